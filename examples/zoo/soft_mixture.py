"""A dense mixture of experts: every expert's output, summed by the gate's softmax."""

import torch
from sklearn.datasets import load_diabetes
from torch import nn


class SoftMixture(nn.Module):
    def __init__(self, inputs, outputs, hidden=24, experts=6):
        super().__init__()
        self.gate = nn.Linear(inputs, experts)
        self.w1 = nn.Parameter(torch.randn(experts, inputs, hidden) / inputs**0.5)
        self.b1 = nn.Parameter(torch.zeros(experts, 1, hidden))
        self.w2 = nn.Parameter(torch.randn(experts, hidden, outputs) / hidden**0.5)

    def forward(self, x):
        share = torch.softmax(self.gate(x), dim=-1)
        h = torch.tanh(torch.matmul(x, self.w1) + self.b1)
        y = torch.bmm(h, self.w2)
        return torch.einsum("be,ebo->bo", share, y)


def data():
    """Ten measures of 442 patients, standardised, and how ill they became."""
    table = load_diabetes()
    x = torch.tensor(table.data, dtype=torch.float32)
    return x / x.std(0), torch.tensor(table.target, dtype=torch.float32)[:, None]


def model():
    torch.manual_seed(0)
    x, y = data()
    net = nn.Sequential(
        nn.Linear(10, 32), nn.ReLU(), SoftMixture(32, 16), nn.ReLU(), nn.Linear(16, 1)
    )
    nn.init.constant_(net[-1].bias, y.mean().item())
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(150):
        opt.zero_grad()
        nn.functional.huber_loss(net(x[:320]), y[:320], delta=30.0).backward()
        opt.step()
    return net.eval()


def batches():
    x, y = data()
    return list(zip(x[:320].split(40), y[:320].split(40)))


def held_out():
    x, y = data()
    return list(zip(x[320:440].split(40), y[320:440].split(40)))


def forward(net, batch):
    return net(batch[0])


def loss(output, batch):
    return (output - batch[1]).square().mean()


def metric(outputs, batches):
    """Minus the mean absolute error."""
    misses = [(o - b[1]).abs() for o, b in zip(outputs, batches)]
    return -torch.cat(misses).mean().item()
