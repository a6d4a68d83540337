"""A GAN on points of a ring: two optimizers, a gradient penalty, spectral scaling by hand."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

NOISE = 6
STEPS = 2


def ring(count, generator):
    angle = 2 * math.pi * torch.rand(count, generator=generator)
    radius = 1 + 0.1 * torch.randn(count, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(NOISE, 24)
        self.norm = nn.BatchNorm1d(24)
        self.outer = nn.Linear(24, 2)

    def forward(self, z):
        return self.outer(F.leaky_relu(self.norm(self.inner(z)), 0.2))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 24)
        self.middle = nn.Linear(24, 24)
        self.outer = nn.Linear(24, 1)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x):
        h = F.leaky_relu(self.inner(x), 0.2)
        h = torch.tanh(self.middle(h) / self.scale)
        return self.outer(h).squeeze(1)


def penalty(critic, real, fake, generator):
    mix = torch.rand(len(real), 1, generator=generator)
    between = (mix * real + (1 - mix) * fake.detach()).requires_grad_(True)
    score = critic(between).sum()
    (slope,) = torch.autograd.grad(score, between, create_graph=True)
    return ((slope.norm(2, dim=1) - 1) ** 2).mean()


torch.manual_seed(8)
generator, critic = Generator(), Critic()
for network in (generator, critic):
    for value in network.parameters():
        nn.init.normal_(value, 0.0, 0.3)
opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
opt_d = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.5, 0.9))
draws = torch.Generator().manual_seed(31)
for step in range(STEPS):
    real = ring(16, draws)
    z = torch.randn(16, NOISE, generator=draws)
    fake = generator(z)
    opt_d.zero_grad()
    wrong = F.softplus(critic(fake.detach())).mean()
    right = F.softplus(-critic(real)).mean()
    loss_d = wrong + right + 10.0 * penalty(critic, real, fake, draws)
    loss_d.backward()
    opt_d.step()
    opt_g.zero_grad()
    loss_g = F.softplus(-critic(fake)).mean()
    loss_g.backward()
    opt_g.step()
    print(f"{step}: critic {loss_d.item():.4f}, generator {loss_g.item():.4f}")
