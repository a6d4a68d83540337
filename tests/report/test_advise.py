"""The answer of ``roundoff advise`` as text and as a page, and as JSON on the command line."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.cells import cell_len

from roundoff.advise import (
    AdviceRow,
    AdviceSummary,
    Change,
    Combination,
    Counts,
    DtypeShare,
    OperatorCount,
    OperatorTime,
    Precision,
    Profile,
    Roofline,
    Speed,
    UnknownOperator,
)
from roundoff.cli.app import main
from roundoff.report import HarmlessConsole, advice_as_text, write_advice
from roundoff.report.advise_answer import answer, bound, sentence
from roundoff.report.advise_text import print_advice

SPEED = Speed(median=1.5, low=1.4, high=1.6, rounds=5, clock="CPU time")
ROOFLINE = Roofline(1e11, 1e10, 1)


def row(**fields) -> AdviceRow:
    values = {
        "name": "channels_last",
        "seen": "2 calls of [bold]<b>convolutions</b>",
        "place": "stem (net.py:3)",
        "do": "model.to(...)",
        "why": "kernels read",
        "source": "a guide",
        "verdict": "pays",
        "speed": SPEED,
        "precision": Precision(output_db=121.04, loss_db=None),
        "change": Change("channels_last"),
    }
    return AdviceRow(**{**values, **fields})


def summary(rows=(), changes=(), operators=True) -> AdviceSummary:
    count = OperatorCount(
        operator="convolution",
        module="stem",
        phase="forward",
        dtype="float32",
        shape="1×8×4×4",
        line="net.py:3",
        calls=1,
        macs=1e6,
        flops=2e6,
        bytes_read=1e4,
        bytes_written=1e4,
        kind="conv",
        is_counted=True,
    )
    time = OperatorTime("convolution", "stem", "forward", 0.002, 1.0)
    return AdviceSummary(
        workload="net",
        train=False,
        device="cpu",
        batches=2,
        step_seconds=0.004,
        counts=Counts((count,) if operators else (), (UnknownOperator("odd", 3),)),
        profile=Profile((time,) if operators else (), 0.002 if operators else 0.0),
        roofline=ROOFLINE,
        dtypes=(DtypeShare("float32", 1.0, 1.0),) if operators else (),
        rows=tuple(rows),
        combination=Combination(
            changes=tuple(changes),
            dropped=("fold_batch_norm",) if changes else (),
            speed=SPEED if changes else None,
            precision=Precision(output_db=math.inf, loss_db=None) if changes else None,
        ),
        loading=None,
        least_db=40.0,
        absent=("no_fp64",),
        notes=(),
    )


def test_the_first_sentence_says_what_is_gained_and_the_next_what_it_costs():
    sentences = answer(summary([row()], [Change("channels_last")]))
    assert sentences[0] == "1.50× the speed with channels_last."
    assert sentences[1] == "They keep the outputs bit for bit."
    assert "batch norms folded" in sentences[2]
    # 2e6 FLOP and 2e4 bytes: 20 µs at 1e11 FLOP/s, longer than 2 µs at 1e10 B/s; of 4 ms
    assert "(100 GFLOP/s, 10 GB/s) it would take 0.5% of that." in " ".join(sentences)


def test_nothing_that_pays_is_said():
    lost = row(verdict="does not pay")
    assert answer(summary([lost]))[0] == "Nothing that was tried pays here: 1 trial."


def test_a_reason_is_said_as_what_it_is():
    untried = row(speed=None, reason="there is no GPU")
    assert sentence(untried).endswith("Not tried: there is no GPU.")
    assert sentence(row(reason="by hand")).endswith("Note: by hand.")


def test_what_bounds_an_operator():
    assert bound(11.0, ROOFLINE) == "arithmetic"
    assert bound(9.0, ROOFLINE) == "memory"
    assert bound(None, ROOFLINE) == "–"


def test_the_whole_step_is_known_from_a_part():
    """Half of the step twice as fast: 1 / (0.5 + 0.25)."""
    twice = Speed(median=2.0, low=2.0, high=2.0, rounds=5, clock="CPU time")
    assert row(speed=twice, of="layer", share=0.5).step_speed == pytest.approx(4 / 3)
    assert row(speed=twice, of="layer").step_speed is None
    assert row(speed=twice).step_speed == 2.0
    assert row(speed=None).step_speed is None


def test_no_line_is_wider_than_a_terminal():
    page = io.StringIO()
    shown = summary([row(name="autocast", place="encoder.layers.0.attention.linear")])
    print_advice(shown, HarmlessConsole(width=60, file=page))
    lines = page.getvalue().splitlines()
    assert max(cell_len(line.rstrip()) for line in lines) <= 60
    assert "encoder.layers" in page.getvalue()


def test_text_shows_speed_and_precision_side_by_side():
    text = advice_as_text(summary([row()], [Change("channels_last")]))
    line = next(line for line in text.splitlines() if "121.0" in line)
    assert "1.50×" in line
    assert "odd (3 calls)" in text
    assert "[bold]<b>convolutions</b>" in text


@pytest.mark.parametrize("operators", [True, False])
def test_the_page_is_whole_and_escapes(tmp_path, operators):
    rows = [row(), row(name="fragmentation", speed=None, precision=None, reason="why")]
    write_advice(summary(rows, operators=operators), tmp_path / "advise.html")
    page = (tmp_path / "advise.html").read_text()
    assert "&lt;b&gt;convolutions" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert ("<svg" in page) == operators


WORKLOAD = """
import torch

def model():
    return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))

def batches():
    return [torch.ones(1, 1, 6, 6)]
"""


def test_the_command_line_writes_every_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(WORKLOAD)
    words = (
        "advise net.py --seconds 0 --json --html a.html --apply a.toml --trace a.json"
    )
    assert main(words.split()) == 0
    printed = json.loads(capsys.readouterr().out)
    # 16 results of 9 products for 2 channels, and for each two of bias and norm
    assert sum(r["macs"] for r in printed["counts"]["rows"]) == 16 * 2 * 9
    assert {r["name"] for r in printed["rows"]} >= {"fold_batch_norm", "channels_last"}
    assert (tmp_path / "a.toml").exists()
    assert "<html" in (tmp_path / "a.html").read_text()
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]


def test_a_missing_workload_is_bad_input(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["advise", "no.py"]) == 2
    assert "no such file" in capsys.readouterr().err
