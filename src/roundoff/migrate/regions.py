"""Regions under autocast: forward and loss, in training and in evaluation."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from roundoff.lint import Act, Event, Script
from roundoff.migrate.names import calls_in, root_name
from roundoff.migrate.programs import Places
from roundoff.migrate.text_edits import TextEdits

_FORWARD_REASON = "forward and loss in low precision; the backward pass stays outside"
_EVALUATION_REASON = "evaluated in the precision that is trained in"
_NUMPY_REASON = "outputs go to numpy, which has no bfloat16: in fp32"
_NO_GRAD = ("torch.no_grad", "torch.inference_mode")
_DEEPEST = 4


class Regions:
    """Finds the statements of forward passes, and puts them under autocast."""

    def __init__(self, script: Script, places: Places, edits: TextEdits) -> None:
        self.script = script
        self.places = places
        self.edits = edits
        self.wrapped: set[ast.stmt] = set()

    # -- training ----------------------------------------------------------------------

    def of_backward(
        self, statement: ast.stmt, loss: str | None, depth: int = 0
    ) -> list[list[ast.stmt]]:
        """Return the runs of statements that compute what a backward pass starts from.

        They stand before it in its block, or in a block around it, or where its
        function is called. Empty where no forward pass is seen there.
        """
        inner = statement
        for around in self.places.chain(statement):
            if isinstance(around, ast.For | ast.While | ast.AsyncFor) and (
                around is not inner
            ):
                break
            runs = self._runs_before(around, loss)
            if runs:
                return runs
            inner = around
        function = self.script.scope(statement)
        calls = self.script.things.callers().get(function, [])
        if depth >= _DEEPEST or len(calls) != 1:
            return []
        return self.of_backward(self.script.statement(calls[0]), None, depth + 1)

    def _runs_before(self, end: ast.stmt, loss: str | None) -> list[list[ast.stmt]]:
        block = self.places.block(end)
        candidates: list[ast.stmt] = []
        for statement in block[: block.index(end)]:
            if self.places.ends_pass(statement):
                candidates = []
            else:
                candidates.append(statement)
        computing = [each for each in candidates if self.places.computes(each)]
        if not computing:
            return []
        last = computing[-1]
        for statement in candidates[candidates.index(last) :]:
            if _assigns(statement, loss) and not _only_scales(statement, loss):
                last = statement
        begin = candidates.index(computing[0])
        return self._split(candidates[begin : candidates.index(last) + 1])

    def _split(self, statements: list[ast.stmt]) -> list[list[ast.stmt]]:
        """Split at what clears gradients: that is no part of a forward pass."""
        runs: list[list[ast.stmt]] = [[]]
        for statement in statements:
            if self.places.clears(statement) and not self.places.computes(statement):
                runs.append([])
            else:
                runs[-1].append(statement)
        return [run for run in runs if run]

    # -- evaluation --------------------------------------------------------------------

    def of_evaluation(self, events: Iterable[Event]) -> list[list[ast.stmt]]:
        """Return the runs of statements that compute under ``no_grad`` or in a function
        that switches its model to evaluation.
        """
        blocks: dict[int, list[ast.stmt]] = {}
        statements: dict[int, list[ast.stmt]] = {}
        for event in events:
            statement = self.script.statement(event.node)
            if self._is_wrapped(statement) or not self._is_evaluation(event):
                continue
            block = self.places.block(statement)
            blocks[id(block)] = block
            statements.setdefault(id(block), []).append(statement)
        runs: list[list[ast.stmt]] = []
        for key, block in blocks.items():
            places = sorted(block.index(each) for each in set(statements[key]))
            runs += self._without_passes(block[places[0] : places[-1] + 1])
        return runs

    def _without_passes(self, statements: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
        """Yield the runs between statements that train or are regions already."""
        run: list[ast.stmt] = []
        for statement in statements:
            if self.places.ends_pass(statement) or self._holds_wrapped(statement):
                if any(map(self.places.computes, run)):
                    yield run
                run = []
            else:
                run.append(statement)
        if any(map(self.places.computes, run)):
            yield run

    def _holds_wrapped(self, statement: ast.stmt) -> bool:
        return any(inner in self.wrapped for inner in ast.walk(statement))

    def _is_wrapped(self, statement: ast.stmt) -> bool:
        return any(each in self.wrapped for each in self.places.chain(statement))

    def _is_evaluation(self, event: Event) -> bool:
        contexts = (_without_call(each) for each in event.contexts)
        if any(self.script.qualified(each) in _NO_GRAD for each in contexts):
            return True
        return self._follows_eval(event.node)

    def _follows_eval(self, node: ast.AST) -> bool:
        """Return True where a function called ``model.eval()`` before this."""
        function = self.script.scope(node)
        if isinstance(function, ast.Module):
            return False
        return any(
            self.script.scope(call) is function and call.lineno < node.lineno  # type: ignore[attr-defined]
            for call in self.script.method_calls("eval")
        )

    # -- writing -----------------------------------------------------------------------

    def wrap(self, run: list[ast.stmt], header: str, *, training: bool) -> None:
        """Put a run of statements under autocast; once, whoever asks."""
        if any(self._is_wrapped(each) for each in run):
            return
        reason = _FORWARD_REASON if training else _EVALUATION_REASON
        self.edits.wrap(run[0], run[-1], header, reason)
        self.wrapped.update(run)
        for name in self._to_numpy(run):
            self.edits.after(run[-1], [f"{name} = {name}.float()"], _NUMPY_REASON)

    def _to_numpy(self, run: list[ast.stmt]) -> list[str]:
        """Return the names of outputs on which ``.numpy()`` is called afterwards."""
        assigned = set(self._outputs(run))
        function = self.script.scope(run[0])
        names: dict[str, None] = {}
        for call in self.script.method_calls("numpy"):
            receiver = root_name(call.func)
            is_later = call.lineno > (run[-1].end_lineno or 0)
            if receiver is None or receiver.id not in assigned or not is_later:
                continue
            if self.script.scope(call) is function:
                names[receiver.id] = None
        return list(names)

    def _outputs(self, run: list[ast.stmt]) -> Iterator[str]:
        """Yield the names that a run of statements gives to what it computes."""
        for statement in run:
            if isinstance(statement, ast.Assign) and self.places.computes(statement):
                for target in statement.targets:
                    if isinstance(target, ast.Name):
                        yield target.id


def _without_call(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node


def _assigns(statement: ast.stmt, name: str | None) -> bool:
    """Return True where a statement, or one in it, gives a name its value."""
    if name is None:
        return False
    return any(
        isinstance(node, ast.Name)
        and node.id == name
        and isinstance(node.ctx, ast.Store)
        for node in ast.walk(statement)
    )


def _only_scales(statement: ast.stmt, name: str | None) -> bool:
    """Return True for ``loss = loss / n`` and ``loss /= n``."""
    value: ast.AST | None = None
    if isinstance(statement, ast.AugAssign):
        value = statement
    elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.BinOp):
        left = statement.value.left
        value = statement.value if _is_name(left, name) else None
    operation = getattr(value, "op", None)
    return isinstance(operation, ast.Div | ast.Mult)


def _is_name(node: ast.AST, name: str | None) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def models_in(
    script: Script, run: list[ast.stmt], nodes: set[ast.AST]
) -> list[ast.expr]:
    """Return the expressions of the models that a run of statements calls."""
    models: dict[str, ast.expr] = {}
    for statement in run:
        for call in calls_in(statement):
            if call in nodes:
                models.setdefault(script.segment(call.func), call.func)
    return list(models.values())


def forward_calls(script: Script) -> set[ast.AST]:
    """Return the calls of models."""
    return {
        event.node for program in script.programs for event in program.of(Act.FORWARD)
    }
