"""What docs/capture.md and docs/compare.md show runs: their Python, their commands, and what those print."""

import importlib
import re
import shlex
import warnings
from pathlib import Path

import pytest

import roundoff
from roundoff.cli.app import main

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "capture.md").read_text()
COMPARE = (DOCS / "compare.md").read_text()
README = (DOCS.parent / "README.md").read_text()
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


@pytest.fixture(scope="module")
def with_compiler():
    """Import torch's compiler, as the first optimizer of a process does.

    What that warns of is an error in tests, and inside a recording would be the script's.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch._dynamo")


@pytest.fixture
def folder(tmp_path, monkeypatch, with_compiler):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python(folder, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    exec(code, {})
    printed = capsys.readouterr().out
    assert "operator" in printed
    assert "tensor([[" in printed
    assert roundoff.load("runs/linear").scalars.collect()["name"].to_list() == [
        "loss",
        "loss",
    ]


def test_commands(folder, capsys):
    lines = [line for line in TEXT.splitlines() if line.startswith("roundoff ")]
    assert len(lines) == 7
    for line in lines:
        # one further process will do: each imports torch
        words = line.replace("--noise 2 --repeats 1", "--noise 1")
        assert main(shlex.split(words, comments=True)[1:]) == 0, capsys.readouterr().err


def test_compare(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    script, code = re.findall(r"```python\n(.*?)```", COMPARE, flags=re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    codes, printed = [], ""
    for line in COMPARE.splitlines():
        if line.startswith("roundoff "):
            codes.append(main(shlex.split(line)[1:]))
            printed += capsys.readouterr().out
    # three recordings, an agreement, then what differs; diff only shows
    assert codes == [0, 0, 0, 0, 1, 0, 1, 1]
    shown = re.findall(r"```\n((?:The runs|1/native).*?)```", COMPARE, flags=re.DOTALL)
    assert len(shown) == 3
    for block in shown:
        missing = [
            line
            for line in block.splitlines()
            if line.strip() and shape(line) not in shape(printed)
        ]
        assert missing == []
    told = README.split("```\nThe runs part")[1].split("...\n```")[0]
    assert told.strip() in shown[1]
    exec(code, {})
    assert "The runs part at 1/native_layer_norm" in capsys.readouterr().out
    assert (tmp_path / "compare.html").exists()


def shape(text):
    """The text without its numbers, bars and widths of columns: those differ between machines."""
    return " ".join(re.sub(r"[\d.,]+(e[+-]\d+)?|[█─]+", "#", text).split())


def test_train(capsys):
    """The first part of docs/train.md runs; what its comment says is printed."""
    code = re.findall(
        r"```python\n(.*?)```", (DOCS / "train.md").read_text(), flags=re.DOTALL
    )[0]
    exec(code, {})
    printed = capsys.readouterr().out
    assert "op:softmax" in printed
    assert "3/softmax runs in fp32: rule 1, op:softmax" in printed


@pytest.mark.parametrize("page", ["quantize", "qat", "prune", "text", "export"])
def test_pages_on_quantization(page, tmp_path, monkeypatch, capsys):
    """The Python of these pages runs from top to bottom, in one go."""
    if page == "text":
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), flags=re.DOTALL
    )
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    if page == "prune":
        text = (DOCS / "prune.md").read_text()
        assert text.split("```text\n")[-1].rstrip("`\n") in capsys.readouterr().out
    if page == "export":
        assert "True True ['0/conv2d:0', '2/relu'" in capsys.readouterr().out
    if page == "quantize":
        assert (
            "[('0/linear', 'int8'), ('1/relu', 'fp32'), ('2/linear', 'int8')]"
            in capsys.readouterr().out
        )
