"""Functions over a dictionary of weights."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


def normalize(x, p, name, eps=1e-5):
    shape = (1, -1, 1, 1)
    scale = p[name + "_scale"] / torch.sqrt(p[name + "_var"] + eps)
    shift = p[name + "_offset"] - p[name + "_mean"] * scale
    return x * scale.view(shape) + shift.view(shape)


def linear(x, p, name):
    return torch.addmm(p[name + "_b"], x, p[name + "_w"])


def apply(p, x):
    x = F.conv2d(x, p["c1_w"], padding="same")
    x = normalize(x, p, "n1").relu()
    x = F.conv2d(x, p["c2_w"], p["c2_b"], stride=2, padding=1)
    x = normalize(x, p, "n2").relu()
    x = F.max_pool2d(x, kernel_size=2, stride=2)
    x = x.flatten(1)
    x = linear(x, p, "d1").relu()
    return linear(x, p, "d2")


class Params(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.p = nn.ParameterDict({k: nn.Parameter(v) for k, v in weights.items()})

    def forward(self, x):
        return apply(self.p, x)


def load(w):
    p = {
        "c1_w": w["conv1.weight"],
        "c2_w": w["conv2.weight"],
        "c2_b": w["conv2.bias"],
    }
    for name, old in (("n1", "bn1"), ("n2", "bn2")):
        p[name + "_scale"] = w[old + ".weight"]
        p[name + "_offset"] = w[old + ".bias"]
        p[name + "_mean"] = w[old + ".running_mean"]
        p[name + "_var"] = w[old + ".running_var"]
    for name, old in (("d1", "fc1"), ("d2", "fc2")):
        p[name + "_w"] = w[old + ".weight"].t().contiguous()
        p[name + "_b"] = w[old + ".bias"]
    return p


def model():
    return Params(load(torch.load(Path(__file__).with_name("weights.pt")))).eval()


def forward(net, batch):
    return net(batch["x"])


def optimizer(net):
    trained = [p for name, p in net.p.items() if not name.endswith(("_mean", "_var"))]
    return torch.optim.SGD(trained, lr=0.05)
