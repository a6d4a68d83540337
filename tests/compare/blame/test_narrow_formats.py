"""A port that rounds to fp16 or bf16: by a stray cast, or because it works in that format."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port
from roundoff.compare.values.value_flow import flow_of
from roundoff.compare.values.value_regions import limit_of, wanted_formats


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {
    "first": drawn(16, 12, seed=1) / 3,
    "middle": drawn(16, 16, seed=2) / 4,
    "third": drawn(16, 16, seed=4) / 4,
    "fourth": drawn(16, 16, seed=5) / 4,
    "fifth": drawn(16, 16, seed=6) / 4,
    "last": drawn(9, 16, seed=3) / 4,
}
X = drawn(10, 12, seed=7)


def reference(m, x):
    for weight in (m.first, m.middle, m.third, m.fourth, m.fifth):
        x = F.linear(x, weight).tanh()
    return F.linear(x, m.last).softmax(-1)


def wide_product(a, b):
    return a @ b


def narrow_product(a, b):
    return (a.bfloat16() @ b.bfloat16()).float()


def scores(m, x, product=wide_product):
    for weight in (m.first, m.middle, m.third, m.fourth, m.fifth):
        x = 1 - 2 / (1 + torch.exp(2 * product(x, weight.t())))
    return x @ m.last.t()


def port(m, x, product=wide_product):
    shares = torch.exp(scores(m, x, product))
    return shares / shares.sum(-1, keepdim=True)


def with_one_cast(dtype):
    def wrong(m, x):
        shares = torch.exp(scores(m, x).to(dtype)).float()
        return shares / shares.sum(-1, keepdim=True)

    return wrong


def in_bfloat16(m, x):
    return port(m, x, narrow_product)


def in_bfloat16_of_other_data(m, x):
    # less than the roundings of bf16 do to numbers of size one
    return port(m, x + 0.003, narrow_product)


def compared(step_of, program, candidate):
    sides = Sides(
        step_of(program(reference, **LEAVES), X),
        step_of(program(candidate, **LEAVES), X),
    )
    return [row for row in compare_port(sides, EarlierSteps()) if row.cause == "own"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_stray_cast_is_named(program, step_of, dtype):
    [named] = compared(step_of, program, with_one_cast(dtype))
    assert named.looks_like == "narrower format"
    assert named.dtype == str(dtype).removeprefix("torch.")
    assert named.evidence == f"it rounds to {named.dtype}; the reference nowhere does"


def test_a_port_that_works_in_bfloat16_agrees(program, step_of):
    assert compared(step_of, program, port) == []
    assert compared(step_of, program, in_bfloat16) == []


def test_what_rounding_hides_is_found_in_fp64(program, step_of):
    [named] = compared(step_of, program, in_bfloat16_of_other_data)
    assert named.operator == "add"


def test_wanted_formats(program, step_of):
    def flow(function):
        return flow_of(step_of(program(function, **LEAVES), X))

    wide = flow(reference)
    cast = flow(with_one_cast(torch.float16))
    narrow = flow(in_bfloat16)
    assert wanted_formats(wide, cast) == {"float32"}
    # what the reference does anywhere is wanted
    assert wanted_formats(cast, wide) == {"float32", "float16"}
    assert wanted_formats(wide, narrow) == {"float32", "bfloat16"}
    assert limit_of(wide, cast) == limit_of(wide, wide)
    assert limit_of(wide, narrow) == 0.1
