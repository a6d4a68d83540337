"""After NumPy: [batch, time, channels], x @ W, lists of arrays and loops over taps."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

N_PAST, N_FUTURE, N_VARS = 26, 6, 3
DILATIONS = [1, 2, 4]
N_TAPS = 3
QUANTILES = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9])
STEP_WEIGHTS = 0.9 ** torch.arange(N_FUTURE)
KEEP = 0.9

# ------------------------------------------------------------------ functions


def sigmoid(x):
    return 1.0 / (1.0 + torch.exp(-x))


def softplus(x):
    return torch.logaddexp(x, torch.zeros_like(x))


def relu(x):
    return x * (x > 0)


def masked_mean(x, m):
    """Over time; [batch, time, vars] -> [batch, vars]."""
    return torch.sum(x * m, axis=1) / torch.clamp(torch.sum(m, axis=1), min=1.0)


def unit_filters(v, gain):
    """v is [taps, in, out]; every output's filter gets the length `gain`."""
    length = torch.sqrt(torch.sum(v * v, axis=(0, 1)))
    return v * (gain / length)


def causal_conv(x, w, b, dilation):
    n, steps, channels = x.shape
    before = torch.zeros(n, (N_TAPS - 1) * dilation, channels)
    padded = torch.cat([before, x], dim=1)
    y = b
    for k in range(N_TAPS):
        first = k * dilation
        y = y + padded[:, first : first + steps] @ w[k]
    return y


# ---------------------------------------------------------------------- model


class Forecaster(nn.Module):
    """All the arrays, by their names; those of the blocks are lists."""

    def __init__(self, arrays, averages):
        super().__init__()
        for name, value in arrays.items():
            if isinstance(value, list):
                value = nn.ParameterList([nn.Parameter(v.clone()) for v in value])
            else:
                value = nn.Parameter(value.clone())
            setattr(self, name, value)
        for name, value in averages.items():
            self.register_buffer(name, value.clone())

    def calendar(self, start):
        """[batch] -> [batch, time, features], for the past and for the future."""
        past = start[:, None] + torch.arange(N_PAST)
        future = start[:, None] + torch.arange(N_PAST, N_PAST + N_FUTURE)
        return self.lookup(past), self.lookup(future)

    def lookup(self, hours):
        by_hour = self.hour_table[hours % 24]
        by_day = self.day_table[torch.div(hours, 24, rounding_mode="floor") % 7]
        return torch.cat([by_hour, by_day], dim=2)

    def shift_from_average(self, series, mu, sigma):
        mu_avg = self.avg_mu[series]
        sigma_avg = self.avg_sigma[series]
        shift_mu = (mu - mu_avg) / sigma_avg
        shift_sigma = torch.log(sigma) - torch.log(sigma_avg)
        return torch.cat([shift_mu, shift_sigma], dim=1)

    def update_averages(self, series, mu, sigma):
        for row, s in enumerate(series.tolist()):
            self.avg_mu[s] = KEEP * self.avg_mu[s] + (1.0 - KEEP) * mu[row]
            self.avg_sigma[s] = KEEP * self.avg_sigma[s] + (1.0 - KEEP) * sigma[row]

    def block(self, i, x):
        d = DILATIONS[i]
        value_w = unit_filters(self.value_v[i], self.value_g[i])
        gate_w = unit_filters(self.gate_v[i], self.gate_g[i])
        value = causal_conv(x, value_w, self.value_b[i], d)
        gate = causal_conv(x, gate_w, self.gate_b[i], d)
        h = value * sigmoid(gate)

        s = torch.mean(h, axis=1)
        s = relu(s @ self.down_w[i] + self.down_b[i])
        s = sigmoid(s @ self.up_w[i] + self.up_b[i])
        h = h * s[:, None, :]

        out = x + (h @ self.res_w[i] + self.res_b[i])
        out = out / math.sqrt(2.0)
        skip = h @ self.skip_w[i] + self.skip_b[i]
        return out, skip

    def denormalize(self, y, mu, sigma):
        """Variables are the last axis of y, [batch, time, vars]."""
        y = y - self.shift
        y = y / self.stretch
        return y * sigma[:, None] + mu[:, None]

    def forward(self, past, seen, start, series):
        m = seen.to(past.dtype)
        mu = masked_mean(past, m)
        sigma = torch.sqrt(masked_mean((past - mu[:, None]) ** 2, m) + 1e-5)
        moved = self.shift_from_average(series, mu, sigma)
        if self.training:
            self.update_averages(series, mu, sigma)

        x = (past - mu[:, None]) / sigma[:, None]
        x = x * self.stretch + self.shift
        x = x * m
        cal_past, cal_future = self.calendar(start)
        x = x @ self.in_x + m @ self.in_m + cal_past @ self.in_cal + self.in_b

        skips = []
        for i in range(len(DILATIONS)):
            x, skip = self.block(i, x)
            skips.append(skip)
        last_skip = relu(sum(skips)[:, N_PAST - 1])
        last_x = relu(x[:, N_PAST - 1])

        context = last_skip @ self.ctx_skip + last_x @ self.ctx_x
        context = context + moved @ self.ctx_moved + self.ctx_b
        h = relu(context[:, None] + cal_future @ self.ctx_cal)

        q_raw = torch.einsum("bth,hvq->btvq", h, self.q_w) + self.q_b
        level = q_raw[..., 0]
        levels = [level]
        for q in range(1, len(QUANTILES)):
            level = level + softplus(q_raw[..., q])
            levels.append(level)
        levels = [self.denormalize(level, mu, sigma) for level in levels]

        nu, loc, tau = (
            torch.einsum("bth,hpv->pbtv", h, self.t_w) + self.t_b[:, None, None]
        )
        tau = softplus(tau) + 1e-3
        return {
            "quantiles": torch.stack(levels, dim=-1),
            "df": softplus(nu) + 2.0,
            "loc": self.denormalize(loc, mu, sigma),
            "scale": tau * sigma[:, None] / self.stretch,
        }


# -------------------------------------------------------------------- weights


def load_arrays(path):
    sd = torch.load(path)
    n_blocks = len(DILATIONS)
    arrays = {}
    arrays["stretch"] = sd["norm.weight"]
    arrays["shift"] = sd["norm.bias"]
    arrays["hour_table"] = sd["calendar.hour.weight"]
    arrays["day_table"] = sd["calendar.weekday.weight"]

    w = sd["inputs.weight"][:, :, 0].T
    arrays["in_x"], arrays["in_m"], arrays["in_cal"] = w[:3], w[3:6], w[6:]
    arrays["in_b"] = sd["inputs.bias"]

    for kind in ["value", "gate"]:
        for letter in "vgb":
            arrays[f"{kind}_{letter}"] = []
    for i in range(n_blocks):
        g = sd[f"blocks.{i}.conv.parametrizations.weight.original0"].reshape(-1)
        v = sd[f"blocks.{i}.conv.parametrizations.weight.original1"]
        v = torch.permute(v, (2, 1, 0))
        b = sd[f"blocks.{i}.conv.bias"]
        half = len(b) // 2
        arrays["value_v"].append(v[..., :half])
        arrays["gate_v"].append(v[..., half:])
        arrays["value_g"].append(g[:half])
        arrays["gate_g"].append(g[half:])
        arrays["value_b"].append(b[:half])
        arrays["gate_b"].append(b[half:])

    arrays["down_w"] = [sd[f"blocks.{i}.squeeze.weight"].T for i in range(n_blocks)]
    arrays["down_b"] = [sd[f"blocks.{i}.squeeze.bias"] for i in range(n_blocks)]
    arrays["up_w"] = [sd[f"blocks.{i}.excite.weight"].T for i in range(n_blocks)]
    arrays["up_b"] = [sd[f"blocks.{i}.excite.bias"] for i in range(n_blocks)]
    res = [sd[f"blocks.{i}.residual.weight"].squeeze(2) for i in range(n_blocks)]
    arrays["res_w"] = [matrix.T for matrix in res]
    arrays["res_b"] = [sd[f"blocks.{i}.residual.bias"] for i in range(n_blocks)]
    skip = [sd[f"blocks.{i}.skip.weight"].squeeze(2) for i in range(n_blocks)]
    arrays["skip_w"] = [matrix.T for matrix in skip]
    arrays["skip_b"] = [sd[f"blocks.{i}.skip.bias"] for i in range(n_blocks)]

    w = sd["context.weight"].T
    arrays["ctx_skip"], arrays["ctx_x"] = w[:28], w[28:52]
    arrays["ctx_moved"] = w[52:]
    arrays["ctx_b"] = sd["context.bias"]
    arrays["ctx_cal"] = sd["future.weight"].T

    w, b = sd["quantile_head.weight"].T, sd["quantile_head.bias"]
    arrays["q_w"] = w.reshape(-1, N_VARS, len(QUANTILES))
    arrays["q_b"] = b.reshape(N_VARS, len(QUANTILES))
    w, b = sd["student_head.weight"].T, sd["student_head.bias"]
    arrays["t_w"] = w.reshape(-1, 3, N_VARS)
    arrays["t_b"] = b.reshape(3, N_VARS)

    averages = {"avg_mu": sd["norm.running_mean"], "avg_sigma": sd["norm.running_std"]}
    return arrays, averages


def model():
    arrays, averages = load_arrays(Path(__file__).with_name("weights.pt"))
    return Forecaster(arrays, averages)


def forward(net, batch):
    return net(batch["past"], batch["past_observed"], batch["start"], batch["series"])


# ----------------------------------------------------------------------- loss


def quantile_loss(quantiles, y, w):
    total: Any = 0.0
    for i, q in enumerate(QUANTILES):
        over = y - quantiles[..., i]
        cost = torch.where(over >= 0, q * over, (q - 1.0) * over)
        total = total + torch.sum(w * cost)
    return 2.0 * total / len(QUANTILES) / torch.sum(w * torch.abs(y))


def t_nll(y, nu, loc, tau):
    z = (y - loc) / tau
    log_norm = torch.lgamma(nu / 2) - torch.lgamma((nu + 1) / 2)
    log_norm = log_norm + 0.5 * torch.log(math.pi * nu) + torch.log(tau)
    return log_norm + 0.5 * (nu + 1) * torch.log1p(z * z / nu)


def loss(output, batch):
    y = batch["future"]
    w = STEP_WEIGHTS[None, :, None] * batch["future_observed"]
    nll = t_nll(y, output["df"], output["loc"], output["scale"])
    nll = torch.sum(nll * w) / torch.sum(w)
    return quantile_loss(output["quantiles"], y, w) + 0.3 * nll


# ------------------------------------------------------------------ optimizer

DECAYED = ["in_x", "in_m", "in_cal", "value_v", "gate_v", "down_w", "up_w", "res_w"]
DECAYED += ["skip_w", "ctx_skip", "ctx_x", "ctx_moved", "ctx_cal", "q_w", "t_w"]


class RMSProp(torch.optim.Optimizer):
    def __init__(self, net, lr=2e-3, rho=0.95, momentum=0.9, eps=1e-4, l2=1e-2):
        named = list(net.named_parameters())
        super().__init__([p for _, p in named], {})
        self.lr, self.rho, self.momentum, self.eps = lr, rho, momentum, eps
        self.arrays = [p for _, p in named]
        self.l2 = [l2 if name.split(".")[0] in DECAYED else 0.0 for name, _ in named]
        self.mean_square = [torch.zeros_like(p) for p in self.arrays]
        self.velocity = [torch.zeros_like(p) for p in self.arrays]

    @torch.no_grad()
    def step(self, closure=None):
        norm = math.sqrt(sum(float(torch.sum(p.grad**2)) for p in self.arrays))
        shrink = min(1.0, 0.25 / (norm + 1e-6))
        for i, p in enumerate(self.arrays):
            g = shrink * p.grad + self.l2[i] * p
            ms = self.rho * self.mean_square[i] + (1.0 - self.rho) * g * g
            vel = self.momentum * self.velocity[i] + g / (torch.sqrt(ms) + self.eps)
            self.mean_square[i], self.velocity[i] = ms, vel
            p.sub_(self.lr * vel)


def optimizer(net):
    return RMSProp(net)
