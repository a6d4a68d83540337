"""Data in other portions are told from other data by their moments alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roundoff as ro
from roundoff.compare.records.data_portions import (
    DataPortions,
    Moments,
    is_padded,
    is_whole,
)
from roundoff.compare.records.recorded_rows import Rows, rows_of

SAMPLES = 6
FEATURES = 5


def _moments(values: Tensor) -> Moments:
    exact = values.to(torch.float64)
    return Moments(
        exact.numel(),
        float(exact.sum()),
        float(exact.square().sum()),
        float(exact.min()),
        float(exact.max()),
    )


def _data(seed: int = 0) -> Tensor:
    return torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(seed))


def test_moments_of_parts_make_those_of_the_whole() -> None:
    first, second = (_moments(part) for part in _data().chunk(2))
    assert is_whole(_moments(_data()), first + second)
    assert not is_whole(_moments(_data()), first + first)


@pytest.mark.parametrize("constant", [0.0, -100.0, 0.5])
def test_padding_is_seen_whatever_it_is_filled_with(constant: float) -> None:
    padded = F.pad(_data(), (0, 2), value=constant)
    assert is_padded(_moments(_data()), _moments(padded))
    assert not is_padded(_moments(padded), _moments(_data()))


@pytest.mark.parametrize("factor", [1.02, 0.98])
def test_padded_data_that_are_scaled_are_other_data(factor: float) -> None:
    padded = F.pad(factor * _data(), (0, 2))
    assert not is_padded(_moments(_data()), _moments(padded))


def test_more_samples_are_no_padding() -> None:
    more = torch.cat([_data(), _data(1)[:2]])
    assert not is_padded(_moments(_data()), _moments(more))


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 8)
        self.down = nn.Linear(8, 3)

    def forward(self, values: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(values)))


def _whole(model: nn.Module, data: Tensor) -> None:
    model(data)


def _halves(model: nn.Module, data: Tensor) -> None:
    for part in data.chunk(2):
        model(part)


def _one_at_a_time(model: nn.Module, data: Tensor) -> None:
    for sample in data:
        model(sample[None])


def _uneven(model: nn.Module, data: Tensor) -> None:
    model(data[:4])
    model(data[4:])


def _padded(model: nn.Module, data: Tensor) -> None:
    model(F.pad(data, (0, 0, 0, 3)))


def _first_half_alone(model: nn.Module, data: Tensor) -> None:
    model(data[: SAMPLES // 2])


def _scaled_halves(model: nn.Module, data: Tensor) -> None:
    for part in data.chunk(2):
        model(1.02 * part)


def _first_half_twice(model: nn.Module, data: Tensor) -> None:
    for _ in range(2):
        model(data[: SAMPLES // 2])


def _compared(
    folder: Path, schedule: Callable[[nn.Module, Tensor], None], leaves: int = 0
) -> ro.Comparison:
    for name, run in (("reference", _whole), ("candidate", schedule)):
        torch.manual_seed(0)
        model = Net()
        with ro.capture(folder / name, model, leaves=leaves), torch.no_grad():
            run(model, _data())
    return ro.compare(reference=folder / "reference", candidate=folder / "candidate")


@pytest.mark.parametrize("schedule", [_halves, _one_at_a_time, _uneven, _padded])
def test_other_portions_are_not_called_other_data(
    tmp_path: Path, schedule: Callable[[nn.Module, Tensor], None]
) -> None:
    comparison = _compared(tmp_path, schedule)
    assert not comparison.fails
    assert comparison.verdicts["undecided"]


@pytest.mark.parametrize("schedule", [_halves, _one_at_a_time, _uneven])
def test_portions_of_computed_tensors_are_decided(
    tmp_path: Path, schedule: Callable[[nn.Module, Tensor], None]
) -> None:
    assert _compared(tmp_path, schedule, leaves=32).agrees


@pytest.mark.parametrize("leaves", [0, 32])
@pytest.mark.parametrize(
    "schedule", [_first_half_alone, _scaled_halves, _first_half_twice]
)
def test_data_left_out_scaled_or_repeated_are_other_data(
    tmp_path: Path, schedule: Callable[[nn.Module, Tensor], None], leaves: int
) -> None:
    comparison = _compared(tmp_path, schedule, leaves)
    assert comparison.culprits(1)[0].looks_like == "other data"


class Kept(nn.Module):
    """The places that a mask keeps, up to a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(FEATURES))

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        return values * mask * self.scale


class Masked(nn.Module):
    """Two layers over the places that a mask keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept()
        self.net = Net()

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        return self.net(self.kept(values, mask))


def _rows_of(folder: Path, data: Tensor, length: int) -> Rows:
    torch.manual_seed(0)
    model = Masked()
    mask = F.pad(torch.ones(len(data), 1), (0, 0, 0, length - len(data)))
    with ro.capture(folder, model), torch.no_grad():
        model(F.pad(data, (0, 0, 0, length - len(data))), mask)
    return rows_of(ro.load(folder), 0, 0)


@pytest.mark.parametrize(("seed", "are_same"), [(0, True), (1, False)])
def test_masks_are_alike_whatever_they_mask(
    tmp_path: Path, seed: int, are_same: bool
) -> None:
    ours = _rows_of(tmp_path / "ours", _data(), 7)
    theirs = _rows_of(tmp_path / "theirs", _data(seed), 9)
    assert DataPortions(ours, theirs).first_are_same() is are_same
