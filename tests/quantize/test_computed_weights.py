"""Weights that modules compute of others: quantized as what they are in evaluation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import roundoff as ro
from roundoff.export import load_model, save_model
from roundoff.quantize import unrounded
from roundoff.workload import Workload

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def halved(layer: nn.Linear) -> nn.Linear:
    prune.l1_unstructured(layer, "weight", amount=0.5)
    return layer


KINDS: dict[str, Callable[..., nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "weight_norm by a hook": nn.utils.weight_norm,
    "spectral_norm by a hook": nn.utils.spectral_norm,
    "pruned": halved,
}


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_quantized_and_the_model_stays(kind, tmp_path):
    torch.manual_seed(0)
    layers = (KINDS[kind](nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.ReLU())
    net = nn.Sequential(*layers, nn.Linear(8, 3))
    net(torch.randn(16, 8))  # with a history, as after training
    net.eval()
    batches = [torch.randn(16, 8) for _ in range(3)]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    wanted = net(batches[0])

    small = ro.quantize(net, "int8", batches)
    rows = {row.site: row.format for row in small.rows}
    assert (rows["0/linear"], rows["3/linear"]) == ("int8", "int8")
    assert "0.weight" in dict(small.model.named_parameters())
    # steps of 1/255 of a range of 6 sigma: 52 dB below a value, a few sums of such
    assert (small(batches[0]) - wanted).norm() < 10 ** (-30 / 20) * wanted.norm()
    twin = unrounded(small, Workload(net, batches))
    torch.testing.assert_close(twin(batches[0]), wanted, rtol=1e-5, atol=1e-5)

    assert before.keys() == net.state_dict().keys()
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert torch.equal(net(batches[0]), wanted)
    save_model(small, tmp_path / "model.pt")
    again = load_model(tmp_path / "model.pt")
    assert torch.equal(again(batches[0]), small(batches[0]))
