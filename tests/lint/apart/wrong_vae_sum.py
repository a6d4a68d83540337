import torch
import torch.nn.functional as F
from torch import nn


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(784, 64)
        self.mu = nn.Linear(64, 8)
        self.logvar = nn.Linear(64, 8)
        self.dec = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 784))

    def forward(self, x):
        h = torch.relu(self.enc(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(z), mu, logvar


def elbo(recon, x, mu, logvar):
    rec = F.binary_cross_entropy_with_logits(recon, x, reduction="sum")
    kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return rec + kl


vae = VAE().cuda()
optimizer = torch.optim.Adam(vae.parameters(), 1e-3)
for epoch in range(10):
    total = 0
    for x, _ in loader:
        x = x.view(-1, 784).cuda()
        recon, mu, logvar = vae(x)
        loss = elbo(recon, x, mu, logvar)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = total + loss  # expect: RO602
    print(epoch, total / len(loader))
    sample = torch.log(1 - torch.sigmoid(vae.dec(torch.randn(4, 8).cuda())))  # expect: RO405 RO705
