"""``roundoff watch``: unmodified scripts, what is said of them, and that their numbers are those of the script alone."""

from __future__ import annotations

import io
import json
import math
import re
import runpy
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from torch.nn.modules import module as hooks
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

import roundoff
from roundoff.cli.app import app, main
from roundoff.errors import RunError
from roundoff.lint import RULES as LINT_RULES
from roundoff.record.program import ScriptError
from roundoff.report import print_events
from roundoff.train.scaling.scaler import LossScaler
from roundoff.train.watch.advice import CODES, LINT_CODES, RULES
from roundoff.train.watch.events import BadGradients, StepEnd

HEAD = """
import math, sys, torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2)
    def forward(self, x, factor=1.0):
        h = self.drop(self.a(x))
        if factor != 1.0:
            h = (h * factor).exp()
        return self.b(h.relu())
model = Net()
opt = torch.optim.AdamW(model.parameters(), lr=0.01)
def loss_of(i, bad=()):
    return model(torch.randn(6, 4), factor=300.0 if i in bad else 1.0).square().mean()
"""
SCALED = """
scaler = torch.amp.GradScaler("cpu", init_scale={scale})
for i in range({steps}):
    opt.zero_grad()
    scaler.scale(loss_of(i, {bad})).backward()
    scaler.step(opt)
    scaler.update()
"""
PLAIN = """
for i in range({steps}):
    opt.zero_grad()
    loss = loss_of(i, {bad})
    loss.backward()
    opt.step()
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda text: (tmp_path / "train.py").write_text(HEAD + textwrap.dedent(text))


@pytest.fixture
def watch(write):
    """``watch(text)`` runs the script; gives the events by kind."""

    def run(text, **options):
        write(text)
        events = []
        try:
            roundoff.watch(["train.py"], events.append, **options)
        finally:
            rows = [event.to_dict() for event in events]
        return {
            kind: [row for row in rows if row["event"] == kind]
            for kind in ("step", "not finite", "warning", "end")
        }

    return run


def scaled(steps=4, bad=(), scale=2.0**16):
    return SCALED.format(steps=steps, bad=bad, scale=scale)


# -- what is said ----------------------------------------------------------------------------------------------------


def test_steps_of_a_plain_training(watch, capsys):
    found = watch("""
        for i in range(3):
            opt.zero_grad()
            loss = loss_of(i)
            loss.backward()
            print(loss.item(), nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
            opt.step()
    """)
    printed = [
        tuple(map(float, line.split())) for line in capsys.readouterr().out.splitlines()
    ]
    assert [r["loss"] for r in found["step"]] == [loss for loss, _ in printed]
    assert [r["gradient_norm"] for r in found["step"]] == pytest.approx(
        [norm for _, norm in printed]
    )
    assert [r["step"] for r in found["step"]] == [0, 1, 2]
    assert found["step"][0] | {"loss": 0, "gradient_norm": 0} == {
        "event": "step",
        "step": 0,
        "loss": 0,
        "loss_scale": None,
        "gradient_norm": 0,
        "non_finite": 0.0,
        "skipped": False,
        "skips": 0,
        "lr": 0.01,
    }
    assert found["end"] == [
        {
            "event": "end",
            "steps": 3,
            "skips": 0,
            "loss_scale": None,
            "trouble": None,
            "warnings": 0,
        }
    ]
    assert not found["warning"] + found["not finite"]


@pytest.mark.parametrize("kind", ["torch", "unscaled", "ours"])
def test_skips_of_a_scaler_with_their_reason(watch, capsys, kind):
    loop = {
        "torch": "scaler.scale(loss).backward(); scaler.step(opt); scaler.update()",
        "unscaled": "scaler.scale(loss).backward(); scaler.unscale_(opt); scaler.step(opt); scaler.update()",
        "ours": "scaler.backward(loss); scaler.step(opt)",
    }[kind]
    made = (
        "roundoff.LossScaler(bad_loss='lower')"
        if kind == "ours"
        else "torch.amp.GradScaler('cpu')"
    )
    with pytest.warns(RuntimeWarning) if kind == "ours" else _nothing():
        found = watch(f"""
            import roundoff
            scaler = {made}
            for i in range(5):
                opt.zero_grad()
                loss = loss_of(i, (0, 3))
                print(loss.item())
                {loop}
        """)
    printed = [float(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["loss"] for r in found["step"]] == pytest.approx(printed, nan_ok=True)
    assert [r["loss_scale"] for r in found["step"]] == [
        2.0**15,
        2.0**15,
        2.0**15,
        2.0**14,
        2.0**14,
    ]
    assert [r["skipped"] for r in found["step"]] == [True, False, False, True, False]
    assert [r["skips"] for r in found["step"]] == [1, 1, 1, 2, 2]
    assert found["step"][1]["gradient_norm"] < 100  # unscaled
    assert found["step"][0]["gradient_norm"] is None
    assert found["step"][0]["non_finite"] == 1
    for row, step, scale in zip(
        found["not finite"], (0, 3), (2.0**16, 2.0**15), strict=True
    ):
        assert (row["step"], row["scale"], row["skipped"]) == (step, scale, True)
        assert row["first"].startswith("the output of b (Linear)")
        assert (row["gradient"], row["made_by"], row["origin"], row["born"]) == (
            "b.bias",
            "b/sum",
            "/exp",
            False,
        )
        assert (row["phase"], row["line"]) == ("forward", "train.py:12")
        assert row["advice"] == "subtract the maximum first (logsumexp, softmax)"
    assert found["end"][0] == {
        "event": "end",
        "steps": 5,
        "skips": 2,
        "loss_scale": 2.0**14,
        "trouble": None,
        "warnings": 0,
    }
    assert not found["warning"]


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def test_without_a_scaler_the_weights_take_it(watch):
    found = watch(PLAIN.format(steps=3, bad=(1,)))
    first, second = found["not finite"]
    assert (first["step"], first["scale"], first["skipped"], first["origin"]) == (
        1,
        None,
        False,
        "/exp",
    )
    assert (second["phase"], second["first"]) == (
        "weights",
        "the output of a (Linear), 48 of 48 elements",
    )
    trouble = (
        "the gradients of the last 2 steps were not finite, and the weights took them"
    )
    assert found["end"][0]["trouble"] == trouble


LOST = """
for i in range(4):
    opt.zero_grad()
    none = torch.zeros(3)
    aside = (none * none.log()).sum() if i >= {first} else 0.0
    (loss_of(i) + aside).backward()
    opt.step()
"""


@pytest.mark.parametrize("first", [0, 2])
def test_a_lost_loss_with_finite_gradients_is_trouble(watch, first):
    *_, end = watch(LOST.format(first=first))["end"]
    lost = 4 - first  # 0 * log(0) is NaN, and no gradient passes it
    assert end["trouble"] == (
        f"the loss of the last {lost} steps was NaN or Inf, though the gradients were finite"
    )


def test_only_so_many_are_run_again(watch):
    found = watch(scaled(4, (0, 1, 2)), explain=1)
    assert [row["origin"] for row in found["not finite"]] == ["/exp", None, None]
    assert all(row["first"] for row in found["not finite"])


def test_accumulation_two_optimizers_and_two_models(watch):
    found = watch(
        """
        critic = nn.Sequential(nn.Linear(2, 1))
        second = torch.optim.SGD(critic.parameters(), lr=0.5)
        for i in range(3):
            opt.zero_grad(), second.zero_grad()
            for part in range(2):
                (critic(model(torch.randn(6, 4))).mean() * (math.inf if i == 1 else 1.0)).backward()
            opt.step(), second.step()
    """,
        explain=0,
    )
    assert len(found["step"]) == 3
    assert found["not finite"][0]["first"].startswith(
        "the gradient at the output of Sequential.0"
    )


def test_a_closure_is_seen_with_its_gradients(watch):
    found = watch("""
        def closure():
            opt.zero_grad()
            loss = loss_of(0)
            loss.backward()
            return loss
        for i in range(2):
            opt.step(closure)
        for i in range(2):
            opt.step(closure=closure)
    """)
    assert all(row["gradient_norm"] > 0 and row["loss"] > 0 for row in found["step"])
    assert len(found["step"]) == 4
    assert not found["warning"]


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning"
)  # torch's own, while it compiles
def test_a_compiled_model(watch):
    fast = """
fast = torch.compile(model, backend="aot_eager")
def loss_of(i, bad):
    return (fast(torch.randn(6, 4)) * (math.nan if i in bad else 1.0)).square().mean()
"""
    found = watch(fast + scaled(3, (1,)))
    torch._dynamo.reset()
    (row,) = found["not finite"]
    assert row["step"] == 1
    assert row["first"].startswith("the gradient at the output of the model (Net)")
    assert row["phase"] == "loss"


# -- the loop --------------------------------------------------------------------------------------------------------

IN_LOOP = """
for i in range(3):
    scaler = torch.amp.GradScaler("cpu")
    opt.zero_grad()
    scaler.scale(loss_of(i)).backward()
    {then}
"""
FAULTS = {
    "scaler-in-loop": IN_LOOP.format(then="scaler.step(opt); scaler.update()"),
    "scaler-not-stepped": scaled()
    .replace("scaler.step(opt)", "opt.step()")
    .replace("scaler.update()", ""),
    "scaler-not-updated": IN_LOOP.format(then="scaler.step(opt)"),
    "clip-before-unscale": scaled().replace(
        "scaler.step(opt)",
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0); scaler.step(opt)",
    ),
    "schedule-on-skip": "schedule = torch.optim.lr_scheduler.StepLR(opt, 1)\n"
    + scaled(5, (3,)).replace("scaler.update()", "scaler.update(); schedule.step()"),
    "scaler-with-bf16": "def loss_of(i, bad):\n    with torch.autocast('cpu', dtype=torch.bfloat16):\n"
    "        return model(torch.randn(6, 4)).float().square().mean()\n" + scaled(),
    "scale-at-floor": scaled(40, tuple(range(30)), 4.0),
    "no-gradients": "other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)\n"
    + PLAIN.format(steps=2, bad=()).replace("opt.step()", "opt.step(); other.step()"),
    "fp16-on-cpu": "def loss_of(i, bad):\n    with torch.autocast('cpu', dtype=torch.float16):\n"
    "        return model(torch.randn(6, 4)).float().square().mean()\n" + scaled(2),
    "adam-eps": "model.half()\nopt = torch.optim.Adam(model.parameters())\n"
    "def loss_of(i, bad): return model(torch.randn(6, 4).half()).float().square().mean()\n"
    + PLAIN.format(steps=1, bad=()),
}
CLASSES = """
target = torch.randint(0, 2, (6,))
share = torch.rand(6, 2)
def loss_of(i, bad=()):
    logits = model(torch.randn(6, 4))
    return {loss}
"""


def judged(loss, steps=2):
    return CLASSES.replace("{loss}", loss) + PLAIN.format(steps=steps, bad=())


FAULTS |= {
    "softmax-of-softmax": judged(
        "nn.functional.cross_entropy(logits.softmax(-1), target)"
    ),
    "log-softmax-twice": judged(
        "nn.functional.cross_entropy(logits.log_softmax(-1), target)"
    ),
    "nll-of-probabilities": judged(
        "nn.functional.nll_loss(logits.softmax(-1), target)"
    ),
    "bce-of-sigmoid": judged(
        "nn.functional.binary_cross_entropy(logits.sigmoid(), share)"
    ),
    "bce-with-logits-of-probabilities": judged(
        "nn.functional.binary_cross_entropy_with_logits(logits.sigmoid(), share)"
    ),
    "log-of-softmax": judged("-(share * logits.softmax(-1).log()).mean()"),
    "log-of-sigmoid": judged("-(share * logits.sigmoid().log()).mean()"),
    "autocast-without-effect": "import warnings; warnings.simplefilter('ignore')\n"
    "def loss_of(i, bad):\n    with torch.autocast('cuda', dtype=torch.bfloat16):\n"
    "        return model(torch.randn(6, 4)).square().mean()\n"
    + PLAIN.format(steps=3, bad=()),
    "unowned-parameters": "opt = torch.optim.SGD(model.b.parameters(), lr=0.1)\n"
    + PLAIN.format(steps=3, bad=()),
    "unchanged-parameters": "model.a.weight.register_hook(torch.zeros_like)\n"
    "opt = torch.optim.SGD(model.parameters(), lr=0.01)\n"
    + PLAIN.format(steps=9, bad=()),
    "lost-updates": "model.bfloat16()\nopt = torch.optim.AdamW(model.parameters(), lr=1e-5)\n"
    "def loss_of(i, bad): return model(torch.randn(6, 4).bfloat16()).float().square().mean()\n"
    + PLAIN.format(steps=5, bad=()),
    "steps-skipped": scaled(30, tuple(range(30)), 2.0**60),
    "often-skipped": scaled(45, tuple(range(1, 45, 2)), 2.0**40),
    "half-statistics": "model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).bfloat16()\n"
    "opt = torch.optim.SGD(model.parameters(), lr=0.5)\n"
    "def loss_of(i, bad): return (model(torch.randn(6, 4).bfloat16()).float() - 1).square().mean()\n"
    + PLAIN.format(steps=2, bad=()),
}


def test_every_rule_has_a_fault():
    assert set(FAULTS) == set(RULES)


@pytest.mark.filterwarnings(
    "ignore:Detected call of `lr_scheduler.step"
)  # the very fault
@pytest.mark.parametrize("rule", FAULTS)
def test_faults_of_a_loop(watch, rule):
    found = watch(FAULTS[rule], explain=0)
    also = {
        "scaler-not-updated": {"scaler-in-loop"},
        "scale-at-floor": {"steps-skipped"},
    }.get(rule, set())
    assert {row["rule"] for row in found["warning"]} == {rule} | also
    (text,) = [row["text"] for row in found["warning"] if row["rule"] == rule]
    assert "{" not in text
    (end,) = found["end"]
    assert end["warnings"] == len(found["warning"])
    codes = {row["rule"]: row["code"] for row in found["warning"]}
    assert codes[rule] == CODES[rule]


def test_codes_are_those_of_lint():
    codes = {rule.code for rule in LINT_RULES}
    assert set(LINT_CODES.values()) <= codes
    assert set(CODES) == set(RULES)
    assert codes.isdisjoint(set(CODES.values()) - set(LINT_CODES.values()))


def test_the_published_wrong_loop(watch):
    """A scaler made inside the loop, never stepped and never updated."""
    found = watch(IN_LOOP.format(then="opt.step()"))
    assert [row["rule"] for row in found["warning"]] == [
        "scaler-not-stepped",
        "scaler-in-loop",
    ]
    assert len(found["step"]) == 3


RIGHT = """
schedule = torch.optim.lr_scheduler.StepLR(opt, 1)
epochs = torch.optim.lr_scheduler.StepLR(opt, 1)
scaler = torch.amp.GradScaler("cpu")
for i in range(6):
    opt.zero_grad()
    for part in range(2):
        scaler.scale(loss_of(i, (3,)) / 2).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    if scaler.get_scale() == before:
        schedule.step()
    if i % 4 == 3:
        epochs.step()
"""


def test_a_loop_that_is_right_hears_nothing(watch):
    assert watch(RIGHT)["warning"] == []


# -- the program -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [scaled(6, (0, 3)), PLAIN.format(steps=6, bad=()), RIGHT]
)
def test_the_numbers_are_those_of_the_script_alone(watch, write, capsys, text):
    text += "\nprint([p.tolist() for p in model.parameters()], torch.rand(3).tolist(), opt.state_dict()['state'])\n"
    write(text)
    runpy.run_path("train.py", run_name="__main__")
    alone = capsys.readouterr().out
    watch(text)
    assert capsys.readouterr().out == alone


def everything():
    return (
        [
            getattr(torch.amp.GradScaler, n)
            for n in ("__init__", "scale", "step", "update")
        ],
        LossScaler.step,
        torch.optim.Optimizer.__init__,
        torch.autograd.backward,
        torch.nn.utils.clip_grad_norm_,
        torch.nn.utils.clip_grad.clip_grad_value_,
        torch.optim.lr_scheduler.LRScheduler.step,
        list(sys.path),
        sys.argv,
        len(_global_optimizer_pre_hooks),
        len(_global_optimizer_post_hooks),
        dict(hooks._global_forward_hooks),
        dict(hooks._global_forward_pre_hooks),
    )


@pytest.mark.parametrize("end", ["", "1 / 0", "sys.exit(3)"])
def test_nothing_is_left_behind(watch, capsys, end):
    before = everything()
    text = (
        scaled(2)
        + f"""
import atexit, gc
{end}
"""
    )
    if end:
        with pytest.raises(ScriptError) as caught:
            watch(text)
        assert "2 steps were seen by then, 0 of them skipped" in str(caught.value)
    else:
        watch(text)
    assert everything() == before


def test_hooks_are_gone_from_the_model(watch, monkeypatch):
    kept = []
    monkeypatch.setattr(torch, "_kept_by_a_test", kept, raising=False)
    watch(scaled(2) + "torch._kept_by_a_test.append(model)\n")
    assert all(
        not m._forward_hooks and not m._forward_pre_hooks for m in kept[0].modules()
    )


def test_stop_on_nan(watch, monkeypatch):
    kept = []
    monkeypatch.setattr(torch, "_kept_by_a_test", kept, raising=False)
    keep = "torch._kept_by_a_test.append(model)\n"
    found = watch(keep + PLAIN.format(steps=9, bad=(2,)), stop_on_nan=True)
    assert [r["step"] for r in found["step"]] == [0, 1, 2]
    assert (
        found["end"][0]["trouble"]
        == "stopped before the weights took gradients that are not finite"
    )
    assert all(bool(p.isfinite().all()) for p in kept[0].parameters())
    found = watch(scaled(9, (2,)), stop_on_nan=True)
    assert found["end"][0]["trouble"] == "stopped at a loss that is not finite"
    assert found["end"][0]["steps"] == 3


def test_overflow_of_scaled_gradients_is_no_reason_to_stop(watch):
    found = watch(
        scaled(3, scale=2.0**127).replace("loss_of(i, ())", "loss_of(i) * 1e6"),
        stop_on_nan=True,
    )
    assert found["end"][0]["steps"] == 3
    assert found["step"][0]["skipped"]
    assert math.isfinite(found["step"][0]["loss"])


# -- the command -------------------------------------------------------------------------------------------------------


def cli(capsys, *arguments):
    code = main(["watch", *arguments, "--", "train.py"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_what_it_prints(write, capsys):
    write(scaled(25, (0,)) + "print('mine')\n")
    code, out, err = cli(capsys)
    assert (code, out) == (0, "mine\n")
    lines = err.splitlines()
    assert lines[:6] == [
        "step 0 skipped at loss scale 65536",
        lines[1],
        "  first parameter in backward order: b.bias, made by b/sum",
        "  inherited: born at /exp, in the forward pass (train.py:12)",
        lines[4],
        "  try: subtract the maximum first (logsumexp, softmax)",
    ]
    assert lines[1].startswith("  first not finite: the output of b (Linear), ")
    assert lines[4].startswith("  exp of values up to ")
    assert [line.split("  ")[0] for line in lines[6:9]] == [
        "step 0",
        "step 10",
        "step 20",
    ]
    assert lines[9:] == ["25 steps, 1 skip, loss scale 32768: it ended well"]


def test_the_function_prints_what_the_command_does(write, capsys):
    write(scaled(25, (0,)) + "print('mine')\n")
    _, out, err = cli(capsys)
    summary = roundoff.watch(["train.py"])
    assert capsys.readouterr() == (out, err)
    assert (summary.steps, summary.skips, summary.trouble) == (25, 1, None)


def test_json_is_a_line_for_each_event(write, capsys):
    write(scaled(3, (1,)) + "print('mine')\n")
    code, out, err = cli(capsys, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["event"] for row in rows] == [
        "step",
        "not finite",
        "step",
        "step",
        "end",
    ]
    assert (code, err) == (0, "mine\n")
    assert rows[2]["loss"] is None  # NaN is no JSON
    assert rows[2]["non_finite"] == 1


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (
            PLAIN.format(steps=3, bad=(2,)),
            1,
            "the gradients of the last 1 steps were not finite",
        ),
        (
            PLAIN.format(steps=3, bad=(1,)).replace(
                "    opt.step()", "    if i != 1: opt.step()"
            ),
            0,
            "it ended well",
        ),
        (scaled(30, tuple(range(30)), 256.0), 1, "the loss scale collapsed to 2.3841"),
        (scaled(30, tuple(range(4, 30)), 2.0**60), 1, "the last 26 steps were skipped"),
        (scaled(3, (1,)), 0, "it ended well"),
        (
            scaled(1) + "1 / 0",
            2,
            "the script failed\n  got: ZeroDivisionError\n  do: 1 steps were seen by then",
        ),
        (scaled(1) + "sys.exit(3)", 2, "exit code 3"),
        (scaled(1) + "sys.exit(0)", 0, "it ended well"),
        ("loss_of(0)", 2, "no step ended in this script"),
    ],
)
def test_exit_codes(write, capsys, text, code, said):
    write(text)
    found, _, err = cli(capsys, "--explain", "0")
    assert found == code
    assert said in err


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_scaler_that_gives_up_is_trouble(write, capsys):
    write("""
        import roundoff
        scaler = roundoff.LossScaler(init_scale=1.0, patience=4)
        for i in range(9):
            opt.zero_grad()
            scaler.backward(loss_of(i) * (math.inf if i > 1 else 1.0))
            scaler.step(opt)
    """)
    code, _, err = cli(capsys, "--explain", "0")
    assert code == 1
    assert (
        "the loss scaler gave up: 4 steps in a row were skipped" in err.splitlines()[-1]
    )


def test_no_script(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="roundoff watch -- train.py"):
        roundoff.watch(["train.py"], print)
    assert main(["watch", "--", "torchrun", "train.py"]) == 2
    assert (
        "torchrun --nproc-per-node 2 -m roundoff watch -- train.py"
        in capsys.readouterr().err
    )


def test_on_a_terminal_one_line_is_refreshed(watch):
    watch(scaled(12, (3,)))
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, highlight=False)
    with print_events(console) as say:
        for step in range(30):
            say(StepEnd(step, 1.0, 8.0, 1.0, 0.0, False, 0, 0.1))
        say(BadGradients(30, 8.0, True, "the output of b (Linear)"))
        say(BadGradients(31, 8.0, True, "the output of b (Linear)"))
    text = out.getvalue()
    assert (
        text.count("first not finite: the output of b (Linear)") == 1
    )  # the same again is one line
    assert "step 31 skipped at loss scale 8" in text
    assert text.count("step 5 ") == 0  # faster than it is refreshed


def test_the_docs_name_every_option_and_rule():
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "cli.md").read_text()
    of_every_verb = page.split("\n## ")[0]
    of_watch = page.split("## roundoff watch ")[1].split("\n## ")[0]
    section = of_every_verb + of_watch
    options = {
        p.name
        for p in typer.main.get_group(app).commands["watch"].params
        if p.name != "script"
    }
    assert {f"--{name.replace('_', '-')}" for name in options} <= set(
        re.findall(r"--[a-z-]+", section)
    )
    pages = [page.read_text() for page in docs.rglob("*.md")]
    assert all(any(f"| `{rule}` |" in page for page in pages) for rule in RULES)
