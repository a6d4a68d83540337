"""A diffusion transformer of mixer blocks: adaLN shifts, scales and gates by time and class."""

import torch
import torch.nn as nn
from sklearn.datasets import load_digits


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class MixerBlock(nn.Module):
    """Mixes tokens, then channels; both branches are modulated by the condition."""

    def __init__(self, tokens, width):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.token_mlp = nn.Sequential(
            nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens)
        )
        self.channel_mlp = nn.Sequential(
            nn.Linear(width, 2 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(2 * width, width),
        )
        self.adaLN = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN(c).chunk(6, dim=1)
        h = modulate(self.norm1(x), shift1, scale1).transpose(1, 2)
        x = x + gate1.unsqueeze(1) * self.token_mlp(h).transpose(1, 2)
        h = self.channel_mlp(modulate(self.norm2(x), shift2, scale2))
        return x + gate2.unsqueeze(1) * h


class DiT(nn.Module):
    def __init__(self, width=48, depth=3):
        super().__init__()
        self.embed = nn.Conv2d(1, width, 2, stride=2)
        self.time = nn.Sequential(
            nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.label = nn.Embedding(10, width)
        self.blocks = nn.ModuleList([MixerBlock(16, width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.final = nn.Linear(width, 4)

    def unpatchify(self, x):
        n = x.shape[0]
        x = x.reshape(n, 4, 4, 2, 2, 1)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(n, 1, 8, 8)

    def forward(self, x, t, y):
        x = self.embed(x).flatten(2).transpose(1, 2)
        c = self.time(t[:, None]) + self.label(y)
        for block in self.blocks:
            x = block(x, c)
        return self.unpatchify(self.final(self.norm(x)))


def interpolants(count, seed):
    """Points between noise and a digit, the time, the class; and the velocity there."""
    digits = load_digits()
    g = torch.Generator().manual_seed(seed)
    pick = torch.randint(0, 1797, (count,), generator=g)
    image = torch.tensor(digits.images, dtype=torch.float32)[pick, None] / 8 - 1
    noise = torch.randn(image.shape, generator=g)
    t = torch.rand(count, generator=g)
    x = torch.lerp(noise, image, t.view(-1, 1, 1, 1))
    return (x, t, torch.tensor(digits.target)[pick]), image - noise


def model():
    torch.manual_seed(0)
    net = DiT()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for step in range(70):
        inputs, velocity = interpolants(32, 500 + step)
        optimizer.zero_grad()
        (net(*inputs) - velocity).pow(2).mean().backward()
        optimizer.step()
    return net.eval()


def batches():
    return [interpolants(16, seed)[0] for seed in range(6)]


def held_out():
    return [interpolants(16, seed)[0] for seed in range(50, 54)]
