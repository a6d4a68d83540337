# One small sine network per picture, written by a hypernetwork.
#
# The network that all pictures share gets low-rank offsets and shifts from the code of a
# picture; the code is what an encoder sees plus a row of a table that is learned as well.
import argparse
import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=31)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--pictures", type=int, default=30)
parser.add_argument("--batch", type=int, default=6)
parser.add_argument("--side", type=int, default=12)
parser.add_argument("--width", type=int, default=24)
parser.add_argument("--code", type=int, default=16)
parser.add_argument("--rank", type=int, default=3)
parser.add_argument("--first-omega", type=float, default=9.0)
parser.add_argument("--omega", type=float, default=4.0)
parser.add_argument("--lr", type=float, default=4e-3)
parser.add_argument("--decay", type=float, default=0.3)
parser.add_argument("--lr-codes", type=float, default=6.0)
parser.add_argument("--momentum", type=float, default=0.8)
parser.add_argument("--warmup", type=int, default=3)
parser.add_argument("--edges", type=float, default=0.2)
parser.add_argument("--ortho", type=float, default=0.02)
parser.add_argument("--prior", type=float, default=0.02)
parser.add_argument("--clip", type=float, default=0.5)
parser.add_argument("--clip-codes", type=float, default=0.1)
args = parser.parse_args()


# ============================== pictures ==============================


def paint(n, side, gen):
    """Bytes [n, 3, side, side]: stripes, and blobs in front of them."""
    row = torch.linspace(-1, 1, side)[:, None]
    col = torch.linspace(-1, 1, side)[None, :]
    pictures = []
    for _ in range(n):
        way, wave, phase = torch.rand(3, generator=gen) * torch.tensor([1.5, 4.0, 6.3])
        stripes = torch.sin((2 + wave) * (col * way.cos() + row * way.sin()) + phase)
        picture = 0.5 + 0.3 * stripes * torch.rand(3, 1, 1, generator=gen)
        for _ in range(2):
            at = 1.4 * torch.rand(2, generator=gen) - 0.7
            size = 0.05 + 0.15 * torch.rand((), generator=gen)
            blob = torch.exp(-((row - at[0]) ** 2 + (col - at[1]) ** 2) / size)
            picture = picture + blob * (torch.rand(3, 1, 1, generator=gen) - 0.4)
        pictures.append(picture)
    return (torch.stack(pictures).clamp(0, 1) * 255).round().to(torch.uint8)


def batches(pictures, size, gen):
    """Rows and pictures in [-1, 1], some of them mirrored; a new order for each epoch."""
    while True:
        for rows in torch.randperm(len(pictures), generator=gen).split(size):
            chosen = pictures[rows].float() / 127.5 - 1
            mirrored = torch.rand(len(rows), 1, 1, 1, generator=gen) < 0.3
            yield rows, torch.where(mirrored, chosen.flip(3), chosen)


def principal(pictures, many):
    """Scores of the pictures along their first directions, each of unit size."""
    flat = pictures.float().flatten(1) / 255
    flat = flat - flat.mean(0)
    u, _, vh = torch.linalg.svd(flat, full_matrices=False)
    side = vh[:many].sum(1).sign()
    return u[:, :many] * side * math.sqrt(len(flat))


# ============================== kernels ==============================


class SineLayer(torch.autograd.Function):
    """sin(omega (x w' + b)), w and b of each picture; x: [n, p, i], w: [n, o, i], b: [n, o]."""

    @staticmethod
    def forward(ctx, x, weight, bias, omega):
        phase = omega * torch.baddbmm(bias[:, None], x, weight.mT)
        ctx.save_for_backward(x, weight, phase)
        ctx.omega = omega
        return phase.sin()

    @staticmethod
    def backward(ctx, grad):
        x, weight, phase = ctx.saved_tensors
        slope = ctx.omega * grad * phase.cos()
        return slope @ weight, slope.mT @ x, slope.sum(1), None


class Differences(torch.autograd.Function):
    """Central differences of pictures [n, c, h, w] by row and by column, inside: [2, n, c, ..]."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        down = x[..., 2:, 1:-1] - x[..., :-2, 1:-1]
        right = x[..., 1:-1, 2:] - x[..., 1:-1, :-2]
        return 0.5 * torch.stack([down, right])

    @staticmethod
    def backward(ctx, grad):
        down, right = 0.5 * grad
        out = grad.new_zeros(ctx.shape)
        out[..., 2:, 1:-1] += down
        out[..., :-2, 1:-1] -= down
        out[..., 1:-1, 2:] += right
        out[..., 1:-1, :-2] -= right
        return out


class Orthogonality(torch.autograd.Function):
    """Mean of |u'u - 1|^2 over pictures; u: [n, o, r]."""

    @staticmethod
    def forward(ctx, u):
        excess = u.mT @ u - torch.eye(u.shape[2])
        ctx.save_for_backward(u, excess)
        return excess.square().sum() / len(u)

    @staticmethod
    def backward(ctx, grad):
        u, excess = ctx.saved_tensors
        return grad * 4 * u @ excess / len(u)


# ============================== networks ==============================


class Encoder(nn.Module):
    def __init__(self, code):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(3, 12)
        self.conv2 = nn.Conv2d(12, 24, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, 24)
        self.head = nn.Linear(24 + 12, code)
        self.register_buffer("centre", torch.zeros(3, 1, 1))
        self.register_buffer("spread", torch.ones(3, 1, 1))

    def forward(self, pictures):
        h = (pictures - self.centre) / self.spread
        h = F.silu(self.norm1(self.conv1(h)))
        low = h.amax((2, 3))
        h = F.silu(self.norm2(self.conv2(h)))
        return self.head(torch.cat([h.mean((2, 3)), low], 1))


class Writer(nn.Module):
    """From codes to offsets of one layer: two thin matrices and a shift."""

    def __init__(self, code, n_in, n_out):
        super().__init__()
        self.trunk = nn.Linear(code, args.width)
        self.left = nn.Linear(args.width, n_out * args.rank)
        self.right = nn.Linear(args.width, n_in * args.rank)
        self.shift = nn.Linear(args.width, n_out)

    def forward(self, code):
        h = F.gelu(self.trunk(code))
        left = self.left(h).unflatten(1, (-1, args.rank))
        right = self.right(h).unflatten(1, (-1, args.rank))
        return left, right, self.shift(h)


class Field(nn.Module):
    """The colours of points, by a network that all pictures share and their offsets to it."""

    def __init__(self):
        super().__init__()
        sizes = [2, args.width, args.width, 3]
        self.base = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.writers = nn.ModuleList(Writer(args.code, a, b) for a, b in pairwise(sizes))
        self.encoder = Encoder(args.code)
        at = (torch.arange(args.side) + 0.5) / args.side * 2 - 1
        grid = torch.stack(torch.meshgrid(at, at, indexing="ij"), -1)
        self.register_buffer("grid", grid.reshape(-1, 2))

    def forward(self, code):
        h = self.grid.expand(len(code), -1, -1)
        penalty = 0.0
        for depth, (base, writer) in enumerate(zip(self.base, self.writers, strict=True)):
            left, right, shift = writer(code)
            weight = base.weight + left @ right.mT / args.rank
            bias = base.bias + shift
            penalty = penalty + Orthogonality.apply(left)
            if depth < len(self.base) - 1:
                omega = args.first_omega if depth == 0 else args.omega
                h = SineLayer.apply(h, weight, bias, omega)
            else:
                h = torch.bmm(h, weight.mT) + bias[:, None]
        return h.mT.unflatten(2, (args.side, args.side)), penalty


@torch.no_grad()
def set_up(field, codes, pictures):
    scaled = pictures.float() / 127.5 - 1
    field.encoder.centre.copy_(scaled.mean((0, 2, 3))[:, None, None])
    field.encoder.spread.copy_(scaled.std((0, 2, 3))[:, None, None])
    field.base[0].weight.uniform_(-1 / 2, 1 / 2)
    for layer in field.base[1:]:
        bound = math.sqrt(6 / layer.in_features) / args.omega
        layer.weight.uniform_(-bound, bound)
    for writer in field.writers:
        writer.right.weight.mul_(0.3)
        nn.init.orthogonal_(writer.left.bias.view(-1, args.rank))
    codes.weight.copy_(principal(pictures, args.code))


# ============================== training ==============================


def rising(step):
    """Share of the rate: up in a few steps, then a cosine down."""
    if step < args.warmup:
        return (step + 1) / args.warmup
    return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (step - args.warmup) / 60))


def main():
    torch.manual_seed(args.seed)
    gen = torch.Generator().manual_seed(args.seed + 1)
    pictures = paint(args.pictures, args.side, gen)
    field = Field()
    codes = nn.Embedding(args.pictures, args.code)
    set_up(field, codes, pictures)

    thick = [p for p in field.parameters() if p.ndim > 1]
    thin = [p for p in field.parameters() if p.ndim == 1]
    groups = [{"params": thick, "weight_decay": args.decay}, {"params": thin, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), eps=1e-6)
    opt_codes = torch.optim.SGD(codes.parameters(), lr=args.lr_codes, momentum=args.momentum)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, rising)
    sched_codes = torch.optim.lr_scheduler.ExponentialLR(opt_codes, 0.7)

    stream = batches(pictures, args.batch, gen)
    for step in range(args.steps):
        rows, target = next(stream)
        own = codes(rows)
        drawn, penalty = field(field.encoder(target) + own)
        pixels = F.mse_loss(drawn, target)
        edges = (Differences.apply(drawn) - Differences.apply(target)).square().mean()
        prior = own.square().sum(1).mean()
        loss = pixels + args.edges * edges + args.ortho * penalty + args.prior * prior
        opt.zero_grad()
        opt_codes.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(field.parameters(), args.clip)
        nn.utils.clip_grad_norm_(codes.parameters(), args.clip_codes)
        opt.step()
        opt_codes.step()
        sched.step()
        sched_codes.step()
        print(f"step {step} pixels {pixels.item():.5f} edges {edges.item():.5f} norm {norm.item():.4f}")

    with torch.no_grad():
        target = pictures[:8].float() / 127.5 - 1
        drawn, _ = field(field.encoder(target) + codes.weight[:8])
        psnr = 10 * torch.log10(4 / F.mse_loss(drawn, target))
    print(f"psnr {psnr.item():.3f}")


if __name__ == "__main__":
    main()
