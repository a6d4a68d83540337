"""Faults of a recurrent cell that a port writes out: its gates, and the order of its words."""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import (
    pack_padded_sequence,
    pad_packed_sequence,
    pad_sequence,
)


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SAMPLES, WORDS, WIDTH, HIDDEN = 3, 7, 5, 6
LENGTHS = torch.tensor([7, 4, 6])
MASK = torch.arange(WORDS) < LENGTHS[:, None]
LSTM = torch.nn.LSTM(WIDTH, HIDDEN, batch_first=True)
X = drawn(SAMPLES, WORDS, WIDTH, seed=1)
#: Rows of the gates in PyTorch's order: in, forget, cell, out.
IN, FORGET, CELL, OUT = drawn(4, HIDDEN, WIDTH + HIDDEN, seed=2).mul(0.6).unbind()
BIASES = drawn(4, HIDDEN, seed=3).mul(0.5)
BEHIND = drawn(4, HIDDEN, seed=5).mul(0.5)
HEAD = drawn(HIDDEN, 4, seed=4)
ROWS = torch.cat([IN, FORGET, CELL, OUT])
REFERENCE = {
    "w": ROWS[:, :WIDTH].contiguous(),
    "u": ROWS[:, WIDTH:].contiguous(),
    "b": BIASES.reshape(-1),
    "c": BEHIND.reshape(-1),
    "head": HEAD,
}


def states(m, x):
    """PyTorch's own cell, over samples that are packed."""
    parameters = {
        "weight_ih_l0": m.w,
        "weight_hh_l0": m.u,
        "bias_ih_l0": m.b,
        "bias_hh_l0": m.c,
    }
    packed = pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False)
    out, _ = torch.func.functional_call(LSTM, parameters, (packed,))
    return pad_packed_sequence(out, batch_first=True, total_length=WORDS)[0]


def reference(m, x):
    return ((states(m, x) @ m.head).tanh() * MASK[..., None]).square().sum()


def kernel(order):
    """One matrix of inputs and state, a gate after the other; what opens one is taken off."""
    bias = BIASES + BEHIND
    bias[1] -= 1.0
    rows = [(IN, FORGET, CELL, OUT)[gate] for gate in order]
    return {
        "kernel": torch.cat(rows).t().contiguous(),
        "bias": torch.cat([bias[gate] for gate in order]),
        "head": HEAD,
    }


def stepped(m, x, cell):
    h = c = x.new_zeros(SAMPLES, HIDDEN)
    outs = []
    for word in x.unbind(1):
        h, c = cell(m, torch.cat([word, h], 1), c)
        outs.append(h)
    return torch.stack(outs, 1)


def loss(m, outs):
    return ((outs @ m.head).tanh() * MASK[..., None]).square().sum()


def right_cell(m, inputs, c):
    i, j, f, o = (inputs @ m.kernel + m.bias).chunk(4, 1)
    c = torch.sigmoid(f + 1.0) * c + torch.sigmoid(i) * torch.tanh(j)
    return torch.sigmoid(o) * torch.tanh(c), c


def closed_cell(m, inputs, c):
    i, j, f, o = (inputs @ m.kernel + m.bias).chunk(4, 1)
    f = torch.sigmoid(f)
    c = f * c + torch.sigmoid(i) * torch.tanh(j)
    return torch.sigmoid(o) * torch.tanh(c), c


def port(m, x):
    return loss(m, stepped(m, x, right_cell))


def closed(m, x):
    return loss(m, stepped(m, x, closed_cell))


ORDER = (0, 2, 1, 3)


def test_the_port_is_right(at_fault):
    assert not at_fault(reference, port, REFERENCE, X, others=kernel(ORDER))


def test_a_gate_that_is_not_opened(at_fault, blamed_text):
    [row] = at_fault(reference, closed, REFERENCE, X, others=kernel(ORDER))
    assert "with 1 added to what it reads" in row.evidence
    assert blamed_text(row) == "f = torch.sigmoid(f)"


def test_gates_in_the_order_of_the_reference(at_fault, blamed_text):
    kept = kernel((0, 1, 2, 3))
    [row] = at_fault(reference, port, REFERENCE, X, others=kept)
    assert row.name in ("kernel", "bias") or ".chunk(4, 1)" in blamed_text(row)


def backward(m, x):
    """Each sample is read from its last word to the first."""
    words = [each[:length].flip(0) for each, length in zip(x, LENGTHS, strict=True)]
    return reference(m, pad_sequence(words, batch_first=True))


def within_lengths(m, x):
    mask = places_inside(x)
    lengths = mask.sum(1, keepdim=True)
    places = torch.arange(WORDS)
    index = torch.where(mask, lengths - 1 - places, places)
    return loss(m, stepped(m, x[torch.arange(SAMPLES)[:, None], index], right_cell))


def places_inside(x):
    return MASK & x[..., 0].isfinite()


def with_padding(m, x):
    mask = places_inside(x)
    places = torch.arange(WORDS)
    index = (WORDS - 1 - places).expand(mask.shape)
    return loss(m, stepped(m, x[torch.arange(SAMPLES)[:, None], index], right_cell))


def test_padding_is_not_turned_with_the_words(at_fault, blamed_text):
    others = kernel(ORDER)
    assert not at_fault(backward, within_lengths, REFERENCE, X, others=others)
    [row] = at_fault(backward, with_padding, REFERENCE, X, others=others)
    assert "turned round within the length of each sample" in row.evidence
    assert "index = (WORDS - 1 - places)" in blamed_text(row)


def of_all_states(m, x):
    """What each turn gives beside its state is read behind the loop."""
    h, outs = x.new_zeros(SAMPLES, HIDDEN), []
    for word in x.unbind(1):
        seen = torch.tanh(word @ m.w[:HIDDEN].t())
        h = torch.tanh(seen + h @ m.u[:HIDDEN].t())
        outs.append(torch.stack([seen, h], 1))
    both = torch.stack(outs, 1)
    return (
        ((both[:, :, 0] @ m.head).sin() + both[:, :, 1] @ m.head.exp()).square().mean()
    )


def collected(m, x, later=False):
    h, steps = x.new_zeros(SAMPLES, HIDDEN), []
    for word in torch.einsum("ntd,hd->tnh", x, m.w[:HIDDEN]):
        seen = word.tanh()
        h = (seen + torch.einsum("nh,gh->ng", h, m.u[:HIDDEN])).tanh()
        steps.append((h if later else seen, h))
    firsts, lasts = (torch.stack(each) for each in zip(*steps, strict=True))
    return ((firsts @ m.head).sin() + lasts @ m.head.exp()).square().mean()


def collected_later(m, x):
    return collected(m, x, later=True)


def test_another_value_of_each_turn_is_collected(at_fault, blamed_text):
    assert not at_fault(of_all_states, collected, REFERENCE, X)
    [row] = at_fault(of_all_states, collected_later, REFERENCE, X)
    assert "gives in each turn" in row.evidence
    assert "torch.stack(each)" in blamed_text(row)
