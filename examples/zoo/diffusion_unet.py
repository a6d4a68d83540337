"""The noise predictor of a diffusion model: time embedding, GroupNorm, SiLU, attention."""

import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


def timestep_embedding(t, dim):
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half)
    args = t[:, None].float() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, cin, cout, temb):
        super().__init__()
        self.norm1 = nn.GroupNorm(4, cin)
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.temb = nn.Linear(temb, cout)
        self.norm2 = nn.GroupNorm(4, cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.temb(F.silu(emb))[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return self.skip(x) + h


class AttnBlock(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.norm = nn.GroupNorm(4, ch)
        self.qkv = nn.Conv2d(ch, 3 * ch, 1)
        self.proj = nn.Conv2d(ch, ch, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, c, h * w).unbind(1)
        weight = torch.bmm(q.transpose(1, 2), k) * c**-0.5
        out = torch.bmm(v, weight.softmax(-1).transpose(1, 2)).reshape(b, c, h, w)
        return x + self.proj(out)


class UNet(nn.Module):
    def __init__(self, ch=16, temb=32):
        super().__init__()
        self.ch = ch
        self.time = nn.Sequential(nn.Linear(ch, temb), nn.SiLU(), nn.Linear(temb, temb))
        self.conv_in = nn.Conv2d(1, ch, 3, padding=1)
        self.down1 = ResBlock(ch, ch, temb)
        self.pool = nn.Conv2d(ch, ch, 3, stride=2, padding=1)
        self.down2 = ResBlock(ch, 2 * ch, temb)
        self.attn = AttnBlock(2 * ch)
        self.mid = ResBlock(2 * ch, 2 * ch, temb)
        self.up1 = ResBlock(3 * ch, ch, temb)
        self.norm_out = nn.GroupNorm(4, ch)
        self.conv_out = nn.Conv2d(ch, 1, 3, padding=1)

    def forward(self, x, t):
        emb = self.time(timestep_embedding(t, self.ch))
        h1 = self.down1(self.conv_in(x), emb)
        h = self.down2(self.pool(h1), emb)
        h = self.mid(self.attn(h), emb)
        h = F.interpolate(h, scale_factor=2.0, mode="nearest")
        h = self.up1(torch.cat([h, h1], dim=1), emb)
        return self.conv_out(F.silu(self.norm_out(h)))


def noisy(count, seed):
    g = torch.Generator().manual_seed(seed)
    digits = torch.tensor(load_digits().images, dtype=torch.float32) / 8 - 1
    pick = torch.randint(0, len(digits), (count,), generator=g)
    t = torch.randint(0, 1000, (count,), generator=g)
    noise = torch.randn(count, 1, 8, 8, generator=g)
    kept = torch.cos(t / 1000 * math.pi / 2)[:, None, None, None]
    return kept * digits[pick, None] + (1 - kept**2).sqrt() * noise, t, noise


def model():
    torch.manual_seed(0)
    net = UNet()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for step in range(60):
        x, t, noise = noisy(32, 500 + step)
        opt.zero_grad()
        F.mse_loss(net(x, t), noise).backward()
        opt.step()
    return net.eval()


def batches():
    return [noisy(16, seed)[:2] for seed in range(6)]


def held_out():
    return [noisy(16, seed)[:2] for seed in range(50, 54)]
