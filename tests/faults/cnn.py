"""A small residual network: padding, batch norm, pooling, interpolation; images arrive as NHWC."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def branch(self, x: Tensor) -> Tensor:
        return self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + x)


class Resize(nn.Module):
    mode = "bilinear"
    align_corners: bool | None = False

    def forward(self, x: Tensor, size: torch.Size) -> Tensor:
        return F.interpolate(
            x, size=size, mode=self.mode, align_corners=self.align_corners
        )


class Cnn(nn.Module):
    """Images of shape (batch, 18, 18, 3) to 10 logits; a coarse map is resized and joined with a finer one."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, padding_mode="reflect")
        self.norm = nn.BatchNorm2d(width)
        self.fine = nn.Sequential(Residual(width), Residual(width))
        self.pool = nn.MaxPool2d(2)
        self.coarse = nn.Sequential(Residual(width), Residual(width))
        self.resize = Resize()
        self.mix = nn.Conv2d(2 * width, width, 1)
        self.shrink = nn.AvgPool2d(3, 2, padding=1, count_include_pad=False)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, 10)

    def channels_first(self, x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(self.channels_first(x))))
        fine = self.fine(x)
        coarse = self.coarse(self.pool(fine))
        joined = torch.cat([fine, self.resize(coarse, fine.shape[-2:])], 1)
        x = self.shrink(F.relu(self.mix(joined)))
        return self.head(self.dropout(x.mean((2, 3))))


def batch(seed: int, size: int = 4) -> tuple[Tensor, Tensor]:
    """Images whose channels have different means, as photographs have, and their labels."""
    draw = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 18, 18, 3, generator=draw).cumsum(1) * 0.3
    return images + torch.tensor([0.4, 0.1, -0.3]), torch.randint(
        10, (size,), generator=draw
    )


def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)
