"""Products with weights whose scales ONNX Runtime's kernels refuse: their scales move outside."""

import pytest
import torch
from torch import nn

import roundoff as ro
from roundoff.export import Deployed, export_onnx, prove

pytest.importorskip("onnxruntime")


class Experts(nn.Module):
    """A weight (experts, inputs, outputs) on the right: a scale a column."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 5) * torch.arange(1.0, 6.0))

    def forward(self, x):
        return torch.matmul(x.unsqueeze(1), self.weight).sum(1)


class Left(nn.Module):
    """A weight (rows, inputs) on the left: a scale a row."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 8) * torch.arange(1.0, 6.0)[:, None])

    def forward(self, x):
        return (self.weight @ x.transpose(1, 2)).transpose(1, 2)


class Loop(Left):
    """The same weight in two products."""

    def forward(self, x):
        x = x.transpose(1, 2)
        return (self.weight @ x) + (self.weight @ x.flip(0))


def workload(model):
    torch.manual_seed(0)
    return ro.Workload(model(), [torch.randn(4, 6, 8) for _ in range(4)])


@pytest.mark.parametrize("model", [Experts, Left, Loop])
def test_the_file_gives_what_the_simulation_gives(model, tmp_path):
    task = workload(model)
    quantized = ro.quantize(task, "int8")
    paths = (tmp_path / "int8.onnx", tmp_path / "fp32.onnx")
    proof = prove(task, quantized, *paths, seconds=0)
    # both add the same codes and multiply by the same scales: a few roundings of
    # 2**-24 each, -140 dB, and 20 dB of room
    assert proof.simulation_db > 120
    (row,) = {row.kernel for row in proof.became if row.integer}
    assert "MatMulIntegerToFloat" in row


def test_a_weight_that_kernels_take_keeps_its_scales(tmp_path):
    import onnx

    task = ro.Workload(nn.Linear(8, 5), [torch.randn(4, 6, 8) for _ in range(4)])
    deployed = Deployed(ro.quantize(task, "int8"))
    graph = onnx.load(export_onnx(task, deployed, tmp_path / "linear.onnx")).graph
    assert "Mul" not in [node.op_type for node in graph.node]
