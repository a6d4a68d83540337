"""Three questions about wind turbines, one trunk: training where gradients clash.

How long a gearbox lasts, which part fails first and how often the turbine stops are read
from a table and a log of sensors. Few turbines have all three labels.
"""

import math
import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad
from torch.utils.data import DataLoader, Sampler

MAKERS = ("vestra", "nordal", "enkon", "siwin", "gamara", "suzlo")
TASKS = {"life": 1, "part": 5, "stops": 1}
COLUMNS, CHANNELS, LONGEST = 7, 4, 21
kwargs = {
    "data_args": {"turbines": 190, "held": 52, "batches": 6, "seed": 41},
    "arch_args": {"vector": 6, "filters": 10, "taps": 3, "hidden": 13, "width": 9},
    "gate_args": {"experts": 4, "top": 2, "pressure": 1.5, "follow": 0.3},
    "weight_args": {"alpha": 0.8, "eta": 0.4, "even": 0.2, "seed": 5},
    "optim_args": {"lr": 6e-3, "betas": (0.8, 0.95), "weight_decay": 0.1},
    "loop_args": {"epochs": 5, "warmup": 4, "clip": 1.2, "patience": 2, "average": 3},
}


def farm(turbines, gen):
    """What is known of each turbine; nan, or -1 for a part, where nothing is."""
    normal = partial(torch.randn, generator=gen)
    maker = torch.randint(len(MAKERS), (turbines,), generator=gen)
    wear = normal(turbines, 3) + 0.8 * normal(len(MAKERS), 3)[maker]
    units = 10 ** torch.linspace(-1, 2, COLUMNS)
    table = (2.0 + wear @ normal(3, COLUMNS) + 0.6 * normal(turbines, COLUMNS)) * units
    table[torch.rand(table.shape, generator=gen) < 0.15] = torch.nan
    swing = torch.sin(torch.arange(LONGEST) * (0.5 + 0.1 * wear[:, :1]))[..., None]
    logs = swing * normal(CHANNELS) + 0.4 * normal(turbines, LONGEST, CHANNELS)
    length = torch.randint(8, LONGEST + 1, (turbines,), generator=gen).tolist()
    months = torch.randint(5, 60, (turbines,), generator=gen).float()
    life = torch.exp(3.2 + 0.5 * wear[:, 0] + 0.2 * normal(turbines))
    part = (wear @ normal(3, 5) + normal(turbines, 5)).argmax(1)
    stops = torch.poisson(torch.exp(0.4 * wear[:, 2]) * months / 12, generator=gen)
    known = torch.rand(turbines, 3, generator=gen) < torch.tensor([0.6, 0.8, 0.5])
    life, part = life.where(known[:, 0], torch.nan), part.where(known[:, 1], -1)
    stops = stops.where(known[:, 2], torch.nan)
    cut = [log[:n] for log, n in zip(logs, length, strict=True)]
    names = ("maker", "table", "log", "months", "known", *TASKS)
    columns = (maker, table, cut, months, known, life, part, stops)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def column(items, name):
    return torch.stack([item[name] for item in items])


class Dealt(Sampler):
    def __init__(self, items, batches, gen):
        self.known, self.count, self.gen = column(items, "known").sum(1), batches, gen

    def __iter__(self):
        order = torch.randperm(len(self.known), generator=self.gen)
        order = order[self.known[order].argsort(stable=True)]  # by how much is known
        return (order[first :: self.count].tolist() for first in range(self.count))


class Collate:
    def __init__(self, items):
        table, life = column(items, "table"), column(items, "life").log()
        self.middle = table.nanmedian(0).values
        full = torch.where(table.isnan(), self.middle, table)
        self.mean, self.std = full.mean(0), full.std(0)
        self.life_mean, self.life_std = life.nanmean(), life[~life.isnan()].std()

    def __call__(self, items):
        batch = {name: column(items, name) for name in items[0] if name != "log"}
        gap = batch["table"].isnan()
        full = torch.where(gap, self.middle, batch["table"])
        batch["table"] = torch.cat([(full - self.mean) / self.std, gap.float()], 1)
        batch["life"] = (batch["life"].log() - self.life_mean) / self.life_std
        logs = [item["log"] for item in items]
        length = torch.tensor([len(log) for log in logs])
        batch["log"] = nn.utils.rnn.pad_sequence(logs, batch_first=True)
        batch["real"] = torch.arange(batch["log"].shape[1]) < length[:, None]
        return batch


class StraightTopK(torch.autograd.Function):
    """The largest shares of a gate, to one again; backward as if all had been kept."""

    @staticmethod
    def forward(ctx, share, top):
        kept = torch.zeros_like(share).scatter_(1, share.topk(top).indices, 1.0)
        total = (share * kept).sum(1, keepdim=True)
        out = share * kept / total
        ctx.save_for_backward(out, total)
        return out

    @staticmethod
    def backward(ctx, slope):
        out, total = ctx.saved_tensors
        return (slope - (slope * out).sum(1, keepdim=True)) / total, None


class Trunk(nn.Module):
    def __init__(self, vector, filters, taps, hidden, width, experts):
        super().__init__()
        joint = vector + 2 * COLUMNS + filters
        self.maker = nn.Embedding(len(MAKERS), vector)
        self.conv = nn.Conv1d(CHANNELS, filters, taps)
        self.query = nn.Parameter(torch.randn(filters))
        self.norm = nn.LayerNorm(joint)
        self.inlet = nn.Parameter(torch.randn(experts, joint, hidden) * joint**-0.5)
        self.shift = nn.Parameter(0.1 * torch.randn(experts, hidden))
        self.outlet = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, batch):
        log = F.pad(batch["log"].transpose(1, 2), (self.conv.kernel_size[0] - 1, 0))
        h = torch.tanh(self.conv(log)).transpose(1, 2)
        score = (h @ self.query) / math.sqrt(h.shape[2])
        look = score.masked_fill(~batch["real"], -torch.inf).softmax(1)
        read = (look[:, :, None] * h).sum(1)
        x = self.norm(torch.cat([self.maker(batch["maker"]), batch["table"], read], 1))
        h = F.silu(torch.einsum("ni,eih->neh", x, self.inlet) + self.shift)
        return x, torch.einsum("neh,ehw->new", h, self.outlet)


class Tower(nn.Module):
    def __init__(self, joint, width, outputs, experts, top, pressure, follow):
        super().__init__()
        self.top, self.pressure, self.follow = top, pressure, follow
        self.gate = nn.Linear(joint, experts, bias=False)
        self.head = nn.Sequential(nn.Linear(width, 8), nn.SiLU(), nn.Linear(8, outputs))
        self.register_buffer("usage", torch.full((experts,), 1 / experts))

    def forward(self, x, said):
        share = (self.gate(x) - self.pressure * self.usage).softmax(1)
        weight = StraightTopK.apply(share, self.top)
        if self.training:
            self.usage.lerp_(weight.detach().mean(0), self.follow)
        uneven = share.shape[1] * share.mean(0).square().sum() - 1
        return self.head((weight[:, :, None] * said).sum(1)), uneven


class Architecture(nn.Module):
    def __init__(self, arch_args, gate_args):
        super().__init__()
        self.trunk = Trunk(**arch_args, experts=gate_args["experts"])
        size = (self.trunk.inlet.shape[1], arch_args["width"])
        towers = {task: Tower(*size, n, **gate_args) for task, n in TASKS.items()}
        self.towers = nn.ModuleDict(towers)
        self.doubt = nn.Parameter(0.2 * torch.randn(len(TASKS)))

    def forward(self, batch):
        x, said = self.trunk(batch)
        return zip(*(tower(x, said) for tower in self.towers.values()), strict=True)


class Lion(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            now, keep = group["betas"]
            for p in group["params"]:
                speed = self.state[p].setdefault("speed", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * speed.lerp(p.grad, 1 - now).sign())
                speed.lerp_(p.grad, 1 - keep)


class Surgery:
    def __init__(self, net, alpha, eta, even, seed):
        self.shared = list(net.trunk.parameters())
        self.own = [*net.towers.parameters(), net.doubt]
        self.doubt, self.alpha, self.eta, self.even = net.doubt, alpha, eta, even
        self.gen = torch.Generator().manual_seed(seed)
        self.share, self.first = torch.ones(len(TASKS)), None

    def project(self, grads):
        mended = grads.clone()
        for i, one in enumerate(mended):
            for other in torch.randperm(len(grads), generator=self.gen).tolist():
                dot = one @ grads[other]
                if other != i and dot < 0:  # they clash
                    one.sub_(dot / grads[other].square().sum() * grads[other])
        return mended

    def balance(self, fits, grads):
        """GradNorm: tasks that learn slower than the others get the larger gradients."""
        self.first = fits if self.first is None else self.first
        pace, norm = fits / self.first, self.share * grads.norm(dim=1)
        wanted = norm.mean() * (pace / pace.mean()) ** self.alpha
        share = self.share * (wanted / norm) ** self.eta
        self.share = len(share) * share / share.sum()

    def backward(self, fits, uneven):
        losses = torch.exp(-self.doubt) * fits + 0.5 * self.doubt + self.even * uneven
        each = [grad(loss, self.shared, retain_graph=True) for loss in losses]
        grads = torch.stack([torch.cat([g.flatten() for g in row]) for row in each])
        self.balance(fits.detach(), grads)
        mended = self.project(self.share[:, None] * grads).sum(0)
        slopes = [*mended.split([p.numel() for p in self.shared])]
        slopes += grad((self.share * losses).sum(), self.own)
        for p, slope in zip([*self.shared, *self.own], slopes, strict=True):
            p.grad = slope.view_as(p)


class Trainer:
    def __init__(self, net, rarity, weight_args, optim_args, loop_args):
        self.net, self.rarity, self.args = net, rarity, loop_args
        self.weighting = Surgery(net, **weight_args)
        weights = [p for p in net.parameters() if p.ndim > 1]
        others = [p for p in net.parameters() if p.ndim < 2]
        groups = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = Lion(groups, optim_args)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)

    def rate(self, step, horizon=40):
        if step < self.args["warmup"]:
            return (step + 1) / self.args["warmup"]
        return 0.5 + 0.5 * math.cos(math.pi * (step - self.args["warmup"]) / horizon)

    def losses(self, batch):
        (life, part, stops), uneven = self.net(batch)
        seen, counted = ~batch["life"].isnan(), ~batch["stops"].isnan()
        score = stops[:, 0] + (batch["months"] / 12).log()
        count = batch["stops"][counted]
        each = score[counted].exp() - count * score[counted] + torch.lgamma(count + 1)
        near = F.huber_loss(life[:, 0][seen], batch["life"][seen], delta=0.7)
        right = F.cross_entropy(part, batch["part"], self.rarity, ignore_index=-1)
        return torch.stack([near, right, each.mean()]), torch.stack(uneven)

    @torch.no_grad()
    def validate(self, batches):
        self.net.eval()
        fits = torch.stack([self.losses(batch)[0] for batch in batches]).mean(0)
        self.net.train()
        return fits

    def fit(self, train, valid):
        start, scores = self.validate(valid), []
        mean, taken = self.net.state_dict(), 0
        for epoch in range(self.args["epochs"]):
            for batch in train:
                fits, uneven = self.losses(batch)
                self.weighting.backward(fits, uneven)
                nn.utils.clip_grad_norm_(self.net.parameters(), self.args["clip"])
                self.optimizer.step()
                self.scheduler.step()
            scores.append((self.validate(valid) / start).mean().item())
            sys.stdout.write(f"epoch {epoch}: {fits.tolist()}, {scores[-1]:.4f}\n")
            if epoch >= self.args["average"]:
                taken += 1
                for name, value in self.net.state_dict().items():
                    mean[name] = mean[name] + (value - mean[name]) / taken
            if min(scores) < min(scores[-self.args["patience"] :]):
                break
        self.net.load_state_dict(mean)
        return self.validate(valid) / start


def last_year(vector, filters, taps, seed=12):
    """Last year's model: makers by the alphabet, taps from the newest to the oldest."""
    gen = torch.Generator().manual_seed(seed)
    vectors = torch.randn(len(MAKERS), vector, generator=gen)
    bank = 0.3 * torch.randn(taps, CHANNELS, filters, generator=gen)
    return {"makers": sorted(MAKERS), "vectors": vectors, "bank": bank}


@torch.no_grad()
def adopt(trunk, head, saved, items):
    order = [saved["makers"].index(name) for name in MAKERS]
    trunk.maker.weight.copy_(saved["vectors"][order])
    trunk.conv.weight.copy_(saved["bank"].flip(0).permute(2, 1, 0))
    yearly = 12 * column(items, "stops") / column(items, "months")
    head[2].bias.fill_(yearly.nanmean().log())
    trunk.norm.weight.normal_(1.0, 0.1)
    trunk.norm.bias.normal_(0.0, 0.1)


def main(data_args, arch_args, gate_args, weight_args, optim_args, loop_args):
    torch.manual_seed(data_args["seed"])
    gen = torch.Generator().manual_seed(data_args["seed"])
    items = farm(data_args["turbines"], gen)
    held, items = items[: data_args["held"]], items[data_args["held"] :]
    dealt, collate = Dealt(items, data_args["batches"], gen), Collate(items)
    train = DataLoader(items, batch_sampler=dealt, collate_fn=collate)
    valid = DataLoader(held, batch_size=26, collate_fn=collate)
    net = Architecture(arch_args, gate_args)
    saved = last_year(*(arch_args[name] for name in ("vector", "filters", "taps")))
    adopt(net.trunk, net.towers["stops"].head, saved, items)
    part = column(items, "part")
    rarity = (part[part >= 0].bincount(minlength=TASKS["part"]) + 1.0).rsqrt()
    trainer = Trainer(net, rarity / rarity.mean(), weight_args, optim_args, loop_args)
    sys.stdout.write(f"averaged: {trainer.fit(train, valid).tolist()}\n")


if __name__ == "__main__":
    main(**kwargs)
