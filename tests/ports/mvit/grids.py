"""Grids with channels last and heads of their own axis; every product an einsum."""

from pathlib import Path

import torch
from torch import nn

EPS = 1e-6
#: heads, stride of the queries, stride of the keys and values
STAGES = ((2, 1, 2), (4, 2, 2), (4, 1, 2))


class Tree(nn.Module):
    """Parameters under names with a point between the levels."""

    def __init__(self, leaves):
        super().__init__()
        for path, leaf in leaves.items():
            *levels, last = path.split(".")
            at = self
            for level in levels:
                if not hasattr(at, level):
                    at.add_module(level, Tree({}))
                at = getattr(at, level)
            at.register_parameter(last, nn.Parameter(leaf.contiguous()))


def convert(sd):
    out = {}

    def norm(to, at):
        out[to + ".scale"], out[to + ".bias"] = sd[at + ".weight"], sd[at + ".bias"]

    def dense(to, at):
        out[to + ".kernel"], out[to + ".bias"] = sd[at + ".weight"].T, sd[at + ".bias"]

    out["patches.kernel"] = sd["patch_embed.weight"].permute(2, 3, 1, 0)
    out["patches.bias"] = sd["patch_embed.bias"]
    for i, (heads, _, _) in enumerate(STAGES):
        to, at = f"stage{i}", f"blocks.{i}"
        kernels = sd[at + ".attn.qkv.weight"].unflatten(0, (3, heads, -1))
        biases = sd[at + ".attn.qkv.bias"].unflatten(0, (3, heads, -1))
        for j, name in enumerate("qkv"):
            out[f"{to}.{name}.kernel"] = kernels[j].permute(2, 0, 1)
            out[f"{to}.{name}.bias"] = biases[j]
            taps = sd[f"{at}.attn.pool_{name}.weight"][:, 0]
            out[f"{to}.{name}.taps"] = taps.permute(1, 2, 0)
            norm(f"{to}.{name}.norm", f"{at}.attn.norm_{name}")
        out[to + ".rows"] = sd[at + ".attn.rel_pos_h"]
        out[to + ".columns"] = sd[at + ".attn.rel_pos_w"]
        merge = sd[at + ".attn.proj.weight"]
        out[to + ".merge.kernel"] = merge.T.unflatten(0, (heads, -1))
        out[to + ".merge.bias"] = sd[at + ".attn.proj.bias"]
        if at + ".shortcut_proj.weight" in sd:
            dense(to + ".widen", at + ".shortcut_proj")
        norm(to + ".norm_a", at + ".norm1")
        norm(to + ".norm_b", at + ".norm2")
        dense(to + ".up", at + ".fc1")
        dense(to + ".down", at + ".fc2")
    norm("final", "norm")
    dense("classes", "head")
    return out


def apply_dense(p, x):
    return torch.einsum("...i,ij->...j", x, p.kernel) + p.bias


def apply_norm(p, x):
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + EPS) * p.scale + p.bias


def gelu(x):
    return x * (torch.erf(x * 0.5**0.5) + 1) / 2


def windows(x, size, stride, fill=0.0):
    """(batch, rows, columns, ...) to (batch, rows, columns, ..., size, size)."""
    border = size // 2
    rest = (0, 0) * (x.dim() - 3)
    x = nn.functional.pad(x, (*rest, *(border,) * 4), value=fill)
    return x.unfold(1, size, stride).unfold(2, size, stride)


def pooled(p, x, stride):
    x = torch.einsum("bxyc,chd->bxyhd", x, p.kernel) + p.bias
    x = torch.einsum("bxyhdij,ijd->bxyhd", windows(x, 3, stride), p.taps)
    return apply_norm(p.norm, x)


def along(scores, queries, keys, axis):
    """Pick from the scores of all offsets those of an axis' keys."""
    ratio = queries // keys
    at = torch.arange(queries)[:, None] + ratio * torch.arange(keys - 1, -1, -1)
    shape = [1] * scores.dim()
    shape[axis], shape[-1] = queries, keys
    return torch.take_along_dim(scores, at.view(shape), dim=-1)


def attention(p, x, stride_q, stride_kv):
    q = pooled(p.q, x, stride_q)
    k = pooled(p.k, x, stride_kv)
    v = pooled(p.v, x, stride_kv)
    scores = torch.einsum("bxyhd,buvhd->bxyhuv", q, k) / q.shape[-1] ** 0.5
    rows = torch.einsum("bxyhd,rd->bxyhr", q, p.rows)
    columns = torch.einsum("bxyhd,rd->bxyhr", q, p.columns)
    rows = along(rows, q.shape[1], k.shape[1], 1)
    columns = along(columns, q.shape[2], k.shape[2], 2)
    scores = scores + rows.unsqueeze(-1) + columns.unsqueeze(-2)
    scores = scores - scores.detach().amax((-2, -1), keepdim=True)
    power = torch.exp(scores)
    share = power / power.sum((-2, -1), keepdim=True)
    x = torch.einsum("bxyhuv,buvhd->bxyhd", share, v) + q
    return torch.einsum("bxyhd,hdc->bxyc", x, p.merge.kernel) + p.merge.bias


def stage(p, x, stride_q, stride_kv):
    normed = apply_norm(p.norm_a, x)
    if hasattr(p, "widen"):
        x = apply_dense(p.widen, normed)
    if stride_q > 1:
        x = windows(x, 3, stride_q, -torch.inf).amax((-2, -1))
    x = x + attention(p, normed, stride_q, stride_kv)
    hidden = gelu(apply_dense(p.up, apply_norm(p.norm_b, x)))
    return x + apply_dense(p.down, hidden)


def model():
    return Tree(convert(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    image = batch["image"].permute(0, 2, 3, 1)
    x = torch.einsum("bxycij,ijcd->bxyd", windows(image, 5, 2), net.patches.kernel)
    x = x + net.patches.bias
    for i, (_, stride_q, stride_kv) in enumerate(STAGES):
        x = stage(getattr(net, f"stage{i}"), x, stride_q, stride_kv)
    x = apply_norm(net.final, x).mean((1, 2))
    return apply_dense(net.classes, x)


def loss(output, batch):
    classes = torch.arange(output.shape[-1])
    share = batch["share"][:, None]
    target = share * (batch["label"][:, None] == classes)
    target = target + (1 - share) * (batch["other"][:, None] == classes)
    logs = output - output.logsumexp(-1, keepdim=True)
    return -(target * logs).sum() / len(output)


def optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, nesterov=True)
