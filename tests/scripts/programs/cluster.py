"""Sort the strokes of pumps into kinds that nobody has named yet: deep embedded clustering.

An autoencoder is warmed up on strokes with holes in them, k-means on its codes gives the first
centres, then soft assignments to these are drawn towards a sharper copy of themselves, which
is made anew every other step. The codes must still be good enough to tell the strokes.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

DEFAULTS = dict(
    seed=71, strokes=132, length=32, kinds=5, noise=0.15, batch=24,
    code=6, dropout=0.1, alpha=2.0, warm_steps=2, warm_lr=0.3, rounds=3,
    steps=4, refresh=2, lr=4e-3, lr_centres=6e-2, ramp=4, clip=1.0,
    ema=0.7, w_kl=1.5, w_even=0.1,
)  # fmt: skip


def options():
    parser = argparse.ArgumentParser(description="deep clustering")
    for name, value in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()


def make_strokes(args, rng):
    """Pressure and current [n, 2, length], where the sensors were on, and the kinds."""
    n, kinds = args.strokes, args.kinds
    share = 0.75 ** torch.arange(kinds)
    kind = torch.multinomial(share, n, replacement=True, generator=rng)
    t = torch.linspace(0, 1, args.length)
    tune = torch.randn(kinds, 2, 3, 1, generator=rng)
    shift = torch.rand(kinds, 2, 3, 1, generator=rng)
    order = torch.arange(1.0, 4.0)[:, None]
    shapes = (tune * torch.sin(2 * torch.pi * (order * t + shift))).sum(2)
    x = (0.7 + 0.6 * torch.rand(n, 1, 1, generator=rng)) * shapes[kind]
    x = x + 0.3 * torch.randn(n, 2, args.length, generator=rng)
    x = torch.tensor([4.0, 31.0])[:, None] + torch.tensor([0.6, 7.5])[:, None] * x
    on = torch.rand(n, 2, args.length, generator=rng) > 0.06
    return x * on, on, kind


def standardise(x, on):
    """By what the sensors saw; nought where they saw nothing."""
    seen = on.sum((0, 2), keepdim=True)
    mean = x.sum((0, 2), keepdim=True) / seen
    centred = (x - mean) * on
    return centred / (centred.square().sum((0, 2), keepdim=True) / seen).sqrt()


def forever(data, args):
    rng = torch.Generator().manual_seed(args.seed + 1)
    loader = DataLoader(data, args.batch, shuffle=True, drop_last=True, generator=rng)
    while True:
        yield from loader


def spoil(x, args, rng):
    """Noise, and a quarter of each stroke cut out."""
    noisy = x + args.noise * torch.randn(x.shape, generator=rng)
    hole = x.shape[2] // 4
    start = torch.randint(x.shape[2] - hole + 1, (len(x), 1, 1), generator=rng)
    place = torch.arange(x.shape[2])
    return noisy.masked_fill((place >= start) & (place < start + hole), 0.0)


class StudentT(torch.autograd.Function):
    """Shares of the centres mu in the codes z, by Student's t kernel."""

    @staticmethod
    def forward(ctx, z, mu, alpha):
        base = 1 + torch.cdist(z, mu).square() / alpha
        kernel = base ** (-(alpha + 1) / 2)
        q = kernel / kernel.sum(1, keepdim=True)
        ctx.save_for_backward(z, mu, base, q)
        ctx.alpha = alpha
        return q

    @staticmethod
    def backward(ctx, grad):
        z, mu, base, q = ctx.saved_tensors
        by_log = q * (grad - (grad * q).sum(1, keepdim=True))
        pull = by_log * (ctx.alpha + 1) / ctx.alpha / base
        grad_z = pull @ mu - pull.sum(1, keepdim=True) * z
        grad_mu = pull.T @ z - pull.sum(0)[:, None] * mu
        return grad_z, grad_mu, None


class LogCosh(torch.autograd.Function):
    """Mean of log(cosh(told - truth)) over what the sensors saw."""

    @staticmethod
    def forward(ctx, told, truth, on):
        error = told - truth
        size = error.abs()
        cost = size + F.softplus(-2 * size) - 0.6931472
        ctx.save_for_backward(error, on)
        return (cost * on).sum() / on.sum()

    @staticmethod
    def backward(ctx, grad):
        error, on = ctx.saved_tensors
        slope = torch.tanh(error)
        return grad * slope * on / on.sum(), None, None


def filter_bank():
    """Taps of the old analyser, as its program convolves: [time, input, output], last first."""
    rng = torch.Generator().manual_seed(1998)
    decay = torch.tensor([1.0, 0.8, 0.5, 0.3, 0.1])
    return {"taps": 0.6 * decay[:, None, None] * torch.randn(5, 2, 8, generator=rng)}


class Encoder(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.conv1 = nn.Conv1d(2, 8, 5, stride=2, padding=2)
        self.norm1 = nn.GroupNorm(2, 8)
        self.conv2 = nn.Conv1d(8, 12, 3, stride=2, padding=1)
        self.norm2 = nn.GroupNorm(3, 12)
        self.drop = nn.Dropout(args.dropout)
        self.out = nn.Linear(12 * args.length // 4, args.code)

    def forward(self, x):
        x = F.gelu(self.norm1(self.conv1(x)))
        x = F.gelu(self.norm2(self.conv2(x)))
        return self.out(self.drop(x.flatten(1)))


def make_decoder(args):
    return nn.Sequential(
        nn.Linear(args.code, 12 * args.length // 4),
        nn.GELU(),
        nn.Unflatten(1, (12, -1)),
        nn.ConvTranspose1d(12, 8, 4, stride=2, padding=1),
        nn.GELU(),
        nn.ConvTranspose1d(8, 2, 4, stride=2, padding=1),
    )


class Clusters(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.encoder, self.decoder = Encoder(args), make_decoder(args)
        self.alpha = args.alpha
        self.centres = nn.Parameter(torch.zeros(args.kinds, args.code))
        self.register_buffer("slow", torch.zeros(args.kinds, args.code))
        with torch.no_grad():
            taps = filter_bank()["taps"].flip(0)
            self.encoder.conv1.weight.copy_(taps.permute(2, 1, 0))
            self.encoder.out.weight.mul_(3.0)  # codes as wide as the kernel
            self.decoder[-1].weight.mul_(0.5)  # tells little at first

    def net(self):
        return [*self.encoder.parameters(), *self.decoder.parameters()]

    def place(self, centres):
        self.centres.data.copy_(centres)
        self.slow.copy_(centres)

    def forward(self, x):
        z = self.encoder(x)
        return StudentT.apply(z, self.centres, self.alpha), self.decoder(z)


def warm_up(model, batches, args, rng):
    model.train()
    for _ in range(args.warm_steps):
        _, x, on = next(batches)
        told = model.decoder(model.encoder(spoil(x, args, rng)))
        grads = torch.autograd.grad(LogCosh.apply(told, x, on), model.net())
        with torch.no_grad():
            for weight, grad in zip(model.net(), grads):
                weight -= args.warm_lr * grad


def kmeans(z, kinds, rounds):
    """From codes that are far from each other, then Lloyd's rounds."""
    centres = z[:1]
    while len(centres) < kinds:
        alone = torch.cdist(z, centres).amin(1).argmax()
        centres = torch.cat([centres, z[alone][None]])
    for _ in range(rounds):
        nearest = torch.cdist(z, centres).argmin(1)
        member = F.one_hot(nearest, kinds).float()
        size = member.sum(0)[:, None]
        centres = torch.where(size > 0, member.T @ z / size.clamp(min=1), centres)
    return centres


@torch.no_grad()
def sharper(model, strokes):
    """Targets of all strokes: sure assignments count more, large clusters less."""
    model.eval()
    q = StudentT.apply(model.encoder(strokes), model.slow, model.alpha)
    weight = q.square() / q.sum(0)
    return weight / weight.sum(1, keepdim=True)


@torch.no_grad()
def purity(model, strokes, kind):
    model.eval()
    nearest = torch.cdist(model.encoder(strokes), model.slow).argmin(1)
    table = F.one_hot(nearest).T @ F.one_hot(kind)
    return table.amax(1).sum().item() / len(kind)


def main():
    args = options()
    torch.manual_seed(args.seed)
    rng = torch.Generator().manual_seed(args.seed)
    x, on, kind = make_strokes(args, rng)
    strokes = standardise(x, on)
    batches = forever(TensorDataset(torch.arange(len(x)), strokes, on.float()), args)
    model = Clusters(args)
    warm_up(model, batches, args, rng)
    with torch.no_grad():
        model.eval()
        model.place(kmeans(model.encoder(strokes), args.kinds, args.rounds))
    groups = [{"params": model.net()}, {"params": [model.centres], "lr": args.lr_centres}]
    adam = torch.optim.Adam(groups, args.lr, betas=(0.8, 0.98))
    ramp = torch.optim.lr_scheduler.LambdaLR(adam, lambda i: min(1.0, (i + 1) / args.ramp))
    for step in range(args.steps):
        if step % args.refresh == 0:
            target = sharper(model, strokes)
        model.train()
        index, clean, on = next(batches)
        p = target[index]
        q, told = model(spoil(clean, args, rng))
        kl = (p * (p.log() - q.log())).sum(1).mean()
        rebuilt = LogCosh.apply(told, clean, on)
        used = q.mean(0)
        even = (used * used.log()).sum()
        loss = rebuilt + args.w_kl * kl + args.w_even * even
        adam.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        adam.step()
        ramp.step()
        model.slow.lerp_(model.centres.detach(), 1 - args.ema)
        print(f"{step} kl {kl.item():.5f} rebuilt {rebuilt.item():.5f} norm {norm.item():.4f}")
    print(f"purity {purity(model, strokes, kind):.3f}")


if __name__ == "__main__":
    main()
