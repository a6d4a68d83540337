"""One matrix for each of query, key and value; fused attention."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.o_proj = nn.Linear(dim, dim)

    def forward(self, x):
        batch, length, dim = x.size()
        shape = (batch, length, self.heads, dim // self.heads)
        q = self.q_proj(x).view(shape).transpose(1, 2)
        k = self.k_proj(x).view(shape).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2).reshape(batch, length, dim)
        return self.o_proj(out)


class MLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU(approximate="tanh")
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.input_norm = nn.LayerNorm(dim)
        self.self_attn = Attention(dim, heads)
        self.post_norm = nn.LayerNorm(dim)
        self.mlp = MLP(dim)

    def forward(self, hidden):
        residual = hidden
        hidden = self.input_norm(hidden)
        hidden = residual + self.self_attn(hidden)
        residual = hidden
        hidden = self.mlp(self.post_norm(hidden))
        return residual + hidden


class Decoder(nn.Module):
    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.embed_tokens = nn.Embedding(40, dim)
        self.register_parameter(
            "embed_positions", nn.Parameter(torch.zeros(1, 12, dim))
        )
        self.layers = nn.Sequential(*[DecoderLayer(dim, heads) for _ in range(2)])
        self.final_norm = nn.LayerNorm(dim)

    def forward(self, ids):
        hidden = self.embed_tokens(ids)
        hidden = hidden + self.embed_positions[:, : ids.size(1)]
        hidden = self.final_norm(self.layers(hidden))
        return F.linear(hidden, self.embed_tokens.weight)


def load(net, w):
    state = {
        "embed_tokens.weight": w["wte.weight"],
        "embed_positions": w["wpe.weight"][None],
        "final_norm.weight": w["ln_f.weight"],
        "final_norm.bias": w["ln_f.bias"],
    }
    for i in range(2):
        old, new = f"h.{i}.", f"layers.{i}."
        for kind in ("weight", "bias"):
            q, k, v = w[old + f"attn.c_attn.{kind}"].split(32)
            state[new + f"self_attn.q_proj.{kind}"] = q
            state[new + f"self_attn.k_proj.{kind}"] = k
            state[new + f"self_attn.v_proj.{kind}"] = v
            state[new + f"self_attn.o_proj.{kind}"] = w[old + f"attn.c_proj.{kind}"]
            state[new + f"input_norm.{kind}"] = w[old + f"ln_1.{kind}"]
            state[new + f"post_norm.{kind}"] = w[old + f"ln_2.{kind}"]
            state[new + f"mlp.up.{kind}"] = w[old + f"c_fc.{kind}"]
            state[new + f"mlp.down.{kind}"] = w[old + f"c_proj.{kind}"]
    net.load_state_dict(state)


def model():
    net = Decoder()
    load(net, torch.load(Path(__file__).with_name("weights.pt")))
    return net


def forward(net, batch):
    return net(batch["ids"])


def optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1, foreach=False)
