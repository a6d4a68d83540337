"""Kernels of the user's own: their lines, memory without values, and values that are written unseen."""

from __future__ import annotations

import inspect

import polars as pl
import pytest
import torch

import roundoff
from roundoff.record import PARTLY_WRITTEN, UNSEEN
from roundoff.record.source_lines import defined_at


@pytest.fixture
def rows(tmp_path):
    """``rows(run)`` records a function and gives the rows."""

    def record(run, **options):
        with roundoff.capture(tmp_path / "run", **options):
            run()
        return roundoff.load(tmp_path / "run").ops.sort("record").collect()

    return record


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def line_of(function, text):
    """The line of a file on which ``text`` stands, counted from the function's first."""
    lines, first = inspect.getsourcelines(function)
    [number] = [n for n, line in enumerate(lines, first) if text in line]
    return f"test_own_kernels.py:{number}"


def test_a_backward_function_has_its_own_line(rows):
    def run():
        Doubled.apply(torch.ones(3, requires_grad=True)).sum().backward()

    products = rows(run).filter(operator="mul")
    lines = dict(products.select("phase", "line").rows())
    assert lines["forward"].endswith(line_of(Doubled, "x * 2"))
    assert lines["backward"].endswith(line_of(Doubled, "grad * 3"))


def test_the_backward_pass_of_torchs_operators_has_the_forward_line(rows):
    def run():
        (torch.ones(3, requires_grad=True).sin()).sum().backward()

    lines = rows(run).filter(pl.col("operator").is_in(["sin", "cos"]))["line"]
    assert lines.n_unique() == 1


@torch.library.custom_op("kernels_of_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


def call_of_halved():
    return halved(torch.ones(3))


def test_an_operator_in_python_has_the_line_of_its_kernel(rows):
    operator = "kernels_of_tests::halved"
    [line] = rows(call_of_halved).filter(operator=operator)["line"]
    call, _, kernel = line.partition(", kernel ")
    assert call.endswith(line_of(call_of_halved, "return"))
    assert kernel.endswith(line_of(halved._init_fn, "def halved"))


def test_where_functions_are_defined():
    assert defined_at(line_of).endswith(line_of(line_of, "def line_of"))
    assert defined_at(torch.nn.functional.gelu) is None
    assert defined_at(None) is None


def test_what_numpy_writes_into_new_memory_is_a_row(rows):
    """The kernel reads ``x`` and fills ``out``: no operator tells of it."""
    x = torch.arange(4.0)

    def run():
        y = x + 1
        out = torch.empty_like(y)
        out.numpy()[:] = y.detach().numpy() * 10
        return out * 1

    table = rows(run)
    [unseen] = table.filter(operator=UNSEEN).to_dicts()
    assert unseen["max"] == 40
    assert unseen["line"] == table.filter(operator="empty_like")["line"][0]
    read = table.filter(pl.col("record").is_in(unseen["inputs"]))["operator"]
    assert {"add", "detach"} >= set(read) >= {"detach"}
    [product] = table.filter(operator="mul").to_dicts()
    assert product["inputs"] == [unseen["record"]]


def test_memory_that_is_written_in_parts_has_no_value_before_it_is_whole(rows):
    def run():
        out = torch.empty(6)
        out[:3] = 1.0
        out[3:] = 2.0
        return out + 1

    table = rows(run)
    views = table.filter(pl.col("operator").is_in(["slice", "alias"]))
    partly = views.filter(reason=PARTLY_WRITTEN)
    assert partly.height >= 2
    assert table.filter(operator="add")["max"].to_list() == [3.0]
    whole = table.filter(
        pl.col("record").is_in(table.filter(operator="add")["inputs"][0])
    )
    assert whole["reason"].to_list() == [None]


def test_new_memory_that_an_operator_fills_is_not_written_unseen(rows):
    def run():
        torch.empty(5).fill_(2.0).add_(1.0)
        torch.add(torch.ones(2), torch.ones(2), out=torch.empty(2))
        torch.nn.init.orthogonal_(torch.empty(3, 2))  # asks for more of its kind
        blank = torch.empty(4)
        blank.copy_(torch.zeros_like(blank) + torch.rand_like(blank))

    assert rows(run).filter(operator=UNSEEN).is_empty()


def test_two_runs_of_blocks_agree_whatever_stood_in_memory(tmp_path):
    """The parts that are not written yet hold other values in every run."""

    def run(garbage):
        out = torch.empty(8)
        out.numpy()[4:] = garbage  # as another program has left it
        for first in range(0, 8, 2):
            out[first : first + 2] = float(first)
        return (out * 2).sum()

    for name, garbage in (("one", 1.0), ("other", 1e30)):
        with roundoff.capture(tmp_path / name, keep="tensors"):
            run(garbage)
    comparison = roundoff.compare(
        reference=tmp_path / "one", candidate=tmp_path / "other"
    )
    assert comparison.agrees
    assert not comparison.culprits()
