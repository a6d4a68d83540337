import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class Diffusion:
    def __init__(self, steps=1000, device="cpu"):
        self.steps = steps
        betas = torch.linspace(1e-4, 0.02, steps, dtype=torch.float64)
        alphas = torch.cumprod(1 - betas, 0)
        self.sqrt_alphas = alphas.sqrt().float().to(device)
        self.sqrt_one_minus = (1 - alphas).sqrt().float().to(device)

    def noisy(self, x, t, noise):
        shape = (-1, 1, 1, 1)
        return self.sqrt_alphas[t].view(shape) * x + self.sqrt_one_minus[t].view(shape) * noise


def timestep_embedding(t, dim, max_period=10000):
    half = dim // 2
    freqs = torch.exp(-torch.arange(half, dtype=torch.float32, device=t.device) * (9.21 / half))
    args = t[:, None].float() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


class Denoiser(nn.Module):
    def __init__(self, ch=64):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(ch, ch), nn.SiLU(), nn.Linear(ch, ch))
        self.inp = nn.Conv2d(3, ch, 3, padding=1)
        self.mid = nn.Sequential(nn.GroupNorm(8, ch), nn.SiLU(), nn.Conv2d(ch, ch, 3, padding=1))
        self.out = nn.Conv2d(ch, 3, 3, padding=1)
        self.ch = ch

    def forward(self, x, t):
        emb = self.time(timestep_embedding(t, self.ch))
        h = self.inp(x) + emb[:, :, None, None]
        return self.out(h + self.mid(h))


@torch.no_grad()
def update_ema(ema, model, decay=0.999):
    for p_ema, p in zip(ema.parameters(), model.parameters()):
        p_ema.lerp_(p, 1 - decay)


def train(loader, device, epochs=100):
    model = Denoiser().to(device)
    ema = copy.deepcopy(model).requires_grad_(False)
    diffusion = Diffusion(device=device)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4)
    scaler = torch.amp.GradScaler(device)
    for epoch in range(epochs):
        for x, _ in loader:
            x = x.to(device)
            t = torch.randint(0, diffusion.steps, (x.size(0),), device=device)
            noise = torch.randn_like(x)
            with torch.autocast(device, dtype=torch.float16):
                pred = model(diffusion.noisy(x, t, noise), t)
                loss = F.mse_loss(pred.float(), noise)
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            update_ema(ema, model)
        torch.save({"ema": ema.state_dict(), "scaler": scaler.state_dict()}, "ddpm.pt")
