"""A small DCGAN: spectral norm, hinge loss, R1 penalty, averaged generator."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

NZ, NGF, NDF, NC = 24, 16, 12, 3
R1_GAMMA = 0.5
LR_G, LR_D = 4e-4, 8e-4
BETAS_G, BETAS_D = (0.5, 0.999), (0.3, 0.99)
EMA_DECAY, TOTAL_STEPS = 0.95, 20


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NZ, NGF * 2, 4, 1, 0, bias=False),
            nn.BatchNorm2d(NGF * 2),
            nn.ReLU(),
            nn.ConvTranspose2d(NGF * 2, NGF, 4, 2, 1, bias=False),
            nn.BatchNorm2d(NGF),
            nn.ReLU(),
            nn.ConvTranspose2d(NGF, NC, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z[:, :, None, None])


class MinibatchStdDev(nn.Module):
    """One more channel: how much the images of a group differ."""

    def __init__(self, group_size=4):
        super().__init__()
        self.group_size = group_size

    def forward(self, x):
        n, c, h, w = x.shape
        group = min(self.group_size, n)
        y = x.reshape(group, n // group, c, h, w)
        y = y - y.mean(dim=0)
        y = (y.square().mean(dim=0) + 1e-8).sqrt()
        y = y.mean(dim=(1, 2, 3)).view(-1, 1, 1, 1)
        return torch.cat([x, y.repeat(group, 1, h, w)], dim=1)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = spectral_norm(nn.Conv2d(NC, NDF, 4, 2, 1))
        self.conv2 = spectral_norm(nn.Conv2d(NDF, NDF * 2, 4, 2, 1))
        self.stddev = MinibatchStdDev()
        self.conv3 = spectral_norm(nn.Conv2d(NDF * 2 + 1, NDF * 2, 3, 1, 1))
        self.head = nn.Conv2d(NDF * 2, 1, 4, 1, 0)

    def forward(self, x):
        x = F.leaky_relu(self.conv1(x), 0.2)
        x = F.leaky_relu(self.conv2(x), 0.2)
        x = F.leaky_relu(self.conv3(self.stddev(x)), 0.2)
        return self.head(x).flatten()


class DCGAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = Generator()
        self.discriminator = Discriminator()
        self.ema = copy.deepcopy(self.generator).requires_grad_(False).eval()


def model():
    """As after some steps: the average is behind the generator."""
    torch.manual_seed(1512)
    net = DCGAN()
    with torch.no_grad():
        for module in net.generator.modules():
            if isinstance(module, nn.ConvTranspose2d):
                nn.init.normal_(module.weight, 0, 0.02)
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1.0, 0.2)
                nn.init.normal_(module.bias, 0, 0.2)
                nn.init.normal_(module.running_mean, 0, 0.05)
                nn.init.uniform_(module.running_var, 0.02, 0.2)
        last = net.generator.main[6]
        last.weight.mul_(10)
        nn.init.normal_(last.bias, 0, 0.2)
        for name, p in net.discriminator.named_parameters():
            if name.endswith("original"):
                p.add_(0.15 * p.std() * torch.randn(p.shape))
            elif name.endswith("bias"):
                nn.init.normal_(p, 0, 0.22)
        nn.init.normal_(net.discriminator.head.weight, 0, 1.0)
        for name, tensor in net.ema.state_dict().items():
            if tensor.is_floating_point():
                now = net.generator.state_dict()[name]
                tensor.copy_(now * (1 + 0.1 * torch.randn(now.shape)))
    return net


def batches():
    """Bright discs and stripes; some are to be mirrored."""
    generator = torch.Generator().manual_seed(1607)
    place = torch.arange(16.0)
    made = []
    for size in (8, 4, 8):
        colour, ground = torch.rand(2, size, 3, 1, 1, generator=generator)
        y, x = 3 + 9 * torch.rand(2, size, 1, 1, 1, generator=generator)
        wave, phase = torch.rand(2, size, 1, 1, 1, generator=generator)
        away = (place.view(16, 1) - y) ** 2 + (place - x) ** 2
        stripes = torch.sin(
            (0.3 + wave) * (place + 0.5 * place.view(16, 1)) + 6 * phase
        )
        image = 40 + 130 * ground + 35 * stripes
        image = image + (230 * colour - 60) * torch.exp(-away / 14)
        image = image + 6 * torch.randn(size, 3, 16, 16, generator=generator)
        made.append(
            {
                "image": image.clamp(0, 255).to(torch.uint8),
                "flip": torch.rand(size, generator=generator) < 0.5,
                "z": torch.randn(size, 24, generator=generator),
            }
        )
    return made


def preprocess(batch):
    image = batch["image"].float() / 127.5 - 1
    return torch.where(batch["flip"].view(-1, 1, 1, 1), image.flip(3), image)


def set_requires_grad(module, value):
    for p in module.parameters():
        p.requires_grad_(value)


def forward(net, batch):
    real, z = preprocess(batch), batch["z"]
    with torch.no_grad():
        sample = net.ema(z)

    # Discriminator: real images with R1, then what the generator made.
    with torch.enable_grad():
        real.requires_grad_(True)
        real_score = net.discriminator(real)
        (grad,) = torch.autograd.grad(real_score.sum(), real, create_graph=True)
    fake = net.generator(z)
    fake_score = net.discriminator(fake.detach())

    # Generator: through a discriminator that stays as it is.
    set_requires_grad(net.discriminator, False)
    fooled_score = net.discriminator(fake)
    set_requires_grad(net.discriminator, True)
    return {
        "real": real_score,
        "fake": fake_score,
        "fooled": fooled_score,
        "penalty": grad.square().sum(dim=(1, 2, 3)),
        "sample": sample,
    }


def loss(output, batch):
    hinge_real = F.relu(1.0 - output["real"]).mean()
    hinge_fake = F.relu(1.0 + output["fake"]).mean()
    loss_d = hinge_real + hinge_fake + 0.5 * R1_GAMMA * output["penalty"].mean()
    loss_g = -output["fooled"].mean()
    return loss_d + loss_g


class GANOptimizer(torch.optim.Optimizer):
    """Both networks take their steps, then the average follows the generator."""

    def __init__(self, net):
        self.net = net
        super().__init__([p for p in net.parameters() if p.requires_grad], {})
        self.opt_g = torch.optim.Adam(net.generator.parameters(), LR_G, BETAS_G)
        self.opt_d = torch.optim.Adam(net.discriminator.parameters(), LR_D, BETAS_D)
        self.schedulers = [
            torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 - step / TOTAL_STEPS)
            for opt in (self.opt_g, self.opt_d)
        ]
        self.done = 0

    @torch.no_grad()
    def update_ema(self):
        self.done += 1
        decay = min(EMA_DECAY, (1 + self.done) / (10 + self.done))
        for avg, p in zip(self.net.ema.parameters(), self.net.generator.parameters()):
            avg.lerp_(p, 1 - decay)
        for avg, b in zip(self.net.ema.buffers(), self.net.generator.buffers()):
            avg.copy_(b)

    def step(self, closure=None):
        self.opt_d.step()
        self.opt_g.step()
        for scheduler in self.schedulers:
            scheduler.step()
        self.update_ema()


def optimizer(net):
    return GANOptimizer(net)
