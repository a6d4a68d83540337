"""Attention over the edges of a graph, with edge features and a readout."""

import torch
from torch import nn
from torch.nn import functional as F


class Attend(nn.Module):
    def __init__(self, inputs, heads, width):
        super().__init__()
        self.heads = heads
        self.width = width
        self.linear = nn.Linear(inputs, heads * width, bias=False)
        self.edge = nn.Linear(3, heads * width, bias=False)
        self.source = nn.Parameter(torch.randn(heads, width) * 0.5)
        self.target = nn.Parameter(torch.randn(heads, width) * 0.5)
        self.link = nn.Parameter(torch.randn(heads, width) * 0.5)
        self.bias = nn.Parameter(torch.randn(heads * width) * 0.2)

    def forward(self, x, edges, features):
        n = x.shape[0]
        row, col = edges
        h = self.linear(x).view(n, self.heads, self.width)
        e = self.edge(features).view(-1, self.heads, self.width)
        score = (h * self.source).sum(-1)[row] + (h * self.target).sum(-1)[col]
        score = F.leaky_relu(score + (e * self.link).sum(-1), 0.2)
        index = col[:, None].expand_as(score)
        top = torch.zeros(n, self.heads).scatter_reduce(
            0, index, score, "amax", include_self=False
        )
        share = (score - top[col]).exp()
        total = torch.zeros(n, self.heads).index_add(0, col, share)
        share = share / (total[col] + 1e-16)
        message = (h[row] + e) * share[..., None]
        out = torch.zeros(n, self.heads, self.width).index_add(0, col, message)
        return out.flatten(1) + self.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = Attend(5, 2, 6)
        self.norm = nn.BatchNorm1d(12)
        self.two = Attend(12, 2, 5)
        self.skip = nn.Linear(12, 10)
        self.mlp = nn.Sequential(nn.Linear(20, 8), nn.PReLU(), nn.Linear(8, 4))

    def forward(self, x, edges, features, graph):
        h = F.elu(self.norm(self.one(x, edges, features)))
        h = self.two(h, edges, features) + self.skip(h)
        count = torch.bincount(graph)
        mean = torch.zeros(3, 10).index_add(0, graph, h) / count[:, None]
        index = graph[:, None].expand_as(h)
        top = torch.zeros(3, 10).scatter_reduce(0, index, h, "amax", include_self=False)
        return self.mlp(torch.cat([mean, top], -1))


def model():
    torch.manual_seed(90)
    net = Net()
    with torch.no_grad():
        net.norm.weight.uniform_(0.5, 1.5)
        net.norm.bias.normal_(0, 0.3)
    return net


def batches():
    generator = torch.Generator().manual_seed(91)
    sizes = (6, 9, 7)
    parts = []
    start = 0
    for size in sizes:
        ring = torch.arange(size)
        parts.append(torch.stack([ring, (ring + 1) % size]) + start)
        more = torch.randint(0, size, (2, 8), generator=generator) + start
        parts.append(more)
        start += size
    edges = torch.cat(parts, 1)
    x = torch.randn(start, 5, generator=generator)
    features = torch.randn(edges.shape[1], 3, generator=generator)
    graph = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    y = torch.randint(0, 4, (3,), generator=generator)
    return [{"x": x, "edges": edges, "features": features, "graph": graph, "y": y}]


def forward(net, batch):
    return net(batch["x"], batch["edges"], batch["features"], batch["graph"])


def loss(output, batch):
    return F.cross_entropy(output, batch["y"], label_smoothing=0.1)


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=5e-3)
