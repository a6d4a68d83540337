"""``roundoff.quantize``: each named output against its own target, in the summary, the report and the file."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

from roundoff import Workload, quantize
from roundoff.budget import parse_target
from roundoff.errors import PlanError, WorkloadError
from roundoff.export import prove
from roundoff.quantize import quantize as quantize_by_plan
from roundoff.report import print_quantize


class TwoHeads(nn.Module):
    """Scores, a price of about 5500, and with labels a loss."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.cls = nn.Linear(32, 10)
        self.price = nn.Linear(32, 1)
        nn.init.constant_(self.price.bias, 5500.0)

    def forward(self, x, labels=None):
        h = torch.tanh(self.body(x))
        output = {"cls": self.cls(h), "price": self.price(h)}
        if labels is not None:
            output["loss"] = nn.functional.cross_entropy(output["cls"], labels)
        return output


def two_heads(*, labels=False):
    torch.manual_seed(0)
    x = torch.rand(4, 32, 16) * 2 - 1
    batches = [{"x": part, "labels": torch.arange(32) % 10} for part in x]
    if not labels:
        batches = list(x)
    return Workload(TwoHeads(), batches[:3], held_out=batches[3:])


QUICK = {"onnx": False, "tradeoff": False}


def text_of(summary):
    text = io.StringIO()
    print_quantize(summary, Console(file=text, width=100))
    return text.getvalue()


def test_scores_are_not_hidden_behind_a_large_price(tmp_path):
    made = quantize(
        two_heads(),
        output=tmp_path / "a",
        formats=["int8", "w4a4"],
        target="40dB",
        **QUICK,
    )
    outputs = {row.output: row for row in made.summary.result.outputs}
    assert made.met
    assert outputs["cls"].sqnr_db >= 40
    assert outputs["price"].sqnr_db >= 40
    assert made.summary.result.sqnr_db == outputs["cls"].sqnr_db
    lines = [line.split() for line in text_of(made.summary).splitlines()]
    assert ["name", "measured", "target", "verdict"] in lines
    assert any(line[:1] == ["price"] and line[-1] == "met" for line in lines)
    page = (tmp_path / "a" / "report.html").read_text()
    assert 'id="outputs"' in page


def test_one_format_is_judged_by_the_worst_output(tmp_path):
    made = quantize(two_heads(), output=tmp_path / "a", formats=["w4a4"], **QUICK)
    outputs = {row.output: row.sqnr_db for row in made.summary.result.outputs}
    assert outputs["price"] > 80 > 30 > outputs["cls"]
    assert made.summary.result.sqnr_db == outputs["cls"]
    assert made.summary.chosen.db == outputs["cls"]


def test_a_target_that_one_output_misses_is_missed(tmp_path):
    target = {"cls": 10, "price": 130}
    made = quantize(
        two_heads(), output=tmp_path / "a", formats=["int8"], target=target, **QUICK
    )
    rows = {row.output: row for row in made.summary.result.outputs}
    assert made.met == all(row.met for row in rows.values())
    assert (rows["cls"].target_db, rows["price"].target_db) == (10.0, 130.0)
    assert made.summary.asked.target == "cls=10dB,price=130dB"


def test_the_loss_of_a_batch_with_labels_is_no_output(tmp_path):
    results = [
        quantize(two_heads(labels=labels), output=tmp_path / str(labels), **QUICK)
        for labels in (False, True)
    ]
    without, beside = (made.summary.result.outputs for made in results)
    assert [row.output for row in beside] == ["cls", "price", "loss"]
    assert beside[2].sqnr_db is None
    assert "one number beside larger tensors" in beside[2].note
    # the same model on the same data, calibrated through another signature
    assert beside[0].sqnr_db == pytest.approx(without[0].sqnr_db, abs=1e-6)


def test_of_one_output(tmp_path):
    made = quantize(two_heads(), output=tmp_path / "a", of="price", **QUICK)
    assert [row.output for row in made.summary.result.outputs] == ["price"]
    assert made.summary.asked.of == "price"
    with pytest.raises(WorkloadError, match="did you mean price"):
        quantize(two_heads(), output=tmp_path / "b", of="prise", **QUICK)
    with pytest.raises(PlanError, match="no output is named 'cls'"):
        quantize(
            two_heads(), output=tmp_path / "c", of="price", target="cls=9dB", **QUICK
        )
    assert not (tmp_path / "c").exists()


def test_the_file_is_proved_for_each_output(tmp_path):
    workload = two_heads()
    model = quantize_by_plan(workload, "w4a4")
    proof = prove(
        workload,
        model,
        tmp_path / "q.onnx",
        tmp_path / "fp32.onnx",
        seconds=0,
        target=parse_target("cls=5dB,price=200dB"),
    )
    rows = {row.output: row for row in proof.outputs}
    with torch.no_grad():
        exact = workload.model(workload.held_out[0])
        rounded = model(workload.held_out[0])
    for name, row in rows.items():
        error = (rounded[name].double() - exact[name].double()).square().sum()
        signal = exact[name].double().square().sum()
        simulated = float(-10 * torch.log10(error / signal))
        # kernels may make another code here and there: a fraction of the noise
        assert row.sqnr_db == pytest.approx(simulated, abs=0.5)
    assert (rows["cls"].met, rows["price"].met) == (True, False)
    assert proof.sqnr_db == rows["price"].sqnr_db


def test_a_file_that_misses_the_target_is_missed(tmp_path, monkeypatch, capsys):
    """The simulation keeps it; kernels with an error of their own would not."""

    def noisy(*args, **kwargs):
        proof = prove(*args, **{**kwargs, "seconds": 0})
        rows = tuple(replace(row, sqnr_db=9.0, met=False) for row in proof.outputs)
        return replace(proof, outputs=rows, sqnr_db=9.0)

    monkeypatch.setattr("roundoff.verbs.quantize.prove", noisy)
    workload = Workload(nn.Linear(8, 4), list(torch.randn(3, 32, 8)))
    made = quantize(workload, output=tmp_path / "a", target="20dB", tradeoff=False)
    assert made.summary.result.met
    assert not made.summary.proof.met
    assert not made.met
    said = " ".join(text_of(made.summary).split())
    assert "The target is met by the simulation and missed by model.onnx: " in said
    assert "dB, 9.0 dB of the file, 20dB asked." in said
    assert "missed" in (tmp_path / "a" / "report.html").read_text()
