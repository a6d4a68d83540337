"""Rounded operands that are remembered: until the batch ends, and parameters beyond it."""

from __future__ import annotations

import torch
from torch import nn

from roundoff.formats import parse_format
from roundoff.ops import Operand, RoundedOperands

BF16 = parse_format("bf16")


def operand(role):
    return Operand(0, role, -1, 0, frozenset())


def test_only_parameters_outlast_a_batch():
    weight = nn.Parameter(torch.tensor([1.001, 2.001]))
    x = torch.tensor([3.001])
    rounded = RoundedOperands()
    of_weight = rounded(weight.detach(), operand("weight"), BF16)
    of_x = rounded(x, operand("activation"), BF16)
    rounded.keep_only({weight.data_ptr()})
    assert rounded(weight.detach(), operand("weight"), BF16) is of_weight
    assert rounded(x, operand("activation"), BF16) is not of_x


def test_what_was_written_over_is_rounded_again():
    weight = nn.Parameter(torch.tensor([1.001, 2.001]))
    rounded = RoundedOperands()
    rounded(weight.detach(), operand("weight"), BF16)
    with torch.no_grad():
        weight.mul_(4)
    expected = weight.detach().to(torch.bfloat16).float()
    assert torch.equal(rounded(weight.detach(), operand("weight"), BF16), expected)


def test_inference_tensors_are_remembered_too():
    with torch.inference_mode():
        x = torch.tensor([1.001])
    rounded = RoundedOperands()
    once = rounded(x, operand("activation"), BF16)
    assert rounded(x, operand("activation"), BF16) is once
