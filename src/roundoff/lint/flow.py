"""One walk through a script: what its loops do, in order, helper functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from roundoff.lint.acts import acts_of
from roundoff.lint.events import Act, Condition, Event, Loop
from roundoff.lint.script import Function, Script
from roundoff.lint.things import Thing, argument_for

#: Helper functions are followed so deep.
_DEEPEST = 5
#: Events of a script; what is longer than any script people write is left.
_MOST = 5000
_STEPS = (Act.STEP, Act.SCALER_STEP)


@dataclass(frozen=True)
class _Around:
    """What stands around the code that is walked."""

    conditions: tuple[Condition, ...] = ()
    contexts: tuple[ast.expr, ...] = ()
    #: loops, and how many conditions stand outside each
    loops: tuple[tuple[ast.AST, int], ...] = ()
    #: what parameters of helper functions stand for
    names: tuple[tuple[str, Thing], ...] = ()
    #: what callers pass for parameters that are tested
    tests: tuple[tuple[str, ast.expr], ...] = ()
    functions: tuple[ast.AST, ...] = ()


@dataclass
class Trace:
    """The events that follow from one entry into the script."""

    root: ast.AST
    events: list[tuple[Event, _Around]] = field(default_factory=list)


def programs(script: Script) -> tuple[Loop, ...]:
    """Return all events of the module, and of each function that nothing in it calls."""
    return tuple(
        Loop(trace.root, tuple(_events_inside(trace, trace.root)))
        for trace in script.traces
        if trace.events
    )


def training_loops(script: Script) -> tuple[Loop, ...]:
    """Return the loops that train: those with a backward pass, each once.

    A function that nothing in the script calls (a ``training_step``, a function that a
    library calls) is a loop of its own where no loop of the script is around its
    backward pass.
    """
    loops: dict[ast.AST, Loop] = {}
    for trace in script.traces:
        for event, around in trace.events:
            if event.act is Act.BACKWARD:
                node = _loop_of(trace, around)
                if node not in loops:
                    loops[node] = Loop(node, tuple(_events_inside(trace, node)))
    return tuple(loops.values())


def _loop_of(trace: Trace, around: _Around) -> ast.AST:
    """Return the innermost loop around a backward pass in which an optimizer steps."""
    nodes = [node for node, _ in around.loops]
    for node in reversed(nodes):
        if any(
            event.act in _STEPS and node in (each for each, _ in outside.loops)
            for event, outside in trace.events
        ):
            return node
    return nodes[-1] if nodes else trace.root


def _events_inside(trace: Trace, node: ast.AST) -> Iterator[Event]:
    """Yield the events of one iteration, with what stands inside the loop alone."""
    order = 0
    for event, around in trace.events:
        nodes = [each for each, _ in around.loops]
        if node is trace.root:
            outer = 0
            conditions = around.conditions
        elif node in nodes:
            outer = nodes.index(node)
            conditions = around.conditions[around.loops[outer][1] :]
        else:
            continue
        yield replace(
            event,
            conditions=frozenset(conditions),
            contexts=around.contexts,
            loops=tuple(nodes[outer:]),
            order=order,
        )
        order += 1


def traces(script: Script) -> list[Trace]:
    """Walk the module and each function that no other function of the script calls."""
    followed = script.things.followed()
    functions = script.nodes(ast.FunctionDef, ast.AsyncFunctionDef)
    functions.sort(key=lambda each: each.lineno)
    walked: set[ast.AST] = set()
    traces = []
    for root in (script.tree, *functions):
        if root in walked or root in followed:
            continue
        walker = _Walker(script, Trace(root), walked)
        around = _Around(functions=(root,))
        if isinstance(root, ast.FunctionDef | ast.AsyncFunctionDef):
            around = replace(around, contexts=tuple(root.decorator_list))
        walker.block(root.body, around)
        traces.append(walker.trace)
    return traces


class _Walker:
    """Follows the statements of one entry, and collects events."""

    def __init__(self, script: Script, trace: Trace, walked: set[ast.AST]) -> None:
        self.script = script
        self.trace = trace
        self.walked = walked

    def block(self, statements: Sequence[ast.stmt], around: _Around) -> None:
        """Walk statements in order; after one that leaves, the rest has its condition."""
        for statement in statements:
            if len(self.trace.events) > _MOST:
                return
            self.statement(statement, around)
            if isinstance(statement, ast.If):
                test = self._written_out(statement.test, around)
                around = _after(statement, test, around)

    def statement(self, statement: ast.stmt, around: _Around) -> None:
        if isinstance(statement, ast.If):
            self.branches(statement, around)
        elif isinstance(statement, ast.For | ast.AsyncFor | ast.While):
            self.loop(statement, around)
        elif isinstance(statement, ast.With | ast.AsyncWith):
            self.context(statement, around)
        elif isinstance(statement, ast.Try):
            self.attempt(statement, around)
        elif isinstance(statement, ast.Match):
            self.match(statement, around)
        elif isinstance(statement, ast.ClassDef):
            return
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            self.expressions(statement, around)

    def branches(self, statement: ast.If, around: _Around) -> None:
        self.expressions(statement.test, around)
        yes, no = outcomes(self._written_out(statement.test, around))
        self.block(statement.body, _under(around, yes))
        self.block(statement.orelse, _under(around, no))

    def loop(
        self, statement: ast.For | ast.AsyncFor | ast.While, around: _Around
    ) -> None:
        entered = (statement, len(around.conditions))
        inside = replace(around, loops=(*around.loops, entered))
        if isinstance(statement, ast.While):
            self.expressions(statement.test, inside)
        else:
            self.expressions(statement.iter, around)
        self.block(statement.body, inside)
        self.block(statement.orelse, around)

    def context(self, statement: ast.With | ast.AsyncWith, around: _Around) -> None:
        for item in statement.items:
            self.expressions(item.context_expr, around)
            around = replace(around, contexts=(*around.contexts, item.context_expr))
        self.block(statement.body, around)

    def attempt(self, statement: ast.Try, around: _Around) -> None:
        self.block(statement.body, around)
        for place, handler in enumerate(statement.handlers):
            test = f"except {place} of line {statement.lineno}"
            self.block(handler.body, _under(around, [Condition(test, True)]))
        self.block(statement.orelse, around)
        self.block(statement.finalbody, around)

    def match(self, statement: ast.Match, around: _Around) -> None:
        self.expressions(statement.subject, around)
        before: list[Condition] = []
        for place, case in enumerate(statement.cases):
            test = f"case {place} of line {statement.lineno}"
            self.block(case.body, _under(around, [*before, Condition(test, True)]))
            before.append(Condition(test, False))

    def expressions(self, node: ast.AST, around: _Around) -> None:
        """Walk the calls of an expression in the order in which they run."""
        if isinstance(node, ast.Lambda):
            return
        for child in self.script.children(node):
            if isinstance(child, ast.expr | ast.keyword | ast.comprehension):
                self.expressions(child, around)
        if isinstance(node, ast.Call):
            self.call(node, around)
        elif isinstance(node, ast.Attribute | ast.Assign | ast.AugAssign):
            self.events(node, around)

    def call(self, call: ast.Call, around: _Around) -> None:
        for argument in call.args:
            closure = self._closure(call, argument)
            if closure is not None:
                self.helper(closure, None, around)
        function = self.script.function_of(call)
        if function is not None:
            self.helper(function, call, around)
        self.events(call, around)

    def _closure(self, call: ast.Call, argument: ast.expr) -> Function | None:
        """Return the function that an optimizer's ``step(closure)`` calls."""
        is_step = isinstance(call.func, ast.Attribute) and call.func.attr == "step"
        if not is_step or not isinstance(argument, ast.Name):
            return None
        home = self.script.home(argument)
        if home is None:
            return None
        for binding in self.script.bindings(home)[argument.id]:
            if isinstance(binding.statement, ast.FunctionDef | ast.AsyncFunctionDef):
                return binding.statement
        return None

    def helper(
        self, function: Function, call: ast.Call | None, around: _Around
    ) -> None:
        """Walk a function where it is called."""
        if function in around.functions or len(around.functions) > _DEEPEST:
            return
        self.walked.add(function)
        names = around.names
        tests = around.tests
        if call is not None:
            names = (*self._passed(function, call, around), *names)
            tests = (*self._passed_tests(function, call, around), *tests)
        inside = replace(
            around,
            names=names,
            tests=tests,
            functions=(*around.functions, function),
            contexts=(*around.contexts, *function.decorator_list),
        )
        self.block(function.body, inside)

    def _passed(
        self, function: Function, call: ast.Call, around: _Around
    ) -> Iterator[tuple[str, Thing]]:
        """Yield what the parameters of a helper stand for in its caller."""
        for parameter in (*function.args.args, *function.args.kwonlyargs):
            argument = argument_for(function, parameter.arg, call)
            thing = self.script.things.thing(argument)
            if thing is not None:
                key = f"{parameter.arg}@{function.lineno}"
                yield key, _resolved(thing, around.names)

    def _written_out(self, test: ast.expr, around: _Around, depth: int = 0) -> ast.expr:
        """Return a test with names replaced by the comparisons that they hold."""
        if depth > _DEEPEST:
            return test
        if isinstance(test, ast.Name):
            return self._held(test, around, depth)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            operand = self._written_out(test.operand, around, depth + 1)
            return ast.UnaryOp(test.op, operand)
        if isinstance(test, ast.BoolOp):
            values = [
                self._written_out(each, around, depth + 1) for each in test.values
            ]
            return ast.BoolOp(test.op, values)
        return test

    def _held(self, name: ast.Name, around: _Around, depth: int) -> ast.expr:
        """Return the comparison that a name holds; the name where it holds none."""
        key = f"{name.id}@{getattr(self.script.home(name), 'lineno', 0)}"
        for parameter, passed in around.tests:
            if parameter == key:
                return passed
        value = self.script.definition(name)
        if isinstance(value, ast.Compare | ast.BoolOp | ast.UnaryOp):
            return self._written_out(value, around, depth + 1)
        return name

    def _passed_tests(
        self, function: Function, call: ast.Call, around: _Around
    ) -> Iterator[tuple[str, ast.expr]]:
        """Yield the comparisons that a caller passes for the parameters of a helper."""
        for parameter in (*function.args.args, *function.args.kwonlyargs):
            argument = argument_for(function, parameter.arg, call)
            if argument is None:
                continue
            test = self._written_out(argument, around)
            if isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):
                yield f"{parameter.arg}@{function.lineno}", test

    def events(self, node: ast.AST, around: _Around) -> None:
        for event in acts_of(self.script, node):
            subject = _renamed(event.subject, around.names)
            scaler = _renamed(event.scaler, around.names)
            renamed = replace(event, subject=subject, scaler=scaler)
            self.trace.events.append((renamed, around))


def _renamed(thing: Thing | None, names: tuple[tuple[str, Thing], ...]) -> Thing | None:
    return None if thing is None else _resolved(thing, names)


def _resolved(thing: Thing, names: tuple[tuple[str, Thing], ...]) -> Thing:
    """Return the caller's object for a parameter of a helper."""
    for key, passed in names:
        if key == thing.key:
            return passed
    return thing


def _under(around: _Around, conditions: Iterable[Condition]) -> _Around:
    return replace(around, conditions=(*around.conditions, *conditions))


def _after(statement: ast.If, test: ast.expr, around: _Around) -> _Around:
    """Return what holds behind an ``if`` of which a branch leaves."""
    yes, no = outcomes(test)
    if _leaves(statement.body):
        return _under(around, no)
    if _leaves(statement.orelse):
        return _under(around, yes)
    return around


def _leaves(block: Sequence[ast.stmt]) -> bool:
    """Return True where a block ends the iteration or the function."""
    if not block:
        return False
    last = block[-1]
    return isinstance(last, ast.Continue | ast.Break | ast.Return | ast.Raise)


def outcomes(test: ast.expr) -> tuple[list[Condition], list[Condition]]:
    """Return what holds where a test is true, and where it is false.

    >>> yes, no = outcomes(ast.parse("scaler is not None and ready", mode="eval").body)
    >>> [(each.test, each.outcome) for each in yes]
    [('scaler', True), ('ready', True)]
    >>> [(each.test, each.outcome) for each in no]
    [('scaler is not None and ready', False)]
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        no, yes = outcomes(test.operand)
        return yes, no
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        yes = [each for value in test.values for each in outcomes(value)[0]]
        return yes, [Condition(ast.unparse(test), False)]
    if isinstance(test, ast.BoolOp):
        no = [each for value in test.values for each in outcomes(value)[1]]
        return [Condition(ast.unparse(test), True)], no
    text, is_straight = _plain(test)
    return [Condition(text, is_straight)], [Condition(text, not is_straight)]


def _plain(test: ast.expr) -> tuple[str, bool]:
    """Return the text of a test without ``is not None``, and False for a negated one."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        against = test.comparators[0]
        is_none = isinstance(against, ast.Constant) and against.value is None
        if is_none and isinstance(test.ops[0], ast.Is | ast.IsNot):
            return ast.unparse(test.left), isinstance(test.ops[0], ast.IsNot)
        if isinstance(test.ops[0], ast.NotEq):
            text = f"{ast.unparse(test.left)} == {ast.unparse(against)}"
            return text, False
    return ast.unparse(test), True
