"""Names, records and statistics of msprobe's dump.json as ``TensorRecord`` rows.

=========================  =============================================================
``Functional.linear.2.``   module ``""``, operator ``Functional::linear``, index 2.
``forward``                ``Aten.mm.0.*`` is ``mm``, as roundoff's own runs call it
the same, with a parent    the parent's module; index counts the calls in that module
in construct.json
``Module.blocks.0.Block.`` module ``blocks.0``, operator ``Block``, index 1
``forward.1``
its parameters             call -1, operator ``parameter``, role ``parameter``, as
                           roundoff calls them
``...parameters_grad.0``   the module's in phase backward, role ``grad``; places in the
                           order of names
parent ``optimizer``, or   phase ``optimizer``
called by it
``Distributed.*``          phase ``collective``
=========================  =============================================================

``place`` is the position in msprobe's list, as in its file names: ``output.2.pt`` is
place 2 although output 1 is None; keyword arguments follow the others. ``backward``
lists gradients in autograd's order, a weight's may be transposed.

msprobe computes statistics in the tensor's own dtype, over all elements, and counts
nothing. Counts are set where the extremes prove them. Where an extreme is NaN or
infinite there is at least one such element: the count is then 1 and the ``reason`` says
that there may be more, and those of ``min``, ``max``, ``mean`` and ``l2`` that are not
finite are null, as the values of the finite elements alone are unknown. An infinite
norm of finite elements (float16) is null too.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from roundoff.record.disk.schema import TensorRecord

_API = re.compile(
    r"([A-Za-z0-9_]+)\.(.+)\.([0-9]{1,18})\.(forward|backward)", re.DOTALL
)
_MODULE = re.compile(
    r"(?:Module|Cell)\.(?:(.+)\.)?([^.]+)\."
    r"(forward|backward|parameters_grad)\.([0-9]{1,18})",
    re.DOTALL,
)
_FRAME = re.compile(r"File (.+), line ([0-9]+), in ([^,]*),", re.DOTALL)
_DIRECTION = re.compile(r"\.(forward|backward|parameters_grad)(?=\.[0-9]+$|$)")
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/", re.DOTALL)
_LIBRARIES = ("torch/", "torch_npu/", "msprobe/")
_INPLACE = re.compile(
    r".*[^_]_|"
    r"__i(?:add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__"
)
_ROLES = {
    "input_args": "input",
    "input_kwargs": "input",
    "input": "input",
    "parameters": "parameter",
    "output": "output",
}
_NO_TENSOR = "no tensor among its results"
_AT_LEAST = (
    "at least one NaN or Inf: msprobe doesn't count them, and measures the others "
    "with them"
)
_NOT_KEPT = "-1"  # msprobe's data_name of a tensor that it could not write


class DumpedCall(NamedTuple):
    """Which call a name of msprobe's means.

    ``kind``: forward | backward | parameters_grad.
    """

    phase: str
    module: str
    operator: str
    number: int
    kind: str
    inplace: bool

    @property
    def key(self) -> tuple[str, str, str]:
        """Equal for calls that are counted together: a backward call has the index of
        its forward call."""
        phase = "" if self.phase == self.kind else self.phase
        return phase, self.module, self.operator


class CallOrigin(NamedTuple):
    """The user's source line of a call; ``optimizer``: an optimizer made it."""

    line: str | None
    optimizer: bool


class DumpedTensor(NamedTuple):
    """One tensor of a call; ``content`` is what the dump says of it, None for a call
    without a tensor among its results."""

    role: str
    place: int
    parameter: str | None
    content: dict[str, Any] | None


class DumpedStatistics(NamedTuple):
    """The statistics of ``TensorRecord``, as far as a dump proves them."""

    min: float | None = None
    max: float | None = None
    mean: float | None = None
    l2: float | None = None
    std: float | None = None
    nan: int | None = None
    posinf: int | None = None
    neginf: int | None = None
    zero: int | None = None
    reason: str | None = None


def origins(stack: dict[str, Any]) -> dict[str, CallOrigin]:
    """Name without its direction -> where it was called, from stack.json's content.

    The line is the innermost one outside torch and msprobe; below the folder of the
    script that was run by its path from there, in an installed package by its path in
    it.
    """
    origin_of = {}
    for names, frames in stack.values():
        matches = [_FRAME.match(frame) for frame in frames]
        places = [match for match in matches if match is not None]
        by_optimizer = any("/torch/optim/" in place[1] for place in places)
        origin = CallOrigin(_user_line(places), by_optimizer)
        origin_of.update({_undirected(name): origin for name in names})
    return origin_of


def _user_line(places: list[re.Match[str]]) -> str | None:
    user = [p for p in places if not _in_package(p[1]).startswith(_LIBRARIES)]
    if not user:
        return None
    script = user[-1][1] if user[-1][3] == "<module>" else ""
    path = _in_package(user[0][1]).removeprefix(os.path.dirname(script) + "/")
    return f"{path}:{user[0][2]}"


def _in_package(path: str) -> str:
    """Return the path without the folder of installed packages."""
    match = _PACKAGES.match(path)
    return path[match.end() :] if match else path


def parents(construct: dict[str, Any]) -> dict[str, str | None]:
    """Name -> path of the module that called it, from construct.json's content.

    "optimizer" for the optimizer.
    """
    return {name: _parent_path(parent) for name, parent in construct.items()}


def _parent_path(parent: Any) -> str | None:
    if isinstance(parent, list):
        parent = parent[0]
    match = _MODULE.fullmatch(parent or "")
    if match:
        return match[1] or ""
    return "optimizer" if parent == "optimizer" else None


def records(
    data: dict[str, Any],
    origin_of: dict[str, CallOrigin],
    parent_of: dict[str, str | None],
    *,
    rank: int,
    step: int,
) -> list[TensorRecord]:
    """Return the rows of the records under "data" of a dump.json, in its order.

    Raises whatever a malformed record leads to.
    """
    calls = {name: _call(name, origin_of, parent_of) for name in data}
    index_of = _indices(calls, parent_of)
    rows: list[TensorRecord] = []
    for number, (name, content) in enumerate(data.items()):
        call = calls[name]
        tensors = list(_tensors(call, content))
        group = _group(content)
        origin = origin_of.get(_undirected(name))
        line = origin.line if origin else None
        inputs: list[int] = []
        for tensor in tensors:
            is_parameter = tensor.role == "parameter"
            is_output = tensor.role == "output"
            if tensor.role == "input":
                inputs.append(len(rows))
            rows.append(
                TensorRecord(
                    rank=rank,
                    step=step,
                    record=len(rows),
                    call=-1 if is_parameter else number,
                    phase=call.phase,
                    module=call.module,
                    operator="parameter" if is_parameter else call.operator,
                    index=index_of[name],
                    place=tensor.place,
                    role=tensor.role,
                    name=_full_name(call.module, tensor.parameter),
                    line=line,
                    inputs=inputs if is_output else None,
                    inplace=call.inplace and is_output,
                    group=group,
                    **_tensor_columns(tensor.content),
                )
            )
    return rows


def _full_name(module: str, parameter: str | None) -> str | None:
    if parameter is None or not module:
        return parameter
    return f"{module}.{parameter}"


def _call(
    name: str,
    origin_of: Mapping[str, CallOrigin],
    parent_of: Mapping[str, str | None],
) -> DumpedCall:
    module = _MODULE.fullmatch(name)
    if module:
        kind = module[3]
        phase = "forward" if kind == "forward" else "backward"
        return DumpedCall(
            phase, module[1] or "", module[2], int(module[4]), kind, False
        )
    api = _API.fullmatch(name)
    if api is None:
        # nothing is left out: a name of a later msprobe stands for itself
        phase = "backward" if "backward" in name else "forward"
        return DumpedCall(phase, "", name, 0, phase, False)
    return _api_call(name, api, origin_of, parent_of)


def _api_call(
    name: str,
    api: re.Match[str],
    origin_of: Mapping[str, CallOrigin],
    parent_of: Mapping[str, str | None],
) -> DumpedCall:
    prefix, operator, number, kind = api.groups()
    path = parent_of.get(name)
    phase = "collective" if prefix == "Distributed" else kind
    origin = origin_of.get(_undirected(name))
    if path == "optimizer" or (origin is not None and origin.optimizer):
        phase = "optimizer"
        path = None
    inplace = kind == "forward" and _INPLACE.fullmatch(operator) is not None
    full = operator if prefix == "Aten" else f"{prefix}::{operator}"
    return DumpedCall(phase, path or "", full, int(number), kind, inplace)


def _indices(
    calls: Mapping[str, DumpedCall], parent_of: Mapping[str, str | None]
) -> dict[str, int]:
    """Return how often each was called before.

    msprobe numbers the calls of an API through the whole step; where the calling
    modules are known, the calls of each module are counted.
    """
    numbers: dict[tuple[str, str, str], set[int]] = {}
    for name, call in calls.items():
        if name in parent_of and _MODULE.fullmatch(name) is None:
            numbers.setdefault(call.key, set()).add(call.number)
    index_of: dict[tuple[tuple[str, str, str], int], int] = {}
    for key, in_module in numbers.items():
        for index, number in enumerate(sorted(in_module)):
            index_of[key, number] = index
    return {
        name: index_of.get((call.key, call.number), call.number)
        for name, call in calls.items()
    }


def _undirected(name: str) -> str:
    return _DIRECTION.sub("", name)


def _tensors(call: DumpedCall, content: Any) -> Iterator[DumpedTensor]:
    """Yield the tensors of a record; one without content where it has no result."""
    if not isinstance(content, dict):
        raise TypeError(f"a {type(content).__name__} where a record should be")
    is_gradients = call.kind == "parameters_grad"
    # gradients arrive in an order that may change from run to run
    parts = sorted(content) if is_gradients else [p for p in _ROLES if p in content]
    next_place = dict.fromkeys(("input", "output", "parameter", "grad"), 0)
    has_result = False
    for part in parts:
        role = "grad" if is_gradients else _ROLES[part]
        for parameter, leaf in _named_leaves(part, content[part], is_gradients):
            if leaf is not None:
                has_result = has_result or role in ("output", "grad")
                yield DumpedTensor(role, next_place[role], parameter, leaf)
            next_place[role] += 1
    if not has_result:
        yield DumpedTensor("grad" if is_gradients else "output", 0, None, None)


def _named_leaves(
    part: str, content: Any, is_gradients: bool
) -> Iterator[tuple[str | None, dict[str, Any] | None]]:
    """Yield the leaves of one part of a record, with the parameter that they belong to."""
    if part == "parameters" and content:
        for parameter, value in content.items():
            for leaf in _leaves(value):
                yield parameter, leaf
        return
    parameter = part if is_gradients or part == "parameters" else None
    for leaf in _leaves(content):
        yield parameter, leaf


def _leaves(value: Any) -> list[dict[str, Any] | None]:
    """Return the tensors in a value, and None for everything else; None once for a list or
    dictionary without tensors."""
    if isinstance(value, dict) and "dtype" in value and "shape" in value:
        return [value]
    if isinstance(value, dict) and not isinstance(value.get("type"), str):
        value = list(value.values())
    if not isinstance(value, list):
        return [None]
    inner: list[dict[str, Any] | None] = []
    for part in value:
        inner += _leaves(part)
    if any(leaf is not None for leaf in inner):
        return inner
    return [None] if value else []


def _group(content: Any) -> str | None:
    """Return the ranks of the process group among the arguments."""
    for part in ("input_args", "input_kwargs"):
        arguments = content.get(part) or []
        if isinstance(arguments, dict):
            arguments = arguments.values()
        for value in arguments:
            if isinstance(value, dict) and "group_ranks" in value:
                return ",".join(str(int(rank)) for rank in value["group_ranks"])
    return None


def _tensor_columns(content: dict[str, Any] | None) -> dict[str, Any]:
    """Return the fields of ``TensorRecord`` that describe a tensor."""
    if content is None:
        return {"reason": _NO_TENSOR}
    shape = [int(size) for size in content["shape"]]
    if min(shape, default=0) < 0:
        raise ValueError(f"the shape {shape}")
    dtype = str(content["dtype"]).removeprefix("torch.")
    blob = content.get("data_name")
    is_nested = "Nested" in str(content.get("type"))
    return {
        "dtype": dtype,
        "shape": shape,
        "numel": math.prod(shape),
        "layout": "nested" if is_nested else None,
        "hash": content.get("md5"),
        "blob": None if blob in (None, _NOT_KEPT) else str(blob),
        **_statistics(content, dtype, shape)._asdict(),
    }


def _statistics(
    content: dict[str, Any], dtype: str, shape: list[int]
) -> DumpedStatistics:
    high = _number(content.get("Max"))
    low = _number(content.get("Min"))
    mean = _number(content.get("Mean"))
    norm = _number(content.get("Norm"))
    numel = math.prod(shape)
    if not shape and norm is not None:
        norm = abs(norm)  # msprobe gives the value itself for a tensor of no dimensions
    measured = DumpedStatistics(
        min=_finite(low), max=_finite(high), mean=_finite(mean), l2=_finite(norm)
    )
    if high is None or low is None:
        why = _why_unmeasured(dtype, numel, has_hash=bool(content.get("md5")))
        return measured._replace(reason=why)
    if math.isnan(high) or math.isnan(low):
        return _with_nan(measured, numel)
    if math.isinf(high) or math.isinf(low):
        return _with_infinity(measured, low, high, numel)
    return measured._replace(
        nan=0,
        posinf=0,
        neginf=0,
        std=0.0 if high == low else None,
        zero=_zeros(low, high, numel),
        reason=_why_incomplete(mean, norm, dtype),
    )


def _why_unmeasured(dtype: str, numel: int, *, has_hash: bool) -> str:
    if numel == 0:
        return "no elements"
    if has_hash:
        return "msprobe kept a checksum alone"
    return f"msprobe kept no statistics of {dtype}"


def _with_nan(measured: DumpedStatistics, numel: int) -> DumpedStatistics:
    # of one element nothing else is left; of more, the others are unknown
    if numel == 1:
        return measured._replace(nan=1, posinf=0, neginf=0, zero=0)
    return measured._replace(nan=1, reason=_AT_LEAST)


def _with_infinity(
    measured: DumpedStatistics, low: float, high: float, numel: int
) -> DumpedStatistics:
    is_single = numel == 1
    return measured._replace(
        nan=0,  # a NaN would have shown in the extremes
        posinf=int(high == math.inf),
        neginf=int(low == -math.inf),
        zero=0 if is_single else None,
        reason=None if is_single else _AT_LEAST,
    )


def _zeros(low: float, high: float, numel: int) -> int | None:
    """Return how many elements are zero, as far as the extremes prove it."""
    if high == low == 0:
        return numel
    return 0 if low > 0 or high < 0 else None


def _why_incomplete(mean: float | None, norm: float | None, dtype: str) -> str | None:
    if norm is not None and not math.isfinite(norm):
        return f"the norm overflowed: msprobe computes it in {dtype}"
    if mean is None or norm is None:
        missing = "norm" if mean is not None else "mean and norm"
        return f"msprobe computes no {missing} of {dtype}"
    return None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise TypeError(f"a {type(value).__name__} where a number should be")
    return float(value)
