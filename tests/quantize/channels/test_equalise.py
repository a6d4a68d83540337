"""Equalisation: function kept, ranges equal, nothing left without a reason."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from roundoff.errors import QuantizationError
from roundoff.quantize.channels.equalise import ClippedReLU, equalise_
from roundoff.quantize.channels.fold_batch_norm import fold_batch_norm_
from roundoff.quantize.channels.groups import channel_groups
from roundoff.quantize.channels.rescale import rescale_, why_not_rescalable

NAMES = (
    "Residual Dense Inverted Grouped UNet Transformer Gated Twice Gate Pixels".split()
)


def made(nets, name: str, double: bool = True) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(5)
    kind = getattr(nets, name)
    net = kind().eval()
    x = kind.example
    if double:
        net, x = net.double(), x.double() if x.is_floating_point() else x
    fold_batch_norm_(net, [x])
    return net, x


@pytest.mark.parametrize("name", NAMES)
def test_rescaling_every_group_keeps_the_function(nets, name: str) -> None:
    net, x = made(nets, name)
    before = net(x).detach()
    generator = torch.Generator().manual_seed(1)
    count = 0
    for group in channel_groups(net, [x], purpose="rescale"):
        if why_not_rescalable(group) is None:
            rescale_(
                net,
                group,
                torch.exp2(torch.rand(group.size, generator=generator) * 6 - 3),
            )
            count += 1
    assert count > 0 or name == "Inverted"
    # float64: scales of 1/8..8 change the order of magnitude of partial sums by 64 at most; sums of fewer than 200 products
    # in fewer than 8 layers: 8 * 200 * 64 * 1.1e-16 = 1.2e-11
    torch.testing.assert_close(
        net(x).detach(), before, rtol=0.0, atol=1.2e-11 * float(before.abs().max())
    )


@pytest.mark.parametrize("name", NAMES)
def test_equalising_keeps_the_function(nets, name: str) -> None:
    net, x = made(nets, name)
    before = net(x).detach()
    rows = equalise_(net, [x])
    assert any(row.scale is not None for row in rows)
    assert all((row.reason == "") == (row.scale is not None) for row in rows)
    torch.testing.assert_close(
        net(x).detach(), before, rtol=0.0, atol=1.2e-11 * float(before.abs().max())
    )


def test_powers_of_two_keep_every_bit(nets) -> None:
    net, x = made(nets, "Residual", double=False)
    before = net(x).detach()
    rows = equalise_(net, [x], powers_of_two=True)
    scales = torch.cat([row.scale for row in rows if row.scale is not None])
    assert bool((scales.log2() == scales.log2().round()).all())
    assert scales.unique().numel() > 1
    # a product and a sum of numbers times powers of two are the powers of two times product and sum: no rounding changes
    assert torch.equal(net(x), before)


def test_a_chain_ends_with_equal_ranges() -> None:
    """Equations 10 and 11: after them the largest weight that makes and that reads a channel are equal, and each is the
    geometric mean of what they were."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    made, read = (
        net[0].weight.detach().abs().amax(1),
        net[2].weight.detach().abs().amax(0),
    )
    (row, _) = equalise_(net, [torch.rand(2, 4, dtype=torch.float64)])
    # one product and one square root, each within an ulp or two: 8 ulp of float64
    torch.testing.assert_close(row.scale, (made / read).sqrt(), rtol=1.8e-15, atol=0.0)
    torch.testing.assert_close(
        net[0].weight.detach().abs().amax(1),
        (made * read).sqrt(),
        rtol=1.8e-15,
        atol=0.0,
    )
    torch.testing.assert_close(
        net[2].weight.detach().abs().amax(0),
        (made * read).sqrt(),
        rtol=1.8e-15,
        atol=0.0,
    )
    assert row.before == pytest.approx(float(made.max() / made.min()), rel=1e-12)


def test_a_skewed_network_becomes_that_of_the_plain_one(nets) -> None:
    """The end point of the iteration doesn't depend on where it starts: per channel rescales of 1/64..64 are undone."""
    plain, x = made(nets, "Dense")
    skewed = copy.deepcopy(plain)
    for group in channel_groups(skewed, [x], purpose="rescale"):
        if why_not_rescalable(group) is None:
            rescale_(skewed, group, torch.exp2(torch.linspace(-6, 6, group.size)))
    equalise_(plain, [x])
    equalise_(skewed, [x])
    for one, two in zip(plain.parameters(), skewed.parameters(), strict=True):
        # both stop when a round changes no scale by more than 1e-3; the three groups' rounds contract by a half or more,
        # so each is within 2e-3 of the end point for each of two scales of a weight: 8e-3 between them
        torch.testing.assert_close(one, two, rtol=8e-3, atol=1e-12)


def test_relu6_gets_a_bound_for_each_channel(nets) -> None:
    net, x = made(nets, "Inverted")
    x = x * 4
    before = net(x).detach()
    assert (
        float(net.m[1](net.m[0](net.stem(x))).detach().max()) > 6
    )  # the clip is at work
    rows = equalise_(net, [x])
    assert isinstance(net.m[2], ClippedReLU)
    assert net.m[2].bound.shape == (1, 12, 1, 1)
    assert net.m[2].bound.unique().numel() > 1
    assert [row.note for row in rows if row.note] == [
        "m.2 has a bound for each channel",
        "m.5 has a bound for each channel",
    ]
    torch.testing.assert_close(
        net(x).detach(), before, rtol=0.0, atol=1.2e-11 * float(before.abs().max())
    )
    again = equalise_(
        net, [x]
    )  # the bounds are rescaled with the channels from here on
    assert [row.reason for row in again] == [row.reason for row in rows]
    torch.testing.assert_close(
        net(x).detach(), before, rtol=0.0, atol=1.2e-11 * float(before.abs().max())
    )


def test_relu6_that_never_clips_can_become_relu(nets) -> None:
    net, x = made(nets, "Inverted")
    x = x / 100
    before = net(x).detach()
    rows = equalise_(net, [x], clip="relu")
    assert isinstance(net.m[2], nn.ReLU)
    assert "m.2 is a plain ReLU: no calibration value reaches 6" in {
        row.note for row in rows
    }
    torch.testing.assert_close(
        net(x).detach(), before, rtol=0.0, atol=1.2e-11 * float(before.abs().max())
    )


def test_a_functional_clip_and_other_operators_are_reasons(nets) -> None:
    class Net(nn.Module):
        def __init__(self, between) -> None:
            super().__init__()
            self.a, self.b, self.between = nn.Linear(3, 4), nn.Linear(4, 2), between

        def forward(self, x):
            return self.b(self.between(self.a(x)))

    expected = {
        F.relu6: "relu6 (/relu6) clips at (0.0, 6.0)",
        F.gelu: "gelu (/gelu) does not pass a factor on",
        (lambda h: h + 1): "add (/add) does not pass a factor on",
    }
    for between, reason in expected.items():
        rows = equalise_(Net(between), [torch.rand(2, 3)])
        assert rows[0].reason == reason
        assert math.isnan(rows[0].after)


def test_a_dead_channel_keeps_its_scale() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    net[0].weight.data[1] = 0.0
    net[2].weight.data[:, 2] = 0.0
    (row, _) = equalise_(net, [torch.rand(2, 3)])
    assert row.scale[1] == row.scale[2] == 1.0
    assert all(bool(torch.isfinite(p).all()) for p in net.parameters())


def test_batch_norm_has_to_be_folded_first() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)
    ).eval()
    x = torch.rand(2, 1, 3, 3)
    with pytest.raises(
        QuantizationError,
        match=r"do: fold it first: fold_batch_norm_\(model, batches\)",
    ):
        equalise_(net, [x])
    (hidden, _) = channel_groups(net, [x], purpose="rescale")
    with pytest.raises(QuantizationError, match="it passes a BatchNorm: fold it first"):
        rescale_(net, hidden, torch.ones(4))


def test_bad_scales_and_groups(nets) -> None:
    net = nets.Twice()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    (hidden, output) = channel_groups(net, [net.example], purpose="rescale")
    for bad in (
        torch.ones(4),
        torch.tensor([1.0, 1, 1, 1, 0]),
        torch.tensor([1.0, 1, 1, 1, math.nan]),
    ):
        with pytest.raises(QuantizationError, match="not a scale for this group"):
            rescale_(net, hidden, bad)
    with pytest.raises(QuantizationError, match="it is the model's output"):
        rescale_(net, output, torch.ones(2))
    (removable, _) = channel_groups(net, [net.example])
    with pytest.raises(
        QuantizationError, match='channel_groups\\(..., purpose="rescale"\\)'
    ):
        rescale_(net, removable, torch.ones(5))
    (tied, *_) = channel_groups(nets.Gated(), [nets.Gated.example], purpose="rescale")
    assert "embed.weight is read in several ways" in str(why_not_rescalable(tied))
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_objects_stay_the_same() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    kept = [id(p) for p in net.parameters()]
    equalise_(net, [torch.rand(2, 3)])
    assert [id(p) for p in net.parameters()] == kept
