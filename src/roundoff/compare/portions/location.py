"""Where a piece stands in a whole, by its values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from roundoff.compare.tensors.nearest import to_nearest

#: Places tried along all axes but the first, at most.
MOST_PLACES = 1024
#: Elements looked at for all places together, at most.
MOST_WORK = 2**27
#: Pairs of rows whose sketches are compared, at most.
MOST_PAIRS = 2**24
#: Elements that are looked for before anything else is tried.
SAMPLE = 64
#: Random projections of a row, which tell rows apart.
_PROJECTIONS = 4


@dataclass(frozen=True, slots=True)
class Location:
    """Where a piece stands in a whole.

    Attributes:
        error: relative l2 distance of what stands in both.
        factor: the piece is this many times the whole's values.
        covered: which elements of the whole the piece has; of the whole's shape.
        complete: every element of the piece stands in the whole; else the piece is
            larger, as a padded one is.
    """

    error: float
    factor: float
    covered: Tensor
    complete: bool


def locate(
    whole: Tensor,
    piece: Tensor,
    tolerance: float,
    factors: Sequence[float] = (1.0,),
    *,
    reordered: bool = True,
) -> Location | None:
    """Return where ``piece`` stands in ``whole``; None where it does nowhere.

    Along the first axis a piece may have any rows in any order; along the others it is
    a stretch, or the whole is a stretch of it (padding). Where the axes do not fit,
    both are taken as rows of their last axis. Elements that are not finite must be the
    same. Of two forms in which it stands there, the one that has all of the piece.

    Args:
        whole: any shape and format.
        piece: the same.
        tolerance: largest relative l2 distance.
        factors: that the piece may be of the whole, the first that fits.
        reordered: rows of the first axis may be in any order; else a stretch of it.
    """
    if not whole.numel() or not piece.numel():
        return None
    for form in _forms(_comparable(whole), _comparable(piece)):
        if not reordered:
            form = (form[0][None], form[1][None])
        for factor in factors:
            if not _is_plausible(*form, tolerance, factor):
                continue
            location = _locate(*form, tolerance, factor)
            if location is not None:
                covered = location.covered.view(*whole.shape, -1).any(-1)
                return Location(
                    location.error, factor, covered, complete=location.complete
                )
    return None


def is_inside(whole: Tensor, piece: Tensor) -> bool:
    """Return True where a piece, if it stands in a tensor, does so with all its elements."""
    if whole.is_complex() or piece.is_complex() or not whole.ndim or not piece.ndim:
        return False
    if whole.ndim == piece.ndim and not _fits(whole.shape, piece.shape):
        return False
    is_of_rows = whole.shape[-1] == piece.shape[-1] and piece.numel() <= whole.numel()
    return is_of_rows or whole.ndim == piece.ndim


def extremes(tensor: Tensor) -> tuple[float, float, float]:
    """Return the least and the largest element, and the l2 norm; infinities for special
    values."""
    wide = tensor.detach().to(torch.float64)
    if not wide.numel() or not bool(torch.isfinite(wide).all()):
        return -math.inf, math.inf, math.inf
    return float(wide.min()), float(wide.max()), float(wide.norm())


def _comparable(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().to(torch.float64)


def _forms(whole: Tensor, piece: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield both in two or more dimensions of the same number."""
    if whole.ndim == piece.ndim:
        if whole.ndim < 2:
            yield whole.reshape(1, -1), piece.reshape(1, -1)
            return
        if _fits(whole.shape, piece.shape):
            yield whole, piece
    if whole.ndim and piece.ndim and whole.shape[-1] == piece.shape[-1]:
        width = whole.shape[-1]
        yield whole.reshape(-1, width), piece.reshape(-1, width)
    if whole.ndim == piece.ndim and not _fits(whole.shape, piece.shape):
        yield whole, piece


def _is_plausible(
    whole: Tensor, piece: Tensor, tolerance: float, factor: float
) -> bool:
    """Return False where some elements of the one that is inside are not in the other."""
    if _fits(whole.shape, piece.shape):
        inner = piece
        outer = whole * factor
    elif _fits(piece.shape, whole.shape):
        inner = whole * factor
        outer = piece
    else:
        return True
    sample = inner.flatten()[:: max(1, inner.numel() // SAMPLE)]
    sample = sample[torch.isfinite(sample)]
    values = outer.flatten()
    values = values[torch.isfinite(values)].sort().values
    if not sample.numel() or not values.numel():
        return True
    gaps = to_nearest(values, sample)
    # no element is further off than all of them together may be
    return bool(gaps.max() <= 2 * tolerance * values.norm())


def _fits(whole: Sequence[int], piece: Sequence[int]) -> bool:
    """Return True where no axis of the piece is longer."""
    return all(p <= w for w, p in zip(whole, piece, strict=True))


def _locate(
    whole: Tensor, piece: Tensor, tolerance: float, factor: float
) -> Location | None:
    """Return the location of tensors of two or more dimensions, of the same number."""
    starts = [
        range(abs(w - p) + 1)
        for w, p in zip(whole.shape[1:], piece.shape[1:], strict=True)
    ]
    places = math.prod(len(each) for each in starts)
    if places > MOST_PLACES or places * max(whole.numel(), piece.numel()) > MOST_WORK:
        return None
    likely = _likely(whole, piece, tolerance, factor) if places > 1 else None
    for start in product(*starts) if likely is None else likely:
        location = _located_at(whole, piece, start, tolerance, factor)
        if location is not None:
            return location
    return None


def _likely(
    whole: Tensor, piece: Tensor, tolerance: float, factor: float
) -> list[list[int]] | None:
    """Return the starts at which the first elements that both have agree in some row.

    None where they are no numbers. Of the one with fewer rows all have to be in the other.
    """
    ours = _first_elements(whole, piece) * factor
    theirs = _first_elements(piece, whole)
    if len(piece) <= len(whole):
        theirs = theirs[:1]
    else:
        ours = ours[:1]
    # no element is further off than all of them together may be
    slack = 2 * tolerance * float(whole.norm()) * abs(factor)
    if not math.isfinite(slack + float(ours.abs().max() + theirs.abs().max())):
        return None
    near = ((ours - theirs).abs() <= slack).any(0)
    return [[int(place) for place in start] for start in near.nonzero()]


def _first_elements(tensor: Tensor, other: Tensor) -> Tensor:
    """Return the elements at which a stretch as long as another tensor may begin, by row."""
    axes = zip(tensor.shape[1:], other.shape[1:], strict=True)
    starts = [slice(max(size - length, 0) + 1) for size, length in axes]
    return tensor[(slice(None), *starts)]


def _located_at(
    whole: Tensor,
    piece: Tensor,
    start: Sequence[int],
    tolerance: float,
    factor: float,
) -> Location | None:
    """Return the location of a piece that starts there along all axes but the first."""
    of_whole = [slice(None)]
    of_piece = [slice(None)]
    for first, w, p in zip(start, whole.shape[1:], piece.shape[1:], strict=True):
        stretch = slice(first, first + min(w, p))
        of_whole.append(stretch if w > p else slice(None))
        of_piece.append(stretch if p > w else slice(None))
    part = piece[tuple(of_piece)]
    matched = _matched_rows(whole[tuple(of_whole)], part, tolerance, factor)
    if matched is None:
        return None
    error, rows = matched
    covered = torch.zeros(whole.shape, dtype=torch.bool)
    covered[tuple(of_whole)] |= rows.view(-1, *(1,) * (whole.ndim - 1))
    complete = part.numel() == piece.numel() and len(piece) <= len(whole)
    return Location(error, factor, covered, complete)


def _matched_rows(
    whole: Tensor, piece: Tensor, tolerance: float, factor: float
) -> tuple[float, Tensor] | None:
    """Return the distance, and which rows of the whole the piece has; None for others.

    All rows of the shorter one have to be in the other one.
    """
    ours = whole.reshape(len(whole), -1)
    theirs = piece.reshape(len(piece), -1)
    if ours.shape == theirs.shape:
        error = _distance(ours, theirs, factor)
        if error <= tolerance:
            return error, torch.ones(len(ours), dtype=torch.bool)
    if len(ours) * len(theirs) > MOST_PAIRS or len(ours) == 1 == len(theirs):
        return None
    gaps = torch.cdist(_sketch(ours) * factor, _sketch(theirs))
    if len(theirs) <= len(ours):
        nearest = gaps.argmin(0)
        error = _distance(ours[nearest], theirs, factor)
    else:
        nearest = torch.arange(len(ours))
        error = _distance(ours, theirs[gaps.argmin(1)], factor)
    if not error <= tolerance:
        return None
    # equal rows of the whole are covered by one of them
    rows = torch.zeros(len(ours), dtype=torch.bool)
    rows[nearest] = True
    near = gaps.min(1).values
    scale = _sketch(ours).norm(dim=1) * abs(factor)
    rows |= near <= tolerance * scale + torch.finfo(torch.float64).tiny
    return error, rows


def _sketch(rows: Tensor) -> Tensor:
    finite = torch.nan_to_num(rows, nan=1.5, posinf=2.5, neginf=-2.5)
    return finite @ _directions(rows.shape[1])


@lru_cache(maxsize=64)
def _directions(width: int) -> Tensor:
    draw = torch.Generator().manual_seed(width)
    return torch.randn(width, _PROJECTIONS, generator=draw, dtype=torch.float64)


def _distance(ours: Tensor, theirs: Tensor, factor: float) -> float:
    """Return |theirs - factor ours| / |factor ours|; infinite where special values differ."""
    finite = torch.isfinite(ours)
    if not torch.equal(finite, torch.isfinite(theirs)):
        return math.inf
    x = torch.where(finite, ours, 0.0) * factor
    y = torch.where(finite, theirs, 0.0)
    difference = float((x - y).norm())
    if not difference:
        return 0.0
    size = float(x.norm())
    return difference / size if size else math.inf


def holds_stretch(buffer: Tensor, wanted: Tensor, tolerance: float) -> bool:
    """Return True where the elements of one stand in the other, one after the other.

    Within a relative l2 distance; zeros, which say nothing, stand nowhere.
    """
    memory = _comparable(buffer).flatten()
    values = _comparable(wanted).flatten()
    size = float(values.norm())
    if not size or not math.isfinite(size) or len(memory) < len(values):
        return False
    # by the largest element: zeros stand in many places
    largest = int(values.abs().argmax())
    last = len(memory) - len(values)
    gaps = (memory[largest : largest + last + 1] - values[largest]).abs()
    # one element is no further off than all of them together may be
    for start in (gaps <= tolerance * size).nonzero().flatten().tolist():
        stretch = memory[start : start + len(values)]
        if _distance(values, stretch, 1.0) <= tolerance:
            return True
    return False


def multiple(whole: Tensor, total: Tensor, tolerance: float) -> float | None:
    """Return how many times the whole a sum of pieces is; None where it is no multiple.

    Both of the same shape. Zeros are no multiple of anything.
    """
    ours = _comparable(whole).flatten()
    theirs = _comparable(total).flatten()
    size = float(ours @ ours)
    if ours.shape != theirs.shape or not size or not math.isfinite(size):
        return None
    factor = float(ours @ theirs) / size
    if not factor > 0:
        return None
    return factor if _distance(ours, theirs, factor) <= tolerance else None
