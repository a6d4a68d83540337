"""Which call is which call, on recordings of real programs: the changes that people make to one, pair by pair."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from roundoff.compare.pairing.alignment import (
    BY_USE,
    CANDIDATE_ONLY,
    MATCHED,
    REFERENCE_ONLY,
    align,
)
from roundoff.compare.pairing.call_pairs import LARGEST, calls_of
from roundoff.compare.records.recorded_rows import RecordedRow


class Net(nn.Module):
    """Two layers; ``middle`` is what is between them."""

    def __init__(self, middle=torch.relu, names=("low", "high"), again=False):
        super().__init__()
        self.names, self.middle, self.again = names, middle, again
        for name, size in zip(names, [(6, 8), (8, 4)], strict=True):
            setattr(self, name, nn.Linear(*size))

    def forward(self, x):
        low, high = (getattr(self, name) for name in self.names)

        def inner(x):
            return self.middle(low(x))

        x = checkpoint(inner, x, use_reentrant=False) if self.again else inner(x)
        return high(x)


def train(model):
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    model(x).square().sum().backward()


@pytest.fixture
def paired(recorded, step_rows):
    """``paired(one, other)`` records both and gives the pairs with (reference site or name, candidate's, status, reason)."""

    def label(row):
        return (
            None
            if row is None
            else f"{row.phase[0]}:{row.site if row.is_call else row.name}"
        )

    def pair(one, other, modules=None, work=train):
        ours, theirs = (
            step_rows(
                recorded(work, made())
                if isinstance(made(), nn.Module)
                else recorded(made())
            )
            for made in (one, other)
        )
        found = align(ours, theirs, modules)
        assert sorted(p.candidate for p in found if p.candidate is not None) == sorted(
            theirs
        )
        assert {p.reference for p in found if p.reference is not None} == set(ours)
        return [
            (
                label(ours.get(p.reference)),
                label(theirs.get(p.candidate)),
                p.status,
                p.reason,
            )
            for p in found
        ]

    return pair


def seeded(**options):
    def make():
        torch.manual_seed(3)
        return Net(**options)

    return make


def function(body):
    """A program without a module."""
    return lambda: body


def test_the_same_program(paired):
    pairs = paired(seeded(), seeded())
    assert len(pairs) > 20
    assert all(
        a == b and status == MATCHED and reason is None
        for a, b, status, reason in pairs
    )
    assert {"f:low.weight", "f:high.bias", "b:low/mm", "f:/relu"} <= {
        a for a, *_ in pairs
    }


def test_an_inserted_cast(paired):
    """There and back again: the values in between stand for the one they are made of, everything else is matched."""
    pairs = paired(
        seeded(),
        seeded(middle=lambda x: torch.relu(x.to(torch.float64).to(torch.float32))),
    )
    extra = [p for p in pairs if p[2] != MATCHED]
    assert {b for _, b, _, _ in extra} == {
        "f:/_to_copy",
        "f:/_to_copy#1",
        "b:/_to_copy",
        "b:/_to_copy#1",
    }
    forward = [p for p in extra if p[1] and p[1][0] == "f"]
    assert forward == [
        ("f:low/addmm", b, BY_USE, "read at the same place")
        for b in ("f:/_to_copy", "f:/_to_copy#1")
    ]
    assert not [p for p in pairs if p[1] is None]
    assert all(a == b for a, b, status, _ in pairs if status == MATCHED)


def test_a_fused_operator_that_is_split(paired):
    """addmm here, mm and add there: what reads the result ties them together."""

    class Split(nn.Linear):
        def forward(self, x):
            return x @ self.weight.t() + self.bias

    def split():
        torch.manual_seed(3)
        net = Net()
        net.low.__class__ = Split
        return net

    for one, other, fused, parts, status in (
        (seeded(), split, "f:low/addmm", "f:low/mm", CANDIDATE_ONLY),
        (split, seeded(), "f:low/addmm", "f:low/mm", REFERENCE_ONLY),
    ):
        pairs = paired(one, other)
        side = 1 if other is split else 0
        assert [p[2] for p in pairs if p[side] == parts] == [status]
        (use,) = [p for p in pairs if fused in p[:2]]
        assert ({*use[:2]}, use[2:]) == (
            {fused, "f:low/add"},
            (BY_USE, "read at the same place"),
        )
        later = ("f:/relu", "f:high/addmm", "f:/pow", "f:/sum", "b:high/mm")
        assert all((site, site, MATCHED, None) in pairs for site in later)


def test_a_recomputed_forward_pass(paired):
    """A checkpoint runs the first layer again in the backward pass: the first run is the counterpart."""
    pairs = paired(seeded(), seeded(again=True))
    again = [p for p in pairs if p[3] == "computed again in the backward pass"]
    assert ("f:low/addmm", "b:low/addmm", MATCHED) in [p[:3] for p in again]
    assert {b.partition("#")[0] for _, b, *_ in again} <= {
        "b:low/addmm",
        "b:low/t",
        "b:/detach",
        "b:low/detach",
    }
    once = [p for p in pairs if p not in again and p[2] == MATCHED]
    assert {"f:low/addmm", "f:/relu", "b:low/mm"} <= {a for a, *_ in once}
    assert all(a == b for a, b, *_ in once if not a.startswith("b:"))
    back = [
        p
        for p in paired(seeded(again=True), seeded())
        if p[1] is None and p[0] == "b:low/addmm"
    ]
    assert [p[3] for p in back] == [
        "computed again in the backward pass; the candidate does not"
    ]


def test_calls_in_another_order(paired):
    """Independent calls the other way round: by what they are, and of one operator by the values."""
    x = torch.linspace(0.1, 2, 12)
    names = "sin exp tanh sqrt".split()

    def one(names):
        return function(
            lambda: torch.stack(
                [r for _, r in sorted((n, getattr(torch, n)(x)) for n in names)]
            )
        )

    pairs = paired(one(names), one(names[::-1]))
    assert all(a == b and status == MATCHED for a, b, status, _ in pairs)
    assert {reason for *_, reason in pairs} == {
        None,
        "at another place in the order of calls",
    }

    pairs = paired(
        function(lambda: (torch.sin(x), torch.sin(3 * x + 1))),
        function(lambda: (torch.sin(3 * x + 1), torch.sin(x))),
    )
    assert {p[:2] for p in pairs if p[0] and "sin" in p[0]} == {
        ("f:/sin", "f:/sin#1"),
        ("f:/sin#1", "f:/sin"),
    }


def test_renamed_modules(paired):
    new = {"low": "first", "high": "second"}
    for mapping in (None, new):
        pairs = paired(seeded(), seeded(names=("first", "second")), mapping)
        for a, b, status, reason in pairs:
            side = (a or b).partition("#")[0]
            if mapping is None and side.endswith(("/t", "/detach")):
                continue  # which view of many is not told without the names of what is viewed
            old, name = next(((o, n) for o, n in new.items() if f":{o}" in a), ("", ""))
            assert (b, status) == (
                a.replace(f":{old}", f":{name}") if old else a,
                MATCHED,
            )
            moved = mapping is None and f"{old}/" in a[2:] and old
            assert reason == (f"module {old} is called {name}" if moved else None)


def test_the_name_of_a_compiled_model(paired):
    pairs = paired(
        seeded(),
        lambda: nn.ModuleDict({"_orig_mod": seeded()()}),
        work=lambda model: train(
            model["_orig_mod"] if isinstance(model, nn.ModuleDict) else model
        ),
    )
    assert all(
        a.replace("_orig_mod.", "")
        == b.replace("_orig_mod.", "").replace("_orig_mod/", "/")
        for a, b, *_ in pairs
    )
    assert {(status, reason) for *_, status, reason in pairs} == {(MATCHED, None)}


def test_parameters_and_gradients_by_name(paired, recorded, step_rows):
    """Layers run in another order, and an operator more between them: names tie parameters, gradients and results."""

    def run(names, scale):
        def work(model):
            x = torch.ones(2, 6)
            parts = {name: getattr(model, name)(x) for name in names}
            loss = sum(parts[name].square().sum() for name in ("a", "b"))
            (loss * scale if scale else loss).backward()

        torch.manual_seed(3)
        model = nn.Module()
        model.a, model.b = nn.Linear(6, 4), nn.Linear(6, 4)
        return step_rows(recorded(work, model))

    ours, theirs = run("ab", None), run("ba", 2.0)
    pairs = align(ours, theirs)
    named = [
        (
            ours[p.reference].name,
            theirs[p.candidate].name,
            theirs[p.candidate].call >= 0,
        )
        for p in pairs
        if p.reference is not None
        and p.candidate is not None
        and theirs[p.candidate].name
    ]
    assert all(a == b for a, b, _ in named)
    assert {name for name, _, made in named if not made} == {
        "a.weight",
        "a.bias",
        "b.weight",
        "b.bias",
    }
    modules = {
        (ours[p.reference].module, theirs[p.candidate].module)
        for p in pairs
        if None not in (p.reference, p.candidate)
        and theirs[p.candidate].operator == "addmm"
    }
    assert modules == {("a", "a"), ("b", "b")}


def test_a_function_moved_into_a_module(paired):
    class Wrapped(nn.Module):
        def forward(self, x):
            return F.gelu(x)

    pairs = paired(seeded(middle=F.gelu), seeded(middle=Wrapped()))
    assert (
        "f:/gelu",
        "f:middle/gelu",
        MATCHED,
        "module (root) is called middle",
    ) in pairs or ("f:/gelu", "f:middle/gelu", MATCHED, "in module middle") in pairs


def test_long_sequences_are_matched_by_blocks(paired, monkeypatch):
    """Above a size the sequences are matched by their longest common blocks: the same for one call less in a chain."""
    from roundoff.compare.pairing import call_pairs as calls

    x = torch.linspace(0.5, 2, 12)
    names = "sin exp tanh sqrt log cos sigmoid".split()

    def chain(without=None):
        def run():
            y = x
            for name in names:
                y = y if name == without else getattr(torch, name)(y.abs() + 0.1)

        return function(run)

    whole = paired(chain(), chain("sqrt"))
    monkeypatch.setattr(calls, "LARGEST", 3)
    blocks = paired(chain(), chain("sqrt"))
    for pairs in (whole, blocks):
        assert [
            a
            for a, b, _, _ in pairs
            if b is None and a[2:5] != "/ab" and a[2:5] != "/ad"
        ] == ["f:/sqrt"]
        assert {
            (a, b) for a, b, *_ in pairs if a and b and a.strip("f:/") in names
        } == {(f"f:/{name}",) * 2 for name in names if name != "sqrt"}


def updated(names, foreach):
    """A step of SGD with weight decay: parameters of one shape, held in this order."""

    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            for name in names:
                values = torch.arange(4.0) + ord(name)
                self.register_parameter(name, nn.Parameter(values))

    def work(model):
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, weight_decay=0.1, foreach=foreach
        )
        sum((p * p).sum() for p in model.parameters()).backward()
        optimizer.step()

    return Held, work


@pytest.mark.parametrize("foreach", [False, True])
def test_an_update_is_that_of_the_same_parameter(recorded, step_rows, foreach):
    """Another parameter in between, another order: what writes ``c`` has no counterpart that writes ``a``."""
    rows = []
    for names in ("abc", "acd"):
        held, work = updated(names, foreach)
        rows.append(step_rows(recorded(work, held())))
    pairs = align(*rows)
    written = [
        (rows[0][pair.reference].name, rows[1][pair.candidate].name)
        for pair in pairs
        if pair.reference is not None and pair.candidate is not None
        if rows[1][pair.candidate].phase == "optimizer"
    ]
    named = [pair for pair in written if all(pair)]
    assert ("a", "a") in named
    assert ("c", "c") in named
    assert all(one == other for one, other in named if other != "d")
    assert not [one for one, other in named if other == "d" and one in "ac"]


def test_a_product_of_complex_numbers_is_none_of_real_ones(paired):
    def real():
        x = torch.arange(6.0)
        return x * 2 + x * 3

    def unreal():
        x = torch.arange(6.0)
        return torch.view_as_real(torch.complex(x, x) * (1 + 1j)).sum(1) + x

    pairs = paired(function(real), function(unreal))
    products = [(a, status) for a, b, status, _ in pairs if b == "f:/mul"]
    assert len(products) == 1
    assert MATCHED not in dict(products).values()


@pytest.mark.parametrize(("operator", "reads"), [("uniform_", False), ("mul_", True)])
def test_what_memory_held_before_a_number_is_drawn_is_not_read(operator, reads):
    """It is another in each run: by it two draws would have nothing to do with each other."""
    memory = RecordedRow(record=0, call=0, operator="empty", numel=1)
    number = RecordedRow(
        record=1,
        call=1,
        operator=operator,
        overload=f"aten.{operator}.Tensor",
        inputs=[0],
        numel=1,
        inplace=True,
    )
    drawn = calls_of([memory, number], str)[-1]
    assert drawn.read == ((memory,) if reads else ())


def in_blocks(x, *, scaled):
    """Turns of a loop, each on its block: more calls than are matched by all their pairs."""
    results = []
    for block in x.split(2):
        y = torch.sin(block) * block
        gate = torch.sigmoid(y * 1.7)
        factor = y * gate * (1 + 1.7 * y * (1 - gate)) if scaled else y * gate
        results += [factor, torch.exp(y * gate)]
    return results


def test_turns_of_a_long_loop_are_each_others_where_each_lacks_a_call(
    recorded, step_rows
):
    x = torch.randn(110, 3, generator=torch.Generator().manual_seed(3))
    whole = recorded(lambda net: in_blocks(net(x), scaled=True), nn.Identity())
    lacking = recorded(lambda net: in_blocks(net(x), scaled=False), nn.Identity())
    ours, theirs = step_rows(whole), step_rows(lacking)
    assert len(ours) * len(theirs) > LARGEST
    pairs = {pair.candidate: pair.reference for pair in align(ours, theirs)}
    exponentials = [
        [row.record for row in rows.values() if row.operator == "exp"]
        for rows in (ours, theirs)
    ]
    assert [pairs[record] for record in exponentials[1]] == exponentials[0]
