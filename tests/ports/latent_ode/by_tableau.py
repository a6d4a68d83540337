"""Runge-Kutta by its tableau; the cell in numpy's manner; everything right-multiplied."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

NODES = (0.0, 0.5, 0.5, 1.0)
STAGES = ((), (0.5,), (0.0, 0.5), (0.0, 0.0, 1.0))
SHARES = (1 / 6, 1 / 3, 1 / 3, 1 / 6)


def elu(x):
    return torch.where(x > 0, x, torch.expm1(x))


class ODE(nn.Module):
    def __init__(self, w):
        super().__init__()
        first = w["field.net.0.weight"]
        self.Wz = nn.Parameter(first[:, :-1].T.clone())
        self.wt = nn.Parameter(first[:, -1].clone())
        self.b0 = nn.Parameter(w["field.net.0.bias"].clone())
        self.W1 = nn.Parameter(w["field.net.2.weight"].T.clone())
        self.b1 = nn.Parameter(w["field.net.2.bias"].clone())
        self.W2 = nn.Parameter(w["field.net.4.weight"].T.clone())
        self.b2 = nn.Parameter(w["field.net.4.bias"].clone())

    def forward(self, y, t):
        h = torch.tanh(y @ self.Wz + t * self.wt + self.b0)
        h = elu(h @ self.W1 + self.b1)
        return h @ self.W2 + self.b2


def integrate(f, y, times, inner=3):
    out = [y]
    for n in range(len(times) - 1):
        dt = (times[n + 1] - times[n]) / inner
        for step in range(inner):
            t = times[n] + step * dt
            ks = []
            for node, row in zip(NODES, STAGES):
                inside = y
                for a, k in zip(row, ks):
                    if a:
                        inside = inside + a * dt * k
                ks.append(f(inside, t + node * dt))
            total = sum(share * k for share, k in zip(SHARES, ks))
            y = y + dt * total
        out.append(y)
    return torch.stack(out)


class GRU(nn.Module):
    def __init__(self, w):
        super().__init__()
        ri, zi, ni = w["encoder.weight_ih_l0"].chunk(3)
        rh, zh, nh = w["encoder.weight_hh_l0"].chunk(3)
        self.W_zr = nn.Parameter(torch.cat([zi, ri]).T.clone())
        self.U_zr = nn.Parameter(torch.cat([zh, rh]).T.clone())
        self.W_n = nn.Parameter(ni.T.clone())
        self.U_n = nn.Parameter(nh.T.clone())
        br, bz, bn = w["encoder.bias_ih_l0"].chunk(3)
        cr, cz, cn = w["encoder.bias_hh_l0"].chunk(3)
        self.b_zr = nn.Parameter(torch.cat([bz, br]))
        self.c_zr = nn.Parameter(torch.cat([cz, cr]))
        self.b_n = nn.Parameter(bn.clone())
        self.c_n = nn.Parameter(cn.clone())

    def forward(self, series):
        h = torch.zeros(series.shape[0], self.U_n.shape[0], dtype=series.dtype)
        for t in reversed(range(series.shape[1])):
            x = series[:, t]
            gates = torch.sigmoid(x @ self.W_zr + h @ self.U_zr + self.b_zr + self.c_zr)
            z, r = torch.split(gates, h.shape[1], dim=1)
            n = torch.tanh(x @ self.W_n + self.b_n + r * (h @ self.U_n + self.c_n))
            h = n + z * (h - n)
        return h


class Model(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.gru = GRU(w)
        mean, logvar = w["stats.weight"].chunk(2)
        mean_bias, logvar_bias = w["stats.bias"].chunk(2)
        self.mu_w = nn.Parameter(mean.T.clone())
        self.mu_b = nn.Parameter(mean_bias.clone())
        self.logvar_w = nn.Parameter(logvar.T.clone())
        self.logvar_b = nn.Parameter(logvar_bias.clone())
        self.ode = ODE(w)
        self.dec_w0 = nn.Parameter(w["decoder.0.weight"].T.clone())
        self.dec_b0 = nn.Parameter(w["decoder.0.bias"].clone())
        self.dec_w1 = nn.Parameter(w["decoder.2.weight"].T.clone())
        self.dec_b1 = nn.Parameter(w["decoder.2.bias"].clone())
        self.log_sigma = nn.Parameter(w["log_noise"].clone())

    def forward(self, x, mask, times, eps):
        n, t = x.shape[:2]
        gap = torch.zeros_like(times)
        gap[1:] = times[1:] - times[:-1]
        gap = gap.reshape(1, t, 1).repeat(n, 1, 1)
        h = self.gru(torch.cat([mask * x, mask, gap], dim=2))
        mu = h @ self.mu_w + self.mu_b
        logvar = h @ self.logvar_w + self.logvar_b
        y0 = mu + torch.sqrt(torch.exp(logvar)) * eps
        ys = integrate(self.ode, y0, times)
        hidden = torch.relu(ys @ self.dec_w0 + self.dec_b0)
        guess = (hidden @ self.dec_w1 + self.dec_b1).transpose(0, 1)
        return {
            "guess": guess,
            "mean": mu,
            "log_var": logvar,
            "log_noise": self.log_sigma,
        }


def model():
    return Model(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["x"], batch["mask"], batch["times"], batch["noise"])


def loss(output, batch):
    log_sigma = output["log_noise"]
    scaled = (batch["x"] - output["guess"]) * torch.exp(-log_sigma)
    log_p = -0.5 * scaled.square() - log_sigma - 0.5 * np.log(2 * np.pi)
    log_p = torch.einsum("ntc,ntc->n", log_p, batch["mask"])
    mu, logvar = output["mean"], output["log_var"]
    kl = 0.5 * torch.sum(mu.square() + logvar.exp() - logvar - 1, dim=1)
    elbo = log_p - 0.7 * kl
    return -elbo.mean()


class RMSProp(torch.optim.Optimizer):
    def __init__(self, params, lr, rho=0.95, momentum=0.9, epsilon=1e-8):
        defaults = dict(lr=lr, rho=rho, momentum=momentum, epsilon=epsilon)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            rho = group["rho"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["square"] = torch.zeros_like(p)
                    state["move"] = torch.zeros_like(p)
                g = p.grad
                state["square"] = rho * state["square"] + (1 - rho) * g**2
                change = g / (state["square"].sqrt() + group["epsilon"])
                state["move"] = group["momentum"] * state["move"] + change
                p.add_(-group["lr"] * state["move"])


def optimizer(net):
    return RMSProp(net.parameters(), 1e-3)
