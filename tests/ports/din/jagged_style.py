"""As a library of jagged tensors has it: no padding anywhere, segments are summed by index.

A feature is values with offsets, and one that is missing has no value. Tables have no row
for padding; an item's bias is the last column of its row. An affine map keeps its bias as
the last row of its matrix. The next item is told from the visits that stand side by side.
"""

from pathlib import Path

import torch
from torch import nn
from torch.autograd import Function

DIM, LATEST = 8, 10
EDGES = torch.tensor([18, 25, 35, 45, 55])
AUX, L2 = 0.5, 4e-3


# ------------------------------------------------------------------- jagged


class Jagged:
    """Values of all samples, and where each sample begins; offsets has one more."""

    def __init__(self, values, offsets):
        self.values, self.offsets = values, offsets

    @classmethod
    def from_lengths(cls, values, lengths):
        return cls(values, nn.functional.pad(lengths.cumsum(0), (1, 0)))

    @classmethod
    def of_single(cls, ids, is_there):
        return cls.from_lengths(ids[is_there], is_there.long())

    @property
    def count(self):
        return len(self.offsets) - 1

    @property
    def lengths(self):
        return self.offsets.diff()

    @property
    def segment(self):
        """The sample of each value."""
        return torch.repeat_interleave(torch.arange(self.count), self.lengths)

    @property
    def position(self):
        return torch.arange(len(self.values)) - self.offsets[self.segment]

    def latest(self, most):
        """The last values of each sample."""
        end = self.offsets[1:][self.segment]
        keep = torch.arange(len(self.values)) >= end - most
        return Jagged.from_lengths(self.values[keep], self.lengths.clamp(max=most))


def segment_sum(x, segment, count):
    return x.new_zeros(count, *x.shape[1:]).index_add(0, segment, x)


def segment_softmax(x, segment, count):
    top = x.new_full((count,), -torch.inf)
    top = top.scatter_reduce(0, segment, x.detach(), "amax")
    e = (x - top[segment]).exp()
    return e / segment_sum(e, segment, count)[segment]


# ---------------------------------------------------------------- functions


def affine(x, w):
    return torch.addmm(w[-1], x, w[:-1])


def softplus(x):
    return x.clamp(min=0) + (-x.abs()).exp().log1p()


class Standard(Function):
    """Columns of x with mean zero and variance one; mean and variance beside them."""

    @staticmethod
    def forward(ctx, x, eps):
        mean = x.mean(0)
        centered = x - mean
        var = centered.square().mean(0)
        rstd = (var + eps).rsqrt()
        unit = centered * rstd
        ctx.save_for_backward(unit, rstd)
        ctx.mark_non_differentiable(mean, var)
        return unit, mean, var

    @staticmethod
    def backward(ctx, grad, _mean, _var):
        unit, rstd = ctx.saved_tensors
        along = unit * (grad * unit).mean(0)
        return rstd * (grad - grad.mean(0) - along), None


class Norm(nn.Module):
    """What all norms share; mean and var are those of evaluation."""

    def __init__(self, stats, eps):
        super().__init__()
        self.eps = eps
        self.register_buffer("stats", stats)

    def forward(self, x):
        if not self.training:
            return (x - self.stats[0]) * (self.stats[1] + self.eps).rsqrt()
        unit, mean, var = Standard.apply(x, self.eps)
        unbiased = var * (len(x) / (len(x) - 1))
        self.stats.lerp_(torch.stack([mean, unbiased]), 0.1)
        return unit


class Dice(nn.Module):
    def __init__(self, leak, stats):
        super().__init__()
        self.leak = nn.Parameter(leak)
        self.norm = Norm(stats, eps=1e-8)

    def forward(self, x):
        share = self.norm(x).sigmoid()
        return x * (self.leak + (1 - self.leak) * share)


# ---------------------------------------------------------------------- net


class Relevance(nn.Module):
    """The first layer has a matrix for each of shown, visited, difference and product."""

    def __init__(self, w):
        super().__init__()
        names = ("shown", "visited", "difference", "product")
        for name, part in zip(names, w["attention.mlp.0.weight"].t().chunk(4)):
            self.register_parameter(name, nn.Parameter(part.contiguous()))
        self.bias = nn.Parameter(w["attention.mlp.0.bias"])
        self.dice = Dice(*dice_of(w, "attention.mlp.1"))
        self.second = nn.Parameter(packed(w, "attention.mlp.2"))
        self.leak = nn.Parameter(w["attention.mlp.3.weight"])
        self.last = nn.Parameter(w["attention.mlp.4.weight"][0])

    def forward(self, shown, visited, segment):
        """(samples, d), (visits, d), (visits,) -> (visits,), one in each segment."""
        h = (shown @ (self.shown + self.difference) + self.bias)[segment]
        h = h + visited @ (self.visited - self.difference)
        h = h + (shown[segment] * visited) @ self.product
        h = affine(self.dice(h), self.second)
        h = torch.where(h > 0, h, self.leak * h)
        score = (h @ self.last) / shown.shape[1] ** 0.5
        return segment_softmax(score, segment, len(shown))


class Follower(nn.Module):
    """A logit for what is visited next; its first layer is cut in two."""

    def __init__(self, w):
        super().__init__()
        past, coming = w["next_item.0.weight"].t().split(2 * DIM)
        self.past = nn.Parameter(past.contiguous())
        self.coming = nn.Parameter(coming.contiguous())
        self.bias = nn.Parameter(w["next_item.0.bias"])
        self.last = nn.Parameter(packed(w, "next_item.2"))

    def forward(self, past, items):
        past = past @ self.past + self.bias
        return [affine((past + x @ self.coming).sigmoid(), self.last) for x in items]


class Tower(nn.Module):
    """Columns: interest, mean, product, shown, user, age, hour."""

    def __init__(self, w):
        super().__init__()

        def reorder(x):
            """Profile, shown, interest, mean, product -> as above, in the last axis."""
            profile, shown, rest = x.split([3 * DIM, 2 * DIM, 6 * DIM], -1)
            return torch.cat([rest, shown, profile], -1)

        self.scale = nn.Parameter(reorder(w["deep.0.weight"]))
        self.shift = nn.Parameter(reorder(w["deep.0.bias"]))
        self.norm = Norm(reorder(stats_of(w, "deep.0")), eps=1e-5)
        first = torch.cat([reorder(w["deep.1.weight"]), w["deep.1.bias"][:, None]], 1)
        self.first = nn.Parameter(first.t().contiguous())
        self.first_dice = Dice(*dice_of(w, "deep.2"))
        self.second = nn.Parameter(packed(w, "deep.3"))
        self.second_dice = Dice(*dice_of(w, "deep.4"))
        self.last = nn.Parameter(packed(w, "deep.5"))

    def forward(self, x):
        x = self.norm(x) * self.scale + self.shift
        x = self.first_dice(affine(x, self.first))
        x = self.second_dice(affine(x, self.second))
        return affine(x, self.last)[:, 0]


class Tables(nn.ParameterDict):
    def pooled(self, name, feature):
        """The sum of each sample's rows; zeros where it has none."""
        rows = self[name][feature.values - 1]
        return segment_sum(rows, feature.segment, feature.count)

    def squares(self, name, ids):
        """Half the squares of rows that occur; the bias of an item is not among them."""
        seen = torch.zeros(len(self[name]), dtype=torch.bool)
        seen[ids - 1] = True
        return self[name][seen, :DIM].square().sum() / 2


class Interest(nn.Module):
    def __init__(self, w):
        super().__init__()
        names = ("user", "age", "hour", "category")
        tables = {name: w[name + ".weight"][1:].clone() for name in names}
        item = torch.cat([w["item.weight"], w["item_bias.weight"]], 1)
        self.tables = Tables({**tables, "item": item[1:].clone()})
        self.register_buffer("category", w["category_of"][1:])
        self.relevance = Relevance(w)
        self.follower = Follower(w)
        self.tower = Tower(w)

    def describe(self, items):
        rows = self.tables["item"][items - 1]
        category = self.tables["category"][self.category[items - 1] - 1]
        return torch.cat([rows[:, :DIM], category], 1), rows[:, DIM]

    def follow(self, visits, visited, drawn):
        """Each visit but a sample's first is told from what was drawn beside it."""
        segment, position = visits.segment, visits.position
        so_far = nn.functional.pad(visited.cumsum(0), (0, 0, 1, 0))
        so_far = so_far[1:] - so_far[visits.offsets[segment]]
        mean = so_far / (position + 1)[:, None]
        at = (position > 0).nonzero()[:, 0]
        real, fake = self.follower(mean[at - 1], [visited[at], drawn[at]])
        return (softplus(-real) + softplus(fake)).sum() / max(len(at), 1)

    def forward(self, profile, item, visits, negatives):
        segment, count = visits.segment, visits.count
        shown, bias = self.describe(item)
        visited, _ = self.describe(visits.values)
        drawn, _ = self.describe(negatives.values)
        share = self.relevance(shown, visited, segment)
        interest = segment_sum(share[:, None] * visited, segment, count)
        mean = segment_sum(visited, segment, count)
        mean = mean / visits.lengths.clamp(min=1)[:, None]
        known = [self.tables.pooled(name, profile[name]) for name in profile]
        x = torch.cat([interest, mean, shown * mean, shown, *known], 1)

        items = torch.cat([item, visits.values, negatives.values])
        ids = {name: feature.values for name, feature in profile.items()}
        ids |= {"item": items, "category": self.category[items - 1]}
        squares = [self.tables.squares(name, which) for name, which in ids.items()]
        return {
            "logit": self.tower(x) + bias,
            "aux_loss": self.follow(visits, visited, drawn),
            "l2": sum(squares),
        }


# ------------------------------------------------------------------ weights


def packed(w, name):
    """A matrix (in, out) with the bias below it."""
    return torch.cat([w[name + ".weight"].t(), w[name + ".bias"][None]])


def stats_of(w, name):
    return torch.stack([w[name + ".running_mean"], w[name + ".running_var"]])


def dice_of(w, name):
    return w[name + ".alpha"], stats_of(w, name + ".norm")


def model():
    return Interest(torch.load(Path(__file__).with_name("weights.pt")))


# ----------------------------------------------------------------- training


def forward(net, batch):
    user, age = batch["user"], batch["age"]
    group = torch.searchsorted(EDGES, age, right=True) + 1
    hour = batch["time"] % 86400 // 3600 + 1
    profile = {
        "user": Jagged.of_single(user % len(net.tables["user"]) + 1, user > 0),
        "age": Jagged.of_single(group, age > 0),
        "hour": Jagged.of_single(hour, torch.ones_like(hour, dtype=torch.bool)),
    }
    visits = Jagged.from_lengths(batch["visits"], batch["lengths"]).latest(LATEST)
    drawn = Jagged.from_lengths(batch["negatives"], batch["lengths"]).latest(LATEST)
    return net(profile, batch["item"], visits, drawn)


def loss(output, batch):
    z = output["logit"]
    each = softplus(z) - batch["clicked"] * z
    click = (batch["weight"] @ each) / len(z)
    return click + AUX * output["aux_loss"] + L2 * output["l2"]


class FusedTables:
    """Adagrad of the rows that a batch has touched."""

    def __init__(self, tables):
        self.tables = tables
        self.moment = [torch.full_like(t, 1e-4) for t in tables]
        self.step_count = 0

    def step(self):
        rate = 0.05 / (1 + 0.2 * self.step_count)
        self.step_count += 1
        for table, moment in zip(self.tables, self.moment):
            rows = table.grad.ne(0).any(1).nonzero()[:, 0]
            grad = table.grad[rows]
            total = moment[rows] + grad.square()
            moment[rows] = total
            table[rows] -= rate * grad / total.sqrt()


class FlatAdam:
    """All parameters as one vector; the rate shrinks by the same factor each step."""

    def __init__(self, params):
        self.params = params
        self.first = torch.zeros(sum(p.numel() for p in params))
        self.second = torch.zeros_like(self.first)
        self.rate = 4e-3
        self.left_1 = self.left_2 = 1.0

    def step(self):
        grad = torch.cat([p.grad.flatten() for p in self.params])
        self.left_1 *= 0.9
        self.left_2 *= 0.999
        self.first = 0.9 * self.first + 0.1 * grad
        self.second = 0.999 * self.second + 0.001 * grad.square()
        mean = self.first / (1 - self.left_1)
        root = (self.second / (1 - self.left_2)).sqrt()
        change = self.rate * mean / (root + 1e-8)
        for p, d in zip(self.params, change.split([p.numel() for p in self.params])):
            p -= d.view_as(p)
        self.rate *= 0.5 ** (1 / 3)


class Trainer(torch.optim.Optimizer):
    def __init__(self, net):
        tables = list(net.tables.values())
        dense = [p for name, p in net.named_parameters() if "tables" not in name]
        super().__init__(tables + dense, {})
        self.parts = (FusedTables(tables), FlatAdam(dense))

    @torch.no_grad()
    def step(self, closure=None):
        for part in self.parts:
            part.step()


def optimizer(net):
    return Trainer(net)
