"""Unmodified training scripts: where their steps end, what they see of Python, and how they may fail."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import polars as pl
import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from roundoff.errors import RoundoffError, RunError
from roundoff.record.disk.loading import load
from roundoff.record.script import ScriptError, capture_script

SOURCE = Path(__file__).parents[2] / "src"

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
def loss(): return model(torch.ones(3, 4)).square().mean()
def train(n):
    for i in range(n):
        opt.zero_grad()
        loss().backward()
        opt.step()
"""


@pytest.fixture
def record(tmp_path, monkeypatch):
    """``record(text, *arguments, **options)`` runs the script and gives the Run."""
    monkeypatch.chdir(tmp_path)

    def run(text, *arguments, head=HEAD, steps="0-1", **options):
        (tmp_path / "train.py").write_text(head + textwrap.dedent(text))
        capture_script(["train.py", *arguments], "run", steps=steps, **options)
        return load(tmp_path / "run")

    return run


def operators(run, step, phase="forward"):
    rows = run.ops.filter(
        pl.col("step") == step, pl.col("phase") == phase, pl.col("call") >= 0
    )
    return rows.sort("record").collect()["operator"].to_list()


def calls(run, operator, phase="forward"):
    """How often an operator was called in each step."""
    found = run.ops.filter(
        pl.col("operator") == operator, pl.col("phase") == phase, pl.col("call") >= 0
    ).collect()
    return [
        found.filter(pl.col("step") == step)["call"].n_unique() for step in run.steps
    ]


def scalars(run, name):
    return (
        run.scalars.filter(pl.col("name") == name)
        .sort("step")
        .collect()["value"]
        .to_list()
    )


def child(tmp_path, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "roundoff", *arguments],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        **options,
    )


def test_a_step_ends_with_the_optimizer(record):
    run = record("train(4)")
    assert run.steps == [0, 1]
    assert calls(run, "addmm") == [2, 2]
    assert run.about.complete is True
    assert run.about.command == ["train.py"]
    assert scalars(run, "lr") == [0.1, 0.1]


def test_numbers_are_those_of_the_script_alone(record, tmp_path, capsys):
    text = "train(3)\nprint([p.sum().item() for p in model.parameters()])\n"
    record(text, steps="1")
    recorded = capsys.readouterr().out
    runpy.run_path(str(tmp_path / "train.py"))
    assert recorded == capsys.readouterr().out


def test_gradient_accumulation(record):
    run = record("""
        for i in range(6):
            (loss() / 3).backward()
            if i % 3 == 2:
                opt.step()
                opt.zero_grad()
    """)
    assert run.steps == [0, 1]
    assert calls(run, "addmm") == [6, 6]


GAN = """
critic = nn.Linear(2, 1)
second = torch.optim.Adam(critic.parameters())
for i in range(3):
    {order}
"""


def test_two_optimizers_make_one_step(record):
    first = "critic(model(torch.ones(3, 4)).detach()).mean().backward(); second.step(); second.zero_grad()"
    other = (
        "critic(model(torch.ones(3, 4))).mean().backward(); opt.step(); opt.zero_grad()"
    )
    run = record(GAN.format(order=f"{first}; {other}"), steps=None)
    assert run.steps == [0, 1, 2]
    assert calls(run, "addmm") == [6, 6, 6]


def test_an_optimizer_that_never_steps_is_not_waited_for_twice(record):
    run = record(
        "unused = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)\ntrain(5)",
        steps=None,
    )
    assert calls(run, "addmm") == [4, 2, 2, 2]


def test_an_optimizer_replaced_by_another_is_not_waited_for(record):
    run = record("opt = torch.optim.Adam(model.parameters())\ntrain(2)")
    assert calls(run, "addmm") == [2, 2]


def test_an_optimizer_that_has_stepped_and_is_gone_is_not_waited_for(record):
    again = "del opt\nopt = torch.optim.SGD(model.parameters(), lr=0.01)"
    run = record(f"train(1)\n{again}\ntrain(2)", steps=None)
    assert calls(run, "addmm") == [2, 2, 2]


def test_grad_scaler_with_a_skipped_step(record):
    run = record(
        """
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for i in range(4):
            opt.zero_grad()
            scaler.scale(loss() * (float("inf") if i == 0 else 1.0)).backward()
            scaler.step(opt)
            scaler.update()
    """,
        steps="0-2",
    )
    assert run.steps == [0, 1, 2]
    assert calls(run, "addmm") == [2, 2, 2]
    assert scalars(run, "loss_scale") == [
        4.0,
        4.0,
        4.0,
    ]  # halved by the first step, then kept
    assert "add_" not in operators(run, 0, "optimizer")


def test_loss_scaler_with_a_skipped_step_and_two_optimizers(record):
    run = record(
        """
        import roundoff
        two = torch.optim.SGD(model[2].parameters(), lr=0.1)
        opt = torch.optim.SGD(model[0].parameters(), lr=0.1)
        scaler = roundoff.LossScaler(init_scale=8.0, bad_loss="lower")
        for i in range(4):
            scaler.backward(loss() * (float("inf") if i == 1 else 1.0))
            scaler.step(opt, two)
            opt.zero_grad(), two.zero_grad()
    """,
        steps="0-3",
    )
    assert run.steps == [0, 1, 2, 3]
    assert calls(run, "addmm") == [2, 2, 2, 2]
    assert scalars(run, "loss_scale") == [8.0, 4.0, 4.0, 4.0]
    assert "_foreach_add_" not in operators(run, 1, "optimizer")
    before = operators(run, 0, "optimizer")
    # after a skipped step the scaler looks at the gradients first
    assert operators(run, 2, "optimizer")[-len(before) :] == before


def test_a_disabled_grad_scaler(record):
    run = record("""
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for i in range(3):
            opt.zero_grad()
            scaler.scale(loss()).backward()
            scaler.step(opt)
            scaler.update()
    """)
    assert calls(run, "addmm") == [2, 2]


def test_a_closure_is_forward(record):
    run = record("""
        opt = torch.optim.LBFGS(model.parameters(), max_iter=3)
        def closure():
            opt.zero_grad()
            value = loss()
            value.backward()
            return value
        for i in range(2):
            opt.step(closure)
    """)
    assert run.steps == [0, 1]
    assert calls(run, "addmm")[0] >= 4  # more than one evaluation
    assert calls(run, "addmm", "optimizer") == [0, 0]
    assert calls(run, "mm", "backward")[0] >= 4


def test_evaluation_after_the_training_is_not_part_of_it(record):
    run = record(
        "train(2)\nwith torch.no_grad():\n    model(torch.ones(1, 4)).softmax(1)\n"
    )
    assert run.steps == [0, 1]
    assert not run.ops.filter(pl.col("operator") == "_softmax").collect().height
    rest = record(
        "train(2)\nwith torch.no_grad():\n    model(torch.ones(1, 4)).softmax(1)\n",
        steps=None,
        overwrite=True,
    )
    assert rest.steps == [0, 1]


def test_a_script_without_training(record):
    text = "with torch.no_grad():\n    model(torch.ones(1, 4)).softmax(1)\n"
    with pytest.raises(RunError, match="no step ended") as caught:
        record(text)
    assert "--whole" in str(caught.value)
    run = record(text, whole=True, overwrite=True)
    assert run.steps == [0]


def test_stop_ends_the_script(record, tmp_path):
    run = record(
        "try:\n    train(50)\nexcept Exception:\n    pass\nopen('end', 'w')\n",
        stop=True,
    )
    assert run.steps == [0, 1]
    assert run.about.complete is True
    assert not (tmp_path / "end").exists()


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning"
)  # torch's own, while it compiles
@pytest.mark.parametrize("eager", [True, False])
def test_compiled_steps(record, eager):
    import torch._dynamo.utils

    torch._dynamo.utils.clear_compilation_metrics()
    run = record(
        """
        compiled = torch.compile(model, backend="aot_eager")
        @torch.compile(backend="aot_eager", fullgraph=False)
        def step(x):
            value = compiled(x).square().mean()
            value.backward()
            opt.step()
            opt.zero_grad()
            return value
        for i in range(3):
            step(torch.ones(3, 4))
    """,
        eager=eager,
    )
    metrics = torch._dynamo.utils.get_compilation_metrics()
    assert bool(metrics) == (not eager)
    # of ours only what stands around calls of the script
    ours = [each for each in metrics if str(SOURCE) in (each.co_filename or "")]
    around = {"replacement", "around", "_noted", "_before_backward"}
    assert {each.co_name for each in ours} <= around
    torch._dynamo.reset()
    assert run.steps == [0, 1]
    assert calls(run, "addmm") == [2, 2]
    assert operators(run, 1, "optimizer")


def test_what_a_script_sees(record, tmp_path, capsys):
    (tmp_path / "neighbour.py").write_text("word = 'next door'\n")
    text = """
        import argparse, os, sys, neighbour
        parser = argparse.ArgumentParser()
        parser.add_argument("--epochs", type=int)
        epochs = parser.parse_args().epochs
        if __name__ == "__main__":
            train(epochs)
            print(neighbour.word, os.path.basename(__file__), sys.argv, __package__, __spec__)
            import __main__
            print(__main__.train is train)
            os.chdir("/")
    """
    before = sys.argv, list(sys.path), sys.modules["__main__"]
    assert record(text, "--epochs", "2").steps == [0, 1]
    assert capsys.readouterr().out.splitlines() == [
        "next door train.py ['train.py', '--epochs', '2']  None",
        "True",
    ]
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


def test_a_module_in_a_package(tmp_path, monkeypatch, capsys):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").write_text("")
    (tmp_path / "pack/size.py").write_text("n = 2\n")
    (tmp_path / "pack/train.py").write_text(
        "from .size import n\nimport sys" + HEAD + "train(n)\nprint(sys.argv[1:])\n"
    )
    monkeypatch.chdir(tmp_path)
    capture_script(["-m", "pack.train", "-x"], "run", steps="0-1")
    assert load("run").steps == [0, 1]
    assert capsys.readouterr().out == "['-x']\n"
    sys.modules.pop("pack", None), sys.modules.pop("pack.size", None)


@pytest.mark.parametrize(
    ("end", "got"),
    [
        ("sys.exit(3)", "3"),
        ("sys.exit('bad config')", "bad config"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_script_that_fails(record, tmp_path, capsys, end, got):
    with pytest.raises(ScriptError) as caught:
        record(f"train(1)\nimport sys\n{end}\n")
    assert got in str(caught.value)
    assert "1 step recorded by then can be read: roundoff show" in str(caught.value)
    err = capsys.readouterr().err
    if "exit" not in end:
        assert err.splitlines()[0] == "Traceback (most recent call last):"
        assert "train.py" in err.splitlines()[1]  # nothing of ours above it
    run = load(tmp_path / "run")
    assert run.steps[0] == 0
    assert run.about.complete is False


@pytest.mark.parametrize("end", ["sys.exit(0)", "sys.exit()", "raise SystemExit"])
def test_a_script_that_exits_well(record, end):
    run = record(f"train(2)\nimport sys\n{end}\n")
    assert run.steps == [0, 1]
    assert run.about.complete is True


def test_a_script_that_does_not_parse(record, capsys):
    with pytest.raises(ScriptError, match="SyntaxError"):
        record("def (:\n")
    err = capsys.readouterr().err
    assert "runpy" not in err
    assert "train.py" in err


def test_an_error_of_ours_in_the_script_is_the_scripts(record, capsys):
    with pytest.raises(ScriptError, match="FormatError"):
        record("import roundoff\nroundoff.autocast('bf61')\n")
    assert "bf61" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no script to run"),
        (["-m"], "no script to run"),
        (["nowhere.py"], "nowhere.py"),
        (["torchrun", "train.py"], "torchrun --nproc-per-node 2 -m roundoff"),
        (
            ["-m", "torch.distributed.run", "train.py"],
            "torchrun --nproc-per-node 2 -m roundoff",
        ),
    ],
)
def test_no_script(words, message, tmp_path):
    with pytest.raises(RunError) as caught:
        capture_script(words, tmp_path / "run")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_nothing_is_left_behind(record):
    optimizer, scaler = torch.optim.Optimizer, torch.amp.GradScaler
    before = [optimizer.__init__, scaler.scale, scaler.step, scaler.update]
    hooks = len(_global_optimizer_post_hooks)
    with pytest.raises(ScriptError):
        record("train(1)\nraise ValueError\n")
    assert [optimizer.__init__, scaler.scale, scaler.step, scaler.update] == before
    assert len(_global_optimizer_post_hooks) == hooks


def test_data_loader_workers(tmp_path):
    """Of both kinds; a forked worker must not record what it computes itself."""
    (tmp_path / "train.py").write_text(
        HEAD
        + textwrap.dedent("""
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 4
            def __getitem__(self, i):
                modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
                assert not any(mode.active for mode in modes)
                return torch.ones(4)
        if __name__ == "__main__":
            for kind in ("fork", "spawn"):
                for x in torch.utils.data.DataLoader(Data(), 2, num_workers=1, multiprocessing_context=kind):
                    model(x).sum().backward()
                    opt.step()
                    opt.zero_grad()
    """)
    )
    process = child(
        tmp_path, "capture", "-o", "run", "--steps", "all", "--", "train.py"
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "Recorded steps 0 to" in out
    run = load(tmp_path / "run")
    assert run.steps[:4] == [0, 1, 2, 3]
    assert calls(run, "addmm")[:4] == [2, 2, 2, 2]


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_interrupted_in_a_step(tmp_path, number, code):
    (tmp_path / "train.py").write_text(
        HEAD
        + textwrap.dedent("""
        import time
        train(2)
        loss()
        print("ready", flush=True)
        time.sleep(60)
    """)
    )
    process = child(
        tmp_path,
        "capture",
        "-o",
        "run",
        "--steps",
        "all",
        "--keep",
        "tensors",
        "--",
        "train.py",
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in err
    assert out == ""
    run = load(tmp_path / "run")
    assert run.steps[:2] == [0, 1]
    assert run.verify() == []
    assert run.about.complete is False
    assert calls(run, "addmm")[:2] == [2, 2]
    if number == signal.SIGINT:
        assert "interrupted" in err
        assert "recorded by then" in err


def test_no_space_left(tmp_path, capsys):
    """A limit on the size of files stands for a full disk: the script goes on, one warning, exit code 2."""
    (tmp_path / "train.py").write_text(
        HEAD + "\ntrain(3)\nprint(sum(p.sum().item() for p in model.parameters()))\n"
    )
    runpy.run_path(str(tmp_path / "train.py"))
    alone = capsys.readouterr().out
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))\n"
    limit += "from roundoff.cli.app import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", limit, "capture", "-o", "run", "--", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert alone in done.stdout
    assert "Traceback" not in done.stderr
    assert done.stderr.count("RuntimeWarning") == 1
    assert "roundoff: " in done.stderr
    assert "the recording stopped before its end, the script did not" in done.stderr
    assert "nothing was recorded by then" in done.stderr


def test_every_error_is_of_the_package():
    assert issubclass(ScriptError, RoundoffError)
