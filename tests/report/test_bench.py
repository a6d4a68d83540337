"""The report of ``roundoff bench``: sentences, table, page, and what a hostile name does to it."""

import io
import json
import math
import re

import pytest
from rich.console import Console

from roundoff.report import bench_answer, bench_chart, bench_html, strict
from roundoff.report.bench_html import write_bench
from roundoff.report.bench_text import as_text, print_bench
from roundoff.train import BenchRow, BenchSummary, Memory, Outcome, Ratios


def judged(verdict=None, difference=None, half=0.02, mean=1.5):
    interval = {}
    if difference is not None:
        interval = {
            "low": difference - half,
            "high": difference + half,
            "could_see": half,
        }
    return Outcome(
        mean=mean,
        spread=0.1,
        seeds=[1.4, 1.6],
        verdict=verdict,
        reason="0.2 of the spread between seeds",
        difference=difference,
        noise=0.1,
        **interval,
    )


def ratios(median):
    return median and Ratios(median, median - 0.1, median + 0.1, 10)


def row(name, verdict=None, speed=1.0, **changes):
    fields = {
        "config": name,
        "format": "fp32",
        "notes": [],
        "findings": [],
        "memory": Memory(1 << 20, 1 << 20, 2 << 20, 4 << 20, 8 << 20),
        "speed": ratios(speed),
        "cpu": ratios(speed),
        "seconds": 0.1,
        "loss": judged(verdict, 0.01 if verdict else None),
        "verdict": verdict,
    }
    return BenchRow(**(fields | changes))


def data(*rows, **changes):
    rows = rows or (row("fp32"), row("bf16", "no difference seen", 1.4))
    losses = [[2.0, 1.5, 1.2, 1.1], [2.2, 1.4, 1.3, 1.0]]
    fields = {
        "workload": "small",
        "reference": rows[0].config,
        "steps": 4,
        "seeds": [0, 1],
        "weights": "drawn anew",
        "device": "cpu",
        "threads": 2,
        "batches": 4,
        "held_out": 0,
        "metric": None,
        "warm": 2,
        "tail": 1,
        "memory_is": "counted",
        "notes": [],
        "rows": list(rows),
        "curves": {r.config: [] if r.failed else list(losses) for r in rows},
    }
    return BenchSummary(**(fields | changes))


def test_the_answer_of_one_that_gains():
    assert bench_answer.answer(data()) == [
        "No difference from fp32 beyond the noise between seeds is seen in bf16.",
        "Fastest is bf16: 1.40× the steps a second of fp32.",
    ]


def test_the_answer_names_every_outcome():
    bad = row("fp16", "different", 0.1, worse=True, skips=3)
    said = " ".join(
        bench_answer.answer(
            data(
                row("fp32"),
                bad,
                row("a", "undecided", 0.9),
                row("b", "different", 0.9),
                row("c", failed="no compiler", speed=None),
                notes=["batch 1 of the workload holds NaN or Inf"],
            )
        )
    )
    assert said == (
        "fp16 ends worse than fp32, by more than 2 seeds explain. b ends better than fp32, by more than 2 seeds explain. "
        "2 seeds do not decide if a trains like fp32. c could not be trained. None is clearly faster than fp32. "
        "fp16 skipped 3 of 8 steps for overflow. Batch 1 of the workload holds NaN or Inf."
    )


def test_the_answer_of_a_loss_that_is_not_finite():
    lost = row(
        "fp16",
        "different",
        worse=True,
        nonfinite="loss nan at step 2 (run 0)",
        loss=judged("different", mean=math.nan),
    )
    said = bench_answer.answer(data(row("fp32"), lost))
    assert said[0] == "fp16 ends with a loss that is not finite."
    assert "fp16: loss nan at step 2 (run 0)." in said


def test_one_alone():
    assert bench_answer.answer(data(row("fp32"))) == ["fp32 was trained with 2 seeds."]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_columns_that_fit(width):
    page = io.StringIO()
    print_bench(data(), Console(width=width, file=page))
    text = page.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "memory" in text
    assert "1.40×" in text


def test_the_text_says_what_could_have_been_seen():
    text = as_text(data())
    assert (
        "loss +0.01 [-0.01, +0.03]: no difference seen: 0.2 of the spread between seeds (0.02 would have shown"
        in text
    )
    assert "Weights: drawn anew. Memory is counted." in text


def test_the_page_is_whole_and_escapes_names(tmp_path):
    evil = '<script>alert("1")</script>'
    page = bench_html.page(
        data(row("fp32"), row(evil, "undecided", notes=[evil]), metric=evil)
    ).render()
    assert evil not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r'(src|href)="(?!#)', page)
    assert page.count("<polyline") == 3  # two losses, one difference
    assert page.count('class="band"') == 2
    write_bench(data(), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_the_page_of_what_failed_and_diverged():
    broken = row("c", failed="no compiler", speed=None, loss=None, memory=None)
    lost = row("d", "different", worse=True)
    found = data(row("fp32"), broken, lost)
    found.curves["d"] = [[1.0, math.nan, math.nan, 1.0]] * 2
    page = bench_html.page(found).render()
    assert "no compiler" in page
    assert "nan," not in page
    bench_html.page(
        data(row("fp32", failed="no", speed=None, loss=None, memory=None), broken)
    ).render()


def test_the_json_has_the_keys_of_the_rows():
    found = strict(data())
    assert json.loads(json.dumps(found)) == found
    assert list(found) == [
        *("workload", "reference", "steps", "seeds", "weights", "device", "threads"),
        *("batches", "held_out", "metric", "warm", "tail", "memory_is", "notes"),
        *("rows", "curves"),
    ]
    assert list(found["rows"][0]) == [
        *("config", "format", "failed", "notes", "findings", "seen", "memory"),
        *("scale", "scaled", "skips", "nonfinite", "speed", "cpu", "seconds"),
        *("loss", "metric", "worse", "verdict"),
    ]
    assert list(found["rows"][1]["loss"]) == [
        *("mean", "spread", "seeds", "verdict", "reason", "difference", "low"),
        *("high", "noise", "could_see"),
    ]
    assert list(found["rows"][0]["speed"]) == ["median", "low", "high", "rounds"]
    assert list(found["rows"][0]["memory"]) == [
        *("parameters", "gradients", "optimizer", "saved", "total"),
    ]


def test_curves_by_hand():
    assert bench_chart.running([1.0] * 10) == [1.0] * 10
    values = [
        float(i) for i in range(100)
    ]  # windows of 3: the mean of a line is the line, but at its ends
    assert bench_chart.running(values)[1:-1] == values[1:-1]
    assert bench_chart.mean_of([[1.0, 2.0], [3.0, None]]) == [2.0, None]
    assert bench_chart.noise_of([[1.0, 2.0], [3.0, None]]) == [math.sqrt(2), None]
    assert bench_chart.noise_of([[1.0, 2.0]]) == [None, None]


def test_a_diverging_curve_does_not_press_the_others_flat():
    found = data(row("fp32"), row("bf16", "no difference seen"), row("d", "different"))
    found.curves["d"] = [[2.0, 1e3, 1e6, 1e9]] * 2
    ticks = [
        float(t)
        for t in re.findall(
            r'class="tick y"[^>]*>([-\d.e+]+)<', str(bench_chart.curves(found))
        )
    ]
    assert max(ticks) < 10
