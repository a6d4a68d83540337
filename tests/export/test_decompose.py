"""Operators that the exporter has no ONNX for: torch says what they compute, ONNX Runtime runs their parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roundoff.export.onnx.export import write
from roundoff.workload.workload import Workload


class Rows(nn.Module):
    """Everything for rows at once: each result is an output of its own."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        distances = [torch.cdist(x, y, p=p) for p in (0.0, 1.0, 2.0, 3.0, np.inf)]
        ordered = x.sort(1).values[0].contiguous()
        buckets = [torch.bucketize(y, ordered, right=right) for right in (False, True)]
        running = [*torch.cummax(x, 1), *torch.cummin(x, 0)]
        chosen = [x.median(1)[0], x.median(), *x.kthvalue(2, 0, keepdim=True)]
        return tuple(
            value.float() for value in (*distances, *buckets, *running, *chosen)
        )


class Pools(nn.Module):
    """Adaptive pools of sizes that do not divide."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        largest, places = F.adaptive_max_pool2d(x[:, 0], (3, 2), return_indices=True)
        deep = F.adaptive_max_pool3d(x, (1, 2, 2))
        return largest, places.float(), deep, F.adaptive_avg_pool3d(x, (2, 3, 1))


class Resynthesized(nn.Module):
    """A signal by way of its spectrum, as masks in speech are applied."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        window = torch.hann_window(16)
        spectrum = torch.stft(x, 16, 4, window=window, return_complex=True)
        parts = torch.view_as_real(spectrum) * 0.5
        changed = torch.view_as_complex(parts.contiguous())
        return (torch.istft(changed, 16, 4, window=window, length=x.shape[-1]),)


def assert_computes(model: nn.Module, batch, tmp_path, inference_session) -> None:
    workload = Workload(model.eval(), [batch], name="parts")
    captured = write(workload, workload.model, tmp_path / "parts.onnx")
    inputs = zip(captured.traced.inputs, captured.traced.tensors(batch), strict=True)
    session: Any = inference_session(tmp_path / "parts.onnx")
    results = session.run(None, {name: tensor.numpy() for name, tensor in inputs})
    for result, wanted in zip(results, workload.run(batch), strict=True):
        # sums of 24 numbers at most, and roots and powers of ONNX Runtime within some 2**-20
        np.testing.assert_allclose(result, wanted.numpy(), rtol=2.0**-18, atol=2.0**-20)


def test_distances_buckets_medians_and_running_extremes(tmp_path, inference_session):
    torch.manual_seed(0)
    batch = (torch.randn(5, 4), torch.randn(3, 4))
    assert_computes(Rows(), batch, tmp_path, inference_session)


def test_adaptive_pools_of_sizes_that_do_not_divide(tmp_path, inference_session):
    torch.manual_seed(0)
    batch = torch.randn(2, 3, 4, 7, 5)
    assert_computes(Pools(), batch, tmp_path, inference_session)


def test_a_signal_from_its_changed_spectrum(tmp_path, inference_session):
    torch.manual_seed(0)
    assert_computes(Resynthesized(), torch.randn(2, 64), tmp_path, inference_session)
