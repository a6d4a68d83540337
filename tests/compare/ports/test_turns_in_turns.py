"""A program that goes sample by sample and step by step, beside one that goes step by step.

None of the values of one turn is the reference's: which has those of all samples in one.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port

DIM, LAYERS = 8, 2
X = torch.randn(3, 5, DIM, generator=torch.Generator().manual_seed(9))


def drawn(seed):
    return torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(seed)) / 3


LEAVES = {
    f"{name}{i}": drawn(10 * i + seed)
    for i in range(LAYERS)
    for seed, name in enumerate(("read", "kept", "told"))
}


def reference(m, x):
    steps = x.unbind(1)
    for i in range(LAYERS):
        read, kept = getattr(m, f"read{i}"), getattr(m, f"kept{i}")
        state = torch.zeros(len(x), DIM)
        told = []
        for step in steps:
            state = torch.tanh(F.linear(step, read) + F.linear(state, kept))
            told.append(step + F.linear(state, getattr(m, f"told{i}")))
        steps = told
    return torch.stack(steps, 1)


def port(m, x, fault):
    answers = []
    for sample in x:
        states = [torch.zeros(DIM) for _ in range(LAYERS)]
        for place in sample:
            for i in range(LAYERS):
                held = place @ getattr(m, f"w{i}_in") + states[i] @ getattr(m, f"w{i}")
                states[i] = 2 * torch.sigmoid(2 * held) - 1
                told = states[i] @ getattr(m, f"w{i}_out")
                place = told if fault == "nothing added" else place + told
            answers.append(place)
    return torch.stack(answers).unflatten(0, x.shape[:2])


def leaves(fault):
    held = {}
    for i in range(LAYERS):
        told = LEAVES[f"told{i}"]
        held[f"w{i}_in"] = LEAVES[f"read{i}"].t().contiguous()
        held[f"w{i}"] = LEAVES[f"kept{i}"].t().contiguous()
        held[f"w{i}_out"] = told if fault == "as it is" else told.t().contiguous()
    return held


def named(program, step_of, fault):
    ours = program(reference, **LEAVES)
    theirs = program(lambda m, x: port(m, x, fault), **leaves(fault))
    sides = Sides(step_of(ours, X), step_of(theirs, X))
    return [row for row in compare_port(sides, EarlierSteps()) if row.cause == "own"]


def test_the_port_is_right(program, step_of):
    assert not named(program, step_of, "")


def test_one_step_of_all_samples_is_a_value_of_the_reference(program, sides_of):
    ours = program(reference, **LEAVES)
    theirs = program(lambda m, x: port(m, x, ""), **leaves(""))
    sides = sides_of(ours, theirs, X)
    states = [v for v in sides.candidate.values.values() if v.operator == "sub"]
    assert len(states) == X.shape[0] * X.shape[1] * LAYERS
    assert {v.key for v in states} <= sides.twins.keys()


def test_a_parameter_that_is_wrong_in_all_layers_is_named(program, step_of):
    [row] = named(program, step_of, "as it is")
    assert row.name == "w0_out", (row.blamed_line, row.evidence)


def test_a_value_that_is_not_added_is_missed_where_the_other_is_made(program, step_of):
    [row] = named(program, step_of, "nothing added")
    lines = Path(__file__).read_text().splitlines()
    assert "told = " in lines[int(row.blamed_line.rpartition(":")[2]) - 1]
    assert "with another value added to it" in row.evidence
