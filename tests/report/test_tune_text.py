"""What ``roundoff tune`` prints."""

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from roundoff.report import print_tuning
from roundoff.train import TunedRun, Tuning

FP32 = TunedRun(
    name="fp32",
    cost=8.0,
    fp32_operators=2,
    predicted_db=None,
    measured_db=float("inf"),
    native_db=None,
    loss_error=0.0,
    along=[],
    losses=[2.0, 1.5],
    formats={},
)
EQUAL = TunedRun(
    name="equal",
    cost=4.0,
    fp32_operators=1,
    predicted_db=41.0,
    measured_db=40.5,
    native_db=40.1,
    loss_error=1e-4,
    along=[(1, 40.2)],
    losses=[2.0, 1.51],
    formats={"0/linear": "bf16"},
)
TUNING = Tuning(
    version="0.1.0",
    workload="tiny",
    formats=["bf16"],
    device="cpu",
    half="bf16",
    cost_model="bytes",
    unit="MB",
    extra=0.2,
    steps=2,
    probes=12,
    batches=1,
    target="gradients",
    loss_scale=1.0,
    cost_fp32=8.0,
    aim="equal",
    met=True,
    reason="40.5 dB against 36.0 dB of built-in autocast (+4.5)",
    operators=2,
    runs=[FP32, EQUAL],
    pareto=[],
    ranking=[],
    notes=[],
    excluded=[],
    plan=None,
    budget=None,
)
TEXT = """\
roundoff 0.1.0: tiny, training in bf16 (gradients; 12 probes, 1 batch)

The plan is better than built-in autocast: 40.5 dB against 36.0 dB of built-in autocast (+4.5).

Runs: 2 steps each, SQNR of the gradients in dB
plan    cost   of fp32   in fp32   predicted   measured   native   then   loss error   last loss
────────────────────────────────────────────────────────────────────────────────────────────────
fp32    8 MB      100%         2           ∞          ∞        –      –           0%         1.5
equal   4 MB     50.0%         1        41.0       40.5     40.1   40.2        <0.1%        1.51
'in fp32' counts operators, of 2; 'then' is later in training, at the weights of the fp32 run.
"""


def show(tuning):
    page = io.StringIO()
    print_tuning(tuning, Console(width=100, file=page))
    return page.getvalue()


def test_the_runs_are_beside_each_other():
    assert show(TUNING).split() == TEXT.split()


@pytest.mark.parametrize("width", [60, 80])
def test_no_line_is_wider_than_the_terminal(width):
    page = io.StringIO()
    print_tuning(TUNING, Console(width=width, file=page))
    lines = page.getvalue().splitlines()
    assert max(cell_len(line.rstrip()) for line in lines) <= width
    for word in ("cost", "native", "1.51", "last", "error"):
        assert any(word in line for line in lines)


def test_a_plan_that_misses_and_its_notes():
    text = show(replace(TUNING, met=False, batches=2, notes=["slow"]))
    assert "12 probes, 2 batches" in text
    assert "The plan is not better than built-in autocast:" in text
    assert text.endswith("Note: slow\n")


def test_the_json_has_the_number_of_sites_in_place_of_the_plan():
    data = TUNING.to_dict()
    assert not {"plan", "budget"} & set(data)
    assert list(data)[:3] == ["version", "workload", "formats"]
    assert list(data)[-1] == "excluded"
    assert "formats" not in data["runs"][1]
    assert data["runs"][1]["sites"] == 1
