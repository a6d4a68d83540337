"""Models whose sizes depend on values, and operators of other libraries, as files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from roundoff.errors import QuantizationError
from roundoff.export.onnx.capture import Captured
from roundoff.export.onnx.export import write
from roundoff.workload.workload import Workload

EXPERTS = 2


class Experts(nn.Module):
    """Each token goes to the expert with the highest score."""

    def __init__(self, layer: Callable[[Experts, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate = nn.Linear(4, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(EXPERTS))
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self, x, self.gate(x).argmax(-1))


def guarded(net: Experts, x: Tensor, chosen: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    for number, expert in enumerate(net.experts):
        (rows,) = torch.where(chosen == number)
        if rows.numel() == 0:
            continue
        result[rows] += expert(x[rows])
    return result


def looped(net: Experts, x: Tensor, chosen: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    for number in range(EXPERTS):
        (rows,) = torch.where(chosen == number)
        result.index_add_(0, rows, net.experts[number](x[rows]))
    return result


def masked(net: Experts, x: Tensor, chosen: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    for number, expert in enumerate(net.experts):
        mask = chosen == number
        result[mask] = expert(x[mask])
    return result


def copied_where_some(net: Experts, x: Tensor, chosen: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    for number, expert in enumerate(net.experts):
        rows = (chosen == number).nonzero().squeeze(1)
        if len(rows.shape) == 1 and rows.shape[0] > 0:
            result = result.index_copy(0, rows, expert(x[rows]))
    return result


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by its own matrix, as a library's kernel may."""
    result = x.new_zeros(x.size(0), weight.size(2))
    start = 0
    for number, end in enumerate(ends.tolist()):
        if start == end:
            continue
        torch.mm(x[start:end], weight[number], out=result[start:end])
        start = end
    return result


def through_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(np.sin(x.detach().numpy()))


SCHEMA = "(Tensor x, Tensor weight, Tensor ends) -> Tensor"
torch.library.custom_op("elsewhere::grouped", grouped, mutates_args=(), schema=SCHEMA)
torch.library.register_fake(
    "elsewhere::grouped", lambda x, weight, _: x.new_empty(x.shape[0], weight.shape[2])
)
torch.library.custom_op("elsewhere::sine", through_numpy, mutates_args=())
torch.library.register_fake("elsewhere::sine", torch.empty_like)


class Grouped(nn.Module):
    """Rows sorted by expert, and a custom operator over the groups."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, EXPERTS)
        self.weight = nn.Parameter(torch.randn(EXPERTS, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        chosen, order = self.gate(x).argmax(-1).sort()
        counts = (chosen[:, None] == torch.arange(EXPERTS)).sum(0)
        ends = counts.cumsum(0)
        return torch.ops.elsewhere.grouped(x[order], self.weight, ends)


class Opaque(nn.Module):
    """A custom operator whose body leaves torch."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.elsewhere.sine(self.a(x))


def written(model: nn.Module, path: Path) -> tuple[Workload, Captured]:
    generator = torch.Generator().manual_seed(0)
    # one row: an expert has none
    batches = [torch.randn(n, 4, generator=generator) for n in (9, 5, 1)]
    workload = Workload(model.eval(), batches, name="experts")
    return workload, write(workload, workload.model, path)


def assert_computes(session, workload: Workload) -> None:
    (name,) = [entry.name for entry in session.get_inputs()]
    for batch in workload.batches:
        (result,) = session.run(None, {name: batch.numpy()})
        with torch.no_grad():
            wanted = workload.run(batch).numpy()
        # sums of 5 products at most, each below 16: twice 5 * 16 roundings of 2**-24
        np.testing.assert_allclose(result, wanted, rtol=0, atol=2 * 80 * 2.0**-24)


@pytest.mark.parametrize("layer", [guarded, looped, masked, copied_where_some])
def test_experts_see_as_many_rows_as_choose_them(layer, tmp_path, inference_session):
    torch.manual_seed(0)
    workload, captured = written(Experts(layer), tmp_path / "a.onnx")
    assert [captured.why_unfit(batch) for batch in workload.batches] == ["", "", ""]
    assert_computes(inference_session(tmp_path / "a.onnx"), workload)
    lines = ["test_general.py:"] if layer in (guarded, copied_where_some) else []
    assert [remark[: len(lines[0])] for remark in captured.remarks] == lines
    general = "the file takes the branch for two rows and more"
    assert all(remark.endswith(general) for remark in captured.remarks)


def test_an_operator_of_another_library_is_what_its_body_computes(
    tmp_path, inference_session
):
    torch.manual_seed(0)
    workload, captured = written(Grouped(), tmp_path / "a.onnx")
    assert [captured.why_unfit(batch) for batch in workload.batches] == ["", "", ""]
    assert_computes(inference_session(tmp_path / "a.onnx"), workload)


def test_an_operator_whose_body_leaves_torch_is_refused(tmp_path):
    with pytest.raises(QuantizationError, match="cannot be written as ONNX"):
        written(Opaque(), tmp_path / "a.onnx")
