"""Tables: numbers as periodic features, categories by offsets, a transformer over columns."""

import math

import torch
from torch import nn
from torch.nn import functional as F

SIZES, NUMBERS, WAVES, WIDTH, HEADS = (4, 6, 3), 4, 3, 12, 2


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.waves = nn.Parameter(torch.randn(NUMBERS, WAVES) * 0.8)
        self.number = nn.Parameter(torch.randn(NUMBERS, 2 * WAVES, WIDTH) * 0.3)
        self.number_bias = nn.Parameter(torch.randn(NUMBERS, WIDTH) * 0.3)
        self.kinds = nn.Embedding(sum(SIZES), WIDTH)
        self.kind_bias = nn.Parameter(torch.randn(len(SIZES), WIDTH) * 0.3)
        offsets = torch.tensor([0, *SIZES[:-1]]).cumsum(0)
        self.register_buffer("offsets", offsets)
        self.cls = nn.Parameter(torch.randn(WIDTH) * 0.3)

    def forward(self, numbers, kinds, missing):
        angle = 2 * math.pi * self.waves * numbers[..., None]
        waves = torch.cat([angle.cos(), angle.sin()], -1)
        x = F.relu((waves[..., None, :] @ self.number).squeeze(-2) + self.number_bias)
        x = x.masked_fill(missing[..., None], 0)
        y = self.kinds(kinds + self.offsets) + self.kind_bias
        cls = self.cls.expand(len(x), 1, -1)
        return torch.cat([cls, x, y], 1)


class Block(nn.Module):
    def __init__(self, is_first):
        super().__init__()
        self.norm1 = nn.Identity() if is_first else nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, keep):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        mask = keep[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        a, b = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(a * F.relu(b))


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = Tokens()
        self.blocks = nn.ModuleList([Block(True), Block(False)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, numbers, kinds, missing):
        x = self.tokens(numbers, kinds, missing)
        kept = torch.ones(len(x), 1 + NUMBERS + len(SIZES), dtype=torch.bool)
        kept[:, 1 : 1 + NUMBERS] = ~missing
        for block in self.blocks:
            x = block(x, kept)
        return self.head(F.relu(self.norm(x[:, 0])))


def model():
    torch.manual_seed(430)
    net = Table()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Linear):
                module.weight.mul_(1.8)
                module.bias.normal_(0, 0.2)
    return net


def batches():
    generator = torch.Generator().manual_seed(431)
    numbers = torch.randn(10, 4, generator=generator)
    kinds = torch.stack(
        [torch.randint(n, (10,), generator=generator) for n in (4, 6, 3)], 1
    )
    missing = torch.rand(10, 4, generator=generator) < 0.25
    label = torch.randint(4, (10,), generator=generator)
    return [{"numbers": numbers, "kinds": kinds, "missing": missing, "label": label}]


def forward(net, batch):
    return net(batch["numbers"], batch["kinds"], batch["missing"])


def loss(output, batch):
    weights = torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=output.dtype)
    each = F.cross_entropy(
        output, batch["label"], weight=weights, label_smoothing=0.1, reduction="none"
    )
    sure = output.softmax(-1).gather(1, batch["label"][:, None])[:, 0]
    focal = (1 - sure) ** 2 * each
    return focal.sum() / weights[batch["label"]].sum() + 1e-3 * output.square().mean()


def optimizer(net):
    plain = [p for n, p in net.named_parameters() if p.ndim < 2 or "bias" in n]
    decayed = [p for n, p in net.named_parameters() if p.ndim >= 2 and "bias" not in n]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.05)
