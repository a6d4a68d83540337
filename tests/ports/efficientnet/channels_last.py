"""Channels last, kernels (height, width, in, out); depthwise kernels tap by tap."""

import re
from pathlib import Path

import torch
from torch import nn

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def swish(x):
    return x * torch.sigmoid(x)


class BatchNormalization(nn.Module):
    def __init__(self, gamma, beta, moving_mean, moving_variance):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(gamma), nn.Parameter(beta)
        self.register_buffer("moving_mean", moving_mean)
        self.register_buffer("moving_variance", moving_variance)
        self.epsilon = 1e-3

    def forward(self, x):
        inv = torch.rsqrt(self.moving_variance + self.epsilon) * self.gamma
        return x * inv + (self.beta - self.moving_mean * inv)


def borders(size, kernel, stride):
    after = -(-size // stride)
    missing = max((after - 1) * stride + kernel - size, 0)
    return after, missing // 2, missing - missing // 2


class Windows:
    """What the taps of a kernel see, one after the other."""

    def __init__(self, kernel, stride):
        self.kernel, self.stride = kernel, stride

    def __call__(self, x):
        rows, top, bottom = borders(x.shape[1], self.kernel, self.stride)
        columns, left, right = borders(x.shape[2], self.kernel, self.stride)
        x = nn.functional.pad(x, (0, 0, left, right, top, bottom))
        s = self.stride
        for i in range(self.kernel):
            for j in range(self.kernel):
                down = slice(i, i + (rows - 1) * s + 1, s)
                across = slice(j, j + (columns - 1) * s + 1, s)
                yield i, j, x[:, down, across]


class Conv(nn.Module):
    def __init__(self, kernel, stride=1, bias=None):
        super().__init__()
        self.kernel = nn.Parameter(kernel.permute(2, 3, 1, 0).contiguous())
        self.bias = None if bias is None else nn.Parameter(bias)
        self.windows = Windows(kernel.shape[-1], stride)

    def forward(self, x):
        taps = [window for _, _, window in self.windows(x)]
        out = torch.cat(taps, -1) @ self.kernel.flatten(0, 2)
        return out if self.bias is None else out + self.bias


class DepthwiseConv(nn.Module):
    def __init__(self, kernel, stride):
        super().__init__()
        self.depthwise = nn.Parameter(kernel[:, 0].permute(1, 2, 0).contiguous())
        self.windows = Windows(kernel.shape[-1], stride)

    def forward(self, x):
        total = 0
        for i, j, window in self.windows(x):
            total = total + window * self.depthwise[i, j]
        return total


class Block(nn.Module):
    def __init__(self, take, stride, first):
        super().__init__()
        conv, norm = take.conv, take.norm
        self.expand = None if first else conv("conv_pw")
        self.expand_bn = None if first else norm("bn1")
        self.depthwise = take.depthwise("conv_dw", stride)
        self.depthwise_bn = norm("bn1" if first else "bn2")
        self.reduce = conv("se.conv_reduce")
        self.excite = conv("se.conv_expand")
        self.project = conv("conv_pw" if first else "conv_pwl")
        self.project_bn = norm("bn2" if first else "bn3")

    def forward(self, inputs):
        x = inputs
        if self.expand is not None:
            x = swish(self.expand_bn(self.expand(x)))
        x = swish(self.depthwise_bn(self.depthwise(x)))
        squeezed = x.mean(dim=(1, 2), keepdim=True)
        gate = torch.sigmoid(self.excite(swish(self.reduce(squeezed))))
        x = self.project_bn(self.project(x * gate))
        if self.expand is not None and x.shape == inputs.shape:
            x = x + inputs
        return x


class Take:
    """Layers of a checkpoint under a prefix."""

    def __init__(self, weights, prefix=""):
        self.weights, self.prefix = weights, prefix

    def conv(self, name, stride=1):
        at = self.prefix + name
        return Conv(
            self.weights[f"{at}.weight"], stride, self.weights.get(f"{at}.bias")
        )

    def depthwise(self, name, stride):
        return DepthwiseConv(self.weights[f"{self.prefix}{name}.weight"], stride)

    def norm(self, name):
        at = f"{self.prefix}{name}."
        names = ("weight", "bias", "running_mean", "running_var")
        return BatchNormalization(*(self.weights[at + n] for n in names))


class Model(nn.Module):
    def __init__(self, weights):
        super().__init__()
        whole = Take(weights)
        self.stem, self.stem_bn = whole.conv("conv_stem", 2), whole.norm("bn1")
        found = {re.match(r"blocks\.(\d+)", n) for n in weights} - {None}
        numbers = sorted({int(match[1]) for match in found})
        self.blocks = nn.ModuleList(
            Block(Take(weights, f"blocks.{n}."), 2 if n == 1 else 1, n == 0)
            for n in numbers
        )
        self.top, self.top_bn = whole.conv("conv_head"), whole.norm("bn2")
        self.predictions = nn.Parameter(weights["classifier.weight"].t().contiguous())
        self.predictions_bias = nn.Parameter(weights["classifier.bias"])

    def forward(self, x):
        x = swish(self.stem_bn(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        x = swish(self.top_bn(self.top(x)))
        return x.mean(dim=(1, 2)) @ self.predictions + self.predictions_bias


def model():
    return Model(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    image = batch["image"].permute(0, 2, 3, 1)
    return net((image - torch.tensor(MEAN)) / torch.tensor(STD))


def loss(output, batch):
    target = nn.functional.one_hot(batch["label"], output.shape[-1]).float()
    target = target * (1 - 0.1) + 0.1 / output.shape[-1]
    return -(target * torch.log_softmax(output, -1)).sum(-1).mean()


def optimizer(net):
    return torch.optim.RMSprop(
        net.parameters(), lr=2e-3, alpha=0.9, eps=1e-3, momentum=0.9
    )
