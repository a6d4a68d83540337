"""A small MViT: attention over pooled queries, keys and values, positions by row and column."""

import torch
from torch import nn
from torch.nn import functional as F


def pooling(channels, stride):
    return nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False)


def pooled(x, size, pool, norm):
    """Pool what stands on a grid, each head on its own."""
    batch, heads, _, channels = x.shape
    x = x.reshape(batch * heads, *size, channels).permute(0, 3, 1, 2)
    x = pool(x)
    size = x.shape[2:]
    x = x.reshape(batch, heads, channels, -1).transpose(2, 3)
    return norm(x), size


def offsets(queries, keys):
    """Rows of a table of relative positions, for each query and key along an axis."""
    step_q, step_k = max(keys // queries, 1), max(queries // keys, 1)
    apart = torch.arange(queries)[:, None] * step_q - torch.arange(keys) * step_k
    return apart + (keys - 1) * step_k


class MultiScaleAttention(nn.Module):
    def __init__(self, dim, out, size, heads, stride_q, stride_kv):
        super().__init__()
        head = out // heads
        self.heads, self.scale = heads, head**-0.5
        self.qkv = nn.Linear(dim, 3 * out)
        self.proj = nn.Linear(out, out)
        self.pool_q = pooling(head, stride_q)
        self.norm_q = nn.LayerNorm(head, eps=1e-6)
        self.pool_k = pooling(head, stride_kv)
        self.norm_k = nn.LayerNorm(head, eps=1e-6)
        self.pool_v = pooling(head, stride_kv)
        self.norm_v = nn.LayerNorm(head, eps=1e-6)
        height, width = (max(n // stride_q, n // stride_kv) for n in size)
        self.rel_pos_h = nn.Parameter(torch.zeros(2 * height - 1, head))
        self.rel_pos_w = nn.Parameter(torch.zeros(2 * width - 1, head))

    def positions(self, q, size_q, size_k):
        batch, heads, _, channels = q.shape
        rows = self.rel_pos_h[offsets(size_q[0], size_k[0])]
        columns = self.rel_pos_w[offsets(size_q[1], size_k[1])]
        q = q.reshape(batch, heads, *size_q, channels)
        by_row = torch.einsum("byhwc,hkc->byhwk", q, rows)
        by_column = torch.einsum("byhwc,wkc->byhwk", q, columns)
        both = by_row[..., :, None] + by_column[..., None, :]
        return both.reshape(batch, heads, size_q.numel(), size_k.numel())

    def forward(self, x, size):
        batch, count, _ = x.shape
        qkv = self.qkv(x).reshape(batch, count, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, size_q = pooled(q, size, self.pool_q, self.norm_q)
        k, size_k = pooled(k, size, self.pool_k, self.norm_k)
        v, _ = pooled(v, size, self.pool_v, self.norm_v)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        scores = scores + self.positions(q, size_q, size_k)
        x = scores.softmax(dim=-1) @ v
        x = x + q
        return self.proj(x.transpose(1, 2).flatten(2)), size_q


class Block(nn.Module):
    def __init__(self, dim, out, size, heads, stride_q, stride_kv):
        super().__init__()
        self.stride = stride_q
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = MultiScaleAttention(dim, out, size, heads, stride_q, stride_kv)
        self.shortcut_proj = nn.Linear(dim, out) if dim != out else None
        self.norm2 = nn.LayerNorm(out, eps=1e-6)
        self.fc1 = nn.Linear(out, 2 * out)
        self.fc2 = nn.Linear(2 * out, out)

    def shortcut(self, x, normed, size):
        if self.shortcut_proj is not None:
            x = self.shortcut_proj(normed)
        if self.stride == 1:
            return x
        x = x.transpose(1, 2).unflatten(2, size)
        return F.max_pool2d(x, 3, self.stride, 1).flatten(2).transpose(1, 2)

    def forward(self, x, size):
        normed = self.norm1(x)
        attended, size_q = self.attn(normed, size)
        x = self.shortcut(x, normed, size) + attended
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)))), size_q


class MViT(nn.Module):
    def __init__(self, classes=6):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 12, 5, 2, 2)
        self.blocks = nn.ModuleList(
            [
                Block(12, 12, (8, 12), 2, 1, 2),
                Block(12, 24, (8, 12), 4, 2, 2),
                Block(24, 24, (4, 6), 4, 1, 2),
            ]
        )
        self.norm = nn.LayerNorm(24, eps=1e-6)
        self.head = nn.Linear(24, classes)

    def forward(self, x):
        x = self.patch_embed(x)
        size = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x, size = block(x, size)
        return self.head(self.norm(x).mean(1))


def model():
    torch.manual_seed(730)
    net = MViT()
    with torch.no_grad():
        for name, value in net.named_parameters():
            if "norm" in name and name.endswith("weight"):
                value.uniform_(0.6, 1.5)
            elif name.endswith("bias"):
                value.normal_(0, 0.2)
            elif "rel_pos" in name:
                value.normal_(0, 0.4)
            else:
                value.mul_(1.6)
    return net


def batches():
    generator = torch.Generator().manual_seed(731)
    return [
        {
            "image": torch.randn(3, 3, 16, 24, generator=generator),
            "label": torch.randint(0, 6, (3,), generator=generator),
            "other": torch.randint(0, 6, (3,), generator=generator),
            "share": torch.rand(3, generator=generator),
        }
    ]


def forward(net, batch):
    return net(batch["image"])


def loss(output, batch):
    one = F.cross_entropy(output, batch["label"], reduction="none")
    other = F.cross_entropy(output, batch["other"], reduction="none")
    return (batch["share"] * one + (1 - batch["share"]) * other).mean()


def optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, nesterov=True)
