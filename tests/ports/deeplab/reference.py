"""A small DeepLabV3+: a dilated residual network, ASPP, a decoder and an auxiliary head."""

import torch
from torch import nn
from torch.nn import functional as F

NUM_CLASSES, IGNORE = 6, 255
CROP, CANVAS = (56, 72), (64, 80)
MEAN, STD = (0.45, 0.43, 0.40), (0.24, 0.22, 0.23)
CLASS_WEIGHTS = (0.4, 1.0, 1.3, 0.8, 1.7, 1.1)
DICE_WEIGHT, AUX_WEIGHT = 0.5, 0.4
BN_MOMENTUM = 0.03
LR, HEAD_SCALE, MOMENTUM, WEIGHT_DECAY = 0.02, 10.0, 0.9, 0.01
TOTAL, POWER, WARMUP, WARMUP_RATIO = 24, 0.9, 3, 0.25


class ConvBN(nn.Sequential):
    def __init__(self, inp, out, kernel=1, stride=1, dilation=1, relu=True):
        padding = dilation * (kernel // 2)
        layers = [
            nn.Conv2d(inp, out, kernel, stride, padding, dilation, bias=False),
            nn.BatchNorm2d(out, momentum=BN_MOMENTUM),
        ]
        if relu:
            layers.append(nn.ReLU(inplace=True))
        super().__init__(*layers)


class SeparableConvBN(nn.Module):
    def __init__(self, inp, out, dilation=1):
        super().__init__()
        self.depthwise = nn.Conv2d(
            inp, inp, 3, padding=dilation, dilation=dilation, groups=inp, bias=False
        )
        self.pointwise = nn.Conv2d(inp, out, 1, bias=False)
        self.bn = nn.BatchNorm2d(out, momentum=BN_MOMENTUM)

    def forward(self, x):
        return F.relu(self.bn(self.pointwise(self.depthwise(x))))


class Bottleneck(nn.Module):
    def __init__(self, inp, out, stride=1, dilation=1):
        super().__init__()
        mid = out // 2
        self.conv1 = ConvBN(inp, mid)
        self.conv2 = ConvBN(mid, mid, 3, stride, dilation)
        self.conv3 = ConvBN(mid, out, relu=False)
        self.downsample = None
        if stride != 1 or inp != out:
            self.downsample = ConvBN(inp, out, 1, stride, relu=False)

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        return F.relu(identity + self.conv3(self.conv2(self.conv1(x))))


class Backbone(nn.Module):
    """Maps of a quarter, an eighth and again an eighth of the size."""

    def __init__(self):
        super().__init__()
        self.stem = ConvBN(3, 12, 3, stride=2)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = Bottleneck(12, 16)
        self.layer2 = Bottleneck(16, 24, stride=2)
        self.layer3 = nn.Sequential(
            Bottleneck(24, 32, dilation=2), Bottleneck(32, 32, dilation=4)
        )

    def forward(self, x):
        low = self.layer1(self.maxpool(self.stem(x)))
        middle = self.layer2(low)
        return low, middle, self.layer3(middle)


class ASPP(nn.Module):
    def __init__(self, inp, out, rates):
        super().__init__()
        self.convs = nn.ModuleList(
            [ConvBN(inp, out), *(SeparableConvBN(inp, out, rate) for rate in rates)]
        )
        self.pooling = nn.Sequential(nn.AdaptiveAvgPool2d(1), *ConvBN(inp, out))
        self.project = ConvBN((len(rates) + 2) * out, out)

    def forward(self, x):
        branches = [conv(x) for conv in self.convs]
        pooled = self.pooling(x)
        branches.append(
            F.interpolate(pooled, x.shape[-2:], mode="bilinear", align_corners=False)
        )
        return self.project(torch.cat(branches, dim=1))


class Decoder(nn.Module):
    def __init__(self, inp, low, squeezed=8, hidden=16):
        super().__init__()
        self.low_project = ConvBN(low, squeezed)
        self.fuse = SeparableConvBN(squeezed + inp, hidden)
        self.classifier = nn.Conv2d(hidden, NUM_CLASSES, 1)

    def forward(self, x, low):
        low = self.low_project(low)
        x = F.interpolate(x, low.shape[-2:], mode="bilinear", align_corners=False)
        return self.classifier(self.fuse(torch.cat([low, x], dim=1)))


class DeepLab(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.aspp = ASPP(32, 16, rates=(2, 3))
        self.decoder = Decoder(16, 16)
        self.aux = nn.Sequential(ConvBN(24, 10, 3), nn.Conv2d(10, NUM_CLASSES, 1))

    def forward(self, x):
        size = x.shape[-2:]
        low, middle, high = self.backbone(x)
        out = self.decoder(self.aspp(high), low)
        aux = self.aux(middle)
        return {
            "out": F.interpolate(out, size, mode="bilinear", align_corners=False),
            "aux": F.interpolate(aux, size, mode="bilinear", align_corners=False),
        }


def model():
    torch.manual_seed(1802)
    net = DeepLab()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
                if module.bias is not None:
                    module.bias.normal_(0, 0.3)
            elif isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 1.5)
    return net


def batches():
    """Discs and boxes on a slope of grey; nobody knows what their edges are."""
    generator = torch.Generator().manual_seed(1803)
    down, across = torch.arange(52.0).view(52, 1), torch.arange(68.0)
    colours = torch.tensor(
        [[120, 40, 60], [60, 150, 60], [50, 80, 170], [190, 170, 60], [170, 70, 180.0]]
    )
    made = []
    for size in (4, 5, 4):
        images, labels = [], []
        for _ in range(size):
            grey = 70 + 60 * torch.rand(3, 1, 1, generator=generator)
            tilt = torch.randn(2, generator=generator)
            image = grey + 0.6 * (tilt[0] * (down - 26) + tilt[1] * (across - 34))
            label = torch.zeros(52, 68, dtype=torch.int64)
            for _ in range(5):
                kind = int(torch.randint(1, 6, (), generator=generator))
                y, x, r = torch.rand(3, generator=generator)
                dy, dx = (down - 52 * y).abs(), (across - 68 * x).abs()
                away = (
                    torch.maximum(dy, 0.7 * dx) if kind > 3 else (dy**2 + dx**2).sqrt()
                )
                away = away - 6 - 9 * r
                image = torch.where(away < 0, colours[kind - 1].view(3, 1, 1), image)
                label = torch.where(away < 0, kind, label)
                label = torch.where(away.abs() < 1, 255, label)
            noise = 14 * torch.randn(image.shape, generator=generator)
            images.append((image + noise).clamp(0, 255).to(torch.uint8))
            labels.append(label)
        corner = torch.randint(0, 9, (size, 2), generator=generator)
        flip = torch.arange(size) % 3 != 1
        made.append(
            {
                "image": torch.stack(images),
                "label": torch.stack(labels),
                "brightness": 0.7 + 0.8 * torch.rand(size, generator=generator),
                "corner": corner,
                "flip": flip,
            }
        )
    return made


def augment(x, batch, fill):
    """Pad at the bottom and at the right, crop, and flip some from left to right."""
    height, width = x.shape[-2:]
    x = F.pad(x, (0, CANVAS[1] - width, 0, CANVAS[0] - height), value=fill)
    crops = []
    for item, (top, left), flip in zip(x, batch["corner"].tolist(), batch["flip"]):
        crop = item[..., top : top + CROP[0], left : left + CROP[1]]
        crops.append(crop.flip(-1) if flip else crop)
    return torch.stack(crops)


def preprocess(batch):
    x = batch["image"] * batch["brightness"].view(-1, 1, 1, 1)
    x = x.clamp(max=255) / 255
    x = (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    return augment(x, batch, 0.0)


def forward(net, batch):
    return net(preprocess(batch))


def dice_loss(logits, target):
    valid = (target != IGNORE).unsqueeze(1)
    probs = logits.softmax(dim=1) * valid
    one_hot = F.one_hot(target.where(target != IGNORE, 0), NUM_CLASSES)
    one_hot = one_hot.permute(0, 3, 1, 2) * valid
    intersection = (probs * one_hot).sum(dim=(0, 2, 3))
    cardinality = probs.sum(dim=(0, 2, 3)) + one_hot.sum(dim=(0, 2, 3))
    return 1 - ((2 * intersection + 1) / (cardinality + 1)).mean()


def loss(output, batch):
    target = augment(batch["label"], batch, IGNORE)
    weight = torch.tensor(CLASS_WEIGHTS)
    ce = F.cross_entropy(output["out"], target, weight, ignore_index=IGNORE)
    aux = F.cross_entropy(output["aux"], target, weight, ignore_index=IGNORE)
    return ce + DICE_WEIGHT * dice_loss(output["out"], target) + AUX_WEIGHT * aux


class PolySGD(torch.optim.SGD):
    """The rate falls as a power of what is left, after a linear warm-up."""

    done = 0

    def factor(self):
        poly = (1 - self.done / TOTAL) ** POWER
        if self.done < WARMUP:
            poly *= 1 - (1 - self.done / WARMUP) * (1 - WARMUP_RATIO)
        return poly

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = LR * self.factor() * group["scale"]
        self.done += 1
        return super().step(closure)


def optimizer(net):
    """Kernels of convolutions decay; all but the backbone learns faster."""
    groups = []
    for name, child in net.named_children():
        scale = 1.0 if name == "backbone" else HEAD_SCALE
        kernels = [p for p in child.parameters() if p.ndim == 4]
        others = [p for p in child.parameters() if p.ndim != 4]
        groups += [
            {"params": kernels, "scale": scale, "weight_decay": WEIGHT_DECAY},
            {"params": others, "scale": scale, "weight_decay": 0.0},
        ]
    return PolySGD(groups, lr=LR, momentum=MOMENTUM, nesterov=True)
