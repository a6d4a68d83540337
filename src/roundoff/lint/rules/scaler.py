"""Loss scaling in PyTorch: where the scaler is made, and the order of its calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from roundoff.lint.contexts import Autocast, autocast_of, autocasts, truth_of
from roundoff.lint.edits import replaced
from roundoff.lint.events import Act, Event, Loop
from roundoff.lint.rule import Edit, Hit, Rule
from roundoff.lint.rules.accumulation import (
    accumulation,
    not_divided,
    outside,
)
from roundoff.lint.rules.half_casts import half_format, is_trained
from roundoff.lint.rules.old_torch import is_for_old_torch
from roundoff.lint.rules.scaler_order import (
    bare_steps,
    made_in_loop,
    never_updated,
    not_scaled,
    read_before_unscaling,
)
from roundoff.lint.script import Script
from roundoff.lint.things import Kind

SCALERS = ("torch.amp.GradScaler", "torch.cuda.amp.GradScaler")


def _in_micro_steps(script: Script) -> Iterator[Hit]:
    for loop in script.loops:
        condition = accumulation(loop)
        if condition is None or not loop.of(Act.SCALER_STEP):
            continue
        for event in outside(loop, condition, Act.UNSCALE):
            if event.scaler is not None:
                yield Hit(event.node)


def _cleared_in_micro_steps(script: Script) -> Iterator[Hit]:
    for loop in script.loops:
        condition = accumulation(loop)
        if condition is None:
            continue
        for event in outside(loop, condition, Act.ZERO_GRAD):
            if not _is_before_first(event):
                yield Hit(event.node)


def _is_before_first(event: Event) -> bool:
    """Return True where a remainder of its own says when gradients are cleared."""
    return any("%" in each.test for each in event.conditions)


def _updated_between_steps(script: Script) -> Iterator[Hit]:
    for loop in script.loops:
        for update in loop.of(Act.UPDATE):
            steps = _like(update, loop.of(Act.SCALER_STEP))
            optimizers = {each.subject for each in steps if each.may_meet(update)}
            later = _like(update, loop.after(update, Act.UPDATE))
            again = any(each.loops == update.loops for each in later)
            if again and len(optimizers) > 1:
                yield Hit(update.node)


def _like(update: Event, events: list[Event]) -> list[Event]:
    """Return the events of the scaler that an event is of."""
    return [each for each in events if each.scaler == update.scaler]


def _scheduler_steps_always(script: Script) -> Iterator[Hit]:
    for loop in script.loops:
        for event in loop.of(Act.SCHEDULER_STEP):
            steps = loop.before(event, Act.SCALER_STEP)
            if getattr(event.node, "args", ()):
                continue  # it follows a metric, not the steps
            if not any(each.loops == event.loops for each in steps):
                continue
            if not _asks_for_skips(script, loop):
                yield Hit(event.node)


def _asks_for_skips(script: Script, loop: Loop) -> bool:
    """Return True where a script looks at the scale, or at what a step returned."""
    if script.method_calls("get_scale"):
        return True
    for step in loop.of(Act.SCALER_STEP):
        if not isinstance(script.parent(step.node), ast.Expr):
            return True
    return any("found_inf" in text for text in map(ast.unparse, _attributes(script)))


def _attributes(script: Script) -> list[ast.Attribute]:
    return [each for each in script.nodes(ast.Attribute) if "found_inf" in each.attr]


_SAVE = "torch.save"


def _saved_without_scaler(script: Script) -> Iterator[Hit]:
    if not script.calls(*SCALERS) or not script.calls(_SAVE):
        return
    if _states(script, Kind.SCALER):
        return
    scopes: set[ast.AST] = set()
    for call in _states(script, Kind.OPTIMIZER):
        scope = script.scope(call)
        if scope not in scopes:
            scopes.add(scope)
            yield Hit(_save_of(script, call), edits=_saved_too(script, call))


def _states(script: Script, kind: Kind) -> list[ast.Call]:
    """Return the calls of ``state_dict`` of one kind of object."""
    return [
        call
        for call in script.method_calls("state_dict")
        if isinstance(call.func, ast.Attribute)
        and script.things.kind(call.func.value) is kind
    ]


def _save_of(script: Script, state: ast.Call) -> ast.Call:
    """Return the ``torch.save`` that a state goes into, or else the state."""
    scope = script.scope(state)
    saves = [call for call in script.calls(_SAVE) if script.scope(call) is scope]
    around = [call for call in saves if call in script.ancestors(state)]
    return (around or saves or [state])[0]


def _saved_too(script: Script, call: ast.Call) -> tuple[Edit, ...]:
    """Return the fix: the scaler's state stands behind the optimizer's."""
    above = script.parent(call)
    if not isinstance(above, ast.Dict) or "scaler" in ast.unparse(above):
        return ()
    written = {
        ast.unparse(step.func.value)
        for step in script.method_calls("step")
        if isinstance(step.func, ast.Attribute)
        and script.things.kind(step.func.value) is Kind.SCALER
        and script.scope(step) is script.scope(call)
    }
    if len(written) != 1:
        return ()
    (scaler,) = written
    end = script.span(call)[1]
    return (Edit(end, end, f', "scaler": {scaler}.state_dict()'),)


def _scaler_without_fp16(script: Script) -> Iterator[Hit]:
    regions = _regions(script)
    formats = {region.format for region in regions if region.enabled is not False}
    if not formats or formats - {"bf16"}:
        return
    for call in script.calls(*SCALERS):
        enabled = _keyword(call, "enabled")
        if enabled is None or truth_of(script, enabled) is True:
            yield Hit(call)


def _regions(script: Script) -> list[Autocast]:
    expressions: list[ast.expr] = [
        item.context_expr for item in script.nodes(ast.withitem)
    ]
    for function in script.nodes(ast.FunctionDef):
        expressions.extend(function.decorator_list)
    regions = [autocast_of(script, each) for each in expressions]
    return [each for each in regions if each is not None]


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((each.value for each in call.keywords if each.arg == name), None)


def _half_model(script: Script) -> Iterator[Hit]:
    if not any(loop.of(Act.SCALER_STEP) for loop in script.loops):
        return
    for call in script.method_calls("half", "to"):
        if half_format(script, call) == "fp16" and is_trained(script, call):
            yield Hit(call)


def _out_of_order(script: Script) -> Iterator[Hit]:
    for loop in script.loops:
        for update in loop.of(Act.UPDATE):
            if _is_too_early(loop, update):
                yield Hit(update.node, _UPDATE_FIRST)
            elif _is_without_step(loop, update):
                yield Hit(update.node, _NO_STEP)
        for event in loop.of(Act.UNSCALE, Act.SCALER_STEP):
            if event.scaler is not None and event.subject is not None:
                message = _repeated(loop, event)
                if message is not None:
                    yield Hit(event.node, message)


def _repeated(loop: Loop, event: Event) -> str | None:
    """Return what is wrong where a call comes again before the scaler was updated."""
    if _since_update(loop, event, Act.SCALER_STEP):
        return _STEP_FIRST if event.act is Act.UNSCALE else _STEP_TWICE
    if event.act is Act.UNSCALE and _since_update(loop, event, Act.UNSCALE):
        return _UNSCALED_TWICE
    return None


_UPDATE_FIRST = (
    "the scaler updates before it steps: move `update()` behind the last `step()`"
)
_STEP_FIRST = (
    "`unscale_()` behind `step()` of the same optimizer raises a RuntimeError: move it "
    "in front"
)
_STEP_TWICE = (
    "the second `step()` of an optimizer before `update()` raises a RuntimeError: step "
    "it once, and update behind"
)
_UNSCALED_TWICE = (
    "the second `unscale_()` of an optimizer before `update()` raises a RuntimeError: "
    "unscale once"
)


_NO_STEP = (
    "`update()` in a micro-step in which the scaler did not step raises an "
    "AssertionError: put it behind `step()`, under the same condition"
)


def _is_without_step(loop: Loop, update: Event) -> bool:
    """Return True where the scaler steps in some micro-steps and updates in each."""
    condition = accumulation(loop)
    steps = [each for each in loop.of(Act.SCALER_STEP) if each.scaler == update.scaler]
    if condition is None or not steps or update.scaler is None:
        return False
    in_each = update in outside(loop, condition, Act.UPDATE)
    unscaled = outside(loop, condition, Act.UNSCALE)
    return in_each and not unscaled and all(condition in s.conditions for s in steps)


def _is_too_early(loop: Loop, update: Event) -> bool:
    """Return True where every step of a scaler comes behind its update."""
    if loop.before(update, Act.SCALER_STEP):
        return False
    return any(
        step.scaler == update.scaler and update.implies(step)
        for step in loop.after(update, Act.SCALER_STEP)
    )


def _since_update(loop: Loop, event: Event, act: Act) -> list[Event]:
    """Return events of the same optimizer before one, with no update between.

    Both happen in the same rounds of the same loops, and one call is no two.
    """
    updates = [each.order for each in loop.before(event, Act.UPDATE)]
    since = max(updates, default=-1)
    return [
        each
        for each in loop.before(event, act)
        if each.subject == event.subject
        and each.scaler == event.scaler
        and each.order > since
        and each.node is not event.node
        and each.loops == event.loops
    ]


def _with_closure(script: Script) -> Iterator[Hit]:
    keys = [_assigned_key(script, call) for call in script.calls("torch.optim.LBFGS")]
    lbfgs = {key for key in keys if key is not None}
    for loop in script.loops:
        for event in loop.of(Act.SCALER_STEP):
            is_lbfgs = event.subject is not None and event.subject.key in lbfgs
            if is_lbfgs or _has_closure(event.node):
                yield Hit(event.node)


def _has_closure(step: ast.AST) -> bool:
    if not isinstance(step, ast.Call):
        return False
    return len(step.args) > 1 or _keyword(step, "closure") is not None


def _assigned_key(script: Script, call: ast.Call) -> str | None:
    statement = script.statement(call)
    if isinstance(statement, ast.Assign) and statement.value is call:
        return script.things.key(statement.targets[0])
    return None


def _fp16_without_scaler(script: Script) -> Iterator[Hit]:
    if _has_scaler(script):
        return
    for loop in script.loops:
        if all(step.is_managed for step in loop.of(Act.STEP)):
            continue
        for event in loop.of(Act.BACKWARD):
            if not event.is_managed and _is_of_fp16(script, loop, event):
                yield Hit(event.node)


def _is_of_fp16(script: Script, loop: Loop, backward: Event) -> bool:
    """Return True where all models in front of a backward pass are called in fp16."""
    forwards = loop.before(backward, Act.FORWARD)
    regions = [autocasts(script, each.contexts) for each in forwards]
    entered = [each for each in regions if each is not None]
    low = [each for each in entered if each.enabled and each.format == "fp16"]
    return bool(entered) and len(low) == len(entered)


def _has_scaler(script: Script) -> bool:
    """Return True where anything in a script scales the loss."""
    names = [*script.imports, *script.imports.values()]
    if any("scaler" in name.lower() or "apex" in name for name in names):
        return True
    if script.calls(*SCALERS) or script.method_calls("unscale_"):
        return True
    scales = script.method_calls("scale")
    return any(
        script.things.kind(call.func.value) is Kind.SCALER
        for call in scales
        if isinstance(call.func, ast.Attribute)
    )


def _deprecated(script: Script) -> Iterator[Hit]:
    for call in script.calls("torch.cuda.amp.GradScaler", "torch.cpu.amp.GradScaler"):
        if is_for_old_torch(script, call, "GradScaler"):
            continue
        yield Hit(call, edits=_present_scaler(script, call))


def _present_scaler(script: Script, call: ast.Call) -> tuple[Edit, ...]:
    """Return the fix: ``torch.amp.GradScaler`` with its device, where torch is imported."""
    if "torch" not in script.imports or script.imports["torch"] != "torch":
        return ()
    device = (script.called(call) or "").split(".")[1]
    start = script.span(call.func)[1]
    rest = script.source[start : script.span(call)[1]].decode()
    if not rest.startswith("("):
        return ()
    comma = ", " if call.args or call.keywords else ""
    return (
        replaced(script, call.func, "torch.amp.GradScaler"),
        Edit(start + 1, start + 1, f'"{device}"{comma}'),
    )


_LOOP = """\
import torch

scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
"""
_STEP = """\
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
_ACCUMULATION = """\
import torch

scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y) / 4
    scaler.scale(loss).backward()
"""

RULES = (
    Rule(
        code="RO101",
        name="scaler-in-loop",
        message="the gradient scaler is made anew in the loop and its scale never adapts: make it once, before",
        why="A new scaler starts at 65536. It forgets which scale overflowed, so that the same steps are skipped "
        "again and again, and it never grows.",
        wrong="""\
import torch

for x, y in loader:
    scaler = torch.amp.GradScaler("cuda")
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
"""
        + _STEP,
        right=_LOOP + _STEP,
        check=made_in_loop,
    ),
    Rule(
        code="RO102",
        name="scaled-loss-bare-step",
        message="the loss is scaled and the optimizer steps by itself, whose gradients still have the scale: "
        "write `scaler.step(optimizer)`",
        why="The scaler divides the gradients by the scale when it steps. Without it an update of SGD is 65536 times "
        "too large, and nothing skips a step with Inf or NaN.",
        wrong=_LOOP
        + """\
    scaler.scale(loss).backward()
    optimizer.step()
    scaler.update()
""",
        right=_LOOP + _STEP,
        check=bare_steps,
    ),
    Rule(
        code="RO103",
        name="scaler-never-updated",
        message="the scaler steps and is never updated: call `scaler.update()` once an iteration, behind the last step",
        why="The second `step()` without an `update()` raises a RuntimeError, and the scale never adapts.",
        wrong=_LOOP
        + """\
    scaler.scale(loss).backward()
    scaler.step(optimizer)
""",
        right=_LOOP + _STEP,
        check=never_updated,
    ),
    Rule(
        code="RO104",
        name="clip-before-unscale",
        message="gradients are clipped or read while they have the loss scale: call `scaler.unscale_(optimizer)` first",
        why="A limit of 1 on gradients with a scale of 65536 is one of 1.5e-5 on the real ones: the measured update was "
        "1.5e-5 where it should have been 0.5, and no error says so.",
        wrong=_LOOP
        + """\
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
        right=_LOOP
        + """\
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
        check=read_before_unscaling,
    ),
    Rule(
        code="RO105",
        name="unscale-each-micro-step",
        message="gradients are unscaled in every micro-step and the optimizer steps in some: unscale only where it steps",
        why="The second `unscale_()` before an `update()` raises a RuntimeError; and gradients of the next micro-step, "
        "which are scaled, would be added to unscaled ones.",
        wrong=_ACCUMULATION
        + """\
    scaler.unscale_(optimizer)
    if (i + 1) % 4 == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
        right=_ACCUMULATION
        + """\
    if (i + 1) % 4 == 0:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
        check=_in_micro_steps,
    ),
    Rule(
        code="RO106",
        name="update-for-each-optimizer",
        message="the scaler is updated more than once an iteration: update it once, behind the step of the last optimizer",
        why="Each update counts as a good step, so that the scale grows twice as fast; and a loss scaled before an update "
        "is unscaled by another factor behind it.",
        wrong="""\
import torch

scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer_a.zero_grad()
    optimizer_b.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer_a)
    scaler.update()
    scaler.step(optimizer_b)
    scaler.update()
""",
        right="""\
import torch

scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer_a.zero_grad()
    optimizer_b.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer_a)
    scaler.step(optimizer_b)
    scaler.update()
""",
        check=_updated_between_steps,
    ),
    Rule(
        code="RO107",
        name="scheduler-ignores-skips",
        message="the schedule goes on where the scaler skipped the step: step it only if `scaler.get_scale()` has not "
        "become smaller",
        why="A step with Inf or NaN is skipped, as the first ones of most trainings are; PyTorch warns that the schedule "
        "steps before the optimizer, and the warm-up is shorter than was asked for.",
        wrong=_LOOP + _STEP + "    scheduler.step()\n",
        right=_LOOP
        + """\
    scale = scaler.get_scale()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= scale:
        scheduler.step()
""",
        check=_scheduler_steps_always,
    ),
    Rule(
        code="RO108",
        name="checkpoint-without-scaler",
        message="the checkpoint keeps the optimizer and not the scaler: save and load `scaler.state_dict()` too",
        why="A training that goes on from such a checkpoint starts again at 65536: it skips steps until the scale fits, "
        "and differs from one that was never interrupted.",
        wrong=_LOOP
        + _STEP
        + """\
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
torch.save(state, "last.pt")
""",
        right=_LOOP
        + _STEP
        + """\
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
state["scaler"] = scaler.state_dict()
torch.save(state, "last.pt")
""",
        check=_saved_without_scaler,
    ),
    Rule(
        code="RO109",
        name="scaler-without-fp16",
        message="a scaler is for fp16, and this script runs in bf16: leave it out, or make it with `enabled=False`",
        why="bf16 has the range of fp32, so that nothing underflows. The scaler is accepted silently, asks the device "
        "about Inf in each step, and may skip steps.",
        wrong="""\
import torch

scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = criterion(model(x), y)
"""
        + _STEP,
        right="""\
import torch

for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
""",
        check=_scaler_without_fp16,
    ),
    Rule(
        code="RO110",
        name="half-model-with-scaler",
        message="the weights are fp16 and a scaler trains them: keep them in fp32, and let autocast choose",
        why="The scaler refuses them with `Attempting to unscale FP16 gradients.`; and updates below half a unit in the "
        "last place of an fp16 weight are lost.",
        wrong="""\
import torch

model = torch.nn.Linear(4, 2).half()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
"""
        + _STEP,
        right="""\
import torch

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
"""
        + _STEP,
        check=_half_model,
    ),
    Rule(
        code="RO111",
        name="loss-not-scaled",
        message="the scaler steps with gradients of a loss that was not scaled: write `scaler.scale(loss).backward()`",
        why="The scaler divides the gradients by 65536 all the same, so that SGD hardly moves, and small gradients "
        "underflow in fp16 as without a scaler.",
        wrong=_LOOP
        + """\
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
""",
        right=_LOOP + _STEP,
        check=not_scaled,
    ),
    Rule(
        code="RO112",
        name="scaler-call-order",
        message="the calls of the scaler are out of order: `scale`, `unscale_`, `step`, `update`",
        why="Each raises a RuntimeError or an AssertionError in the first iteration.",
        wrong=_LOOP
        + """\
    scaler.scale(loss).backward()
    scaler.update()
    scaler.step(optimizer)
""",
        right=_LOOP + _STEP,
        check=_out_of_order,
    ),
    Rule(
        code="RO113",
        name="accumulation-not-divided",
        message="gradients of several micro-steps are added and the loss is not divided by their number: "
        "write `loss / steps`",
        why="The gradient is as many times larger as there are micro-steps, and the learning rate with it; the same script "
        "with one large batch trains otherwise.",
        wrong="""\
import torch

for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y)
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        right="""\
import torch

for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y) / 4
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        check=not_divided,
    ),
    Rule(
        code="RO114",
        name="cleared-each-micro-step",
        message="gradients are cleared in every micro-step and the optimizer steps in some: clear them only where it steps",
        why="Only the last micro-step of each group reaches the weights; the others are computed for nothing.",
        wrong="""\
import torch

for i, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    loss = criterion(model(x), y) / 4
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
""",
        right="""\
import torch

for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y) / 4
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        check=_cleared_in_micro_steps,
    ),
    Rule(
        code="RO115",
        name="deprecated-scaler",
        message='`torch.cuda.amp.GradScaler` is deprecated: write `torch.amp.GradScaler("cuda")`',
        why="It warns since PyTorch 2.4, and will go.",
        wrong=_LOOP.replace(
            'torch.amp.GradScaler("cuda")', "torch.cuda.amp.GradScaler()"
        )
        + _STEP,
        right=_LOOP + _STEP,
        check=_deprecated,
    ),
    Rule(
        code="RO116",
        name="scaler-with-closure",
        message="a scaler cannot step with a closure, nor LBFGS: train in fp32 or bf16, or use another optimizer",
        why="`scaler.step(optimizer, closure)` raises a RuntimeError: the closure would run again with scaled gradients.",
        wrong=_LOOP
        + """\
    scaler.scale(loss).backward()
    scaler.step(optimizer, closure)
    scaler.update()
""",
        right=_LOOP + _STEP,
        check=_with_closure,
    ),
    Rule(
        code="RO117",
        name="fp16-without-scaler",
        message="this trains in fp16 without a gradient scaler: use `torch.amp.GradScaler`, or bf16",
        why="Gradients below 6e-8 become zero in fp16, and their weights never change; bf16 has the range of fp32.",
        wrong="""\
import torch

for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
""",
        right=_LOOP + _STEP,
        check=_fp16_without_scaler,
    ),
)
