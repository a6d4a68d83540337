"""One thread: the tensors of these tests are tiny: threads cost more than they save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def inference_session() -> Callable[..., Any]:
    """Open an ONNX file in ONNX Runtime, with kernels that are exact on every CPU."""
    onnxruntime = pytest.importorskip("onnxruntime")

    def opened(path: str | Path, **entries: str) -> Any:
        options = onnxruntime.SessionOptions()
        # without VNNI the usual kernels clip sums of two products to 16 bits
        options.add_session_config_entry("session.x64quantprecision", "1")
        for name, value in entries.items():
            options.add_session_config_entry(f"session.{name}", value)
        return onnxruntime.InferenceSession(path, options)

    return opened
