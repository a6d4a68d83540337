"""Classifies the nodes of a random graph by message passing."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

p = argparse.ArgumentParser()
p.add_argument("--hidden", type=int, default=16)
p.add_argument("--steps", type=int, default=2)
options = p.parse_args()


def graph(nodes=40, edges=160, features=8):
    g = torch.Generator().manual_seed(17)
    source = torch.randint(nodes, (edges,), generator=g)
    target = torch.randint(nodes, (edges,), generator=g)
    x = torch.randn(nodes, features, generator=g)
    weight = torch.rand(edges, generator=g) + 0.5
    y = (x.sum(1) > 0).long() + (x[:, 0] > 1).long()
    return x, source, target, weight, y


class Message(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.send = nn.Linear(inside, outside)
        self.keep = nn.Linear(inside, outside, bias=False)
        self.norm = nn.BatchNorm1d(outside)

    def forward(self, x, source, target, weight):
        degree = torch.zeros(len(x)).index_add(0, target, weight)
        message = self.send(x)[source] * weight[:, None]
        total = torch.zeros(len(x), message.shape[1]).index_add(0, target, message)
        mean = total / degree.clamp(min=1e-6)[:, None]
        return F.relu(self.norm(mean + self.keep(x)))


class Net(nn.Module):
    def __init__(self, features, hidden, classes):
        super().__init__()
        self.first = Message(features, hidden)
        self.second = Message(hidden, hidden)
        self.gate = nn.Linear(2 * hidden, hidden)
        self.out = nn.Linear(hidden, classes)

    def forward(self, x, source, target, weight):
        a = self.first(x, source, target, weight)
        b = self.second(a, source, target, weight)
        gate = torch.sigmoid(self.gate(torch.cat([a, b], dim=1)))
        mixed = gate * a + (1 - gate) * b
        return F.log_softmax(self.out(mixed), dim=1)


def saved(model):
    g = torch.Generator().manual_seed(23)
    result = {}
    for key, value in model.state_dict().items():
        if value.is_floating_point():
            result[key] = value + 0.2 * torch.rand(value.shape, generator=g)
        else:
            result[key] = value
    return result


torch.manual_seed(5)
x, source, target, weight, y = graph()
x = (x - x.mean(0)) / x.std(0)
train = torch.arange(len(x)) % 4 != 0
net = Net(x.shape[1], options.hidden, 3)
state = saved(net)
net.load_state_dict(state)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
for step in range(options.steps):
    net.train()
    optimizer.zero_grad()
    scores = net(x, source, target, weight)
    loss = F.nll_loss(scores[train], y[train])
    penalty = 1e-3 * sum(
        w.abs().sum() for n, w in net.named_parameters() if "weight" in n
    )
    (loss + penalty).backward()
    optimizer.step()
    print(step, loss.item())
