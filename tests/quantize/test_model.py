"""QuantizedModel: called like the model, in all ways that a module is used; and the user's model stays as it was."""

import copy
import dataclasses
import io
import random
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundoff as ro
from roundoff.errors import QuantizationError
from roundoff.formats import PerAxis, PerGroup, choose_qparams, fake_quantize, integer
from roundoff.quantize.model import Passing, Unquantized
from roundoff.quantize.quantizer import Quantizer, round_bias, sum_scale


def data(*shape, count=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def rows(model):
    return {row.site: (row.format, row.reason) for row in model.rows}


def value(x, quantizer):
    """Through a quantizer by hand."""
    return fake_quantize(x, quantizer.qparams(), quantizer.fmt)


@pytest.fixture(name="small")
def _small(calibrated):
    torch.manual_seed(0)
    return calibrated(
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), data(5, 4), "int4"
    )


def test_a_residual_net_by_hand(calibrated, Model):
    """In-place operators, a residual add of two ranges and a clip: every rounding written out."""

    def forward(self, x):
        y = F.relu_(self.a(x))
        z = self.b(y)
        z += y
        z.clamp_(0.0, 2.0)
        return self.c(z)

    torch.manual_seed(0)
    net = Model(
        forward,
        a=nn.Conv2d(2, 3, 3, padding=1),
        b=nn.Conv2d(3, 3, 1),
        c=nn.Conv2d(3, 2, 1),
    )
    formats = dict.fromkeys(("a/conv2d", "b/conv2d", "c/conv2d"), "int8")
    model, x = calibrated(net, data(4, 2, 5, 5), formats), data(2, 2, 5, 5, seed=1)[0]
    q = dict(model.named())

    def conv(name, x, read, padding=0):
        weight, bias = (
            getattr(model.model, name).weight,
            getattr(model.model, name).bias,
        )
        step = q[read].scale.flatten() * q[f"{name}.weight"].scale.flatten()
        return F.conv2d(
            value(x, q[read]),
            value(weight, q[f"{name}.weight"]),
            (bias / step).round() * step,
            padding=padding,
        )

    with torch.no_grad():
        y = conv("a", x, "a/conv2d:0", padding=1).relu()
        z = value(conv("b", y, "/relu"), q["b/conv2d"]) + value(y, q["/relu"])
        want = conv("c", z.clamp(0, 2), "/clamp")
    assert set(q) == {
        "a.weight",
        "b.weight",
        "c.weight",
        "a/conv2d:0",
        "/relu",
        "b/conv2d",
        "/clamp",
    }
    assert torch.equal(model(x), want)


def test_a_write_through_a_view_is_seen(calibrated, Model):
    """What was quantized before a part of it was written is not used afterwards, though its name stays."""

    def forward(self, x):
        y = x.relu()
        before = self.a(y)
        y[:, :2].zero_()
        return before + self.a(y)

    torch.manual_seed(0)
    model, x = (
        calibrated(Model(forward, a=nn.Linear(4, 3)), data(5, 4)),
        data(2, 4, seed=1)[0],
    )
    held = dict(model.named())
    weight, bias = model.model.a.weight, model.model.a.bias
    y, cut = x.relu(), x.relu() * torch.tensor([0.0, 0.0, 1.0, 1.0])
    step = held["/relu"].scale.flatten() * held["a.weight"].scale.flatten()
    first = F.linear(value(y, held["/relu"]), weight, (bias / step).round() * step)
    second = F.linear(value(cut, held["/relu"]), weight, (bias / step).round() * step)
    assert torch.equal(model(x), first + second)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    name: str


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda y: {"a": y, "b": None}, lambda o: o["a"]),
        (lambda y: (y, 3), lambda o: o[0]),
        (lambda y: Output(y, "n"), lambda o: o.logits),
        (lambda y: [[y]], lambda o: o[0][0]),
    ],
    ids=["dict", "tuple", "dataclass", "nested"],
)
def test_outputs_of_any_kind(calibrated, Model, wrap, unwrap):
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 3), data(2, 4)[0]
    plain = calibrated(layer, data(2, 4))
    found = calibrated(Model(lambda s, x: wrap(s.a(x)), a=layer), data(2, 4))(x)
    assert type(found) is type(wrap(x))
    assert torch.equal(unwrap(found), plain(x))


def test_inputs_of_any_kind(calibrated, Model):
    torch.manual_seed(0)
    net = Model(lambda s, x, scale=1.0: s.a(x["x"]) * scale, a=nn.Linear(4, 3))
    batches = [({"x": x},) for x in data(2, 4)]
    model = calibrated(net, batches)
    assert torch.equal(model(*batches[0], scale=2.0), 2 * model(*batches[0]))


def test_the_users_model_is_untouched(calibrated):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)
    ).train()
    net[0].register_forward_hook(lambda *_: None)
    net[0].weight.grad = torch.ones_like(net[0].weight)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    draws = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    calibrated(net, data(8, 4))
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert [m.training for m in net.modules()] == [True] * 5
    assert len(net[0]._forward_hooks) == 1
    assert not net._forward_hooks
    assert torch.equal(net[0].weight.grad, torch.ones(4, 4))
    assert torch.equal(torch.get_rng_state(), draws[0])
    assert (np.random.get_state()[1] == draws[1]).all()
    assert random.getstate() == draws[2]


def test_no_hooks_stay(small):
    small(data(2, 4)[0])
    with pytest.raises(RuntimeError):
        small(torch.ones(2, 7))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in small.modules())


def test_state_dict_goes_into_a_fresh_one(small, laid):
    fresh, *_ = laid(
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), data(5, 4), "int4"
    )
    x = data(2, 4, seed=1)[0]
    with pytest.raises(
        QuantizationError, match="0/linear:0: this value has no scale"
    ) as error:
        fresh(x)
    assert error.value.got == "one that saw no data"
    assert fresh.load_state_dict(small.state_dict()).missing_keys == []
    assert torch.equal(fresh(x), small(x))
    shorter = {
        k: v for k, v in small.state_dict().items() if not k.endswith("relu.scale")
    }
    with pytest.raises(RuntimeError, match="Missing key"):
        fresh.load_state_dict(shorter)


@pytest.mark.parametrize("fmt", ["int4", "w4g2", "mxfp4", "bf16"])
def test_copies_and_files(calibrated, fmt):
    torch.manual_seed(0)
    model, x = (
        calibrated(
            nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), data(5, 4), fmt
        ),
        data(2, 4)[0],
    )
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(twin(x), model(x))
        assert twin.rows == model.rows
        with torch.no_grad():
            twin.model[0].weight.zero_()
        assert not torch.equal(twin(x), model(x))


def test_repr(small):
    assert "Quantizer(0.weight, int4, PerAxis(axis=0))" in repr(small)
    assert "Quantizer(1/relu, int4_asym, PerTensor())" in repr(small)


def test_nested_in_another_module(small, Model):
    x = data(2, 4)[0]
    outer = Model(lambda s, x: s.inner(x).softmax(-1), inner=small)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(outer(x), small(x).softmax(-1))


def test_grad_modes_and_gradients(small):
    """Straight-through: the gradient is that of the quantized values, as if rounding were the identity."""
    x = data(2, 4)[0].requires_grad_()
    small(x).sum().backward()
    held = dict(small.named())
    net = small.model
    hidden = F.linear(value(x, held["0/linear:0"]), net[0].weight).detach()
    assert torch.allclose(net[2].bias.grad, torch.full((3,), 2.0))
    inside = hidden + net[0].bias > 0
    want = (torch.ones(2, 3) @ net[2].weight * inside) @ net[0].weight
    assert torch.allclose(x.grad, want, atol=1e-6)
    assert torch.isfinite(net[0].weight.grad).all()
    assert net[0].weight.grad.abs().sum() > 0
    with torch.no_grad():
        assert not small(x).requires_grad
    with torch.inference_mode():
        assert torch.equal(small(data(2, 4)[0]), small(x.detach()))


def test_autocast_regions(small):
    x = data(2, 4)[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = small(x)
    assert found.dtype == torch.bfloat16
    want = small(x).detach()
    # products and sums in bf16 (steps of 2**-8) of codes of 4 bits, which bf16 holds exactly: a few steps of the largest
    assert torch.allclose(found.float(), want, atol=8 * 2**-8 * float(want.abs().max()))
    with ro.autocast("bf16", small):
        assert torch.equal(small(x), found)


def test_compiled_it_computes_the_same(small, Model):
    x = data(2, 4)[0]
    outer = torch.compile(
        Model(lambda s, x: s.inner(x * 2).relu(), inner=small), backend="eager"
    )
    with torch.no_grad():
        assert torch.equal(outer(x), small(x * 2).relu())


def test_empty_and_other_batches(small):
    assert small(torch.ones(0, 4)).shape == (0, 3)
    assert small(torch.ones(7, 2, 4)).shape == (7, 2, 3)
    assert small(torch.full((2, 4), torch.nan)).isnan().all()
    assert small(torch.full((2, 4), torch.inf)).isfinite().all()  # saturates


def test_dynamic_quantizers_take_empty_batches(calibrated):
    model = calibrated(nn.Linear(4, 2), data(3, 4), dynamic=True)
    assert model(torch.ones(0, 4)).shape == (0, 2)


@pytest.mark.parametrize(
    "layer", [nn.Linear(1, 1), nn.Conv2d(1, 1, 1), nn.Linear(1, 1, bias=False)]
)
def test_weights_of_one_element(calibrated, layer):
    """The scale is |w| / 127, so the weight comes back as it was, up to a rounding of the product."""
    shape = (3, 1, 1, 1) if isinstance(layer, nn.Conv2d) else (3, 1)
    model = calibrated(layer, data(*shape))
    assert torch.allclose(next(model.model.parameters()), layer.weight, rtol=2**-22)


def test_a_model_without_parameters(calibrated, Model):
    model = calibrated(Model(lambda s, x: x @ x.mT), data(2, 3, 4))
    x = data(2, 3, 4, seed=1)[0]
    held = dict(model.named())
    left, right = (value(v, held[f"/matmul:{i}"]) for i, v in enumerate((x, x.mT)))
    assert torch.equal(model(x), left @ right)


def test_a_call_that_calibration_did_not_see_warns_once(calibrated, Model):
    torch.manual_seed(0)
    net = Model(
        lambda s, x, more=False: s.b(s.a(x)) if more else s.a(x),
        a=nn.Linear(4, 4),
        b=nn.Linear(4, 4),
    )
    model, x = calibrated(net, data(2, 4)), data(2, 4)[0]
    with pytest.warns(
        RuntimeWarning,
        match="b/linear was never called while the model was calibrated: it runs in fp32",
    ):
        found = model(x, more=True)
    assert torch.equal(found, net.b(model(x)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x, more=True)
    assert model.unseen == {"b/linear": 2}


def test_something_else_may_happen_to_values(small):
    x = data(2, 4)[0]
    with small.through(Unquantized()):
        plain = small(x)
    assert torch.equal(plain, small.model(x))

    class Doubled(Unquantized):
        def value(self, name, quantizer, value):
            return value * 2 if name == "0/linear:0" else value

    with pytest.raises(ZeroDivisionError), small.through(Doubled()):
        assert torch.allclose(small(x / 2), plain)
        raise ZeroDivisionError
    assert type(small.passing) is Passing


def test_constant_values_and_tiny_weights_are_reported(calibrated, Model):
    torch.manual_seed(0)
    net = Model(lambda s, x: s.a(x * 0.0), a=nn.Linear(4, 4))
    with torch.no_grad():
        net.a.weight[1].zero_()
        net.a.weight[2].fill_(1e-40)
    model = calibrated(net, data(3, 4))
    assert model.notes == {
        "/mul": "1 of 1 range zero: scale 1",
        "a.weight": "1 of 4 ranges zero: scale 1; 1 of 4 ranges too small: the scale would be below 1.18e-38 and is that",
    }
    assert {
        e.name: e.scale[0] for e in model.record().entries if e.kind == "activation"
    } == {"/mul": 1.0}


def test_sites_that_calibration_never_reaches(calibrated, Model):
    """Traced on both batches, calibrated on one: the other branch's calls are rows."""
    torch.manual_seed(0)
    net = Model(
        lambda s, x: s.a(x) if x.sum() > 0 else s.b(x),
        a=nn.Linear(4, 2),
        b=nn.Linear(4, 2),
    )
    up, down = torch.ones(2, 4), -torch.ones(2, 4)
    model = calibrated(net, [up, down])
    assert rows(model)["a/linear"] == rows(model)["b/linear"] == ("int8", "")
    model.quantizer("b/linear:0").scale = None
    model.drop_unreached_()
    assert rows(model)["b/linear"] == ("fp32", "calibration never reached it")
    assert torch.equal(model(down), model.model.b(down))


def operand(model):
    return model.quantizer("0.weight").operand


def test_quantizer_needs_its_scale(small):
    quantizer = Quantizer("x", integer(8), operand(small), PerAxis(0))
    with pytest.raises(QuantizationError, match="x: this value has no scale"):
        quantizer(torch.ones(2, 2))
    blocks = Quantizer("x", integer(8), operand(small), PerAxis(0), dynamic=True)
    with pytest.raises(QuantizationError) as error:
        blocks.qparams()
    assert error.value.got == "one that is dynamic"


def test_codes_are_the_grid(small):
    weight, quantizer = small.model[0].weight.detach(), small.quantizer("0.weight")
    codes = quantizer.codes(weight)
    assert codes.dtype == torch.int32
    assert int(codes.abs().max()) == 7
    assert torch.equal(codes * quantizer.scale, weight)


def test_biases_on_sums(small):
    """Only where one weight and one value with static scales meet, and the weight has none or one scale a channel."""
    weight, x = small.quantizer("0.weight"), small.quantizer("0/linear:0")
    bias = torch.tensor([0.1, -2.0, 0.0, 1e30, 5.0, -7.0])
    step = x.scale.flatten().double() * weight.scale.flatten().double()
    want = (bias.double() / step).round().clamp(-(2**31), 2**31 - 1) * step
    # step and quotient are rounded to fp32 once each, and the clamp to 2**31: three roundings
    assert torch.allclose(round_bias(bias, [x, weight]).double(), want, rtol=3 * 2**-24)
    assert sum_scale([weight, weight], 3) is None
    assert sum_scale([x], 3) is None
    grouped = Quantizer("w", integer(4), weight.operand, PerGroup(2))
    grouped.set_(choose_qparams(torch.randn(6, 4), integer(4), PerGroup(2)))
    assert round_bias(bias, [x, grouped]) is bias


def test_a_model_that_cannot_be_copied():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    vars(net)["lock"] = threading.Lock()
    with pytest.raises(QuantizationError, match="the model cannot be copied") as error:
        ro.quantize(net, "int8", data(2, 4))
    assert "lock" in error.value.got
    del vars(net)["lock"]
    assert rows(ro.quantize(net, "int8", data(2, 4)))["0/linear"] == ("int8", "")


def test_the_record_says_what_is_dynamic(calibrated):
    model = calibrated(nn.Linear(4, 2), data(2, 4), activation="token")
    found = {
        e.name: (e.granularity, e.dynamic, len(e.scale)) for e in model.record().entries
    }
    assert found == {
        "/linear:0": ("per_token", True, 0),
        "weight": ("per_axis(0)", False, 2),
    }
    grouped = calibrated(nn.Linear(4, 2), data(2, 4), "w4g2").record().entries
    assert [(e.granularity, len(e.scale)) for e in grouped] == [("per_group(2, 1)", 4)]
