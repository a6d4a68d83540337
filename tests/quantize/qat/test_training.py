"""Groups of parameters, freezing, BatchNorm, distillation and the loop."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import roundoff as ro
from roundoff.errors import NonFiniteError, QuantizationError
from roundoff.formats import PerAxis
from roundoff.quantize.qat.batch_norm import FoldedNorm, freeze_batch_norm
from roundoff.quantize.qat.distill import distillation_loss
from roundoff.quantize.qat.learners import make_learner
from roundoff.quantize.qat.loop import Distillation, train
from roundoff.quantize.qat.training import Freezing, freeze, learners, parameter_groups


class Quantized(nn.Module):
    """A linear layer with learners before weight and input."""

    def __init__(self, weight="lsq", activation="lsq+", formats=("int4", "int4_asym")):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.weight = make_learner(weight, formats[0], PerAxis(0))
        self.input = make_learner(activation, formats[1], role="activation")

    def forward(self, x):
        return functional.linear(
            self.input(x), self.weight(self.linear.weight), self.linear.bias
        )


def data(count=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = [torch.randn(16, 4, generator=generator) for _ in range(count)]
    return [(x, x[:, :3].argmax(1)) for x in images]


def forward(model, batch):
    return model(batch[0])


def loss(output, batch):
    return functional.cross_entropy(output.float(), batch[1])


def made(seed=0, **names):
    torch.manual_seed(seed)
    model = Quantized(**names)
    model(data()[0][0])
    return model


def test_scales_have_a_group_of_their_own():
    model = made(activation="pact")
    groups = parameter_groups(model, 0.1, 0.01, 1e-3)
    found = {
        g["name"]: ({id(p) for p in g["params"]}, g["lr"], g["weight_decay"])
        for g in groups
    }
    assert found == {
        "model": ({id(p) for p in model.linear.parameters()}, 0.1, 1e-3),
        "scales": ({id(model.weight.scale)}, 0.01, 0.0),
        "clips": ({id(model.input.alpha)}, 0.01, 1e-3),
    }
    assert [g["name"] for g in parameter_groups(nn.Linear(2, 2), 0.1, 0.01)] == [
        "model"
    ]


def test_a_learner_without_parameters_yet_has_no_place_in_an_optimizer():
    with pytest.raises(
        QuantizationError,
        match="weight: this learner has no parameters yet\n.*\n.*\n  do: run one batch",
    ):
        parameter_groups(Quantized(), 0.1, 0.01)


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad],
)
def test_every_optimizer_trains_weights_and_scales(optimizer):
    model = made()
    before = copy.deepcopy(model.state_dict())
    optimizer = optimizer(parameter_groups(model, 1e-2, 1e-3))
    done = train(model, data(), loss, optimizer, 2, forward=forward)
    assert done.steps == 8
    assert len(done.losses) == 2
    assert done.reverted == {}
    for name, value in model.state_dict().items():
        assert not torch.equal(value, before[name]), name


def test_training_lowers_the_loss_and_restores_the_flags():
    model = made()
    model.eval()
    model.input.train()
    flags = [m.training for m in model.modules()]
    done = train(
        model,
        data(),
        loss,
        torch.optim.AdamW(parameter_groups(model, 0.05, 1e-3)),
        15,
        forward=forward,
    )
    assert done.losses[-1] < 0.9 * done.losses[0]
    assert [m.training for m in model.modules()] == flags


def test_freezing_at_a_step():
    model = nn.Sequential(made(), nn.BatchNorm1d(3))
    scales, tracked = [], []
    freezing = Freezing(model, scales=2, batch_norm=3)
    optimizer = torch.optim.SGD(parameter_groups(model, 0.1, 0.1), momentum=0.9)

    def watched(m, batch):
        scales.append(m[0].input.scale.item())
        tracked.append(m[1].num_batches_tracked.item())
        return m(batch[0])

    train(model, data(6), loss, optimizer, forward=watched, freezing=freezing)
    assert len(set(scales[:3])) == 3
    assert len(set(scales[2:])) == 1
    assert tracked == [0, 1, 2, 3, 3, 3]
    assert freeze(model, False) == 2
    assert model[0].input.scale.requires_grad


def test_frozen_batch_norm_is_evaluation_mode_that_still_learns():
    norm = nn.BatchNorm2d(3)
    norm(torch.randn(4, 3, 2, 2))
    expected, x = copy.deepcopy(norm).eval(), torch.randn(4, 3, 2, 2)
    (handle,) = freeze_batch_norm(norm)
    result = norm.train()(x)
    assert torch.equal(result, expected(x))
    result.sum().backward()
    assert norm.weight.grad is not None
    handle.remove()
    norm.train()(x)
    assert norm.num_batches_tracked == 2
    assert (
        freeze_batch_norm(
            nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
        )
        == []
    )


@pytest.mark.parametrize(
    ("layer", "norm", "shape"),
    [
        (nn.Conv2d(2, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), (3, 2, 6, 6)),
        (
            nn.Conv1d(4, 6, 3, groups=2, padding=1, padding_mode="circular"),
            nn.BatchNorm1d(6, momentum=None),
            (3, 4, 5),
        ),
        (nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2, momentum=0.3), (2, 1, 3, 3, 3)),
        (nn.Linear(5, 3), nn.BatchNorm1d(3), (7, 5)),
    ],
)
def test_folded_training_is_layer_and_batch_norm(layer, norm, shape):
    generator = torch.Generator().manual_seed(0)
    layer, norm = layer.double(), norm.double()
    with torch.no_grad():
        norm.weight.copy_(torch.rand(norm.weight.shape, generator=generator) + 0.5)
        norm.bias.copy_(torch.randn(norm.bias.shape, generator=generator))
    folded = FoldedNorm(copy.deepcopy(layer), copy.deepcopy(norm))
    reference = nn.Sequential(layer, norm)
    # sums of at most 100 products of numbers below 10 in float64, divided by deviations above 0.1
    tolerance = {"rtol": 0, "atol": 100 * 10 * 100 * 2.0**-52}
    for _ in range(3):
        x = torch.randn(shape, dtype=torch.float64, generator=generator)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        result, expected = folded(ours), reference(theirs)
        torch.testing.assert_close(result, expected, **tolerance)
        g = torch.randn(result.shape, dtype=torch.float64, generator=generator)
        result.backward(g)
        expected.backward(g)
        torch.testing.assert_close(ours.grad, theirs.grad, **tolerance)
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(
                folded.layer.get_parameter(name).grad, parameter.grad, **tolerance
            )
        torch.testing.assert_close(
            folded.norm.weight.grad, norm.weight.grad, **tolerance
        )
    for name, value in norm.state_dict().items():
        torch.testing.assert_close(folded.norm.state_dict()[name], value, **tolerance)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(folded.eval()(x), reference.eval()(x), **tolerance)
    torch.testing.assert_close(folded.folded()(x), reference(x), **tolerance)


def test_folded_training_quantizes_what_is_deployed():
    learner = make_learner("lsq", "int4", PerAxis(0))
    folded = FoldedNorm(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), learner)
    x = torch.randn(3, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    folded(x).sum().backward()
    assert learner.scale.grad is not None
    folded.eval()
    plain = folded.folded()
    with torch.no_grad():
        plain.weight.copy_(learner.frozen(plain.weight)[0])
        assert torch.equal(folded(x), plain(x))
    assert len(freeze_batch_norm(folded)) == 1
    assert torch.equal(folded.train()(x), plain(x))


@pytest.mark.parametrize(
    ("layer", "norm", "message"),
    [
        (
            nn.ConvTranspose2d(2, 4, 3),
            nn.BatchNorm2d(4),
            "ConvTranspose2d: this layer cannot be trained folded",
        ),
        (
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(5),
            "this BatchNorm cannot be folded\n  expected: 4 channels",
        ),
        (
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4, affine=False),
            "this BatchNorm cannot be folded",
        ),
        (
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4, track_running_stats=False),
            "this BatchNorm cannot be folded",
        ),
    ],
)
def test_what_cannot_be_trained_folded(layer, norm, message):
    with pytest.raises(QuantizationError, match=message):
        FoldedNorm(layer, norm)


def test_folded_training_in_bf16_takes_its_statistics_in_fp32():
    folded, x = FoldedNorm(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.randn(64, 2)
    with torch.autocast("cpu", torch.bfloat16):
        folded(x)
        expected = (
            functional.linear(x, folded.layer.weight, folded.layer.bias).float().mean(0)
            * 0.1
        )
    assert torch.equal(folded.norm.running_mean, expected) or torch.allclose(
        folded.norm.running_mean, expected, rtol=1e-6
    )


def test_one_value_has_no_variance():
    with pytest.raises(
        QuantizationError, match="one value per channel has no variance"
    ):
        FoldedNorm(nn.Linear(2, 2), nn.BatchNorm1d(2))(torch.ones(1, 2))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_distillation_is_the_divergence_of_soft_targets(temperature):
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(size=(5, 7)) * 3, rng.normal(size=(5, 7)) * 3

    def soft(z):
        e = np.exp((z - z.max(1, keepdims=True)) / temperature)
        return e / e.sum(1, keepdims=True)

    p, q = soft(teacher), soft(student)
    expected = temperature**2 * (p * np.log(p / q)).sum(1).mean()
    leaf = torch.tensor(student, requires_grad=True)
    found = distillation_loss(leaf, torch.tensor(teacher), temperature=temperature)
    # logits below 10 / temperature, of fp32's relative error, in 7 terms
    assert found.item() == pytest.approx(
        expected, abs=temperature**2 * 7 * 40 / temperature * 2.0**-24
    )
    found.backward()  # eq. 2, over the batch, times T**2: T (q - p)
    np.testing.assert_allclose(
        leaf.grad.numpy(), temperature * (q - p) / 5, rtol=0, atol=1e-6 * temperature
    )


def test_distillation_by_logits_and_along_another_axis():
    student, teacher = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    assert torch.equal(
        distillation_loss(student, teacher, kind="mse"),
        functional.mse_loss(student, teacher),
    )
    by_class = distillation_loss(student.movedim(1, -1), teacher.movedim(1, -1))
    torch.testing.assert_close(distillation_loss(student, teacher, axis=1), by_class)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (torch.ones(2, 3), torch.ones(2, 4)),
            "have no outputs to compare\n  expected: the teacher's shape .2, 4.",
        ),
        ((torch.ones(0, 3), torch.ones(0, 3)), "have no outputs to compare"),
        ((torch.ones(2, 3), torch.ones(2, 3), "l1"), "this distillation is unknown"),
        (
            (torch.ones(2, 3), torch.ones(2, 3), "kl", 0.0),
            "got: kind kl, temperature 0.0",
        ),
    ],
)
def test_what_cannot_be_distilled(arguments, message):
    names = dict(zip(("kind", "temperature"), arguments[2:], strict=False))
    with pytest.raises(QuantizationError, match=message):
        distillation_loss(*arguments[:2], **names)


def test_a_student_learns_from_its_teacher_alone():
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).train()
    model, batches = made(), data(8)
    distillation = Distillation(teacher, share=1.0, temperature=2.0)
    done = train(
        model,
        batches,
        loss,
        torch.optim.AdamW(parameter_groups(model, 0.05, 1e-3)),
        20,
        forward=forward,
        teacher=distillation,
    )
    assert done.losses[-1] < 0.1 * done.losses[0]
    assert teacher.training
    assert all(m.training for m in teacher.modules())
    assert all(p.grad is None for p in teacher.parameters())
    train(
        model,
        batches,
        loss,
        torch.optim.SGD(model.parameters(), 0.1),
        forward=forward,
        teacher=teacher,
    )


def test_a_teacher_that_gives_no_logits():
    class Two(nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(
        QuantizationError,
        match="distillation needs one tensor of logits\n.*\n  got: tuple",
    ):
        model = made()
        train(
            model,
            data(),
            loss,
            torch.optim.SGD(model.parameters(), 0.1),
            forward=forward,
            teacher=Two(),
        )


def test_an_optimizer_that_does_not_know_the_scales():
    model = made()
    with pytest.raises(
        QuantizationError,
        match="weight: the optimizer does not know this learner's parameters",
    ):
        train(
            model,
            data(),
            loss,
            torch.optim.SGD(model.linear.parameters(), 0.1),
            forward=forward,
        )
    with pytest.raises(QuantizationError, match="expected: scale\n"):
        train(
            Quantized(),
            data(),
            loss,
            torch.optim.SGD(model.parameters(), 0.1),
            forward=forward,
        )
    freeze(model)
    train(
        model,
        data(),
        loss,
        torch.optim.SGD(model.linear.parameters(), 0.1),
        forward=forward,
    )


def test_training_in_bf16_with_a_loss_scaler():
    model = made()
    optimizer = torch.optim.SGD(parameter_groups(model, 0.1, 1e-3))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    region = ro.autocast("bf16", device="cpu")
    done = train(
        model,
        data(),
        loss,
        optimizer,
        10,
        forward=forward,
        region=region,
        scaler=scaler,
    )
    assert done.losses[-1] < done.losses[0]
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_scaler_unscales_the_gradients_of_scales():
    """A power of two as loss scale: gradients, and so the step, are the same bits as without it."""
    models = made(), made()
    for model, scaler in zip(
        models, (None, torch.amp.GradScaler("cpu", init_scale=2.0**12)), strict=True
    ):
        train(
            model,
            data(1),
            loss,
            torch.optim.SGD(parameter_groups(model, 0.1, 0.1)),
            forward=forward,
            scaler=scaler,
        )
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_loss_that_is_no_number_stops_before_the_step():
    model = made()
    before = copy.deepcopy(model.state_dict())
    bad = [(torch.full((2, 4), float("nan")), torch.zeros(2, dtype=torch.int64))]
    with pytest.raises(NonFiniteError, match="epoch 0: the loss of step 0 is nan"):
        train(
            model, bad, loss, torch.optim.SGD(model.parameters(), 0.1), forward=forward
        )
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_batches_that_are_used_up():
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(
        QuantizationError, match="epoch 1: there is nothing to train on"
    ):
        train(model, iter(data()), loss, optimizer, 2, forward=forward)
    done = train(model, lambda: iter(data()), loss, optimizer, 2, forward=forward)
    assert done.steps == 8


def test_default_forward_and_schedule():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def squared(output, _batch):
        return output.square().mean()

    x = torch.ones(2, 2)
    done = train(model, [x, (x,), {"input": x}], squared, optimizer, schedule=schedule)
    assert done.steps == 3
    assert optimizer.param_groups[0]["lr"] == 1 / 8
    assert learners(model) == {}


def test_what_was_put_back_is_reported():
    model = made()
    with pytest.warns(RuntimeWarning, match="became invalid"):
        done = train(
            model,
            data(),
            loss,
            torch.optim.SGD(parameter_groups(model, 0.0, 1e6)),
            2,
            forward=forward,
        )
    assert set(done.reverted) <= {"weight", "input"}
    assert sum(done.reverted.values()) > 0
