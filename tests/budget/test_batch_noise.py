"""Batches whose samples share a scale: how far whole batches differ is seen by real runs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from roundoff import Workload, budget
from roundoff.budget.batch_noise import BatchNoise, RealRuns, finest_sharing
from roundoff.budget.outputs import OutputRows
from roundoff.budget.prepared import prepared
from roundoff.budget.scan import Scan
from roundoff.budget.trials import record
from roundoff.formats import parse_format
from roundoff.plan import noise, run_batches


@pytest.mark.parametrize(
    "name", ["int8", "int4_asym", "fp8_e4m3fn", "hif8", "w4a8", "nvfp4"]
)
def test_formats_whose_samples_share_a_scale(name):
    """NVFP4 has a scale of the whole tensor that block scales are relative to."""
    assert parse_format(name).shares_scale


@pytest.mark.parametrize(
    "name", ["bf16", "fp16", "tf32", "mxfp4", "mxint8", "w4", "ternary"]
)
def test_formats_whose_samples_share_none(name):
    assert not parse_format(name).shares_scale


def of_batches(*noises):
    column = np.array(noises, dtype=float)[:, None]
    return BatchNoise(column, np.ones_like(column))


def test_what_measured_batches_are_off_by():
    batches = of_batches(1, 1, 4, 2)
    # their mean is 1, that of all is 2
    assert batches.error([0, 1]) == pytest.approx(1.0)
    # means of 2.5 and 2; the deviations are -1, -1, 2 and 0, so their variance is 2
    standard_error = math.sqrt((1 - 2 / 4) / 2 * 2) / 2
    assert batches.error([0, 2]) == pytest.approx(max(0.2, standard_error))
    assert batches.error([0, 1, 2, 3]) == 0.0


def test_noise_is_counted_beyond_what_the_signal_explains():
    """A batch of four times the signal, with four times the noise, is like the others."""
    signal = np.array([[1.0], [4.0], [1.0]])
    assert BatchNoise(0.1 * signal, signal).error([0]) == pytest.approx(0.0, abs=1e-12)


def test_batches_that_cannot_be_compared_say_nothing():
    assert of_batches(math.nan, math.inf, 1).error([0, 1]) == 0.0
    assert of_batches(1, 1, math.nan).error([0]) == 0.0
    assert of_batches(0, 0, 0).error([0]) == 0.0


def test_the_worst_output_counts():
    both = BatchNoise(np.array([[1.0, 1.0], [1.0, 3.0]]), np.ones((2, 2)))
    assert both.error([0]) == pytest.approx(1.0)


def test_the_finest_format_with_shared_scales_is_run():
    formats = [parse_format(name) for name in ("bf16", "int8", "fp8_e4m3fn")]
    rows = {("a", "bf16"): np.ones((2, 3)), ("a", "int8"): np.full((2, 3), 2.0)}
    rows["a", "fp8_e4m3fn"] = np.full((2, 3), 3.0)
    assert finest_sharing([rows], formats).name == "int8"
    assert finest_sharing([rows], formats[:1]) is None


class Background(nn.Module):
    """Adds up what a linear layer makes of each place."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.outer(self.inner(x).mean(1))


def backgrounds(largest):
    """Images of the constant 1 with a few places of noise, and the largest value as given.

    Of int8's steps, a 127th of it, the constant is a whole number or not.
    """
    batches = []
    for value in largest:
        x = torch.ones(48, 40, 3)
        x[:, :4] = torch.randn(48, 4, 3)
        x[0, 0, 0] = value
        batches.append(x)
    return batches


@pytest.mark.parametrize("trials", [None, 0])
def test_two_batches_that_are_alike_by_chance_do_not_stand_for_the_others(trials):
    """The constant is 10 steps in the first two batches, and then 9.5, 9 and so on."""
    torch.manual_seed(0)
    steps = [10, 10, 9.5, 9, 8.6, 8.5, 10, 9.4]
    workload = Workload(Background(), backgrounds([127 / n for n in steps]))
    found = budget(workload, ["int8"], trials=trials)
    assert len(found.about.batch_samples) > 4
    formats = {"inner/linear": "int8"}
    real = noise(run_batches(workload, formats).targets, run_batches(workload).targets)
    predicted = found.predict(formats)
    assert predicted.stderr_db is not None
    # 3 sigma; 0.1 dB of second order where all batches were measured by trial
    tolerance = 3 * max(predicted.stderr_db, 0.1)
    assert predicted.db == pytest.approx(-10 * math.log10(real), abs=tolerance)


@pytest.mark.parametrize("trials", [None, 0])
@pytest.mark.parametrize("fmt", ["int8", "mxint8"])
def test_batches_without_the_effect_are_not_measured(trials, fmt):
    torch.manual_seed(0)
    batches = [torch.randn(48, 40, 3) for _ in range(8)]
    if fmt == "mxint8":  # its scales are not shared, whatever repeats
        batches = backgrounds([127 / 10] * 2 + [127 / 9.5] * 6)
    found = budget(Workload(Background(), batches), [fmt], trials=trials)
    assert len(found.about.batch_samples) == 2


def test_the_error_of_whole_batches_is_stated():
    """It counts for what shares a scale, and not for a single batch."""
    torch.manual_seed(0)
    steps = [10, 10, 9.9, 10, 10, 9.9, 10, 10]
    workload = Workload(Background(), backgrounds([127 / n for n in steps]))
    found = budget(workload, ["int8", "bf16"], precision="2dB")
    assert found.about.unmeasured > 0
    share = found.about.batch_error
    assert share > 0
    for cost in found.costs:
        if cost.format == "int8":
            assert cost.stderr_db >= 10 / math.log(10) * share * 0.999
    formats = {"inner/linear": "int8"}
    alone = found.predict(formats, batch=0).stderr_db
    together = found.predict(formats).stderr_db
    assert alone is not None
    assert together is not None
    assert alone < together


class Sometimes(nn.Module):
    """Calls a layer more where the first value is large."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv1d(3, 5, 3), nn.Linear(5, 4)
        self.more = nn.Linear(5, 5)

    def forward(self, x):
        h = self.conv(x).relu().mean(-1)
        return self.last(self.more(h) if x[0, 0, 0] > 100 else h)


@pytest.mark.parametrize("fmt", ["int8", "nvfp4"])
def test_real_runs_are_what_a_plan_does(fmt):
    """A batch that calls something else runs with its calls named."""
    torch.manual_seed(0)
    batches = [torch.randn(6, 3, 12) for _ in range(4)]
    batches[2][0, 0, 0] = 1000.0
    workload = Workload(Sometimes(), batches)
    sites = ("conv/conv1d", "more/linear", "last/linear")
    reference = run_batches(workload).targets
    rounded = run_batches(workload, dict.fromkeys(sites, fmt)).targets
    expected = [
        noise([got], [want]) for got, want in zip(rounded, reference, strict=True)
    ]
    with prepared(workload.model):
        first = record(workload, None, 1)
        rows = OutputRows.of(reference[0], ())
        chosen = parse_format(fmt)

        def scan():
            return Scan(dict.fromkeys(sites), [])

        real = RealRuns(workload, first, {}, rows, scan, [0]).noise(chosen)
        impure = replace(first, is_pure=False)
        named = RealRuns(workload, impure, {}, rows, scan, [0]).noise(chosen)
    assert list(named.outputs) == []
    # relu and mean are sites that this scan does not know
    assert list(real.outputs) == []
    ratios = (real.noise / real.signal)[:, 0]
    assert ratios.tolist() == pytest.approx(expected, rel=1e-6)
    assert (named.noise / named.signal)[:, 0].tolist() == pytest.approx(
        expected, rel=1e-6
    )


def test_the_metric_sees_every_batch_once_and_in_order():
    """Also those whose output stands since batches were compared."""
    torch.manual_seed(0)
    batches = [torch.randn(48, 40, 3) for _ in range(6)]
    seen = []

    def metric(outputs):
        seen.append([output.clone() for output in outputs])
        return 0.5

    workload = Workload(Background(), batches, metric=metric)
    found = budget(workload, ["int8", "bf16"])
    assert found.about.unmeasured > 0
    expected = run_batches(workload).outputs
    for output, exact in zip(seen[0], expected, strict=True):
        assert torch.equal(output, exact)


def test_a_batch_that_leaves_the_range_is_measured_still():
    torch.manual_seed(0)
    batches = [torch.randn(256, 4) for _ in range(5)]
    batches[4][0, 0] = 1e6
    found = budget(Workload(nn.Linear(4, 4), batches), ["fp16", "int8"])
    assert any(cost.note.startswith("overflow") for cost in found.costs)


def test_a_site_as_the_target_and_a_rounded_reference():
    torch.manual_seed(0)
    workload = Workload(Background(), backgrounds([12.7] * 2 + [13.4] * 4))
    at_site = budget(workload, ["int8"], of="inner/linear", trials=0)
    assert len(at_site.about.batch_samples) > 2
    around = budget(workload, ["int8"], around={"outer/linear": "bf16"})
    assert len(around.about.batch_samples) > 2
