"""The structure of the difference of two tensors: an end that was not written, an exchanged axis, a factor, a constant...

Each classifier is a few lines over the expected and the actual values; the first that fits gives a label and the evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

Found = tuple[str, str]

#: A fit is one that leaves this share of the squared difference.
FIT = 1e-4
#: More wrong elements than this share are no part of a result.
MOST = 0.75
#: Differences below this share of the largest one are not looked at: the kernel's own rounding.
SMALL = 2.0**-10
#: Wrong elements stand out where they are this many times as far off as the worst of the others.
APART = 8.0
#: Of larger tensors every k-th slice of the longest axis is looked at.
LOOKED_AT = 2**20
#: Slices of an axis that are compared with all others; factors that are named as fractions, up to this denominator.
SLICES, DENOMINATOR = 256, 16


def structure(expected: Tensor, actual: Tensor, unit: float) -> Found | None:
    """The first description that fits, or None; neither tensor is changed.

    Args:
        expected: what it should be, of the shape of ``actual``, any format.
        actual: what it is.
        unit: unit roundoff of the actual's format, 0 for integers: what is below a few roundings is no difference.

    Elements that are not finite on both sides are left out. None for empty tensors, for those that agree, and for formats
    without arithmetic.
    """
    seen = _seen(expected, actual, unit)
    if seen is None or not seen.count:
        return None
    for classify in (_partly, _clipped, _few, _permuted, _scaled, _by_axis, _slices):
        found = classify(seen)
        if found is not None:
            return found
    return None


def usual_error(expected: Tensor, actual: Tensor) -> float | None:
    """The median of the relative errors of the elements that differ; None where there are none.

    >>> usual_error(torch.tensor([2.0, 4.0, 8.0]), torch.tensor([2.0, 5.0, 10.0]))
    0.25
    """
    seen = _seen(expected, actual, 0.0)
    if seen is None or not seen.count:
        return None
    known = seen.differ & (seen.want != 0)
    return (
        float((seen.off[known] / seen.want[known]).abs().median())
        if bool(known.any())
        else None
    )


def fewer_digits(expected: Tensor, actual: Tensor, unit: float) -> str | None:
    """The format whose numbers all values are, where those expected are not: ``bfloat16``, ``float16``."""
    want, got = _flat(expected), _flat(actual)
    for dtype in (torch.bfloat16, torch.float16):
        if (
            want is None
            or got is None
            or unit >= torch.finfo(dtype).eps / 2
            or not bool(got.any())
        ):
            continue
        if _among(got, dtype) and not _among(want, dtype):
            return str(dtype).removeprefix("torch.")
    return None


def _among(values: Tensor, dtype: torch.dtype) -> bool:
    fine = values[values.isfinite()]
    return torch.equal(fine.to(dtype).to(torch.float64), fine)


@dataclass(frozen=True)
class _Seen:
    """Both tensors in fp64, zero where one is not finite, their axes in the order of the actual's memory."""

    want: Tensor
    got: Tensor
    off: Tensor
    differ: Tensor
    count: int
    unit: float
    order: tuple[int, ...]
    step: dict[int, int]
    part: bool

    def index(self, flat: int) -> str:
        """The place of an element, as the tensor is indexed."""
        if self.want.dim() == 0:
            return "[]"
        place = [
            int(i) for i in torch.unravel_index(torch.tensor(flat), self.want.shape)
        ]
        found = {
            axis: i * self.step.get(axis, 1)
            for axis, i in zip(self.order, place, strict=False)
        }
        return "[" + ", ".join(str(found[axis]) for axis in sorted(found)) + "]"

    def axes(self) -> list[tuple[int, Tensor, Tensor, Tensor]]:
        """Of each axis of more than one index, with several elements for each: its number, wanted, actual and differing
        values, one row for each index."""
        found = []
        for place, axis in enumerate(self.order):
            length = self.want.shape[place]
            if 1 < length <= self.want.numel() // 4:
                rows = [
                    t.movedim(place, 0).reshape(length, -1)
                    for t in (self.want, self.got, self.differ)
                ]
                found.append((axis, rows[0], rows[1], rows[2]))
        return found


def _flat(tensor: Tensor) -> Tensor | None:
    try:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.detach().resolve_conj())
        return tensor.detach().to(torch.float64)
    except (RuntimeError, NotImplementedError):
        return None


def _seen(expected: Tensor, actual: Tensor, unit: float) -> _Seen | None:
    if expected.shape != actual.shape or not actual.numel():
        return None
    step: dict[int, int] = {}
    if actual.numel() > LOOKED_AT:
        axis = max(range(actual.dim()), key=lambda a: actual.shape[a])
        step[axis] = -(-actual.numel() // LOOKED_AT)
        cut = tuple(slice(None, None, step.get(a, 1)) for a in range(actual.dim()))
        expected, actual = expected[cut], actual[cut]
    want, got = _flat(expected), _flat(actual)
    if want is None or got is None:
        return None
    strides = got.stride()
    order = tuple(sorted(range(got.dim()), key=lambda a: (-strides[a], a)))
    want, got = want.permute(order), got.permute(order)
    fine = want.isfinite() & got.isfinite()
    want, got = (
        torch.where(fine, want, 0.0).contiguous(),
        torch.where(fine, got, 0.0).contiguous(),
    )
    off = got - want
    size = off.abs()
    rounding = 4 * unit * want.abs() + unit * float(want.abs().max()) / 16
    differ = size > rounding.clamp(min=SMALL * float(size.max()))
    return _Seen(
        want,
        got,
        off,
        differ,
        int(differ.sum()),
        unit,
        order[: actual.dim()],
        step,
        bool(step),
    )


def _partly(seen: _Seen) -> Found | None:
    """One block at the end of the memory (or the last indices of an axis) is wrong, and all before it is right."""
    size = seen.got.numel()
    if not bool(seen.got.any()) and seen.count > 1:
        return "partly written output", "every element is zero"
    if seen.count < 2 or seen.count > MOST * size or not _stands_out(seen):
        return None
    places = seen.differ.reshape(-1).nonzero()[:, 0]
    first, values = int(places[0]), seen.got.reshape(-1)[places]
    held = "not right"
    if float(values.max()) == float(values.min()):
        held = "one constant" if bool(values.any()) else "zero"
    if first and seen.count >= 0.8 * (size - first):
        return (
            "partly written output",
            f"{seen.count:,} of {size:,} elements are {held}, from {seen.index(first)} on",
        )
    for axis, _, _, differ in seen.axes():
        hit, length = differ.any(1).nonzero()[:, 0], len(differ)
        last = int(hit[-1]) == length - 1 and len(hit) == length - int(hit[0])
        if (
            last
            and len(hit) <= length // 2
            and seen.count >= 0.8 * len(hit) * differ.shape[1]
        ):
            step = seen.step.get(axis, 1)
            start = int(hit[0]) * step
            return (
                "partly written output",
                f"elements are {held} from {start} of axis {axis} ({length * step} long) on",
            )
    return None


def _stands_out(seen: _Seen) -> bool:
    """Whether what differs is far beyond what the other elements are off by."""
    size = seen.off.abs()
    others = size[~seen.differ]
    return not len(others) or float(size[seen.differ].max()) > APART * float(
        others.max()
    )


def _clipped(seen: _Seen) -> Found | None:
    """What differs stands at one magnitude, and should be larger."""
    size = seen.got[seen.differ].abs()
    if len(size) < 2 or float(size.max()) != float(size.min()) or not float(size.max()):
        return None
    if bool((seen.want[seen.differ].abs() < size).any()):
        return None
    return (
        "overflow",
        f"{len(size):,} values stand at ±{float(size.max()):.6g} and should be larger: saturated",
    )


def _few(seen: _Seen) -> Found | None:
    size = seen.got.numel()
    if (
        seen.part
        or seen.count > max(4, size // 1000)
        or size < 16
        or not _stands_out(seen)
    ):
        return None
    first = int(seen.differ.reshape(-1).nonzero()[0, 0])
    want, got = (float(t.reshape(-1)[first]) for t in (seen.want, seen.got))
    there = f"the first at {seen.index(first)}: {got:.6g}, should be {want:.6g}"
    return "corrupted elements", f"{seen.count:,} of {size:,} elements differ, {there}"


def _permuted(seen: _Seen) -> Found | None:
    """The same values in other places."""
    if seen.part or seen.want.numel() < 4:
        return None
    a, b = seen.want.reshape(-1).sort().values, seen.got.reshape(-1).sort().values
    scale = float(a.abs().max())
    most, moved = float((a - b).abs().max()), float(seen.off.abs().max())
    if (
        not scale
        or most > 1e-3 * scale
        or moved < 0.05 * scale
        or float((a - b).norm()) > 0.02 * float(seen.off.norm())
    ):
        return None
    if len(seen.order) == seen.want.dim():
        return "wrong axis or layout", _turned(seen, scale) or _reordered(
            seen, scale
        ) or "the same values in other places"
    return "wrong axis or layout", "the same values in other places"


def _turned(seen: _Seen, scale: float) -> str | None:
    back = sorted(range(seen.want.dim()), key=lambda place: seen.order[place])
    want, got = seen.want.permute(back), seen.got.permute(back)
    for first in range(want.dim()):
        for second in range(first + 1, want.dim()):
            if torch.allclose(
                want.transpose(first, second).reshape(got.shape),
                got,
                rtol=1e-3,
                atol=1e-3 * scale,
            ):
                return f"axes {first} and {second} of {list(got.shape)} are exchanged"
    return None


def _reordered(seen: _Seen, scale: float) -> str | None:
    for axis, want, got, _ in seen.axes():
        one, other = want.norm(dim=1).argsort(), got.norm(dim=1).argsort()
        if torch.allclose(want[one], got[other], rtol=1e-3, atol=1e-3 * scale):
            return f"axis {axis} of {len(want)} is in another order"
    return None


def _scaled(seen: _Seen) -> Found | None:
    want, got, off = seen.want.reshape(-1), seen.got.reshape(-1), seen.off.reshape(-1)
    square, total = float(want @ want), float(off @ off)
    if not square or not total:
        return None
    factor = float(want @ got) / square
    ratio = _fraction(factor, max(seen.unit, 2.0**-24))
    rest = got - factor * want
    # of a single value everything is a factor: only a ratio of small numbers says something
    if (
        factor
        and float(rest @ rest) < FIT * total
        and (len(want) > 1 or (ratio and seen.unit < 2.0**-12))
    ):
        return "constant factor", f"{factor:.6g}{ratio} times what it should be"
    shift = float(off.mean())
    rest = off - shift
    if len(off) > 1 and float(rest @ rest) < FIT * total:
        return "constant offset", f"{shift:+.4g} everywhere"
    return None


def _fraction(factor: float, unit: float) -> str:
    near = Fraction(factor).limit_denominator(DENOMINATOR)
    if (
        near.denominator == 1
        or abs(near.numerator) > DENOMINATOR
        or abs(float(near) - factor) > 8 * unit * abs(factor)
    ):
        return ""
    return f" ({near})"


def _by_axis(seen: _Seen) -> Found | None:
    """Each index of an axis has a factor or a constant of its own."""
    total = float((seen.off**2).sum())
    for axis, want, got, _ in seen.axes():
        if want.shape[1] < 4:
            continue
        square = (want * want).sum(1)
        factor = torch.where(square > 0, (want * got).sum(1) / square, 1.0)
        if float(((got - factor[:, None] * want) ** 2).sum()) < FIT * total and bool(
            factor.all()
        ):
            ends = f"{float(factor.min()):.6g} to {float(factor.max()):.6g}"
            return (
                "constant factor",
                f"each index of axis {axis} by its own: {ends} times what it should be",
            )
        shift = (got - want).mean(1)
        if float(((got - want - shift[:, None]) ** 2).sum()) < FIT * total:
            ends = f"{float(shift.min()):+.4g} to {float(shift.max()):+.4g}"
            return "constant offset", f"each index of axis {axis} by its own: {ends}"
    return None


def _slices(seen: _Seen) -> Found | None:
    """Some indices of an axis are wrong, the others right: what they hold may be what others should."""
    for axis, want, got, differ in seen.axes():
        hit = differ.any(1).nonzero()[:, 0]
        if (
            len(hit) > len(want) / 2
            or seen.count < MOST * len(hit) * want.shape[1]
            or len(hit) > SLICES
        ):
            continue
        step = seen.step.get(axis, 1)
        near = torch.full((len(hit),), torch.inf)
        if len(hit) * len(want) <= LOOKED_AT:
            apart = torch.cdist(got[hit], want)
            apart[torch.arange(len(hit)), hit] = torch.inf
            near, place = apart.min(1)
        if bool((near <= 1e-3 * got[hit].norm(dim=1)).all()) and bool(got[hit].any()):
            one, other = int(hit[0]) * step, int(place[0]) * step
            more = f", and {len(hit) - 1} more like it" if len(hit) > 1 else ""
            return (
                "stale or shared buffer",
                f"index {one} of axis {axis} holds what index {other} should{more}",
            )
        named = ", ".join(str(int(h) * step) for h in hit[:4]) + (
            ", ..." if len(hit) > 4 else ""
        )
        return (
            "corrupted elements",
            f"{len(hit)} of {len(want) * step} indices of axis {axis} are wrong: {named}",
        )
    return None
