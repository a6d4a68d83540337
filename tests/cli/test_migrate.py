"""roundoff migrate: a diff first, files when asked, codes of its outcome."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from roundoff.cli.app import main

TRAIN = """\
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
"""
LEFT = TRAIN.replace("optimizer.step()", "optimizer.step(lambda: loss)")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def test_a_diff_first(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "train.py", "--to", "amp"]) == 0
    printed = capsys.readouterr().out
    assert "+scaler = torch.amp.GradScaler" in printed
    assert "train.py:8: small gradients are scaled" in printed
    assert "--write changes the file" in printed
    assert script.read_text() == TRAIN


def test_write_keeps_rights_and_mark(script: Path) -> None:
    script.write_bytes(b"\xef\xbb\xbf" + TRAIN.encode())
    script.chmod(0o755)
    assert main(["migrate", "train.py", "--to", "bf16", "--write", "-q"]) == 0
    assert script.read_bytes().startswith(b"\xef\xbb\xbfimport torch")
    assert b"bfloat16" in script.read_bytes()
    assert stat.S_IMODE(script.stat().st_mode) == 0o755


def test_another_file(script: Path) -> None:
    assert main(["migrate", "train.py", "--to", "bf16", "-o", "new.py", "-q"]) == 0
    assert "bfloat16" in Path("new.py").read_text()
    assert script.read_text() == TRAIN


def test_json(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "train.py", "--to", "amp", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["after"].startswith("import torch")
    assert data["output"] is None
    assert {"line", "reason"} == set(data["changes"][0])


def test_left_is_no_success(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(LEFT)
    assert main(["migrate", "train.py", "--to", "amp"]) == 4
    printed = capsys.readouterr().out
    assert "Left as it is:" in printed
    assert "nothing is changed" in printed


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("migrate none.py --to amp", "none.py"),
        ("migrate . --to amp", "not a file"),
        ("migrate train.py", "not said"),
        ("migrate train.py --to fp16", "--to"),
        ("migrate train.py --from amp", "--from"),
        ("migrate train.py --to amp --write -o x.py", "one file"),
        ("migrate notebook.ipynb --to amp", "notebook"),
        ("migrate latin.py --to amp", "UTF-8"),
        ("migrate wrong.py --to amp", "line 1"),
    ],
)
def test_bad_input(
    script: Path, line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("notebook.ipynb").write_text('{"cells": []}')
    Path("latin.py").write_bytes(b"x = '\xe9'\n")
    Path("wrong.py").write_text("def f(:\n")
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
