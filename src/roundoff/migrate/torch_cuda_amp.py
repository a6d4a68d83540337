"""``torch.cuda.amp`` and ``torch.cpu.amp`` → ``torch.amp``, which takes the device."""

from __future__ import annotations

import ast
import re

from roundoff.lint import Script
from roundoff.migrate.names import add_import, imported_as
from roundoff.migrate.result import Migration, NotUnderstoodError, Remark
from roundoff.migrate.text_edits import TextEdits

_DEPRECATED = "deprecated since torch 2.4: torch.amp takes the device"
#: What positional arguments of the old function are called in the new one.
_AUTOCAST = ("enabled", "dtype", "cache_enabled")
_MOVED = ("autocast", "GradScaler", "custom_fwd", "custom_bwd")
_OLD = re.compile(r"torch\.(?:cuda|cpu)\.amp(?:\.\w+)?")
_MODULE = re.compile(rb"torch\.(?:cuda|cpu)(?:\.amp(?:\.\w+)?)?")


def from_torch_cuda_amp(script: Script) -> Migration:
    """Return the script with torch.amp in place of torch.cuda.amp."""
    work = _Work(script)
    try:
        work.calls()
        work.references()
        work.imports()
        text = work.edits.apply()
    except NotUnderstoodError as error:
        return Migration(script.path, script.text, script.text, left=(error.remark,))
    notes: tuple[Remark, ...] = ()
    if text == script.text and not work.left:
        notes = (Remark(0, "torch.cuda.amp is not used: nothing to write anew"),)
    return Migration(
        script.path,
        script.text,
        text,
        changes=tuple(sorted(work.edits.remarks)),
        left=tuple(sorted(set(work.left))),
        notes=notes,
    )


class _Work:
    """The edits of one script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.edits = TextEdits(script)
        self.left: list[Remark] = []
        self._needs_torch = False

    def _device_of(self, name: str | None) -> str | None:
        """Return the device of an old function by its dotted name; None for others."""
        for device in ("cuda", "cpu"):
            if name in {f"torch.{device}.amp.{each}" for each in _MOVED}:
                return device
        return None

    def calls(self) -> None:
        """Give each call its device, and the name of its module."""
        for call in self.script.nodes(ast.Call):
            name = self.script.called(call)
            device = self._device_of(name)
            if name is None or device is None:
                continue
            self._add_device(call, name.rpartition(".")[2], device)
            if isinstance(call.func, ast.Attribute):
                self._rename(call.func)

    def _add_device(self, call: ast.Call, function: str, device: str) -> None:
        text = f'"{device}"'
        if function.startswith("custom_"):
            text = f"device_type={text}"
        if call.args or call.keywords:
            text += ", "
        _, end = self.script.span(call.func)
        bracket = self.script.source.index(b"(", end) + 1
        self.edits.replace_span(bracket, bracket, text, _DEPRECATED)
        if function == "autocast":
            for name, argument in zip(_AUTOCAST, call.args, strict=False):
                if isinstance(argument, ast.Starred):
                    raise NotUnderstoodError(
                        call.lineno, "arguments are passed as *args"
                    )
                start, _ = self.script.span(argument)
                self.edits.replace_span(start, start, f"{name}=", _DEPRECATED)

    def _rename(self, node: ast.Attribute) -> None:
        """``torch.cuda.amp.autocast`` → ``torch.amp.autocast``."""
        parts = ast.unparse(node).split(".")
        root = self.script.imports.get(parts[0], "")
        if root == "torch":
            self.edits.replace(node, f"{parts[0]}.amp.{parts[-1]}", _DEPRECATED)
        elif root in ("torch.cuda", "torch.cpu"):
            torch = imported_as(self.script, "torch")
            self._needs_torch = torch is None
            self.edits.replace(node, f"{torch or 'torch'}.amp.{parts[-1]}", _DEPRECATED)

    def references(self) -> None:
        """Rename what is not called: annotations, ``isinstance``, decorators."""
        called = {call.func for call in self.script.nodes(ast.Call)}
        for node in self.script.nodes(ast.Attribute, ast.Name):
            if node in called or not isinstance(node.ctx, ast.Load):
                continue
            name = self.script.qualified(node)
            device = self._device_of(name)
            if name is None or device is None:
                continue
            self._refer(node, name.rpartition(".")[2], device)

    def _refer(
        self, node: ast.Attribute | ast.Name, function: str, device: str
    ) -> None:
        if function == "autocast":
            reason = "autocast is passed on without a call: give it the device there"
            self.left.append(Remark(node.lineno, reason))
            return
        if isinstance(node, ast.Attribute):
            self._rename(node)
        if function.startswith("custom_"):
            _, end = self.script.span(node)
            text = f'(device_type="{device}")'
            self.edits.replace_span(end, end, text, _DEPRECATED)

    def imports(self) -> None:
        """Import from torch.amp."""
        for statement in self.script.nodes(ast.ImportFrom):
            self._import_from(statement)
        for plain in self.script.nodes(ast.Import):
            if any(_OLD.fullmatch(alias.name) for alias in plain.names):
                self._module(plain, "torch.amp")
        if self._needs_torch:
            add_import(self.script, self.edits, "import torch", _DEPRECATED)

    def _import_from(self, statement: ast.ImportFrom) -> None:
        names = {alias.name for alias in statement.names}
        module = statement.module or ""
        if module in ("torch.cuda", "torch.cpu") and names == {"amp"}:
            self._module(statement, "torch")
        if not _OLD.fullmatch(module):
            return
        others = ", ".join(sorted(names - set(_MOVED)))
        if others:
            raise NotUnderstoodError(statement.lineno, f"torch.amp has no {others}")
        self._module(statement, "torch.amp")

    def _module(self, statement: ast.stmt, module: str) -> None:
        start, end = self.script.span(statement)
        match = _MODULE.search(self.script.source, start, end)
        if match is not None:
            self.edits.replace_span(match.start(), match.end(), module, _DEPRECATED)
