"""Without padding: all events of a batch in columns, by time; gradients by hand.

An event is a column of ``x`` (width, events). First come the first events of all users,
then the second ones. Tables have no row for padding, and are (width, rows).
"""

import math
from pathlib import Path

import torch
from torch import nn
from torch.autograd import Function

WIDTH, HEADS, LAYERS, CATALOGUE = 24, 3, 2, 60
SIZE = WIDTH // HEADS
EPS = 1e-5
CONFIDENCE = 0.9
EDGES = (0, 1, 3, 7, 15, 31)


class Standardize(Function):
    """Layer norm of columns; affine (2, width): gain and shift."""

    @staticmethod
    def forward(ctx, x, affine):
        centred = x - x.mean(0)
        inv = (centred.square().mean(0) + EPS).rsqrt()
        unit = centred * inv
        ctx.save_for_backward(unit, inv, affine)
        return torch.addcmul(affine[1][:, None], affine[0][:, None], unit)

    @staticmethod
    def backward(ctx, grad):
        unit, inv, affine = ctx.saved_tensors
        gaffine = torch.stack([(grad * unit).sum(1), grad.sum(1)])
        g = grad * affine[0][:, None]
        along = (g * unit).mean(0)
        gx = (g - g.mean(0) - unit * along) * inv
        return gx, gaffine


class GapBias(Function):
    """table (heads, buckets), bucket (events, events) -> (heads, events, events)."""

    @staticmethod
    def forward(ctx, table, bucket):
        ctx.save_for_backward(bucket)
        ctx.buckets = table.shape[1]
        return table[:, bucket]

    @staticmethod
    def backward(ctx, grad):
        (bucket,) = ctx.saved_tensors
        rows = grad.new_zeros(len(grad), ctx.buckets)
        rows.index_add_(1, bucket.flatten(), grad.flatten(1))
        return rows, None


class Attend(Function):
    """qkv (heads, 3, size, events), bias (heads, events, events), seen (events, events)."""

    @staticmethod
    def forward(ctx, qkv, bias, seen):
        q, k, v = qkv.unbind(1)
        score = torch.baddbmm(bias, q.mT, k, alpha=SIZE**-0.5)
        score = score.masked_fill(~seen, -math.inf)
        score = (score - score.amax(-1, keepdim=True)).exp()
        share = score / score.sum(-1, keepdim=True)
        ctx.save_for_backward(q, k, v, share)
        return v @ share.mT

    @staticmethod
    def backward(ctx, grad):
        q, k, v, share = ctx.saved_tensors
        gv = grad @ share
        gshare = grad.mT @ v
        inner = (gshare * share).sum(-1, keepdim=True)
        gscore = share * (gshare - inner)
        gq = k @ gscore.mT * SIZE**-0.5
        gk = q @ gscore * SIZE**-0.5
        return torch.stack([gq, gk, gv], dim=1), gscore, None


class Gelu(Function):
    @staticmethod
    def forward(ctx, x):
        below = 0.5 * torch.erfc(-x * math.sqrt(0.5))
        ctx.save_for_backward(x, below)
        return x * below

    @staticmethod
    def backward(ctx, grad):
        x, below = ctx.saved_tensors
        density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return grad * (below + x * density)


class SmoothedSurprise(Function):
    """logits (catalogue, events), target (events), -1 where there is none."""

    @staticmethod
    def forward(ctx, logits, target):
        counted = target >= 0
        rest = (1 - CONFIDENCE) / len(logits)
        wanted = torch.full_like(logits, rest)
        columns = torch.arange(len(target))
        wanted[target.clamp(min=0), columns] += CONFIDENCE
        logp = logits - torch.logsumexp(logits, 0)
        each = -(wanted * logp).sum(0) * counted
        ctx.save_for_backward(logp, wanted, counted)
        return each.sum() / counted.sum()

    @staticmethod
    def backward(ctx, grad):
        logp, wanted, counted = ctx.saved_tensors
        return grad * (logp.exp() - wanted) * counted / counted.sum(), None


class Look(Function):
    """Columns of a table, (width, rows) at (...) -> (width, ...)."""

    @staticmethod
    def forward(ctx, table, index):
        ctx.save_for_backward(index)
        ctx.shape = table.shape
        return table[:, index]

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        rows = grad.new_zeros(ctx.shape)
        rows.index_add_(1, index.flatten(), grad.flatten(1))
        return rows, None


class Events:
    """Where the events of a batch are."""

    def __init__(self, items, hours):
        user, slot = items.nonzero().unbind(1)
        self.length = (items > 0).sum(1)
        rank = slot - (items.shape[1] - self.length)[user]
        order = torch.argsort(rank * len(items) + user)
        self.by_user = torch.argsort(order)
        self.user, self.rank = user[order], rank[order]
        slot = slot[order]
        self.item = items[self.user, slot] - 1
        self.hour = hours[self.user, slot]

    def seen(self):
        """(asking, asked)"""
        same = self.user[:, None] == self.user
        return same & (self.rank[:, None] >= self.rank)

    def bucket(self):
        waited = (self.hour[:, None] - self.hour).clamp(min=0)
        return sum((waited > edge).long() for edge in EDGES)

    def last(self):
        """The column of each user's last event."""
        ends = self.rank == self.length[self.user] - 1
        column = torch.empty_like(self.length)
        column[self.user[ends]] = ends.nonzero()[:, 0]
        return column


class Layer(nn.Module):
    def __init__(self, weights):
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight.clone().contiguous()))

    def attention(self, x, bucket, seen):
        x = Standardize.apply(x, self.affine_a)
        qkv = (self.qkv @ x).view(HEADS, 3, SIZE, -1)
        bias = GapBias.apply(self.gap, bucket)
        y = Attend.apply(qkv, bias, seen).reshape(WIDTH, -1)
        return torch.addmm(self.mix_shift, self.mix, y)

    def expert(self, x):
        x = Standardize.apply(x, self.affine_b)
        x = torch.addmm(self.wide_shift, self.wide, x)
        return torch.addmm(self.narrow_shift, self.narrow, Gelu.apply(x))

    def forward(self, x, bucket, seen):
        x = x + self.attention(x, bucket, seen)
        return x + self.expert(x)


class Recommender(nn.Module):
    def __init__(self, layers, tables):
        super().__init__()
        self.layers = nn.ModuleList([Layer(weights) for weights in layers])
        for name, table in tables.items():
            self.register_parameter(name, nn.Parameter(table.clone().contiguous()))

    def forward(self, items, hours, candidates):
        events = Events(items, hours)
        bucket, seen = events.bucket(), events.seen()
        x = Look.apply(self.catalogue, events.item)
        x = x * math.sqrt(WIDTH) + Look.apply(self.ranks, events.rank)
        for layer in self.layers:
            x = layer(x, bucket, seen)
        x = Standardize.apply(x, self.affine)

        logits = torch.addmm(self.popularity[:, None], self.catalogue.t(), x)
        taste = x[:, events.last()]
        offered = Look.apply(self.catalogue, candidates - 1)
        scores = (taste[:, :, None] * offered).sum(0)
        scores = scores + self.popularity[candidates - 1]
        return logits[:, events.by_user], scores


def read(state):
    """Weights of the layers, and of what they share."""

    def affine(name):
        return torch.stack([state[f"{name}.weight"], state[f"{name}.bias"]])

    layers = []
    for i in range(LAYERS):
        attention, ffn = f"blocks.{i}.attention", f"blocks.{i}.ffn"
        parts = [state[f"{attention}.{n}.weight"] for n in ("query", "key", "value")]
        qkv = torch.stack([p.view(HEADS, SIZE, WIDTH) for p in parts], dim=1)
        layers.append(
            {
                "affine_a": affine(f"blocks.{i}.norm1"),
                "qkv": qkv.reshape(3 * WIDTH, WIDTH),
                "gap": state[f"{attention}.gap.weight"].t(),
                "mix": state[f"{attention}.out.weight"],
                "mix_shift": state[f"{attention}.out.bias"][:, None],
                "affine_b": affine(f"blocks.{i}.norm2"),
                "wide": state[f"{ffn}.conv1.weight"].squeeze(2),
                "wide_shift": state[f"{ffn}.conv1.bias"][:, None],
                "narrow": state[f"{ffn}.conv2.weight"].squeeze(2),
                "narrow_shift": state[f"{ffn}.conv2.bias"][:, None],
            }
        )
    tables = {
        "catalogue": state["item.weight"][1:].t(),
        "ranks": state["position.weight"][1:].t(),
        "affine": affine("norm"),
        "popularity": state["item_bias"],
    }
    return layers, tables


def model():
    return Recommender(*read(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    logits, scores = net(batch["items"], batch["hours"], batch["candidates"])
    return {"logits": logits.t(), "scores": scores}


def loss(output, batch):
    target = batch["targets"][batch["items"] > 0] - 1
    surprise = SmoothedSurprise.apply(output["logits"].t(), target)
    margin = output["scores"][:, 0:1] - output["scores"][:, 1:]
    misranked = torch.log1p(torch.exp(-margin)).mean()
    return surprise + 0.5 * misranked


class FlatAdam(torch.optim.Optimizer):
    """All weights are one vector; ``fades`` says which of them decay."""

    fades = ("qkv", "mix", "wide", "narrow", "catalogue")

    def __init__(self, named, peak, warm, fade, limit):
        named = sorted(named, key=lambda pair: pair[0])
        super().__init__([p for _, p in named], {})
        self.fade = [fade * (n.rpartition(".")[2] in self.fades) for n, _ in named]
        self.peak, self.warm, self.limit = peak, warm, limit
        self.t, self.moments = 0, None

    def rate(self):
        warm = self.warm
        return self.peak * (self.t / warm if self.t < warm else (warm / self.t) ** 0.5)

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        sizes = [p.numel() for p in params]
        self.t += 1
        rate = self.rate()
        g = torch.cat([p.grad.flatten() for p in params])
        length = torch.linalg.vector_norm(g)
        g = g * (self.limit / length).clamp(max=1)
        if self.moments is None:
            self.moments = torch.zeros_like(g), torch.zeros_like(g)
        m, v = self.moments
        m.lerp_(g, 0.1)
        v.lerp_(g * g, 0.02)
        root = (v / (1 - 0.98**self.t)).sqrt_().add_(1e-6)
        move = m / root * (rate / (1 - 0.9**self.t))
        for p, part, fade in zip(params, move.split(sizes), self.fade):
            p.mul_(1 - rate * fade).sub_(part.view_as(p))


def optimizer(net):
    return FlatAdam(net.named_parameters(), peak=8e-3, warm=2, fade=0.1, limit=1.0)
