"""GPTQ, flips and scale refit: against the paper's own equations in numpy float64, exhaustion, and their guarantees."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.errors import QuantizationError
from roundoff.formats import (
    PerGroup,
    PerTensor,
    PerToken,
    QParams,
    all_values,
    choose_qparams,
    fake_quantize,
    parse_format,
)
from roundoff.quantize.weights.flips import flip
from roundoff.quantize.weights.gptq import (
    damped_hessian,
    gptq,
    least_squares,
)
from roundoff.quantize.weights.output_error import output_db, quadratic
from roundoff.quantize.weights.round_weight import round_weight
from roundoff.quantize.weights.scales import refit_scales

INT4 = parse_format("int4")


def moments(
    features: int, rows: int = 200, seed: int = 0, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Second moments of rectified, correlated inputs."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(max(features // 2, 1), features, generator=g, dtype=dtype)
    x = torch.randn(rows, max(features // 2, 1), generator=g, dtype=dtype) @ mix
    x = (x + 0.3 * torch.randn(rows, features, generator=g, dtype=dtype)).relu()
    return x.T @ x / rows


def normal(
    *shape: int, seed: int = 1, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=dtype
    )


def paper(w, h, scale, zero, low, high, damp, order, kept=None):
    """Equations 2 and 3 of arXiv:2210.17323 row by row and weight by weight, with inverses updated by elimination.

    Where a weight is not kept, quant gives 0, as in algorithm 1 of SparseGPT (arXiv:2301.00774) under a given mask."""
    w, kept = w.copy(), np.ones(w.shape) if kept is None else kept
    h = h + damp * np.mean(np.diag(h)) * np.eye(len(h))
    sequence = np.argsort(-np.diag(h), kind="stable") if order else np.arange(len(h))
    result = np.zeros_like(w)
    for r in range(len(w)):
        inverse, row = np.linalg.inv(h), w[r].copy()
        for q in sequence:
            code = (
                np.clip(np.rint(row[q] / scale[r, q]) + zero[r, q], low, high)
                - zero[r, q]
            ) * kept[r, q]
            result[r, q] = code * scale[r, q]
            row -= (row[q] - result[r, q]) / inverse[q, q] * inverse[:, q]  # equation 2
            inverse = (
                inverse - np.outer(inverse[:, q], inverse[q]) / inverse[q, q]
            )  # equation 3
            inverse[q, q] = (
                1.0  # out of the game: its row and column are 0, and never used again
            )
    return result


@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("name", ["int4", "int4_asym", "int2"])
@pytest.mark.parametrize("granularity", [PerToken(), PerGroup(4), PerTensor()])
def test_equals_the_papers_equations(name, granularity, order):
    fmt, w, h = parse_format(name), normal(5, 12), moments(12)
    q = choose_qparams(w, fmt, granularity)
    shape = granularity.split(w.shape)[0]
    scale = q.scale.expand(shape).reshape(w.shape).numpy()
    zero = (
        np.zeros_like(scale)
        if q.zero_point is None
        else q.zero_point.expand(shape).reshape(w.shape).numpy()
    )
    expected = torch.tensor(
        paper(
            w.numpy(),
            h.numpy(),
            scale,
            zero,
            fmt.min_finite,
            fmt.max_finite,
            0.01,
            order,
        )
    )
    nearest = fake_quantize(w, q, fmt)
    keep = quadratic(expected - w, h) <= quadratic(
        nearest - w, h
    )  # a row that nearest serves better keeps it
    expected = torch.where(keep[:, None], expected, nearest)
    found = gptq(w, h, fmt, q, order=order, block=5)
    # both are the same multiples of the scale, computed in float64; a tie would show as a whole step
    torch.testing.assert_close(found.weight, expected, rtol=1e-12, atol=1e-12)
    assert int(keep.sum()) >= 3  # so the equations were used


def two_of_four(w: torch.Tensor) -> torch.Tensor:
    groups = w.abs().reshape(*w.shape[:-1], -1, 4)
    return (
        torch.ones_like(groups, dtype=torch.bool)
        .scatter_(-1, groups.argsort(-1)[..., :2], False)
        .reshape(w.shape)
    )


@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("name", ["int4", "int4_asym"])
def test_pruned_weights_stay_zero_and_the_others_make_up_for_it(name, order):
    fmt, w, h = parse_format(name), normal(6, 16), moments(16)
    kept = two_of_four(w)
    w = w * kept
    q = choose_qparams(w, fmt, PerToken())
    scale = q.scale.expand(w.shape).numpy()
    zero = (
        np.zeros_like(scale)
        if q.zero_point is None
        else q.zero_point.expand(w.shape).numpy()
    )
    ends = fmt.min_finite, fmt.max_finite
    expected = torch.tensor(
        paper(w.numpy(), h.numpy(), scale, zero, *ends, 0.01, order, kept.numpy())
    )
    nearest = fake_quantize(w, q, fmt)
    better = quadratic(expected - w, h) <= quadratic(nearest - w, h)
    assert int(better.sum()) >= 3  # so the equations are used
    expected = torch.where(better[:, None], expected, nearest)
    found = gptq(w, h, fmt, q, order=order, block=5, kept=kept)
    torch.testing.assert_close(
        found.weight, expected, rtol=1e-12, atol=1e-12
    )  # as for the dense weight
    assert not found.weight[~kept].any()


def test_a_pruned_weight_against_all_roundings_of_what_is_kept():
    """All 4**4 codes of the four kept of eight weights: flips move none of the others, and the loss is at most twice the
    least (1.8 over these 40 rows); on average it has less than a quarter of what nearest has above the least."""
    fmt = parse_format("int2_asym")
    codes = torch.tensor(
        list(itertools.product(range(-2, 2), repeat=4)), dtype=torch.float64
    )
    ratios = []
    for seed in range(10):
        w, h = normal(4, 8, seed=seed), moments(8, seed=seed)
        kept = two_of_four(w)
        w = w * kept
        q = choose_qparams(w, fmt, PerToken())
        best = torch.stack(
            [
                quadratic(
                    (codes - q.zero_point[r]) * q.scale[r] - w[r, kept[r]],
                    h[kept[r]][:, kept[r]],
                ).min()
                for r in range(4)
            ]
        )
        found = round_weight(w, h, fmt, q, ratios=(1.0,), refit=False, kept=kept).weight
        assert not found[~kept].any()
        ratios.append(
            torch.stack(
                [quadratic(x - w, h) / best for x in (found, fake_quantize(w, q, fmt))]
            )
        )
    ours, nearest = torch.cat(ratios, 1)
    assert ours.min() >= 1 - 1e-9
    assert ours.max() < 2
    assert ours.mean() - 1 < 0.25 * (nearest.mean() - 1)


def test_pruned_weights_stay_zero_with_other_inputs_and_searched_scales():
    w, h = normal(5, 16, dtype=torch.float32), moments(16, dtype=torch.float32)
    kept = two_of_four(w)
    w = w * kept
    noisy = h + 0.1 * h.diagonal().mean() * torch.eye(
        16
    )  # x and x + noise: H grows, the cross term does not
    found = round_weight(
        w, noisy, INT4, choose_qparams(w, INT4, PerToken()), cross=h, kept=kept
    )
    assert not found.weight[~kept].any()
    assert bool((found.weight[kept] != 0).float().mean() > 0.5)


@pytest.mark.parametrize(
    ("kept", "text"),
    [
        (
            torch.ones(2, 3, dtype=torch.bool),
            "expected: bool of shape (2, 4)\n  got: torch.bool of shape (2, 3)",
        ),
        (
            torch.ones(2, 4),
            "expected: bool of shape (2, 4)\n  got: torch.float32 of shape (2, 4)",
        ),
        (torch.eye(2, 4) > 0, "a weight that is not kept is not 0"),
    ],
)
def test_masks_that_do_not_fit_are_refused(kept, text):
    w = torch.ones(2, 4)
    with pytest.raises(QuantizationError) as caught:
        gptq(w, torch.eye(4), INT4, choose_qparams(w, INT4, PerToken()), kept=kept)
    assert text in str(caught.value)


@pytest.mark.parametrize("block", [1, 3, 128])
def test_blocks_do_not_change_codes(block):
    w, h = normal(4, 10), moments(10)
    q = choose_qparams(w, INT4, PerToken())
    assert torch.equal(
        gptq(w, h, INT4, q, block=block).weight, gptq(w, h, INT4, q, block=4).weight
    )


def test_near_the_best_of_all_roundings():
    """All 4**6 codes of a row of six weights, asymmetric int2: gptq's loss is at most 4 times the least (that is the
    factor over these 40 rows; Babai's bound is exponential in the length), flips at most 2.5 times, and on average both
    are clearly better than nearest."""
    fmt = parse_format("int2_asym")
    codes = torch.tensor(
        list(itertools.product(range(-2, 2), repeat=6)), dtype=torch.float64
    )
    ratios = []
    for seed in range(10):
        w, h = normal(4, 6, seed=seed), moments(6, seed=seed)
        q = choose_qparams(w, fmt, PerToken())
        best = torch.stack(
            [
                quadratic((codes - q.zero_point[r]) * q.scale[r] - w[r], h).min()
                for r in range(4)
            ]
        )
        found = gptq(w, h, fmt, q).weight
        flipped = flip(w, found, h, fmt, q).weight
        ratios.append(
            torch.stack(
                [
                    quadratic(x - w, h) / best
                    for x in (found, flipped, fake_quantize(w, q, fmt))
                ]
            )
        )
    by_gptq, by_flips, nearest = torch.cat(ratios, 1)
    assert (
        by_gptq.min() >= 1 - 1e-9
    )  # nothing beats exhaustion: the losses are comparable
    assert by_gptq.max() < 4
    assert by_flips.max() < 2.5
    assert by_gptq.mean() < 0.7 * nearest.mean()
    assert by_flips.mean() <= by_gptq.mean()


@settings(max_examples=40, deadline=None)
@given(
    out=st.integers(1, 5),
    features=st.integers(1, 20),
    seed=st.integers(0, 10**6),
    dead=st.booleans(),
    name=st.sampled_from(
        ["int4", "int8_asym", "fp4_e2m1", "fp8_e4m3fn", "ternary", "binary", "int2"]
    ),
)
def test_never_worse_than_nearest_and_always_on_the_grid(
    out, features, seed, dead, name
):
    fmt, w, h = (
        parse_format(name),
        normal(out, features, seed=seed),
        moments(features, rows=8, seed=seed),
    )
    if dead:
        h[0], h[:, 0] = 0.0, 0.0
    q = choose_qparams(w, fmt, PerToken())
    nearest = fake_quantize(w, q, fmt)
    found = gptq(w, h, fmt, q)
    refined = flip(w, found.weight, h, fmt, q)
    values = torch.tensor(
        sorted({v for v in all_values(fmt) if np.isfinite(v)}), dtype=w.dtype
    )
    if q.zero_point is None:
        grid = values * q.scale[..., None]
    else:
        grid = (values - q.zero_point[..., None]) * q.scale[..., None]
    for weight in (found.weight, refined.weight):
        assert (weight[..., None] - grid).abs().amin(-1).max() <= 1e-12 * w.abs().max()
    slack = 1 + 1e-9  # losses are sums in float64
    assert (
        quadratic(found.weight - w, h) <= slack * quadratic(nearest - w, h) + 1e-12
    ).all()
    assert (
        quadratic(refined.weight - w, h)
        <= slack * quadratic(found.weight - w, h) + 1e-12
    ).all()
    if dead:
        assert torch.equal(found.weight[:, 0], nearest[:, 0])
    assert found.gain.after_db >= found.gain.before_db - 1e-9


def test_groups_are_separate_problems():
    w, h = normal(6, 3, 9), torch.stack([moments(9, seed=s) for s in range(6)])
    q = choose_qparams(w, INT4, PerToken())
    found = gptq(w, h, INT4, q).weight
    flipped = flip(w, found, h, INT4, q).weight
    for i in range(6):
        alone = QParams(q.scale[i])
        assert torch.equal(found[i], gptq(w[i], h[i], INT4, alone).weight)
        assert torch.equal(flipped[i], flip(w[i], found[i], h[i], INT4, alone).weight)


def test_cross_term_brings_the_output_of_the_full_precision_layer():
    """x̂ = x + error: the loss E|Ŵ x̂ - W x|² is measured on the samples themselves."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(500, 6, generator=g, dtype=torch.float64) @ torch.randn(
        6, 16, generator=g, dtype=torch.float64
    )
    noisy = x * 0.8 + 0.3 * torch.randn(500, 16, generator=g, dtype=torch.float64)
    w, h, cross = normal(8, 16), noisy.T @ noisy / 500, x.T @ noisy / 500
    q = choose_qparams(w, parse_format("int8"), PerToken())
    plain = gptq(w, h, parse_format("int8"), q).weight
    aware = gptq(w, h, parse_format("int8"), q, cross=cross, damp=1e-4).weight

    def loss(weight):
        return (noisy @ weight.T - x @ w.T).square().mean()

    exact = torch.linalg.lstsq(
        noisy, x @ w.T
    ).solution.T  # the least that any weights reach
    assert loss(aware) < 0.8 * loss(plain)
    assert loss(aware) < 1.02 * loss(exact)  # damping and 8-bit weights


def test_least_squares_is_numpys_and_leaves_weights_without_cross_error():
    w, h = normal(3, 8), moments(8)
    torch.testing.assert_close(least_squares(w, h, h), w, rtol=1e-9, atol=1e-9)
    cross = moments(8, seed=5)
    eye = 0.01 * np.mean(np.diag(h.numpy())) * np.eye(8)
    expected = w.numpy() @ (cross.numpy() + eye) @ np.linalg.inv(h.numpy() + eye)
    np.testing.assert_allclose(least_squares(w, h, cross).numpy(), expected, rtol=1e-9)


def test_ratios_take_the_best_of_each_row():
    w, h = normal(4, 24), moments(24)
    q = choose_qparams(w, INT4, PerToken())
    alone = [gptq(w, h, INT4, QParams(q.scale * r)) for r in (1.0, 0.8, 0.6)]
    together = gptq(w, h, INT4, q, ratios=(1.0, 0.8, 0.6))
    losses = torch.stack([quadratic(a.weight - w, h) for a in alone])
    torch.testing.assert_close(quadratic(together.weight - w, h), losses.amin(0))
    codes = together.weight / together.qparams.scale
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-12)


def test_refit_is_the_minimum_of_the_parabola():
    w, h = normal(5, 9), moments(9)
    q = choose_qparams(w, INT4, PerToken())
    start = fake_quantize(w, q, INT4)
    found = refit_scales(w, start, h, INT4, q)
    for r in range(5):
        codes = (start[r] / q.scale[r]).round().numpy()
        # weighted least squares with one unknown, by numpy: s codes ~ w under Lᵀ, H = L Lᵀ
        factor = np.linalg.cholesky(h.numpy() + 1e-12 * np.eye(9)).T
        (scale,), *_ = np.linalg.lstsq(
            (factor @ codes)[:, None], factor @ w[r].numpy(), rcond=None
        )
        assert found.qparams.scale[r].item() == pytest.approx(scale, rel=1e-9)
        np.testing.assert_allclose(found.weight[r].numpy(), codes * scale, rtol=1e-9)


def test_refit_keeps_asymmetric_codes():
    fmt, w, h = parse_format("int4_asym"), normal(3, 8) + 2, moments(8)
    q = choose_qparams(w, fmt, PerToken())
    start = fake_quantize(w, q, fmt)
    found = refit_scales(w, start, h, fmt, q)
    assert torch.equal(
        (found.weight / found.qparams.scale).round(), (start / q.scale).round()
    )
    assert found.gain.after_db > found.gain.before_db


def test_round_weight_is_better_than_its_parts():
    w, h = normal(8, 36), moments(36)
    q = choose_qparams(w, INT4, PerToken())
    first, all_steps = gptq(w, h, INT4, q), round_weight(w, h, INT4, q)
    assert all_steps.gain.before_db == pytest.approx(first.gain.before_db)
    assert all_steps.gain.after_db > first.gain.after_db + 0.3
    assert all_steps.gain.after_db == pytest.approx(output_db(all_steps.weight, w, h))
    codes = all_steps.weight / all_steps.qparams.scale
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-12)


def test_half_precision_weights_keep_their_dtype():
    w = normal(4, 8, dtype=torch.float32).bfloat16()
    found = gptq(
        w, moments(8, dtype=torch.float32), INT4, choose_qparams(w, INT4, PerToken())
    )
    assert found.weight.dtype == torch.bfloat16


def test_one_weight_one_sample_and_no_signal():
    one = torch.tensor([[0.3]])
    q = choose_qparams(one, INT4)
    assert gptq(one, torch.tensor([[2.0]]), INT4, q).weight.item() == pytest.approx(0.3)
    # one sample: a Hessian of rank 1, positive definite by its damping alone
    x, w = normal(1, 30), normal(2, 30)
    assert gptq(w, x.T @ x, INT4, choose_qparams(w, INT4, PerToken())).gain.db > 5
    # all inputs dead: nearest
    q = choose_qparams(w, INT4, PerToken())
    nothing = gptq(w, torch.zeros(30, 30, dtype=torch.float64), INT4, q)
    assert torch.equal(nothing.weight, fake_quantize(w, q, INT4))
    assert nothing.gain.db == 0


def test_damping_is_raised_and_said():
    """Rank 1 without damping has no Cholesky factor; -1e-4 on the diagonal of eigenvalues is made up for as well."""
    ones = torch.ones(4, 4)
    _, added, note = damped_hessian(ones, 0.0)
    assert added.max() > 0
    assert note.startswith("damping raised to ")
    w = normal(2, 4, dtype=torch.float32)
    assert (
        gptq(w, ones, INT4, choose_qparams(w, INT4, PerToken()), damp=0.0).gain.note
        == note
    )


BAD = moments(4)
BAD_INDEFINITE = torch.eye(4, dtype=torch.float64) * 1e-3 + 5 * (
    1 - torch.eye(4, dtype=torch.float64)
)
QUIET = choose_qparams(normal(2, 4), INT4, PerToken())


@pytest.mark.parametrize(
    ("weight", "hessian", "qparams", "more", "text"),
    [
        (normal(2, 4) / 0, BAD, QUIET, {}, "the weight holds NaN or Inf"),
        (normal(2, 4), BAD * torch.nan, QUIET, {}, "the hessian holds NaN or Inf"),
        (normal(2, 4), moments(5), QUIET, {}, "the Hessian does not fit the weight"),
        (normal(4), BAD, QUIET, {}, "the weight is no matrix"),
        (normal(2, 4), -BAD, QUIET, {}, "no second moments"),
        (
            normal(2, 4),
            BAD_INDEFINITE,
            QUIET,
            {},
            "the Hessian is not positive semidefinite",
        ),
        (normal(2, 4), BAD, QUIET, {"damp": -1.0}, "negative damping"),
        (normal(2, 4), BAD, QUIET, {"ratios": (0.0,)}, "a ratio is not positive"),
        (
            normal(2, 4),
            BAD,
            QUIET,
            {"cross": moments(3)},
            "the cross term does not fit the Hessian",
        ),
        (
            normal(2, 4),
            BAD,
            QUIET,
            {"cross": BAD * torch.inf},
            "the cross holds NaN or Inf",
        ),
        (
            normal(2, 4),
            BAD,
            QParams(torch.zeros(2, 1)),
            {},
            "a scale is not positive and finite",
        ),
        (
            normal(2, 4),
            BAD,
            QParams(torch.ones(3, 1)),
            {},
            "the scale does not fit the weight",
        ),
        (
            torch.ones(2, 4, dtype=torch.int64),
            BAD,
            QUIET,
            {},
            "the weight has no floating-point values",
        ),
    ],
)
def test_what_is_refused(weight, hessian, qparams, more, text):
    with pytest.raises(QuantizationError, match=text):
        gptq(weight, hessian, INT4, qparams, **more)


def test_refit_refuses_groups_of_inputs():
    w = normal(2, 8)
    q = choose_qparams(w, INT4, PerGroup(4))
    with pytest.raises(QuantizationError, match="several scales in one row"):
        refit_scales(w, fake_quantize(w, q, INT4), moments(8), INT4, q)
