"""One table for all fields, sums by index, pairs before vectors: no classes of layers."""

from pathlib import Path

import torch
from torch import nn

STARTS = {"history": 0, "item": 50, "tags": 90}
PAIRS = [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]


def affine(p, name, x):
    return torch.addmm(p[name + "_b"], x, p[name + "_w"])


def segment_sum(rows, lengths_from, count):
    segment = torch.zeros(len(rows), dtype=torch.long)
    segment[lengths_from[1:]] = 1
    segment = segment.cumsum(0)
    return torch.zeros(count, rows.shape[1]).index_add(0, segment, rows), segment


def lookup(p, field, ids):
    return p["table"].index_select(0, ids + STARTS[field])


def vectors_of(p, batch):
    count = len(batch["item"])
    h = torch.relu(affine(p, "bot1", torch.log1p(batch["counts"])))
    numbers = torch.relu(affine(p, "bot2", h))
    rows = lookup(p, "history", batch["history"])
    rows = rows * batch["history_weights"].unsqueeze(1)
    history, _ = segment_sum(rows, batch["history_offsets"], count)
    item = lookup(p, "item", batch["item"])
    rows = lookup(p, "tags", batch["tags"])
    tags, segment = segment_sum(rows, batch["tags_offsets"], count)
    sizes = torch.bincount(segment, minlength=count)
    tags = tags / sizes.unsqueeze(1)
    return [numbers, history, item, tags]


def score(p, batch):
    vectors = vectors_of(p, batch)
    pairs = [(vectors[i] * vectors[j]).sum(1) for i, j in PAIRS]
    x0 = torch.cat([torch.stack(pairs, 1), *vectors], 1)
    x = x0
    for k in range(2):
        x = x + x0 * ((x @ p[f"cross{k}_down"]) @ p[f"cross{k}_up"] + p[f"cross{k}_b"])
    y = torch.relu(affine(p, "top1", x0))
    y = torch.relu(affine(p, "top2", y))
    return affine(p, "out", torch.cat([y, x], 1)).flatten()


def pairs_first(matrix, dim):
    """Turn [vectors, pairs] into [pairs, vectors] along an axis."""
    vectors, pairs = matrix.split([32, 6], dim)
    return torch.cat([pairs, vectors], dim)


def convert(w):
    p = {"table": torch.cat([w[name + ".weight"] for name in STARTS])}
    for new, old in [
        ("bot1", "bottom.0"),
        ("bot2", "bottom.2"),
        ("top1", "top.0"),
        ("top2", "top.2"),
    ]:
        p[new + "_w"] = w[old + ".weight"].t()
        p[new + "_b"] = w[old + ".bias"]
    p["top1_w"] = pairs_first(p["top1_w"], 0)
    for k in range(2):
        p[f"cross{k}_down"] = pairs_first(w[f"crosses.{k}.down.weight"].t(), 0)
        p[f"cross{k}_up"] = pairs_first(w[f"crosses.{k}.up.weight"].t(), 1)
        p[f"cross{k}_b"] = pairs_first(w[f"crosses.{k}.up.bias"], 0)
    wide, deep = w["last.weight"].t().split([38, 12])
    p["out_w"] = torch.cat([deep, pairs_first(wide, 0)])
    p["out_b"] = w["last.bias"]
    return p


class Params(nn.Module):
    def __init__(self, p):
        super().__init__()
        for name, value in p.items():
            setattr(self, name, nn.Parameter(value.contiguous().clone()))

    def forward(self, batch):
        return score(dict(self.named_parameters()), batch)


def model():
    return Params(convert(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    return net(batch)


def loss(z, batch):
    y = batch["clicked"]
    log_p = torch.nn.functional.logsigmoid(z)
    log_q = log_p - z
    each = -(2.5 * y * log_p + (1 - y) * log_q) * batch["seen"]
    return each.sum() / len(each)


def optimizer(net):
    return torch.optim.Adagrad(
        net.parameters(), lr=0.02, initial_accumulator_value=0.01
    )
