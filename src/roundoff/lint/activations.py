"""What an expression is by the last layer that made it: logits, probabilities, their logs."""

from __future__ import annotations

import ast
import enum
from collections.abc import Iterable

from roundoff.lint.bindings import is_self
from roundoff.lint.containers import last_layer, part_of, replaced_head
from roundoff.lint.makers import makers
from roundoff.lint.script import Function, Script
from roundoff.lint.tensors import (
    SAME_VALUES,
    Operation,
    number,
    operation,
    sources,
)
from roundoff.lint.things import Kind


class Output(enum.Enum):
    """The range of an output, by its last layer."""

    SOFTMAX = "softmax"
    LOG_SOFTMAX = "log_softmax"
    SIGMOID = "sigmoid"
    LOGITS = "logits"


_FUNCTIONS = {
    "softmax": Output.SOFTMAX,
    "log_softmax": Output.LOG_SOFTMAX,
    "sigmoid": Output.SIGMOID,
    "expit": Output.SIGMOID,
    "logsigmoid": Output.LOG_SOFTMAX,
    "linear": Output.LOGITS,
}
_LAYERS = {
    "torch.nn.Softmax": Output.SOFTMAX,
    "torch.nn.Softmax2d": Output.SOFTMAX,
    "torch.nn.LogSoftmax": Output.LOG_SOFTMAX,
    "torch.nn.Sigmoid": Output.SIGMOID,
    "torch.nn.LogSigmoid": Output.LOG_SOFTMAX,
    "torch.nn.Linear": Output.LOGITS,
    "torch.nn.LazyLinear": Output.LOGITS,
    "torch.nn.Bilinear": Output.LOGITS,
    "torch.nn.Conv1d": Output.LOGITS,
    "torch.nn.Conv2d": Output.LOGITS,
    "torch.nn.Conv3d": Output.LOGITS,
    "torch.nn.ConvTranspose2d": Output.LOGITS,
}
#: Operators that leave an output what it is.
_KEEPS = SAME_VALUES | {"clamp", "clip", "clamp_min", "nan_to_num", "index"}
_WRAPPERS = (
    "torch.nn.DataParallel",
    "torch.nn.parallel.DataParallel",
    "torch.nn.parallel.DistributedDataParallel",
    "torch.distributed.fsdp.FullyShardedDataParallel",
    "torch.compile",
    "torch.jit.script",
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    "copy.deepcopy",
)
#: Which of several values: its place in a tuple, or its name in a dictionary.
_Place = int | str | None
_BASES = ("torch.nn.Module", "torch.nn.Sequential")
_DEEPEST = 10


def output_of(script: Script, node: ast.expr | None) -> Output | None:
    """Return what the values of an expression are; None where that is not certain.

    >>> script = Script("import torch; p = torch.softmax(x, -1).view(4, 2); y = loss(p)")
    >>> output_of(script, script.nodes(ast.Call)[-1].args[0])
    <Output.SOFTMAX: 'softmax'>
    """
    return _output(script, node, None, 0)


def _output(
    script: Script, node: ast.expr | None, element: _Place, depth: int
) -> Output | None:
    """``element`` is the place of the values where the expression is several."""
    if node is None or depth > _DEEPEST:
        return None
    if isinstance(node, ast.Tuple | ast.List):
        part = _of_several(node, element)
        return _output(script, part, None, depth + 1)
    if isinstance(node, ast.Subscript):
        return _of_subscript(script, node, element, depth)
    part = None if element is None else part_of(script, node, element)
    if part is not None:
        return _output(script, part, None, depth + 1)
    return _of_whole(script, node, element, depth)


def _of_whole(
    script: Script, node: ast.expr, element: _Place, depth: int
) -> Output | None:
    """Return the output of an expression of which no part can be taken."""
    if isinstance(node, ast.Attribute) and not is_self(node.value):
        return _of_field(script, node, depth)
    if isinstance(node, ast.Name | ast.Attribute):
        return _of_name(script, node, element, depth)
    if isinstance(node, ast.IfExp):
        branches = (node.body, node.orelse)
        return _common(script, [(branch, element) for branch in branches], depth)
    if isinstance(node, ast.Call):
        return _of_call(script, node, element, depth)
    if isinstance(node, ast.BinOp):
        return _of_arithmetic(script, node, depth)
    return None


def _of_several(node: ast.Tuple | ast.List, element: _Place) -> ast.expr | None:
    inside = isinstance(element, int) and element < len(node.elts)
    return node.elts[element] if inside and isinstance(element, int) else None


def _of_field(script: Script, node: ast.Attribute, depth: int) -> Output | None:
    """``outputs.logits``, of an object of this script or of a library's model."""
    output = _output(script, node.value, node.attr, depth + 1)
    return Output.LOGITS if output is None and node.attr == "logits" else output


def _of_arithmetic(script: Script, node: ast.BinOp, depth: int) -> Output | None:
    """A multiple is what its tensor is, and a mixture of probabilities is too."""
    if isinstance(node.op, ast.Mult | ast.Div):
        if number(node.left) is not None:
            return _output(script, node.right, None, depth + 1)
        if number(node.right) is not None:
            return _output(script, node.left, None, depth + 1)
    if isinstance(node.op, ast.Add):
        parts: list[tuple[ast.expr, _Place]] = [(node.left, None), (node.right, None)]
        mixture = _common(script, parts, depth)
        return mixture if mixture is Output.SOFTMAX else None
    return None


def _of_subscript(
    script: Script, node: ast.Subscript, element: _Place, depth: int
) -> Output | None:
    """``model(x)[0]`` is the first of several outputs, or rows of the only one."""
    index = node.slice
    if isinstance(index, ast.Constant) and isinstance(index.value, int):
        part = _output(script, node.value, index.value, depth + 1)
        if part is not None:
            return part
    if isinstance(index, ast.Constant) and isinstance(index.value, str):
        return _output(script, node.value, index.value, depth + 1)
    return _output(script, node.value, element, depth + 1)


def _of_name(
    script: Script,
    node: ast.Name | ast.Attribute,
    element: _Place,
    depth: int,
) -> Output | None:
    several: list[tuple[ast.expr, _Place]] = [
        (value, element if place is None else place)
        for value, place in sources(script, node)
        if value is not node
    ]
    return _common(script, several, depth)


def _common(
    script: Script, several: Iterable[tuple[ast.expr, _Place]], depth: int
) -> Output | None:
    """Return what all of several values are; None where they differ."""
    outputs = {_output(script, value, place, depth + 1) for value, place in several}
    return outputs.pop() if len(outputs) == 1 else None


def _of_call(
    script: Script, call: ast.Call, element: _Place, depth: int
) -> Output | None:
    each = operation(script, call)
    if each is not None:
        output = _of_operation(script, each, element, depth)
        if output is not None:
            return output
    return _of_layer_call(script, call, element, depth)


def _of_operation(
    script: Script, each: Operation, element: _Place, depth: int
) -> Output | None:
    if each.name in _FUNCTIONS:
        return _FUNCTIONS[each.name]
    if each.name in _KEEPS:
        return _output(script, each.first, element, depth + 1)
    inner = each.first
    if each.name == "log":
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Add):
            inner = inner.left
        output = _output(script, inner, element, depth + 1)
        is_share = output in (Output.SOFTMAX, Output.SIGMOID)
        return Output.LOG_SOFTMAX if is_share else None
    if each.name == "exp":
        output = _output(script, inner, element, depth + 1)
        return Output.SOFTMAX if output is Output.LOG_SOFTMAX else None
    return None


def _of_layer_call(
    script: Script, call: ast.Call, element: _Place, depth: int
) -> Output | None:
    """``self.head(x)``, ``model(x)``, ``nn.Softmax(dim=1)(x)``, a function of the script."""
    function = call.func
    if isinstance(function, ast.Name) and is_self(function):
        return _of_class(script, script.class_of(call), element, depth)
    if isinstance(function, ast.Attribute) and function.attr == "forward":
        function = function.value
    helper = script.function_of(call)
    if helper is not None:
        return _of_function(script, helper, element, depth)
    if script.called(call) is not None:
        return None
    several = _layers(script, function)
    if not several and script.things.kind(function) is Kind.MODEL:
        return _of_class(script, _only_model(script), element, depth)
    return _of_layers(script, several, element, depth)


def _of_layers(
    script: Script, several: Iterable[ast.Call], element: _Place, depth: int
) -> Output | None:
    """Return what all of several layers return; None where they differ."""
    outputs = {_of_layer(script, maker, element, depth + 1) for maker in several}
    return outputs.pop() if len(outputs) == 1 else None


def _layers(script: Script, function: ast.expr) -> list[ast.Call]:
    """Return the calls that made a layer or model, or the last layer that replaces its own."""
    several = makers(script, function)
    if several and all(_is_published(script, maker) for maker in several):
        head = replaced_head(script, function)
        return several if head is None else makers(script, head)
    return several


def _only_model(script: Script) -> ast.ClassDef | None:
    """Return the model that a caller elsewhere passes: the one that the script defines,
    where it defines one alone and never makes it.
    """
    things = script.things
    models = [
        each
        for each in script.nodes(ast.ClassDef)
        if any(script.qualified(base) in _BASES for base in each.bases)
    ]
    if len(models) != 1:
        return None
    is_called = any(
        things.script_class(call) is models[0] for call in script.nodes(ast.Call)
    )
    return None if is_called else models[0]


def _of_layer(
    script: Script, maker: ast.Call, element: _Place, depth: int
) -> Output | None:
    """Return what an object returns when it is called, by the call that made it."""
    if depth > _DEEPEST:
        return None
    name = script.called(maker)
    if name in _LAYERS:
        return _LAYERS[name]
    if name == "torch.nn.Sequential":
        last = makers(script, last_layer(script, maker))
        return _of_layers(script, last, None, depth)
    if name in _WRAPPERS and maker.args:
        return _of_layers(script, makers(script, maker.args[0]), element, depth)
    if name is not None and _is_published(script, maker):
        return Output.LOGITS if _ends_in_logits(name, maker) else None
    return _of_class(script, script.things.script_class(maker), element, depth)


def _ends_in_logits(name: str, maker: ast.Call) -> bool:
    """Return True for a published classifier: one output, and a last layer."""
    if name == "timm.create_model":
        return "num_classes=0" not in ast.unparse(maker)
    return not any(each in name for each in ("detection", "segmentation", "inception"))


def _is_published(script: Script, maker: ast.Call) -> bool:
    """Return True for a network of a library, which ends in a layer that is replaced."""
    name = script.called(maker) or ""
    return name.startswith(("torchvision.models.", "timm.create_model"))


def _of_class(
    script: Script, holder: ast.ClassDef | None, element: _Place, depth: int
) -> Output | None:
    forward = script.things.method(holder, "forward")
    if forward is None:
        return _of_inherited(script, holder, depth)
    return _of_function(script, forward, element, depth)


def _of_inherited(
    script: Script, holder: ast.ClassDef | None, depth: int
) -> Output | None:
    """Return what ``class Net(nn.Sequential)`` returns: what its last layer does."""
    bases = [] if holder is None else [script.qualified(each) for each in holder.bases]
    if "torch.nn.Sequential" not in bases:
        return None
    for call in script.method_calls("__init__"):
        inside = script.class_of(call) is holder and call.args
        if inside and ast.unparse(call.func) == "super().__init__":
            last = makers(script, last_layer(script, call))
            return _of_layers(script, last, None, depth + 1)
    return None


def _of_function(
    script: Script, function: Function, element: _Place, depth: int
) -> Output | None:
    """Return what a function returns, where all its returns agree."""
    values = script.things.returned(function)
    if any(
        isinstance(value, ast.Tuple) != isinstance(element, int) for value in values
    ):
        return None
    several: list[tuple[ast.expr, _Place]] = [(value, element) for value in values]
    return _common(script, several, depth + 1)
