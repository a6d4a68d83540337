"""Autocast in PyTorch: what stands inside it, for which device, in which format."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from roundoff.lint.contexts import (
    Autocast,
    argument,
    autocast_of,
    autocasts,
    format_of,
    text_of,
    without_gradients,
)
from roundoff.lint.edits import moved_out, replaced
from roundoff.lint.events import Act, Event, Loop
from roundoff.lint.rule import Edit, Hit, Rule
from roundoff.lint.rules.half_casts import half_format, is_trained
from roundoff.lint.rules.old_torch import is_for_old_torch
from roundoff.lint.script import Script
from roundoff.lint.things import Kind
from roundoff.ops import facts, operators_that

_AUTOCASTS = ("torch.autocast", "torch.cuda.amp.autocast", "torch.cpu.amp.autocast")
_BACKWARD = (Act.BACKWARD, Act.STEP, Act.SCALER_STEP)


# -- what stands inside ----------------------------------------------------------------


def backward_inside(script: Script) -> Iterator[Hit]:
    """Backward passes and steps inside an autocast region: the first of each region."""
    shown: set[ast.AST] = set()
    for loop in script.loops:
        for event in loop.of(*_BACKWARD):
            region = autocasts(script, event.contexts)
            if region is None or event.is_managed or region.enabled is False:
                continue
            holder = _with_around(script, event)
            if holder is None and not _is_decorated(event):
                continue
            place = holder or region.call
            if place not in shown:
                shown.add(place)
                yield Hit(event.node, edits=_moved(script, loop, event, holder))


def _with_around(script: Script, event: Event) -> ast.With | None:
    """Return the ``with autocast`` of the same function around an event."""
    for above in script.ancestors(event.node):
        if isinstance(above, ast.With):
            items = [item.context_expr for item in above.items]
            if any(script.things.kind(item) is Kind.AUTOCAST for item in items):
                return above
    return None


def _is_decorated(event: Event) -> bool:
    """Return True where autocast comes from a caller or a decorator."""
    return bool(event.contexts)


def _moved(
    script: Script, loop: Loop, event: Event, holder: ast.With | None
) -> tuple[Edit, ...]:
    """Return the fix: what stands in the region from the backward pass on moves out.

    None where a model or a loss is called behind it, or the region is more than autocast.
    """
    if holder is None or len(holder.items) != 1:
        return ()
    statement = script.statement(event.node)
    if statement not in holder.body or statement is holder.body[0]:
        return ()
    rest = holder.body[holder.body.index(statement) :]
    inside = set(map(id, rest))
    for each in loop.of(Act.FORWARD, Act.LOSS):
        above = script.ancestors(each.node)
        if any(id(node) in inside for node in above):
            return ()
    return moved_out(script, rest)


def cast_inside(script: Script) -> Iterator[Hit]:
    """Inputs that are cast by hand where autocast casts, and weights that lose fp32."""
    has_scaler = any(loop.of(Act.SCALER_STEP) for loop in script.loops)
    for call in script.method_calls("half", "bfloat16", "to"):
        if half_format(script, call) is None:
            continue
        if _is_input_inside(script, call):
            yield Hit(call, edits=_uncast(script, call))
        elif not has_scaler and is_trained(script, call) and _trains_inside(script):
            yield Hit(call)


def _is_input_inside(script: Script, call: ast.Call) -> bool:
    """Return True for the argument of a model inside autocast."""
    above = script.parent(call)
    if isinstance(above, ast.keyword):
        above = script.parent(above)
    is_argument = isinstance(above, ast.Call) and call is not above.func
    if not is_argument or not isinstance(above, ast.Call):
        return False
    if script.things.kind(above.func) is not Kind.MODEL:
        return False
    return region_around(script, call) is not None


def region_around(script: Script, node: ast.AST) -> Autocast | None:
    """Return the autocast region of the same function around a node, if it is on."""
    for above in script.ancestors(node):
        if isinstance(above, ast.With):
            items = [item.context_expr for item in above.items]
            if any(script.things.kind(item) is Kind.AUTOCAST for item in items):
                return autocasts(script, items)
        if isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef):
            return autocasts(script, above.decorator_list)
    return None


def _uncast(script: Script, call: ast.Call) -> tuple[Edit, ...]:
    """Return the fix: the input as it was."""
    function = call.func
    plain = isinstance(function, ast.Attribute) and (
        function.attr != "to" or len(call.args) + len(call.keywords) == 1
    )
    if not plain or not isinstance(function, ast.Attribute):
        return ()
    return (replaced(script, call, script.segment(function.value)),)


def _trains_inside(script: Script) -> bool:
    """Return True where a model is called in autocast on the way to a backward pass."""
    return any(
        autocasts(script, event.contexts) is not None
        for loop in script.loops
        for event in loop.of(Act.FORWARD)
    )


def _is_cast(operator: str) -> bool:
    """Return True for operators that autocast runs in 16 bits, or in fp32."""
    is_product = facts(operator).kind not in ("elementwise", "embedding")
    return is_product or operator in _CAST


_CAST = frozenset[str]().union(
    operators_that("exponentiate"),
    operators_that("take logarithms"),
    operators_that("take roots"),
    operators_that("add up terms"),
    ("cumprod", "prod", "reciprocal"),
)


def in_place_inside(script: Script) -> Iterator[Hit]:
    """In-place operators and ``out=``, which autocast passes by."""
    for call in script.nodes(ast.Call):
        name = script.called(call)
        if name is None:
            changes = _works_in_place(call) and not _is_quiet(script, call)
        else:
            changes = name.startswith("torch.") and _writes_out(call, name)
        if changes and region_around(script, call) is not None:
            yield Hit(call)


def _works_in_place(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return name.endswith("_") and _is_cast(name.removesuffix("_"))


def _writes_out(call: ast.Call, name: str) -> bool:
    has_out = any(keyword.arg == "out" for keyword in call.keywords)
    return has_out and _is_cast(name.rpartition(".")[2])


def _is_quiet(script: Script, call: ast.Call) -> bool:
    """Return True under ``no_grad``, and on what is fp32 by itself."""
    for above in script.ancestors(call):
        if isinstance(above, ast.With):
            items = [item.context_expr for item in above.items]
            if without_gradients(script, items):
                return True
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
    return isinstance(receiver, ast.Call) and isinstance(receiver.func, ast.Attribute)


def no_grad_first(script: Script) -> Iterator[Hit]:
    """A model under ``no_grad`` and then with gradients, in one autocast region."""
    for loop in script.loops:
        for first in loop.of(Act.FORWARD):
            is_quiet = without_gradients(script, first.contexts)
            if not is_quiet or not _is_cached(script, first):
                continue
            later = loop.after(first, Act.FORWARD)
            if any(_trains_same(script, first, each) for each in later):
                yield Hit(first.node)


def _trains_same(script: Script, first: Event, later: Event) -> bool:
    """Return True where a call trains the same model in the same autocast region."""
    if first.subject != later.subject or without_gradients(script, later.contexts):
        return False
    holder = _with_around(script, first)
    return holder is not None and _with_around(script, later) is holder


def _is_cached(script: Script, event: Event) -> bool:
    region = autocasts(script, event.contexts)
    if region is None or event.subject is None:
        return False
    cached = argument(script, region.call, "cache_enabled")
    return not (isinstance(cached, ast.Constant) and cached.value is False)


# -- device and format -----------------------------------------------------------------


def other_device(script: Script) -> Iterator[Hit]:
    """A model on one device, called in the autocast of another."""
    shown: set[ast.AST] = set()
    for program in script.programs:
        for event in program.of(Act.FORWARD):
            region = autocasts(script, event.contexts)
            if region is None or region.device is None or region.call in shown:
                continue
            device = _device_of(script, event)
            if device is not None and device != _type(region.device):
                shown.add(region.call)
                text = (
                    f"autocast is for {_type(region.device)} and the model is on {device}, where it does "
                    f'nothing: write `torch.autocast("{device}")`'
                )
                yield Hit(region.call, text)


def _type(device: str) -> str:
    return device.partition(":")[0]


def _device_of(script: Script, event: Event) -> str | None:
    """Return the device that a model is certainly on."""
    call = event.node
    function = call.func if isinstance(call, ast.Call) else None
    devices = {
        _device_of_call(script, move)
        for move in script.method_calls("cuda", "to", "cpu", "xpu", "npu")
        if isinstance(move.func, ast.Attribute)
        and _is_same_model(script, move, function)
    }
    if len(devices) != 1:
        return None
    return devices.pop()


def _is_same_model(script: Script, move: ast.Call, function: ast.expr | None) -> bool:
    """Return True where a move is of the model that is called, or makes it."""
    things = script.things
    key = things.key(function)
    if not isinstance(move.func, ast.Attribute) or key is None:
        return False
    if things.kind(move.func.value) is not Kind.MODEL:
        return False
    statement = script.statement(move)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return key in {things.key(each) for each in (move.func.value, *targets)}


def _device_of_call(script: Script, move: ast.Call) -> str | None:
    """Return the device of ``model.cuda()`` or ``model.to(...)``; None where it varies."""
    attribute = move.func.attr if isinstance(move.func, ast.Attribute) else ""
    if attribute != "to":
        return attribute
    for value in (*move.args, *(each.value for each in move.keywords)):
        if format_of(script, value) is None:
            device = text_of(script, value)
            return None if device is None else _type(device)
    return None


def fp16_on_cpu(script: Script) -> Iterator[Hit]:
    """fp16 in the autocast of a CPU."""
    for call in script.calls("torch.autocast", "torch.cpu.amp.autocast"):
        region = autocast_of(script, call)
        if region is not None and region.enabled is not False:
            device = region.device or ""
            if _type(device) == "cpu" and region.format == "fp16":
                yield Hit(call)


def other_format(script: Script) -> Iterator[Hit]:
    """A format that autocast does not know."""
    for call in script.calls(*_AUTOCASTS):
        region = autocast_of(script, call)
        if region is None or not region.is_explicit or region.enabled is False:
            continue
        if region.format in ("fp32", "fp64"):
            yield Hit(call)


def never_entered(script: Script) -> Iterator[Hit]:
    """An autocast that is made and not entered."""
    for call in script.calls(*_AUTOCASTS):
        if isinstance(script.parent(call), ast.Expr):
            yield Hit(call)
    for item in script.nodes(ast.withitem):
        name = script.qualified(item.context_expr)
        if name in _AUTOCASTS:
            yield Hit(item.context_expr)


# -- custom functions, evaluation, deprecated names ------------------------------------


def plain_function(script: Script) -> Iterator[Hit]:
    """A custom function used under autocast without ``custom_fwd`` and ``custom_bwd``."""
    regions = [_autocast_device(script, call) for call in script.calls(*_AUTOCASTS)]
    for definition in script.nodes(ast.ClassDef) if regions else ():
        if _is_custom_function(script, definition):
            bare = _bare_methods(definition)
            if bare:
                yield Hit(bare[0], edits=_decorated(script, bare, regions))


def _bare_methods(definition: ast.ClassDef) -> list[ast.FunctionDef]:
    """Return the methods that need a decorator, and have none."""
    functions = [each for each in definition.body if isinstance(each, ast.FunctionDef)]
    methods = {each.name: each for each in functions}
    if "setup_context" in methods or not _casts(functions):
        return []
    both = [methods[name] for name in ("forward", "backward") if name in methods]
    return [method for method in both if not _is_custom(method)]


def _is_custom_function(script: Script, definition: ast.ClassDef) -> bool:
    names = [script.qualified(base) for base in definition.bases]
    return any(
        name in ("torch.autograd.Function", "torch.autograd.function.Function")
        for name in names
    )


def _casts(methods: Iterable[ast.FunctionDef]) -> bool:
    """Return True where a method calls what autocast casts."""
    for method in methods:
        for node in ast.walk(method):
            if isinstance(node, ast.BinOp) and _is_product(node):
                return True
            function = node.func if isinstance(node, ast.Call) else None
            if isinstance(function, ast.Attribute) and _is_cast(function.attr):
                return True
    return False


def _is_product(node: ast.BinOp) -> bool:
    """Return True for a matrix product, a power, and a quotient of two tensors."""
    if isinstance(node.op, ast.Div):
        return not isinstance(node.right, ast.Constant)
    return isinstance(node.op, ast.MatMult | ast.Pow)


def _is_custom(method: ast.FunctionDef) -> bool:
    texts = [ast.unparse(each) for each in method.decorator_list]
    return any("custom_fwd" in text or "custom_bwd" in text for text in texts)


def _autocast_device(script: Script, call: ast.Call) -> str | None:
    region = autocast_of(script, call)
    return None if region is None else region.device


def _decorated(
    script: Script, methods: list[ast.FunctionDef], devices: list[str | None]
) -> tuple[Edit, ...]:
    """Return the fix: decorators of the one device that the script names."""
    if len(set(devices)) != 1 or devices[0] is None:
        return ()
    if script.imports.get("torch") != "torch":
        return ()
    edits = []
    for method in methods:
        name = "custom_fwd" if method.name == "forward" else "custom_bwd"
        text = f'@torch.amp.{name}(device_type="{_type(devices[0])}")'
        start = script.offset(method.lineno, method.col_offset)
        indent = " " * method.col_offset
        edits.append(Edit(start, start, f"{text}\n{indent}"))
    return tuple(edits)


def other_evaluation(script: Script) -> Iterator[Hit]:
    """A model that is trained in autocast and evaluated outside it, or the reverse."""
    trained = {
        (event.subject, autocasts(script, event.contexts) is not None)
        for loop in script.loops
        for event in loop.of(Act.FORWARD)
        if not without_gradients(script, event.contexts)
    }
    shown: set[ast.AST] = set()
    for event in _evaluations(script):
        if event.node in shown:
            continue
        low = autocasts(script, event.contexts) is not None
        is_alike = (event.subject, low) in trained
        if not is_alike and (event.subject, not low) in trained:
            shown.add(event.node)
            yield Hit(event.node, _OTHER_LOW if low else "")


def _evaluations(script: Script) -> Iterator[Event]:
    """Yield the forward passes of models that are evaluated."""
    for program in script.programs:
        for event in program.of(Act.FORWARD):
            if _evaluates(script, program, event):
                yield event


def _evaluates(script: Script, program: Loop, event: Event) -> bool:
    """Return True where a known model is called without gradients, in a loop of its own."""
    if event.subject is None or not event.loops:
        return False
    quiet = without_gradients(script, event.contexts)
    return quiet and not _trains_in(program, event)


_OTHER_LOW = "the model is evaluated in autocast and trained in fp32: enter the same autocast in both, or report both"


def _trains_in(program: Loop, event: Event) -> bool:
    """Return True where the innermost loop around an evaluation trains too."""
    innermost = event.loops[-1]
    return any(innermost in each.loops for each in program.of(Act.BACKWARD))


def deprecated_autocast(script: Script) -> Iterator[Hit]:
    """``torch.cuda.amp.autocast`` and ``torch.cpu.amp.autocast``."""
    for call in script.calls("torch.cuda.amp.autocast", "torch.cpu.amp.autocast"):
        if is_for_old_torch(script, call, "autocast"):
            continue
        yield Hit(call, edits=_present(script, call))


def _present(script: Script, call: ast.Call) -> tuple[Edit, ...]:
    """Return the fix: ``torch.autocast`` with its device, where torch is imported."""
    if script.imports.get("torch") != "torch":
        return ()
    device = (script.called(call) or "").split(".")[1]
    start = script.span(call.func)[1]
    opening = script.source[start : start + 1]
    if opening != b"(":
        return ()
    edits = [replaced(script, call.func, "torch.autocast")]
    comma = ", " if call.args or call.keywords else ""
    text = f'"{device}"{comma}'
    if call.args:  # the first was `enabled`, which has another place now
        if len(call.args) > 1:
            return ()
        text += "enabled="
    edits.append(Edit(start + 1, start + 1, text))
    return tuple(edits)


def apex(script: Script) -> Iterator[Hit]:
    """``apex.amp``, which is gone."""
    for statement in script.nodes(ast.ImportFrom, ast.Import):
        module = statement.module if isinstance(statement, ast.ImportFrom) else ""
        names = [alias.name for alias in statement.names]
        is_amp = module == "apex" and "amp" in names
        if is_amp or (module or "").startswith("apex.amp") or "apex.amp" in names:
            yield Hit(statement)


_IMPORT = "import torch\n\n"
_LOOP = """\
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
"""

RULES = (
    Rule(
        code="RO201",
        name="backward-in-autocast",
        message="the backward pass or the step stands inside autocast: only the forward pass and the loss belong there",
        why="Operators of the backward pass run in the formats of their forward ones; inside the region those that it "
        "calls anew, and an optimizer's own products, are cast again. Bad losses in bf16 were traced to that.",
        wrong=_IMPORT
        + """\
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
""",
        right=_IMPORT + _LOOP,
        check=backward_inside,
    ),
    Rule(
        code="RO202",
        name="cast-in-autocast",
        message="a cast to half by hand where autocast casts: leave inputs and weights in fp32",
        why="Weights in half lose every update below half a unit in their last place (in bf16 at a rate of 1e-3 62 % "
        "of them never changed in 20 steps); and inputs in half are rounded before operators that autocast keeps in fp32.",
        wrong=_IMPORT + _LOOP.replace("model(x)", "model(x.bfloat16())"),
        right=_IMPORT + _LOOP,
        check=cast_inside,
    ),
    Rule(
        code="RO203",
        name="autocast-other-device",
        message="autocast is for another device than the model is on, where it does nothing",
        why="Autocast casts the calls of its own device alone. The script runs in fp32, and nothing says so.",
        wrong="""\
import torch

model = torch.nn.Linear(4, 2).cuda()
with torch.autocast("cpu", dtype=torch.bfloat16):
    output = model(x)
""",
        right="""\
import torch

model = torch.nn.Linear(4, 2).cuda()
with torch.autocast("cuda", dtype=torch.bfloat16):
    output = model(x)
""",
        check=other_device,
    ),
    Rule(
        code="RO204",
        name="fp16-on-cpu",
        message="fp16 on a CPU is slower than fp32: use `torch.bfloat16`",
        why="Without instructions for fp16, which few CPUs have, a training step took 16 (GPT-2) and 32 (ResNet-18) times "
        "as long as in fp32; in bf16 0.37 and 0.74 times.",
        wrong="""\
import torch

with torch.autocast("cpu", dtype=torch.float16):
    output = model(x)
""",
        right="""\
import torch

with torch.autocast("cpu", dtype=torch.bfloat16):
    output = model(x)
""",
        check=fp16_on_cpu,
    ),
    Rule(
        code="RO205",
        name="no-grad-then-grad",
        message="the model runs under `no_grad`, then with gradients, in one autocast region: give each its own region",
        why="Autocast keeps the cast weights of a region. Before PyTorch 2.10 those cast under `no_grad` had no gradient, "
        "and the second call trained nothing, silently.",
        wrong=_IMPORT
        + """\
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        with torch.no_grad():
            before = model(x)
        loss = criterion(model(x + before), y)
    loss.backward()
    optimizer.step()
""",
        right=_IMPORT
        + """\
for x, y in loader:
    optimizer.zero_grad()
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        before = model(x)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = criterion(model(x + before), y)
    loss.backward()
    optimizer.step()
""",
        check=no_grad_first,
    ),
    Rule(
        code="RO206",
        name="function-without-custom-fwd",
        message="a custom function is used under autocast: decorate `forward` with `torch.amp.custom_fwd` and `backward` "
        "with `torch.amp.custom_bwd`",
        why="`backward` runs outside the region, with the formats that happen to arrive: what ran in fp32 in the forward "
        "pass may run in fp16 there, or raise for two formats.",
        wrong="""\
import torch


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        return gradient.mm(b.t()), a.t().mm(gradient)


with torch.autocast("cuda", dtype=torch.float16):
    output = Product.apply(x, y)
""",
        right="""\
import torch


class Product(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        return gradient.mm(b.t()), a.t().mm(gradient)


with torch.autocast("cuda", dtype=torch.float16):
    output = Product.apply(x, y)
""",
        check=plain_function,
    ),
    Rule(
        code="RO207",
        name="in-place-in-autocast",
        message="autocast passes in-place operators and `out=` by: write the operator that returns its result",
        why="They run in the formats of their operands: `exp_` of an fp16 tensor overflows above 11, where `exp` would "
        "have run in fp32, and `addmm_` raises for two formats.",
        wrong="""\
import torch

with torch.autocast("cuda", dtype=torch.float16):
    scores = model(x)
    scores.exp_()
""",
        right="""\
import torch

with torch.autocast("cuda", dtype=torch.float16):
    scores = model(x)
    scores = scores.exp()
""",
        check=in_place_inside,
    ),
    Rule(
        code="RO210",
        name="evaluation-not-in-autocast",
        message="the model is trained in autocast and evaluated in fp32: enter the same autocast in both, or report both",
        why="The metric is that of another network than the one that is trained, and that will be served.",
        wrong="""\
import torch

for epoch in range(3):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for x, y in test_loader:
            correct = (model(x).argmax(1) == y).sum()
""",
        right="""\
import torch

for epoch in range(3):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        for x, y in test_loader:
            correct = (model(x).argmax(1) == y).sum()
""",
        check=other_evaluation,
    ),
    Rule(
        code="RO209",
        name="deprecated-autocast",
        message='`torch.cuda.amp.autocast` is deprecated: write `torch.autocast("cuda")`',
        why="It warns since PyTorch 2.4, and will go.",
        wrong="""\
import torch

with torch.cuda.amp.autocast(dtype=torch.bfloat16):
    output = model(x)
""",
        right="""\
import torch

with torch.autocast("cuda", dtype=torch.bfloat16):
    output = model(x)
""",
        check=deprecated_autocast,
    ),
    Rule(
        code="RO208",
        name="apex-amp",
        message="`apex.amp` is gone: use `torch.autocast` and `torch.amp.GradScaler`",
        why="NVIDIA has removed it from Apex in favour of what PyTorch brings. `roundoff migrate --from apex` rewrites it.",
        wrong="""\
import torch
from apex import amp
""",
        right="""\
import torch
from torch import amp
""",
        check=apex,
    ),
    Rule(
        code="RO211",
        name="autocast-not-entered",
        message="autocast is made and not entered: write `with torch.autocast(...):` around the forward pass",
        why="Without `with` nothing is cast and the script runs in fp32; the class itself in `with` raises.",
        wrong="""\
import torch

torch.autocast("cuda", dtype=torch.bfloat16)
output = model(x)
""",
        right="""\
import torch

with torch.autocast("cuda", dtype=torch.bfloat16):
    output = model(x)
""",
        check=never_entered,
    ),
    Rule(
        code="RO212",
        name="autocast-to-fp32",
        message="autocast has no fp32: write `enabled=False`, or a format of 16 bits",
        why="It warns, and is switched off.",
        wrong="""\
import torch

with torch.autocast("cuda", dtype=torch.float32):
    output = model(x)
""",
        right="""\
import torch

with torch.autocast("cuda", enabled=False):
    output = model(x)
""",
        check=other_format,
    ),
)
