"""A loss over rows one by one, and over all at once, without an optimizer behind it."""

from __future__ import annotations

import linecache

import pytest
import torch
import torch.nn.functional as F

import roundoff


def drawn(*shape, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * scale


LEAVES = {
    "a": drawn(8, 6, seed=1, scale=0.5),
    "b": drawn(4, 8, seed=2, scale=0.4),
    "c": drawn(5, 8, seed=3, scale=0.4),
}
X = drawn(7, 6, seed=4)
PLACES = drawn(9, 4, seed=5).abs() + 0.5
KINDS = torch.tensor([0, 3, 1, 4, 2, 2, 0])


def one_by_one(m, x, places, kinds):
    """Each row has its own number of places, of which the nearest counts."""
    kind_loss, place_loss = torch.zeros(()), torch.zeros(())
    for number, (row, kind) in enumerate(zip(x, kinds, strict=True)):
        h = torch.tanh(F.linear(row, m.a))
        apart = (places[: 3 + number % 3] - row[:4]).square().sum(1)
        goal = (places[apart.argmin()] - row[:4]) / places[0]
        place_loss = place_loss + F.smooth_l1_loss(
            F.linear(h, m.b), goal, beta=0.2, reduction="sum"
        )
        p = torch.sigmoid(F.linear(h, m.c))
        is_kind = F.one_hot(kind, 5).float()
        weight = 0.25 * is_kind + 0.75 * (1 - is_kind)
        right = p * is_kind + (1 - p) * (1 - is_kind)
        kind_loss = kind_loss - (weight * (1 - right) ** 2 * right.log()).sum()
    return (kind_loss + 0.5 * place_loss) / len(x)


def at_once(alpha, names="abc"):
    def run(m, x, places, kinds):
        a, b, c = (getattr(m, name) for name in names)
        h = 2 * torch.sigmoid(2 * x @ a.t()) - 1
        centre = x[:, None, :4]
        apart = ((places - centre) ** 2).sum(2)
        there = torch.arange(len(places)) < (3 + torch.arange(len(x)) % 3)[:, None]
        nearest = torch.where(there, apart, torch.inf).argmin(1)
        goal = (places[nearest] - x[:, :4]) / places[:1]
        diff = (h @ b.t() - goal).abs()
        place = torch.where(diff < 0.2, 0.5 * diff * diff / 0.2, diff - 0.5 * 0.2)
        logits = h @ c.t()
        label = torch.eye(5)[kinds]
        positive = -alpha * torch.sigmoid(-logits) ** 2 * F.logsigmoid(logits)
        negative = -(1 - alpha) * torch.sigmoid(logits) ** 2 * F.logsigmoid(-logits)
        kind = torch.where(label > 0, positive, negative)
        return kind.sum() / len(x) + place.sum() * 0.5 / len(x)

    return run


@pytest.fixture
def compared(program, tmp_path):
    """``compared(names, alpha)``: the gradients of one batch, and no update of them."""

    def recorded(folder, function, names):
        leaves = dict(zip(names, LEAVES.values(), strict=True))
        net = program(function, **leaves)
        with roundoff.capture(tmp_path / folder, net, keep="tensors"):
            net(X, PLACES, KINDS).backward()
        return tmp_path / folder

    def compare(names, alpha):
        reference = recorded("reference", one_by_one, "abc")
        candidate = recorded("candidate", at_once(alpha, names), names)
        return roundoff.compare(reference=reference, candidate=candidate)

    return compare


def text(culprit):
    return linecache.getline(__file__, int(culprit.line.rpartition(":")[2]))


@pytest.mark.parametrize("names", ["abc", "uvw"])
def test_the_right_loss_agrees(compared, names):
    assert compared(names, 0.25).agrees


def test_gradients_that_no_optimizer_reads_are_compared_in_other_portions(compared):
    comparison = compared("abc", 0.75)
    assert not comparison.agrees
    assert "logsigmoid" in text(comparison.culprits()[0])
