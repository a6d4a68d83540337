"""A loop over examples of different lengths, where the port takes all of them at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {"deltas": drawn(6, 4, seed=1)}
FEATURES = drawn(3, 9, 6, seed=2)
#: How many of the anchors of each picture have a box.
COUNTS = torch.tensor([9, 2, 5])
ANCHORS = drawn(9, 2, seed=3).repeat(1, 2) + torch.tensor([0.0, 0.0, 3.0, 4.0])
BOXES = ANCHORS + 0.3 * drawn(3, 9, 4, seed=4)
SCALES = (10.0, 10.0, 5.0, 5.0)


def encode(boxes, anchors):
    sides, anchor_sides = boxes[:, 2:] - boxes[:, :2], anchors[:, 2:] - anchors[:, :2]
    centre = boxes[:, :2] + sides / 2
    anchor_centre = anchors[:, :2] + anchor_sides / 2
    shift = (centre - anchor_centre) / anchor_sides
    return torch.cat([shift, torch.log(sides / anchor_sides)], 1) * torch.tensor(SCALES)


def reference(m, features, counts):
    total = torch.zeros(())
    predicted = torch.tanh(features @ m.deltas)
    for each, boxes, count in zip(predicted, BOXES, counts.tolist(), strict=True):
        codes = encode(boxes[:count], ANCHORS[:count])
        total = total + F.smooth_l1_loss(each[:count], codes, reduction="sum")
    return total / counts.sum()


def bbox2delta(src, tgt, one):
    src_w = src[:, 2] - src[:, 0] + one
    src_h = src[:, 3] - src[:, 1] + one
    src_x = src[:, 0] + 0.5 * src_w
    src_y = src[:, 1] + 0.5 * src_h
    tgt_w = tgt[:, 2] - tgt[:, 0] + one
    tgt_h = tgt[:, 3] - tgt[:, 1] + one
    tgt_x = tgt[:, 0] + 0.5 * tgt_w
    tgt_y = tgt[:, 1] + 0.5 * tgt_h
    dx = 10 * (tgt_x - src_x) / src_w
    dy = 10 * (tgt_y - src_y) / src_h
    dw = 5 * torch.log(tgt_w / src_w)
    dh = 5 * torch.log(tgt_h / src_h)
    return torch.stack((dx, dy, dw, dh), dim=-1)


def port(*, one=0, straight=0.5):
    """``one``: both ends of a side count; ``straight``: what the loss lies lower by."""

    def run(m, features, counts):
        there = torch.arange(9) < counts[:, None]
        codes = bbox2delta(ANCHORS.expand(3, 9, 4)[there], BOXES[there], one)
        apart = (torch.tanh(features @ m.deltas)[there] - codes).abs()
        bent = 0.5 * apart * apart
        each = torch.where(apart < 1, bent, apart - straight)
        return each.sum() / counts.sum()

    return run


@pytest.fixture
def own(at_fault):
    """``own(port)``: the rows at fault of a port."""
    return lambda port: at_fault(reference, port, LEAVES, FEATURES, COUNTS)


def test_the_port_is_right(own):
    assert not own(port())


def test_a_number_that_the_reference_does_not_have_is_named(own, blamed_text):
    """Four sums with it are wrong; all that follows their codes is right."""
    [row] = own(port(one=1))
    assert blamed_text(row).startswith("src_w = ")
    assert "it takes 1, which is no number of the reference's" in row.evidence


def test_a_loss_after_what_agrees_in_turns(own, blamed_text):
    [row] = own(port(straight=0.25))
    assert blamed_text(row) == "each = torch.where(apart < 1, bent, apart - straight)"


LABELS = torch.randint(4, (3, 9), generator=torch.Generator().manual_seed(5))


def classifier(m, features, counts):
    total = torch.zeros(())
    for logits, labels, count in zip(
        features @ m.deltas, LABELS, counts.tolist(), strict=True
    ):
        classes = torch.zeros_like(logits)
        classes[torch.arange(count), labels[:count]] = 1.0
        each = F.binary_cross_entropy_with_logits(logits, classes, reduction="none")
        # anchors behind the boxes are ignored, but for the last
        kept = torch.arange(9) != count
        total = total + each[kept].sum()
    return total / counts.sum()


#: A class of the reference by the port's number.
TURNED = torch.tensor([2, 0, 3, 1])


def classifier_port(*, background=4, is_turned=False):
    def run(m, features, counts):
        places = torch.arange(9).expand(3, 9)
        known = TURNED[LABELS] if is_turned else LABELS
        labels = torch.where(places < counts[:, None], known, background)
        one_hot = F.one_hot(labels, 5)[..., :4].float()
        logits = features @ m.deltas
        each = torch.clamp(logits, min=0) - logits * one_hot
        each = each + torch.log1p(torch.exp(-logits.abs()))
        kept = places != counts[:, None]
        return (each * kept[:, :, None]).sum() / counts.sum()

    return run


@pytest.fixture
def own_class(program, step_of):
    """``own_class(port)``: the rows at fault of a port of the classifier."""

    def compare(port):
        sides = Sides(
            step_of(program(classifier, **LEAVES), FEATURES, COUNTS),
            step_of(program(port, **LEAVES), FEATURES, COUNTS),
        )
        rows = compare_port(sides, EarlierSteps())
        return [row for row in rows if row.cause == "own"]

    return compare


def test_right_classes(own_class):
    assert not own_class(classifier_port())


def test_the_background_has_a_class_of_the_others(own_class, blamed_text):
    """All is right once it is a number; of the places the first is named."""
    [row] = own_class(classifier_port(background=0))
    assert blamed_text(row).startswith("labels = torch.where(places < counts[:, None]")
    assert "with index_put of" in row.evidence


def test_classes_in_another_order(own_class, blamed_text):
    [row] = own_class(classifier_port(is_turned=True))
    assert blamed_text(row) == "known = TURNED[LABELS] if is_turned else LABELS"
