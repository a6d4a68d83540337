"""Short tours by a pointer network, taught by REINFORCE against its own greedy past.

The encoder begins where the router of the vans ended: its projections are stored packed.
"""

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    seed: int = 44
    cities: int = 9
    batch: int = 24
    held_out: int = 64
    steps: int = 3
    width: int = 32
    heads: int = 4
    layers: int = 2
    hidden: int = 48
    tanh_clip: float = 6.0
    lr: float = 4e-3
    warm: int = 4
    betas: tuple = (0.9, 0.98)
    entropy: float = 0.05
    clip: float = 2.0
    momentum: float = 0.25
    level: float = 0.05


CFG = Config()
FEATURES = 5


def draw(n, gen):
    """Maps of cities in the unit square: even ones uniform, odd ones in clusters."""
    spread = torch.rand(n, CFG.cities, 2, generator=gen)
    centres = torch.rand(n, 3, 2, generator=gen)
    which = torch.randint(3, (n, CFG.cities), generator=gen)
    noise = torch.randn(n, CFG.cities, 2, generator=gen)
    near = centres.gather(1, which[..., None].expand(-1, -1, 2)) + 0.07 * noise
    maps = torch.where((torch.arange(n) % 2 == 0)[:, None, None], spread, near)
    low = maps.amin(1, keepdim=True)
    size = (maps.amax(1, keepdim=True) - low).amax(2, keepdim=True)
    return (maps - low) / size


def describe(maps):
    """Coordinates, distances to the middle and the nearest city, and the mean distance."""
    apart = torch.cdist(maps, maps, compute_mode="donot_use_mm_for_euclid_dist")
    itself = torch.eye(maps.shape[1], dtype=torch.bool)
    nearest = apart.masked_fill(itself, math.inf).amin(2)
    middle = (maps - maps.mean(1, keepdim=True)).norm(dim=2)
    mean = apart.sum(2) / (maps.shape[1] - 1)
    return torch.cat([maps, torch.stack([middle, nearest, mean], 2)], 2)


def reflections(maps):
    """The map, mirrored in both axes and at the diagonal: eight in all."""
    x, y = maps.unbind(2)
    for a, b in ((x, y), (y, x)):
        for p in (a, 1 - a):
            for q in (b, 1 - b):
                yield torch.stack([p, q], 2)


def tour_length(maps, tours):
    """Length of the closed tour."""
    there = maps.gather(1, tours[..., None].expand(-1, -1, 2))
    return (there - there.roll(-1, 1)).norm(dim=2).sum(1)


class PointerLogp(torch.autograd.Function):
    """Log probabilities of the cities still open, from clipped products with the query."""

    @staticmethod
    def forward(ctx, query, keys, visited, bound):
        scale = 1 / math.sqrt(query.shape[-1])
        squashed = torch.tanh(torch.einsum("bd,bnd->bn", query, keys) * scale)
        logp = (bound * squashed).masked_fill(visited, -math.inf).log_softmax(1)
        ctx.save_for_backward(query, keys, squashed, logp)
        ctx.bound, ctx.scale = bound, scale
        return logp

    @staticmethod
    def backward(ctx, grad):
        query, keys, squashed, logp = ctx.saved_tensors
        p = logp.exp()
        grad = grad.masked_fill(p == 0, 0.0)
        score = grad - p * grad.sum(1, keepdim=True)
        score = score * (1 - squashed.square()) * ctx.bound * ctx.scale
        to_query = torch.einsum("bn,bnd->bd", score, keys)
        return to_query, score[:, :, None] * query[:, None, :], None, None


class Entropy(torch.autograd.Function):
    """Entropy of log probabilities, some of which are -inf."""

    @staticmethod
    def forward(ctx, logp):
        safe = logp.clamp(min=-80.0)
        ctx.save_for_backward(safe)
        return -(safe.exp() * safe).sum(1)

    @staticmethod
    def backward(ctx, grad):
        (safe,) = ctx.saved_tensors
        return -grad[:, None] * safe.exp() * (1 + safe)


def heads_of(x):
    """[b, n, width] -> [b, heads, n, width / heads]"""
    return x.unflatten(-1, (CFG.heads, -1)).transpose(1, 2)


def attend(q, k, v, closed=None):
    scores = heads_of(q) @ heads_of(k).mT / math.sqrt(CFG.width // CFG.heads)
    if closed is not None:
        scores = scores.masked_fill(closed[:, None, None, :], -math.inf)
    return (scores.softmax(-1) @ heads_of(v)).transpose(1, 2).flatten(2)


class CityNorm(nn.BatchNorm1d):
    """Batch norm over maps and cities."""

    def forward(self, x):
        return super().forward(x.flatten(0, 1)).view_as(x)


class Layer(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        square = [nn.Linear(width, width, bias=False) for _ in range(4)]
        self.q, self.k, self.v, self.out = square
        self.norm1, self.norm2 = CityNorm(width), CityNorm(width)
        self.wide = nn.Linear(width, hidden)
        self.narrow = nn.Linear(hidden, width, bias=False)

    def forward(self, h):
        mixed = self.out(attend(self.q(h), self.k(h), self.v(h)))
        h = self.norm1(h + mixed)
        return self.norm2(h + self.narrow(F.relu(self.wide(h))))


class Router(nn.Module):
    def __init__(self, width, hidden, layers):
        super().__init__()
        self.register_buffer("shift", torch.zeros(FEATURES))
        self.register_buffer("spread", torch.ones(FEATURES))
        self.embed = nn.Linear(FEATURES, width)
        self.layers = nn.ModuleList([Layer(width, hidden) for _ in range(layers)])
        self.whole = nn.Linear(width, width, bias=False)
        self.step = nn.Linear(2 * width, width, bias=False)
        self.glimpse_k = nn.Linear(width, width, bias=False)
        self.glimpse_v = nn.Linear(width, width, bias=False)
        self.glimpse_out = nn.Linear(width, width, bias=False)
        self.pointer = nn.Linear(width, width, bias=False)
        self.nowhere = nn.Parameter(torch.empty(2 * width))
        nn.init.uniform_(self.nowhere, -1.0, 1.0)

    def encode(self, maps):
        h = self.embed((describe(maps) - self.shift) / self.spread)
        for layer in self.layers:
            h = layer(h)
        return h

    def forward(self, maps, dice=None):
        """Tours, their log probabilities, and mean entropies: drawn, or greedy ones."""
        h = self.encode(maps)
        glimpse_k, glimpse_v, keys = self.glimpse_k(h), self.glimpse_v(h), self.pointer(h)
        whole = self.whole(h.mean(1))
        row = torch.arange(len(maps))
        visited = torch.zeros(maps.shape[:2], dtype=torch.bool)
        ends = self.nowhere.expand(len(maps), -1)
        tour, total, entropy = [], 0.0, 0.0
        for _ in range(maps.shape[1]):
            query = (whole + self.step(ends))[:, None]
            seen = attend(query, glimpse_k, glimpse_v, visited)
            query = (query + self.glimpse_out(seen))[:, 0]
            logp = PointerLogp.apply(query, keys, visited, CFG.tanh_clip)
            if dice is None:
                city = logp.argmax(1)
            else:
                u = torch.rand(logp.shape, generator=dice).clamp(1e-6, 1 - 1e-6)
                city = (logp - (-u.log()).log()).argmax(1)
            tour.append(city)
            total = total + logp[row, city]
            entropy = entropy + Entropy.apply(logp)
            visited = visited.index_put((row, city), torch.tensor(True))
            ends = torch.cat([h[row, tour[0]], h[row, city]], 1)
        return torch.stack(tour, 1), total, entropy / maps.shape[1]


@torch.no_grad()
def warm_start(model, gen):
    """Projections of the vans' router: one matrix for a layer, q over k over v."""
    for layer in model.layers:
        packed = torch.randn(3 * CFG.width, CFG.width, generator=gen)
        packed *= torch.tensor([0.3, 0.2, 0.15]).repeat_interleave(CFG.width)[:, None]
        for part, rows in zip((layer.q, layer.k, layer.v), packed.chunk(3)):
            part.weight.copy_(rows)


@torch.no_grad()
def calibrate(model, maps):
    """Moments of the features, and the batch norms' as means over parts."""
    features = describe(maps).flatten(0, 1)
    model.shift.copy_(features.mean(0))
    model.spread.copy_(features.std(0))
    norms = [m for m in model.modules() if isinstance(m, CityNorm)]
    for norm in norms:
        norm.momentum = None
    model.train()
    for part in maps.split(16):
        model.encode(part)
    for norm in norms:
        norm.momentum = 0.1


class LengthScale(nn.Module):
    """Running moments of tours' lengths; outliers are pulled in."""

    def __init__(self, mean, var):
        super().__init__()
        self.register_buffer("mean", mean.clone())
        self.register_buffer("var", var.clone())

    @torch.no_grad()
    def update(self, length):
        self.mean.lerp_(length.mean(), CFG.momentum)
        self.var.lerp_((length - self.mean).square().mean(), CFG.momentum)

    def forward(self, length):
        z = (length - self.mean) / (self.var + 1e-5).sqrt()
        return 2 * torch.tanh(z / 2)


@torch.no_grad()
def greedy(model, maps):
    was = model.training
    model.eval()
    length = tour_length(maps, model(maps)[0])
    model.train(was)
    return length


def better(model, baseline, maps):
    """One-sided paired test: are the model's greedy tours shorter?"""
    gain = greedy(baseline, maps) - greedy(model, maps)
    z = gain.mean() / (gain.std() / math.sqrt(len(maps)) + 1e-8)
    return gain.mean() > 0 and 0.5 * math.erfc(z / math.sqrt(2)) < CFG.level


def main():
    torch.manual_seed(CFG.seed)
    gen = torch.Generator().manual_seed(CFG.seed + 1)
    dice = torch.Generator().manual_seed(CFG.seed + 2)
    known, held_out = draw(48, gen), draw(CFG.held_out, gen)

    model = Router(CFG.width, CFG.hidden, CFG.layers)
    warm_start(model, gen)
    calibrate(model, known)
    baseline = copy.deepcopy(model).requires_grad_(False).eval()
    at_random = torch.stack([torch.randperm(CFG.cities, generator=gen) for _ in known])
    first = tour_length(known, at_random)
    scale = LengthScale(first.mean(), first.var())

    opt = torch.optim.Adam(model.parameters(), CFG.lr, betas=CFG.betas)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 2) / CFG.warm))
    for step in range(CFG.steps):
        maps = draw(CFG.batch, gen)
        tours, logp, entropy = model(maps, dice)
        length = tour_length(maps, tours)
        past = greedy(baseline, maps)
        scale.update(length)
        advantage = scale(length) - scale(past)
        loss = (advantage * logp).mean() - CFG.entropy * entropy.mean()
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CFG.clip)
        opt.step()
        sched.step()
        swapped = better(model, baseline, held_out)
        if swapped:
            baseline.load_state_dict(model.state_dict())
        word = "new baseline" if swapped else ""
        print(f"{step}: {length.mean():.3f} {past.mean():.3f} {loss:.4f} {norm:.2f} {word}")

    best = torch.stack([greedy(model, maps) for maps in reflections(held_out)]).amin(0)
    print(f"held out: {greedy(model, held_out).mean():.3f}, mirrored {best.mean():.3f}")


if __name__ == "__main__":
    main()
