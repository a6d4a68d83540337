"""Checkpoints keep the scaler's state beside the optimizer's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from roundoff.lint import Kind, Script
from roundoff.migrate.result import NotUnderstoodError, Remark
from roundoff.migrate.scalers import Scalers
from roundoff.migrate.text_edits import TextEdits

_SAVED = "the scale is part of what is resumed"
_OPTIMIZER = re.compile(r"optim(izer)?|opt")


class Checkpoints:
    """Adds the scaler to what a script saves and loads of its optimizer."""

    def __init__(self, script: Script, edits: TextEdits, scalers: Scalers) -> None:
        self.script = script
        self.edits = edits
        self.scalers = scalers
        self.notes: list[Remark] = []

    def migrate(self) -> None:
        """Add the scaler's state wherever an optimizer's is saved or loaded."""
        for key, optimizer in list(self._saved()):
            self._save(key, optimizer)
        for call in self.script.method_calls("load_state_dict"):
            if isinstance(call.func, ast.Attribute) and self._is_optimizer(
                call.func.value
            ):
                self._load(call, call.func.value)

    def _is_optimizer(self, node: ast.expr) -> bool:
        return self.script.things.kind(node) is Kind.OPTIMIZER

    def _saved(self) -> Iterator[tuple[ast.expr, ast.expr]]:
        """Yield each dictionary entry that is the state of an optimizer."""
        for entries in self.script.nodes(ast.Dict):
            for key, value in zip(entries.keys, entries.values, strict=True):
                optimizer = _state_of(value)
                if (
                    key is not None
                    and optimizer is not None
                    and self._is_optimizer(optimizer)
                ):
                    yield key, optimizer
                    break

    def _save(self, key: ast.expr, optimizer: ast.expr) -> None:
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
            self._note(key, "the scaler's state is not saved: its key is computed")
            return
        scaler = self._scaler(optimizer)
        if scaler is None:
            return
        start, _ = self.script.span(key)
        line, _ = self.script.position(start)
        line_start = self.script.offset(line, 0)
        in_front = self.script.source[line_start:start].decode()
        behind = f"{self.edits.newline}{in_front}" if not in_front.strip() else " "
        text = f'"{scaler_key(key.value)}": {scaler}.state_dict(),{behind}'
        self.edits.replace_span(start, start, text, _SAVED)

    def _load(self, call: ast.Call, optimizer: ast.expr) -> None:
        loaded = _loaded(call)
        statement = self.script.statement(call)
        if loaded is None or not isinstance(statement, ast.Expr):
            self._note(call, "load the scaler's state beside the optimizer's")
            return
        scaler = self._scaler(optimizer)
        if scaler is None:
            return
        checkpoint = self.script.segment(loaded[0])
        name = scaler_key(loaded[1])
        lines = [
            f'if "{name}" in {checkpoint}:  # older checkpoints have none',
            f'{self.edits.unit}{scaler}.load_state_dict({checkpoint}["{name}"])',
        ]
        self.edits.after(statement, lines, _SAVED)

    def _scaler(self, optimizer: ast.expr) -> str | None:
        try:
            return self.scalers.of(optimizer)
        except NotUnderstoodError as error:
            self._note(optimizer, f"the scaler's state is left out: {error.reason}")
            return None

    def _note(self, node: ast.expr, reason: str) -> None:
        self.notes.append(Remark(node.lineno, reason))


def _state_of(value: ast.expr) -> ast.expr | None:
    """Return ``x`` of ``x.state_dict()``."""
    function = value.func if isinstance(value, ast.Call) else None
    is_state = isinstance(function, ast.Attribute) and function.attr == "state_dict"
    return function.value if is_state else None  # type: ignore[union-attr]


def _loaded(call: ast.Call) -> tuple[ast.expr, str] | None:
    """Return the checkpoint and the key of ``x.load_state_dict(checkpoint["key"])``."""
    loaded = call.args[0] if call.args else None
    if not isinstance(loaded, ast.Subscript) or not isinstance(
        loaded.slice, ast.Constant
    ):
        return None
    key = loaded.slice.value
    return (loaded.value, key) if isinstance(key, str) else None


def scaler_key(key: str) -> str:
    """Return the key of the scaler's state beside the optimizer's.

    >>> scaler_key("optimizer_state_dict"), scaler_key("optim"), scaler_key("o")
    ('scaler_state_dict', 'scaler', 'scaler')
    """
    name, count = _OPTIMIZER.subn("scaler", key, count=1)
    return name if count else "scaler"
