"""Removed channels: the smaller network computes what the whole one does when the channels are zero."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from roundoff.errors import QuantizationError
from roundoff.quantize.channels.groups import channel_groups
from roundoff.quantize.sparsity import model_cost
from roundoff.quantize.sparsity.channels import prune_channels_
from roundoff.quantize.sparsity.importance import taylor_importance

NAMES = "Residual Dense Inverted Grouped UNet Transformer Gated Twice Branching Gate Pixels".split()


def silenced(net: nn.Module, x: torch.Tensor) -> dict[str, list[int]]:
    """Make the first half of the channels of every free group zero: all that makes them, or has a value for them."""
    named = dict(net.named_parameters())
    found = {}
    for group in channel_groups(net, [x]):
        half = round(group.size / 2)
        if group.pinned is None and half:
            found[group.name] = list(range(half))
            for binding in (*group.producers, *group.passers):
                if binding.part != "slope" and binding.name in named:
                    places = binding.index[:half].flatten()
                    named[binding.name].data.index_fill_(binding.axis, places, 0.0)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_zero_channels_go_and_the_output_stays(nets, name: str) -> None:
    torch.manual_seed(7)
    kind = getattr(nets, name)
    net, x = kind().double().eval(), kind.example
    x = x.double() if x.is_floating_point() else x
    expected = silenced(net, x)
    before, whole = net(x).detach(), model_cost(net, x)
    rows = prune_channels_(net, [x], ratio=0.5)
    # l2 importance is 0 for them alone (depthwise rows count too)
    assert {r.group: r.removed.tolist() for r in rows if len(r.removed)} == expected
    after = model_cost(net, x)
    assert after.macs < whole.macs
    assert after.bytes < whole.bytes
    # float64; the same products summed in another order: fewer than 200 in fewer than 8 layers of size-1 weights
    torch.testing.assert_close(
        net(x).detach(),
        before,
        rtol=0.0,
        atol=1e-12 * max(1.0, float(before.abs().max())),
    )


def test_attributes_and_shapes_shrink(nets) -> None:
    net = nets.Inverted()
    prune_channels_(net, [net.example], ratio=0.5)
    depthwise = net.m[3]
    assert (depthwise.in_channels, depthwise.out_channels, depthwise.groups) == (
        6,
        6,
        6,
    )
    assert depthwise.weight.shape == (6, 1, 3, 3)
    assert (
        net.m[1].num_features == len(net.m[1].running_mean) == len(net.m[1].weight) == 6
    )
    assert (net.m[6].in_channels, net.m[6].out_channels) == (6, 2)
    assert (net.fc.in_features, net.fc.out_features) == (2, 2)
    assert net(net.example).shape == (2, 2)
    copy.deepcopy(net).train()(net.example).sum().backward()


def test_grouped_and_transposed_attributes(nets) -> None:
    grouped = nets.Grouped()
    prune_channels_(grouped, [grouped.example], ratio=0.5)
    assert (grouped.g.in_channels, grouped.g.out_channels, grouped.g.groups) == (
        4,
        6,
        2,
    )
    assert grouped.g.weight.shape == (6, 2, 3, 3)
    unet = nets.UNet()
    prune_channels_(unet, [unet.example], ratio=0.5)
    assert (unet.up.in_channels, unet.up.out_channels, unet.up.weight.shape) == (
        3,
        2,
        (3, 2, 2, 2),
    )
    assert unet.out.in_channels == 1 + 2


def test_code_that_holds_a_size_is_found_and_left(nets) -> None:
    net = nets.HardCoded()
    first = {k: v.clone() for k, v in net.state_dict().items() if k.startswith("a.")}
    rows = {r.group: r for r in prune_channels_(net, [net.example], ratio=0.5)}
    assert rows["a.weight"].reason.startswith("the code depends on its size")
    assert rows["fc.weight"].after == 3
    assert all(torch.equal(v, net.state_dict()[k]) for k, v in first.items())
    assert net(net.example).shape == (2, 2)


def test_the_balanced_l2_rule(nets) -> None:
    """Norms over the other axes, scaled to 0..1 for each weight, added over the weights; keep n - round(n r), up to a
    multiple: written again in numpy."""
    torch.manual_seed(2)
    net = nets.Residual(norm=False)
    weights = [net.c2.weight, net.down.weight, net.d2.weight]
    total = np.zeros(8)
    for weight in weights:
        norm = np.sqrt((weight.detach().double().numpy().reshape(8, -1) ** 2).sum(1))
        total += (norm - norm.min()) / (norm.max() - norm.min())
    rows = {
        r.group: r
        for r in prune_channels_(copy.deepcopy(net), [net.example], ratio=0.4)
    }
    assert rows["c2.weight"].removed.tolist() == sorted(
        np.argsort(total)[: round(8 * 0.4)].tolist()
    )
    rows = {
        r.group: r for r in prune_channels_(net, [net.example], ratio=0.4, multiple=4)
    }
    assert [(r.before, r.after) for r in rows.values()] == [
        (4, 4),
        (6, 4),
        (8, 8),
        (5, 4),
        (3, 3),
    ]


def test_batch_norm_importance() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)
    ).eval()
    net[1].weight.data = torch.tensor([0.5, -0.1, 0.2, -3.0])
    rows = prune_channels_(
        net, [torch.rand(1, 1, 2, 2)], ratio=0.5, importance="batch_norm"
    )
    assert rows[0].removed.tolist() == [1, 2]


def test_taylor_importance_is_the_sum_over_weights_of_the_product_with_the_gradient() -> (
    None
):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    batches = [
        (torch.randn(5, 3, dtype=torch.float64), torch.randint(2, (5,)))
        for _ in range(2)
    ]
    forward, loss = (lambda m, b: m(b[0])), (lambda out, b: F.cross_entropy(out, b[1]))
    expected = torch.zeros(4, dtype=torch.float64)
    for x, y in batches:
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        expected += (net[0].weight * net[0].weight.grad).abs().sum(1).detach() / 2
        expected += (net[2].weight * net[2].weight.grad).abs().sum(0).detach() / 2
    net.zero_grad()
    group, _ = channel_groups(net, batches, forward=forward)
    found = taylor_importance(net, batches, loss, forward=forward)(group)
    torch.testing.assert_close(
        found, expected, rtol=1e-13, atol=0.0
    )  # the same sums of ten products, in float64
    assert all(p.grad is None for p in net.parameters())


def test_a_target_of_multiply_accumulates_is_met_and_not_overshot(nets) -> None:
    class Wide(nn.Module):
        example = torch.zeros(1, 1, 8, 8)

        def __init__(self) -> None:
            super().__init__()
            self.m = nn.Sequential(
                nn.Conv2d(1, 16, 3),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3),
                nn.ReLU(),
                nn.Conv2d(32, 4, 3),
            )

        def forward(self, x):
            return self.m(x)

    for scope in ("group", "global"):
        net = Wide()
        whole = model_cost(net, net.example).macs
        prune_channels_(net, [net.example], macs=0.5, scope=scope)
        # one more channel of the widest layer is 1/16 of the MACs or less
        assert 0.5 - 1 / 12 < model_cost(net, net.example).macs / whole <= 0.5
    with pytest.raises(
        QuantizationError, match="cannot leave only 0.001 of the multiply-accumulates"
    ) as error:
        prune_channels_(net, [net.example], macs=0.001)
    assert "with one channel left in each of 2 groups (1 groups are pinned)" in str(
        error.value
    )


def test_an_importance_of_the_caller_and_ignored_weights(nets) -> None:
    net = nets.Residual()
    rows = prune_channels_(
        net,
        [net.example],
        ratio=0.5,
        importance=lambda g: -torch.arange(g.size).float(),
        ignored=["stem.*"],
    )
    assert [r.reason for r in rows if r.reason] == [
        "ignored by stem.*",
        "it is the model's output",
    ]
    assert {r.group: r.removed.tolist() for r in rows}["c1.weight"] == [3, 4, 5]


def test_rows_for_what_no_batch_reached(nets) -> None:
    rows = prune_channels_(nets.Branching(), [nets.Branching.example], ratio=0.2)
    assert {r.group for r in rows if r.reason.startswith("no batch reached it")} == {
        "b.weight",
        "out.weight",
    }


def test_bad_arguments_leave_the_model(nets) -> None:
    net = nets.Residual()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    x = net.example
    for arguments, message in (
        ({}, "how much is to be removed"),
        ({"ratio": 0.1, "macs": 0.5}, "got: both"),
        ({"ratio": 1.0}, "0 <= ratio < 1"),
        ({"macs": 0.0}, "0 < macs <= 1"),
        ({"ratio": 0.1, "multiple": 0}, "multiple"),
        ({"ratio": 0.1, "scope": "all"}, "group or global"),
        ({"ratio": 0.1, "importance": "size"}, "unknown importance"),
        (
            {"ratio": 0.1, "importance": "batch_norm"},
            "no BatchNorm scales this group's channels",
        ),
        (
            {"ratio": 0.1, "importance": lambda g: torch.full((g.size,), float("nan"))},
            "not an importance for this group",
        ),
    ):
        with pytest.raises(QuantizationError, match=message):
            prune_channels_(net, [x], **arguments)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_one_channel_is_always_left() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    prune_channels_(net, [torch.rand(1, 3)], ratio=0.99)
    assert net[0].out_features == net[2].in_features == 1


def test_shared_weights_stay_shared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.out = (
                nn.Linear(3, 4),
                nn.Linear(4, 4),
                nn.Linear(4, 4),
                nn.Linear(4, 2),
            )
            self.c.weight = self.b.weight

        def forward(self, x):
            return self.out(self.c(self.b(self.a(x))))

    net = Tied()
    prune_channels_(net, [torch.rand(1, 3)], ratio=0.5)
    assert net.c.weight is net.b.weight
    assert net.b.weight.shape == (2, 2)
    assert len(net.c.bias) == 2
