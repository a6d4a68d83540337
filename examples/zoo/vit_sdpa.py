"""An audio-spectrogram-like transformer: einsum patches, scaled_dot_product_attention."""

import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    """One projection each for query, key and value; the token count comes from the input."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def split(self, x):
        b, t, c = x.size()
        return x.view(b, t, self.heads, c // self.heads).transpose(1, 2)

    def forward(self, x):
        y = self.ln1(x)
        q, k, v = self.split(self.q(y)), self.split(self.k(y)), self.split(self.v(y))
        y = F.scaled_dot_product_attention(q, k, v)
        y = y.transpose(1, 2).contiguous().view(x.size(0), x.size(1), x.size(2))
        x = x + self.out(y)
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate="tanh"))


class SpectrogramTransformer(nn.Module):
    def __init__(self, bins=16, width=32, layers=2, classes=4):
        super().__init__()
        self.proj = nn.Linear(bins * 2, width)
        self.register_buffer("position", torch.randn(1, 64, width) * 0.02)
        self.layers = nn.Sequential(*[Encoder(width, 4) for _ in range(layers)])
        self.head = nn.Linear(width, classes)

    def forward(self, spectrogram):
        b, bins, frames = spectrogram.shape
        pairs = spectrogram.view(b, bins, frames // 2, 2)
        patches = torch.einsum("bftp->btfp", pairs).flatten(2)
        x = self.proj(patches) + self.position[:, : frames // 2]
        x = self.layers(x)
        return self.head(x.mean(dim=1))


def sounds(count, seed):
    """Log spectrograms with a rising, falling, steady or no tone."""
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 4, (count,), generator=g)
    start = torch.rand(count, 1, 1, generator=g) * 6 + 4
    slope = torch.tensor([0.2, -0.2, 0.0, 0.0])[label].view(-1, 1, 1)
    ridge = start + slope * torch.arange(32) - torch.arange(16.0)[:, None]
    tone = torch.exp(-(ridge**2)) * (label != 3).view(-1, 1, 1)
    noise = 0.1 * torch.rand(count, 16, 32, generator=g)
    return torch.log(tone + noise + 1e-3), label


def model():
    torch.manual_seed(4)
    net = SpectrogramTransformer()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for step in range(60):
        x, y = sounds(32, 100 + step)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net.eval()


def batches():
    return [sounds(32, seed)[0] for seed in range(6)]


def held_out():
    return [sounds(32, seed)[0] for seed in range(20, 24)]
