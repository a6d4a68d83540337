"""What each turn of a loop takes from a table: one place earlier, or later."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

TURNS = 6
LEAVES = {"w": torch.randn(5, 8, generator=torch.Generator().manual_seed(1))}
X = torch.randn(3, TURNS + 2, 5, generator=torch.Generator().manual_seed(2))


def reference(m, x):
    """Cell by cell: each is reached by staying at a place, or from the one before it."""
    scores = (x @ m.w).log_softmax(-1)
    row = [scores[:, 0, place] for place in range(4)]
    for t in range(1, TURNS):
        reached = [row[0] + scores[:, t, 0]]
        for place in range(1, 4):
            stay = row[place] + scores[:, t, place]
            move = row[place - 1] + scores[:, t, place + 4]
            reached.append(torch.logaddexp(stay, move))
        row = reached
    return -torch.stack(row, 1).logsumexp(1).mean()


def port(later):
    """All places at once."""

    def run(m, x):
        scores = (x @ m.w).log_softmax(-1)
        stays, moves = scores.chunk(2, -1)
        alpha = stays[:, 0]
        for t in range(1, TURNS):
            stay = alpha + stays[:, t]
            move = alpha[:, :-1] + moves[:, t + later, 1:]
            move = F.pad(move, (1, 0), value=-1e30)
            alpha = torch.logaddexp(stay, move)
        return -alpha.logsumexp(1).mean()

    return run


def test_the_port_is_right(at_fault):
    assert not at_fault(reference, port(0), LEAVES, X)


@pytest.mark.parametrize(
    ("later", "words"), [(1, "one place earlier"), (-1, "one place later")]
)
def test_the_place_of_each_turn_is_named(later, words, at_fault, blamed_text):
    [row] = at_fault(reference, port(later), LEAVES, X)
    assert blamed_text(row) == "move = alpha[:, :-1] + moves[:, t + later, 1:]"
    assert words in row.evidence
