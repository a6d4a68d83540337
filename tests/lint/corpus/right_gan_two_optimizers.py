import torch
import torch.nn as nn
import torch.nn.functional as F


class Generator(nn.Module):
    def __init__(self, nz=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(nz, 256), nn.LeakyReLU(0.2), nn.Linear(256, 784), nn.Tanh()
        )

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))

    def forward(self, x):
        return self.net(x)


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
G = Generator().to(device)
D = Discriminator().to(device)
opt_g = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
scaler = torch.amp.GradScaler(device.type)
criterion = nn.BCEWithLogitsLoss()


def train(loader, epochs):
    for epoch in range(epochs):
        for real, _ in loader:
            real = real.view(-1, 784).to(device)
            z = torch.randn(real.size(0), 64, device=device)
            # discriminator
            opt_d.zero_grad()
            with torch.autocast(device.type, dtype=torch.float16):
                fake = G(z)
                real_logits = D(real)
                fake_logits = D(fake.detach())
                loss_d = criterion(real_logits, torch.ones_like(real_logits)) + criterion(
                    fake_logits, torch.zeros_like(fake_logits)
                )
            scaler.scale(loss_d).backward()
            scaler.step(opt_d)
            # generator
            opt_g.zero_grad()
            with torch.autocast(device.type, dtype=torch.float16):
                logits = D(fake)
                loss_g = F.softplus(-logits).mean()
            scaler.scale(loss_g).backward()
            scaler.step(opt_g)
            scaler.update()
        print(f"{epoch}: d {loss_d.item():.3f} g {loss_g.item():.3f}")


@torch.inference_mode()
def sample(n):
    G.eval()
    images = G(torch.randn(n, 64, device=device))
    G.train()
    return images
