"""Values times their own sigmoid between integer kernels: codes in ONNX Runtime, as in the simulation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundoff.export.onnx.proof import Proof, prove
from roundoff.quantize.model import Passing, QuantizedModel
from roundoff.workload.workload import Workload


class Gated(nn.Module):
    """Convolutions with SiLU: one between two of them, one that reads a sum."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.b = nn.Conv2d(8, 8, 3, padding=1)
        self.short = nn.Conv2d(3, 8, 1)
        self.c = nn.Conv2d(8, 8, 1)
        self.act = nn.SiLU(inplace)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.b(self.act(self.a(x)))
        result: Tensor = self.c(self.act(self.short(x) + branch))
        return result


def rows(model: QuantizedModel) -> dict[str, bool]:
    return {site: route.gated for site, route in model.routes.items()}


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "inplace"])
def gated(request, quantize: Any, tmp_path_factory) -> tuple[QuantizedModel, Proof]:
    torch.manual_seed(0)
    net = Gated(request.param).eval()
    batches = [torch.randn(4, 3, 8, 8) * 3 for _ in range(3)]
    workload = Workload(net, batches[:2], held_out=batches[2:], name="gated")
    model = quantize(workload, "int8_asym")
    folder = tmp_path_factory.mktemp("gated")
    proof = prove(workload, model, folder / "q.onnx", folder / "fp32.onnx", seconds=0)
    return model, proof


def test_what_reads_and_becomes_codes_is_looked_up_and_multiplied_as_codes(gated):
    model, proof = gated
    counts = proof.kernels.counts
    sites = [site for site, is_gated in rows(model).items() if is_gated]
    # the second reads a sum, which is a float
    assert [s.partition("#")[0] for s in sites] == ["act/silu"]
    assert len(sites) == 1
    assert counts["QLinearSigmoid"] == 1
    assert counts["QLinearMul"] == 1
    became = {row.site: row for row in proof.became}
    assert became[sites[0]].integer
    assert became[sites[0]].kernel in (
        "QLinearSigmoid, QLinearMul",
        "QLinearMul, QLinearSigmoid",
    )


def test_file_and_simulation_are_one_code_apart_at_most(gated):
    _, proof = gated
    assert proof.codes <= 1
    assert proof.simulation_db > 40


def test_the_simulation_multiplies_by_255_steps(gated):
    model, _ = gated
    site = next(site for site, is_gated in rows(model).items() if is_gated)
    x = torch.linspace(-6, 6, 101)
    gate = model.passing.gate(site, torch.sigmoid(x))
    codes = (gate * 255).double()
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-4)
    # half a step, and the rounding of 1/255 to fp32
    assert (gate - torch.sigmoid(x)).abs().max() <= 0.5 / 255 + 1e-7


def test_its_noise_is_a_small_part_of_that_of_the_codes():
    """What `code_flow` says: E[(x s)²] is small beside the step of the result."""
    torch.manual_seed(0)
    x = torch.randn(100_000, dtype=torch.float64)
    exact = x * torch.sigmoid(x)
    step = float(exact.max() - exact.min()) / 255
    gate = (torch.sigmoid(x) * 255).round() / 255
    noise = float((x * gate - exact).square().mean())
    assert noise < 0.1 * step**2 / 12
    assert math.isfinite(noise)


def test_a_gradient_passes_straight_through():
    x = torch.randn(5, requires_grad=True)
    Passing().gate("site", torch.sigmoid(x)).sum().backward()
    sigmoid = torch.sigmoid(x.detach())
    torch.testing.assert_close(x.grad, sigmoid * (1 - sigmoid))
