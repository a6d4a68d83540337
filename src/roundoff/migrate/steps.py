"""The optimizer steps of one iteration, and what has to stand around them."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from roundoff.lint import Act, Event, Loop, Script
from roundoff.migrate.programs import Places
from roundoff.migrate.result import NotUnderstoodError

_LOOPS = (ast.For, ast.While, ast.AsyncFor)


@dataclass(frozen=True)
class Step:
    """One ``optimizer.step()``.

    Attributes:
        event: of the step.
        optimizer: what steps.
        statement: the statement of the call.
        unit: the same, or the loop over optimizers that it stands in.
    """

    event: Event
    optimizer: ast.expr
    statement: ast.stmt
    unit: ast.stmt


def steps_of(script: Script, loop: Loop) -> list[Step]:
    """Return the optimizer steps of an iteration in their order.

    Raises ``NotUnderstoodError`` for steps that a scaler cannot take.
    """
    steps = []
    for event in loop.of(Act.STEP):
        call = event.node
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if call.args or call.keywords:
            raise NotUnderstoodError(
                call.lineno,
                "the optimizer runs a closure several times a step (LBFGS): a gradient "
                "scaler cannot skip that; bf16 needs none (--to bf16)",
            )
        statement = script.statement(call)
        unit = _unit(script, loop, statement)
        steps.append(Step(event, call.func.value, statement, unit))
    return steps


def _unit(script: Script, loop: Loop, statement: ast.stmt) -> ast.stmt:
    """Climb out of loops in which nothing runs backward: those over optimizers."""
    unit: ast.stmt = statement
    around = script.in_loop(statement)
    while isinstance(around, ast.stmt) and around is not loop.node:
        if any(around in event.loops for event in loop.of(Act.BACKWARD)):
            break
        unit = around
        around = script.in_loop(around)
    return unit


def update_places(
    script: Script, places: Places, steps: Sequence[Step]
) -> list[ast.stmt]:
    """Return the statements behind which the scale is updated, once an iteration.

    Steps in several functions are updated in each. Raises ``NotUnderstoodError`` where
    no place is passed exactly when a step was taken.
    """
    by_function: dict[ast.AST, list[ast.stmt]] = {}
    for step in steps:
        by_function.setdefault(script.scope(step.unit), []).append(step.unit)
    if len(by_function) == 1 and _all_of_one(steps):
        return list(dict.fromkeys(step.unit for step in steps))
    return [_behind(places, units) for units in by_function.values()]


def _all_of_one(steps: Sequence[Step]) -> bool:
    """Return True where one optimizer steps several times in an iteration."""
    subjects = [step.event.subject for step in steps]
    several = len({step.unit for step in steps}) > 1
    return several and None not in subjects and len(set(subjects)) == 1


def _behind(places: Places, units: list[ast.stmt]) -> ast.stmt:
    placed = places.common_block(units)
    if placed is None:
        raise NotUnderstoodError(
            units[0].lineno, "steps in places without a common block"
        )
    _, held = placed
    is_always = any(unit in held for unit in units)
    is_one = len(held) == 1 and _in_every_branch(held[0], units)
    if is_always or is_one:
        return held[-1]
    raise NotUnderstoodError(
        held[0].lineno,
        "which of the optimizers step depends on conditions: there is no one place to "
        "update the scale",
    )


def _in_every_branch(statement: ast.stmt, units: list[ast.stmt]) -> bool:
    """Return True for an ``if`` of which each branch steps."""
    if not isinstance(statement, ast.If):
        return isinstance(statement, ast.With)
    branches = [statement.body, statement.orelse]
    return all(
        any(unit in ast.walk(each) for each in branch for unit in units)
        for branch in branches
    )


@dataclass(frozen=True)
class Unscaling:
    """Gradients are divided by the scale before a statement, of these optimizers.

    Attributes:
        before: the statement, which reads or changes gradients, or holds what does.
        steps: those whose gradients it reads.
    """

    before: ast.stmt
    steps: tuple[Step, ...]


def unscalings(places: Places, loop: Loop, steps: Sequence[Step]) -> list[Unscaling]:
    """Return where gradients are unscaled: before they are clipped, logged or changed.

    Raises ``NotUnderstoodError`` where gradients are clipped more often than stepped.
    """
    places_of_unscaling: list[Unscaling] = []
    done: set[Step] = set()
    for event in loop.of(Act.CLIP, Act.GRADIENT):
        following = _following(loop, event, steps)
        waiting = tuple(step for step in following if step not in done)
        if not waiting or not _follows_backward(loop, event):
            continue
        done.update(waiting)
        places_of_unscaling.append(
            Unscaling(_anchor(places, event, waiting[0]), waiting)
        )
    return places_of_unscaling


def _follows_backward(loop: Loop, event: Event) -> bool:
    return any(each.order < event.order for each in loop.of(Act.BACKWARD))


def _following(loop: Loop, event: Event, steps: Sequence[Step]) -> list[Step]:
    """Return the steps behind an event, before the next backward pass."""
    later = [each.order for each in loop.of(Act.BACKWARD) if each.order > event.order]
    end = min(later, default=None)
    return [
        step
        for step in steps
        if step.event.order > event.order and (end is None or step.event.order < end)
    ]


def _anchor(places: Places, event: Event, step: Step) -> ast.stmt:
    node = places.projected(event.node, places.script.scope(step.statement))
    if node is None:
        raise NotUnderstoodError(
            _line(event.node),
            "gradients are read in a function that several places call",
        )
    for statement in (step.statement, step.unit):
        block = places.block(statement)
        held = places.in_block(node, block)
        if held is not None and held is not statement:
            return held
    outer = places.common_block([node, step.unit])
    if outer is not None and places.block(step.unit) is not outer[0]:
        return _around_both(outer[1], step, event)
    raise NotUnderstoodError(
        _line(event.node), "how gradients are read and stepped with is not understood"
    )


def _around_both(held: list[ast.stmt], step: Step, event: Event) -> ast.stmt:
    """The step stands deeper than what reads gradients: always, or only sometimes?"""
    holder = held[-1]
    inner = holder
    while isinstance(inner, ast.With):
        if step.unit in inner.body:
            return held[0]
        inner = inner.body[-1]
    raise NotUnderstoodError(
        _line(event.node),
        "gradients are clipped or read in iterations that do not step: move that to "
        "where the optimizer steps",
    )


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


def schedules(
    script: Script, places: Places, loop: Loop, update: ast.stmt
) -> list[ast.stmt]:
    """Return the statements that move a learning rate once a step, behind the update."""
    block = places.block(update)
    statements = []
    for event in loop.of(Act.SCHEDULER_STEP):
        if script.scope(event.node) is not script.scope(update):
            continue
        if _loop_around(script, event.node) is not _loop_around(script, update):
            continue
        held = places.in_block(event.node, block)
        if held is not None and block.index(held) > block.index(update):
            statements.append(script.statement(event.node))
    return list(dict.fromkeys(statements))


def _loop_around(script: Script, node: ast.AST) -> ast.AST | None:
    return script.in_loop(node)
