"""Advice on the input pipeline and on transfers: what makes the device wait."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from roundoff.lint.events import Act, Loop
from roundoff.lint.findings import Severity
from roundoff.lint.makers import makers
from roundoff.lint.modes import uses_gpu
from roundoff.lint.rule import Edit, Hit, Rule
from roundoff.lint.script import Script
from roundoff.lint.tensors import keyword_of, last_part, number
from roundoff.ops import operators_that

_LOADER = "torch.utils.data.DataLoader"
_IN_MEMORY = ("torch.utils.data.TensorDataset",)
#: Functions that make a tensor of a shape; those with ``_`` take a device from another.
_CONSTANT = [name for name in operators_that("create exactly") if "_" not in name]
_FACTORIES = (*sorted(_CONSTANT), "full", "arange", "linspace")
_RANDOM = tuple(
    name
    for name in sorted(operators_that("draw"))
    if name.startswith("rand") and "_" not in name
)
_READS = ("item", "tolist", "numpy")
_READERS = ("PIL.Image.open", "cv2.imread", "imageio.imread", "skimage.io.imread")
_WAITS = (*_READS, "cpu")
#: More than this many values that are waited for in each step are said.
_FEW_WAITS = 1


def _loaders(script: Script) -> list[ast.Call]:
    """Return the calls that make loaders with arguments that can be read."""
    return [
        call
        for call in script.calls(_LOADER)
        if not any(keyword.arg is None for keyword in call.keywords)
    ]


def _trains(script: Script) -> bool:
    return any(loop.of(Act.BACKWARD) for loop in script.programs)


def _no_workers(script: Script) -> Iterator[Hit]:
    if not uses_gpu(script) or not _trains(script):
        return
    for loader in _loaders(script):
        workers = keyword_of(loader, "num_workers")
        is_zero = workers is None or number(workers) == 0
        if is_zero and len(loader.args) < 6 and not _is_in_memory(script, loader):
            yield Hit(loader)


def _is_in_memory(script: Script, loader: ast.Call) -> bool:
    data = loader.args[0] if loader.args else keyword_of(loader, "dataset")
    calls = makers(script, data)
    return bool(calls) and all(script.called(call) in _IN_MEMORY for call in calls)


def _not_pinned(script: Script) -> Iterator[Hit]:
    if not uses_gpu(script) or not _trains(script) or not _moves(script):
        return
    for loader in _loaders(script):
        if len(loader.args) < 8 and not _is_pinned(loader):
            yield Hit(loader, edits=_pinned_edit(script, loader))


def _moves(script: Script) -> bool:
    return bool(script.method_calls("cuda", "to"))


def _is_pinned(loader: ast.Call) -> bool:
    pinned = keyword_of(loader, "pin_memory")
    if pinned is None:
        return False
    return not (isinstance(pinned, ast.Constant) and pinned.value is False)


def _pinned_edit(script: Script, loader: ast.Call) -> tuple[Edit, ...]:
    pinned = keyword_of(loader, "pin_memory")
    if pinned is not None:
        start, end = script.span(pinned)
        return (Edit(start, end, "True"),)
    arguments = [*loader.args, *(each.value for each in loader.keywords)]
    if not arguments:
        return ()
    _, end = script.span(max(arguments, key=lambda each: script.span(each)[1]))
    return (Edit(end, end, ", pin_memory=True"),)


def _waits_all_the_same(script: Script) -> Iterator[Hit]:
    loaders = script.calls(_LOADER)
    if not loaders or len(_loaders(script)) < len(loaders):
        return
    if any(map(_is_pinned, loaders)) or script.method_calls("pin_memory"):
        return
    for call in script.method_calls("cuda", "to"):
        option = keyword_of(call, "non_blocking")
        if isinstance(option, ast.Constant) and option.value is True:
            yield Hit(call)
            return


def _waits_in_loop(script: Script) -> Iterator[Hit]:
    if not uses_gpu(script):
        return
    for loop in script.loops:
        if not isinstance(loop.node, ast.For) or not loop.of(Act.BACKWARD):
            continue
        waits = _waits(script, loop)
        prints = [call for call in waits if _is_printed(script, call)]
        values = {ast.unparse(call.func) for call in waits}
        if len(values) > _FEW_WAITS or prints:
            yield Hit(waits[0])


def _waits(script: Script, loop: Loop) -> list[ast.Call]:
    """Return the calls that wait for the device in every round of a loop."""
    calls = []
    for call in script.method_calls(*_WAITS):
        if script.in_loop(call) is not loop.node or call.args:
            continue
        if not _is_conditional(script, call, loop.node):
            calls.append(call)
    calls = [call for call in calls if not _is_part_of(script, call, calls)]
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def _is_conditional(script: Script, call: ast.Call, loop: ast.AST) -> bool:
    for above in script.ancestors(call):
        if above is loop:
            return False
        if isinstance(above, ast.If | ast.IfExp | ast.Lambda | ast.ListComp):
            return True
    return True


def _is_part_of(script: Script, call: ast.Call, calls: list[ast.Call]) -> bool:
    """Return True for the ``cpu()`` of ``x.cpu().numpy()``, which is one wait."""
    above = set(script.ancestors(call))
    return any(other in above for other in calls if other is not call)


def _is_printed(script: Script, call: ast.Call) -> bool:
    for above in script.ancestors(call):
        if isinstance(above, ast.Call) and last_part(above) == "print":
            return True
        if isinstance(above, ast.stmt):
            return False
    return False


def _made_then_moved(script: Script) -> Iterator[Hit]:
    factories = [f"torch.{each}" for each in (*_FACTORIES, *_RANDOM)]
    for factory in script.calls(*factories):
        if keyword_of(factory, "device") is not None or not _is_repeated(
            script, factory
        ):
            continue
        attribute = script.parent(factory)
        move = None if attribute is None else script.parent(attribute)
        if not isinstance(attribute, ast.Attribute) or not isinstance(move, ast.Call):
            continue
        device = _device_of(script, attribute, move)
        if device is not None:
            yield Hit(move, edits=_device_edit(script, factory, move, device))


def _device_of(script: Script, attribute: ast.Attribute, move: ast.Call) -> str | None:
    """Return the text of the device that a tensor is moved to."""
    if attribute.attr == "cuda" and not move.args and not move.keywords:
        return '"cuda"'
    if attribute.attr != "to" or len(move.args) != 1 or move.keywords:
        return None
    return _device_text(script, move.args[0])


def _device_text(script: Script, argument: ast.expr) -> str | None:
    """Return the text of an argument that is a device by its look."""
    is_text = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    text = script.segment(argument)
    return text if is_text or "device" in text or text == "rank" else None


def _device_edit(
    script: Script, factory: ast.Call, move: ast.Call, device: str
) -> tuple[Edit, ...]:
    """Return the edit that makes the tensor there; none for random numbers, which would be
    others.
    """
    if (script.called(factory) or "").rpartition(".")[2] in _RANDOM:
        return ()
    start, end = script.span(move)
    text = script.segment(factory)
    if (
        not (factory.args or factory.keywords)
        or not text.endswith(")")
        or "," in text[-3:]
    ):
        return ()
    return (Edit(start, end, f"{text[:-1]}, device={device})"),)


def _is_repeated(script: Script, node: ast.AST) -> bool:
    """Return True in a loop, in a forward pass or in a step."""
    if script.in_loop(node) is not None:
        return True
    name = getattr(script.scope(node), "name", "")
    return name in ("forward", "training_step", "train_step")


def _adds_to_gradients(script: Script) -> bool:
    """Return True where the script itself computes with ``p.grad`` in place."""
    return any(
        isinstance(each.target, ast.Attribute) and each.target.attr == "grad"
        for each in script.nodes(ast.AugAssign)
    )


def _cleared_to_zero(script: Script) -> Iterator[Hit]:
    if _adds_to_gradients(script):
        return
    for call in script.method_calls("zero_grad"):
        option = keyword_of(call, "set_to_none")
        if isinstance(option, ast.Constant) and option.value is False:
            edits: tuple[Edit, ...] = ()
            if not call.args and len(call.keywords) == 1:
                _, start = script.span(call.func)
                _, end = script.span(call)
                edits = (Edit(start, end, "()"),)
            yield Hit(call, edits=edits)


def _element_by_element(script: Script) -> Iterator[Hit]:
    for loop in script.nodes(ast.For):
        if not isinstance(loop.target, ast.Name) or not _is_range(loop.iter):
            continue
        name = loop.target.id
        if any(_takes_element(call, name) for call in _items(script, loop)):
            yield Hit(loop)


def _is_range(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call) or last_part(node) != "range" or not node.args:
        return False
    text = ast.unparse(node.args[-1])
    return ".shape[" in text or ".size(" in text or text.startswith("len(")


def _items(script: Script, loop: ast.For) -> Iterator[ast.Call]:
    for call in script.method_calls("item"):
        if script.in_loop(call) is loop:
            yield call


def _takes_element(call: ast.Call, name: str) -> bool:
    """Return True for ``x[i].item()``."""
    function = call.func
    element = function.value if isinstance(function, ast.Attribute) else None
    if not isinstance(element, ast.Subscript):
        return False
    return any(
        isinstance(each, ast.Name) and each.id == name
        for each in ast.walk(element.slice)
    )


def _resized_each_time(script: Script) -> Iterator[Hit]:
    for function in script.nodes(ast.FunctionDef):
        if function.name != "__getitem__" or _keeps_results(function):
            continue
        resize = _resize_of_read(script, function)
        if resize is not None:
            yield Hit(resize)


def _resize_of_read(script: Script, function: ast.FunctionDef) -> ast.Call | None:
    """Return the first call that resizes, in a function that reads an image file."""
    calls = [each for each in ast.walk(function) if isinstance(each, ast.Call)]
    if not any(script.called(call) in _READERS for call in calls):
        return None
    return next((call for call in calls if _resizes(script, call)), None)


def _resizes(script: Script, call: ast.Call) -> bool:
    """Return True for ``cv2.resize(image)`` and ``image.resize()``."""
    name = script.called(call)
    return name == "cv2.resize" or (name is None and last_part(call) == "resize")


def _keeps_results(function: ast.FunctionDef) -> bool:
    text = ast.unparse(function).lower()
    return "cache" in text


_LOOP = """\
for x, y in loader:
    x = x.cuda(non_blocking=True)
    optimizer.zero_grad()
    loss = criterion(model(x), y.cuda(non_blocking=True))
    loss.backward()
    optimizer.step()
"""
_HEAD = "import torch\nfrom torch.utils.data import DataLoader\n\n"
_GOOD = "loader = DataLoader(data, batch_size=64, num_workers=4, pin_memory=True)\n"
_BLOCKING = _LOOP.replace("non_blocking=True", "")
_MADE = "    noise = torch.zeros(64, 8, device=device)\n"

RULES = (
    Rule(
        code="RO701",
        name="no-workers",
        message="batches are loaded while the device waits: give the loader num_workers",
        why="With num_workers=0 the training process itself reads and transforms each batch, and the GPU idles meanwhile.",
        wrong=_HEAD + _GOOD.replace("num_workers=4, ", "") + _LOOP,
        right=_HEAD + _GOOD + _LOOP,
        check=_no_workers,
        severity=Severity.ADVICE,
    ),
    Rule(
        code="RO702",
        name="not-pinned",
        message="batches go to the GPU from ordinary memory: give the loader pin_memory=True",
        why="The driver copies them into pinned memory first, and the script waits for that.",
        wrong=_HEAD + _GOOD.replace(", pin_memory=True", "") + _BLOCKING,
        right=_HEAD + _GOOD + _BLOCKING,
        check=_not_pinned,
        severity=Severity.ADVICE,
    ),
    Rule(
        code="RO703",
        name="non-blocking-waits",
        message="non_blocking=True does nothing here, since the loader's memory is not pinned: pin_memory=True",
        why="From ordinary memory a transfer is no background one: the call waits as it does without the option.",
        wrong="import torch\nfrom torch.utils.data import DataLoader\n\nloader = DataLoader(data, num_workers=4)\n"
        "for x in loader:\n    y = model(x.to(device, non_blocking=True))\n",
        right="import torch\nfrom torch.utils.data import DataLoader\n\nloader = DataLoader(data, "
        "num_workers=4, pin_memory=True)\n"
        "for x in loader:\n    y = model(x.to(device, non_blocking=True))\n",
        check=_waits_all_the_same,
        severity=Severity.ADVICE,
    ),
    Rule(
        code="RO704",
        name="waits-in-loop",
        message="each step waits for the device here: keep the values as tensors, and read them every so many steps",
        why="item(), cpu() and print() of a GPU tensor wait until everything before is computed, so that the next step is "
        "launched late.",
        wrong=_HEAD + _GOOD + _LOOP + "    print(loss.item())\n",
        right=_HEAD
        + _GOOD
        + _LOOP.replace("for x, y in loader", "for step, (x, y) in enumerate(loader)")
        + "    if step % 100 == 0:\n        print(loss.item())\n",
        check=_waits_in_loop,
        severity=Severity.ADVICE,
    ),
    Rule(
        code="RO705",
        name="made-then-moved",
        message="a tensor is made on the CPU and copied to the device each time: make it there with device=",
        why="The copy goes over the bus, and from ordinary memory it makes the script wait.",
        wrong="import torch\n\nfor x in data:\n"
        + _MADE.replace(", device=device)", ").to(device)"),
        right="import torch\n\nfor x in data:\n" + _MADE,
        check=_made_then_moved,
        severity=Severity.ADVICE,
    ),
    Rule(
        code="RO706",
        name="cleared-to-zero",
        message="set_to_none=False fills all gradients with zeros: leave it out",
        why="That is one pass over as much memory as the weights in each step, and backward() then "
        "adds to zeros where it could "
        "write.",
        wrong="import torch\n\noptimizer.zero_grad(set_to_none=False)\n",
        right="import torch\n\noptimizer.zero_grad()\n",
        check=_cleared_to_zero,
        severity=Severity.ADVICE,
    ),
    Rule(
        code="RO707",
        name="element-by-element",
        message="a Python loop takes a tensor's elements one by one: use one operator over all of them",
        why="Each item() costs microseconds on a CPU and a wait for the device on a GPU; bincount, "
        "scatter_add or a comparison "
        "do the same at once.",
        wrong="import torch\n\nfor i in range(labels.shape[0]):\n    counts[labels[i].item()] += 1\n",
        right="import torch\n\ncounts = torch.bincount(labels, minlength=10)\n",
        check=_element_by_element,
        severity=Severity.ADVICE,
    ),
    Rule(
        code="RO708",
        name="resized-each-time",
        message="each image is decoded in full and resized in every epoch: resize the files once, before training",
        why="Decoding takes time in proportion to the pixels; images stored at the size that is used "
        "are decoded several times "
        "faster.",
        wrong="import torch\nfrom PIL import Image\n\n\nclass Photos(torch.utils.data.Dataset):\n    "
        "def __getitem__(self, index):\n"
        "        return Image.open(self.paths[index]).resize((224, 224))\n",
        right="import torch\nfrom PIL import Image\n\n\nclass Photos(torch.utils.data.Dataset):\n    "
        "def __getitem__(self, index):\n"
        "        return Image.open(self.small_paths[index])\n",
        check=_resized_each_time,
        severity=Severity.ADVICE,
    ),
)
