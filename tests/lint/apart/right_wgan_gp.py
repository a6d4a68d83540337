import torch
import torch.nn as nn


def gradient_penalty(critic, real, fake):
    eps = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    mixed = (eps * real + (1 - eps) * fake).requires_grad_(True)
    score = critic(mixed)
    (grad,) = torch.autograd.grad(score.sum(), mixed, create_graph=True)
    norm = torch.sqrt(grad.flatten(1).pow(2).sum(1) + 1e-12)
    return ((norm - 1) ** 2).mean()


class WGAN:
    def __init__(self, generator, critic, device, n_critic=5):
        self.device = device
        self.g = generator.to(device)
        self.c = critic.to(device)
        self.opt_g = torch.optim.Adam(self.g.parameters(), 1e-4, (0.0, 0.9))
        self.opt_c = torch.optim.Adam(self.c.parameters(), 1e-4, (0.0, 0.9))
        self.n_critic = n_critic

    def critic_step(self, real):
        with torch.no_grad():
            fake = self.g(torch.randn(real.size(0), 128, device=self.device))
        loss = self.c(fake).mean() - self.c(real).mean() + 10 * gradient_penalty(self.c, real, fake)
        self.opt_c.zero_grad()
        loss.backward()
        self.opt_c.step()
        return loss.detach()

    def generator_step(self, n):
        fake = self.g(torch.randn(n, 128, device=self.device))
        loss = -self.c(fake).mean()
        self.opt_g.zero_grad()
        loss.backward()
        self.opt_g.step()
        return loss.detach()

    def train(self, loader, epochs):
        self.g.train()
        for epoch in range(epochs):
            g_loss = torch.zeros((), device=self.device)
            c_losses = []
            for i, (real, _) in enumerate(loader):
                real = real.to(self.device, non_blocking=loader.pin_memory)
                c_losses.append(self.critic_step(real))
                if (i + 1) % self.n_critic == 0:
                    g_loss = self.generator_step(real.size(0))
            print(epoch, torch.stack(c_losses).mean().item(), g_loss.item())

    @torch.no_grad()
    def sample(self, n):
        self.g.eval()
        images = self.g(torch.randn(n, 128, device=self.device)).cpu()
        self.g.train()
        return images
