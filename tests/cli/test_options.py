"""Every option of every verb is checked before any work: no model is loaded, no script
started, no run opened, no file written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import roundoff
from roundoff import Workload
from roundoff.budget import Goal
from roundoff.cli.app import app, main
from roundoff.errors import RoundoffError

WORKLOAD = """
from pathlib import Path
Path("started").touch()
import torch

def model():
    return torch.nn.Linear(4, 2)

def batches():
    return [torch.ones(8, 4)]

def loss(output, batch):
    return output.mean()

def optimizer(model):
    return torch.optim.SGD(model.parameters(), 0.1)
"""
#: What each verb is called with; nothing but the workload is there.
COMMANDS = {
    "diagnose": "net.py",
    "budget": "net.py",
    "plan": "no.parquet",
    "plan convert": "no.toml --to plan -o new.toml",
    "plan explain": "no.toml a/linear",
    "verify": "net.py no.toml",
    "tune": "net.py",
    "quantize": "net.py",
    "capture": "-o run",
    "show": "a",
    "overflow": "a",
    "check": "a b",
    "compare": "a b",
    "diff": "a b site",
    "replay": "a",
    "watch": "",
    "bench": "net.py",
    "advise": "net.py",
    "lint": "net.py",
    "migrate": "net.py",
}
#: Folders in which no run is.
RUNS = ("a", "b")
#: What follows the options: a script has to stand last.
SCRIPTS = {"capture": "-- net.py", "watch": "-- net.py"}

NOT_A_NUMBER = ["many", "", "nan"]
COUNT = [*NOT_A_NUMBER, "-1", "1.5"]
FINITE = [*NOT_A_NUMBER, "inf", "-1"]
FORMATS = ["bf17", "", ",", "bf16,bf17", "w99"]
TARGET = ["forty", "", "40%dB", "200%", "1e400dB", "cls=high", "40dB,30dB", "nan"]
PATTERN_FORMAT = ["linear", "=bf16", "linear=", "*=bf17"]
DEVICE = ["gpu", "", "cuda:x", "meta"]
BAD: dict[str, list[str]] = {
    "--formats": FORMATS,
    "--target": TARGET,
    "--metric-drop": ["half", "", "-1%", "200%", "1dB", "nan"],
    "--max-cost": FINITE,
    "--cost": ["bites", "", "Bytes"],
    "--cost-table": ["missing.toml", ""],
    "--pin": PATTERN_FORMAT,
    "--allow": [*PATTERN_FORMAT, "*=bf16,bf17"],
    "--tie": ["operators", "", "Site"],
    "overflow --allow": [""],
    "--of": [""],
    "--probes": [*COUNT, "0"],
    "--precision": ["often", "", "0", "-1dB", "nan", "inf", "1e400"],
    "--memory": ["much", "", "0", "-1MB", "5XB"],
    "--trials": COUNT,
    "--checks": COUNT,
    "--seed": ["", "one", "1.5", "1e3", str(2**64)],
    "--candidate": [
        "bf17",
        "fp8_e4m3fn",
        "missing.py",
        "threads=0",
        "mkldnn=no",
        "gpu",
    ],
    "--backend": ["ahead", ""],
    "--rows": [*COUNT, "0"],
    "--rank": COUNT,
    "--step": COUNT,
    "--place": COUNT,
    "--phase": ["forwards", ""],
    "--sort": ["biggest", ""],
    "--steps": [*NOT_A_NUMBER, "-1", "0"],
    "capture --steps": ["first", "3-1", "1,,2", ""],
    "check --steps": ["first", "3-1", "1,,2", ""],
    "--noise": COUNT,
    "--repeats": COUNT,
    "check --repeats": ["missing"],
    "--repeat": [*COUNT, "1"],
    "--runs": [*COUNT, "2"],
    "--batches": [*COUNT, "0"],
    "--extra": FINITE,
    "--aim": ["best", ""],
    "tune --device": ["gpu", ""],
    "plan explain --device": ["gpu", ""],
    "--device": DEVICE,
    "--dtype": ["bf17", ""],
    "--within": FINITE,
    "--margin": FINITE,
    "--loss-format": ["bf17", "int8", ""],
    "overflow --formats": [*FORMATS, "int8"],
    "--cosine": ["high", "", "nan", "1.5", "-2"],
    "--engine": ["cloud", "ray:", "ray://", ""],
    "--limit": ["max_abs", "max_abs=", "max_abs=low", "max_abs=nan", "maxabs=1"],
    "--map": ["missing.toml", ""],
    "--level": ["layer", ""],
    "--keep": ["all", ""],
    "--leaves": ["all", "", "nan", "-1"],
    "--shadow": ["fp32", ""],
    "--site": [""],
    "--to": ["onnx", ""],
    "--from": ["onnx", ""],
    "--format": ["fp8_e4m3fn", ""],
    "--model": ["missing.py"],
    "--base": ["missing.json"],
    "--workload": ["missing.py"],
    "--plan": ["missing.toml"],
    "--budget": ["missing.parquet"],
    "--config": ["missing.cfg"],
    "--weights-only": ["fp16", "int99", ""],
    "--group": [*COUNT, "0"],
    "--method": ["round", ""],
    "--observer": ["average", ""],
    "--granularity": ["row", "group:0", "group:", ""],
    "--weight-granularity": ["row", "group:x", ""],
    "--kv-cache": ["int99", "int8:row"],
    "quantize --cost": ["bites", "seconds"],
    "--skip": [""],
    "--samples": [*COUNT, "0"],
    "--prune": ["half", "4:2", "channel:1", "channel:0"],
    "--epochs": [*COUNT, "0"],
    "--lr": [*FINITE, "0"],
    "--configs": ["fp32,bf17", "", "int8", "fp32+bf16", "fp32+accumulate=0"],
    "--seeds": [*COUNT, "0"],
    "--every": [*COUNT, "0"],
    "--explain": COUNT,
    "lint --explain": ["RO999", "", "every"],
    "--select": ["RO999", "", "E501", "RO1,E501"],
    "--ignore": ["RO999", ""],
    "--lines": [*COUNT, "0"],
    "--least": ["much", "", "-1dB", "0", "nan"],
    "--seconds": FINITE,
    "--apply": ["tuned.txt", ""],
    "plan --output": ["plan.txt"],
    "verify --output": ["plan.txt"],
    "tune --output": ["plan.txt"],
}
#: Any text is one: a folder or file to write, which is checked when it is made.
FREE = {"--output", "--html", "--save", "--trace", "-o"}


def options() -> list[tuple[str, Any]]:
    """Every option with a value, with its verb."""
    group = typer.main.get_group(app)
    commands: dict[str, Any] = {}
    for name, command in group.commands.items():
        members = getattr(command, "commands", None) or {"": command}
        for member, inner in members.items():
            commands[f"{name} {member}".strip().replace(" budget", "")] = inner
    return [
        (verb, option)
        for verb, command in commands.items()
        for option in command.params
        if option.opts[0].startswith("-") and not option.is_flag
    ]


def long_name(option: Any) -> str:
    return next(name for name in option.opts if name.startswith("--"))


def bad_values() -> list[tuple[str, str, str]]:
    cases = []
    for verb, option in options():
        name = long_name(option)
        for value in BAD.get(f"{verb} {name}", BAD.get(name, [])):
            cases.append((verb, name, value))
    return cases


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(WORKLOAD)
    for name in RUNS:
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_option_with_a_value_has_bad_ones():
    verbs = {verb for verb, _ in options()}
    assert verbs == set(COMMANDS)
    without = {
        f"{verb} {long_name(option)}"
        for verb, option in options()
        if not BAD.get(f"{verb} {long_name(option)}", BAD.get(long_name(option)))
        and long_name(option) not in FREE
    }
    assert without == set()


@pytest.mark.parametrize(("verb", "name", "value"), bad_values())
def test_a_bad_value_is_refused_before_any_work(verb, name, value, folder, capsys):
    words = [*verb.split(), *COMMANDS[verb].split(), f"{name}={value}"]
    words += SCRIPTS.get(verb, "").split()
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert name in captured.err
    assert "Traceback" not in captured.err
    assert "did not foresee" not in captured.err
    assert {p.name for p in folder.iterdir()} == {"net.py", *RUNS}


def test_one_name_has_one_meaning():
    """A short option stands for one long one, and the number of rows has one name."""
    meanings: dict[str, set[str]] = {}
    for _, option in options():
        for short in set(option.opts) - {long_name(option)}:
            meanings.setdefault(short, set()).add(long_name(option))
    assert {k: v for k, v in meanings.items() if len(v) > 1} == {}
    names = {long_name(option) for _, option in options()}
    assert "--rows" in names
    assert not names & {"--top", "--limits", "--count", "--weights"}


@pytest.mark.parametrize(
    "target", ["38", "38dB", "-5dB", "0.5%", "cls=40dB,price=30dB"]
)
@pytest.mark.parametrize("verb", ["diagnose", "plan", "verify", "quantize"])
def test_every_verb_takes_every_kind_of_target(verb, target, capsys):
    words = [*verb.split(), "missing.py", "--target", target]
    words += ["missing.toml"] if verb == "verify" else []
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "--target" not in error
    assert "missing" in error


@pytest.mark.parametrize(
    "wrong",
    [
        {"target": "forty"},
        {"metric_drop": "200%"},
        {"cost": "bites"},
        {"pin": {"*": "bf17"}},
        {"allow": {"*": ["bf16", "bf17"]}},
        {"max_cost": float("nan")},
        {"formats": ["bf17"]},
    ],
)
def test_a_goal_is_checked_when_it_is_made(wrong):
    with pytest.raises(RoundoffError):
        Goal(**wrong)


@pytest.mark.parametrize(
    ("formats", "wrong"),
    [
        (["bf17"], {}),
        ([], {}),
        (["bf16"], {"target": "forty"}),
        (["bf16"], {"cost": "bites"}),
        (["bf16"], {"pin": {"*": "bf17"}}),
        (["bf16"], {"target": 40, "metric_drop": "1%"}),
        (["bf16"], {"precision": "often"}),
    ],
)
def test_functions_check_before_the_model_runs(formats, wrong):
    def forward(model, batch):
        pytest.fail("the model ran")

    import torch

    workload = Workload(torch.nn.Linear(4, 2), [torch.ones(1, 4)], forward=forward)
    with pytest.raises(RoundoffError):
        roundoff.diagnose(workload, formats, **wrong)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"roundoff {roundoff.__version__}\n"


def test_quiet_and_debug(capsys, folder):
    assert main(["show", "nope", "-q"]) == 2
    assert capsys.readouterr().err.startswith("roundoff: nope: no such folder")
    assert main(["show", "nope", "--debug"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    assert main(["show", "nope"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    (folder / "good.py").write_text(WORKLOAD.replace('Path("started").touch()', ""))
    words = "budget good.py -f bf16 -o b.parquet".split()
    assert main(["-q", *words]) == 0
    assert capsys.readouterr() == ("", "")
    assert main([*words, "-v"]) == 0
    captured = capsys.readouterr()
    assert "roundoff: " in captured.err
    assert "Ranking" in captured.out


def test_completion():
    environment = os.environ | {
        "_ROUNDOFF_COMPLETE": "complete_bash",
        "COMP_WORDS": "roundoff dia",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "roundoff"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["diagnose"]


def test_a_reader_that_goes_away_is_no_error(folder):
    (folder / "many.py").write_text("print('x' * 100_000)\n")
    code = "import sys; from roundoff.cli.app import main; sys.exit(main(['--help']))"
    command = f'{sys.executable} -c "{code}" | head -c 1; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True
    )
    assert "Traceback" not in done.stderr
    assert done.stdout.split("\n")[0][1:] in ("0", "141")


SCRIPT = """
import os
print("of the script", flush=True)
os.system("echo of its child")
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""


def test_json_of_capture_is_apart_from_what_the_script_prints(folder, capfd):
    (folder / "train.py").write_text(SCRIPT)
    assert main("capture -o run --json -- train.py".split()) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["steps"] == [0]
    assert "of the script\nof its child\n" in captured.err
    assert main(["--version"]) == 0
    assert capfd.readouterr().out.startswith("roundoff ")


@pytest.mark.parametrize(
    "verb",
    [
        "budget train.py --formats bf16 --json",
        "diagnose train.py --formats bf16 --checks 0 --no-pareto --json",
        "diagnose train.py --candidate bf16 --json",
        "tune train.py --formats bf16 --steps 1 --probes 2 --json",
        "bench train.py --configs fp32 --steps 3 --seeds 1 --json",
        "advise train.py --seconds 0.01 --json",
    ],
)
def test_json_is_apart_from_what_a_workload_prints(verb, folder, capfd):
    talkative = (
        "import os, torch\nprint('of the file')\nos.system('echo of its child')\n"
    )
    model = "    print('of the model')\n    return"
    text = WORKLOAD.replace("    return", model, 1)
    (folder / "train.py").write_text(talkative + text)
    assert main(verb.split()) in (0, 1)
    captured = capfd.readouterr()
    assert isinstance(json.loads(captured.out), dict)
    for line in ("of the file", "of its child", "of the model"):
        assert line in captured.err


@pytest.mark.parametrize(
    "end",
    ["raise ValueError", "import sys; sys.exit(1)", "raise KeyboardInterrupt"],
)
def test_a_failed_recording_does_not_block_the_next(end, folder, capsys):
    (folder / "train.py").write_text(SCRIPT + end)
    is_interrupted = "Keyboard" in end
    assert main("capture -o run -- train.py".split()) == (130 if is_interrupted else 2)
    assert main(["show", "run"]) == 0  # its whole steps can be read
    (folder / "train.py").write_text(SCRIPT)
    assert main("capture -o run -- train.py".split()) == 0
    assert roundoff.load("run").about.complete
    assert main("capture -o run -- train.py".split()) == 2
    assert "there is a run here already" in capsys.readouterr().err


def test_a_script_without_steps_does_not_block_the_next(folder, capsys):
    (folder / "train.py").write_text("import torch\ntorch.ones(2).exp()\n")
    assert main("capture -o run -- train.py".split()) == 2
    assert "no step ended" in capsys.readouterr().err
    assert main("capture -o run --whole -- train.py".split()) == 0
