"""Token by token: each head keeps a matrix that fades. One kernel for q, k, v and gate."""

from pathlib import Path

import torch
from torch import nn

HEADS = 3


class Scale(nn.Module):
    def __init__(self, g):
        super().__init__()
        self.g = nn.Parameter(g.clone())

    def forward(self, x):
        rms = torch.sqrt(torch.mean(x * x, -1, keepdim=True) + 1e-5)
        return x / rms * self.g


class RetentionCell(nn.Module):
    def __init__(self, w, at):
        super().__init__()
        names = ("query", "key", "value", "gate")
        fused = torch.cat([w[f"{at}.{name}.weight"] for name in names])
        self.w_in = nn.Parameter(fused.t().contiguous())
        self.w_out = nn.Parameter(w[at + ".out.weight"].t().contiguous())
        gamma = 1.0 - 2.0 ** -(2.0 + torch.arange(HEADS))
        self.register_buffer("gamma", gamma[:, None, None], persistent=False)

    def rotate(self, x, t):
        half = x.shape[-1] // 2
        theta = t * 10000.0 ** -(torch.arange(half) / (half - 1))
        pair = x.reshape(*x.shape[:-1], half, 2)
        a, b = pair.unbind(-1)
        cos, sin = torch.cos(theta), torch.sin(theta)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).reshape(x.shape)

    def step(self, x, t, state):
        memory, weight = state
        n, d = x.shape
        q, k, v, g = torch.split(x @ self.w_in, [d, d, 2 * d, 2 * d], dim=1)
        q = self.rotate(q.reshape(n, HEADS, -1), t)
        k = self.rotate(k.reshape(n, HEADS, -1), t) / (d / HEADS) ** 0.5
        v = v.reshape(n, HEADS, -1)
        memory = self.gamma * memory + k[..., :, None] * v[..., None, :]
        weight = self.gamma * weight + 1.0
        y = torch.einsum("nhk,nhkv->nhv", q, memory) / weight[..., 0].sqrt()
        y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6)
        y = y.reshape(n, -1) * (g * torch.sigmoid(g))
        return y @ self.w_out, (memory, weight)

    def forward(self, x):
        n, length, d = x.shape
        memory = x.new_zeros(n, HEADS, d // HEADS, 2 * d // HEADS)
        state = memory, torch.zeros_like(self.gamma)
        outputs = []
        for t in range(length):
            y, state = self.step(x[:, t], t, state)
            outputs.append(y)
        return torch.stack(outputs, 1)


class GatedMLP(nn.Module):
    def __init__(self, w, at):
        super().__init__()
        for name in ("gate", "up", "down"):
            kernel = w[f"{at}.{name}.weight"].t().contiguous()
            setattr(self, "w_" + name, nn.Parameter(kernel))
            setattr(self, "b_" + name, nn.Parameter(w[f"{at}.{name}.bias"].clone()))

    def forward(self, x):
        gate = x @ self.w_gate + self.b_gate
        gate = 0.5 * gate * (1.0 + torch.erf(gate * 0.5**0.5))
        up = x @ self.w_up + self.b_up
        return (gate * up) @ self.w_down + self.b_down


class Layer(nn.Module):
    def __init__(self, w, at):
        super().__init__()
        self.pre_mix = Scale(w[at + ".norm1.weight"])
        self.mix = RetentionCell(w, at + ".retention")
        self.pre_mlp = Scale(w[at + ".norm2.weight"])
        self.mlp = GatedMLP(w, at + ".feed")

    def forward(self, x):
        h = x + self.mix(self.pre_mix(x))
        return h + self.mlp(self.pre_mlp(h))


class LM(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.table = nn.Parameter(w["embed.weight"].clone())
        self.layers = nn.ModuleList([Layer(w, f"blocks.{i}") for i in range(2)])
        self.final = Scale(w["norm.weight"])
        self.unembed = nn.Parameter(w["head.weight"].t().contiguous())

    def forward(self, ids):
        x = self.table[ids] * self.table.shape[1] ** 0.5
        for layer in self.layers:
            x = layer(x)
        return self.final(x) @ self.unembed


def model():
    return LM(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["ids"])


def loss(logits, batch):
    keep = batch["targets"] != -100
    z, y = logits[keep], batch["targets"][keep]
    log_z = torch.logsumexp(z, 1)
    picked = z.gather(1, y[:, None])[:, 0]
    smooth = log_z - (0.9 * picked + 0.1 * z.mean(1))
    return (smooth + 0.01 * log_z**2).mean()


def optimizer(net):
    decayed, plain = [], []
    for name, p in net.named_parameters():
        kind = name.rpartition(".")[2]
        (plain if kind == "g" or kind.startswith("b_") else decayed).append(p)
    return torch.optim.AdamW(
        [
            dict(params=decayed, weight_decay=0.05),
            dict(params=plain, weight_decay=0.0),
        ],
        lr=2e-3,
        betas=(0.9, 0.98),
    )
