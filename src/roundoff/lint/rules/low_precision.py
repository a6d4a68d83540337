"""State, positions, constants and sums that do not fit into 16 bits."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from roundoff.lint.events import Act
from roundoff.lint.precision import Low, cast_of, constant_of, low_of
from roundoff.lint.rule import Edit, Hit, Rule
from roundoff.lint.script import Binding, Script
from roundoff.lint.tensors import (
    keyword_of,
    number,
    operation,
    operations,
    value_of,
    without_views,
)
from roundoff.lint.things import Kind

_LARGEST = 65504.0
#: Half of the smallest number of float16: what is below is rounded to 0.
_SMALLEST = 2.0**-25
_PLAIN = "torch.optim."
_WITH_EPS = {
    "torch.optim.Adam": 1e-8,
    "torch.optim.AdamW": 1e-8,
    "torch.optim.NAdam": 1e-8,
    "torch.optim.RAdam": 1e-8,
    "torch.optim.Adamax": 1e-8,
    "torch.optim.RMSprop": 1e-8,
    "torch.optim.Adagrad": 1e-10,
    "torch.optim.Adadelta": 1e-6,
}
#: From this learning rate on most updates are large enough for bfloat16 weights.
_FAST = 1e-2
_LOADS = ("from_pretrained", "from_config")


def _cast_models(script: Script) -> Iterator[tuple[str, Low, ast.Call]]:
    """Yield each model that is cast to 16 bits: its key, the format, the call."""
    things = script.things
    for call in script.nodes(ast.Call):
        low = cast_of(script, call)
        function = call.func
        if low is None or not isinstance(function, ast.Attribute):
            continue
        if function.attr in ("autocast", "auto_cast") or not _is_model(script, call):
            continue
        names = {things.key(function.value), *_keys_assigned(script, call)}
        for key in names - {None}:
            yield str(key), low, call


def _is_model(script: Script, call: ast.Call) -> bool:
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr in _LOADS:
        return True
    if script.called(call) is not None:
        return False
    receiver = function.value if isinstance(function, ast.Attribute) else None
    return script.things.kind(receiver) is Kind.MODEL


def _keys_assigned(script: Script, call: ast.Call) -> Iterator[str]:
    """Yield the keys of the names that hold what a call returns, moved or not."""
    node: ast.AST = call
    while True:
        above = script.parent(node)
        is_chain = isinstance(above, ast.Attribute) or (
            isinstance(above, ast.Call) and above.func is node
        )
        if above is None or not is_chain:
            break
        node = above
    if isinstance(above, ast.Assign):
        for target in above.targets:
            key = script.things.key(target)
            if key is not None:
                yield key


def _optimizers(script: Script) -> Iterator[tuple[ast.Call, str]]:
    """Yield calls that make an optimizer of torch, and the key of its model."""
    for call in script.nodes(ast.Call):
        name = script.called(call) or ""
        if not name.startswith(_PLAIN) or "lr_scheduler" in name or not call.args:
            continue
        key = _model_key(script, call.args[0])
        if key is not None:
            yield call, key


def _model_key(script: Script, parameters: ast.expr) -> str | None:
    """Return the key of the model of ``model.parameters()``."""
    for node in ast.walk(value_of(script, parameters) or parameters):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in ("parameters", "named_parameters"):
            return script.things.key(node.func.value)
    return None


def _low_optimizers(script: Script) -> Iterator[tuple[Low, ast.Call, ast.Call]]:
    """Yield format, cast and optimizer for each model that is trained in 16 bits."""
    trains = any(loop.of(Act.STEP, Act.SCALER_STEP) for loop in script.programs)
    if not trains or _has_adapters(script):
        return
    casts = list(_cast_models(script))
    for optimizer, key in _optimizers(script):
        for cast_key, low, cast in casts:
            if cast_key == key:
                yield low, cast, optimizer


def _has_adapters(script: Script) -> bool:
    """Return True where low-rank adapters are trained: the cast weights are not."""
    return script.uses("peft") or script.uses("loralib")


def _uses_scaler(script: Script) -> bool:
    return any(loop.of(Act.SCALER_STEP) for loop in script.programs)


def _plain_optimizer(script: Script) -> Iterator[Hit]:
    scaled = _uses_scaler(script)
    for low, cast, optimizer in _low_optimizers(script):
        if low is Low.HALF and (scaled or _vanishing_eps(script, optimizer)):
            continue
        rate = _rate(optimizer)
        if rate is None or rate < _FAST:
            yield Hit(cast)


def _rate(optimizer: ast.Call) -> float | None:
    rate = keyword_of(optimizer, "lr")
    if rate is None and len(optimizer.args) > 1:
        rate = optimizer.args[1]
    return number(rate)


def _half_eps(script: Script) -> Iterator[Hit]:
    if _uses_scaler(script):
        return
    for low, _, optimizer in _low_optimizers(script):
        if low is Low.HALF and _vanishing_eps(script, optimizer):
            yield Hit(optimizer)


def _vanishing_eps(script: Script, optimizer: ast.Call) -> bool:
    """Return True where an optimizer's eps is 0 in float16."""
    name = script.called(optimizer) or ""
    if name not in _WITH_EPS:
        return False
    eps = keyword_of(optimizer, "eps")
    value = _WITH_EPS[name] if eps is None else number(value_of(script, eps))
    return value is not None and value < _SMALLEST


def _low_positions(script: Script) -> Iterator[Hit]:
    for positions in operations(script, "arange"):
        if cast_of(script, positions.call) is not None:
            yield Hit(positions.call)
    for call in script.method_calls("half", "bfloat16", "to", "type"):
        if cast_of(script, call) is None:
            continue
        function = call.func
        receiver = function.value if isinstance(function, ast.Attribute) else None
        origin = operation(script, without_views(script, receiver))
        if origin is not None and origin.name == "arange":
            yield Hit(call)


def _unfit_constant(script: Script) -> Iterator[Hit]:
    yield from _unfit_fills(script)
    yield from _unfit_clamps(script)
    yield from _unfit_sums(script)
    for node in script.nodes(ast.BinOp):
        yield from _unfit_mask(script, node)


def _unfit_fills(script: Script) -> Iterator[Hit]:
    """``scores.masked_fill(mask, -1e9)`` in float16."""
    for fill in operations(script, "masked_fill", "masked_fill_"):
        value = fill.operands[-1] if len(fill.operands) > 2 else fill.keyword("value")
        if _is_too_large(script, value) and low_of(script, fill.first) is Low.HALF:
            edits = _finfo_edit(script, fill.first, value)
            yield Hit(fill.call, _TOO_LARGE, edits)


def _unfit_clamps(script: Script) -> Iterator[Hit]:
    """``x.clamp(min=1e-12)`` in float16."""
    for clamp in operations(script, "clamp", "clamp_", "clamp_min", "clamp_min_"):
        least = clamp.keyword("min")
        if least is None and len(clamp.operands) > 1:
            least = clamp.operands[1]
        if _is_too_small(script, least) and low_of(script, clamp.first) is Low.HALF:
            yield Hit(clamp.call, _TOO_SMALL)


def _unfit_mask(script: Script, node: ast.BinOp) -> Iterator[Hit]:
    """``scores + (1 - mask) * -1e9`` in float16."""
    if not isinstance(node.op, ast.Add | ast.Sub):
        return
    for tensor, mask in ((node.left, node.right), (node.right, node.left)):
        factor = value_of(script, mask)
        if not isinstance(factor, ast.BinOp) or not isinstance(factor.op, ast.Mult):
            continue
        sides = (factor.left, factor.right)
        is_large = any(_is_too_large(script, side) for side in sides)
        if is_large and low_of(script, tensor) is Low.HALF:
            yield Hit(node, _TOO_LARGE)


_TOO_LARGE = (
    "this number is beyond the range of float16, in which the tensor is: "
    "write torch.finfo(x.dtype).min"
)
_TOO_SMALL = "this number is 0 in float16, in which the tensor is: write 1e-4, or compute in float32"


def _finfo_edit(
    script: Script, tensor: ast.expr | None, value: ast.expr | None
) -> tuple[Edit, ...]:
    """Return the edit from ``-1e9`` to the least number of the tensor's own format."""
    written = number(value)
    if value is None or written is None or not isinstance(tensor, ast.Name):
        return ()
    start, end = script.span(value)
    edge = "min" if written < 0 else "max"
    return (Edit(start, end, f"torch.finfo({tensor.id}.dtype).{edge}"),)


def _unfit_sums(script: Script) -> Iterator[Hit]:
    """``x + 1e-12`` in float16."""
    for node in script.nodes(ast.BinOp):
        if not isinstance(node.op, ast.Add | ast.Sub):
            continue
        for tensor, value in ((node.left, node.right), (node.right, node.left)):
            if _is_too_small(script, value) and low_of(script, tensor) is Low.HALF:
                yield Hit(node, _TOO_SMALL)


def _is_too_large(script: Script, node: ast.expr | None) -> bool:
    value = constant_of(script, node)
    return value is not None and _LARGEST < abs(value) < float("inf")


def _is_too_small(script: Script, node: ast.expr | None) -> bool:
    value = constant_of(script, node)
    return value is not None and 0 < value < _SMALLEST


def _low_sums(script: Script) -> Iterator[Hit]:
    for add in script.nodes(ast.AugAssign):
        if _is_running_sum(script, add) and _is_low_buffer(script, add.target):
            yield Hit(add)
    for add_ in script.method_calls("add_", "lerp_"):
        if _is_low_average(script, add_):
            yield Hit(add_)
    for assign in script.nodes(ast.Assign):
        if _is_average(assign.value) and _holds_cast(script, assign.value):
            yield Hit(assign)


def _is_running_sum(script: Script, add: ast.AugAssign) -> bool:
    """Return True for ``total += x`` in a loop, and for ``self.total += x``."""
    is_kept = isinstance(add.target, ast.Attribute)
    is_repeated = is_kept or script.in_loop(add) is not None
    return isinstance(add.op, ast.Add) and is_repeated


def _is_low_buffer(script: Script, target: ast.expr) -> bool:
    """Return True for a sum that was made in 16 bits: ``torch.zeros(..., dtype=half)``."""
    calls = _made(script, target)
    return bool(calls) and all(cast_of(script, call) is not None for call in calls)


def _made(script: Script, target: ast.expr) -> list[ast.Call]:
    """Return the calls that a name or ``self.name`` is made by, sums onto it left out."""
    bindings = _bindings_of(script, target)
    values = [each.value for each in bindings if each.value is not None]
    calls = [value for value in values if isinstance(value, ast.Call)]
    return calls if len(calls) == len(values) else []


def _bindings_of(script: Script, target: ast.expr) -> Sequence[Binding]:
    """Return all that is bound to a name or to ``self.name``."""
    if isinstance(target, ast.Name):
        home = script.home(target)
        return () if home is None else script.bindings(home)[target.id]
    if isinstance(target, ast.Attribute):
        holder = script.class_of(target)
        return () if holder is None else script.bindings(holder).get(target.attr, ())
    return ()


def _is_low_average(script: Script, call: ast.Call) -> bool:
    """Return True for ``e.mul_(decay).add_(p.half(), alpha=1 - decay)``."""
    function = call.func
    if not isinstance(function, ast.Attribute) or not call.args:
        return False
    if not isinstance(call.args[0], ast.Call):
        return False
    if cast_of(script, call.args[0]) is None:
        return False
    before = operation(script, function.value)
    return function.attr == "lerp_" or (before is not None and before.name == "mul_")


def _is_average(node: ast.expr) -> bool:
    """Return True for ``a * decay + b * (1 - decay)``."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return False
    sides = (node.left, node.right)
    products = [each for each in sides if isinstance(each, ast.BinOp)]
    if len(products) < 2 or not all(isinstance(e.op, ast.Mult) for e in products):
        return False
    return any("1 - " in ast.unparse(each) for each in products)


def _holds_cast(script: Script, node: ast.expr) -> bool:
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    return any(cast_of(script, call) is not None for call in calls)


def _low_reductions(script: Script) -> Iterator[Hit]:
    for each in operations(script, "sum", "mean", "mse_loss"):
        if each.keyword("dtype") is not None:
            continue
        if each.name in ("sum", "mean") and not _is_square(script, each.first):
            continue
        if low_of(script, each.first) is Low.HALF:
            yield Hit(each.call)


def _is_square(script: Script, node: ast.expr | None) -> bool:
    value = value_of(script, node)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Pow):
        return True
    each = operation(script, value)
    return each is not None and each.name in ("pow", "square")


_LOOP = """\
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
"""

RULES = (
    Rule(
        code="RO301",
        name="low-precision-weights",
        message="most updates of weights in 16 bits are below half a unit in the last place and are "
        "lost: keep the weights in "
        "float32 under torch.autocast, or give the optimizer float32 copies",
        why="Of bfloat16 weights under AdamW, 62 % never change at a learning rate of 1e-3, 97.5 % at 1e-4, 99.7 % at 1e-5 "
        "(measured).",
        wrong="import torch\nfrom torch import nn\n\nmodel = nn.Linear(8, 2)\nmodel = model.to(torch.bfloat16)\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\n" + _LOOP,
        right="import torch\nfrom torch import nn\n\nmodel = nn.Linear(8, 2)\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\n"
        + _LOOP.replace(
            "    loss = criterion(model(x), y)\n",
            '    with torch.autocast("cuda", dtype=torch.bfloat16):\n        loss = criterion(model(x), y)\n',
        ),
        check=_plain_optimizer,
    ),
    Rule(
        code="RO302",
        name="eps-in-half",
        message="the optimizer's eps is 0 in float16: the first step divides by zero; keep the "
        "weights in float32, or eps=1e-4",
        why="float16 rounds 1e-8 to 0. The first step of Adam gives -Inf where the gradient is 1e-4 and NaN where it is 0 "
        "(measured).",
        wrong="import torch\nfrom torch import nn\n\nmodel = nn.Linear(8, 2).cuda().half()\n"
        "optimizer = torch.optim.Adam(model.parameters(), lr=0.01)\n" + _LOOP,
        right="import torch\nfrom torch import nn\n\nmodel = nn.Linear(8, 2).cuda()\n"
        "optimizer = torch.optim.Adam(model.parameters(), lr=0.01)\n" + _LOOP,
        check=_half_eps,
    ),
    Rule(
        code="RO303",
        name="positions-in-half",
        message="whole numbers are counted in 16 bits and neighbours become equal: keep positions in int64 or float32",
        why="Of 300 positions bfloat16 tells 279 apart, of 5000 float16 tells 3299 apart (measured).",
        wrong="import torch\n\npositions = torch.arange(length, dtype=torch.bfloat16)\n",
        right="import torch\n\npositions = torch.arange(length, dtype=torch.float32)\n",
        check=_low_positions,
    ),
    Rule(
        code="RO304",
        name="constant-beyond-half",
        message="this number does not fit into float16, in which the tensor is: take it from torch.finfo(x.dtype)",
        why="masked_fill(-1e9) of a float16 tensor raises, 1e10 becomes Inf, and 1e-8 is 0, so that it protects nothing "
        "(measured).",
        wrong="import torch\n\nscores = (q @ k).half()\nscores = scores.masked_fill(mask, -1e9)\n",
        right="import torch\n\nscores = (q @ k).half()\nscores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)\n",
        check=_unfit_constant,
    ),
    Rule(
        code="RO305",
        name="sum-in-half",
        message="a sum or a moving average in 16 bits stops growing: keep it in float32",
        why="4096 times 0.1 in bfloat16 is 32, not 410: from there on each addend is below half a unit in the last place "
        "(measured). An average with decay 0.999 never moves at all.",
        wrong="import torch\n\ntotal = torch.zeros((), dtype=torch.float16)\nfor x in loader:\n    "
        "total += model(x).sum()\n",
        right="import torch\n\ntotal = torch.zeros((), dtype=torch.float32)\nfor x in loader:\n    "
        "total += model(x).sum()\n",
        check=_low_sums,
    ),
    Rule(
        code="RO306",
        name="square-in-half",
        message="squares in float16 overflow from 256 on: call .float() before the reduction",
        why="256 squared is 65536, beyond float16's 65504: the mean squared error of values near 300 is Inf (measured).",
        wrong="import torch\n\nerror = (a - b).half().pow(2).mean()\n",
        right="import torch\n\nerror = (a - b).float().pow(2).mean()\n",
        check=_low_reductions,
    ),
)
