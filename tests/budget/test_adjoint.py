"""The adjoint against exact Jacobians from torch.func.jacrev, and against itself in its other modes."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from polars.testing import assert_frame_equal
from torch import nn

import roundoff
from roundoff import Workload
from roundoff.budget.noise_power import power
from roundoff.budget.terms import TermKey

#: The adjoint alone.
budget = functools.partial(roundoff.budget, trials=0)

SITES = ["first/linear", "/tanh", "/matmul", "/mul", "last/linear"]


def parts(measured, site):
    rows = measured.rows(site, "bf16")
    groups = {
        name: [t for t in rows if t.part == name]
        for name in ("activation", "weight", "output")
    }
    return {
        "all": power(rows),
        **{name: power(group) for name, group in groups.items() if group},
    }


def test_one_sample_many_probes_gives_the_exact_power(tiny):
    """K = 3000 probes of one sample, seed 0: within 4 sigma of the reported standard error, for all 19 numbers.

    The relative variance of (v . Je)^2 for signs v is at most 2, so sigma is at most sqrt(2 / 3000) = 2.6 %.
    """
    x = torch.randn(1, 4, dtype=torch.float64)
    measured = budget(Workload(tiny, [x]), ["bf16"], probes=3000)
    exact = tiny.exact(x)
    assert [s.site for s in measured.sites] == SITES
    checked = 0
    for site in SITES:
        found = parts(measured, site)
        assert set(found) == set(exact[site])
        for name, (noise, stderr) in found.items():
            assert abs(noise - exact[site][name]) <= 4 * stderr + 1e-6 * noise, (
                site,
                name,
            )  # kept in fp32
            assert (
                stderr <= 1.2 * (2 / 3000) ** 0.5 * noise
            )  # 1.2: the spread of an estimated spread
            checked += 1
    assert checked == 18


@pytest.mark.parametrize(("mixing", "probes"), [(False, 64), (True, 2000)])
def test_errors_of_a_batch(tiny, mixing, probes):
    """64 samples, seed 0. A weight's error is the same in all samples: its projections are summed inside the square,
    where the independent signs of the samples make the expectation the sum of powers.

    Each power is a mean over n products of relative variance at most 2, within 4 sigma = 4 sqrt(2 / n): n is probes
    times samples where samples are told apart, probes alone where the model mixes them.
    """
    tiny.mean = mixing
    x = torch.randn(64, 4, dtype=torch.float64)
    measured = budget(Workload(tiny, [x]), ["bf16"], probes=probes)
    exact = tiny.exact(x)
    for site in SITES:
        products = probes * (64 if not mixing or site == "last/linear" else 1)
        for name, (noise, _) in parts(measured, site).items():
            assert noise == pytest.approx(
                exact[site][name], rel=4 * (2 / products) ** 0.5
            ), (
                site,
                name,
            )
    pooled = dict(measured.terms.select("site", "pooled").iter_rows())
    assert {s: pooled[s] for s in SITES} == {
        s: mixing and s != "last/linear" for s in SITES
    }


def test_batches_are_added(tiny):
    batches = [torch.randn(n, 4, dtype=torch.float64) for n in (5, 1, 8)]
    measured = budget(Workload(tiny, batches), ["bf16"], probes=400)
    exact = tiny.exact(torch.cat(batches))
    for site in SITES:
        # 14 * 400 products: sigma at most sqrt(2 / 5600) = 1.9 %
        assert parts(measured, site)["all"][0] == pytest.approx(
            exact[site]["all"], rel=4 * 0.019
        )


def test_a_scalar_target_needs_one_probe_and_is_exact(tiny):
    """The gradient of a scalar is exact; the projection is kept in fp32, so its square carries 2**-23."""
    loss = nn.Sequential(tiny, Sum())
    x = torch.randn(6, 4, dtype=torch.float64)
    measured = budget(Workload(loss, [x]), ["bf16"])
    assert measured.about.probes == 1
    with torch.no_grad():
        signal = float(loss(x)) ** 2
    for site, errors in tiny.errors(x).items():
        gradient = tiny.jacobian(site, x, errors["all"].shape).sum(0)
        for name, error in errors.items():
            expected = float((gradient * error).sum()) ** 2 / signal
            found = parts(
                measured, ("0" + site) if site.startswith("/") else "0." + site
            )[name]
            # a sum that cancels loses relative accuracy: absolute to its terms, n terms of fp64
            scale = float((gradient * error).abs().sum()) ** 2 / signal
            assert found[0] == pytest.approx(expected, rel=2**-21, abs=1e-12 * scale)
            assert found[1] == 0.0


class Sum(nn.Module):
    def forward(self, z):
        return z.sum()


@pytest.mark.parametrize("given", [None, 5])
def test_a_loss_over_several_batches(given):
    model = nn.Linear(4, 3).double()
    batches = [torch.randn(n, 4, dtype=torch.float64) for n in (3, 2)]
    workload = Workload(
        model, batches, loss=lambda output, batch: output.square().mean()
    )
    measured = budget(workload, ["bf16"], of="loss", probes=given)
    assert (measured.about.probes, measured.about.samples) == (1, 2)
    with torch.no_grad():
        signal = sum(float(model(batch).square().mean()) ** 2 for batch in batches)
        x, w, b = (
            t.bfloat16().double() for t in (batches[0], model.weight, model.bias)
        )
        exact = model(batches[0])
        error = (x @ w.T + b).bfloat16().double() - exact
        expected = (
            float((2 / 9 * exact * error).sum()) ** 2
        )  # the gradient of the mean of 9 squares
    first = power([t.take(slice(0, 1)) for t in measured.rows("/linear", "bf16")])[0]
    # projections are kept in fp32: each of 4 parts carries 2**-24, and they cancel at most 20 fold here
    assert first == pytest.approx(expected / signal, rel=2 * 20 * 2**-24)


def test_a_last_batch_whose_output_is_one_number(tiny):
    """Its gradient is exact with one probe, beside batches that have K."""
    model = nn.Linear(4, 1).double()
    batches = [torch.randn(n, 4, dtype=torch.float64) for n in (3, 1)]
    measured = budget(Workload(model, batches), ["bf16"], probes=8)
    assert measured.about.probes == 8
    (row,) = measured.table.to_dicts()
    x, w, b = torch.cat(batches), model.weight.detach(), model.bias.detach()
    low = [t.bfloat16().double() for t in (x, w, b)]
    error = (low[0] @ low[1].T + low[2]).bfloat16().double() - (x @ w.T + b)
    expected = float(error.square().sum() / (x @ w.T + b).square().sum())
    # one output element a sample: (v e)^2 = e^2 whatever the sign v; fp32 storage of the projections
    assert row["noise"] == pytest.approx(expected, rel=2**-20)


def by_key(probe):
    return {
        (k.site, k.format, k.part, k.operand): torch.from_numpy(v)
        for k, v in probe.terms.projections().items()
    }


@pytest.mark.parametrize("mixing", [False, True])
def test_batched_and_one_by_one_probes_agree(tiny, measure, mixing):
    """The same signs and, up to the order of sums in fp64, the same projections."""
    tiny.mean = mixing
    x = torch.randn(6, 4, dtype=torch.float64)
    batched, single = (
        measure(tiny, x, probes=5, formats=("bf16", "int8"), batched=b)
        for b in (True, False)
    )
    one, other = by_key(batched), by_key(single)
    assert one.keys() == other.keys()
    assert batched.axes == single.axes
    for key, values in one.items():
        torch.testing.assert_close(
            other[key], values, rtol=1e-9, atol=1e-12 * float(values.abs().max())
        )


def test_the_same_seed_gives_the_same_numbers(tiny):
    x = torch.randn(3, 4, dtype=torch.float64)
    first, again, other = (
        budget(Workload(tiny, [x]), ["bf16"], seed=s) for s in (1, 1, 2)
    )
    assert first.terms.equals(again.terms)
    assert not first.terms.equals(other.terms)


def test_a_new_format_costs_no_new_pass(tiny):
    calls = []
    tiny.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(3, 4, dtype=torch.float64)
    one = budget(Workload(tiny, [x]), ["bf16"])
    of_one = len(calls)
    many = budget(Workload(tiny, [x]), ["fp16", "bf16", "int8", "fp8_e4m3fn", "mxfp4"])
    assert len(calls) == 2 * of_one
    same = many.terms.filter(many.terms["format"] == "bf16")
    # errors that are projected beside others are summed in another order, in fp64 here
    assert_frame_equal(same, one.terms, rel_tol=1e-6, abs_tol=1e-12)


def test_terms_name_the_operand_and_where_it_comes_from(tiny, measure):
    probe = measure(tiny, torch.randn(2, 4, dtype=torch.float64))
    assert set(probe.terms.projections()) == {
        TermKey("first/linear", "bf16", "activation", 0, ()),
        TermKey("first/linear", "bf16", "weight", 1, ("first.weight",)),
        TermKey("first/linear", "bf16", "weight", 2, ("first.bias",)),
        TermKey("first/linear", "bf16", "output", -1, ()),
        TermKey("/tanh", "bf16", "activation", 0, ("first/linear",)),
        TermKey("/tanh", "bf16", "output", -1, ()),
        TermKey("/matmul", "bf16", "activation", 0, ("/tanh",)),
        TermKey("/matmul", "bf16", "weight", 1, ("a",)),
        TermKey("/matmul", "bf16", "output", -1, ()),
        TermKey("/mul", "bf16", "activation", 0, ("/matmul",)),
        TermKey("/mul", "bf16", "activation", 1, ("/tanh",)),
        TermKey("/mul", "bf16", "output", -1, ()),
        TermKey("last/linear", "bf16", "activation", 0, ("/mul",)),
        TermKey("last/linear", "bf16", "weight", 1, ("last.weight",)),
        TermKey("last/linear", "bf16", "weight", 2, ("last.bias",)),
        TermKey("last/linear", "bf16", "output", -1, ()),
    }


def test_around_a_rounded_model_the_jacobian_is_that_of_the_rounded_model(tiny):
    """tanh's derivative is taken where the rounded first layer puts it."""
    x = torch.randn(1, 4, dtype=torch.float64)
    measured = budget(
        Workload(tiny, [x]), ["bf16"], probes=3000, around={"first/linear": "int2"}
    )
    with torch.no_grad():
        w = tiny.first.weight
        scale_x, scale_w = (
            x.abs().max(),
            w.abs().amax(1, keepdim=True),
        )  # int2 has the codes -1, 0, 1
        y = (torch.round(x / scale_x) * scale_x) @ (
            torch.round(w / scale_w) * scale_w
        ).T + tiny.first.bias
        shift = y - tiny.first(x)
    plain = tiny.exact(x)["/tanh"]["all"]
    original = tiny.first
    tiny.first = Shifted(original, shift)
    try:
        with torch.no_grad():
            h, signal = torch.tanh(y), float(tiny(x).square().sum())
            end = torch.tanh(y.bfloat16().double()).bfloat16().double()
        expected = (
            float(
                (tiny.jacobian("/tanh", x, h.shape).reshape(3, 5) @ (end - h)[0])
                .square()
                .sum()
            )
            / signal
        )
    finally:
        tiny.first = original
    noise, stderr = parts(measured, "/tanh")["all"]
    assert abs(noise - expected) <= 4 * stderr
    assert (
        abs(noise - plain) > 10 * stderr
    )  # another number than around the unrounded model


class Shifted(nn.Module):
    def __init__(self, inner, shift):
        super().__init__()
        self.inner, self.shift = inner, shift

    def forward(self, x):
        return self.inner(x) + self.shift


def test_weights_used_twice_count_once_for_each_use(tiny):
    shared = nn.Linear(4, 4).double()
    model = nn.Sequential(shared, nn.Tanh(), shared)
    x = torch.randn(40, 4, dtype=torch.float64)
    measured = budget(Workload(model, [x]), ["bf16"], probes=100)

    def rounded():
        w, b = (
            shared.weight.detach().bfloat16().double(),
            shared.bias.detach().bfloat16().double(),
        )
        return torch.tanh(x @ w.T + b) @ w.T + b

    with torch.no_grad():
        z = model(x)
        expected = float((rounded() - z).square().sum() / z.square().sum())
    both = [
        t
        for s in ("0/linear", "0/linear#1")
        for t in measured.rows(s, "bf16")
        if t.part == "weight"
    ]
    # 4000 products: sigma 2.2 %; second order: the relative error of the weights, 2**-9, against 1
    assert power(both)[0] == pytest.approx(expected, rel=4 * 0.022 + 0.01)
    assert np.isfinite(power(both)[1])
