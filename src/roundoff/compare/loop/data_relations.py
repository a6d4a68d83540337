"""How the data of two runs differ, in words: another order, other samples, a factor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from roundoff.compare.loop.loaded_values import statistics_factor
from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.records.value_sketch import in_reals

#: A fit leaves at most this share of the difference's squares.
FIT = 1e-6
#: Of data that nothing leads to from the reference's.
OTHER_VALUES = "has other values"
#: Values of one channel that a factor and an offset are fitted to, at the least.
_CHANNEL = 8


def how_data_differ(ours: Tensor, theirs: Tensor) -> str:
    """Return how the candidate's data differ from the reference's, in words.

    >>> batch = torch.tensor([[1.0, 2.0], [3.0, 5.0], [4.0, 9.0]])
    >>> how_data_differ(batch, batch.flip(0))
    'has the same 3 samples in another order'
    >>> how_data_differ(batch, 1.02 * batch)
    "is 1.02 times the reference's"
    >>> how_data_differ(batch, 2 * batch - 1)
    "is the reference's times 2 plus -1: scaled otherwise"
    >>> how_data_differ(batch, batch + torch.tensor([1e-5, 0.0]))
    "is 1.5e-06 of its size apart from the reference's"
    >>> how_data_differ(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 0]))
    "has 1 of 4 values unlike the reference's"
    """
    return (
        _same_samples(ours, theirs)
        or _same_values(ours, theirs)
        or _scaled(ours, theirs)
        or _scaled_by_channel(ours, theirs)
        or _few(ours, theirs)
    )


def statistics_words(twin: RecordedRow, row: RecordedRow) -> str:
    factor = statistics_factor(twin, row)
    if factor is not None:
        return f"is {factor:.6g} times the reference's, by its statistics"
    affine = _affine(
        (twin.min, twin.max, twin.mean), (row.min, row.max, row.mean), twin, row
    )
    if affine is not None:
        return f"is the reference's {affine}, by its statistics: scaled otherwise"
    return "has other values, by its statistics"


def _affine(
    ours: Sequence[float | None],
    theirs: Sequence[float | None],
    twin: RecordedRow,
    row: RecordedRow,
) -> str | None:
    """Return the factor and offset that lead from one row's statistics to the other's."""
    if None in (*ours, *theirs) or not twin.std or row.std is None or not row.std:
        return None
    factor = row.std / twin.std
    low, _, mean = (value or 0.0 for value in ours)
    other_low, other_high, other_mean = (value or 0.0 for value in theirs)
    offset = other_mean - factor * mean
    fits = [
        abs(factor * a + offset - b) <= 1e-5 * max(abs(other_low), abs(other_high))
        for a, b in ((low, other_low), (twin.max or 0.0, other_high))
    ]
    return f"times {factor:.4g} plus {offset:.4g}" if all(fits) else None


def _same_samples(ours: Tensor, theirs: Tensor) -> str | None:
    if not ours.dim() or len(ours) < 2 or not ours.numel():
        return None
    mine = _samples(ours)
    others = _samples(theirs)
    if sorted(mine) == sorted(others):
        return f"has the same {len(mine)} samples in another order"
    if ours.dim() < 2:
        return None  # labels: values that come again
    common = len({*mine} & {*others})
    if common:
        return f"has {common} of the reference's {len(mine)} samples, and others"
    return None


def _samples(tensor: Tensor) -> list[bytes]:
    """Return the bytes of each sample."""
    flat = tensor.detach().contiguous().reshape(len(tensor), -1)
    rows = flat.view(torch.uint8).numpy(force=True)
    return [row.tobytes() for row in rows]


def _same_values(ours: Tensor, theirs: Tensor) -> str | None:
    mine = in_reals(ours.detach()).reshape(-1).sort().values
    others = in_reals(theirs.detach()).reshape(-1).sort().values
    if mine.numel() > 1 and torch.equal(mine, others):
        return "has the same values in another order"
    return None


def _scaled(ours: Tensor, theirs: Tensor) -> str | None:
    if not ours.is_floating_point() or not theirs.is_floating_point():
        return None
    x = ours.detach().to(torch.float64).reshape(-1)
    y = theirs.detach().to(torch.float64).reshape(-1)
    square = float(x @ x)
    if not square or x.numel() < 3 or not bool((x.isfinite() & y.isfinite()).all()):
        return None
    factor = float(x @ y) / square
    if factor and float((factor * x - y).square().sum()) <= FIT * float(y @ y):
        times = f"{factor:.6g}"
        if times != "1":
            return f"is {times} times the reference's"
        apart = float((x - y).norm() / x.norm())
        return f"is {apart:.1e} of its size apart from the reference's"
    centred = x - x.mean()
    spread = float(centred @ centred)
    if not spread:
        return None
    factor = float(centred @ (y - y.mean())) / spread
    offset = float(y.mean() - factor * x.mean())
    rest = float((factor * x + offset - y).square().sum())
    if factor and rest <= FIT * float((y - y.mean()).square().sum()):
        return (
            f"is the reference's times {factor:.6g} plus {offset:.4g}: scaled otherwise"
        )
    return None


def _scaled_by_channel(ours: Tensor, theirs: Tensor) -> str | None:
    """Return the words for a factor and an offset for each entry of a dimension."""
    if not ours.is_floating_point() or not theirs.is_floating_point():
        return None
    for dim in dict.fromkeys((1, ours.dim() - 1)):
        if not 1 <= dim < ours.dim() or ours.shape[dim] < 2:
            continue
        channels = ours.shape[dim]
        x = ours.detach().to(torch.float64).movedim(dim, 0).reshape(channels, -1)
        y = theirs.detach().to(torch.float64).movedim(dim, 0).reshape(channels, -1)
        if x.shape[1] >= _CHANNEL and _fits_by_row(x, y):
            return (
                f"is the reference's times a factor plus an offset for each of the "
                f"{channels} entries of dimension {dim}: scaled otherwise"
            )
    return None


def _fits_by_row(x: Tensor, y: Tensor) -> bool:
    centred = x - x.mean(1, keepdim=True)
    wanted = y - y.mean(1, keepdim=True)
    spread = centred.square().sum(1, keepdim=True)
    factors = (centred * wanted).sum(1, keepdim=True) / spread.clamp_min(1e-300)
    rest = (factors * centred - wanted).square().sum()
    size = wanted.square().sum()
    return bool(size > 0) and bool(rest <= FIT * size)


def _few(ours: Tensor, theirs: Tensor) -> str:
    is_same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    differing = int((~is_same).sum())
    if differing == ours.numel():
        return OTHER_VALUES
    return f"has {differing:,} of {ours.numel():,} values unlike the reference's"
