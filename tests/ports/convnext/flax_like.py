"""As Flax would: channels last between layers, HWIO kernels, dictionaries of leaves."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


def conv(x, kernel, bias, *, strides=1, groups=1, padding="VALID"):
    pad = kernel.shape[0] // 2 if padding == "SAME" else 0
    y = F.conv2d(
        x.movedim(-1, 1), kernel.permute(3, 2, 0, 1), None, strides, pad, 1, groups
    )
    return y.movedim(1, -1) + bias


def layer_norm(x, leaf, epsilon=1e-6):
    mean = x.mean(-1, keepdim=True)
    square = (x * x).mean(-1, keepdim=True)
    scale = torch.rsqrt(square - mean * mean + epsilon) * leaf["scale"]
    return (x - mean) * scale + leaf["bias"]


def response(x, leaf):
    size = (x**2).sum((1, 2), keepdim=True).sqrt()
    share = size / (size.mean(-1, keepdim=True) + 1e-6)
    return x * (1 + leaf["gamma"] * share) + leaf["beta"]


def block(x, leaves):
    y = conv(
        x,
        leaves["dw"]["kernel"],
        leaves["dw"]["bias"],
        groups=x.shape[-1],
        padding="SAME",
    )
    y = layer_norm(y, leaves["ln"])
    y = y @ leaves["up"]["kernel"] + leaves["up"]["bias"]
    y = F.gelu(y)
    y = response(y, leaves["grn"])
    y = y @ leaves["down"]["kernel"] + leaves["down"]["bias"]
    return x + y * leaves["scale"]["gamma"]


class Apply(nn.Module):
    def __init__(self, tree):
        super().__init__()
        self.tree = nn.ModuleDict(
            {
                name: nn.ModuleDict(
                    {key: nn.ParameterDict(leaf) for key, leaf in part.items()}
                )
                for name, part in tree.items()
            }
        )

    def forward(self, x):
        t = self.tree
        x = x.movedim(1, -1)
        x = conv(x, t["stem"]["conv"]["kernel"], t["stem"]["conv"]["bias"], strides=2)
        x = layer_norm(x, t["stem"]["ln"])
        x = block(x, t["one"])
        x = layer_norm(x, t["down"]["ln"])
        x = conv(x, t["down"]["conv"]["kernel"], t["down"]["conv"]["bias"], strides=2)
        x = block(x, t["two"])
        x = x.mean((1, 2))
        x = layer_norm(x, t["end"]["ln"])
        return x @ t["end"]["head"]["kernel"] + t["end"]["head"]["bias"]


def conv_leaf(w, name):
    return {
        "kernel": w[name + ".weight"].permute(2, 3, 1, 0).clone(),
        "bias": w[name + ".bias"],
    }


def dense_leaf(w, name):
    return {"kernel": w[name + ".weight"].t().clone(), "bias": w[name + ".bias"]}


def norm_leaf(w, name):
    return {"scale": w[name + ".weight"], "bias": w[name + ".bias"]}


def block_leaves(w, name):
    return {
        "dw": conv_leaf(w, name + ".dwconv"),
        "ln": norm_leaf(w, name + ".norm"),
        "up": dense_leaf(w, name + ".pwconv1"),
        "grn": {"gamma": w[name + ".grn.gamma"], "beta": w[name + ".grn.beta"]},
        "down": dense_leaf(w, name + ".pwconv2"),
        "scale": {"gamma": w[name + ".gamma"]},
    }


def model():
    w = torch.load(Path(__file__).with_name("weights.pt"))
    tree = {
        "stem": {"conv": conv_leaf(w, "stem.0"), "ln": norm_leaf(w, "stem.1")},
        "one": block_leaves(w, "stage1"),
        "down": {"ln": norm_leaf(w, "down.0"), "conv": conv_leaf(w, "down.1")},
        "two": block_leaves(w, "stage2"),
        "end": {"ln": norm_leaf(w, "norm"), "head": dense_leaf(w, "head")},
    }
    return Apply(tree)


def forward(net, batch):
    return net(batch["x"])
