"""Sizes and numbers that a model's code fixes: the file is written, says so, and computes what the model does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from roundoff.export.onnx.export import REMARKS, write
from roundoff.export.onnx.proof import prove
from roundoff.quantize.pipeline import quantize
from roundoff.workload.workload import Workload


class Loop(nn.Module):
    """A state that a Python loop carries from token to token."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 4)
        states = []
        for token in range(x.shape[1]):
            state = torch.tanh(self.a(x[:, token])) + 0.5 * state
            states.append(state)
        return torch.stack(states, 1)


class Heads(nn.Module):
    """Attention heads cut out by a number of samples that Python has taken as an int."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).reshape(int(x.shape[0]), x.shape[1], 2, 4).mean(2)


class Scattered(nn.Module):
    """Messages along edges, added up at their nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 8)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        nodes = self.a(x)
        sums = torch.zeros(x.shape[0], 8).index_add(0, edges[1], nodes[edges[0]])
        return sums.scatter_reduce(
            0, edges[0][:, None].expand(-1, 8), nodes[edges[1]], "amax"
        )


class Longer(nn.Module):
    """Another path for more than three samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.shape[0] > 3 else -self.a(x)


class SizeAsTensor(nn.Module):
    """Code as converters from ONNX write it: sizes are tensors, and ints are read from them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        shape = torch.tensor(x.shape)
        samples = torch.gather(shape, 0, torch.tensor([0]))
        rest = torch.prod(shape[1:])
        return self.a(x).reshape(int(samples), int(rest))


class Branching(nn.Module):
    """A branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.a(x)
        return self.a(-x) + 1


class Chosen(nn.Module):
    """A branch on the number of samples that a value chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nonzero(x[:, 0] > 0)[:, 0]
        if rows.numel() == 0:
            return self.a(x)
        return self.a(x[rows])


class Picked(nn.Module):
    """As many indices as rows: sizes that have to agree, but may be any."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor, columns: Tensor) -> Tensor:
        return self.a(x).gather(1, columns)


def written(model: nn.Module, batches: list, tmp_path: Path):
    torch.manual_seed(0)
    workload = Workload(model.eval(), batches, name="sizes")
    path = tmp_path / "fp32.onnx"
    captured = write(workload, workload.model, path)
    file = onnx.load(path)
    notes = {entry.key: entry.value for entry in file.metadata_props}
    assert (
        notes.get(REMARKS, "") == "\n".join(captured.remarks) == file.graph.doc_string
    )
    return workload, captured, path


def assert_computes(session, workload: Workload, captured, batch) -> None:
    inputs = dict(
        zip(
            captured.traced.inputs,
            map(Tensor.numpy, captured.traced.tensors(batch)),
            strict=True,
        )
    )
    (result,) = session.run(None, inputs)
    with torch.no_grad():
        wanted = workload.run(batch).numpy()
    # one layer with sums of 8 products at most, each below 4: 8 * 4 * 2**-24, eight of them behind each other
    np.testing.assert_allclose(result, wanted, rtol=0, atol=8 * 8 * 4 * 2.0**-24)


def free_axes(path: Path) -> list[list[bool]]:
    """Whether each axis of each input has a name in the place of a number."""
    inputs = onnx.load(path).graph.input
    return [[bool(d.dim_param) for d in i.type.tensor_type.shape.dim] for i in inputs]


def test_sums_over_edges_take_any_number_of_nodes_and_edges(
    tmp_path, inference_session
):
    batches = [
        (torch.randn(nodes, 4), torch.randint(0, nodes, (2, edges)))
        for nodes, edges in ((5, 9), (7, 11))
    ]
    workload, captured, path = written(Scattered(), batches, tmp_path)
    assert captured.remarks == []
    nodes, edges = free_axes(path)
    assert nodes == [True, False]
    assert edges[1]
    for batch in batches:
        assert_computes(inference_session(path), workload, captured, batch)


@pytest.mark.parametrize(
    ("model", "shapes", "free", "remark"),
    [
        (
            Loop(),
            [(3, 5, 4), (2, 7, 4)],
            [[True, False, False]],
            "input, axis 1: 5 elements in the file and no other number",
        ),
        (
            Heads(),
            [(3, 5, 8), (2, 5, 8)],
            [[False, False, False]],
            "input, axis 0: 3 elements in the file and no other number",
        ),
    ],
)
def test_a_size_that_the_code_fixes_is_fixed_and_said(
    model, shapes, free, remark, tmp_path, inference_session
):
    batches = [torch.randn(shape) for shape in shapes]
    workload, captured, path = written(model, batches, tmp_path)
    assert free_axes(path) == free
    assert captured.remarks[0].startswith(remark)
    assert captured.remarks[1].startswith("the file cannot run batch 1: input has ")
    assert captured.why_unfit(batches[0]) == ""
    assert_computes(inference_session(path), workload, captured, batches[0])


def test_sizes_that_take_another_path_are_named(tmp_path, inference_session):
    batches = [torch.randn(5, 4), torch.randn(2, 4)]
    workload, captured, path = written(Longer(), batches, tmp_path)
    assert captured.remarks == [
        "input, axis 0: traced with 5 elements; with 2, 3 the model takes another path than the file",
        "the file cannot run batch 1: the model takes another path for its sizes",
    ]
    assert_computes(inference_session(path), workload, captured, batches[0])


def test_sizes_that_have_to_agree_are_free_together(tmp_path, inference_session):
    batches = [(torch.randn(n, 6), torch.randint(0, 6, (n, 6))) for n in (3, 5)]
    workload, captured, path = written(Picked(), batches, tmp_path)
    assert captured.remarks == []
    for batch in batches:
        assert_computes(inference_session(path), workload, captured, batch)


def test_a_batch_of_one_sample_whose_number_is_fixed_stays_one(tmp_path):
    _, captured, path = written(Heads(), [torch.randn(1, 5, 8)], tmp_path)
    assert onnx.load(path).graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    assert captured.why_unfit(torch.randn(1, 5, 8)) == ""


def test_a_size_read_from_a_tensor_is_a_constant(tmp_path, inference_session):
    batches = [torch.randn(3, 2, 4), torch.randn(3, 2, 4)]
    workload, captured, path = written(SizeAsTensor(), batches, tmp_path)
    reads = "reads a number from values, 3, 8 on every batch: a constant in the file"
    assert any(
        r.startswith("test_sizes.py:") and r.endswith(reads) for r in captured.remarks
    )
    assert any(r.startswith("input, axis 0: 3 elements") for r in captured.remarks)
    for batch in batches:
        assert_computes(inference_session(path), workload, captured, batch)


def test_a_branch_that_all_batches_take_is_a_constant_and_sizes_stay_free(
    tmp_path, inference_session
):
    batches = [torch.rand(3, 4), torch.rand(5, 4)]
    workload, captured, path = written(Branching(), batches, tmp_path)
    (remark,) = captured.remarks
    assert remark.endswith(
        "reads a number from values, True on every batch: a constant in the file"
    )
    assert free_axes(path) == [[True, False]]
    for batch in batches:
        assert_computes(inference_session(path), workload, captured, batch)


def test_a_branch_that_batches_take_differently_is_that_of_the_first(
    tmp_path, inference_session
):
    batches = [torch.rand(3, 4), -torch.rand(3, 4), torch.rand(3, 4)]
    workload, captured, path = written(Branching(), batches, tmp_path)
    assert "True on the first batch and others on other batches" in captured.remarks[-2]
    assert captured.remarks[-1] == (
        "the file cannot run batch 1: its values take another path through the model's code"
    )
    assert [bool(captured.why_unfit(batch)) for batch in batches] == [
        False,
        True,
        False,
    ]
    for batch in (batches[0], batches[2]):
        assert_computes(inference_session(path), workload, captured, batch)


def test_a_branch_on_a_computed_size_is_that_for_several_rows(
    tmp_path, inference_session
):
    batches = [
        torch.rand(6, 4),
        torch.randn(6, 4).copysign(torch.ones(6, 1)),
        -torch.rand(6, 4),
    ]
    workload, captured, path = written(Chosen(), batches, tmp_path)
    assert any("branches on a size that the model" in r for r in captured.remarks)
    assert [bool(captured.why_unfit(batch)) for batch in batches] == [
        False,
        False,
        True,
    ]
    for batch in batches[:2]:
        assert_computes(inference_session(path), workload, captured, batch)


def test_the_proof_runs_the_batches_that_fit(tmp_path):
    torch.manual_seed(0)
    batches = [torch.randn(3, 5, 4), torch.randn(3, 5, 4)]
    workload = Workload(
        Loop().eval(),
        batches,
        held_out=[torch.randn(3, n, 4) for n in (6, 5)],
        name="loop",
    )
    model = quantize(workload, "int8")
    proof = prove(workload, model, tmp_path / "a.onnx", tmp_path / "b.onnx", seconds=0)
    assert (
        "the file cannot run held-out batch 0: input has 6 elements along axis 1, and 5 in the file"
        in proof.remarks
    )
    assert proof.samples == 3
    assert proof.codes <= 1
