import torch
import torch.nn as nn
import torch.nn.functional as F


class VAE(nn.Module):
    def __init__(self, hidden=400, latent=20):
        super().__init__()
        self.fc1 = nn.Linear(784, hidden)
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.decode = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, 784))

    def forward(self, x):
        h = F.relu(self.fc1(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.decode(z), mu, logvar


def elbo(logits, x, mu, logvar):
    recon = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
    kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return (recon + kl) / x.size(0)


def bits_back(logits):
    log_p = F.log_softmax(logits, dim=-1)
    return -(log_p.exp() * log_p).sum(-1)


def log_mean_exp(x, dim):
    return torch.logsumexp(x, dim) - torch.log(torch.tensor(float(x.size(dim))))


def stable(x):
    a = torch.log1p(x)
    b = torch.expm1(x)
    c = torch.log(x + 1e-8)
    d = torch.log(2 + x.abs())
    norm = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    unit = x / (x.norm(dim=-1, keepdim=True) + 1e-6)
    safe = torch.where(x > 0, x, torch.ones_like(x))
    e = torch.where(x > 0, torch.log(safe), torch.zeros_like(x))
    z = (x - x.mean()) / (x.std() + 1e-5)
    rms = torch.sqrt(x.pow(2).mean(-1) + 1e-6)
    return a + b + c + d + norm + unit + e + z + rms[..., None]


def train(model, loader, device, epochs=10):
    model.to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(1, epochs + 1):
        train_loss = 0
        for batch_idx, (data, _) in enumerate(loader):
            data = data.to(device).view(-1, 784)
            optimizer.zero_grad()
            loss = elbo(*((model(data)[0], data) + model(data)[1:]))
            loss.backward()
            train_loss += loss.item()
            optimizer.step()
        print(f"====> Epoch: {epoch} Average loss: {train_loss / len(loader):.4f}")


def rmse(model, loader):
    model.eval()
    with torch.no_grad():
        errors = torch.stack([F.mse_loss(torch.sigmoid(model(x.view(-1, 784))[0]), x.view(-1, 784)) for x, _ in loader])
        return torch.sqrt(errors.mean()).item()
