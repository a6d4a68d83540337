"""Depthwise convolutions of 7 with layer scale, as in networks after transformers."""

import torch
from torch import nn
from torch.nn import functional as F


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class GRN(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(dim) * 0.3)
        self.beta = nn.Parameter(torch.randn(dim) * 0.3)

    def forward(self, x):
        size = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        share = size / (size.mean(-1, keepdim=True) + 1e-6)
        return self.gamma * (x * share) + self.beta + x


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.grn = GRN(4 * dim)
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(torch.rand(dim) + 0.5)

    def forward(self, x):
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        y = self.pwconv2(self.grn(F.gelu(self.pwconv1(y))))
        return x + (self.gamma * y).permute(0, 3, 1, 2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 2, stride=2), LayerNorm2d(8, eps=1e-6)
        )
        self.stage1 = Block(8)
        self.down = nn.Sequential(
            LayerNorm2d(8, eps=1e-6), nn.Conv2d(8, 12, 2, stride=2)
        )
        self.stage2 = Block(12)
        self.norm = nn.LayerNorm(12, eps=1e-6)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = self.stage2(self.down(self.stage1(self.stem(x))))
        return self.head(self.norm(x.mean((-2, -1))))


def model():
    torch.manual_seed(50)
    net = Net()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
    return net


def batches():
    generator = torch.Generator().manual_seed(51)
    x = torch.randn(3, 3, 16, 16, generator=generator)
    y = torch.randint(0, 5, (3,), generator=generator)
    return [{"x": x, "y": y}]


def forward(net, batch):
    return net(batch["x"])


def loss(output, batch):
    return F.cross_entropy(output, batch["y"])


def optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-3)
