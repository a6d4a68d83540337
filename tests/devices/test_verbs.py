"""Each verb on each device: what it makes stands on the device of what it stands beside.

On a pretended or real GPU these raise where a tensor is made on the CPU, drawn with
another device's generator or read without being copied. Figures are held against those
of the CPU where both have the same kernels.
"""

import copy
import functools

import pytest
import torch
from torch import nn

import roundoff as ro
from roundoff.quantize import pipeline
from roundoff.quantize.channels.spread import spread_


class Net(nn.Module):
    """Operators of each kind: a table, a convolution, norms, attention, a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.query = nn.Linear(8, 8)
        self.cell = nn.GRU(8, 8, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, ids):
        x = self.table(ids)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        q = self.query(self.norm(x))
        x = x + nn.functional.scaled_dot_product_attention(q, x, x)
        x, _ = self.cell(x)
        return self.last(nn.functional.gelu(x.mean(1)))


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def cross_entropy(output, batch):
    return nn.functional.cross_entropy(output, batch.sum(1).long() % 3)


def accuracy(outputs, batches):
    hits = [
        (o.argmax(1) == b.sum(1).long() % 3).float().mean()
        for o, b in zip(outputs, batches, strict=True)
    ]
    return float(torch.stack(hits).mean())


def work_on(device, model, draw):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    net = model()
    batches = [draw(generator).to(device) for _ in range(2)]
    return ro.Workload(
        net.to(device),
        batches,
        forward=lambda model, batch: model(batch),
        loss=cross_entropy,
        metric=accuracy,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), 1e-2),
    )


def ids(generator):
    return torch.randint(11, (6, 5), generator=generator)


def rows(generator):
    return torch.randn(8, 6, generator=generator)


@pytest.fixture
def work(device):
    return work_on(device, Net, ids)


@pytest.fixture
def tiny(device):
    return work_on(device, small, rows)


@pytest.fixture
def few_steps(monkeypatch):
    """Channels are spread in three steps, not in a hundred: where they stand is the same."""
    few = functools.partial(spread_, steps=3)
    monkeypatch.setattr(pipeline, "spread_", few)


def recorded(path, work, **options):
    """Two steps of training, recorded."""
    model = copy.deepcopy(work.model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ro.capture(path, model, **options) as run:
        for batch in work.batches:
            optimizer.zero_grad()
            cross_entropy(model(batch), batch).backward()
            optimizer.step()
            run.step()
    return path


def test_budget_and_plan(work, device):
    formats = ["bf16", "int8", "int4", "mxfp4"]
    budget = ro.budget(work, formats, probes=4)
    reference = ro.budget(work_on("cpu", Net, ids), formats, probes=4)
    assert budget.table.height == reference.table.height
    plan = ro.plan(budget, 20.0)
    ro.verify(work, plan, budget=budget, target=20.0)


def test_diagnose(tiny):
    ro.diagnose(tiny, ["bf16", "int8"], target=30.0, probes=4)


def test_diagnose_beside_another_variant(tiny):
    ro.diagnose(tiny, ["bf16"], candidate="fp64", probes=4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"keep": "tensors", "shadow": "fp64"},
        {"keep": "sample", "noise": 0},
    ],
)
def test_capture_and_compare(tiny, tmp_path, options):
    reference = recorded(tmp_path / "a", tiny, **options)
    tiny.model[0].weight.data[0, 0] += 1
    candidate = recorded(tmp_path / "b", tiny, **options)
    compared = ro.compare(reference=reference, candidate=candidate)
    assert compared.table.height
    ro.overflow(reference)


def test_replay(work, tmp_path, device):
    run = recorded(tmp_path / "a", work, keep="tensors")
    for where in {"cpu", device}:
        replayed = ro.replay(run, device=where)
        reasons = {
            row.reason for row in replayed.rows if "device" in (row.reason or "")
        }
        assert not reasons
        assert any(row.own_l2 for row in replayed.rows)


def test_watch(work):
    from roundoff.train.watch.monitor import Monitor

    model = work.model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model) as monitor:
        for batch in work.batches:
            cross_entropy(model(batch), batch).backward()
            optimizer.step()
            monitor.step()
    assert monitor.first_bad is None
    assert monitor.table.height


def test_bench(tiny):
    ro.bench(tiny, ["fp32", "bf16"], steps=3, seeds=1)


def test_tune(tiny):
    ro.tune(tiny, ["bf16"], steps=2, runs=3, batches=2, probes=4, device="cpu")


@pytest.mark.parametrize(("formats", "onnx"), [(("int8",), True), (("int4",), False)])
def test_quantize_delivers(tiny, tmp_path, formats, onnx, few_steps):
    made = ro.quantize(
        tiny,
        output=tmp_path / "out",
        formats=formats,
        target="1dB",
        checkpoint=True,
        onnx=onnx,
        tradeoff=False,
    )
    assert made.summary.formats


def test_training_with_quantization_and_pruning(tiny, tmp_path, few_steps):
    ro.quantize(
        tiny,
        output=tmp_path / "out",
        prune="2:4",
        qat=True,
        epochs=1,
        distill=True,
        onnx=False,
        tradeoff=False,
    )


def test_loss_scaler(tiny):
    model = tiny.model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = ro.LossScaler(model, init_scale=2.0**10)
    for batch in tiny.batches:
        scaler.backward(cross_entropy(model(batch), batch))
        scaler.step(optimizer)
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**10
