# Which offer a visitor is shown. A tower over visitor and offer gives features, a Bayesian
# line on top of them is what we explore with (Thompson), and a second head learns from the
# log, doubly robust, so that what is seldom shown is not forgotten.
import copy

import torch
import torch.nn.functional as F
from torch import nn

SEED = 31
VISITOR, OFFER, OFFERS = 7, 5, 6
WIDTH, HIDDEN, FEATURES = 16, 24, 10
LOGGED, ONLINE, FRESH, OLD = 80, 8, 8, 24
STEPS, HORIZON = 3, 10
PRIOR, NOISE, FADE, DRAWS = 0.5, 0.8, 0.05, 32
EPSILON = (0.4, 0.05)
CAP, DELTA, TAU = 4.0, 1.0, 0.5
DIRECT, POLICY, ENTROPY = 0.6, 0.4, 0.05
LR, DECAY, GAMMA, CLIP, FOLLOW = 0.01, 0.3, 0.8, 0.8, 0.2

# what a visitor did so far, and what is usual
COLUMNS = ("minutes", "pages", "basket", "visits", "age", "hour", "phone")
USUAL = torch.tensor([6.0, 9.0, 40.0, 3.0, 41.0, 14.0, 0.6])
VARIES = torch.tensor([4.0, 5.0, 30.0, 2.0, 13.0, 5.0, 0.5])


class Shop:
    """Stands in for the world: visitors come, and spend more or less."""

    def __init__(self, gen):
        self.gen = gen
        self.offers = torch.randn(OFFERS, OFFER, generator=gen) * 3 + 2
        self.taste = torch.randn(VISITOR, OFFER, generator=gen) / 3

    def visitors(self, n):
        return USUAL + VARIES * torch.randn(n, VISITOR, generator=self.gen)

    def spends(self, visitor, action):
        likes = ((visitor - USUAL) / VARIES) @ self.taste
        match = (likes * (self.offers[action] - 2) / 3).sum(1)
        return (
            14
            + 6 * torch.tanh(match)
            + 2 * torch.randn(len(visitor), generator=self.gen)
        )

    def history(self, n):
        """Of the old rule, which liked some offers more: with logarithms of its propensities."""
        visitor = self.visitors(n)
        logp = (0.4 * self.offers[:, :2].sum(1)).expand(n, -1).log_softmax(1)
        action = torch.multinomial(logp.exp(), 1, generator=self.gen)
        return (
            visitor,
            action[:, 0],
            self.spends(visitor, action[:, 0]),
            logp.gather(1, action),
        )


def standard(visitor):
    return (visitor - USUAL) / VARIES


class UnitNorm(torch.autograd.Function):
    """Vectors of length one, along the last dimension."""

    @staticmethod
    def forward(ctx, x):
        length = x.norm(dim=-1, keepdim=True)
        unit = x / length
        ctx.save_for_backward(unit, length)
        return unit

    @staticmethod
    def backward(ctx, grad):
        unit, length = ctx.saved_tensors
        along = (grad * unit).sum(-1, keepdim=True)
        return (grad - along * unit) / length


class Huber(torch.autograd.Function):
    """Weighted Huber loss per row; the weights are no variables."""

    @staticmethod
    def forward(ctx, value, wanted, weight, delta):
        gap = value - wanted
        size = gap.abs()
        each = torch.where(
            size < delta, 0.5 * gap.square(), delta * (size - 0.5 * delta)
        )
        ctx.save_for_backward(gap, weight)
        ctx.delta = delta
        return (weight * each).sum() / len(value)

    @staticmethod
    def backward(ctx, grad):
        gap, weight = ctx.saved_tensors
        slope = gap.clamp(-ctx.delta, ctx.delta)
        return grad * weight * slope / len(gap), None, None, None


class Tower(nn.Module):
    def __init__(self, offers):
        super().__init__()
        self.register_buffer("offers", (offers - offers.mean(0)) / offers.std(0))
        self.visitor = nn.Linear(VISITOR, WIDTH)
        self.offer = nn.Linear(OFFER, WIDTH)
        self.mix = nn.Linear(3 * WIDTH, HIDDEN)
        self.deep = nn.Linear(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, FEATURES)
        self.value = nn.Linear(FEATURES, 1)

    def features(self, visitor):
        """One vector for each visitor and offer: [n, offers, features]."""
        v = F.silu(self.visitor(visitor))[:, None].expand(-1, OFFERS, -1)
        o = F.silu(self.offer(self.offers)).expand(len(visitor), -1, -1)
        h = F.silu(self.mix(torch.cat([v, o, v * o], 2)))
        h = h + F.silu(self.deep(h))
        return UnitNorm.apply(self.out(h))

    def forward(self, visitor):
        return self.value(self.features(visitor)).squeeze(2)


def initialise(tower):
    for module in tower.modules():
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight, gain=1.6)
            nn.init.uniform_(module.bias, -0.2, 0.2)


class LastLayer(nn.Module):
    """Bayesian linear regression: what is known is a precision and a moment."""

    def __init__(self):
        super().__init__()
        self.register_buffer("prior", torch.eye(FEATURES) / PRIOR)
        self.register_buffer("precision", self.prior.clone())
        self.register_buffer("moment", torch.zeros(FEATURES))

    @torch.no_grad()
    def observe(self, features, reward):
        for f, r in zip(features, reward):
            self.precision += torch.outer(f, f) / NOISE
            self.moment += f * r / NOISE

    @torch.no_grad()
    def fade(self):
        """The tower moves on: what was seen with the old one counts less."""
        self.precision.lerp_(self.prior, FADE)
        self.moment.mul_(1 - FADE)

    @torch.no_grad()
    def sample(self, n, gen):
        """Weights drawn from the posterior: [features, n]."""
        chol = torch.linalg.cholesky(self.precision)
        mean = torch.cholesky_solve(self.moment[:, None], chol)
        noise = torch.randn(FEATURES, n, generator=gen)
        return mean + torch.linalg.solve_triangular(chol.mT, noise, upper=True)


class Running(nn.Module):
    """Mean and variance of all rewards so far."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rewards", torch.tensor(0.0))
        self.register_buffer("reward_mean", torch.tensor(0.0))
        self.register_buffer("reward_var", torch.tensor(1.0))

    @torch.no_grad()
    def update(self, reward):
        n, total = len(reward), self.rewards + len(reward)
        var, mean = torch.var_mean(reward, correction=0)
        away = mean - self.reward_mean
        spread = self.reward_var * self.rewards + var * n
        spread += away**2 * self.rewards * n / total
        self.reward_var.copy_(spread / total)
        self.reward_mean += away * n / total
        self.rewards.copy_(total)

    def forward(self, reward):
        return (reward - self.reward_mean) / (self.reward_var + 1e-5).sqrt()


class Log:
    def __init__(self, visitor, action, reward, propensity):
        self.columns = [visitor, action, reward, propensity]

    def add(self, *columns):
        self.columns = [torch.cat(pair) for pair in zip(self.columns, columns)]

    def replay(self, gen):
        """The newest rows, and some of the older ones."""
        older = len(self.columns[0]) - FRESH
        rows = torch.randperm(older, generator=gen)[:OLD]
        rows = torch.cat([rows, torch.arange(older, older + FRESH)])
        return [column[rows] for column in self.columns]


@torch.no_grad()
def decide(tower, last, visitor, epsilon, gen):
    """Features, offers and their propensities, which are the shares of Thompson's draws."""
    features = tower.features(visitor)
    best = (features @ last.sample(DRAWS, gen)).argmax(1)
    share = F.one_hot(best, OFFERS).float().mean(1)
    policy = (1 - epsilon) * share + epsilon / OFFERS
    action = torch.multinomial(policy, 1, generator=gen)
    chosen = features[torch.arange(len(visitor)), action[:, 0]]
    return chosen, action[:, 0], policy.gather(1, action)[:, 0]


def robust(slow, action, reward, propensity):
    """What each offer would have brought: the slow tower's word, set right where we know."""
    weight = (1 / propensity).clamp(max=CAP)
    error = reward - slow.gather(1, action[:, None]).squeeze(1)
    shown = F.one_hot(action, OFFERS)
    return slow + shown * (weight * error)[:, None], weight


def loss_of(value, slow, action, reward, propensity):
    estimate, weight = robust(slow, action, reward, propensity)
    every = Huber.apply(value, estimate, torch.full_like(value, 1 / OFFERS), DELTA)
    shown = value.gather(1, action[:, None]).squeeze(1)
    direct = (weight * (shown - reward).square()).sum() / weight.sum()
    logp = (value / TAU).log_softmax(1)
    gain = (logp.exp() * estimate).sum(1).mean()
    entropy = -(logp.exp() * logp).sum(1).mean()
    return every + DIRECT * direct - POLICY * gain - ENTROPY * entropy


def epsilon_at(step):
    first, last = EPSILON
    return first + (last - first) * min(1.0, step / HORIZON)


@torch.no_grad()
def follow(slow, tower):
    for s, p in zip(slow.parameters(), tower.parameters()):
        s.lerp_(p, FOLLOW)


torch.manual_seed(SEED)
gen = torch.Generator().manual_seed(SEED)
shop = Shop(gen)
tower = Tower(shop.offers)
initialise(tower)
slow = copy.deepcopy(tower).requires_grad_(False)
last, running = LastLayer(), Running()

# begin with what the old rule has seen
visitor, action, reward, logp = shop.history(LOGGED)
visitor = standard(visitor)
log = Log(visitor, action, reward, logp.squeeze(1).exp())
running.update(reward)
with torch.no_grad():
    seen = tower.features(visitor)[torch.arange(LOGGED), action]
last.observe(seen, running(reward))

weights = [p for p in tower.parameters() if p.ndim > 1]
others = [p for p in tower.parameters() if p.ndim == 1]
opt = torch.optim.AdamW(
    [
        {"params": weights, "weight_decay": DECAY},
        {"params": others, "weight_decay": 0.0},
    ],
    lr=LR,
    betas=(0.8, 0.95),
    eps=1e-5,
)
sched = torch.optim.lr_scheduler.ExponentialLR(opt, GAMMA)

for step in range(STEPS):
    # a few visitors
    raw = shop.visitors(ONLINE)
    visitor = standard(raw)
    epsilon = epsilon_at(step)
    features, action, propensity = decide(tower, last, visitor, epsilon, gen)
    reward = shop.spends(raw, action)
    running.update(reward)
    last.observe(features, running(reward))
    log.add(visitor, action, reward, propensity)

    # learn from the log
    visitor, action, reward, propensity = log.replay(gen)
    with torch.no_grad():
        believed = slow(visitor)
    loss = loss_of(tower(visitor), believed, action, running(reward), propensity)
    opt.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(tower.parameters(), CLIP)
    opt.step()
    sched.step()
    follow(slow, tower)
    last.fade()
    print(
        f"{step}: epsilon {epsilon:.2f}, loss {loss.item():.4f}, norm {norm.item():.3f}"
    )
