"""A candidate file's own ``batches()`` against the reference's."""

from __future__ import annotations

import torch

from roundoff.compare import (
    BatchDifference,
    Culprit,
    cause_of_batches,
    differing_batches,
)
from roundoff.errors import RoundoffError
from roundoff.plan import Variant
from roundoff.workload import Workload


def candidate_data(
    workload: Workload, other: Variant
) -> tuple[list[Culprit], list[str]]:
    """Return the finding that the candidate's file gives other data, and notes.

    Nothing for candidates that are no files. Batches that are drawn anew by each
    ``batches()`` are a note.
    """
    if other.batches is None:
        return [], []
    differences = differing_batches(workload.batches, other.batches)
    if not differences:
        return [], []
    if not any(each.is_explained for each in differences):
        for source, batches in (
            (workload.path, workload.batches),
            (other.workload.path, other.batches),
        ):
            if source is not None and _loaded_again(source, batches):
                note = (
                    f"the batches of {source} are other ones each time, so the two "
                    "files' data cannot be compared: seed what draws them"
                )
                return [], [note]
    return [cause_of_batches(differences).culprit()], []


def _loaded_again(source: object, batches: list[object]) -> list[BatchDifference]:
    """Return how the batches of a file differ when it is loaded once more."""
    with torch.random.fork_rng():
        try:
            again = Workload.load(str(source))
        except RoundoffError:
            return []
    return differing_batches(batches, again.batches)
