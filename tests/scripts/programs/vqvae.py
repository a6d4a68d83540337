"""VQ-VAE: the codebook is an exponential average, gradients pass straight through."""

import torch
import torch.nn.functional as F
from torch import nn

CODES, DIM = 16, 8
DECAY = 0.9


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        codes = 0.3 * torch.randn(CODES, DIM)
        self.register_buffer("codes", codes)
        self.register_buffer("count", torch.ones(CODES))
        self.register_buffer("total", codes.clone())

    def forward(self, z):
        flat = z.permute(0, 2, 3, 1).reshape(-1, DIM)
        distance = (
            flat.pow(2).sum(1, keepdim=True)
            - 2 * flat @ self.codes.t()
            + self.codes.pow(2).sum(1)
        )
        nearest = distance.argmin(1)
        quantized = self.codes[nearest]
        if self.training:
            self.follow(flat.detach(), nearest)
        quantized = quantized.view(len(z), *z.shape[2:], DIM)
        quantized = quantized.permute(0, 3, 1, 2)
        commitment = F.mse_loss(z, quantized.detach())
        return z + (quantized - z).detach(), commitment

    @torch.no_grad()
    def follow(self, flat, nearest):
        hot = F.one_hot(nearest, CODES).float()
        self.count.mul_(DECAY).add_(hot.sum(0), alpha=1 - DECAY)
        self.total.mul_(DECAY).add_(hot.t() @ flat, alpha=1 - DECAY)
        self.codes.copy_(self.total / (self.count + 1e-5)[:, None])


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 12, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(12, DIM, 3, padding=1),
        )
        self.book = Codebook()
        self.decoder = nn.Sequential(
            nn.Conv2d(DIM, 12, 3, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(12, 1, 4, stride=2, padding=1),
        )

    def forward(self, x):
        z, commitment = self.book(self.encoder(x))
        return self.decoder(z), commitment


def batch(number):
    g = torch.Generator().manual_seed(400 + number)
    image = torch.rand(6, 1, 12, 12, generator=g)
    return F.avg_pool2d(image, 3, stride=1, padding=1) * 2 - 1


def restore(model):
    torch.manual_seed(9)
    stored = VQVAE().state_dict()
    for key, value in stored.items():
        if key.endswith("bias"):
            value.add_(0.1 * torch.randn_like(value))
        elif key.startswith("encoder"):
            value.mul_(2.0)
    own = model.state_dict()
    for key in own:
        own[key].copy_(stored[key])


torch.manual_seed(2)
vqvae = VQVAE()
restore(vqvae)
optimizer = torch.optim.RMSprop(vqvae.parameters(), lr=2e-3, alpha=0.95)
for step in range(2):
    vqvae.train()
    image = batch(step)
    output, commitment = vqvae(image)
    reconstruction = F.mse_loss(output, image)
    loss = reconstruction + 0.25 * commitment
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, reconstruction.item(), commitment.item())
