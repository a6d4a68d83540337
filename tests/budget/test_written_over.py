"""Models that write over what autograd saved have the budget of those that do not."""

import pytest
import torch
from torch import nn

import roundoff as ro
from roundoff.budget.written_over import KeptTensor, Writes, saving
from roundoff.workload import Workload


class _Net(nn.Module):
    """``sin(h) * h`` with h written over between, in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 5, generator=generator))
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.linear(x, self.weight)
        s = h.sin()  # the backward of sin reads h
        if self.way == "written":
            h *= 0.5
        else:
            h = h * 0.5
        return s * h


def _budget(way: str) -> ro.Budget:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, 5, generator=generator) for _ in range(2)]
    return ro.budget(Workload(_Net(way), batches), ["bf16"], probes=4, trials=0)


def test_the_numbers_are_those_of_the_model_that_writes_over_nothing() -> None:
    expected = {cost.site: cost.noise for cost in _budget("plain").costs}
    measured = {cost.site: cost.noise for cost in _budget("written").costs}
    assert measured.keys() == expected.keys()
    for site, noise in expected.items():
        # the same signs and errors; sums in fp32 may come in another order
        assert measured[site] == pytest.approx(noise, rel=1e-5), site


def test_a_copy_before_the_write_is_read_back() -> None:
    kept: list[KeptTensor] = []

    def keep(tensor: torch.Tensor) -> KeptTensor:
        kept.append(KeptTensor(tensor))
        return kept[-1]

    x = torch.tensor([0.5, 2.0], requires_grad=True)
    with saving(Writes.COPIED, keep):
        h = x * 1.0
        y = h.sin().sum()
        for tensor in kept:
            tensor.copy()
        with torch.no_grad():
            h.mul_(3.0)
        y.backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_a_write_that_nobody_announced_is_refused() -> None:
    x = torch.tensor([0.5, 2.0], requires_grad=True)
    with saving(Writes.COPIED, KeptTensor):
        h = x * 1.0
        y = h.sin().sum()
        with torch.no_grad():
            h.mul_(3.0)
        with pytest.raises(RuntimeError, match="wrote over"):
            y.backward()
