"""A port that is one edit away from its reference: the edit is found, and where it is.

Defaults that were left unsaid, one constant in several places, another half, a call whose
result has another shape.
"""

from __future__ import annotations

import linecache

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {
    "enter": drawn(8, 8, seed=1),
    "mix": drawn(6, 6, seed=2),
    "turn": drawn(4, 4, seed=3),
    "leave": drawn(5, 8, seed=4),
}
X = drawn(6, 8, seed=5) * 0.3


def reference(m, x):
    x = F.layer_norm(F.linear(x, m.enter), (8,), eps=1e-6)
    lower = m.mix * torch.ones(6, 6).tril(-1)
    x = x + lower @ x
    still, moved = x.split(4, 1)
    x = torch.cat([still, F.linear(moved, m.turn)], 1)
    x = F.layer_norm(x, (8,), eps=1e-6)
    return F.linear(x, m.leave)


def port(m, x, fault):
    eps = 1e-2 if fault == "eps" else 1e-6
    x = x @ m.enter.t()
    x = (x - x.mean(-1, True)) / (x.var(-1, correction=0, keepdim=True) + eps).sqrt()
    lower = m.mix.tril() if fault == "diagonal" else m.mix.tril(-1)
    x = lower @ x + x
    moved = x[:, :4] if fault == "half" else x[:, 4:]
    x = torch.cat([x[:, :4], moved @ m.turn.t()], 1)
    x = x - x.mean(-1, True)
    x = x / (x.square().mean(-1, True) + eps).sqrt()
    return x @ m.leave.t()


def named(program, step_of, fault):
    sides = Sides(
        step_of(program(reference, **LEAVES), X, tensors=True),
        step_of(program(lambda m, x: port(m, x, fault), **LEAVES), X, tensors=True),
    )
    rows = compare_port(sides, EarlierSteps())
    return [row for row in rows if row.cause == "own"]


def test_the_port_is_right(program, step_of):
    assert not named(program, step_of, "")


@pytest.mark.parametrize(
    ("fault", "operator", "words"),
    [
        ("eps", "add", "with 1e-06, not 0.01"),
        ("diagonal", "tril", "with -1"),
        ("half", "slice", "from 4 on, not 0"),
    ],
)
def test_the_edit_is_named(program, step_of, fault, operator, words):
    [row] = named(program, step_of, fault)
    assert row.operator.rstrip("_#0123456789") == operator, row.evidence
    assert words in row.evidence


# -- signs and factors, behind products that move their operands many times -------------


def of_waves(m, x):
    waves = torch.fft.rfft(F.linear(x, m.enter)[..., :6])
    mixed = waves * torch.complex(m.turn[0], m.turn[1])
    return torch.tanh(torch.fft.irfft(mixed, 6)) @ m.mix


def of_sines(m, x, fault):
    x = torch.einsum("bi,oi->bo", x, m.enter)[..., :6]
    angle = torch.outer(torch.arange(4.0), torch.arange(6.0)) * (2 * torch.pi / 6)
    twice = torch.tensor([1.0, 2.0, 2.0, 1.0])
    real = torch.einsum("bn,kn->bk", x, angle.cos()) * twice
    imag = torch.einsum("bn,kn->bk", x, angle.sin()) * twice
    if fault != "other sign":
        imag = -imag
    mixed_real = real * m.turn[0] - imag * m.turn[1]
    mixed_imag = real * m.turn[1] + imag * m.turn[0]
    back = torch.einsum("bk,kn->bn", mixed_real, angle.cos())
    back = back - torch.einsum("bk,kn->bn", mixed_imag, angle.sin())
    count = 6**0.5 if fault == "root of the number" else 6
    return torch.einsum("bi,io->bo", torch.tanh(back / count), m.mix)


@pytest.mark.parametrize(
    ("fault", "line", "words"),
    [
        ("other sign", "imag = torch.einsum", "followed by a change of sign"),
        ("root of the number", "back / count", "with 6, not 2.44949"),
    ],
)
def test_a_sign_and_a_factor_are_named(program, step_of, fault, line, words):
    def rows_of(fault):
        ours = step_of(program(of_waves, **LEAVES), X, tensors=True)
        theirs = program(lambda m, x: of_sines(m, x, fault), **LEAVES)
        sides = Sides(ours, step_of(theirs, X, tensors=True))
        rows = compare_port(sides, EarlierSteps())
        return [row for row in rows if row.cause == "own"]

    assert not rows_of("")
    [row] = rows_of(fault)
    number = int(row.blamed_line.rpartition(":")[2])
    assert line in linecache.getline(__file__, number), row.evidence
    assert words in row.evidence


# -- padding ------------------------------------------------------------------------------

KERNELS = {"first": drawn(4, 3, 3, seed=11), "second": drawn(2, 4, 3, seed=12)}
SERIES = drawn(2, 3, 9, seed=13)


def causal(m, x):
    x = torch.tanh(F.conv1d(F.pad(x, (4, 0)), m.first, dilation=2))
    return F.conv1d(F.pad(x, (2, 0)), m.second)


def padded(sides):
    def run(m, x):
        taps = m.first.permute(2, 1, 0)
        long = F.pad(x.transpose(1, 2), (0, 0, *sides))
        parts = [long[:, 2 * tap : 2 * tap + 9] @ taps[tap] for tap in range(3)]
        x = torch.tanh(sum(parts))
        long = F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1)
        return torch.einsum("btcw,kcw->bkt", long, m.second)

    return run


def test_right_padding_is_right(program, step_of):
    ours = step_of(program(causal, **KERNELS), SERIES, tensors=True)
    theirs = step_of(program(padded((4, 0)), **KERNELS), SERIES, tensors=True)
    rows = compare_port(Sides(ours, theirs), EarlierSteps())
    assert not [row for row in rows if row.cause == "own"]


@pytest.mark.parametrize("sides", [(0, 4), (2, 2), (3, 1)])
def test_padding_on_the_wrong_side_is_named(program, step_of, sides):
    ours = step_of(program(causal, **KERNELS), SERIES, tensors=True)
    theirs = step_of(program(padded(sides), **KERNELS), SERIES, tensors=True)
    rows = compare_port(Sides(ours, theirs), EarlierSteps())
    [row] = [row for row in rows if row.cause == "own"]
    assert row.operator == "constant_pad_nd", row.evidence
    assert "with [0, 0, 4, 0]" in row.evidence or "padded before only" in row.evidence


# -- rows that are looked up, sums of all, constants that both have ------------------------

TABLES = {"table": drawn(12, 5, seed=21), "last": drawn(3, 5, seed=22)}
IDS = torch.tensor([[1, 4, 2], [3, 5, 1], [0, 2, 4]])


def looking_up(m, ids):
    x = torch.tanh(F.embedding(ids, m.table[6:]))
    return 0.25 * F.linear(x, m.last).square().mean((1, 2)).sum()


def in_one_table(m, ids, fault):
    start = 5 if fault == "rows" else 6
    x = torch.tanh(m.table.index_select(0, ids.flatten() + start)).view(3, 3, 5)
    x = (x @ m.last.t()).square().mean((1, 2))
    if fault == "mean":
        return x.mean() * 0.25
    return x.sum() * 0.25


@pytest.mark.parametrize(
    ("fault", "words"),
    [("", ""), ("rows", "with 6, not 5"), ("mean", "as sum, not mean")],
)
def test_rows_and_reductions_are_named(at_fault, fault, words):
    rows = at_fault(looking_up, lambda m, x: in_one_table(m, x, fault), TABLES, IDS)
    assert len(rows) == bool(fault)
    assert all(words in row.evidence for row in rows)


# -- brackets in the wrong place ----------------------------------------------------------


SEEN = drawn(6, 8, seed=9) > -0.3


def weighed(m, x):
    said = torch.tanh(F.linear(x, m.enter))
    weights = torch.where(x > 0, 3.0, 1.0)
    off = said - x
    seen = SEEN
    cost = weights * (off.square() + 0.5 * off.abs())
    return cost.masked_fill(~seen, 0).sum() / seen.sum()


def weighed_in_part(m, x):
    seen = SEEN
    off = torch.tanh(x @ m.enter.t())[seen] - x[seen]
    weights = 1 + 2 * (x[seen] > 0).float()
    squares = off * off
    absolute = 0.5 * off.abs()
    total = weights * squares + absolute
    return total.mean()


def test_a_weight_of_all_that_is_one_of_a_part_is_named_where_it_is_read(
    program, step_of
):
    leaves = {"enter": LEAVES["enter"]}
    ours = step_of(program(weighed, **leaves), X, tensors=True)
    theirs = step_of(program(weighed_in_part, **leaves), X, tensors=True)
    rows = compare_port(Sides(ours, theirs), EarlierSteps())
    [row] = [row for row in rows if row.cause == "own"]
    number = int(row.blamed_line.rpartition(":")[2])
    assert "total = weights * squares" in linecache.getline(__file__, number)


# -- reductions: their kind, their order, and how little they may change -------------------


def penalised(m, x):
    said = torch.tanh(F.linear(x, m.enter))
    cost = (said - 3).square().mean()
    size = said.square().mean(1).mean()
    change = (said[1:] - said[:-1]).square().mean(1).mean()
    return cost + 0.1 * size + 1e-4 * change


def by_hand(m, x, fault):
    said = torch.tanh(torch.einsum("bi,oi->bo", x, m.enter))
    off = said - 3
    cost = (off * off).sum() / off.numel()
    squares = said**2
    size = squares.sum(1) if fault == "sum" else squares.mean(1)
    step = said[1:] - said[:-1]
    change = step.mean(1) ** 2 if fault == "order" else (step**2).mean(1)
    return cost + 0.1 * size.mean() + 1e-4 * change.mean()


@pytest.mark.parametrize(
    ("fault", "text", "words"),
    [
        ("", "", ""),
        ("sum", "size = squares.sum(1)", "sum where the reference has mean"),
        ("order", "change = step.mean(1) ** 2", "before mean, not after it"),
    ],
)
def test_reductions_are_named_where_they_are_made(at_fault, fault, text, words):
    leaves = {"enter": LEAVES["enter"]}
    rows = at_fault(penalised, lambda m, x: by_hand(m, x, fault), leaves, X)
    assert len(rows) == bool(fault)
    for row in rows:
        number = int(row.blamed_line.rpartition(":")[2])
        assert text in linecache.getline(__file__, number)
        assert words in row.evidence


# -- masks, ends of an axis, an axis the other way round -----------------------------------

HEADS = {
    "query": drawn(8, 6, seed=31),
    "key": drawn(8, 6, seed=32),
    "far": drawn(8, 6, seed=33),
    "value": drawn(5, 6, seed=34),
    "last": drawn(6, 5, seed=37),
}
NOW = drawn(4, 6, seed=35) * 0.2
PAST = drawn(7, 6, seed=36)


def with_memory(m, x):
    context = torch.cat([PAST.split([4, 3])[1], x])
    score = F.linear(x, m.query) @ F.linear(context, m.key).t()
    score = score + F.linear(x, m.query) @ F.linear(PAST.flip(0), m.far).t()
    later = torch.ones(4, 7).triu(4).bool()
    share = F.softmax(score.masked_fill(later, -torch.inf), -1)
    return F.linear(torch.tanh(share @ F.linear(context, m.value)), m.last)


def with_places(m, x, fault):
    first = {"end": 0, "middle": 2}.get(fault, 4)
    past = PAST[first : first + 3]
    places = torch.arange(10) - 3
    keep = torch.cat([torch.zeros(3, 6), past, x])
    distance = torch.arange(4)[:, None] + 3 - places[None]
    allowed = distance > 0 if fault == "self" else distance >= 0
    if fault != "empty":
        allowed = allowed & (places >= 0)
    q = torch.einsum("tc,dc->td", x, m.query)
    score = torch.einsum("td,sd->ts", q, keep @ m.key.t())
    by_place = torch.einsum("td,sd->ts", q, PAST.flip(0) @ m.far.t())
    score = score + torch.cat([torch.zeros(4, 3), by_place], 1)
    if fault == "opposite":
        score = score + allowed.float() * -1e30
    else:
        score = torch.where(allowed, score, -1e30)
    share = torch.exp(score - score.logsumexp(1, keepdim=True))
    mixed = torch.einsum("ts,sd->td", share, keep @ m.value.t())
    return torch.tanh(mixed) @ m.last.t()


def row_by_row(m, x, fault):
    context = torch.cat([PAST[-3:], x])
    far = PAST @ m.far.t()
    rows = []
    for row, now in enumerate(x):
        last = 4 + row
        places = far[7 - last :]
        if fault != "turned":
            places = places.flip(0)
        q = m.query @ now
        score = context[:last] @ m.key.t() @ q + places @ q
        rows.append(torch.softmax(score, 0) @ context[:last] @ m.value.t())
    return torch.tanh(torch.stack(rows)) @ m.last.t()


@pytest.mark.parametrize("fault", ["", "turned"])
def test_an_axis_the_other_way_round_is_named(program, step_of, fault):
    ours = step_of(program(with_memory, **HEADS), NOW, tensors=True)
    port = program(lambda m, x: row_by_row(m, x, fault), **HEADS)
    sides = Sides(ours, step_of(port, NOW, tensors=True))
    rows = compare_port(sides, EarlierSteps())
    words = [row.evidence for row in rows if row.cause == "own"]
    if not fault:
        assert not words
    else:
        assert "axis 0 the other way round" in words[0]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("", ""),
        ("self", "as ge, not gt"),
        ("empty", "elements the other way"),
        ("end", "from the other end of its axis"),
        ("middle", "from the end of its axis"),
        ("opposite", "with its mask the other way round"),
    ],
)
def test_masks_and_ends_are_named(at_fault, fault, words):
    rows = at_fault(with_memory, lambda m, x: with_places(m, x, fault), HEADS, NOW)
    assert len(rows) == bool(fault)
    for row in rows:
        assert any(part in row.evidence for part in words.split("|"))


# -- loops over examples, layers and heads, which the reference computes at once -----------

LAYERS = {
    **{f"qkv{n}": drawn(24, 8, seed=40 + n) * 0.4 for n in (1, 2)},
    **{f"out{n}": drawn(8, 8, seed=42 + n) * 0.4 for n in (1, 2)},
    "head": drawn(3, 8, seed=45),
}
EXAMPLES = drawn(3, 5, 8, seed=46)


def at_once(m, x):
    for qkv, out in ((m.qkv1, m.out1), (m.qkv2, m.out2)):
        parts = F.linear(x, qkv).view(3, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts)
        x = x + torch.tanh(F.linear(mixed.transpose(1, 2).flatten(2), out))
    return F.linear(x, m.head).square().mean((1, 2)).mean()


def one_by_one(m, x, fault):
    costs = []
    for example in x:
        for qkv, out in ((m.qkv1, m.out1), (m.qkv2, m.out2)):
            first, second, v = (example @ qkv.t()).split(8, 1)
            q, k = (second, first) if fault == "exchanged" else (first, second)
            mixed = []
            for at in (slice(0, 4), slice(4, 8)):
                score = q[:, at] @ k[:, at].t() / (1 if fault == "scale" else 2)
                mixed.append(score.softmax(1) @ v[:, at])
            example = example + torch.tanh(torch.cat(mixed, 1) @ out.t())
        costs.append((example @ m.head.t()).square().mean())
    return torch.stack(costs).mean()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("", ""),
        ("exchanged", "exchanged"),
        ("scale", "by a product with 0.5|with 2, not 1"),
    ],
)
def test_what_is_wrong_in_each_turn_of_several_loops_is_named(at_fault, fault, words):
    rows = at_fault(at_once, lambda m, x: one_by_one(m, x, fault), LAYERS, EXAMPLES)
    assert len(rows) == bool(fault)
    for row in rows:
        assert any(part in row.evidence for part in words.split("|"))


# -- a turn that is left out ---------------------------------------------------------------

TURNS = {"mix": drawn(8, 8, seed=50) * 0.4, "end": drawn(3, 8, seed=51)}


def three_turns(m, x):
    for _ in range(3):
        x = F.linear(x, m.mix)
        x = torch.tanh(x)
        x = x / x.norm(dim=-1, keepdim=True)
    return F.linear(x, m.end)


def two_turns(m, x):
    for _ in range(2):
        x = torch.tanh(torch.einsum("nc,dc->nd", x, m.mix))
        x = x * x.square().sum(-1, keepdim=True).rsqrt()
    return x @ m.end.t()


def test_all_that_is_left_out_is_named_from_the_first_on(program, step_of):
    ours = step_of(program(three_turns, **TURNS), X, tensors=True)
    theirs = step_of(program(two_turns, **TURNS), X, tensors=True)
    rows = compare_port(Sides(ours, theirs), EarlierSteps())
    [row] = [row for row in rows if row.cause == "own"]
    assert "left out is all from" in row.evidence
    line = linecache.getline(
        __file__, int(row.blamed_reference_line.rpartition(":")[2])
    )
    assert "F.linear(x, m.mix)" in line


SPREAD = {
    "gain": drawn(6, seed=31),
    "shift": drawn(6, seed=32),
    "middle": drawn(6, seed=33),
    "variance": drawn(6, seed=34).square() + 0.3,
    "last": drawn(3, 6, seed=35),
}
PICTURES = drawn(5, 6, 4, seed=36)


def with_running_variance(m, x):
    x = F.batch_norm(x, m.middle, m.variance, m.gain, m.shift, eps=1e-3)
    return torch.tanh(x).mean(2) @ m.last.t()


def with_a_scale(m, x, fault):
    spread = m.variance + 1e-3
    if fault == "root":
        scale = m.gain / spread
    elif fault == "twice":
        scale = m.gain / spread.sqrt().sqrt()
    else:
        scale = m.gain * spread.rsqrt()
    shift = m.shift - m.middle * scale
    x = x * scale[:, None] + shift[:, None]
    return torch.mm(torch.tanh(x).sum(2) / 4, m.last.t())


@pytest.mark.parametrize(
    ("fault", "text", "words"),
    [
        ("", "", ""),
        ("root", "spread", "left out is sqrt"),
        ("twice", "spread.sqrt().sqrt()", "not sqrt"),
    ],
)
def test_a_variance_for_a_deviation_is_named(at_fault, fault, text, words):
    def port(m, x):
        return with_a_scale(m, x, fault)

    rows = at_fault(with_running_variance, port, SPREAD, PICTURES)
    assert len(rows) == bool(fault)
    for row in rows:
        number = int((row.blamed_line or row.line).rpartition(":")[2])
        assert text in linecache.getline(__file__, number)
        assert words in row.evidence


SCORES = {"last": drawn(6, 8, seed=41) * 2}
CLASSES = torch.tensor([0, 3, 5, 1, 2, 2])


def smoothed(m, x):
    return F.cross_entropy(F.linear(x, m.last), CLASSES, label_smoothing=0.1)


def smoothed_by_hand(m, x, is_weighed):
    scores = x @ m.last.t()
    right = scores.gather(1, CLASSES[:, None])[:, 0]
    if is_weighed:
        mixed = 0.9 * right + 0.1 * scores.mean(1)
    else:
        mixed = right + 0.1 * scores.mean(1)
    return (scores.logsumexp(1) - mixed).mean()


@pytest.mark.parametrize("is_weighed", [True, False])
def test_weights_of_a_sum_belong_together(at_fault, is_weighed):
    rows = at_fault(
        smoothed, lambda m, x: smoothed_by_hand(m, x, is_weighed), SCORES, X
    )
    assert len(rows) != is_weighed
    for row in rows:
        number = int((row.blamed_line or row.line).rpartition(":")[2])
        assert "mixed = right + " in linecache.getline(__file__, number)
        assert "followed by a product with 0.9" in row.evidence


# -- what is chosen before a mean, and after it --------------------------------------------

PAIR = {"one": drawn(4, 6, seed=61), "other": drawn(4, 6, seed=62)}
ROWS = drawn(9, 6, seed=63)


def smaller_of_each_pair(m, x):
    costs = torch.stack([F.linear(x, w).square().mean(1) for w in (m.one, m.other)])
    return costs.amin(0).mean()


def smaller_in_all(m, x, is_each):
    one = (x @ m.one.t()).pow(2).mean(-1)
    other = (x @ m.other.t()).pow(2).mean(-1)
    if is_each:
        return torch.minimum(one, other).sum() / len(x)
    return torch.minimum(one.mean(), other.mean())


def test_the_smaller_of_two_means_for_the_mean_of_the_smaller_ones(at_fault):
    assert not at_fault(
        smaller_of_each_pair, lambda m, x: smaller_in_all(m, x, True), PAIR, ROWS
    )
    [row] = at_fault(
        smaller_of_each_pair, lambda m, x: smaller_in_all(m, x, False), PAIR, ROWS
    )
    assert row.operator == "minimum"
    assert "before mean, not after it" in row.evidence


def attending(m, x):
    h = F.linear(x, m.enter)
    scores = (h * 8**-0.5) @ h.t() + m.mix
    return F.linear(torch.tanh(scores.softmax(-1) @ h), m.leave)


def attending_at_once(m, x, scale):
    """The bias and the products in one call, which has the scale by name."""
    h = x @ m.enter.t()
    scores = torch.addmm(m.mix, h, h.t(), alpha=scale)
    weights = torch.exp(scores - scores.amax(-1, True))
    mixed = (weights / weights.sum(-1, keepdim=True)) @ h
    return (2 * torch.sigmoid(2 * mixed) - 1) @ m.leave.t()


@pytest.mark.parametrize("scale", [8**-0.5, 24**-0.5])
def test_a_scale_that_a_call_has_by_name(program, step_of, scale):
    sides = Sides(
        step_of(program(attending, **LEAVES), X, tensors=True),
        step_of(
            program(lambda m, x: attending_at_once(m, x, scale), **LEAVES),
            X,
            tensors=True,
        ),
    )
    wrong = [r for r in compare_port(sides, EarlierSteps()) if r.cause == "own"]
    assert bool(wrong) == (scale == 24**-0.5)
    for row in wrong[:1]:
        assert row.operator == "addmm"
        assert "with 0.353553, not 0.204124" in row.evidence


# -- a softmax that is written out in a function of several lines ---------------------------


def over_all(m, x):
    share = F.linear(x, m.enter).softmax(-1)
    return F.linear(share, m.leave)


def share_of(x, axis):
    above = torch.exp(x - torch.amax(x, dim=axis, keepdim=True))
    return above / torch.sum(above, dim=axis, keepdim=True)


def over_blocks(m, x, fault):
    x = (x @ m.enter.t()).unflatten(-1, (2, 4))
    share = share_of(x, -1 if fault else (-2, -1))
    return share.flatten(1) @ m.leave.t()


@pytest.mark.parametrize("fault", ["", "each block"])
def test_the_axes_of_a_function_are_named_together(at_fault, fault):
    rows = at_fault(over_all, lambda m, x: over_blocks(m, x, fault), LEAVES, X)
    assert len(rows) == bool(fault)
    assert all("along axes 1 and 2, not axis 2" in row.evidence for row in rows)


# -- numbers that a kernel has inside -------------------------------------------------------

LABELS = torch.tensor([0, 2, 1, 4, 3, 0])


def smoothed_inside(m, x):
    return F.cross_entropy(F.linear(x, m.leave), LABELS, label_smoothing=0.1)


def by_table(m, x, fault):
    off = 0.1 / (4 if fault else 5)
    table = torch.full((5, 5), off)
    table.fill_diagonal_(0.9 + off)
    return -(table[LABELS] * (x @ m.leave.t()).log_softmax(1)).sum() / 6


@pytest.mark.parametrize("fault", ["", "shared by the others alone"])
def test_the_numbers_of_each_class_are_named(at_fault, fault):
    rows = at_fault(smoothed_inside, lambda m, x: by_table(m, x, fault), LEAVES, X)
    assert len(rows) == bool(fault)
    assert all("made of numbers alone" in row.evidence for row in rows)
    assert all(row.operator == "full" for row in rows)


# -- a constant that changes nothing --------------------------------------------------------


def chosen(m, x):
    share = F.linear(x, m.enter).softmax(1)
    sure = (share > 0.12).float()
    return F.linear(share * sure, m.leave).square().mean(1)


def chosen_by_hand(m, x, fault):
    share = torch.exp(F.log_softmax(x @ m.enter.t(), 1))
    sure = torch.ones_like(share) if fault else torch.where(share > 0.12, 1.0, 0.0)
    return (share * sure @ m.leave.t()).pow(2).mean(1)


@pytest.mark.parametrize("fault", ["", "all of them"])
def test_a_constant_is_named_where_it_is_made(at_fault, fault):
    rows = at_fault(chosen, lambda m, x: chosen_by_hand(m, x, fault), LEAVES, X)
    assert len(rows) == bool(fault)
    assert all("it is 1 everywhere" in row.evidence for row in rows)
    assert all(row.operator == "ones_like" for row in rows)
