"""Gradients of a scaled loss are those of the loss: the scale is divided out, where the program does so too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundoff
from roundoff.compare.judging.explain import RecordedStep, Sides
from roundoff.compare.judging.gradient_scale import rescaling, without_loss_scales
from roundoff.compare.records.recorded_rows import rows_of

SCALE = 512.0


def trained(folder, scale, *, unscaled=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 6)
    with roundoff.capture(folder, model, keep="tensors") as run:
        loss = model(x).square().mean()
        if scale is not None:
            loss = loss * scale
        loss.backward()
        if scale is not None and unscaled:
            for parameter in model.parameters():
                parameter.grad.div_(scale)
        optimizer.step()
        run.step()


@pytest.fixture
def compared(tmp_path):
    def compare(candidate, **options):
        trained(tmp_path / "reference", None)
        trained(tmp_path / "candidate", candidate, **options)
        sides = {name: tmp_path / name for name in ("reference", "candidate")}
        return roundoff.compare(**sides)

    return compare


def test_a_scale_that_is_divided_out_is_no_difference(compared):
    found = compared(SCALE)
    assert found.agrees, found.answer
    backward = found.table.filter(phase="backward", status="matched")
    # powers of two change no bit
    assert backward["error"].max() == 0


def test_a_scale_that_stays_is_one(compared):
    found = compared(SCALE, unscaled=False)
    assert not found.agrees
    assert found.culprits(1)[0].operator == "mul"


def test_two_scales(tmp_path):
    trained(tmp_path / "one", 1024.0)
    trained(tmp_path / "other", 3.0)
    found = roundoff.compare(reference=tmp_path / "one", candidate=tmp_path / "other")
    assert found.agrees, found.answer


def clipped(folder, factor, keep, clip):
    """Train with a clip that gradients are above, so that it hides a factor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 6)
    with roundoff.capture(folder, model, keep=keep) as run:
        loss = model(x).square().mean()
        if factor != 1:
            loss = loss * factor
        loss.backward()
        clip(model.parameters(), 1e-3)
        optimizer.step()
        run.step()


@pytest.mark.parametrize("keep", ["tensors", "stats"])
@pytest.mark.parametrize(
    "clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_], ids=["norm", "value"]
)
def test_a_clip_divides_no_scale_out(keep, clip, tmp_path):
    clipped(tmp_path / "one", 1, keep, clip)
    clipped(tmp_path / "other", 64.0, keep, clip)
    found = roundoff.compare(reference=tmp_path / "one", candidate=tmp_path / "other")
    assert not found.agrees
    assert found.culprits(1)[0].operator == "mul"


def weighed(folder, *, with_graph):
    """A penalty with a weight of 0.1, beside a product of two other numbers by 0.1."""
    draw = torch.Generator().manual_seed(3)
    model = nn.Linear(4, 1)
    with roundoff.capture(folder, model, keep="tensors") as run:
        bias = 0.1 * torch.randn(1, generator=draw)
        with torch.no_grad():
            model.weight.copy_(torch.randn(1, 4, generator=draw))
            model.bias.copy_(bias)
        x = torch.randn(6, 4, generator=draw, requires_grad=True)
        y = model(x).square()
        once_more = model(x).square().sum()
        (slope,) = torch.autograd.grad(once_more, x, create_graph=with_graph)
        (y.mean() + 0.1 * slope.square().mean()).backward()
        run.step()


def test_the_weight_of_a_term_is_no_scale(tmp_path):
    weighed(tmp_path / "one", with_graph=True)
    weighed(tmp_path / "other", with_graph=False)
    found = roundoff.compare(reference=tmp_path / "one", candidate=tmp_path / "other")
    forward = found.table.filter(phase="forward", operator="mul", status="matched")
    assert forward["error"].max() == 0
    assert "create_graph" in found.answer


def in_two_terms(folder, scale):
    """Both terms of the loss are scaled, each for itself."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    x = torch.randn(5, 4)
    with roundoff.capture(folder, model, keep="tensors") as run:
        out = model(x)
        loss = out.square().mean() * scale + out.abs().mean() * scale
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.div_(scale)
        run.step()


def test_a_scale_of_all_terms_is_one(tmp_path):
    in_two_terms(tmp_path / "one", 256.0)
    in_two_terms(tmp_path / "other", 1024.0)
    found = roundoff.compare(reference=tmp_path / "one", candidate=tmp_path / "other")
    backward = found.table.filter(phase="backward", operator="mul", status="matched")
    # powers of two change no bit
    assert backward["error"].max() == 0


def test_a_product_with_a_saved_value_is_no_product_with_the_scale(tmp_path):
    net = nn.Linear(3, 4)
    with roundoff.capture(tmp_path, net) as run:
        loss = net(torch.rand(5, 3)).exp().sqrt().square().mean()
        (loss / 2).backward()
        for parameter in net.parameters():
            parameter.grad.mul_(2)
        run.step()
    one = RecordedStep(rows_of(roundoff.load(tmp_path), 0, 0))
    scaled = without_loss_scales(Sides(one, one)).candidate
    backward = {r.operator for r in scaled.rows.values() if r.phase == "backward"}
    assert {"mul", "div"} <= backward, "exp and sqrt multiply with what they gave"
    changed = sorted(scaled.rows[record].operator for record in rescaling(scaled))
    assert changed == ["div", "div", "mul_", "mul_"], "the loss, its gradient, the ends"


def of_words_that_count(folder):
    """The loss is divided by how many words count, and its gradients stay so."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    x = torch.randn(5, 4)
    counts = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    with roundoff.capture(folder, model, keep="tensors") as run:
        losses = model(x).square().sum(1)
        (2 * (losses * counts).sum() / counts.sum()).backward()
        run.step()
    return RecordedStep(rows_of(roundoff.load(folder), 0, 0))


def test_what_a_loss_is_divided_by_for_good_is_no_scale(tmp_path):
    sides = Sides(
        of_words_that_count(tmp_path / "one"), of_words_that_count(tmp_path / "other")
    )
    assert without_loss_scales(sides) is sides


def clipped_by_torch(parameters):
    nn.utils.clip_grad_norm_(parameters, 1e-2)


def clipped_by_hand(parameters):
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    factor = min(1.0, 1e-2 / (flat.norm().item() + 1e-6))
    for parameter in parameters:
        parameter.grad = parameter.grad * factor


def accumulated(folder, clip, *, divides, by=2.0, keep="tensors"):
    """Two micro-batches a step; their loss, or their gradients, are divided."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    batches = torch.randn(2, 5, 6)
    with roundoff.capture(folder, model, keep=keep) as run:
        for batch in batches:
            # a term with the weight that the loss is divided by is no scale
            y = model(batch)
            loss = y.square().mean() + 0.5 * y.abs().mean()
            if divides == "loss":
                (loss / by).backward()
                continue
            slopes = torch.autograd.grad(loss, parameters)
            for parameter, slope in zip(parameters, slopes, strict=True):
                part = slope / by
                grad = parameter.grad
                parameter.grad = part if grad is None else grad + part
        clip(parameters)
        optimizer.step()
        run.step()


@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_a_loss_is_divided_or_its_gradients_are(keep, tmp_path):
    accumulated(tmp_path / "one", clipped_by_torch, divides="loss", keep=keep)
    accumulated(tmp_path / "other", clipped_by_hand, divides="slopes", keep=keep)
    found = roundoff.compare(reference=tmp_path / "one", candidate=tmp_path / "other")
    assert found.agrees, found.answer


@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_gradients_divided_by_another_number_are_found_though_a_clip_hides_it(
    keep, tmp_path
):
    accumulated(tmp_path / "one", clipped_by_torch, divides="loss", keep=keep)
    accumulated(
        tmp_path / "other", clipped_by_hand, divides="slopes", by=3.0, keep=keep
    )
    found = roundoff.compare(reference=tmp_path / "one", candidate=tmp_path / "other")
    assert not found.agrees
