"""What a loader may have done wrong to a parameter, undone: its own elements in other places.

Heads before or behind their halves, gates beside each other or one after the other: the
elements are there, and an axis was cut in another order. Several parameters that are cut
alike, the rows of queries and of keys, are wrong together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from roundoff.compare.blame.near_leaves import of_leaves_alone
from roundoff.compare.repairs.edits.edited_calls import numbers_in
from roundoff.compare.repairs.named_repairs import stands_in_order
from roundoff.compare.values.traced_calls import TracedProgram
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides
from roundoff.ops import operators_that

_OF_PARAMETERS = operators_that("pair elements")
_OF_PARAMETERS |= operators_that("work element by element")


@dataclass(frozen=True, slots=True)
class LeafChange:
    """What parameters would hold if they were filled otherwise.

    Attributes:
        tensors: by record.
        words: what the loader did.
        made: what each is made by, those of other layers and sizes too, where that is known.
        is_patient: a trial goes on however long nothing of the reference comes back, as where
            each head has a part of it.
    """

    tensors: Mapping[int, Tensor]
    words: str
    made: Callable[[Tensor], Tensor] | None = None
    is_patient: bool = False


#: A parameter of the candidate, and what it holds.
Held = tuple[Value, Tensor]
#: An axis cut in four: blocks that stay, two axes of these that change places, and elements
#: that stay together.
Cut = tuple[int, int, int, int]


def recut(sides: Sides, present: Sequence[Held]) -> Iterator[LeafChange]:
    """Yield each parameter with one axis cut otherwise, then all that can be cut alike.

    But for those that stand as the reference's do: then what reads them is wrong.

    Args:
        sides: both programs.
        present: the parameters that a wrong region reads.
    """
    groups: dict[tuple[int, int, int, int], list[tuple[Value, Tensor, Tensor]]] = {}
    for leaf, tensor in present:
        if stands_in_order(sides, leaf):
            continue
        for axis in range(-tensor.dim(), 0):
            for cut in cuts_of(tensor.shape[axis]):
                moved = _cut_along(tensor, axis, cut)
                if torch.equal(moved, tensor):
                    continue
                words = f"{leaf.row.name}, {_in_words(tensor, axis, cut)}"
                made = partial(_cut_alike, axis, cut)
                yield LeafChange({leaf.key: moved}, words, made)
                # matrices by rows or by columns, vectors along the one axis that they have
                place = axis if tensor.dim() > 1 else -1
                groups.setdefault((place, *cut[1:]), []).append((leaf, tensor, moved))
    for (_, a, b, kept), group in groups.items():
        yield from _together(group, f"an axis cut in {_sizes(a, b, kept)}")


def of_other_sign(present: Sequence[Held]) -> Iterator[LeafChange]:
    """Yield each parameter with the other sign; a complex one conjugated, or with its real
    and imaginary parts in each other's places.

    Args:
        present: the parameters that a wrong region reads.
    """
    for leaf, tensor in present:
        name = leaf.row.name
        kinds: list[tuple[Callable[[Tensor], Tensor], str]] = []
        if tensor.is_floating_point():
            kinds = [(_negated, f"{name} has the other sign")]
        elif tensor.is_complex():
            kinds = [
                (_conjugated, f"{name} is the conjugate of what it should be"),
                (_crossed, f"{name} has real and imaginary parts the wrong way round"),
            ]
        for made, words in kinds:
            yield LeafChange({leaf.key: made(tensor)}, words, made)


def _negated(tensor: Tensor) -> Tensor:
    return -tensor if tensor.is_floating_point() else tensor


def _conjugated(tensor: Tensor) -> Tensor:
    return tensor.conj().resolve_conj()


def _crossed(tensor: Tensor) -> Tensor:
    if not tensor.is_complex():
        return tensor
    return torch.complex(tensor.imag, tensor.real)


def made_ready(flow: Flow, present: Sequence[Held]) -> Iterator[LeafChange]:
    """Yield each parameter after what the reference computes of its parameters first.

    One is added to a scale, a rate is the exponential of what was trained: a port may hold
    it ready.

    Args:
        flow: of the reference.
        present: the parameters that a wrong region reads.
    """
    for operator, number in _first_computed(flow):
        made = partial(_computed, operator, number)
        for leaf, tensor in present:
            if tensor.is_floating_point():
                words = f"of {leaf.row.name} the reference computes {operator} first"
                if number is not None:
                    words = f"{words}, with {number:g}"
                yield LeafChange({leaf.key: made(tensor)}, words, made)


def _first_computed(flow: Flow) -> list[tuple[str, float | None]]:
    """Return the operators that the reference applies to parameters alone, with numbers."""
    program = TracedProgram(flow)
    found: dict[tuple[str, float | None], None] = {}
    for value in flow.in_order():
        call = program.calls.get(value.row.call)
        is_of_parameters = not value.inner and of_leaves_alone(flow, value)
        if call is None or not is_of_parameters or value.operator not in _OF_PARAMETERS:
            continue
        for number in (None, *numbers_in(call.parsed)):
            if _is_function(value.operator, number):
                found[value.operator, number] = None
    return list(found)


def _is_function(operator: str, number: float | None) -> bool:
    """Return True where torch has such a function of one tensor, with a number or without."""
    try:
        _computed(operator, number, torch.ones(1))
    except (AttributeError, TypeError, RuntimeError):
        return False
    return True


def _computed(operator: str, number: float | None, tensor: Tensor) -> Tensor:
    function = getattr(torch, operator)
    made: Tensor = function(tensor) if number is None else function(tensor, number)
    return made.to(tensor.dtype)


def _together(
    group: Sequence[tuple[Value, Tensor, Tensor]], what: str
) -> Iterator[LeafChange]:
    tensors = {leaf.key: moved for leaf, _, moved in group}
    if len(tensors) > 1:
        names = " and ".join(dict.fromkeys(leaf.row.name or "" for leaf, *_ in group))
        yield LeafChange(tensors, f"{names} have {what}")


def _in_words(tensor: Tensor, axis: int, cut: Cut) -> str:
    """Return which elements along an axis should change places."""
    place = axis % tensor.dim()
    which = "first" if cut[0] == 1 else "last"
    return (
        f"cut in {_sizes(*cut)} along axis {place}, should have the {which} two turned"
    )


def _sizes(*sizes: int) -> str:
    return " x ".join(str(size) for size in sizes if size > 1)


def cuts_of(size: int) -> Iterator[Cut]:
    """Yield the ways to cut an axis so that two axes change places, whole ones first.

    In blocks, or with elements that stay together.

    >>> list(cuts_of(8))
    [(1, 2, 4, 1), (1, 4, 2, 1), (2, 2, 2, 1), (1, 2, 2, 2)]
    """
    for blocks in _divisors(size):
        rest = size // blocks
        yield from ((blocks, a, rest // a, 1) for a in _divisors(rest)[1:-1])
    for kept in _divisors(size)[1:]:
        rest = size // kept
        yield from ((1, a, rest // a, kept) for a in _divisors(rest)[1:-1])


def _divisors(size: int) -> list[int]:
    return [number for number in range(1, size + 1) if not size % number]


def order_of(cut: Cut) -> Tensor:
    """Return which place of an axis each element comes from if it is cut otherwise."""
    return torch.arange(math.prod(cut)).reshape(cut).transpose(1, 2).reshape(-1)


def _cut_alike(axis: int, cut: Cut, tensor: Tensor) -> Tensor:
    """Return another parameter cut alike: as many parts or heads, of another size.

    As it is where it can not be cut so.
    """
    if tensor.dim() < -axis:
        return tensor
    blocks, a, b, kept = cut
    size = tensor.shape[axis]
    if blocks > 1:
        alike = (size // (a * b), a, b, 1)
    elif kept > 1:
        alike = (1, a, b, size // (a * b))
    else:
        alike = (1, a, size // a, 1) if a <= b else (1, size // b, b, 1)
    return tensor if math.prod(alike) != size else _cut_along(tensor, axis, alike)


def _cut_along(tensor: Tensor, axis: int, cut: Cut) -> Tensor:
    return tensor.index_select(axis, order_of(cut)).contiguous()
