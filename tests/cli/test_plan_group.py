"""roundoff plan convert and explain; a first word that is neither is a budget, as before."""

import json
import re
import shlex
from pathlib import Path

import pytest

from roundoff.cli.app import main

DOCS = Path(__file__).parents[2] / "docs"
NET = """
import collections
import torch

def model():
    parts = {"fc1": torch.nn.Linear(4, 4), "norm": torch.nn.LayerNorm(4)}
    return torch.nn.Sequential(collections.OrderedDict(parts))

def batches():
    return [torch.ones(3, 4)]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "ops_info.json").write_text(
        '{"black-list":\n {"to-add": ["SoftmaxV2"]}}'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(shlex.split(line))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_budget_needs_no_word(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run("plan --help", capsys)
    assert code == 0
    assert out.startswith("Usage: roundoff plan [OPTIONS]")
    assert "--max-cost" in out
    assert "roundoff plan convert" in out
    assert run("plan", capsys)[0] == 2
    code, _, err = run("plan none.parquet --target 30dB", capsys)
    assert code == 2
    assert "none.parquet" in err
    assert (
        run("plan --target 30dB none.parquet", capsys)[2] == err
    )  # options first, too


@pytest.mark.parametrize("verb", ["convert", "explain"])
def test_every_option_is_documented(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(f"plan {verb} --help", capsys)
    assert code == 0
    section = (
        (DOCS / "cli.md")
        .read_text()
        .split(f"## roundoff plan {verb} ")[1]
        .split("\n## ")[0]
    )
    options = set(re.findall(r"^\s+(?:-\w, )?(--[a-z-]+)", out, flags=re.MULTILINE)) - {
        "--help",
        "--quiet",
        "--verbose",
        "--debug",
    }
    assert len(options) >= 3
    assert {option for option in options if f"`{option}`" not in section} == set()


def test_convert_and_explain(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        "plan convert ops_info.json --format bf16 --to plan -o plan.toml", capsys
    )
    assert (code, err) == (0, "")
    assert "Note: operators on no list here follow torch's own lists" in out
    assert "Written to plan.toml" in out
    code, out, _ = run(
        "plan convert plan.toml --to ascend -o again.json --json", capsys
    )
    assert code == 0
    assert (
        json.loads(out)["use"]
        == "--precision_mode_v2=mixed_bfloat16 --modify_mixlist=again.json"
    )
    assert json.loads((folder / "again.json").read_text()) == {
        "black-list": {"to-add": ["SoftmaxV2"]}
    }
    code, out, _ = run(
        "plan explain plan.toml a/softmax a/layer_norm --device cuda --json", capsys
    )
    softmax, norm = json.loads(out)
    line = (folder / "plan.toml").read_text().splitlines().index('  "op:softmax",') + 1
    expected = f"rule 1, op:softmax (plan.toml, line {line}, from SoftmaxV2 (line 2, black-list to-add) of ops_info.json)"
    assert softmax["why"] == expected
    assert (norm["format"], norm["listed"]) == (
        "fp32",
        {"cpu": "follow", "cuda": "fp32"},
    )
    code, out, _ = run("plan explain ops_info.json a/softmax 'b[0]/linear'", capsys)
    assert code == 0
    assert "b[0]/linear" in out
    assert "autocast, cuda" in out


def test_with_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    (folder / "te.yaml").write_text(
        "high:\n  enabled: True\n  layers:\n    layer_name_regex_pattern: fc\n"
        "  transformer_engine:\n    DisableFP8Layer:\n      enabled: True\n"
    )
    assert run("plan convert te.yaml --to plan -o te.toml", capsys)[0] == 2
    assert (
        run("plan convert te.yaml --to plan -o te.toml --model net.py", capsys)[0] == 0
    )
    code, out, _ = run(
        "plan explain te.toml fc1/linear norm/layer_norm -w net.py", capsys
    )
    assert code == 0
    assert "rule 1, fc1/*" in out
    code, _, err = run("plan explain te.toml fc2/linear -w net.py", capsys)
    assert code == 2
    assert "no module 'fc2'" in err
    code, _, err = run("plan explain te.toml fc1/liner -w net.py", capsys)
    assert code == 2
    assert "does not call 'fc1/liner'" in err


def test_what_cannot_be_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "plan.toml").write_text(
        'schema = 1\nautocast = "bf16"\n[[rule]]\nformat = "fp32"\nsites = ["head.*", "op:exp"]\n'
    )
    code, out, err = run("plan convert plan.toml --to paddle -o amp.json", capsys)
    assert (code, out) == (2, "")
    assert "rule 1, head.* → fp32: not an operator type" in err
    assert not (folder / "amp.json").exists()
    code, out, _ = run(
        "plan convert plan.toml --to paddle -o amp.json --partial", capsys
    )
    assert code == 0
    assert "Left out: rule 1, head.* → fp32" in out
    assert json.loads((folder / "amp.json").read_text())["custom_black_list"] == ["exp"]
    (folder / "ops_info.json").write_text('{ // comment\n "black-list": {}}')
    code, _, err = run("plan convert ops_info.json --to plan -o p.toml", capsys)
    assert code == 2
    assert "line 1: JSON has no comments" in err
    assert run("plan convert plan.toml --to caffe -o x", capsys)[0] == 2


def test_the_page_about_lists_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (DOCS / "lists.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    printed, commands = re.findall(
        r"```\n(.*?)```",
        page.replace("```python\n" + code + "```", ""),
        flags=re.DOTALL,
    )
    exec(code, {})
    assert capsys.readouterr().out == printed
    for line in commands.splitlines():
        assert run(line.removeprefix("roundoff "), capsys)[0] == 0


def test_by_operator_type(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(
        "budget net.py --formats bf16 --probes 2 -o budget.parquet -q", capsys
    )
    assert code == 0, err
    line = "plan budget.parquet --target 20dB --tie operator -o plan.toml -q"
    code, _, err = run(line, capsys)
    assert code == 0, err
    assert "op:linear" in Path("plan.toml").read_text()
    code, out, err = run("plan convert plan.toml --to ascend -o mix.json", capsys)
    assert code == 0, err
    assert "own lists" in out
    assert "MatMulV2" in Path("mix.json").read_text()
    code, _, err = run(line.replace("operator", "operators"), capsys)
    assert code == 2
    assert "--tie" in err
    assert "operator" in err


@pytest.mark.parametrize("width", [40, 80, None])
def test_explain_cuts_no_name(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    width: int | None,
) -> None:
    """None is a pipe: the name stands on one line."""
    name = "encoder_of_the_queries.attention_with_a_long_name.projection/linear"
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("FORCE_COLOR", "1")
    code, out, _ = run(f"plan explain ops_info.json {name} a/softmax", capsys)
    assert code == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
    assert "…" not in out
    if width is None:
        assert any(name in line for line in lines)
        return
    assert max(map(len, lines)) <= width
    end = next(line.index("format") for line in lines if "format" in line)
    rule = next(n for n, line in enumerate(lines) if line.startswith("─"))
    shown = "".join(line[:end].strip() for line in lines[rule + 1 :])
    assert shown.startswith(f"{name}a/softmax")
