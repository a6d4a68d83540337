"""Complex parameters, and buffers that are made in the script before a deep copy of a model."""

from __future__ import annotations

import copy
import linecache

import pytest
import torch
from torch import nn

import roundoff

STEPS = 2


class Spectral(nn.Module):
    """A product per frequency, beside a product with a weight for each place."""

    def __init__(self, area):
        super().__init__()
        self.modes = nn.Parameter(torch.randn(4, 5, dtype=torch.complex64))
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("area", area)

    def forward(self, x):
        spectrum = torch.fft.rfft(x * self.area) * self.modes
        return x + self.gain[:, None] * torch.fft.irfft(spectrum, 8)


def record(
    folder, *, areas=torch.mean, keep="tensors", held=lambda model: [model.gain]
):
    """Train for two steps, with an average of the weights; the script makes its areas."""
    with roundoff.capture(folder, keep=keep) as run:
        torch.manual_seed(0)
        raw = torch.linspace(-1, 1, 8).cos()
        area = raw / areas(raw)
        model = Spectral(area)
        average = copy.deepcopy(model).requires_grad_(False)
        optimizer = torch.optim.AdamW([model.modes, *held(model)], 1e-2)
        for _ in range(STEPS):
            optimizer.zero_grad()
            x = torch.randn(3, 4, 8)
            (area * model(x)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                pairs = zip(average.parameters(), model.parameters(), strict=True)
                for ours, theirs in pairs:
                    ours.mul_(0.9).add_(theirs, alpha=0.1)
            run.step()
    return folder


def text(culprit):
    return linecache.getline(__file__, int(culprit.line.rpartition(":")[2])).strip()


@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_a_buffer_that_the_script_makes_is_told_where_it_is_made(tmp_path, keep):
    compared = roundoff.compare(
        reference=record(tmp_path / "right", keep=keep),
        candidate=record(tmp_path / "wrong", areas=torch.amax, keep=keep),
    )
    first, *others = compared.culprits()
    assert text(first) == "area = raw / areas(raw)"
    # what the optimizer makes of complex parameters is passed on to the next step, and is
    # no fault of its own
    assert keep == "stats" or not others


def test_complex_parameters_stand_beside_an_update_that_is_left_out(tmp_path):
    compared = roundoff.compare(
        reference=record(tmp_path / "right"),
        candidate=record(tmp_path / "wrong", held=lambda model: []),
    )
    first = compared.culprits()[0]
    assert first.looks_like == "missing update"
    assert first.evidence.startswith("gain is not changed here")
