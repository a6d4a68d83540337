"""``apex.amp`` → ``torch.amp``: what Apex did is taken out, then mixed precision is
written as into a plain script.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable
from dataclasses import replace

from roundoff.foreign import script_lines
from roundoff.lint import Script, parse
from roundoff.migrate.mixed_precision import migrate_text
from roundoff.migrate.result import Migration, NotUnderstoodError, Remark
from roundoff.migrate.text_edits import TextEdits

_GONE = "apex.amp is no longer developed: torch.amp does this"
_LEVELS = {
    "O0": "O0 is plain fp32: no mixed precision is written",
    "O1": "O1 patched functions; torch.autocast has the same lists and casts inside its region alone",
    "O2": "O2 kept the weights in fp16 beside fp32 masters; torch.amp keeps fp32 weights and casts each call: "
    "as exact, with more memory for weights and less for masters",
    "O3": "O3 was pure fp16 without a loss scale; torch.amp keeps fp32 weights and scales",
}
_OPTIMIZERS = (
    "Apex's fused optimizers stay: torch.optim has fused=True for Adam, AdamW and SGD"
)
_PARALLEL = "apex.parallel stays: torch.nn.parallel.DistributedDataParallel and torch.nn.SyncBatchNorm replace it"


def from_apex(script: Script) -> Migration:
    """Return the script with torch.amp in place of apex.amp."""
    work = _Work(script)
    if not work.is_used():
        note = Remark(0, "apex.amp is not used: nothing to write anew")
        return Migration(script.path, script.text, script.text, notes=(note,))
    try:
        work.take_out()
        plain = work.edits.apply()
    except NotUnderstoodError as error:
        return Migration(script.path, script.text, script.text, left=(error.remark,))
    first = Migration(
        script.path,
        script.text,
        plain,
        changes=tuple(sorted(work.edits.remarks)),
        notes=tuple(sorted(set(work.notes))),
    )
    if "O0" in work.levels:
        return first
    switch = work.switches.pop() if len(work.switches) == 1 else ""
    return _then_torch_amp(first, switch)


def _then_torch_amp(plain: Migration, switch: str) -> Migration:
    """Write mixed precision into a script that Apex was taken out of; all or nothing."""
    script = parse(plain.after, plain.path)
    second = migrate_text(script, "amp", plan="", scales=True, switch=switch)
    lines = _lines_of_before(plain)
    left = _placed(second.left, lines)
    if not second.is_changed:
        why = left or (Remark(0, "no training loop found"),)
        return replace(plain, after=plain.before, changes=(), left=why)
    return replace(
        plain,
        after=second.after,
        changes=tuple(sorted({*plain.changes, *_placed(second.changes, lines)})),
        left=left,
        notes=tuple(sorted({*plain.notes, *_placed(second.notes, lines)})),
    )


def _lines_of_before(migration: Migration) -> dict[int, int]:
    """Return the line of the script that each line of the new text comes from."""
    before = script_lines(migration.before)
    after = script_lines(migration.after)
    lines = {}
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for _, start, end, new_start, new_end in matcher.get_opcodes():
        for place in range(new_start, new_end):
            near = min(start + place - new_start, max(end - 1, start))
            lines[place + 1] = near + 1
    return lines


def _placed(remarks: Iterable[Remark], lines: dict[int, int]) -> tuple[Remark, ...]:
    return tuple(
        Remark(lines.get(each.line, each.line), each.reason) for each in remarks
    )


class _Work:
    """The edits that take Apex out of one script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.edits = TextEdits(script)
        self.notes: list[Remark] = []
        self.levels: set[str] = set()
        #: the tests under which alone Apex scales a loss
        self.switches: set[str] = set()

    def is_used(self) -> bool:
        """Return True where the script imports apex.amp."""
        return any(
            target in ("apex", "apex.amp") or target.startswith("apex.amp.")
            for target in self.script.imports.values()
        )

    def take_out(self) -> None:
        """Take out what Apex did, the losses and steps stay as in plain fp32."""
        for call in self.script.calls("apex.amp.initialize"):
            self._initialize(call)
        for block in self.script.nodes(ast.With):
            self._scaled_loss(block)
        for call in self.script.calls("apex.amp.master_params"):
            self._parameters(call)
        self._states()
        self._imports()
        self._others()

    def _initialize(self, call: ast.Call) -> None:
        statement = self.script.statement(call)
        is_whole = (
            isinstance(statement, ast.Assign | ast.Expr) and statement.value is call
        )
        if not is_whole:
            raise NotUnderstoodError(
                call.lineno, "amp.initialize inside of an expression"
            )
        if isinstance(statement, ast.Assign) and not self._gives_back(statement, call):
            raise NotUnderstoodError(
                call.lineno, "amp.initialize gives its model and optimizer other names"
            )
        self._delete(statement)
        self._level(call)

    def _gives_back(self, statement: ast.Assign, call: ast.Call) -> bool:
        """Return True for ``model, optimizer = amp.initialize(model, optimizer)``."""
        passed = [ast.unparse(each) for each in call.args]
        passed += [
            ast.unparse(each.value)
            for each in call.keywords
            if each.arg in ("models", "optimizers")
        ]
        (target,) = statement.targets[-1:]
        names = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        return [ast.unparse(each) for each in names] == passed[: len(names)]

    def _level(self, call: ast.Call) -> None:
        level = "O1"
        for keyword in call.keywords:
            if keyword.arg == "opt_level" and isinstance(keyword.value, ast.Constant):
                level = str(keyword.value.value)
            elif keyword.arg == "opt_level":
                level = ""
            elif keyword.arg in _INSTEAD and not _is_default(keyword.value):
                text = f"{keyword.arg}={ast.unparse(keyword.value)} is left out"
                self.notes.append(
                    Remark(call.lineno, f"{text}: {_INSTEAD[keyword.arg]}")
                )
        self.levels.add(level)
        note = _LEVELS.get(
            level, "the level is chosen at run time: what is written is O1"
        )
        self.notes.append(Remark(call.lineno, note))

    def _delete(self, statement: ast.stmt) -> None:
        """Delete a statement; in a block of its own the block needs one."""
        if self._is_only_one(statement):
            self.edits.replace(statement, "pass", _GONE)
        else:
            self.edits.delete(statement, _GONE)

    def _is_only_one(self, statement: ast.stmt) -> bool:
        above = self.script.parent(statement)
        blocks = [
            getattr(above, name, None) for name in ("body", "orelse", "finalbody")
        ]
        return any(block == [statement] for block in blocks)

    def _scaled_loss(self, block: ast.With) -> None:
        """``with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()``."""
        for item in block.items:
            call = item.context_expr
            if self.script.called(call) != "apex.amp.scale_loss":
                continue
            if len(block.items) > 1 or not isinstance(call, ast.Call) or not call.args:
                raise NotUnderstoodError(block.lineno, "amp.scale_loss beside others")
            self.edits.unwrap(block, _GONE)
            self.switches.add(self._switch(block))
            if isinstance(item.optional_vars, ast.Name):
                loss = self.script.segment(call.args[0])
                self._rename(block, item.optional_vars.id, loss)

    def _switch(self, block: ast.With) -> str:
        """Return the test of ``if fp16: with amp.scale_loss(...)``, whose other branch is
        the plain backward pass; an empty text without one.
        """
        above = self.script.parent(block)
        if not isinstance(above, ast.If) or above.body != [block]:
            return ""
        others = {node for each in above.orelse for node in ast.walk(each)}
        backward = self.script.method_calls("backward")
        is_plain = any(call in others for call in backward)
        is_name = isinstance(above.test, ast.Name | ast.Attribute)
        return self.script.segment(above.test) if is_plain and is_name else ""

    def _rename(self, block: ast.With, name: str, text: str) -> None:
        """Write the loss itself where its scaled form was read."""
        is_simple = text.replace("_", "").replace(".", "").isalnum()
        for statement in block.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and node.id == name:
                    self.edits.replace(node, text if is_simple else f"({text})", _GONE)

    def _parameters(self, call: ast.Call) -> None:
        """``amp.master_params(optimizer)``: the parameters are in fp32 themselves."""
        if not call.args:
            raise NotUnderstoodError(
                call.lineno, "amp.master_params without an optimizer"
            )
        optimizer = self.script.segment(call.args[0])
        text = f'[p for group in {optimizer}.param_groups for p in group["params"]]'
        self.edits.replace(
            call, text, "the parameters are in fp32: there are no masters"
        )

    def _states(self) -> None:
        """Take out ``amp.state_dict()`` and ``amp.load_state_dict(...)``."""
        for entries in self.script.nodes(ast.Dict):
            for place, value in enumerate(entries.values):
                if self.script.called(value) == "apex.amp.state_dict":
                    self._delete_entry(entries, place)
        for call in self.script.calls("apex.amp.load_state_dict"):
            statement = self.script.statement(call)
            if not isinstance(statement, ast.Expr):
                raise NotUnderstoodError(
                    call.lineno, "amp.load_state_dict in an expression"
                )
            self._delete(statement)
            reason = "Apex's state is another than torch's: the scale of old checkpoints starts anew"
            self.notes.append(Remark(call.lineno, reason))

    def _delete_entry(self, entries: ast.Dict, place: int) -> None:
        key = entries.keys[place]
        if key is None:
            raise NotUnderstoodError(
                entries.lineno, "amp.state_dict() unpacked with **"
            )
        start, _ = self.script.span(key)
        _, end = self.script.span(entries.values[place])
        if place + 1 < len(entries.keys):
            following = entries.keys[place + 1] or entries.values[place + 1]
            end, _ = self.script.span(following)
        elif place > 0:
            _, start = self.script.span(entries.values[place - 1])
        self.edits.replace_span(start, end, "", _GONE)

    def _imports(self) -> None:
        for statement in self.script.nodes(ast.ImportFrom):
            self._import_from(statement)
        for plain in self.script.nodes(ast.Import):
            if all(alias.name in ("apex", "apex.amp") for alias in plain.names):
                self._delete_import(plain)

    def _import_from(self, statement: ast.ImportFrom) -> None:
        others = [alias for alias in statement.names if alias.name != "amp"]
        is_amp = statement.module == "apex" and len(others) < len(statement.names)
        if is_amp and others:
            names = ", ".join(map(ast.unparse, others))
            self.edits.replace(statement, f"from apex import {names}", _GONE)
        elif is_amp or statement.module == "apex.amp":
            self._delete_import(statement)

    def _delete_import(self, statement: ast.stmt) -> None:
        """Delete an import, with the ``try`` that was written for its absence."""
        above = self.script.parent(statement)
        if isinstance(above, ast.Try) and self._is_only_one(statement):
            self.edits.delete(above, _GONE)
        else:
            self._delete(statement)

    def _others(self) -> None:
        """Say what of Apex stays, and what has no form in torch.amp."""
        for name, target in self.script.imports.items():
            if target.startswith("apex.optimizers"):
                self.notes.append(Remark(self._line_of(name), _OPTIMIZERS))
            elif target.startswith("apex.parallel"):
                self.notes.append(Remark(self._line_of(name), _PARALLEL))
        taken_out = {
            "initialize",
            "scale_loss",
            "master_params",
            "state_dict",
            "load_state_dict",
        }
        for call in self.script.nodes(ast.Call):
            called = self.script.called(call) or ""
            prefix, _, last = called.rpartition(".")
            if prefix == "apex.amp" and last not in taken_out:
                reason = f"amp.{last} has no form in torch.amp"
                raise NotUnderstoodError(call.lineno, reason)

    def _line_of(self, name: str) -> int:
        for statement in self.script.nodes(ast.ImportFrom, ast.Import):
            for alias in statement.names:
                if name == (alias.asname or alias.name.partition(".")[0]):
                    return statement.lineno
        return 0


def _is_default(value: ast.expr) -> bool:
    """Return True for what torch.amp does anyway: a loss scale that moves."""
    return isinstance(value, ast.Constant) and value.value in (None, "dynamic")


_INSTEAD = {
    "loss_scale": "a fixed scale is torch.amp.GradScaler(device, init_scale=S, growth_interval=10**9)",
    "keep_batchnorm_fp32": "torch.amp keeps all weights in fp32",
    "num_losses": "one scaler serves all losses",
}
