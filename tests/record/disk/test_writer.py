"""roundoff.record.disk.writer: what is written comes back, and no fault reaches the training."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from roundoff.errors import RunError
from roundoff.record.disk import tensors as tensors_module
from roundoff.record.disk.loading import load
from roundoff.record.disk.schema import OPS
from roundoff.record.disk.writer import Writer

SOURCE = Path(__file__).parents[2] / "src"


def record(path, steps=2, **options) -> Writer:
    """A run with one kept tensor in each step, not closed."""
    writer = Writer(path, **{"about": {"level": "op"}} | options)
    for step in range(steps):
        write(writer, step)
    return writer


def write(writer: Writer, step: int) -> None:
    blob = writer.add(step, "0", torch.full((3,), float(step)))
    site: dict[str, list[Any]] = {
        "phase": ["forward"],
        "module": ["a"],
        "operator": ["relu"],
        "place": [0],
    }
    writer.write_step(step, {"record": [0], **site, "blob": [blob]})


def test_rows_come_back_with_all_columns(tmp_path):
    rows = {
        "record": [0, 1],
        "phase": ["forward", "backward"],
        "inputs": [[], [0, 7]],
        "shape": [[2, 3], []],
        "inplace": [True, False],
        "l2": [1, math.nan],
        "max": [math.inf, None],
        "exponent": [-149, None],
        "exponents": [[1, 0, 5], None],
    }
    with Writer(tmp_path / "run", about={}) as writer:
        writer.write_step(4, rows)
        writer.write_step(
            5, pl.DataFrame({"record": [0, 1]}, schema={"record": pl.Int8})
        )
    ops = load(tmp_path / "run").ops.collect()
    assert dict(ops.schema) == OPS
    first = ops.filter(pl.col("step") == 4)
    for name, values in rows.items():
        for back, value in zip(first[name].to_list(), values, strict=True):
            same = back == value or (value != value and back != back)
            assert same, name
    assert first["rank"].to_list() == [0, 0]
    assert first["reason"].to_list() == [None, None]
    assert ops.filter(pl.col("step") == 5)["record"].to_list() == [0, 1]


@pytest.mark.parametrize(
    "rows", [{}, pl.DataFrame(), {"record": []}, pl.DataFrame(schema=OPS)]
)
def test_a_step_may_have_no_rows(tmp_path, rows):
    with Writer(tmp_path, about={}) as writer:
        writer.write_step(0, rows)
    run = load(tmp_path)
    assert run.steps == [0]
    assert run.ops.collect().height == 0


def test_scalars_come_back(tmp_path):
    with record(tmp_path, 1) as writer:
        for step, value in enumerate(
            [1.5, math.nan, math.inf, -0.0, torch.tensor(2.0), 3]
        ):
            writer.scalar(step, "loss", value)
        writer.scalar(9, "lr", 1e-3)
    table = load(tmp_path).scalars.collect()
    assert table.columns == ["rank", "step", "name", "value"]
    loss = table.filter(pl.col("name") == "loss")["value"].to_list()
    assert [str(value) for value in loss] == ["1.5", "nan", "inf", "-0.0", "2.0", "3.0"]
    assert table.row(6) == (0, 9, "lr", 1e-3)


def test_run_json_says_how_it_ended(tmp_path):
    about = {
        "level": "op",
        "keep": "hash",
        "notes": {"dtype": torch.float16, (1, 2): {3}},
    }
    writer = record(tmp_path / "run", about=about)
    during = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (during["schema"], during["complete"], during["level"]) == (1, False, "op")
    assert during["notes"] == {"dtype": "torch.float16", "(1, 2)": [3]}
    coverage = {"operators": {"aten.mm.default": 12}}
    writer.close(coverage=coverage)
    after = json.loads((tmp_path / "run" / "run.json").read_text())
    assert after.pop("checksum") != during.pop("checksum")
    assert after == during | {"complete": True, "coverage": coverage}
    told = load(tmp_path / "run").about
    assert (told.complete, told.keep) == (True, "hash")
    assert told.coverage.operators == coverage["operators"]


def test_an_exception_in_the_training_leaves_an_incomplete_run(tmp_path):
    with pytest.raises(KeyError), record(tmp_path) as writer:
        writer.add(2, "0", torch.ones(2))  # a step that never ends
        raise KeyError
    run = load(tmp_path)
    assert (run.about.complete, run.steps) == (False, [0, 1])
    assert (
        repr(run) == f"Run({str(tmp_path)!r}, 2 steps: 0 to 1, 1 ranks, not complete)"
    )
    assert sorted(os.listdir(tmp_path / "rank0")) == ["step000000", "step000001"]


def test_a_step_written_again_replaces_the_earlier(tmp_path):
    with record(tmp_path) as writer:
        writer.write_step(1, {"record": [5], "operator": ["gelu"]})
    run = load(tmp_path)
    assert run.ops.filter(pl.col("step") == 1).collect()["operator"].to_list() == [
        "gelu"
    ]
    assert run.verify() == []
    assert sorted(os.listdir(tmp_path / "rank0")) == ["step000000", "step000001"]


def test_steps_may_overlap(tmp_path):
    with Writer(tmp_path, about={}) as writer:
        for step in (0, 1):
            writer.add(step, "0", torch.full((2,), float(step)))
        for step in (1, 0):
            writer.write_step(step, {"record": [0], "blob": ["0"]})
    run = load(tmp_path)
    assert [run.tensor(record=0, step=step).tolist() for step in (0, 1)] == [
        [0, 0],
        [1, 1],
    ]


def use(writer: Writer) -> None:
    """All that a training loop calls, twice over."""
    for step in (2, 3):
        writer.add(step, "0", torch.ones(4) * step)
        writer.add(step, "1", torch.zeros(4))
        writer.write_step(step, {"record": [0, 1], "blob": ["0", "1"]})
        writer.scalar(step, "loss", 1.0)
    writer.close(coverage={})
    writer.close()


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


class PanicException(BaseException):
    """polars' own derives from BaseException too."""


def panic(*args, **kwargs):
    raise PanicException("index out of bounds")


FAULTS = {
    "tensors": lambda patch: patch.setattr(tensors_module, "save_file", full),
    "table": lambda patch: patch.setattr(pl.DataFrame, "write_parquet", full),
    "panic": lambda patch: patch.setattr(pl.DataFrame, "write_parquet", panic),
    "rename": lambda patch: patch.setattr(Path, "rename", full),
    "replace": lambda patch: patch.setattr(os, "replace", full),
    "folder": lambda patch: patch.setattr(Path, "mkdir", full),
    "thread": lambda patch: patch.setattr(threading.Thread, "start", full),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_stops_the_recording_with_one_warning(tmp_path, monkeypatch, fault):
    writer = record(tmp_path)
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        FAULTS[fault](patch)
        use(writer)
    (warning,) = said
    assert warning.category is RuntimeWarning
    text = str(warning.message)
    assert str(tmp_path) in text
    assert "the recording has stopped and training goes on" in text
    assert (
        "index out of bounds" in text
        if fault == "panic"
        else "No space left on device" in text
    )
    assert warning.filename == __file__  # the user's line, not one of ours
    assert writer.stopped
    run = load(tmp_path)
    assert run.steps[:2] == [0, 1]
    assert run.verify() == []
    assert run.tensor("a/relu", step=1).tolist() == [1, 1, 1]
    assert run.about.complete is False
    assert not list(tmp_path.rglob("*.partial"))


circle: list = []
circle.append(circle)


@pytest.mark.parametrize(
    ("work", "fault"),
    [
        (lambda w: w.add(5, "0", torch.eye(2).to_sparse()), "layout torch.sparse_coo"),
        (lambda w: w.add(5, "0", torch.empty(2, device="meta")), "meta"),
        (lambda w: w.add(-1, "0", torch.ones(2)), "steps count from 0: -1"),
        (lambda w: w.write_step(5, {"recrod": [0]}), "no column recrod"),
        (lambda w: w.write_step(5, {"record": ["x"]}), "Int64"),
        (
            lambda w: w.write_step(5, {"record": [1], "call": [1, 2]}),
            "height of column",
        ),
        (lambda w: w.write_step(5, pl.DataFrame({"record": ["x"]})), "record"),
        (lambda w: w.write_step(5, None), "NoneType"),
        (lambda w: w.scalar(5, "loss", torch.ones(2)), "one element"),
        (lambda w: w.scalar(5, "loss", "high"), "high"),
        (lambda w: w.close(coverage=circle), "recursion"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*Sparse.*")
def test_what_cannot_be_stored_stops_it_too(tmp_path, work, fault):
    writer = record(tmp_path)
    with pytest.warns(RuntimeWarning, match=fault) as said:
        assert [each(writer) for each in (work, use)] == [None, None]
    assert len(said) == 1
    assert writer.stopped
    assert load(tmp_path).steps == [0, 1]
    assert load(tmp_path).about.stopped is not None


def test_a_vanished_folder_stops_the_recording(tmp_path):
    writer = record(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.warns(RuntimeWarning, match="FileNotFoundError") as said:
        use(writer)
    assert len(said) == 1


def test_where_warnings_are_errors_training_goes_on_nevertheless(tmp_path, capsys):
    writer = record(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writer.write_step(5, {"recrod": [0]})
    assert "recording has stopped" in capsys.readouterr().err


def test_ctrl_c_is_not_swallowed(tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    writer = record(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pl.DataFrame, "write_parquet", interrupt)
        write(writer, 2)
    write(writer, 3)
    writer.close()
    assert load(tmp_path).steps == [0, 1, 3]


FILE_LIMIT = """
import resource, sys, warnings, torch
from roundoff.record.disk.writer import Writer
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
writer = Writer(sys.argv[1], about={})
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for step in range(6):
        many = torch.ones(2**(10 + 2 * step)) * step  # 4 KiB, 16 KiB, 64 KiB: too much with its header
        writer.add(step, "0", many)
        writer.write_step(step, {"record": [0], "blob": ["0"]})
    writer.close()
print(len(said), writer.stopped, "File too large" in str(said[0].message))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits of processes are of POSIX")
def test_the_system_refusing_to_write_more(tmp_path):
    """No patched function: the kernel itself refuses, in the middle of a file."""
    assert python(FILE_LIMIT, tmp_path / "run") == "1 True True\n"
    run = load(tmp_path / "run")
    assert run.steps == [0, 1]
    assert run.verify() == []


def python(code: str, *args) -> str:
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_closed_writer_does_nothing(tmp_path):
    writer = record(tmp_path)
    writer.close()
    use(writer)
    assert load(tmp_path).steps == [0, 1]
    assert writer.add(5, "0", torch.ones(1)) is None
    assert not writer.stopped


def test_an_empty_run_is_an_error(tmp_path):
    Writer(tmp_path, about={}).close()
    with pytest.raises(RunError, match="the run is empty"):
        load(tmp_path)


def test_a_run_that_another_rank_begins_while_this_one_looks(tmp_path, monkeypatch):
    """``run.json`` is not there at the first look, and is at the second."""
    from roundoff.record.disk import folder

    read = folder._read_about
    looks = []

    def late(path):
        looks.append(path)
        if len(looks) == 3:  # of this rank: has it failed, is it there, is it there now
            (path / "run.json").write_text('{"schema": 1, "id": "a"}')
        return read(path)

    monkeypatch.setattr(folder, "_read_about", late)
    folder.claim(tmp_path, 1, "a", 2, overwrite=False)
    assert (tmp_path / "rank1").is_dir()
