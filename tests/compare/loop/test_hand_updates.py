"""An optimizer written out in the script, and gradients taken sample by sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roundoff as ro
from roundoff.compare.loop.hand_updates import is_made_out_of_place
from roundoff.compare.records.recorded_rows import RecordedRow

KEEP = pytest.mark.parametrize("keep", ["tensors", "stats"])
RATE = 0.1


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 8)
        self.down = nn.Linear(8, 3)

    def forward(self, values: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(values)))


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(6, 5, generator=generator),
        torch.randint(0, 3, (6,), generator=generator),
    )


def _with_optimizer(model: nn.Module) -> None:
    values, labels = _batch()
    F.cross_entropy(model(values), labels).backward()
    torch.optim.SGD(model.parameters(), RATE, foreach=False).step()


def _by_hand(model: nn.Module) -> None:
    values, labels = _batch()
    F.cross_entropy(model(values), labels).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(RATE * parameter.grad)


def _without_update(model: nn.Module) -> None:
    values, labels = _batch()
    F.cross_entropy(model(values), labels).backward()


def _head_alone(model: nn.Module) -> None:
    values, labels = _batch()
    F.cross_entropy(model(values), labels).backward()
    with torch.no_grad():
        for parameter in list(model.parameters())[2:]:
            assert parameter.grad is not None
            parameter.sub_(RATE * parameter.grad)


def _sample_gradients(model: nn.Module, factor: float) -> None:
    values, labels = _batch()

    def loss(parameters: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        output = torch.func.functional_call(model, parameters, (sample[None],))
        return F.cross_entropy(output[0], label)

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    gradients = per_sample(parameters, values, labels)
    for name, parameter in model.named_parameters():
        parameter.grad = factor * gradients[name].mean(0)
    torch.optim.SGD(model.parameters(), RATE, foreach=False).step()


def _samples(model: nn.Module) -> None:
    _sample_gradients(model, 1.0)


def _samples_summed(model: nn.Module) -> None:
    _sample_gradients(model, 6.0)


def _compared(
    folder: Path, keep: str, candidate: Callable[[nn.Module], None]
) -> ro.Comparison:
    for name, run in (("reference", _with_optimizer), ("candidate", candidate)):
        torch.manual_seed(0)
        model = Net()
        with ro.capture(folder / name, model, keep=keep) as capture:
            run(model)
            capture.step()
    return ro.compare(reference=folder / "reference", candidate=folder / "candidate")


@KEEP
@pytest.mark.parametrize("candidate", [_by_hand, _samples])
def test_another_form_of_a_step_is_no_fault(
    tmp_path: Path, keep: str, candidate: Callable[[nn.Module], None]
) -> None:
    comparison = _compared(tmp_path, keep, candidate)
    assert not comparison.fails, comparison.answer


@KEEP
@pytest.mark.parametrize("candidate", [_without_update, _head_alone, _samples_summed])
def test_a_step_that_does_something_else_is_a_fault(
    tmp_path: Path, keep: str, candidate: Callable[[nn.Module], None]
) -> None:
    comparison = _compared(tmp_path, keep, candidate)
    assert comparison.fails


def test_a_value_in_new_memory_is_the_update_only_where_it_is_nearly_the_wanted_one():
    """Half of the way is some other value; a parameter in its own memory is another rule."""

    def row(record, mean, **changed):
        counts = dict.fromkeys(("nan", "posinf", "neginf", "zero", "subnormal"), 0)
        numbers = {"min": mean - 1, "max": mean + 1, "mean": mean, "std": 1.0}
        size = {"l2": 2 * mean, "shape": (4,), "numel": 4, "dtype": "float32"}
        return RecordedRow(
            record, record, "sub", **numbers, **size, **counts, **changed
        )

    start = row(0, 2.0)
    wanted = row(1, 3.0)
    assert is_made_out_of_place({2: row(2, 3.0)}, start, wanted)
    assert not is_made_out_of_place({2: row(2, 2.5)}, start, wanted)
    assert not is_made_out_of_place({2: row(2, 3.0, name="w")}, start, wanted)
    assert not is_made_out_of_place({2: row(2, 3.0)}, None, wanted)
