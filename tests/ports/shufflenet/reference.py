"""A small ShuffleNet v2: channels are split, one half goes through a branch, both are shuffled.

The weights and the statistics of the norms have a moving average.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

HEIGHT, WIDTH, CLASSES = 24, 20, 6
# Units and channels of each stage; the first unit takes every second pixel.
STEM, STAGES, LAST = 16, ((3, 32), (2, 64)), 80
SMOOTHING = 0.1
LR, END_LR, POWER = 0.1, 0.004, 2.0
WARMUP, TOTAL = 2, 9
MOMENTUM, WEIGHT_DECAY = 0.9, 0.02
EMA_DECAY = 0.8

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def pointwise(inputs, outputs):
    return [
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    ]


def depthwise(channels, stride):
    return [
        nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False),
        nn.BatchNorm2d(channels),
    ]


def channel_shuffle(x, groups):
    b, c, h, w = x.shape
    x = x.view(b, groups, c // groups, h, w)
    return x.transpose(1, 2).reshape(b, c, h, w)


class InvertedResidual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.stride = stride
        half = outputs // 2
        if stride == 2:
            self.branch1 = nn.Sequential(
                *depthwise(inputs, stride), *pointwise(inputs, half)
            )
        self.branch2 = nn.Sequential(
            *pointwise(inputs if stride == 2 else half, half),
            *depthwise(half, stride),
            *pointwise(half, half),
        )

    def forward(self, x):
        if self.stride == 1:
            x1, x2 = x.chunk(2, dim=1)
            out = torch.cat((x1, self.branch2(x2)), dim=1)
        else:
            out = torch.cat((self.branch1(x), self.branch2(x)), dim=1)
        return channel_shuffle(out, 2)


class ShuffleNetV2(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Sequential(
            nn.Conv2d(3, STEM, 3, padding=1, bias=False),
            nn.BatchNorm2d(STEM),
            nn.ReLU(inplace=True),
        )
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = STEM
        stages = []
        for units, outputs in STAGES:
            blocks = [InvertedResidual(channels, outputs, 2)]
            blocks += [InvertedResidual(outputs, outputs, 1) for _ in range(units - 1)]
            stages.append(nn.Sequential(*blocks))
            channels = outputs
        self.stage2, self.stage3 = stages
        self.conv5 = nn.Sequential(*pointwise(channels, LAST))
        self.fc = nn.Linear(LAST, CLASSES)

    def forward(self, x):
        x = self.maxpool(self.conv1(x))
        x = self.conv5(self.stage3(self.stage2(x)))
        return self.fc(x.mean((2, 3)))


class Averaged(nn.Module):
    """A network and the moving average of all that it keeps."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.average = copy.deepcopy(network).requires_grad_(False)

    def forward(self, x):
        return self.network(x)

    @torch.no_grad()
    def update_average(self):
        now = self.network.state_dict()
        for name, average in self.average.state_dict().items():
            if average.is_floating_point():
                average.lerp_(now[name], 1 - EMA_DECAY)


def model():
    """As after some steps: the norms have statistics, and the average is behind."""
    torch.manual_seed(1807)
    net = Averaged(ShuffleNetV2())
    with torch.no_grad():
        for module in net.network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight, 1.5)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.4, 1.6)
        now = net.network.state_dict()
        for name, average in net.average.state_dict().items():
            if average.is_floating_point():
                average.copy_(now[name] * (1 + 0.1 * torch.randn(average.shape)))
    return net


def batches():
    """Rings of a width for each class on a ground of another colour, larger than the crop."""
    generator = torch.Generator().manual_seed(1164)

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    down = torch.arange(28.0).view(28, 1, 1)
    across = torch.arange(24.0).view(24, 1)
    made = []
    for size in (8, 7, 8):
        label = torch.randint(0, 6, (size,), generator=generator)
        y, x = 8 + 12 * rand(2, size, 1, 1, 1)
        distance = ((down - y).square() + 1.5 * (across - x).square()).sqrt()
        wave = (0.5 + 0.18 * label + 0.08 * rand(size)).view(-1, 1, 1, 1)
        ground = 50 + 120 * rand(size, 1, 1, 3)
        image = ground + 90 * (rand(size, 1, 1, 3) - 0.3) * torch.sin(wave * distance)
        image = image + 40 * rand(size, 1, 1, 3) * (across / 24 - down / 28)
        image = image + 9 * torch.randn(image.shape, generator=generator)
        made.append(
            {
                "image": image.clamp(0, 255).to(torch.uint8),
                "label": label,
                "offset": torch.randint(0, 5, (size, 2), generator=generator),
                "flip": rand(size) < 0.5,
                "gain": 0.6 + 0.9 * rand(size),
            }
        )
    return made


def augmented(batch):
    """Crops, some of them turned; darker or brighter, but not brighter than white."""
    image = batch["image"].permute(0, 3, 1, 2).float() / 255
    crops = []
    for item, (top, left), flip in zip(image, batch["offset"].tolist(), batch["flip"]):
        crop = item[:, top : top + HEIGHT, left : left + WIDTH]
        crops.append(crop.flip(2) if flip else crop)
    bright = torch.stack(crops) * batch["gain"].view(-1, 1, 1, 1)
    return (bright.clamp(max=1) - MEAN) / STD


def forward(net, batch):
    return net(augmented(batch))


def loss(output, batch):
    return F.cross_entropy(output, batch["label"], label_smoothing=SMOOTHING)


class AveragingSGD(torch.optim.SGD):
    """A linear warm-up, then a polynomial; the average follows each step."""

    done = 0

    def __init__(self, net, groups):
        super().__init__(groups, lr=LR, momentum=MOMENTUM, nesterov=True)
        self.net = net

    def rate(self):
        step = self.done + 1
        if step <= WARMUP:
            return LR * step / WARMUP
        progress = (step - WARMUP) / (TOTAL - WARMUP)
        return END_LR + (LR - END_LR) * (1 - progress) ** POWER

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = self.rate()
        self.done += 1
        result = super().step(closure)
        self.net.update_average()
        return result


def optimizer(net):
    """Norms and biases do not decay."""
    params = list(net.network.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    return AveragingSGD(net, groups)
