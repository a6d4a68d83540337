"""Depth from a picture: an encoder, bilinear and nearest resizes, concatenated skips."""

import torch
import torch.nn.functional as F
from torch import nn


class Up(nn.Module):
    def __init__(self, inputs, skip, outputs, mode):
        super().__init__()
        self.mode = mode
        self.conv = nn.Conv2d(inputs + skip, outputs, 3, padding=1)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x, skip):
        if self.mode == "bilinear":
            size = skip.shape[-2:]
            x = F.interpolate(x, size=size, mode="bilinear", align_corners=False)
        else:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
        return F.leaky_relu(self.bn(self.conv(torch.cat((x, skip), 1))), 0.1)


class DepthNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ELU())
        self.down1 = nn.Sequential(nn.Conv2d(16, 24, 3, 2, 1), nn.ELU())
        self.down2 = nn.Sequential(nn.Conv2d(24, 40, 3, 2, 1), nn.ELU())
        self.mid = nn.Conv2d(40, 40, 3, padding=2, dilation=2)
        self.up1 = Up(40, 24, 24, "bilinear")
        self.up2 = Up(24, 16, 16, "nearest")
        self.head = nn.Conv2d(16, 1, 3, padding=1, padding_mode="reflect")

    def forward(self, x):
        s1 = self.stem(x)
        s2 = self.down1(s1)
        h = self.down2(s2)
        h = h + F.elu(self.mid(h))
        h = self.up2(self.up1(h, s2), s1)
        return 10 * torch.sigmoid(self.head(h)) + 0.1


def rooms(count, seed):
    """Slanted planes with a nearer box; brightness falls with distance."""
    g = torch.Generator().manual_seed(seed)
    a, b, c = torch.rand(3, count, 1, 1, generator=g)
    y, x = torch.meshgrid(
        torch.linspace(0, 1, 32), torch.linspace(0, 1, 32), indexing="ij"
    )
    depth = 2 + 3 * a + 3 * b * y + 2 * c * x
    box = ((x - a).abs() < 0.2) & ((y - b).abs() < 0.2)
    depth = torch.where(box, depth * 0.4, depth).unsqueeze(1)
    tint = torch.rand(count, 3, 1, 1, generator=g) * 0.2 + 0.9
    image = tint * 2 / depth + 0.02 * torch.randn(count, 3, 32, 32, generator=g)
    return image, depth


def model():
    torch.manual_seed(0)
    net = DepthNet()
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    image, depth = rooms(128, 1)
    for step in range(36):
        i = torch.arange(16) + 16 * (step % 8)
        error = (net(image[i]).log() - depth[i].log()).abs().mean()
        opt.zero_grad()
        error.backward()
        opt.step()
    return net.eval()


def batches():
    return [rooms(16, seed)[0] for seed in (2, 3, 4, 5)]


def held_out():
    return [rooms(16, seed)[0] for seed in (6, 7, 8)]
