"""What an exported file returns: every tensor of the output, also of integers, from nests of any kind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from roundoff.export.delivery.judge import Judge
from roundoff.export.onnx.export import write
from roundoff.export.onnx.proof import prove
from roundoff.quantize.pipeline import quantize
from roundoff.workload.workload import Workload


@dataclass
class Found:
    """Scores of classes, and the best of them."""

    best: Tensor
    scores: Tensor
    threshold: float = 0.5


class Detector(nn.Module):
    """A dataclass in a dict, with integers before and behind scores."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> dict:
        scores = self.a(x) if scale is None else self.a(x) * scale
        found = Found(scores.argmax(-1), scores.softmax(-1))
        return {"found": found, "sure": (scores > 0).any(-1), "parts": [scores, None]}


def test_integers_and_truth_values_are_outputs_too(tmp_path, inference_session):
    torch.manual_seed(0)
    batch = {"x": torch.randn(5, 6), "scale": torch.tensor(2.0)}
    workload = Workload(Detector().eval(), [batch], name="nested")
    captured = write(workload, workload.model, tmp_path / "fp32.onnx")
    names = ["found.scores", "parts.0", "found.best", "sure"]
    assert captured.traced.outputs == names
    session = inference_session(tmp_path / "fp32.onnx")
    assert [output.name for output in session.get_outputs()] == names
    inputs = {name: tensor.numpy() for name, tensor in batch.items()}
    scores, parts, best, sure = session.run(None, inputs)
    wanted = workload.run(batch)
    # sums of 6 products below 4
    np.testing.assert_allclose(parts, wanted["parts"][0].detach(), atol=24 * 2.0**-24)
    assert np.array_equal(best, wanted["found"].best)
    assert np.array_equal(sure, wanted["sure"])
    assert scores.shape == (5, 4)


def test_the_proof_compares_the_floating_point_part(tmp_path):
    torch.manual_seed(0)
    batches = [{"x": torch.randn(8, 6)} for _ in range(2)]
    workload = Workload(Detector().eval(), batches, name="nested")
    model = quantize(workload, "int8")
    proof = prove(workload, model, tmp_path / "a.onnx", tmp_path / "b.onnx", seconds=0)
    assert proof.simulation_db > proof.sqnr_db + 6


class Sampler(nn.Module):
    """A latent drawn around a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(8, 8)
        self.decoder = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean = self.mean(x)
        return {"mean": mean, "drawn": self.decoder(mean + torch.randn_like(mean))}


def test_a_model_that_draws_random_numbers(tmp_path):
    """Reference and simulation draw alike, at every place; the file cannot, and says so."""
    torch.manual_seed(0)
    batches = [torch.randn(24, 8) for _ in range(3)]
    workload = Workload(Sampler(), batches)
    small = quantize(workload, "int8")
    judge = Judge(workload)
    torch.rand(5)
    rows = {row.output: row for row in judge.judge(small).outputs}
    # int8 of normal values is about 40 dB a layer; other draws would be at 0 dB
    assert rows["mean"].sqnr_db > 30
    assert rows["drawn"].sqnr_db > 30
    state = torch.get_rng_state()
    proof = prove(workload, small, tmp_path / "small.onnx", tmp_path / "fp32.onnx")
    assert torch.equal(torch.get_rng_state(), state)
    assert any("random numbers of its own" in remark for remark in proof.remarks)
