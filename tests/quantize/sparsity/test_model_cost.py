"""Cost: multiply-accumulates and bytes by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundoff.errors import QuantizationError
from roundoff.quantize.sparsity import model_cost
from roundoff.quantize.sparsity.model_cost import latency_ratio


def test_multiply_accumulates_and_bytes_by_hand() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.ConvTranspose2d(8, 2, 2, 2),
        nn.Flatten(),
        nn.Linear(2 * 8 * 8, 5),
    )
    found = model_cost(net, torch.zeros(2, 3, 6, 6))
    # per output: 3·9 on 2·8·6·6; 9 on 2·8·4·4; each of 2·8·4·4 inputs meets 2·4 weights; 128 on 2·5
    assert list(found.by_site.values()) == [27 * 576, 9 * 256, 256 * 8, 1280]
    assert found.macs == sum(found.by_site.values())
    parameters = (3 * 8 * 9 + 8) + 4 * 8 + (72 + 8) + (64 + 2) + (128 * 5 + 5)
    assert found.bytes == 4 * parameters + 8  # and num_batches_tracked, one int64


def test_the_ratio_of_a_model_to_itself_is_a_positive_number() -> None:
    net = nn.Linear(4, 4).train()
    ratio = latency_ratio(net, net, torch.zeros(1, 4), repeats=2)
    assert 0 < ratio < float("inf")
    assert net.training
    with pytest.raises(QuantizationError, match="at least 1"):
        latency_ratio(net, net, torch.zeros(1, 4), repeats=0)
