"""Each verb does what docs/cli.md says, with the exit codes and files it names."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from roundoff.cli.app import app, main

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "cli.md").read_text()
WORKLOAD = """
import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))

def batches():
    return [torch.randn(32, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]

def metric(outputs, reference):
    same = [(o.argmax(1) == r.argmax(1)).double() for o, r in zip(outputs, reference)]
    return torch.cat(same).mean().item()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(arguments.split())
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_diagnose(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        "diagnose net.py --formats bf16,int8 --target 35dB -o out", capsys
    )
    assert (code, err) == (0, "")
    assert sorted(p.name for p in (folder / "out").iterdir()) == [
        "budget.parquet",
        "plan.toml",
        "report.html",
        "summary.json",
    ]
    for word in (
        "0/linear",
        "1/gelu",
        "int8",
        "predicted",
        "measured",
        "Coverage",
        "threads",
    ):
        assert word in out
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["result"]["measured_db"] >= 35
    assert {row["site"] for row in summary["ranking"]} == {
        "0/linear",
        "1/gelu",
        "2/linear",
    }


def test_in_steps_with_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("budget net.py --formats bf16,int8 -o b.parquet --json", capsys)
    assert code == 0
    assert len(json.loads(out)["ranking"]) == 5  # gelu has no int8
    code, out, _ = run(
        "plan b.parquet --target 45 -o p.toml --pin 0/linear=bf16 --json", capsys
    )
    assert code == 0
    planned = json.loads(out)
    assert planned["predicted_db"] >= 45
    code, out, _ = run("verify net.py p.toml -b b.parquet --json -o q.toml", capsys)
    assert code == 0
    proof = json.loads(out)["result"]
    # one standard error is 0.4 dB
    assert proof["measured_db"] == pytest.approx(planned["predicted_db"], abs=1.6)
    assert (folder / "q.toml").exists()


def test_a_missed_target_is_exit_code_1(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("budget net.py --formats int8 -o b.parquet".split()) == 0
    assert "plan" not in capsys.readouterr().out  # there is none yet
    assert main("plan b.parquet --target 30 -o p.toml".split()) == 0
    capsys.readouterr()
    code, out, _ = run("verify net.py p.toml --target 90dB --json", capsys)
    assert code == 1
    assert json.loads(out)["result"]["met"] is False
    code, _, err = run(
        "plan b.parquet --target 90 --pin */linear=int8 -o no.toml", capsys
    )
    assert code == 1
    assert "0/linear" in err
    assert not (folder / "no.toml").exists()


@pytest.mark.parametrize("verb", ["diagnose", "budget", "plan", "verify", "quantize"])
def test_every_option_is_documented(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(f"{verb} --help", capsys)
    assert code == 0
    section = DOCS.split(f"## roundoff {verb} ")[1].split("\n## ")[0]
    options = set(re.findall(r"^\s+(?:-\w, )?(--[a-z-]+)", out, flags=re.MULTILINE)) - {
        "--help",
        "--quiet",
        "--verbose",
        "--debug",
    }
    assert len(options) > 4
    assert {option for option in options if f"`{option}`" not in section} == set()


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main(["diagnose"]) == 2
    assert main(["nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err


def test_help_is_light() -> None:
    code = (
        "import sys; from roundoff.cli.app import main; main(['--help']);"
        "print([m for m in ('torch', 'polars', 'scipy', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_ctrl_c_leaves_nothing(folder: Path) -> None:
    text = WORKLOAD.replace(
        "def metric",
        "def forward(model, batch):\n    import time\n    print('running', flush=True)\n    time.sleep(30)\n\ndef metric",
    )
    (folder / "slow.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "roundoff",
        "budget",
        "slow.py",
        "-o",
        "out/b.parquet",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    assert list((folder / "out").iterdir()) == []


def advised_verbs(tree: ast.AST) -> set[str]:
    """Return the words after ``roundoff`` in what errors advise to do."""
    advice = [
        ast.unparse(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "do"
    ]
    return set(re.findall(r"(?<!same )\broundoff ([a-z]+)", " ".join(advice)))


def test_errors_advise_verbs_that_exist() -> None:
    verbs = set(typer.main.get_group(app).commands)
    unknown = {
        str(file.relative_to(ROOT)): strange
        for file in (ROOT / "src").rglob("*.py")
        if (strange := advised_verbs(ast.parse(file.read_text())) - verbs)
    }
    assert unknown == {}
