"""Arguments of wrong types: one error that names the argument, and says what is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundoff
from roundoff.errors import ArgumentError, FormatError, RoundoffError, WorkloadError


class Net(nn.Module):
    """Takes four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, batch: torch.Tensor) -> Any:
        return self.layer(batch)


#: No wrong type below is for the type checker.
ro: Any = roundoff
BATCHES = [torch.ones(2, 4)]
#: What a user may give by mistake: nothing, a number, a class, a model, a list.
WRONG: tuple[Any, ...] = (None, 3, Net, Net(), [])
#: With a workload, or an argument in its place.
OF_WORKLOADS: dict[str, Callable[[Any], Any]] = {
    "diagnose": ro.diagnose,
    "budget": ro.budget,
    "advise": ro.advise,
    "tune": ro.tune,
    "bench": lambda workload: ro.bench(workload, ["fp32", "bf16"]),
    "verify": lambda workload: ro.verify(workload, ro.Plan(())),
}


@pytest.mark.parametrize("verb", OF_WORKLOADS)
@pytest.mark.parametrize("wrong", WRONG, ids=["None", "3", "class", "model", "list"])
def test_what_is_no_workload(verb: str, wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="workload: an argument of the wrong type"):
        OF_WORKLOADS[verb](wrong)


@pytest.mark.parametrize("verb", OF_WORKLOADS)
def test_a_file_that_is_not_there(verb: str) -> None:
    for path in ("nowhere.py", Path("nowhere.py")):
        with pytest.raises(WorkloadError, match="nowhere"):
            OF_WORKLOADS[verb](path)


def test_a_file_is_a_workload(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "import torch\nmodel = torch.nn.Linear(2, 1)\nbatches = [torch.ones(3, 2)]\n"
    )
    for path in (file, str(file)):
        assert set(ro.budget(path, "bf16", probes=1).terms["format"]) == {"bf16"}


def _capture(*arguments: Any, **options: Any) -> None:
    with ro.capture(*arguments, **options):
        pass


def _autocast(*arguments: Any) -> None:
    with ro.autocast(*arguments):
        pass


#: What says which argument is wrong.
CALLS: dict[str, tuple[str, Callable[[], Any]]] = {
    "plan None": ("budget", lambda: ro.plan(None, target=30)),
    "plan number": ("budget", lambda: ro.plan(3, target=30)),
    "compare": ("path", lambda: ro.compare(reference=None, candidate=3)),
    "compare models": ("path", lambda: ro.compare(reference=Net(), candidate=Net())),
    "show": ("path", lambda: ro.show(None)),
    "overflow": ("path", lambda: ro.overflow(3)),
    "replay": ("path", lambda: ro.replay(Net())),
    "load": ("path", lambda: ro.load(None)),
    "check": ("run", lambda: ro.check(None, 3)),
    "capture nothing": ("path", lambda: _capture(None)),
    "capture the model first": ("path", lambda: _capture(Net(), "run")),
    "capture a class": ("model", lambda: _capture("run", Net)),
    "capture a number": ("model", lambda: _capture("run", 3)),
    "quantize, a number": ("plan", lambda: ro.quantize(Net(), 3, BATCHES)),
    "quantize, a list": ("plan", lambda: ro.quantize(Net(), ["int8"], BATCHES)),
    "quantize, one batch": ("batches", lambda: ro.quantize(Net(), "int8", BATCHES[0])),
    "quantize, no batches": ("batches", lambda: ro.quantize(Net(), "int8", 3)),
    "autocast None": ("plan", lambda: _autocast(None)),
    "autocast a model": ("plan", lambda: _autocast(Net())),
    "autocast of a number": ("model", lambda: _autocast("bf16", 3)),
    "Plan.load": ("path", lambda: ro.Plan.load(None)),
    "Budget.load": ("path", lambda: ro.Budget.load(3)),
    "Workload.load": ("source", lambda: ro.Workload.load(None)),
    "lint": ("paths", lambda: ro.lint(3)),
    "lint None": ("paths", lambda: ro.lint(None)),
    "lint of None": ("paths", lambda: ro.lint([None])),
    "migrate": ("script", lambda: ro.migrate(None, to="amp")),
    "watch": ("command", lambda: ro.watch("train.py --lr 3")),
    "watch None": ("command", lambda: ro.watch(None)),
    "verify": ("plan", lambda: ro.verify(ro.Workload(Net(), BATCHES), 3)),
    "formats": ("formats", lambda: ro.budget(ro.Workload(Net(), BATCHES), None)),
    "a format": ("format", lambda: ro.budget(ro.Workload(Net(), BATCHES), [3])),
    "an option": ("tarket", lambda: ro.diagnose(ro.Workload(Net(), BATCHES), tarket=3)),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_argument_is_named(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, function = CALLS[call]
    with pytest.raises(ArgumentError, match=rf"^{name}: ") as caught:
        function()
    assert isinstance(caught.value, RoundoffError)
    assert isinstance(caught.value, TypeError)
    assert caught.value.expected or caught.value.do
    assert not list(tmp_path.iterdir())


def test_words_of_no_kind() -> None:
    workload = ro.Workload(Net(), BATCHES)
    budget = ro.budget(workload, "bf16", probes=1)
    with pytest.raises(RoundoffError, match="cost"):
        ro.plan(budget, target=30, cost=None)
    with pytest.raises(RoundoffError):
        ro.migrate("a.py", to=3)
    with pytest.raises(FormatError):
        ro.budget(workload, "bf16,bf17")


def test_dtypes_are_names_of_formats() -> None:
    workload = ro.Workload(Net(), BATCHES)
    dtypes: Any = [torch.bfloat16]
    assert set(ro.budget(workload, dtypes, probes=1).terms["format"]) == {"bf16"}
    with ro.autocast(torch.bfloat16):
        assert Net()(BATCHES[0]).dtype == torch.bfloat16
