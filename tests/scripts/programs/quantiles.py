"""Quantiles of the demand of the next days, many shops at once (temporal fusion)."""

import argparse
import copy
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

LEVELS = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9])
REGIONS = ("west", "south", "north", "east")
SHOPS, DAYS, CUT, PAST, AHEAD = 12, 120, 94, 14, 5  # the rest after CUT is the test
WIDTH, HEADS, DROP, PAST_VARS, FUTURE_VARS = 12, 3, 0.1, 5, 3
DECAY, CLIP, EMA = 0.1, 0.5, 0.99


def simulate(gen):
    """Demand [shops, days] with gaps, promotions, and what is known of each shop."""
    region = torch.randint(len(REGIONS), (SHOPS,), generator=gen)
    area = 0.5 + 2.5 * torch.rand(SHOPS, generator=gen)
    promo = (torch.rand(SHOPS, DAYS, generator=gen) < 0.15).float()
    peak = 7 * torch.rand(SHOPS, 1, generator=gen)
    week = torch.cos(2 * math.pi * (torch.arange(DAYS) - peak) / 7)
    drift = 0.03 * torch.randn(SHOPS, DAYS, generator=gen).cumsum(1)
    noise = 0.25 * torch.randn(SHOPS, DAYS, generator=gen)
    lift = (0.4 + 0.3 * region[:, None]) * promo
    demand = 30 * area[:, None] ** 2 * torch.exp(0.4 * week + drift + lift + noise)
    lost = torch.rand(SHOPS, DAYS, generator=gen) < 0.1
    return demand.masked_fill(lost, math.nan), promo, region, area


def statistics(demand):
    """Mean and deviation of each shop, kept to get back to pieces sold."""
    count = (~demand.isnan()).sum(1, keepdim=True)
    mean = demand.nansum(1, keepdim=True) / count
    square = (demand - mean).square().nansum(1, keepdim=True)
    return mean, (square / count).sqrt()


class Windows(Dataset):
    def __init__(self, units, promo, region, area, first, last):
        self.units, self.there = units.nan_to_num(0.0), (~units.isnan()).float()
        phase = 2 * math.pi * (torch.arange(DAYS) % 7) / 7
        week = [part.expand_as(promo) for part in (phase.sin(), phase.cos())]
        self.known = torch.stack([promo, *week], 2)
        self.region, self.area = region, area.log()
        starts = range(first, last - PAST - AHEAD + 1, 3)
        self.index = [(shop, start) for shop in range(SHOPS) for start in starts]

    def __len__(self):
        return len(self.index)

    def __getitem__(self, number):
        shop, start = self.index[number]
        now = start + PAST
        before, after = slice(start, now), slice(now, now + AHEAD)
        seen = torch.stack([self.units[shop, before], self.there[shop, before]], 1)
        past = torch.cat([seen, self.known[shop, before]], 1)
        static = self.known[shop, after], self.region[shop], self.area[shop]
        return past, *static, self.units[shop, after], self.there[shop, after], shop


class Pinball(torch.autograd.Function):
    """Mean over weights and sum over levels: [b, t, q], [b, t], [b, t], [q]."""

    @staticmethod
    def forward(ctx, told, truth, weight, levels):
        short = truth[:, :, None] - told
        mass = weight.sum().clamp(min=1.0)
        ctx.save_for_backward(short, weight, levels, mass)
        each = torch.maximum(levels * short, (levels - 1) * short)
        return (weight[:, :, None] * each).sum() / mass

    @staticmethod
    def backward(ctx, grad):
        short, weight, levels, mass = ctx.saved_tensors
        slope = (short < 0).to(short.dtype) - levels
        return grad * weight[:, :, None] * slope / mass, None, None, None


class Gate(torch.autograd.Function):
    """GLU over the last axis: the second half opens the first."""

    @staticmethod
    def forward(ctx, x):
        value, opening = x.chunk(2, -1)
        opened = opening.sigmoid()
        ctx.save_for_backward(value, opened)
        return value * opened

    @staticmethod
    def backward(ctx, grad):
        value, opened = ctx.saved_tensors
        return torch.cat([grad * opened, grad * value * opened * (1 - opened)], -1)


class GatedSkip(nn.Module):
    def __init__(self, inner, width):
        super().__init__()
        self.gate, self.norm = nn.Linear(inner, 2 * width), nn.LayerNorm(width)

    def forward(self, x, skip):
        return self.norm(skip + Gate.apply(self.gate(x)))


class GRN(nn.Module):
    def __init__(self, size, width, context=False):
        super().__init__()
        self.skip = nn.Identity() if size == width else nn.Linear(size, width)
        self.first, self.second = nn.Linear(size, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.context = nn.Linear(WIDTH, WIDTH, bias=False) if context else None
        self.drop, self.add = nn.Dropout(DROP), GatedSkip(WIDTH, width)

    def forward(self, x, context=None):
        h = self.first(x)
        if context is not None:
            h = h + self.context(context)
        h = self.second(F.elu(h))
        return self.add(self.drop(h), self.skip(x))


class Selection(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.embed = nn.ModuleList(nn.Linear(1, WIDTH) for _ in range(count))
        self.each = nn.ModuleList(GRN(WIDTH, WIDTH) for _ in range(count))
        self.choose = GRN(count * WIDTH, count, context=True)

    def forward(self, x, shop):
        parts = [e(x[:, :, i : i + 1]) for i, e in enumerate(self.embed)]
        share = self.choose(torch.cat(parts, 2), shop[:, None]).softmax(2)
        told = torch.stack([g(p) for g, p in zip(self.each, parts)], 2)
        return (share[:, :, :, None] * told).sum(2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.v = nn.Linear(WIDTH, WIDTH // HEADS)
        self.out = nn.Linear(WIDTH // HEADS, WIDTH, bias=False)
        self.register_buffer("mask", torch.ones(AHEAD, PAST + AHEAD).tril(PAST) > 0)

    def forward(self, x):
        q = self.q(x[:, PAST:]).unflatten(2, (HEADS, -1)).transpose(1, 2)
        k = self.k(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        score = q @ k.mT / math.sqrt(q.shape[3])
        share = score.masked_fill(~self.mask, -1e9).softmax(3)
        return self.out((share @ self.v(x)[:, None]).mean(1))


class Fusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.region, self.area = nn.Embedding(len(REGIONS), WIDTH), nn.Linear(1, WIDTH)
        uses = ("select", "hidden", "cell", "enrich")
        self.shop = nn.ModuleDict({use: GRN(2 * WIDTH, WIDTH) for use in uses})
        self.past, self.future = Selection(PAST_VARS), Selection(FUTURE_VARS)
        self.encoder = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.decoder = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.after_lstm, self.enrich = GatedSkip(WIDTH, WIDTH), GRN(WIDTH, WIDTH, True)
        self.attention, self.after_attention = Attention(), GatedSkip(WIDTH, WIDTH)
        self.feed, self.head = GRN(WIDTH, WIDTH), nn.Linear(WIDTH, len(LEVELS))

    def forward(self, past, future, region, area):
        static = torch.cat([self.region(region), self.area(area[:, None])], 1)
        shop = {use: grn(static) for use, grn in self.shop.items()}
        past = self.past(past, shop["select"])
        future = self.future(future, shop["select"])
        seen, state = self.encoder(past, (shop["hidden"][None], shop["cell"][None]))
        going, _ = self.decoder(future, state)
        x = torch.cat([seen, going], 1)
        x = self.after_lstm(x, torch.cat([past, future], 1))
        x = self.enrich(x, shop["enrich"][:, None])
        x = self.after_attention(self.attention(x), x[:, PAST:])
        return self.head(self.feed(x))


def exported(gen):
    """Last season's run as ONNX has it (gates: input, output, forget, cell)."""
    saved = {"regions": 0.8 * torch.randn(len(REGIONS), WIDTH, generator=gen)}
    for name in ("encoder", "decoder"):
        saved[f"{name}.W"] = 0.4 * torch.randn(4 * WIDTH, WIDTH, generator=gen)
        saved[f"{name}.R"] = 0.4 * torch.randn(4 * WIDTH, WIDTH, generator=gen)
        saved[f"{name}.B"] = 0.3 * torch.randn(8 * WIDTH, generator=gen)
    return saved


@torch.no_grad()
def warm_start(model, saved, units):
    for name in ("encoder", "decoder"):
        lstm, bias = getattr(model, name), saved[f"{name}.B"].chunk(2)
        parts = {"weight_ih": saved[f"{name}.W"], "weight_hh": saved[f"{name}.R"]}
        parts |= {"bias_ih": bias[0], "bias_hh": bias[1]}
        for part, value in parts.items():
            i, o, f, g = value.chunk(4)
            getattr(lstm, f"{part}_l0").copy_(torch.cat([i, f, g, o]))
    rows = [sorted(REGIONS).index(name) for name in REGIONS]  # there by the alphabet
    model.region.weight.copy_(saved["regions"][rows])
    model.head.bias.copy_(units.nanquantile(LEVELS))


def main(args):
    torch.manual_seed(args.seed)
    gen = torch.Generator().manual_seed(args.seed + 1)
    demand, promo, region, area = simulate(gen)
    mean, std = statistics(demand[:, :CUT])
    units = (demand - mean) / std
    source = units, promo, region, area
    train, test = Windows(*source, 0, CUT), Windows(*source, CUT, DAYS)
    model = Fusion()
    warm_start(model, exported(gen), units[:, :CUT])
    average = copy.deepcopy(model).requires_grad_(False)
    recurrent = [*model.encoder.parameters(), *model.decoder.parameters()]
    rest = [p for p in model.parameters() if all(p is not r for r in recurrent)]
    groups = [{"params": [p for p in rest if p.ndim > 1], "weight_decay": DECAY}]
    groups += [{"params": [p for p in rest if p.ndim == 1]}, {"params": recurrent}]
    opt = torch.optim.AdamW(groups, args.lr, betas=(0.9, 0.98), weight_decay=0.0)
    rates = [args.lr, args.lr, args.lr / 4]
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, rates, 40, div_factor=5.0)
    loader = DataLoader(train, args.batch, shuffle=True, drop_last=True, generator=gen)
    for step, (*inputs, truth, weight, _) in zip(range(args.steps), loader):
        loss = Pinball.apply(model(*inputs), truth, weight, LEVELS)
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        opt.step()
        sched.step()
        keep = min(EMA, (1 + step) / (4 + step))
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters()):
                ours.lerp_(theirs, 1 - keep)
        print(f"step {step} loss {loss.item():.5f} norm {norm.item():.4f}")

    *inputs, truth, weight, shop = next(iter(DataLoader(test, len(test))))
    with torch.no_grad():
        told = average.eval()(*inputs) * std[shop][:, :, None] + mean[shop][:, :, None]
        truth = truth * std[shop] + mean[shop]
        loss = Pinball.apply(told, truth, weight, LEVELS)
    below = (truth[:, :, None] < told)[weight > 0].float().mean(0)
    print(f"test {loss.item():.3f} pieces; below the levels", below.tolist())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"seed": 31, "steps": 5, "batch": 8, "lr": 0.02}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    main(parser.parse_args())
