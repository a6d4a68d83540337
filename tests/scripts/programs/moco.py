"""Momentum contrast on small tiles of satellite images, from a stem that was trained before.

Norms see half a batch each, as on the two cards that the recipe was tuned on; keys are
shuffled between the halves, so that no statistics give away which key belongs to a query.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    seed: int = 5
    tiles: int = 96
    side: int = 16
    batch: int = 16
    cards: int = 2
    steps: int = 3
    width: int = 16
    dim: int = 12
    queue: int = 48
    temperature: float = 0.2
    follow: float = 0.9
    lr: float = 0.12
    warmup: int = 2
    horizon: int = 40
    momentum: float = 0.9
    decay: float = 0.05
    grey: float = 0.3
    jitter: float = 0.4


cfg = Config()


# ------------------------------------------------------------------ tiles and views


def make_tiles(n, side, rng):
    """Fields, water and roads as bytes [n, 3, side, side], and what each of them is."""
    kind = torch.randint(3, (n,), generator=rng)
    base = torch.tensor([[0.35, 0.5, 0.2], [0.1, 0.25, 0.5], [0.5, 0.45, 0.4]])[kind]
    ramp = torch.linspace(-1, 1, side)
    angle = math.pi * torch.rand(n, 1, 1, generator=rng)
    along = ramp[:, None] * angle.cos() + ramp[None, :] * angle.sin()
    stripes = torch.sin(along * (4.0 + 5.0 * kind[:, None, None]))
    tint = 0.3 * torch.rand(n, 3, 1, 1, generator=rng)
    tiles = base[:, :, None, None] + tint * stripes[:, None]
    tiles = tiles + 0.05 * torch.randn(n, 3, side, side, generator=rng)
    return (tiles.clamp(0, 1) * 255).byte(), kind


def shift(images, rng, most=2):
    """Each image is cut out of itself, mirrored at the borders, at a place of its own."""
    n, _, side, _ = images.shape
    padded = F.pad(images, (most,) * 4, mode="reflect")
    offsets = torch.randint(2 * most + 1, (2, n, 1), generator=rng)
    rows = offsets[0] + torch.arange(side)
    cols = offsets[1] + torch.arange(side)
    which = torch.arange(n)[:, None, None]
    return padded.transpose(1, 3)[which, cols[:, :, None], rows[:, None, :]].transpose(1, 3)


def view(tiles, rng):
    """One random view of each tile, with values from nought to one."""
    images = tiles.float() / 255
    n = len(images)
    images = shift(images, rng)
    mirrored = torch.rand(n, generator=rng) < 0.5
    images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
    contrast = 1 + cfg.jitter * (2 * torch.rand(n, 1, 1, 1, generator=rng) - 1)
    light = cfg.jitter * (torch.rand(n, 3, 1, 1, generator=rng) - 0.5)
    mean = images.mean((1, 2, 3), keepdim=True)
    images = (images - mean) * contrast + mean + light
    grey = torch.rand(n, generator=rng) < cfg.grey
    luma = (images * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, True)
    return torch.where(grey[:, None, None, None], luma, images)


def batches(tiles, size, rng):
    """Pairs of views, epoch after epoch."""
    while True:
        order = torch.randperm(len(tiles), generator=rng)
        for rows in order.split(size):
            if len(rows) == size:
                yield view(tiles[rows], rng), view(tiles[rows], rng)


# ------------------------------------------------------------------ kernels


class Unit(torch.autograd.Function):
    """Rows of length one."""

    @staticmethod
    def forward(ctx, x):
        length = x.norm(dim=1, keepdim=True).clamp(min=1e-8)
        y = x / length
        ctx.save_for_backward(y, length)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, length = ctx.saved_tensors
        along = (grad * y).sum(1, keepdim=True)
        return (grad - along * y) / length


class InfoNCE(torch.autograd.Function):
    """Mean loss of queries [n, d] for their keys [n, d] among negatives [d, k].

    Keys and negatives are constants: there is a gradient for the queries alone.
    """

    @staticmethod
    def forward(ctx, query, key, negatives, temperature):
        own = (query * key).sum(1, keepdim=True)
        logits = torch.cat([own, query @ negatives], 1) / temperature
        top = logits.logsumexp(1)
        share = (logits - top[:, None]).exp()
        ctx.save_for_backward(share, key, negatives)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(share)
        return (top - logits[:, 0]).mean(), share

    @staticmethod
    def backward(ctx, grad, _):
        share, key, negatives = ctx.saved_tensors
        pull = (share[:, :1] - 1) * key
        push = share[:, 1:] @ negatives.T
        slope = (pull + push) / (ctx.temperature * len(key))
        return grad * slope, None, None, None


# ------------------------------------------------------------------ model


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x):
        h = F.relu(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        return F.relu(x + h)


class Encoder(nn.Module):
    def __init__(self, width, dim):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, 1, 1))
        self.register_buffer("std", torch.ones(3, 1, 1))
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.block = Block(width)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.hidden = nn.Linear(2 * width, 2 * width)
        self.out = nn.Linear(2 * width, dim)

    def features(self, x):
        h = self.stem((x - self.mean) / self.std)
        h = F.max_pool2d(F.relu(self.norm(h)), 2)
        h = F.relu(self.down(self.block(h)))
        return h.mean((2, 3))

    def forward(self, x):
        return self.out(F.relu(self.hidden(self.features(x))))


class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = Encoder(cfg.width, cfg.dim)
        self.key = Encoder(cfg.width, cfg.dim).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(cfg.dim, cfg.queue), dim=0))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def follow(self):
        for k, q in zip(self.key.parameters(), self.query.parameters(), strict=True):
            k.mul_(cfg.follow).add_(q, alpha=1 - cfg.follow)

    @torch.no_grad()
    def enqueue(self, keys):
        start = int(self.place)
        self.queue[:, start : start + len(keys)] = keys.T
        self.place.fill_((start + len(keys)) % cfg.queue)

    @torch.no_grad()
    def keys(self, images, rng):
        order = torch.randperm(len(images), generator=rng)
        parts = images[order].chunk(cfg.cards)
        mixed = torch.cat([self.key(part) for part in parts])
        back = order.argsort()
        return Unit.apply(mixed[back])

    def queries(self, images):
        parts = images.chunk(cfg.cards)
        return Unit.apply(torch.cat([self.query(part) for part in parts]))


def earlier_stem():
    """The stem of the supervised run, in the layout of its framework: [h, w, in, out]."""
    rng = torch.Generator().manual_seed(77)
    saved = {"stem/kernel": 0.3 * torch.randn(3, 3, 3, cfg.width, generator=rng)}
    saved["stem/scale"] = 0.5 + torch.rand(cfg.width, generator=rng)
    saved["stem/offset"] = 0.1 * torch.randn(cfg.width, generator=rng)
    saved["pixels/mean"] = torch.tensor([0.30, 0.41, 0.37])
    saved["pixels/variance"] = torch.tensor([0.061, 0.032, 0.048])
    return saved


@torch.no_grad()
def adopt(encoder, saved):
    encoder.stem.weight.copy_(saved["stem/kernel"].permute(3, 2, 0, 1))
    encoder.norm.weight.copy_(saved["stem/scale"])
    encoder.norm.bias.copy_(saved["stem/offset"])
    encoder.mean.copy_(saved["pixels/mean"].view(3, 1, 1))
    encoder.std.copy_(saved["pixels/variance"].sqrt().view(3, 1, 1))


# ------------------------------------------------------------------ training


def rate(step):
    """Linear warm-up, then half a cosine."""
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / (cfg.warmup + 1)
    done = (step - cfg.warmup) / (cfg.horizon - cfg.warmup)
    return cfg.lr * 0.5 * (1 + math.cos(math.pi * done))


def groups_of(encoder):
    """Weights of layers are decayed; norms and biases are not."""
    weights, others = [], []
    for p in encoder.parameters():
        (weights if p.ndim > 1 else others).append(p)
    return [
        {"params": weights, "weight_decay": cfg.decay},
        {"params": others, "weight_decay": 0.0},
    ]


@torch.no_grad()
def neighbours(encoder, tiles, kind):
    """Share of tiles whose nearest other tile is of the same kind."""
    encoder.eval()
    h = F.normalize(encoder.features(tiles.float() / 255), dim=1)
    near = (h @ h.T).fill_diagonal_(-1.0).argmax(1)
    return (kind[near] == kind).float().mean().item()


def main():
    torch.manual_seed(cfg.seed)
    rng = torch.Generator().manual_seed(cfg.seed + 1)
    tiles, kind = make_tiles(cfg.tiles, cfg.side, rng)
    model = MoCo()
    adopt(model.query, earlier_stem())
    model.key.load_state_dict(model.query.state_dict())
    groups = groups_of(model.query)
    opt = torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum, nesterov=True)
    stream = batches(tiles, cfg.batch, rng)
    model.train()
    for step in range(cfg.steps):
        for group in opt.param_groups:
            group["lr"] = rate(step)
        first, second = next(stream)
        query = model.queries(first)
        model.follow()
        key = model.keys(second, rng)
        loss, share = InfoNCE.apply(query, key, model.queue.clone(), cfg.temperature)
        opt.zero_grad()
        loss.backward()
        opt.step()
        model.enqueue(key)
        hit = (share.argmax(1) == 0).float().mean()
        print(f"step {step} loss {loss.item():.5f} found {hit.item():.3f}")
    print(f"neighbours of the same kind {neighbours(model.query, tiles, kind):.3f}")


if __name__ == "__main__":
    main()
