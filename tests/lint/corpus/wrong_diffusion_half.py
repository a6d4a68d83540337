import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def sinusoidal(t, dim):
    half = dim // 2
    freq = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float16, device=t.device) / half)  # expect: RO303
    angle = t[:, None] * freq[None]
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


class Block(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.conv = nn.Conv2d(ch, ch, 3, padding=1)
        self.norm = nn.GroupNorm(8, ch)

    def forward(self, x, emb):
        return x + F.silu(self.norm(self.conv(x) + emb[:, :, None, None]))


class Net(nn.Module):
    def __init__(self, ch=64):
        super().__init__()
        self.first = nn.Conv2d(3, ch, 1)
        self.blocks = nn.ModuleList(Block(ch) for _ in range(4))
        self.last = nn.Conv2d(ch, 3, 1)
        self.ch = ch

    def forward(self, x, t):
        emb = sinusoidal(t, self.ch)
        h = self.first(x)
        for block in self.blocks:
            h = block(h, emb)
        return self.last(h)


model = Net().cuda()
ema_model = copy.deepcopy(model).half()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
betas = torch.linspace(1e-4, 0.02, 1000, device="cuda")
alphas = (1 - betas).cumprod(0)


def ema_update(decay=0.9999):
    with torch.no_grad():
        for e, p in zip(ema_model.parameters(), model.parameters()):
            e.mul_(decay).add_(p.half(), alpha=1 - decay)  # expect: RO305


def train_step(x):
    x = x.cuda(non_blocking=True)
    t = torch.randint(0, 1000, (len(x),), device="cuda")
    a = alphas[t].view(-1, 1, 1, 1)
    noise = torch.randn_like(x)
    loss = F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema_update()
    return loss.detach()
