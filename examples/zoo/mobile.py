"""Depthwise separable blocks with hardswish, squeeze-and-excite and residuals."""

import torch
from sklearn.datasets import load_digits
from torch import nn


class SqueezeExcite(nn.Module):
    def __init__(self, channels, reduced):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.down = nn.Conv2d(channels, reduced, 1)
        self.act = nn.ReLU(inplace=True)
        self.up = nn.Conv2d(reduced, channels, 1)
        self.gate = nn.Hardsigmoid(inplace=True)

    def forward(self, x):
        return x * self.gate(self.up(self.act(self.down(self.pool(x)))))


class InvertedResidual(nn.Module):
    def __init__(self, inputs, expanded, outputs, kernel, stride):
        super().__init__()
        self.use_res_connect = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(
            nn.Conv2d(inputs, expanded, 1, bias=False),
            nn.BatchNorm2d(expanded),
            nn.Hardswish(inplace=True),
            nn.Conv2d(
                expanded,
                expanded,
                kernel,
                stride,
                kernel // 2,
                groups=expanded,
                bias=False,
            ),
            nn.BatchNorm2d(expanded),
            nn.Hardswish(inplace=True),
            SqueezeExcite(expanded, expanded // 4),
            nn.Conv2d(expanded, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x):
        if self.use_res_connect:
            return x + self.conv(x)
        return self.conv(x)


def make_net():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.Hardswish(inplace=True),
        InvertedResidual(16, 32, 16, 3, 1),
        InvertedResidual(16, 48, 24, 5, 2),
        InvertedResidual(24, 64, 24, 5, 1),
        nn.Conv2d(24, 96, 1, bias=False),
        nn.BatchNorm2d(96),
        nn.Hardswish(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(96, 10),
    )


def pictures(first, last):
    """Digits in colour: each has a random foreground and background."""
    digits = load_digits()
    g = torch.Generator().manual_seed(3)
    ink, paper = torch.rand(2, 1797, 3, 1, 1, generator=g)
    grey = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    grey = nn.functional.interpolate(grey, scale_factor=3, mode="nearest")
    colour = ink * grey + 0.3 * paper * (1 - grey)
    return (colour[first:last] - 0.3) / 0.3, torch.tensor(digits.target[first:last])


def model():
    torch.manual_seed(1)
    x, y = pictures(0, 1400)
    net = make_net()
    opt = torch.optim.AdamW(net.parameters(), lr=6e-3)
    for _ in range(2):
        for i in torch.randperm(1400).split(50):
            opt.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(net(x[i]), y[i]).backward()
            opt.step()
    return net.eval()


def batches():
    return list(pictures(0, 256)[0].split(32))


def held_out():
    return list(pictures(1400, 1797)[0].split(64))
