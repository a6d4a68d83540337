"""roundoff.budget: its arguments, what it says of the workload, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from roundoff import Workload, budget
from roundoff.budget.facts import MeasuredTarget
from roundoff.budget.measure import parse_formats
from roundoff.errors import FormatError, PlanError, WorkloadError
from roundoff.plan.rounded_model import noise, run_batches


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = (
            nn.Linear(4, 6),
            nn.Dropout(0.5),
            nn.Linear(6, 3),
        )

    def forward(self, x):
        h = self.drop(torch.relu(self.first(x)).view(-1, 6))
        z = self.last(h)
        return {"z": z, "aux": {"h": h, "index": z.argmax(-1)}}


@pytest.fixture
def workload():
    torch.manual_seed(0)
    return Workload(
        Net(),
        [torch.randn(5, 4), torch.randn(3, 4)],
        loss=lambda output, batch: output["z"].square().mean(),
        name="net",
    )


@pytest.mark.parametrize(
    ("samples", "batches", "probes"),
    [(1, 1, 96), (16, 1, 10), (64, 1, 3), (32, 4, 3), (400, 1, 2), (30, 1, 6)],
)
def test_the_number_of_probes_reaches_the_precision(samples, batches, probes):
    """Between 2 and 96, rounded up: 1.5 * 2 * (4.343 / 0.6)^2 = 157.2 projections.

    They come from all samples of one batch, or of two where there are more.
    """
    workload = Workload(nn.Linear(2, 2), [torch.randn(samples, 2)] * batches)
    assert budget(workload, ["bf16"], trials=0).about.probes == probes


def test_a_precision_is_reached_by_some_of_the_batches():
    torch.manual_seed(0)
    batches = [torch.randn(32, 8) for _ in range(6)]
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    coarse = budget(Workload(model, batches), ["bf16"], precision="0.6dB")
    assert coarse.about.batch_samples == (32, 32)
    assert coarse.about.workload_batches == 6
    assert coarse.about.unmeasured == pytest.approx(4 / 6)
    errors = [cost.stderr_db for cost in coarse.costs]
    assert math.sqrt(sum(e**2 for e in errors) / len(errors)) <= 0.6
    fine = budget(Workload(model, batches), ["bf16"], precision="0.1dB")
    assert math.sqrt(sum(c.stderr_db**2 for c in fine.costs) / 3) <= 0.1
    every = budget(Workload(model, batches), ["bf16"], probes=2)
    assert len(every.about.batch_samples) == 6
    for given in (0, -1, "nan", "inf"):
        with pytest.raises((WorkloadError, PlanError)):
            budget(Workload(model, batches), ["bf16"], precision=given)


class Sometimes(nn.Module):
    """Calls a site, or leaves fp16's range, only where the first value is large."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.first(x)
        return self.second(h) if x[0, 0] > 100 else h


@pytest.mark.parametrize("late", [1000.0, 1e6])
def test_a_batch_that_shows_something_new_is_measured(late):
    torch.manual_seed(0)
    batches = [torch.randn(256, 4) for _ in range(5)]
    batches[4][0, 0] = late
    model = Sometimes() if late == 1000.0 else nn.Linear(4, 4)
    found = budget(Workload(model, batches), ["fp16"], precision=0.6)
    assert len(found.about.batch_samples) == 3
    if late == 1000.0:
        assert {site.site for site in found.sites} == {"first/linear", "second/linear"}
    else:
        assert any(cost.note.startswith("overflow") for cost in found.costs)


def test_probes_as_asked(workload):
    assert budget(workload, ["bf16"], probes=3).about.probes == 3
    with pytest.raises(WorkloadError, match="no probes to draw"):
        budget(workload, ["bf16"], probes=0)


def test_formats_by_any_name_once_and_in_order():
    assert [
        f.name for f in parse_formats(["bfloat16", "int8", "bf16", "fp32", "float16"])
    ] == [
        "bf16",
        "int8",
        "fp16",
    ]
    assert parse_formats([]) == []
    with pytest.raises(FormatError, match="did you mean bf16"):
        parse_formats(["bf61"])


def test_fp32_alone_is_no_format_to_measure(workload):
    with pytest.raises(FormatError, match="no format to measure"):
        budget(workload, ["fp32"])


def test_what_is_kept_about_the_run(workload):
    found = budget(workload, ["bf16", "int8"], seed=7)
    about = found.about
    assert (about.workload, about.formats, about.seed) == (
        "net",
        ("bf16", "int8"),
        7,
    )
    assert (about.samples, about.batch_samples) == (8, (5, 3))
    assert sum(about.batch_signal) == pytest.approx(1.0, rel=1e-12)
    assert sum(about.sample_signal) == pytest.approx(1.0, rel=1e-12)
    assert about.target == MeasuredTarget("output", {"z": [3, 3], "aux.h": [3, 6]})
    # a pass makes 3 sites, and a view, a dropout and an argmax that are none
    assert about.calls == 6
    assert {(e.operator, e.reason, e.count) for e in about.excluded} == {
        ("view", "moves values, rounds nothing", 1),
        ("dropout", "moves values, rounds nothing", 1),
        ("argmax", "integer or boolean result", 1),
    }
    with torch.no_grad():
        outputs = [workload.model.eval()(batch) for batch in workload.batches]
    signal = sum(
        float(o["z"].double().square().sum() + o["aux"]["h"].double().square().sum())
        for o in outputs
    )
    assert about.signal == pytest.approx(signal, rel=1e-6)


def test_what_is_kept_about_sites(workload):
    first, relu, last = budget(workload, ["bf16", "int8"]).sites
    assert (first.operator, first.kind, first.params) == (
        "linear",
        "linear",
        ("first.bias", "first.weight"),
    )
    # averaged over batches of 5 and 3 samples
    assert first.sizes == {
        "activation_elements": 16,
        "weight_elements": 30,
        "output_elements": 24,
        "macs": 96,
    }
    assert relu.refused == {"int8": "no int8 arithmetic for elementwise operators"}
    assert (last.refused, last.no_path, last.batches) == ({}, None, 2)


def test_a_part_of_the_output(workload):
    found = budget(workload, ["bf16"], of="aux.h")
    assert found.about.target == MeasuredTarget("aux.h", {"aux.h": [3, 6]})
    assert {s.site: s.no_path is None for s in found.sites} == {
        "first/linear": True,
        "/relu": True,
        "last/linear": False,
    }
    with pytest.raises(WorkloadError, match="no part named 'y'") as caught:
        budget(workload, ["bf16"], of="y")
    assert caught.value.where == "of"


def test_a_site_as_the_target(workload):
    found = budget(workload, ["bf16"], of="first/linear", probes=200)
    assert {s.site: s.no_path is None for s in found.sites} == {
        "first/linear": True,
        "/relu": False,
        "last/linear": False,
    }
    x, w, b = (
        torch.cat(workload.batches),
        workload.model.first.weight.detach(),
        workload.model.first.bias.detach(),
    )
    exact = x @ w.T + b
    low = (
        (x.bfloat16().float() @ w.bfloat16().float().T + b.bfloat16().float())
        .bfloat16()
        .float()
    )
    expected = float((low - exact).square().sum() / exact.square().sum())
    # the Jacobian is the identity: 1600 products of relative variance at most 2, 4 sigma is 14 %
    assert found.table["noise"][0] == pytest.approx(expected, rel=0.14)
    with pytest.raises(WorkloadError, match="no site named 'second/linear' was called"):
        budget(workload, ["bf16"], of="second/linear")


def test_a_site_as_the_target_of_batches_that_are_not_measured():
    torch.manual_seed(0)
    batches = [torch.randn(64, 8) for _ in range(6)]
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    for trials in (None, 0):
        found = budget(
            Workload(model, batches), ["bf16", "int8"], of="0/linear", trials=trials
        )
        assert found.about.unmeasured > 0


def test_a_site_that_is_written_over_later():
    class Overwritten(nn.Module):
        def forward(self, x):
            y = x.sin()
            z = y.exp()
            y.zero_()
            return z + y

    workload = Workload(Overwritten(), [torch.rand(4, 3) + 0.5])
    found = budget(workload, ["bf16"], of="/sin")
    (reference,) = run_batches(workload, target="/sin").targets
    assert torch.equal(reference["/sin"], workload.batches[0].sin())
    assert {s.site: s.no_path is None for s in found.sites} == {
        "/sin": True,
        "/exp": False,
        "/add": False,
    }


def test_the_loss_as_the_target(workload):
    found = budget(workload, ["bf16"], of="loss")
    assert found.about.target.name == "loss"
    assert {"/square", "/mean"} <= {s.site for s in found.sites}
    chosen = {s.site: "bf16" for s in found.sites if not s.no_path}
    reference = run_batches(workload, target="loss").targets
    assert set(reference[0]) == {"loss"}
    assert (
        0
        < noise(run_batches(workload, chosen, target="loss").targets, reference)
        < 1e-3
    )
    with pytest.raises(WorkloadError, match="the workload has none"):
        budget(Workload(workload.model, workload.batches), ["bf16"], of="loss")


def test_the_metric_is_kept_as_a_curve(workload):
    workload = Workload(
        Net(), workload.batches, metric=lambda outputs: float(outputs[0]["z"].mean())
    )
    assert len(budget(workload, ["bf16"]).about.metric.levels) > 10
    # noise in a part of the output says nothing of a metric that sees all of it
    assert budget(workload, ["bf16"], of="z").about.metric is None


def test_a_target_of_zeros():
    class Zeros(nn.Module):
        def forward(self, x):
            return x * 0.0

    with pytest.raises(WorkloadError, match="zero everywhere"):
        budget(Workload(Zeros(), [torch.randn(3, 2)]), ["bf16"])


def test_progress_is_told(workload):
    seen = []
    budget(workload, ["bf16"], progress=lambda *step: seen.append(step))
    assert seen[:3] == [("budget", 0, 2), ("budget", 1, 2), ("budget", 2, 2)]
    assert {stage for stage, _, _ in seen[3:]} <= {"trials"}


def test_a_site_that_some_batches_do_not_call():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).sin() if len(x) > 3 else x.sin()

    torch.manual_seed(0)
    workload = Workload(Sometimes(), [torch.randn(n, 4) for n in (4, 2, 5)])
    found = budget(workload, ["bf16"], probes=100)
    assert {s.site: s.batches for s in found.sites} == {
        "linear/linear": 2,
        "/sin": 3,
    }
    reference = run_batches(workload).targets
    for site in ("linear/linear", "/sin"):
        single = noise(run_batches(workload, {site: "bf16"}).targets, reference)
        (row,) = [r for r in found.table.to_dicts() if r["site"] == site]
        # at least 900 products: 4 sigma of sqrt(2 / 900), and the second order of relative errors of 2**-8
        assert row["noise"] == pytest.approx(single, rel=4 * math.sqrt(2 / 900) + 0.01)
    per_batch = [
        found.predict({"linear/linear": "bf16"}, batch=i).noise for i in range(3)
    ]
    assert per_batch[1] == 0.0
    assert min(per_batch[0], per_batch[2]) > 0


def test_around_refuses_unknown_formats(workload):
    with pytest.raises(FormatError):
        budget(workload, ["bf16"], around={"first/linear": "bf61"})
    found = budget(workload, ["bf16"], around={"first/linear": "int8"})
    assert found.about.around == {"first/linear": "int8"}


def test_an_operand_that_is_already_in_the_format_is_counted_once():
    """One rounding by the linear layer, then operators that are exact on its bf16 result: doubling, relu, negation. Each
    of them alone rounds an operand; together they do not, which the measurement shows."""

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return -((self.linear(x) * 2.0).relu() * 0.5)

    torch.manual_seed(0)
    workload = Workload(Chain(), [torch.randn(64, 8)])
    found = budget(workload, ["bf16"], probes=64)
    everywhere = {s.site: "bf16" for s in found.sites}
    assert len(everywhere) == 5
    measured = noise(
        run_batches(workload, everywhere).targets, run_batches(workload).targets
    )
    predicted = found.predict(everywhere)
    # 4096 products: 4 sigma of sqrt(2 / 4096) = 9 %, and relative errors of 2**-8 in the second order
    assert predicted.noise == pytest.approx(measured, rel=0.1)
    apart = sum(found.predict({site: "bf16"}).noise for site in everywhere)
    assert apart > 1.5 * measured  # what counting them all would give
