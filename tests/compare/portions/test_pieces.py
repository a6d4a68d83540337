"""Pieces of a step: the search goes on where the work is the same, and ends where it is another."""

from __future__ import annotations

import pytest
import torch

from roundoff.compare.portions import pieces

LEAVES = {"a": torch.randn(5, 5, generator=torch.Generator().manual_seed(1))}


def layers(m, *parts):
    for x in parts:
        for _ in range(8):
            x = torch.tanh(x @ m.a)


def data(seed):
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("seed", "is_same"), [(2, True), (3, False)])
def test_the_search_ends_where_hardly_a_value_stands(
    program, step_of, monkeypatch, seed, is_same
):
    monkeypatch.setattr(pieces, "ENOUGH", 5)
    reference = step_of(program(layers, **LEAVES), data(2))
    candidate = step_of(program(layers, **LEAVES), *data(seed).chunk(2))
    step = pieces.StepPieces(reference, {0: candidate}, str)
    looked_for = []
    find = step._find_piece

    def counted(rank, recorded, row):
        looked_for.append(row)
        find(rank, recorded, row)

    monkeypatch.setattr(step, "_find_piece", counted)
    step.find()
    computed = [p for p in step.pieces.values() if p.row.is_call]
    assert len(computed) == 2 * 8 * 2  # a product and an activation in each layer
    assert all(p.location is not None for p in computed) is is_same
    calls = [row for row in looked_for if row.is_call]
    assert len(calls) == (len(computed) if is_same else 5)
