"""``roundoff overflow`` and ``roundoff show`` on runs written by the store: output, JSON, exit codes, messages."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len

from roundoff.cli.app import main
from roundoff.record.disk.writer import Writer

DOCS = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


def row(record, operator, values, inputs=(), **about):
    values = np.asarray(values, dtype=np.float64)
    finite = values[np.isfinite(values)]
    exponents = np.frexp(np.abs(finite[finite != 0]))[1] - 1
    low = int(exponents.min()) if exponents.size else 0
    some = finite.size > 0
    return {
        "record": record,
        "call": record - 2,
        "operator": operator,
        "module": "head",
        "phase": "forward",
        "index": 0,
        "place": 0,
        "inputs": list(inputs),
        "dtype": "float16",
        "shape": list(values.shape),
        "numel": values.size,
        "min": finite.min() if some else None,
        "max": finite.max() if some else None,
        "mean": finite.mean() if some else None,
        "l2": float(np.sqrt((finite**2).sum())) if some else None,
        "std": finite.std() if some else None,
        "nan": int(np.isnan(values).sum()),
        "posinf": int((values == np.inf).sum()),
        "neginf": int((values == -np.inf).sum()),
        "zero": int((values == 0).sum()),
        "subnormal": 0,
        "exponent": low,
        "sampled": values.size,
        "exponents": np.bincount(exponents - low).tolist() if exponents.size else [],
        "line": f"net.py:{record}",
        "layout": "strided",
        "device": "cpu",
        "inplace": False,
        "view_of": None,
        "name": None,
        "reason": None,
    } | about


def rows(peak):
    """What fp16 makes of exp(x), then a mask, a softmax and a gradient."""
    x = np.array([[1.0, 2.0], [3.0, peak]])
    with np.errstate(over="ignore"):
        e = np.exp(x).astype(np.float16).astype(np.float64)
    clean = np.nan_to_num(e, posinf=65504.0)
    masked = np.array([[1.0, -math.inf], [3.0, 4.0]])
    return [
        row(0, "parameter", [0.5, 0.25], call=-1, name="head.weight", line=None),
        row(1, "input", x, call=-1, module="", line=None),
        row(2, "exp", e, [1]),
        row(3, "nan_to_num", clean, [2]),
        row(4, "t", x, [1], view_of=1),
        row(5, "masked_fill", masked, [1]),
        row(6, "_softmax", [[1.0, 0.0], [0.27, 0.73]], [5]),
        row(7, "mul", [2.0**-20, 2.0**-27], [3, 0], phase="backward", dtype="float32"),
        row(8, "to_sparse", [1.0], [3])
        | dict.fromkeys(
            (
                "min",
                "max",
                "mean",
                "l2",
                "std",
                "nan",
                "posinf",
                "neginf",
                "zero",
                "subnormal",
                "exponents",
            )
        )
        | {"reason": "sparse tensors are not read"},
    ]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")

    def make(*peaks):
        with Writer(tmp_path / "run", about={"level": "op"}, overwrite=True) as writer:
            for step, peak in enumerate(peaks):
                given = rows(peak)
                writer.write_step(
                    step, {key: [r[key] for r in given] for key in given[0]}
                )
                writer.scalar(step, "loss_scale", 4.0)
        assert not writer.stopped

    make(4.0, 12.0)
    return make


def said(arguments, capsys, code=0):
    assert main(arguments.split()) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return " ".join(captured.out.split())


def test_overflow_answers_first(run, capsys):
    text = said("overflow run", capsys, 1)
    answer = text.split("NaN and Inf, in the order")[0]
    for part in (
        "1 +Inf of 4 values born at head/exp in the forward pass (net.py:2), step 1.",
        "Exp of values up to 12 passes the largest float16, 6.55e+04.",
        "head/nan_to_num (net.py:3) silently removed it.",
        "Try: subtract the maximum first",
        "2 tensors without statistics could not be judged.",
    ):
        assert part in answer
    assert "Allowed: 4 events that come from head/masked_fill" in text
    assert "1 site" in text.split("powers of two of the largest value")[1][:20]
    assert "Loss scale for fp16 gradients" in text
    assert "The run itself used up to 4, which is divided out." in text


def test_overflow_exit_codes(run, capsys):
    text = said("overflow run --step 0", capsys)
    assert text.startswith(
        "No NaN or Inf was born in 9 tensors. The -inf of masks, or what else is allowed"
    )
    assert said("overflow run --allow */exp", capsys).startswith(
        "No NaN or Inf was born"
    )
    assert said("overflow run --step 1 --within 0", capsys, 1)


def test_overflow_json(run, capsys):
    assert (
        main(["overflow", "run", "--json", "--formats", "fp16,bf16", "--margin", "0"])
        == 1
    )
    data = json.loads(capsys.readouterr().out)
    assert (data["first"]["site"], data["first"]["step"], data["first"]["deaths"]) == (
        "head/exp",
        1,
        1,
    )
    assert {e["kind"] for e in data["events"]} == {"birth", "death"}
    assert {f["format"] for f in data["formats"]} == {"fp16", "bf16"}
    gradients = {
        f["fate"]: f["share"]
        for f in data["formats"]
        if (f["phase"], f["format"]) == ("backward", "fp16")
    }
    assert gradients == {"overflow": 0.0, "subnormal": 0.5, "zero": 0.5}
    # gradients were recorded at scale 4: the largest is 2**-22, and 2**-22 * 2**37 = 32768 < 65504
    assert data["loss_scale"]["scale"] == 2.0**37
    assert data["loss_scale"]["zero_at_1"] == 0.5
    assert data["loss_scale"]["zero_at_scale"] == 0.0


def test_show(run, capsys):
    text = said("show run", capsys)
    assert text.startswith(
        "Step 1 of 0 to 1: 9 tensors of 9 sites, 1 of them views, 2 tensors with NaN or Inf."
    )
    assert "1 tensor without statistics (1: sparse tensors are not read)." in text
    sites = re.findall(
        r"(?:head)?/(?:parameter|input|exp|nan_to_num|masked_fill|_softmax|mul|to_sparse|t)\b",
        text,
    )
    assert sites[:4] == ["/input", "head/exp", "head/nan_to_num", "head/masked_fill"]
    assert " head.weight forward float16 " in text  # a parameter has its own name
    assert "head/t" not in sites
    assert "head/t " in said("show run --views", capsys)
    largest = said("show run --sort max --rows 1", capsys)
    assert "head/nan_to_num" in largest
    assert "7 more rows below" in largest
    assert "head/exp" not in said("show run --phase backward", capsys)
    assert "2 tensors with" not in said("show run --step 0", capsys)


def test_show_one_site(run, capsys):
    text = said("show run head/exp", capsys)
    for part in (
        "head/exp (forward)",
        "float16 2×2, on cpu",
        "Source line: net.py:2",
        "Magnitudes, of 4 elements",
        "2^4 ████",
        "Inputs",
        "/input",
        "Used by head/nan_to_num (forward, net.py:3)",
        "In other steps",
    ):
        assert part in text
    assert "head.weight" in said("show run head.weight", capsys)
    assert "Sites" in said("show run head/*", capsys)


def test_show_json(run, capsys):
    assert main(["show", "run", "--json", "--sort", "zero", "--phase", "forward"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["rows"][0]["site"] == "head/_softmax"
    assert data["coverage"]["reasons"] == [
        {"reason": "sparse tensors are not read", "count": 1}
    ]
    assert main(["show", "run", "head/exp", "--json"]) == 0
    (site,) = json.loads(capsys.readouterr().out)["site"]
    assert [(b["exponent"], b["count"]) for b in site["histogram"]] == [
        (1, 1),
        (2, 1),
        (3, 0),
        (4, 1),
    ]
    assert [i["site"] for i in site["inputs"]] == ["/input"]
    assert [h["posinf"] for h in site["history"]] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("show nowhere", ["nowhere"]),
        ("overflow nowhere", ["nowhere"]),
        ("show plain", ["plain", "run.json"]),
        ("overflow empty", ["empty"]),
        ("show empty", ["empty"]),
        ("show run head/expo", ["head/expo", "no such site", "head/exp"]),
        ("show run --step 7", ["--step", "7", "0, 1"]),
        ("overflow run --step 7", ["--step", "7", "0, 1"]),
        ("overflow run --rank 1", ["--rank", "1"]),
        ("show run --sort size_of", ["size_of", "nan", "l2"]),
        ("show run --phase fwd", ["fwd", "forward"]),
        ("overflow run --formats bf61", ["bf61", "bf16"]),
        ("overflow run --formats int8", ["int8", "scale"]),
    ],
)
def test_bad_input(arguments, words, run, tmp_path, capsys):
    (tmp_path / "plain").mkdir()
    Writer(tmp_path / "empty", about={}).close()
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert [word for word in words if word not in captured.err] == []


@pytest.mark.parametrize("verb", ["show", "overflow"])
def test_every_option_is_documented(verb, capsys):
    assert main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    section = DOCS.split(f"## roundoff {verb} ")[1].split("\n## ")[0]
    options = set(re.findall(r"^\s+(?:-\w, )?(--[a-z-]+)", out, flags=re.MULTILINE)) - {
        "--help",
        "--quiet",
        "--verbose",
        "--debug",
        "--no-views",
    }
    assert len(options) > 4
    assert {option for option in options if f"`{option}`" not in section} == set()


def test_the_help_of_overflow_says_its_exit_code(capsys):
    main(["overflow", "--help"])
    assert "exit code is 1" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", ["overflow run", "show run"])
def test_no_line_is_wider_than_a_terminal(run, capsys, monkeypatch, command):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    main(command.split())
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "head/exp" in shown
    assert max(cell_len(line.rstrip()) for line in shown.splitlines()) <= 60
