"""The exporter's list of ONNX operators is read once, and nothing of torch stays changed."""

import pytest

from roundoff.export.onnx import known_operators as module
from roundoff.export.onnx.known_operators import known_operators

lazy = pytest.importorskip("torch.onnx._internal._lazy_import")


def test_they_are_those_of_onnxscript_and_the_same_list_each_time():
    source = lazy.onnxscript_apis
    before = source.get_torchlib_ops
    with known_operators():
        first = source.get_torchlib_ops()
    with known_operators():
        assert source.get_torchlib_ops() is first
    assert source.get_torchlib_ops == before
    assert "get_torchlib_ops" not in vars(source)
    names = [(meta.qualified_name, meta.name) for meta in first]
    assert names == [(meta.qualified_name, meta.name) for meta in before()]


def test_torch_is_as_before_also_after_an_error():
    with pytest.raises(ZeroDivisionError), known_operators():
        raise ZeroDivisionError
    assert "get_torchlib_ops" not in vars(lazy.onnxscript_apis)


def test_where_torch_reads_them_elsewhere_nothing_is_kept(monkeypatch):
    monkeypatch.delattr(lazy, "onnxscript_apis")
    with known_operators():
        assert module._source() is None
