"""Pictures with most patches hidden are completed; half precision with a scaler."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

CONFIG = dict(
    side=12, patch=3, dim=24, heads=3, depth=2, hidden=0.5, lr=4e-3, clip=0.3, warm=3
)


def patches_of(pictures, patch):
    n, c, h, w = pictures.shape
    cut = pictures.reshape(n, c, h // patch, patch, w // patch, patch)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(n, -1, patch * patch * c)


def grid_of(side, dim):
    """Sines of the row in the first half, of the column in the second."""
    row, column = np.mgrid[:side, :side].reshape(2, -1)
    rate = 1 / 50 ** (np.arange(dim // 4) / (dim // 4))
    waves = [f(np.outer(axis, rate)) for axis in (row, column) for f in (np.sin, np.cos)]
    return torch.from_numpy(np.concatenate(waves, 1).astype("f4"))


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        n, length, dim = x.shape
        qkv = self.qkv(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv)
        return self.proj(mixed.transpose(1, 2).reshape(n, length, dim))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.gamma = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, x):
        x = x + self.gamma * self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Masked(nn.Module):
    def __init__(self, side, patch, dim, heads, depth, hidden, **_):
        super().__init__()
        self.patch, self.hidden = patch, hidden
        inside = patch * patch * 3
        self.enter = nn.Linear(inside, dim)
        self.register_buffer("grid", grid_of(side // patch, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.gap = nn.Parameter(torch.zeros(dim))
        self.decode = Block(dim, heads)
        self.leave = nn.Linear(dim, inside)

    def forward(self, pictures, noise):
        goal = patches_of(pictures, self.patch)
        order = noise.argsort(1)
        back = order.argsort(1)
        shown = int(goal.shape[1] * (1 - self.hidden))
        x = self.enter(goal) + self.grid
        x = x.gather(1, order[:, :shown, None].expand(-1, -1, x.shape[-1]))
        for block in self.blocks:
            x = block(x)
        gaps = self.gap.expand(len(x), goal.shape[1] - shown, -1)
        x = torch.cat([x, gaps.to(x.dtype)], 1)
        x = x.gather(1, back[..., None].expand(-1, -1, x.shape[-1])) + self.grid
        guess = self.leave(self.decode(x))
        return self.loss(guess.float(), goal, back >= shown)

    def loss(self, guess, goal, hidden):
        mean, var = goal.mean(-1, keepdim=True), goal.var(-1, keepdim=True)
        goal = (goal - mean) / (var + 1e-2).sqrt()
        each = (guess - goal).square().mean(-1)
        return (each * hidden).sum() / hidden.sum()


def pictures(count, side, seed):
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:side, :side] / side
    wave = rng.uniform(1, 6, (count, 3, 2, 1, 1))
    clean = np.sin(wave[:, :, 0] * x + wave[:, :, 1] * y)
    noisy = clean + 0.1 * rng.standard_normal(clean.shape)
    return torch.from_numpy((255 * (noisy + 1) / 2).clip(0, 255).astype("uint8"))


class Trainer:
    def __init__(self, config):
        self.config = config
        torch.manual_seed(17)
        self.model = Masked(**config)
        self.load()
        decay = [p for p in self.model.parameters() if p.ndim > 1]
        free = [p for p in self.model.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.05}, {"params": free, "weight_decay": 0}],
            lr=config["lr"],
            betas=(0.9, 0.95),
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.warmth)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=1)

    def warmth(self, step):
        return min(1.0, (step + 1) / self.config["warm"])

    def load(self):
        source = torch.Generator().manual_seed(23)
        saved = {}
        for name, value in self.model.state_dict().items():
            wobble = 0.1 * torch.randn(value.shape, generator=source)
            saved["encoder." + name] = value + wobble
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(saved["encoder." + name])

    def batches(self, steps, size=8):
        raw = pictures(steps * size, self.config["side"], seed=3)
        for batch in raw.split(size):
            yield (batch.float() / 255 - 0.5) / 0.25

    def step(self, batch):
        patches = (self.config["side"] // self.config["patch"]) ** 2
        noise = torch.rand(len(batch), patches)
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = self.model(batch, noise)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config["clip"])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return loss.item()

    def fit(self, steps):
        for number, batch in enumerate(self.batches(steps)):
            print(f"step={number} loss={self.step(batch):.5f}")


Trainer(CONFIG).fit(3)
