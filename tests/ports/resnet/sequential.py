"""The same layers in other containers, with names of its own."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


def unit(cin, cout, kernel, stride, act=True):
    layers = [
        nn.Conv2d(cin, cout, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(cout),
    ]
    return nn.Sequential(*layers, *([nn.ReLU()] if act else []))


class Residual(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.body = nn.Sequential(
            unit(cin, cout, 3, stride), unit(cout, cout, 3, 1, act=False)
        )
        same = cin == cout and stride == 1
        self.skip = nn.Identity() if same else unit(cin, cout, 1, stride, act=False)

    def forward(self, x):
        out = self.body(x)
        out += self.skip(x)
        return out.relu_()


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(unit(3, 8, 3, 1), Residual(8, 8), Residual(8, 16, 2))
        self.classifier = nn.Conv2d(16, 10, 1)

    def forward(self, x):
        feats = self.trunk(x)
        pooled = feats.mean((2, 3), keepdim=True)
        return self.classifier(pooled)[:, :, 0, 0]


ORDER = [
    "stem",
    "layer1.conv1",
    "layer1.conv2",
    "layer2.conv1",
    "layer2.conv2",
    "layer2.downsample.0",
]
NORMS = [
    "norm",
    "layer1.bn1",
    "layer1.bn2",
    "layer2.bn1",
    "layer2.bn2",
    "layer2.downsample.1",
]


def load(net, w):
    convs = [m for m in net.trunk.modules() if isinstance(m, nn.Conv2d)]
    norms = [m for m in net.trunk.modules() if isinstance(m, nn.BatchNorm2d)]
    for conv, norm, a, b in zip(convs, norms, ORDER, NORMS):
        conv.weight.copy_(w[a + ".weight"])
        for old in ("weight", "bias", "running_mean", "running_var"):
            getattr(norm, old).copy_(w[f"{b}.{old}"])
    net.classifier.weight.copy_(w["fc.weight"][:, :, None, None])
    net.classifier.bias.copy_(w["fc.bias"])


def model():
    net = Backbone()
    with torch.no_grad():
        load(net, torch.load(Path(__file__).with_name("weights.pt")))
    return net.train()


def forward(net, batch):
    return net(batch["x"])


def loss(output, batch):
    return F.cross_entropy(output, batch["labels"], label_smoothing=0.1)
