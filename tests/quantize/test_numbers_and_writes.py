"""Tensors without axes, numbers of Python, results written in place: as in a model without them, and as by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundoff as ro
from roundoff.quantize.options import Options, Rounding

PLAIN = Rounding(observer="minmax", weights="nearest", scales="minmax", bias=False)


def data(*shape, count=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def sum_written(self, x):
    y = self.a(x)
    h = F.relu(y)
    h += y
    return self.b(h)


def sum_made(self, x):
    y = self.a(x)
    return self.b(F.relu(y) + y)


def many_written(self, x):
    h = F.relu(self.a(x))
    h.mul_(0.5)
    h -= 0.25
    h /= 2
    h.clamp_(max=0.3)
    h.add_(self.a(x), alpha=0.5)
    return self.b(F.relu(h, inplace=True))


def many_made(self, x):
    h = F.relu(self.a(x))
    h = ((h * 0.5) - 0.25) / 2
    h = torch.add(h.clamp(max=0.3), self.a(x), alpha=0.5)
    return self.b(F.relu(h))


def places_written(self, x):
    h = self.a(x)
    h[:, 0] = 1.0
    h[:, 1] = h[:, 2]
    h[:, 3:5] += x[:, :2]
    return self.b(h)


def places_made(self, x):
    h = self.a(x)
    ones = torch.ones_like(h[:, :1])
    return self.b(
        torch.cat([ones, h[:, 2:3], h[:, 2:3], h[:, 3:5] + x[:, :2], h[:, 5:]], 1)
    )


def out_written(self, x):
    y = self.a(x)
    z = torch.empty_like(y)
    torch.add(y, F.relu(y), out=z)
    low = torch.empty(0)
    torch.mul(z, 2.0, out=low)
    return self.b(low)


def out_made(self, x):
    y = self.a(x)
    return self.b((y + F.relu(y)) * 2.0)


def view_written(self, x):
    h = self.a(x)
    part = h.view(len(h), 2, 3)[:, 1]
    part.mul_(2.0)
    return self.b(h)


def view_made(self, x):
    h = self.a(x).view(len(x), 2, 3)
    return self.b(torch.stack([h[:, 0], h[:, 1] * 2.0], 1).flatten(1))


def numbers_written(self, x):
    x = x / (x.max() + 1)
    h = self.a(x) * self.t.exp() + self.t
    top = h.amax() - h.mean()
    return 2 - self.b(1 - h / top) * 2 ** top.detach().sign() // 1e-6


def numbers_made(self, x):
    x = x / (x.amax((0, 1), keepdim=True) + torch.ones(1, 1))
    h = self.a(x) * self.t.exp().view(1, 1) + self.t.view(1, 1)
    top = h.amax((0, 1), keepdim=True) - h.mean((0, 1), keepdim=True)
    y = self.b(torch.ones(1, 1) - h / top)
    return torch.full((1, 1), 2.0) - y * torch.full((1, 1), 2.0) // 1e-6


PAIRS = {
    "sum": (sum_written, sum_made),
    "many": (many_written, many_made),
    "places": (places_written, places_made),
    "out": (out_written, out_made),
    "view": (view_written, view_made),
    "numbers": (numbers_written, numbers_made),
}


def parts():
    torch.manual_seed(0)
    return {
        "a": nn.Linear(4, 6),
        "b": nn.Linear(6, 3),
        "t": nn.Parameter(torch.tensor(0.25)),
    }


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("fmt", ["int8", "w4a8", "int4"])
def test_written_in_place_or_made_anew(Model, name, fmt):
    """The same values at the same weights have the same scales, so the outputs are equal."""
    batches = data(8, 4)
    outputs = []
    for forward in PAIRS[name]:
        model = ro.quantize(
            Model(forward, **parts()), fmt, batches, spread=False, rounding=PLAIN
        )
        assert {row.site for row in model.rows if row.format == fmt} >= {"b/linear"}
        outputs.append(model(batches[0]))
    # equal but for the last bits of other kernels
    assert torch.allclose(*outputs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PAIRS)
def test_all_steps_of_the_default(Model, name):
    model = ro.quantize(Model(PAIRS[name][0], **parts()), "int8", data(8, 4))
    assert model.steps[-1].after > 15


def on_grid(x, quantizer):
    """ONNX QuantizeLinear and DequantizeLinear, written out."""
    scale = quantizer.scale.flatten()
    zero = 0.0 if quantizer.zero_point is None else quantizer.zero_point.flatten()
    low, high = quantizer.fmt.min_finite, quantizer.fmt.max_finite
    return ((x / scale).round() + zero).clamp(low, high).sub(zero) * scale


def test_by_hand(Model):
    """``h = relu(a(x)); h += a(x); b(h * (x.max() + 1))``, each product on codes, biases on the grid of the sums."""

    def forward(self, x):
        y = self.a(x)
        h = F.relu(y)
        h += y
        h *= x.max() + 1
        return self.b(h)

    batches = data(8, 4)
    model = ro.quantize(
        Model(forward, **parts()),
        "int8",
        batches,
        spread=False,
        rounding=PLAIN,
        options=Options(elementwise=False),
    )

    def product(x, site, value, name):
        layer = getattr(model.model, name)
        step = (
            model.quantizer(value).scale.flatten()
            * model.quantizer(f"{name}.weight").scale.flatten()
        )
        bias = (layer.bias / step).round() * step
        weight = on_grid(layer.weight.T, model.quantizer(f"{name}.weight")).T
        assert model.routes[site].uses[0] == value
        return on_grid(x, model.quantizer(value)) @ weight.T + bias

    x = batches[1]
    y = product(x, "a/linear", "a/linear:0", "a")
    h = (y.clamp(min=0) + y) * (x.max() + 1)
    want = product(h, "b/linear", "/mul", "b")
    # fp32 sums in another order
    assert torch.allclose(model(x), want, rtol=1e-5, atol=1e-6)


LAYOUTS = {
    "view": lambda x: x.view(-1, 16),
    "reshape": lambda x: x.reshape(x.size(0), -1),
    "flatten": lambda x: torch.flatten(x, 1),
    "permute": lambda x: x.permute(0, 2, 3, 1).reshape(len(x), -1),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 2).flatten(1),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, (2, 2)).flatten(1),
    "tokens": lambda x: x.flatten(2).transpose(1, 2).reshape(len(x), -1),
}
CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(4, 4, 3, padding=1),
    "1x1": lambda: nn.Conv2d(4, 4, 1),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4),
    "grouped": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2),
    "transposed": lambda: nn.ConvTranspose2d(4, 4, 3, padding=1),
}


def pooled(layout):
    def forward(self, x):
        x = F.max_pool2d(F.relu(self.a(x)), 2)
        x = F.max_pool2d(F.relu(self.b(x)), 2)
        return self.c(layout(x))

    return forward


# each layout behind one convolution, and each convolution before a layout whose channels
# are the slowest and one whose channels are the fastest
CONVOLUTION_AND_LAYOUT = [
    *(("plain", layout) for layout in LAYOUTS),
    *((kind, "flatten") for kind in CONVOLUTIONS if kind != "plain"),
    *((kind, "tokens") for kind in CONVOLUTIONS if kind != "plain"),
]


@pytest.mark.parametrize(("kind", "layout"), CONVOLUTION_AND_LAYOUT)
def test_a_pool_that_a_linear_layer_reads(Model, kind, layout):
    """Codes from a convolution through a pool: one scale, whatever axes the layer behind it sees."""
    torch.manual_seed(0)
    net = Model(
        pooled(LAYOUTS[layout]),
        a=nn.Conv2d(1, 4, 3, padding=1),
        b=CONVOLUTIONS[kind](),
        c=nn.Linear(16, 3),
    )
    model = ro.quantize(net, "int8", data(4, 1, 8, 8), rounding=PLAIN)
    assert "c/linear" in {row.site for row in model.rows if row.format == "int8"}
    assert model.steps[-1].after > 20


@pytest.mark.parametrize("fmt", ["int8", "w4a8", "int4"])
@pytest.mark.parametrize("options", [{}, {"activation": "channel"}, {"dynamic": True}])
def test_formats_and_granularities_of_a_pool(Model, fmt, options):
    torch.manual_seed(0)
    net = Model(
        pooled(LAYOUTS["flatten"]),
        a=nn.Conv2d(1, 4, 3, padding=1),
        b=nn.Conv2d(4, 4, 3, padding=1),
        c=nn.Linear(16, 3),
    )
    model = ro.quantize(net, fmt, data(4, 1, 8, 8), options=Options(**options))
    assert model.steps[-1].after > 3
