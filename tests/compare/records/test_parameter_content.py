"""Parameters are recognised by what they hold: torch's own layouts are the truth."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundoff.compare.records.parameter_content import (
    JOINED,
    PARTLY_ZERO,
    REORDERED,
    SCALED,
    ZERO,
    relation,
)

WEIGHT = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
KERNEL = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (WEIGHT, WEIGHT.clone(), "as it is"),
        (WEIGHT, WEIGHT.t(), "transposed"),
        (WEIGHT, WEIGHT.reshape(3, 4, 8), "in the shape [3, 4, 8]"),
        (KERNEL, KERNEL.permute(2, 3, 1, 0), "with its axes in the order [2, 3, 1, 0]"),
        (WEIGHT, WEIGHT.flip(0), "backwards along axis 0"),
        (KERNEL, KERNEL.flip(2, 3), "backwards along axes [2, 3]"),
        (
            KERNEL,
            KERNEL.permute(2, 3, 0, 1).flip(0, 1),
            "with its axes in the order [2, 3, 0, 1], backwards along axes [0, 1]",
        ),
        (
            KERNEL,
            KERNEL[[3, 0, 5, 1, 4, 2]].permute(2, 3, 1, 0),
            "with its axes in the order [2, 3, 1, 0], with the 6 indexes of axis 3 in "
            "another order",
        ),
        (WEIGHT, 3 * WEIGHT, "times 3"),
        (WEIGHT, WEIGHT.to(torch.bfloat16), "as it is"),
    ],
)
def test_a_relation_is_said_in_words(ours, theirs, words):
    assert relation(ours, theirs).words == words


def test_gates_in_another_order():
    gates = WEIGHT.chunk(4)
    other = torch.cat([gates[0], gates[2], gates[1], gates[3]])
    assert relation(WEIGHT, other).kind == REORDERED


def test_zeros_are_found_where_the_rest_agrees():
    part = WEIGHT.clone()
    part[3:7] = 0
    found = relation(WEIGHT, part)
    assert found.kind == PARTLY_ZERO
    assert "3 to 6 of axis 0" in found.words
    assert relation(WEIGHT, torch.zeros_like(WEIGHT)).kind == ZERO


def test_a_folded_normalisation_is_a_factor_for_each_channel():
    norm = nn.BatchNorm2d(6).eval()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
        norm.running_var.uniform_(0.5, 2.0)
    conv = nn.Conv2d(4, 6, 3)
    fused = torch.nn.utils.fuse_conv_bn_eval(conv.eval(), norm)
    found = relation(conv.weight, fused.weight)
    assert found.kind == SCALED
    assert found.words == "with a factor for each index of axis 0"


def test_split_and_joined():
    parts = WEIGHT.chunk(3)
    assert relation(WEIGHT, parts[1].t()).words == "part 2 of 3 along axis 0"
    assert relation(parts[1], WEIGHT).kind == JOINED
    assert relation(WEIGHT, torch.randn(4, 8)) is None


@pytest.mark.parametrize(
    "other", [torch.randn(12, 8), torch.full((12, 8), float("nan")), torch.empty(0)]
)
def test_other_values_are_not_related(other):
    assert relation(WEIGHT, other) is None
