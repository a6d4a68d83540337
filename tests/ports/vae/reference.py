"""A convolutional variational autoencoder of grey pictures, with free bits."""

import torch
from torch import nn
from torch.nn import functional as F

HEIGHT, WIDTH = 16, 24
LATENT, SAMPLES = 10, 2
BETA, FREE_BITS = 0.8, 0.3
PEAK_LR, WARMUP, MAX_NORM = 2e-3, 4, 100.0


class ResBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm1 = nn.GroupNorm(4, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return x + h


def down(inp, out):
    return nn.Sequential(
        nn.Conv2d(inp, out, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(out),
        nn.LeakyReLU(0.2),
    )


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = down(1, 8)
        self.down2 = down(8, 16)
        self.block = ResBlock(16)
        features = 16 * (HEIGHT // 4) * (WIDTH // 4)
        self.mean = nn.Linear(features, LATENT)
        self.log_var = nn.Linear(features, LATENT)

    def forward(self, x):
        h = self.block(self.down2(self.down1(x)))
        h = F.silu(h).flatten(1)
        return self.mean(h), self.log_var(h)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(LATENT, 16 * (HEIGHT // 4) * (WIDTH // 4))
        self.block = ResBlock(16)
        self.up1 = nn.Sequential(
            nn.ConvTranspose2d(
                16, 12, 3, stride=2, padding=1, output_padding=1, bias=False
            ),
            nn.BatchNorm2d(12),
            nn.LeakyReLU(0.2),
        )
        self.up2 = nn.Sequential(
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.Conv2d(12, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.LeakyReLU(0.2),
        )
        self.out = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, z):
        h = self.start(z).view(-1, 16, HEIGHT // 4, WIDTH // 4)
        return self.out(self.up2(self.up1(self.block(h))))


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = Decoder()

    def forward(self, x, noise):
        """noise: (batch, samples, latent)."""
        mean, log_var = self.encoder(2 * x - 1)
        std = torch.exp(0.5 * log_var)
        z = mean.unsqueeze(1) + std.unsqueeze(1) * noise
        logits = self.decoder(z.flatten(0, 1))
        return logits.unflatten(0, noise.shape[:2]), mean, log_var


def model():
    torch.manual_seed(1110)
    net = VAE()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 1.5)
        for head in (net.encoder.mean, net.encoder.log_var):
            head.weight.mul_(2)
            head.bias.uniform_(-0.5, 0.5)
    return net


def batches():
    """Bright bars on a dark ground."""
    generator = torch.Generator().manual_seed(1111)
    made = []
    for size in (4, 3):
        image = torch.randint(0, 50, (size, 1, 16, 24), generator=generator)
        for picture in image[:, 0]:
            row = int(torch.randint(0, 12, (), generator=generator))
            column = int(torch.randint(0, 20, (), generator=generator))
            picture[row : row + 3] += 120
            picture[:, column : column + 4] += 80
        noise = torch.randn(size, 2, 10, generator=generator)
        made.append({"image": image.to(torch.uint8), "noise": noise})
    return made


def pixels(batch):
    return batch["image"].float() / 255


def forward(net, batch):
    logits, mean, log_var = net(pixels(batch), batch["noise"])
    return {"logits": logits, "mean": mean, "log_var": log_var}


def loss(output, batch):
    logits, mean, log_var = output["logits"], output["mean"], output["log_var"]
    target = pixels(batch).unsqueeze(1).expand_as(logits)
    nll = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    nll = nll.sum(dim=(2, 3, 4)).mean()

    kl = 0.5 * (mean.pow(2) + log_var.exp() - 1 - log_var)
    kl = kl.mean(dim=0).clamp(min=FREE_BITS).sum()
    return nll + BETA * kl


class WarmupAdamW(torch.optim.AdamW):
    """Clips the gradient; the rate grows over the first steps."""

    done = 0

    def step(self, closure=None):
        self.done += 1
        for group in self.param_groups:
            group["lr"] = PEAK_LR * min(1.0, self.done / WARMUP)
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        return super().step(closure)


def optimizer(net):
    decayed = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim == 1]
    groups = [
        {"params": decayed, "weight_decay": 0.05},
        {"params": others, "weight_decay": 0.0},
    ]
    return WarmupAdamW(groups, lr=PEAK_LR, betas=(0.9, 0.99))
