"""Tables of several features in one parameter, and a mask that is wrong for one of them."""

from __future__ import annotations

import torch

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port

ROWS = {"word": 7, "place": 5, "tag": 9}
WIDTH = 4


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


TABLES = {n: drawn(r, WIDTH, seed=i) for i, (n, r) in enumerate(ROWS.items())}
TABLES["tag"][0] = 0.0
LEAVE = drawn(WIDTH * len(ROWS), 2, seed=9)
IDS = torch.randint(0, 5, (6, 3, 4), generator=torch.Generator().manual_seed(5))


def apart(m, ids):
    """Each feature has a table; of tags row 0 is padding."""
    rows = []
    for place, name in enumerate(ROWS):
        counts = (ids[:, place] > 0) if name == "tag" else (ids[:, place] >= 0)
        counts = counts.float()[..., None]
        found = getattr(m, name)[ids[:, place]] * counts
        rows.append(found.sum(1) / counts.sum(1).clamp(min=1))
    return torch.tanh(torch.cat(rows, 1) @ m.leave)


class Joined(torch.nn.Module):
    def __init__(self, order=tuple(ROWS), pads=("tag",)):
        super().__init__()
        joined = torch.cat([TABLES[name] for name in order])
        self.table = torch.nn.Parameter(joined)
        self.leave = torch.nn.Parameter(LEAVE.clone())
        self.pads = pads

    def forward(self, ids):
        sizes = torch.tensor([0, *ROWS.values()])[: len(ROWS)]
        rows = ids + sizes.cumsum(0)[:, None]
        weights = torch.stack(
            [self.counts(ids[:, place], name) for place, name in enumerate(ROWS)], 1
        )
        found = torch.einsum("bfl,bfld->bfd", weights, self.table[rows])
        return torch.tanh(found.flatten(1) @ self.leave)

    def counts(self, ids, name):
        inside = ids > 0 if name in self.pads else ids >= 0
        total = inside.float().sum(1, keepdim=True)
        return inside.float() / torch.where(total > 0, total, 1.0)


def own_rows(program, step_of, candidate):
    reference = program(apart, **TABLES, leave=LEAVE)
    sides = Sides(step_of(reference, IDS), step_of(candidate, IDS))
    rows = compare_port(sides, EarlierSteps())
    return [row for row in rows if row.cause == "own"]


def test_the_right_port_agrees(program, step_of):
    assert not own_rows(program, step_of, Joined())


def test_tables_that_are_joined_in_another_order_are_named(program, step_of):
    [row] = own_rows(program, step_of, Joined(order=("place", "tag", "word")))
    assert row.name == "table"
    assert "should hold in this order: word, place and tag" in row.evidence


def test_a_mask_that_is_wrong_in_one_turn_is_named(program, step_of):
    [row] = own_rows(program, step_of, Joined(pads=()))
    assert row.operator == "ge", row.evidence
    assert "not 0" in row.evidence or "gt" in row.evidence
