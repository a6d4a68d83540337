"""What docs/capture.md and docs/compare.md show runs: their Python, their commands, and what those print."""

import importlib
import re
import shlex
import sys
import warnings
from pathlib import Path

import pytest
from rich.console import Console

import roundoff
from roundoff.cli import options
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


def counts(text):
    """The text without its fractions, and without the digits of names (AVX2, fp16): what is counted stays."""
    without = re.sub(r"\d[\d,]*(\.\d+(e[+-]\d+)?|e[+-]\d+)|(?<=[A-Za-z])\d+", "#", text)
    return " ".join(re.sub("[█▏▎▍▌▋▊▉─]+", "#", without).split())


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


#: Pages of verbs, whose commands run in a folder with the files of the tutorial.
PAGES = "tutorial advise budget check diagnose diff lint migrate overflow plan replay show tune verify".split()
BLOCK = re.compile(r'```(python|console)(?: title="([^"]+)")?\n(.*?)```', re.DOTALL)


def blocks_of(page):
    return BLOCK.findall((DOCS / f"{page}.md").read_text())


@pytest.mark.filterwarnings("ignore:fp16 on")
@pytest.mark.parametrize("page", PAGES)
def test_pages_of_verbs(page, tmp_path, monkeypatch, capfd, with_compiler):
    """Files are written, commands run and print what the page shows, Python runs, in order."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(options, "console", lambda: Console(width=100, highlight=False))
    for _, title, text in [*blocks_of("tutorial"), *blocks_of(page)]:
        if title:
            (tmp_path / title).write_text(text)
            monkeypatch.delitem(sys.modules, Path(title).stem, raising=False)
    names: dict[str, object] = {}
    for kind, title, text in blocks_of(page):
        if kind == "console":
            check_console(text, capfd)
        elif not title:
            exec(text, names)
    for name in ("net", "fit"):
        sys.modules.pop(name, None)


def check_console(text, capfd):
    """Run the lines that begin with $; the lines below each are among what it prints."""
    commands = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    for command in commands:
        line, _, shown = command.partition("\n")
        # 1: a verb that found what the page is about
        assert main(shlex.split(line)[1:]) in (0, 1), capfd.readouterr().err
        printed = counts(capfd.readouterr().out)
        missing = [
            row
            for row in shown.splitlines()
            if row.strip() and row != "..." and counts(row) not in printed
        ]
        assert missing == []


def test_every_verb_has_a_page():
    index = (DOCS / "index.md").read_text()
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    for verb in main_verbs():
        page = (DOCS / f"{verb}.md").read_text()
        assert f"roundoff {verb}" in page
        assert f"{verb}.md" in navigation
        assert f"({verb}.md)" in index


def main_verbs():
    return re.findall(
        r"^## roundoff (\w+) ", (DOCS / "cli.md").read_text(), re.MULTILINE
    )
