"""From a call to what it does in training: an event, or none."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from roundoff.lint.events import Act, Event
from roundoff.lint.script import Script
from roundoff.lint.things import Kind, Thing
from roundoff.ops import operators_that

CLIPS = {
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grad_norm",
    "clip_grads_with_norm_",
}
#: Attributes of a gradient that say nothing of its values, or change it as a whole.
_LINEAR_METHODS = operators_that("describe tensors") | {"zero_", "detach_", "copy_"}
_LINEAR_METHODS |= {"dtype", "device", "is_sparse", "is_cuda", "register_hook"}
_LINEAR_METHODS |= operators_that("ask about values") | {"requires_grad_"}
_LINEAR_FUNCTIONS = {
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "isnan",
    "isinf",
    "isfinite",
    "append",
    "hasattr",
    "print",
}
_SAVES = {"torch.save", "paddle.save"}
_LOSS_FUNCTIONS = (
    "torch.nn.functional.cross_entropy",
    "torch.nn.functional.nll_loss",
    "torch.nn.functional.kl_div",
    "torch.nn.functional.binary_cross_entropy",
    "torch.nn.functional.binary_cross_entropy_with_logits",
    "torch.nn.functional.mse_loss",
    "torch.nn.functional.l1_loss",
    "torch.nn.functional.smooth_l1_loss",
    "torch.nn.functional.huber_loss",
    "paddle.nn.functional.cross_entropy",
)


def acts_of(script: Script, node: ast.AST) -> Iterator[Event]:
    """Yield what a call, an attribute or an assignment does in training."""
    if isinstance(node, ast.Assign):
        yield from _cleared(node)
    elif isinstance(node, ast.AugAssign):
        yield from _divided(node)
    elif isinstance(node, ast.Attribute):
        yield from _gradient(script, node)
    elif isinstance(node, ast.Call):
        yield from _of_call(script, node)


def _cleared(assign: ast.Assign) -> Iterator[Event]:
    """``p.grad = None``: the gradient is cleared."""
    value = assign.value
    is_none = isinstance(value, ast.Constant) and value.value is None
    targets = [each for each in assign.targets if isinstance(each, ast.Attribute)]
    if is_none and any(target.attr == "grad" for target in targets):
        yield Event(Act.ZERO_GRAD, assign, None)


def _divided(assign: ast.AugAssign) -> Iterator[Event]:
    """``p.grad /= scale``: the gradient is unscaled by hand."""
    target = assign.target
    is_factor = isinstance(assign.op, ast.Div | ast.Mult)
    if is_factor and isinstance(target, ast.Attribute) and target.attr == "grad":
        yield Event(Act.UNSCALE, assign, None)


def _gradient(script: Script, node: ast.Attribute) -> Iterator[Event]:
    """``p.grad`` where its value counts: not ``p.grad is None``, and not where a factor
    makes no difference, as in sums over ranks and tests for NaN.
    """
    if node.attr != "grad" or not isinstance(node.ctx, ast.Load):
        return
    if script.qualified(node) is not None:
        return
    above = script.parent(node)
    while isinstance(above, ast.Attribute) and above.attr in ("data", "grad"):
        above = script.parent(above)
    if isinstance(above, ast.Attribute) and above.attr in ("mul_", "div_"):
        yield Event(Act.UNSCALE, node, None)
    elif not _is_harmless(script, above):
        yield Event(Act.GRADIENT, node, None)


def _is_harmless(script: Script, user: ast.AST | None) -> bool:
    """Return True where a factor of the gradient makes no difference to what uses it."""
    if isinstance(user, ast.Compare | ast.BoolOp | ast.If | ast.UnaryOp | ast.Expr):
        return True
    if isinstance(user, ast.Attribute):
        return user.attr in _LINEAR_METHODS
    return isinstance(user, ast.Call) and _is_linear(script, user)


def _is_linear(script: Script, call: ast.Call) -> bool:
    """Return True for calls to which a factor of the gradient makes no difference."""
    name = script.called(call) or ast.unparse(call.func)
    return name.rpartition(".")[2] in _LINEAR_FUNCTIONS


def _of_call(script: Script, call: ast.Call) -> Iterator[Event]:
    name = script.called(call)
    if name is not None:
        yield from _of_function(script, call, name)
        return
    if isinstance(call.func, ast.Attribute):
        act = _METHODS.get(call.func.attr)
        if act is not None:
            yield from act(script, call, call.func.value)
            return
    yield from _of_object(script, call)


def _of_function(script: Script, call: ast.Call, name: str) -> Iterator[Event]:
    last = name.rpartition(".")[2]
    if last in CLIPS:
        yield Event(Act.CLIP, call, _owner(script, call))
    elif name in _SAVES:
        yield Event(Act.SAVE, call, None)
    elif name == "torch.autograd.backward":
        yield Event(Act.BACKWARD, call, None)
    elif name in _LOSS_FUNCTIONS:
        yield Event(Act.LOSS, call, None)
    elif name.startswith("torch_xla.") and last == "optimizer_step":
        subject = script.things.thing(call.args[0]) if call.args else None
        yield Event(Act.STEP, call, subject, is_managed=True)
    else:
        kind = script.things.kind(call)
        if kind in (Kind.SCALER, Kind.OPTIMIZER, Kind.SCHEDULER):
            yield Event(Act.CREATE, call, Thing(kind, f"new@{call.lineno}"))


def _owner(script: Script, call: ast.Call) -> Thing | None:
    """The model or optimizer whose gradients are clipped."""
    argument = call.args[0] if call.args else None
    while isinstance(argument, ast.Call) and isinstance(argument.func, ast.Attribute):
        argument = argument.func.value
    return script.things.thing(argument)


def _of_object(script: Script, call: ast.Call) -> Iterator[Event]:
    """``model(x)``, ``criterion(output, target)``."""
    kind = script.things.kind(call.func)
    subject = script.things.thing(call.func)
    if kind is Kind.MODEL or _is_own_forward(call.func):
        yield Event(Act.FORWARD, call, subject)
    elif kind is Kind.LOSS:
        yield Event(Act.LOSS, call, subject)


def _is_own_forward(function: ast.expr) -> bool:
    """``self(x)`` in a model."""
    return isinstance(function, ast.Name) and function.id == "self"


def scaler_of_loss(script: Script, loss: ast.expr | None) -> Thing | None:
    """Return the scaler of ``scaler.scale(loss)``, also where a name holds that."""
    seen = 0
    while isinstance(loss, ast.Name) and seen < 5:
        loss = script.definition(loss) or _scaled_somewhere(script, loss)
        seen += 1
    if not isinstance(loss, ast.Call) or not isinstance(loss.func, ast.Attribute):
        return None
    if loss.func.attr != "scale":
        return None
    scaler = script.things.thing(loss.func.value)
    return scaler if scaler is not None and scaler.kind is Kind.SCALER else None


def _scaled_somewhere(script: Script, name: ast.Name) -> ast.expr | None:
    """Return a ``scale(...)`` among the values of a name that a branch decides."""
    home = script.home(name)
    for binding in () if home is None else script.bindings(home)[name.id]:
        value = binding.value
        function = value.func if isinstance(value, ast.Call) else None
        if isinstance(function, ast.Attribute) and function.attr == "scale":
            return value
    return None


def _is_apex_loss(script: Script, loss: ast.expr) -> bool:
    """``with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()``."""
    if not isinstance(loss, ast.Name):
        return False
    home = script.home(loss)
    bindings = () if home is None else script.bindings(home)[loss.id]
    calls = [each.value for each in bindings if isinstance(each.value, ast.Call)]
    return any(ast.unparse(call.func).endswith("scale_loss") for call in calls)


def _backward(script: Script, call: ast.Call, receiver: ast.expr) -> Iterator[Event]:
    kind = script.things.kind(receiver)
    is_manual = (
        isinstance(call.func, ast.Attribute) and call.func.attr == "manual_backward"
    )
    takes_loss = bool(call.args) and kind in (Kind.MODEL, Kind.OPTIMIZER)
    managed = (
        kind is Kind.MANAGER
        or is_manual
        or takes_loss
        or _is_apex_loss(script, receiver)
    )
    scaler = scaler_of_loss(script, receiver)
    yield Event(Act.BACKWARD, call, None, scaler=scaler, is_managed=managed)


def _step(script: Script, call: ast.Call, receiver: ast.expr) -> Iterator[Event]:
    thing = script.things.thing(receiver)
    kind = None if thing is None else thing.kind
    argument = _first(call)
    if kind is Kind.SCALER and argument is not None:
        optimizer = script.things.thing(argument)
        yield Event(Act.SCALER_STEP, call, optimizer, scaler=thing)
    elif kind is Kind.SCHEDULER and len(call.args) < 2:
        yield Event(Act.SCHEDULER_STEP, call, thing)
    elif kind in (Kind.OPTIMIZER, Kind.MANAGER, Kind.MODEL):
        managed = kind is not Kind.OPTIMIZER
        yield Event(Act.STEP, call, thing, is_managed=managed)


def _unscale(script: Script, call: ast.Call, receiver: ast.expr) -> Iterator[Event]:
    scaler = script.things.thing(receiver)
    if scaler is not None and scaler.kind is Kind.SCALER:
        subject = script.things.thing(_first(call))
        yield Event(Act.UNSCALE, call, subject, scaler=scaler)


def _update(script: Script, call: ast.Call, receiver: ast.expr) -> Iterator[Event]:
    scaler = script.things.thing(receiver)
    if scaler is not None and scaler.kind is Kind.SCALER:
        yield Event(Act.UPDATE, call, scaler, scaler=scaler)


def _minimize(script: Script, call: ast.Call, receiver: ast.expr) -> Iterator[Event]:
    """Paddle's ``scaler.minimize(optimizer, scaled)`` steps and updates."""
    thing = script.things.thing(receiver)
    if thing is not None and thing.kind is Kind.SCALER:
        optimizer = script.things.thing(_first(call))
        yield Event(Act.SCALER_STEP, call, optimizer, scaler=thing)
        yield Event(Act.UPDATE, call, thing, scaler=thing)
    elif thing is not None and thing.kind is Kind.OPTIMIZER:
        yield Event(Act.STEP, call, thing)


def _zero_grad(script: Script, call: ast.Call, receiver: ast.expr) -> Iterator[Event]:
    yield Event(Act.ZERO_GRAD, call, script.things.thing(receiver))


def _clip(script: Script, call: ast.Call, receiver: ast.expr) -> Iterator[Event]:
    thing = script.things.thing(receiver)
    is_managed = thing is not None and thing.kind is Kind.MANAGER
    yield Event(Act.CLIP, call, thing, is_managed=is_managed)


def _eval(script: Script, call: ast.Call, receiver: ast.expr) -> Iterator[Event]:
    yield Event(Act.EVAL, call, script.things.thing(receiver))


def _train(script: Script, call: ast.Call, receiver: ast.expr) -> Iterator[Event]:
    argument = _first(call)
    off = isinstance(argument, ast.Constant) and argument.value is False
    act = Act.EVAL if off else Act.TRAIN
    if script.things.kind(receiver) is Kind.MODEL or not call.args:
        yield Event(act, call, script.things.thing(receiver))


def _save(script: Script, call: ast.Call, receiver: ast.expr) -> Iterator[Event]:
    yield Event(Act.SAVE, call, script.things.thing(receiver))


def _first(call: ast.Call) -> ast.expr | None:
    """Return the first argument, also where it has its name in front."""
    if call.args:
        return call.args[0]
    return call.keywords[0].value if call.keywords else None


_METHODS: dict[str, Callable[[Script, ast.Call, ast.expr], Iterator[Event]]] = {
    "backward": _backward,
    "manual_backward": _backward,
    "step": _step,
    "unscale_": _unscale,
    "unscale": _unscale,
    "update": _update,
    "minimize": _minimize,
    "zero_grad": _zero_grad,
    "clear_grad": _zero_grad,
    "clear_gradients": _zero_grad,
    "eval": _eval,
    "train": _train,
    "save_checkpoint": _save,
    **dict.fromkeys(CLIPS, _clip),
}
