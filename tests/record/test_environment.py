"""environment: rows that say what in this process changes numbers, read without changing any of it."""

from __future__ import annotations

from dataclasses import astuple

import torch
from torch import nn

from roundoff.record.environment import environment
from roundoff.record.setting import Setting


def rows(model=None):
    return {row.name: row for row in environment(model)}


def test_rows_are_plain_text():
    found = environment(nn.Linear(2, 2))
    texts = [text for row in found for text in astuple(row)]
    assert all(isinstance(text, str) for text in texts)
    assert len({row.name for row in found}) == len(found)


def test_versions_and_threads():
    found = rows()
    assert found["torch"].value == torch.__version__
    assert found["threads"].value == str(torch.get_num_threads())
    assert found["default dtype"].value == "float32"
    assert found["subnormals"].value in ("kept", "flushed to zero")


def test_fewer_bits_in_products_are_pointed_out():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert rows()["float32 matmul precision"].note == ""
        torch.set_float32_matmul_precision("medium")
        row = rows()["float32 matmul precision"]
        assert row.value == "medium"
        assert "fewer bits" in row.note
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_low_precision_reference_is_pointed_out():
    assert rows(nn.Linear(2, 2))["parameters"] == Setting(
        "parameters", "2 tensors float32 on cpu", ""
    )
    row = rows(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False).bfloat16()))[
        "parameters"
    ]
    assert row.value == "2 tensors float32 on cpu, 1 tensors bfloat16 on cpu"
    assert "low precision" in row.note
    assert rows(nn.ReLU())["parameters"].value == "none"


def test_nothing_is_changed():
    model = nn.Linear(2, 2)
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    environment(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
