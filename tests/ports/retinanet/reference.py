"""A small RetinaNet: a residual network, a pyramid of features, anchors and focal loss."""

import math

import torch
from torch import nn
from torch.nn import functional as F

MEAN, STD = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)
NUM_CLASSES = 4
STRIDES = (4, 8, 16, 32)
SIZES, SCALES, RATIOS = (8, 16, 32, 64), (1.0, math.sqrt(2)), (0.5, 1.0, 2.0)
FG_IOU, BG_IOU = 0.5, 0.4
BACKGROUND, IGNORED = -1, -2
CODE_WEIGHTS = (10.0, 10.0, 5.0, 5.0)
ALPHA, GAMMA, BETA, BOX_WEIGHT = 0.25, 2.0, 1 / 9, 0.5
PRIOR = 0.05
LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 0.05
WARMUP, WARMUP_FACTOR = 4, 0.25
MILESTONES, DROP = (8, 11), 0.1


class FrozenBatchNorm2d(nn.Module):
    """Statistics and the affine part are constants."""

    def __init__(self, channels, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x):
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        bias = self.bias - self.running_mean * scale
        return x * scale.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride=1, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = norm(outputs)
        self.downsample = None
        if stride > 1:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, norm(outputs))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            x = self.downsample(x)
        return F.relu(out + x)


class Backbone(nn.Module):
    """The stem is fixed, and so are the norms of the first stage."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False)
        self.conv1.requires_grad_(False)
        self.bn1 = FrozenBatchNorm2d(16)
        self.layer1 = BasicBlock(16, 16, norm=FrozenBatchNorm2d)
        self.layer2 = BasicBlock(16, 24, stride=2)
        self.layer3 = BasicBlock(24, 32, stride=2)
        self.layer4 = BasicBlock(32, 48, stride=2)

    def forward(self, x):
        x = self.layer1(F.relu(self.bn1(self.conv1(x))))
        c3 = self.layer2(x)
        c4 = self.layer3(c3)
        c5 = self.layer4(c4)
        return c3, c4, c5


class FPN(nn.Module):
    def __init__(self, in_channels, channels):
        super().__init__()
        self.inner = nn.ModuleList([nn.Conv2d(c, channels, 1) for c in in_channels])
        self.layer = nn.ModuleList(
            [nn.Conv2d(channels, channels, 3, padding=1) for _ in in_channels]
        )
        self.extra = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, features):
        last = self.inner[-1](features[-1])
        results = [self.layer[-1](last)]
        for i in (1, 0):
            lateral = self.inner[i](features[i])
            last = lateral + F.interpolate(last, size=lateral.shape[-2:])
            results.insert(0, self.layer[i](last))
        results.append(self.extra(results[-1]))
        return results


class Head(nn.Module):
    """A tower of convolutions for all levels; ``size`` values for each anchor."""

    def __init__(self, channels, size):
        super().__init__()
        self.size = size
        layers = []
        for _ in range(2):
            layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()]
        self.conv = nn.Sequential(*layers)
        anchors = len(SCALES) * len(RATIOS)
        self.predict = nn.Conv2d(channels, anchors * size, 3, padding=1)

    def forward(self, features):
        outputs = []
        for x in features:
            x = self.predict(self.conv(x))
            outputs.append(x.permute(0, 2, 3, 1).reshape(len(x), -1, self.size))
        return torch.cat(outputs, dim=1)


class RetinaNet(nn.Module):
    def __init__(self, channels=32):
        super().__init__()
        self.backbone = Backbone()
        self.fpn = FPN((24, 32, 48), channels)
        self.classification = Head(channels, NUM_CLASSES)
        self.regression = Head(channels, 4)

    def forward(self, x):
        features = self.fpn(self.backbone(x))
        return {
            "logits": self.classification(features),
            "deltas": self.regression(features),
        }


def model():
    torch.manual_seed(1117)
    net = RetinaNet()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, (nn.BatchNorm2d, FrozenBatchNorm2d)):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 2)
            elif isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    module.bias.normal_(0, 0.1)
        for head in (net.classification, net.regression):
            head.predict.weight.mul_(0.3)
        for conv in (*net.fpn.inner, *net.fpn.layer):
            conv.weight.mul_(0.5)
        net.classification.predict.bias.sub_(math.log((1 - PRIOR) / PRIOR))
    return net.train()


def batches():
    """Patches with the patterns of their classes, on pictures of many sizes.

    What is below and to the right of a picture is filled with zeros.
    """
    generator = torch.Generator().manual_seed(1994)

    def rand(*size):
        return torch.rand(*size, generator=generator)

    rows = torch.arange(72.0)[:, None] + 0.5
    columns = torch.arange(88.0)[None, :] + 0.5
    patterns = (rows, columns, rows + columns, rows * columns / 20)
    made = []
    for counts in ((3, 0, 2, 4), (2, 5, 1), (1, 4, 3, 2)):
        images, sizes, targets = [], [], []
        for count in counts:
            height, width = 58 + int(15 * rand(1)), 66 + int(23 * rand(1))
            slope = rand(3, 1, 1) - 0.5
            image = 60 + 110 * rand(3, 1, 1) + slope * (rows + columns)
            corners, labels = [], torch.randint(0, 4, (count,), generator=generator)
            for label in labels.tolist():
                size, shape, left, top = rand(4).tolist()
                size, shape = 11 + 62 * size**1.3, 5 ** (2 * shape - 1)
                w = min(size * shape**0.5, 0.95 * width)
                h = min(size / shape**0.5, 0.95 * height)
                x1, y1 = left * (width - w), top * (height - h)
                corners.append([x1, y1, x1 + w, y1 + h])
                inside = (columns > x1) & (columns < x1 + w)
                inside = inside & (rows > y1) & (rows < y1 + h)
                colour = 255 * rand(3, 1, 1) + 50 * torch.sin(1.3 * patterns[label])
                image = torch.where(inside, colour, image)
            image = image + 10 * torch.randn(3, 72, 88, generator=generator)
            image = image.clamp(0, 255) * (rows < height) * (columns < width)
            images.append(image.to(torch.uint8))
            sizes.append([height, width])
            boxes = torch.tensor(corners).view(-1, 4)
            targets.append({"boxes": boxes, "labels": labels})
        made.append(
            {
                "image": torch.stack(images),
                "size": torch.tensor(sizes),
                "targets": targets,
            }
        )
    return made


def forward(net, batch):
    image, size = batch["image"], batch["size"]
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    rows = torch.arange(image.shape[2]) < size[:, :1]
    columns = torch.arange(image.shape[3]) < size[:, 1:]
    inside = (rows[:, :, None] & columns[:, None]).unsqueeze(1)
    return net(((image - mean) / std).masked_fill(~inside, 0.0))


def make_anchors(height, width):
    """(anchors, 4): left, top, right, bottom; of a cell, all scales of each ratio."""
    every = []
    for stride, size in zip(STRIDES, SIZES):
        roots = torch.tensor(RATIOS).sqrt()
        sides = size * torch.tensor(SCALES)
        w = (sides / roots[:, None]).flatten()
        h = (sides * roots[:, None]).flatten()
        cell = torch.stack([-w, -h, w, h], dim=1) / 2
        x = (torch.arange(math.ceil(width / stride)) + 0.5) * stride
        y = (torch.arange(math.ceil(height / stride)) + 0.5) * stride
        y, x = torch.meshgrid(y, x, indexing="ij")
        shift = torch.stack([x, y, x, y], dim=-1).view(-1, 1, 4)
        every.append((shift + cell).view(-1, 4))
    return torch.cat(every)


def box_iou(a, b):
    low = torch.max(a[:, None, :2], b[:, :2])
    high = torch.min(a[:, None, 2:], b[:, 2:])
    inter = (high - low).clamp(min=0).prod(dim=2)
    area_a = (a[:, 2:] - a[:, :2]).prod(dim=1)
    area_b = (b[:, 2:] - b[:, :2]).prod(dim=1)
    return inter / (area_a[:, None] + area_b - inter)


def match(boxes, anchors, inside):
    """Number of each anchor's box; each box has at least the anchor that fits it best."""
    if len(boxes) == 0:
        matched = torch.full((len(anchors),), BACKGROUND)
    else:
        iou = box_iou(boxes, anchors).masked_fill(~inside, 0.0)
        best, matched = iou.max(dim=0)
        matched[best < FG_IOU] = IGNORED
        matched[best < BG_IOU] = BACKGROUND
        matched[iou.argmax(dim=1)] = torch.arange(len(boxes))
    matched[~inside] = IGNORED
    return matched


def encode(boxes, anchors):
    size, anchor_size = boxes[:, 2:] - boxes[:, :2], anchors[:, 2:] - anchors[:, :2]
    centre, anchor_centre = boxes[:, :2] + size / 2, anchors[:, :2] + anchor_size / 2
    shift = (centre - anchor_centre) / anchor_size
    codes = torch.cat([shift, torch.log(size / anchor_size)], dim=1)
    return codes * torch.tensor(CODE_WEIGHTS)


def focal_loss(logits, targets):
    p = torch.sigmoid(logits)
    ce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    alpha_t = ALPHA * targets + (1 - ALPHA) * (1 - targets)
    return (alpha_t * (1 - p_t) ** GAMMA * ce).sum()


def loss(output, batch):
    anchors = make_anchors(*batch["image"].shape[2:])
    centre = (anchors[:, :2] + anchors[:, 2:]) / 2
    cls_loss, box_loss = torch.zeros(()), torch.zeros(())
    num_foreground = 0
    for logits, deltas, size, target in zip(
        output["logits"], output["deltas"], batch["size"], batch["targets"]
    ):
        inside = (centre < size.flip(0)).all(dim=1)
        matched = match(target["boxes"], anchors, inside)
        foreground, counts = matched >= 0, matched != IGNORED
        matched = matched[foreground]

        classes = torch.zeros_like(logits)
        classes[foreground, target["labels"][matched]] = 1.0
        cls_loss = cls_loss + focal_loss(logits[counts], classes[counts])

        codes = encode(target["boxes"][matched], anchors[foreground])
        box_loss = box_loss + F.smooth_l1_loss(
            deltas[foreground], codes, beta=BETA, reduction="sum"
        )
        num_foreground += int(foreground.sum())
    return (cls_loss + BOX_WEIGHT * box_loss) / max(num_foreground, 1)


class WarmupSGD(torch.optim.SGD):
    """The rate warms up and falls in steps."""

    iteration = 0

    def rate(self):
        if self.iteration < WARMUP:
            done = self.iteration / WARMUP
            return LR * (WARMUP_FACTOR + (1 - WARMUP_FACTOR) * done)
        return LR * DROP ** sum(self.iteration >= m for m in MILESTONES)

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = self.rate()
        self.iteration += 1
        return super().step(closure)


def optimizer(net):
    """Norms and biases do not decay."""
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    return WarmupSGD(groups, lr=LR, momentum=MOMENTUM)
