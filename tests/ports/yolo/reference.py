"""A small detector: cross-stage blocks, pyramid pooling, boxes from a grid."""

import torch
from torch import nn
from torch.nn import functional as F


class ConvBn(nn.Module):
    def __init__(self, inputs, outputs, kernel=1, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.03)

    def forward(self, x):
        return F.silu(self.bn(self.conv(x)))


class C2f(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.cv1 = ConvBn(dim, dim)
        self.m1 = ConvBn(dim // 2, dim // 2, 3)
        self.m2 = ConvBn(dim // 2, dim // 2, 3)
        self.cv2 = ConvBn(dim // 2 * 3, dim)

    def forward(self, x):
        a, b = self.cv1(x).chunk(2, 1)
        return self.cv2(torch.cat([a, b, b + self.m2(self.m1(b))], 1))


class Pool(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.cv1 = ConvBn(dim, dim // 2)
        self.cv2 = ConvBn(dim // 2 * 3, dim)

    def forward(self, x):
        x = self.cv1(x)
        y = F.max_pool2d(x, 5, 1, 2)
        z = F.max_pool2d(y, 5, 1, 2)
        return self.cv2(torch.cat([x, y, z], 1))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = ConvBn(3, 6, 3, 2)
        self.c1 = C2f(6)
        self.down = ConvBn(6, 10, 3, 2)
        self.pool = Pool(10)
        self.lateral = ConvBn(16, 8)
        self.box = nn.Conv2d(8, 2 * 4, 1)
        self.cls = nn.Conv2d(8, 2 * 3, 1)
        self.register_buffer("anchors", torch.tensor([[1.0, 2.0], [3.0, 1.5]]))

    def forward(self, x):
        fine = self.c1(self.stem(x))
        coarse = self.pool(self.down(fine))
        up = F.interpolate(coarse, scale_factor=2, mode="nearest")
        x = self.lateral(torch.cat([up, fine], 1))
        b, _, h, w = x.shape
        boxes = self.box(x).view(b, 2, 4, h, w).permute(0, 1, 3, 4, 2)
        rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        grid = torch.stack([columns, rows], -1)
        centre = boxes[..., :2].sigmoid() * 2 - 0.5 + grid
        size = (boxes[..., 2:].sigmoid() * 2) ** 2 * self.anchors[:, None, None]
        kinds = self.cls(x).view(b, 2, 3, h, w).permute(0, 1, 3, 4, 2).sigmoid()
        return torch.cat([centre, size, kinds], -1).view(b, -1, 7)


def model():
    torch.manual_seed(70)
    net = Detector()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.3)
    return net


def batches():
    generator = torch.Generator().manual_seed(71)
    x = torch.rand(2, 3, 16, 16, generator=generator)
    y = torch.rand(2, 128, 7, generator=generator)
    return [{"x": x, "y": y}]


def forward(net, batch):
    return net(batch["x"])


def loss(output, batch):
    return F.smooth_l1_loss(output, batch["y"], beta=0.5)


def optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
