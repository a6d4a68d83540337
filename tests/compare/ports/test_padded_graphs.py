"""A port that fills the rows of all samples up to one number, as static shapes need, with no
mask that says so: what stands there counts for nothing."""

from __future__ import annotations

import linecache

import pytest
import torch
import torch.nn.functional as F

import roundoff


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.5


LEAVES = {
    "enter": drawn(8, 5, seed=1),
    "update": drawn(8, 8, seed=2),
    "globals": drawn(8, 8, seed=3),
    "gate": drawn(3, 8, seed=4),
    "leave": drawn(4, 8, seed=5),
}
SOURCE = torch.tensor([0, 1, 1, 2, 4, 5, 6, 6, 8, 9, 10, 8, 3])
TARGET = torch.tensor([1, 0, 2, 1, 3, 6, 5, 7, 9, 8, 8, 10, 4])
GRAPH = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
NODES = drawn(11, 5, seed=6)
WANTED = drawn(3, 4, seed=7)
MORE_NODES, MORE_EDGES = 5, 4


def reference(m, nodes, wanted):
    x = F.linear(nodes, m.enter)
    total = torch.zeros_like(x).index_add(0, TARGET, F.relu(x[SOURCE]))
    x = x + torch.tanh(F.linear(total, m.update))
    pooled = torch.zeros(3, 8).index_add(0, GRAPH, x)
    pooled = pooled + torch.sigmoid(F.linear(pooled, m.globals))
    hint = F.linear(pooled, m.gate).sigmoid().detach()
    out = F.linear(pooled, m.leave) * hint.sum(1, keepdim=True)
    return (out - wanted).square().mean()


def padded(rows, count, fill=0):
    return torch.cat([rows, torch.full((count, *rows.shape[1:]), fill)])


def port(m, nodes, wanted, fault):
    """The last graph is of padding alone."""
    nodes = padded(nodes, MORE_NODES, 0.3)
    source, target = (padded(each, MORE_EDGES, 11) for each in (SOURCE, TARGET))
    graph = padded(GRAPH, MORE_NODES, 3)
    x = nodes @ m.ENTER
    sent = torch.relu(x.index_select(0, source))
    ends = source if fault == "sources" else target
    total = torch.zeros(len(x), 8).index_add(0, ends, sent)
    x = torch.tanh(total @ m.UPDATE) + x
    pooled = torch.zeros(4, 8).index_add(0, graph, x)
    update = 1 / (1 + torch.exp(-(pooled @ m.GLOBALS)))
    pooled = update if fault == "globals" else pooled + update
    hint = torch.sigmoid(pooled @ m.GATE)
    if fault != "taught":
        hint = hint.detach()
    out = (pooled @ m.LEAVE) * torch.einsum("gh->g", hint)[:, None]
    return ((out[:3] - wanted) ** 2).mean()


@pytest.fixture
def compared(program, tmp_path):
    """``compared(fault)``: a step of each with its backward pass, recorded and compared."""

    def compare(fault, tensors=True):
        folders = []
        others = {name.upper(): leaf.t() for name, leaf in LEAVES.items()}
        for module in (
            program(reference, **LEAVES),
            program(lambda m, x, y: port(m, x, y, fault), **others),
        ):
            folders.append(tmp_path / f"run{len(folders)}")
            with roundoff.capture(folders[-1], module, keep="tensors") as run:
                module(NODES, WANTED).backward()
                run.step()
        ours, theirs = map(str, folders)
        return roundoff.compare(reference=ours, candidate=theirs, tensors=tensors)

    return compare


@pytest.mark.parametrize("tensors", [True, False])
def test_a_port_with_more_rows_agrees(compared, tensors):
    assert not compared("", tensors).culprits(1)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("sources", "index_add(0, ends, sent)"),
        ("globals", "update = 1 / (1"),
        ("taught", "hint = torch.sigmoid(pooled"),
    ],
)
def test_the_line_is_named(compared, fault, text):
    first = compared(fault).culprits(1)[0]
    number = int(first.line.rpartition(":")[2])
    assert text in linecache.getline(__file__, number), first.evidence
