"""One table of arrays and functions of it; norms go into the kernels on each call."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

BLOCKS = (("ds", 3, 1, False), ("ir", 5, 2, False), ("ir", 3, 1, True))
NORM_OF = {
    "conv_stem": "bn1",
    "conv_head": "bn2",
    "ds.conv_dw": "bn1",
    "ds.conv_pw": "bn2",
    "ir.conv_pw": "bn1",
    "ir.conv_dw": "bn2",
    "ir.conv_pwl": "bn3",
}


class Net(nn.Module):
    def __init__(self, table, constants):
        super().__init__()
        self.arrays = nn.ParameterDict(table)
        for name, value in constants.items():
            self.register_buffer(name, value)


def converted(sd):
    table, constants = {}, {}

    def conv(to, at, bn):
        table[to + "_w"] = sd[at + ".weight"]
        table[to + "_g"] = sd[bn + ".weight"]
        table[to + "_b"] = sd[bn + ".bias"]
        constants[to + "_m"] = sd[bn + ".running_mean"]
        constants[to + "_s"] = torch.sqrt(sd[bn + ".running_var"] + 1e-3)

    for name in ("conv_stem", "conv_head"):
        conv(name[5:], name, NORM_OF[name])
    for i, (kind, *_) in enumerate(BLOCKS):
        for name, bn in NORM_OF.items():
            if name.startswith(kind + "."):
                conv(f"b{i}_{name[8:]}", f"blocks.{i}.{name[3:]}", f"blocks.{i}.{bn}")
        for short, name in (("down", "reduce"), ("up", "expand")):
            at = f"blocks.{i}.se.conv_{name}"
            table[f"b{i}_{short}_w"] = sd[at + ".weight"].flatten(1).t().contiguous()
            table[f"b{i}_{short}_b"] = sd[at + ".bias"]
    table["head_fc"] = torch.cat(
        [sd["classifier.weight"], sd["classifier.bias"][:, None]], dim=1
    )
    return table, constants


def fused(net, name):
    """Return the kernel and the bias of a convolution and the norm behind it."""
    p, stats = net.arrays, dict(net.named_buffers())
    scale = p[name + "_g"] / stats[name + "_s"]
    bias = p[name + "_b"] - stats[name + "_m"] * scale
    return p[name + "_w"] * scale.view(-1, 1, 1, 1), bias


def pointwise(net, name, x):
    weight, bias = fused(net, name)
    out = torch.matmul(weight[:, :, 0, 0], x.flatten(2)) + bias[:, None]
    return out.unflatten(2, x.shape[2:])


def spatial(net, name, x, kernel, stride, groups=1):
    weight, bias = fused(net, name)
    pads = []
    for size in (x.shape[3], x.shape[2]):
        over = (size - 1) % stride
        total = max(kernel - 1 - over, 0)
        pads += [total // 2, total - total // 2]
    return F.conv2d(F.pad(x, pads), weight, bias, stride=stride, groups=groups)


def squeeze_excite(net, i, x):
    p = net.arrays
    pooled = x.flatten(2).mean(-1)
    hidden = F.silu(pooled @ p[f"b{i}_down_w"] + p[f"b{i}_down_b"])
    gate = torch.sigmoid(hidden @ p[f"b{i}_up_w"] + p[f"b{i}_up_b"])
    return x * gate[:, :, None, None]


def block(net, i, x):
    kind, kernel, stride, residual = BLOCKS[i]
    shortcut = x
    if kind == "ir":
        x = F.silu(pointwise(net, f"b{i}_pw", x))
    x = F.silu(spatial(net, f"b{i}_dw", x, kernel, stride, x.shape[1]))
    x = squeeze_excite(net, i, x)
    x = pointwise(net, f"b{i}_pwl" if kind == "ir" else f"b{i}_pw", x)
    return shortcut + x if residual else x


def model():
    return Net(*converted(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    x = batch["image"] / 0.2245
    shift = x.new_tensor([2.160356347, 2.031180401, 1.808463252]).view(3, 1, 1)
    gain = x.new_tensor([0.980349345, 1.002232143, 0.997777778]).view(3, 1, 1)
    x = (x - shift) * gain
    x = F.silu(spatial(net, "stem", x, 3, 2))
    for i in range(len(BLOCKS)):
        x = block(net, i, x)
    x = F.silu(pointwise(net, "head", x)).mean((-2, -1))
    weight = net.arrays["head_fc"]
    return torch.addmm(weight[:, -1], x, weight[:, :-1].t())


def loss(output, batch):
    logs = F.log_softmax(output, dim=1)
    hit = logs.gather(1, batch["label"][:, None]).squeeze(1)
    return -(0.9 * hit + 0.1 * logs.mean(1)).mean()


def optimizer(net):
    return torch.optim.RMSprop(
        net.parameters(), lr=2e-3, alpha=0.9, eps=1e-3, momentum=0.9
    )
