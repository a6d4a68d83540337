"""Which samples to send to the lab: a committee of small networks buys labels by the round.

The members live in one stack of weights. Each labelled sample counts for each member as
often as a bootstrap drew it; what the committee disagrees about is bought next, spread
out over the pool.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel


@dataclass(frozen=True)
class Settings:
    seed: int = 7
    members: int = 4
    dim: int = 12
    width: int = 24
    features: int = 16
    classes: int = 5
    pool: int = 160
    start: int = 24
    buy: int = 8
    rounds: int = 3
    micro: int = 20
    accumulate: int = 2
    quiet: int = 24
    passes: int = 4
    drop: float = 0.2
    spread: float = 0.5
    tau: float = 1.6
    smooth: float = 0.1
    agree: float = 0.7
    lr: float = 0.3
    momentum: float = 0.9
    decay: float = 1e-3
    clip: float = 0.6
    total: int = 8


cfg = Settings()
ASSAYS = ("ph", "iron", "lead", "zinc", "salt", "tin", "gold", "clay", "lime", "peat", "ash", "oil")


def pool_of_samples(gen):
    """Raw assays, and labels that only the lab knows; some classes are rare."""
    share = torch.tensor([0.4, 0.25, 0.15, 0.12, 0.08])
    labels = torch.multinomial(share, cfg.pool, replacement=True, generator=gen)
    centres = 1.3 * torch.randn(cfg.classes, cfg.dim, generator=gen)
    noise = torch.randn(cfg.pool, cfg.dim, generator=gen)
    units = 10 ** torch.linspace(-1, 1, cfg.dim)
    return (centres[labels] + noise + 2.0) * units, labels


def bootstrap(gen, many):
    """How often each member drew each of the samples."""
    rate = torch.ones(cfg.members, many)
    return torch.poisson(rate, generator=gen)


class Labelled:
    """What has been bought so far, with the bootstrap's counts."""

    def __init__(self):
        self.index = torch.empty(0, dtype=torch.long)
        self.label = torch.empty(0, dtype=torch.long)
        self.counts = torch.empty(cfg.members, 0)

    def add(self, index, label, counts):
        self.index = torch.cat([self.index, index])
        self.label = torch.cat([self.label, label])
        self.counts = torch.cat([self.counts, counts], 1)

    def draw(self, many, gen):
        """All classes equally often, whatever was bought."""
        common = self.label.bincount(minlength=cfg.classes).double()
        chance = 1.0 / common[self.label]
        rows = torch.multinomial(chance, many, replacement=True, generator=gen)
        return self.index[rows], self.label[rows], self.counts[:, rows]


class Drop(torch.autograd.Function):
    """Dropout with a mask that is given."""

    @staticmethod
    def forward(ctx, x, keep, rate):
        ctx.save_for_backward(keep)
        ctx.scale = 1 / (1 - rate)
        return x * keep * ctx.scale

    @staticmethod
    def backward(ctx, grad):
        (keep,) = ctx.saved_tensors
        return grad * keep * ctx.scale, None, None


class SoftenedLoss(torch.autograd.Function):
    """Weighted cross entropy of [members, n, classes] with temperature and smoothing."""

    @staticmethod
    def forward(ctx, logits, label, weight, tau, smooth):
        classes = logits.shape[2]
        target = F.one_hot(label, classes) * (1 - smooth) + smooth / classes
        logp = (logits / tau).log_softmax(2)
        share = weight / weight.sum(1, keepdim=True).clamp(min=1)
        ctx.save_for_backward(logp, target, share)
        ctx.tau = tau
        return -(share * (target * logp).sum(2)).sum(1).mean()

    @staticmethod
    def backward(ctx, grad):
        logp, target, share = ctx.saved_tensors
        slope = share[:, :, None] * (logp.exp() - target) / ctx.tau
        return grad * slope / len(share), None, None, None, None


class Stack(nn.Module):
    """A linear layer for each member."""

    def __init__(self, inputs, outputs, bias=False):
        super().__init__()
        bound = inputs**-0.5
        weight = torch.empty(cfg.members, inputs, outputs)
        self.weight = nn.Parameter(weight.uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(cfg.members, 1, outputs)) if bias else None

    def forward(self, x):
        y = torch.bmm(x, self.weight)
        return y if self.bias is None else y + self.bias


class Norm(nn.Module):
    """Batch norm of all members at once."""

    def __init__(self, width):
        super().__init__()
        self.bn = nn.BatchNorm1d(cfg.members * width)

    def forward(self, x):
        flat = x.transpose(0, 1).flatten(1)
        return self.bn(flat).unflatten(1, (len(x), -1)).transpose(0, 1)


class Committee(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(cfg.dim))
        self.register_buffer("scale", torch.ones(cfg.dim))
        self.inlet = Stack(cfg.dim, cfg.width)
        self.norm1 = Norm(cfg.width)
        self.middle = Stack(cfg.width, cfg.features)
        self.norm2 = Norm(cfg.features)
        self.head = Stack(cfg.features, cfg.classes, bias=True)

    def forward(self, raw, gen=None):
        x = (raw - self.centre) / self.scale
        h = self.inlet(x.expand(cfg.members, -1, -1))
        h = self.drop(F.relu(self.norm1(h)), gen)
        features = F.relu(self.norm2(self.middle(h)))
        return self.head(self.drop(features, gen)), features

    def drop(self, x, gen):
        if gen is None:
            return x
        keep = torch.rand(x.shape, generator=gen) >= cfg.drop
        return Drop.apply(x, keep.float(), cfg.drop)


def disagreement(logits):
    """Jensen-Shannon: the members' divergence from what they say together."""
    logp = logits.log_softmax(2)
    together = logp.exp().mean(0).detach().log()
    return (logp.exp() * (logp - together)).sum(2).mean()


def entropy(p):
    return -(p * p.clamp(min=1e-12).log()).sum(-1)


@torch.no_grad()
def acquire(net, raw, labelled, gen):
    """Indices of the pool: informative by BALD, and far from all that is labelled."""
    net.eval()
    said = [net(raw, gen)[0].softmax(2) for _ in range(cfg.passes)]
    p = torch.cat(said)
    bald = entropy(p.mean(0)) - entropy(p).mean(0)
    features = net(raw)[1].transpose(0, 1).flatten(1)
    far = torch.cdist(features, features[labelled.index]).amin(1)
    free = torch.ones(len(raw), dtype=torch.bool)
    free[labelled.index] = False
    bought = []
    for _ in range(cfg.buy):
        score = bald / bald[free].max() + cfg.spread * far / far[free].max()
        best = score.masked_fill(~free, -1.0).argmax()
        free[best] = False
        far = torch.minimum(far, (features - features[best]).norm(dim=1))
        bought.append(best)
    return torch.stack(bought), free.nonzero().squeeze(1)


@torch.no_grad()
def recompute(net, raw):
    """Statistics of the averaged weights over all that is labelled, in chunks."""
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm1d)]
    for bn in norms:
        bn.reset_running_stats()
        bn.momentum = None  # equal shares
    net.train()
    for chunk in raw.chunk(3):
        net(chunk)


def last_season(raw):
    """What the old pipeline left: assays by the alphabet, members one by one."""
    gen = torch.Generator().manual_seed(1999)
    saved = {"assays": sorted(ASSAYS)}
    order = [ASSAYS.index(name) for name in saved["assays"]]
    saved["mean"] = raw.mean(0)[order] * 1.05
    saved["deviation"] = raw.std(0)[order] * 0.9
    for member in range(cfg.members):
        weight = torch.randn(cfg.width, cfg.dim, generator=gen)
        saved[f"member{member}.weight"] = weight * cfg.dim**-0.5
    deviation = 0.3 + 2.0 * torch.rand(cfg.width, generator=gen)
    saved["norm"] = torch.stack([torch.zeros(cfg.width), deviation])
    return saved


@torch.no_grad()
def adopt(net, saved, label):
    order = [saved["assays"].index(name) for name in ASSAYS]
    net.centre.copy_(saved["mean"][order])
    net.scale.copy_(saved["deviation"][order])
    for member in range(cfg.members):
        weight = saved[f"member{member}.weight"]
        net.inlet.weight[member] = weight[:, order].T
    mean, deviation = saved["norm"]
    net.norm1.bn.running_mean.copy_(mean.repeat(cfg.members))
    net.norm1.bn.running_var.copy_(deviation.square().repeat(cfg.members))
    share = label.bincount(minlength=cfg.classes) + 1.0
    net.head.bias.copy_((share / share.sum()).log())


def main():
    torch.manual_seed(cfg.seed)
    world = torch.Generator().manual_seed(cfg.seed)
    masks = torch.Generator().manual_seed(cfg.seed + 1)
    raw, lab = pool_of_samples(world)
    first = torch.randperm(cfg.pool, generator=world)[: cfg.start]
    labelled = Labelled()
    labelled.add(first, lab[first], bootstrap(world, cfg.start))
    net = Committee()
    adopt(net, last_season(raw), labelled.label)
    average = AveragedModel(net)
    plain = [p for name, p in net.named_parameters() if "bias" in name or "bn" in name]
    decayed = [net.inlet.weight, net.middle.weight, net.head.weight]
    groups = [{"params": decayed, "weight_decay": cfg.decay}, {"params": plain}]
    opt = torch.optim.SGD(groups, cfg.lr, momentum=cfg.momentum, nesterov=True)
    sched = torch.optim.lr_scheduler.OneCycleLR(
        opt, cfg.lr, total_steps=cfg.total, pct_start=0.4, div_factor=3.0
    )
    for number in range(cfg.rounds):
        bought, rest = acquire(net, raw, labelled, masks)
        labelled.add(bought, lab[bought], bootstrap(world, cfg.buy))
        net.train()
        opt.zero_grad()
        for _ in range(cfg.accumulate):
            index, label, counts = labelled.draw(cfg.micro, world)
            quiet = rest[torch.randperm(len(rest), generator=world)[: cfg.quiet]]
            logits, _ = net(raw[torch.cat([index, quiet])], masks)
            told, untold = logits.split([cfg.micro, cfg.quiet], 1)
            fit = SoftenedLoss.apply(told, label, counts, cfg.tau, cfg.smooth)
            loss = (fit + cfg.agree * disagreement(untold)) / cfg.accumulate
            loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), cfg.clip)
        opt.step()
        sched.step()
        average.update_parameters(net)
        recompute(average.module, raw[labelled.index])
        print(f"round {number}: {len(labelled.index)} labels, fit {fit:.4f} loss {loss:.4f}")
    average.eval()
    with torch.no_grad():
        guess = average(raw)[0].softmax(2).mean(0).argmax(1)
    print(f"right {(guess == lab).float().mean():.3f}")


if __name__ == "__main__":
    main()
