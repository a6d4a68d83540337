"""Whatever goes wrong in a recording ends it with one warning, and the program ends as without it, to the bit.

Each function of the room is made to fail in turn.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import roundoff
from roundoff.record import (
    dispatch,
    loop_events,
    module_paths,
    modules,
    other_threads,
    recorder,
    session,
    statistics,
    step_boundaries,
    tensor_keeper,
)
from roundoff.record.disk import step_table, tensors, writer

MODULES = (
    dispatch,
    loop_events,
    module_paths,
    modules,
    other_threads,
    recorder,
    session,
    statistics,
    step_boundaries,
    tensor_keeper,
    step_table,
    tensors,
    writer,
)
#: They are the guards themselves, the program's own calls, or say what is raised on purpose.
NOT_TRIED = {
    "run",
    "_write",
    "_run_unrecorded",
    "_run_perturbed",
    "_noted",
    "_enter",
    "_leave",
    "_leave_mode",
    "_optimizer_steps",
    "_optimizer_stepped",
    "_before_optimizer",
    "_after_optimizer",
    "_record_gradient",
    "_check_choice",
    "_check_leaves",
    "_module_or_none",
    "_attempt",
    "_failed",
    "_check_recorded",
    "_guarded",
    "_stop",
    "step",
    "fail",
    "identity",
}


class InjectedError(Exception):
    """What nobody foresaw."""


def train() -> list[torch.Tensor]:
    """A training loop with all that a recording follows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield_step()
    return [loss.detach(), *(p.detach().clone() for p in model.parameters())]


yield_step: Callable[[], None] = lambda: None  # noqa: E731


def functions() -> Iterator[tuple[Any, str]]:
    """Each function and method of the recording that is written in Python."""
    for module in MODULES:
        for owner in (module, *_classes(module)):
            for name, value in vars(owner).items():
                is_its_own = getattr(value, "__module__", None) == module.__name__
                if not inspect.isfunction(value) or not is_its_own:
                    continue
                is_special = name.startswith("__")
                if (
                    is_special
                    or name in NOT_TRIED
                    or inspect.isgeneratorfunction(inspect.unwrap(value))
                ):
                    continue
                yield owner, name


def _classes(module: Any) -> list[type]:
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__ == module.__name__
    ]


FUNCTIONS = list(functions())
EXPECTED = train()


#: At module level most of it is the same.
CASES = [(owner, name, "op") for owner, name in FUNCTIONS] + [
    (owner, name, "module")
    for owner, name in FUNCTIONS
    if owner in (modules, modules.ModuleRecording, session.Capture)
]


@pytest.mark.parametrize(
    ("owner", "name", "level"),
    CASES,
    ids=[f"{o.__name__.rpartition('.')[2]}.{name}-{level}" for o, name, level in CASES],
)
def test_a_fault_of_a_recording_is_a_warning(
    owner: Any, name: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    def fail(*_: Any, **__: Any) -> Any:
        called.append(name)
        raise InjectedError("injected")

    monkeypatch.setattr(owner, name, fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with roundoff.capture(tmp_path / "run", level=level, keep="tensors") as run:
            monkeypatch.setattr(f"{__name__}.yield_step", run.step)
            ended = train()
    texts = [str(warning.message) for warning in caught]
    assert _get_current_dispatch_mode() is None
    assert all(torch.equal(a, b) for a, b in zip(ended, EXPECTED, strict=True))
    if called:
        stopped = [text for text in texts if "stopped" in text]
        assert len(stopped) == 1, stopped
