"""A small EfficientNet: inverted bottlenecks with squeeze and excitation, padding as in TF."""

import torch
from torch import nn
from torch.nn import functional as F


def same_pad(x, kernel, stride):
    """Pad as TF does: what is odd goes below and to the right."""
    height, width = x.shape[-2:]
    down = max((-(-height // stride) - 1) * stride + kernel - height, 0)
    across = max((-(-width // stride) - 1) * stride + kernel - width, 0)
    return F.pad(x, (across // 2, across - across // 2, down // 2, down - down // 2))


class Conv2dSame(nn.Conv2d):
    def forward(self, x):
        x = same_pad(x, self.kernel_size[0], self.stride[0])
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, 1, self.groups)


def norm(channels):
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class SqueezeExcite(nn.Module):
    def __init__(self, channels, reduced):
        super().__init__()
        self.conv_reduce = nn.Conv2d(channels, reduced, 1)
        self.act1 = nn.SiLU()
        self.conv_expand = nn.Conv2d(reduced, channels, 1)

    def forward(self, x):
        s = x.mean((2, 3), keepdim=True)
        s = self.conv_expand(self.act1(self.conv_reduce(s)))
        return x * s.sigmoid()


class DepthwiseSeparable(nn.Module):
    def __init__(self, inputs, outputs, kernel):
        super().__init__()
        self.conv_dw = Conv2dSame(inputs, inputs, kernel, groups=inputs, bias=False)
        self.bn1 = norm(inputs)
        self.se = SqueezeExcite(inputs, inputs // 4)
        self.conv_pw = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.bn2 = norm(outputs)

    def forward(self, x):
        x = F.silu(self.bn1(self.conv_dw(x)))
        return self.bn2(self.conv_pw(self.se(x)))


class InvertedResidual(nn.Module):
    def __init__(self, inputs, outputs, kernel, stride):
        super().__init__()
        middle = 3 * inputs
        self.skip = stride == 1 and inputs == outputs
        self.conv_pw = nn.Conv2d(inputs, middle, 1, bias=False)
        self.bn1 = norm(middle)
        self.conv_dw = Conv2dSame(
            middle, middle, kernel, stride, groups=middle, bias=False
        )
        self.bn2 = norm(middle)
        self.se = SqueezeExcite(middle, inputs // 4)
        self.conv_pwl = nn.Conv2d(middle, outputs, 1, bias=False)
        self.bn3 = norm(outputs)

    def forward(self, x):
        shortcut = x
        x = F.silu(self.bn1(self.conv_pw(x)))
        x = F.silu(self.bn2(self.conv_dw(x)))
        x = self.bn3(self.conv_pwl(self.se(x)))
        return x + shortcut if self.skip else x


class EfficientNet(nn.Module):
    def __init__(self, classes=7):
        super().__init__()
        self.conv_stem = Conv2dSame(3, 8, 3, 2, bias=False)
        self.bn1 = norm(8)
        self.blocks = nn.Sequential(
            DepthwiseSeparable(8, 8, 3),
            InvertedResidual(8, 12, 5, 2),
            InvertedResidual(12, 12, 3, 1),
        )
        self.conv_head = nn.Conv2d(12, 20, 1, bias=False)
        self.bn2 = norm(20)
        self.classifier = nn.Linear(20, classes)

    def forward(self, x):
        x = F.silu(self.bn1(self.conv_stem(x)))
        x = self.blocks(x)
        x = F.silu(self.bn2(self.conv_head(x)))
        return self.classifier(x.mean((2, 3)))


def model():
    torch.manual_seed(710)
    net = EfficientNet()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.6, 1.6)
                module.bias.normal_(0, 0.3)
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.02, 0.4)
            elif isinstance(module, SqueezeExcite):
                module.conv_reduce.weight.mul_(3)
                module.conv_expand.weight.mul_(3)
    return net.eval()


def batches():
    generator = torch.Generator().manual_seed(711)
    return [
        {
            "image": torch.rand(3, 3, 16, 20, generator=generator),
            "label": torch.randint(0, 7, (3,), generator=generator),
        }
    ]


def forward(net, batch):
    image = batch["image"]
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    return net((image - mean) / std)


def loss(output, batch):
    return F.cross_entropy(output, batch["label"], label_smoothing=0.1)


def optimizer(net):
    return torch.optim.RMSprop(
        net.parameters(), lr=2e-3, alpha=0.9, eps=1e-3, momentum=0.9
    )
