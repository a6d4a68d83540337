"""torch's own cells in a loop over time."""

from pathlib import Path

import torch
from torch import nn


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(30, 10)
        self.cell1 = nn.LSTMCell(10, 12)
        self.cell2 = nn.LSTMCell(12, 12)
        self.tags = nn.Linear(12, 6)

    def forward(self, ids):
        s1 = s2 = None
        scores = []
        for t in range(ids.shape[1]):
            s1 = self.cell1(self.words(ids[:, t]), s1)
            s2 = self.cell2(s1[0], s2)
            scores.append(self.tags(s2[0]))
        return torch.log_softmax(torch.stack(scores, 1), 2)


def load(net, w):
    net.words.weight.copy_(w["embedding.weight"])
    for n, cell in enumerate((net.cell1, net.cell2)):
        for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(cell, part).copy_(w[f"lstm.{part}_l{n}"])
    net.tags.weight.copy_(w["hidden2tag.weight"])
    net.tags.bias.copy_(w["hidden2tag.bias"])


def model():
    net = Loop()
    with torch.no_grad():
        load(net, torch.load(Path(__file__).with_name("weights.pt")))
    return net


def forward(net, batch):
    return net(batch["words"])
