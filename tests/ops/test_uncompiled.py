"""Compiled regions run uncompiled in the block, and the compiler is only loaded where the
program uses it."""

import subprocess
import sys

import torch

from roundoff.ops import uncompiled


def counting_backend(runs):
    def backend(graph, inputs):
        def run(*args):
            runs.append(1)
            return graph(*args)

        return run

    return backend


def test_what_is_compiled_runs_as_written():
    runs: list[int] = []
    double = torch.compile(lambda x: x + x, backend=counting_backend(runs))
    with uncompiled():
        assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    assert runs == []
    assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    assert runs == [1]


def test_the_compiler_is_loaded_when_the_program_compiles():
    code = """
import sys, torch
from roundoff.ops import uncompiled
with uncompiled():
    assert "torch._dynamo" not in sys.modules
assert "torch._dynamo" not in sys.modules
before = torch.compile
runs = []
def backend(graph, inputs):
    runs.append(1)
    return graph
with uncompiled():
    double = torch.compile(lambda x: x + x, backend=backend)
    assert double(torch.ones(1)).item() == 2
    assert runs == []
assert torch.compile is before
assert double(torch.ones(1)).item() == 2
assert runs == [1]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
