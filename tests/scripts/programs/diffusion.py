"""Denoising diffusion, the way of a lightning module: hooks of a small trainer, an average of weights, two schedules."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

LEVELS, SIZE, CLASSES = 20, 8, 3


def cosine_schedule(levels, offset=0.008):
    """Return how much of the signal is left at each level, squared."""
    time = torch.linspace(0, 1, levels + 1, dtype=torch.float64)
    left = torch.cos((time + offset) / (1 + offset) * math.pi / 2) ** 2
    betas = (1 - left[1:] / left[:-1]).clamp(max=0.99)
    return torch.cumprod(1 - betas, 0).float()


def embedded(level, dim):
    half = dim // 2
    rates = torch.exp(-math.log(1000.0) * torch.arange(half) / half)
    angle = level[:, None].float() * rates
    return torch.cat([angle.sin(), angle.cos()], -1)


class Block(nn.Module):
    def __init__(self, inside, outside, dim):
        super().__init__()
        self.norm = nn.GroupNorm(2, inside)
        self.first = nn.Conv2d(inside, outside, 3, padding=1)
        self.scale_shift = nn.Linear(dim, 2 * outside)
        self.normed = nn.GroupNorm(2, outside, affine=False)
        self.second = nn.Conv2d(outside, outside, 3, padding=1)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x, condition):
        h = self.first(F.silu(self.norm(x)))
        scale, shift = self.scale_shift(condition)[:, :, None, None].chunk(2, 1)
        h = self.normed(h) * (1 + scale) + shift
        return (self.skip(x) + self.second(F.silu(h))) / math.sqrt(2)


class Denoiser(nn.Module):
    def __init__(self, width=8, dim=16):
        super().__init__()
        self.dim = dim
        self.label = nn.Embedding(CLASSES + 1, dim)
        self.time = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.down = Block(width, 2 * width, dim)
        self.middle = Block(2 * width, 2 * width, dim)
        self.up = Block(3 * width, width, dim)
        self.leave = nn.Conv2d(width, 1, 3, padding=1)
        nn.init.normal_(self.leave.weight, std=0.02)

    def forward(self, x, level, label):
        condition = F.silu(self.time(embedded(level, self.dim)) + self.label(label))
        high = self.enter(x)
        low = F.avg_pool2d(high, 2)
        low = self.middle(self.down(low, condition), condition)
        back = F.interpolate(low, scale_factor=2, mode="nearest")
        return self.leave(F.silu(self.up(torch.cat([high, back], 1), condition)))


class Pictures(torch.utils.data.Dataset):
    """Stripes of three directions."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(700 + index)
        label = index % CLASSES
        rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        along = (rows, columns, rows + columns)[label]
        phase = 2 * math.pi * torch.rand((), generator=g)
        return torch.sin(along * math.pi / 3 + phase)[None], label


class DiffusionModule(nn.Module):
    def __init__(self, rate=4e-3, keep=0.9, drop_label=0.25, gamma=5.0):
        super().__init__()
        torch.manual_seed(12)
        self.net = Denoiser()
        self.average = copy.deepcopy(self.net).eval().requires_grad_(False)
        self.rate, self.keep, self.drop_label, self.gamma = rate, keep, drop_label, gamma
        left = cosine_schedule(LEVELS)
        self.register_buffer("signal", left.sqrt())
        self.register_buffer("noise", (1 - left).sqrt())
        self.register_buffer("ratio", left / (1 - left))
        self.draw = torch.Generator().manual_seed(33)

    def training_step(self, batch, number):
        picture, label = batch
        level = torch.randint(LEVELS, (len(picture),), generator=self.draw)
        noise = torch.randn(picture.shape, generator=self.draw)
        unlabelled = torch.rand(len(label), generator=self.draw) < self.drop_label
        label = torch.where(unlabelled, CLASSES, label)
        signal = self.signal[level].view(-1, 1, 1, 1)
        strength = self.noise[level].view(-1, 1, 1, 1)
        noisy = signal * picture + strength * noise
        velocity = signal * noise - strength * picture
        predicted = self.net(noisy, level, label)
        error = (predicted - velocity).pow(2).mean((1, 2, 3))
        ratio = self.ratio[level]
        weight = ratio.clamp(max=self.gamma) / (ratio + 1)
        return (weight * error).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.RAdam(
            self.net.parameters(), lr=self.rate, betas=(0.9, 0.98), weight_decay=1e-3, decoupled_weight_decay=True
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3 * self.rate, total_steps=10)
        return optimizer, schedule

    def on_after_backward(self):
        for value in self.net.parameters():
            value.grad.nan_to_num_(0.0)
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.02)

    @torch.no_grad()
    def on_train_batch_end(self):
        for slow, fast in zip(self.average.parameters(), self.net.parameters()):
            slow.lerp_(fast, 1 - self.keep)

    @torch.no_grad()
    def validation_step(self, batch):
        picture, label = batch
        level = torch.full((len(picture),), LEVELS // 2)
        noisy = self.signal[level].view(-1, 1, 1, 1) * picture
        return self.average(noisy, level, label).pow(2).mean().item()


class Trainer:
    def __init__(self, max_steps):
        self.max_steps = max_steps

    def fit(self, module, loader):
        optimizer, schedule = module.configure_optimizers()
        module.net.train()
        for number, batch in zip(range(self.max_steps), loader):
            loss = module.training_step(batch, number)
            optimizer.zero_grad()
            loss.backward()
            module.on_after_backward()
            optimizer.step()
            schedule.step()
            module.on_train_batch_end()
            print(f"{number} {loss.item():.5f} {module.validation_step(batch):.5f}")


loader = torch.utils.data.DataLoader(
    Pictures(), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(5)
)
Trainer(max_steps=3).fit(DiffusionModule(), loader)
