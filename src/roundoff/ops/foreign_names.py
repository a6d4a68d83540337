"""The operator names of other systems: torch's site operators, aten, TensorFlow,
Paddle, CANN and ONNX.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable
from typing import Any

from roundoff.errors import PlanError, nearest
from roundoff.ops.foreign_names_table import SYSTEMS, TABLE

#: What a gradient operator adds to the name of its forward operator.
_GRADIENT = re.compile(
    r"(Grad|Backprop|BackpropFilter|BackpropInput|_grad|_backward)(V\d+|D)?$"
)
_VERSIONS = ("", "V2", "V3", "D", "_v2")
#: Other ways to write a system's name.
_ALSO = {"ascend": "cann", "tf": "tensorflow", "site": "torch"}


def translate(name: str, source: str, target: str) -> tuple[str, ...]:
    """Return an operator's names in another system; empty where that system has none of its own.

    Systems: torch (operators of sites), aten, tensorflow, paddle, cann, onnx. As a
    source, an aten name may have its namespace and overload; as a target it is every
    functional overload, as ``torch.library`` writes them. Raises ``PlanError`` with the
    nearest names for a name that the source does not have.

    >>> translate("softmax", "torch", "cann"), translate("BiasAdd", "tensorflow", "torch")
    (('SoftmaxV2',), ('add',))
    >>> translate("aten::softmax.int", "aten", "onnx"), translate("cosine_similarity", "torch", "aten")
    (('Softmax',), ('aten::cosine_similarity',))
    """
    source = system(source)
    target = system(target)
    matching = _rows(source).get(_plain(name) if source == "aten" else name)
    if matching is None:
        raise unknown_operators([name], source)
    column = SYSTEMS.index(target)
    names: dict[str, None] = {}
    for row in matching:
        names |= dict.fromkeys(row[column])
    if target != "aten":
        return tuple(names)
    overloads: list[str] = []
    for packet in names:
        overloads += _overloads(packet)
    return tuple(overloads)


def operator_names(name: str) -> frozenset[str]:
    """Return every name that the table has of one system."""
    return frozenset(_rows(system(name)))


def forward_of(name: str, source: str) -> tuple[str, ...]:
    """Return the torch operators whose gradient ``name`` is in a system; empty if it is none.

    >>> forward_of("SoftmaxGrad", "cann"), forward_of("Softmax", "tensorflow")
    (('softmax',), ())
    """
    stem, replaced = _GRADIENT.subn("", name)
    if not replaced:
        return ()
    names = _rows(system(source))
    for version in _VERSIONS:
        if stem + version in names:
            return translate(stem + version, source, "torch")
    return ()


def unknown_operators(
    names: Iterable[str],
    source: str,
    places: Iterable[str] = (),
    where: str | None = None,
) -> PlanError:
    """Return the error for names that a system lacks, with the nearest that it has.

    Args:
        names: as they were written.
        source: the system.
        places: where each stands, or nothing.
        where: the file.
    """
    choices = sorted(operator_names(source))
    lines = []
    for name, place in itertools.zip_longest(names, places):
        near = nearest(name, choices)
        line = name if place is None else f"{place}: {name}"
        lines.append(f"{line} (nearest: {', '.join(near)})" if near else line)
    what = f"{len(lines)} operators" if len(lines) > 1 else "an operator"
    return PlanError(
        f"{what} that the table of names does not have:\n    " + "\n    ".join(lines),
        where=where,
        expected=f"operators of {source}, spelled as there",
        do="correct the name; leave out what only other versions have with partial=True (--partial)",
    )


def system(name: str) -> str:
    """Return the system's name as the table has it. Raises ``PlanError`` for another."""
    canonical = _ALSO.get(name, name)
    if canonical not in SYSTEMS:
        raise PlanError(
            "no such system of operator names",
            where=name,
            expected=", ".join(SYSTEMS),
            got=repr(name),
        )
    return canonical


#: The names of one operator, in each of ``SYSTEMS``.
Names = tuple[tuple[str, ...], ...]


@functools.cache
def _rows(source: str) -> dict[str, list[Names]]:
    """The rows that have each name of a system."""
    column = SYSTEMS.index(source)
    by_name: dict[str, list[Names]] = {}
    for row in rows():
        for name in row[column]:
            by_name.setdefault(name, []).append(row)
    return by_name


@functools.cache
def rows() -> tuple[Names, ...]:
    """Return the table: for each operator its names in each of ``SYSTEMS``."""
    lines: list[str] = []
    for line in TABLE.splitlines():
        if line.startswith(" "):
            lines[-1] += line
        elif line and not line.startswith("#"):
            lines.append(line)
    return tuple(tuple(map(_cell, line.split("|"))) for line in lines)


def _cell(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split() if name != "-")


def _plain(name: str) -> str:
    """``aten::softmax.int``, ``aten.softmax.int`` and ``softmax_`` are all softmax."""
    name = name.removeprefix("aten::").removeprefix("aten.").partition(".")[0]
    return name.rstrip("_") if name.rstrip("_") in _rows("aten") else name


@functools.cache
def _overloads(name: str) -> tuple[str, ...]:
    """The overloads of an aten operator that return new tensors; without those over
    named dimensions.
    """
    import torch

    packet: Any = getattr(torch.ops.aten, name)
    overloads = []
    for overload in packet.overloads():
        schema = getattr(packet, overload)._schema
        if not schema.is_mutable and _takes_tensors(schema):
            suffix = "" if overload == "default" else f".{overload}"
            overloads.append(f"aten::{name}{suffix}")
    return tuple(overloads)


def _takes_tensors(schema: Any) -> bool:
    kinds = [str(argument.type) for argument in schema.arguments]
    arguments = " ".join(map(str, schema.arguments))
    return any("Tensor" in kind for kind in kinds) and "Dimname" not in arguments
