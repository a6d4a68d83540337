"""Functions of a dictionary of arrays; complex rotation of neighbours, fused kernels."""

from pathlib import Path

import torch
from torch import nn

HEADS = 4
GROUPS = 2


def rms(x, scale, eps=1e-5):
    size = torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + eps)
    return x / size * scale


def rotate(x, base=10000.0):
    # (batch, time, heads, width): neighbours are a pair
    width = x.shape[-1]
    rate = base ** (-torch.arange(0, width, 2) / width)
    phase = torch.arange(x.shape[1])[:, None] * rate
    c = torch.cos(phase)[None, :, None, :]
    s = torch.sin(phase)[None, :, None, :]
    even = x[..., 0::2]
    odd = x[..., 1::2]
    turned = [even * c - odd * s, even * s + odd * c]
    return torch.stack(turned, -1).reshape(x.shape)


def attend(p, x):
    b, t, d = x.shape
    w = d // HEADS
    joined = x @ p["wqkv"]
    q, k, v = joined.split([HEADS * w, GROUPS * w, GROUPS * w], -1)
    q = rotate(q.reshape(b, t, HEADS, w))
    k = rotate(k.reshape(b, t, GROUPS, w))
    v = v.reshape(b, t, GROUPS, w)
    q = q.reshape(b, t, GROUPS, HEADS // GROUPS, w)
    scores = torch.einsum("btgrw,bsgw->bgrts", q, k) * w**-0.5
    future = torch.ones(t, t).triu(1) > 0
    scores = scores.masked_fill(future, float("-inf"))
    share = torch.softmax(scores, dim=-1)
    y = torch.einsum("bgrts,bsgw->btgrw", share, v)
    return y.reshape(b, t, d) @ p["wo"]


def feed(p, x):
    gate, up = (x @ p["w13"]).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up) @ p["w2"]


def decoder(params, tokens):
    x = params["table"][tokens]
    for layer in params["layers"]:
        x = x + attend(layer, rms(x, layer["n1"]))
        x = x + feed(layer, rms(x, layer["n2"]))
    return rms(x, params["n"]) @ params["out"]


class Holder(nn.Module):
    def __init__(self, tree):
        super().__init__()
        self.top = nn.ParameterDict({k: v for k, v in tree.items() if k != "layers"})
        self.layers = nn.ModuleList([nn.ParameterDict(each) for each in tree["layers"]])

    def forward(self, tokens):
        params = {**self.top, "layers": list(self.layers)}
        return decoder(params, tokens)


def neighbours(kernel, heads):
    # halves of each head -> pairs of neighbours
    out, inputs = kernel.shape
    halves = kernel.reshape(heads, 2, out // heads // 2, inputs)
    return halves.transpose(1, 2).reshape(out, inputs)


def converted(w):
    layers = []
    for i in range(2):
        at = f"layers.{i}."
        q = neighbours(w[at + "attention.q_proj.weight"], HEADS)
        k = neighbours(w[at + "attention.k_proj.weight"], GROUPS)
        v = w[at + "attention.v_proj.weight"]
        layers.append(
            {
                "wqkv": torch.cat([q, k, v]).t().clone(),
                "wo": w[at + "attention.o_proj.weight"].t().clone(),
                "n1": w[at + "input_norm.weight"],
                "n2": w[at + "post_norm.weight"],
                "w13": torch.cat([w[at + "gate_proj.weight"], w[at + "up_proj.weight"]])
                .t()
                .clone(),
                "w2": w[at + "down_proj.weight"].t().clone(),
            }
        )
    return {
        "table": w["embed.weight"],
        "layers": layers,
        "n": w["norm.weight"],
        "out": w["lm_head.weight"].t().clone(),
    }


def model():
    return Holder(converted(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    return net(batch["tokens"][:, :-1])
