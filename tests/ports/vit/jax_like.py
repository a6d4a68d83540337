"""Pure functions over a tree of arrays; kernels by head, einsum everywhere."""

import math
from pathlib import Path

import torch
from torch import nn


def layer_norm(x, p):
    mean = torch.mean(x, dim=-1, keepdim=True)
    centered = x - mean
    variance = torch.mean(centered * centered, dim=-1, keepdim=True)
    return centered * torch.rsqrt(variance + 1e-6) * p["scale"] + p["bias"]


def attention(x, p):
    q = torch.einsum("bnd,dhk->bhnk", x, p["q_kernel"]) + p["q_bias"][:, None]
    k = torch.einsum("bnd,dhk->bhnk", x, p["k_kernel"]) + p["k_bias"][:, None]
    v = torch.einsum("bnd,dhk->bhnk", x, p["v_kernel"]) + p["v_bias"][:, None]
    q = q / math.sqrt(q.shape[-1])
    logits = torch.einsum("bhnk,bhmk->bhnm", q, k)
    probs = torch.softmax(logits, dim=-1)
    out = torch.einsum("bhnm,bhmk->bnhk", probs, v)
    return torch.einsum("bnhk,hkd->bnd", out, p["o_kernel"]) + p["o_bias"]


def mlp(x, p):
    x = torch.einsum("bnd,df->bnf", x, p["wi"]) + p["wi_bias"]
    x = nn.functional.gelu(x)
    return torch.einsum("bnf,fd->bnd", x, p["wo"]) + p["wo_bias"]


def apply(params, images):
    b = images.shape[0]
    x = images.permute(0, 2, 3, 1).reshape(b, 3, 4, 3, 4, 3)
    x = torch.einsum("bihjwc,hwcd->bijd", x, params["embed"]["kernel"])
    x = x.reshape(b, 9, -1) + params["embed"]["bias"]
    x = torch.cat([params["embed"]["cls"].repeat(b, 1, 1), x], dim=1)
    x = x + params["embed"]["pos"]
    for i in range(2):
        p = params[f"block_{i}"]
        x = x + attention(layer_norm(x, params[f"ln1_{i}"]), p)
        x = x + mlp(layer_norm(x, params[f"ln2_{i}"]), p)
    x = layer_norm(x, params["ln_f"])
    return x[:, 0] @ params["head"]["kernel"] + params["head"]["bias"]


def convert(w):
    tree = {
        "embed": {
            "kernel": w["patch.weight"].permute(2, 3, 1, 0),
            "bias": w["patch.bias"],
            "cls": w["cls"],
            "pos": w["pos"],
        },
        "ln_f": {"scale": w["norm.weight"], "bias": w["norm.bias"]},
        "head": {"kernel": w["head.weight"].T, "bias": w["head.bias"]},
    }
    for i in range(2):
        name = f"blocks.{i}."
        qkv = w[name + "attn.qkv.weight"].reshape(3, 3, 8, 24)
        bias = w[name + "attn.qkv.bias"].reshape(3, 3, 8)
        block = {}
        for j, letter in enumerate("qkv"):
            block[letter + "_kernel"] = qkv[j].permute(2, 0, 1)
            block[letter + "_bias"] = bias[j]
        block["o_kernel"] = w[name + "attn.proj.weight"].T.reshape(3, 8, 24)
        block["o_bias"] = w[name + "attn.proj.bias"]
        block["wi"] = w[name + "fc1.weight"].T
        block["wi_bias"] = w[name + "fc1.bias"]
        block["wo"] = w[name + "fc2.weight"].T
        block["wo_bias"] = w[name + "fc2.bias"]
        tree[f"block_{i}"] = block
        for j in (1, 2):
            norm = name + f"norm{j}"
            tree[f"ln{j}_{i}"] = {
                "scale": w[norm + ".weight"],
                "bias": w[norm + ".bias"],
            }
    return tree


class Wrapped(nn.Module):
    def __init__(self, tree):
        super().__init__()
        self.groups = nn.ModuleDict(
            {
                name: nn.ParameterDict(
                    {k: nn.Parameter(v.clone().contiguous()) for k, v in group.items()}
                )
                for name, group in tree.items()
            }
        )

    def forward(self, images):
        return apply(self.groups, images)


def model():
    return Wrapped(convert(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    return net(batch["x"])
