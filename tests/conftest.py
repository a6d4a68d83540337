"""One thread: the tensors of these tests are tiny, so that threads cost more time than they save."""

import functools

import pytest
import torch
from torch import nn

torch.set_num_threads(1)


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
