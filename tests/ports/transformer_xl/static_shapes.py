"""As in JAX: batch first, a memory of one fixed length whose empty places are masked."""

from pathlib import Path

import torch
from torch import nn

SEGMENT, MEMORY = 4, 6


def layer_norm(x, scale, bias, eps=1e-5):
    mean = torch.mean(x, dim=-1, keepdim=True)
    var = torch.mean(torch.square(x), dim=-1, keepdim=True) - torch.square(mean)
    return (x - mean) * torch.rsqrt(var + eps) * scale + bias


def softmax(x):
    x = x - torch.amax(x, dim=-1, keepdim=True).detach()
    e = torch.exp(x)
    return e / torch.sum(e, dim=-1, keepdim=True)


def sinusoids(distance, width):
    """One row for each distance, sines before cosines."""
    rate = torch.pow(100.0, -torch.arange(0, width, 2) / width)
    phase = distance[:, None] * rate
    return torch.cat([torch.sin(phase), torch.cos(phase)], dim=1)


class Attention(nn.Module):
    """Kernels (width, heads, size), output (heads, size, width)."""

    def __init__(self, params, prefix, heads=3):
        super().__init__()
        width = params[prefix + ".o_net.weight"].shape[0]
        size = width // heads

        def dense(weight):
            return nn.Parameter(weight.T.reshape(width, heads, size).clone())

        q, k, v = params[prefix + ".qkv_net.weight"].split(width)
        self.query = dense(q)
        self.key = dense(k)
        self.value = dense(v)
        self.relative = dense(params[prefix + ".r_net.weight"])
        out = params[prefix + ".o_net.weight"].T.reshape(heads, size, width)
        self.out = nn.Parameter(out.clone())
        self.scale = nn.Parameter(params[prefix + ".layer_norm.weight"].clone())
        self.bias = nn.Parameter(params[prefix + ".layer_norm.bias"].clone())

    def forward(self, x, memory, table, distance, allowed, content, position):
        context = torch.cat([memory, x], dim=1)
        q = torch.einsum("btw,whd->bhtd", x, self.query)
        k = torch.einsum("bsw,whd->bhsd", context, self.key)
        v = torch.einsum("bsw,whd->bhsd", context, self.value)
        r = torch.einsum("pw,whd->hpd", table, self.relative)
        by_content = torch.einsum("bhtd,bhsd->bhts", q + content[:, None], k)
        by_distance = torch.einsum("bhtd,hpd->bhtp", q + position[:, None], r)
        index = distance.expand(*by_distance.shape[:2], -1, -1)
        by_place = torch.gather(by_distance, -1, index)
        logits = (by_content + by_place) / q.shape[-1] ** 0.5
        logits = torch.where(allowed, logits, -1e30)
        mixed = torch.einsum("bhts,bhsd->bthd", softmax(logits), v)
        y = torch.einsum("bthd,hdw->btw", mixed, self.out)
        return layer_norm(x + y, self.scale, self.bias)


class Block(nn.Module):
    def __init__(self, params, prefix):
        super().__init__()
        self.attention = Attention(params, prefix + ".attn")
        self.up = nn.Parameter(params[prefix + ".core.0.weight"].T.clone())
        self.up_bias = nn.Parameter(params[prefix + ".core.0.bias"].clone())
        self.down = nn.Parameter(params[prefix + ".core.2.weight"].T.clone())
        self.down_bias = nn.Parameter(params[prefix + ".core.2.bias"].clone())
        self.scale = nn.Parameter(params[prefix + ".layer_norm.weight"].clone())
        self.bias = nn.Parameter(params[prefix + ".layer_norm.bias"].clone())

    def forward(self, x, *rest):
        x = self.attention(x, *rest)
        h = torch.clamp_min(x @ self.up + self.up_bias, 0.0)
        y = h @ self.down + self.down_bias
        return layer_norm(x + y, self.scale, self.bias)


class Model(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.table = nn.Parameter(params["word_emb.weight"].clone())
        self.content = nn.Parameter(params["r_w_bias"].clone())
        self.position = nn.Parameter(params["r_r_bias"].clone())
        self.logit_bias = nn.Parameter(params["out_bias"].clone())
        self.blocks = nn.ModuleList(Block(params, f"layers.{i}") for i in range(2))

    def forward(self, tokens):
        batch, length = tokens.shape
        width = self.table.shape[1]
        span = MEMORY + SEGMENT
        memory = torch.zeros(2, batch, MEMORY, width, dtype=self.table.dtype)
        places = torch.arange(span)
        distance = (torch.arange(SEGMENT) + MEMORY)[:, None] - places[None, :]
        table = sinusoids(torch.arange(span).to(self.table.dtype), width)
        logits = []
        for start in range(0, length, SEGMENT):
            filled = places >= MEMORY - min(start, MEMORY)
            allowed = (distance >= 0) & filled
            x = self.table[tokens[:, start : start + SEGMENT]] * width**0.5
            kept = []
            for block, past in zip(self.blocks, memory):
                kept.append(torch.cat([past, x], dim=1)[:, -MEMORY:].detach())
                x = block(
                    x,
                    past,
                    table,
                    distance.clamp(min=0),
                    allowed,
                    self.content,
                    self.position,
                )
            memory = torch.stack(kept)
            logits.append(torch.einsum("btw,vw->btv", x, self.table) + self.logit_bias)
        return torch.cat(logits, dim=1)


def model():
    return Model(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["text"][:, :-1])


def loss(logits, batch):
    labels = batch["text"][:, 1:]
    right = torch.gather(logits, -1, labels[..., None])[..., 0]
    return torch.mean(torch.logsumexp(logits, dim=-1) - right)


class Adam(torch.optim.Optimizer):
    """Optax's order: moments, corrections, scale."""

    def __init__(self, params, rate=2e-3, b1=0.9, b2=0.999, eps=1e-6):
        super().__init__(params, dict(rate=rate, b1=b1, b2=b2, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                s["count"] = s.get("count", 0) + 1
                mu = s.get("mu", torch.zeros_like(p))
                nu = s.get("nu", torch.zeros_like(p))
                s["mu"] = (1 - group["b1"]) * p.grad + group["b1"] * mu
                s["nu"] = (1 - group["b2"]) * (p.grad**2) + group["b2"] * nu
                mu_hat = s["mu"] / (1 - group["b1"] ** s["count"])
                nu_hat = s["nu"] / (1 - group["b2"] ** s["count"])
                update = mu_hat / (torch.sqrt(nu_hat) + group["eps"])
                p.add_(-group["rate"] * update)


def optimizer(net):
    return Adam(net.parameters())
