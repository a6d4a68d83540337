"""Bags are rows of counts times a table; kernels are (in, out)."""

from pathlib import Path

import torch
from torch import nn


class Dense(nn.Module):
    def __init__(self, units_in, units_out, use_bias=True, activation=None):
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(units_in, units_out))
        self.bias = nn.Parameter(torch.zeros(units_out)) if use_bias else None
        self.activation = activation

    def forward(self, x):
        y = torch.matmul(x, self.kernel)
        if self.bias is not None:
            y = y + self.bias
        return self.activation(y) if self.activation else y


def multi_hot(ids, offsets, rows, weights=None):
    """Counts of each row of the table in each bag."""
    sample = torch.searchsorted(offsets, torch.arange(len(ids)), right=True) - 1
    dense = torch.zeros(len(offsets), rows)
    amount = torch.ones(len(ids)) if weights is None else weights
    return dense.index_put((sample, ids), amount, accumulate=True)


class DeepCross(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense_0 = Dense(6, 16, activation=torch.relu)
        self.dense_1 = Dense(16, 8, activation=torch.relu)
        self.history_table = nn.Parameter(torch.zeros(50, 8))
        self.item_table = nn.Parameter(torch.zeros(40, 8))
        self.tags_table = nn.Parameter(torch.zeros(30, 8))
        self.cross_v = nn.ModuleList([Dense(38, 5, use_bias=False) for _ in range(2)])
        self.cross_u = nn.ModuleList([Dense(5, 38) for _ in range(2)])
        self.deep_0 = Dense(38, 20, activation=torch.relu)
        self.deep_1 = Dense(20, 12, activation=torch.relu)
        self.score_wide = Dense(38, 1)
        self.score_deep = Dense(12, 1, use_bias=False)

    def embed(self, batch):
        counts = torch.log(1.0 + batch["counts"])
        numbers = self.dense_1(self.dense_0(counts))
        clicks = multi_hot(
            batch["history"], batch["history_offsets"], 50, batch["history_weights"]
        )
        history = clicks @ self.history_table
        item = self.item_table[batch["item"]]
        tags = multi_hot(batch["tags"], batch["tags_offsets"], 30)
        tags = (tags / tags.sum(dim=1, keepdim=True)) @ self.tags_table
        return numbers, history, item, tags

    def forward(self, batch):
        fields = torch.stack(self.embed(batch), dim=1)
        gram = torch.einsum("bie,bje->bij", fields, fields)
        below = torch.ones(4, 4).tril(-1).bool()
        dots = gram[:, below]
        x0 = torch.cat([fields.reshape(len(fields), -1), dots], dim=-1)
        x = x0
        for v, u in zip(self.cross_v, self.cross_u):
            x = x0 * u(v(x)) + x
        deep = self.deep_1(self.deep_0(x0))
        logit = self.score_wide(x) + self.score_deep(deep)
        return logit[:, 0]


def assign(layer, weight, bias=None):
    layer.kernel.copy_(weight.t())
    if bias is not None:
        layer.bias.copy_(bias)


@torch.no_grad()
def model():
    w = torch.load(Path(__file__).with_name("weights.pt"))
    net = DeepCross()
    for layer, old in [
        (net.dense_0, "bottom.0"),
        (net.dense_1, "bottom.2"),
        (net.deep_0, "top.0"),
        (net.deep_1, "top.2"),
        (net.cross_u[0], "crosses.0.up"),
        (net.cross_u[1], "crosses.1.up"),
    ]:
        assign(layer, w[old + ".weight"], w[old + ".bias"])
    assign(net.cross_v[0], w["crosses.0.down.weight"])
    assign(net.cross_v[1], w["crosses.1.down.weight"])
    for name in ("history", "item", "tags"):
        getattr(net, name + "_table").copy_(w[name + ".weight"])
    wide, deep = w["last.weight"].split([38, 12], dim=1)
    assign(net.score_wide, wide, w["last.bias"])
    assign(net.score_deep, deep)
    return net


def forward(net, batch):
    return net(batch)


def loss(logit, batch):
    clicked = batch["clicked"]
    softplus = torch.nn.functional.softplus
    positive = clicked * softplus(-logit) * 2.5
    negative = (1 - clicked) * softplus(logit)
    return torch.mean(batch["seen"] * (positive + negative))


class Adagrad(torch.optim.Optimizer):
    def __init__(self, params, learning_rate, initial_accumulator_value):
        super().__init__(
            params, dict(lr=learning_rate, start=initial_accumulator_value)
        )

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["accumulator"] = torch.full_like(p, group["start"])
                state["accumulator"] += p.grad.square()
                p -= group["lr"] * p.grad / torch.sqrt(state["accumulator"])


def optimizer(net):
    return Adagrad(net.parameters(), 0.02, 0.01)
