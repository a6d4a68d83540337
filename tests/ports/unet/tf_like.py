"""Channels last in all layers."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class Conv(nn.Module):
    def __init__(self, cin, cout, size):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(size, size, cin, cout))
        self.bias = nn.Parameter(torch.empty(cout))
        self.size = size

    def forward(self, x):
        pad = self.size // 2
        x = F.pad(x, (0, 0, pad, pad, pad, pad))
        h, w = x.shape[1] - 2 * pad, x.shape[2] - 2 * pad
        y = self.bias
        for i in range(self.size):
            for j in range(self.size):
                y = y + x[:, i : i + h, j : j + w] @ self.kernel[i, j]
        return y


class GroupNormalization(nn.Module):
    def __init__(self, channels, groups=2):
        super().__init__()
        self.groups = groups
        self.gamma = nn.Parameter(torch.empty(channels))
        self.beta = nn.Parameter(torch.empty(channels))

    def forward(self, x):
        n, h, w, c = x.shape
        g = x.reshape(n, h, w, self.groups, c // self.groups)
        mean = g.mean(dim=(1, 2, 4), keepdim=True)
        var = g.var(dim=(1, 2, 4), keepdim=True, unbiased=False)
        g = (g - mean) * torch.rsqrt(var + 1e-5)
        return g.reshape(n, h, w, c) * self.gamma + self.beta


class ConvBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv_1 = Conv(cin, cout, 3)
        self.norm_1 = GroupNormalization(cout)
        self.conv_2 = Conv(cout, cout, 3)
        self.norm_2 = GroupNormalization(cout)

    def forward(self, x):
        x = self.norm_1(self.conv_1(x))
        x = torch.maximum(x, 0.1 * x)
        x = self.norm_2(self.conv_2(x))
        return torch.maximum(x, 0.1 * x)


def pool(x):
    return F.max_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc1 = ConvBlock(2, 6)
        self.enc2 = ConvBlock(6, 8)
        self.bottom = ConvBlock(8, 10)
        self.up_kernel = nn.Parameter(torch.empty(2, 2, 8, 10))
        self.up_bias = nn.Parameter(torch.empty(8))
        self.dec2 = ConvBlock(16, 8)
        self.dec1 = ConvBlock(14, 6)
        self.out = Conv(6, 1, 1)

    def upsample(self, x):
        n, h, w, c = x.shape
        y = torch.einsum("nhwc,ijoc->nhiwjo", x, self.up_kernel)
        return y.reshape(n, 2 * h, 2 * w, -1) + self.up_bias

    def forward(self, image):
        x = image.permute(0, 2, 3, 1)
        s1 = self.enc1(x)
        s2 = self.enc2(pool(s1))
        x = self.bottom(pool(s2))
        x = self.upsample(x)
        x = self.dec2(torch.cat([x, s2], dim=-1))
        x = x.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
        x = self.dec1(torch.cat([x, s1], dim=-1))
        return self.out(x).permute(0, 3, 1, 2)


def block(layer, w, name):
    for new, old in (("1", "a"), ("2", "b")):
        conv = getattr(layer, "conv_" + new)
        conv.kernel.copy_(w[f"{name}.{old}.weight"].permute(2, 3, 1, 0))
        conv.bias.copy_(w[f"{name}.{old}.bias"])
        norm = getattr(layer, "norm_" + new)
        norm.gamma.copy_(w[f"{name}.n{old}.weight"])
        norm.beta.copy_(w[f"{name}.n{old}.bias"])


def load(net, w):
    block(net.enc1, w, "down1")
    block(net.enc2, w, "down2")
    block(net.bottom, w, "middle")
    block(net.dec2, w, "dec2")
    block(net.dec1, w, "dec1")
    net.up_kernel.copy_(w["up2.weight"].permute(2, 3, 1, 0))
    net.up_bias.copy_(w["up2.bias"])
    net.out.kernel.copy_(w["last.weight"].permute(2, 3, 1, 0))
    net.out.bias.copy_(w["last.bias"])


def model():
    net = Net()
    with torch.no_grad():
        load(net, torch.load(Path(__file__).with_name("weights.pt")))
    return net


def forward(net, batch):
    return net(batch["image"])


def loss(output, batch):
    p = torch.sigmoid(output)
    y = batch["mask"].to(p.dtype)
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()
