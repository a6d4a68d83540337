#!/usr/bin/env python3
"""Rotations in the complex plane for the graph of parts and who supplies them.

Begins with the tables of the last release; entities that are new begin at random.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Settings:
    seed: int = 23
    entities: int = 48
    relations: int = 6
    dim: int = 12
    steps: int = 3
    accumulate: int = 2
    batch: int = 24
    negatives: int = 14
    margin: float = 9.0
    alpha: float = 0.6
    n3: float = 0.02
    lr_entity: float = 0.4
    lr_relation: float = 0.1
    start: float = 1e-3
    warmup: int = 4


S = Settings()
NAMES = [f"part-{(37 * i) % 101:03d}" for i in range(S.entities)]
FAN = (2, 3, 4, 6, 2, 3)  # tails of a head, by relation


# ------------------------------------------------------------------ graph


def make_graph(gen):
    """Triples (head, relation, tail): a tail is near to where its relation turns a head."""
    at = 2 * math.pi * torch.rand(S.entities, 2, generator=gen)
    turn = 2 * math.pi * torch.rand(S.relations, 2, generator=gen)
    triples = []
    for relation, fan in enumerate(FAN):
        gap = at[:, None] + turn[relation] - at[None, :]
        near = torch.cos(gap).sum(2).topk(fan, dim=1).indices
        heads = torch.arange(S.entities)[:, None].expand_as(near)
        found = torch.stack([heads, torch.full_like(near, relation), near], 2)
        triples.append(found.reshape(-1, 3))
    triples = torch.cat(triples)
    triples = triples[torch.rand(len(triples), generator=gen) < 0.7]
    held_out = torch.randperm(len(triples), generator=gen) < 40
    return triples[~held_out], triples[held_out]


def keys_of(head, relation, tail):
    """One number for each triple."""
    return (head * S.relations + relation) * S.entities + tail


def head_shares(triples):
    """How often the head is the one to be replaced, by relation (Wang et al., 2014)."""
    tails, heads = defaultdict(set), defaultdict(set)
    for h, r, t in triples.tolist():
        tails[r, h].add(t)
        heads[r, t].add(h)
    shares = torch.empty(S.relations)
    for relation in range(S.relations):
        per_head = [len(v) for (r, _), v in tails.items() if r == relation]
        per_tail = [len(v) for (r, _), v in heads.items() if r == relation]
        tph, hpt = sum(per_head) / len(per_head), sum(per_tail) / len(per_tail)
        shares[relation] = tph / (tph + hpt)
    return shares


def rarity(triples):
    """Triples whose (head, relation) or (relation, tail) is frequent count less."""
    out = Counter((h, r) for h, r, _ in triples.tolist())
    into = Counter((r, t) for _, r, t in triples.tolist())
    count = [out[h, r] + into[r, t] for h, r, t in triples.tolist()]
    return torch.tensor(count, dtype=torch.float32).rsqrt()


def corrupt(triples, shares, known, gen):
    """Heads and tails [n, k] of wrong triples, and which of them are not wrong at all."""
    h, r, t = triples[:, None].expand(-1, S.negatives, -1).unbind(2)
    other = torch.randint(S.entities, h.shape, generator=gen)
    at_head = torch.rand(h.shape, generator=gen) < shares[r]
    heads = torch.where(at_head, other, h)
    tails = torch.where(at_head, t, other)
    return heads, tails, torch.isin(keys_of(heads, r, tails), known)


# ------------------------------------------------------------------ model


class RotateDistance(torch.autograd.Function):
    """Sum over coordinates of care |head exp(i phase) - tail|; last axis is (re, im)."""

    @staticmethod
    def forward(ctx, head, phase, care, tail):
        a, b = head.chunk(2, -1)
        c, d = tail.chunk(2, -1)
        cos, sin = phase.cos(), phase.sin()
        re = a * cos - b * sin - c
        im = a * sin + b * cos - d
        size = (re * re + im * im + 1e-6).sqrt()
        ctx.save_for_backward(head, phase, care, tail, re, im, size)
        return (care * size).sum(-1)

    @staticmethod
    def backward(ctx, grad):
        head, phase, care, tail, re, im, size = ctx.saved_tensors
        c, d = tail.chunk(2, -1)
        cos, sin = phase.cos(), phase.sin()
        grad = grad.unsqueeze(-1)
        pull = grad * care / size
        to_re, to_im = pull * re, pull * im
        to_head = torch.cat([to_re * cos + to_im * sin, to_im * cos - to_re * sin], -1)
        to_phase = to_im * (re + c) - to_re * (im + d)
        to_tail = -torch.cat([to_re, to_im], -1)
        return (
            to_head.sum_to_size(head.shape),
            to_phase.sum_to_size(phase.shape),
            (grad * size).sum_to_size(care.shape),
            to_tail.sum_to_size(tail.shape),
        )


class Rotations(nn.Module):
    def __init__(self):
        super().__init__()
        self.entity = nn.Embedding(S.entities, 2 * S.dim)
        self.phase = nn.Embedding(S.relations, S.dim)
        self.care = nn.Embedding(S.relations, S.dim)
        nn.init.normal_(self.care.weight, 0.5, 0.1)

    def forward(self, heads, relations, tails):
        """Distances [n, k] of heads [n, k or 1] and tails [n, 1 or k] under relations [n]."""
        phase = self.phase(relations)[:, None]
        care = F.softplus(self.care(relations))[:, None]
        return RotateDistance.apply(self.entity(heads), phase, care, self.entity(tails))

    def cubes(self, triples):
        """N3: cubes of the moduli of a triple's entities, summed up."""
        re, im = self.entity(triples[:, [0, 2]]).chunk(2, -1)
        return (re.square() + im.square()).pow(1.5).sum((1, 2))


def last_release(gen):
    """Tables as they were published: by name, (re, im) side by side, angles in degrees."""
    names = sorted(NAMES)[: S.entities - 5]
    vectors = torch.randn(len(names), S.dim, 2, generator=gen)
    vectors = vectors / vectors.square().sum((1, 2), keepdim=True).sqrt()
    degrees = 360 * torch.rand(S.relations, S.dim, generator=gen) - 180
    return {"names": names, "vectors": math.sqrt(S.dim) * vectors, "degrees": degrees}


@torch.no_grad()
def adopt(model, saved):
    rows = torch.tensor([NAMES.index(name) for name in saved["names"]])
    model.entity.weight[rows] = saved["vectors"].transpose(1, 2).flatten(1)
    model.phase.weight.copy_(saved["degrees"] * (math.pi / 180))


@torch.no_grad()
def normalise(table):
    """Rows back to the sphere."""
    table.mul_(math.sqrt(S.dim) / table.norm(dim=1, keepdim=True))


class RowAdagrad(torch.optim.Optimizer):
    """One sum of squares for each row; rows without a gradient are left alone."""

    def __init__(self, groups, start, eps=1e-8):
        super().__init__(groups, {"eps": eps})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.full((len(p),), start)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                rows = p.grad.any(1).nonzero()[:, 0]
                grad, total = p.grad[rows], self.state[p]["sum"]
                total.index_add_(0, rows, grad.square().mean(1))
                pace = group["lr"] / (total[rows].sqrt() + group["eps"])
                p.index_add_(0, rows, -pace[:, None] * grad)


def objective(positive, negative, known, weight):
    """Log-sigmoid of the margin, negatives by how hard they are (Sun et al., 2019)."""
    hard = (-S.alpha * negative).masked_fill(known, -math.inf)
    hard = hard.softmax(1).detach()
    near = F.logsigmoid(S.margin - positive)
    far = (hard * F.logsigmoid(negative - S.margin)).sum(1)
    return -(weight * (near + far)).sum() / (2 * weight.sum())


@torch.no_grad()
def filtered_ranks(model, triples, known):
    """Ranks of the tails among all entities that would be wrong."""
    h, r, t = triples.unbind(1)
    everyone = torch.arange(S.entities).expand(len(triples), -1)
    distance = model(h[:, None], r, everyone)
    right = distance.gather(1, t[:, None])
    skip = torch.isin(keys_of(h[:, None], r[:, None], everyone), known)
    return 1 + ((distance < right) & ~skip).sum(1)


# ------------------------------------------------------------------ training

torch.manual_seed(S.seed)
gen = torch.Generator().manual_seed(S.seed + 1)
train, test = make_graph(gen)
known = keys_of(*train.unbind(1))
shares, weights = head_shares(train), rarity(train)

model = Rotations()
adopt(model, last_release(gen))
groups = [
    {"params": [model.entity.weight], "lr": S.lr_entity},
    {"params": [model.phase.weight, model.care.weight], "lr": S.lr_relation},
]
opt = RowAdagrad(groups, S.start)
warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: min(1.0, (n + 1) / S.warmup))

batches = iter(torch.randperm(len(train), generator=gen).split(S.batch))
for step in range(S.steps):
    opt.zero_grad()
    seen = 0.0
    for _ in range(S.accumulate):
        rows = next(batches)
        triples = train[rows]
        h, r, t = triples.unbind(1)
        heads, tails, true = corrupt(triples, shares, known, gen)
        positive = model(h[:, None], r, t[:, None])[:, 0]
        negative = model(heads, r, tails)
        loss = objective(positive, negative, true, weights[rows])
        loss = loss + S.n3 * model.cubes(triples).mean()
        loss = loss / S.accumulate
        loss.backward()
        seen += loss.item()
    opt.step()
    normalise(model.entity.weight)
    warm.step()
    print(
        f"step {step} loss {seen:.4f} apart {(negative.mean() - positive.mean()).item():.3f}"
    )

ranks = filtered_ranks(model, test, torch.cat([known, keys_of(*test.unbind(1))]))
print(
    f"mrr {ranks.float().reciprocal().mean():.3f} hits@10 {(ranks <= 10).float().mean():.3f}"
)
