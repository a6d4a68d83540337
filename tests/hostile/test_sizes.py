"""Files that say they are larger than memory: refused with a message, and nothing is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.hostile.honest import MSPROBE

import roundoff
from roundoff import foreign
from roundoff.check import check_checkpoints
from roundoff.errors import QuantizationError, RunError
from roundoff.export import read_compressed
from roundoff.foreign import check_memory, memory_left
from roundoff.record import load

#: Values that no machine holds in memory: 4 PiB, and of a file 1 TiB.
MANY = 2**50
IN_FILE = 2**38


def _sparse(file: Path) -> None:
    """Write safetensors whose one tensor is a hole."""
    size = 4 * IN_FILE
    tensors = {"w": {"dtype": "F32", "shape": [IN_FILE], "data_offsets": [0, size]}}
    header = json.dumps(tensors).encode()
    with file.open("wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        opened.truncate(8 + len(header) + size)


def test_memory_is_known() -> None:
    left = memory_left()
    assert left is None or left > 2**20
    check_memory(0, "nothing")


def test_the_least_of_several_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "_available", lambda: 3000)
    monkeypatch.setattr(foreign, "_left_of_limit", lambda: None)
    monkeypatch.setattr(foreign, "_left_of_group", lambda: 2000)
    assert memory_left() == 2000
    with pytest.raises(ValueError, match="it needs .* GiB of memory, and .* are left"):
        check_memory(2001, "it")


def test_checkpoints_larger_than_memory(tmp_path: Path) -> None:
    _sparse(tmp_path / "a.safetensors")
    with pytest.raises(RunError, match="memory"):
        check_checkpoints(tmp_path / "a.safetensors", tmp_path / "a.safetensors")


def test_codes_larger_than_memory(tmp_path: Path) -> None:
    _sparse(tmp_path / "model.safetensors")
    scheme = {"quant_method": "compressed-tensors", "config_groups": {}}
    config = json.dumps({"quantization_config": scheme})
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(QuantizationError, match="this checkpoint needs"):
        read_compressed(tmp_path)


def test_a_table_of_operators_that_became_a_hole_is_not_read(tmp_path: Path) -> None:
    with roundoff.capture(tmp_path / "run"):
        torch.ones(2).exp()
    for table in (tmp_path / "run").rglob("ops.parquet"):
        with table.open("r+b") as file:
            file.truncate(2**40)
    with pytest.raises(RunError, match="other bytes"):
        load(tmp_path / "run").part(0, 0)


def test_one_value_that_is_repeated(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(MANY)}, tmp_path / "a.pt")
    with pytest.raises(RunError, match="the tensor needs"):
        check_checkpoints(tmp_path / "a.pt", tmp_path / "a.pt")


def test_a_tensor_of_a_dump_that_is_repeated(tmp_path: Path) -> None:
    shutil.copytree(MSPROBE / "tensor", tmp_path / "dump")
    for file in (tmp_path / "dump").rglob("*.pt"):
        torch.save(torch.ones(1).expand(MANY), file)
    run = load(tmp_path / "dump")
    kept = run.ops.select("rank", "step", "blob").collect().drop_nulls()
    rank, step, blob = kept.row(0)
    with pytest.raises(RunError, match="the tensor needs"):
        run.blob(rank, step, blob)
