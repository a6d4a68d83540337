"""A fault in what a line hands to a function is that line's, not the function's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port
from roundoff.compare.records.call_stacks import shared, stack_of
from roundoff.compare.records.recorded_rows import RecordedRow

DIM = 8


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {
    "enter": drawn(DIM, DIM, seed=1),
    "places": drawn(5, DIM, seed=2),
    **{
        f"blocks.{block}.{name}": drawn(DIM, DIM, seed=10 * block + place) * 0.4
        for block in (0, 1)
        for place, name in enumerate(("query", "key", "value", "raise"), 3)
    },
    "leave": drawn(3, DIM, seed=30),
}
X = drawn(4, 5, DIM, seed=31)


class _Reference:
    def __init__(self, m):
        self.m = m

    def block(self, x, at):
        m = self.m
        h = F.layer_norm(x, (DIM,))
        q = F.linear(h + m.places, m[at + "query"])
        k = F.linear(h, m[at + "key"])
        v = F.linear(h, m[at + "value"])
        x = x + F.softmax(q @ k.transpose(1, 2) / 8**0.5, -1) @ v
        return x + torch.tanh(F.linear(F.layer_norm(x, (DIM,)), m[at + "raise"]))

    def __call__(self, x):
        x = F.linear(torch.sinh(x), self.m.enter)
        x = self.block(x, "blocks.0.")
        x = self.block(x, "blocks.1.")
        return F.linear(F.layer_norm(x, (DIM,)), self.m.leave)


class _Named:
    """Leaves by their dotted names."""

    def __init__(self, m):
        self._m = m

    def __getitem__(self, name):
        return self._m.get_parameter(name.replace(".", "_"))

    def __getattr__(self, name):
        return self[name]


def norm(x):
    x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def attend(q, k, v):
    scores = torch.einsum("bqd,bkd->bqk", q, k) / 8**0.5
    return torch.einsum("bqk,bkd->bqd", torch.softmax(scores, -1), v)


def project(x, weight):
    return x @ weight.t()


def port_block(m, x, at, fault):
    h = norm(x)
    placed = h + m.places
    if fault == "places left out":
        placed = h
    q = project(placed, m[at + "query"])
    k = project(h, m[at + "key"])
    v = project(h, m[at + "value"])
    if fault == "value of another":
        v = project(placed, m[at + "value"])
    x = attend(q, k, v) + x
    if fault == "norm left out":
        return x + torch.tanh(project(x, m[at + "raise"]))
    return x + torch.tanh(project(norm(x), m[at + "raise"]))


def port(m, x, fault):
    if fault == "input as it is":
        x = project(x, m.enter)
    else:
        x = project(x.sinh(), m.enter)
    first, second = "blocks.0.", "blocks.1."
    if fault == "blocks exchanged":
        first, second = second, first
    x = port_block(m, x, first, fault)
    x = port_block(m, x, second, fault)
    if fault == "last norm left out":
        return project(x, m.leave)
    return project(norm(x), m.leave)


def named(program, step_of, fault):
    leaves = {name.replace(".", "_"): tensor for name, tensor in LEAVES.items()}
    ours = program(lambda m, x: _Reference(_Named(m))(x), **leaves)
    theirs = program(lambda m, x: port(_Named(m), x, fault), **leaves)
    sides = Sides(step_of(ours, X, tensors=True), step_of(theirs, X, tensors=True))
    return [row for row in compare_port(sides, EarlierSteps()) if row.cause == "own"]


def text_of(line):
    number = int(line.rpartition(":")[2])
    return Path(__file__).read_text().splitlines()[number - 1]


def test_the_port_is_right(program, step_of):
    assert not named(program, step_of, "")


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("places left out", 'project(placed, m[at + "query"])'),
        ("norm left out", "torch.tanh(project(x,"),
        ("last norm left out", "return project(x, m.leave)"),
        ("blocks exchanged", "port_block(m, x, first, fault)"),
        ("input as it is", "x = project(x, m.enter)"),
        ("value of another", 'project(placed, m[at + "value"])'),
    ],
)
def test_the_line_that_calls_the_function_is_named(program, step_of, fault, text):
    [row] = named(program, step_of, fault)
    assert text in text_of(row.blamed_line), (row.blamed_line, row.evidence)


# -- two modules that one line calls ---------------------------------------------------


class Mixed(torch.nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone())
        self.bias = torch.nn.Parameter(bias.clone())

    def forward(self, x):
        y = torch.einsum("...i,oi->...o", x, self.weight)
        return y + self.bias


class Normed(torch.nn.Module):
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


class Steps(torch.nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.mix = Mixed(LEAVES["enter"], LEAVES["places"][0])
        self.norm = Normed()
        self.fault = fault

    def forward(self, x):
        if self.fault:
            return self.norm(self.mix(x))
        return self.norm(x + self.mix(x))


class Whole(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Linear(DIM, DIM)
        self.mix.weight.data.copy_(LEAVES["enter"])
        self.mix.bias.data.copy_(LEAVES["places"][0])

    def forward(self, x):
        x = x + self.mix(x)
        return F.layer_norm(x, (DIM,))


@pytest.mark.parametrize("fault", [False, True])
def test_what_is_left_out_between_two_modules_is_on_the_line_that_calls_them(
    step_of, fault
):
    sides = Sides(step_of(Whole(), X), step_of(Steps(fault), X))
    rows = [r for r in compare_port(sides, EarlierSteps()) if r.cause == "own"]
    assert len(rows) == fault
    for row in rows:
        assert "return self.norm(self.mix(x))" in text_of(row.blamed_line)
        assert row.evidence.startswith("left out is add of ")


# -- rows that a loss leaves out --------------------------------------------------------

KEPT = torch.tensor([True, False, True, True])


def capped(x):
    return 3.0 * torch.tanh(x / 3.0)


def scores_of_all(m, x):
    return capped(F.linear(x, m.leave))


def scores_as_they_are(m, x):
    return x @ m.leave.t()


def mean_of_kept(m, x, scores):
    return scores(m, x)[KEPT].logsumexp(-1).mean()


def test_what_is_left_out_before_rows_are_chosen(program, step_of):
    def ours(m, x):
        return (scores_of_all(m, x).logsumexp(-1) * KEPT).sum() / KEPT.sum()

    x = drawn(4, DIM, seed=32)
    steps = [
        step_of(program(each, leave=LEAVES["leave"]), x)
        for each in (ours, lambda m, x: mean_of_kept(m, x, scores_as_they_are))
    ]
    rows = compare_port(Sides(*steps), EarlierSteps())
    [row] = [row for row in rows if row.cause == "own"]
    assert "x @ m.leave.t()" in text_of(row.blamed_line), row.evidence
    assert row.evidence.startswith("left out is ")


def test_stacks_of_rows():
    row = RecordedRow(0, 0, "add", line="a.py:3", callers="a.py:9 < b.py:1")
    assert stack_of(row) == ("b.py:1", "a.py:9", "a.py:3")
    assert stack_of(RecordedRow(0, 0, "add")) == ()
    assert shared(("b:1", "a:9", "a:3"), ("b:1", "a:9")) == 1
