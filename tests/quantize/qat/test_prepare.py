"""Learners in a whole quantized model: prepare_qat, training, convert."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import roundoff as ro
from roundoff.errors import PatternError, QuantizationError
from roundoff.formats import choose_qparams, parse_format
from roundoff.quantize.graph import trace
from roundoff.quantize.model import Passing, QuantizedModel
from roundoff.quantize.options import Options
from roundoff.quantize.qat.learner import Learner
from roundoff.quantize.qat.learners import LEARNERS
from roundoff.quantize.qat.loop import train
from roundoff.quantize.qat.prepare import clip_binary_, convert, prepare_qat
from roundoff.quantize.qat.training import learners, parameter_groups
from roundoff.quantize.quantizer import Quantizer
from roundoff.quantize.schemes import scheme
from roundoff.workload.workload import Workload


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.body = nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        y = self.body(self.conv(x))
        return self.fc(y.mean((2, 3)))


class MinMax(Passing):
    """Calibrates each quantizer on the first tensor that reaches it."""

    def value(self, _name, quantizer, value):
        if not quantizer.dynamic and quantizer.scale is None:
            quantizer.set_(choose_qparams(value, quantizer.fmt, quantizer.granularity))
        return value


def quantized(fmt="int4", calibrated=True, **options):
    torch.manual_seed(0)
    model = Net()
    workload = Workload(model, [b[0] for b in batches()[:1]])
    graph = trace(workload)
    laid_out = scheme(
        graph, dict.fromkeys(graph.nodes, parse_format(fmt)), Options(**options)
    )
    found = QuantizedModel(copy.deepcopy(model).eval(), laid_out)
    if calibrated:
        with found.through(MinMax()), torch.no_grad():
            found(workload.batches[0])
    return found


def batches(count=3):
    generator = torch.Generator().manual_seed(0)
    images = [torch.rand(8, 1, 6, 6, generator=generator) for _ in range(count)]
    return [(x, (x.mean((1, 2, 3)) * 30).long() % 3) for x in images]


def forward(model, batch):
    return model(batch[0])


def loss(output, batch):
    return functional.cross_entropy(output.float(), batch[1])


def trained(model, epochs=1, **parameters):
    optimizer = torch.optim.AdamW(parameter_groups(model, 1e-2, 1e-3))
    return train(
        model, batches(), loss, optimizer, epochs, forward=forward, **parameters
    )


@pytest.mark.parametrize(
    ("fmt", "weights", "activations"),
    [
        ("int4", "lsq", "lsq+"),
        ("int4", "ste", "ste"),
        ("int4", "lsq+", "ulq"),
        ("int8", "lsq", "lsq"),
        ("int4", "dorefa", "lsq"),
    ],
)
@pytest.mark.parametrize("start", ["calibrated", "paper"])
def test_convert_keeps_every_bit(fmt, weights, activations, start):
    model = quantized(fmt)
    x = batches()[0][0]
    before = {n: p.detach().clone() for n, p in model.model.named_parameters()}
    names = [name for name, _ in model.named()]
    assert (
        prepare_qat(model, weights=weights, activations=activations, start=start) == {}
    )
    assert model.training
    assert all(isinstance(q, Learner) for _, q in model.named())
    model(x)
    done = trained(model)
    assert done.steps == 3
    assert any(not torch.equal(p, before[n]) for n, p in model.model.named_parameters())
    expected = model.eval()(x)
    assert convert(model) is model
    assert [name for name, _ in model.named()] == names
    assert all(type(q) is Quantizer and not q.training for _, q in model.named())
    assert not any(isinstance(m, Learner) for m in model.modules())
    # the bias is rounded to steps of the sums, which are those of the learners: nothing at all changes
    assert torch.equal(model(x), expected)
    for name in model.weight_names():
        weight = model.model.get_parameter(name)
        assert torch.equal(model.quantizer(name)(weight), weight), "on its grid"
        assert model.quantizer(name).observer == weights


def test_the_calibrated_start_changes_nothing_before_training():
    model, x = quantized(), batches()[0][0]
    expected = model(x)
    prepare_qat(model, weights="lsq", activations="lsq+")
    assert torch.equal(model.eval()(x), expected)


@pytest.mark.parametrize(
    ("fmt", "name"),
    [
        ("ternary", "twn"),
        ("ternary", "ttq"),
        ("binary", "bnn"),
        ("binary", "xnor"),
        ("binary", "dorefa"),
    ],
)
def test_weights_of_one_and_two_bits(fmt, name):
    model, x = quantized(fmt), batches()[0][0]
    prepare_qat(model, weights=name, start="paper")
    assert {q.kind for q in learners(model).values()} == {name}
    trained(model)
    expected = model.eval()(x)
    convert(model)
    assert torch.equal(model(x), expected)
    for weight_name in model.weight_names():
        weight = model.model.get_parameter(weight_name)
        distinct = [row.unique().numel() for row in weight.flatten(1)]
        assert max(distinct) <= (3 if fmt == "ternary" else 2)
    assert model.quantizer("fc.weight").fmt.name == ("int8" if name == "ttq" else fmt)


def test_training_in_bf16_with_the_teacher():
    model = quantized()
    torch.manual_seed(0)
    teacher = Net()
    prepare_qat(model)
    done = trained(model, 2, teacher=teacher, region=ro.autocast("bf16", device="cpu"))
    assert done.losses[1] < done.losses[0]
    plain = quantized()
    prepare_qat(plain)
    assert torch.isfinite(plain(batches()[0][0])).all()


def test_scales_are_trained_and_gradients_reach_every_learner():
    model = quantized()
    prepare_qat(model, activations="ulq")
    loss(model(batches()[0][0]), batches()[0]).backward()
    for path, learner in learners(model).items():
        for name, parameter in learner.named_parameters():
            assert parameter.grad is not None, (path, name)
            assert parameter.grad.isfinite().all()
    assert all(p.grad is not None for p in model.model.parameters())


def test_patterns_choose_other_learners():
    model = quantized()
    kept = prepare_qat(model, only={"fc.*": "", "*.weight": "ste"})
    kinds = {name: type(q).__name__ for name, q in model.named()}
    assert kept == {"fc.weight": "left as it is by `only`"}
    assert kinds["conv.weight"] == "Ste"
    assert kinds["fc.weight"] == "Quantizer"
    assert set(kinds.values()) == {"Ste", "Quantizer", "LsqPlus"}


def test_dynamic_quantizers_stay_and_are_listed():
    model = quantized(dynamic=True)
    kept = prepare_qat(model)
    assert set(kept.values()) == {"dynamic: its scale is chosen from each tensor"}
    assert set(learners(model)) == {
        f"quantizers.{n.replace('.', '__dot__')}" for n in model.weight_names()
    }
    trained(model)
    convert(model)


def test_an_uncalibrated_model_starts_with_its_first_batch():
    model = quantized(calibrated=False)
    prepare_qat(model, activations="ste")
    with pytest.raises(QuantizationError, match="this learner has no scale yet"):
        convert(model)
    assert isinstance(model.quantizer("fc.weight"), Learner)
    model(batches()[0][0])
    trained(model)
    convert(model)


def test_weights_of_binary_net_are_clipped():
    model = quantized("binary")
    prepare_qat(model, weights="bnn", start="paper")
    with torch.no_grad():
        model.model.fc.weight.fill_(3.0)
        model.model.fc.bias.fill_(3.0)
    clip_binary_(model)
    assert model.model.fc.weight.max() == 1
    assert model.model.fc.bias.max() == 3
    with torch.no_grad():
        model.model.fc.weight.fill_(3.0)
    trained(model)
    assert model.model.fc.weight.abs().max() <= 1
    other = quantized("binary")
    prepare_qat(other, weights="xnor", start="paper")
    with torch.no_grad():
        other.model.fc.weight.fill_(3.0)
    clip_binary_(other)
    assert other.model.fc.weight.max() == 3


def test_a_learner_that_does_not_fit_leaves_the_model_as_it_was():
    model = quantized()
    before = copy.deepcopy([type(q) for _, q in model.named()])
    for names, message in (
        (
            {"activations": "twn"},
            "twn, int4_asym, activation.: twn has a grid of its own",
        ),
        (
            {"weights": "ulq"},
            r"conv.weight \(ulq, int4, weight\): this learner needs codes with a zero point",
        ),
        ({"weights": "lqs"}, "unknown learner"),
    ):
        with pytest.raises(QuantizationError, match=message):
            prepare_qat(model, **names)
    with pytest.raises(
        PatternError,
        match="only: a pattern matches no quantizer\n.*conv/conv2d:0\n  got: nothing.[*]",
    ):
        prepare_qat(model, only={"nothing.*": "lsq"})
    with pytest.raises(QuantizationError, match="there is nothing to learn"):
        prepare_qat(model, only={"*": ""})
    assert [type(q) for _, q in model.named()] == before
    prepare_qat(model)
    with pytest.raises(QuantizationError, match="this quantizer is a learner already"):
        prepare_qat(model)


@pytest.mark.parametrize("name", LEARNERS)
def test_every_learner_works_on_activations_in_int4_or_says_why_not(name):
    model = quantized()
    if name in ("pact", "dorefa", "twn", "ttq", "bnn", "xnor"):
        model.quantizer("conv/conv2d:0").zero_point.add_(
            1
        )  # a range that goes below 0; all others are a ReLU's
        with pytest.raises(
            QuantizationError,
            match="goes below" if name in ("pact", "dorefa") else "a grid of its own",
        ):
            prepare_qat(model, activations=name)
    else:
        prepare_qat(model, activations=name)
        model(batches()[0][0]).sum().backward()


def test_parameters_of_learners():
    model = quantized()
    prepare_qat(model, activations="ulq", parameters={"ulq": {"fixed_min": True}})
    model(batches()[0][0])
    assert all(
        q.clip_min.item() == 0 for q in learners(model).values() if q.kind == "ulq"
    )


@pytest.mark.parametrize("step", [prepare_qat, convert])
def test_a_model_that_is_not_quantized_is_an_error_that_says_how(step):
    net = Net().eval()
    with pytest.raises(
        QuantizationError,
        match=f"{step.__name__}: not a quantized model\n.*\n  got: Net\n  do: quant",
    ):
        step(net)
    assert not any(module.training for module in net.modules())
