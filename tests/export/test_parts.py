"""Parts of written codes: read on the grid that they were written on, and cut out as codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from roundoff.export.onnx.proof import prove
from roundoff.quantize.options import Rounding
from roundoff.quantize.pipeline import quantize
from roundoff.workload.workload import Workload


class Split(nn.Module):
    """A convolution whose channels are cut in two: a branch reads one, a join the other."""

    def __init__(self, clip: bool) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.b = nn.Conv2d(8, 8, 3, padding=1)
        self.c = nn.Conv2d(16, 8, 1)
        self.act = nn.ReLU() if clip else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        kept, branch = self.act(self.a(x)).chunk(2, 1)
        result: Tensor = self.c(torch.cat([kept, self.act(self.b(branch))], 1))
        return result


@pytest.mark.parametrize("clip", [True, False], ids=["relu", "plain"])
def test_a_part_takes_the_scale_of_the_whole_and_is_cut_out_as_codes(clip, tmp_path):
    torch.manual_seed(0)
    net = Split(clip).eval()
    with torch.no_grad():  # a grid of its own would be a finer one
        net.a.weight[8:] *= 0.3
        net.a.bias[8:] *= 0.3
    batches = [torch.randn(4, 3, 8, 8) for _ in range(3)]
    workload = Workload(net, batches[:2], held_out=batches[2:], name="split")
    rounding = Rounding(observer="minmax", weights="nearest")
    model = quantize(workload, "int8", rounding=rounding, spread=False)
    written = "act/relu" if clip else "a/conv2d"
    part = model.quantizer("b/conv2d:0")
    whole = model.quantizer(written)
    assert part.source == written
    torch.testing.assert_close(part.scale, whole.scale, rtol=0, atol=0)
    torch.testing.assert_close(part.zero_point, whole.zero_point, rtol=0, atol=0)
    proof = prove(
        workload, model, tmp_path / "q.onnx", tmp_path / "fp32.onnx", seconds=0
    )
    assert proof.codes <= 1
    assert proof.kernels.between_codes == ()
    # the last one's result is a float, which its kernel may compute
    assert proof.kernels.counts["QLinearConv"] >= 2
    assert proof.kernels.counts["Split"] == 1
