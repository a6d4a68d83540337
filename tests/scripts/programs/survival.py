"""Time to relapse after surgery: a deep Cox model with a second head for hazards by interval.

The published score, a sum over a few lab values, is where the linear part begins.
"""

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

DEFAULTS = {"seed": 17, "patients": 260, "batch": 40, "epochs": 1, "width": 24, "intervals": 6}
DEFAULTS |= {"lr": 0.08, "momentum": 0.9, "decay": 1e-2, "l1": 0.03, "clip": 0.6, "ema": 0.9}
ap = argparse.ArgumentParser()
for name, value in DEFAULTS.items():
    ap.add_argument(f"--{name}", type=type(value), default=value)
ap.add_argument("--hazard-weight", type=float, default=0.5)
cli = ap.parse_args()

# hazard ratios of the published score, for one unit each
LABS = ["age", "albumin", "log_marker", "margin", "grade", "bmi"]
PUBLISHED = {"age": 1.03, "albumin": 0.93, "log_marker": 1.6, "margin": 0.8}
STAGES = ["?", "I", "II", "IIIa", "IIIb"]


# --- cohort


def simulate(n, rng):
    """Raw lab values with holes, stage (0 is unknown), months, and whether it was a relapse."""
    z = torch.randn(n, len(LABS), generator=rng)
    z[:, 4] = 0.6 * z[:, 0] + 0.8 * z[:, 4]
    stage = torch.randint(1, len(STAGES), (n,), generator=rng)
    true = z @ torch.tensor([0.3, -0.4, 0.5, -0.2, 0.3, 0.0]) + 0.35 * (stage - 2)
    true = true + 0.4 * z[:, 0] * z[:, 2]
    u = torch.rand(2, n, generator=rng).clamp(min=1e-4)
    relapse = 30 * (-u[0].log() * torch.exp(-true)) ** (1 / 1.3)
    leaves = 50 * u[1] + 4
    months = torch.minimum(relapse, leaves).ceil()  # visits are monthly: ties
    labs = z * torch.tensor([9.0, 5.0, 1.2, 1.5, 0.8, 4.0])
    labs = labs + torch.tensor([63.0, 39.0, 2.5, 4.0, 2.2, 26.0])
    labs[torch.rand(n, len(LABS), generator=rng) < 0.12] = math.nan
    stage[torch.rand(n, generator=rng) < 0.1] = 0
    return labs, stage, months, relapse <= leaves


def fit_scaler(labs):
    there = ~labs.isnan()
    mean = labs.nanmean(0)
    var = ((labs - mean) ** 2).nan_to_num().sum(0) / there.sum(0)
    return mean, var.sqrt()


def featurise(labs, mean, std):
    """Standard scores, nought where missing, and which are missing."""
    missing = labs.isnan()
    x = ((labs - mean) / std).nan_to_num(0.0)
    return torch.cat([x, missing.float()], 1)


def make_cuts(months, event, k):
    """Ends of all intervals but the last: equally many relapses in each."""
    return months[event].quantile(torch.arange(1, k) / k)


def stratified(event, size, rng):
    """Rows of batches that all have the cohort's share of relapses."""
    queues = [rows.nonzero()[:, 0] for rows in (event, ~event)]
    queues = [rows[torch.randperm(len(rows), generator=rng)] for rows in queues]
    batches = len(event) // size
    parts = zip(*(q.tensor_split(batches) for q in queues))
    return [torch.cat(part) for part in parts]


# --- losses


class EfronLoss(torch.autograd.Function):
    """Negative log partial likelihood per relapse, ties as Efron has them. Rows in order of time."""

    @staticmethod
    def forward(ctx, score, time, event):
        # those still at risk: all from the first row with the same time
        later = score.flip(0).logcumsumexp(0).flip(0)
        log_risk = later[torch.searchsorted(time, time)]
        tied = (time[:, None] == time) & event[:, None] & event
        log_tied = torch.where(tied, score, -math.inf).logsumexp(1)
        share = tied.tril(-1).sum(1) / tied.sum(1).clamp(min=1)
        log_denom = log_risk + torch.log1p(-share * (log_tied - log_risk).exp())
        n = event.sum()
        ctx.save_for_backward(score, time, event, tied, share, log_denom, n)
        return ((log_denom - score) * event).sum() / n

    @staticmethod
    def backward(ctx, grad):
        score, time, event, tied, share, log_denom, n = ctx.saved_tensors
        per = event * torch.exp(-log_denom)
        last = torch.searchsorted(time, time, right=True) - 1
        at_risk = per.cumsum(0)[last]
        at_risk = at_risk - tied.T.to(per.dtype) @ (share * per)
        return grad * (score.exp() * at_risk - event.float()) / n, None, None


def hazard_loss(logits, months, event, cuts):
    """Cross-entropy over the intervals that a patient was seen in, per patient."""
    index = torch.bucketize(months, cuts)
    interval = torch.arange(logits.shape[1])
    target = (interval == index[:, None]) & event[:, None]
    # censored in an interval: not known to have come through it
    seen = (interval < index[:, None]) | target
    loss = F.binary_cross_entropy_with_logits(logits, target.float(), reduction="none")
    return (loss * seen).sum(1).mean()


# --- net


class SpectralLinear(nn.Module):
    """A linear layer whose largest singular value is `bound`."""

    def __init__(self, n_in, n_out, bound=1.5):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        self.bias = nn.Parameter(torch.zeros(n_out))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.bound = bound
        self.register_buffer("u", F.normalize(torch.randn(n_out), dim=0))

    def forward(self, x):
        with torch.no_grad():
            v = F.normalize(self.weight.T @ self.u, dim=0)
            u = F.normalize(self.weight @ v, dim=0)
            if self.training:
                self.u.copy_(u)
        sigma = u @ self.weight @ v
        return F.linear(x, self.weight * (self.bound / sigma), self.bias)


class DeepCox(nn.Module):
    def __init__(self, n_in, width, intervals):
        super().__init__()
        self.stage = nn.Embedding(len(STAGES), 3, padding_idx=0)
        self.inlet = nn.Linear(n_in + 3, width, bias=False)
        self.bn = nn.BatchNorm1d(width)
        self.hidden = nn.ModuleList([SpectralLinear(width, width), SpectralLinear(width, width)])
        self.drop = nn.Dropout(0.1)
        self.linear = nn.Linear(n_in, 1, bias=False)
        self.risk = nn.Linear(width, 1, bias=False)
        self.hazard = nn.Linear(width, intervals)

    def forward(self, x, stage):
        h = self.inlet(torch.cat([x, self.stage(stage)], 1))
        h = F.selu(self.bn(h))
        for layer in self.hidden:
            h = h + self.drop(F.selu(layer(h)))
        risk = self.risk(h) + self.linear(x)
        return risk.squeeze(1), self.hazard(h) + risk.detach()


@torch.no_grad()
def adopt(net, std, months, event, cuts):
    """The linear part begins as the published score, the hazards as the cohort's."""
    net.linear.weight.zero_()
    for name, ratio in PUBLISHED.items():
        column = LABS.index(name)
        net.linear.weight[0, column] = math.log(ratio) * std[column]
    index = torch.bucketize(months, cuts)
    events = torch.bincount(index[event], minlength=len(cuts) + 1)
    at_risk = torch.bincount(index, minlength=len(cuts) + 1).flip(0).cumsum(0).flip(0)
    net.hazard.bias.copy_((events / at_risk).clamp(0.01, 0.99).logit())
    # known stages begin in their order
    net.stage.weight[1:, 0] = torch.linspace(-1, 1, len(STAGES) - 1)


# --- training


@torch.no_grad()
def shrink(weight, by):
    """Proximal step of the L1 penalty."""
    weight.copy_(weight.sign() * (weight.abs() - by).clamp(min=0))


@torch.no_grad()
def update_average(average, net, step, most):
    decay = min(most, step / (step + 3))
    for a, p in zip(average.parameters(), net.parameters()):
        a.lerp_(p, 1 - decay)
    for a, b in zip(average.buffers(), net.buffers()):
        a.copy_(b)


@torch.no_grad()
def concordance(net, x, stage, months, event):
    """Share of comparable pairs that are in order; ties of the score count half."""
    net.eval()
    score = net(x, stage)[0]
    before = event[:, None] & (months[:, None] < months)
    right = (score[:, None] > score).float() + 0.5 * (score[:, None] == score)
    return ((right * before).sum() / before.sum()).item()


def main():
    torch.manual_seed(cli.seed)
    rng = torch.Generator().manual_seed(cli.seed + 1)
    labs, stage, months, event = simulate(cli.patients, rng)
    cut = int(0.8 * cli.patients)
    mean, std = fit_scaler(labs[:cut])
    x = featurise(labs, mean, std)
    cuts = make_cuts(months[:cut], event[:cut], cli.intervals)
    everything = (x, stage, months, event)
    train, test = [t[:cut] for t in everything], [t[cut:] for t in everything]

    net = DeepCox(x.shape[1], cli.width, cli.intervals)
    adopt(net, std, *train[2:], cuts)
    average = copy.deepcopy(net).requires_grad_(False)
    decayed = [net.hidden[0].weight, net.hidden[1].weight, net.risk.weight, net.hazard.weight]
    slow = [net.linear.weight]
    known = {id(p) for p in [*decayed, *slow]}
    rest = [p for p in net.parameters() if id(p) not in known]
    groups = [{"params": decayed, "weight_decay": cli.decay}, {"params": slow}, {"params": rest}]
    opt = torch.optim.SGD(groups, cli.lr, momentum=cli.momentum, nesterov=True)
    sched = torch.optim.lr_scheduler.OneCycleLR(
        opt, max_lr=[cli.lr, 0.2 * cli.lr, cli.lr], total_steps=20, pct_start=0.3, div_factor=4.0
    )

    print(f"published score and noise: {concordance(net, *test):.3f}")
    net.train()
    for epoch in range(cli.epochs):
        for rows in stratified(train[3], cli.batch, rng):
            rows = rows[train[2][rows].argsort(stable=True)]
            bx, bstage, bmonths, bevent = (t[rows] for t in train)
            score, logits = net(bx, bstage)
            cox = EfronLoss.apply(score, bmonths, bevent)
            loss = cox + cli.hazard_weight * hazard_loss(logits, bmonths, bevent, cuts)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), cli.clip)
            opt.step()
            shrink(net.inlet.weight, cli.l1 * opt.param_groups[2]["lr"])
            sched.step()
            update_average(average, net, sched.last_epoch, cli.ema)
            print(f"epoch {epoch} cox {cox:.4f} loss {loss:.4f}")
    print(f"concordance {concordance(average, *test):.3f}")


if __name__ == "__main__":
    main()
