"""A small RWKV (version 4): a language model whose attention is a recurrence."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, DIM, FFN, LAYERS = 30, 16, 40, 3


def wkv(decay, first, k, v):
    """Weighted mean of the values so far; exponents are kept relative to their maximum."""
    w = -torch.exp(decay)
    num = torch.zeros_like(v[:, 0])
    den = torch.zeros_like(v[:, 0])
    top = torch.full_like(v[:, 0], -1e38)
    out = []
    for t in range(k.shape[1]):
        kt, vt = k[:, t], v[:, t]
        q = torch.maximum(top, first + kt)
        e1 = torch.exp(top - q)
        e2 = torch.exp(first + kt - q)
        out.append((e1 * num + e2 * vt) / (e1 * den + e2))
        q = torch.maximum(top + w, kt)
        e1 = torch.exp(top + w - q)
        e2 = torch.exp(kt - q)
        num = e1 * num + e2 * vt
        den = e1 * den + e2
        top = q
    return torch.stack(out, dim=1)


class TimeMix(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.time_decay = nn.Parameter(torch.zeros(dim))
        self.time_first = nn.Parameter(torch.zeros(dim))
        self.time_mix_k = nn.Parameter(torch.ones(1, 1, dim))
        self.time_mix_v = nn.Parameter(torch.ones(1, 1, dim))
        self.time_mix_r = nn.Parameter(torch.ones(1, 1, dim))
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.receptance = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        xx = self.time_shift(x)
        xk = x * self.time_mix_k + xx * (1 - self.time_mix_k)
        xv = x * self.time_mix_v + xx * (1 - self.time_mix_v)
        xr = x * self.time_mix_r + xx * (1 - self.time_mix_r)
        k = self.key(xk)
        v = self.value(xv)
        r = torch.sigmoid(self.receptance(xr))
        return self.output(r * wkv(self.time_decay, self.time_first, k, v))


class ChannelMix(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.time_mix_k = nn.Parameter(torch.ones(1, 1, dim))
        self.time_mix_r = nn.Parameter(torch.ones(1, 1, dim))
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.key = nn.Linear(dim, hidden, bias=False)
        self.receptance = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        xx = self.time_shift(x)
        xk = x * self.time_mix_k + xx * (1 - self.time_mix_k)
        xr = x * self.time_mix_r + xx * (1 - self.time_mix_r)
        k = torch.square(torch.relu(self.key(xk)))
        r = torch.sigmoid(self.receptance(xr))
        return r * self.value(k)


class Block(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.ln1 = nn.LayerNorm(dim)
        self.att = TimeMix(dim)
        self.ln2 = nn.LayerNorm(dim)
        self.ffn = ChannelMix(dim, hidden)

    def forward(self, x):
        x = x + self.att(self.ln1(x))
        return x + self.ffn(self.ln2(x))


class RWKV(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.ln0 = nn.LayerNorm(DIM)
        self.blocks = nn.ModuleList(Block(DIM, FFN) for _ in range(LAYERS))
        self.ln_out = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, idx):
        x = self.ln0(self.emb(idx))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_out(x))


def model():
    torch.manual_seed(820)
    net = RWKV()
    with torch.no_grad():
        for name, value in net.named_parameters():
            if "time_mix" in name:
                value.uniform_(0.1, 0.9)
            elif "time_decay" in name:
                value.uniform_(-2.5, 0.8)
            elif "time_first" in name:
                value.normal_(0.4, 0.6)
            elif "ln" in name:
                value.normal_(0, 0.3)
                if name.endswith("weight"):
                    value.add_(1)
            elif "emb" in name:
                value.normal_(0, 0.03)
            else:
                value.normal_(0, value.shape[1] ** -0.5)
    return net


def batches():
    generator = torch.Generator().manual_seed(821)
    found = []
    for lengths in ([9, 7, 9], [6, 9, 8]):
        ids = torch.randint(1, 30, (3, 9), generator=generator)
        ids = ids * (torch.arange(9) < torch.tensor(lengths)[:, None])
        found.append({"idx": ids[:, :-1], "targets": ids[:, 1:]})
    return found


def forward(net, batch):
    return net(batch["idx"])


def loss(output, batch):
    return F.cross_entropy(
        output.flatten(0, 1), batch["targets"].flatten(), ignore_index=0
    )


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=1e-3, eps=1e-6)
