"""Windows of an image that attend to themselves, shifted in every second block."""

import torch
from torch import nn
from torch.nn import functional as F

WINDOW = 4


def windows(x):
    b, h, w, c = x.shape
    x = x.view(b, h // WINDOW, WINDOW, w // WINDOW, WINDOW, c)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, WINDOW * WINDOW, c)


def image(x, h, w):
    c = x.shape[-1]
    x = x.view(-1, h // WINDOW, w // WINDOW, WINDOW, WINDOW, c)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, h, w, c)


class WindowAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.table = nn.Parameter(torch.randn((2 * WINDOW - 1) ** 2, heads) * 0.3)
        grid = torch.stack(
            torch.meshgrid(torch.arange(WINDOW), torch.arange(WINDOW), indexing="ij")
        ).flatten(1)
        apart = grid[:, :, None] - grid[:, None, :] + WINDOW - 1
        self.register_buffer("index", apart[0] * (2 * WINDOW - 1) + apart[1])

    def forward(self, x, mask):
        n, t, c = x.shape
        qkv = self.qkv(x).view(n, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1)
        scores = scores + self.table[self.index].permute(2, 0, 1)
        if mask is not None:
            parts = mask.shape[0]
            scores = scores.view(n // parts, parts, self.heads, t, t)
            scores = (scores + mask[:, None]).view(n, self.heads, t, t)
        x = (scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, c)
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, dim, heads, shift):
        super().__init__()
        self.shift = shift
        self.norm1 = nn.LayerNorm(dim)
        self.attention = WindowAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)

    def mask(self, h, w):
        region = torch.zeros(1, h, w, 1)
        stretches = (slice(0, -WINDOW), slice(-WINDOW, -2), slice(-2, None))
        for i, rows in enumerate(stretches):
            for j, columns in enumerate(stretches):
                region[:, rows, columns] = 3 * i + j
        region = windows(region).squeeze(-1)
        apart = region[:, None, :] != region[:, :, None]
        return torch.zeros(apart.shape).masked_fill(apart, -100.0)

    def forward(self, x):
        h, w = x.shape[1:3]
        y = self.norm1(x)
        mask = None
        if self.shift:
            y = torch.roll(y, (-2, -2), (1, 2))
            mask = self.mask(h, w)
        y = image(self.attention(windows(y), mask), h, w)
        if self.shift:
            y = torch.roll(y, (2, 2), (1, 2))
        x = x + y
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Swin(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 12, 2, stride=2)
        self.norm0 = nn.LayerNorm(12)
        self.blocks = nn.ModuleList([Block(12, 3, False), Block(12, 3, True)])
        self.merge_norm = nn.LayerNorm(48)
        self.merge = nn.Linear(48, 16, bias=False)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 6)

    def forward(self, x):
        x = self.norm0(self.patch(x).permute(0, 2, 3, 1))
        for block in self.blocks:
            x = block(x)
        parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        x = self.merge(self.merge_norm(torch.cat(parts, -1)))
        return self.head(self.norm(x).mean((1, 2)))


def model():
    torch.manual_seed(20)
    net = Swin()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
    return net


def batches():
    generator = torch.Generator().manual_seed(21)
    x = torch.randn(3, 3, 16, 16, generator=generator)
    y = torch.randint(0, 6, (3,), generator=generator)
    return [{"x": x, "y": y}]


def forward(net, batch):
    return net(batch["x"])


def loss(output, batch):
    return F.cross_entropy(output, batch["y"])


def optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-3)
