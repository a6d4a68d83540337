"""roundoff diagnose --candidate: what is printed and written, and the exit code."""

from __future__ import annotations

import json
import re

import polars as pl
import pytest

import roundoff
from roundoff.cli.app import main

FILE = """
import torch
from torch import nn

def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16, eps={eps}), nn.Linear(16, 3))

def batches():
    return [torch.randn(6, 8, generator=torch.Generator().manual_seed(1))]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text(FILE.format(eps=1e-5))
    (tmp_path / "wrong.py").write_text(FILE.format(eps=0.1))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_bug(folder, capsys):
    assert main(["diagnose", "good.py", "--candidate", "wrong.py", "-o", "out"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "1/native_layer_norm" in text
    assert "A bug: the difference at 1/native_layer_norm stays at" in text
    assert (
        "Written to out: reference, candidate, comparison, report.html, summary.json"
        in text
    )
    written = {"reference", "candidate", "comparison", "report.html", "summary.json"}
    assert {p.name for p in (folder / "out").iterdir()} == written
    assert "1/native_layer_norm" in (folder / "out" / "report.html").read_text()
    assert pl.read_parquet("out/comparison/comparison.parquet")["site"].len() > 0
    again = roundoff.compare(reference="out/reference", candidate="out/candidate")
    assert again.divergence.site == "1/native_layer_norm"


def test_more_rows_name_an_option_that_diagnose_has(folder, capsys):
    command = ["diagnose", "good.py", "-c", "wrong.py", "-o", "out", "--rows", "1"]
    assert main(command) == 1
    text = " ".join(capsys.readouterr().out.split())
    total = re.search(r"more values below: --rows (\d+)\.", text)[1]
    command[-1] = total
    assert main([*command[:-3], "again", "--rows", total]) == 1
    assert "more values below" not in capsys.readouterr().out


def test_a_format_comes_with_its_plan(folder, capsys):
    assert (
        main(
            [
                "diagnose",
                "good.py",
                "-c",
                "bf16",
                "-o",
                "out",
                "--target",
                "20dB",
                "--json",
            ]
        )
        == 0
    )
    summary = json.loads(capsys.readouterr().out)
    assert summary == json.loads((folder / "out" / "summary.json").read_text())
    assert summary["agrees"] is True
    assert summary["higher_precision"]["verdict"] == "rounding"
    assert summary["plan"]["result"]["met"] is True
    assert {"plan.toml", "budget.parquet", "plan.html", "report.html"} <= {
        p.name for p in (folder / "out").iterdir()
    }
    assert len(roundoff.Plan.load("out/plan.toml").rules) >= 0
    # once more into the same folder, in words
    assert (
        main(["diagnose", "good.py", "-c", "bf16", "-o", "out", "--target", "20dB"])
        == 0
    )
    text = capsys.readouterr().out
    assert "in fp64: rounding." in " ".join(text.split())
    assert "meets 20dB" in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-c", "bf61"], "there is no such candidate"),
        (["-c", "fp8_e4m3fn"], "torch cannot run a model in fp8_e4m3fn"),
        (["-c", "nowhere.py"], "no such file"),
        (["--noise", "1"], "only used with --candidate"),
        (["-c", "bf16", "--backend", "aot_eager"], "a backend is one of torch.compile"),
    ],
)
def test_bad_input(arguments, message, capsys):
    assert main(["diagnose", "good.py", "-o", "out", *arguments]) == 2
    assert message in capsys.readouterr().err
