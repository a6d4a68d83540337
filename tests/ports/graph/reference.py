"""Graph convolutions over a dense adjacency, then attention over the nodes."""

import torch
from torch import nn
from torch.nn import functional as F


class GraphConv(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.lin = nn.Linear(inp, out, bias=False)
        self.root = nn.Linear(inp, out)

    def forward(self, x, adjacency):
        degree = adjacency.sum(-1).clamp(min=1).rsqrt()
        normalised = degree[:, None] * adjacency * degree[None, :]
        return normalised @ self.lin(x) + self.root(x)


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GraphConv(5, 12)
        self.conv2 = GraphConv(12, 12)
        self.score = nn.Linear(12, 1)
        self.out = nn.Linear(12, 4)

    def forward(self, x, adjacency):
        x = F.elu(self.conv1(x, adjacency))
        x = F.elu(self.conv2(x, adjacency))
        weight = F.softmax(torch.tanh(self.score(x)), dim=0)
        pooled = (weight * x).sum(0)
        return self.out(pooled)[None]


def model():
    torch.manual_seed(16)
    return GraphNet()


def batches():
    generator = torch.Generator().manual_seed(17)
    x = torch.randn(9, 5, generator=generator)
    edges = torch.rand(9, 9, generator=generator) < 0.35
    adjacency = (edges | edges.T).float().fill_diagonal_(0)
    label = torch.tensor([2])
    return [{"x": x, "adjacency": adjacency, "label": label}]


def forward(net, batch):
    return net(batch["x"], batch["adjacency"])


def loss(output, batch):
    return F.cross_entropy(output, batch["label"])


def optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=0.1)
