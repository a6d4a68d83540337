"""A selective state-space model on sums of sines."""

import torch
import torch.nn as nn
import torch.nn.functional as F

INNER, STATE, LENGTH = 12, 4, 5


class Selective(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(INNER, 2 * INNER)
        self.conv = nn.Conv1d(INNER, INNER, 3, groups=INNER, padding=2)
        self.rates = nn.Linear(INNER, INNER)
        self.reads = nn.Linear(INNER, 2 * STATE, bias=False)
        self.log_a = nn.Parameter(
            torch.log(torch.arange(1.0, STATE + 1)).repeat(INNER, 1)
        )
        self.skip = nn.Parameter(torch.ones(INNER))
        self.leave = nn.Linear(INNER, INNER)

    def forward(self, x):
        n = x.shape[1]
        u, gate = self.enter(x).chunk(2, -1)
        u = self.conv(u.transpose(1, 2))[..., :n].transpose(1, 2)
        u = F.silu(u)
        delta = F.softplus(self.rates(u))
        b, c = self.reads(u).split(STATE, -1)
        decay = torch.exp(-delta[..., None] * self.log_a.exp())
        drive = delta[..., None] * b[:, :, None, :] * u[..., None]
        h = x.new_zeros(x.shape[0], INNER, STATE)
        outputs = []
        for t in range(n):
            h = decay[:, t] * h + drive[:, t]
            outputs.append((h * c[:, t, None, :]).sum(-1))
        y = torch.stack(outputs, 1) + u * self.skip
        return self.leave(y * F.silu(gate))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(1, INNER)
        self.first, self.second = Selective(), Selective()
        self.norm1, self.norm2 = nn.LayerNorm(INNER), nn.LayerNorm(INNER)
        self.drop = nn.Linear(INNER, 1)

    def forward(self, x):
        x = self.lift(x)
        x = x + self.first(self.norm1(x))
        x = x + self.second(self.norm2(x))
        return self.drop(x)


def waves(seed, count=5):
    g = torch.Generator().manual_seed(seed)
    phase = 6.28 * torch.rand(count, 2, 1, generator=g)
    rate = torch.tensor([0.3, 1.1])[:, None]
    wave = torch.sin(rate * torch.arange(LENGTH + 1) + phase).sum(1)
    return wave[:, :-1, None], wave[:, 1:, None]


def initial():
    torch.manual_seed(29)
    model = Model()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim == 1:
                value += 0.15 * torch.randn(value.shape)
        model.first.log_a += 0.1 * torch.randn(INNER, STATE)
        model.second.log_a += 0.1 * torch.randn(INNER, STATE)
    return model.state_dict()


torch.manual_seed(0)
model = Model()
start = initial()
model.load_state_dict(start)
optimizer = torch.optim.NAdam(model.parameters(), lr=4e-3, weight_decay=0.01)
for step in range(2):
    past, future = waves(50 + step)
    loss = F.mse_loss(model(past), future)
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
