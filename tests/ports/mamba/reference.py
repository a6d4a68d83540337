"""A selective state space model on tokens."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class RMS(nn.Module):
    def __init__(self, d, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.g = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.g


class Mixer(nn.Module):
    def __init__(self, d=12, n=4, rank=2, width=4):
        super().__init__()
        e = 2 * d
        self.n, self.rank, self.e = n, rank, e
        self.in_proj = nn.Linear(d, 2 * e, bias=False)
        self.conv1d = nn.Conv1d(e, e, width, groups=e, padding=width - 1)
        self.x_proj = nn.Linear(e, rank + 2 * n, bias=False)
        self.dt_proj = nn.Linear(rank, e)
        self.A_log = nn.Parameter(
            torch.log(torch.arange(1.0, n + 1).repeat(e, 1)) + 0.1 * torch.randn(e, n)
        )
        self.D = nn.Parameter(1 + 0.2 * torch.randn(e))
        self.out_proj = nn.Linear(e, d, bias=False)

    def forward(self, u):
        b, n, _ = u.shape
        x, z = self.in_proj(u).chunk(2, dim=-1)
        x = self.conv1d(x.transpose(1, 2))[..., :n].transpose(1, 2)
        x = F.silu(x)
        dt, B, C = self.x_proj(x).split([self.rank, self.n, self.n], dim=-1)
        dt = F.softplus(self.dt_proj(dt))
        A = -torch.exp(self.A_log)
        h = x.new_zeros(b, self.e, self.n)
        ys = []
        for t in range(n):
            dA = torch.exp(dt[:, t, :, None] * A)
            dB = dt[:, t, :, None] * B[:, t, None, :]
            h = dA * h + dB * x[:, t, :, None]
            ys.append((h * C[:, t, None, :]).sum(-1))
        y = torch.stack(ys, dim=1) + self.D * x
        return self.out_proj(y * F.silu(z))


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = RMS(d)
        self.mixer = Mixer(d)

    def forward(self, x):
        return x + self.mixer(self.norm(x))


class MambaLM(nn.Module):
    def __init__(self, vocab=23, d=12, depth=2):
        super().__init__()
        self.embedding = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Block(d) for _ in range(depth))
        self.norm_f = RMS(d)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm_f(x), self.embedding.weight)


def model():
    torch.manual_seed(5)
    net = MambaLM()
    with torch.no_grad():
        for m in net.modules():
            if isinstance(m, RMS):
                m.g.uniform_(0.7, 1.3)
    return net


def batches():
    g = torch.Generator().manual_seed(6)
    return [{"ids": torch.randint(0, 23, (2, 9), generator=g)}]


def forward(net, batch):
    return net(batch["ids"][:, :-1])


def loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["ids"][:, 1:].flatten())


def optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-3)
