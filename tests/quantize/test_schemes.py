"""Which values and weights are quantized, how, and why the others are not; against quantization by hand with ``formats``."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from roundoff.errors import QuantizationError
from roundoff.formats import (
    BlockFormat,
    PerAxis,
    PerGroup,
    PerTensor,
    PerToken,
    choose_qparams,
    fake_quantize,
    integer,
    parse_format,
    round_tensor,
)
from roundoff.quantize.options import Options


def data(*shape, count=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def rows(model):
    return {row.site: (row.format, row.reason) for row in model.rows}


def blocks(x, fmt, axis):
    """Blocks along an axis, the last one completed with zeros."""
    missing = -x.shape[axis] % fmt.block_size
    shape = list(x.shape)
    shape[axis] = missing
    return round_tensor(
        torch.cat([x, x.new_zeros(shape)], axis), fmt, axis=axis
    ).narrow(axis, 0, x.shape[axis])


def on_grid(x, seen, fmt, granularity):
    """``x`` quantized with the scale of ``seen``."""
    return fake_quantize(x, choose_qparams(seen, fmt, granularity), fmt)


INTEGERS = [
    "int8",
    "int4",
    "int2",
    "int8_asym",
    "int4_asym",
    "int2_asym",
    "w4a8",
    "w2a4",
    "w3a6",
]
FLOATS = ["fp8_e4m3fn", "fp8_e5m2", "fp4", "fp6_e3m2", "hif8", "fp8_e4m3fnuz"]


@pytest.mark.parametrize("fmt", INTEGERS + FLOATS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_static_per_tensor_values_and_per_channel_weights(calibrated, fmt, symmetric):
    torch.manual_seed(0)
    layer, batches, x = nn.Linear(8, 5), data(6, 8), data(4, 8, seed=1)[0]
    model = calibrated(layer, batches, fmt, symmetric=symmetric)
    fmt = parse_format(fmt)
    own = fmt.of_activations
    if own.one_quantum == 1.0 and (
        own.symmetric or own is not fmt
    ):  # integers are asymmetric unless asked otherwise
        own = integer(own.width, symmetric=symmetric)
    weight = on_grid(layer.weight, layer.weight, fmt, PerAxis(0))
    value = on_grid(x, torch.cat(batches), own, PerTensor())
    bias = layer.bias.detach()
    if fmt.one_quantum == 1.0:
        step = (
            choose_qparams(torch.cat(batches), own).scale
            * choose_qparams(layer.weight, fmt, PerAxis(0)).scale
        )
        bias = (bias / step.flatten()).round() * step.flatten()
    assert torch.equal(model(x), F.linear(value, weight, bias))


@pytest.mark.parametrize("fmt", ["int8", "fp8_e4m3fn", "w4a8"])
@pytest.mark.parametrize(
    ("weight", "activation", "dynamic"),
    [
        (weight, activation, dynamic)
        for weight in ("tensor", "channel", "group:4", "group:16")
        for activation in ("tensor", "channel", "token", "group:2")
        for dynamic in (False, True)
    ],
)
def test_granularities(calibrated, fmt, weight, activation, dynamic):
    torch.manual_seed(0)
    layer, batches, x = (
        nn.Linear(8, 5, bias=False),
        data(3, 2, 8),
        data(4, 2, 8, seed=1)[0],
    )
    model = calibrated(
        layer, batches, fmt, weight=weight, activation=activation, dynamic=dynamic
    )
    fmt = parse_format(fmt)
    own = integer(8, symmetric=False) if fmt.one_quantum == 1.0 else fmt
    shared = {
        "tensor": PerTensor(),
        "channel": PerAxis(0),
        "group:4": PerGroup(4),
        "group:16": PerGroup(8),
    }[weight]
    held = on_grid(layer.weight, layer.weight, fmt, shared)
    granularity = {
        "tensor": PerTensor(),
        "channel": PerAxis(2),
        "token": PerToken(),
        "group:2": PerGroup(2),
    }[activation]
    seen = x if dynamic or activation in ("token", "group:2") else torch.cat(batches)
    assert torch.equal(model(x), F.linear(on_grid(x, seen, own, granularity), held))
    assert rows(model) == {"/linear": (fmt.name, "")}


@pytest.mark.parametrize(
    "fmt", ["mxfp4", "mxfp6_e3m2", "mxfp8_e4m3", "mxint8", "nvfp4"]
)
@pytest.mark.parametrize("features", [32, 40, 7])
def test_blocks_lie_along_the_contracted_axis(calibrated, fmt, features):
    torch.manual_seed(0)
    layer, x = nn.Linear(features, 5), data(4, features, seed=1)[0]
    model = calibrated(layer, data(6, features), fmt)
    fmt = parse_format(fmt)
    assert isinstance(fmt, BlockFormat)
    assert torch.equal(
        model(x),
        F.linear(blocks(x, fmt, 1), blocks(layer.weight.detach(), fmt, 1), layer.bias),
    )
    conv, x = nn.Conv2d(3, 4, 2), data(2, 3, 5, 5, seed=1)[0]
    model = calibrated(conv, data(6, 3, 5, 5), fmt)
    assert torch.equal(
        model(x),
        F.conv2d(blocks(x, fmt, 1), blocks(conv.weight.detach(), fmt, 1), conv.bias),
    )


@pytest.mark.parametrize("fmt", ["w4", "w8", "w4g4", "w4g64", "ternary", "binary"])
def test_weights_alone(calibrated, fmt):
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 5), data(4, 8, seed=1)[0]
    model = calibrated(layer, data(6, 8), fmt)
    fmt = parse_format(fmt)
    granularity = (
        PerGroup(min(fmt.group_size, 8))
        if fmt.execution.weight == "group"
        else PerAxis(0)
    )
    assert torch.equal(
        model(x),
        F.linear(x, on_grid(layer.weight, layer.weight, fmt, granularity), layer.bias),
    )
    assert [name for name, _ in model.named()] == ["weight"]


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "tf32", "fp64"])
def test_casts_execute_beside_quantized_sites(calibrated, fmt):
    torch.manual_seed(0)
    net, x = (
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)),
        data(4, 8, seed=1)[0],
    )
    batches = data(6, 8)
    model = calibrated(net, batches, {"0/linear": fmt, "2/linear": "int8"}, bias=False)
    found = parse_format(fmt)

    def first(x):
        y = F.linear(
            round_tensor(x, found),
            round_tensor(net[0].weight, found),
            _bias(net[0].bias, found),
        )
        return round_tensor(y, found) if found.execution.output else y

    hidden = first(x).relu()
    seen = first(torch.cat(batches)).relu()
    weight = on_grid(net[2].weight, net[2].weight, integer(8), PerAxis(0))
    value = on_grid(hidden, seen, integer(8, symmetric=False), PerTensor())
    assert torch.equal(model(x), F.linear(value, weight, net[2].bias))
    assert rows(model)["0/linear"] == (fmt, "")


def _bias(bias, fmt):
    return round_tensor(bias, fmt) if fmt.execution.bias else bias


@pytest.mark.parametrize(
    ("layer", "shape", "axis", "repeat"),
    [
        (nn.Conv1d(4, 6, 3, groups=2), (4, 7), 0, 1),
        (nn.Conv2d(4, 6, 3, stride=2, padding=1), (4, 7, 7), 0, 1),
        (nn.Conv2d(4, 4, 3, groups=4, padding="same"), (4, 7, 7), 0, 1),
        (nn.Conv3d(2, 3, 2), (2, 4, 4, 4), 0, 1),
        (nn.ConvTranspose1d(4, 6, 3), (4, 7), 1, 1),
        (
            nn.ConvTranspose2d(4, 6, 3, groups=2, stride=2, output_padding=1),
            (4, 5, 5),
            1,
            2,
        ),
    ],
)
def test_convolutions(calibrated, layer, shape, axis, repeat):
    """Biases lie on the step of the sums; a transposed convolution's channel scales repeat in each group."""
    batches, x = data(3, *shape), data(2, *shape, seed=1)[0]
    model = calibrated(layer, batches, "int8")
    q = choose_qparams(layer.weight, integer(8), PerAxis(axis))
    seen = choose_qparams(torch.cat(batches), integer(8, symmetric=False))
    step = seen.scale.flatten() * q.scale.flatten().repeat(repeat)
    with torch.no_grad():
        weight, bias = layer.weight.clone(), layer.bias.clone()
        layer.weight.copy_(fake_quantize(weight, q, integer(8)))
        layer.bias.copy_((bias / step).round() * step)
        value = fake_quantize(x, seen, integer(8, symmetric=False))
        inside = layer(value)
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
        written = model.quantizer(
            "/" + type(layer).__name__.lower().replace("transpose", "_transpose")
        )
        assert torch.equal(
            model(x), written(inside)
        )  # integer convolutions write codes


def test_groups_that_do_not_divide_are_refused(laid):
    net = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    model, *_ = laid(net, data(2, 8), "w4g4")
    assert rows(model) == {
        "0/linear": ("w4g4", ""),
        "1/linear": ("fp32", "1.weight of shape (4, 6): size 4 does not divide axis 1"),
    }
    model, *_ = laid(net, data(2, 8), "int8", activation="group:4")
    assert rows(model)["1/linear"] == (
        "fp32",
        "0/linear of shape (2, 6): size 4 does not divide axis 1",
    )
    with pytest.raises(
        QuantizationError,
        match=r"0.weight of shape \(6, 8\): size 5 does not divide axis 1",
    ):
        laid(net, data(2, 8), "w4g5")


@pytest.mark.parametrize(
    ("option", "given"),
    [("activation", "row"), ("weight", "group:0"), ("weight", "token")],
)
def test_unknown_granularity(option, given):
    with pytest.raises(QuantizationError, match="unknown granularity") as error:
        Options(**{option: given})
    assert error.value.got == repr(given)


def test_two_readers_in_different_formats(laid, Model):
    heads = {name: nn.Linear(4, 2) for name in "abc"}
    net = Model(lambda s, x: (y := x.relu(), s.a(y), s.b(y), s.c(y))[1:], **heads)
    model, *_ = laid(net, data(3, 4), {"a/linear": "int8", "b/linear": "int4"})
    assert {n: (q.fmt.name, q.sites) for n, q in model.named() if not q.weight} == {
        "/relu": ("int8_asym", ("a/linear",)),
        "b/linear:0": ("int4_asym", ("b/linear",)),
    }
    assert rows(model)["c/linear"] == ("fp32", "")


def test_one_reader_quantized_one_not(calibrated, Model):
    """The one in fp32 reads the exact value, also in the artefact: Q/DQ stands before the other alone."""
    torch.manual_seed(0)
    net = Model(
        lambda s, x: (y := x.relu(), s.a(y), s.b(y))[1:],
        a=nn.Linear(4, 2),
        b=nn.Linear(4, 2),
    )
    batches = data(3, 4)
    model = calibrated(net, batches, {"a/linear": "int4"})
    found, exact = model(batches[0])
    assert torch.equal(exact, net.b(batches[0].relu()))
    assert not torch.allclose(found, net.a(batches[0].relu()))


def test_what_is_only_read_joined_has_the_scale_of_the_whole(calibrated, Model):
    """Two convolutions write the codes of their joined value: nothing is rounded twice."""
    torch.manual_seed(0)

    def forward(self, x):
        return self.c(torch.cat([self.a(x), self.b(x)], 1))

    net = Model(
        forward, a=nn.Conv2d(2, 3, 1), b=nn.Conv2d(2, 1, 1), c=nn.Conv2d(4, 2, 1)
    )
    model = calibrated(net, data(3, 2, 4, 4))
    assert {n for n, q in model.named() if not q.weight} == {
        "a/conv2d:0",
        "b/conv2d:0",
        "a/conv2d b/conv2d",
    }


def test_what_is_read_joined_and_alone_is_codes_for_both(calibrated, Model):
    """A skip connection: its convolution writes codes once, and the join makes others of them."""

    def forward(self, x):
        skip = self.a(x).relu()
        return self.c(torch.cat([skip, self.b(skip)], 1))

    net = Model(
        forward, a=nn.Conv2d(2, 3, 1), b=nn.Conv2d(3, 1, 1), c=nn.Conv2d(4, 2, 1)
    )
    model = calibrated(net, data(3, 2, 4, 4))
    assert model.routes["/relu"].output == "/relu"
    assert {n for n, q in model.named() if not q.weight} == {
        "a/conv2d:0",
        "/relu",
        "/relu b/conv2d",
    }
    x = data(3, 2, 4, 4)[0]
    inner = model.quantizer("/relu")(net.a(model.quantizer("a/conv2d:0")(x)).relu())
    assert model.quantizer("/relu").codes(inner).unique().numel() > 4


@pytest.mark.parametrize(
    ("channels", "size", "is_rounded"), [(9, 1, False), (10, 1, True), (1, 5, True)]
)
@pytest.mark.parametrize("behind", [lambda y: y, torch.sigmoid, torch.relu])
def test_a_head_of_few_products_gives_floats(
    calibrated, Model, channels, size, is_rounded, behind
):
    """Integers gain no time there, so its result is rounded for nothing."""
    torch.manual_seed(0)
    net = Model(
        lambda s, x: behind(s.head(s.a(x).relu())),
        a=nn.Conv2d(2, 16, 3),
        head=nn.Conv2d(16, channels, size),
    )
    model = calibrated(net, data(3, 2, 9, 9))
    assert rows(model)["head/conv2d"][0] == "int8"
    last = {"head/conv2d", "/relu#1"}
    written = {name for name, q in model.named() if not q.weight} & last
    assert bool(written) == is_rounded


def test_an_output_that_is_read_too_is_codes(calibrated, Model):
    """The kernel writes nothing else."""

    def forward(self, x):
        y = self.a(x)
        return y, self.b(y)

    net = Model(forward, a=nn.Conv2d(2, 3, 1), b=nn.Conv2d(3, 1, 1))
    batches = data(3, 2, 4, 4)
    model = calibrated(net, batches)
    written, _ = model(batches[0])
    assert torch.equal(model.quantizer("a/conv2d")(written), written)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_repeated_codes_have_their_scale(calibrated, Model, mode):
    def forward(self, x):
        y = F.interpolate(self.a(x), scale_factor=2.0, mode=mode)
        return self.c(y + self.b(x).repeat_interleave(2, 2).repeat_interleave(2, 3))

    parts = {n: nn.Conv2d(2, 2, 1) for n in "abc"}
    model = calibrated(Model(forward, **parts), data(3, 2, 4, 4))
    (resized,) = (site for site in model.routes if "upsample" in site)
    assert rows(model)[resized] == ("codes", "")
    assert model.quantizer(resized).scale == model.quantizer("a/conv2d").scale


def test_a_module_used_twice_has_a_scale_for_each_call(calibrated, Model):
    torch.manual_seed(0)
    model = calibrated(
        Model(lambda s, x: s.a(s.a(x).mul(100.0)), a=nn.Linear(4, 4)), data(5, 4)
    )
    assert rows(model) == {
        "a/linear": ("int8", ""),
        "/mul": ("fp32", "no int8 arithmetic for elementwise operators"),
        "a/linear#1": ("int8", ""),
    }
    assert model.quantizer("/mul").scale > 10 * model.quantizer("a/linear:0").scale
    assert model.weight_names() == ["a.weight"]
    assert model.quantizer("a.weight").sites == ("a/linear", "a/linear#1")


def test_parts_of_a_value_have_scales_of_their_own(calibrated, Model):
    """Queries, keys and values are chunks of one projection: three ranges."""

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k * 1.0, v)

    torch.manual_seed(0)
    net = Model(forward, qkv=nn.Linear(4, 12))
    with torch.no_grad():
        net.qkv.weight[8:].mul_(50)
    model = calibrated(net, data(3, 5, 4))
    site = "/scaled_dot_product_attention"
    assert {n for n, q in model.named() if not q.weight} == {
        "qkv/linear:0",
        f"{site}:0",
        "/mul",
        f"{site}:2",
    }
    assert model.quantizer(f"{site}:2").scale > 10 * model.quantizer(f"{site}:0").scale


IDS = [torch.tensor([[0, 3, 5]]), torch.tensor([[1, 8, 8]])]


def test_tied_weights_have_one_grid(calibrated, Tied):
    torch.manual_seed(0)
    model = calibrated(Tied(), IDS, "w4")
    assert [name for name, _ in model.named()] == ["table.weight"]
    assert model.quantizer("table.weight").sites == ("table/embedding", "head/linear")
    assert rows(model) == {"table/embedding": ("w4", ""), "head/linear": ("w4", "")}


def test_a_tied_weight_that_one_reader_wants_quantized_is_so_for_all(calibrated, Tied):
    """It is stored once; before and after the weights are rounded in place the model computes the same."""
    torch.manual_seed(0)
    net = Tied()
    model = calibrated(net, IDS, {"head/linear": "w4"})
    note = "reads table.weight as it is stored for head/linear, in w4"
    assert rows(model) == {"table/embedding": ("fp32", note), "head/linear": ("w4", "")}
    weight = on_grid(net.table.weight, net.table.weight, integer(4), PerAxis(0))
    assert torch.equal(model(IDS[0]), F.linear(F.embedding(IDS[0], weight), weight))


def test_a_tied_weight_in_two_formats(laid, Tied):
    model, *_ = laid(Tied(), IDS, {"table/embedding": "w8", "head/linear": "w4"})
    assert rows(model)["table/embedding"] == ("w8", "")
    assert rows(model)["head/linear"] == (
        "fp32",
        "table.weight is stored once, as table/embedding reads it: w8, PerAxis(axis=0); "
        "reads table.weight as it is stored for table/embedding, in w8",
    )


def test_a_tied_weight_along_two_axes(laid, Model):
    net = Model(lambda s, x: F.linear(x @ s.w, s.w), w=nn.Parameter(torch.randn(4, 4)))
    model, *_ = laid(net, data(3, 4))
    assert rows(model)["/matmul"] == ("int8", "")
    assert rows(model)["/linear"][0] == "fp32"
    assert (
        "w is stored once, as /matmul reads it: int8, PerAxis(axis=1)"
        in rows(model)["/linear"][1]
    )
    model, *_ = laid(net, data(3, 4), weight="tensor")
    assert rows(model) == {"/matmul": ("int8", ""), "/linear": ("int8", "")}


@pytest.mark.parametrize(
    ("forward", "parts"),
    [
        (lambda s, x: F.linear(x, s.w.t()), {"w": nn.Parameter(torch.ones(4, 3))}),
        (lambda s, x: x @ s.w.view(4, 3), {"w": nn.Parameter(torch.ones(12))}),
        (lambda s, x: F.linear(x, s.w), {"w": torch.ones(3, 4)}),
        (lambda s, x: F.linear(x, s.w[:3]), {"w": torch.ones(5, 4)}),
        (
            lambda s, x: F.linear(x, s.w * s.g),
            {"w": nn.Parameter(torch.ones(3, 4)), "g": nn.Parameter(torch.ones(3, 1))},
        ),
        (
            lambda s, x: F.linear(x, torch.cat([s.w, s.w])),
            {"w": nn.Parameter(torch.ones(3, 4))},
        ),
    ],
    ids=["transposed", "view", "buffer", "part of a buffer", "product", "cat"],
)
def test_weights_that_are_no_parameters_are_refused(laid, Model, forward, parts):
    net = nn.Sequential(Model(forward, **parts), nn.LazyLinear(2))
    net(data(2, 4)[0])
    model, *_ = laid(net, data(2, 4))
    format, reason = next(
        v for k, v in rows(model).items() if "linear" in k or "matmul" in k
    )
    assert format == "fp32"
    assert reason.endswith(
        "is no parameter: a buffer, a view, or made of parameters in the forward pass"
    )
    assert rows(model)["1/linear"] == ("int8", "")


@pytest.mark.parametrize(
    "norm",
    [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm],
)
def test_parametrized_weights_are_refused(calibrated, norm):
    """What they are computed from keeps its values."""
    torch.manual_seed(0)
    net = nn.Sequential(norm(nn.Linear(4, 4)), nn.Linear(4, 2)).eval()
    model = calibrated(net, data(3, 4))
    assert rows(model)["0/linear"][0] == "fp32"
    assert "made of parameters" in rows(model)["0/linear"][1]
    assert rows(model)["1/linear"] == ("int8", "")
    before = {k: v for k, v in net.state_dict().items() if k.startswith("0.")}
    assert all(torch.equal(v, model.model.state_dict()[k]) for k, v in before.items())


def test_what_another_weight_is_made_of_keeps_its_values(laid, Model):
    net = Model(
        lambda s, x: F.linear(F.linear(x, s.w), s.w * 2),
        w=nn.Parameter(torch.ones(4, 4)),
    )
    with pytest.raises(
        QuantizationError,
        match="w is stored once, and /mul reads a view of it or makes another weight",
    ):
        laid(net, data(3, 4))


def test_adds_and_pools_between_convolutions_work_on_codes(laid, Model):
    def forward(self, x):
        y = F.relu(self.a(x))
        z = self.b(y) + y
        return self.c(F.max_pool2d(z, 2))

    net = Model(
        forward, a=nn.Conv2d(1, 2, 1), b=nn.Conv2d(2, 2, 1), c=nn.Conv2d(2, 1, 1)
    )
    pictures = data(2, 1, 4, 4)
    formats = dict.fromkeys(("a/conv2d", "b/conv2d", "c/conv2d"), "int8")
    model, *_ = laid(net, pictures, formats)
    found = {site: fmt for site, (fmt, _) in rows(model).items()}
    assert found == {
        "a/conv2d": "int8",
        "/relu": "fp32",
        "b/conv2d": "int8",
        "/add": "codes",
        "/max_pool2d": "codes",
        "c/conv2d": "int8",
    }
    assert {n for n, q in model.named() if not q.weight} == {
        "a/conv2d:0",
        "/relu",
        "b/conv2d",
        "/add",
        "/max_pool2d",
    }
    assert model.quantizer("/add").operand.reduce == 1
    model, *_ = laid(net, pictures, formats, elementwise=False)
    assert {n for n, q in model.named() if not q.weight} == {
        "a/conv2d:0",
        "/relu",
        "/max_pool2d",
    }
    model, *_ = laid(
        net, pictures, formats, dynamic=True
    )  # dynamic kernels leave floats
    assert {n for n, q in model.named() if not q.weight} == {
        "a/conv2d:0",
        "/relu",
        "/max_pool2d",
    }
    assert all(q.dynamic for _, q in model.named() if not q.weight)


def test_a_product_with_a_number_is_no_join(laid, Model):
    net = Model(lambda s, x: s.b(s.a(x) * 3.0), a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    assert rows(laid(net, data(2, 2), {"a/linear": "int8", "b/linear": "int8"})[0])[
        "/mul"
    ] == ("fp32", "")


def test_branches_become_rows(laid, Model):
    net = Model(
        lambda s, x: s.b(s.a(x.relu() if x.sum() > 0 else x.abs())),
        a=nn.Linear(2, 2),
        b=nn.Linear(2, 2),
    )
    model, *_ = laid(net, [torch.ones(1, 2), -torch.ones(1, 2)])
    assert rows(model)["a/linear"] == (
        "fp32",
        "reads other values from batch to batch: the model branches on its data",
    )
    assert rows(model)["b/linear"] == ("int8", "")


def test_reasons(laid):
    net = nn.Sequential(
        nn.Linear(4, 4), nn.Softmax(-1), nn.LayerNorm(4), nn.Linear(4, 2)
    )
    model, *_ = laid(
        net, data(2, 4), {"0/linear": "int8", "1/softmax": "int8", "3/linear": "fp32"}
    )
    assert rows(model) == {
        "0/linear": ("int8", ""),
        "1/softmax": ("fp32", "no int8 arithmetic for softmax operators"),
        "2/layer_norm": ("fp32", ""),
        "3/linear": ("fp32", "the plan leaves it in fp32"),
    }
    with pytest.raises(QuantizationError, match="nothing would be quantized") as error:
        laid(net, data(2, 4), {"1/softmax": "int8"})
    assert error.value.got == "no int8 arithmetic for softmax operators"
    with pytest.raises(QuantizationError, match="e8m0 holds scales, not values"):
        laid(net, data(2, 4), "e8m0")


@pytest.mark.parametrize("fmt", ["int8", "fp8_e4m3fn"])
def test_kv_cache_per_token(calibrated, Model, fmt):
    """Each token of keys and values has a scale of its own, which further tokens do not change."""
    site = "/scaled_dot_product_attention"
    net = Model(lambda s, q, k, v: F.scaled_dot_product_attention(q, k, v))
    parts = tuple(data(2, 2, 5, 4, count=3))
    model = calibrated(net, [parts], {}, kv_cache=fmt)
    found = parse_format(fmt)
    q, k, v = parts
    want = F.scaled_dot_product_attention(
        q, on_grid(k, k, found, PerToken()), on_grid(v, v, found, PerToken())
    )
    assert torch.equal(model(*parts), want)
    assert rows(model) == {site: (f"keys and values in {fmt}", "")}


def test_kv_cache_needs_attention(laid):
    with pytest.raises(QuantizationError, match="no keys and values to keep"):
        laid(nn.Linear(2, 2), data(2, 2), "int8", kv_cache="int8")
