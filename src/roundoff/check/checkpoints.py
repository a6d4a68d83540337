"""Two checkpoints: which tensors differ, by how much, and what is called otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roundoff.check.checkpoint_files import Checkpoint, read_checkpoint
from roundoff.compare import relation

#: What wrappers and files put before the names of a state.
_PREFIXES = ("state_dict.", "model.", "module.", "_orig_mod.", "model_state_dict.")
#: Tensors of one side alone whose counterpart is looked for, and their elements.
_MOST_LOST = 64
_LARGEST_LOST = 2**24
#: Elements that are widened to fp64 at a time.
_PIECE = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """A tensor of both checkpoints.

    Attributes:
        name: in the reference.
        dtypes: of the reference and the candidate.
        shapes: likewise.
        equal: bit for bit, dtype included.
        change: norm of the difference relative to the reference's; None where shapes
            differ or a value is not finite, infinite where the reference is zero.
        cosine: of the two; None where one is zero.
        largest: the largest absolute difference.
        nonfinite: how many values of the candidate are NaN or Inf where the reference's
            are other.
        hint: how the candidate holds the reference's values, where that can be told.
    """

    name: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    equal: bool
    change: float | None = None
    cosine: float | None = None
    largest: float | None = None
    nonfinite: int = 0
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """A tensor that the other checkpoint has under another name."""

    reference: str
    candidate: str
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCheck:
    """What two checkpoints have otherwise.

    Attributes:
        reference: where it is.
        candidate: where it is.
        changes: the tensors of both, the largest relative change first.
        only_reference: names that the candidate lacks.
        only_candidate: names that the reference lacks.
        renamed: of those, pairs with the same values.
        prefixes: what was taken from the front of the names, to match them.
    """

    reference: str
    candidate: str
    changes: tuple[TensorChange, ...]
    only_reference: tuple[str, ...]
    only_candidate: tuple[str, ...]
    renamed: tuple[Renamed, ...]
    prefixes: tuple[str, str]

    @property
    def differing(self) -> tuple[TensorChange, ...]:
        """The tensors that are not equal bit for bit."""
        return tuple(change for change in self.changes if not change.equal)

    @property
    def verdict(self) -> str:
        """``comparable`` where all is equal, or ``differ``."""
        others = self.differing or self.only_reference or self.only_candidate
        return "differ" if others else "comparable"


def check_checkpoints(reference: str, candidate: str) -> CheckpointCheck:
    """Compare two checkpoints, tensor by tensor; neither is in memory as a whole.

    Raises ``RunError`` where one cannot be read.
    """
    ours = read_checkpoint(reference)
    theirs = read_checkpoint(candidate)
    prefixes = _prefixes(ours.readers, theirs.readers)
    mine = {name.removeprefix(prefixes[0]): name for name in ours.readers}
    others = {name.removeprefix(prefixes[1]): name for name in theirs.readers}
    changes = [
        _change(name, ours.tensor(mine[name]), theirs.tensor(others[name]))
        for name in mine
        if name in others
    ]
    lost = [mine[name] for name in mine if name not in others]
    new = [others[name] for name in others if name not in mine]
    return CheckpointCheck(
        reference=reference,
        candidate=candidate,
        changes=tuple(sorted(changes, key=_rank)),
        only_reference=tuple(lost),
        only_candidate=tuple(new),
        renamed=tuple(_renamed(ours, theirs, lost, new)),
        prefixes=prefixes,
    )


def _prefixes(
    ours: Mapping[str, object], theirs: Mapping[str, object]
) -> tuple[str, str]:
    """Return the prefixes without which most names are the same."""
    best = ("", "")
    most = len({*ours} & {*theirs})
    fronts = [_fronts(ours), _fronts(theirs)]
    for mine in fronts[0]:
        short = {name.removeprefix(mine) for name in ours}
        for other in fronts[1]:
            count = len(short & {name.removeprefix(other) for name in theirs})
            if count > most:
                best = (mine, other)
                most = count
    return best


def _fronts(names: Mapping[str, object]) -> list[str]:
    """Return prefixes of wrappers that some names have, alone and one after another."""
    fronts = [""]
    for front in fronts:
        for prefix in _PREFIXES:
            longer = front + prefix
            has_it = any(name.startswith(longer) for name in names)
            if has_it and len(longer) < 60 and longer not in fronts:
                fronts.append(longer)
    return fronts


def _rank(change: TensorChange) -> tuple[bool, float]:
    size = math.inf if change.change is None else change.change
    return change.equal, -size


def _change(name: str, ours: Tensor, theirs: Tensor) -> TensorChange:
    dtypes = (_dtype(ours), _dtype(theirs))
    shapes = (tuple(ours.shape), tuple(theirs.shape))
    if shapes[0] != shapes[1]:
        hint = _relation(ours, theirs)
        return TensorChange(
            name=name, dtypes=dtypes, shapes=shapes, equal=False, hint=hint
        )
    is_equal = dtypes[0] == dtypes[1] and _same_bits(ours, theirs)
    if is_equal:
        return TensorChange(
            name=name, dtypes=dtypes, shapes=shapes, equal=True, change=0.0, largest=0.0
        )
    sums = _Sums()
    for mine, other in _pieces(ours, theirs):
        sums.add(mine, other)
    change = sums.change()
    hint = _relation(ours, theirs) if change is None or change > _TELLING else ""
    return TensorChange(
        name=name,
        dtypes=dtypes,
        shapes=shapes,
        equal=False,
        change=change,
        cosine=sums.cosine(),
        largest=sums.largest,
        nonfinite=sums.nonfinite,
        hint=hint,
    )


#: Relative change from which on values may be another order of the same.
_TELLING = 0.01


class _Sums:
    """Sums over pieces of two tensors, of the elements that are finite in both."""

    def __init__(self) -> None:
        self.product = 0.0
        self.ours = 0.0
        self.theirs = 0.0
        self.squares = 0.0
        self.largest = 0.0
        self.nonfinite = 0

    def add(self, ours: Tensor, theirs: Tensor) -> None:
        """Add a piece, in fp64."""
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        finite = ours.isfinite() & theirs.isfinite()
        self.nonfinite += int((~finite & ~same).sum())
        x = torch.where(finite, ours, 0.0)
        y = torch.where(finite, theirs, 0.0)
        difference = x - y
        self.product += float(x @ y)
        self.ours += float(x @ x)
        self.theirs += float(y @ y)
        self.squares += float(difference @ difference)
        self.largest = max(self.largest, float(difference.abs().max()))

    def change(self) -> float | None:
        """Return the relative change; None where special values differ."""
        if self.nonfinite:
            return None
        if not self.ours:
            return math.inf if self.squares else 0.0
        return math.sqrt(self.squares / self.ours)

    def cosine(self) -> float | None:
        """Return the cosine; None where one of the two is zero."""
        size = math.sqrt(self.ours) * math.sqrt(self.theirs)
        return self.product / size if size else None


def _pieces(ours: Tensor, theirs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    flat = [_real(tensor).reshape(-1) for tensor in (ours, theirs)]
    for start in range(0, flat[0].numel(), _PIECE):
        mine, other = (each[start : start + _PIECE].to(torch.float64) for each in flat)
        yield mine, other


def _real(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _same_bits(ours: Tensor, theirs: Tensor) -> bool:
    try:
        mine, other = (_real(tensor).contiguous() for tensor in (ours, theirs))
        flat = [each.reshape(-1).view(torch.uint8) for each in (mine, other)]
        return torch.equal(flat[0], flat[1])
    except (RuntimeError, NotImplementedError):
        return False


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _relation(ours: Tensor, theirs: Tensor) -> str:
    if max(ours.numel(), theirs.numel()) > _LARGEST_LOST:
        return ""
    if ours.is_complex() or theirs.is_complex():
        return ""
    related = relation(_real(ours), _real(theirs))
    return "" if related is None else related.words


def _renamed(
    ours: Checkpoint, theirs: Checkpoint, lost: Sequence[str], new: Sequence[str]
) -> Iterator[Renamed]:
    """Yield tensors of one side alone whose values the other has under another name."""
    if not new or len(lost) > _MOST_LOST or len(new) > _MOST_LOST:
        return
    left = {name: theirs.tensor(name) for name in new}
    for name in lost:
        tensor = ours.tensor(name)
        for other, candidate in left.items():
            words = ""
            if tensor.numel() == candidate.numel() and tensor.numel() > 1:
                words = _relation(tensor, candidate)
            if words:
                yield Renamed(reference=name, candidate=other, how=words)
                del left[other]
                break
