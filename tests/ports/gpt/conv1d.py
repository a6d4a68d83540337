"""As in the first release of GPT-2: one-dimensional convolutions with transposed weights."""

import math
from pathlib import Path

import torch
from torch import nn


class Conv1D(nn.Module):
    def __init__(self, nx, nf):
        super().__init__()
        self.w = nn.Parameter(torch.empty(nx, nf))
        self.b = nn.Parameter(torch.empty(nf))

    def forward(self, x):
        y = torch.addmm(self.b, x.view(-1, x.size(-1)), self.w)
        return y.view(*x.shape[:-1], -1)


class Norm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.g = nn.Parameter(torch.empty(n))
        self.b = nn.Parameter(torch.empty(n))

    def forward(self, x):
        u = x.mean(-1, keepdim=True)
        s = (x - u).pow(2).mean(-1, keepdim=True)
        x = (x - u) / torch.sqrt(s + 1e-5)
        return self.g * x + self.b


def gelu(x):
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))
    return 0.5 * x * (1 + torch.tanh(inner))


class Attention(nn.Module):
    def __init__(self, nx, n_head):
        super().__init__()
        self.n_head = n_head
        self.qkv = Conv1D(nx, 3 * nx)
        self.merge = Conv1D(nx, nx)
        self.register_buffer("past", torch.tril(torch.ones(12, 12)))

    def forward(self, x):
        n, t, d = x.shape
        qkv = self.qkv(x).view(n, t, 3, self.n_head, d // self.n_head)
        q = qkv[:, :, 0].permute(0, 2, 1, 3)
        k = qkv[:, :, 1].permute(0, 2, 3, 1)
        v = qkv[:, :, 2].permute(0, 2, 1, 3)
        w = torch.matmul(q, k) / math.sqrt(d // self.n_head)
        b = self.past[:t, :t]
        w = w * b - 1e10 * (1 - b)
        w = torch.softmax(w, dim=-1)
        a = torch.matmul(w, v)
        a = a.permute(0, 2, 1, 3).reshape(n, t, d)
        return self.merge(a)


class Layer(nn.Module):
    def __init__(self, nx, n_head):
        super().__init__()
        self.norm_a = Norm(nx)
        self.attention = Attention(nx, n_head)
        self.norm_b = Norm(nx)
        self.fc = Conv1D(nx, 4 * nx)
        self.out = Conv1D(4 * nx, nx)

    def forward(self, x):
        x = x + self.attention(self.norm_a(x))
        m = gelu(self.fc(self.norm_b(x)))
        return x + self.out(m)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(40, 32))
        self.positions = nn.Parameter(torch.empty(12, 32))
        self.layers = nn.ModuleList([Layer(32, 4) for _ in range(2)])
        self.norm = Norm(32)

    def forward(self, ids):
        x = self.tokens[ids]
        x = x + self.positions[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return torch.matmul(x, self.tokens.t())


def put(layer, w, name, transpose=True):
    layer.w.copy_(w[name + ".weight"].t())
    layer.b.copy_(w[name + ".bias"])


def put_norm(layer, w, name):
    layer.g.copy_(w[name + ".weight"])
    layer.b.copy_(w[name + ".bias"])


def load(net, w):
    net.tokens.copy_(w["wte.weight"])
    net.positions.copy_(w["wpe.weight"])
    for i, layer in enumerate(net.layers):
        put_norm(layer.norm_a, w, f"h.{i}.ln_1")
        put(layer.attention.qkv, w, f"h.{i}.attn.c_attn")
        put(layer.attention.merge, w, f"h.{i}.attn.c_proj")
        put_norm(layer.norm_b, w, f"h.{i}.ln_2")
        put(layer.fc, w, f"h.{i}.c_fc")
        put(layer.out, w, f"h.{i}.c_proj")
    put_norm(net.norm, w, "ln_f")


def model():
    net = Transformer()
    with torch.no_grad():
        load(net, torch.load(Path(__file__).with_name("weights.pt")))
    return net


def forward(net, batch):
    return net(batch["ids"])


def loss(output, batch):
    log_probs = output - output.logsumexp(-1, keepdim=True)
    return -log_probs.gather(-1, batch["targets"].unsqueeze(-1)).mean()
