"""Where the scaler is made, once, and how it gets to where it is used."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from roundoff.lint import Script, argument_for
from roundoff.migrate.names import root_name, scopes_around
from roundoff.migrate.programs import Places
from roundoff.migrate.result import NotUnderstoodError, Remark
from roundoff.migrate.text_edits import TextEdits

_HANDED_ON = "the scaler is handed on: there is one for the whole training"
_MADE = "one scaler, made once beside the optimizer: a new one would forget its scale"
_DEEPEST = 6
_OPTIMIZERS = re.compile(r"opt", re.IGNORECASE)


@dataclass
class _Wanted:
    """The statements that make the optimizers of one scaler, and those that use them."""

    makers: dict[ast.stmt, None] = field(default_factory=dict)
    used: list[ast.stmt] = field(default_factory=list)


class Scalers:
    """Gives the scaler of an optimizer by its name at a place, and sees to it that it is
    made and handed on there.

    Args:
        script: the script.
        places: its acts.
        edits: of the script.
        name: of the scaler.
        make: the expression that makes a scaler at a statement.
    """

    def __init__(
        self,
        script: Script,
        places: Places,
        edits: TextEdits,
        name: str,
        make: Callable[[ast.AST], str],
    ) -> None:
        self.script = script
        self.places = places
        self.edits = edits
        self.name = name
        self.make = make
        self.notes: list[Remark] = []
        self._wanted: dict[tuple[ast.AST | None, str], _Wanted] = {}
        self._parameters: set[ast.AST] = set()

    def of(self, optimizer: ast.expr, depth: int = 0) -> str:
        """Return the text of the scaler where this optimizer is used.

        Raises ``NotUnderstoodError`` where no place to make it is found.
        """
        name = root_name(optimizer)
        if name is None or depth > _DEEPEST:
            raise _not_made(optimizer)
        if name.id == "self":
            return self._of_object(optimizer)
        home = self.script.home(name)
        return self._of_name(home, name, optimizer, depth)

    def _of_name(
        self, home: ast.AST | None, name: ast.Name, optimizer: ast.expr, depth: int
    ) -> str:
        """The scaler of an optimizer that a name of a function or the module holds."""
        if home is None:
            raise _not_made(optimizer)
        bindings = self.script.bindings(home)[name.id]
        if any(isinstance(each.statement, ast.arg) for each in bindings):
            self._hand_on(home, name.id, depth)
            return self.name
        loops = [each for each in bindings if each.is_loop]
        if loops:
            return self.of(self._optimizers_in(loops[0].value, optimizer), depth + 1)
        self._want(home, [each.statement for each in bindings], optimizer, self.name)
        return self.name

    def _optimizers_in(self, iterated: ast.expr | None, place: ast.expr) -> ast.expr:
        """Return the list of optimizers in what a loop goes over."""
        for node in () if iterated is None else ast.walk(iterated):
            if not isinstance(node, ast.Name | ast.Attribute):
                continue
            if _OPTIMIZERS.search(self.script.segment(node)):
                return node
        raise _not_made(place)

    # -- made --------------------------------------------------------------------------

    def _of_object(self, optimizer: ast.expr) -> str:
        """The scaler beside ``self.optimizer``."""
        attribute: ast.AST = optimizer
        while isinstance(attribute, ast.Attribute | ast.Subscript):
            inner = attribute.value
            if isinstance(inner, ast.Name) and inner.id == "self":
                break
            attribute = inner
        holder = self.script.class_of(optimizer)
        if holder is None or not isinstance(attribute, ast.Attribute):
            raise _not_made(optimizer)
        bindings = self.script.bindings(holder).get(attribute.attr, [])
        if not bindings:
            raise _not_made(optimizer)
        statements = [each.statement for each in bindings]
        self._want(holder, statements, optimizer, f"self.{self.name}")
        return f"self.{self.name}"

    def _want(
        self,
        home: ast.AST | None,
        statements: list[ast.AST],
        optimizer: ast.expr,
        name: str,
    ) -> None:
        """Note that a scaler is needed beside what makes an optimizer."""
        wanted = self._wanted.setdefault((home, name), _Wanted())
        placed = self.places.common_block(statements)
        if placed is None:
            raise _not_made(optimizer)
        wanted.makers[placed[1][-1]] = None
        if home in list(scopes_around(self.script, optimizer)):
            wanted.used.append(self.script.statement(optimizer))

    def write(self) -> None:
        """Make each scaler behind the last of its optimizers, before its first use.

        Optimizers that are made after others were used get a scaler of their own.
        Raises ``NotUnderstoodError`` for one that is made where it is used.
        """
        for (home, name), wanted in self._wanted.items():
            behind = self._behind_all(home, wanted)
            for statement in [behind] if behind is not None else list(wanted.makers):
                self._check_order(home, statement, wanted)
                line = f"{name} = {self.make(statement)}"
                self.edits.after(statement, [line], _MADE)

    def _behind_all(self, home: ast.AST | None, wanted: _Wanted) -> ast.stmt | None:
        """Return the statement behind which all optimizers are made and none is used."""
        placed = self.places.common_block(list(wanted.makers))
        if placed is None:
            return None
        last = placed[1][-1]
        same = [each for each in wanted.used if self.script.scope(each) is home]
        is_first = all(each.lineno > last.lineno for each in same)
        return last if is_first else None

    def _check_order(
        self, home: ast.AST | None, statement: ast.stmt, wanted: _Wanted
    ) -> None:
        around = self.script.in_loop(statement)
        for use in wanted.used:
            is_inside = around is not None and around in self.places.chain(use)
            if (
                self.script.scope(use) is home
                and is_inside
                and use.lineno < statement.lineno
            ):
                raise NotUnderstoodError(
                    statement.lineno,
                    "the optimizer is made anew in the loop that uses it",
                )

    # -- handed on ---------------------------------------------------------------------

    def _hand_on(self, function: ast.AST, optimizer: str, depth: int) -> None:
        """Give a function the scaler as a parameter, and let its callers pass it."""
        if function in self._parameters:
            return
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            raise NotUnderstoodError(_line(function), "an optimizer that a lambda gets")
        self._parameters.add(function)
        self._add_parameter(function)
        calls = self.script.things.callers().get(function, [])
        for call in calls:
            passed = argument_for(function, optimizer, call)
            if passed is None:
                if _takes_more(call):
                    raise NotUnderstoodError(
                        call.lineno, "arguments are passed as *args or **kwargs"
                    )
                continue
            if isinstance(passed, ast.Constant):
                continue
            self._pass(call, self.of(passed, depth + 1))
        if not calls:
            reason = f"nothing here calls {function.name}: pass {self.name}= where it is called"
            self.notes.append(Remark(function.lineno, reason))

    def _pass(self, call: ast.Call, scaler: str) -> None:
        last = max(
            [*call.args, *(each.value for each in call.keywords)],
            key=lambda node: self.script.span(node)[1],
        )
        _, end = self.script.span(last)
        end += _closing(self.script.source[end : self.script.span(call)[1]])
        text = f", {self.name}={scaler}"
        self.edits.replace_span(end, end, text, _HANDED_ON)

    def _add_parameter(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = function.args
        has_default = bool(
            arguments.defaults or arguments.kwonlyargs or arguments.vararg
        )
        text = f"{self.name}=None" if has_default else self.name
        if arguments.kwarg is not None:
            start, _ = self.script.span(arguments.kwarg)
            stars = self.script.source.rfind(b"**", 0, start)
            self.edits.replace_span(stars, stars, f"{text}, ", _HANDED_ON)
            return
        nodes: list[ast.AST] = [
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
            *arguments.defaults,
            *(each for each in arguments.kw_defaults if each is not None),
        ]
        if arguments.vararg is not None:
            nodes.append(arguments.vararg)
        end = max(self.script.span(node)[1] for node in nodes)
        self.edits.replace_span(end, end, f", {text}", _HANDED_ON)


def _closing(rest: bytes) -> int:
    """Return how many bytes of closing brackets belong to the last argument."""
    depth = rest.count(b")") - rest.count(b"(")
    if depth <= 1:
        return 0
    place = 0
    for _ in range(depth - 1):
        place = rest.index(b")", place) + 1
    return place


def _takes_more(call: ast.Call) -> bool:
    has_star = any(isinstance(each, ast.Starred) for each in call.args)
    return has_star or any(each.arg is None for each in call.keywords)


def _not_made(optimizer: ast.expr) -> NotUnderstoodError:
    reason = (
        "where the optimizer is made is not seen, so there is no place for a scaler"
    )
    return NotUnderstoodError(optimizer.lineno, reason)


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)
