"""What docs/capture.md shows runs: its Python, and its commands on a small training script."""

import re
import shlex
from pathlib import Path

import pytest

import roundoff
from roundoff.cli.app import main

TEXT = (Path(__file__).parent.parent / "docs" / "capture.md").read_text()
SCRIPT = """
import torch

torch.manual_seed(0)
encoder = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Softmax(-1))
model = torch.nn.ModuleDict({"encoder": encoder})
model.forward = lambda x: encoder(x)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python(folder, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    exec(code, {})
    printed = capsys.readouterr().out
    assert "operator" in printed
    assert "tensor([[" in printed
    assert roundoff.load("runs/linear").scalars.collect()["name"].to_list() == ["loss", "loss"]


def test_commands(folder, capsys):
    lines = [line for line in TEXT.splitlines() if line.startswith("roundoff ")]
    assert len(lines) == 7
    for line in lines:
        assert main(shlex.split(line, comments=True)[1:]) == 0, capsys.readouterr().err
