"""Triton kernels that a program launches itself, run by Triton's interpreter on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import roundoff

pytest.importorskip("triton", reason="triton is not installed")

SCRIPT = """
import sys, torch, triton, triton.language as tl, roundoff
from triton.runtime.interpreter import InterpretedFunction

@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2.0, mask=i < n)

before = InterpretedFunction.run
x, y = torch.arange(6.0), torch.empty(6)
with roundoff.capture(sys.argv[1], keep="tensors") as run:
    y.zero_()
    double[(1,)](x, y, 6, BLOCK=8)
    z = y + 1.0
assert run.stopped is None, run.stopped
assert InterpretedFunction.run is before
assert z.tolist() == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]
"""


def test_a_kernel_is_a_row_and_what_it_wrote_is_read_anew(tmp_path):
    (tmp_path / "kernel.py").write_text(SCRIPT)  # Triton reads the source of a kernel
    source = str(Path(roundoff.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "kernel.py", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ
        | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([source, *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    run = roundoff.load(tmp_path / "run")
    table = run.ops.collect()
    rows = table.filter(operator="triton::double").to_dicts()
    assert [row["max"] for row in rows] == [5.0, 10.0]
    assert all("which arguments" in row["reason"] for row in rows)
    (added,) = table.filter(operator="add").to_dicts()
    assert added["inputs"] == [rows[1]["record"]]  # not the zeros
    assert run.tensor(record=rows[1]["record"]).tolist() == [
        0.0,
        2.0,
        4.0,
        6.0,
        8.0,
        10.0,
    ]
