"""Heads lead every weight of an einsum; a period is a near block and a far one."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, FEATURES, ENTRIES, PERIODS = 40, 56, 48, 2
N_HEADS, N_GROUPS, SIZE = 4, 2, 8
SPAN = 4
ATTN_CAP, FINAL_CAP = 3.0, 5.0
MASKED = -2.0e38


class Einsum(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(shape))

    def forward(self, equation, x):
        return torch.einsum(equation, x, self.w)


class Norm(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(features))

    def forward(self, x):
        var = x.square().mean(dim=-1, keepdim=True)
        normed = x / torch.sqrt(var + 1e-6)
        return normed * (1 + self.scale)


def apply_rope(x, positions, wavelength):
    """Turn x (batch, time, heads, size)."""
    half = x.shape[-1] // 2
    timescale = wavelength ** (torch.arange(half) / half)
    angle = positions[:, None, None] / timescale
    sin, cos = angle.sin(), angle.cos()
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, window, wavelength):
        super().__init__()
        self.window, self.wavelength = window, wavelength
        self.qkv_einsum = Einsum(N_HEADS + 2 * N_GROUPS, WIDTH, SIZE)
        self.out_einsum = Einsum(N_HEADS, SIZE, WIDTH)
        self.query_norm = Norm(SIZE)
        self.key_norm = Norm(SIZE)

    def visible(self, positions):
        apart = positions[:, None] - positions
        seen = apart >= 0
        if self.window is not None:
            seen = seen & (apart < self.window)
        return seen

    def forward(self, x, positions):
        heads = self.qkv_einsum("btd,ndh->btnh", x)
        q, k, v = heads.split([N_HEADS, N_GROUPS, N_GROUPS], dim=2)
        q = apply_rope(self.query_norm(q), positions, self.wavelength)
        k = apply_rope(self.key_norm(k), positions, self.wavelength)
        q = q * (WIDTH // N_HEADS) ** -0.5
        q = q.unflatten(2, (N_GROUPS, N_HEADS // N_GROUPS))
        logits = torch.einsum("btkgh,bskh->bkgts", q, k)
        logits = torch.tanh(logits / ATTN_CAP) * ATTN_CAP
        logits = torch.where(self.visible(positions), logits, MASKED)
        probs = torch.softmax(logits, dim=-1)
        encoded = torch.einsum("bkgts,bskh->btkgh", probs, v)
        return self.out_einsum("btnh,nhd->btd", encoded.flatten(2, 3))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gating_einsum = Einsum(2, WIDTH, FEATURES)
        self.linear = Einsum(FEATURES, WIDTH)

    def forward(self, x):
        gate, up = self.gating_einsum("btd,cdf->cbtf", x)
        activations = F.gelu(gate, approximate="tanh") * up
        return self.linear("btf,fd->btd", activations)


class Block(nn.Module):
    def __init__(self, window, wavelength):
        super().__init__()
        self.pre_attention_norm = Norm(WIDTH)
        self.attn = Attention(window, wavelength)
        self.post_attention_norm = Norm(WIDTH)
        self.pre_ffw_norm = Norm(WIDTH)
        self.mlp = FeedForward()
        self.post_ffw_norm = Norm(WIDTH)

    def forward(self, x, positions):
        inputs_normalized = self.pre_attention_norm(x)
        attn_output = self.attn(inputs_normalized, positions)
        x = x + self.post_attention_norm(attn_output)
        ffw_input = self.pre_ffw_norm(x)
        ffw_output = self.post_ffw_norm(self.mlp(ffw_input))
        return x + ffw_output


class Period(nn.Module):
    def __init__(self):
        super().__init__()
        self.near = Block(SPAN, 100.0)
        self.far = Block(None, 10_000.0)

    def forward(self, x, positions):
        return self.far(self.near(x, positions), positions)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_embedding = nn.Parameter(torch.zeros(ENTRIES, WIDTH))
        self.periods = nn.ModuleList(Period() for _ in range(PERIODS))
        self.final_norm = Norm(WIDTH)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1])
        x = self.input_embedding[tokens]
        x = x * torch.tensor(WIDTH).sqrt()
        for period in self.periods:
            x = period(x, positions)
        logits = torch.einsum("btd,vd->btv", self.final_norm(x), self.input_embedding)
        return torch.tanh(logits / FINAL_CAP) * FINAL_CAP


def split_rows(weight):
    """From (heads * size, width) to (heads, width, size)."""
    return weight.unflatten(0, (-1, SIZE)).transpose(1, 2)


NORMS = {
    "attn.query_norm": "attn.q_norm",
    "attn.key_norm": "attn.k_norm",
    "pre_attention_norm": "pre_attn_norm",
    "post_attention_norm": "post_attn_norm",
    "pre_ffw_norm": "pre_mlp_norm",
    "post_ffw_norm": "post_mlp_norm",
}


def block_params(layer):
    """Return a block's parameters, from those of a layer of the reference."""
    qkv = [split_rows(layer[f"attn.{n}_proj.weight"]) for n in "qkv"]
    gating = [layer[f"mlp.{n}_proj.weight"].t() for n in ("gate", "up")]
    out = layer["attn.o_proj.weight"].t()
    params = {
        "attn.qkv_einsum.w": torch.cat(qkv),
        "attn.out_einsum.w": out.unflatten(0, (N_HEADS, SIZE)),
        "mlp.gating_einsum.w": torch.stack(gating),
        "mlp.linear.w": layer["mlp.down_proj.weight"].t(),
    }
    for ours, theirs in NORMS.items():
        params[f"{ours}.scale"] = layer[f"{theirs}.weight"]
    return params


def load(net, weights):
    params = {
        "input_embedding": weights["embed.weight"],
        "final_norm.scale": weights["norm.weight"],
    }
    for period in range(PERIODS):
        for place, name in enumerate(("near", "far")):
            prefix = f"layers.{2 * period + place}."
            layer = {
                key.removeprefix(prefix): value
                for key, value in weights.items()
                if key.startswith(prefix)
            }
            for key, value in block_params(layer).items():
                params[f"periods.{period}.{name}.{key}"] = value
    net.load_state_dict(params)
    return net


def model():
    return load(Transformer(), torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["tokens"][:, :-1])


def loss(output, batch):
    targets = batch["tokens"][:, 1:]
    scored = (targets != 0).float()
    logprobs = F.log_softmax(output, dim=-1)
    picked = (logprobs * F.one_hot(targets, ENTRIES)).sum(-1)
    return -(picked * scored).sum() / scored.sum()


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=1e-3)
