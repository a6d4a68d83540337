"""roundoff.quantize on models of all kinds: each works, or says in rows why a part of it stays in fp32."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundoff as ro
from roundoff.errors import QuantizationError
from roundoff.formats import parse_format
from roundoff.ops.execute import runs_kind
from roundoff.quantize.options import Options
from roundoff.workload.workload import Workload


def data(*shape, count=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def rows(model):
    return {row.site: (row.format, row.reason) for row in model.rows}


def sqnr(model, net, batches):
    with torch.no_grad():
        exact, found = (
            torch.cat([net(x) for x in batches]),
            torch.cat([model(x) for x in batches]),
        )
    return 10 * float((exact.square().sum() / (exact - found).square().sum()).log10())


def in_place(self, x):
    y = self.a(x)
    y += self.b(y)
    y = F.relu_(y)
    return self.c(y)


def inception(self, x):
    return self.c(torch.cat([F.relu(self.a(x)), self.b(x)], 1))


def tokens_first(self, x):
    y = self.a(x.transpose(0, 1).reshape(-1, 8)).relu()
    return self.b(y).view(x.shape[1], x.shape[0], -1).transpose(0, 1)


def positions(self, x):
    return self.a(x) + self.p(torch.arange(x.shape[1])) @ self.w


CONVS = {
    "a": lambda: nn.Conv2d(2, 4, 3),
    "b": lambda: nn.Conv2d(4, 4, 1),
    "c": lambda: nn.Conv2d(4, 2, 1),
}
KINDS = {
    "in place": (
        lambda M: M(in_place, **{k: f() for k, f in CONVS.items()}),
        (4, 2, 6, 6),
    ),
    "concatenation": (
        lambda M: M(
            inception, a=nn.Conv2d(2, 3, 3), b=nn.Conv2d(2, 1, 3), c=nn.Conv2d(4, 2, 1)
        ),
        (4, 2, 6, 6),
    ),
    "depthwise and transposed": (
        lambda _: nn.Sequential(
            nn.Conv2d(4, 4, 3, groups=4),
            nn.ReLU6(),
            nn.ConvTranspose2d(4, 6, 3, groups=2),
        ),
        (4, 4, 6, 6),
    ),
    "folded": (
        lambda _: nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 2, 1)
        ),
        (4, 2, 6),
    ),
    "recurrent": (
        lambda M: M(
            lambda s, x: s.b(s.a(x)[0]),
            a=nn.LSTM(8, 6, batch_first=True),
            b=nn.Linear(6, 3),
        ),
        (4, 5, 8),
    ),
    "cells": (lambda M: M(lambda s, x: s.a(x)[0], a=nn.LSTMCell(8, 6)), (4, 8)),
    "attention": (
        lambda _: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        (4, 5, 8),
    ),
    "tokens first": (
        lambda M: M(tokens_first, a=nn.Linear(8, 8), b=nn.Linear(8, 3)),
        (4, 5, 8),
    ),
    "positions": (
        lambda M: M(
            positions,
            a=nn.Linear(8, 4),
            p=nn.Embedding(5, 8),
            w=nn.Parameter(torch.randn(8, 4)),
        ),
        (4, 5, 8),
    ),
    "batch statistics": (
        lambda M: M(
            lambda s, x: F.batch_norm(s.a(x), None, None, training=True),
            a=nn.Linear(8, 3),
        ),
        (6, 8),
    ),
    "one number": (
        lambda M: M(lambda s, x: s.a(x).sum().view(1), a=nn.Linear(8, 3)),
        (6, 8),
    ),
    "bilinear": (lambda M: M(lambda s, x: s.a(x, x), a=nn.Bilinear(8, 8, 3)), (6, 8)),
    "einsum": (
        lambda M: M(
            lambda s, x: torch.einsum("bi,oi->bo", x, s.w),
            w=nn.Parameter(torch.randn(3, 8)),
        ),
        (6, 8),
    ),
    "weight first": (
        lambda M: M(lambda s, x: (s.w @ x.t()).t(), w=nn.Parameter(torch.randn(3, 8))),
        (6, 8),
    ),
    "first and later": (
        lambda M: M(
            lambda s, x: s.b(s.a(100 * s.a(x).relu())),
            a=nn.Linear(8, 8),
            b=nn.Linear(8, 3),
        ),
        (16, 8),
    ),
    "depthwise, first and later": (
        lambda M: M(
            lambda s, x: s.b(s.a(9 * s.a(x).relu())),
            a=nn.Conv1d(4, 4, 3, groups=4, padding=1),
            b=nn.Conv1d(4, 2, 1),
        ),
        (16, 4, 8),
    ),
    "twice": (lambda M: M(lambda s, x: s.a(10 * s.a(x)), a=nn.Linear(8, 8)), (6, 8)),
    "one element": (lambda _: nn.Linear(1, 1), (6, 1)),
    "two weights, one made": (
        lambda _: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 3)
        ),
        (6, 8),
    ),
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("fmt", ["int8", "w4a8", "mxfp8_e4m3"])
def test_it_works_and_the_model_stays(Model, kind, fmt):
    torch.manual_seed(0)
    make, shape = KINDS[kind]
    net, batches = make(Model).eval(), data(*shape)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    model = ro.quantize(net, fmt, batches)
    assert any(row.format == fmt for row in model.rows)
    # 8 bits: noise of step² / 12 with steps of 1/255 of a range of about 6 sigma is 52 dB below a value, 4 bits of weights
    # 24 dB; sums of a few such noises, cancellation in small layers and e4m3's four bits leave the rest
    assert sqnr(model, net, batches) > {"int8": 24, "w4a8": 10, "mxfp8_e4m3": 15}[fmt]
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert not any(m.training for m in net.modules())
    assert not any(
        m._forward_hooks or m._forward_pre_hooks
        for m in [*net.modules(), *model.modules()]
    )


def test_a_branch_that_the_first_batch_does_not_take(Model):
    torch.manual_seed(0)
    net = Model(
        lambda s, x: s.a(x) if x.sum() > 0 else s.b(x),
        a=nn.Linear(4, 2),
        b=nn.Linear(4, 2),
    )
    up, down = torch.rand(3, 4), -torch.rand(3, 4)
    model = ro.quantize(net, "int8", [up, down])
    assert rows(model)["a/linear"] == rows(model)["b/linear"] == ("int8", "")
    assert not torch.equal(model(down), net.b(down))


def test_what_one_format_cannot_do_is_a_row(Model):
    def forward(self, x):
        return self.last(F.linear(F.linear(x, self.kept), self.turned.t()))

    net = Model(
        forward,
        kept=torch.randn(4, 4),
        turned=nn.Parameter(torch.randn(4, 4)),
        last=nn.Linear(4, 2),
    )
    found = rows(ro.quantize(net, "int8", data(6, 4)))
    assert found["/linear"][1].startswith("/linear:1 is no parameter: a buffer")
    assert found["/linear#1"][1].startswith("turned is no parameter: a buffer, a view")
    assert found["last/linear"] == ("int8", "")


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "token"},
        {"dynamic": True},
        {"weight": "group:4"},
        {"symmetric": True},
        {"activation": "group:4"},
        {"activation": "channel"},
    ],
)
def test_options(options):
    torch.manual_seed(0)
    net, batches = (
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)),
        data(16, 8),
    )
    assert (
        sqnr(
            ro.quantize(net, "int8", batches, options=Options(**options)), net, batches
        )
        > 30
    )


def test_bad_data():
    net = nn.Linear(4, 2)
    with pytest.raises(QuantizationError, match="no calibration data"):
        ro.quantize(net, "int8", [])
    bad = data(3, 4)
    bad[1][2, 1] = torch.nan
    with pytest.raises(
        QuantizationError,
        match=r"/linear:0, first in batch 1: 1 of 12 values are NaN or Inf",
    ):
        ro.quantize(net, "int8", bad)


def test_a_workload_with_another_model_shares_the_rest():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    workload = Workload(first, data(1, 2), metric=lambda outputs: 1.0)
    twin = workload.with_model(second)
    assert (workload.model, twin.model) == (first, second)
    assert twin.batches is workload.batches
    assert twin.metric is workload.metric
    assert torch.equal(twin.run(twin.batches[0]), second(twin.batches[0]))


@pytest.mark.parametrize(
    ("kind", "weight", "fmt", "reason"),
    [
        ("linear", True, "int8", None),
        ("matmul", False, "int8", None),
        ("softmax", False, "int8", "no int8 arithmetic for softmax operators"),
        ("softmax", False, "bf16", None),
        ("matmul", False, "w4", "w4 is for weights, and this operator has none"),
        ("matmul", True, "w4", None),
        ("embedding", False, "int8", "the looked-up table is not a parameter"),
        ("embedding", True, "int8", None),
        ("linear", True, "e8m0", "e8m0 holds scales, not values"),
        ("conv", True, "w4a8", None),
    ],
)
def test_which_kinds_run_in_which_formats(kind, weight, fmt, reason):
    assert runs_kind(kind, weight, parse_format(fmt)) == reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_are_refused(dtype):
    with pytest.raises(
        QuantizationError, match="weight: the model's weights are no fp32"
    ) as error:
        ro.quantize(
            nn.Linear(4, 2).to(dtype), "int8", [x.to(dtype) for x in data(3, 4)]
        )
    assert error.value.got == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused_by_name(value):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        net[1].weight[0, 2] = value
    with pytest.raises(
        QuantizationError, match=r"1\.weight: 1 of 8 weights are NaN or Inf"
    ):
        ro.quantize(net, "int8", data(3, 4))


def test_weights_too_small_for_a_scale_are_noted():
    """Ranges below 127 times the smallest normal number, 1.2e-38."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        net[2].weight.mul_(1e-42)
    model = ro.quantize(net, "int8", data(3, 4))
    assert model.notes == {
        "2.weight": "2 of 2 ranges too small: the scale would be below 1.18e-38 and is that"
    }


def test_calls_that_share_no_channels_leave_nothing_to_rescale(Model):
    """The second layer reads another value in every batch, so nothing that is quantized reads the first one's channels."""
    parts = {name: nn.Linear(4, 4) for name in "abo"}
    net = Model(lambda s, x: s.o(s.a(x) if x.mean() > 0 else s.b(x)), **parts)
    model = ro.quantize(net, "int8", [torch.rand(3, 4), -torch.rand(3, 4)])
    assert (
        model.steps[0].note
        == "no channel that can be rescaled costs the output anything"
    )


def test_channels_whose_rescaling_changes_the_model_are_left(monkeypatch):
    """A safety net: nothing that it is needed for is known."""
    from roundoff.quantize.channels import rescale_alike

    net, batches = (
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)),
        data(16, 4),
    )
    kept = ro.quantize(net, "int8", batches, spread=False)
    monkeypatch.setattr(
        rescale_alike,
        "rescale_",
        lambda model, *_, **__: model[0].weight.data.mul_(2.0),
    )
    model = ro.quantize(net, "int8", batches)
    assert (model.steps[0].name, model.steps[0].note) == (
        "spread",
        "predicted, 0 of 2 groups of channels; "
        "undone for 1 that changed what the model computes: 0.weight",
    )
    assert torch.equal(model(batches[0]), kept(batches[0]))
