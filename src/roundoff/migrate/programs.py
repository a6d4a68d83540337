"""Where the acts of a training script stand: in which statement, block and loop."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cached_property

from roundoff.lint import Act, Script, block_of
from roundoff.migrate.names import calls_in

_FORWARD = (Act.FORWARD, Act.LOSS)
_BOUNDARY = (Act.BACKWARD, Act.STEP, Act.SCALER_STEP)
_CLEARS = (Act.ZERO_GRAD,)
#: Helper functions are followed so deep.
_DEEPEST = 5


class Places:
    """The acts of a script by the statements that lead to them."""

    def __init__(self, script: Script) -> None:
        self.script = script

    @cached_property
    def _nodes(self) -> dict[Act, set[ast.AST]]:
        nodes: dict[Act, set[ast.AST]] = {act: set() for act in Act}
        for program in self.script.programs:
            for event in program.events:
                nodes[event.act].add(event.node)
        return nodes

    def computes(self, statement: ast.AST) -> bool:
        """Return True where a statement calls a model or a loss function."""
        return self._leads_to(statement, _FORWARD, 0)

    def ends_pass(self, statement: ast.AST) -> bool:
        """Return True where a statement runs a backward pass or an optimizer."""
        return self._leads_to(statement, _BOUNDARY, 0)

    def clears(self, statement: ast.AST) -> bool:
        """Return True where a statement clears gradients."""
        return self._leads_to(statement, _CLEARS, 0)

    def _leads_to(self, node: ast.AST, acts: Iterable[Act], depth: int) -> bool:
        wanted = tuple(acts)
        for call in calls_in(node):
            if any(call in self._nodes[act] for act in wanted):
                return True
            helper = self.script.function_of(call)
            if helper is None or depth >= _DEEPEST:
                continue
            if any(self._leads_to(each, wanted, depth + 1) for each in helper.body):
                return True
        return False

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements that a statement stands among."""
        return block_of(self.script, statement)

    def chain(self, node: ast.AST) -> list[ast.stmt]:
        """Return the statements around a node in its function, the innermost first."""
        statements = [self.script.statement(node)]
        for above in self.script.ancestors(statements[0]):
            if isinstance(
                above,
                ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda,
            ):
                break
            if isinstance(above, ast.stmt):
                statements.append(above)
        return statements

    def in_block(self, node: ast.AST, block: list[ast.stmt]) -> ast.stmt | None:
        """Return the statement of a block that a node stands in; None for none of them."""
        for statement in self.chain(node):
            if statement in block:
                return statement
        return None

    def projected(self, node: ast.AST, function: ast.AST) -> ast.AST | None:
        """Return the node of a function that leads to a node: itself, or a call.

        None where no call, or more than one, leads there.
        """
        for _ in range(_DEEPEST):
            scope = self.script.scope(node)
            if scope is function:
                return node
            calls = self.script.things.callers().get(scope, [])
            if len(calls) != 1:
                return None
            node = calls[0]
        return None

    def common_block(
        self, nodes: Iterable[ast.AST]
    ) -> tuple[list[ast.stmt], list[ast.stmt]] | None:
        """Return the innermost block around nodes of one function, and its statements
        that hold them, in order; None where they stand in several functions.
        """
        chains = [self.chain(node) for node in nodes]
        for statement in chains[0]:
            block = self.block(statement)
            held = [
                next((each for each in chain if each in block), None)
                for chain in chains
            ]
            if all(each is not None for each in held):
                inside = dict.fromkeys(each for each in held if each is not None)
                return block, sorted(inside, key=block.index)
        return None
