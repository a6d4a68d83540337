"""Channel groups of networks whose dependencies are known by construction; removal checked against masked networks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from roundoff.errors import QuantizationError, WorkloadError
from roundoff.quantize.channels.groups import ChannelGroup, channel_groups


def told(group: ChannelGroup) -> tuple[int, str, str]:
    """Size, producers and consumers as text."""
    producers, consumers = (
        " ".join(
            f"{b.name}:{b.axis}" + (f"/{b.groups}" if b.groups > 1 else "")
            for b in side
        )
        for side in (group.producers, group.consumers)
    )
    return (group.size, producers, consumers)


def groups(net: Any, purpose: str = "remove") -> list[ChannelGroup]:
    return channel_groups(net(), [net.example], purpose=purpose)


# Read off the definitions in channel_nets.py, by hand.
REMOVE = {
    "Residual": [
        (4, "stem.weight:0", "c1.weight:1 down.weight:1"),
        (6, "c1.weight:0", "c2.weight:1"),
        (8, "c2.weight:0 down.weight:0 d2.weight:0", "d1.weight:1 fc.weight:1"),
        (5, "d1.weight:0", "d2.weight:1"),
    ],
    "Dense": [
        (3, "a.weight:0", "b.weight:1 c.weight:1 fc.weight:1"),
        (4, "b.weight:0", "c.weight:1 fc.weight:1"),
        (5, "c.weight:0", "fc.weight:1"),
    ],
    "Inverted": [
        (4, "stem.weight:0 m.6.weight:0", "m.0.weight:1 fc.weight:1"),
        (12, "m.0.weight:0 m.3.weight:0", "m.3.weight:0 m.6.weight:1"),
    ],
    "Grouped": [(4, "a.weight:0", "g.weight:1/2"), (6, "g.weight:0", "c.weight:1")],
    "UNet": [
        (3, "down1.weight:0", "down2.weight:1 out.weight:1"),
        (5, "down2.weight:0", "up.weight:0"),
        (4, "up.weight:1", "out.weight:1"),
    ],
    "Transformer": [(16, "up.weight:0", "down.weight:1")],
    "Gated": [(10, "gate_up.weight:0", "down.weight:1")],
    "Twice": [(5, "a.weight:0 shared.weight:0", "shared.weight:1 b.weight:1")],
    "Branching": [(5, "a.weight:0", "c.weight:1")],
    "Gate": [
        (6, "a.weight:0 up.weight:0", "down.weight:1 b.weight:1"),
        (3, "down.weight:0", "up.weight:1"),
    ],
    "HardCoded": [(4, "a.weight:0", "fc.weight:1"), (6, "fc.weight:0", "out.weight:1")],
    # pixel_shuffle makes one channel of four; a shuffle of channels into a grouped convolution ties all six
    "Pixels": [
        (2, "a.weight:0", "b.weight:1"),
        (1, "b.weight:0", "c.weight:1/2"),
        (3, "c.weight:0", "d.weight:1"),
    ],
}
RESCALE = {
    "Inverted": [
        (4, "stem.weight:0 m.6.weight:0", "m.0.weight:1 fc.weight:1"),
        (12, "m.0.weight:0", "m.3.weight:0"),
        (12, "m.3.weight:0", "m.6.weight:1"),
    ],
    "Grouped": [(8, "a.weight:0", "g.weight:1/2"), (12, "g.weight:0", "c.weight:1")],
    "Transformer": [
        (8, "embed.weight:0 o.weight:0 down.weight:0", "head.weight:1"),
        (8, "n1.weight:0", "q.weight:1 k.weight:1 v.weight:1"),
        (8, "n2.weight:0", "up.weight:1"),
        (8, "v.weight:0", "o.weight:1"),
        (16, "up.weight:0", "down.weight:1"),
    ],
    # the head reads the table that makes the embedding: what divides one multiplies the other
    "Gated": [
        (6, "norm.weight:0", "gate_up.weight:1"),
        (10, "gate_up.weight:0", "down.weight:1"),
    ],
    "Gate": [
        (6, "a.weight:0", "down.weight:1 b.weight:1"),
        (3, "down.weight:0", "up.weight:1"),
    ],
}


@pytest.mark.parametrize("name", REMOVE)
def test_the_groups_to_remove(nets, name: str) -> None:
    assert [told(g) for g in groups(getattr(nets, name)) if g.pinned is None] == REMOVE[
        name
    ]


@pytest.mark.parametrize("name", RESCALE)
def test_the_groups_to_rescale(nets, name: str) -> None:
    found = groups(getattr(nets, name), "rescale")
    assert [told(g) for g in found if g.pinned is None] == RESCALE[name]


def test_flatten_gives_each_channel_its_places_of_the_linear_layer(nets) -> None:
    group = groups(nets.Residual)[2]
    (fc,) = [b for b in group.consumers if b.name == "fc.weight"]
    assert fc.index.tolist() == [
        [4 * c, 4 * c + 1, 4 * c + 2, 4 * c + 3] for c in range(8)
    ]


def test_a_concatenation_binds_each_part_at_its_offset(nets) -> None:
    a, b, c, _ = groups(nets.Dense)
    places = {
        x.name: x.index.flatten().tolist()
        for g in (a, b, c)
        for x in g.consumers
        if x.name == "fc.weight"
    }
    assert places == {"fc.weight": [0, 1, 2, 3, 4]}  # the last: c stands first
    assert [x.index.flatten().tolist() for x in a.consumers] == [
        [0, 1, 2],
        [0, 1, 2],
        [5, 6, 7],
    ]
    assert [x.index.flatten().tolist() for x in b.consumers] == [
        [3, 4, 5, 6],
        [8, 9, 10, 11],
    ]


def test_pixel_shuffle_ties_the_pixels_of_a_channel(nets) -> None:
    group = groups(nets.Pixels)[0]
    assert group.producers[0].index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [b.name for b in group.passers] == ["a.bias", "prelu.weight"]


def test_a_grouped_convolution_ties_one_place_of_every_group(nets) -> None:
    first, second, _ = groups(nets.Grouped)
    assert first.producers[0].index.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert second.producers[0].index.tolist() == [[i, i + 6] for i in range(6)]


def test_the_halves_of_a_chunk_leave_together(nets) -> None:
    group = next(g for g in groups(nets.Gated) if g.size == 10)
    assert group.producers[0].index.tolist() == [[i, i + 10] for i in range(10)]


def test_statistics_and_biases_pass_with_their_channels(nets) -> None:
    group = groups(nets.Residual)[1]
    assert [(b.name, b.part) for b in group.passers] == [
        ("c1.bias", "bias"),
        ("b1.weight", "batch_norm"),
        ("b1.bias", "batch_norm"),
        ("b1.running_mean", "batch_norm"),
        ("b1.running_var", "batch_norm"),
    ]
    token = next(g for g in groups(nets.Transformer) if "embed.weight" in told(g)[1])
    assert [(b.name, b.axis) for b in token.passers if b.name in ("cls", "pos")] == [
        ("cls", 2),
        ("pos", 2),
    ]


def test_operators_say_whether_they_pass_a_factor_on(nets) -> None:
    laws = {
        p.operator: (p.law, p.bounds)
        for g in groups(nets.Inverted, "rescale")
        for p in g.operators
    }
    assert laws["hardtanh"] == ("clipped", (0.0, 6.0))
    assert laws["add"] == laws["adaptive_avg_pool2d"] == ("homogeneous", None)
    assert {
        p.operator: p.law for p in groups(nets.Transformer, "rescale")[-2].operators
    } == {"gelu": "other"}


PINS = {
    "Transformer": {
        "n1/layer_norm": "runs over its channels",
        "(/view)": "split into parts by view",
    },
    "Gated": {"norm/rms_norm": "runs over its channels"},
}


@pytest.mark.parametrize("name", PINS)
def test_pins_say_why_and_where(nets, name: str) -> None:
    reasons = [g.pinned or "" for g in groups(getattr(nets, name))]
    for where, why in PINS[name].items():
        assert any(where in r and why in r for r in reasons)
    assert "it is the model's output" in reasons


class Odd(nn.Module):
    """What happens between two linear layers is an argument."""

    def __init__(self, between: object) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(3, 6), nn.Linear(6, 2), between
        self.other, self.gain = nn.Linear(3, 6), nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.between(self, self.a(x), x))


ODD = {
    "cumsum": (
        lambda m, h, x: h.cumsum(1),
        "what cumsum (/cumsum) does to channels is not known",
    ),
    "softmax": (
        lambda m, h, x: h.softmax(-1),
        "softmax (/softmax) runs over its channels",
    ),
    "sum": (
        lambda m, h, x: h * h.sum(1, keepdim=True),
        "sum (/sum) runs over its channels",
    ),
    "sort": (lambda m, h, x: h.sort(1)[0], "sort moves values by size"),
    "constant": (
        lambda m, h, x: h + torch.arange(6.0),
        "meets a tensor of fixed size in add (/add)",
    ),
    "input": (
        lambda m, h, x: h + x.repeat(1, 2),
        "meets a tensor of fixed size in add (/add)",
    ),
    "slice": (
        lambda m, h, x: F.pad(h[:, 2:], (1, 1)),
        "cut at a fixed place by getitem (/getitem)",
    ),
    "reshape": (
        lambda m, h, x: h.view(-1, 2, 3).transpose(1, 2).reshape(-1, 6),
        "split into parts by view (/view)",
    ),
    "permuted": (
        lambda m, h, x: h[:, torch.tensor([1, 0, 2, 3, 5, 4])],
        "cut at a fixed place by getitem (/getitem)",
    ),
    "argmax": (
        lambda m, h, x: h * h.argmax(1, keepdim=True),
        "argmax (/argmax) compares its values",
    ),
    "numpy": (
        lambda m, h, x: h + float(h.tolist()[0][0]),
        "its values leave torch by tolist (/tolist)",
    ),
    "own weight": (
        lambda m, h, x: h * (m.other.weight * 2).sum(1),
        "meets a tensor of fixed size in mul (/mul#1)",
    ),
    "written": (lambda m, h, x: _written(h), "cut at a fixed place"),
}


def _written(h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    h[:, 1].fill_(0.0)
    return h


@pytest.mark.parametrize("name", ODD)
def test_what_is_not_known_is_pinned(name: str) -> None:
    between, reason = ODD[name]
    net = Odd(between)
    (hidden,) = {
        g.pinned
        for g in channel_groups(net, [torch.rand(2, 3)])
        if g.producers[0].name == "a.weight"
    }
    assert hidden is not None
    assert reason in hidden


FINE = {
    "functional residual": lambda m, h, x: F.relu(h) + m.other(x),
    "in place": lambda m, h, x: torch.relu_(h).add_(m.other(x)),
    "where": lambda m, h, x: torch.where(h > 0, h, m.other(x)),
    "gain": lambda m, h, x: h * m.gain,
    "roundtrip": lambda m, h, x: h.t().contiguous().t()[None].squeeze(0),
    "dropout": lambda m, h, x: F.dropout(h, 0.5, m.training),
    "scalar": lambda m, h, x: 2 * h.double().float() - 1,
    "assembled": lambda m, h, x: torch.stack([h, m.other(x)]).sum(0),
}


@pytest.mark.parametrize("name", FINE)
def test_ordinary_code_is_followed(name: str) -> None:
    found = channel_groups(Odd(FINE[name]), [torch.rand(2, 3)])
    (hidden,) = [g for g in found if g.producers[0].name in ("a.weight", "gain")]
    assert hidden.pinned is None
    assert hidden.size == 6
    assert any(b.name == "b.weight" and b.axis == 1 for b in hidden.consumers)


def test_a_batch_of_one_and_another_size_give_the_same_groups(nets) -> None:
    net = nets.UNet()
    small, large = (
        channel_groups(net, [torch.rand(*shape)])
        for shape in ((1, 1, 4, 4), (3, 1, 10, 8))
    )
    assert [told(g) for g in small] == [told(g) for g in large]


def test_branches_that_only_some_batches_take_are_united(nets) -> None:
    net = nets.Branching()
    found = channel_groups(net, [torch.ones(2, 3), -torch.ones(2, 3)])
    assert [told(g) for g in found if g.pinned is None] == [
        (5, "a.weight:0 b.weight:0", "c.weight:1 out.weight:1")
    ]


def test_attention_of_torch_is_pinned_and_its_output_projection_followed() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.m, self.b = (
                nn.Linear(3, 8),
                nn.MultiheadAttention(8, 2, batch_first=True),
                nn.Linear(8, 2),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            return self.b(self.m(x, x, x, need_weights=False)[0])

    found = {g.name: g for g in channel_groups(Net(), [torch.rand(2, 4, 3)])}
    assert found["m.in_proj_weight"].pinned is not None
    assert found["m.out_proj.weight"].pinned is None
    assert told(found["a.weight"]) == (8, "a.weight:0", "m.in_proj_weight:1")


def test_the_model_is_left_as_it_was(nets) -> None:
    net = nets.Residual().train()
    before = {n: t.clone() for n, t in net.state_dict().items()}
    channel_groups(net, [net.example])
    assert net.training
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_bad_arguments(nets) -> None:
    net = nets.Twice()
    with pytest.raises(WorkloadError):
        channel_groups(net, [])
    with pytest.raises(QuantizationError, match="expected: remove or rescale"):
        channel_groups(net, [net.example], purpose="prune")


class Pooled(nn.Module):
    """Rows of one graph are added up by a store."""

    example = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
        self.store = store

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.store(self.a(x)))


STORES = {
    "index_put": lambda h: h.new_zeros(2, 4).index_put(
        (torch.arange(6) // 3,), h, accumulate=True
    ),
    "index_put_": lambda h: h.new_zeros(2, 4).index_put_(
        (torch.arange(6) // 3,), h, True
    ),
    "put_": lambda h: h.new_zeros(2, 4).put_(
        torch.arange(24) % 8, h.flatten(), accumulate=True
    ),
}


@pytest.mark.parametrize("name", STORES)
def test_channels_that_a_store_adds_up_are_pinned(name: str) -> None:
    """Labels are names, not numbers: the sum of two is none."""
    pooled = channel_groups(Pooled(STORES[name]), [Pooled.example], purpose="rescale")
    (group,) = (g for g in pooled if g.producers[0].name == "a.weight")
    assert group.size == 4
    assert name.rstrip("_") in str(group.pinned)
