"""Tables of a run at any width, names with brackets, answers in words."""

from __future__ import annotations

import io

import polars as pl
import pytest
from rich.console import Console

from roundoff.compare.nonfinite.overflow import trace_overflow
from roundoff.record.disk.sites import HistogramBin, describe_sites
from roundoff.report.overflow_text import answer, print_overflow
from roundoff.report.run_text import histogram, print_show


def text(function, data, width, **options):
    file = io.StringIO()
    console = Console(width=width, file=file, highlight=False, force_terminal=False)
    function(data, console, **options)
    return file.getvalue()


def row(record, operator, low, high, inputs=(), **about):
    return {
        "rank": 0,
        "step": 0,
        "record": record,
        "call": record - 1,
        "operator": operator,
        "phase": "forward",
        "index": 0,
        "module": "encoder.layer.0.[red]heads[/red]",
        "inputs": list(inputs),
        "dtype": "float16",
        "shape": [4],
        "numel": 4,
        "min": low,
        "max": high,
        "mean": high,
        "l2": high,
        "std": 0.0,
        "nan": 0,
        "posinf": 0,
        "neginf": 0,
        "zero": 0,
        "subnormal": 0,
        "exponent": 0,
        "exponents": [4],
        "sampled": 4,
        "line": "model/attention.py:123",
    } | about


def frame(*rows):
    return pl.DataFrame(list(rows), infer_schema_length=None)


BAD = frame(
    row(0, "input", 1.0, 400.0, call=-1, line=None),
    row(1, "mul", 1.0, 60000.0, [0], posinf=2),
    row(2, "sub", 0.0, 1.0, [1, 1], nan=2),
    row(
        3, "addcdiv_", None, None, [2], nan=4, name="encoder.weight", phase="optimizer"
    ),
    row(4, "add", 0.0, 1.0, [0], phase="collective", name=None),
    row(5, "log", 0.0, 1.0, [0], neginf=1, rank=1),
    row(6, "clamp", 0.0, 1.0, [5], rank=1, step=1),
)


@pytest.mark.parametrize("width", [72, 80, 100, 140, 240])
def test_no_line_of_show_is_wider_and_no_number_is_cut(width):
    shown = text(print_show, describe_sites(BAD, rank=0), width)
    assert max(map(len, shown.splitlines())) <= width
    assert "6e+04" in shown
    one = text(print_show, describe_sites(BAD, "*/sub", rank=0), width)
    assert "/sub (forward)" in one
    assert "[red]heads[/red]" in "".join(one.split())


@pytest.mark.parametrize("width", [72, 80, 100, 140, 240])
def test_no_line_of_overflow_is_wider(width):
    found = text(print_overflow, trace_overflow(BAD), width)
    assert max(map(len, found.splitlines())) <= width
    words = " ".join(found.split())
    assert "of 4 values born at" in words
    assert "It reached encoder.weight." in words


def test_the_answer_in_words():
    verdict, *rest = answer(trace_overflow(BAD))
    site = "encoder.layer.0.[red]heads[/red]"
    assert (
        verdict
        == f"2 +Inf of 4 values born at {site}/mul in the forward pass (model/attention.py:123), step 0."
    )
    assert rest[0] == "Mul of values up to 400 passes the largest float16, 6.55e+04."
    assert rest[1].startswith(
        f"It passed into 2 tensors, the last one at {site}/addcdiv_ encoder.weight in the optimizer"
    )
    assert rest[-1] == f"1 later birth: {site}/log."
    assert not any("removed" in sentence for sentence in rest)


def test_the_answer_when_all_is_well():
    verdict, near = answer(trace_overflow(frame(row(1, "mul", 1.0, 60000.0))))
    assert verdict == "No NaN or Inf was born in 1 tensor."
    assert near == (
        "1 site within 3 powers of two of overflow: the nearest, encoder.layer.0.[red]heads[/red]/mul, keeps 0.1 in float16."
    )
    assert answer(trace_overflow(frame(row(1, "mul", 1.0, 2.0))))[1].startswith(
        "Every site keeps more than 3 powers"
    )


def test_events_that_do_not_fit_are_counted_and_births_stay():
    rows = [row(0, "exp", 1.0, 1.0, [], posinf=3)] + [
        row(i, "relu", 1.0, 1.0, [i - 1], posinf=3) for i in range(1, 9)
    ]
    rows += [row(9, "clamp", 0.0, 1.0, [8])]
    shown = text(print_overflow, trace_overflow(frame(*rows)), 140, limit=3)
    events = shown.split("in the order of calls")[1].split("Within")[0]
    assert events.count("propagation") == 1
    assert "death" in events
    assert "7 more events" in events


def test_histogram_shows_every_count():
    lines = histogram(
        [HistogramBin(exponent=e, count=n) for e, n in ((-2, 1), (-1, 0), (0, 100_000))]
    )
    assert lines == ["2^0  " + "█" * 40 + " 100,000", "2^-1 0", "2^-2 ▏ 1"]


def test_a_run_of_nothing_finite_and_no_floats():
    rows = frame(row(0, "argmax", 3, 3, dtype="int64"))
    shown = text(print_overflow, trace_overflow(rows), 80)
    assert "No floating-point values were recorded." in shown
    assert "None: the run has no backward pass" in shown
