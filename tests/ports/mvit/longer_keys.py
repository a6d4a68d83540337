"""Tokens last; relative positions as further channels of queries and keys, for the library."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


class ChannelNorm(nn.Module):
    """Norm over the channels, which stand before the tokens."""

    def __init__(self, gain, shift, eps=1e-6):
        super().__init__()
        self.gain = nn.Parameter(gain[:, None].clone())
        self.shift = nn.Parameter(shift[:, None].clone())
        self.eps = eps

    def forward(self, x):
        var, mean = torch.var_mean(x, dim=-2, keepdim=True, correction=0)
        return torch.addcmul(
            self.shift, (x - mean) * (var + self.eps).rsqrt(), self.gain
        )


class Pointwise(nn.Module):
    def __init__(self, w, b):
        super().__init__()
        self.w, self.b = nn.Parameter(w.clone()), nn.Parameter(b[:, None].clone())

    def forward(self, x):
        return self.w @ x + self.b


class Checkpoint:
    def __init__(self, tensors, *path):
        self.tensors, self.path = tensors, path

    def under(self, *more):
        return Checkpoint(self.tensors, *self.path, *more)

    def get(self, name):
        return self.tensors[".".join((*self.path, name))]

    def has(self, name):
        return ".".join((*self.path, name)) in self.tensors

    def pair(self, name):
        return self.get(name + ".weight"), self.get(name + ".bias")


class PooledAttention(nn.Module):
    def __init__(self, ckpt, grid, heads, down_q, down_kv):
        super().__init__()
        self.heads, self.grid = heads, grid
        self.down_q, self.down_kv = down_q, down_kv
        w, b = ckpt.pair("qkv")
        third = len(b) // 3
        self.to_q = Pointwise(w[:third], b[:third])
        self.to_kv = Pointwise(w[third:], b[third:])
        self.pool_q = nn.Parameter(ckpt.get("pool_q.weight").clone())
        self.pool_kv = nn.Parameter(
            torch.stack([ckpt.get("pool_k.weight"), ckpt.get("pool_v.weight")])
        )
        self.norm_q = ChannelNorm(*ckpt.pair("norm_q"))
        self.norm_k = ChannelNorm(*ckpt.pair("norm_k"))
        self.norm_v = ChannelNorm(*ckpt.pair("norm_v"))
        # Along each axis the farthest key behind comes first.
        self.table_y = nn.Parameter(ckpt.get("rel_pos_h").flip(0))
        self.table_x = nn.Parameter(ckpt.get("rel_pos_w").flip(0))
        self.out = Pointwise(*ckpt.pair("proj"))

    def image(self, x):
        return x.unflatten(-1, self.grid)

    def extended(self, q, k):
        """Add to the keys where they stand, to the queries how much they like it there."""
        rows, columns = (n // self.down_q for n in self.grid)
        key_rows, key_columns = (n // self.down_kv for n in self.grid)
        square = q.unflatten(-1, (rows, columns))
        every = rows // key_rows
        likes_y = []
        for y in range(rows):
            first = len(self.table_y) - 1 - y - every * (key_rows - 1)
            seen = self.table_y[first::every][:key_rows]
            likes_y.append(torch.einsum("bhcx,kc->bhkx", square[..., y, :], seen))
        likes_x = []
        for x in range(columns):
            first = len(self.table_x) - 1 - x - every * (key_columns - 1)
            seen = self.table_x[first::every][:key_columns]
            likes_x.append(torch.einsum("bhcy,kc->bhky", square[..., x], seen))
        by_row = torch.stack(likes_y, dim=-2).flatten(-2)
        by_column = torch.stack(likes_x, dim=-1).flatten(-2)
        stands_y = torch.eye(key_rows).repeat_interleave(key_columns, dim=1)
        stands_x = torch.eye(key_columns).repeat(1, key_rows)
        stands = torch.cat([stands_y, stands_x]).expand(*k.shape[:2], -1, -1)
        q = torch.cat([q * q.shape[-2] ** -0.5, by_row, by_column], dim=-2)
        return q, torch.cat([k, stands], dim=-2)

    def forward(self, x):
        n, h = len(x), self.heads
        q = self.image(self.to_q(x))
        kernel = self.pool_q.repeat(h, 1, 1, 1)
        q = F.conv2d(q, kernel, stride=self.down_q, padding=1, groups=len(kernel))
        q = self.norm_q(q.reshape(n, h, q.shape[1] // h, -1))
        kv = self.image(self.to_kv(x))
        kernel = self.pool_kv.repeat_interleave(h, dim=0).flatten(0, 1)
        kv = F.conv2d(kv, kernel, stride=self.down_kv, padding=1, groups=len(kernel))
        k, v = kv.reshape(n, 2, h, kv.shape[1] // (2 * h), -1).unbind(1)
        k, v = self.norm_k(k), self.norm_v(v)
        long_q, long_k = (t.transpose(-1, -2) for t in self.extended(q, k))
        y = F.scaled_dot_product_attention(
            long_q, long_k, v.transpose(-1, -2), scale=1.0
        )
        y = y.transpose(-1, -2) + q
        return self.out(y.flatten(1, 2))


class Layer(nn.Module):
    def __init__(self, ckpt, grid, heads, down_q, down_kv):
        super().__init__()
        self.grid, self.down = grid, down_q
        self.ln1 = ChannelNorm(*ckpt.pair("norm1"))
        self.ln2 = ChannelNorm(*ckpt.pair("norm2"))
        self.attention = PooledAttention(
            ckpt.under("attn"), grid, heads, down_q, down_kv
        )
        wider = ckpt.has("shortcut_proj.weight")
        self.skip = Pointwise(*ckpt.pair("shortcut_proj")) if wider else None
        self.expand = Pointwise(*ckpt.pair("fc1"))
        self.contract = Pointwise(*ckpt.pair("fc2"))

    def forward(self, x):
        u = self.ln1(x)
        carried = x if self.skip is None else self.skip(u)
        if self.down > 1:
            carried = carried.unflatten(-1, self.grid)
            carried = F.max_pool2d(carried, 3, self.down, padding=1).flatten(2)
        x = carried + self.attention(u)
        u = self.expand(self.ln2(x))
        return x + self.contract(F.gelu(u))


class Network(nn.Module):
    def __init__(self, ckpt):
        super().__init__()
        self.stem, self.stem_bias = map(nn.Parameter, ckpt.pair("patch_embed"))
        grid, layers = (8, 12), []
        for i, (heads, down) in enumerate(((2, 1), (4, 2), (4, 1))):
            layers.append(Layer(ckpt.under("blocks", str(i)), grid, heads, down, 2))
            grid = grid[0] // down, grid[1] // down
        self.layers = nn.Sequential(*layers)
        self.ln = ChannelNorm(*ckpt.pair("norm"))
        self.logits = Pointwise(*ckpt.pair("head"))

    def forward(self, image):
        x = F.conv2d(image, self.stem, self.stem_bias, stride=2, padding=2)
        x = self.ln(self.layers(x.flatten(2)))
        return self.logits(x.mean(-1, keepdim=True)).squeeze(-1)


def model():
    return Network(Checkpoint(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    return net(batch["image"])


def loss(output, batch):
    logp = torch.log_softmax(output, dim=-1)
    chosen = torch.stack([batch["label"], batch["other"]], dim=-1)
    picked = logp.gather(-1, chosen)
    weight = torch.stack([batch["share"], 1 - batch["share"]], dim=-1)
    return -torch.sum(picked * weight, dim=-1).mean()


def optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, nesterov=True)
