"""Tokens through attention and a mixture of experts, two of five for each token."""

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Mixture(nn.Module):
    def __init__(self, dim, hidden, count=5, top=2):
        super().__init__()
        self.top = top
        self.router = nn.Linear(dim, count, bias=False)
        self.experts = nn.ModuleList([Expert(dim, hidden) for _ in range(count)])
        self.shared = Expert(dim, hidden)
        self.shared_gate = nn.Linear(dim, 1)

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        scores = self.router(x)
        chance = scores.softmax(-1)
        weight, chosen = torch.topk(chance, self.top, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == number)
            if len(token):
                part = expert(x[token]) * weight[token, rank, None]
                y = y.index_add(0, token, part)
        y = y + torch.sigmoid(self.shared_gate(x)) * self.shared(x)
        count = len(self.experts)
        used = F.one_hot(chosen, count).to(x.dtype).sum(1).mean(0)
        balance = count * (used * chance.mean(0)).sum()
        return y.reshape(shape), balance


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1 = RMSNorm(dim)
        self.attention = Attention(dim, 2)
        self.norm2 = RMSNorm(dim)
        self.mixture = Mixture(dim, 10)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        y, balance = self.mixture(self.norm2(x))
        return x + y, balance


class Sparse(nn.Module):
    def __init__(self, words=23, dim=12, depth=2):
        super().__init__()
        self.words = nn.Embedding(words, dim)
        self.places = nn.Embedding(9, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(depth)])
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, words, bias=False)

    def forward(self, ids):
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        balance = 0.0
        for block in self.blocks:
            x, part = block(x)
            balance = balance + part
        return {"logits": self.head(self.norm(x)), "balance": balance}


def model():
    torch.manual_seed(210)
    net = Sparse()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, RMSNorm):
                module.weight.uniform_(0.6, 1.4)
        for block in net.blocks:
            block.mixture.router.weight.mul_(2)
    return net


def batches():
    generator = torch.Generator().manual_seed(211)
    ids = torch.randint(0, 23, (3, 8), generator=generator)
    return [{"ids": ids}]


def forward(net, batch):
    return net(batch["ids"])


def loss(output, batch):
    logits, target = output["logits"][:, :-1], batch["ids"][:, 1:]
    return (
        F.cross_entropy(logits.flatten(0, 1), target.flatten())
        + 0.02 * output["balance"]
    )


def optimizer(net):
    matrices = [p for p in net.parameters() if p.ndim > 1]
    vectors = [p for p in net.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
