"""WGAN-GP that dreams up infrared spectra of minerals, one kind at a time.

The raw spectra lie on the uneven wavelengths of the spectrometer; they are brought to
even wavenumbers first. Both networks scale their weights by the largest singular value,
and the critic takes the kind in by projection.
"""

import copy
import logging
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

CFG = {"seed": 17, "channels": 70, "bins": 44, "latent": 10, "code": 6, "batch": 18}
CFG |= {"iterations": 4, "n_critic": 3, "updates": 9, "old": 5, "burn_in": 12}
CFG |= {"lr_g": 4e-3, "lr_d": 6e-3, "betas": (0.0, 0.9), "clip_g": 1.5, "clip_d": 2.0}
CFG |= {"gp": 10.0, "drift": 0.2, "smooth": 0.3, "ema": 0.98}

# name: how many spectra, and bands as (centre in 1/cm, width, depth)
MINERALS = {
    "quartz": (40, [(795.0, 18.0, 0.5), (1085.0, 55.0, 0.9)]),
    "calcite": (31, [(712.0, 10.0, 0.4), (875.0, 14.0, 0.6), (1430.0, 60.0, 0.8)]),
    "kaolin": (22, [(915.0, 16.0, 0.7), (1010.0, 25.0, 0.6), (1115.0, 20.0, 0.4)]),
    "gypsum": (12, [(670.0, 22.0, 0.5), (1120.0, 40.0, 0.9), (1620.0, 25.0, 0.5)]),
    "olivine": (7, [(840.0, 20.0, 0.6), (890.0, 30.0, 0.7)]),
}
leaky = nn.LeakyReLU(0.2)


def measure(gen):
    """Reflectance on the spectrometer's wavelengths in microns, kind after kind."""
    microns = torch.linspace(5.8, 15.8, CFG["channels"])
    waves = 1e4 / microns
    rows, kinds = [], []
    for kind, (count, bands) in enumerate(MINERALS.values()):
        sky = 1.0 + 0.15 * torch.randn(count, 1, generator=gen)
        tilt = 0.3 * torch.randn(count, 1, generator=gen)
        row = sky + tilt * (waves - 1150) / 1000
        for centre, width, depth in bands:
            at = centre + 6.0 * torch.randn(count, 1, generator=gen)
            deep = depth * (0.6 + 0.4 * torch.rand(count, 1, generator=gen))
            row = row * (1 - deep / (1 + ((waves - at) / width) ** 2))
        rows.append(row + 0.01 * torch.randn(row.shape, generator=gen))
        kinds += [kind] * count
    return microns, torch.cat(rows), torch.tensor(kinds)


def prepare(microns, raw):
    """Absorption on even wavenumbers, the continuum taken out, between -1 and 1."""
    waves = (1e4 / microns).flip(0)
    values = raw.flip(1)
    grid = torch.linspace(660.0, 1700.0, CFG["bins"])
    right = torch.searchsorted(waves, grid).clamp(1, len(waves) - 1)
    part = (grid - waves[right - 1]) / (waves[right] - waves[right - 1])
    even = torch.lerp(values[:, right - 1], values[:, right], part)
    first, last = even[:, :3].mean(1, keepdim=True), even[:, -3:].mean(1, keepdim=True)
    continuum = first + (last - first) * torch.linspace(0, 1, CFG["bins"])
    flat = even / continuum
    depth = 1 - flat
    low, high = depth.min(), depth.max()
    return 2 * (depth - low) / (high - low) - 1


class EvenKinds(Sampler):
    """Batches without end in which all kinds are equally likely."""

    def __init__(self, kinds, seed):
        self.counts = kinds.bincount()
        self.starts = self.counts.cumsum(0) - self.counts
        self.gen = torch.Generator().manual_seed(seed)

    def __iter__(self):
        while True:
            kind = torch.randint(len(MINERALS), (CFG["batch"],), generator=self.gen)
            place = torch.rand(len(kind), generator=self.gen) * self.counts[kind]
            yield (self.starts[kind] + place.long()).tolist()


class PixelNorm(torch.autograd.Function):
    """Root mean square over the channels brought to one."""

    @staticmethod
    def forward(ctx, x):
        rms = (x.square().mean(1, keepdim=True) + 1e-6).sqrt()
        y = x / rms
        ctx.save_for_backward(y, rms)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, rms = ctx.saved_tensors
        along = (grad * y).mean(1, keepdim=True)
        return (grad - y * along) / rms


class BlurDown(torch.autograd.Function):
    """Every other bin of a blurred spectrum; its backward can be derived once more."""

    @staticmethod
    def forward(ctx, x, taps):
        ctx.save_for_backward(taps)
        kernel = taps.expand(x.shape[1], 1, -1)
        return F.conv1d(x, kernel, stride=2, padding=1, groups=x.shape[1])

    @staticmethod
    def backward(ctx, grad):
        (taps,) = ctx.saved_tensors
        kernel = taps.expand(grad.shape[1], 1, -1)
        back = F.conv_transpose1d(grad, kernel, None, 2, 1, groups=grad.shape[1])
        return back, None


class Scaled(nn.Module):
    """Linear layer or convolution whose weight is divided by its largest stretch."""

    def __init__(self, *shape):
        super().__init__()
        fan = math.prod(shape[1:])
        self.weight = nn.Parameter(torch.randn(shape) * fan**-0.5)
        self.bias = nn.Parameter(0.1 * torch.randn(shape[0]))
        self.gain = nn.Parameter(1.4 + 0.1 * torch.randn(1))
        self.register_buffer("u", F.normalize(torch.randn(shape[0]), dim=0))
        self.settle()

    def settle(self):
        for _ in range(CFG["burn_in"]):
            self.scaled()

    def scaled(self):
        table = self.weight.flatten(1)
        with torch.no_grad():
            v = F.normalize(table.T @ self.u, dim=0)
            u = F.normalize(table @ v, dim=0)
            if self.training:
                self.u.copy_(u)
        sigma = u @ table @ v
        return self.weight * (self.gain / sigma)

    def forward(self, x):
        weight = self.scaled()
        if weight.ndim == 2:
            return F.linear(x, weight, self.bias)
        return F.conv1d(x, weight, self.bias, padding=weight.shape[2] // 2)


def double(h):
    """Twice as many bins, each of them two times."""
    return h.repeat_interleave(2, dim=2)


class Generator(nn.Module):
    def __init__(self, kinds, usual):
        super().__init__()
        self.code = nn.Embedding(kinds, CFG["code"])
        self.entry = Scaled(14 * 11, CFG["latent"] + CFG["code"])
        self.conv1 = Scaled(12, 14, 5)
        self.conv2 = Scaled(9, 12, 3)
        self.shade = nn.Parameter(0.2 * torch.randn(kinds, 12))
        self.out = Scaled(1, 9, 3)
        self.base = nn.Parameter(torch.atanh(0.95 * usual))

    def forward(self, z, kind):
        z = PixelNorm.apply(torch.cat([z, self.code(kind)], 1))
        h = leaky(self.entry(z)).unflatten(1, (14, 11))
        h = leaky(self.conv1(double(h)))
        h = PixelNorm.apply(h) * (1 + self.shade[kind])[:, :, None]
        h = PixelNorm.apply(leaky(self.conv2(double(h))))
        return torch.tanh(self.out(h).squeeze(1) + self.base)


class Critic(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        octave = math.pi * 2.0 ** torch.arange(3)
        at = (torch.arange(CFG["bins"]) + 0.5) / CFG["bins"]
        taps = torch.tensor([1.0, 3.0, 3.0, 1.0])
        self.register_buffer("places", torch.cos(octave[:, None] * at))
        self.register_buffer("taps", taps / taps.sum())
        self.conv1 = Scaled(8, 4, 5)
        self.conv2 = Scaled(13, 8, 3)
        self.conv3 = Scaled(15, 14, 3)
        self.score = Scaled(1, 15)
        self.embed = nn.Parameter(0.4 * torch.randn(kinds, 15))

    def forward(self, x, kind):
        places = self.places.expand(len(x), -1, -1)
        h = leaky(self.conv1(torch.cat([x[:, None], places], 1)))
        h = leaky(self.conv2(BlurDown.apply(h, self.taps)))
        h = BlurDown.apply(h, self.taps)
        spread = (h.var(0, correction=0) + 1e-6).sqrt().mean()
        h = torch.cat([h, spread.expand(len(h), 1, h.shape[2])], 1)
        phi = leaky(self.conv3(h)).sum(2)
        return self.score(phi).squeeze(1) + (self.embed[kind] * phi).sum(1)


def earlier_filters():
    """First filters of last year's classifier, in bytes, with a step for each filter."""
    gen = torch.Generator().manual_seed(2025)
    weight = torch.randn(8, 4, 5, generator=gen)
    weight = weight * (0.2 + torch.rand(8, 1, 1, generator=gen))
    step = weight.abs().amax((1, 2)) / 127
    return {"bytes": (weight / step[:, None, None]).round().char(), "step": step}


def adopt(layer, saved):
    with torch.no_grad():
        layer.weight.copy_(saved["bytes"].float() * saved["step"][:, None, None])
    layer.settle()


def penalty(critic, real, fake, kind, gen):
    share = torch.rand(len(real), 1, generator=gen)
    mixed = (share * real + (1 - share) * fake).requires_grad_()
    score = critic(mixed, kind).sum()
    (slope,) = torch.autograd.grad(score, mixed, create_graph=True)
    return (slope.norm(2, dim=1) - 1).square().mean()


def critic_loss(critic, real, fake, kind, gen):
    on_real, on_fake = critic(real, kind), critic(fake, kind)
    apart = on_fake.mean() - on_real.mean()
    drift = on_real.square().mean()
    gp = penalty(critic, real, fake, kind, gen)
    return apart + CFG["gp"] * gp + CFG["drift"] * drift, apart


def generator_loss(critic, fake, kind):
    bend = fake[:, 2:] - 2 * fake[:, 1:-1] + fake[:, :-2]
    return CFG["smooth"] * bend.square().mean() - critic(fake, kind).mean()


@torch.no_grad()
def follow(average, gen, rounds):
    keep = min(CFG["ema"], (1 + rounds) / (4 + rounds))
    for ours, theirs in zip(average.parameters(), gen.parameters(), strict=True):
        ours.lerp_(theirs, 1 - keep)
    for ours, theirs in zip(average.buffers(), gen.buffers(), strict=True):
        ours.copy_(theirs)


def slow_down(opt, base, done):
    for group in opt.param_groups:
        group["lr"] = base * (1 - done / CFG["updates"])


def main():
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(CFG["seed"])
    draws = torch.Generator().manual_seed(CFG["seed"] + 1)
    microns, raw, kinds = measure(draws)
    spectra = prepare(microns, raw)
    sampler = EvenKinds(kinds, CFG["seed"] + 2)
    data, own = TensorDataset(spectra, kinds), torch.Generator()
    stream = iter(DataLoader(data, batch_sampler=sampler, generator=own))

    gen = Generator(len(MINERALS), spectra.mean(0))
    critic = Critic(len(MINERALS))
    adopt(critic.conv1, earlier_filters())
    average = copy.deepcopy(gen).eval().requires_grad_(False)
    opt_g = torch.optim.Adam(gen.parameters(), CFG["lr_g"], CFG["betas"])
    opt_d = torch.optim.Adam(critic.parameters(), CFG["lr_d"], CFG["betas"])

    it, done, batch, old = 0, 0, CFG["batch"], CFG["old"]
    while it < CFG["iterations"]:
        if it % CFG["n_critic"] == 0:
            kind = torch.randint(len(MINERALS), (batch,), generator=draws)
            z = torch.randn(batch, CFG["latent"], generator=draws)
            slow_down(opt_g, CFG["lr_g"], done)
            opt_g.zero_grad()
            loss_g = generator_loss(critic, gen(z, kind), kind)
            loss_g.backward()
            nn.utils.clip_grad_norm_(gen.parameters(), CFG["clip_g"])
            opt_g.step()
            follow(average, gen, it // CFG["n_critic"])
            done += 1
            logging.info("%d: generator %.4f", it, loss_g.item())

        real, kind = next(stream)
        z = torch.randn(batch, CFG["latent"], generator=draws)
        with torch.no_grad():  # some fakes are the average's
            fake = torch.cat([average(z[:old], kind[:old]), gen(z[old:], kind[old:])])
        slow_down(opt_d, CFG["lr_d"], done)
        opt_d.zero_grad()
        loss_d, apart = critic_loss(critic, real, fake, kind, draws)
        loss_d.backward()
        nn.utils.clip_grad_norm_(critic.parameters(), CFG["clip_d"])
        opt_d.step()
        done += 1
        logging.info("%d: critic %.4f, apart %.4f", it, loss_d.item(), apart.item())
        it += 1

    fake = average(torch.randn(len(kinds), CFG["latent"], generator=draws), kinds)
    logging.info("mean off by %.3f", (fake.mean(0) - spectra.mean(0)).abs().mean())


if __name__ == "__main__":
    main()
