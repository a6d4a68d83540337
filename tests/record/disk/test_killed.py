"""A process killed at any moment leaves every finished step readable."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from roundoff.errors import OutputError
from roundoff.record.disk.loading import load
from roundoff.record.disk.writer import Writer

SOURCE = Path(__file__).parents[2] / "src"

LOOP = """
import sys, torch
from roundoff.record.disk.writer import Writer
from roundoff.record.disk import tensors
writer = Writer(sys.argv[1], about={"id": "one"}, overwrite=sys.argv[2] == "overwrite")
print("begun", flush=True)
step = 0
while True:
    for key in range(4):
        writer.add(step, str(key), torch.full((2000,), float(step * 10 + key)))
    writer.scalar(step, "loss", step)
    writer.write_step(step, {"record": list(range(4)), "blob": [str(key) for key in range(4)]})
    print(step, flush=True)
    step += 1
"""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is of POSIX")


def run_and_kill(path: Path, seconds: float, mode: str = "") -> int:
    """Record until it is killed, ``seconds`` after it has begun; the last step it said was finished, or -1."""
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP, str(path), mode],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(seconds)
    finally:
        process.send_signal(signal.SIGKILL)
    said, _ = process.communicate()
    return int(said.split()[-1]) if said.split() else -1


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
def test_whenever_it_is_killed_whole_steps_stay(tmp_path):
    times = random.Random(0)
    for attempt in range(6):
        path = tmp_path / str(attempt)
        last = run_and_kill(path, times.uniform(0.1, 0.5))
        assert last >= 0
        check(path, last)


def test_killed_and_begun_again(tmp_path):
    path = tmp_path / "run"
    last = run_and_kill(path, 0.3)
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

    again = run_and_kill(path, 0.2, "overwrite")
    check(path, again)
