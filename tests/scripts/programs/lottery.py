"""A lottery ticket for a plankton counter: prune by magnitude, rewind, train again.

The camera of the flow cell sees two bands; a small network tells what drifts by, and
where. An earlier run left its state at an early iteration: all levels begin from there.
"""

import copy
import logging
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset


@dataclass(frozen=True)
class DataHparams:
    seed: int = 61
    images: int = 126
    size: tuple[int, int] = (18, 26)
    batch: int = 15
    noise: float = 0.15


@dataclass(frozen=True)
class TrainHparams:
    lr: float = 0.3
    momentum: float = 0.9
    decay: float = 2e-2
    warmup: int = 6
    milestones: tuple[int, ...] = (7, 9)
    gamma: float = 0.2
    clip: float = 1.0
    accumulate: int = 2
    smoothing: float = 0.15
    place: float = 0.8
    thrift: float = 0.05
    prune: float = 0.3
    steps: tuple[int, ...] = (1, 2, 2)  # of each level


DATA, TRAIN = DataHparams(), TrainHparams()
KINDS = ("disc", "ring", "rod", "star", "chain")
SHARES = (0.36, 0.26, 0.18, 0.12, 0.08)
LR_THEN, EARLY = 0.2, 3  # of the earlier run


def grid(height: int, width: int) -> torch.Tensor:
    """Places across and down, from -1 to 1, as [2, height, width]."""
    down, across = torch.linspace(-1, 1, height), torch.linspace(-1, 1, width)
    return torch.stack(torch.meshgrid(across, down, indexing="xy"))


def plankton(hp: DataHparams, gen: torch.Generator) -> TensorDataset:
    """Bytes as the camera keeps them, [height, width, band], the kind and the place."""
    kind = torch.multinomial(torch.tensor(SHARES), hp.images, True, generator=gen)
    place = 1.2 * torch.rand(hp.images, 2, generator=gen) - 0.6
    turn = math.pi * torch.rand(hp.images, 1, 1, generator=gen)
    half = torch.tensor(hp.size[::-1]) / 2
    spots = half[:, None, None] * grid(*hp.size)
    x, y = (spots - (half * place)[:, :, None, None]).unbind(1)
    u, v = turn.cos() * x + turn.sin() * y, turn.cos() * y - turn.sin() * x
    r, star = (u**2 + v**2).sqrt(), torch.cos(5 * torch.atan2(v, u))
    rod = torch.exp(-((u / 5) ** 2) - (v / 1.4) ** 2)
    ring = torch.exp(-(((r - 4) / 1.3) ** 2))
    star = torch.exp(-((r / (2.6 + 1.8 * star)) ** 2))
    looks = [torch.exp(-((r / 3.2) ** 2)), ring, rod, star, rod * torch.cos(u) ** 2]
    shape = torch.stack(looks)[kind, torch.arange(hp.images)]
    glow = 0.2 + 0.15 * kind[:, None, None]
    light = torch.stack([0.1 + 0.8 * shape, 0.3 + glow * shape * (1 - y / 40)], 3)
    light = light + 0.05 * torch.randn(light.shape, generator=gen)
    return TensorDataset((255 * light).round().clamp(0, 255).byte(), kind, place)


class Endless(Sampler):
    """Batches of rows without end; what an epoch leaves over opens the next batch."""

    def __init__(self, rows: int, batch: int, gen: torch.Generator):
        self.rows, self.batch, self.gen = rows, batch, gen

    def __iter__(self):
        left = []
        while True:
            while len(left) < self.batch:
                left += torch.randperm(self.rows, generator=self.gen).tolist()
            yield left[: self.batch]
            left = left[self.batch :]


class Collate:
    """Floats of unit spread; half of the images mirrored; some noise."""

    def __init__(self, coded, noise: float, gen: torch.Generator):
        light = coded.float() / 255
        self.mean, self.std = light.mean((0, 1, 2)), light.std((0, 1, 2))
        self.noise, self.gen = noise, gen

    def __call__(self, rows):
        images, kinds, places = (torch.stack(part) for part in zip(*rows, strict=True))
        x = ((images.float() / 255 - self.mean) / self.std).permute(0, 3, 1, 2)
        mirrored = torch.rand(len(x), generator=self.gen) < 0.5
        x = torch.where(mirrored[:, None, None, None], x.flip(3), x)
        places[:, 0] = torch.where(mirrored, -places[:, 0], places[:, 0])
        x = x + self.noise * torch.randn(x.shape, generator=self.gen)
        return x, kinds, places


class Standardise(torch.autograd.Function):
    """Filters of mean zero and unit norm, counting the weights that are kept."""

    @staticmethod
    def forward(ctx, weight, mask, eps):
        count = mask.sum((1, 2, 3), keepdim=True).clamp(min=1)
        mean = (weight * mask).sum((1, 2, 3), keepdim=True) / count
        centred = (weight - mean) * mask
        inv = (centred.square().sum((1, 2, 3), keepdim=True) / count + eps).rsqrt()
        out = centred * inv
        ctx.save_for_backward(out, mask, inv, count)
        return out * count.rsqrt()

    @staticmethod
    def backward(ctx, grad):
        out, mask, inv, count = ctx.saved_tensors
        grad = grad * mask * count.rsqrt()
        shift = grad.sum((1, 2, 3), keepdim=True) / count
        slope = (grad * out).sum((1, 2, 3), keepdim=True) / count
        return inv * (grad - shift - out * slope) * mask, None, None


class StdConv(nn.Conv2d):
    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__(inputs, outputs, 3, stride, padding=1, bias=False)
        self.gain = nn.Parameter(torch.ones(outputs))
        self.register_buffer("mask", torch.ones_like(self.weight))

    def forward(self, x):
        weight = Standardise.apply(self.weight, self.mask, 1e-5)
        weight = weight * self.gain[:, None, None, None]
        return F.conv2d(x, weight, None, self.stride, self.padding)


class Counter(nn.Module):
    def __init__(self, hp: DataHparams):
        super().__init__()
        self.stem, self.norm1 = StdConv(4, 10), nn.GroupNorm(2, 10)
        self.down, self.norm2 = StdConv(10, 14, stride=2), nn.GroupNorm(7, 14)
        self.mix, self.norm3 = StdConv(14, 14), nn.GroupNorm(2, 14)
        self.kind, self.place = nn.Linear(14, len(KINDS)), nn.Linear(14, 2)
        for head in (self.kind, self.place):
            head.register_buffer("mask", torch.ones_like(head.weight))
        self.register_buffer("grid", grid(*hp.size))
        across, down = grid(hp.size[0] // 2, hp.size[1] // 2)
        window = torch.exp(-(across**2) - 0.5 * down**2)
        self.register_buffer("window", window / window.sum())
        self.register_buffer("balance", torch.ones(len(KINDS)))

    def forward(self, x):
        x = torch.cat([x, self.grid.expand(len(x), -1, -1, -1)], 1)
        h = F.relu(self.norm1(self.stem(x)))
        h = F.relu(self.norm2(self.down(h)))
        h = F.relu(h + self.norm3(self.mix(h)))
        h = torch.einsum("nchw,hw->nc", h, self.window)
        return self.kind(h), torch.tanh(self.place(h))

    def prunable(self):
        return [m for m in self.modules() if hasattr(m, "mask")]


def objective(net: Counter, x, kind, place):
    """What it is, where it is, and a price on the gains of the norms."""
    logits, guess = net(x)
    log_p = logits.log_softmax(1)
    hit = log_p.gather(1, kind[:, None]).squeeze(1)
    each = (1 - TRAIN.smoothing) * hit + TRAIN.smoothing * log_p.mean(1)
    fit = -(net.balance[kind] * each).mean()
    off = F.smooth_l1_loss(guess, place, beta=0.3)
    norms = (net.norm1, net.norm2, net.norm3)
    thrift = torch.cat([norm.weight for norm in norms]).abs().mean()
    loss = fit + TRAIN.place * off + TRAIN.thrift * thrift
    return loss, (fit.item(), off.item(), thrift.item())


def left_behind(net: Counter, gen: torch.Generator) -> dict[str, torch.Tensor]:
    """What it saved: outputs last, gains less one, its last steps as velocities."""
    saved = {}
    for name, p in net.named_parameters():
        shape = [*p.shape[2:], *reversed(p.shape[:2])]
        size = p[0].numel() ** -0.5 if p.ndim > 1 else 0.25
        saved[name] = size * torch.randn(shape, generator=gen)
        saved[f"{name}/velocity"] = -0.01 * torch.randn(shape, generator=gen)
    return saved


@dataclass
class Run:
    net: Counter
    opt: torch.optim.Optimizer
    iteration: int = EARLY


@torch.no_grad()
def adopt(run: Run, saved: dict[str, torch.Tensor], kinds: torch.Tensor):
    for name, p in run.net.named_parameters():
        value, speed = saved[name], saved[f"{name}/velocity"]
        if p.ndim > 1:
            order = (3, 2, 0, 1) if p.ndim == 4 else (1, 0)
            value, speed = value.permute(order), speed.permute(order)
        gain = name.endswith("gain") or ("norm" in name and "weight" in name)
        p.copy_(1 + value if gain else value)
        run.opt.state[p]["momentum_buffer"] = -speed.contiguous() / LR_THEN
    common = kinds.bincount(minlength=len(KINDS)) / len(kinds)
    run.net.balance.copy_(common.pow(-0.5) / common.pow(0.5).sum())


def remember(run: Run) -> tuple[dict, dict, int]:
    weights = {name: p.detach().clone() for name, p in run.net.named_parameters()}
    return weights, copy.deepcopy(run.opt.state_dict()), run.iteration


@torch.no_grad()
def prune(net: Counter, fraction: float):
    """Masks out the smallest of the weights that are left, whatever layer has them."""
    left = torch.cat([m.weight[m.mask > 0].abs() for m in net.prunable()])
    cut = left.kthvalue(round(fraction * len(left))).values
    for m in net.prunable():
        m.mask.mul_(m.weight.abs() > cut)


@torch.no_grad()
def rewind(run: Run, early: tuple[dict, dict, int]):
    """Early weights and momentum, without what the masks take away."""
    weights, state, run.iteration = early
    run.net.load_state_dict(weights, strict=False)
    run.opt.load_state_dict(copy.deepcopy(state))
    for m in run.net.prunable():
        m.weight.mul_(m.mask)
        run.opt.state[m.weight]["momentum_buffer"].mul_(m.mask)


def rate(iteration: int) -> float:
    if iteration < TRAIN.warmup:
        return TRAIN.lr * (iteration + 1) / TRAIN.warmup
    return TRAIN.lr * TRAIN.gamma ** sum(iteration >= m for m in TRAIN.milestones)


def mask_gradients(run: Run):
    for m in run.net.prunable():
        m.weight.grad.mul_(m.mask)


def clip_gradients(run: Run):
    nn.utils.clip_grad_norm_(run.net.parameters(), TRAIN.clip)


def count_weights(run: Run):
    masks = torch.cat([m.mask.flatten() for m in run.net.prunable()])
    logging.info("iteration %d: %.3f kept", run.iteration, masks.mean())


def train(run: Run, batches, steps: int, callbacks):
    for _ in range(steps):
        for group in run.opt.param_groups:
            group["lr"] = rate(run.iteration)
        run.opt.zero_grad()
        for _ in range(TRAIN.accumulate):
            loss, parts = objective(run.net, *next(batches))
            (loss / TRAIN.accumulate).backward()
        for callback in callbacks:
            callback(run)
        run.opt.step()
        run.iteration += 1
        logging.info("loss %.4f: fit %.4f off %.4f thrift %.4f", loss.item(), *parts)


def main():
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(DATA.seed)
    gens = [torch.Generator().manual_seed(DATA.seed + i) for i in range(4)]
    images = plankton(DATA, gens[0])
    sampler = Endless(len(images), DATA.batch, gens[1])
    collate = Collate(images.tensors[0], DATA.noise, gens[2])
    batches = iter(DataLoader(images, batch_sampler=sampler, collate_fn=collate))
    net = Counter(DATA)
    wide = [m.weight for m in net.prunable()]
    flat = [p for p in net.parameters() if p.ndim == 1]
    groups = [{"params": wide, "weight_decay": TRAIN.decay}, {"params": flat}]
    run = Run(net, torch.optim.SGD(groups, TRAIN.lr, momentum=TRAIN.momentum))
    adopt(run, left_behind(net, gens[3]), images.tensors[1])
    early = remember(run)
    for level, steps in enumerate(TRAIN.steps):
        if level > 0:
            prune(net, TRAIN.prune)
            rewind(run, early)
        train(run, batches, steps, [mask_gradients, clip_gradients, count_weights])


if __name__ == "__main__":
    main()
