"""One thread: the tensors of these tests are tiny: threads cost more than they save."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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


@functools.cache
def _runs_bf16_lstm() -> bool:
    """Ask torch: oneDNN has an LSTM in bf16 only where the CPU has AVX512."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
    except RuntimeError:
        return False
    return True


@pytest.fixture
def bf16_lstm() -> None:
    """Skip the test where this CPU has no LSTM in bf16."""
    if not _runs_bf16_lstm():
        pytest.skip("this CPU has no LSTM kernel in bf16")
