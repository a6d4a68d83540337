import torch
import torch.nn as nn


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x)


class WGAN:
    def __init__(self, g, lam=10):
        self.g, self.c = g.cuda(), Critic().cuda()
        self.og = torch.optim.Adam(self.g.parameters(), 1e-4, betas=(0, 0.9))
        self.oc = torch.optim.Adam(self.c.parameters(), 1e-4, betas=(0, 0.9))
        self.sg = torch.amp.GradScaler("cuda")
        self.sc = torch.amp.GradScaler("cuda")
        self.lam = lam

    def gp(self, real, fake):
        a = torch.rand(real.size(0), 1, device=real.device)
        x = (a * real + (1 - a) * fake).requires_grad_(True)
        score = self.c(x)
        g = torch.autograd.grad(score.sum(), x, create_graph=True)[0]
        return ((g.norm(2, dim=1) - 1) ** 2).mean()

    def critic_step(self, real):
        z = torch.randn(real.size(0), 8, device=real.device)
        with torch.autocast("cuda", dtype=torch.float16):
            fake = self.g(z).detach()
            loss = self.c(fake).mean() - self.c(real).mean()
        loss = loss + self.lam * self.gp(real, fake)
        self.oc.zero_grad()
        self.sc.scale(loss).backward()
        self.sc.step(self.oc)
        self.sc.update()
        return loss.item()

    def gen_step(self, n):
        z = torch.randn(n, 8, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = -self.c(self.g(z)).mean()
        self.og.zero_grad()
        self.sg.scale(loss).backward()
        self.sg.step(self.og)
        self.sg.update()
        return loss.item()

    def fit(self, loader):
        for i, real in enumerate(loader):
            self.critic_step(real.cuda())
            if i % 5 == 0:
                self.gen_step(real.size(0))
