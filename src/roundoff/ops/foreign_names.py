"""The operator names of other systems: torch's site operators, aten, TensorFlow, Paddle, CANN and ONNX."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

from roundoff.errors import PlanError, nearest
from roundoff.ops.names_table import SYSTEMS, TABLE

#: What a gradient operator adds to the name of its forward operator.
_GRADIENT = re.compile(
    r"(Grad|Backprop|BackpropFilter|BackpropInput|_grad|_backward)(V\d+|D)?$"
)
_VERSIONS = ("", "V2", "V3", "D", "_v2")
#: Other ways to write a system's name.
_ALSO = {"ascend": "cann", "tf": "tensorflow", "site": "torch"}


def translate(name: str, source: str, target: str) -> tuple[str, ...]:
    """An operator's names in another system; empty where that system has none of its own.

    Systems: torch (operators of sites), aten, tensorflow, paddle, cann, onnx. As a source, an aten name may have its
    namespace and overload; as a target it is every functional overload, as ``torch.library`` writes them. Raises
    ``PlanError`` with the nearest names for a name that the source does not have.

    >>> translate("softmax", "torch", "cann"), translate("BiasAdd", "tensorflow", "torch")
    (('SoftmaxV2',), ('add',))
    >>> translate("aten::softmax.int", "aten", "onnx"), translate("cosine_similarity", "torch", "aten")
    (('Softmax',), ('aten::cosine_similarity',))
    """
    source, target = system(source), system(target)
    rows = _rows(source).get(_plain(name) if source == "aten" else name)
    if rows is None:
        raise unknown([name], source)
    names = dict.fromkeys(n for row in rows for n in row[SYSTEMS.index(target)])
    return (
        tuple(o for n in names for o in _overloads(n))
        if target == "aten"
        else tuple(names)
    )


def known(name: str) -> frozenset[str]:
    """Every name that the table has of one system."""
    return frozenset(_rows(system(name)))


def forward_of(name: str, source: str) -> tuple[str, ...]:
    """The torch operators of which ``name`` is the gradient in a system; empty if it is none.

    >>> forward_of("SoftmaxGrad", "cann"), forward_of("Softmax", "tensorflow")
    (('softmax',), ())
    """
    stem, replaced = _GRADIENT.subn("", name)
    found = [
        version
        for version in _VERSIONS
        if replaced and stem + version in _rows(system(source))
    ]
    return translate(stem + found[0], source, "torch") if found else ()


def unknown(
    names: Iterable[str],
    source: str,
    places: Iterable[str] = (),
    where: str | None = None,
) -> PlanError:
    """The error for names that a system does not have: each with its place and the nearest that there are."""
    choices = sorted(known(source))
    places = list(places)
    lines = []
    for i, name in enumerate(names := list(names)):
        near = nearest(name, choices)
        place = f"{places[i]}: " if places else ""
        lines.append(
            f"{place}{name}" + (f" (nearest: {', '.join(near)})" if near else "")
        )
    many = len(lines) > 1
    return PlanError(
        f"{len(lines) if many else 'an'} operator{'s' if many else ''} that the table of names does not have:\n    "
        + "\n    ".join(lines),
        where=where,
        expected=f"operators of {source}, spelled as there",
        do="correct the name; leave out what only other versions have with partial=True (--partial)",
    )


def system(name: str) -> str:
    """The system's name as the table has it. Raises ``PlanError`` for another."""
    found = _ALSO.get(name, name)
    if found not in SYSTEMS:
        raise PlanError(
            "no such system of operator names",
            where=name,
            expected=", ".join(SYSTEMS),
            got=repr(name),
        )
    return found


Row = tuple[tuple[str, ...], ...]


@functools.cache
def _rows(source: str) -> dict[str, list[Row]]:
    column = SYSTEMS.index(source)
    found: dict[str, list[Row]] = {}
    for row in rows():
        for name in row[column]:
            found.setdefault(name, []).append(row)
    return found


@functools.cache
def rows() -> tuple[Row, ...]:
    """The table: for each operator its names in each of ``SYSTEMS``."""
    lines: list[str] = []
    for line in TABLE.splitlines():
        if line.startswith(" "):
            lines[-1] += line
        elif line and not line.startswith("#"):
            lines.append(line)
    return tuple(
        tuple(tuple(n for n in cell.split() if n != "-") for cell in line.split("|"))
        for line in lines
    )


def _plain(name: str) -> str:
    """``aten::softmax.int``, ``aten.softmax.int`` and ``softmax_`` are all softmax."""
    name = name.removeprefix("aten::").removeprefix("aten.").partition(".")[0]
    return name.rstrip("_") if name.rstrip("_") in _rows("aten") else name


@functools.cache
def _overloads(name: str) -> tuple[str, ...]:
    """The overloads of an aten operator that return new tensors; without those over named dimensions."""
    import torch

    packet: Any = getattr(torch.ops.aten, name)
    schemas = {
        overload: getattr(packet, overload)._schema for overload in packet.overloads()
    }
    kept = [
        o
        for o, schema in schemas.items()
        if not schema.is_mutable and _takes_tensors(schema)
    ]
    return tuple(f"aten::{name}" + (f".{o}" if o != "default" else "") for o in kept)


def _takes_tensors(schema: Any) -> bool:
    kinds = [str(argument.type) for argument in schema.arguments]
    return any("Tensor" in kind for kind in kinds) and "Dimname" not in " ".join(
        map(str, schema.arguments)
    )
