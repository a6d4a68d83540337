"""``roundoff capture``: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from roundoff.cli.app import main
from roundoff.compare.rounding.reproducibility import RANDOM, unstable
from roundoff.record.disk.loading import load
from roundoff.record.disk.siblings import siblings
from roundoff.record.disk.writer import Writer

DOCS = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()

TRAIN = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
opt = torch.optim.AdamW(model.parameters())
for i in range(3):
    x = torch.full((3, 4), 1.0)
    loss = model(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def run(arguments, capsys, code=0):
    assert main(arguments.split()) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_what_it_prints(capsys):
    out = run("capture -o runs/a -- train.py", capsys)
    first, *rest = out.splitlines()
    assert re.fullmatch(
        r"Recorded steps 0 to 1 in runs/a: \d+ calls of \d+ operators, \d+ tensors\.",
        first,
    )
    assert rest == ["Next: roundoff show runs/a", "      roundoff overflow runs/a"]
    shown = run("show runs/a", capsys)
    assert "0/addmm" in shown
    assert "all that was measured is finite" in shown
    assert "Left out" not in shown
    run("overflow runs/a", capsys)


def test_json(capsys):
    data = json.loads(run("capture -o runs/a --steps 0:2 --json -- train.py", capsys))
    assert data["path"] == "runs/a"
    assert data["steps"] == [0, 1, 2]
    assert data["ranks"] == [0]
    assert data["coverage"]["operators"]["aten.addmm.default"] == 6
    assert data["coverage"]["calls"] == sum(data["coverage"]["operators"].values())


def test_show_names_sites_parameters_and_lines(capsys):
    run("capture -o runs/a --keep tensors -- train.py", capsys)
    backward = run("show runs/a --phase backward --sort max --rows 3", capsys)
    assert "backward" in backward
    assert " forward " not in backward
    one = run("show runs/a 2/addmm --phase forward", capsys)
    assert "Source line: train.py:9" in one
    assert "█" in one
    assert "\n2.bias " in one  # among its inputs
    assert "2.bias" in run("show runs/a 2.*", capsys)


def test_nan_stands_first_and_is_counted(folder, capsys):
    (folder / "train.py").write_text(
        TRAIN.replace("1.0)", "1.0) / (0.0 if i == 1 else 1.0)")
    )
    run("capture -o runs/a -- train.py", capsys)
    shown = run("show runs/a --sort nan --rows 5", capsys)
    assert "tensors with NaN or Inf" in shown
    found = json.loads(run("show runs/a --sort nan --json", capsys))["rows"]
    bad = [r["nan"] + r["posinf"] + r["neginf"] for r in found if r["nan"] is not None]
    assert bad == sorted(bad, reverse=True)
    assert bad[0] > 0
    assert run("overflow runs/a --json", capsys, 1) == ""


@pytest.mark.parametrize(
    ("options", "check"),
    [
        (
            "--level module",
            lambda r: set(r.ops.collect()["operator"]) >= {"Linear", "Sequential"},
        ),
        ("--keep hash", lambda r: r.ops.collect()["hash"].drop_nulls().len() > 10),
        ("--shadow fp64", lambda r: r.ops.collect()["own_l2"].drop_nulls().len() > 10),
        (
            "--site */addmm",
            lambda r: (
                set(r.ops.filter(pl.col("call") >= 0).collect()["operator"])
                == {"addmm"}
            ),
        ),
        ("--steps 2", lambda r: r.steps == [2]),
        ("--steps all", lambda r: r.steps == [0, 1, 2]),
        ("--stop --steps 0", lambda r: r.steps == [0]),
    ],
)
def test_options(options, check, capsys):
    run(f"capture -o runs/a {options} -- train.py", capsys)
    assert check(load("runs/a"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("capture -o runs/a -- missing.py", ["missing.py", "no script to run"]),
        (
            "capture -o runs/a -- -m torch.distributed.run train.py",
            ["torchrun --nproc-per-node 2 -m roundoff capture"],
        ),
        ("capture -o runs/a --level layer -- train.py", ["layer", "op, module"]),
        (
            "capture -o runs/a --keep all -- train.py",
            ["all", "stats, tensors, sample, hash"],
        ),
        ("capture -o runs/a --shadow fp32 -- train.py", ["fp32", "fp64"]),
        (
            "capture -o runs/a --shadow fp64 --level module -- train.py",
            ["shadow", "level"],
        ),
        ("capture -o runs/a --steps 5-3 -- train.py", ["5-3", "3:5,100"]),
        ("capture -o train.py -- train.py", ["a file is where the run should go"]),
        ("capture -o train.py/a -- train.py", ["train.py/a", "cannot write here"]),
        ("capture -o . -- train.py", ["not empty and holds no run"]),
        ("capture train.py", ["--output"]),
    ],
)
def test_refused_before_the_script_runs(arguments, words, folder, capsys):
    (folder / "train.py").write_text("print('ran')\n" + TRAIN)
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert [word for word in words if word not in " ".join(captured.err.split())] == []
    assert {p.name for p in folder.iterdir()} == {"train.py"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--site nowhere/*", ["no call matches the sites", "nowhere/*"]),
        ("--steps 100", ["nothing was recorded", "3 steps"]),
    ],
)
def test_refused_after_it(options, words, capsys):
    err = run(f"capture -o runs/a {options} -- train.py", capsys, 2)
    assert [word for word in words if word not in err] == []
    assert err.count("roundoff:") == 1
    assert "Traceback" not in err


def test_a_run_is_not_replaced_unasked(capsys):
    run("capture -o runs/a --steps 0 -- train.py", capsys)
    err = run("capture -o runs/a -- train.py", capsys, 2)
    assert "there is a run here already" in err
    assert "--overwrite" in err
    assert load("runs/a").steps == [0]
    run("capture -o runs/a --overwrite -- train.py", capsys)
    assert load("runs/a").steps == [0, 1]


def test_a_script_that_fails(folder, capsys):
    (folder / "train.py").write_text(TRAIN + "\nraise ValueError('no such thing')\n")
    err = run("capture -o runs/a -- train.py", capsys, 2)
    trace, _, ours = err.partition("roundoff: ")
    assert trace.splitlines()[0] == "Traceback (most recent call last):"
    assert trace.splitlines()[-1] == "ValueError: no such thing"
    assert "/roundoff/" not in trace
    assert "2 steps recorded by then can be read: roundoff show" in ours


@pytest.mark.skipif(
    os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere"
)
def test_a_folder_that_may_not_be_written(folder, capsys):
    (folder / "locked").mkdir(mode=0o500)
    err = run("capture -o locked/a -- train.py", capsys, 2)
    assert "cannot write here" in err


def test_noise_and_repeats_are_runs_beside_it(folder, capfd, monkeypatch):
    """Each in a process of its own, from the start: what the script has left behind does not reach the next."""
    monkeypatch.setenv("LEFT", "0")
    unseeded = "import os, sys\nassert os.environ['LEFT'] == '0' and sys.argv[1:] == ['--lr', '1']\n"
    unseeded += "os.environ['LEFT'] = '1'\n" + TRAIN.replace(
        "opt =", "own = torch.Generator()\nown.seed()\nopt ="
    )
    unseeded = unseeded.replace("x = ", "x = torch.rand(3, 4, generator=own) + ")
    (folder / "train.py").write_text(unseeded + "print('of the script')\n")
    assert (
        main(
            "capture -o runs/a --noise 1 --repeats 1 --keep hash --json -- train.py --lr 1".split()
        )
        == 0
    )
    captured = capfd.readouterr()
    data = json.loads(captured.out)
    # once: that of the run itself
    assert captured.err.splitlines().count("of the script") == 1
    assert (data["noise"], data["repeats"]) == (["runs/a.noise1"], ["runs/a.repeat1"])
    assert [
        line for line in captured.err.splitlines() if line.startswith("roundoff: ")
    ] == [
        "roundoff: recording with noise, seed 1, in runs/a.noise1 (1 of 2)",
        "roundoff: recording again in runs/a.repeat1 (2 of 2)",
    ]
    found = siblings("runs/a")
    assert [p.as_posix() for p in found["noise"] + found["repeat"]] == data[
        "noise"
    ] + data["repeats"]
    one, noisy, *repeats = map(load, ["runs/a", *data["noise"], *data["repeats"]])
    assert [r.about.noise for r in (one, noisy, *repeats)] == [None, 1, None]
    assert {r.about.of for r in (noisy, *repeats)} == {one.about.id}
    assert [r.steps for r in (one, noisy, *repeats)] == [[0, 1]] * 3
    # which operator draws without a seed is named, and it alone
    assert unstable(one, repeats).select("step", "operator", "note").rows() == [
        (0, "rand", RANDOM),
        (1, "rand", RANDOM),
    ]

    # the next recording here has other repeats: those of the first are no longer beside it
    (folder / "train.py").write_text(TRAIN)
    run("capture -o runs/a --overwrite --steps 0 -- train.py", capfd)
    assert siblings("runs/a") == {"noise": [], "repeat": []}


def test_a_repeat_that_fails(folder, capfd):
    (folder / "train.py").write_text(
        TRAIN + "import pathlib\npathlib.Path('made').mkdir()\n"
    )
    err = run("capture -o runs/a --repeats 2 -- train.py", capfd, 2)
    assert "FileExistsError" in err
    assert "runs/a.repeat1: the script could not be recorded again" in err
    assert not Path("runs/a.repeat2").exists()
    assert load("runs/a").steps == [0, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--noise 1 --level module", ["noise is added to the results of operators"]),
        (
            "--repeats 1",
            ["runs/a.repeat1", "there is a run here already", "--overwrite"],
        ),
        ("--noise -1", ["--noise"]),
    ],
)
def test_repeats_are_refused_before_the_script_runs(options, words, folder, capsys):
    with Writer("runs/a.repeat1", about={}):
        pass
    err = run(f"capture -o runs/a {options} -- train.py", capsys, 2)
    assert [word for word in words if word not in err] == []
    assert not Path("runs/a").exists()


def test_one_of_several_processes_starts_no_others(folder, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    err = run("capture -o runs/a --noise 1 -- train.py", capsys, 2)
    assert "one of several processes cannot start the others again" in err
    assert not Path("runs").exists()


def test_every_option_is_documented(capsys):
    out = run("capture --help", capsys)
    section = DOCS.split("## roundoff capture ")[1].split("\n## ")[0]
    options = set(
        re.findall(r"^\s+(?:-\w, )?(--[a-z0-9-]+)", out, flags=re.MULTILINE)
    ) - {"--help", "--quiet", "--verbose", "--debug"}
    assert len(options) > 8
    assert {option for option in options if f"`{option}`" not in section} == set()


#: The first recording goes to its end; the repeat, whose folder is there, waits.
HELD = f"""{TRAIN}
import os, time
if os.path.isdir("a.repeat1"):
    open(f"pid{{os.getpid()}}", "w").close()
    time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="of Linux")
@pytest.mark.parametrize("is_for_all", [False, True])
def test_ctrl_c_ends_a_repeat_and_blocks_no_next_try(folder, is_for_all):
    """A terminal sends SIGINT to children too; a supervisor to the command alone."""
    (folder / "train.py").write_text(HELD)
    words = [sys.executable, "-m", "roundoff", "capture", "-o", "a", "--keep", "hash"]
    words += ["--steps", "all", "--repeats", "1", "--", "train.py"]
    with subprocess.Popen(
        words, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        while not (held := [file.name for file in folder.glob("pid*")]):
            assert process.poll() is None
            time.sleep(0.05)
        (os.killpg if is_for_all else os.kill)(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "a.repeat1: interrupted" in err
    assert not Path("/proc", held[0].removeprefix("pid")).exists()
    assert load(folder / "a").about.complete
    if is_for_all:
        return
    # the first is whole, so it is deleted by its owner alone; the repeat is in nobody's way
    shutil.rmtree(folder / "a")
    (folder / "train.py").write_text(TRAIN)
    again = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
