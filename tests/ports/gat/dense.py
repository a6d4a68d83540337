"""Incidence matrices in place of indexes; no softmax trick, one array for three vectors."""

from pathlib import Path

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, inputs, heads, width):
        super().__init__()
        self.w_node = nn.Parameter(torch.empty(inputs, heads, width))
        self.w_edge = nn.Parameter(torch.empty(3, heads, width))
        self.att = nn.Parameter(torch.empty(3, heads, width))
        self.offset = nn.Parameter(torch.empty(heads, width))

    def forward(self, x, start, end, features):
        h = torch.einsum("ni,ihw->nhw", x, self.w_node)
        e = torch.einsum("ei,ihw->ehw", features, self.w_edge)
        at_start = torch.einsum("en,nhw->ehw", start, h)
        at_end = torch.einsum("en,nhw->ehw", end, h)
        whole = at_start * self.att[0] + at_end * self.att[1] + e * self.att[2]
        score = whole.sum(-1)
        score = torch.maximum(score, 0.2 * score)
        weight = torch.exp(score)
        total = torch.einsum("en,eh->nh", end, weight)
        weight = weight / torch.einsum("en,nh->eh", end, total)
        sent = (at_start + e) * weight.unsqueeze(-1)
        return torch.einsum("en,ehw->nhw", end, sent) + self.offset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Layer(5, 2, 6)
        self.bn = nn.BatchNorm1d(12)
        self.second = Layer(12, 2, 5)
        self.shortcut = nn.Linear(12, 10)
        self.hidden = nn.Linear(20, 8)
        self.slope = nn.Parameter(torch.empty(1))
        self.out = nn.Linear(8, 4)

    def forward(self, x, edges, features, graph):
        eye = torch.eye(x.shape[0])
        start = eye[edges[0]]
        end = eye[edges[1]]
        h = self.first(x, start, end, features).flatten(1)
        h = self.bn(h)
        h = torch.where(h > 0, h, torch.expm1(h))
        h = self.second(h, start, end, features).flatten(1) + self.shortcut(h)
        pooled = []
        for part in range(3):
            nodes = h[graph == part]
            pooled.append(torch.cat([nodes.mean(0), nodes.max(0).values]))
        z = self.hidden(torch.stack(pooled))
        z = torch.relu(z) - self.slope * torch.relu(-z)
        return self.out(z)


def layer(into, w, name, heads):
    kernel = w[name + ".linear.weight"]
    into.w_node.copy_(kernel.t().reshape(kernel.shape[1], heads, -1))
    into.w_edge.copy_(w[name + ".edge.weight"].t().reshape(3, heads, -1))
    parts = [w[f"{name}.{part}"] for part in ("source", "target", "link")]
    into.att.copy_(torch.stack(parts))
    into.offset.copy_(w[name + ".bias"].reshape(heads, -1))


def model():
    net = Model()
    w = torch.load(Path(__file__).with_name("weights.pt"))
    with torch.no_grad():
        layer(net.first, w, "one", 2)
        layer(net.second, w, "two", 2)
        net.bn.weight.copy_(w["norm.weight"])
        net.bn.bias.copy_(w["norm.bias"])
        for ours, theirs in (
            ("shortcut", "skip"),
            ("hidden", "mlp.0"),
            ("out", "mlp.2"),
        ):
            getattr(net, ours).weight.copy_(w[theirs + ".weight"])
            getattr(net, ours).bias.copy_(w[theirs + ".bias"])
        net.slope.copy_(w["mlp.1.weight"])
    return net


def forward(net, batch):
    return net(batch["x"], batch["edges"], batch["features"], batch["graph"])


def loss(output, batch):
    logs = output - torch.logsumexp(output, 1, keepdim=True)
    aim = torch.nn.functional.one_hot(batch["y"], 4) * 0.9 + 0.1 / 4
    return -(aim * logs).sum(1).mean()
