"""``roundoff compare`` and ``roundoff diff`` on small recorded trainings: what is said, JSON, exit codes, messages."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

import roundoff
from roundoff.cli import options as cli_options
from roundoff.cli.app import main
from roundoff.record.disk.writer import Writer

DOCS = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


class Net(torch.nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.low, self.norm, self.high = (
            torch.nn.Linear(8, 16),
            torch.nn.LayerNorm(16, eps=eps),
            torch.nn.Linear(16, 4),
        )

    def forward(self, x):
        return self.high(torch.relu(self.norm(self.low(x))))


def record(path, eps=1e-5, *, steps=1, keep="tensors", leaves=0, lr=0.1):
    torch.manual_seed(0)
    model = Net(eps)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with roundoff.capture(path, model, keep=keep, leaves=leaves) as run:
        for step in range(steps):
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            run.step()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, options in {
        "good": {},
        "same": {},
        "bad": {"eps": 0.3},
        "longer": {"steps": 2},
        "stats": {"keep": "stats"},
        "bad_stats": {"eps": 0.3, "keep": "stats"},
        "leaves": {"keep": "stats", "leaves": 32},
        "bad_leaves": {"eps": 0.3, "keep": "stats", "leaves": 32},
    }.items():
        record(folder / name, **options)
    return folder


@pytest.fixture
def here(runs, monkeypatch):
    monkeypatch.chdir(runs)
    monkeypatch.setenv("COLUMNS", "150")
    return runs


def said(arguments, capsys, code):
    assert main(arguments.split()) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return " ".join(captured.out.split())


def test_agreement(here, capsys):
    text = said("compare good same", capsys, 0)
    assert re.search(r"The runs agree: all \d+ values are equal, bit for bit\.", text)
    assert "Operators that made" not in text


def test_the_answer_comes_first(here, capsys):
    text = said("compare good bad", capsys, 1)
    answer = text.split("Operators that made")[0]
    for part in (
        "The runs part at norm/native_layer_norm (",
        "test_compare.py:",
        "), step 0, in the forward pass: its inputs are",
        "times what rounding explains.",
        "It looks like a wrong constant: eps: 1e-05, here 0.3.",
        "of the error at the end of the step.",
        "only inherit it.",
        "Try: compare this argument in the two programs.",
    ):
        assert part in answer
    assert "wrong constant" in text.split("likeliest first")[1]
    assert "its own" in text.split("Values, those that fail")[1]


def test_a_narrow_terminal_keeps_the_numbers(here, capsys, monkeypatch):
    monkeypatch.setattr(cli_options, "console", lambda: Console(width=70))
    assert main("compare good bad".split()) == 1
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 70
    assert all(heading in out for heading in ("tolerance", "looks like", "line"))


def test_to_a_pipe_every_column_and_name_is_whole(here, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = said("compare good bad", capsys, 1)
    assert "tolerance" in text
    assert "norm/native_layer_norm" in text


def test_json(here, capsys):
    assert main("compare good bad --json --rows 3".split()) == 1
    data = json.loads(capsys.readouterr().out)
    assert {
        "answer",
        "agrees",
        "verdicts",
        "divergence",
        "culprits",
        "coverage",
        "damage",
        "notes",
        "rows",
    } <= {*data}
    assert (
        data["divergence"]["site"]
        == data["culprits"][0]["site"]
        == "norm/native_layer_norm"
    )
    assert (data["agrees"], len(data["rows"]), data["damage"]) == (False, 3, [])
    assert data["answer"].startswith("The runs part at norm/native_layer_norm")
    assert sum(data["verdicts"].values()) == data["coverage"]["rows"]


def test_classic_limits(here, capsys):
    # cosine is at least -1, and no distance is above 1e9: nothing can fail
    text = said("compare good bad --cosine -1", capsys, 0)
    assert "Asked for cosine at least -1: all" in text
    assert said("compare good bad --limit max_abs=1e9 --limit error=1e9", capsys, 0)
    text = said("compare good bad --limit max_abs=0 --json", capsys, 1)
    rows = (
        roundoff.compare(reference="good", candidate="bad")
        .table.filter(max_abs=0)
        .height
    )
    assert (
        json.loads(text)["verdicts"]["fail"]
        == json.loads(text)["coverage"]["measured"] - rows
    )
    assert said("compare good bad --margin 1e12", capsys, 0).startswith(
        "good against bad"
    )


def test_a_saved_comparison_is_judged_again(here, tmp_path, capsys):
    saved = tmp_path / "kept"
    assert main(f"compare good bad --save {saved}".split()) == 1
    assert "Comparison written to" in capsys.readouterr().out
    shutil.move(here / "good", here / "away")  # nothing is computed again
    try:
        assert main(f"compare {saved} --json".split()) == 1
        again = json.loads(capsys.readouterr().out)
        assert main(f"compare {saved} --cosine -1".split()) == 0
    finally:
        shutil.move(here / "away", here / "good")
    capsys.readouterr()
    assert main("compare good bad --json".split()) == 1
    fresh = json.loads(capsys.readouterr().out)
    for key in ("answer", "rows", "culprits", "verdicts", "coverage"):
        assert again[key] == fresh[key]


def test_a_saved_comparison_at_a_url(here):
    found = roundoff.compare(reference="good", candidate="bad")
    found.save("memory://compare/kept")
    again = roundoff.Comparison.load("memory://compare/kept")
    assert again.table.equals(found.table)
    assert again.answer == found.answer


def test_html(here, tmp_path, capsys):
    page = tmp_path / "r.html"
    assert f"Report written to {page}" in said(
        f"compare good bad --html {page}", capsys, 1
    )
    text = page.read_text()
    assert "http" not in text.replace("http-equiv", "")
    assert "norm/native_layer_norm" in text


def test_statistics_alone(here, capsys):
    text = said("compare stats bad_stats", capsys, 1)
    assert "This is from statistics alone (neither run kept tensors)." in text
    assert "norm/native_layer_norm" in text.split("Values")[0]
    text = said("compare stats bad", capsys, 1)
    assert "This is from statistics alone (the reference did not keep tensors)." in text
    assert "by their statistics" in said("compare stats good", capsys, 0)


def test_what_was_not_kept_is_computed_again(here, capsys):
    text = said("compare leaves bad_leaves", capsys, 1)
    assert "were computed again from what the steps began with" in text
    assert "It looks like a wrong constant: eps: 1e-05, here 0.3." in text
    assert "are equal, bit for bit" in said("compare leaves good", capsys, 0)


def test_steps_of_one_run_alone(here, capsys):
    text = said("compare good longer", capsys, 0)
    assert "Only the candidate has step 1." in text
    assert "1 is only in the candidate" in text


def test_another_world_size(here, tmp_path, capsys):
    shutil.copytree(here / "good", tmp_path / "two")
    shutil.copytree(tmp_path / "two" / "rank0", tmp_path / "two" / "rank1")
    text = said(f"compare good {tmp_path / 'two'} --json", capsys, 0)
    assert json.loads(text)["notes"] == ["Only the candidate has rank 1"]
    assert json.loads(text)["coverage"]["status"]["only in candidate"] == 1


def test_a_mapping_of_modules(here, tmp_path, capsys):
    mapping = tmp_path / "map.toml"
    mapping.write_text('"norm" = "norm"\n')
    said(f"compare good same --map {mapping}", capsys, 0)


def test_damage_is_named_and_the_rest_compared(here, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(here / "longer", broken)
    path = broken / "rank0" / "step000001" / "ops.parquet"
    path.write_bytes(path.read_bytes()[:-7])
    text = said(f"compare longer {broken}", capsys, 2)
    assert "Damaged and left out:" in text
    assert "step000001" in text
    assert "1 step could not be read" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("compare nowhere good", ["nowhere"]),
        ("compare good nowhere", ["nowhere"]),
        ("compare good", ["one run is not enough", "REF and CAND", "--save"]),
        ("compare good empty", ["the run is empty"]),
        ("compare good bad --limit cosin=0.9", ["no such metric", "cosin", "sqnr_db"]),
        ("compare good bad --limit cosine", ["--limit", "METRIC=VALUE", "'cosine'"]),
        (
            "compare good bad --rank 3",
            ["--rank", "not both rank 3", "rank 0 in the reference"],
        ),
        (
            "compare good longer --step 1",
            ["--step", "not both step 1", "steps 0 to 1 in the candidate"],
        ),
        (
            "compare good bad --map missing.toml",
            ["missing.toml", "cannot be read", "encoder.layers"],
        ),
        ("compare good bad --map empty.toml", ["empty.toml", "is empty"]),
        (
            "compare good bad --map types.toml",
            ["types.toml", "no name", "dots need quotes"],
        ),
        (
            "compare good bad --map typo.toml",
            ["matches nothing", "the reference has no module 'nrm'", "norm"],
        ),
        (
            "compare good bad --map there.toml",
            ["matches nothing", "the candidate has no module 'nrm'", "norm"],
        ),
        ("compare good bad --engine spark", ["unknown engine", "spark", "local, ray"]),
        ("compare damaged_saved", ["cannot be read", "damaged_saved"]),
        ("compare newer_saved", ["another version", "newer_saved"]),
        ("compare newer_saved --rank 0", ["only judged again", "--rank"]),
        (
            "diff good bad norm/native_layer_nor",
            ["neither run has this site", "norm/native_layer_norm"],
        ),
        (
            "diff good bad norm/native_layer_norm --phase optimizer",
            ["has no such value", "forward, place 0"],
        ),
        (
            "diff good bad norm/native_layer_norm --place 7",
            ["has no such value", "place 7", "place 2"],
        ),
        ("diff good nowhere x", ["nowhere"]),
    ],
)
def test_bad_input(arguments, words, here, capsys):
    Writer(here / "empty", about={}, overwrite=True).close()
    for name, text in {
        "empty": "",
        "types": "a.b = 'c'\n",
        "typo": "nrm = 'norm'\n",
        "there": "norm = 'nrm'\n",
    }.items():
        (here / f"{name}.toml").write_text(text)
    for name, text in {"damaged": "{", "newer": '{"comparison": 99}'}.items():
        (here / f"{name}_saved").mkdir(exist_ok=True)
        (here / f"{name}_saved" / "comparison.json").write_text(text)
        shutil.copy(
            here / "good" / "rank0" / "step000000" / "ops.parquet",
            here / f"{name}_saved" / "comparison.parquet",
        )
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert [word for word in words if word not in " ".join(captured.err.split())] == []


def test_an_unreachable_cluster(here, capsys):
    pytest.importorskip("ray")
    assert main("compare good bad --engine ray://127.0.0.1:1".split()) == 2
    assert "no Ray cluster can be reached here" in capsys.readouterr().err


def test_diff(here, capsys):
    text = said("diff good bad norm/native_layer_norm --rows 2", capsys, 0)
    for part in (
        "times what rounding explains",
        "Argument eps: 1e-05, here 0.3",
        "Statistics",
        "cosine",
        "Worst",
        "Elements: 80 of 80 differ",
    ):
        assert part in text
    assert main("diff good bad norm/native_layer_norm --json --rows 2".split()) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["elements"]["worst"]) == 2
    assert math.isclose(data["metrics"]["rel_l2"], data["error"])
    assert "is equal in both runs" in said("diff good same low.weight", capsys, 0)


def test_diff_of_statistics(here, capsys):
    text = said("diff stats bad norm/native_layer_norm", capsys, 0)
    assert (
        "The reference did not keep tensors, so there are statistics alone: record with --keep tensors."
        in text
    )
    assert "Metrics" not in text


@pytest.mark.parametrize("verb", ["compare", "diff"])
def test_every_option_is_documented(verb, capsys):
    assert main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    section = DOCS.split(f"## roundoff {verb} ")[1].split("\n## ")[0]
    options = set(re.findall(r"^\s+(?:-\w, )?(--[a-z-]+)", out, flags=re.MULTILINE)) - {
        "--help",
        "--quiet",
        "--verbose",
        "--debug",
        "--no-stats",
    }
    assert len(options) > 4
    assert {option for option in options if f"`{option}`" not in section} == set()
