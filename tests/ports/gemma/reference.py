"""A small Gemma: norms before and after, windows in every second layer, capped scores."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, DIM, HIDDEN, LAYERS = 48, 40, 56, 4
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
WINDOW = 4
SCORE_CAP, LOGIT_CAP = 3.0, 5.0


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * (1 + self.weight)


def softcap(x, cap):
    return cap * torch.tanh(x / cap)


def rotary(length, base):
    rates = base ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.outer(torch.arange(length).float(), rates)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotated(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, local):
        super().__init__()
        self.local = local
        self.q_proj = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.q_norm = RMSNorm(HEAD_DIM)
        self.k_norm = RMSNorm(HEAD_DIM)

    def split(self, x):
        return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

    def forward(self, x):
        length = x.shape[1]
        q = self.q_norm(self.split(self.q_proj(x)))
        k = self.k_norm(self.split(self.k_proj(x)))
        v = self.split(self.v_proj(x))
        cos, sin = rotary(length, 100.0 if self.local else 10000.0)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k = k.repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = v.repeat_interleave(HEADS // KV_HEADS, dim=1)
        scores = q @ k.transpose(-1, -2) * (DIM / HEADS) ** -0.5
        scores = softcap(scores, SCORE_CAP)
        allowed = torch.ones(length, length, dtype=torch.bool).tril()
        if self.local:
            allowed = allowed.triu(1 - WINDOW)
        scores = scores.masked_fill(~allowed, float("-inf"))
        y = scores.softmax(dim=-1) @ v
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.up_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        gate = F.gelu(self.gate_proj(x), approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, local):
        super().__init__()
        self.attn = Attention(local)
        self.mlp = MLP()
        self.pre_attn_norm = RMSNorm(DIM)
        self.post_attn_norm = RMSNorm(DIM)
        self.pre_mlp_norm = RMSNorm(DIM)
        self.post_mlp_norm = RMSNorm(DIM)

    def forward(self, x):
        x = x + self.post_attn_norm(self.attn(self.pre_attn_norm(x)))
        return x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x)))


class Gemma(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer(i % 2 == 0) for i in range(LAYERS))
        self.norm = RMSNorm(DIM)

    def forward(self, tokens):
        x = self.embed(tokens) * DIM**0.5
        for layer in self.layers:
            x = layer(x)
        return softcap(self.norm(x) @ self.embed.weight.T, LOGIT_CAP)


def model():
    torch.manual_seed(760)
    net = Gemma()
    with torch.no_grad():
        for name, value in net.named_parameters():
            if "norm" in name:
                value.uniform_(-0.5, 0.7)
            elif "embed" in name:
                value.mul_(0.3)
            elif "v_proj" in name or "o_proj" in name:
                value.mul_(0.5)
    return net


def batches():
    generator = torch.Generator().manual_seed(761)
    tokens = torch.randint(1, 48, (3, 13), generator=generator)
    lengths = torch.tensor([13, 9, 11])
    return [{"tokens": tokens * (torch.arange(13) < lengths[:, None])}]


def forward(net, batch):
    return net(batch["tokens"][:, :-1])


def loss(output, batch):
    targets = batch["tokens"][:, 1:].flatten()
    return F.cross_entropy(output.flatten(0, 1), targets, ignore_index=0)


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=1e-3)
