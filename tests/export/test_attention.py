"""``scaled_dot_product_attention`` in the file: what torch computes, in few operators."""

from __future__ import annotations

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from roundoff.export.onnx.export import export_onnx
from roundoff.workload.workload import Workload


class Attention(nn.Module):
    def __init__(self, **settings) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, q, k, v, mask=None):
        return F.scaled_dot_product_attention(q, k, v, mask, **self.settings)


def tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def lower(length):
    return torch.ones(length, length).tril().bool()


CASES = {
    "plain": (tensors((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4)), {}),
    "without heads": (tensors((2, 5, 8), (2, 7, 8), (2, 7, 4)), {}),
    "causal": (tensors(*[(2, 3, 5, 8)] * 3), {"is_causal": True}),
    "causal, more keys": (
        tensors((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
        {"is_causal": True},
    ),
    "scaled": (tensors(*[(2, 3, 5, 8)] * 3), {"scale": 0.1}),
    "added mask": ([*tensors(*[(2, 3, 5, 8)] * 3), torch.randn(2, 1, 5, 5)], {}),
    "boolean mask": ([*tensors(*[(2, 3, 5, 8)] * 3), lower(5)], {}),
    "a row without keys": (
        [*tensors(*[(2, 3, 5, 8)] * 3), torch.arange(5)[:, None] > torch.arange(5)],
        {},
    ),
    "shared keys": (
        tensors((2, 6, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)),
        {"enable_gqa": True},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_file_computes_what_torch_does(name, tmp_path, inference_session):
    batch, settings = CASES[name]
    model = Attention(**settings).eval()
    export_onnx(Workload(model, [tuple(batch)]), model, tmp_path / "a.onnx")
    session = inference_session(tmp_path / "a.onnx")
    names = [value.name for value in session.get_inputs()]
    feed = {n: t.numpy() for n, t in zip(names, batch, strict=True)}
    (found,) = session.run(None, feed)
    # sums of 8 products and 7 exponentials in another order: a few ulp of fp32
    torch.testing.assert_close(
        torch.from_numpy(found), model(*batch), atol=1e-6, rtol=1e-5
    )
    counts = [n.op_type for n in onnx.load(tmp_path / "a.onnx").graph.node]
    assert counts.count("MatMul") == 2
    assert "Shape" not in counts
