"""A parameter that is written row by row, and read between: its versions pair in turns."""

from __future__ import annotations

import polars as pl
import pytest
import torch
from torch import nn

import roundoff
from roundoff.compare.pairing.alignment import align
from roundoff.compare.records.recorded_rows import rows_of


def imprinting(reduced):
    """Write each row of the weight with what is made of the samples of one class."""

    def work(model):
        x = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            for row in range(model.weight.shape[0]):
                model.weight[row] = reduced(x[row::3])
        model(x).square().mean().backward()

    return work


@pytest.fixture
def record(recorded):
    def record(reduced, keep):
        torch.manual_seed(0)
        return recorded(imprinting(reduced), nn.Linear(6, 3), keep=keep)

    return record


@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_a_run_beside_itself_agrees(record, keep):
    runs = [record(lambda x: x.mean(0), keep) for _ in range(2)]
    comparison = roundoff.compare(reference=runs[0].path, candidate=runs[1].path)
    assert comparison.agrees, comparison.answer
    assert (comparison.table["status"] == "matched").all()


@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_what_makes_the_rows_is_named(record, keep):
    runs = [record(lambda x, most=m: x.clamp(max=most).mean(0), keep) for m in (1, 2)]
    comparison = roundoff.compare(reference=runs[0].path, candidate=runs[1].path)
    wrong = comparison.table.filter(pl.col("cause") == "own")["operator"].to_list()
    assert wrong[0] == "clamp"
    assert set(wrong) == {"clamp"}


def test_each_version_depends_on_what_was_written(record):
    rows = rows_of(record(lambda x: x.mean(0), "tensors"), 0, 0)
    first, *later = [r for r in rows.values() if r.name == "weight" and not r.is_call]
    assert first.inputs == []
    assert len(later) == 3
    assert [rows[row.inputs[0]].operator for row in later] == ["copy_"] * 3


def test_the_first_and_the_last_pair_where_one_has_more(record):
    whole = rows_of(record(lambda x: x.mean(0), "tensors"), 0, 0)
    versions = [
        r.record for r in whole.values() if r.name == "weight" and not r.is_call
    ]
    without = {record: row for record, row in whole.items() if record != versions[1]}
    paired = {pair.candidate: pair.reference for pair in align(without, whole)}
    assert paired[versions[0]] == versions[0]
    assert paired[versions[-1]] == versions[-1]
    assert paired[versions[1]] != versions[-1]
