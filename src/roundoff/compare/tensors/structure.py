"""The structure of a difference: an unwritten end, an exchanged axis, a factor...

Each classifier is a few lines over the expected and the actual values; the first that
fits gives a label and the evidence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

import torch
from torch import Tensor

#: A fit leaves at most this share of the squared difference.
FIT = 1e-4
#: More wrong elements than this share are no part of a result.
MOST = 0.75
#: An end or a slice is wrong where at least this share of it is.
WHOLE = 0.8
#: Differences below this share of the largest one are not looked at: the kernel's own
#: rounding.
SMALL = 2.0**-10
#: Wrong elements stand out where they are this many times as far off as the worst of
#: the others.
APART = 8.0
#: Of larger tensors every k-th slice of the longest axis is looked at.
LOOKED_AT = 2**20
#: Slices of an axis that are compared with all others.
SLICES = 256
#: Factors are named as fractions up to this denominator.
DENOMINATOR = 16
#: Values that were moved agree to this share of the largest.
MOVED = 1e-3
#: The finest of the formats in which a single value's factor says nothing.
_COARSE = 2.0**-12

PARTLY_WRITTEN = "partly written output"
WRONG_AXIS = "wrong axis or layout"


@dataclass(frozen=True, slots=True)
class Structure:
    """A label of ``symptoms.ADVICE``, and the evidence for it."""

    label: str
    evidence: str


def structure(expected: Tensor, actual: Tensor, unit: float) -> Structure | None:
    """Return the first description that fits; neither tensor is changed.

    Args:
        expected: what it should be, of the shape of ``actual``, any format.
        actual: what it is.
        unit: unit roundoff of the actual's format, 0 for integers: what is below a few
            roundings is no difference.

    Returns:
        None where nothing fits, for empty tensors, for those that agree, and for
        formats without arithmetic. Elements that are not finite on both sides are left
        out.
    """
    difference = _difference(expected, actual, unit)
    if difference is None or not difference.count:
        return None
    for classify in _CLASSIFIERS:
        described = classify(difference)
        if described is not None:
            return described
    return None


def usual_error(expected: Tensor, actual: Tensor) -> float | None:
    """Return the median relative error of the elements that differ; None without any.

    >>> usual_error(torch.tensor([2.0, 4.0, 8.0]), torch.tensor([2.0, 5.0, 10.0]))
    0.25
    """
    difference = _difference(expected, actual, 0.0)
    if difference is None:
        return None
    measurable = difference.differ & (difference.expected != 0)
    if not bool(measurable.any()):
        return None
    relative = difference.error[measurable] / difference.expected[measurable]
    return float(relative.abs().median())


def fewer_digits(expected: Tensor, actual: Tensor, unit: float) -> str | None:
    """Return the format whose numbers all values are, where those expected are not.

    ``bfloat16`` or ``float16``; None for others.
    """
    wanted = _fp64(expected)
    values = _fp64(actual)
    if wanted is None or values is None or not bool(values.any()):
        return None
    for dtype in (torch.bfloat16, torch.float16):
        narrower = unit < torch.finfo(dtype).eps / 2
        if narrower and _are_all(values, dtype) and not _are_all(wanted, dtype):
            return str(dtype).removeprefix("torch.")
    return None


def _are_all(values: Tensor, dtype: torch.dtype) -> bool:
    """Return True where all finite values are numbers of a format."""
    finite = values[values.isfinite()]
    return torch.equal(finite.to(dtype).to(torch.float64), finite)


@dataclass(frozen=True, slots=True)
class _Axis:
    """One axis of a difference: its values with one row for each index."""

    number: int
    expected: Tensor
    actual: Tensor
    differ: Tensor
    #: Only every k-th index was looked at.
    step: int

    @property
    def length(self) -> int:
        return len(self.expected)

    @property
    def wrong(self) -> Tensor:
        """The indexes with an element that differs."""
        return self.differ.any(1).nonzero()[:, 0]


@dataclass(frozen=True, slots=True)
class _Difference:
    """Both tensors in fp64, zero where one is not finite.

    Attributes:
        expected: axes in the order of the actual's memory, as of all tensors here.
        actual: of the same shape.
        error: actual - expected.
        differ: elements that are further off than a few roundings.
        count: how many those are.
        unit: unit roundoff of the actual's format.
        order: the tensor's axes in the order of memory.
        steps: the axis of which only every k-th index was looked at, and k.
    """

    expected: Tensor
    actual: Tensor
    error: Tensor
    differ: Tensor
    count: int
    unit: float
    order: tuple[int, ...]
    steps: Mapping[int, int]

    @property
    def is_part(self) -> bool:
        """True where only a part of a large tensor was looked at."""
        return bool(self.steps)

    def index(self, flat: int) -> str:
        """Return the place of an element, as the tensor is indexed."""
        if self.expected.dim() == 0:
            return "[]"
        place = torch.unravel_index(torch.tensor(flat), self.expected.shape)
        by_axis = {
            axis: int(i) * self.steps.get(axis, 1)
            for axis, i in zip(self.order, place, strict=False)
        }
        return "[" + ", ".join(str(by_axis[axis]) for axis in sorted(by_axis)) + "]"

    def axes(self) -> Iterator[_Axis]:
        """Yield the axes of several indexes, with several elements for each."""
        for place, axis in enumerate(self.order):
            length = self.expected.shape[place]
            if 1 < length <= self.expected.numel() // 4:
                expected, actual, differ = (
                    t.movedim(place, 0).reshape(length, -1)
                    for t in (self.expected, self.actual, self.differ)
                )
                yield _Axis(axis, expected, actual, differ, self.steps.get(axis, 1))

    def stands_out(self) -> bool:
        """Return True where what differs is far beyond the error of the others."""
        size = self.error.abs()
        others = size[~self.differ]
        if not len(others):
            return True
        return float(size[self.differ].max()) > APART * float(others.max())


def _fp64(tensor: Tensor) -> Tensor | None:
    """Return the values in fp64; None for formats without arithmetic."""
    try:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.detach().resolve_conj())
        return tensor.detach().to(torch.float64)
    except (RuntimeError, NotImplementedError):
        return None


def _difference(expected: Tensor, actual: Tensor, unit: float) -> _Difference | None:
    if expected.shape != actual.shape or not actual.numel():
        return None
    if expected.is_complex() != actual.is_complex():
        return None
    dimensions = actual.dim()
    steps = _steps(actual)
    if steps:
        part = tuple(slice(None, None, steps.get(a, 1)) for a in range(dimensions))
        expected = expected[part]
        actual = actual[part]
    wanted = _fp64(expected)
    values = _fp64(actual)
    if wanted is None or values is None:
        return None
    strides = values.stride()
    order = tuple(sorted(range(values.dim()), key=lambda a: (-strides[a], a)))
    wanted = wanted.permute(order)
    values = values.permute(order)
    finite = wanted.isfinite() & values.isfinite()
    wanted = torch.where(finite, wanted, 0.0).contiguous()
    values = torch.where(finite, values, 0.0).contiguous()
    error = values - wanted
    size = error.abs()
    rounding = 4 * unit * wanted.abs() + unit * float(wanted.abs().max()) / 16
    differ = size > rounding.clamp(min=SMALL * float(size.max()))
    count = int(differ.sum())
    return _Difference(
        wanted, values, error, differ, count, unit, order[:dimensions], steps
    )


def _steps(tensor: Tensor) -> dict[int, int]:
    """Of a large tensor the longest axis, and of how many of its indexes one is enough."""
    if tensor.numel() <= LOOKED_AT:
        return {}
    longest = max(range(tensor.dim()), key=lambda axis: tensor.shape[axis])
    return {longest: -(-tensor.numel() // LOOKED_AT)}


def _partly_written(d: _Difference) -> Structure | None:
    """One block at the end of the memory, or of an axis, is wrong, all before is right."""
    size = d.actual.numel()
    if not bool(d.actual.any()) and d.count > 1:
        return Structure(PARTLY_WRITTEN, "every element is zero")
    if d.count < 2 or d.count > MOST * size or not d.stands_out():
        return None
    places = d.differ.reshape(-1).nonzero()[:, 0]
    first = int(places[0])
    held = _held(d.actual.reshape(-1)[places])
    if first and d.count >= WHOLE * (size - first):
        wrong = f"{d.count:,} of {size:,} elements are {held}"
        return Structure(PARTLY_WRITTEN, f"{wrong}, from {d.index(first)} on")
    for axis in d.axes():
        if _wrong_at_the_end(axis, d.count):
            start = int(axis.wrong[0]) * axis.step
            whole = f"axis {axis.number} ({axis.length * axis.step} long)"
            evidence = f"elements are {held} from {start} of {whole} on"
            return Structure(PARTLY_WRITTEN, evidence)
    return None


def _held(values: Tensor) -> str:
    if float(values.max()) != float(values.min()):
        return "not right"
    return "one constant" if bool(values.any()) else "zero"


def _wrong_at_the_end(axis: _Axis, count: int) -> bool:
    """Return True where the last indexes of an axis are wrong, and no others."""
    wrong = axis.wrong
    is_last = int(wrong[-1]) == axis.length - 1
    in_one_block = len(wrong) == axis.length - int(wrong[0])
    if not is_last or not in_one_block or len(wrong) > axis.length // 2:
        return False
    return count >= WHOLE * len(wrong) * axis.differ.shape[1]


def _clipped(d: _Difference) -> Structure | None:
    """The wrong elements stand at one magnitude, and should be larger."""
    size = d.actual[d.differ].abs()
    if len(size) < 2:
        return None
    level = float(size.max())
    if not level or level != float(size.min()):
        return None
    if bool((d.expected[d.differ].abs() < size).any()):
        return None
    stand = f"{len(size):,} values stand at ±{level:.6g}"
    return Structure("overflow", f"{stand} and should be larger: saturated")


def _few(d: _Difference) -> Structure | None:
    """A few elements are far off."""
    size = d.actual.numel()
    if d.is_part or size < 16 or d.count > max(4, size // 1000) or not d.stands_out():
        return None
    first = int(d.differ.reshape(-1).nonzero()[0, 0])
    wanted = float(d.expected.reshape(-1)[first])
    value = float(d.actual.reshape(-1)[first])
    where = f"the first at {d.index(first)}: {value:.6g}, should be {wanted:.6g}"
    evidence = f"{d.count:,} of {size:,} elements differ, {where}"
    return Structure("corrupted elements", evidence)


def _permuted(d: _Difference) -> Structure | None:
    """The same values in other places."""
    if d.is_part or d.expected.numel() < 4:
        return None
    wanted = d.expected.reshape(-1).sort().values
    values = d.actual.reshape(-1).sort().values
    scale = float(wanted.abs().max())
    changed = wanted - values
    if not scale or float(changed.abs().max()) > MOVED * scale:
        return None
    if float(d.error.abs().max()) < 0.05 * scale:
        return None
    if float(changed.norm()) > 0.02 * float(d.error.norm()):
        return None
    evidence = None
    if len(d.order) == d.expected.dim():
        evidence = _exchanged_axes(d, scale) or _reordered_axis(d, scale)
    return Structure(WRONG_AXIS, evidence or "the same values in other places")


def _exchanged_axes(d: _Difference, scale: float) -> str | None:
    back = sorted(range(d.expected.dim()), key=lambda place: d.order[place])
    wanted = d.expected.permute(back)
    values = d.actual.permute(back)
    shape = list(values.shape)
    for first, second in combinations(range(len(shape)), 2):
        turned = wanted.transpose(first, second).reshape(shape)
        if torch.allclose(turned, values, rtol=MOVED, atol=MOVED * scale):
            return f"axes {first} and {second} of {shape} are exchanged"
    return None


def _reordered_axis(d: _Difference, scale: float) -> str | None:
    for axis in d.axes():
        wanted = axis.expected[axis.expected.norm(dim=1).argsort()]
        values = axis.actual[axis.actual.norm(dim=1).argsort()]
        if torch.allclose(wanted, values, rtol=MOVED, atol=MOVED * scale):
            return f"axis {axis.number} of {axis.length} is in another order"
    return None


def _scaled(d: _Difference) -> Structure | None:
    """All elements have one factor, or one constant too much."""
    wanted = d.expected.reshape(-1)
    values = d.actual.reshape(-1)
    error = d.error.reshape(-1)
    square = float(wanted @ wanted)
    total = float(error @ error)
    if not square or not total:
        return None
    factor = float(wanted @ values) / square
    fraction = _fraction(factor, max(d.unit, 2.0**-24))
    # of a single value everything is a factor: only a ratio of small numbers says
    # something
    telling = len(wanted) > 1 or (fraction and d.unit < _COARSE)
    if factor and telling and _square(values - factor * wanted) < FIT * total:
        evidence = f"{factor:.6g}{fraction} times what it should be"
        return Structure("constant factor", evidence)
    shift = float(error.mean())
    if len(error) > 1 and _square(error - shift) < FIT * total:
        return Structure("constant offset", f"{shift:+.4g} everywhere")
    return None


def _square(values: Tensor) -> float:
    return float((values * values).sum())


def _fraction(factor: float, unit: float) -> str:
    """Return `` (1/3)`` for a factor near a ratio of small numbers; empty for others."""
    near = Fraction(factor).limit_denominator(DENOMINATOR)
    off = abs(float(near) - factor)
    if near.denominator == 1 or abs(near.numerator) > DENOMINATOR:
        return ""
    return f" ({near})" if off <= 8 * unit * abs(factor) else ""


def _scaled_along_an_axis(d: _Difference) -> Structure | None:
    """Each index of an axis has a factor or a constant of its own."""
    total = _square(d.error)
    for axis in d.axes():
        wanted = axis.expected
        values = axis.actual
        if wanted.shape[1] < 4:
            continue
        each = f"each index of axis {axis.number} by its own"
        square = (wanted * wanted).sum(1)
        factor = torch.where(square > 0, (wanted * values).sum(1) / square, 1.0)
        left = _square(values - factor[:, None] * wanted)
        if left < FIT * total and bool(factor.all()):
            ends = f"{float(factor.min()):.6g} to {float(factor.max()):.6g}"
            evidence = f"{each}: {ends} times what it should be"
            return Structure("constant factor", evidence)
        shift = (values - wanted).mean(1)
        if _square(values - wanted - shift[:, None]) < FIT * total:
            ends = f"{float(shift.min()):+.4g} to {float(shift.max()):+.4g}"
            return Structure("constant offset", f"{each}: {ends}")
    return None


def _wrong_slices(d: _Difference) -> Structure | None:
    """Some indexes of an axis are wrong; they may hold what others should."""
    for axis in d.axes():
        wrong = axis.wrong
        most_of_them = d.count >= MOST * len(wrong) * axis.expected.shape[1]
        if len(wrong) > min(axis.length / 2, SLICES) or not most_of_them:
            continue
        other = _holds_another_index(axis, wrong)
        if other is not None:
            first = int(wrong[0]) * axis.step
            more = f", and {len(wrong) - 1} more like it" if len(wrong) > 1 else ""
            held = f"index {first} of axis {axis.number} holds what index {other}"
            return Structure("stale or shared buffer", f"{held} should{more}")
        named = ", ".join(str(int(index) * axis.step) for index in wrong[:4])
        if len(wrong) > 4:
            named += ", ..."
        whole = f"{axis.length * axis.step} indices of axis {axis.number}"
        evidence = f"{len(wrong)} of {whole} are wrong: {named}"
        return Structure("corrupted elements", evidence)
    return None


def _holds_another_index(axis: _Axis, wrong: Tensor) -> int | None:
    """Return the index whose values the first wrong index holds, where all hold another's."""
    held = axis.actual[wrong]
    if len(wrong) * axis.length > LOOKED_AT or not bool(held.any()):
        return None
    distance = torch.cdist(held, axis.expected)
    distance[torch.arange(len(wrong)), wrong] = torch.inf
    nearest, place = distance.min(1)
    if not bool((nearest <= MOVED * held.norm(dim=1)).all()):
        return None
    return int(place[0]) * axis.step


#: In this order: the first that fits describes the difference.
_CLASSIFIERS = (
    _partly_written,
    _clipped,
    _few,
    _permuted,
    _scaled,
    _scaled_along_an_axis,
    _wrong_slices,
)
