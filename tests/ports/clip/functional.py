"""One flat dict of the reference's own tensors; layers as functions."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


class State(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.keys = {}
        for key, value in w.items():
            name = key.replace(".", "_")
            self.keys[key] = name
            if "running" in key or "num_batches" in key:
                self.register_buffer(name, value.clone())
            else:
                self.register_parameter(name, nn.Parameter(value.clone()))

    def __getitem__(self, key):
        return getattr(self, self.keys[key])

    def forward(self, image, ids):
        return scores(self, image, ids)


def batch_norm(s, at, x):
    s[at + ".num_batches_tracked"].add_(1)
    mean, var = s[at + ".running_mean"], s[at + ".running_var"]
    return F.batch_norm(
        x, mean, var, s[at + ".weight"], s[at + ".bias"], True, 0.1, 1e-5
    )


def residual(s, at, x):
    short = F.conv2d(F.avg_pool2d(x, 2), s[at + ".down.weight"])
    x = F.conv2d(x, s[at + ".conv1.weight"], stride=2, padding=1)
    x = torch.relu(batch_norm(s, at + ".bn1", x))
    x = F.conv2d(x, s[at + ".conv2.weight"], padding=1)
    return torch.relu(batch_norm(s, at + ".bn2", x) + short)


def pictures(s, x):
    x = residual(s, "pictures.block1", x)
    x = residual(s, "pictures.block2", x)
    x = F.adaptive_avg_pool2d(x, 1).flatten(1)
    return x @ s["pictures.project.weight"].mT


def words(s, ids):
    keep = ids.ne(0)
    x = F.embedding(ids, s["words.table.weight"], padding_idx=0)
    y = F.conv1d(x.mT, s["words.conv.weight"], s["words.conv.bias"], padding=1).mT
    x = F.layer_norm(
        x + F.gelu(y), x.shape[-1:], s["words.norm.weight"], s["words.norm.bias"]
    )
    x = x.masked_fill(~keep[..., None], 0).sum(1) / keep.sum(1, keepdim=True)
    x = F.gelu(F.linear(x, s["words.project.0.weight"], s["words.project.0.bias"]))
    return F.linear(x, s["words.project.2.weight"], s["words.project.2.bias"])


def unit(x):
    return x * x.square().sum(-1, keepdim=True).rsqrt()


def scores(s, image, ids):
    a = unit(pictures(s, image)) * s["log_scale"].exp()
    return F.linear(a, unit(words(s, ids)))


def model():
    return State(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["image"], batch["ids"])


def loss(output, batch):
    right = output.diagonal()
    rows, columns = output.logsumexp(1), output.logsumexp(0)
    hard = (rows + columns).mean() - 2 * right.mean()
    soft = (rows + columns).mean() - 2 * output.mean()
    return (0.9 * hard + 0.1 * soft) / 2


def optimizer(net):
    groups = {True: [], False: []}
    for p in net.parameters():
        groups[p.ndim > 1].append(p)
    return torch.optim.SGD(
        [dict(params=groups[True], weight_decay=0.005), dict(params=groups[False])],
        lr=0.05,
        momentum=0.9,
        dampening=0.1,
        foreach=False,
    )
