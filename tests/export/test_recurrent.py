"""Recurrent layers as LSTM, GRU and RNN of ONNX: torch says what they compute, ONNX Runtime runs them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from roundoff.export.onnx.export import write
from roundoff.export.onnx.proof import prove
from roundoff.quantize.pipeline import quantize
from roundoff.workload.workload import Workload


class Recurrent(nn.Module):
    """A recurrent layer, all of whose results are read."""

    def __init__(self, layer: nn.RNNBase, **settings) -> None:
        super().__init__()
        self.layer = layer(6, 5, **settings)

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        initial = None
        if states:
            initial = states if isinstance(self.layer, nn.LSTM) else states[0]
        output, last = self.layer(x, initial)
        return (output, *last) if isinstance(last, tuple) else (output, last)


class Packed(nn.Module):
    """A recurrent layer over sequences of several lengths."""

    def __init__(self, layer: nn.RNNBase, sorts: bool, padding: float = 0.0) -> None:
        super().__init__()
        self.layer = layer(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.sorts = sorts
        self.padding = padding

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        packed = pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=not self.sorts
        )
        output, last = self.layer(packed)
        padded, _ = pad_packed_sequence(
            output, batch_first=True, padding_value=self.padding
        )
        return padded, last[0] if isinstance(last, tuple) else last


class Tagger(nn.Module):
    """An embedding, a recurrent layer, a classifier."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.layer = layer(8, 12, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.table(ids))[0])


def exported(model: nn.Module, batches: list, folder: Path):
    workload = Workload(model.eval(), batches, name="recurrent")
    path = folder / "fp32.onnx"
    return workload, write(workload, workload.model, path), path


def operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


def assert_same(session, workload: Workload, captured, batch) -> None:
    tensors = captured.traced.tensors(batch)
    inputs = {
        name: tensor.numpy()
        for name, tensor in zip(captured.traced.inputs, tensors, strict=True)
    }
    results = session.run(None, inputs)
    with torch.no_grad():
        wanted = workload.run(batch)
    for result, tensor in zip(results, wanted, strict=True):
        # 2 layers of 7 steps; a step adds 11 products below 1 and applies functions of slope 1 at most,
        # which ONNX Runtime approximates within some 2**-20
        np.testing.assert_allclose(result, tensor.numpy(), rtol=0, atol=14 * 2.0**-18)


@pytest.mark.parametrize(
    ("layer", "operator", "settings"),
    [
        (nn.LSTM, "LSTM", {"num_layers": 2, "bidirectional": True}),
        (nn.LSTM, "LSTM", {"batch_first": True}),
        (nn.GRU, "GRU", {"num_layers": 2, "bidirectional": True, "batch_first": True}),
        (nn.GRU, "GRU", {"bias": False}),
        (nn.RNN, "RNN", {"bidirectional": True}),
        (nn.RNN, "RNN", {"nonlinearity": "relu", "bidirectional": True}),
    ],
)
def test_a_recurrent_layer_is_one_node_for_any_length(
    layer, operator, settings, tmp_path, inference_session
):
    torch.manual_seed(0)
    batches = [(torch.randn(shape),) for shape in ((4, 3, 6), (5, 2, 6))]
    workload, captured, path = exported(Recurrent(layer, **settings), batches, tmp_path)
    assert captured.remarks == []
    assert operators(path).count(operator) == settings.get("num_layers", 1)
    for batch in batches:
        assert_same(inference_session(path), workload, captured, batch)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_initial_states_are_read(layer, tmp_path, inference_session):
    torch.manual_seed(0)
    states = [torch.randn(2, 3, 5) for _ in range(1 + (layer is nn.LSTM))]
    batch = (torch.randn(4, 3, 6), *states)
    model = Recurrent(layer, bidirectional=True)
    workload, captured, path = exported(model, [batch], tmp_path)
    assert len(onnx.load(path).graph.input) == 1 + len(states)
    assert_same(inference_session(path), workload, captured, batch)


@pytest.mark.parametrize(
    ("layer", "sorts", "padding"),
    [(nn.LSTM, False, 0.0), (nn.GRU, True, 0.0), (nn.GRU, False, -1.0)],
)
def test_packed_sequences_have_lengths(
    layer, sorts, padding, tmp_path, inference_session
):
    torch.manual_seed(0)
    lengths = [[2, 5, 3], [5, 1, 4]] if sorts else [[5, 3, 2], [5, 5, 1]]
    batches = [(torch.randn(3, 5, 6), torch.tensor(numbers)) for numbers in lengths]
    workload, captured, path = exported(
        Packed(layer, sorts, padding), batches, tmp_path
    )
    assert operators(path).count("LSTM" if layer is nn.LSTM else "GRU") == 2
    assert captured.remarks == []
    batches.append((torch.randn(2, 5, 6), torch.tensor([3, 2])))
    for batch in batches:
        assert captured.why_unfit(batch) == ""
        assert_same(inference_session(path), workload, captured, batch)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_projections_which_onnx_has_not_are_steps(tmp_path, inference_session):
    torch.manual_seed(0)
    batch = (torch.randn(4, 3, 6),)
    model = Recurrent(nn.LSTM, proj_size=2, bidirectional=True)
    workload, captured, path = exported(model, [batch], tmp_path)
    assert_same(inference_session(path), workload, captured, batch)


# with groups, the scales of gates change places as their rows do; an RNN has one gate
@pytest.mark.parametrize(
    ("layer", "formats"),
    [
        (nn.LSTM, "int8"),
        (nn.GRU, "int8"),
        (nn.RNN, "int8"),
        (nn.LSTM, "w4g4"),
        (nn.GRU, "w4g4"),
    ],
)
def test_a_quantized_layer_stores_codes_and_computes_what_the_simulation_does(
    layer, formats, tmp_path
):
    torch.manual_seed(0)
    batches = [torch.randint(0, 20, (4, 6)) for _ in range(3)]
    workload = Workload(Tagger(layer).eval(), batches[:2], held_out=batches[2:])
    model = quantize(workload, formats)
    path = tmp_path / "a.onnx"
    proof = prove(workload, model, path, tmp_path / "b.onnx", seconds=0)
    assert operators(path).count(layer.__name__) == 2
    assert proof.codes <= 1
    assert proof.simulation_db > proof.sqnr_db + 40
    # weights of 8 * 12 and more are codes: what is left in fp32 has one axis, or is scales
    file = onnx.load(path).graph
    floats = [t for t in file.initializer if t.data_type == onnx.TensorProto.FLOAT]
    codes = sum(p.numel() for p in model.model.parameters() if p.ndim == 2)
    assert sum(np.prod(t.dims) for t in floats) < codes
