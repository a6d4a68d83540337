"""Numbers that a model's code reads from a batch: constants of the file, and what other batches do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from roundoff.export import prove
from roundoff.quantize import quantize
from roundoff.workload import Workload


class Crop(nn.Module):
    """Cuts out a window where a batch says; the corner is read as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3, padding=1)
        self.fc = nn.Linear(12 * 16, 3)

    def forward(self, x: Tensor, corners: Tensor) -> Tensor:
        (top, left), _ = corners.tolist()
        image = self.conv(x) if top > 1 else x.repeat(1, 12, 1, 1)
        window = image[:, :, top : top + 4, left : left + 4]
        return self.fc(window.flatten(1))


class Steps(nn.Module):
    """Takes as many steps as a batch says: other batches have other values inside."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.out = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        for _ in range(int(steps.max())):
            x = torch.tanh(self.step(x))
        return self.out(x)


def proved(model: nn.Module, batches, tmp_path):
    workload = Workload(model.eval(), batches, name="net")
    return prove(
        workload,
        quantize(workload, "int8"),
        tmp_path / "model.onnx",
        tmp_path / "fp32.onnx",
        seconds=0,
    )


def test_numbers_of_a_list(tmp_path):
    torch.manual_seed(0)
    corners = ([[2, 1], [0, 0]], [[2, 1], [0, 0]], [[3, 0], [0, 0]])
    batches = [(torch.randn(4, 1, 8, 8), torch.tensor(c)) for c in corners]
    proof = proved(Crop(), batches, tmp_path)
    assert any("reads a number from values, 2, 1, 0" in r for r in proof.remarks), (
        proof.remarks
    )
    assert any("cannot run batch 2: " in remark for remark in proof.remarks)
    assert proof.samples == 8  # of the two batches with these numbers
    assert proof.simulation_db > 60  # the same codes, but for a few at a boundary


def test_batches_with_more_steps_than_the_file_has(tmp_path):
    torch.manual_seed(0)
    batches = [(torch.randn(8, 6), torch.tensor([1, n])) for n in (2, 3, 4)]
    proof = proved(Steps(), batches, tmp_path)
    assert proof.samples == 8
    assert proof.simulation_db > 60
    assert all("#2" not in site.name for site in proof.sites)
