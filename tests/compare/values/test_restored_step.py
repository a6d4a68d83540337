"""Tensors that a recording did not keep, computed again from what its step began with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from roundoff.compare.records.recorded_rows import rows_of
from roundoff.compare.values.restored_step import restored_tensors
from roundoff.record import StepTensors


class Net(nn.Module):
    """Buffers, random numbers, a write through a view, and memory made without values."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Conv1d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.gate = nn.LSTMCell(4, 5)
        self.down = nn.Linear(5, 2)

    def forward(self, x):
        h = nn.functional.dropout(self.norm(self.up(x)), 0.3)
        h[:, 1].mul_(2)
        state = torch.empty(len(x), 5).zero_()
        cell = torch.zeros(len(x), 5)
        for column in h.unbind(-1):
            state, cell = self.gate(column, (state, cell))
        return self.down(state * torch.rand_like(state))


def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    x = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(1))
    x[0, 0, 0] = torch.nan
    loss = model(x).nan_to_num().square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@pytest.fixture
def runs(recorded):
    """The same step twice: with tensors, and with what it begins with."""
    runs = []
    for keep in ("tensors", "stats"):
        torch.manual_seed(3)
        runs.append(recorded(train, Net(), keep=keep))
    return runs


def test_every_tensor_of_a_step_comes_out_as_it_was(runs):
    kept, run = runs
    rows = rows_of(run, 0, 0)
    blobs = {row.blob for row in rows.values()} - {None}
    assert len(blobs) < len(rows) / 4
    tensors = restored_tensors(run, 0, 0, rows)
    expected = StepTensors(kept, 0, 0)
    phases = set()
    for record, row in rows_of(kept, 0, 0).items():
        if row.l2 is None or row.reason is not None or "empty" in row.operator:
            continue
        phases.add(row.phase)
        got, wanted = tensors[record], expected[record]
        assert got.dtype == wanted.dtype
        assert torch.equal(got.isnan(), wanted.isnan()), row.site
        assert torch.equal(got.nan_to_num(), wanted.nan_to_num()), row.site
    assert phases == {"forward", "backward", "optimizer"}


def test_a_run_with_tensors_gives_the_same(runs):
    kept, _ = runs
    tensors = restored_tensors(kept, 0, 0, rows_of(kept, 0, 0))
    assert tensors is not None


@pytest.mark.parametrize(
    "change",
    [{"max": 1e3}, {"mean": 1e3}, {"nan": 7}, {"dtype": "float16"}, {"shape": [1]}],
)
def test_one_value_with_other_statistics_leaves_none(runs, change):
    _, run = runs
    rows = rows_of(run, 0, 0)
    record = next(r for r, row in rows.items() if row.operator == "convolution")
    rows[record] = replace(rows[record], **change)
    assert restored_tensors(run, 0, 0, rows) is None


@pytest.mark.parametrize(
    ("phase", "kept"),
    [("backward", {"forward"}), ("optimizer", {"forward", "backward"})],
)
def test_the_phases_before_other_statistics_are_kept(runs, phase, kept):
    _, run = runs
    rows = rows_of(run, 0, 0)
    record = next(
        record
        for record, row in rows.items()
        if row.phase == phase and row.l2 and row.is_call and not row.inplace
    )
    rows[record] = replace(rows[record], max=1e3)
    tensors = restored_tensors(run, 0, 0, rows)
    assert {rows[record].phase for record in rows if record in tensors} == kept


@pytest.mark.parametrize(("off", "is_kept"), [(2.0**-21, True), (2.0**-12, False)])
def test_what_is_left_of_a_sum_is_as_far_off_as_its_terms_are_rounded(
    recorded, off, is_kept
):
    """The gradient of a bias before a normalization is zero but for rounding."""
    net = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.Tanh())
    x = torch.randn(6, 3, 8, generator=torch.Generator().manual_seed(1))
    run = recorded(lambda model: model(x).square().sum().backward(), net, keep="stats")
    rows = rows_of(run, 0, 0)
    [record] = [
        record
        for record, row in rows.items()
        if row.operator == "convolution_backward" and row.place == 1
    ]
    row = rows[record]
    gradient = rows[row.inputs[0]]
    terms = max(abs(gradient.min), abs(gradient.max))
    assert max(abs(row.min), abs(row.max)) < 2.0**-18 * terms
    rows[record] = replace(row, max=row.max + off * terms)
    tensors = restored_tensors(run, 0, 0, rows)
    assert (record in tensors) == is_kept


@pytest.mark.parametrize("keep", ["sample", "hash"])
def test_samples_and_hashes_are_no_beginning(recorded, keep):
    run = recorded(train, Net(), keep=keep)
    assert restored_tensors(run, 0, 0, rows_of(run, 0, 0)) is None


def test_without_leaves_there_is_nothing_to_begin_with(recorded):
    run = recorded(train, Net(), keep="stats", leaves=0)
    assert restored_tensors(run, 0, 0, rows_of(run, 0, 0)) is None


@pytest.mark.parametrize(
    "change", [{"dtype": "load"}, {"shape": [-5, -6]}, {"shape": [10**9, 10**9]}]
)
def test_memory_that_no_call_can_have_made(runs, change):
    _, run = runs
    rows = rows_of(run, 0, 0)
    record = next(r for r, row in rows.items() if row.operator == "empty")
    rows[record] = replace(rows[record], **change)
    assert restored_tensors(run, 0, 0, rows) is None


def test_the_number_of_threads_is_as_before(runs):
    _, run = runs
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        restored_tensors(run, 0, 0, rows_of(run, 0, 0))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
