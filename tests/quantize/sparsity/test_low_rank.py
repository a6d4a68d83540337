"""Low rank: against numpy's decomposition, exact ranks, and the free energy of variational Bayes written again."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from torch import nn

from roundoff.errors import QuantizationError
from roundoff.quantize.sparsity import model_cost
from roundoff.quantize.sparsity.low_rank import decompose_
from roundoff.quantize.sparsity.rank import _tau_low, evbmf_rank


def exact(layer: nn.Module, rank: int, kind: str) -> nn.Module:
    """Give a layer a weight whose matrix has exactly this rank, built from its two factors by einsum."""
    g = torch.Generator().manual_seed(1)
    out, inputs, *kernel = layer.weight.shape

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    if kind == "linear":
        weight = torch.einsum("or,ri->oi", drawn(out, rank), drawn(rank, inputs))
    elif kind == "spatial":
        weight = torch.einsum(
            "orx,riy->oiyx", drawn(out, rank, kernel[1]), drawn(rank, inputs, kernel[0])
        )
    else:
        weight = torch.einsum(
            "or...,ri->oi...", drawn(out, rank, *kernel), drawn(rank, inputs)
        )
    layer.weight.data = weight.to(layer.weight)
    return layer


LAYERS = {
    "linear": (nn.Linear(32, 24), "linear", (2, 5, 32)),
    "spatial": (nn.Conv2d(12, 16, 3, padding=1), "spatial", (2, 12, 8, 8)),
    "spatial, odd": (
        nn.Conv2d(12, 16, (3, 5), (2, 1), (0, 2), (1, 2), bias=False),
        "spatial",
        (2, 12, 9, 11),
    ),
    "channel": (nn.Conv2d(16, 12, 3, 2, 1), "channel", (2, 16, 8, 8)),
    "channel 1d": (nn.Conv1d(16, 12, 3, padding=1), "channel", (2, 16, 9)),
    "channel 3d": (nn.Conv3d(16, 6, 2), "channel", (1, 16, 4, 4, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_exact_rank_is_replaced_exactly(name: str) -> None:
    layer, kind, shape = LAYERS[name]
    net = nn.Sequential(exact(layer.double(), 3, kind))
    x = torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    before, whole = net(x).detach(), model_cost(net, x)
    (row,) = decompose_(
        net, [x], rank={"0": 3}, scheme="channel" if kind == "channel" else "spatial"
    )
    assert (row.scheme, row.rank, row.reason) == (kind, 3, "")
    assert row.energy == pytest.approx(1.0, abs=1e-13)
    assert row.macs == pytest.approx(model_cost(net, x).macs / whole.macs, rel=1e-12)
    assert row.macs < 1
    # float64; the decomposition is backward stable: a few hundred ulp of the largest singular value on each product
    torch.testing.assert_close(
        net(x).detach(), before, rtol=0.0, atol=1e-12 * float(before.abs().max())
    )


def test_the_share_of_the_norm_is_that_of_numpy() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 40))
    values = [
        np.linalg.svd(net[i].weight.detach().double().numpy(), compute_uv=False)
        for i in (0, 2)
    ]
    originals = [net[i].weight.detach().double().clone() for i in (0, 2)]
    rows = decompose_(net, [torch.rand(1, 40)], rank=0.6)
    for row, s, weight, i in zip(rows, values, originals, (0, 2), strict=True):
        share = np.cumsum(s**2) / (s**2).sum()
        assert share[row.rank - 1] >= 0.6 > share[row.rank - 2]
        assert row.energy == pytest.approx(share[row.rank - 1], rel=1e-12)
        approximation = (net[i][1].weight @ net[i][0].weight).detach().double()
        # Eckart and Young: the error is what the other singular values hold, here up to fp32 rounding of two factors of 40
        # terms (40 * 6e-8 relative)
        lost = float((weight - approximation).square().sum())
        assert lost == pytest.approx((s[row.rank :] ** 2).sum(), rel=1e-4)


def test_what_stays_says_why() -> None:
    net = nn.Sequential(
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 6, 1),
        nn.Conv2d(6, 8, 3, padding="same"),
        nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(8, 2, 3),
    )
    before = [id(m) for m in net]
    rows = decompose_(net, [torch.rand(1, 4, 9, 9)], rank=1.0)
    groups = "it has groups, or padding other than a number of zeros"
    assert [r.reason for r in rows] == [
        groups,
        "a kernel of (1, 1) has no spatial parts",
        groups,
        groups,
        "rank 6 takes no fewer multiply-accumulates",
    ]
    assert [id(m) for m in net] == before


def test_bad_ranks_leave_the_model() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    for rank, message in (
        (0.0, "0 < rank <= 1"),
        (1.5, "0 < rank <= 1"),
        ({"0": 9}, "expected: 1 to 8"),
        ({"2": 1}, "2: no linear layer or convolution that ran"),
        ("best", "unknown way"),
    ):
        with pytest.raises(QuantizationError, match=message):
            decompose_(net, [torch.rand(1, 8)], rank=rank)
    with pytest.raises(QuantizationError, match="spatial or channel"):
        decompose_(net, [torch.rand(1, 8)], scheme="tucker")
    with pytest.raises(QuantizationError, match="nothing can hold its two factors"):
        decompose_(nn.Linear(16, 16), [torch.rand(1, 16)], rank={"": 1})
    assert [type(m) for m in net] == [nn.Linear, nn.Linear]


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.5, 1.0])
def test_the_threshold_of_theorem_2(alpha: float) -> None:
    """The zero of Φ(τ) + Φ(τ/α) by mpmath in 30 digits; at α = 1 it is the paper's 2.5129."""
    with mpmath.workdps(30):
        phi = lambda z: mpmath.log(z + 1) / z - mpmath.mpf(1) / 2  # noqa: E731
        zero = mpmath.findroot(
            lambda t: phi(t) + phi(t / alpha), (2.4 * alpha**0.5, 2.7 * alpha**0.5)
        )
    assert _tau_low(alpha) == pytest.approx(float(zero), rel=1e-10)
    if alpha == 1.0:
        assert _tau_low(alpha) == pytest.approx(2.5129, abs=5e-5)


def energy(values: np.ndarray, large: int, rank: int, variance: float) -> float:
    """Ω of theorem 3 for one variance, sum by sum with plain Python floats."""
    alpha = len(values) / large
    tau = _tau_low(alpha)
    total = 0.0
    for g in values:
        x = g * g / (large * variance)
        total += x - math.log(x)
        if x > (1 + tau) * (1 + alpha / tau):
            t = (x - 1 - alpha + math.sqrt((x - 1 - alpha) ** 2 - 4 * alpha)) / 2
            total += math.log(t + 1) + alpha * math.log(t / alpha + 1) - t
    return total


@pytest.mark.parametrize(
    ("rows", "columns", "rank"), [(40, 40, 4), (30, 90, 3), (80, 50, 6), (25, 60, 0)]
)
def test_a_planted_rank_is_found(rows: int, columns: int, rank: int) -> None:
    """Noise of variance 1 and a signal whose singular values are 3 times the noise's largest, √rows + √columns: the
    estimator keeps exactly the signal (corollary 2: no false ones, with a margin of 1 + τ against the noise's edge)."""
    generator = np.random.default_rng(rows + rank)
    u, v = (
        np.linalg.qr(generator.normal(size=(n, max(rank, 1))))[0][:, :rank]
        for n in (rows, columns)
    )
    strength = 3 * (math.sqrt(rows) + math.sqrt(columns))
    matrix = strength * u @ v.T + generator.normal(size=(rows, columns))
    values = np.linalg.svd(matrix, compute_uv=False)
    assert evbmf_rank(values, rows, columns) == rank
    assert evbmf_rank(values * 1e-6, rows, columns) == rank  # any unit
    assert evbmf_rank(values, columns, rows) == rank
    assert evbmf_rank(values, rows, columns, noise=1.0) == rank
    # the variance that explains it best, by exhaustion of a fine grid, leads to the same rank
    small, large = sorted((rows, columns))
    grid = np.geomspace(0.05, (values**2).sum() / (small * large), 4000)
    best = grid[int(np.argmin([energy(values, large, rank, s) for s in grid]))]
    tau = _tau_low(small / large)
    assert (
        int(
            (
                values > math.sqrt(large * best * (1 + tau) * (1 + small / large / tau))
            ).sum()
        )
        == rank
    )
    assert best == pytest.approx(1.0, abs=0.2)


def test_ranks_of_special_matrices() -> None:
    assert evbmf_rank(np.zeros(3), 3, 5) == 0
    assert evbmf_rank(np.zeros(0), 0, 5) == 0
    exact_rank = np.linalg.svd(
        np.outer(np.arange(1.0, 9), np.arange(1.0, 7)), compute_uv=False
    )
    assert evbmf_rank(exact_rank, 8, 6) == 1
    for bad in (np.ones(2), np.array([1.0, np.nan, 0.0]), np.array([1.0, -1.0, 0.0])):
        with pytest.raises(
            QuantizationError, match="not the singular values of a matrix"
        ):
            evbmf_rank(bad, 3, 5)
