"""What stands where a file should, and is none: it is refused, and nothing waits for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from roundoff import Budget, Plan, autocast
from roundoff.check import check_checkpoints
from roundoff.errors import RoundoffError
from roundoff.export import read_config, read_record
from roundoff.foreign import read_bytes, read_text, regular
from roundoff.record.disk.loading import load
from roundoff.verbs.compare import Comparison

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes a pipe")
READERS: dict[str, Callable[[Path], object]] = {
    "plan.toml": Plan.load,
    "budget.parquet": Budget.load,
    "simple.cfg": read_config,
    "record.txt": read_record,
    "model.pt": lambda path: check_checkpoints(path, path),
    "model.safetensors": lambda path: check_checkpoints(path, path),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_no_file(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(RoundoffError, match="not a regular file"):
        READERS[name](tmp_path / name)


def test_a_huge_file_is_no_list_of_operators(tmp_path: Path) -> None:
    with (tmp_path / "lists.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(RoundoffError, match="less than"):
        autocast(tmp_path / "lists.json")


def test_a_file_without_end_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "zero").symlink_to("/dev/zero")
    for read in (regular, read_text, read_bytes):
        with pytest.raises(OSError, match="not a regular file"):
            read(tmp_path / "zero")


def test_a_saved_comparison_of_pipes(tmp_path: Path) -> None:
    for name in ("comparison.json", "comparison.parquet"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(RoundoffError):
        Comparison.load(tmp_path)


def test_an_archive_that_is_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.zip")
    with pytest.raises(RoundoffError, match="not a regular file"):
        load(f"zip://::{tmp_path / 'run.zip'}")


def test_a_text_is_read_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("\ufeffa\r\nb\rc\n".encode())
    assert read_text(tmp_path / "text", "utf-8-sig") == "a\nb\nc\n"
