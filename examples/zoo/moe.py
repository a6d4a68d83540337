"""A mixture of experts with top-2 routing by token: each expert sees its own tokens."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)))


class MoE(nn.Module):
    def __init__(self, dim, hidden, num_experts=4, top_k=2):
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(num_experts))
        self.top_k = top_k

    def forward(self, x):
        shape = x.shape
        x = x.view(-1, shape[-1])
        weights, selected = torch.topk(self.gate(x), self.top_k)
        weights = F.softmax(weights, dim=1)
        results = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, nth = torch.where(selected == i)
            if token.numel() == 0:
                continue
            results[token] += weights[token, nth, None] * expert(x[token])
        return results.view(shape)


class Model(nn.Module):
    def __init__(self, vocab=80, dim=32, classes=8):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.mix = nn.Conv1d(dim, dim, 3, padding=1, groups=dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.layers = nn.ModuleList(MoE(dim, 64) for _ in range(2))
        self.out = nn.Linear(dim, classes)

    def forward(self, ids):
        x = self.emb(ids)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x))
        return self.out(x)


def tokens(count, seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 80, (count, 16), generator=g)
    neighbours = ids + ids.roll(1, 1) * (torch.arange(16) > 0)
    return ids, torch.where(ids < 40, ids % 4, 4 + neighbours % 4)


def forward(model, batch):
    return model(batch[0])


def loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def model():
    torch.manual_seed(0)
    net = Model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=8e-3)
    for step in range(100):
        batch = tokens(32, 100 + step)
        optimizer.zero_grad()
        loss(forward(net, batch), batch).backward()
        optimizer.step()
    return net.eval()


def batches():
    return [tokens(16, seed) for seed in range(6)]


def held_out():
    return [tokens(16, seed) for seed in range(50, 54)]
