"""Gradients that are far off, of which names know no cause: values are asked."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import roundoff

X = torch.randn(6, 9, 3, generator=torch.Generator().manual_seed(1))


class Forecast(nn.Module):
    """A decoder goes on with what the encoder has at last; ``is_cut``: and teaches it nothing."""

    def __init__(self, is_cut):
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(3, 4)
        self.encoder = nn.LSTM(4, 4, batch_first=True)
        self.decoder = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 2)
        self.is_cut = is_cut

    def forward(self, x):
        x = torch.tanh(self.enter(x))
        seen, state = self.encoder(x[:, :5])
        if self.is_cut:
            state = tuple(part.detach() for part in state)
        going, _ = self.decoder(x[:, 5:], state)
        return self.head(torch.tanh(torch.cat([seen, going], 1))).square().mean()


def recorded(folder, is_cut):
    net = Forecast(is_cut)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with roundoff.capture(folder, net, keep="tensors") as run:
        net(X).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        run.step()
    return folder


def test_a_sum_of_gradients_that_is_left_out_is_no_agreement(tmp_path):
    # the encoder's gradient lacks what comes from the decoder, and each call is right
    found = roundoff.compare(
        reference=recorded(tmp_path / "reference", is_cut=False),
        candidate=recorded(tmp_path / "candidate", is_cut=True),
    )
    assert not found.agrees
    culprit = found.culprits()[0]
    text = Path(__file__).read_text().splitlines()
    assert ".detach()" in text[int(culprit.line.rpartition(":")[2]) - 1]
    assert "gradient" in culprit.evidence


def test_the_same_network_agrees_with_itself(tmp_path):
    found = roundoff.compare(
        reference=recorded(tmp_path / "reference", is_cut=False),
        candidate=recorded(tmp_path / "candidate", is_cut=False),
    )
    assert found.agrees
