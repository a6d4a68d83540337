"""U-Net with BatchNorm, transposed convolutions and skips: which pixels are of a disc?"""

import torch
import torch.nn as nn


def double_conv(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, n_channels, n_classes, width=8):
        super().__init__()
        self.inc = double_conv(n_channels, width)
        self.down1 = double_conv(width, 2 * width)
        self.down2 = double_conv(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.conv1 = double_conv(4 * width, 2 * width)
        self.up2 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.conv2 = double_conv(2 * width, width)
        self.outc = nn.Conv2d(width, n_classes, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(self.pool(x1))
        x3 = self.down2(self.pool(x2))
        x = self.conv1(torch.cat([x2, self.up1(x3)], dim=1))
        x = self.conv2(torch.cat([x1, self.up2(x)], dim=1))
        return self.outc(x)


def scenes(count, seed):
    """Noisy pictures with a disc and a bar, and 1 where the disc is."""
    g = torch.Generator().manual_seed(seed)
    row = torch.arange(32.0)
    cy, cx, r, at = (torch.rand(4, count, 1, 1, generator=g) * 16) + 8
    disc = ((row[:, None] - cy) ** 2 + (row - cx) ** 2).sqrt() < r / 3
    bar = (row - at).abs().expand(count, 32, 32) < 2
    image = disc.float() - 0.7 * bar.float()
    image = image + 0.3 * torch.randn(count, 32, 32, generator=g)
    return image.unsqueeze(1), disc.long()


def model():
    torch.manual_seed(2)
    net = UNet(1, 2).train()
    optim = torch.optim.Adam(net.parameters(), 3e-3)
    criterion = nn.CrossEntropyLoss()
    x, y = scenes(256, 0)
    for step in range(40):
        part = slice(step % 16 * 16, step % 16 * 16 + 16)
        optim.zero_grad()
        criterion(net(x[part]), y[part]).backward()
        optim.step()
    return net.eval()


def batches():
    images, masks = scenes(96, 10)
    return list(zip(images.split(16), masks.split(16)))


def held_out():
    images, masks = scenes(64, 11)
    return list(zip(images.split(16), masks.split(16)))


def forward(model, batch):
    return model(batch[0])


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def metric(outputs, batches):
    """Intersection over union of the disc."""
    both = either = 0
    for output, (_, mask) in zip(outputs, batches):
        predicted = output.argmax(1) == 1
        both += (predicted & (mask == 1)).sum().item()
        either += (predicted | (mask == 1)).sum().item()
    return both / either
