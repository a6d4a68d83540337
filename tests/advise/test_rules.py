"""Every planted sin is seen, and nothing is seen where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from roundoff.advise import (
    RULES,
    Runner,
    Setup,
    can_load_again,
    gather_facts,
    measure_loading,
)
from roundoff.advise.batch_size import try_larger_batches
from roundoff.advise.guidelines import try_guidelines
from roundoff.advise.loading_advice import advise_on_loading
from roundoff.workload import Workload

WORKLOADS = Path(__file__).parent / "workloads"


def names_of(facts):
    return {rule.name for rule in RULES if rule.condition(facts) is not None}


@pytest.fixture(scope="module")
def slow():
    workload = Workload.load(WORKLOADS / "slow.py")
    workload.model.train()
    return workload


@pytest.fixture(scope="module")
def slow_facts(slow):
    return gather_facts(Setup(slow, train=True))


def test_the_sins_of_model_and_step_are_seen(slow_facts):
    planted = {
        "fused_attention",
        "drop_bias_before_norm",
        "no_fp64",
        "fused_optimizer",
        "gradients_to_none",
        "no_anomaly_mode",
        "value_to_python",
    }
    assert planted <= names_of(slow_facts)


def test_the_sins_of_layers_are_seen_with_their_effect(slow_facts):
    rows = {row.name: row for row in try_guidelines(slow_facts, seconds=0.0)}
    assert {"equal_channels", "group_convolutions", "fragmentation"} <= set(rows)
    assert rows["group_convolutions"].place == "grouped"
    assert rows["fragmentation"].place == "attention.query … attention.value"
    assert all(row.speed is not None for row in rows.values())
    assert all(row.verdict in ("by hand", "does not pay") for row in rows.values())


def test_the_sins_of_the_data_are_seen(slow):
    loading = measure_loading(slow, lambda batch: batch)
    assert len(loading.files) == 48
    assert loading.is_repeatable
    assert loading.resize_share > 0
    rows = advise_on_loading(slow, loading, seconds=0.0, cores=2)
    assert {row.name for row in rows} == {"packed_files", "ready_samples"}
    assert all(row.speed is not None for row in rows)


def test_a_tuned_model_has_none_of_them():
    workload = Workload(
        # large enough that its products take the time, on a busy machine too
        nn.Sequential(nn.Linear(512, 512), nn.ReLU()),
        [torch.ones(256, 512)],
        loss=lambda output, _: output.sum(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1, fused=True),
    )
    facts = gather_facts(Setup(workload, train=True))
    assert names_of(facts) <= {"bf16_autocast", "threads", "compile"}
    assert try_guidelines(facts, seconds=0.0) == []


def test_lines_and_modules_are_named(slow_facts):
    (evidence,) = [
        rule.condition(slow_facts) for rule in RULES if rule.name == "value_to_python"
    ]
    text = (WORKLOADS / "slow.py").read_text().splitlines()
    line = next(n for n, code in enumerate(text, 1) if ".item()" in code)
    assert evidence.place.endswith(f"slow.py:{line})")


def loading_of(batches):
    workload = Workload(nn.Identity(), batches)
    return workload, measure_loading(workload, lambda batch: batch)


def test_batches_in_memory_are_not_loaded():
    assert not can_load_again(Workload(nn.Identity(), [torch.ones(1)]))


def test_a_loader_without_workers_or_pinned_memory():
    data = TensorDataset(torch.randn(64, 4))
    workload, loading = loading_of(DataLoader(data, batch_size=8))
    rows = {
        row.name: row
        for row in advise_on_loading(workload, loading, seconds=0.0, cores=1)
    }
    assert {"workers", "pinned_memory"} <= set(rows)
    assert "one core" in rows["workers"].reason
    if not torch.cuda.is_available():
        assert "no GPU" in rows["pinned_memory"].reason


def test_random_batches_cannot_be_stored():
    workload, loading = loading_of(lambda: (torch.randn(4) for _ in range(3)))
    assert not loading.is_repeatable
    (row,) = advise_on_loading(workload, loading, seconds=0.0, cores=1)
    assert row.name == "ready_samples"
    assert "other batches" in row.reason


def test_batches_that_do_not_fit_are_a_row_with_the_reason(monkeypatch):
    monkeypatch.setattr("roundoff.advise.batch_size.SHORT_KERNEL", 10.0)

    class Trials:
        setup = Setup(Workload(nn.ReLU(), [torch.ones(2, 3), torch.ones(2, 4)]), False)
        seconds = 0.0

    facts = gather_facts(Trials.setup)
    (row,) = try_larger_batches(facts, Trials)
    assert row.verdict == "not tried"
    assert "cannot be put together" in row.reason


def test_a_step_of_its_own_is_run():
    calls = []

    def step(model, optimizer, batch):
        calls.append(type(optimizer).__name__)
        return model(batch).sum()

    workload = Workload(nn.Linear(2, 2), [torch.ones(1, 2)], step=step)
    Runner(Setup(workload, train=True)).step()
    assert calls == ["SGD"]
