"""Every bad input is one clear message on standard error, exit code 2, and no file left."""

from pathlib import Path

import pytest

from roundoff.cli.app import main

GOOD = """
import torch

def model():
    return torch.nn.Linear(4, 2)

def batches():
    return [torch.ones(8, 4)]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "good.py").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def message(arguments: str, capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    before = {
        p for p in Path.cwd().rglob("*") if p.is_file() and "__pycache__" not in str(p)
    }
    assert main(arguments.split()) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert {
        p for p in Path.cwd().rglob("*") if p.is_file() and "__pycache__" not in str(p)
    } == before
    return captured.err


FORWARD = "\ndef forward(model, batch):\n    "
WORKLOADS = {
    "no model": ("def batches():\n    return [1]\n", ["model", "bad.py"]),
    "no batches": (
        "import torch\nmodel = torch.nn.Linear(1, 1)\n",
        ["batches", "bad.py"],
    ),
    "raises at import": (
        "import nowhere_to_be_found\n",
        ["nowhere_to_be_found", "bad.py"],
    ),
    "model raises": (
        GOOD.replace("return torch.nn", "1 / 0; return torch.nn"),
        ["ZeroDivisionError", "bad.py", "5"],
    ),
    "empty batch": (
        GOOD.replace("torch.ones(8, 4)", "torch.ones(0, 4)"),
        ["empty", "batch 0"],
    ),
    "no batch": (GOOD.replace("[torch.ones(8, 4)]", "[]"), ["batches"]),
    "forward raises": (
        GOOD.replace("torch.ones(8, 4)", "torch.ones(8, 5)"),
        ["batch 0", "float32[8, 5]"],
    ),
    "no gradient": (
        GOOD
        + FORWARD
        + "return torch.from_numpy(model(batch).detach().numpy().copy())\n",
        ["gradient", "no_grad"],
    ),
    "integers": (
        GOOD + FORWARD + "return model(batch).argmax(1)\n",
        ["floating-point", "argmax"],
    ),
    "NaN": (
        GOOD + FORWARD + "return (model(batch) * float('inf') * 0).exp()\n",
        ["NaN", "/mul#1"],
    ),
}


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("verb", ["diagnose bad.py", "budget bad.py"])
def test_workload(
    verb: str, name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, words = WORKLOADS[name]
    (folder / "bad.py").write_text(text)
    err = message(verb, capsys)
    assert [word for word in words if word not in err] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("diagnose good.py --formats bf61", ["bf61", "bf16", "did you mean"]),
        (
            "diagnose good.py --pin *.attention=bf16",
            ["*.attention", "matches no site", "/linear"],
        ),
        (
            "diagnose good.py --pin linear",
            ["--pin: a pattern and a format are needed", "PATTERN=FORMAT"],
        ),
        ("diagnose good.py --target fast", ["fast", "40dB"]),
        (
            "diagnose good.py --target 40 --metric-drop 1%",
            ["one of", "target and metric_drop"],
        ),
        ("diagnose good.py --metric-drop 1%", ["metric"]),
        ("diagnose good.py --cost money", ["money", "bytes", "bitops", "seconds"]),
        ("diagnose good.py --cost bytez", ["'bytez'", "did you mean bytes?"]),
        ("diagnose good.py --of logits", ["logits", "output"]),
        ("diagnose good.py --of loss", ["loss"]),
        ("diagnose good.py -o good.py", ["good.py", "cannot write"]),
        ("budget good.py -o good.py/b.parquet", ["good.py", "cannot write"]),
        ("diagnose missing.py", ["missing.py"]),
        ("plan good.py --target 40", ["good.py", "budget"]),
        ("verify good.py good.py", ["good.py", "plan"]),
    ],
)
def test_arguments(
    arguments: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    err = message(arguments, capsys)
    assert [word for word in words if word not in err] == []


def test_a_plan_of_another_model_lists_its_sites(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "plan.toml").write_text(
        'schema = 1\ndefault = "fp32"\n[about]\n[[rule]]\nformat = "bf16"\nsites = ["encoder.0/linear"]\n'
    )
    err = message("verify good.py plan.toml", capsys)
    assert "encoder.0/linear" in err
    assert "/linear" in err.split("expected:")[1]


def test_interrupt_in_forward(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.py").write_text(GOOD + FORWARD + "raise KeyboardInterrupt\n")
    assert "interrupted" in message("diagnose bad.py -o out", capsys, 130)


@pytest.mark.parametrize(
    "arguments",
    [
        "budget {}/good.py --formats bf16",
        "diagnose {}/good.py",
        "show {}",
        "compare {} {}",
        "capture -o {}/run -- {}/good.py",
        "lint {}/good.py",
        "plan {}/budget.parquet",
        "plan explain {}/plan.toml x",
    ],
)
def test_the_working_folder_is_gone(
    arguments: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Libraries end the process where they find no working folder: oneMKL does."""
    gone = folder / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(arguments.replace("{}", str(folder)).split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "roundoff: the working folder does not exist any more\n"
        "  do: change to a folder that exists\n"
    )


def test_help_where_the_working_folder_is_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = folder / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["budget", "--help"]) == 0
    assert "--formats" in capsys.readouterr().out
