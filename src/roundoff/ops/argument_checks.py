"""The arguments of a recorded call, held against the operator's schema and each other.

Most kernels check what they are given; those here read or write beyond the end of a
tensor where sizes or indices do not fit, or divide by zero. A call that a program has
made passes all of these checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from roundoff.ops.arguments import Keywords
from roundoff.ops.refusals import Refusal
from roundoff.ops.table import base, facts

#: A call's arguments by name, defaults of the schema included.
Values = Mapping[str, Any]

#: torch's own limit of dimensions is 64.
_MOST_NUMBERS = 64
_LONGEST_TEXT = 200
_LARGEST = 2**63
#: Kinds of devices whose tensors have values.
_DEVICES = frozenset("cpu cuda xpu mps npu mtia hpu maia privateuseone".split())


def check_arguments(func: OpOverload, args: Sequence[Any], kwargs: Keywords) -> None:
    """Raise ``Refusal`` where an argument is not of its type, or does not fit the others."""
    values = _bound(func, args, kwargs)
    for argument in func._schema.arguments:
        if argument.name in values:
            _check_type(argument, values[argument.name])
    rule = facts(base(func._schema.name.rpartition("::")[2])).sizes_like
    lists = _lists_of_tensors(func, values)
    if len(lists) > 1 and not _fits_as_lists(lists, rule == "fused step"):
        raise _does_not_fit("lists of tensors of other lengths or sizes")
    check = _CHECKS.get(rule or "")
    if check is None:
        return
    try:
        complaint = check(values)
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        complaint = f"{type(error).__name__}: {error}"
    if complaint is not None:
        raise _does_not_fit(complaint)


def depends_on_values(func: OpOverload) -> bool:
    """Return True where ``check_arguments`` reads values of tensors, not their sizes alone."""
    rule = facts(base(func._schema.name.rpartition("::")[2])).sizes_like
    return rule in _READ_INDICES


def _does_not_fit(complaint: str) -> Refusal:
    return Refusal(f"not run again: its arguments do not fit: {complaint}"[:300])


def _bound(func: OpOverload, args: Sequence[Any], kwargs: Keywords) -> dict[str, Any]:
    schema = func._schema.arguments
    names = [argument.name for argument in schema]
    if len(args) > len(names) or not set(kwargs) <= set(names):
        raise _does_not_fit("the operator has no such argument")
    values = {a.name: a.default_value for a in schema if a.has_default_value()}
    passed = dict(zip(names, args, strict=False)) | dict(kwargs)
    missing = [name for name in names if name not in values and name not in passed]
    if missing:
        raise _does_not_fit(f"no {missing[0]}")
    return values | passed


# -- types -----------------------------------------------------------------------------

_NUMBERS = (int, float, complex)
#: What JSON has for each type of a schema.
_TYPES: Mapping[str, tuple[type, ...]] = {
    "Tensor": (Tensor, *_NUMBERS),  # a number stands for a tensor of it
    # schemas call formats, layouts and orders of memory so too
    "int": (int, torch.dtype, torch.layout, torch.memory_format),
    "float": (int, float),
    "bool": (bool, int),
    "number": _NUMBERS,
    "str": (str,),
    "Device": (torch.device,),
    "Generator": (),
    "Storage": (),
    "Stream": (),
}


def _check_type(argument: Any, value: Any) -> None:
    text = str(argument.type)
    if value is None:
        if not text.startswith("Optional[") and not argument.has_default_value():
            raise _does_not_fit(f"{argument.name} is missing")
        return
    text = text.removeprefix("Optional[")
    if text.startswith("List["):
        _check_list(argument.name, text.removeprefix("List["), value)
        return
    _check_one(argument.name, text.rstrip("]"), value)


def _check_list(name: str, text: str, value: Any) -> None:
    kind = text.removeprefix("Optional[").rstrip("]")
    if not isinstance(value, list | tuple):
        value = [value]  # one number stands for a list of it
    if kind != "Tensor" and len(value) > _MOST_NUMBERS:
        raise _does_not_fit(f"{len(value)} numbers in {name}")
    for each in value:
        if each is not None or kind != "Tensor":
            _check_one(name, kind, each)


def _check_one(name: str, kind: str, value: Any) -> None:
    wanted = _TYPES.get(kind.replace("Sym", "").replace("Int", "int"))
    if wanted is not None and not isinstance(value, wanted):
        raise _does_not_fit(f"{name} is no {kind}")
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        raise _does_not_fit(f"{name} has more than 64 bits")
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        raise _does_not_fit(f"{name} is {len(value)} characters long")
    if isinstance(value, torch.device) and value.type not in _DEVICES:
        raise _does_not_fit(f"{name} is {value}")


# -- lists of tensors ------------------------------------------------------------------


def _lists_of_tensors(func: OpOverload, values: Values) -> list[list[Tensor]]:
    """Return the arguments that are lists of tensors, without the empty ones."""
    names = [a.name for a in func._schema.arguments if str(a.type) == "List[Tensor]"]
    lists = [values[name] for name in names]
    return [
        [each for each in tensors if isinstance(each, Tensor)]
        for tensors in lists
        if isinstance(tensors, list | tuple) and len(tensors)
    ]


def _fits_as_lists(lists: list[list[Tensor]], is_step: bool) -> bool:
    """Return True for lists of one length; of a fused step, with as many elements at each place."""
    if len({len(tensors) for tensors in lists}) > 1:
        return False
    if not is_step:
        return True
    places = zip(*lists, strict=True)
    return all(len({t.numel() for t in place} - {1}) <= 1 for place in places)


# -- sizes and indices -----------------------------------------------------------------


def _numel(value: Any) -> int | None:
    return None if value is None else int(value.numel())


def _batch_norm(values: Values) -> str | None:
    read = values["input"]
    if read.dim() < 2:
        return "an input without channels"
    channels = read.shape[1]
    names = ("weight", "bias", "running_mean", "running_var", "save_mean")
    for name in (*names, "save_invstd"):
        if _numel(values.get(name)) not in (None, channels, 0):
            return f"{name} has not one number for each channel"
    grad = values.get("grad_out")
    if grad is not None and grad.shape != read.shape:
        return "a gradient of another shape"
    return _saved(values)


def _saved(values: Values) -> str | None:
    """Say where the statistics that are read are not there."""
    is_backward = "grad_out" in values
    is_of_batch = values.get("train" if is_backward else "training", False)
    if is_of_batch and not is_backward:
        return None
    pair = ("save_mean", "save_invstd")
    names = pair if is_of_batch else ("running_mean", "running_var")
    missing = [name for name in names if not _numel(values.get(name))]
    return f"no {missing[0]}" if missing and values["input"].numel() else None


def _group_norm(values: Values) -> str | None:
    read = values["input"]
    samples = values["N"]
    channels = values["C"]
    groups = values["group"]
    if min(samples, channels, values["HxW"]) < 0 or groups < 1 or channels % groups:
        return "sizes or groups"
    if samples * channels * values["HxW"] != read.numel():
        return "sizes are not those of the input"
    for name in ("weight", "bias"):
        if _numel(values.get(name)) not in (None, channels):
            return f"{name} has not one number for each channel"
    if "grad_out" not in values:
        return None
    statistics = {values["mean"].numel(), values["rstd"].numel()}
    if values["grad_out"].numel() != read.numel() or statistics != {samples * groups}:
        return "a gradient, or statistics, of another size"
    return None


def _layer_norm(values: Values) -> str | None:
    read = values["input"]
    tail = list(values["normalized_shape"])
    if not tail or list(read.shape[-len(tail) :]) != tail:
        return "the normalized shape is not the input's"
    inner = math.prod(tail)
    for name in ("weight", "bias"):
        if _numel(values.get(name)) not in (None, inner):
            return f"{name} has another size than the normalized shape"
    if "grad_out" not in values:
        return None
    rows = math.prod(read.shape[: read.dim() - len(tail)])
    for name in ("mean", "rstd"):
        if _numel(values.get(name)) not in (None, rows):
            return f"{name} has not one number for each row"
    return "a gradient of another shape" if _other_shape(values, read) else None


def _other_shape(values: Values, read: Tensor) -> bool:
    return bool(values["grad_out"].shape != read.shape)


def _within(indices: Tensor, count: int, ignored: int | None = None) -> str | None:
    """Say where an index is none of ``count`` places."""
    if (
        indices.is_floating_point()
        or indices.is_complex()
        or indices.device.type == "meta"
    ):
        return "indices are no integers"
    outside = (indices < 0) | (indices >= count)
    if ignored is not None:
        outside &= indices != ignored
    return f"an index is not below {count}" if bool(outside.any()) else None


def _embedding_backward(values: Values) -> str | None:
    indices = values["indices"]
    grad = values["grad_output"]
    if grad.shape[: indices.dim()] != indices.shape or grad.dim() != indices.dim() + 1:
        return "a gradient of another shape than the indices"
    return _within(indices, values["num_weights"])


def _pool_backward(dimensions: int) -> Callable[[Values], str | None]:
    def check(values: Values) -> str | None:
        read = values["self"]
        indices = values["indices"]
        grad = values["grad_output"]
        if indices.shape != grad.shape or read.dim() != grad.dim():
            return "a gradient of another shape than the indices"
        if (
            read.dim() < dimensions
            or read.shape[:-dimensions] != grad.shape[:-dimensions]
        ):
            return "a gradient with other channels than the input"
        return _within(indices, math.prod(read.shape[-dimensions:]))

    return check


def _unpool(values: Values) -> str | None:
    size = list(values["output_size"])
    if values["self"].shape != values["indices"].shape or min(size) < 1:
        return "indices of another shape than the input"
    return _within(values["indices"], math.prod(size))


def _nll(values: Values) -> str | None:
    read = values["self"]
    target = values["target"]
    if not 1 <= read.dim() <= 4:
        return "an input without classes"
    axis = 0 if read.dim() == 1 else 1
    classes = read.shape[axis]
    expected = [*read.shape[:axis], *read.shape[axis + 1 :]]
    if list(target.shape) not in (expected, expected or [1]):
        return "targets of another shape than the input"
    if _numel(values["weight"]) not in (None, classes):
        return "weight has not one number for each class"
    grad = values.get("grad_output")
    if grad is not None and grad.numel() not in (1, target.numel()):
        return "a gradient of another shape"
    total = values.get("total_weight")
    if total is not None and total.numel() != 1:
        return "the total weight is not one number"
    return _within(target, classes, values["ignore_index"])


def _fourier(values: Values) -> str | None:
    read = values["self"]
    # the kernels read beyond a negative one
    axes = [axis for axis in values["dim"] if 0 <= axis < read.dim()]
    if not axes or len(set(axes)) != len(values["dim"]):
        return "axes that the input has not, or twice"
    if min(read.shape) < 1 or not 0 <= values["normalization"] <= 2:
        return "an empty input"
    last = values.get("last_dim_size")
    if last is None:
        return None
    return None if read.shape[axes[-1]] == last // 2 + 1 > 0 else "the last size"


def _weight_norm(values: Values) -> str | None:
    sizes = {values["g"].numel()}
    return _norms_of(values["v"], values["dim"], sizes)


def _weight_norm_backward(values: Values) -> str | None:
    weight = values["saved_v"]
    if values["grad_w"].shape != weight.shape:
        return "a gradient of another size"
    sizes = {values["saved_g"].numel(), values["saved_norms"].numel()}
    return _norms_of(weight, values["dim"], sizes)


def _norms_of(weight: Tensor, axis: int, sizes: set[int]) -> str | None:
    """The norms are one for each place of the first or the last axis."""
    if weight.dim() < 1 or axis not in (0, weight.dim() - 1):
        return "an axis that is neither the first nor the last"
    return None if sizes == {weight.shape[axis]} else "norms of another size"


def _same_shape(*names: str) -> Callable[[Values], str | None]:
    def check(values: Values) -> str | None:
        shapes = {tuple(values[name].shape) for name in names}
        return None if len(shapes) == 1 else f"{' and '.join(names)} differ in shape"

    return check


def _attention_backward(values: Values) -> str | None:
    query, key, value = (values[name] for name in ("query", "key", "value"))
    if not query.dim() == key.dim() == value.dim() == 4:
        return "operands that have not four axes"
    if values["out"].shape != values["grad_out"].shape:
        return "a gradient of another shape"
    rows = query.shape[:3]
    if values["out"].shape[:3] != rows or key.shape[:3] != value.shape[:3]:
        return "operands of other shapes"
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        return "operands of other shapes"
    if values["logsumexp"].numel() != math.prod(rows):
        return "sums of exponentials of another size"
    return None


#: Blocks of a weight by torch's number of the kind: an LSTM's, a GRU's.
_GATES = {2: 4, 3: 3}


def _mkldnn_rnn(values: Values) -> str | None:
    """One layer in one direction, of a network of one or several: gates of weights in rows.

    Its input is ``(sequence, batch, features)``, whatever ``batch_first`` says: the network
    has turned it before.
    """
    read = values["input"]
    hidden = values["hidden_size"]
    gates = _GATES.get(values["mode"], 1)
    if read.dim() != 3 or hidden < 1 or values["num_layers"] < 1:
        return "an input that has not three axes"
    samples = read.shape[1]
    shapes = {
        "weight0": (gates * hidden, read.shape[2]),
        "weight1": (gates * hidden, hidden),
    }
    for name, shape in shapes.items():
        if tuple(values[name].shape) != shape:
            return f"{name} of another shape"
    for name in ("hx_", "cx_"):
        if values[name].numel() != samples * hidden or not read.numel():
            return f"{name} of another size"
    biases = {values["weight2"].numel(), values["weight3"].numel()}
    if values["has_biases"] and biases != {gates * hidden}:
        return "biases of another size"
    return "packed sequences" if values["batch_sizes"] else None


def _fold(values: Values) -> str | None:
    """The columns of an image: as many rows and columns as the windows say."""
    read = values["self"]
    given = ("output_size", "kernel_size", "dilation", "padding", "stride")
    pairs = [list(values[name]) for name in given]
    if any(len(pair) != 2 for pair in pairs) or read.dim() not in (2, 3):
        return "windows of other than two axes"
    size, kernel, dilation, padding, stride = pairs
    if min(*size, *kernel, *dilation, *stride) < 1 or min(padding) < 0:
        return "windows without a size"
    places = 1
    for axis in range(2):
        reach = dilation[axis] * (kernel[axis] - 1) + 1
        room = size[axis] + 2 * padding[axis] - reach
        if room < 0:
            return "windows larger than the image"
        places *= room // stride[axis] + 1
    rows, columns = read.shape[-2:]
    if not rows or rows % math.prod(kernel) or columns != places:
        return "as many columns as windows have no place in the image"
    return None


def _packed(values: Values) -> str | None:
    """Rows with their lengths, from the longest to the shortest."""
    read = values["input"]
    if read.dim() < 2:
        return "an input without steps"
    samples, steps = read.shape[:2] if values["batch_first"] else read.shape[1::-1]
    return _lengths(values["lengths"], samples, steps)


def _lengths(lengths: Any, count: int, most: int, least: int = 1) -> str | None:
    given = torch.as_tensor(lengths)
    if given.shape != (count,):
        return "not one length for each sample"
    return _within(given - least, most + 1 - least)


def _bags(values: Values) -> str | None:
    """Rows of a table, in bags that begin where ``offsets`` say."""
    indices = values["indices"]
    starts = values["offsets"]
    table = values["weight"]
    if indices.dim() != 1 or starts.dim() != 1 or table.dim() != 2:
        return "bags of other than one axis"
    weights = values["per_sample_weights"]
    if weights is not None and weights.shape != indices.shape:
        return "not one weight for each index"
    ends = torch.cat([starts, starts.new_tensor([len(indices)])])
    if int(ends[0]) != 0 or bool((ends.diff() < 0).any()):
        return "bags that do not follow each other"
    return _within(indices, len(table))


def _bags_backward(values: Values) -> str | None:
    grad = values["grad"]
    indices = values["indices"]
    if grad.dim() != 2 or values["offset2bag"].numel() not in (0, len(indices)):
        return "a gradient of other bags"
    weights = values["per_sample_weights"]
    if weights is not None and weights.shape != indices.shape:
        return "not one weight for each index"
    takes_largest = values["mode"] == 2
    if takes_largest:
        if values["maximum_indices"].shape != grad.shape:
            return "the largest of other bags"
        indices = values["maximum_indices"]
        return _within(indices, values["num_weights"], -1)
    if values["bag_size"].numel() not in (0, len(grad)):
        return "sizes of other bags"
    return _within(values["offset2bag"], len(grad)) or _within(
        indices, values["num_weights"]
    )


def _labels(values: Values) -> str | None:
    """Labels of each sample, in rows or one after the other."""
    read = values["log_probs"]
    labels = values["targets"]
    if read.dim() != 3 or labels.dim() not in (1, 2):
        return "an input that has not three axes"
    steps, samples, classes = read.shape
    counts = torch.as_tensor(values["target_lengths"])
    most = labels.shape[-1]
    if not 0 <= values["blank"] < classes:
        return "blank is none of the classes"
    if labels.dim() == 2 and len(labels) != samples:
        return "not one row of labels for each sample"
    if labels.dim() == 1 and int(counts.sum()) != len(labels):
        return "lengths of other labels"
    unfit = _lengths(values["input_lengths"], samples, steps, 0)
    unfit = unfit or _lengths(counts, samples, most, 0)
    if unfit is None and labels.dim() == 2:  # what stands behind them is not read
        labels = labels[torch.arange(most) < counts.reshape(-1, 1)]
    return unfit or _within(labels, classes)


def _labels_backward(values: Values) -> str | None:
    unfit = _labels(values)
    if unfit is not None:
        return unfit
    steps, samples, _ = values["log_probs"].shape
    longest = int(torch.as_tensor(values["target_lengths"]).max())
    alphas = values["log_alpha"].shape
    if alphas[:2] != (samples, steps) or alphas[2] < 2 * longest + 1:
        return "another forward pass"
    losses = {values["grad"].numel(), values["neg_log_likelihood"].numel()}
    return None if losses == {samples} else "not one loss for each sample"


_CHECKS: Mapping[str, Callable[[Values], str | None]] = {
    "batch norm": _batch_norm,
    "group norm": _group_norm,
    "layer norm": _layer_norm,
    "embedding's gradient": _embedding_backward,
    "pool's gradient": _pool_backward(2),
    "volume pool's gradient": _pool_backward(3),
    "unpool": _unpool,
    "fold": _fold,
    "packed rows": _packed,
    "bags": _bags,
    "bags' gradient": _bags_backward,
    "labels": _labels,
    "labels' gradient": _labels_backward,
    "targets": _nll,
    "Fourier transform": _fourier,
    "weight norm": _weight_norm,
    "weight norm's gradient": _weight_norm_backward,
    "softmax's gradient": _same_shape("grad_output", "output"),
    "attention's gradient": _attention_backward,
    "recurrent layer": _mkldnn_rnn,
}

#: Checks of indices or targets.
_READ_INDICES = frozenset(
    (
        "embedding's gradient",
        "pool's gradient",
        "volume pool's gradient",
        "unpool",
        "targets",
        "packed rows",
        "bags",
        "bags' gradient",
        "labels",
        "labels' gradient",
    )
)
