"""Sequences of several lengths: what stands in padding, or is left out there, is no fault."""

from __future__ import annotations

import itertools
import linecache

import pytest
import torch
import torch.nn.functional as F

import roundoff
from roundoff.compare.judging.explain import RecordedStep
from roundoff.compare.records.recorded_rows import rows_of
from roundoff.compare.values.padded_rows import (
    kept_rows,
    kept_values,
    padding_masks,
)
from roundoff.compare.values.value_flow import flow_of
from roundoff.record import StepTensors


def drawn(*shape, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * scale


LEAVES = {
    "a": drawn(8, 6, seed=1, scale=0.5),
    "q": drawn(8, 8, seed=2, scale=0.6),
    "b": drawn(5, 8, seed=3, scale=0.5),
}
#: Values of two programs in fp32 that are alike lie nearer.
LIMIT = 1e-4
LENGTHS = torch.tensor([7, 4, 5])
MASK = torch.arange(7) < LENGTHS[:, None]
X = drawn(3, 7, 6, seed=4)
Y = drawn(3, 7, 5, seed=5)


def scores(m, h):
    return (h @ m.q) @ h.transpose(1, 2) / 8**0.5


def padded(m, x, y, mask):
    """Attention in each sequence; the mean of the errors in its places."""
    h = torch.tanh(F.linear(x, m.a))
    s = scores(m, h).masked_fill(~mask[:, None, :], -1e9)
    h = h + s.softmax(-1) @ h
    error = (F.linear(h, m.b) - y).square().mean(-1)
    return (error * mask).sum() / mask.sum()


def packed(m, x, y, mask):
    """All sequences behind each other; the same numbers in the places that there are."""
    x, y = x[mask], y[mask]
    sequence = mask.nonzero()[:, 0]
    h = 2 * torch.sigmoid(2 * torch.einsum("ni,oi->no", x, m.a)) - 1
    s = torch.einsum("ni,ij,mj->nm", h, m.q, h) / 8**0.5
    s = torch.where(sequence[:, None] == sequence, s, -1e9)
    h = torch.einsum("nm,mj->nj", torch.exp(s - s.logsumexp(1, keepdim=True)), h) + h
    return ((torch.einsum("ni,oi->no", h, m.b) - y) ** 2).mean()


def of_other_padding(m, x, y, mask):
    """What stands in the padding is a number of its own after each layer."""
    h = 2 * torch.sigmoid(2 * torch.einsum("bti,oi->bto", x, m.a)) - 1
    h = torch.where(mask[..., None], h, 0.3)
    s = torch.einsum("bti,ij,bsj->bts", h, m.q, h) / 8**0.5
    s = torch.where(mask[:, None, :], s, -1e9)
    weights = torch.exp(s - s.logsumexp(-1, keepdim=True))
    h = torch.einsum("bts,bsj->btj", weights, h) + h
    h = torch.where(mask[..., None], h, -0.7)
    error = ((torch.einsum("bti,oi->bto", h, m.b) - y) ** 2).sum(-1) / 5
    return torch.where(mask, error, 0.0).sum() / mask.sum()


def packed_and_wrong(m, x, y, mask):
    """``packed`` with scores of another scale."""
    x, y = x[mask], y[mask]
    sequence = mask.nonzero()[:, 0]
    h = 2 * torch.sigmoid(2 * torch.einsum("ni,oi->no", x, m.a)) - 1
    s = torch.einsum("ni,ij,mj->nm", h, m.q, h) / 6**0.5
    s = torch.where(sequence[:, None] == sequence, s, -1e9)
    h = torch.einsum("nm,mj->nj", torch.exp(s - s.logsumexp(1, keepdim=True)), h) + h
    return ((torch.einsum("ni,oi->no", h, m.b) - y) ** 2).mean()


def attends_to_padding(m, x, y, mask):
    """``of_other_padding`` without the mask of the scores."""
    h = 2 * torch.sigmoid(2 * torch.einsum("bti,oi->bto", x, m.a)) - 1
    h = torch.where(mask[..., None], h, 0.3)
    s = torch.einsum("bti,ij,bsj->bts", h, m.q, h) / 8**0.5
    weights = torch.exp(s - s.logsumexp(-1, keepdim=True))
    h = torch.einsum("bts,bsj->btj", weights, h) + h
    error = ((torch.einsum("bti,oi->bto", h, m.b) - y) ** 2).sum(-1) / 5
    return torch.where(mask, error, 0.0).sum() / mask.sum()


def summed(m, x, y, mask):
    """What packed places give, summed in each sequence."""
    h = torch.tanh(F.linear(x[mask], m.a))
    e = torch.exp(F.linear(torch.tanh(F.linear(h, m.q)), m.b))
    sums = torch.zeros(3, 5).index_add(0, mask.nonzero()[:, 0], e)
    return (sums.log() - y[:, 0]).square().mean()


def summed_with_padding(m, x, y, mask):
    """``summed`` over all places, as what stands in the padding was made zero before."""
    h = torch.tanh(torch.einsum("bti,oi->bto", x, m.a)) * mask[..., None]
    h = torch.tanh(torch.einsum("bti,oi->bto", h, m.q))
    e = torch.exp(torch.einsum("bti,oi->bto", h, m.b))
    return (e.sum(1).log() - y[:, 0]).square().mean()


def shifted(m, x, y, mask):
    """Packed places through a layer whose activation is moved to go through zero."""
    h = F.softplus(F.linear(x[mask], m.a)) - 0.7
    e = torch.tanh(F.linear(h, m.q)) @ m.b.t()
    sums = torch.zeros(3, 5).index_add(0, mask.nonzero()[:, 0], e)
    return (sums - y[:, 0]).square().mean()


def not_shifted(m, x, y, mask):
    """``shifted`` over padded places, and not moved."""
    h = torch.log(1 + torch.exp(torch.einsum("bti,oi->bto", x, m.a)))
    e = torch.einsum("bti,oi->bto", h, m.q).tanh()
    e = torch.einsum("bti,oi->bto", e, m.b) * mask[..., None]
    return (e.sum(1) - y[:, 0]).square().mean()


def filled_up(m, x, y, mask):
    """``padded`` in sequences of eight places."""
    more = (0, 0, 0, 1)
    return padded(m, F.pad(x, more), F.pad(y, more), F.pad(mask, (0, 1)))


def in_seven_places(m, x, y, mask, scale=8**-0.5):
    """``padded`` by another hand."""
    h = 2 * torch.sigmoid(2 * torch.einsum("bti,oi->bto", x, m.a)) - 1
    s = torch.einsum("bti,ij,bsj->bts", h, m.q, h) * scale
    s = torch.where(mask[:, None, :], s, -1e9)
    h = (
        torch.einsum("bts,bsj->btj", torch.exp(s - s.logsumexp(-1, keepdim=True)), h)
        + h
    )
    error = ((torch.einsum("bti,oi->bto", h, m.b) - y) ** 2).sum(-1) / 5
    return torch.where(mask, error, 0.0).sum() / mask.sum()


def in_seven_places_and_wrong(m, x, y, mask):
    return in_seven_places(m, x, y, mask, scale=6**-0.5)


@pytest.fixture
def recorded(program, tmp_path):
    """``recorded(function)``: the folder of a recorded step with its backward pass."""
    numbers = itertools.count()

    def record(function, mask=MASK):
        net = program(function, **LEAVES)
        folder = tmp_path / str(next(numbers))
        with roundoff.capture(folder, net, keep="tensors") as run:
            net(X, Y, mask).backward()
            run.step()
        return folder

    return record


@pytest.fixture
def flow(recorded):
    """``flow(function)``: the values of a recorded step."""

    def values(function, mask=MASK):
        run = roundoff.load(recorded(function, mask))
        step = RecordedStep(rows_of(run, 0, 0), StepTensors(run, 0, 0))
        return flow_of(step)

    return values


def text(line):
    return linecache.getline(__file__, int(line.rpartition(":")[2])).strip()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (padded, packed),
        (packed, padded),
        (padded, of_other_padding),
    ],
)
@pytest.mark.parametrize("tensors", [True, False])
def test_padding_is_no_difference(recorded, ours, theirs, tensors):
    comparison = roundoff.compare(
        reference=recorded(ours), candidate=recorded(theirs), tensors=tensors
    )
    assert comparison.agrees


def test_a_fault_among_packed_places_is_named(recorded):
    comparison = roundoff.compare(
        reference=recorded(padded), candidate=recorded(packed_and_wrong)
    )
    assert not comparison.agrees
    assert "/ 6**0.5" in text(comparison.culprits()[0].line)


def test_places_that_a_gradient_reaches_count(flow):
    ours = flow(padded)
    [mask] = padding_masks(ours, flow(packed), LIMIT)
    assert torch.equal(mask, MASK)
    assert padding_masks(ours, flow(attends_to_padding), LIMIT) == ()


def test_padding_that_counts_by_a_fault_is_padding(flow, recorded):
    ours, theirs = flow(summed), flow(summed_with_padding)
    [mask] = padding_masks(ours, theirs, LIMIT)
    assert torch.equal(mask, MASK)
    comparison = roundoff.compare(
        reference=recorded(summed), candidate=recorded(summed_with_padding)
    )
    assert "e.sum(1)" in text(comparison.culprits()[0].line)


def test_padding_may_have_another_length_on_each_side(flow, recorded):
    masks = padding_masks(flow(filled_up), flow(in_seven_places_and_wrong), LIMIT)
    assert {tuple(mask.shape) for mask in masks} == {(3, 7), (3, 8)}
    right = roundoff.compare(
        reference=recorded(filled_up), candidate=recorded(in_seven_places)
    )
    assert right.agrees


def test_what_is_left_out_among_padded_places_is_named(recorded):
    comparison = roundoff.compare(
        reference=recorded(shifted), candidate=recorded(not_shifted)
    )
    first = comparison.culprits()[0]
    assert "left out is sub" in first.evidence
    assert "h = torch.log(1 + torch.exp(" in text(first.line)


def without(m, x, y, outside):
    """``padded``, told what is left out."""
    h = torch.tanh(F.linear(x, m.a))
    s = scores(m, h).masked_fill(outside[:, None, :], -1e9)
    h = h + s.softmax(-1) @ h
    error = (F.linear(h, m.b) - y).square().mean(-1)
    return error.masked_fill(outside, 0.0).sum() / LENGTHS.sum()


def test_what_is_left_out_is_a_mask_as_well(flow):
    ours = flow(without, ~MASK)
    [mask] = padding_masks(ours, ours, LIMIT)
    assert torch.equal(mask, MASK)


def after_many_tables(m, x, y, mask):
    """``padded``, behind more tables of zeros and ones than masks are tried."""
    for place in range(20):
        F.one_hot(torch.tensor([place, 3]), 24).float().sum()
    return padded(m, x, y, mask)


def test_tables_of_other_places_are_no_masks(flow):
    ours = flow(after_many_tables)
    [mask] = padding_masks(ours, ours, LIMIT)
    assert torch.equal(mask, MASK)


def test_padding_that_is_read_is_a_difference(recorded):
    comparison = roundoff.compare(
        reference=recorded(padded), candidate=recorded(attends_to_padding)
    )
    assert not comparison.agrees


def test_kept_values_are_those_of_a_program_without_padding(flow):
    ours, theirs = flow(padded), flow(packed)
    hidden = torch.tanh(X @ LEAVES["a"].T)[MASK]
    wanted = hidden.flatten().sort().values.double().numpy()
    masks = padding_masks(ours, theirs, LIMIT)
    sketches = [kept.sketch for kept in kept_values(ours, masks)]
    near = [s for s in sketches if s.numel == hidden.numel() and s.exact]
    assert min(abs(s.values - wanted).max() for s in near) < 1e-6


def test_a_mask_keeps_places_of_its_own_axes():
    rows = torch.arange(21.0)[:, None]
    [kept] = kept_rows(rows, MASK)
    assert torch.equal(kept, rows[MASK.flatten()])
    assert not list(kept_rows(torch.zeros(21), MASK))
    assert not list(kept_rows(torch.zeros(5, 3, 7), MASK))


def test_places_stand_behind_heads():
    heads = drawn(3, 2, 7, 4, seed=6)
    [kept] = kept_rows(heads, MASK)
    assert torch.equal(kept, heads.transpose(1, 2)[MASK])
    scores = drawn(3, 2, 7, 7, seed=7)
    queries, keys = kept_rows(scores, MASK)
    assert torch.equal(queries, scores.permute(0, 2, 1, 3)[MASK])
    assert torch.equal(keys, scores.permute(0, 3, 1, 2)[MASK])


def test_a_table_of_places_is_the_same_in_all_sequences():
    table = drawn(7, 4, seed=8)
    [kept] = kept_rows(table, MASK)
    assert torch.equal(kept, torch.cat([table[:n] for n in LENGTHS.tolist()]))


def test_a_mask_of_pairs_keeps_those_of_the_first_axes():
    pairs = drawn(3, 7, 7, 2, seed=9)
    near = drawn(3, 7, 7, seed=10) > 0.5
    [kept] = kept_rows(pairs, near)
    assert torch.equal(kept, pairs[near])
    assert not list(kept_rows(pairs[:, :, :, 0].transpose(0, 1), near))


NODES = drawn(6, 3, seed=11)
NEAR = (torch.cdist(NODES, NODES) < 2) & ~torch.eye(6, dtype=torch.bool)


def by_edges(m, x, y, mask):
    """Messages of the edges, which stand in a list, are summed for each node."""
    to, source = NEAR.nonzero().T
    far = (NODES[to] - NODES[source]).norm(dim=1, keepdim=True)
    sent = torch.tanh(F.linear(x.view(21, 6)[source], m.a)) * torch.exp(-far)
    h = torch.zeros(6, 8).index_add(0, to, sent)
    return F.mse_loss(F.linear(h, m.b), y.view(21, 5)[:6])


def by_all_pairs(m, x, y, mask, of_scale=1.0):
    """All pairs have a message, and those without an edge weigh nothing."""
    apart = ((NODES[:, None] - NODES[None]) ** 2).sum(-1).clamp(min=1e-4).sqrt()
    weight = torch.where(NEAR, torch.exp(-apart * of_scale), 0.0)
    sent = torch.einsum("ni,oi->no", x.view(21, 6)[:6], m.a)
    sent = (2 * torch.sigmoid(2 * sent) - 1)[None] * weight[..., None]
    y = y.view(21, 5)[:6]
    return ((torch.einsum("ijo,po->ip", sent, m.b) - y) ** 2).mean()


def test_pairs_without_an_edge_are_no_difference(recorded):
    comparison = roundoff.compare(
        reference=recorded(by_edges), candidate=recorded(by_all_pairs)
    )
    assert comparison.agrees


def test_a_fault_of_all_pairs_is_named(recorded):
    def wrong(m, x, y, mask):
        return by_all_pairs(m, x, y, mask, of_scale=0.8)

    comparison = roundoff.compare(
        reference=recorded(by_edges), candidate=recorded(wrong)
    )
    assert "of_scale" in text(comparison.culprits()[0].line)


def of_empty_mask(m, x, y, mask):
    none = (x[:0, :, :1] > 0).expand(0, 7, 7)
    return padded(m, x, y, mask) + none.sum()


def test_a_table_without_elements_is_no_mask(flow):
    ours, theirs = flow(of_empty_mask), flow(packed)
    [mask] = padding_masks(ours, theirs, LIMIT)
    assert mask.tolist() == MASK.tolist()
