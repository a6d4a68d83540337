"""Masks: which weights go (against a count written again), structure, and zeros that stay while training."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from roundoff.errors import QuantizationError
from roundoff.quantize.sparsity.masks import (
    check_n_m,
    finish_,
    magnitude_scores,
    n_m_mask,
    n_m_masks,
    prunable,
    sparsify_,
    taylor_scores,
    unstructured_masks,
)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)
    )


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_n_m_keeps_the_best_sum_of_every_group(
    values: list[int], m: int, drop: int
) -> None:
    """Against exhaustion: of all ways to keep n places of each group of m (filled with zeros), none keeps more."""
    n = max(1, m - drop)
    score = torch.tensor([values], dtype=torch.float32)
    kept = (score * n_m_mask(score, n, m)).flatten().tolist()
    for start in range(0, len(values), m):
        group = values[start : start + m] + [0] * (m - len(values[start : start + m]))
        best = max(
            sum(group[i] for i in places)
            for places in itertools.combinations(range(m), n)
        )
        assert sum(kept[start : start + m]) == best
    assert check_n_m(torch.tensor([kept]), n, m) == 0


def test_amct_groups_run_along_the_input_channels() -> None:
    """Groups of 4 along cin for each output channel and kernel position; the 2 smallest magnitudes go. 6 channels: the
    second group holds two and two zeros, of which the zeros go."""
    weight = torch.randn(3, 6, 2, 2, generator=torch.Generator().manual_seed(0))
    mask = n_m_mask(weight.abs(), 2, 4).numpy()
    for o, y, x in itertools.product(range(3), range(2), range(2)):
        lane = weight[o, :, y, x].abs().numpy()
        assert set(np.flatnonzero(mask[o, :4, y, x])) == set(np.argsort(lane[:4])[2:])
        assert mask[o, 4:, y, x].all()
    depthwise = n_m_mask(torch.rand(4, 1, 3, 3), 2, 4)
    assert bool(depthwise.all())


def test_check_n_m_counts_the_groups_that_break_it() -> None:
    weight = torch.tensor([[1.0, 1, 0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0, 0]])
    assert check_n_m(weight) == 2
    assert check_n_m(weight, 3, 4) == 1
    assert check_n_m(weight.T, axis=0) == 2
    assert check_n_m(weight[:, :0]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"n": 3, "m": 2}), "got: 3:2"),
        ({"n": 0}, "0 < n <= m"),
        ({"axis": 2}, "no such axis"),
    ],
)
def test_bad_structures(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        n_m_mask(torch.ones(2, 4), **arguments)
    with pytest.raises(QuantizationError, match="NaN or Inf"):
        n_m_mask(torch.tensor([[1.0, float("nan")]]))


def test_transposed_convolutions_have_their_inputs_on_axis_0() -> None:
    net = nn.Sequential(nn.ConvTranspose2d(8, 3, 2), nn.Conv2d(3, 5, 1))
    masks = n_m_masks(net)
    assert check_n_m(net[0].weight.detach() * masks["0.weight"], axis=0) == 0
    assert masks["0.weight"].sum() == masks["0.weight"].numel() / 2


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.floats(0, 0.99))
@settings(max_examples=100, deadline=None)
def test_unstructured_masks_remove_the_lowest(
    values: list[int], sparsity: float
) -> None:
    halves = values[: len(values) // 2], values[len(values) // 2 :]
    scores = {
        name: torch.tensor(half, dtype=torch.float32)
        for name, half in zip("ab", halves, strict=True)
    }
    masks = unstructured_masks(scores, sparsity)
    removed = [
        v
        for name, half in zip("ab", halves, strict=True)
        for v, m in zip(half, masks[name], strict=True)
        if not m
    ]
    assert sorted(removed) == sorted(values)[: round(sparsity * len(values))]
    for name, mask in unstructured_masks(scores, sparsity, scope="layer").items():
        assert int((~mask).sum()) == round(sparsity * len(scores[name]))


def test_bad_sparsities() -> None:
    with pytest.raises(QuantizationError, match="0 <= sparsity < 1"):
        unstructured_masks({"w": torch.ones(2)}, 1.0)
    with pytest.raises(QuantizationError, match="global or layer"):
        unstructured_masks({"w": torch.ones(2)}, 0.5, scope="all")
    with pytest.raises(QuantizationError, match="w: NaN or Inf among the scores"):
        unstructured_masks({"w": torch.tensor([float("nan")])}, 0.5)


def test_taylor_scores_are_the_product_with_the_gradient() -> None:
    net = small().double().eval()
    batches = [
        (torch.randn(4, 2, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0]))
        for _ in range(2)
    ]
    found = taylor_scores(
        net,
        batches,
        lambda out, b: F.cross_entropy(out, b[1]),
        forward=lambda m, b: m(b[0]),
    )
    expected = {name: torch.zeros_like(w) for name, w in prunable(net).items()}
    for x, y in batches:
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        for name, w in prunable(net).items():
            expected[name] += (w * w.grad).detach().abs() / 2
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-14, atol=0.0
        )  # the same operations in the same order
    with pytest.raises(QuantizationError, match="no gradient reaches this weight"):
        taylor_scores(
            net,
            batches,
            lambda out, b: net[0].weight.sum(),
            forward=lambda m, b: m(b[0]),
        )


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-2),
        lambda p: torch.optim.AdamW(p, 1e-2),
    ],
)
def test_zeros_stay_while_training(optimizer) -> None:
    net = small()
    made = optimizer(net.parameters())
    x, y = torch.randn(8, 2, 4, 4), torch.arange(8) % 3

    def train(steps: int) -> None:
        for _ in range(steps):
            made.zero_grad()
            F.cross_entropy(net(x), y).backward()
            made.step()

    train(2)  # the optimizer has momentum when the masks come
    kept = [id(p) for p in net.parameters()]
    masks = n_m_masks(net)
    rows = sparsify_(net, masks)
    assert [(r.name, r.elements) for r in rows] == [("0.weight", 108), ("4.weight", 72)]
    assert rows[1].share == 0.5
    before = net[4].weight.detach().clone()
    train(3)
    net(x)
    for name, mask in masks.items():
        assert bool((net.get_parameter(name)[~mask] == 0).all())
    assert not torch.equal(before, net[4].weight)
    train(1)
    rows = finish_(net)
    assert rows[1].share == 0.5
    assert check_n_m(net[4].weight) == 0
    assert [id(p) for p in net.parameters()] == kept
    assert not net._forward_pre_hooks
    assert list(net.state_dict()) == list(small().state_dict())


def test_a_copy_keeps_its_own_masks() -> None:
    net = small()
    sparsify_(net, unstructured_masks(magnitude_scores(net), 0.8))
    twin = copy.deepcopy(net)
    finish_(net)
    twin[4].weight.data.fill_(1.0)
    twin(torch.zeros(1, 2, 4, 4).repeat(2, 1, 1, 1))
    assert 0 < int((twin[4].weight == 0).sum()) < 72
    finish_(twin)


def test_masks_that_do_not_fit_and_no_masks() -> None:
    net = small()
    before = copy.deepcopy(net.state_dict())
    for masks in (
        {"5.weight": torch.ones(2, dtype=torch.bool)},
        {"4.weight": torch.ones(3, 24)},
        {"4.weight": torch.zeros(2, 2, dtype=torch.bool)},
    ):
        with pytest.raises(QuantizationError, match="no parameter for this mask"):
            sparsify_(net, masks)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    with pytest.raises(QuantizationError, match=r"do: sparsify_\(model, masks\) first"):
        finish_(net)
