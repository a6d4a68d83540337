"""Order the offers of a search: LambdaRank over lists, from the linear ranker in production."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEED = 31
QUERIES, MICRO, ACCUMULATE, UPDATES = 72, 4, 3, 3
COUNTS = ("sold", "seen", "returned")  # heavy tails
PLAIN = ("match", "stars", "price")
COLUMNS = (*COUNTS, *PLAIN)
FIELDS = {"brand": 7, "seller": 101, "word": 4001}  # and their salts
BUCKETS, DIM, WIDTH = 48, 8, 24
GRADES, TOP, LONGEST = 4, 4, 9
SLOPE, RESIDUAL = 1.5, 0.5
LR, WARMUP, DECAY, CLIP, MEMORY = 8e-3, 4, 0.5, 0.45, 0.7
PRODUCTION = {
    "match": 0.9,
    "sold": 0.5,
    "stars": 0.35,
    "price": -0.25,
    "returned": -0.2,
}


class Query(NamedTuple):
    counts: Tensor  # [offers, 3], not yet logarithms
    plain: Tensor  # [offers, 3]
    ids: Tensor  # [offers, fields], any whole numbers
    grade: Tensor  # [offers], 0 to 3


class Batch(NamedTuple):
    dense: Tensor
    ids: Tensor
    grade: Tensor
    mask: Tensor


# --- queries


def simulate(gen) -> list[Query]:
    charm = torch.randn(300, generator=gen)
    queries = []
    for _ in range(QUERIES):
        n = int(torch.randint(4, LONGEST + 1, (), generator=gen))
        z = torch.randn(n, len(COLUMNS), generator=gen)
        ids = torch.randint(300, (n, len(FIELDS)), generator=gen)
        ids[:, 2] = ids[0, 2]  # the word that was searched for
        taste = z @ torch.tensor([0.6, 0.1, -0.4, 0.9, 0.4, -0.3])
        taste = taste + 0.5 * charm[ids[:, 0]] + 0.4 * torch.randn(n, generator=gen)
        grade = torch.bucketize(taste, torch.tensor([-0.4, 0.6, 1.5]))
        counts = (
            z[:, :3] * torch.tensor([1.0, 1.4, 0.7]) + torch.tensor([3.0, 5.0, 1.0])
        ).exp()
        plain = z[:, 3:] * torch.tensor([0.2, 0.6, 15.0]) + torch.tensor(
            [0.5, 3.8, 40.0]
        )
        queries.append(Query(counts.floor(), plain, ids, grade))
    return queries


def dense(query: Query) -> Tensor:
    return torch.cat([torch.log1p(query.counts), query.plain], 1)


def moments(queries) -> tuple[Tensor, Tensor]:
    """Over all offers of the training set, once."""
    rows = torch.cat([dense(query) for query in queries])
    return rows.mean(0), rows.var(0, correction=0).sqrt()


def hashed(ids: Tensor) -> Tensor:
    """One table for all fields; row 0 is kept for what pads."""
    salts = torch.tensor([*FIELDS.values()])
    mixed = (ids + salts) * 2246822519 % 2**32
    return 1 + (mixed >> 11) % (BUCKETS - 1)


def collate(queries, mean, std) -> Batch:
    longest = max(len(query.grade) for query in queries)
    x = torch.zeros(len(queries), longest, len(COLUMNS))
    ids = torch.zeros(len(queries), longest, len(FIELDS), dtype=torch.long)
    grade = torch.zeros(len(queries), longest, dtype=torch.long)
    mask = torch.zeros(len(queries), longest, dtype=torch.bool)
    for row, query in enumerate(queries):
        n = len(query.grade)
        x[row, :n] = (dense(query) - mean) / std
        ids[row, :n] = hashed(query.ids)
        grade[row, :n] = query.grade
        mask[row, :n] = True
    return Batch(x, ids, grade, mask)


def stream(queries, mean, std, gen):
    while True:
        order = torch.randperm(len(queries), generator=gen).tolist()
        for at in range(0, len(order) - MICRO + 1, MICRO):
            yield collate([queries[i] for i in order[at : at + MICRO]], mean, std)


# --- ranking


def places(score: Tensor, mask: Tensor) -> Tensor:
    """The place of each offer, from 0; what pads comes last."""
    order = score.masked_fill(~mask, -math.inf).argsort(1, descending=True)
    return torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1]).expand_as(order)
    )


def best(gain: Tensor, discount: Tensor) -> Tensor:
    ideal = gain.sort(1, descending=True).values
    return (ideal * discount[: gain.shape[1]]).sum(1).clamp(min=1e-6)


class LambdaLoss(torch.autograd.Function):
    """Logistic loss of pairs, each by what its exchange would do to NDCG; one a query."""

    @staticmethod
    def forward(ctx, score, gain, mask, discount):
        seen = discount[places(score, mask)]
        swap = (gain[:, :, None] - gain[:, None]) * (seen[:, :, None] - seen[:, None])
        swap = swap.abs() / best(gain, discount)[:, None, None]
        better = (gain[:, :, None] > gain[:, None]) & mask[:, :, None] & mask[:, None]
        weight = swap * better
        gap = SLOPE * (score[:, :, None] - score[:, None])
        ctx.save_for_backward(weight, gap)
        return (weight * F.softplus(-gap)).sum((1, 2))

    @staticmethod
    def backward(ctx, grad):
        weight, gap = ctx.saved_tensors
        push = SLOPE * weight * torch.sigmoid(-gap)
        return grad[:, None] * (push.sum(1) - push.sum(2)), None, None, None


@torch.no_grad()
def ndcg(score, gain, mask, discount):
    reached = (gain * discount[places(score, mask)]).sum(1)
    return (reached / best(gain, discount)).mean()


class Meter(nn.Module):
    """An exponential average that knows how much it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("value", torch.zeros(()))
        self.register_buffer("weight", torch.zeros(()))

    def forward(self, new):
        self.value.mul_(MEMORY).add_((1 - MEMORY) * new)
        self.weight.mul_(MEMORY).add_(1 - MEMORY)
        return self.value / self.weight


# --- model


class Attention(nn.Module):
    """Offers of one list look at one another."""

    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, h, mask):
        n, length, width = h.shape
        q, k, v = self.qkv(h).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(width // self.heads)
        scores = scores.masked_fill(~mask[:, None, None], -math.inf)
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(n, length, width))


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("discount", torch.zeros(LONGEST))
        self.register_buffer("gains", torch.zeros(GRADES))
        self.table = nn.Embedding(BUCKETS, DIM, padding_idx=0)
        self.inlet = nn.Linear(len(COLUMNS) + DIM, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.score = nn.Linear(WIDTH, 1, bias=False)
        self.linear = nn.Linear(len(COLUMNS), 1, bias=False)
        self.meter = Meter()

    def forward(self, batch):
        ids = self.table(batch.ids).sum(2)
        h = F.gelu(self.inlet(torch.cat([batch.dense, ids], 2)))
        h = h + RESIDUAL * self.attention(self.norm(h), batch.mask)
        h = F.gelu(self.hidden(h))
        return (self.score(h) + self.linear(batch.dense)).squeeze(2)


def last_table():
    """The table of the retrieval tower, bytes with a scale for each row."""
    gen = torch.Generator().manual_seed(77)
    rows = torch.randn(BUCKETS, DIM, generator=gen)
    scale = (0.1 + torch.rand(BUCKETS, generator=gen)) * rows.abs().amax(1) / 127
    return {
        "bytes": (rows / rows.abs().amax(1)[:, None] * 127).round().char(),
        "scale": scale,
    }


@torch.no_grad()
def prepare(model, saved):
    place = torch.arange(LONGEST)
    model.discount.copy_((place < TOP) / torch.log2(place + 2.0))
    model.gains.copy_(2.0 ** torch.arange(GRADES) - 1)
    model.table.weight.copy_(saved["bytes"] * saved["scale"][:, None])
    model.table.weight[0] = 0
    model.linear.weight.zero_()
    for name, value in PRODUCTION.items():
        model.linear.weight[0, COLUMNS.index(name)] = value


# --- training


def rate(update):
    """Up over the first updates, then down by the root."""
    return min((update + 1) / WARMUP, math.sqrt(WARMUP / (update + 1)))


def main():
    torch.manual_seed(SEED)
    gen = torch.Generator().manual_seed(SEED + 1)
    queries = simulate(gen)
    mean, std = moments(queries)
    model = Ranker()
    prepare(model, last_table())
    matrices = [
        model.inlet,
        model.attention.qkv,
        model.attention.out,
        model.hidden,
        model.score,
    ]
    decayed = [layer.weight for layer in matrices]
    known = {id(p) for p in decayed}
    rest = [p for p in model.parameters() if id(p) not in known]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": rest}]
    opt = torch.optim.AdamW(
        groups, lr=LR, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.0
    )
    sched = torch.optim.lr_scheduler.LambdaLR(opt, rate)
    batches = stream(queries, mean, std, gen)

    for update in range(UPDATES):
        opt.zero_grad()
        seen, reached = 0.0, []
        for _ in range(ACCUMULATE):
            batch = next(batches)
            score = model(batch)
            gain = model.gains[batch.grade]
            each = LambdaLoss.apply(score, gain, batch.mask, model.discount)
            loss = each.mean() / ACCUMULATE
            loss.backward()
            seen += loss.item()
            reached.append(ndcg(score, gain, batch.mask, model.discount))
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        opt.step()
        sched.step()
        average = model.meter(torch.stack(reached).mean())
        print(f"{update} loss {seen:.4f} norm {norm:.3f} ndcg {average:.4f}")


if __name__ == "__main__":
    main()
