"""A process killed at any moment leaves every finished step readable."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from roundoff.errors import OutputError
from roundoff.record.disk.loading import load
from roundoff.record.disk.writer import Writer

SOURCE = Path(__file__).parents[3] / "src"

#: For each line it reads, a mode, a tab and a path, it records in a fork of itself:
#: most of the time goes into importing torch.
LOOP = """
import os, sys, torch
from roundoff.record.disk.writer import Writer
from roundoff.record.disk import tensors

def record(path, mode):
    writer = Writer(path, about={"id": "one"}, overwrite=mode == "overwrite")
    print("begun", os.getpid(), flush=True)
    step = 0
    while True:
        for key in range(4):
            writer.add(step, str(key), torch.full((2000,), float(step * 10 + key)))
        writer.scalar(step, "loss", step)
        writer.write_step(step, {"record": list(range(4)), "blob": [str(key) for key in range(4)]})
        print(step, flush=True)
        step += 1

for line in iter(sys.stdin.readline, ""):
    mode, _, path = line.rstrip("\\n").partition("\\t")
    child = os.fork()
    if child == 0:
        record(path, mode)
    os.waitpid(child, 0)
    print("killed", flush=True)
"""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is of POSIX")


@pytest.fixture(scope="module")
def recorder() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
    )
    with process:
        yield process


def run_and_kill(
    recorder: subprocess.Popen[str], path: Path, seconds: float, mode: str = ""
) -> int:
    """Record until it is killed, ``seconds`` after it has begun; the last step it said was finished, or -1."""
    assert recorder.stdin is not None
    assert recorder.stdout is not None
    recorder.stdin.write(f"{mode}\t{path}\n")
    recorder.stdin.flush()
    word, number = recorder.stdout.readline().split()
    assert word == "begun"
    time.sleep(seconds)
    os.kill(int(number), signal.SIGKILL)
    # a pipe takes a line this short whole or not at all
    said = list(iter(recorder.stdout.readline, "killed\n"))
    return int(said[-1]) if said else -1


def check(path: Path, last: int) -> None:
    run = load(path)
    assert run.steps[: last + 1] == list(range(last + 1))
    assert len(run.steps) <= last + 2  # one may be finished and not yet said
    assert run.verify() == []
    assert run.about.complete is False
    assert run.ops.collect().height == 4 * len(run.steps)
    for step in run.steps:
        for key in range(4):
            back = run.tensor(record=key, step=step)
            assert torch.equal(back, torch.full((2000,), float(step * 10 + key)))
    there = run.scalars.collect()[
        "step"
    ].to_list()  # perhaps with one of the step after
    assert there == list(range(len(there)))
    assert last + 1 <= len(there) <= last + 3


@pytest.mark.slow
def test_whenever_it_is_killed_whole_steps_stay(recorder, tmp_path):
    times = random.Random(0)
    for attempt in range(6):
        path = tmp_path / str(attempt)
        last = run_and_kill(recorder, path, times.uniform(0.1, 0.5))
        assert last >= 0
        check(path, last)


def test_killed_and_begun_again(recorder, tmp_path):
    path = tmp_path / "run"
    last = run_and_kill(recorder, path, 0.3)
    check(path, last)
    # Something half done of each kind, whether or not this kill has left it.
    for name in (".step000900.partial", ".step000901.partial"):
        (path / "rank0" / name).mkdir(exist_ok=True)
        (path / "rank0" / name / "tensors-000.safetensors").write_bytes(b"half")
    with (path / "rank0" / "scalars.txt").open("ab") as file:
        file.write(b'[901, "los')
    (path / ".run.json.abc.json").write_bytes(b"half")
    check(path, last)

    with pytest.raises(OutputError, match="there is a run here already"):
        Writer(path, about={"id": "two"})
    check(path, last)

    with Writer(path, about={"id": "one"}) as writer:  # the same run goes on
        writer.write_step(last + 100, {"record": [0]})
    run = load(path)
    assert run.steps[: last + 1] == list(range(last + 1))
    assert run.steps[-1] == last + 100
    hidden = [file.name for file in path.rglob(".*")]
    assert hidden == []

    again = run_and_kill(recorder, path, 0.2, "overwrite")
    check(path, again)
