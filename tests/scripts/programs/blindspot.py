"""Denoising micrographs without clean ones: blind spots, and a model of the camera's noise."""

import copy
import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

hp = SimpleNamespace(
    seed=23, side=24, tiles=3, accumulate=2, steps=3, cell=4, reach=2,
    width=12, groups=3, slope=0.1, mix=0.6, eps=0.05, nll=0.2, percept=0.5, seen=10,
    lr=0.05, betas=(0.9, 0.99), decay=1e-2, period=4, least=1e-3, sync=2, slow=0.5,
    clip=0.15, ema=0.8, gain=0.06, offset=0.01,
)  # fmt: skip


# ---- micrographs


def scenes(n, rng):
    """Clean ones: a few gratings and cells, between 0 and about 2."""
    line = torch.linspace(-1, 1, hp.side)
    y, x = torch.meshgrid(line, line, indexing="ij")
    out = torch.zeros(n, hp.side, hp.side)
    for _ in range(3):
        angle, rate, phase = torch.rand(3, n, 1, 1, generator=rng) * 2 * math.pi
        along = x * angle.cos() + y * angle.sin()
        out += 0.15 * (1 + torch.sin(2 * rate * along + phase))
        at = torch.rand(2, n, 1, 1, generator=rng) * 1.6 - 0.8
        far = (x - at[0]).square() + (y - at[1]).square()
        out += 0.6 * torch.sigmoid((0.09 - far) * 60)
    return out[:, None]


def expose(clean, rng):
    """What the camera makes of it: the variance grows with the signal."""
    deviation = (hp.gain * clean + hp.offset).sqrt()
    return clean + deviation * torch.randn(clean.shape, generator=rng)


def turned(tiles, rng):
    """Each tile turned by some quarters."""
    quarters = torch.randint(4, (len(tiles),), generator=rng).tolist()
    return torch.stack([t.rot90(q, (1, 2)) for t, q in zip(tiles, quarters)])


def blind_spots(tiles, rng):
    """One pixel in each cell, overwritten by a neighbour: the tiles, and where."""
    n, _, height, width = tiles.shape
    rows, cols = height // hp.cell, width // hp.cell
    inside = torch.randint(hp.cell, (2, n, rows, cols), generator=rng)
    i = (inside[0] + hp.cell * torch.arange(rows)[:, None]).flatten(1)
    j = (inside[1] + hp.cell * torch.arange(cols)).flatten(1)
    # any of the window but its middle
    across = 2 * hp.reach + 1
    pick = torch.randint(across**2 - 1, i.shape, generator=rng)
    pick = pick + (pick >= across**2 // 2)
    di, dj = pick // across - hp.reach, pick % across - hp.reach
    from_i, from_j = (i + di).clamp(0, height - 1), (j + dj).clamp(0, width - 1)
    tile = torch.arange(n)[:, None]
    blinded = tiles.clone()
    blinded[tile, 0, i, j] = tiles[tile, 0, from_i, from_j]
    mask = torch.zeros_like(tiles)
    mask[tile, 0, i, j] = 1.0
    return blinded, mask


# ---- kernels


class Charbonnier(torch.autograd.Function):
    """Mean of sqrt(d^2 + eps^2) - eps where the mask is one."""

    @staticmethod
    def forward(ctx, found, wanted, mask, eps):
        gap = found - wanted
        root = (gap.square() + eps**2).sqrt()
        ctx.save_for_backward(gap, root, mask)
        return ((root - eps) * mask).sum() / mask.sum()

    @staticmethod
    def backward(ctx, grad):
        gap, root, mask = ctx.saved_tensors
        slope = grad * gap / root * mask / mask.sum()
        return slope, -slope, None, None


class CameraNLL(torch.autograd.Function):
    """Gaussian likelihood with the variance gain * signal + offset, where masked."""

    @staticmethod
    def forward(ctx, signal, seen, mask, gain, offset):
        light = signal.clamp(min=0.0)
        var = gain * light + offset
        gap = seen - signal
        ctx.save_for_backward(light, var, gap, mask, gain)
        each = 0.5 * (var.log() + gap.square() / var)
        return (each * mask).sum() / mask.sum()

    @staticmethod
    def backward(ctx, grad):
        light, var, gap, mask, gain = ctx.saved_tensors
        share = grad * mask / mask.sum()
        by_var = 0.5 * share * (1 / var - (gap / var).square())
        by_signal = by_var * gain * (light > 0) - share * gap / var
        return by_signal, None, None, (by_var * light).sum(), by_var.sum()


# ---- nets


class Block(nn.Module):
    """Two convolutions with group norm."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, padding=1, padding_mode="reflect")
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, padding_mode="reflect")
        self.norm1 = nn.GroupNorm(hp.groups, n_out)
        self.norm2 = nn.GroupNorm(hp.groups, n_out)

    def forward(self, x):
        x = F.leaky_relu(self.norm1(self.conv1(x)), hp.slope)
        return F.leaky_relu(self.norm2(self.conv2(x)), hp.slope)


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))
        self.enter = Block(1, width)
        self.down = Block(width, 2 * width)
        self.deep = Block(2 * width, 2 * width)
        self.up = Block(4 * width, width)
        self.leave = Block(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, tiles):
        fine = self.enter((tiles - self.mean) / self.std)
        coarse = self.down(F.avg_pool2d(fine, 2))
        deep = self.deep(F.max_pool2d(coarse, 2))
        x = self.up(torch.cat([bigger(deep), coarse], 1))
        x = self.leave(torch.cat([bigger(x), fine], 1))
        return self.head(x) * self.std + self.mean


def bigger(x):
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


class Camera(nn.Module):
    """Gain and offset of the noise, both positive."""

    def __init__(self, gain, offset):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain).expm1().log())
        self.offset = nn.Parameter(torch.tensor(offset).expm1().log())

    def forward(self):
        return F.softplus(self.gain), F.softplus(self.offset)


class RandomFeatures(nn.Module):
    """Frozen filters that answer nothing to a flat tile."""

    def __init__(self, n, rng):
        super().__init__()
        filters = torch.randn(n, 1, 5, 5, generator=rng)
        filters = filters - filters.mean((2, 3), keepdim=True)
        filters = filters / filters.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        self.register_buffer("filters", filters)
        self.register_buffer("mixing", torch.randn(n, n, 1, 1, generator=rng) / n**0.5)

    def forward(self, tiles):
        first = F.conv2d(tiles, self.filters, padding=2).relu()
        return first, F.conv2d(F.avg_pool2d(first, 2), self.mixing).relu()


@torch.no_grad()
def prepare(net, tiles):
    """Moments of what the camera saw; weights for leaky rectifiers."""
    net.mean.copy_(tiles.mean())
    net.std.copy_(tiles.std())
    for part in net.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, a=hp.slope, mode="fan_in")
            nn.init.zeros_(part.bias)
    net.head.weight.mul_(0.25)


# ---- optimizer


class Lookahead(torch.optim.Optimizer):
    """Every few steps of the inner optimizer, half the way back to the slow weights."""

    def __init__(self, inner, every, alpha):
        self.inner, self.every, self.alpha, self.taken = inner, every, alpha, 0
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.taken += 1
        if self.taken % self.every:
            return
        for p, state in self.state.items():
            state["slow"].lerp_(p, self.alpha)
            p.copy_(state["slow"])


@torch.no_grad()
def follow(average, net, decay):
    for a, p in zip(average.parameters(), net.parameters()):
        a.mul_(decay).add_(p, alpha=1 - decay)


# ---- training


def loss_of(net, camera, features, seen, rng):
    blinded, mask = blind_spots(seen, rng)
    found = net(blinded)
    square = ((found - seen).square() * mask).sum() / mask.sum()
    robust = Charbonnier.apply(found, seen, mask, hp.eps)
    nll = CameraNLL.apply(found, seen, mask, *camera())
    pasted = torch.where(mask > 0, found, seen)
    percept = sum(F.l1_loss(a, b) for a, b in zip(features(pasted), features(seen)))
    loss = hp.mix * square + (1 - hp.mix) * robust + hp.nll * nll + hp.percept * percept
    return loss, nll


def psnr(net, clean, seen):
    with torch.no_grad():
        return -10 * (net(seen) - clean).square().mean().log10().item()


def main():
    torch.manual_seed(hp.seed)
    rng = torch.Generator().manual_seed(hp.seed + 1)
    clean = scenes(hp.tiles * hp.accumulate * hp.steps, rng)
    seen = expose(clean, rng)

    net, camera = UNet(hp.width), Camera(0.1, 0.02)
    prepare(net, seen)
    features = RandomFeatures(hp.seen, rng)
    average = copy.deepcopy(net).requires_grad_(False)

    both = [*net.parameters(), *camera.parameters()]
    decayed = [p for p in both if p.dim() > 1]
    others = [p for p in both if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": hp.decay}, {"params": others}]
    inner = torch.optim.RAdam(groups, hp.lr, betas=hp.betas)
    opt = Lookahead(inner, hp.sync, hp.slow)
    sched = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
        opt, T_0=hp.period, T_mult=2, eta_min=hp.least
    )

    order = torch.randperm(len(seen), generator=rng).split(hp.tiles)
    for step in range(hp.steps):
        opt.zero_grad()
        shown = 0.0
        for part in range(hp.accumulate):
            tiles = turned(seen[order[step * hp.accumulate + part]], rng)
            loss, nll = loss_of(net, camera, features, tiles, rng)
            loss = loss / hp.accumulate
            loss.backward()
            shown += loss.item()
        norm = nn.utils.clip_grad_norm_(both, hp.clip)
        opt.step()
        sched.step()
        follow(average, net, hp.ema)
        gain, offset = (value.item() for value in camera())
        print(f"{step} loss {shown:.4f} nll {nll:.3f} norm {norm:.2f}")
        print(f"  noise {gain:.4f} s + {offset:.4f}")
    print(f"{psnr(net, clean, seen):.2f} dB, averaged {psnr(average, clean, seen):.2f} dB")


if __name__ == "__main__":
    main()
