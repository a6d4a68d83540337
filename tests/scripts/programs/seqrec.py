# Next item in a shop, from what somebody looked at before: a small causal transformer that
# scores with the same table it reads. The softmax is over drawn items, corrected for how
# often each is drawn. Tables and layers have optimizers of their own.
import math
from argparse import Namespace

import torch
import torch.nn.functional as F
from torch import nn

hp = Namespace(
    seed=4, items=64, genres=6, people=90, span=10, width=16, heads=2, depth=2, drop=0.1,
    micro=8, accumulate=2, negatives=24, flatten=0.75, lr_tables=0.03, lr=0.01, decay=0.05,
    clip=0.5, warm=3, updates=3, top=5,
)  # fmt: skip
PAD = 0  # items count from 1
ROWS = hp.items + 1

# ------------------------------------------------------------------ data


def visits(gen):
    """What each person looked at, oldest first; genres differ, and few items are popular."""
    fame = 1.0 / torch.arange(1, hp.items + 1).float()
    genre = torch.arange(hp.items) % hp.genres
    everybody = []
    for _ in range(hp.people):
        taste = torch.softmax(2 * torch.randn(hp.genres, generator=gen), 0)
        many = int(torch.randint(4, 18, (), generator=gen))
        weight = fame.sqrt() * taste[genre]
        seen = [int(torch.multinomial(weight, 1, generator=gen))]
        while len(seen) < many:
            stays = float(torch.rand((), generator=gen)) < 0.6
            now = weight * (genre == genre[seen[-1]]) if stays else weight
            seen.append(int(torch.multinomial(now, 1, generator=gen)))
        everybody.append(torch.tensor(seen) + 1)
    return everybody


def encode(seen):
    """The latest items, padded in front, and what followed each."""
    inputs, targets = seen[:-1][-hp.span :], seen[1:][-hp.span :]
    gap = hp.span - len(inputs)
    return F.pad(inputs, (gap, 0), value=PAD), F.pad(targets, (gap, 0), value=PAD)


def micro_batches(everybody, gen):
    """Endless; the last item of each person is for the evaluation."""
    while True:
        order = torch.randperm(len(everybody), generator=gen)
        for rows in order.split(hp.micro):
            if len(rows) == hp.micro:
                pairs = [encode(everybody[i][:-1]) for i in rows.tolist()]
                inputs, targets = zip(*pairs)
                yield torch.stack(inputs), torch.stack(targets)


def popularity(everybody):
    counts = torch.bincount(torch.cat([seen[:-1] for seen in everybody]), minlength=ROWS)
    return (counts + 1.0) * (torch.arange(ROWS) != PAD)


# ------------------------------------------------------------------ kernels


class Attend(torch.autograd.Function):
    """Softmax attention over allowed keys; nought for a query that has none."""

    @staticmethod
    def forward(ctx, q, k, v, allowed):
        scale = q.shape[-1] ** -0.5
        score = (q @ k.mT * scale).masked_fill(~allowed, -1e9)
        p = score.softmax(-1) * allowed
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        return p @ v

    @staticmethod
    def backward(ctx, grad):
        q, k, v, p = ctx.saved_tensors
        along = grad @ v.mT
        slope = p * (along - (along * p).sum(-1, keepdim=True)) * ctx.scale
        return slope @ k, slope.mT @ q, p.mT @ grad, None


class FirstOfAll(torch.autograd.Function):
    """Cross entropy where column 0 is right, summed over the rows."""

    @staticmethod
    def forward(ctx, logits):
        log_p = logits.log_softmax(1)
        ctx.save_for_backward(log_p)
        return -log_p[:, 0].sum()

    @staticmethod
    def backward(ctx, grad):
        slope = ctx.saved_tensors[0].exp()
        slope[:, 0] -= 1.0
        return grad * slope


class LazyAdam(torch.optim.Optimizer):
    """Adam for tables: moments and counts of a row move when the row has a gradient."""

    def __init__(self, params, lr, betas=(0.9, 0.98), eps=1e-7):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["n"] = torch.zeros(len(p), 1)
                rows = p.grad.abs().amax(1).nonzero()[:, 0]
                g = p.grad[rows]
                state["n"][rows] += 1
                n = state["n"][rows]
                m = state["m"][rows] = b1 * state["m"][rows] + (1 - b1) * g
                v = state["v"][rows] = b2 * state["v"][rows] + (1 - b2) * g * g
                size = (v / (1 - b2**n)).sqrt() + group["eps"]
                p[rows] -= group["lr"] * m / (1 - b1**n) / size


# ------------------------------------------------------------------ model


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, allowed):
        batch, span, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, span, 3, hp.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = Attend.apply(q, k, v, allowed)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, span, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class NextItem(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, hp.width, padding_idx=PAD)
        self.bias = nn.Embedding(ROWS, 1, padding_idx=PAD)
        self.place = nn.Parameter(0.1 * torch.randn(hp.span, hp.width))
        self.drop = nn.Dropout(hp.drop)
        self.layers = nn.ModuleList([Layer(hp.width) for _ in range(hp.depth)])
        self.norm = nn.LayerNorm(hp.width)
        self.register_buffer("causal", torch.ones(hp.span, hp.span).tril().bool())

    def forward(self, items):
        real = items != PAD
        x = self.table(items) * math.sqrt(hp.width)
        x = self.drop(x + self.place) * real[..., None]
        allowed = self.causal & real[:, None, None, :]
        for layer in self.layers:
            x = layer(x, allowed)
        return self.norm(x)

    def sampled_loss(self, hidden, targets, drawn, log_q):
        """Sum over the places that have a target."""
        there = targets != PAD
        h, right = hidden[there], targets[there]
        good = (h * self.table(right)).sum(1) + self.bias(right)[:, 0] - log_q[right]
        bad = h @ self.table(drawn).T + self.bias(drawn)[:, 0] - log_q[drawn]
        bad = bad.masked_fill(drawn == right[:, None], -1e9)  # drawn by accident
        return FirstOfAll.apply(torch.cat([good[:, None], bad], 1))


# ------------------------------------------------------------------ where it begins


def exported():
    """Vectors from the texts of items, without padding; layers as the old code packs them."""
    gen = torch.Generator().manual_seed(31)
    centre = torch.randn(hp.genres, hp.width, generator=gen)
    own = torch.randn(hp.items, hp.width, generator=gen)
    texts = 0.3 * centre[torch.arange(hp.items) % hp.genres] + 0.15 * own
    packed = torch.randn(hp.depth, 3, hp.width, hp.width, generator=gen) * 0.35
    return {"texts": texts, "kqv": packed}


@torch.no_grad()
def begin(model, saved, counts):
    model.table.weight[1:] = saved["texts"]
    share = counts / counts.sum()
    model.bias.weight[1:, 0] = share[1:].log() - share[1:].log().mean()
    for layer, (k, q, v) in zip(model.layers, saved["kqv"]):
        layer.qkv.weight.copy_(torch.cat([q, k, v]))


def proposal(counts):
    """How often an item is drawn, and the logarithm of that."""
    q = counts**hp.flatten
    q = q / q.sum()
    return q, q.clamp(min=1e-12).log()


# ------------------------------------------------------------------ training


@torch.no_grad()
def hit_rate(model, everybody):
    """Share of people whose held-out item is among the best."""
    model.eval()
    inputs = torch.stack([encode(seen)[0] for seen in everybody])
    last = torch.stack([seen[-1] for seen in everybody])
    score = model(inputs)[:, -1] @ model.table.weight.T + model.bias.weight[:, 0]
    score[:, PAD] = -math.inf
    best = score.topk(hp.top, dim=1).indices
    model.train()
    return (best == last[:, None]).any(1).float().mean().item()


def warm_up(update):
    return min(1.0, (update + 1) / hp.warm)


def main():
    torch.manual_seed(hp.seed)
    gen = torch.Generator().manual_seed(hp.seed + 100)
    everybody = visits(gen)
    counts = popularity(everybody)
    model = NextItem()
    begin(model, exported(), counts)
    q, log_q = proposal(counts)

    tables = [model.table.weight, model.bias.weight]
    known = {id(p) for p in tables}
    dense = [p for p in model.parameters() if id(p) not in known]
    opt_tables = LazyAdam(tables, hp.lr_tables)
    opt_dense = torch.optim.AdamW(dense, hp.lr, weight_decay=hp.decay)
    both = (opt_tables, opt_dense)
    scheds = [torch.optim.lr_scheduler.LambdaLR(opt, warm_up) for opt in both]

    stream = micro_batches(everybody, gen)
    for update in range(hp.updates):
        parts = [next(stream) for _ in range(hp.accumulate)]
        places = sum(int((targets != PAD).sum()) for _, targets in parts)
        for opt in both:
            opt.zero_grad()
        total = 0.0
        for inputs, targets in parts:
            drawn = torch.multinomial(q, hp.negatives, replacement=True, generator=gen)
            loss = model.sampled_loss(model(inputs), targets, drawn, log_q) / places
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(dense, hp.clip)
        for opt in both:
            opt.step()
        for sched in scheds:
            sched.step()
        hits = hit_rate(model, everybody)
        print(f"{update} loss {total:.4f} hits in {hp.top} {hits:.3f}")


main()
