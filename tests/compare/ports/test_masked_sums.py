"""A loss over places of a batch: a mask that is forgotten, a value that is mistaken where the
places stand in another order, a mask that grows where it should shrink, a scale of a whole
sum."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {"score": drawn(3, 5, seed=1), "box": drawn(4, 5, seed=2)}
X = drawn(4, 9, 5, seed=3)
IS_THERE = torch.rand(4, 9, generator=torch.Generator().manual_seed(4)) < 0.6
BOXES = drawn(4, 9, 4, seed=5).exp()


def giou(a, b):
    inter = torch.minimum(a, b)
    inter = (inter[:, 0] + inter[:, 2]) * (inter[:, 1] + inter[:, 3])
    area_a = (a[:, 0] + a[:, 2]) * (a[:, 1] + a[:, 3])
    area_b = (b[:, 0] + b[:, 2]) * (b[:, 1] + b[:, 3])
    union = area_a + area_b - inter
    hull = torch.maximum(a, b)
    hull = (hull[:, 0] + hull[:, 2]) * (hull[:, 1] + hull[:, 3])
    return inter / union - (hull - union) / hull


def reference(m, x):
    scores, boxes = torch.zeros(2)
    count = 0
    for sample, there, wanted in zip(x, IS_THERE, BOXES, strict=True):
        far = F.softplus(F.linear(sample[there], m.score)).sum()
        scores = scores + far
        made = F.linear(sample[there], m.box).exp()
        boxes = boxes + (1 - giou(made, wanted[there])).sum()
        count += int(there.sum())
    return (scores + boxes) / count


def port(m, x, fault):
    """Places first."""
    mask = IS_THERE.t().float()
    x = x.transpose(0, 1)
    far = torch.log1p(torch.exp(x @ m.score.t())).sum(-1)
    scores = torch.sum(far) if fault == "mask" else torch.sum(far * mask)
    index = torch.nonzero(mask.flatten()).squeeze(1)
    made = torch.exp(x.reshape(-1, 5).index_select(0, index) @ m.box.t())
    wanted = BOXES.transpose(0, 1).reshape(-1, 4).index_select(0, index)
    left, top, right, bottom = made.unbind(1)
    to_left, to_top, to_right, to_bottom = wanted.unbind(1)
    area = (left + right) * (top + bottom)
    area_wanted = (to_left + to_right) * (to_top + to_bottom)
    width = torch.minimum(left, to_left) + torch.minimum(right, to_right)
    height = torch.minimum(top, to_top) + torch.minimum(bottom, to_bottom)
    union = area + area_wanted - width * height
    wide = torch.maximum(left, to_left) + torch.maximum(right, to_right)
    high = torch.maximum(top, to_top) + torch.maximum(bottom, to_bottom)
    hull = wide * high
    excess = (hull - union) / (union if fault == "hull" else hull)
    boxes = 1.0 - (width * height / union - excess)
    return (scores + boxes.sum()) / mask.sum()


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("", ""),
        ("mask", "scores = torch.sum(far)"),
        ("hull", "excess = (hull - union)"),
    ],
)
def test_the_line_of_a_term_is_named(at_fault, blamed_text, fault, text):
    rows = at_fault(reference, lambda m, x: port(m, x, fault), LEAVES, X)
    assert len(rows) == bool(fault)
    assert all(text in blamed_text(row) for row in rows)


KNOWN = torch.rand(2, 1, 8, 9, generator=torch.Generator().manual_seed(6)) < 0.8
KERNEL = {"kernel": drawn(2, 3, 3, 3, seed=7) * 0.3}
PICTURES = drawn(2, 3, 8, 9, seed=8)


def inside(m, x):
    weight = -F.max_pool2d(-KNOWN.float(), 3, stride=1, padding=1)
    x = F.conv2d(x, m.kernel, padding=1).square().sum(1, keepdim=True)
    return (torch.sqrt(x + 1e-3) * weight).sum() / weight.sum()


def eroded(known, fault):
    pair = torch.maximum if fault else torch.minimum
    x = F.pad(known, (1, 1, 1, 1), value=1.0)
    x = pair(pair(x[:, :, :-2], x[:, :, 1:-1]), x[:, :, 2:])
    return pair(pair(x[..., :-2], x[..., 1:-1]), x[..., 2:])


def by_shifts(m, x, fault):
    weight = eroded(KNOWN.float(), fault)
    x = F.pad(x, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
    x = torch.einsum("nchwij,ocij->nohw", x, m.kernel)
    length = torch.sqrt((x**2).sum(1, keepdim=True) + 1e-3)
    return torch.sum(length * weight) / torch.sum(weight)


def test_weights_without_a_sign_agree(at_fault):
    assert not at_fault(inside, lambda m, x: by_shifts(m, x, False), KERNEL, PICTURES)


def test_a_mask_that_grows_is_named_on_the_lines_that_make_it(at_fault, blamed_text):
    found = at_fault(inside, lambda m, x: by_shifts(m, x, True), KERNEL, PICTURES)
    [row] = found
    assert "pair(pair(x" in blamed_text(row), row.evidence


SCALED = {
    "mix": drawn(5, 5, seed=9) * 0.5,
    "gamma": drawn(5, seed=10) * 0.3,
    "leave": drawn(3, 5, seed=11),
}


def scaled_branch(m, x):
    x = x + m.gamma * F.linear(x, m.mix)
    return F.linear(torch.tanh(x), m.leave).square().mean()


def scaled_sum(m, x, fault):
    branch = x @ m.mix.t()
    x = (x + branch) * m.gamma if fault else x + branch * m.gamma
    return ((2 * torch.sigmoid(2 * x) - 1) @ m.leave.t()).square().mean()


@pytest.mark.parametrize("fault", [False, True])
def test_a_scale_of_the_whole_sum_is_named(at_fault, blamed_text, fault):
    rows = at_fault(scaled_branch, lambda m, x: scaled_sum(m, x, fault), SCALED, X)
    assert len(rows) == fault
    for row in rows:
        assert "x = (x + branch) * m.gamma" in blamed_text(row)
        assert "of one term of add alone" in row.evidence
