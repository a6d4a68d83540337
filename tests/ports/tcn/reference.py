"""A small temporal convolutional network for several series, with two probabilistic heads."""

from typing import Any

import torch
from torch import nn
from torch.distributions import StudentT
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

NUM_SERIES, VARIABLES = 8, 3
HISTORY, HORIZON = 26, 6
HOUR_DIM, WEEKDAY_DIM = 6, 4
CALENDAR = HOUR_DIM + WEEKDAY_DIM
WIDTH, SKIP, SQUEEZED, HIDDEN = 24, 28, 6, 32
KERNEL, DILATIONS = 3, (1, 2, 4)
LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9)
NORM_EPS, MIN_SCALE = 1e-5, 1e-3
STATISTICS_DECAY = 0.9
HORIZON_DECAY, NLL_WEIGHT = 0.9, 0.3
LR, ALPHA, EPS, MOMENTUM = 2e-3, 0.95, 1e-4, 0.9
WEIGHT_DECAY, CLIP_NORM = 1e-2, 0.25


class SeriesNorm(nn.Module):
    """Reversible: by the observed history of each series, then a learned affine map.

    Keeps averages of the statistics of each series; how far a series is from them are
    features of their own.
    """

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(VARIABLES))
        self.bias = nn.Parameter(torch.zeros(VARIABLES))
        self.register_buffer("running_mean", torch.zeros(NUM_SERIES, VARIABLES))
        self.register_buffer("running_std", torch.ones(NUM_SERIES, VARIABLES))

    def statistics(self, past, observed):
        count = observed.sum(dim=1, keepdim=True).clamp(min=1)
        mean = (past * observed).sum(dim=1, keepdim=True) / count
        var = ((past - mean) ** 2 * observed).sum(dim=1, keepdim=True) / count
        return mean, torch.sqrt(var + NORM_EPS)

    def drift(self, series, mean, std):
        old_mean, old_std = self.running_mean[series], self.running_std[series]
        mean, std = mean.squeeze(1), std.squeeze(1)
        moved = torch.cat(
            [(mean - old_mean) / old_std, torch.log(std / old_std)], dim=1
        )
        if self.training:
            self.running_mean[series] = old_mean.lerp(mean, 1 - STATISTICS_DECAY)
            self.running_std[series] = old_std.lerp(std, 1 - STATISTICS_DECAY)
        return moved

    def normalize(self, x, mean, std):
        return (x - mean) / std * self.weight + self.bias

    def restore(self, y, mean, std):
        return (y - self.bias) / self.weight * std + mean


class Calendar(nn.Module):
    def __init__(self):
        super().__init__()
        self.hour = nn.Embedding(24, HOUR_DIM)
        self.weekday = nn.Embedding(7, WEEKDAY_DIM)

    def forward(self, start):
        """The hour of the week in which the history starts -> history and horizon."""
        hours = start[:, None] + torch.arange(HISTORY + HORIZON)
        return torch.cat([self.hour(hours % 24), self.weekday(hours // 24 % 7)], dim=-1)


class Block(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.padding = (KERNEL - 1) * dilation
        self.conv = weight_norm(nn.Conv1d(WIDTH, 2 * WIDTH, KERNEL, dilation=dilation))
        self.squeeze = nn.Linear(WIDTH, SQUEEZED)
        self.excite = nn.Linear(SQUEEZED, WIDTH)
        self.residual = nn.Conv1d(WIDTH, WIDTH, 1)
        self.skip = nn.Conv1d(WIDTH, SKIP, 1)

    def forward(self, x):
        h = F.glu(self.conv(F.pad(x, (self.padding, 0))), dim=1)
        scale = self.excite(F.relu(self.squeeze(h.mean(dim=2))))
        h = h * torch.sigmoid(scale).unsqueeze(2)
        return (x + self.residual(h)) * 0.5**0.5, self.skip(h)


class TCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = SeriesNorm()
        self.calendar = Calendar()
        self.inputs = nn.Conv1d(2 * VARIABLES + CALENDAR, WIDTH, 1)
        self.blocks = nn.ModuleList(Block(dilation) for dilation in DILATIONS)
        self.context = nn.Linear(SKIP + WIDTH + 2 * VARIABLES, HIDDEN)
        self.future = nn.Linear(CALENDAR, HIDDEN, bias=False)
        self.quantile_head = nn.Linear(HIDDEN, VARIABLES * len(LEVELS))
        self.student_head = nn.Linear(HIDDEN, 3 * VARIABLES)

    def forward(self, past, observed, start, series):
        observed = observed.float()
        mean, std = self.norm.statistics(past, observed)
        drift = self.norm.drift(series, mean, std)
        x = self.norm.normalize(past, mean, std) * observed
        calendar = self.calendar(start)

        x = torch.cat([x, observed, calendar[:, :HISTORY]], dim=-1)
        x = self.inputs(x.transpose(1, 2))
        total: Any = 0
        for block in self.blocks:
            x, skip = block(x)
            total = total + skip
        last = F.relu(torch.cat([total, x], dim=1))[:, :, -1]

        context = self.context(torch.cat([last, drift], dim=1))
        h = F.relu(context.unsqueeze(1) + self.future(calendar[:, HISTORY:]))

        raw = self.quantile_head(h).unflatten(-1, (VARIABLES, len(LEVELS)))
        steps = torch.cat([raw[..., :1], F.softplus(raw[..., 1:])], dim=-1)
        quantiles = steps.cumsum(dim=-1).transpose(-1, -2)
        quantiles = self.norm.restore(quantiles, mean.unsqueeze(1), std.unsqueeze(1))

        df, loc, scale = self.student_head(h).chunk(3, dim=-1)
        scale = (F.softplus(scale) + MIN_SCALE) / self.norm.weight * std
        return {
            "quantiles": quantiles.transpose(-1, -2),
            "df": 2 + F.softplus(df),
            "loc": self.norm.restore(loc, mean, std),
            "scale": scale,
        }


def model():
    """As after some steps: gains and averages are away from where they start."""
    torch.manual_seed(3107)
    net = TCN()
    with torch.no_grad():
        net.norm.weight.uniform_(0.7, 1.4)
        net.norm.bias.normal_(0, 0.3)
        for block in net.blocks:
            gain = block.conv.parametrizations.weight.original0
            gain.mul_(torch.empty_like(gain).uniform_(1.2, 2.4))
            for part in (block.squeeze, block.excite, block.residual, block.skip):
                part.weight.mul_(2)
        for name, p in net.named_parameters():
            if name.endswith("bias") and name != "norm.bias":
                p.normal_(0, 0.25)
        level = 30 + 6 * torch.arange(NUM_SERIES)[:, None]
        net.norm.running_mean.copy_(level + 6 * torch.randn(NUM_SERIES, VARIABLES))
        net.norm.running_std.uniform_(4, 12)
    return net


def batches():
    """Days and weeks with noise; some hours were not observed."""
    generator = torch.Generator().manual_seed(3108)
    made = []
    for kinds in ([5, 0, 3, 6, 2], [3, 7, 0, 1]):
        series = torch.tensor(kinds)
        size = len(series)
        start = torch.randint(0, 168, (size,), generator=generator)
        hours = (start[:, None] + torch.arange(32)).unsqueeze(2)
        phase, height, week = torch.rand(3, size, 1, 3, generator=generator)
        values = (
            30.0
            + 6 * series[:, None, None]
            + (5 + 8 * height) * torch.sin(6.2832 * (hours / 24 + phase))
            + 6 * week * (hours // 24 % 7 > 4)
            + 2 * torch.randn(size, 32, 3, generator=generator)
        )
        observed = torch.rand(values.shape, generator=generator) < 0.8
        values = torch.where(observed, values, 0.0)
        made.append(
            {
                "past": values[:, :26],
                "past_observed": observed[:, :26],
                "future": values[:, 26:],
                "future_observed": observed[:, 26:],
                "start": start,
                "series": series,
            }
        )
    return made


def forward(net, batch):
    return net(batch["past"], batch["past_observed"], batch["start"], batch["series"])


def pinball_loss(quantiles, target, weight):
    """Twice the weighted loss of the quantiles, over the weighted size of the target."""
    levels = torch.tensor(LEVELS)
    error = target.unsqueeze(-1) - quantiles
    pinball = torch.maximum(levels * error, (levels - 1) * error).mean(dim=-1)
    return 2 * (pinball * weight).sum() / (target.abs() * weight).sum()


def student_loss(output, target, weight):
    log_prob = StudentT(output["df"], output["loc"], output["scale"]).log_prob(target)
    return -(log_prob * weight).sum() / weight.sum()


def loss(output, batch):
    decay = HORIZON_DECAY ** torch.arange(HORIZON)
    weight = batch["future_observed"] * decay[:, None]
    pinball = pinball_loss(output["quantiles"], batch["future"], weight)
    return pinball + NLL_WEIGHT * student_loss(output, batch["future"], weight)


class ClippedRMSprop(torch.optim.RMSprop):
    """Clips by the norm of all gradients."""

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, CLIP_NORM)
        return super().step(closure)


def optimizer(net):
    """Biases, gains and the calendar do not decay."""
    decay, rest = [], []
    for name, p in net.named_parameters():
        free = p.ndim == 1 or name.endswith("original0") or "calendar" in name
        (rest if free else decay).append(p)
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return ClippedRMSprop(groups, lr=LR, alpha=ALPHA, eps=EPS, momentum=MOMENTUM)
