"""A selective state space model whose scan is a Python loop over the steps."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SelectiveSSM(nn.Module):
    def __init__(self, d_model, d_state=8, expand=2, d_conv=3):
        super().__init__()
        self.d_inner, self.d_state = expand * d_model, d_state
        self.dt_rank = max(1, d_model // 8)
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=False)
        self.conv1d = nn.Conv1d(
            self.d_inner, self.d_inner, d_conv, groups=self.d_inner, padding=d_conv - 1
        )
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(self.dt_rank, self.d_inner)
        A = torch.arange(1, d_state + 1).float().repeat(self.d_inner, 1)
        self.A_log = nn.Parameter(torch.log(A))
        self.D = nn.Parameter(torch.ones(self.d_inner))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False)

    def forward(self, x):
        length = x.shape[1]
        x, res = self.in_proj(x).split([self.d_inner, self.d_inner], dim=-1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[:, :, :length].transpose(1, 2))
        y = self.ssm(x) * F.silu(res)
        return self.out_proj(y)

    def ssm(self, u):
        A = -torch.exp(self.A_log)
        sizes = [self.dt_rank, self.d_state, self.d_state]
        delta, B, C = self.x_proj(u).split(sizes, dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        deltaA = torch.exp(torch.einsum("bld,dn->bldn", delta, A))
        deltaB_u = torch.einsum("bld,bln,bld->bldn", delta, B, u)
        state = torch.zeros(u.size(0), self.d_inner, self.d_state, device=u.device)
        ys = []
        for i in range(u.size(1)):
            state = deltaA[:, i] * state + deltaB_u[:, i]
            ys.append(torch.einsum("bdn,bn->bd", state, C[:, i]))
        return torch.stack(ys, dim=1) + u * self.D


class Net(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.inp = nn.Linear(2, dim)
        self.ssm = SelectiveSSM(dim)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        h = self.inp(x)
        h = h + self.ssm(self.norm(h))
        return self.out(h).squeeze(-1)


def series(count, seed):
    """Values and marks; the target is the last value that was marked."""
    g = torch.Generator().manual_seed(seed)
    value = torch.randn(count, 16, generator=g)
    mark = torch.rand(count, 16, generator=g) < 0.3
    mark[:, 0] = True
    last = torch.where(mark, torch.arange(16), 0).cummax(1).values
    return torch.stack([value, mark.float()], -1), value.gather(1, last)


def forward(net, batch):
    return net(batch[0])


def loss(output, batch):
    return F.mse_loss(output, batch[1])


def model():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for step in range(90):
        batch = series(32, 100 + step)
        optimizer.zero_grad()
        loss(forward(net, batch), batch).backward()
        optimizer.step()
    return net.eval()


def batches():
    return [series(16, seed) for seed in range(6)]


def held_out():
    return [series(16, seed) for seed in range(50, 54)]
