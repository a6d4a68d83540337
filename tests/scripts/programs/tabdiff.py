"""Made-up customers for the test bench: a diffusion model of a table with mixed columns.

Numbers go through a quantile transform and a Gaussian diffusion, categories through a
multinomial one, one network undoes both. Rows may be asked for by risk class.
"""

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--seed", type=int, default=41)
parser.add_argument("--rows", type=int, default=240)
parser.add_argument("--batch", type=int, default=40)
parser.add_argument("--updates", type=int, default=3)
parser.add_argument("--horizon", type=int, default=10, help="updates until the rate is nought")
parser.add_argument("--times", type=int, default=24)
parser.add_argument("--width", type=int, default=40)
parser.add_argument("--lr", type=float, default=4e-3)
parser.add_argument("--decay", type=float, default=0.05)
parser.add_argument("--clip", type=float, default=0.2)
parser.add_argument("--drop", type=float, default=0.25, help="share of rows without a class")
parser.add_argument("--ema", type=float, default=0.99)
parser.add_argument("--recall", type=float, default=0.7, help="of the losses by time")
args = parser.parse_args()

NUMBERS = ("income", "balance", "age", "hours", "tenure")
CATEGORIES = {"job": 6, "region": 4, "plan": 3, "channel": 5}
RISKS = 3
LEVELS = list(CATEGORIES.values())


# table


def customers(n, gen):
    """Numbers [n, 5], categories [n, 4], and risk class; all hang on three factors."""
    hidden = torch.randn(n, 3, generator=gen)
    noise = 0.5 * torch.randn(n, len(NUMBERS), generator=gen)
    base = hidden @ torch.randn(3, len(NUMBERS), generator=gen) + noise
    numbers = torch.stack(
        [
            torch.exp(9.5 + 0.6 * base[:, 0]),
            400 * base[:, 1] ** 3 + 900 * base[:, 1],
            18 + 60 * base[:, 2].sigmoid(),
            38 + 6 * base[:, 3],
            F.softplus(3 * base[:, 4]),
        ],
        1,
    )
    columns = []
    for levels in LEVELS:
        logits = 1.2 * hidden @ torch.randn(3, levels, generator=gen)
        columns.append(torch.multinomial(logits.softmax(1), 1, generator=gen))
    risk = torch.bucketize(hidden.sum(1), torch.tensor([-0.4, 1.6]))
    return numbers, torch.cat(columns, 1), risk


class QuantileTransform:
    """Each column to a normal one, by a table of its quantiles."""

    def __init__(self, x, points=33):
        self.levels = torch.linspace(0, 1, points)
        self.table = x.quantile(self.levels, dim=0).T.contiguous()

    def __call__(self, x):
        values = x.T.contiguous()
        right = torch.searchsorted(self.table, values).clamp(1, len(self.levels) - 1)
        low, high = self.table.gather(1, right - 1), self.table.gather(1, right)
        part = ((values - low) / (high - low)).clamp(0, 1)
        level = (right - 1 + part) / (len(self.levels) - 1)
        return torch.special.ndtri(level.clamp(0.005, 0.995)).T


def pages(n, size, gen):
    while True:
        order = torch.randperm(n, generator=gen)
        yield from order[: n - n % size].split(size)


# kernels


class Swish(torch.autograd.Function):
    """x sigmoid(x); keeps x alone."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grad * (gate + x * gate * (1 - gate))


class Divergence(torch.autograd.Function):
    """KL of rows: from what is known, as log-probabilities, to what is said, as logits."""

    @staticmethod
    def forward(ctx, known, said):
        log_said = said - said.logsumexp(1, keepdim=True)
        ctx.save_for_backward(known, log_said)
        return (known.exp() * (known - log_said)).sum(1)

    @staticmethod
    def backward(ctx, grad):
        known, log_said = ctx.saved_tensors
        return None, grad[:, None] * (log_said.exp() - known.exp())


def log_one_hot(index, levels):
    return F.one_hot(index, levels).float().clamp(min=1e-30).log()


# diffusion


class Diffusion(nn.Module):
    """Tables of the noise, and what the loss was at each time."""

    def __init__(self, times, recall):
        super().__init__()
        self.times, self.recall = times, recall
        at = torch.arange(times + 1, dtype=torch.float64) / times
        kept = torch.cos((at + 0.008) / 1.008 * math.pi / 2) ** 2
        alpha = (kept[1:] / kept[:-1]).clamp(min=1e-3)
        total = alpha.cumprod(0)
        for name, table in (("step", alpha), ("total", total)):
            self.register_buffer(f"log_{name}", table.log().float())
            self.register_buffer(f"log_1m_{name}", torch.log1p(-table).float())
        self.register_buffer("signal", total.sqrt().float())
        self.register_buffer("noise", (1 - total).sqrt().float())
        self.register_buffer("seen", torch.linspace(1.5, 0.5, times))

    def draw(self, n, gen):
        """Times in pairs from both ends, more where the loss is large, and their weights."""
        share = self.seen / self.seen.sum()
        share = 0.9 * share + 0.1 / self.times
        u = torch.rand(n // 2, generator=gen)
        u = torch.cat([u, 1 - u])
        t = torch.searchsorted(share.cumsum(0), u).clamp(max=self.times - 1)
        return t, 1 / (share[t] * self.times)

    @torch.no_grad()
    def remember(self, t, loss):
        """The root of the mean square at each time that was drawn moves on."""
        count = torch.zeros(self.times).index_add_(0, t, torch.ones_like(loss))
        square = torch.zeros(self.times).index_add_(0, t, loss.square())
        now = (square / count.clamp(min=1)).sqrt()
        new = self.recall * self.seen + (1 - self.recall) * now
        self.seen.copy_(torch.where(count > 0, new, self.seen))

    def blur(self, x, t, gen):
        eps = torch.randn(x.shape, generator=gen)
        return self.signal[t][:, None] * x + self.noise[t][:, None] * eps, eps

    def mixed(self, log_p, name, t):
        """A distribution that is kept with a probability of the table, else uniform."""
        keep = getattr(self, f"log_{name}")[t][:, None]
        lose = getattr(self, f"log_1m_{name}")[t][:, None]
        return torch.logaddexp(log_p + keep, lose - math.log(log_p.shape[1]))

    def scramble(self, index, levels, t, gen):
        logits = self.mixed(log_one_hot(index, levels), "total", t)
        u = torch.rand(logits.shape, generator=gen).clamp(1e-6, 1 - 1e-6)
        return (logits - torch.log(-torch.log(u))).argmax(1)

    def before(self, log_first, log_now, t):
        """Logits of the category one time before, for that at first and that now."""
        earlier = self.mixed(log_first, "total", (t - 1).clamp(min=0))
        earlier = torch.where(t[:, None] == 0, log_first, earlier)
        return earlier + self.mixed(log_now, "step", t)

    def divergence(self, index, now, logits, t):
        levels = logits.shape[1]
        log_now = log_one_hot(now, levels)
        known = self.before(log_one_hot(index, levels), log_now, t).log_softmax(1)
        said = self.before(logits.log_softmax(1), log_now, t)
        likely = F.cross_entropy(logits, index, reduction="none")
        return torch.where(t == 0, likely, Divergence.apply(known, said))


# network


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, width)
        self.film = nn.Linear(width, 2 * width)
        self.second = nn.Linear(width, width)
        with torch.no_grad():
            self.second.weight.mul_(0.5)

    def forward(self, h, condition):
        scale, shift = self.film(condition).chunk(2, 1)
        inner = Swish.apply(self.first(self.norm(h)) * (1 + scale) + shift)
        return h + self.second(inner)


class TableNet(nn.Module):
    def __init__(self, width, times):
        super().__init__()
        sizes = len(NUMBERS) + sum(LEVELS)
        self.inlet = nn.Linear(sizes, width)
        self.risk = nn.Embedding(RISKS + 1, width)  # the last one: not told
        self.clock = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        pitch = torch.exp(-math.log(1000.0) * torch.arange(width // 2) / (width // 2))
        self.register_buffer("pitch", pitch)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.outlet = nn.Linear(width, sizes)
        self.stretch = 1000.0 / times

    def forward(self, numbers, categories, t, risk):
        hot = [F.one_hot(c, k).float() for c, k in zip(categories.unbind(1), LEVELS)]
        h = self.inlet(torch.cat([numbers, *hot], 1))
        phase = self.stretch * t[:, None] * self.pitch
        condition = self.clock(torch.cat([phase.cos(), phase.sin()], 1)) + self.risk(risk)
        for block in self.blocks:
            h = block(h, condition)
        eps, *logits = self.outlet(F.silu(h)).split([len(NUMBERS), *LEVELS], 1)
        return eps, logits


@torch.no_grad()
def start(net, categories):
    """Without a class, the mean of the classes; categories as often as in the table."""
    net.risk.weight[RISKS] = net.risk.weight[:RISKS].mean(0)
    shares = [torch.bincount(c, minlength=k) for c, k in zip(categories.unbind(1), LEVELS)]
    shares = torch.cat([(n + 1.0) / (n + 1.0).sum() for n in shares])
    net.outlet.weight.mul_(0.5)
    net.outlet.bias[len(NUMBERS) :] = shares.log()


@torch.no_grad()
def follow(average, net, update):
    keep = min(args.ema, (1 + update) / (10 + update))
    for slow, fast in zip(average.parameters(), net.parameters()):
        slow.mul_(keep).add_(fast, alpha=1 - keep)


torch.manual_seed(args.seed)
gen = torch.Generator().manual_seed(args.seed)
raw, categories, risk = customers(args.rows, gen)
transform = QuantileTransform(raw)
numbers = transform(raw)
diffusion = Diffusion(args.times, args.recall)
net = TableNet(args.width, args.times)
start(net, categories)
average = copy.deepcopy(net).requires_grad_(False)
matrices = [p for name, p in net.named_parameters() if p.ndim == 2 and "risk" not in name]
vectors = [p for name, p in net.named_parameters() if p.ndim == 1 or "risk" in name]
groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
opt = torch.optim.AdamW(groups, args.lr, betas=(0.9, 0.98), eps=1e-5, weight_decay=args.decay)
anneal = torch.optim.lr_scheduler.LambdaLR(opt, lambda update: 1 - update / args.horizon)
page = pages(args.rows, args.batch, torch.Generator().manual_seed(args.seed + 1))

for update in range(args.updates):
    rows = next(page)
    x, cats, label = numbers[rows], categories[rows], risk[rows]
    untold = torch.rand(len(rows), generator=gen) < args.drop
    label = torch.where(untold, RISKS, label)
    t, weight = diffusion.draw(len(rows), gen)
    noisy, eps = diffusion.blur(x, t, gen)
    now = [diffusion.scramble(c, k, t, gen) for c, k in zip(cats.unbind(1), LEVELS)]
    told, logits = net(noisy, torch.stack(now, 1), t, label)
    mse = (told - eps).square().mean(1)
    triples = zip(cats.unbind(1), now, logits)
    kl = sum(diffusion.divergence(first, then, said, t) for first, then, said in triples)
    each = mse + kl / len(LEVELS)
    loss = (weight * each).mean()
    opt.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), args.clip)
    opt.step()
    anneal.step()
    diffusion.remember(t, each.detach())
    follow(average, net, update)
    print(f"update {update} loss {loss.item():.4f} kl {kl.mean().item():.4f} norm {norm.item():.3f}")

# how well the average cleans rows at half the time, with guidance
with torch.no_grad():
    half = torch.full((args.rows,), args.times // 2)
    noisy, eps = diffusion.blur(numbers, half, gen)
    free = average(noisy, categories, half, torch.full_like(risk, RISKS))[0]
    guided = free + 1.5 * (average(noisy, categories, half, risk)[0] - free)
    print(f"error {F.mse_loss(free, eps):.4f}, guided {F.mse_loss(guided, eps):.4f}")
