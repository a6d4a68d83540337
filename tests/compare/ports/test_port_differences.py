"""A fault of the search for what is at fault ends it, and not the comparison."""

from __future__ import annotations

import pytest
import torch

from roundoff.compare.ports import port_differences

LEAVES = {
    "a": torch.randn(5, 6, generator=torch.Generator().manual_seed(1)),
    "b": torch.randn(6, 3, generator=torch.Generator().manual_seed(2)),
}
X = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))


def reference(m, x):
    return (torch.tanh(x @ m.a) @ m.b).square().mean()


def port(m, x):
    return (torch.einsum("ni,io->no", torch.sigmoid(x @ m.a), m.b) ** 2).mean()


def test_the_rows_stay_where_the_search_fails(at_fault, monkeypatch):
    def failing(*_):
        raise ValueError("sort does not know these numbers")

    monkeypatch.setattr(port_differences, "_blamed", failing)
    with pytest.warns(RuntimeWarning, match="sort does not know these numbers"):
        rows = at_fault(reference, port, LEAVES, X)
    assert [row.operator for row in rows] == ["sigmoid"]
