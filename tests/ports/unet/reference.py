"""A U-Net with group normalisation and transposed convolutions."""

import torch
from torch import nn
from torch.nn import functional as F


class Double(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.a = nn.Conv2d(inp, out, 3, padding=1)
        self.na = nn.GroupNorm(2, out)
        self.b = nn.Conv2d(out, out, 3, padding=1)
        self.nb = nn.GroupNorm(2, out)

    def forward(self, x):
        x = F.leaky_relu(self.na(self.a(x)), 0.1)
        return F.leaky_relu(self.nb(self.b(x)), 0.1)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = Double(2, 6)
        self.down2 = Double(6, 8)
        self.middle = Double(8, 10)
        self.up2 = nn.ConvTranspose2d(10, 8, 2, stride=2)
        self.dec2 = Double(16, 8)
        self.dec1 = Double(14, 6)
        self.last = nn.Conv2d(6, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        d = self.dec2(torch.cat([self.up2(c), b], 1))
        up = F.interpolate(d, scale_factor=2, mode="nearest")
        e = self.dec1(torch.cat([up, a], 1))
        return self.last(e)


def model():
    torch.manual_seed(12)
    net = UNet()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.GroupNorm):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.2)
    return net


def batches():
    generator = torch.Generator().manual_seed(13)
    image = torch.randn(2, 2, 8, 8, generator=generator)
    mask = torch.randint(0, 2, (2, 1, 8, 8), generator=generator).float()
    return [{"image": image, "mask": mask}]


def forward(net, batch):
    return net(batch["image"])


def loss(output, batch):
    return F.binary_cross_entropy_with_logits(output, batch["mask"])


def optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
