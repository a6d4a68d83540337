"""Time before channels, as in Keras; one dense kernel for query, key and value a head."""

import math
from pathlib import Path

import torch
from torch import nn

HORIZON, LEVELS = 8, [0.1, 0.5, 0.9]


class Dense(nn.Module):
    def __init__(self, w, b):
        super().__init__()
        self.kernel = nn.Parameter(w.T.contiguous())
        self.bias = nn.Parameter(b.clone())

    def forward(self, x):
        return torch.matmul(x, self.kernel) + self.bias


class BatchNorm(nn.Module):
    def __init__(self, state, at, momentum=0.9, epsilon=1e-5):
        super().__init__()
        self.gamma = nn.Parameter(state[at + ".weight"].clone())
        self.beta = nn.Parameter(state[at + ".bias"].clone())
        self.register_buffer("moving_mean", state[at + ".running_mean"].clone())
        self.register_buffer("moving_var", state[at + ".running_var"].clone())
        self.momentum, self.epsilon = momentum, epsilon

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        n = len(flat)
        mean = flat.sum(0) / n
        var = (flat * flat).sum(0) / n - mean * mean
        if self.training:
            with torch.no_grad():
                keep = self.momentum
                self.moving_mean.copy_(keep * self.moving_mean + (1 - keep) * mean)
                unbiased = var * n / (n - 1)
                self.moving_var.copy_(keep * self.moving_var + (1 - keep) * unbiased)
        return (x - mean) * (self.gamma / torch.sqrt(var + self.epsilon)) + self.beta


class Attention(nn.Module):
    def __init__(self, state, at, heads=3):
        super().__init__()
        w = state[at + ".in_proj_weight"]
        width = w.shape[1]
        size = width // heads
        # head, part, width, size
        kernel = w.view(3, heads, size, width).permute(1, 0, 3, 2)
        bias = state[at + ".in_proj_bias"].view(3, heads, size).transpose(0, 1)
        self.kernel = nn.Parameter(kernel.contiguous())
        self.bias = nn.Parameter(bias.contiguous())
        out = state[at + ".out_proj.weight"].view(width, heads, size)
        self.out = nn.Parameter(out.permute(1, 2, 0).contiguous())
        self.out_bias = nn.Parameter(state[at + ".out_proj.bias"].clone())
        self.factor = 1 / math.sqrt(size)

    def forward(self, x):
        parts = torch.einsum("ntw,hpws->phnts", x, self.kernel)
        parts = parts + self.bias.permute(1, 0, 2)[:, :, None, None, :]
        query, key, value = parts.unbind(0)
        scores = torch.einsum("hnts,hnus->hntu", query, key) * self.factor
        share = torch.exp(scores - torch.logsumexp(scores, dim=-1, keepdim=True))
        mixed = torch.einsum("hntu,hnus->hnts", share, value)
        return torch.einsum("hnts,hsw->ntw", mixed, self.out) + self.out_bias


class Encoder(nn.Module):
    def __init__(self, state, at):
        super().__init__()
        self.att = Attention(state, at + ".attention")
        self.bn_a = BatchNorm(state, at + ".norm1")
        self.up = Dense(state[at + ".feed.0.weight"], state[at + ".feed.0.bias"])
        self.down = Dense(state[at + ".feed.2.weight"], state[at + ".feed.2.bias"])
        self.bn_b = BatchNorm(state, at + ".norm2")

    def forward(self, x):
        x = self.bn_a(x + self.att(x))
        h = self.up(x)
        h = h * 0.5 * torch.erfc(-h / math.sqrt(2))
        return self.bn_b(x + self.down(h))


def replicate(x, before, after):
    """Repeat the first and last moments of (batch, time, channels)."""
    return torch.cat([x[:, :1]] * before + [x] + [x[:, -1:]] * after, dim=1)


class Model(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.gain = nn.Parameter(state["scale.weight"][:, 0].clone())
        self.shift = nn.Parameter(state["scale.bias"][:, 0].clone())
        self.embed = Dense(state["embed.weight"], state["embed.bias"])
        self.position = nn.Parameter(state["position"].clone())
        self.encoders = nn.ModuleList(Encoder(state, f"layers.{i}") for i in (0, 1))
        # (patches, width, horizon, levels)
        head = state["head.weight"].view(HORIZON, 3, -1, 12).permute(2, 3, 0, 1)
        self.head = nn.Parameter(head.contiguous())
        trend = state["trend.weight"].view(HORIZON, 3, -1).permute(2, 0, 1)
        self.trend = nn.Parameter(trend.contiguous())
        self.head_bias = nn.Parameter(state["head.bias"].view(HORIZON, 3).clone())
        self.trend_bias = nn.Parameter(state["trend.bias"].view(HORIZON, 3).clone())

    def forward(self, history):
        x = history.transpose(1, 2)
        with torch.no_grad():
            center = x.mean(dim=1, keepdim=True)
            spread = torch.sqrt(((x - center) ** 2).mean(dim=1, keepdim=True) + 1e-5)
        x = (x - center) / spread * self.gain + self.shift
        sums = torch.cumsum(replicate(x, 3 + 1, 4), dim=1)
        smooth = (sums[:, 8:] - sums[:, :-8]) / 8
        rest = replicate(x - smooth, 0, 4)
        starts = range(0, rest.shape[1] - 5, 4)
        patches = torch.stack([rest[:, s : s + 6] for s in starts], dim=1)
        tokens = self.embed(patches.permute(0, 3, 1, 2)) + self.position
        n, c, p, w = tokens.shape
        tokens = tokens.reshape(n * c, p, w)
        for encoder in self.encoders:
            tokens = encoder(tokens)
        tokens = tokens.reshape(n, c, p, w)
        y = torch.einsum("ncpw,pwhq->nchq", tokens, self.head) + self.head_bias
        y = y + torch.einsum("ntc,thq->nchq", smooth, self.trend) + self.trend_bias
        y = (y - self.shift[:, None, None]) / (self.gain[:, None, None] + 1e-10)
        return y * spread.mT[..., None] + center.mT[..., None]


def model():
    return Model(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["history"])


def loss(forecast, batch):
    total = 0.0
    decay = [0.9**h for h in range(HORIZON)]
    future = batch["future"]
    for q, level in enumerate(LEVELS):
        late = future - forecast[..., q]
        cost = level * late.clamp(min=0) + (1 - level) * (-late).clamp(min=0)
        weights = torch.tensor(decay, dtype=late.dtype) / sum(decay)
        total = total + (cost * weights).sum(-1).mean() / len(LEVELS)
    down = forecast.diff(dim=-1).neg().clamp(min=0)
    return total + 0.5 * down.mean()


class Momentum(torch.optim.Optimizer):
    def __init__(self, params, rate=0.02, momentum=0.9, decay=1e-3):
        super().__init__(params, dict(rate=rate, momentum=momentum, decay=decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad + group["decay"] * p
                before = self.state[p].get("v")
                v = g.clone() if before is None else group["momentum"] * before + g
                self.state[p]["v"] = v
                p -= group["rate"] * (g + group["momentum"] * v)


def optimizer(net):
    return Momentum(net.parameters())
