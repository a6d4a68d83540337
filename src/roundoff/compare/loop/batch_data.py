"""The data that two workload files give: the same, or other ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from roundoff.compare.judging.step_causes import DATA, Cause
from roundoff.compare.loop.data_relations import OTHER_VALUES, how_data_differ
from roundoff.compare.loop.fed_data import MOST, ROUNDINGS
from roundoff.compare.rounding.distance import of_metrics
from roundoff.compare.rounding.rounding_bound import unit
from roundoff.compare.tensors.metrics import measure


@dataclass(frozen=True, slots=True)
class BatchDifference:
    """An input of a batch that two files give otherwise.

    Attributes:
        name: ``input 0``, ``input ids``, ``input 0 of batch 2``.
        words: how the candidate's differs.
        error: relative; infinite for another shape or number of inputs.
    """

    name: str
    words: str
    error: float

    @property
    def is_explained(self) -> bool:
        """True where a factor, an offset, an order or a shape tells the two apart."""
        return self.words != OTHER_VALUES


def differing_batches(
    reference: Sequence[Any], candidate: Sequence[Any]
) -> list[BatchDifference]:
    """Return the inputs that differ by more than rounding, batch by batch.

    Batches are tensors, arrays, or mappings and sequences of them. Other leaves are
    left out, and so are batches that only one of the files has. What differs alike in
    several batches is listed once.

    >>> batch = torch.tensor([1.0, 2.0, 5.0])
    >>> differing_batches([batch], [(1 + 1e-7) * batch])
    []
    >>> [found] = differing_batches([batch, batch], [batch, 0.5 * batch])
    >>> f"{found.name} {found.words}"
    "input 0 of batch 1 is 0.5 times the reference's"
    """
    differences: dict[tuple[str, str], BatchDifference] = {}
    for number, (ours, theirs) in enumerate(zip(reference, candidate, strict=False)):
        inputs = _inputs(ours)
        for name, other in _inputs(theirs).items():
            if name not in inputs:
                continue
            difference = _difference(inputs[name], other)
            if difference is not None:
                place = f" of batch {number}" if number else ""
                words, error = difference
                first = BatchDifference(name + place, words, error)
                differences.setdefault((name, words), first)
    return [*differences.values()]


def cause_of_batches(differences: Sequence[BatchDifference]) -> Cause:
    """Return the cause "other data" of files whose batches differ.

    The runs themselves had the reference's data.
    """
    text = "; ".join(f"{each.name} {each.words}" for each in differences[:MOST])
    if len(differences) > MOST:
        text += f"; and {len(differences) - MOST:,} more inputs"
    evidence = (
        f"the candidate's batches() give other data: {text} "
        "(both ran on the reference's data here)"
    )
    return Cause(
        kind=DATA,
        label="other data",
        evidence=evidence,
        step=0,
        rank=0,
        phase="forward",
        name=differences[0].name,
        error=max(each.error for each in differences),
    )


def _inputs(batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch by name."""
    leaves, _ = tree_flatten_with_path(batch)
    inputs = {}
    for path, leaf in leaves:
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fiub":
            leaf = torch.from_numpy(np.ascontiguousarray(leaf))
        if isinstance(leaf, Tensor):
            keys = [str(getattr(key, "key", getattr(key, "idx", key))) for key in path]
            inputs[f"input {'.'.join(keys) or 0}"] = leaf.detach()
    return inputs


def _difference(ours: Tensor, theirs: Tensor) -> tuple[str, float] | None:
    """Return how an input differs, and by how much; None for rounding."""
    if ours.shape != theirs.shape:
        words = (
            f"has the shape {[*theirs.shape]} where the reference has {[*ours.shape]}"
        )
        return words, float("inf")
    wanted = _wide(ours)
    values = _wide(theirs)
    error = of_metrics(measure(wanted, values)).error
    units = [unit(str(each.dtype).removeprefix("torch.")) for each in (ours, theirs)]
    if error is None or error <= ROUNDINGS * max(units):
        return None
    return how_data_differ(wanted, values), error


def _wide(tensor: Tensor) -> Tensor:
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    return dense.cpu().to(torch.float64)
