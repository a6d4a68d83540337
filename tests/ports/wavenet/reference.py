"""Dilated causal convolutions with gates, weight norm and skips."""

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.dilation = dilation
        self.dilated = nn.Conv1d(8, 16, 3, dilation=dilation)
        self.condition = nn.Conv1d(4, 16, 1, bias=False)
        self.skip = nn.Conv1d(8, 10, 1)
        self.residual = nn.Conv1d(8, 8, 1)

    def forward(self, x, c):
        h = self.dilated(F.pad(x, (2 * self.dilation, 0))) + self.condition(c)
        a, b = h.chunk(2, 1)
        h = torch.tanh(a) * torch.sigmoid(b)
        return (x + self.residual(h)) * 0.5**0.5, self.skip(h)


class WaveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(1, 8, 1)
        self.layers = nn.ModuleList([Layer(d) for d in (1, 2, 4)])
        self.norm = nn.GroupNorm(2, 10)
        self.out1 = nn.Conv1d(10, 12, 1)
        self.out2 = nn.Conv1d(12, 16, 1)

    def forward(self, x, c):
        c = F.interpolate(c, scale_factor=4, mode="linear", align_corners=False)
        x = self.first(x)
        total = torch.zeros(())
        for layer in self.layers:
            x, skip = layer(x, c)
            total = total + skip
        total = F.leaky_relu(self.norm(total), 0.1)
        return self.out2(F.elu(self.out1(total)))


def model():
    torch.manual_seed(60)
    net = WaveNet()
    with torch.no_grad():
        net.norm.weight.uniform_(0.6, 1.4)
        net.norm.bias.normal_(0, 0.3)
    return net


def batches():
    generator = torch.Generator().manual_seed(61)
    x = torch.randn(2, 1, 24, generator=generator)
    c = torch.randn(2, 4, 6, generator=generator)
    y = torch.randint(0, 16, (2, 24), generator=generator)
    return [{"x": x, "c": c, "y": y}]


def forward(net, batch):
    return net(batch["x"], batch["c"])


def loss(output, batch):
    return F.cross_entropy(output, batch["y"])


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=1e-3)
