"""Where to dig: a GFlowNet walks over a field and stops in cells as often as they are rich.

Walkers start in the north-western corner and go south, east, or stop. Trajectory balance
and detailed balance teach the forward policy, the backward policy, the flows and log Z;
paths come from the policy, from sites of a survey traced back, and from the best so far.
"""

import copy
import math
import sys
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

FIELD = {"height": 7, "width": 9, "sites": 230, "shrink": 1.5, "beta": 1.7}
MODEL = {"seed": 31, "inner": 34, "outer": 26, "stay": 6.0}
PATHS = {"walkers": 20, "guided": 11, "replayed": 13, "keep": 25, "greed": 2.0}
EXPLORE = {"eps_start": 0.5, "eps_fall": 0.6, "eps_floor": 0.02}
TERMS = {"w_detail": 1.6, "w_anchor": 0.3, "w_spread": 0.9, "delta": 1.2, "lag": 0.3}
TRAIN = {"steps": 5, "warmup": 2, "lr": 2e-2, "lr_z": 0.15, "decay": 2e-2, "clip": 2.5}
args = SimpleNamespace(**FIELD, **MODEL, **PATHS, **EXPLORE, **TERMS, **TRAIN)
SOUTH, EAST, STOP, PAD = 0, 1, 2, -1
STRIDE = torch.tensor([args.width, 1, 0])
CELLS = args.height * args.width
LONGEST = args.height + args.width - 1
BLOCKED = -1e4


def survey(gen):
    """Places of the samples, in metres from the corner, and grams of metal in each."""
    size = torch.tensor([args.height, args.width]) * 10.0
    place = torch.rand(args.sites, 2, generator=gen) * size
    place = place[place[:, 0].argsort()]  # the crew went from north to south
    lodes = torch.tensor([[55.0, 18.0], [22.0, 71.0], [48.0, 66.0]])
    reach = torch.tensor([9.0, 14.0, 7.0])
    far = (place[:, None] - lodes).square().sum(2)
    grams = 0.2 + torch.exp(-0.5 * far / reach**2) @ torch.tensor([6.0, 4.0, 9.0])
    return place, grams * torch.exp(0.3 * torch.randn(args.sites, generator=gen))


class Field:
    """The survey in cells: log reward, what the network may see, and where one may go."""

    def __init__(self, place, grams):
        row, col = (place / 10.0).long().unbind(1)
        self.site = row * args.width + col
        level = grams.log()
        count = torch.zeros(CELLS).index_add_(0, self.site, torch.ones(len(level)))
        total = torch.zeros(CELLS).index_add_(0, self.site, level)
        mean = (total + args.shrink * level.mean()) / (count + args.shrink)
        self.logr = args.beta * mean
        extra = torch.stack([mean, count], 1)
        extra = (extra - extra.mean(0)) / extra.std(0)
        row, col = torch.arange(CELLS) // args.width, torch.arange(CELLS) % args.width
        rows, cols = F.one_hot(row, args.height), F.one_hot(col, args.width)
        self.code = torch.cat([rows.float(), cols.float(), extra], 1)
        south, east = row < args.height - 1, col < args.width - 1
        self.onward = torch.stack([south, east, torch.ones_like(south)], 1)
        self.back = torch.stack([row > 0, col > 0], 1)


class Sites:
    """Deals the cells of the surveyed places, mixed anew when all were dealt."""

    def __init__(self, site, gen):
        self.site, self.gen = site, gen
        self.order, self.at = torch.randperm(len(site), generator=gen), 0

    def deal(self, many):
        if self.at + many > len(self.order):
            self.order, self.at = torch.randperm(len(self.site), generator=self.gen), 0
        rows = self.order[self.at : self.at + many]
        self.at += many
        return self.site[rows]


class AllowedLogSoftmax(torch.autograd.Function):
    """Logarithms of probabilities over the actions that are allowed."""

    @staticmethod
    def forward(ctx, logits, allowed):
        masked = logits.masked_fill(~allowed, BLOCKED)
        logp = masked - masked.logsumexp(1, keepdim=True)
        ctx.save_for_backward(logp, allowed)
        return logp

    @staticmethod
    def backward(ctx, grad):
        logp, allowed = ctx.saved_tensors
        slope = grad - logp.exp() * grad.sum(1, keepdim=True)
        return slope.masked_fill(~allowed, 0.0), None


class Soft(torch.autograd.Function):
    """Square near zero, straight beyond delta."""

    @staticmethod
    def forward(ctx, x, delta):
        root = (1 + (x / delta).square()).sqrt()
        ctx.save_for_backward(x, root)
        return delta**2 * (root - 1)

    @staticmethod
    def backward(ctx, grad):
        x, root = ctx.saved_tensors
        return grad * x / root, None


class Walker(nn.Module):
    """Forward and backward policy and log flow of all cells, and log Z."""

    def __init__(self, field):
        super().__init__()
        for name in ("code", "onward", "back"):
            self.register_buffer(name, getattr(field, name))
        self.inlet = nn.Linear(field.code.shape[1], args.inner)
        self.norm = nn.LayerNorm(args.inner)
        self.middle = nn.Linear(args.inner, args.outer)
        self.ahead = nn.Linear(args.outer, 3)
        self.behind = nn.Linear(args.outer, 2)
        self.flow = nn.Linear(args.outer, 1)
        self.log_z = nn.Parameter(torch.zeros(()))
        nn.init.normal_(self.norm.weight, 1.0, 0.1)
        nn.init.normal_(self.norm.bias, 0.0, 0.1)

    def forward(self):
        h = F.silu(self.norm(self.inlet(self.code)))
        h = F.silu(self.middle(h))
        ahead = AllowedLogSoftmax.apply(self.ahead(h), self.onward)
        behind = AllowedLogSoftmax.apply(self.behind(h), self.back)
        return ahead, behind, self.flow(h).squeeze(1)


def last_year():
    """The old walker's file: inputs by outputs, the columns of the field before its rows."""
    gen = torch.Generator().manual_seed(2024)
    weight = 0.5 * torch.randn(args.width + args.height + 2, args.inner, generator=gen)
    return {"inlet": weight, "log10_z": torch.tensor(1.9), "stay": args.stay}


@torch.no_grad()
def adopt(net, saved):
    cols, rows, extra = saved["inlet"].split([args.width, args.height, 2])
    net.inlet.weight.copy_(torch.cat([rows, cols, extra]).T)
    net.log_z.copy_(saved["log10_z"] * math.log(10))
    net.flow.bias.add_(net.log_z)
    net.ahead.bias[STOP] -= math.log(saved["stay"])


def draw(prob, gen):
    """An index for each row of probabilities."""
    u = torch.rand(len(prob), 1, generator=gen)
    return (prob.cumsum(1) <= u).sum(1).clamp(max=prob.shape[1] - 1)


@torch.no_grad()
def roam(net, many, eps, gen):
    """Follow the policy, at times any action that is allowed."""
    even = net.onward / net.onward.sum(1, keepdim=True)
    prob = (1 - eps) * net()[0].exp() + eps * even
    cells = torch.zeros(many, LONGEST, dtype=torch.long)
    actions = torch.full((many, LONGEST), PAD)
    cell, alive = cells[:, 0].clone(), torch.ones(many, dtype=torch.bool)
    for t in range(LONGEST):
        action = draw(prob[cell], gen)
        cells[alive, t] = cell[alive]
        actions[alive, t] = action[alive]
        alive = alive & (action != STOP)
        cell = torch.where(alive, cell + STRIDE[action], cell)
    return cells, actions


@torch.no_grad()
def retrace(net, ends, gen):
    """Paths to given cells, from their ends by the backward policy."""
    prob = net()[1].exp()
    who, left = torch.arange(len(ends)), ends // args.width + ends % args.width
    cells = torch.zeros(len(ends), LONGEST, dtype=torch.long)
    actions = torch.full((len(ends), LONGEST), PAD)
    cells[who, left], actions[who, left] = ends, STOP
    cell = ends
    for _ in range(LONGEST - 1):
        action = draw(prob[cell], gen)
        go = left > 0
        left = left - go.long()
        cell = torch.where(go, cell - STRIDE[action], cell)
        cells[who[go], left[go]] = cell[go]
        actions[who[go], left[go]] = action[go]
    return cells, actions


def ends_of(cells, actions):
    last = (actions == STOP).long().argmax(1, keepdim=True)
    return cells.gather(1, last).squeeze(1)


class Replay:
    """The richest paths so far; the richer, the more often one is drawn."""

    def __init__(self, logr):
        self.logr = logr
        self.cells = torch.empty(0, LONGEST, dtype=torch.long)
        self.actions = torch.empty(0, LONGEST, dtype=torch.long)

    def add(self, cells, actions):
        cells = torch.cat([self.cells, cells])
        actions = torch.cat([self.actions, actions])
        worth = self.logr[ends_of(cells, actions)]
        best = worth.argsort(descending=True, stable=True)[: args.keep]
        self.cells, self.actions = cells[best], actions[best]

    def draw(self, many, gen):
        worth = self.logr[ends_of(self.cells, self.actions)]
        chance = (worth / args.greed).softmax(0)
        rows = draw(chance.expand(many, -1), gen)
        return self.cells[rows], self.actions[rows]


def balance(net, lagged, logr, cells, actions):
    """Trajectory balance, detailed balance, anchor of the root, and evenness behind."""
    ahead, behind, flow = net()
    with torch.no_grad():
        later = lagged()[2]
    live, moved = actions >= 0, (actions == SOUTH) | (actions == EAST)
    reward = logr[ends_of(cells, actions)]
    entered = torch.cat([cells[:, 1:], cells[:, :1]], 1)
    logpf = ahead[cells].gather(2, actions.clamp(min=0)[..., None]).squeeze(2) * live
    taken = torch.where(moved, actions, 0)
    logpb = behind[entered].gather(2, taken[..., None]).squeeze(2) * moved
    whole = net.log_z + logpf.sum(1) - logpb.sum(1) - reward
    after = torch.where(moved, later[entered] + logpb, reward[:, None])
    gap = (flow[cells] + logpf - after) * live
    detail = Soft.apply(gap, args.delta).sum() / live.sum()
    anchor = (flow[0] - net.log_z.detach()).square()
    certain = (behind.exp() * behind).sum(1)[entered[moved]].mean()
    return whole.square().mean(), detail, anchor, certain


@torch.no_grad()
def follow(lagged, net):
    for old, new in zip(lagged.parameters(), net.parameters(), strict=True):
        old.mul_(args.lag).add_(new, alpha=1 - args.lag)


@torch.no_grad()
def stopping(net):
    """How often each cell is the end, without drawing."""
    prob = net()[0].exp()
    reach = F.one_hot(torch.tensor(0), CELLS).float()
    for cell, action in net.onward[:, :STOP].nonzero():
        reach[cell + STRIDE[action]] += reach[cell] * prob[cell, action]
    return reach * prob[:, STOP]


def main():
    torch.manual_seed(args.seed)
    world, dice = (torch.Generator().manual_seed(args.seed + k) for k in (1, 2))
    field = Field(*survey(world))
    sites, replay = Sites(field.site, world), Replay(field.logr)
    net = Walker(field)
    adopt(net, last_year())
    lagged = copy.deepcopy(net).requires_grad_(False)
    body = [p for name, p in net.named_parameters() if name != "log_z"]
    groups = [
        {"params": [p for p in body if p.ndim == 2], "weight_decay": args.decay},
        {"params": [p for p in body if p.ndim == 1]},
        {"params": [net.log_z], "lr": args.lr_z},
    ]
    opt = torch.optim.AdamW(groups, args.lr, (0.8, 0.95), eps=1e-4, weight_decay=0.0)
    warm = [lambda k: min(1.0, (k + 1) / args.warmup)] * 2
    sched = torch.optim.lr_scheduler.LambdaLR(opt, [*warm, lambda k: 0.97**k])
    for step in range(args.steps):
        eps = max(args.eps_floor, args.eps_start * args.eps_fall**step)
        fresh = roam(net, args.walkers, eps, dice)
        guided = retrace(net, sites.deal(args.guided), dice)
        replay.add(*fresh)
        replay.add(*guided)
        sources = [(fresh, 0.5), (guided, 0.2), (replay.draw(args.replayed, dice), 0.3)]
        opt.zero_grad()
        told = 0.0
        for paths, share in sources:
            whole, detail, anchor, certain = balance(net, lagged, field.logr, *paths)
            loss = whole + args.w_detail * detail
            loss = loss + args.w_anchor * anchor + args.w_spread * certain
            (share * loss).backward()
            told += share * loss.item()
        nn.utils.clip_grad_norm_(body, args.clip)
        opt.step()
        sched.step()
        follow(lagged, net)
        sys.stdout.write(f"{step}: loss {told:.4f}, log Z {net.log_z.item():.4f}\n")
    error = (stopping(net) - field.logr.softmax(0)).abs().sum()
    sys.stdout.write(f"true {field.logr.logsumexp(0):.3f}, ends off by {error:.3f}\n")


if __name__ == "__main__":
    main()
