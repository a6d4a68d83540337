"""Capsules: routing by agreement, a margin loss and a decoder of the masked capsule."""

import torch
from torch import nn
from torch.nn import functional as F

CLASSES, SIZE, ROUTINGS = 3, 4, 3


def squash(s, dim=-1):
    squared = (s**2).sum(dim, keepdim=True)
    norm = torch.sqrt(squared + 1e-8)
    return squared / (1 + squared) * s / norm


class PrimaryCaps(nn.Module):
    def __init__(self, channels, types, size):
        super().__init__()
        self.types, self.size = types, size
        self.conv = nn.Conv2d(channels, types * size, kernel_size=5, stride=2)

    def forward(self, x):
        u = self.conv(x)
        n, _, h, w = u.shape
        u = u.view(n, self.types, self.size, h, w).permute(0, 1, 3, 4, 2)
        return squash(u.reshape(n, -1, self.size))


class RoutedCaps(nn.Module):
    def __init__(self, inputs, input_size, outputs, output_size):
        super().__init__()
        self.weight = nn.Parameter(
            1.5 * torch.randn(inputs, outputs, output_size, input_size)
        )
        self.bias = nn.Parameter(torch.randn(outputs, output_size) * 0.4)

    def forward(self, u):
        # (n, inputs, outputs, output_size)
        predicted = torch.einsum("ioab,nib->nioa", self.weight, u)
        fixed = predicted.detach()
        logits = u.new_zeros(predicted.shape[:3])
        for step in range(ROUTINGS):
            coupling = F.softmax(logits, dim=2).unsqueeze(-1)
            votes = predicted if step == ROUTINGS - 1 else fixed
            v = squash((coupling * votes).sum(1) + self.bias)
            if step < ROUTINGS - 1:
                logits = logits + (fixed * v.detach().unsqueeze(1)).sum(-1)
        return v


class CapsNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 10, kernel_size=5)
        self.primary = PrimaryCaps(10, 2, 4)
        self.digits = RoutedCaps(2 * 3 * 3, 4, CLASSES, SIZE)
        self.decoder = nn.Sequential(
            nn.Linear(CLASSES * SIZE, 16),
            nn.ReLU(inplace=True),
            nn.Linear(16, 24),
            nn.ReLU(inplace=True),
            nn.Linear(24, 13 * 13),
            nn.Sigmoid(),
        )

    def forward(self, image, label):
        v = self.digits(self.primary(F.relu(self.conv(image))))
        lengths = v.norm(dim=-1)
        mask = F.one_hot(label, CLASSES).to(v.dtype)
        picture = self.decoder((v * mask.unsqueeze(-1)).flatten(1))
        return lengths, picture


def model():
    torch.manual_seed(510)
    return CapsNet()


def batches():
    generator = torch.Generator().manual_seed(511)
    image = torch.rand(4, 1, 13, 13, generator=generator)
    image[:, :, 2:7, 4:9] += 0.7
    return [{"image": image, "label": torch.tensor([1, 2, 0, 2])}]


def forward(net, batch):
    return net(batch["image"], batch["label"])


def loss(output, batch):
    lengths, picture = output
    target = F.one_hot(batch["label"], CLASSES).to(lengths.dtype)
    present = F.relu(0.9 - lengths) ** 2
    absent = F.relu(lengths - 0.1) ** 2
    margin = (target * present + 0.5 * (1 - target) * absent).sum(1).mean()
    rebuilt = F.mse_loss(picture, batch["image"].flatten(1), reduction="sum")
    return margin + 0.0005 * rebuilt / len(lengths) * 13


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.9, 0.99))
