"""Parameters that hold what others do, in place of those that the reference has beside them."""

from __future__ import annotations

import pytest
import torch

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X = drawn(5, 6, seed=1)
#: Of each state a layer makes the start.
LEAVES = {
    "hidden_in": drawn(8, 6, seed=2),
    "hidden_out": drawn(4, 8, seed=3),
    "cell_in": drawn(8, 6, seed=4),
    "cell_out": drawn(4, 8, seed=5),
    "gates": drawn(12, 4, seed=6),
    "last": drawn(3, 4, seed=7),
}


def reference(m, x):
    h = torch.relu(x @ m.hidden_in.t()) @ m.hidden_out.t()
    c = torch.relu(x @ m.cell_in.t()) @ m.cell_out.t()
    keep, take, give = (h @ m.gates.t()).chunk(3, 1)
    c = torch.sigmoid(keep) * c + torch.tanh(take)
    return (torch.sigmoid(give) * torch.tanh(c)) @ m.last.t()


def port(m, x):
    start = torch.einsum("bi,ik->bk", torch.einsum("bi,ik->bk", x, m.c1).clamp(0), m.c2)
    h = torch.einsum("bi,ik->bk", torch.einsum("bi,ik->bk", x, m.h1).clamp(0), m.h2)
    keep, take, give = torch.einsum("bi,ik->bk", h, m.kernel).split(4, 1)
    c = torch.addcmul(torch.tanh(take), torch.sigmoid(keep), start)
    return torch.einsum("bi,ik->bk", torch.sigmoid(give) * torch.tanh(c), m.end)


def loaded(cell, hidden="hidden"):
    names = {
        "c1": f"{cell}_in",
        "c2": f"{cell}_out",
        "h1": f"{hidden}_in",
        "h2": f"{hidden}_out",
        "kernel": "gates",
        "end": "last",
    }
    return {mine: LEAVES[name].t().contiguous() for mine, name in names.items()}


@pytest.mark.parametrize(
    ("cell", "hidden", "wrong"),
    [("hidden", "hidden", "c"), ("cell", "cell", "h"), ("cell", "hidden", None)],
)
def test_of_two_layers_alike_the_one_that_should_be_another_is_named(
    step_of, program, cell, hidden, wrong
):
    """What the wrong layer gives agrees: it is what the other one gives, rightly."""
    candidate = program(port, **loaded(cell, hidden=hidden))
    steps = step_of(program(reference, **LEAVES), X), step_of(candidate, X)
    rows = compare_port(Sides(*steps), EarlierSteps())
    named = [row.name for row in rows if row.cause == "own"]
    assert named[:1] == ([] if wrong is None else [f"{wrong}1"])
