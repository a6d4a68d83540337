"""Mixed precision in a plain fp32 PyTorch script: each training loop as a whole, or not
at all.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from roundoff.lint import Act, Event, Loop, Script, block_of
from roundoff.migrate.checkpoints import Checkpoints
from roundoff.migrate.devices import device_type, names_cpu_alone
from roundoff.migrate.names import (
    add_import,
    free_name,
    imported_as,
    is_visible,
    root_name,
)
from roundoff.migrate.programs import Places
from roundoff.migrate.regions import Regions, forward_calls, models_in
from roundoff.migrate.result import Migration, NotUnderstoodError, Remark
from roundoff.migrate.scalers import Scalers
from roundoff.migrate.steps import (
    Step,
    schedules,
    steps_of,
    unscalings,
    update_places,
)
from roundoff.migrate.targets import Target, To
from roundoff.migrate.text_edits import TextEdits

_BANNED = (
    "torch.nn.BCELoss",
    "torch.nn.functional.binary_cross_entropy",
)
_MANAGED = (
    "a library (accelerate, Fabric, DeepSpeed ...) runs backward and step: set its own "
    "mixed precision"
)
_PROBABILITIES = (
    "binary cross-entropy of probabilities raises under autocast on CUDA: use "
    "BCEWithLogitsLoss on the logits, without the sigmoid, then migrate"
)
_PENALTY = (
    "torch.autograd.grad in the loss (a gradient penalty): its gradients have to be "
    "scaled and unscaled by hand; bf16 needs no scaler (--to bf16)"
)
_BY_HAND = (
    "half precision by hand: autocast wants fp32 weights and inputs; take the casts out, "
    "then migrate"
)
_HALF = ("torch.half", "torch.float16", "torch.bfloat16")
_FUNCTION = "a function written by hand runs in fp32, forward and backward, as it did"
_NUMPY = "numpy has no bfloat16: under autocast write .float() in front of .numpy()"
_ON_CPU = (
    "this script names no device but the CPU, where fp16 is slower than fp32: --to bf16"
)
_STAYS_ON = (
    "what turns mixed precision on is not known yet where the scaler is made: it scales "
    "in fp32 too, and divides by the same; enabled=... switches it off"
)
_STEP = "skips the step where a gradient is not finite"
_UPDATE = "the scale moves once an iteration, behind all steps"
_BACKWARD = "small gradients are scaled out of the range that float16 flushes to zero"
_UNSCALE = "gradients are divided by the scale before they are clipped or read"
_SCHEDULE = "the learning rate moves only where a step was taken"


def migrate_text(
    script: Script, to: To, *, plan: str, scales: bool, switch: str = ""
) -> Migration:
    """Write mixed precision into a script.

    Args:
        script: the script, in plain fp32.
        to: ``amp``, ``bf16`` or ``roundoff``.
        plan: of ``roundoff``, the file that the new text names.
        scales: the loss is scaled.
        switch: the name, or ``self.name``, that turns mixed precision on; on without.
    """
    settings = _Settings(to, plan, scales, switch)
    accepted: list[Loop] = []
    left: list[Remark] = []
    for loop in script.loops:
        try:
            _write(script, [loop], settings)
        except NotUnderstoodError as error:
            left.append(error.remark)
        else:
            accepted.append(loop)
    if not accepted:
        return Migration(script.path, script.text, script.text, left=_sorted(left))
    try:
        work = _write(script, accepted, settings)
        text = work.edits.apply()
    except NotUnderstoodError as error:
        left.append(error.remark)
        return Migration(script.path, script.text, script.text, left=_sorted(left))
    return Migration(
        script.path,
        script.text,
        text,
        changes=_sorted(work.edits.remarks),
        left=_sorted(left),
        notes=_sorted(work.notes),
    )


def _sorted(remarks: Iterable[Remark]) -> tuple[Remark, ...]:
    return tuple(sorted(set(remarks)))


@dataclass(frozen=True)
class _Settings:
    """What is written: in which formats, by which plan, and what switches it on."""

    to: To
    plan: str
    scales: bool
    switch: str


def _write(script: Script, loops: Sequence[Loop], settings: _Settings) -> _Work:
    """Gather the edits of some loops, of evaluation and of checkpoints.

    Raises ``NotUnderstoodError`` where one of the loops is not understood.
    """
    work = _Work(script, settings)
    for loop in loops:
        work.training(loop)
    work.evaluation()
    work.functions()
    if settings.scales:
        checkpoints = Checkpoints(script, work.edits, work.scalers)
        checkpoints.migrate()
        work.scalers.write()
        work.notes += [*checkpoints.notes, *work.scalers.notes]
    work.imports()
    work.edits.apply()
    return work


@dataclass
class _Work:
    """The edits that migrate one script."""

    script: Script
    settings: _Settings
    notes: list[Remark] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.to = self.settings.to
        self.scales = self.settings.scales
        library = "torch" if self.to != "roundoff" else "roundoff"
        imported = imported_as(self.script, library)
        self.is_imported = imported is not None
        default = "torch" if self.to != "roundoff" else "ro"
        self.target = Target(
            self.to, self.scales, self.settings.plan, imported or default
        )
        self.torch = imported_as(self.script, "torch") or "torch"
        self.places = Places(self.script)
        self.edits = TextEdits(self.script)
        self.regions = Regions(self.script, self.places, self.edits)
        name = free_name(self.script, ("scaler", "grad_scaler", "loss_scaler"))
        self.before = free_name(self.script, ("scale_before", "scale_of_step"))
        self.scalers = Scalers(self.script, self.places, self.edits, name, self._make)
        self.models = forward_calls(self.script)
        self._trained: dict[str, ast.expr] = {}
        self._marked: set[tuple[ast.AST, str]] = set()

    def _make(self, place: ast.AST) -> str:
        """Return what makes a scaler at a place."""
        models = list(self._trained.values())
        if self.to == "amp" and names_cpu_alone(self.script):
            self.notes.append(Remark(0, _ON_CPU))
        visible = [each for each in models if is_visible(self.script, each, place)]
        texts = {self.script.segment(model) for model in visible}
        model = texts.pop() if len(texts) == 1 else ""
        switch = self._switch(place)
        if self.settings.switch and not switch:
            self.notes.append(Remark(0, _STAYS_ON))
        return self.target.scaler(self._device(place, models), model, switch)

    def _switch(self, place: ast.AST) -> str:
        """Return what turns mixed precision on, where its name means that at a place."""
        text = self.settings.switch
        for node in self.script.nodes(ast.Name, ast.Attribute):
            if ast.unparse(node) == text and self._is_set(node, place):
                return text
        return ""

    def _is_set(self, switch: ast.Name | ast.Attribute, place: ast.AST) -> bool:
        """Return True where a switch has its value at a place already."""
        if not is_visible(self.script, switch, place):
            return False
        holder = self.script.class_of(switch)
        attribute = switch.attr if isinstance(switch, ast.Attribute) else ""
        bindings = self.script.bindings(holder).get(attribute, ()) if holder else ()
        scope = self.script.scope(place)
        return not any(
            self.script.scope(each.statement) is scope
            and getattr(each.statement, "lineno", 0) >= getattr(place, "lineno", 0)
            for each in bindings
        )

    def _device(self, place: ast.AST, models: list[ast.expr]) -> str:
        if self.to == "roundoff":
            return ""
        return device_type(self.script, place, self.torch, models)

    # -- training ----------------------------------------------------------------------

    def training(self, loop: Loop) -> None:
        """Migrate one training loop."""
        _check(self.script, loop, scales=self.scales)
        for event in loop.of(Act.BACKWARD):
            if self._is_new(event.node, "backward"):
                self._forward(loop, event)
        if self.scales:
            steps = self._steps(loop)
            self._unscale(loop, steps)
            self._update(loop, steps)

    def _forward(self, loop: Loop, event: Event) -> None:
        """Put the forward pass of a backward pass under autocast, and scale its loss."""
        call = event.node
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            raise NotUnderstoodError(
                getattr(call, "lineno", 0),
                "a backward pass of another shape than loss.backward()",
            )
        loss = call.func.value
        statement = self.script.statement(call)
        name = root_name(loss)
        runs = self.regions.of_backward(statement, name.id if name else None)
        computed_here = self.places.computes(loss)
        if not runs and not computed_here:
            raise NotUnderstoodError(
                call.lineno, "the forward pass of this backward pass is not seen"
            )
        for run in runs:
            self.regions.wrap(run, self._header(run), training=True)
        if computed_here:
            self._take_apart(statement, call, loss, loop)
        elif self.scales:
            self._scale(call, loss, loop)

    def _header(self, run: list[ast.stmt]) -> str:
        models = models_in(self.script, run, self.models)
        for each in models:
            self._trained.setdefault(self.script.segment(each), each)
        device = self._device(run[0], models)
        model = ""
        if self.to == "roundoff":
            model = self._one_model(run, models)
        return self.target.autocast(device, model, self._switch(run[0]))

    def _one_model(self, run: list[ast.stmt], models: list[ast.expr]) -> str:
        texts = [self.script.segment(model) for model in models]
        if len(texts) == 1:
            return texts[0]
        reason = "no model is called here: a plan names sites of one"
        if texts:
            reason = f"a plan names sites of one model, here are {', '.join(texts)}"
        raise NotUnderstoodError(run[0].lineno, reason)

    def _take_apart(
        self, statement: ast.stmt, call: ast.Call, loss: ast.expr, loop: Loop
    ) -> None:
        """``criterion(model(x), y).backward()``: the loss gets a name."""
        if not isinstance(statement, ast.Expr) or statement.value is not call:
            raise NotUnderstoodError(
                call.lineno, "a backward pass inside of another expression"
            )
        name = free_name(self.script, ("loss", "loss_value"))
        text = self.script.segment(loss)
        if "\n" in text:
            text = f"({text})"
        header = self._header([statement])
        lines = [header, f"{self.edits.unit}{name} = {text}"]
        self.edits.before(
            statement,
            lines,
            "forward and loss in low precision; the backward pass stays outside",
        )
        if self.scales:
            self._scale(call, loss, loop, name)
        else:
            self.edits.replace_span(*self._receiver(call), name, "")

    def _receiver(self, call: ast.Call) -> tuple[int, int]:
        """Return the span of what stands before ``.backward``."""
        assert isinstance(call.func, ast.Attribute)  # noqa: S101 - checked before
        start, _ = self.script.span(call)
        _, end = self.script.span(call.func)
        dot = self.script.source.rfind(b".", start, end)
        return start, dot

    def _scale(
        self, call: ast.Call, loss: ast.expr, loop: Loop, name: str | None = None
    ) -> None:
        first = _first_step(self.script, loop, call)
        scaler = self._scaler_at(call, first)
        _, arguments_start = self.script.span(call.func)
        start, end = self.script.span(call)
        inside = self.script.source[arguments_start:end].decode().strip()
        arguments = inside.removeprefix("(").removesuffix(")").strip()
        text = name or self.script.segment(loss)
        self.edits.replace_span(
            start, end, self.target.backward(scaler, text, arguments), _BACKWARD
        )

    def _scaler_at(self, place: ast.AST, optimizer: ast.expr) -> str:
        """Return the scaler of an optimizer where a backward pass stands."""
        if self.script.scope(optimizer) is self.script.scope(place):
            return self.scalers.of(optimizer)
        scaler = self.scalers.of(optimizer)
        if scaler.startswith("self.") and (
            self.script.class_of(place) is self.script.class_of(optimizer)
        ):
            return scaler
        name = root_name(optimizer)
        home = None if name is None else self.script.home(name)
        if home is self.script.tree:
            return scaler
        raise NotUnderstoodError(
            getattr(place, "lineno", 0),
            "the backward pass stands in another function than the step",
        )

    # -- steps -------------------------------------------------------------------------

    def _steps(self, loop: Loop) -> list[Step]:
        steps = steps_of(self.script, loop)
        if not steps:
            raise NotUnderstoodError(
                _line(loop.node), "no optimizer steps in this loop"
            )
        return steps

    def _unscale(self, loop: Loop, steps: list[Step]) -> None:
        for unscaling in unscalings(self.places, loop, steps):
            if not self._is_new(unscaling.before, "unscale"):
                continue
            lines = self._unscale_lines(unscaling.before, unscaling.steps)
            self.edits.before(unscaling.before, lines, _UNSCALE)

    def _is_new(self, node: ast.AST, what: str) -> bool:
        """Return True the first time; helpers are part of several loops."""
        is_new = (node, what) not in self._marked
        self._marked.add((node, what))
        return is_new

    def _unscale_lines(self, before: ast.stmt, steps: Sequence[Step]) -> list[str]:
        units = list(dict.fromkeys(step.unit for step in steps))
        if self.to == "roundoff":
            texts = [self._step_argument(step) for step in steps]
            scaler = self.scalers.of(steps[0].optimizer)
            return [f"{scaler}.unscale({', '.join(dict.fromkeys(texts))})"]
        lines: list[str] = []
        for unit in units:
            inside = [step for step in steps if step.unit is unit]
            is_within = before in self.places.block(inside[0].statement)
            for step in inside:
                scaler = self.scalers.of(step.optimizer)
                line = f"{scaler}.unscale_({self.script.segment(step.optimizer)})"
                if step.unit is step.statement or is_within:
                    lines.append(line)
                else:
                    lines += [self._loop_header(unit), f"{self.edits.unit}{line}"]
        return lines

    def _loop_header(self, unit: ast.stmt) -> str:
        if not isinstance(unit, ast.For) or len(unit.body) != 1:
            raise NotUnderstoodError(
                unit.lineno, "a loop over optimizers that does more"
            )
        target = self.script.segment(unit.target)
        return f"for {target} in {self.script.segment(unit.iter)}:"

    def _step_argument(self, step: Step) -> str:
        if step.unit is step.statement:
            return self.script.segment(step.optimizer)
        self._loop_header(step.unit)
        assert isinstance(step.unit, ast.For)  # noqa: S101 - as _loop_header says
        iterated = self.script.segment(step.unit.iter)
        optimizer = self.script.segment(step.optimizer)
        target = self.script.segment(step.unit.target)
        if optimizer == target:
            return f"*{iterated}"
        return f"*({optimizer} for {target} in {iterated})"

    def _update(self, loop: Loop, steps: list[Step]) -> None:
        updates = update_places(self.script, self.places, steps)
        if self.to == "roundoff":
            self._step_together(steps, updates)
            for update in updates:
                scaler = self.scalers.of(steps[0].optimizer)
                self._schedule(loop, update, f"if not {scaler}.skipped:")
            return
        for step in steps:
            if not self._is_new(step.event.node, "step"):
                continue
            scaler = self.scalers.of(step.optimizer)
            text = f"{scaler}.step({self.script.segment(step.optimizer)})"
            self.edits.replace(step.event.node, text, _STEP)
        for update in updates:
            if self._is_new(update, "update"):
                self._write_update(loop, steps, update)

    def _write_update(self, loop: Loop, steps: list[Step], update: ast.stmt) -> None:
        function = self.script.scope(update)
        near = next(each for each in steps if self.script.scope(each.unit) is function)
        scaler = self.scalers.of(near.optimizer)
        header = f"if {scaler}.get_scale() >= {self.before}:  # the step was taken"
        lines = [f"{scaler}.update()"]
        if self._schedule(loop, update, header):
            lines.insert(0, f"{self.before} = {scaler}.get_scale()")
        self.edits.after(update, lines, _UPDATE)

    def _schedule(self, loop: Loop, update: ast.stmt, header: str) -> bool:
        statements = schedules(self.script, self.places, loop, update)
        for statement in statements:
            self.edits.wrap(statement, statement, header, _SCHEDULE)
        return bool(statements)

    def _step_together(self, steps: list[Step], updates: list[ast.stmt]) -> None:
        """One call steps every optimizer of an iteration."""
        if len(updates) > 1 or _stepped_apart(self.script, steps):
            raise NotUnderstoodError(
                steps[0].statement.lineno,
                "optimizers step at several places of an iteration: LossScaler steps all "
                "of them, or none, in one call",
            )
        scaler = self.scalers.of(steps[0].optimizer)
        texts = list(dict.fromkeys(self._step_argument(step) for step in steps))
        *earlier, last = list(dict.fromkeys(step.unit for step in steps))
        for unit in earlier:
            self.edits.delete(unit, _STEP)
        self.edits.replace(last, f"{scaler}.step({', '.join(texts)})", _STEP)

    # -- the rest ----------------------------------------------------------------------

    def evaluation(self) -> None:
        """Evaluate in the precision that is trained in."""
        events = [
            event
            for program in self.script.programs
            for event in program.of(Act.FORWARD, Act.LOSS)
        ]
        for run in self.regions.of_evaluation(events):
            try:
                header = self._header(run)
                self.regions.wrap(run, header, training=False)
            except NotUnderstoodError as error:
                self.notes.append(error.remark)

    def functions(self) -> None:
        """Let functions written by hand run in fp32, and name those that use numpy."""
        for call in self.script.method_calls("numpy"):
            is_wide = "float()" in self.script.segment(call)
            if self.script.class_of(call) is not None and not is_wide:
                self.notes.append(Remark(call.lineno, _NUMPY))
        if self.to == "roundoff":
            return
        for definition in self.script.nodes(ast.ClassDef):
            bases = {self.script.qualified(base) for base in definition.bases}
            if "torch.autograd.Function" not in bases:
                continue
            for method in definition.body:
                if isinstance(method, ast.FunctionDef):
                    self._decorate(method)

    def _decorate(self, method: ast.FunctionDef) -> None:
        name = {"forward": "custom_fwd", "backward": "custom_bwd"}.get(method.name)
        decorators = " ".join(map(ast.unparse, method.decorator_list))
        if name is None or "custom_" in decorators:
            return
        device = self._device(method, [])
        cast = f", cast_inputs={self.torch}.float32" if name == "custom_fwd" else ""
        line = f"@{self.torch}.amp.{name}(device_type={device}{cast})"
        start, _ = self.script.span(method)
        indentation = self.edits.indentation(method)
        text = f"{line}{self.edits.newline}{indentation}"
        self.edits.replace_span(start, start, text, _FUNCTION)

    def imports(self) -> None:
        """Import what the new text names."""
        if self.is_imported:
            return
        line = "import torch" if self.to != "roundoff" else "import roundoff as ro"
        add_import(self.script, self.edits, line, "what the new lines use")


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


def _first_step(script: Script, loop: Loop, call: ast.Call) -> ast.expr:
    """Return the optimizer that steps next behind a backward pass."""
    steps = steps_of(script, loop)
    order = next(event.order for event in loop.events if event.node is call)
    later = [step for step in steps if step.event.order > order]
    for step in (*later, *steps):
        return step.optimizer
    raise NotUnderstoodError(call.lineno, "no optimizer steps in this loop")


def _stepped_apart(script: Script, steps: Sequence[Step]) -> bool:
    """Return True where another statement stands between two steps of an iteration."""
    units = list(dict.fromkeys(step.unit for step in steps))
    block = block_of(script, units[0])
    if any(unit not in block for unit in units):
        return True
    places = [block.index(unit) for unit in units]
    return places != list(range(places[0], places[0] + len(places)))


def _check(script: Script, loop: Loop, *, scales: bool) -> None:
    """Raise ``NotUnderstoodError`` for a loop in which mixed precision is not ours."""
    for event in loop.events:
        if event.is_managed:
            raise NotUnderstoodError(_line(event.node), _MANAGED)
    if loop.of(Act.SCALER_STEP, Act.UNSCALE, Act.UPDATE):
        raise NotUnderstoodError(_line(loop.node), "a gradient scaler is used already")
    if not loop.of(Act.STEP):
        reason = "no optimizer step is seen in this loop"
        raise NotUnderstoodError(_line(loop.node), reason)
    by_hand = _cast_by_hand(script)
    if by_hand is not None:
        raise NotUnderstoodError(_line(by_hand), _BY_HAND)
    for call in script.calls(*_BANNED):
        raise NotUnderstoodError(call.lineno, _PROBABILITIES)
    for call in script.calls("torch.autograd.grad") if scales else ():
        raise NotUnderstoodError(call.lineno, _PENALTY)


def _cast_by_hand(script: Script) -> ast.AST | None:
    """Return the first place where a script names a half-precision format."""
    for call in script.method_calls("half", "bfloat16"):
        return call
    for node in script.nodes(ast.Attribute):
        if script.qualified(node) in _HALF:
            return node
    return None
