"""Cloth under a scanner, in two dyes: a ladder of three latents learns how it is woven.

Pixels are levels of a scanner: their likelihood is a mixture of logistics in bins.
"""

import logging
import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

SEED = 66
SHEETS, SHEET, TILE, DYES, LEVELS = 6, (44, 60), (16, 24), 2, 48
BATCH, RAMP, WARMUP, LR, DECAY = 18, 5, 4, 6e-3, 0.02
CLIP, SKIP, FREE_BITS, GAIN_COST = 0.4, 1.3, 0.04, 0.02
WIDTHS, LATENTS, MIXTURE = (10, 14, 18), (3, 4, 5), 3  # from the pixels up
GRIDS = [(TILE[0] >> n, TILE[1] >> n) for n in (1, 2, 3)]
PIXELS = DYES * TILE[0] * TILE[1]


def weave(gen):
    """Scans [sheet, row, column, dye] as bytes; one came from a finer scanner."""
    rows, columns = (torch.arange(side) for side in SHEET)
    place = torch.stack(
        torch.meshgrid(columns / TILE[1], rows / TILE[0], indexing="xy"), 2
    )
    scans = []
    for number in range(SHEETS):
        slope, phase, dye = torch.randn(3, 2, 2, generator=gen)
        beat = torch.tensor([2.0 + 0.7 * number, 5.5 - 0.6 * number])
        angle = 2 * math.pi * beat * (place + 0.2 * place @ slope) + phase[0]
        noise = torch.randn(*SHEET, DYES, generator=gen)
        cloth = angle.sin() @ (dye + 1.2 * torch.eye(2)) + 0.25 * noise - 0.4
        scans.append((0.8 * cloth).sigmoid() * (LEVELS - 1))
    scans[4] = 3 * scans[4]
    return torch.stack(scans).round().to(torch.uint8)


class Tiles(Dataset):
    def __init__(self, scans):
        self.scans = scans.permute(0, 3, 1, 2)

    def __getitem__(self, place):
        sheet, top, left, turned = place
        down, right = top + TILE[0], left + TILE[1]
        tile = self.scans[sheet, :, top:down, left:right].long()
        return tile.flip(-1) if turned else tile  # [dye, row, column]


def places(gen):
    """Batches of places, each out of two sheets; the sheets are shuffled."""
    spare = torch.tensor(SHEET) - torch.tensor(TILE) + 1
    order = torch.randperm(SHEETS, generator=gen).repeat(2)
    for pair in order.split(2):
        sheet = pair.repeat_interleave(BATCH // 2)
        corner = torch.rand(BATCH, 2, generator=gen) * spare
        turned = torch.rand(BATCH, generator=gen) < 0.5
        yield torch.column_stack([sheet, corner.long(), turned]).tolist()


def to_unit(codes):
    return 2.0 * codes / (LEVELS - 1) - 1.0


class BinLog(torch.autograd.Function):
    """Logarithm of a logistic's mass in the bin around x; the outer bins are open."""

    @staticmethod
    def forward(ctx, x, mean, log_scale):
        half = 1.0 / (LEVELS - 1)
        low, high = x < half - 1, x > 1 - half
        inverse = (-log_scale).exp()
        upper, lower = (x - mean + half) * inverse, (x - mean - half) * inverse
        ctx.save_for_backward(upper, lower, inverse, low, high)
        below = F.logsigmoid(upper).masked_fill(high, 0)
        above = F.logsigmoid(-lower).masked_fill(low, 0)
        inside = torch.log(-torch.expm1(lower - upper)).masked_fill(low | high, 0)
        return below + above + inside

    @staticmethod
    def backward(ctx, grad):
        upper, lower, inverse, low, high = ctx.saved_tensors
        both = (1 / torch.expm1(upper - lower)).masked_fill(low | high, 0)
        at_upper = grad * (torch.sigmoid(-upper).masked_fill(high, 0) + both)
        at_lower = -grad * (torch.sigmoid(lower).masked_fill(low, 0) + both)
        slope = -(at_upper + at_lower) * inverse
        return None, slope, -(at_upper * upper + at_lower * lower)


class NormalGap(torch.autograd.Function):
    """Divergence of one normal from another, each given by mean and log deviation."""

    @staticmethod
    def forward(ctx, mean_q, log_q, mean_p, log_p):
        shift = (mean_q - mean_p) * (-log_p).exp()
        ratio = (2 * (log_q - log_p)).exp()
        ctx.save_for_backward(shift, ratio, log_p)
        return 0.5 * (ratio + shift.square() - 1) - log_q + log_p

    @staticmethod
    def backward(ctx, grad):
        shift, ratio, log_p = ctx.saved_tensors
        mean = grad * shift * (-log_p).exp()
        return mean, grad * (ratio - 1), -mean, grad * (1 - ratio - shift.square())


class Cell(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.GroupNorm(2, width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.gate = nn.Linear(width, width)
        self.gain = nn.Parameter(0.6 + 0.2 * torch.randn(width))

    def forward(self, h):
        y = F.silu(self.conv(F.silu(self.norm(h))))
        y = y * torch.sigmoid(self.gate(y.mean((2, 3))))[:, :, None, None]
        return h + self.gain[:, None, None] * y


class Rung(nn.Module):
    """A level on the way down: a prior, a posterior relative to it, and a draw."""

    def __init__(self, width, latent):
        super().__init__()
        self.prior = nn.Conv2d(width, 2 * latent, 1)
        self.posterior = nn.Conv2d(2 * width, 2 * latent, 3, padding=1)
        self.use = nn.Conv2d(latent, width, 1)
        self.cell = Cell(width)

    def forward(self, h, seen, gen):
        mean_p, log_p = self.prior(F.silu(h)).chunk(2, 1)
        off, log_off = self.posterior(torch.cat([h, seen], 1)).chunk(2, 1)
        log_p = 2.0 * torch.tanh(log_p / 2.0)
        mean_q, log_q = mean_p + off, log_p + 2.0 * torch.tanh(log_off / 2.0)
        z = mean_q + log_q.exp() * torch.randn(off.shape, generator=gen)
        return self.cell(h + self.use(z)), NormalGap.apply(mean_q, log_q, mean_p, log_p)


class Ladder(nn.Module):
    def __init__(self):
        super().__init__()
        w = WIDTHS
        self.register_buffer("dye_mean", torch.zeros(DYES, 1, 1))
        self.register_buffer("dye_std", torch.ones(DYES, 1, 1))
        self.stem = nn.Conv2d(DYES, w[0], 4, stride=2, padding=1)
        self.cells = nn.ModuleList(Cell(width) for width in w)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(w))
        self.rungs = nn.ModuleList(map(Rung, w, LATENTS))
        self.up = nn.ModuleList(nn.Conv2d(b, a, 1) for a, b in pairwise(w))
        self.top = nn.Parameter(0.5 * torch.randn(w[-1], *GRIDS[-1]))
        self.out = nn.Conv2d(w[0], 4 * MIXTURE * 3 * DYES, 3, padding=1)
        for name, p in self.named_parameters():
            if "norm" in name or "bias" in name:
                nn.init.normal_(p, 1.0 if "norm.weight" in name else 0.0, 0.1)

    def forward(self, x, gen):
        h = self.cells[0](self.stem((x - self.dye_mean) / self.dye_std))
        seen = [h]
        for down, cell in zip(self.down, self.cells[1:], strict=True):
            h = cell(down(F.silu(h)))
            seen.append(h)
        h, gaps = self.top.expand_as(h), []
        for n in reversed(range(len(seen))):
            h, gap = self.rungs[n](h, seen[n], gen)
            gaps.append(gap)
            if n:
                h = self.up[n - 1](F.interpolate(h, scale_factor=2, mode="nearest"))
        return F.pixel_shuffle(self.out(F.silu(h)), 2), gaps


@torch.no_grad()
def prepare(net, scans, gen):
    """Statistics of the scans, filters of an older model, and where the bins begin."""
    x = to_unit(scans.float())
    net.dye_mean.copy_(x.mean((0, 1, 2))[:, None, None])
    net.dye_std.copy_(x.std((0, 1, 2))[:, None, None])
    filters = torch.randn(4, 4, DYES, WIDTHS[0], generator=gen)  # channels last
    filters = filters * torch.linspace(0.4, 1.6, 4)[:, None, None, None]
    net.stem.weight.copy_(0.25 * filters.permute(3, 2, 0, 1))
    for rung in net.rungs:
        rung.posterior.weight.mul_(0.4)
    bias = net.out.bias.view(MIXTURE, 3, DYES, 4)
    at = (torch.arange(MIXTURE) + 0.5) / MIXTURE
    bias[:, 1] += torch.quantile(x.flatten(0, 2), at, 0)[:, :, None]
    bias[:, 2] += (net.dye_std.flatten() / MIXTURE).log()[:, None]


def log_likelihood(x, out):
    """Nats of a tile; the second dye's means lean on the first dye's pixel."""
    logits, mean, log_scale = out.unflatten(1, (MIXTURE, 3, DYES)).unbind(2)
    lean = torch.tanh(logits[:, :, 1]) * x[:, None, 0]
    mean = torch.stack([mean[:, :, 0], mean[:, :, 1] + lean], 2)
    each = BinLog.apply(x[:, None].expand_as(mean), mean, log_scale.clamp(min=-5.0))
    share = logits[:, :, 0].log_softmax(1)
    return torch.logsumexp(share + each.sum(2), 1).sum((1, 2))


class Objective:
    """Likelihood, balanced divergences with free bits, and the size of the gains."""

    def __init__(self, net):
        areas = [rows * columns for rows, columns in reversed(GRIDS)]  # from the top
        self.free = [FREE_BITS * math.log(2) * area for area in areas]
        self.share = torch.tensor(areas).float().sqrt()
        self.gains = [p for name, p in net.named_parameters() if "gain" in name]

    def __call__(self, net, x, beta, gen):
        out, gaps = net(x, gen)
        told = -log_likelihood(x, out).mean()
        gaps = [gap.sum((2, 3)).mean(0) for gap in gaps]
        floors = zip(gaps, self.free, strict=True)
        paid = torch.stack([gap.clamp(min=free).sum() for gap, free in floors])
        if beta < 1:
            pull = paid.detach() * self.share
            paid = paid * pull / pull.mean()
        gains = torch.cat(self.gains).square().sum()
        loss = (told + beta * paid.sum()) / PIXELS + GAIN_COST * gains
        return loss, (told, paid.sum(), gains)


def warm_up(trainer):
    """Rate and weight of the divergences rise from batch to batch."""
    trainer.beta = min(1.0, (trainer.seen + 1) / RAMP)
    rate = min(1.0, (trainer.made + 1) / WARMUP)
    for group in trainer.opt.param_groups:
        group["lr"] = group["base"] * rate


class Average:
    def __init__(self, net, x):
        self.shadow = [p.detach().clone() for p in net.parameters()]
        self.x = x

    @torch.no_grad()
    def __call__(self, trainer):
        weights = list(trainer.net.parameters())
        keep = trainer.made / (trainer.made + 2)
        if not trainer.skipped:
            torch._foreach_lerp_(self.shadow, weights, 1 - keep)
        own = [p.clone() for p in weights]
        torch._foreach_copy_(weights, self.shadow)
        gen = torch.Generator().manual_seed(SEED)
        _, (told, paid, _) = trainer.objective(trainer.net, self.x, 1.0, gen)
        torch._foreach_copy_(weights, own)
        logging.info("average: %.4f bits", (told + paid) / PIXELS / math.log(2))


class Trainer:
    def __init__(self, net, opt, objective, gen, before, after):
        self.net, self.opt, self.objective, self.gen = net, opt, objective, gen
        self.before, self.after = before, after
        self.seen = self.made = 0

    def fit(self, loader):
        for codes in loader:
            self.before(self)
            self.opt.zero_grad()
            loss, parts = self.objective(self.net, to_unit(codes), self.beta, self.gen)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.net.parameters(), CLIP)
            self.skipped = bool(norm > SKIP)
            if not self.skipped:
                self.opt.step()
                self.made += 1
            self.seen += 1
            words = " ".join(f"{part:.4f}" for part in (loss, norm, *parts))
            logging.info("%d batches, %d steps: %s", self.seen, self.made, words)
            self.after(self)


def main():
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(SEED)
    world, draws, noise = (torch.Generator().manual_seed(SEED + n) for n in range(3))
    scans = weave(world)
    tiles = Tiles(scans)
    loader = DataLoader(tiles, batch_sampler=places(draws), generator=world)
    net = Ladder()
    prepare(net, scans, world)
    unseen = torch.stack([tiles[n, 3 * n, 35 - 4 * n, n % 2] for n in range(4)])
    wide = [p for p in net.parameters() if p.ndim > 1]
    flat = [p for p in net.parameters() if p.ndim == 1]
    groups = [
        {"params": wide, "base": LR, "weight_decay": DECAY},
        {"params": flat, "base": 1.5 * LR, "weight_decay": 0.0},
    ]
    opt = torch.optim.Adamax(groups, LR, betas=(0.9, 0.99), eps=1e-5)
    callbacks = warm_up, Average(net, to_unit(unseen))
    Trainer(net, opt, Objective(net), noise, *callbacks).fit(loader)


if __name__ == "__main__":
    main()
