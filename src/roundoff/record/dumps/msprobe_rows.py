"""What the names, records and statistics of msprobe's dump.json become in the columns of OPS.

==========================================  =====================================================================
``Functional.linear.2.forward``             module ``""``, operator ``Functional::linear``, index 2. ``Aten.mm.0.*`` is
                                            ``mm``, as roundoff's own runs call it
the same, with a parent in construct.json   the parent's module; index counts the calls in that module
``Module.blocks.0.Block.forward.1``         module ``blocks.0``, operator ``Block``, index 1
its parameters                              call -1, operator ``parameter``, role ``parameter``, as roundoff calls them
``...parameters_grad.0``                    the module's in phase backward, role ``grad``; places in the order of names
parent ``optimizer``, or called by it       phase ``optimizer``
``Distributed.*``                           phase ``collective``
==========================================  =====================================================================

``place`` is the position in msprobe's list, as in its file names: ``output.2.pt`` is place 2 although output 1 is None;
keyword arguments follow the others. ``backward`` lists gradients in autograd's order, a weight's may be transposed.

msprobe computes statistics in the tensor's own dtype, over all elements, and counts nothing. Counts are given where the
extremes prove them. Where an extreme is NaN or infinite there is at least one such element: the count is then 1 and the
``reason`` says that there may be more, and those of ``min``, ``max``, ``mean`` and ``l2`` that are not finite are null, for
what they are of the finite elements is not known. An infinite norm of finite elements (float16) is null too.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_API = re.compile(
    r"([A-Za-z0-9_]+)\.(.+)\.([0-9]{1,18})\.(forward|backward)", re.DOTALL
)
_MODULE = re.compile(
    r"(?:Module|Cell)\.(?:(.+)\.)?([^.]+)\.(forward|backward|parameters_grad)\.([0-9]{1,18})",
    re.DOTALL,
)
_FRAME = re.compile(r"File (.+), line ([0-9]+), in ([^,]*),", re.DOTALL)
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")
_LIBRARIES = ("torch/", "torch_npu/", "msprobe/")
_INPLACE = re.compile(
    r".*[^_]_|__i(?:add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__"
)
_ROLES = {
    "input_args": "input",
    "input_kwargs": "input",
    "input": "input",
    "parameters": "parameter",
    "output": "output",
}
_NO_TENSOR = "no tensor among its results"
_AT_LEAST = "at least one NaN or Inf: msprobe doesn't count them, and measures the others with them"
_NOT_KEPT = "-1"  # msprobe's data_name of a tensor that it could not write


class Call(NamedTuple):
    """Which call a name of msprobe's means. ``kind``: forward | backward | parameters_grad."""

    phase: str
    module: str
    operator: str
    number: int
    kind: str
    inplace: bool


class Source(NamedTuple):
    """Where a call was made: user source line, and whether an optimizer made it."""

    line: str | None
    optimizer: bool


def sources(stack: dict[str, Any]) -> dict[str, Source]:
    """Name without its direction -> where it was called, from the content of stack.json.

    The line is the innermost one outside torch and msprobe, below the folder of the script that was run by its path from
    there, in an installed package by its path in it.
    """
    found = {}
    for names, frames in stack.values():
        places = [match for frame in frames if (match := _FRAME.match(frame))]
        user = [
            match
            for match in places
            if not _PACKAGES.sub("", match[1]).startswith(_LIBRARIES)
        ]
        line = None
        if user:
            script = user[-1][1] if user[-1][3] == "<module>" else ""
            path = _PACKAGES.sub("", user[0][1]).removeprefix(
                os.path.dirname(script) + "/"
            )
            line = f"{path}:{user[0][2]}"
        source = Source(line, any("/torch/optim/" in match[1] for match in places))
        found.update({_undirected(name): source for name in names})
    return found


def parents(construct: dict[str, Any]) -> dict[str, str | None]:
    """Name -> module path of the module that called it, "optimizer" for the optimizer, from construct.json."""
    found: dict[str, str | None] = {}
    for name, parent in construct.items():
        parent = parent[0] if isinstance(parent, list) else parent
        match = _MODULE.fullmatch(parent or "")
        found[name] = (
            (match[1] or "")
            if match
            else "optimizer"
            if parent == "optimizer"
            else None
        )
    return found


def rows(
    data: dict[str, Any], source: dict[str, Source], parent: dict[str, str | None]
) -> dict[str, list[Any]]:
    """Columns of OPS, without rank and step, for the records under "data" of a dump.json, in its order.

    Raises whatever a malformed record leads to.
    """
    calls = {name: _call(name, source, parent) for name in data}
    index = _indices(calls, parent)
    table: list[dict[str, Any]] = []
    for number, (name, record) in enumerate(data.items()):
        call = calls[name]
        values = list(_values(call, record))
        group = _group(record)
        place_of = source.get(_undirected(name))
        inputs = []
        for role, place, parameter, value in values:
            if role == "input":
                inputs.append(len(table))
            full = f"{call.module}.{parameter}" if call.module else parameter
            row = {
                "record": len(table),
                "call": -1 if role == "parameter" else number,
                "phase": call.phase,
                "module": call.module,
                "operator": "parameter" if role == "parameter" else call.operator,
                "index": index[name],
                "place": place,
                "role": role,
                "name": None if parameter is None else full,
                "line": place_of.line if place_of else None,
                "inputs": inputs if role == "output" else None,
                "inplace": call.inplace and role == "output",
                "group": group,
            }
            table.append(
                row | ({"reason": _NO_TENSOR} if value is None else _tensor(value))
            )
    names = {column for row in table for column in row} | {"record"}
    return {name: [row.get(name) for row in table] for name in names}


def _call(name: str, source: dict[str, Source], parent: dict[str, str | None]) -> Call:
    module = _MODULE.fullmatch(name)
    if module:
        kind = module[3]
        phase = "forward" if kind == "forward" else "backward"
        return Call(phase, module[1] or "", module[2], int(module[4]), kind, False)
    api = _API.fullmatch(name)
    if api is None:  # nothing is left out: a name of a later msprobe stands for itself
        phase = "backward" if "backward" in name else "forward"
        return Call(phase, "", name, 0, phase, False)
    prefix, operator, number, kind = api.groups()
    place = source.get(_undirected(name))
    above = parent.get(name)
    phase = "collective" if prefix == "Distributed" else kind
    if above == "optimizer" or (place is not None and place.optimizer):
        phase, above = "optimizer", None
    inplace = kind == "forward" and _INPLACE.fullmatch(operator) is not None
    full = operator if prefix == "Aten" else f"{prefix}::{operator}"
    return Call(phase, above or "", full, int(number), kind, inplace)


def _indices(calls: dict[str, Call], parent: dict[str, str | None]) -> dict[str, int]:
    """How often each was called before. msprobe numbers the calls of an API through the whole step; where the calling
    modules are known, the calls of each module are counted, and a backward call has the index of its forward call."""
    numbers: dict[tuple[str, str, str], set[int]] = {}
    for name, call in calls.items():
        if name in parent and _MODULE.fullmatch(name) is None:
            numbers.setdefault(_counted(call), set()).add(call.number)
    order = {
        (key, number): i
        for key, known in numbers.items()
        for i, number in enumerate(sorted(known))
    }
    return {
        name: order.get((_counted(call), call.number), call.number)
        for name, call in calls.items()
    }


def _counted(call: Call) -> tuple[str, str, str]:
    return "" if call.phase == call.kind else call.phase, call.module, call.operator


def _undirected(name: str) -> str:
    return re.sub(r"\.(forward|backward|parameters_grad)(?=\.[0-9]+$|$)", "", name)


def _values(call: Call, record: Any) -> Iterator[tuple[str, int, str | None, Any]]:
    """(role, place, parameter, tensor) of each tensor of a record; one with no tensor where it has no result."""
    if not isinstance(record, dict):
        raise TypeError(f"a {type(record).__name__} where a record should be")
    gradients = call.kind == "parameters_grad"
    places = {"input": 0, "output": 0, "parameter": 0, "grad": 0}
    results = 0
    # Gradients arrive in an order that may change from run to run.
    for part in (
        sorted(record) if gradients else (part for part in _ROLES if part in record)
    ):
        role = "grad" if gradients else _ROLES[part]
        content = record[part]
        named = gradients or part == "parameters"
        items = (
            content.items() if part == "parameters" and content else [(part, content)]
        )
        for parameter, leaves in items:
            for value in _leaves(leaves):
                if value is not None:
                    results += role in ("output", "grad")
                    yield role, places[role], parameter if named else None, value
                places[role] += 1
    if not results:
        yield "grad" if gradients else "output", 0, None, None


def _leaves(value: Any) -> list[dict[str, Any] | None]:
    """The tensors in a value, and None for everything else; None once for a list or dictionary without tensors."""
    if isinstance(value, dict) and "dtype" in value and "shape" in value:
        return [value]
    if isinstance(value, dict) and not isinstance(value.get("type"), str):
        value = list(value.values())
    if not isinstance(value, list):
        return [None]
    inner = [leaf for part in value for leaf in _leaves(part)]
    return inner if any(leaf is not None for leaf in inner) else [None] if value else []


def _group(record: dict[str, Any]) -> str | None:
    """The ranks of the process group among the arguments."""
    for part in ("input_args", "input_kwargs"):
        content = record.get(part) or []
        for value in content.values() if isinstance(content, dict) else content:
            if isinstance(value, dict) and "group_ranks" in value:
                return ",".join(str(int(rank)) for rank in value["group_ranks"])
    return None


def _tensor(value: dict[str, Any]) -> dict[str, Any]:
    shape = [int(size) for size in value["shape"]]
    if min(shape, default=0) < 0:
        raise ValueError(f"the shape {shape}")
    dtype = str(value["dtype"]).removeprefix("torch.")
    blob = value.get("data_name")
    numel = math.prod(shape)
    row = {
        "dtype": dtype,
        "shape": shape,
        "numel": numel,
        "layout": "nested" if "Nested" in str(value.get("type")) else None,
        "hash": value.get("md5"),
        "blob": None if blob in (None, _NOT_KEPT) else str(blob),
    }
    return row | _statistics(value, dtype, shape, numel)


def _statistics(
    value: dict[str, Any], dtype: str, shape: list[int], numel: int
) -> dict[str, Any]:
    high, low = _number(value.get("Max")), _number(value.get("Min"))
    mean, norm = _number(value.get("Mean")), _number(value.get("Norm"))
    if not shape and norm is not None:
        norm = abs(norm)  # msprobe gives the value itself for a tensor of no dimensions
    found: dict[str, Any] = {
        "min": low,
        "max": high,
        "mean": mean,
        "l2": norm,
        "reason": None,
    }
    if high is None or low is None:
        kept = "a checksum alone" if value.get("md5") else f"no statistics of {dtype}"
        found["reason"] = "no elements" if numel == 0 else f"msprobe kept {kept}"
    elif math.isfinite(high) and math.isfinite(low):
        found |= {"nan": 0, "posinf": 0, "neginf": 0}
        found["std"] = 0.0 if high == low else None
        found["zero"] = (
            numel if high == low == 0 else 0 if low > 0 or high < 0 else None
        )
        if norm is not None and not math.isfinite(norm):
            found["reason"] = f"the norm overflowed: msprobe computes it in {dtype}"
        elif mean is None or norm is None:
            missing = "norm" if mean is not None else "mean and norm"
            found["reason"] = f"msprobe computes no {missing} of {dtype}"
    elif math.isnan(high) or math.isnan(low):
        found["nan"] = 1
        # of one element nothing else is left; of more, it isn't known what the others are
        found |= (
            {"posinf": 0, "neginf": 0, "zero": 0}
            if numel == 1
            else {"reason": _AT_LEAST}
        )
    else:
        found |= {
            "nan": 0,
            "posinf": int(high == math.inf),
            "neginf": int(low == -math.inf),
        }  # a NaN would have shown
        if numel == 1:
            found["zero"] = 0
        else:
            found["reason"] = _AT_LEAST
    for name in ("min", "max", "mean", "l2"):
        if found[name] is not None and not math.isfinite(found[name]):
            found[name] = None
    return found


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise TypeError(f"a {type(value).__name__} where a number should be")
    return float(value)
