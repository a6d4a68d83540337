# Clicks in the search of the shop: DLRM with a ranking term, warm from last month's run.
# Non-clicks are thinned out by the logger, each surface at its own rate. The model tells
# what would be without that.
from itertools import pairwise
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

cfg = SimpleNamespace(
    seed=11, dim=8, micro=6, accumulate=2, updates=5, shown=7,
    lr_rows=0.05, lr=0.15, momentum=0.9, decay=0.02, milestones=(1, 3), gamma=0.4,
    rank=0.5, margin=0.2, start=1e-6, eps=1e-8, ctr=0.3, clip=0.1,
)  # fmt: skip
BUCKETS = {"user": 40, "item": 60, "shop": 16, "city": 12}
SALTS = {"user": 17, "item": 101, "shop": 257, "city": 911}
DENSE = ("price", "seen", "age")
WIDE, PULL = torch.tensor([0.7, 1.6, 1.0]), torch.tensor([-0.5, 0.3, 0.0])
KEPT = torch.tensor([1.0, 0.5, 0.25])  # share of non-clicks that the logger keeps
FIELDS = len(BUCKETS) + 2  # with the bag of recent items and the dense ones


def bucket(ids: Tensor, field: str) -> Tensor:
    """Multiplicative hashing, salted."""
    mixed = (ids + SALTS[field]) * 2654435761 % 2**32
    return (mixed >> 7) % BUCKETS[field]


# ---------------------------------------------------------------- sessions


def sessions(gen):
    """Endless: ids, dense and clicks of what was shown, recent items, surface."""
    taste = torch.randn(500, 4, generator=gen)
    charm = torch.randn(3000, 4, generator=gen)
    while True:
        user = int(torch.randint(500, (), generator=gen))
        surface = int(torch.randint(len(KEPT), (), generator=gen))
        item = (3000 * torch.rand(cfg.shown, generator=gen) ** 2).long()
        many = int(torch.randint(1, 6, (), generator=gen))
        recent = torch.randint(3000, (many,), generator=gen)
        heavy = torch.randn(cfg.shown, len(DENSE), generator=gen)
        dense = torch.exp(heavy * WIDE + torch.tensor([3.0, 4.0, 2.0]))
        logit = (taste[user] * charm[item]).sum(1) + heavy @ PULL - 1.0
        click = torch.rand(cfg.shown, generator=gen) < logit.sigmoid()
        keep = click | (torch.rand(cfg.shown, generator=gen) < KEPT[surface])
        if keep.sum() < 2:
            continue
        ids = {"user": torch.full_like(item, user), "item": item}
        ids |= {"shop": item % 37, "city": torch.full_like(item, user % 23)}
        ids = {field: values[keep] for field, values in ids.items()}
        yield ids, dense[keep], click[keep].float(), recent, surface


def collate(parts):
    """Sessions one after another; a bag for each row."""
    ids, dense, click, recent, surface = zip(*parts)
    size = torch.tensor([len(y) for y in click])
    session = torch.arange(len(parts)).repeat_interleave(size)
    bags = [r for r, n in zip(recent, size.tolist()) for _ in range(n)]
    starts = torch.tensor([0, *(len(r) for r in bags[:-1])]).cumsum(0)
    batch = {f: bucket(torch.cat([i[f] for i in ids]), f) for f in BUCKETS}
    batch["recent"] = bucket(torch.cat(bags), "item"), starts
    batch["dense"] = torch.log1p(torch.cat(dense))
    return batch, torch.cat(click), session, KEPT[torch.tensor(surface)][session]


# ---------------------------------------------------------------- kernels


class Dots(torch.autograd.Function):
    """Products of all pairs of vectors: [n, f, d] -> [n, f (f - 1) / 2]."""

    @staticmethod
    def forward(ctx, x, rows, cols):
        ctx.save_for_backward(x, rows, cols)
        return (x @ x.mT)[:, rows, cols]

    @staticmethod
    def backward(ctx, grad):
        x, rows, cols = ctx.saved_tensors
        square = x.new_zeros(len(x), x.shape[1], x.shape[1])
        square[:, rows, cols] = grad
        return (square + square.mT) @ x, None, None


class ThinnedBCE(torch.autograd.Function):
    """Mean cross entropy of logits of all, where non-clicks were kept with a rate."""

    @staticmethod
    def forward(ctx, logit, click, kept):
        thinned = logit - kept.log()
        ctx.save_for_backward(thinned, click)
        return (F.softplus(thinned) - click * thinned).mean()

    @staticmethod
    def backward(ctx, grad):
        thinned, click = ctx.saved_tensors
        return grad * (thinned.sigmoid() - click) / click.numel(), None, None


def in_order(score, click, session):
    """Clicked before not clicked, within a session; a session counts once."""
    gap = score[:, None] - score[None, :] - cfg.margin
    pair = (session[:, None] == session[None, :]) & (click[:, None] > click[None, :])
    many = torch.zeros(cfg.micro).index_add_(0, session, pair.sum(1).float())
    weight = pair / many.clamp(min=1.0)[session][:, None]
    return (weight * F.softplus(-gap)).sum() / (many > 0).sum().clamp(min=1)


class RowwiseAdagrad(torch.optim.Optimizer):
    """One sum of squares for a row; rows without a gradient stay."""

    def __init__(self, params, lr, start, eps):
        super().__init__(params, {"lr": lr, "eps": eps})
        for p in self.param_groups[0]["params"]:
            self.state[p]["sum"] = torch.full((len(p),), start)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                rows = p.grad.abs().sum(1).nonzero().squeeze(1)
                grad, total = p.grad[rows], self.state[p]["sum"]
                total[rows] += grad.square().mean(1)
                size = total[rows].sqrt() + group["eps"]
                p[rows] -= group["lr"] * grad / size[:, None]


# ---------------------------------------------------------------- model


def mlp(*sizes):
    layers = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers)


class ClickRank(nn.Module):
    def __init__(self):
        super().__init__()
        tables = {f: nn.Embedding(n, cfg.dim) for f, n in BUCKETS.items()}
        self.tables = nn.ModuleDict(tables)
        self.recent = nn.EmbeddingBag(BUCKETS["item"], cfg.dim, mode="mean")
        self.register_buffer("centre", torch.zeros(len(DENSE)))
        self.register_buffer("spread", torch.ones(len(DENSE)))
        self.bottom = mlp(len(DENSE), 16, cfg.dim)
        self.top = mlp(cfg.dim + FIELDS * (FIELDS - 1) // 2, 24, 12)
        self.score = nn.Linear(12, 1)
        rows, cols = torch.tril_indices(FIELDS, FIELDS, offset=-1)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("cols", cols, persistent=False)

    def forward(self, batch):
        dense = self.bottom((batch["dense"] - self.centre) / self.spread)
        vectors = [table(batch[field]) for field, table in self.tables.items()]
        vectors += [self.recent(*batch["recent"]), dense]
        dots = Dots.apply(torch.stack(vectors, 1), self.rows, self.cols)
        hidden = self.top(torch.cat([dense, dots], 1))
        return self.score(hidden).squeeze(1)


def last_month():
    """As the parameter server gives it: all tables in one, layers as [in, out]."""
    gen = torch.Generator().manual_seed(2409)
    saved = {"rows": 0.6 * torch.randn(sum(BUCKETS.values()), cfg.dim, generator=gen)}
    saved["order"] = sorted(BUCKETS)
    for name, a, b in (("0", len(DENSE), 16), ("2", 16, cfg.dim)):
        kernel = torch.randn(a, b, generator=gen) * (2 / a) ** 0.5
        saved[f"bottom/{name}/kernel"] = kernel
        saved[f"bottom/{name}/bias"] = 0.1 * torch.randn(b, generator=gen)
    saved["dense/moments"] = torch.tensor([[3.1, 4.0, 2.2], [10.1, 18.2, 5.7]])
    return saved


@torch.no_grad()
def warm_start(model, saved):
    sizes = [BUCKETS[field] for field in saved["order"]]
    for field, rows in zip(saved["order"], saved["rows"].split(sizes)):
        model.tables[field].weight.copy_(rows)
    model.recent.weight.copy_(model.tables["item"].weight)
    for name in ("0", "2"):
        layer = model.bottom[int(name)]
        layer.weight.copy_(saved[f"bottom/{name}/kernel"].T)
        layer.bias.copy_(saved[f"bottom/{name}/bias"])
    first, second = saved["dense/moments"]
    model.centre.copy_(first)
    model.spread.copy_((second - first.square()).sqrt())
    model.score.bias.fill_(torch.logit(torch.tensor(cfg.ctr)))


torch.manual_seed(cfg.seed)
stream = sessions(torch.Generator().manual_seed(cfg.seed))
model = ClickRank()
warm_start(model, last_month())
tables = [*model.tables.parameters(), *model.recent.parameters()]
layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
parameters = [p for m in layers for p in m.parameters()]
opt_rows = RowwiseAdagrad(tables, cfg.lr_rows, cfg.start, cfg.eps)
groups = [{"params": [m.weight for m in layers], "weight_decay": cfg.decay}]
groups += [{"params": [m.bias for m in layers]}]
opt = torch.optim.SGD(groups, cfg.lr, momentum=cfg.momentum)
MultiStepLR = torch.optim.lr_scheduler.MultiStepLR
scheds = [MultiStepLR(o, cfg.milestones, cfg.gamma) for o in (opt_rows, opt)]
for update in range(cfg.updates):
    opt_rows.zero_grad()
    opt.zero_grad()
    seen = 0.0
    for _ in range(cfg.accumulate):
        batch, click, session, kept = collate([next(stream) for _ in range(cfg.micro)])
        logit = model(batch)
        told = ThinnedBCE.apply(logit, click, kept)
        ranked = in_order(logit, click, session)
        loss = (told + cfg.rank * ranked) / cfg.accumulate
        loss.backward()
        seen += loss.item()
    norm = nn.utils.clip_grad_norm_(parameters, cfg.clip)
    opt_rows.step()
    opt.step()
    for sched in scheds:
        sched.step()
    print(f"update {update} loss {seen:.5f} norm {norm.item():.4f}")

with torch.no_grad():
    batch, click, session, kept = collate([next(stream) for _ in range(30)])
    logit = model(batch)
    odds = kept * (logit - kept.log()).exp()  # back to all that was shown
    weight = torch.where(click > 0, 1.0, 1 / kept)
    bias = (weight * odds / (1 + odds)).sum() / click.sum()
    apart = (session[:, None] == session) & (click[:, None] > click)
    auc = (logit[:, None] > logit)[apart].float().mean()
print(f"told to clicked {bias.item():.3f}, auc within sessions {auc.item():.3f}")
