"""CallMode: the operands of a call, their role, and where their values came from."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

X = torch.rand(3, 4)


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(4, 4))
        self.b = nn.Parameter(torch.rand(4))
        self.register_buffer("table", torch.rand(4))


def roles(call):
    return [(o.role, sorted(o.sources)) for o in call.operands]


OWNER = Weights()


@pytest.mark.parametrize(
    ("function", "site", "expected"),
    [
        (
            lambda x: F.linear(x, OWNER.w, OWNER.b),
            "/linear",
            [("activation", []), ("weight", ["w"]), ("bias", ["b"])],
        ),
        (
            lambda x: F.linear(x, weight=OWNER.w, bias=OWNER.b),
            "/linear",
            [("activation", []), ("weight", ["w"]), ("bias", ["b"])],
        ),
        (lambda x: x @ OWNER.w, "/matmul", [("activation", []), ("weight", ["w"])]),
        (lambda x: x @ OWNER.w.t(), "/matmul", [("activation", []), ("weight", ["w"])]),
        (
            lambda x: x @ OWNER.w[:, 1:],
            "/matmul",
            [("activation", []), ("weight", ["w"])],
        ),
        (lambda x: OWNER.w @ x.T, "/matmul", [("weight", ["w"]), ("activation", [])]),
        (
            lambda x: torch.addmm(OWNER.b, x, OWNER.w),
            "/addmm",
            [("bias", ["b"]), ("activation", []), ("weight", ["w"])],
        ),
        (
            lambda x: torch.einsum("ij,kj->ik", x, OWNER.w),
            "/einsum",
            [("activation", []), ("weight", ["w"])],
        ),
        (
            lambda x: F.linear(x, OWNER.w * 2.0),
            "/linear",
            [("activation", []), ("activation", ["/mul"])],
        ),
        (lambda x: x + OWNER.b, "/add", [("activation", []), ("weight", ["b"])]),
        (lambda x: x + OWNER.table, "/add", [("activation", []), ("activation", [])]),
        (
            lambda x: F.layer_norm(x, (4,), OWNER.b, OWNER.b),
            "/layer_norm",
            [("activation", []), ("weight", ["b"]), ("weight", ["b"])],
        ),
        (
            lambda x: F.embedding(torch.tensor([1]), OWNER.w),
            "/embedding",
            [("weight", ["w"])],
        ),
        (
            lambda x: torch.where(x > 0, x, OWNER.b).sin(),
            "/sin",
            [("activation", ["", "b"])],
        ),  # mixed with the input
        (
            lambda x: torch.where(x > 0, torch.zeros_like(x), OWNER.b).sin(),
            "/sin",
            [("weight", ["b"])],
        ),
        (
            lambda x: (OWNER.w + torch.zeros(4)).sin(),
            "/add",
            [("weight", ["w"]), ("activation", [])],
        ),
        (
            lambda x: F.linear(x, OWNER.w, x.sin()[0]),
            "/linear",
            [("activation", []), ("weight", ["w"]), ("bias", ["/sin"])],
        ),
        (lambda x: x * 2.0, "/mul", [("activation", [])]),
        (
            lambda x: x * torch.tensor(2.0),
            "/mul",
            [("activation", [])],
        ),  # a 0-dim tensor is a scalar factor
        (
            lambda x: F.batch_norm(x, OWNER.table, OWNER.table.abs(), OWNER.b, OWNER.b),
            "/batch_norm",
            [("activation", []), ("weight", ["b"]), ("weight", ["b"])],
        ),  # running statistics stay as they are kept
        (
            lambda x: F.scaled_dot_product_attention(
                x, x, x, attn_mask=torch.zeros(3, 3)
            ),
            "/scaled_dot_product_attention",
            [("activation", [])] * 3,
        ),  # a mask is not rounded
    ],
)
def test_roles_and_sources(seen, function, site, expected):
    assert roles(seen(function, X, owner=OWNER).call(site)) == expected


@pytest.mark.parametrize(
    "move",
    [
        lambda y: y.view(4, 3).T,
        lambda y: y[..., None].squeeze(-1),
        lambda y: torch.cat([y[:1], y[1:]]),
        lambda y: y.chunk(3)[0],
        lambda y: F.dropout(y, 0.1, training=False),
        lambda y: y.detach().clone(),
        lambda y: y.to(torch.float64).float(),
        lambda y: y.masked_fill(y > 2, 0.0),
        lambda y: F.pad(y, (0, 1)),
        lambda y: y.contiguous().unbind(0)[1],
        lambda y: torch.stack(y.split(1)),
        lambda y: y.flatten().unflatten(0, (3, 4)),
        lambda y: torch.cat([y, torch.zeros(1, 4)]),  # zeros are exact in every format
        lambda y: torch.where(y > 0, y, y.new_ones(4)),
    ],
)
def test_sources_pass_through_views_and_copies(seen, move):
    found = seen(lambda x: move(x.sin()).cos(), X)
    assert roles(found.call("/cos")) == [("activation", ["/sin"])]


def test_sources_of_values_that_meet_are_united(seen):
    found = seen(lambda x: torch.cat([x.sin(), x.cos()]).exp(), X)
    assert roles(found.call("/exp")) == [("activation", ["/cos", "/sin"])]


@pytest.mark.parametrize(
    "mix",
    [
        lambda y, x: torch.cat([y, x]),
        lambda y, x: torch.stack([x, y]),
        lambda y, x: torch.where(y > 0, y, torch.full_like(y, 0.1)),
        lambda y, x: torch.cat([y, torch.rand(1, 4)]),
        lambda y, x: torch.cat([y, torch.tensor([[0.1, 0.2, 0.3, 0.4]])]),
        lambda y, x: torch.cat([y, torch.arange(4)[None] / 3]),
    ],
)
def test_values_from_outside_that_are_mixed_in_are_remembered(seen, mix):
    """Or else a format would be thought to hold them already, because the operator ``sin`` ends in it."""
    found = seen(lambda x: mix(x.sin(), x).exp(), X)
    assert roles(found.call("/exp")) == [("activation", ["", "/sin"])]


@pytest.mark.parametrize(
    "draw",
    [torch.rand_like, torch.bernoulli, lambda y: F.dropout(y, 0.5, training=True)],
)
def test_random_values_come_from_nowhere(seen, draw):
    found = seen(lambda x: draw(x.sin().square()).exp(), X)
    assert roles(found.call("/exp")) == [("activation", [])]


def test_a_written_slice_adds_its_source(seen):
    def f(x):
        y = x.sin()
        y[:, :1] = x.cos()[:, :1]
        return y.exp()

    assert roles(seen(f, X).call("/exp")) == [("activation", ["/cos", "/sin"])]


def test_an_in_place_operator_is_the_new_source(seen):
    def f(x):
        y = x.sin()
        y *= 3.0
        return y.exp()

    found = seen(f, X)
    assert roles(found.call("/mul")) == [("activation", ["/sin"])]
    assert roles(found.call("/exp")) == [("activation", ["/mul"])]


def test_a_write_through_a_view_reaches_the_whole_tensor(seen):
    def f(x):
        y = x.sin()
        y[:, :2].mul_(3.0)
        return y.exp()

    # part of y now ends in the format of mul, so both are where its values come from
    assert "/mul" in roles(seen(f, X).call("/exp"))[0][1]


def test_a_slice_of_an_input_that_was_written_keeps_the_input_in_mind(seen):
    def f(x):
        y = x.clone()
        y[:, :2].copy_(x[:, :2].sin())
        return y.exp()

    assert roles(seen(f, X).call("/exp")) == [("activation", ["", "/sin"])]


def test_each_output_of_an_operator_has_its_source(seen):
    def f(x):
        values, _ = x.sin().max(dim=-1)
        return values.exp()

    found = seen(f, X)
    assert found.names == ["/sin", "/max", "/exp"]
    assert roles(found.call("/exp")) == [("activation", ["/max"])]


def test_tied_weights_have_one_name(seen):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    found = seen(Tied(), torch.tensor([1, 2]))
    assert roles(found.call("embed/embedding")) == [("weight", ["embed.weight"])]
    assert roles(found.call("head/linear")) == [
        ("activation", ["embed/embedding"]),
        ("weight", ["embed.weight"]),
    ]


def test_sources_are_forgotten_between_forward_passes(seen):
    kept = []

    def f(x):
        if not kept:
            kept.append(x.sin())
        return kept[0].cos()

    found = seen(f, X)
    found.mode.begin()
    with found.mode:
        f(X)
    first, second = (c for c in found.calls if c.operator.name == "cos")
    assert roles(first) == [("activation", ["/sin"])]
    assert roles(second) == [("activation", [])]  # a constant of this pass


def test_packed_and_plain_sequences_have_the_same_operands(seen):
    lstm = nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True)
    x = torch.rand(2, 5, 4)
    plain = seen(lstm, x).call("/lstm")
    packed = nn.utils.rnn.pack_padded_sequence(
        x, torch.tensor([5, 3]), batch_first=True
    )
    other = seen(lstm, packed).call("/lstm")
    weights = [
        (o.role, sorted(o.sources)) for o in plain.operands if o.role != "activation"
    ]
    assert [
        (o.role, sorted(o.sources)) for o in other.operands if o.role != "activation"
    ] == weights
    assert {name for role, (name,) in weights if role == "weight"} == {
        n for n, _ in lstm.named_parameters() if n.startswith("weight")
    }
    assert {name for role, (name,) in weights if role == "bias"} == {
        n for n, _ in lstm.named_parameters() if n.startswith("bias")
    }
    assert [o.role for o in plain.operands].count(
        "activation"
    ) == 3  # input and both initial states


def test_a_call_keeps_enough_to_run_again_on_other_values(seen):
    found = seen(
        lambda x: F.conv1d(x[None], torch.ones(2, 3, 1), stride=2).add_(1.0), X
    )
    call = found.call("/add")
    before = call.leaves[0].clone()
    again = call.again([torch.zeros_like(before), *call.leaves[1:]])
    assert torch.equal(again, torch.ones_like(before))
    assert torch.equal(call.leaves[0], before)
