"""The order of a scaler's calls in a loop: checks that PyTorch and Paddle share."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from roundoff.lint.contexts import text_of
from roundoff.lint.edits import line_after, line_before, line_removed, replaced
from roundoff.lint.events import Act, Event, Loop
from roundoff.lint.rule import Edit, Hit
from roundoff.lint.script import Script
from roundoff.lint.things import Kind


def made_in_loop(script: Script) -> Iterator[Hit]:
    """A scaler that is made inside a loop that trains, where the optimizer is not."""
    for program in script.programs:
        created = program.of(Act.CREATE)
        optimizers = [each for each in created if _is_of(each, Kind.OPTIMIZER)]
        # a loop around an optimizer that is made runs whole trainings
        steps = _loops_around(program.of(Act.BACKWARD)) - _loops_around(optimizers)
        for event in created:
            if _is_of(event, Kind.SCALER) and _is_again(script, event, steps):
                yield Hit(event.node)


def _loops_around(events: list[Event]) -> set[ast.AST]:
    return {loop for each in events for loop in each.loops}


def _is_of(event: Event, kind: Kind) -> bool:
    return event.subject is not None and event.subject.kind is kind


def _is_again(script: Script, event: Event, loops: set[ast.AST]) -> bool:
    """Return True where one of these loops makes a scaler again and again."""
    around = loops.intersection(event.loops)
    if _binds_optimizer(script, event.node):
        around.intersection_update(script.ancestors(event.node))
    return bool(around)


def _binds_optimizer(script: Script, node: ast.AST) -> bool:
    """Return True in a function that gets an optimizer of its own: loops outside of it run
    whole trainings.
    """
    scope = script.scope(node)
    if isinstance(scope, ast.Module):
        return False
    names = script.bindings(scope)
    return any(
        isinstance(each.statement, ast.Assign)
        and script.things.kind(_target(each.statement, name)) is Kind.OPTIMIZER
        for name, bindings in names.items()
        for each in bindings
    )


def _target(assign: ast.Assign, name: str) -> ast.expr | None:
    """Return the node that an assignment binds a name by."""
    for target in assign.targets:
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and node.id == name:
                return node
    return None


def bare_steps(script: Script) -> Iterator[Hit]:
    """A scaled backward pass, and then a step that the scaler does not take."""
    for loop in script.loops:
        for step in loop.of(Act.STEP):
            backward = _last(loop.before(step, Act.BACKWARD))
            if backward is None or backward.scaler is None:
                continue
            if _is_taken_care_of(loop, step):
                continue
            unscaled = bool(loop.before(step, Act.UNSCALE))
            if unscaled and _looks_for_inf(script, loop):
                continue
            edits = _scaled_step(script, loop, backward, step)
            yield Hit(step.node, _NOT_SKIPPED if unscaled else "", edits)


_NOT_SKIPPED = (
    "the optimizer steps by itself, so that nothing skips a step with Inf or NaN: write "
    "`scaler.step(optimizer)`"
)


def _looks_for_inf(script: Script, loop: Loop) -> bool:
    """Return True where a script itself asks whether gradients are finite."""
    scopes = {script.scope(event.node) for event in loop.events} | {loop.node}
    names = {
        node.attr
        for scope in scopes
        for node in ast.walk(scope)
        if isinstance(node, ast.Attribute)
    }
    return bool(names & {"isfinite", "isnan", "isinf", "found_inf"})


def _last(events: list[Event]) -> Event | None:
    return events[-1] if events else None


def _is_taken_care_of(loop: Loop, step: Event) -> bool:
    """Return True where a library, the scaler or the script itself unscales for a step."""
    if step.is_managed or _is_taken_by_scaler(loop, step):
        return True
    return _unscaled_by_hand(loop, step)


def _is_taken_by_scaler(loop: Loop, step: Event) -> bool:
    """Return True where the scaler steps the same optimizer on the same path."""
    return any(
        each.subject == step.subject and each.may_meet(step)
        for each in loop.of(Act.SCALER_STEP)
    )


def _unscaled_by_hand(loop: Loop, step: Event) -> bool:
    """Return True where a script itself unscales gradients before a step."""
    before = loop.before(step, Act.UNSCALE)
    by_hand = any(each.scaler is None for each in before)
    return by_hand or (not before and bool(loop.before(step, Act.GRADIENT)))


def _scaled_step(
    script: Script, loop: Loop, backward: Event, step: Event
) -> tuple[Edit, ...]:
    """Return the fix: the scaler steps, and updates where nothing does."""
    call = step.node
    scaler = scaler_text(backward.node)
    is_plain = isinstance(call, ast.Call) and not call.args and not call.keywords
    if scaler is None or not is_plain or not _same_function(script, backward, step):
        return ()
    optimizer = _receiver(script, call)
    edits = (replaced(script, call, f"{scaler}.step({optimizer})"),)
    if loop.of(Act.UPDATE):
        return edits
    if len(loop.of(Act.STEP)) > 1:
        return ()
    update = line_after(script, script.statement(call), f"{scaler}.update()")
    return (*edits, *update) if update else ()


def _receiver(script: Script, call: ast.AST) -> str:
    """Return how a script writes the object whose method is called."""
    function = call.func if isinstance(call, ast.Call) else None
    return script.segment(function.value) if isinstance(function, ast.Attribute) else ""


def scaler_text(backward: ast.AST) -> str | None:
    """Return how a script writes the scaler of ``scaler.scale(loss).backward()``."""
    if not isinstance(backward, ast.Call) or not isinstance(
        backward.func, ast.Attribute
    ):
        return None
    scaled = backward.func.value
    if isinstance(scaled, ast.Call) and isinstance(scaled.func, ast.Attribute):
        return ast.unparse(scaled.func.value)
    return None


def _same_function(script: Script, first: Event, second: Event) -> bool:
    return script.scope(first.node) is script.scope(second.node)


def never_updated(script: Script) -> Iterator[Hit]:
    """A scaler steps, and never updates."""
    for loop in script.loops:
        steps = loop.of(Act.SCALER_STEP)
        rare = _rare_update(loop)
        if rare is not None:
            yield Hit(rare.node, _SOMETIMES)
        if not steps or _updated_anywhere(script, steps[0]):
            continue
        last = steps[-1]
        edits: tuple[Edit, ...] = ()
        if isinstance(last.node, ast.Call) and isinstance(
            last.node.func, ast.Attribute
        ):
            scaler = script.segment(last.node.func.value)
            statement = script.statement(last.node)
            edits = line_after(script, statement, f"{scaler}.update()")
        yield Hit(last.node, edits=edits)


_SOMETIMES = (
    "the scaler steps in each iteration and is updated in some: call `scaler.update()` "
    "behind each step"
)


def _rare_update(loop: Loop) -> Event | None:
    """Return an update that only some of the iterations reach in which the scaler steps."""
    steps = loop.of(Act.SCALER_STEP)
    updates = loop.of(Act.UPDATE)
    if len(updates) != 1 or not steps:
        return None
    (update,) = updates
    extra = update.conditions - steps[-1].conditions
    return update if any("%" in each.test for each in extra) else None


def _updated_anywhere(script: Script, step: Event) -> bool:
    """Return True where the scaler updates in the script, also outside the loop.

    A helper of another file that gets the scaler may update it too.
    """
    if any(
        update.scaler == step.scaler or update.scaler is None
        for program in script.programs
        for update in program.of(Act.UPDATE)
    ):
        return True
    return any(
        script.things.thing(argument) == step.scaler
        for call in script.nodes(ast.Call)
        for argument in call.args
        if script.function_of(call) is None
    )


def read_before_unscaling(script: Script) -> Iterator[Hit]:
    """Gradients are clipped or read while they are scaled."""
    for loop in script.loops:
        for event in loop.of(Act.CLIP, Act.GRADIENT):
            if event.is_managed:
                continue
            if _is_scaled_by_manager(script, loop, event):
                yield Hit(event.node, _MANAGED_CLIP)
            if _is_unscaled(loop, event):
                continue
            if loop.after(event, Act.SCALER_STEP, Act.STEP):
                yield Hit(event.node, edits=_unscaling(script, loop, event))


_MANAGED_CLIP = (
    "gradients are clipped while they have the loss scale, which accelerate and Fabric "
    "keep to themselves: call their own `clip_grad_norm_` or `clip_gradients`"
)


def _is_scaled_by_manager(script: Script, loop: Loop, event: Event) -> bool:
    """Return True where torch clips gradients that accelerate or Fabric scaled for fp16."""
    if event.act is not Act.CLIP or not manages_fp16(script):
        return False
    backward = loop.before(event, Act.BACKWARD)
    is_managed = bool(backward) and backward[-1].is_managed
    return is_managed and not script.method_calls("unscale_gradients")


def manages_fp16(script: Script) -> bool:
    """Return True where an ``Accelerator`` or ``Fabric`` of the script says fp16."""
    for call in script.nodes(ast.Call):
        if script.things.kind(call) is not Kind.MANAGER:
            continue
        options = {each.arg: each.value for each in call.keywords}
        precision = options.get("mixed_precision", options.get("precision"))
        if text_of(script, precision) in ("fp16", "16-mixed", "16"):
            return True
    return False


def _is_unscaled(loop: Loop, event: Event) -> bool:
    """Return True where gradients are not scaled: no scaled pass before, or unscaled since."""
    backward = [
        each for each in loop.before(event, Act.BACKWARD) if not each.is_managed
    ]
    scaled = [each for each in backward if each.scaler is not None]
    if not scaled or backward[-1].scaler is None:
        return True
    since = scaled[-1].order
    unscaled = loop.before(event, Act.UNSCALE, Act.SCALER_STEP, Act.ZERO_GRAD)
    return any(each.order > since for each in unscaled)


def _unscaling(script: Script, loop: Loop, event: Event) -> tuple[Edit, ...]:
    """Return the fix: ``unscale_`` in front, where one optimizer steps."""
    steps = loop.after(event, Act.SCALER_STEP)
    texts = {_step_text(step) for step in steps}
    if len(texts) != 1 or event.act is not Act.CLIP:
        return ()
    (step,) = texts
    if step is None or any(not _same_function(script, each, event) for each in steps):
        return ()
    scaler, optimizer = step
    statement = script.statement(event.node)
    added = line_before(script, statement, f"{scaler}.unscale_({optimizer})")
    late = [each for each in loop.after(event, Act.UNSCALE) if each.scaler is not None]
    return _moved(script, event, added, late) if late else added


def _moved(
    script: Script, event: Event, added: tuple[Edit, ...], late: list[Event]
) -> tuple[Edit, ...]:
    """Return the edits that also take the one later unscaling out; none for several."""
    if len(late) != 1 or not _same_function(script, late[0], event):
        return ()
    taken = _taken_out(script, late[0])
    return (*added, *taken) if added and taken else ()


def _taken_out(script: Script, event: Event) -> tuple[Edit, ...]:
    """Return the edit that takes a call out that has a line of its own."""
    statement = script.statement(event.node)
    if not isinstance(statement, ast.Expr) or statement.value is not event.node:
        return ()
    return line_removed(script, statement)


def _step_text(step: Event) -> tuple[str, str] | None:
    """Return how a script writes the scaler and the optimizer of a step."""
    call = step.node
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    if call.func.attr != "step" or len(call.args) != 1:
        return None
    return ast.unparse(call.func.value), ast.unparse(call.args[0])


def not_scaled(script: Script) -> Iterator[Hit]:
    """A backward pass without the scaler, and then a step by the scaler."""
    for loop in script.loops:
        yield from _bare_backward(script, loop)
        for step in loop.of(Act.SCALER_STEP):
            before = loop.before(step, Act.BACKWARD)
            if not before or any(
                each.scaler is not None or each.is_managed for each in before
            ):
                continue
            backward = before[-1]
            yield Hit(backward.node, edits=_scaled_loss(script, backward, step))
            break


_BARE_BACKWARD = (
    "`loss.backward()` leaves accelerate's and Fabric's loss scale out: call their own "
    "`backward(loss)`"
)


def _bare_backward(script: Script, loop: Loop) -> Iterator[Hit]:
    """``loss.backward()`` where an Accelerator in fp16 was given the optimizer."""
    if not manages_fp16(script):
        return
    for backward in loop.of(Act.BACKWARD):
        steps = loop.after(backward, Act.STEP)
        is_plain = not backward.is_managed and backward.scaler is None
        if is_plain and any(_is_prepared(script, step) for step in steps):
            yield Hit(backward.node, _BARE_BACKWARD)


def _is_prepared(script: Script, step: Event) -> bool:
    """Return True for an optimizer that went through ``prepare`` or ``setup``."""
    key = None if step.subject is None else step.subject.key
    for call in script.method_calls("prepare", "setup", "setup_optimizers"):
        function = call.func
        is_method = isinstance(function, ast.Attribute)
        manager = function.value if is_method else None  # type: ignore[attr-defined]
        keys = [script.things.key(argument) for argument in call.args]
        if script.things.kind(manager) is Kind.MANAGER and key in keys:
            return True
    return False


def _scaled_loss(script: Script, backward: Event, step: Event) -> tuple[Edit, ...]:
    """Return the fix: the loss is scaled where it is differentiated."""
    call = backward.node
    text = _step_text(step)
    if text is None or not isinstance(call, ast.Call) or call.args:
        return ()
    if not isinstance(call.func, ast.Attribute) or not _same_function(
        script, backward, step
    ):
        return ()
    if not isinstance(call.func.value, ast.Name | ast.Attribute):
        return ()
    loss = call.func.value
    return (replaced(script, loss, f"{text[0]}.scale({script.segment(loss)})"),)
