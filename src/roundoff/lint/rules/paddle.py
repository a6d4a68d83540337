"""Mixed precision in Paddle: the scaler, ``auto_cast``, and what never takes effect."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator

from roundoff.lint.contexts import Autocast, autocasts, text_of
from roundoff.lint.edits import line_after, replaced
from roundoff.lint.events import Act, Event, Loop
from roundoff.lint.rule import Edit, Hit, Rule
from roundoff.lint.rules.autocast import backward_inside
from roundoff.lint.rules.scaler_order import (
    bare_steps,
    made_in_loop,
    never_updated,
    not_scaled,
    read_before_unscaling,
)
from roundoff.lint.script import Script
from roundoff.lint.things import Kind

_FRAMEWORKS = ("paddle",)
_OLD = {
    "paddle.fluid.dygraph.AmpScaler": "paddle.amp.GradScaler",
    "paddle.fluid.dygraph.amp.AmpScaler": "paddle.amp.GradScaler",
    "paddle.amp.AmpScaler": "paddle.amp.GradScaler",
    "paddle.fluid.dygraph.amp_guard": "paddle.amp.auto_cast",
    "paddle.fluid.dygraph.amp.amp_guard": "paddle.amp.auto_cast",
    "paddle.amp.amp_guard": "paddle.amp.auto_cast",
}


def _never_cleared(script: Script) -> Iterator[Hit]:
    """An optimizer steps, and nothing clears its gradients."""
    clears = any(program.of(Act.ZERO_GRAD) for program in script.programs)
    if clears:
        return
    for loop in script.loops:
        steps = [
            step
            for step in loop.of(Act.STEP, Act.SCALER_STEP)
            if step.loops or loop.node is not script.tree
        ]
        if loop.of(Act.BACKWARD) and steps:
            yield Hit(steps[-1].node, edits=_clearing(script, steps[-1].node))


def _clearing(script: Script, node: ast.AST) -> tuple[Edit, ...]:
    """Return the fix: gradients are cleared behind the update, or else behind the step."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return ()
    holder = node.func.value
    if script.things.kind(holder) is Kind.SCALER:
        if not node.args:
            return ()
        optimizer = script.segment(node.args[0])
    else:
        optimizer = script.segment(holder)
    statement = script.statement(node)
    return line_after(script, statement, f"{optimizer}.clear_grad()")


def _not_decorated(script: Script) -> Iterator[Hit]:
    """Level O2 without ``decorate``."""
    if script.calls("paddle.amp.decorate", "paddle.amp.amp_decorate"):
        return
    for call in script.calls("paddle.amp.auto_cast"):
        level = next(
            (each.value for each in call.keywords if each.arg == "level"), None
        )
        if text_of(script, level) == "O2":
            yield Hit(call)


def _on_cpu(script: Script) -> Iterator[Hit]:
    """``auto_cast`` in a script that runs on the CPU."""
    devices = {
        text_of(script, call.args[0])
        for call in script.calls("paddle.set_device", "paddle.device.set_device")
        if call.args
    }
    if devices == {"cpu"}:
        for call in script.calls("paddle.amp.auto_cast"):
            yield Hit(call)


def _old_names(script: Script) -> Iterator[Hit]:
    for name, present in _OLD.items():
        for call in script.calls(name):
            text = f"`{name}` is of old Paddle: write `{present}`"
            yield Hit(call, text, _renamed(script, call, present))


def _renamed(script: Script, call: ast.Call, name: str) -> tuple[Edit, ...]:
    if script.imports.get("paddle") != "paddle":
        return ()
    return (replaced(script, call.func, name),)


def _without_scaler(script: Script) -> Iterator[Hit]:
    """fp16 without a scaler."""
    if any("scaler" in name.lower() for name in script.imports) or _scales(script):
        return
    for loop in script.loops:
        if not loop.of(Act.STEP):
            continue
        for event in loop.of(Act.BACKWARD):
            if _is_behind_fp16(script, loop, event):
                yield Hit(event.node)


def _is_behind_fp16(script: Script, loop: Loop, backward: Event) -> bool:
    """Return True where all that is cast before a backward pass is cast to fp16."""
    forwards = loop.before(backward, Act.FORWARD)
    regions = [autocasts(script, each.contexts) for each in forwards]
    entered = [each for each in regions if each is not None]
    return bool(entered) and all(map(_is_fp16, entered))


def _is_fp16(region: Autocast) -> bool:
    """Return True for a region that is on, in fp16, which is Paddle's default."""
    is_fp16 = region.format == "fp16" or not region.is_explicit
    return is_fp16 and region.enabled is True


def _scales(script: Script) -> bool:
    return bool(
        script.calls("paddle.amp.GradScaler", "paddle.amp.AmpScaler")
        or script.method_calls("scale")
    )


_LOOP = """\
import paddle

model = paddle.vision.models.resnet18()
optim = paddle.optimizer.SGD(parameters=model.parameters())
scaler = paddle.amp.GradScaler(init_loss_scaling=1024)
for x, y in loader:
    with paddle.amp.auto_cast():
        loss = paddle.nn.functional.cross_entropy(model(x), y)
"""
_STEP = """\
    scaled = scaler.scale(loss)
    scaled.backward()
    scaler.step(optim)
    scaler.update()
    optim.clear_grad()
"""


def _rule(
    code: str,
    name: str,
    message: str,
    why: str,
    wrong: str,
    check: Callable[[Script], Iterable[Hit]],
    right: str = _LOOP + _STEP,
) -> Rule:
    return Rule(code, name, message, why, wrong, right, check, _FRAMEWORKS)


RULES = (
    _rule(
        "RO801",
        "paddle-scaler-in-loop",
        "the scaler is made anew in the loop and its scale never adapts: make it once, before",
        "A new scaler starts at its first scale. It forgets which one overflowed, and never grows.",
        """\
import paddle

model = paddle.vision.models.resnet18()
optim = paddle.optimizer.SGD(parameters=model.parameters())
for x, y in loader:
    scaler = paddle.amp.GradScaler(init_loss_scaling=1024)
    with paddle.amp.auto_cast():
        loss = paddle.nn.functional.cross_entropy(model(x), y)
"""
        + _STEP,
        made_in_loop,
    ),
    _rule(
        "RO802",
        "paddle-scaled-loss-bare-step",
        "the loss is scaled and the optimizer steps by itself, with scaled gradients: write `scaler.step(optimizer)`",
        "Only `scaler.step` and `scaler.minimize` divide the gradients by the scale; without them an update of SGD is too "
        "large by the scale (1024 in the loop that is published most), and a step with Inf is taken.",
        _LOOP
        + """\
    scaled = scaler.scale(loss)
    scaled.backward()
    optim.step()
    scaler.update()
    optim.clear_grad()
""",
        bare_steps,
    ),
    _rule(
        "RO803",
        "paddle-scaler-never-updated",
        "the scaler steps and is never updated: call `scaler.update()` behind the step",
        "The second `step()` without an `update()` raises a RuntimeError, and the scale never adapts.",
        _LOOP
        + """\
    scaled = scaler.scale(loss)
    scaled.backward()
    scaler.step(optim)
    optim.clear_grad()
""",
        never_updated,
    ),
    _rule(
        "RO804",
        "paddle-loss-not-scaled",
        "the scaler steps with gradients of a loss that was not scaled: write `scaler.scale(loss).backward()`",
        "The scaler divides the gradients by its scale all the same, so that the weights hardly move.",
        _LOOP
        + """\
    loss.backward()
    scaler.step(optim)
    scaler.update()
    optim.clear_grad()
""",
        not_scaled,
    ),
    _rule(
        "RO805",
        "paddle-gradients-never-cleared",
        "gradients are never cleared: call `optimizer.clear_grad()` behind each step",
        "They add up over all iterations until they overflow: a reported loss scale fell to 0 that way.",
        _LOOP
        + """\
    scaled = scaler.scale(loss)
    scaled.backward()
    scaler.step(optim)
    scaler.update()
""",
        _never_cleared,
    ),
    _rule(
        "RO806",
        "paddle-clip-before-unscale",
        "gradients are clipped or read while they have the loss scale: call `scaler.unscale_(optimizer)` first",
        "A limit of 1 on gradients with a scale of 1024 is one of 0.001 on the real ones.",
        _LOOP
        + """\
    scaled = scaler.scale(loss)
    scaled.backward()
    paddle.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optim)
    scaler.update()
    optim.clear_grad()
""",
        read_before_unscaling,
        _LOOP
        + """\
    scaled = scaler.scale(loss)
    scaled.backward()
    scaler.unscale_(optim)
    paddle.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optim)
    scaler.update()
    optim.clear_grad()
""",
    ),
    _rule(
        "RO807",
        "paddle-backward-in-auto-cast",
        "the backward pass or the step stands inside `auto_cast`: only the forward pass and the loss belong there",
        "Operators of the backward pass run in the formats of their forward ones; inside the region those of the optimizer "
        "are cast too.",
        _LOOP
        + """\
        scaled = scaler.scale(loss)
        scaled.backward()
    scaler.step(optim)
    scaler.update()
    optim.clear_grad()
""",
        backward_inside,
    ),
    _rule(
        "RO808",
        "paddle-o2-not-decorated",
        'level O2 needs `paddle.amp.decorate(models=..., optimizers=..., level="O2")` before the loop',
        "Without it the weights stay in fp32 and are cast in each call, and the optimizer keeps no fp32 copy of them.",
        _LOOP.replace("auto_cast()", 'auto_cast(level="O2")') + _STEP,
        _not_decorated,
        _LOOP.replace("auto_cast()", 'auto_cast(level="O2")').replace(
            "scaler =",
            'model, optim = paddle.amp.decorate(models=model, optimizers=optim, level="O2")\nscaler =',
        )
        + _STEP,
    ),
    _rule(
        "RO809",
        "paddle-auto-cast-on-cpu",
        "`auto_cast` does nothing on a CPU: the script runs in fp32",
        "Paddle warns once that it works on GPU, XPU and custom devices only; the scaler is off as well.",
        _LOOP.replace("import paddle\n", 'import paddle\n\npaddle.set_device("cpu")', 1)
        + _STEP,
        _on_cpu,
    ),
    _rule(
        "RO810",
        "paddle-old-names",
        "a name of old Paddle: write `paddle.amp.GradScaler` and `paddle.amp.auto_cast`",
        "`paddle.fluid` is gone since Paddle 2.5.",
        _LOOP.replace("paddle.amp.GradScaler", "paddle.amp.AmpScaler") + _STEP,
        _old_names,
    ),
    _rule(
        "RO811",
        "paddle-fp16-without-scaler",
        'this trains in fp16 without a gradient scaler: use `paddle.amp.GradScaler`, or `dtype="bfloat16"`',
        "Gradients below 6e-8 become zero in fp16, and their weights never change.",
        """\
import paddle

model = paddle.vision.models.resnet18()
optim = paddle.optimizer.SGD(parameters=model.parameters())
for x, y in loader:
    with paddle.amp.auto_cast(dtype="float16"):
        loss = paddle.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optim.step()
    optim.clear_grad()
""",
        _without_scaler,
    ),
)
