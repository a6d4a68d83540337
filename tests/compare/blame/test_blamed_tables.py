"""Tables of constants: which of two programs' are the same, and which differ."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from roundoff.compare.blame.blamed_tables import blamed_table
from roundoff.compare.ports.port_results import outputs
from roundoff.compare.values.value_regions import parted


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {
    "query": drawn(6, 6, seed=1),
    "key": drawn(6, 6, seed=2),
    "far": drawn(6, 6, seed=3),
    "last": drawn(4, 6, seed=4),
}
X = drawn(5, 6, seed=5) * 0.5


def reference(m, x):
    q, k = F.linear(x, m.query), F.linear(x, m.key)
    angles = torch.outer(torch.arange(4, -1, -1.0), torch.tensor([1.0, 0.3, 0.1]))
    far = F.linear(torch.cat([angles.sin(), angles.cos()], 1), m.far)
    by_place = q @ far.t()
    # row i, column j: the distance i - j stands in column j + 4 - i
    shifted = torch.cat([by_place.new_zeros(5, 1), by_place], 1).view(6, 5)[1:]
    later = torch.ones(5, 5).triu(1).bool()
    score = (q @ k.t() + shifted).masked_fill(later, -torch.inf)
    return torch.tanh(F.softmax(score, 1) @ x) @ m.last.t()


def port(m, x, fault):
    q, k = torch.einsum("nc,dc->nd", x, m.query), torch.einsum("nc,dc->nd", x, m.key)
    angles = torch.arange(5)[:, None] * torch.tensor([1.0, 0.3, 0.1])
    far = torch.cat([torch.sin(angles), torch.cos(angles)], 1) @ m.far.t()
    distance = torch.arange(5)[:, None] - torch.arange(5)
    places = distance.clamp(min=0)
    allowed = distance >= (-1 if fault == "mask" else 0)
    score = torch.einsum("id,jd->ij", q, k)
    score = score + torch.gather(q @ far.t(), 1, places)
    if fault == "scale":
        score = score * 0.5
    score = torch.where(allowed, score, -1e30)
    return torch.tanh(torch.softmax(score, 1) @ x) @ m.last.t()


def blamed(program, sides_of, fault):
    port_ = program(lambda m, x: port(m, x, fault), **LEAVES)
    sides = sides_of(program(reference, **LEAVES), port_, X)
    ours, theirs, phase = outputs(sides)
    part = parted(sides, ours, theirs, phase) if ours and theirs else None
    return None if part is None else blamed_table(sides, part)


def test_the_port_is_right(program, sides_of):
    assert blamed(program, sides_of, "") is None


def test_a_mask_that_differs_is_a_table(program, sides_of):
    found = blamed(program, sides_of, "mask")
    assert found is not None
    assert found.value.operator == "ge"


def test_places_and_the_opposite_of_a_mask_are_none(program, sides_of):
    """Places to look up and what a mask allows stand in no table of the reference."""
    assert blamed(program, sides_of, "scale") is None


def scaled_by_a_tensor(m, x):
    mean, std = torch.tensor(-1.3), torch.tensor(0.7)
    centers = torch.linspace(0, 3, 6)
    near = torch.exp(-0.5 / 0.36 * (F.linear(x, m.query) - centers) ** 2)
    return near @ m.last.t() * std + mean


def with_a_width_of_centers(m, x):
    """Its one tensor of a single element is right; its last number is not."""
    centers = torch.arange(6) * 0.6
    width = centers[1] - centers[0]
    distance = (torch.einsum("nc,dc->nd", x, m.query) - centers) / width
    return torch.exp(-0.5 * distance.square()) @ m.last.t() * 0.9 - 1.3


def test_single_numbers_are_no_tables(program, sides_of):
    leaves = {name: LEAVES[name] for name in ("query", "last")}
    ours = program(scaled_by_a_tensor, **leaves)
    sides = sides_of(ours, program(with_a_width_of_centers, **leaves), X)
    keys, others, phase = outputs(sides)
    part = parted(sides, keys, others, phase)
    assert part is not None
    assert blamed_table(sides, part) is None


def with_channels_last(m, x):
    scale = torch.rsqrt(m.spread + 1e-2)
    x = x.permute(0, 2, 1) * scale
    return torch.clamp(x, min=0).sum(1) @ m.last


def with_channels_first(m, x):
    x = F.batch_norm(x, torch.zeros(6), m.spread, eps=1e-5)
    return F.relu(x).sum(2) @ m.last


def test_a_table_inside_a_call_is_as_long_as_itself(program, sides_of):
    class Spread(torch.nn.Module):
        def __init__(self, work):
            super().__init__()
            self.work = work
            self.register_buffer("spread", drawn(6, seed=7).square() + 0.5)
            self.register_buffer("last", drawn(6, 4, seed=8))

        def forward(self, x):
            return self.work(self, x)

    pictures = drawn(5, 6, 3, seed=9)
    sides = sides_of(Spread(with_channels_first), Spread(with_channels_last), pictures)
    ours, theirs, phase = outputs(sides)
    blamed = blamed_table(sides, parted(sides, ours, theirs, phase))
    assert blamed.value.operator == "add"  # of the epsilon, and not the root of it


def resized(m, x):
    h = F.linear(x, m.query).view(1, 1, 5, 6)
    return F.interpolate(h, size=(10, 13), mode="bilinear").square().mean()


def shares(out, size, corners):
    step = (size - 1) / (out - 1) if corners else size / out
    places = torch.arange(out) * step
    if not corners:
        places = places + (0.5 * step - 0.5)
    below = places.floor()
    low, high = below.clamp(min=0).long(), (below + 1).clamp(max=size - 1).long()
    return low, high, places - below


def by_places(m, x, *, corners):
    h = x @ m.query.t()
    low, high, share = shares(10, 5, corners)
    h = h[low] + (h[high] - h[low]) * share[:, None]
    low, high, share = shares(13, 6, corners)
    h = h[:, low] + (h[:, high] - h[:, low]) * share
    return (h * h).sum() / 130


def test_the_first_wrong_value_of_a_table_is_named(at_fault, blamed_text):
    leaves = {"query": LEAVES["query"]}
    right = at_fault(resized, lambda m, x: by_places(m, x, corners=False), leaves, X)
    assert not right
    [row] = at_fault(resized, lambda m, x: by_places(m, x, corners=True), leaves, X)
    assert blamed_text(row) == "places = torch.arange(out) * step"
