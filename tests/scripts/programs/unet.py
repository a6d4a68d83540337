"""Segments discs in noisy pictures with a small U-Net."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

STEPS = 2


def pictures(seed, count=8, size=16):
    rng = np.random.default_rng(seed)
    centre = rng.random((count, 2, 1, 1)) * size
    radius = 2 + 4 * rng.random((count, 1, 1))
    place = np.arange(size)
    y = place.reshape(1, size, 1) - centre[:, 0]
    x = place.reshape(1, 1, size) - centre[:, 1]
    mask = y**2 + x**2 < radius**2
    noise = 0.3 * rng.standard_normal((count, 2, size, size))
    image = np.stack([mask, ~mask], 1) + noise
    image = (image - 0.5) / 0.6
    return torch.from_numpy(image.astype("f4")), torch.from_numpy(mask.astype("f4"))


class Block(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, outside)

    def forward(self, x):
        x = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down1 = Block(2, width)
        self.down2 = Block(width, 2 * width)
        self.middle = Block(2 * width, 2 * width)
        self.up2 = Block(4 * width, width)
        self.up1 = Block(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        fine = self.down1(x)
        coarse = self.down2(F.max_pool2d(fine, 2))
        deep = self.middle(F.avg_pool2d(coarse, 2))
        deep = F.interpolate(deep, scale_factor=2, mode="bilinear", align_corners=False)
        up = self.up2(torch.cat([deep, coarse], 1))
        up = F.interpolate(up, scale_factor=2, mode="nearest")
        up = self.up1(torch.cat([up, fine], 1))
        return self.head(up).squeeze(1)


def dice(logits, mask):
    p = torch.sigmoid(logits)
    overlap = (p * mask).sum((1, 2))
    total = p.sum((1, 2)) + mask.sum((1, 2))
    return (1 - (2 * overlap + 1) / (total + 1)).mean()


def checkpoint():
    torch.manual_seed(7)
    state = UNet().state_dict()
    for name, value in state.items():
        if "norm" in name:
            value.add_(0.2 * torch.randn_like(value))
    return state


torch.manual_seed(0)
model = UNet()
state = checkpoint()
model.load_state_dict(state)
optimizer = torch.optim.SGD(
    model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
for step in range(STEPS):
    image, mask = pictures(step)
    optimizer.zero_grad()
    logits = model(image)
    bce = F.binary_cross_entropy_with_logits(logits, mask)
    loss = bce + 0.5 * dice(logits, mask)
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(f"step {step}: loss {loss.item():.4f}")
