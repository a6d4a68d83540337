"""A classifier of sequences: GRU, last state, linear."""

import torch
from torch import nn
from torch.nn import functional as F


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(8, 10, batch_first=True)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 5)

    def forward(self, x):
        _, h = self.gru(x)
        return self.head(F.silu(self.norm(h[-1])))


def model():
    torch.manual_seed(10)
    net = Classifier()
    with torch.no_grad():
        net.norm.weight.uniform_(0.5, 1.5)
        net.norm.bias.normal_(0, 0.3)
    return net


def batches():
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(4, 7, 8, generator=generator)
    y = torch.randint(0, 5, (4,), generator=generator)
    return [{"x": x, "y": y}]


def forward(net, batch):
    return net(batch["x"])


def loss(output, batch):
    return F.cross_entropy(output, batch["y"])


def optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=0.1)
