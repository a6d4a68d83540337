"""What torch's exporter knows of ONNX's operators, kept from one file to the next.

For every file it reads some 500 functions of onnxscript from their source: a quarter of
its time. They are the same each time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

_NAME = "get_torchlib_ops"


@contextlib.contextmanager
def known_operators() -> Iterator[None]:
    """Keep the operators that torch reads inside, and have it take those that are kept.

    Where another version of torch reads them elsewhere, nothing is kept.
    """
    source = _source()
    if source is None or _NAME in vars(source):
        yield
        return
    setattr(source, _NAME, _read)
    try:
        yield
    finally:
        delattr(source, _NAME)


@functools.cache
def _read() -> list[Any]:
    """Return them as onnxscript lists them; found as torch finds it, at the first call."""
    source = _source()
    operators: list[Any] = type(source).__getattr__(source, _NAME)()
    return operators


def _source() -> Any:
    """Return the module of onnxscript that torch loads where it is used; None if there is none."""
    try:
        lazy = importlib.import_module("torch.onnx._internal._lazy_import")
    except ImportError:
        return None
    source = getattr(lazy, "onnxscript_apis", None)
    return source if hasattr(type(source), "__getattr__") else None
