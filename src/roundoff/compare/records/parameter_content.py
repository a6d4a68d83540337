"""Which parameter holds another's values, and how: turned, cut, joined, scaled.

Names say nothing here. Two tensors are related where one is the other up to the order of
its axes, its shape, the order of the slices of an axis, or a factor (one for all, or one
for each index of an axis, as batch normalisation is folded into a convolution).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from roundoff.compare.records.value_sketch import in_reals

#: Two tensors are equal up to this many roundings of the coarser format.
ROUNDINGS = 4.0
#: Tensors of more axes are compared in their own order alone.
MOST_AXES = 6
#: A factor for each index of an axis says something from this many elements on.
FEWEST = 4

EQUAL = "equal"
TRANSPOSED = "transposed"
#: With an axis cut into several, which stand in another order then.
TURNED = "turned"
RESHAPED = "reshaped"
FLIPPED = "flipped"
REORDERED = "reordered"
SHUFFLED = "shuffled"
PART = "part"
JOINED = "joined"
SCALED = "scaled"
ZERO = "zero"
PARTLY_ZERO = "partly zero"


@dataclass(frozen=True, slots=True)
class Relation:
    """How one tensor holds another's values.

    Attributes:
        kind: one of the names above.
        words: the same in words that follow "the reference's": ``transposed``.
    """

    kind: str
    words: str


def relation(reference: Tensor, candidate: Tensor) -> Relation | None:
    """Return how ``candidate`` holds the values of ``reference``; None where it does not.

    Empty tensors and those with NaN or Inf are related to none. A candidate of zeros is
    ``ZERO``, one with slices of zeros where the others agree ``PARTLY_ZERO``.

    >>> weight = torch.arange(6.0).reshape(2, 3)
    >>> relation(weight, weight.t()).words
    'transposed'
    >>> relation(weight, weight[:, [1, 0, 2]]).words
    'with the 3 indexes of axis 1 in another order'
    >>> relation(weight, 2 * weight).words
    'times 2'
    >>> relation(torch.complex(weight, -weight), torch.complex(weight, weight).t()).words
    'conjugated and transposed'
    """
    if not reference.numel() or not candidate.numel():
        return None
    allowed = _allowed(reference, candidate)
    ours = in_reals(reference.detach()).to(torch.float64)
    theirs = in_reals(candidate.detach()).to(torch.float64)
    if not bool(ours.isfinite().all() & theirs.isfinite().all()):
        return None
    if ours.numel() != theirs.numel():
        return _part(ours, theirs, allowed)
    as_numbers = None
    if reference.is_complex() and candidate.is_complex():
        as_numbers = _of_complex(reference, candidate, allowed)
    return (
        as_numbers
        or _in_another_layout(ours, theirs, allowed)
        or _in_another_order(ours, theirs, allowed)
        or _zero(ours, theirs, allowed)
        or _scaled(ours, theirs, allowed)
    )


def _allowed(reference: Tensor, candidate: Tensor) -> float:
    """Return the relative distance up to which two tensors are equal."""
    formats = [t.dtype for t in (reference, candidate) if t.is_floating_point()]
    return ROUNDINGS * max((torch.finfo(d).eps / 2 for d in formats), default=0.0)


def _near(ours: Tensor, theirs: Tensor, allowed: float) -> bool:
    size = float(ours.norm())
    return float((ours - theirs).norm()) <= allowed * size


def _of_complex(ours: Tensor, theirs: Tensor, allowed: float) -> Relation | None:
    """The same complex numbers, their conjugates, or with their parts exchanged."""
    ours = ours.detach().to(torch.complex128)
    theirs = theirs.detach().to(torch.complex128)
    kinds = {
        "": ours,
        "conjugated": ours.conj(),
        "with real and imaginary parts exchanged": torch.complex(ours.imag, ours.real),
    }
    flat = theirs.reshape(-1)
    for words, numbers in kinds.items():
        for order in axis_orders(numbers):
            if not _near(numbers.permute(order).reshape(-1), flat, allowed):
                continue
            layout = _layout(ours, theirs, order)
            if not words:
                return layout
            moved = "" if layout.kind == EQUAL else f" and {layout.words}"
            return Relation(SCALED, f"{words}{moved}")
    return None


def _in_another_layout(ours: Tensor, theirs: Tensor, allowed: float) -> Relation | None:
    """The same values with the axes in another order, or another shape."""
    flat = theirs.reshape(-1)
    for order in axis_orders(ours):
        if _near(ours.permute(order).reshape(-1), flat, allowed):
            return _layout(ours, theirs, order)
    flat = ours.reshape(-1)
    for order in axis_orders(theirs):
        if _near(flat, theirs.permute(order).reshape(-1), allowed):
            return Relation(TURNED, f"with axes {list(order)} of its shape turned")
    return None


def _layout(ours: Tensor, theirs: Tensor, order: Sequence[int]) -> Relation:
    straight = list(order) == sorted(order)
    if straight and ours.shape == theirs.shape:
        return Relation(EQUAL, "as it is")
    if straight:
        return Relation(RESHAPED, f"in the shape {list(theirs.shape)}")
    if ours.dim() == 2:
        return Relation(TRANSPOSED, "transposed")
    return Relation(TRANSPOSED, f"with its axes in the order {list(order)}")


def axis_orders(tensor: Tensor) -> Iterator[tuple[int, ...]]:
    """Yield the orders of a tensor's axes, its own first; axes of length 1 stay.

    >>> list(axis_orders(torch.zeros(2, 1, 3)))
    [(0, 1, 2), (2, 1, 0)]
    """
    axes = tuple(range(tensor.dim()))
    longer = [axis for axis in axes if tensor.shape[axis] > 1]
    if len(longer) > MOST_AXES:
        yield axes
        return
    for order in permutations(longer):
        turned = list(axes)
        for place, axis in zip(longer, order, strict=True):
            turned[place] = axis
        yield tuple(turned)


def backward_axes(tensor: Tensor) -> Iterator[tuple[int, ...]]:
    """Yield the axes along which a tensor may lie backwards: one, or neighbours of all but two.

    The kernel of a convolution does along all axes of space in that of its transpose.

    >>> list(backward_axes(torch.zeros(4, 2, 3, 3)))
    [(0,), (1,), (2,), (3,), (0, 1), (1, 2), (2, 3)]
    """
    axes = range(tensor.dim())
    for count in range(1, max(2, tensor.dim() - 1)):
        for first in range(tensor.dim() - count + 1):
            several = tuple(axes[first : first + count])
            if all(tensor.shape[axis] > 1 for axis in several):
                yield several


def _backwards(ours: Tensor, theirs: Tensor, allowed: float) -> Relation | None:
    """The same values, backwards along some axes, which may be in another order too."""
    flat = theirs.reshape(-1)
    for order in axis_orders(ours):
        layout = ours.permute(order)
        if ours.dim() == theirs.dim() and layout.shape != theirs.shape:
            continue
        for axes in backward_axes(layout):
            if _near(layout.flip(axes).reshape(-1), flat, allowed):
                along = f"axis {axes[0]}" if len(axes) == 1 else f"axes {list(axes)}"
                words = f"backwards along {along}"
                if list(order) != sorted(order):
                    words = f"with its axes in the order {list(order)}, {words}"
                return Relation(FLIPPED, words)
    return None


def _in_another_order(ours: Tensor, theirs: Tensor, allowed: float) -> Relation | None:
    """The same values, with the slices of an axis, or all of them, in another order."""
    wanted = ours.reshape(-1).sort().values
    values = theirs.reshape(-1).sort().values
    if not _near(wanted, values, allowed) or float(wanted[0]) == float(wanted[-1]):
        return None
    backwards = _backwards(ours, theirs, allowed)
    if backwards is not None:
        return backwards
    for order in axis_orders(ours):
        turned = ours.permute(order)
        for axis in range(turned.dim()):
            if turned.shape != theirs.shape:
                break
            if _same_slices(turned, theirs, axis, allowed):
                count = turned.shape[axis]
                words = f"with the {count} indexes of axis {axis} in another order"
                if list(order) != sorted(order):
                    words = f"with its axes in the order {list(order)}, {words}"
                return Relation(REORDERED, words)
    return Relation(SHUFFLED, "with its values in another order")


def _same_slices(ours: Tensor, theirs: Tensor, axis: int, allowed: float) -> bool:
    ours = ours.movedim(axis, 0).reshape(ours.shape[axis], -1)
    theirs = theirs.movedim(axis, 0).reshape(theirs.shape[axis], -1)
    weights = torch.linspace(1.0, 2.0, ours.shape[1], dtype=torch.float64)
    ours = ours[(ours @ weights).argsort()]
    theirs = theirs[(theirs @ weights).argsort()]
    return _near(ours, theirs, allowed)


def _zero(ours: Tensor, theirs: Tensor, allowed: float) -> Relation | None:
    """All is zero, or whole slices of an axis are while the others agree."""
    if not bool(ours.any()):
        return None
    if not bool(theirs.any()):
        return Relation(ZERO, "set to zero")
    if ours.shape != theirs.shape:
        return None
    for axis in range(ours.dim()):
        slices = theirs.movedim(axis, 0).reshape(theirs.shape[axis], -1)
        kept = slices.any(dim=1)
        if bool(kept.all()):
            continue
        if _near(ours.movedim(axis, 0)[kept], theirs.movedim(axis, 0)[kept], allowed):
            places = (~kept).nonzero()[:, 0]
            words = f"with zeros at {_span(places)} of axis {axis}"
            return Relation(PARTLY_ZERO, words)
    return None


def _span(places: Tensor) -> str:
    first = int(places[0])
    last = int(places[-1])
    if last - first + 1 == len(places):
        return f"{first} to {last}" if last > first else f"index {first}"
    return f"{len(places)} indexes"


def _scaled(ours: Tensor, theirs: Tensor, allowed: float) -> Relation | None:
    """A factor for all elements, or one for each index of an axis."""
    flat = theirs.reshape(-1)
    for order in axis_orders(ours):
        turned = ours.permute(order)
        layout = "" if list(order) == sorted(order) else "transposed and "
        factor = _factor(turned.reshape(-1), flat)
        if factor and _near(factor * turned.reshape(-1), flat, 4 * allowed):
            return Relation(SCALED, f"{layout}times {factor:.6g}")
        axis = _scaled_axis(turned, theirs, allowed)
        if axis is not None:
            words = f"{layout}with a factor for each index of axis {axis}"
            return Relation(SCALED, words)
    return None


def _factor(ours: Tensor, theirs: Tensor) -> float:
    square = float(ours @ ours)
    return float(ours @ theirs) / square if square else 0.0


def _scaled_axis(ours: Tensor, theirs: Tensor, allowed: float) -> int | None:
    if ours.shape != theirs.shape or ours.dim() < 2:
        return None
    for axis in range(ours.dim()):
        a = ours.movedim(axis, 0).reshape(ours.shape[axis], -1)
        b = theirs.movedim(axis, 0).reshape(ours.shape[axis], -1)
        square = (a * a).sum(1)
        if a.shape[1] < FEWEST or not bool(square.all()):
            continue
        factor = (a * b).sum(1) / square
        if bool(factor.all()) and _near(factor[:, None] * a, b, 8 * allowed):
            return axis
    return None


def _part(ours: Tensor, theirs: Tensor, allowed: float) -> Relation | None:
    """A stretch of an axis, turned or not; or the other way round, a larger tensor."""
    if ours.numel() < theirs.numel():
        larger = _part(theirs, ours, allowed)
        return Relation(JOINED, "together with others") if larger else None
    if ours.numel() % theirs.numel():
        return None
    parts = ours.numel() // theirs.numel()
    for axis in range(ours.dim()):
        if ours.shape[axis] % parts:
            continue
        for number, part in enumerate(ours.chunk(parts, axis)):
            if _in_another_layout(part.contiguous(), theirs, allowed):
                words = f"part {number + 1} of {parts} along axis {axis}"
                return Relation(PART, words)
    return None
