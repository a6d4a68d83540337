"""A small FCOS: boxes from places, without anchors, and how central each place is."""

import math

import torch
from torch import nn
from torch.nn import functional as F

MEAN, STD = (122.8, 115.9, 101.4), (59.3, 56.7, 60.2)
NUM_CLASSES = 5
STRIDES = (8, 16, 32, 64)
RANGES = ((0.0, 26.0), (26.0, 42.0), (42.0, 58.0), (58.0, math.inf))
RADIUS = 1.5
WIDTH, GROUPS, TOWER = 32, 4, 2
ALPHA, GAMMA, BOX_WEIGHT = 0.25, 2.0, 1.5
PRIOR = 0.04
LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 0.02
BIAS_LR_FACTOR, WARMUP, WARMUP_FACTOR = 2.0, 2, 1 / 3


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
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = FrozenBatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = FrozenBatchNorm2d(outputs)
        self.downsample = None
        if inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, FrozenBatchNorm2d(outputs))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            x = self.downsample(x)
        return F.relu(out + x)


class Backbone(nn.Module):
    """The stem is fixed."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 5, stride=2, padding=2, bias=False)
        self.conv1.requires_grad_(False)
        self.bn1 = FrozenBatchNorm2d(12)
        self.layer1 = nn.Sequential(BasicBlock(12, 16))
        self.layer2 = nn.Sequential(BasicBlock(16, 24, stride=2), BasicBlock(24, 24))
        self.layer3 = nn.Sequential(BasicBlock(24, 40, stride=2))

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        c3 = self.layer2(self.layer1(x))
        c4 = self.layer3(c3)
        return c3, c4


class FPN(nn.Module):
    """Two maps of the backbone and two coarser ones."""

    def __init__(self):
        super().__init__()
        self.lateral3 = nn.Conv2d(24, WIDTH, 1)
        self.lateral4 = nn.Conv2d(40, WIDTH, 1)
        self.output3 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.output4 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.p5 = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.p6 = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1)

    def forward(self, features):
        c3, c4 = features
        m4 = self.lateral4(c4)
        m3 = self.lateral3(c3) + F.interpolate(m4, size=c3.shape[-2:], mode="nearest")
        p3, p4 = self.output3(m3), self.output4(m4)
        p5 = self.p5(p4)
        p6 = self.p6(F.relu(p5))
        return p3, p4, p5, p6


def tower():
    layers = []
    for _ in range(TOWER):
        conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        layers += [conv, nn.GroupNorm(GROUPS, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


class Head(nn.Module):
    """The same for all levels but for a scale of each."""

    def __init__(self):
        super().__init__()
        self.cls_tower = tower()
        self.bbox_tower = tower()
        self.cls_logits = nn.Conv2d(WIDTH, NUM_CLASSES, 3, padding=1)
        self.bbox_pred = nn.Conv2d(WIDTH, 4, 3, padding=1)
        self.centerness = nn.Conv2d(WIDTH, 1, 3, padding=1)
        self.scales = nn.Parameter(torch.ones(len(STRIDES)))

    def forward(self, features):
        logits, distances, centerness = [], [], []
        for level, (x, stride) in enumerate(zip(features, STRIDES)):
            cls, box = self.cls_tower(x), self.bbox_tower(x)
            logits.append(self.cls_logits(cls).flatten(2))
            reg = torch.exp(self.scales[level] * self.bbox_pred(box))
            distances.append((stride * reg).flatten(2))
            centerness.append(self.centerness(box).flatten(1))
        return {
            "logits": torch.cat(logits, dim=2).transpose(1, 2),
            "distances": torch.cat(distances, dim=2).transpose(1, 2),
            "centerness": torch.cat(centerness, dim=1),
        }


class FCOS(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.fpn = FPN()
        self.head = Head()

    def forward(self, x):
        return self.head(self.fpn(self.backbone(x)))


def model():
    torch.manual_seed(1904)
    net = FCOS()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, FrozenBatchNorm2d):
                module.weight.uniform_(0.5, 1.2)
                module.bias.normal_(0, 0.2)
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.4, 1.6)
            elif isinstance(module, nn.GroupNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    module.bias.normal_(0, 0.1)
        fpn, head = net.fpn, net.head
        for conv in (fpn.lateral3, fpn.lateral4, fpn.output3, fpn.output4):
            conv.weight.mul_(0.6)
        for layer in (*head.cls_tower, *head.bbox_tower):
            if isinstance(layer, nn.Conv2d):
                layer.weight.mul_(0.3)
        for conv in (head.cls_logits, head.bbox_pred, head.centerness):
            conv.weight.mul_(0.3)
        head.cls_logits.bias.sub_(math.log((1 - PRIOR) / PRIOR))
        head.bbox_pred.bias.add_(1.0)
        head.scales.copy_(torch.tensor([0.8, 1.15, 0.95, 1.25]))
    return net


def batches():
    """Striped things of all sizes, some over others, on pictures of many sizes.

    What is below and to the right of a picture is filled with zeros.
    """
    generator = torch.Generator().manual_seed(1905)

    def rand(*size):
        return torch.rand(*size, generator=generator)

    made = []
    for counts, height, width in (((4, 6), 88, 136), ((5, 0, 3), 104, 152)):
        rows, columns = torch.arange(height)[:, None], torch.arange(width)
        images, sizes = [], []
        boxes = torch.zeros(len(counts), max(counts), 4)
        labels = torch.full((len(counts), max(counts)), -1)
        for i, count in enumerate(counts):
            h, w = height - int(15 * rand(1)), width - int(30 * rand(1))
            image = 50 + 120 * rand(3, 1, 1) + (rand(3, 1, 1) - 0.5) * (rows + columns)
            # The large ones lie below the small ones.
            for j in range(count):
                size = min(h, w) * (0.95 - 0.8 * (j + float(rand(1))) / count)
                tall, left, top = rand(3).tolist()
                dh = min(size * (0.6 + 0.9 * tall), 0.95 * h)
                dw = min(size * (1.5 - 0.9 * tall), 0.95 * w)
                x1, y1 = left * (w - dw), top * (h - dh)
                label = int(5 * rand(1))
                boxes[i, j] = torch.tensor([x1, y1, x1 + dw, y1 + dh])
                labels[i, j] = label
                inside = (columns > x1) & (columns < x1 + dw)
                inside = inside & (rows > y1) & (rows < y1 + dh)
                angle = torch.tensor(0.6 * label)
                place = columns * angle.cos() + rows * angle.sin()
                colour = 220 * rand(3, 1, 1) + 45 * torch.sin(
                    place * (0.5 + 0.2 * label)
                )
                image = torch.where(inside, colour, image)
            image = image + 12 * torch.randn(3, height, width, generator=generator)
            image = image.clamp(0, 255) * (rows < h) * (columns < w)
            images.append(image.to(torch.uint8))
            sizes.append([h, w])
        made.append(
            {
                "image": torch.stack(images),
                "size": torch.tensor(sizes),
                "boxes": boxes,
                "labels": labels,
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


def make_places(height, width):
    """Middles of the cells [places, 2], their strides, and the sizes they stand for."""
    places, strides, ranges = [], [], []
    for stride, limits in zip(STRIDES, RANGES):
        x = (torch.arange(math.ceil(width / stride)) + 0.5) * stride
        y = (torch.arange(math.ceil(height / stride)) + 0.5) * stride
        y, x = torch.meshgrid(y, x, indexing="ij")
        places.append(torch.stack([x, y], dim=-1).view(-1, 2))
        strides.append(torch.full((x.numel(),), float(stride)))
        ranges.append(torch.tensor(limits).expand(x.numel(), 2))
    return torch.cat(places), torch.cat(strides), torch.cat(ranges)


def assign(boxes, places, strides, ranges):
    """The box of each place, or -1; the smallest where there are several."""
    if len(boxes) == 0:
        return torch.full((len(places),), -1)
    low = places[:, None] - boxes[:, :2]
    high = boxes[:, 2:] - places[:, None]
    largest = torch.cat([low, high], dim=2).amax(dim=2)
    fits = (largest >= ranges[:, :1]) & (largest <= ranges[:, 1:])
    centre = (boxes[:, :2] + boxes[:, 2:]) / 2
    reach = (RADIUS * strides)[:, None, None]
    start = torch.maximum(centre - reach, boxes[:, :2])
    end = torch.minimum(centre + reach, boxes[:, 2:])
    places = places[:, None]
    central = ((places > start) & (places < end)).all(dim=2)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1).expand(len(places), -1)
    area, matched = area.masked_fill(~(fits & central), math.inf).min(dim=1)
    return matched.masked_fill(area == math.inf, -1)


def focal_loss(logits, targets):
    p = torch.sigmoid(logits)
    ce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    alpha_t = ALPHA * targets + (1 - ALPHA) * (1 - targets)
    return (alpha_t * (1 - p_t) ** GAMMA * ce).sum()


def giou_loss(a, b, weight):
    inter = torch.minimum(a[:, 2:], b[:, 2:]) - torch.maximum(a[:, :2], b[:, :2])
    inter = inter.clamp(min=0).prod(dim=1)
    area_a = (a[:, 2:] - a[:, :2]).prod(dim=1)
    area_b = (b[:, 2:] - b[:, :2]).prod(dim=1)
    union = area_a + area_b - inter
    hull = torch.maximum(a[:, 2:], b[:, 2:]) - torch.minimum(a[:, :2], b[:, :2])
    hull = hull.prod(dim=1)
    giou = inter / union - (hull - union) / hull
    return ((1 - giou) * weight).sum()


def centerness_of(distances):
    sides = torch.stack([distances[:, [0, 2]], distances[:, [1, 3]]], dim=1)
    return (sides.amin(dim=2) / sides.amax(dim=2)).prod(dim=1).sqrt()


def loss(output, batch):
    places, strides, ranges = make_places(*batch["image"].shape[2:])
    cls_loss, box_loss, centre_loss = torch.zeros(3)
    num_foreground = 0
    for i, (boxes, labels) in enumerate(zip(batch["boxes"], batch["labels"])):
        boxes, labels = boxes[labels >= 0], labels[labels >= 0]
        matched = assign(boxes, places, strides, ranges)
        foreground = matched >= 0
        matched, spots = matched[foreground], places[foreground]

        classes = torch.zeros_like(output["logits"][i])
        classes[foreground, labels[matched]] = 1.0
        cls_loss = cls_loss + focal_loss(output["logits"][i], classes)

        target = boxes[matched]
        distances = torch.cat([spots - target[:, :2], target[:, 2:] - spots], dim=1)
        central = centerness_of(distances)
        low, high = output["distances"][i, foreground].split(2, dim=1)
        pred = torch.cat([spots - low, spots + high], dim=1)
        box_loss = box_loss + giou_loss(pred, target, central)

        centre_loss = centre_loss + F.binary_cross_entropy_with_logits(
            output["centerness"][i, foreground], central, reduction="sum"
        )
        num_foreground += int(foreground.sum())
    total = cls_loss + BOX_WEIGHT * box_loss + centre_loss
    return total / max(num_foreground, 1)


class WarmupSGD(torch.optim.SGD):
    """The rate is a part of itself at first."""

    iteration = 0

    def step(self, closure=None):
        factor = WARMUP_FACTOR if self.iteration < WARMUP else 1.0
        for group in self.param_groups:
            group["lr"] = LR * factor * group["lr_factor"]
        self.iteration += 1
        return super().step(closure)


def optimizer(net):
    """Biases learn faster and do not decay."""
    trained = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    weights = [p for n, p in trained if not n.endswith("bias")]
    biases = [p for n, p in trained if n.endswith("bias")]
    groups = [
        {"params": weights, "weight_decay": WEIGHT_DECAY, "lr_factor": 1.0},
        {"params": biases, "weight_decay": 0.0, "lr_factor": BIAS_LR_FACTOR},
    ]
    return WarmupSGD(groups, lr=LR, momentum=MOMENTUM)
