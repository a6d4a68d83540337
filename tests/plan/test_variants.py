"""A workload in fp64: all that is a number, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundoff.plan.variants import double
from roundoff.workload import Workload


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("order", torch.tensor([2, 0, 1]))

    def forward(self, batch):
        waves = batch["waves"] * self.kernel * self.turns
        return torch.einsum("bk,k->b", waves[:, self.order], self.kernel).real


@pytest.fixture
def default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


def test_complex_numbers_are_doubled_too(default_dtype):
    torch.manual_seed(1)
    batch = {"waves": torch.randn(2, 3, dtype=torch.complex64), "n": torch.arange(2)}
    model = Waves()
    before = model.kernel.detach().clone()
    wide = double(Workload(model, [batch]))
    formats = {name: str(t.dtype) for name, t in model.state_dict().items()}
    assert formats == {
        "kernel": "torch.complex128",
        "scale": "torch.float64",
        "turns": "torch.complex128",
        "order": "torch.int64",
    }
    assert torch.equal(model.kernel.detach(), before.to(torch.complex128))
    assert wide.batches[0]["waves"].dtype == torch.complex128
    assert wide.batches[0]["n"].dtype == torch.int64
    # complex64 and complex128 together raise in this operator
    assert model(wide.batches[0]).dtype == torch.float64
