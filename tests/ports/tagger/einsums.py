"""Every product an einsum, with an axis of heads in the weights; one table of arrays."""

import math
from pathlib import Path

import torch
from torch import nn

HEADS = 4


def arranged(sd):
    table = {"lookup/words": sd["words.weight"], "lookup/shapes": sd["shapes.weight"]}
    for new, old in (("enter", "embed_norm"), ("leave", "norm")):
        table[f"{new}/gain"] = sd[f"{old}.weight"]
        table[f"{new}/shift"] = sd[f"{old}.bias"]
    for i in range(2):
        old, new = f"layers.{i}.", f"layer{i}/"
        for letter, name in (("q", "query"), ("k", "key"), ("v", "value")):
            weight = sd[f"{old}attention.{name}.weight"]
            table[f"{new}{letter}"] = weight.unflatten(0, (HEADS, -1)).transpose(1, 2)
        for letter, name in (("q", "query"), ("v", "value")):
            bias = sd[f"{old}attention.{name}.bias"]
            table[f"{new}{letter}_add"] = bias.unflatten(0, (HEADS, -1))
        merge = sd[f"{old}attention.out.weight"]
        table[f"{new}o"] = merge.t().unflatten(0, (HEADS, -1))
        table[f"{new}o_add"] = sd[f"{old}attention.out.bias"]
        table[f"{new}in"] = sd[f"{old}mlp.wi.weight"].unflatten(0, (2, -1))
        table[f"{new}in_add"] = sd[f"{old}mlp.wi.bias"].unflatten(0, (2, -1))
        table[f"{new}back"] = sd[f"{old}mlp.wo.weight"]
        table[f"{new}back_add"] = sd[f"{old}mlp.wo.bias"]
        for number, name in ((1, "before"), (2, "between")):
            table[f"{new}{name}/gain"] = sd[f"{old}norm{number}.weight"]
            table[f"{new}{name}/shift"] = sd[f"{old}norm{number}.bias"]
    for new, old in (("dense", "dense"), ("tags", "tags")):
        table[new] = sd[f"{old}.weight"]
        table[f"{new}_add"] = sd[f"{old}.bias"]
    return {name: value.contiguous() for name, value in table.items()}


class Arrays(nn.Module):
    """Parameters by the names of a table, with colons for the slashes."""

    def __init__(self, table):
        super().__init__()
        for name, value in table.items():
            self.register_parameter(name.replace("/", ":"), nn.Parameter(value))

    def __getitem__(self, name):
        return self.get_parameter(name.replace("/", ":"))


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def layer_norm(p, name, x, eps=1e-5):
    x = x - x.mean(-1, keepdim=True)
    spread = torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    return x / spread * p[f"{name}/gain"] + p[f"{name}/shift"]


def attention(p, at, x, near, mask):
    q = torch.einsum("btd,hde->bhte", x, p[at + "q"]) + p[at + "q_add"][:, None]
    k = torch.einsum("btd,hde->bhte", x, p[at + "k"])
    v = torch.einsum("btd,hde->bhte", x, p[at + "v"]) + p[at + "v_add"][:, None]
    score = torch.einsum("bhqe,bhke->bhqk", q, k) / math.sqrt(q.shape[-1]) - near
    score = torch.where(mask[:, None, None], score, -math.inf)
    score = score - score.amax(-1, keepdim=True).detach()
    power = torch.exp(score)
    share = power / power.sum(-1, keepdim=True)
    mixed = torch.einsum("bhqk,bhke->bqhe", share, v)
    return torch.einsum("bqhe,hed->bqd", mixed, p[at + "o"]) + p[at + "o_add"]


def gated(p, at, x):
    both = torch.einsum("btd,cfd->cbtf", x, p[at + "in"])
    value, gate = both + p[at + "in_add"][:, None, None]
    out = torch.einsum("btf,df->btd", value * gelu(gate), p[at + "back"])
    return out + p[at + "back_add"]


def model():
    return Arrays(arranged(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(p, batch):
    words, mask = batch["words"], batch["mask"]
    known = (words > 0).unsqueeze(-1)
    x = torch.where(known, p["lookup/words"][words], 0.0)
    x = x + p["lookup/shapes"][batch["shapes"]]
    x = layer_norm(p, "enter", x, 1e-12)
    time = torch.arange(words.shape[1])
    slope = 0.25 ** torch.arange(1, HEADS + 1).float()
    near = slope[:, None, None] * (time[None] - time[:, None]).abs()
    for i in range(2):
        at = f"layer{i}/"
        x = x + attention(p, at, layer_norm(p, at + "before", x), near, mask)
        x = x + gated(p, at, layer_norm(p, at + "between", x))
    x = layer_norm(p, "leave", x)
    x = torch.tanh(torch.einsum("btd,ed->bte", x, p["dense"]) + p["dense_add"])
    return torch.einsum("bte,ce->btc", x, p["tags"]) + p["tags_add"]


def loss(output, batch):
    labels = batch["labels"]
    scored = (labels != -100).float()
    gold = labels.clamp(min=0)
    rare = 1.0 - 0.6 * (gold == 0) + 0.5 * (gold == 4)
    logs = output - torch.logsumexp(output, -1, keepdim=True)
    each = -logs.gather(-1, gold[..., None])[..., 0] * rare * scored
    return each.sum() / (rare * scored).sum()


def optimizer(p):
    plain = ("gain", "shift", "_add")
    free = [v for n, v in p.named_parameters() if n.endswith(plain)]
    held = [v for n, v in p.named_parameters() if not n.endswith(plain)]
    groups = [{"params": free, "weight_decay": 0.0}, {"params": held}]
    return torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.05)
