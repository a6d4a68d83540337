"""Roundabout ways of a forward pass are seen at their lines; ordinary ones are not."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from roundoff.advise.forward_calls import LOOP, forward_calls


def test_one_hot_products_are_seen_with_their_shapes():
    ids = torch.tensor([3, 40, 7])
    table = torch.randn(64, 5)
    seen = forward_calls(lambda: functional.one_hot(ids, 64).float() @ table)
    product = seen.one_hot[0]
    assert (product.rows, product.columns, product.width) == (3, 64, 5)
    assert "test_forward_calls.py" in product.line


def test_products_with_other_rows_are_not_one_hot():
    table = torch.randn(64, 5)
    twos = 2 * torch.eye(64)[:3]
    dense = torch.rand(3, 64)
    assert not forward_calls(lambda: (twos @ table, dense @ table)).one_hot


def test_attention_in_single_operators_is_seen_through_mask_scale_and_dropout():
    query, key, value = (torch.randn(2, 3, 8, 4) for _ in range(3))
    mask = torch.ones(8, 8).tril() == 0

    def run():
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(4)
        weights = scores.masked_fill(mask, -1e9).softmax(-1)
        return torch.einsum("bhqk,bhkd->bhqd", functional.dropout(weights, 0.1), value)

    attention = forward_calls(run).attention[0]
    assert (attention.batch, attention.queries, attention.keys) == (6, 8, 8)
    assert attention.width == 4


def test_two_products_without_a_softmax_are_no_attention():
    a, b = (torch.randn(2, 8, 8) for _ in range(2))
    assert not forward_calls(lambda: torch.relu(a @ b) @ b).attention


def test_a_loop_is_an_operator_that_one_line_calls_again_and_again():
    cell = nn.Tanh()
    x = torch.randn(LOOP, 4)
    seen = forward_calls(lambda: [cell(x[i]) for i in range(LOOP)])
    assert [(each.operator, each.calls) for each in seen.loops] == [("tanh", LOOP)]
    assert not forward_calls(lambda: [cell(x[i]) for i in range(LOOP - 1)]).loops


def test_constants_are_tensors_that_are_made_from_no_other():
    x = torch.zeros(4)
    assert sum(forward_calls(lambda: x + torch.ones(4)).constants.values()) == 1
    assert not forward_calls(lambda: x + torch.ones_like(x) * x).constants
