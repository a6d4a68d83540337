"""Layers as in Keras: channels last, gamma and beta, the shortcut first."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class Conv2D(nn.Module):
    def __init__(self, cin, filters, size, strides=1):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(size, size, cin, filters))
        self.strides = strides

    def forward(self, x):
        kernel = self.kernel.permute(3, 2, 0, 1)
        x = x.permute(0, 3, 1, 2)
        y = F.conv2d(x, kernel, stride=self.strides, padding=kernel.shape[-1] // 2)
        return y.permute(0, 2, 3, 1)


class BatchNormalization(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(channels))
        self.beta = nn.Parameter(torch.empty(channels))
        self.register_buffer("moving_mean", torch.zeros(channels))
        self.register_buffer("moving_variance", torch.ones(channels))

    def forward(self, x):
        mean = x.mean(dim=(0, 1, 2))
        variance = (x - mean).square().mean(dim=(0, 1, 2))
        with torch.no_grad():
            count = x.numel() / x.shape[-1]
            self.moving_mean.mul_(0.9).add_(0.1 * mean)
            self.moving_variance.mul_(0.9).add_(0.1 * variance * count / (count - 1))
        y = (x - mean) / torch.sqrt(variance + 1e-5)
        return y * self.gamma + self.beta


class ResidualBlock(nn.Module):
    def __init__(self, cin, filters, strides):
        super().__init__()
        self.project = strides > 1 or cin != filters
        if self.project:
            self.shortcut_conv = Conv2D(cin, filters, 1, strides)
            self.shortcut_norm = BatchNormalization(filters)
        self.first_conv = Conv2D(cin, filters, 3, strides)
        self.first_norm = BatchNormalization(filters)
        self.second_conv = Conv2D(filters, filters, 3)
        self.second_norm = BatchNormalization(filters)

    def forward(self, inputs):
        shortcut = inputs
        if self.project:
            shortcut = self.shortcut_norm(self.shortcut_conv(inputs))
        x = self.first_norm(self.first_conv(inputs))
        x = torch.relu(x)
        x = self.second_norm(self.second_conv(x))
        x = shortcut + x
        return torch.relu(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = Conv2D(3, 8, 3)
        self.bn = BatchNormalization(8)
        self.blocks = nn.ModuleList([ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2)])
        self.logits_kernel = nn.Parameter(torch.empty(16, 10))
        self.logits_bias = nn.Parameter(torch.empty(10))

    def forward(self, images):
        x = images.permute(0, 2, 3, 1)
        x = torch.relu(self.bn(self.conv(x)))
        for block in self.blocks:
            x = block(x)
        x = x.mean(dim=(1, 2))
        return torch.einsum("nc,ck->nk", x, self.logits_kernel) + self.logits_bias


def set_conv(layer, weight):
    layer.kernel.copy_(weight.permute(2, 3, 1, 0))


def set_norm(layer, weights, name):
    layer.gamma.copy_(weights[name + ".weight"])
    layer.beta.copy_(weights[name + ".bias"])
    layer.moving_mean.copy_(weights[name + ".running_mean"])
    layer.moving_variance.copy_(weights[name + ".running_var"])


def load(net, w):
    set_conv(net.conv, w["stem.weight"])
    set_norm(net.bn, w, "norm")
    for index, block in enumerate(net.blocks, 1):
        name = f"layer{index}."
        set_conv(block.first_conv, w[name + "conv1.weight"])
        set_norm(block.first_norm, w, name + "bn1")
        set_conv(block.second_conv, w[name + "conv2.weight"])
        set_norm(block.second_norm, w, name + "bn2")
        if block.project:
            set_conv(block.shortcut_conv, w[name + "downsample.0.weight"])
            set_norm(block.shortcut_norm, w, name + "downsample.1")
    net.logits_kernel.copy_(w["fc.weight"].T)
    net.logits_bias.copy_(w["fc.bias"])


def model():
    net = Model()
    with torch.no_grad():
        load(net, torch.load(Path(__file__).with_name("weights.pt")))
    return net.train()


def forward(net, batch):
    return net(batch["x"])


def loss(output, batch):
    target = F.one_hot(batch["labels"], 10) * 0.9 + 0.1 / 10
    return -(target * output.log_softmax(-1)).sum(-1).mean()


def optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
