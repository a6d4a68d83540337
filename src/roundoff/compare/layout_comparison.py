"""Steps that one process did, held against the same steps of several that share the work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import polars as pl

from roundoff.compare.judging.explain import RecordedStep, Sides
from roundoff.compare.judging.gradient_scale import without_loss_scales
from roundoff.compare.judging.table import ComparedRow, frame_of
from roundoff.compare.pairing.alignment import renaming
from roundoff.compare.portions.comparison import (
    PortionsMemory,
    compare_portions,
    without_tensors,
)
from roundoff.compare.portions.stages import named_as_whole
from roundoff.compare.rank_comparison import (
    RankResult,
    Settings,
    recorded_step,
    uses_tensors,
)
from roundoff.compare.values.restored_step import tensors_of_all
from roundoff.errors import RunError
from roundoff.record import Run, as_run


def compare_layouts(
    reference: str | Run,
    candidate: str | Run,
    ranks: Sequence[int],
    steps: Sequence[int],
    settings: Settings,
) -> RankResult:
    """Return what is found in steps that one process did, and several share.

    The values of the ranks are pieces of the reference's: stretches of it, or terms of
    a sum. Without tensors they cannot be put together, and only those with the same
    statistics are compared.

    Args:
        reference: of one rank.
        candidate: of several.
        ranks: of the candidate.
        steps: that both have.
        settings: as of ``compare_rank``.
    """
    ours = as_run(reference)
    theirs = as_run(candidate)
    tensors = uses_tensors(settings, ours, theirs)
    damage: list[str] = []
    memory = PortionsMemory()
    stages: dict[int, dict[str, str]] = {}
    frames = []
    for step in steps:
        try:
            whole = recorded_step(ours, ours.ranks[0], step, tensors=tensors)
            parts = {
                rank: recorded_step(theirs, rank, step, tensors=tensors)
                for rank in ranks
            }
            whole, *others = tensors_of_all([whole, *parts.values()])
            parts = dict(zip(ranks, others, strict=True))
        except RunError as error:
            damage.append(str(error).replace("\n", ";"))
            continue
        rename = renaming(settings.modules)
        if whole.tensors is None:
            rows = without_tensors(whole, parts, rename)
        else:
            if not settings.modules:
                parts = {
                    rank: named_as_whole(whole, part, stages.setdefault(rank, {}))
                    for rank, part in parts.items()
                }
            rows = _of_ranks(whole, parts, rename, memory)
        frames.append(frame_of(rows))
    table = pl.concat(frames, how="diagonal") if frames else pl.DataFrame()
    return RankResult(table, damage, [])


def _of_ranks(
    whole: RecordedStep,
    parts: Mapping[int, RecordedStep],
    rename: Callable[[str], str],
    memory: PortionsMemory,
) -> list[ComparedRow]:
    """Compare a step of one process with that of several, without scales of losses."""
    sides = {
        rank: without_loss_scales(Sides(whole, part)) for rank, part in parts.items()
    }
    reference = next(iter(sides.values())).reference
    candidates = {rank: side.candidate for rank, side in sides.items()}
    return compare_portions(reference, candidates, rename, memory)
