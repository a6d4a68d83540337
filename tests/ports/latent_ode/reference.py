"""Series at uneven times: a GRU reads them backwards, an ODE explains them from a sample."""

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 3


class Field(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim + 1, hidden),
            nn.Tanh(),
            nn.Linear(hidden, hidden),
            nn.ELU(),
            nn.Linear(hidden, dim),
        )

    def forward(self, t, z):
        time = t.expand(len(z), 1)
        return self.net(torch.cat([z, time], -1))


def runge_kutta(field, z, start, end):
    h = (end - start) / STEPS
    for i in range(STEPS):
        t = start + i * h
        k1 = field(t, z)
        k2 = field(t + h / 2, z + h / 2 * k1)
        k3 = field(t + h / 2, z + h / 2 * k2)
        k4 = field(t + h, z + h * k3)
        z = z + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return z


class LatentODE(nn.Module):
    def __init__(self, seen=3, latent=4, hidden=9):
        super().__init__()
        self.encoder = nn.GRU(2 * seen + 1, hidden, batch_first=True)
        self.stats = nn.Linear(hidden, 2 * latent)
        self.field = Field(latent, hidden)
        self.decoder = nn.Sequential(
            nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, seen)
        )
        self.log_noise = nn.Parameter(torch.full((seen,), -0.5))

    def forward(self, x, mask, times, noise):
        gaps = torch.diff(times, prepend=times[:1])
        gaps = gaps[None, :, None].expand(len(x), -1, -1)
        read = torch.cat([x * mask, mask, gaps], -1).flip(1)
        _, h = self.encoder(read)
        mean, log_var = self.stats(h[0]).chunk(2, -1)
        z = mean + noise * (0.5 * log_var).exp()
        path = [z]
        for start, end in zip(times[:-1], times[1:]):
            z = runge_kutta(self.field, z, start, end)
            path.append(z)
        guess = self.decoder(torch.stack(path, 1))
        return {
            "guess": guess,
            "mean": mean,
            "log_var": log_var,
            "log_noise": self.log_noise,
        }


def model():
    torch.manual_seed(230)
    net = LatentODE()
    with torch.no_grad():
        for layer in list(net.field.net.children())[::2]:
            layer.weight.mul_(2.5)
    return net


def batches():
    generator = torch.Generator().manual_seed(231)
    x = torch.randn(4, 5, 3, generator=generator)
    mask = (torch.rand(4, 5, 3, generator=generator) < 0.7).to(x.dtype)
    times = torch.rand(5, generator=generator).cumsum(0)
    noise = torch.randn(4, 4, generator=generator)
    return [{"x": x, "mask": mask, "times": times, "noise": noise}]


def forward(net, batch):
    return net(batch["x"], batch["mask"], batch["times"], batch["noise"])


def loss(output, batch):
    spread = (2 * output["log_noise"]).exp().expand_as(output["guess"])
    nll = F.gaussian_nll_loss(
        output["guess"], batch["x"], spread, full=True, reduction="none"
    )
    nll = (nll * batch["mask"]).sum((1, 2))
    mean, log_var = output["mean"], output["log_var"]
    kl = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(-1)
    return (nll + 0.7 * kl).mean()


def optimizer(net):
    return torch.optim.RMSprop(net.parameters(), lr=1e-3, alpha=0.95, momentum=0.9)
