"""A small RCAN: residual groups with channel attention, pictures six times as large."""

import torch
from torch import nn
from torch.nn import functional as F

RGB_MEAN = (0.4488, 0.4371, 0.4040)
FEATURES, GROUPS, BLOCKS, REDUCTION = 20, 2, 3, 4
RES_SCALE = 0.4
STAGES = ((3, 18), (2, 16))  # factor, features behind it
CHARBONNIER_EPS = 1e-3
EDGE_WEIGHT = 0.05
SCALE_WEIGHTS = {"x6": 1.0, "x3": 0.5, "x1": 0.25}
LR, GAMMA, EVERY, CLIP_VALUE = 2e-3, 0.5, 3, 0.02


class MeanShift(nn.Conv2d):
    """Takes the mean colour away, or adds it; it does not learn."""

    def __init__(self, sign):
        super().__init__(3, 3, kernel_size=1)
        self.weight.data = torch.eye(3).view(3, 3, 1, 1)
        self.bias.data = sign * torch.tensor(RGB_MEAN)
        for p in self.parameters():
            p.requires_grad = False


class CALayer(nn.Module):
    """Squeeze and excitation: a gate for each channel."""

    def __init__(self, channel, reduction):
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.conv_du = nn.Sequential(
            nn.Conv2d(channel, channel // reduction, 1),
            nn.ReLU(),
            nn.Conv2d(channel // reduction, channel, 1),
            nn.Sigmoid(),
        )

    def forward(self, x):
        y = self.conv_du(self.avg_pool(x))
        return x * y


class RCAB(nn.Module):
    def __init__(self, n_feat, reduction):
        super().__init__()
        self.conv1 = nn.Conv2d(n_feat, n_feat, 3, padding=1)
        self.conv2 = nn.Conv2d(n_feat, n_feat, 3, padding=1)
        self.ca = CALayer(n_feat, reduction)

    def forward(self, x):
        res = self.conv2(F.relu(self.conv1(x)))
        res = self.ca(res)
        return x + RES_SCALE * res


class ResidualGroup(nn.Module):
    def __init__(self, n_feat, reduction, n_blocks):
        super().__init__()
        self.body = nn.ModuleList([RCAB(n_feat, reduction) for _ in range(n_blocks)])
        self.conv = nn.Conv2d(n_feat, n_feat, 3, padding=1)

    def forward(self, x):
        res = x
        for block in self.body:
            res = block(res)
        return x + self.conv(res)


class Upsampler(nn.Module):
    def __init__(self, inp, out, factor):
        super().__init__()
        self.conv = nn.Conv2d(inp, out * factor**2, 3, padding=1)
        self.shuffle = nn.PixelShuffle(factor)
        self.act = nn.PReLU(out)

    def forward(self, x):
        return self.act(self.shuffle(self.conv(x)))


class RCAN(nn.Module):
    def __init__(self):
        super().__init__()
        (factor1, feat1), (factor2, feat2) = STAGES
        self.sub_mean = MeanShift(-1)
        self.add_mean = MeanShift(1)
        self.head = nn.Conv2d(3, FEATURES, 3, padding=1)
        self.body = nn.ModuleList(
            [ResidualGroup(FEATURES, REDUCTION, BLOCKS) for _ in range(GROUPS)]
        )
        self.body_conv = nn.Conv2d(FEATURES, FEATURES, 3, padding=1)
        self.up1 = Upsampler(FEATURES, feat1, factor1)
        self.tail1 = nn.Conv2d(feat1, 3, 3, padding=1)
        self.up2 = Upsampler(feat1, feat2, factor2)
        self.tail2 = nn.Conv2d(feat2, 3, 3, padding=1)

    def forward(self, x):
        x = self.head(self.sub_mean(x))
        res = x
        for group in self.body:
            res = group(res)
        res = x + self.body_conv(res)
        x3 = self.up1(res)
        x6 = self.up2(x3)
        return {
            "x3": self.add_mean(self.tail1(x3)),
            "x6": self.add_mean(self.tail2(x6)),
        }


def model():
    """As after some training: slopes differ, and gates are neither open nor shut."""
    torch.manual_seed(5201)
    net = RCAN()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, MeanShift):
                continue
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                module.bias.normal_(0, 0.1)
            elif isinstance(module, nn.PReLU):
                module.weight.uniform_(0.1, 0.4)
        for module in net.modules():
            if isinstance(module, CALayer):
                module.conv_du[0].weight.mul_(5.0)
                module.conv_du[2].weight.mul_(2.0)
        net.tail1.weight.mul_(0.15)
        net.tail2.weight.mul_(0.15)
    return net


def batches():
    """Waves of colour with discs; some parts of the large pictures are not known."""
    generator = torch.Generator().manual_seed(5205)
    rows, columns = torch.arange(66.0)[:, None], torch.arange(84.0)
    made = []
    for size in (2, 4):
        high, known = [], []
        for _ in range(size):
            turn, phase, grey = torch.rand(3, generator=generator)
            colour = torch.rand(3, 1, 1, generator=generator)
            wave = torch.cos(3 * turn) * rows + torch.sin(3 * turn) * columns
            image = 70 + 80 * grey + 55 * torch.sin(0.2 * wave + 6 * phase + 3 * colour)
            for _ in range(3):
                y, x, r = torch.rand(3, generator=generator)
                paint = 255 * torch.rand(3, 1, 1, generator=generator)
                away = (rows - 66 * y) ** 2 + (columns - 84 * x) ** 2
                image = torch.where(away < (5 + 13 * r) ** 2, paint, image)
            y, x, r = torch.rand(3, generator=generator)
            away = (rows - 66 * y).abs() + (columns - 84 * x).abs()
            high.append(image)
            known.append(away > 7 + 20 * r)
        images = torch.stack(high)
        small = images.unflatten(2, (11, 6)).unflatten(4, (14, 6)).mean(dim=(3, 5))
        noise = torch.randn(small.shape, generator=generator)
        made.append(
            {
                "low": (small + 6 * noise).clamp(0, 255).round().to(torch.uint8),
                "high": images.clamp(0, 255).round().to(torch.uint8),
                "known": torch.stack(known),
            }
        )
    return made


def forward(net, batch):
    return net(batch["low"].float() / 255)


def weighted_mean(values, weight):
    """The weights are the same for all channels."""
    return (values * weight).sum() / (weight.sum() * values.shape[1])


def charbonnier(x, y):
    return torch.sqrt((x - y) ** 2 + CHARBONNIER_EPS**2)


def area_down(x, known, size):
    """Means of what is known in each cell, and the part of it that is known."""
    share = F.interpolate(known, size, mode="area")
    mean = F.interpolate(x * known, size, mode="area") / share.clamp(min=1e-6)
    return mean, share


def sobel(x):
    """Derivatives down and to the right: [n, c, 2, h, w]."""
    n, c, h, w = x.shape
    down = torch.tensor([[-1.0, -2, -1], [0, 0, 0], [1, 2, 1]])
    kernel = torch.stack([down, down.t()]).unsqueeze(1)
    x = F.pad(x.reshape(n * c, 1, h, w), (1, 1, 1, 1), mode="reflect")
    return F.conv2d(x, kernel).view(n, c, 2, h, w)


def edge_loss(output, target, known):
    """Where all pixels around are known; both derivatives make one length."""
    inner = -F.max_pool2d(-known, 3, stride=1, padding=1)
    diff = sobel(output) - sobel(target)
    length = torch.sqrt(diff.square().sum(dim=2) + CHARBONNIER_EPS**2)
    return weighted_mean(length, inner)


def loss(output, batch):
    high = batch["high"].float() / 255
    known = batch["known"].unsqueeze(1).float()
    x1, _ = area_down(output["x6"], known, batch["low"].shape[2:])
    made = {"x6": output["x6"], "x3": output["x3"], "x1": x1}
    total = EDGE_WEIGHT * edge_loss(output["x6"], high, known)
    for scale, weight in SCALE_WEIGHTS.items():
        target, share = area_down(high, known, made[scale].shape[2:])
        pixels = weighted_mean(charbonnier(made[scale], target), share)
        total = total + weight * pixels
    return total


class StepAdam(torch.optim.Adam):
    """Gradients are clipped one by one; the rate halves every so many steps."""

    done = 0

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_value_(params, CLIP_VALUE)
        for group in self.param_groups:
            group["lr"] = LR * GAMMA ** (self.done // EVERY)
        self.done += 1
        return super().step(closure)


def optimizer(net):
    trained = [p for p in net.parameters() if p.requires_grad]
    return StepAdam(trained, lr=LR, betas=(0.9, 0.999), eps=1e-8)
