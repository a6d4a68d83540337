"""What is cut out of pictures by lists of places, one of them too far to the right."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {"a": drawn(3, 6, seed=1), "c": drawn(6, 2, seed=2)}
PICTURES = torch.randint(
    0, 255, (4, 9, 12, 3), generator=torch.Generator().manual_seed(3)
).to(torch.uint8)


def reference(m, x):
    x = x.permute(0, 3, 1, 2).float() / 255
    x = (x[:, :, 2:7, 2:9] - 0.45) / 0.22
    return (torch.relu(x.permute(0, 2, 3, 1) @ m.a) @ m.c).square().mean()


def places(size, crop, start):
    first = (size - crop) // 2 if start is None else start
    return torch.arange(first, first + crop)


def cropped(m, x, start=None):
    rows, columns = places(9, 5, None), places(12, 7, start)
    x = x[:, rows[:, None], columns[None, :]]
    x = (x.float() - 0.45 * 255) / (0.22 * 255)
    return ((torch.relu(x @ m.a) @ m.c) ** 2).mean()


def test_the_port_is_right(at_fault):
    assert not at_fault(reference, cropped, LEAVES, PICTURES)


def test_places_that_begin_one_too_late_are_named(at_fault, blamed_text):
    [row] = at_fault(reference, lambda m, x: cropped(m, x, 3), LEAVES, PICTURES)
    assert "one earlier" in row.evidence
    assert blamed_text(row) == "x = x[:, rows[:, None], columns[None, :]]"


def in_time(m, x, table):
    return torch.tanh(x @ m.a + table) @ m.c


def angles(first):
    places = torch.arange(float(first), first + 7.0)[:, None]
    return torch.sin(places * torch.pow(100.0, -torch.arange(6) / 6.0))


def test_places_that_are_counted_from_one_are_named(at_fault, blamed_text):
    x = drawn(4, 7, 3, seed=4)
    leaves = {**LEAVES, "table": angles(0)}

    def learnt(m, x):
        return in_time(m, x, m.table.detach()).square().mean()

    def computed(first):
        return lambda m, x: (in_time(m, x, angles(first)) ** 2).mean()

    assert not at_fault(learnt, computed(0), leaves, x)
    [row] = at_fault(learnt, computed(1), leaves, x)
    assert "from 0 on, not 1" in row.evidence
    assert blamed_text(row).startswith("places = torch.arange(")


TOKENS = torch.randint(0, 2, (4, 9), generator=torch.Generator().manual_seed(5))


def of_the_next(m, x):
    logits = (torch.tanh(x @ m.a) @ m.c)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())


def rolled(m, x, shift=-1):
    logits = torch.tanh(x @ m.a) @ m.c
    labels = torch.roll(TOKENS, shift, 1)
    picked = logits.gather(-1, labels[..., None])[:, :-1, 0]
    return (torch.logsumexp(logits, -1)[:, :-1] - picked).mean()


def test_labels_that_are_rolled_the_other_way_are_named(at_fault, blamed_text):
    x = drawn(4, 9, 3, seed=6)
    assert not at_fault(of_the_next, rolled, LEAVES, x)
    [row] = at_fault(of_the_next, lambda m, x: rolled(m, x, 1), LEAVES, x)
    assert "rolled by -1, not 1" in row.evidence
    assert blamed_text(row) == "labels = torch.roll(TOKENS, shift, 1)"
