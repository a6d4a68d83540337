"""A decoder with rotary positions, grouped keys, RMS norms and gated layers."""

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.weight * (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        )


def rotate_half(x):
    one, two = x.chunk(2, -1)
    return torch.cat([-two, one], -1)


class Attention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.width = dim // heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.width).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv_heads, self.width).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.width).transpose(1, 2)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        repeats = self.heads // self.kv_heads
        k = k.repeat_interleave(repeats, 1)
        v = v.repeat_interleave(repeats, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.input_norm = RMSNorm(dim)
        self.attention = Attention(dim, 4, 2)
        self.post_norm = RMSNorm(dim)
        self.gate_proj = nn.Linear(dim, 40, bias=False)
        self.up_proj = nn.Linear(dim, 40, bias=False)
        self.down_proj = nn.Linear(40, dim, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.input_norm(x), cos, sin)
        h = self.post_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.layers = nn.ModuleList([Layer(24) for _ in range(2)])
        self.norm = RMSNorm(24)
        self.lm_head = nn.Linear(24, 50, bias=False)
        angles = torch.arange(16)[:, None] / 10000 ** (torch.arange(0, 6, 2) / 6)
        angles = torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens):
        t = tokens.shape[1]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[:t], self.sin[:t])
        return self.lm_head(self.norm(x))


def model():
    torch.manual_seed(30)
    net = Llama()
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    return net


def batches():
    generator = torch.Generator().manual_seed(31)
    return [{"tokens": torch.randint(0, 50, (2, 11), generator=generator)}]


def forward(net, batch):
    return net(batch["tokens"][:, :-1])


def loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["tokens"][:, 1:].flatten())


def optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-3)
