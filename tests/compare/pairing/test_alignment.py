"""Which row is which: nothing is lost whatever one program has more, less or elsewhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.compare.pairing.alignment import (
    BY_USE,
    CANDIDATE_ONLY,
    MATCHED,
    REFERENCE_ONLY,
    align,
    renaming,
)
from roundoff.compare.records.recorded_rows import RecordedRow

# Programs as data: an Op reads other ops by key (negative keys are parameters), and its key seeds what it computes.


@dataclass(frozen=True)
class Op:
    key: int
    module: str
    operator: str
    shape: tuple[int, ...]
    reads: tuple[int, ...]
    seed: int


def rows(ops, *, rename=lambda name: name, dtype="float32"):
    """A recording of the program: parameters as they are first read, then each call with statistics by numpy."""
    found: dict[int, RecordedRow] = {}
    record_of = {}

    def enter(key, seed, shape, **columns):
        values = np.random.default_rng(seed).normal(1.0, 2.0, shape)
        record = record_of[key] = len(found)
        found[record] = RecordedRow(
            record=record,
            dtype=dtype,
            shape=list(shape),
            numel=values.size,
            nan=0,
            posinf=0,
            neginf=0,
            min=values.min(),
            max=values.max(),
            mean=values.mean(),
            std=values.std(),
            l2=np.linalg.norm(values),
            **columns,
        )

    for call, op in enumerate(ops):
        for key in op.reads:
            if (
                key not in record_of
            ):  # a parameter, or what an op made that this program lacks
                name = rename(f"layer{-key}.weight")
                enter(
                    key,
                    key % 1000,
                    (4, 4),
                    call=-1,
                    module="",
                    operator="parameter",
                    name=name,
                    inputs=[],
                )
        enter(
            op.key,
            op.seed,
            op.shape,
            call=call,
            module=rename(op.module),
            operator=op.operator,
            name=None,
            inputs=[record_of[key] for key in op.reads],
        )
    return found


@st.composite
def programs(draw):
    ops = []
    for key in range(draw(st.integers(1, 9))):
        before = [op.key for op in ops[-3:]] + [-1, -2, -3]
        ops.append(
            Op(
                key,
                draw(st.sampled_from(["", "a", "a.b", "layer1"])),
                draw(st.sampled_from(["mm", "add", "relu", "view"])),
                draw(st.sampled_from([(4, 4), (16,)])),
                tuple(draw(st.lists(st.sampled_from(before), min_size=1, max_size=2))),
                key,
            )
        )
    return ops


def dropped(ops, at):
    return ops[:at] + ops[at + 1 :]


def inserted(ops, at):
    new = Op(900 + at, "a", "mul", (4, 4), (ops[at].key,), 900 + at)
    return (
        ops[: at + 1]
        + [new]
        + [
            replace(
                op, reads=tuple(new.key if k == ops[at].key else k for k in op.reads)
            )
            for op in ops[at + 1 :]
        ]
    )


def duplicated(ops, at):
    return ops[: at + 1] + [replace(ops[at], key=800 + at)] + ops[at + 1 :]


def swapped(ops, at):
    return ops[:at] + ops[at : at + 2][::-1] + ops[at + 2 :]


def moved(ops, at):
    return [
        replace(op, module=f"new.{op.module}") if op.module == ops[at].module else op
        for op in ops
    ]


def cast(ops, at):
    op = ops[at]
    new = Op(700 + at, op.module, "_to_copy", (4, 4), op.reads[:1], op.seed + 5000)
    return [*ops[:at], new, replace(op, reads=(new.key, *op.reads[1:])), *ops[at + 1 :]]


CHANGES = [dropped, inserted, duplicated, swapped, moved, cast]


@given(
    programs(),
    st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 20)), max_size=4),
)
@settings(deadline=None)
def test_every_row_of_both_runs_is_there(ops, changes):
    changed = list(ops)
    for change, at in changes:
        changed = change(changed, at % len(changed)) if changed else changed
    ours, theirs = rows(ops), rows(changed)
    pairs = align(ours, theirs)
    assert [p.candidate for p in pairs if p.candidate is not None] == list(theirs)
    assert {p.reference for p in pairs if p.reference is not None} == set(ours)
    # a tensor that was there before may be read where the candidate reads two: weights that are tied in one program
    times = Counter(
        p.reference
        for p in pairs
        if p.status == MATCHED and ours[p.reference].call >= 0
    )
    assert max(times.values(), default=1) == 1
    for pair in pairs:
        assert (pair.status == REFERENCE_ONLY) == (pair.candidate is None)
        assert (pair.status == CANDIDATE_ONLY) == (pair.reference is None)
        if pair.status != MATCHED:
            assert pair.reason
        elif pair.reference is not None and theirs[pair.candidate].call >= 0:
            assert ours[pair.reference].operator == theirs[pair.candidate].operator
            assert ours[pair.reference].phase == theirs[pair.candidate].phase


@given(programs())
@settings(deadline=None, max_examples=40)
def test_a_program_is_aligned_with_itself(ops):
    one = rows(ops)
    assert all(
        (p.reference, p.status, p.reason) == (p.candidate, MATCHED, None)
        for p in align(one, one)
    )


@given(programs())
@settings(deadline=None, max_examples=60)
def test_a_mapping_undoes_a_renaming(ops):
    def rename(name):
        return ".".join(part for part in ("net", name) if part)

    ours, theirs = rows(ops), rows(ops, rename=rename)
    assert all(
        (p.reference, p.status, p.reason) == (p.candidate, MATCHED, None)
        for p in align(ours, theirs, {"": "net"})
    )


@given(st.permutations(range(6)), st.integers(0, 5))
@settings(deadline=None, max_examples=40)
def test_one_call_less_and_the_others_keep_their_twins(seeds, at):
    """A chain of the same operator and shape: only the values tell which one is missing."""
    ops = [
        Op(i, "a", "relu", (4, 4), (i - 1 if i else -1,), seed)
        for i, seed in enumerate(seeds)
    ]
    fewer = [
        replace(op, reads=(at - 1 if at else -1,)) if op.reads == (at,) else op
        for op in ops
        if op.key != at
    ]
    ours, theirs = rows(ops), rows(fewer)
    for pair in align(ours, theirs):
        if pair.candidate is None:
            assert ours[pair.reference].mean not in {
                row.mean for row in theirs.values()
            }
        else:
            assert ours[pair.reference].mean == theirs[pair.candidate].mean


def test_renaming():
    rename = renaming({"encoder": "enc", "encoder.layers": "blocks", "head": ""})
    names = {
        "encoder": "enc",
        "encoder.layers.0.norm": "blocks.0.norm",
        "encoder.embed": "enc.embed",
        "encoders.x": "encoders.x",
        "head.out": "out",
        "head": "",
        "_orig_mod.encoder.embed": "enc.embed",
        "a._orig_mod.b": "a.b",
        "": "",
    }
    assert {name: rename(name) for name in names} == names
    assert renaming({"": "net"})("layer.weight") == "net.layer.weight"
    assert renaming({"": "net"})("") == "net"


def test_reasons():
    """One row of each kind that has no counterpart."""
    lone = [
        Op(0, "a", "mm", (4, 4), (-1,), 0),
        Op(1, "a", "view", (16,), (0,), 1),
        Op(2, "", "compiled", (4, 4), (1,), 2),
    ]
    pairs = align(rows(lone), rows([Op(0, "b", "relu", (3,), (), 9)]))
    assert [(p.status, p.reason) for p in pairs] == [
        (CANDIDATE_ONLY, "the reference has no such call"),
        (REFERENCE_ONLY, "nothing in the candidate is read at the same place"),
        (REFERENCE_ONLY, "the candidate has no such call"),
        (REFERENCE_ONLY, "hands values on; the candidate has none here"),
        (REFERENCE_ONLY, "the boundary of a compiled region"),
    ]


def test_a_row_by_use_may_be_read_twice():
    """The cast of a tensor, and the tensor, are both that tensor of the reference."""
    plain = [Op(0, "a", "relu", (4, 4), (-1,), 0), Op(1, "a", "mm", (4, 4), (0, -2), 1)]
    ours, theirs = rows(plain), rows(cast(plain, 1))
    pairs = {p.candidate: p for p in align(ours, theirs)}
    (inner,) = [r for r, row in theirs.items() if row.operator == "_to_copy"]
    (relu,) = [r for r, row in theirs.items() if row.operator == "relu"]
    assert (pairs[inner].status, pairs[inner].reason) == (
        BY_USE,
        "read at the same place",
    )
    assert pairs[relu].status == MATCHED
    assert pairs[inner].reference == pairs[relu].reference
    assert None not in pairs


def test_another_shape_is_another_value():
    """What stands at the same place but has another shape is no counterpart."""
    product = Op(1, "a", "mm", (4, 4), (0, -2), 1)
    ours, theirs = (
        rows([Op(0, "a", name, shape, (), 0), product])
        for name, shape in (("relu", (4, 4)), ("tanh", (16,)))
    )
    found = {(p.reference, p.candidate): p.status for p in align(ours, theirs)}
    assert found[None, 0] == CANDIDATE_ONLY
    assert found[0, None] == REFERENCE_ONLY


@pytest.mark.parametrize("empty", ["both", "reference", "candidate"])
def test_nothing_recorded(empty):
    some = rows([Op(0, "a", "mm", (4, 4), (), 0)])
    ours, theirs = (
        {} if empty in ("both", side) else some for side in ("reference", "candidate")
    )
    assert [p.status for p in align(ours, theirs)] == {
        "both": [],
        "reference": [CANDIDATE_ONLY],
        "candidate": [REFERENCE_ONLY],
    }[empty]
