"""A small SSD: boxes of four scales on VGG-like features, with hard negative mining."""

import math

import torch
from torch import nn
from torch.nn import functional as F

HEIGHT, WIDTH = 76, 100
MEAN, SCALE = (123.0, 117.0, 104.0), 1 / 64
NUM_CLASSES = 5  # with the background, which is 0
MAPS = ((10, 13), (5, 7), (3, 4), (1, 2))
STEPS = (8, 16, 32, 64)
MIN_SIZES, MAX_SIZES = (14, 26, 42, 60), (26, 42, 60, 84)
ASPECT_RATIOS = ((2,), (2, 3), (2, 3), (2,))
VARIANCES = (0.1, 0.2)
THRESHOLD, NEG_POS_RATIO, LOC_WEIGHT = 0.5, 3, 1.5
LR, MOMENTUM, WEIGHT_DECAY, MAX_NORM = 0.04, 0.9, 0.02, 4.0
WARMUP, WARMUP_FACTOR = 2, 0.25
MILESTONES, GAMMA = (8, 11), 0.1


class L2Norm(nn.Module):
    """Features of length one at each place, times a learned scale."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.full((channels,), 20.0))

    def forward(self, x):
        norm = (x.pow(2).sum(dim=1, keepdim=True) + 1e-10).sqrt()
        return self.weight.view(1, -1, 1, 1) * (x / norm)


def conv_relu(in_channels, out_channels, kernel_size=3, padding=1, **options):
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, padding=padding, **options)
    return [conv, nn.ReLU()]


class SSD(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower = nn.Sequential(
            *conv_relu(3, 8),
            *conv_relu(8, 8),
            nn.MaxPool2d(2),
            *conv_relu(8, 12),
            *conv_relu(12, 12),
            nn.MaxPool2d(2),
            *conv_relu(12, 16),
            *conv_relu(16, 16),
            nn.MaxPool2d(2, ceil_mode=True),
            *conv_relu(16, 20),
            *conv_relu(20, 20),
        )
        self.l2_norm = L2Norm(20)
        self.upper = nn.Sequential(
            nn.MaxPool2d(2, ceil_mode=True),
            *conv_relu(20, 20),
            nn.MaxPool2d(3, stride=1, padding=1),
            *conv_relu(20, 24, padding=2, dilation=2),
            *conv_relu(24, 24, kernel_size=1, padding=0),
        )
        self.extra1 = nn.Sequential(
            *conv_relu(24, 12, kernel_size=1, padding=0),
            *conv_relu(12, 20, stride=2),
        )
        self.extra2 = nn.Sequential(
            *conv_relu(20, 10, kernel_size=1, padding=0),
            *conv_relu(10, 16, padding=0),
        )
        self.loc, self.conf = nn.ModuleList(), nn.ModuleList()
        for channels, ratios in zip((20, 24, 20, 16), ASPECT_RATIOS):
            boxes = 2 + 2 * len(ratios)
            self.loc.append(nn.Conv2d(channels, boxes * 4, 3, padding=1))
            self.conf.append(nn.Conv2d(channels, boxes * NUM_CLASSES, 3, padding=1))

    def forward(self, x):
        sources = []
        x = self.lower(x)
        sources.append(self.l2_norm(x))
        for part in (self.upper, self.extra1, self.extra2):
            x = part(x)
            sources.append(x)

        loc, conf = [], []
        for source, loc_head, conf_head in zip(sources, self.loc, self.conf):
            loc.append(loc_head(source).permute(0, 2, 3, 1).flatten(1))
            conf.append(conf_head(source).permute(0, 2, 3, 1).flatten(1))
        return {
            "loc": torch.cat(loc, dim=1).view(len(x), -1, 4),
            "conf": torch.cat(conf, dim=1).view(len(x), -1, NUM_CLASSES),
        }


def prior_boxes():
    """(boxes, 4): centre, width and height in parts of the picture."""
    every = []
    for (rows, columns), step, low, high, ratios in zip(
        MAPS, STEPS, MIN_SIZES, MAX_SIZES, ASPECT_RATIOS
    ):
        sizes = [(low, low), (math.sqrt(low * high), math.sqrt(low * high))]
        for ratio in ratios:
            root = math.sqrt(ratio)
            sizes += [(low * root, low / root), (low / root, low * root)]
        size = torch.tensor(sizes).expand(rows, columns, -1, -1)
        cy = (torch.arange(rows) + 0.5) * step
        cx = (torch.arange(columns) + 0.5) * step
        cy, cx = torch.meshgrid(cy, cx, indexing="ij")
        centre = torch.stack([cx, cy], dim=-1).unsqueeze(2).expand_as(size)
        every.append(torch.cat([centre, size], dim=-1).view(-1, 4))
    return torch.cat(every) / torch.tensor([WIDTH, HEIGHT, WIDTH, HEIGHT])


def corners(boxes):
    """Centre and size -> left, top, right, bottom."""
    return torch.cat(
        [boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], dim=1
    )


def jaccard(a, b):
    """Overlap of each box of a with each of b, both as corners."""
    low = torch.max(a[:, None, :2], b[None, :, :2])
    high = torch.min(a[:, None, 2:], b[None, :, 2:])
    inter = (high - low).clamp(min=0).prod(dim=2)
    area_a = (a[:, 2:] - a[:, :2]).prod(dim=1)
    area_b = (b[:, 2:] - b[:, :2]).prod(dim=1)
    return inter / (area_a[:, None] + area_b[None] - inter)


def encode(truths, priors):
    centre = (truths[:, :2] + truths[:, 2:]) / 2 - priors[:, :2]
    centre = centre / (VARIANCES[0] * priors[:, 2:])
    size = torch.log((truths[:, 2:] - truths[:, :2]) / priors[:, 2:]) / VARIANCES[1]
    return torch.cat([centre, size], dim=1)


def match(truths, labels, priors):
    """Offsets and class of each prior; each truth gets the prior that fits it best."""
    if len(truths) == 0:
        return torch.zeros_like(priors), torch.zeros(len(priors), dtype=torch.long)
    overlaps = jaccard(truths, corners(priors))
    best_overlap, best_truth = overlaps.max(dim=0)
    best_prior = overlaps.argmax(dim=1)
    best_overlap[best_prior] = 2.0
    best_truth[best_prior] = torch.arange(len(truths))
    conf = labels[best_truth]
    conf[best_overlap < THRESHOLD] = 0
    return encode(truths[best_truth], priors), conf


def model():
    torch.manual_seed(1625)
    net = SSD()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.startswith("l2_norm"):
                p.uniform_(3, 8)
            elif name.endswith("bias"):
                p.normal_(0, 0.2)
            elif name.startswith(("loc", "conf")):
                nn.init.xavier_uniform_(p)
            else:
                nn.init.kaiming_normal_(p, nonlinearity="relu")
    return net


def batches():
    """Discs and blocks in the colours of their classes before a sky with noise."""
    generator = torch.Generator().manual_seed(1652)

    def rand(*size):
        return torch.rand(*size, generator=generator)

    colours = torch.tensor(
        [[220, 60, 40], [50, 200, 90], [40, 70, 230], [230, 210, 60]]
    )
    down = (torch.arange(76.0)[:, None] + 0.5) / 76
    across = (torch.arange(100.0)[None, :] + 0.5) / 100
    made = []
    for counts in ((3, 0, 2, 4), (2, 3, 1), (1, 4, 0, 3)):
        images, targets = [], []
        for count in counts:
            top, slope = rand(2, 3, 1, 1)
            image = 60 + 90 * top + 80 * (slope - 0.5) * (down + 0.5 * across)
            image = image.expand(3, 76, 100)
            size = 0.16 + 0.7 * rand(count, 2) ** 1.5
            start = (1 - size) * rand(count, 2)
            boxes = torch.cat([start, start + size], dim=1)
            labels = torch.randint(1, 5, (count,), generator=generator)
            for (x1, y1, x2, y2), label in zip(boxes.tolist(), labels.tolist()):
                u = (2 * across - x1 - x2) / (x2 - x1)
                v = (2 * down - y1 - y2) / (y2 - y1)
                power = 2 if label % 2 else 10
                inside = u.abs() ** power + v.abs() ** power < 1
                image = torch.where(inside, colours[label - 1].view(3, 1, 1), image)
            image = image + 12 * torch.randn(3, 76, 100, generator=generator)
            images.append(image.clamp(0, 255).to(torch.uint8))
            targets.append({"boxes": boxes, "labels": labels})
        mirror = rand(len(counts)) < 0.5
        made.append(
            {"image": torch.stack(images), "targets": targets, "mirror": mirror}
        )
    return made


def forward(net, batch):
    mean = torch.tensor(MEAN).view(3, 1, 1)
    image = (batch["image"].float() - mean) * SCALE
    mirror = batch["mirror"].view(-1, 1, 1, 1)
    return net(torch.where(mirror, image.flip(3), image))


def loss(output, batch):
    loc, conf = output["loc"], output["conf"]
    priors = prior_boxes()
    matches = []
    for target, mirror in zip(batch["targets"], batch["mirror"]):
        boxes = target["boxes"]
        if mirror:
            left, top, right, bottom = boxes.unbind(1)
            boxes = torch.stack([1 - right, top, 1 - left, bottom], dim=1)
        matches.append(match(boxes, target["labels"], priors))
    loc_t = torch.stack([offsets for offsets, _ in matches])
    conf_t = torch.stack([classes for _, classes in matches])

    pos = conf_t > 0
    loss_l = F.smooth_l1_loss(loc[pos], loc_t[pos], reduction="sum")

    entropy = F.cross_entropy(conf.transpose(1, 2), conf_t, reduction="none")
    hardest = entropy.detach().masked_fill(pos, -math.inf)
    rank = hardest.argsort(dim=1, descending=True).argsort(dim=1)
    neg = rank < NEG_POS_RATIO * pos.sum(dim=1, keepdim=True)
    loss_c = entropy[pos | neg].sum()

    return (LOC_WEIGHT * loss_l + loss_c) / pos.sum().clamp(min=1)


class ScheduledSGD(torch.optim.SGD):
    """Clips by norm; the rate warms up and falls in steps."""

    iteration = 0

    def rate(self):
        if self.iteration < WARMUP:
            done = self.iteration / WARMUP
            return LR * (WARMUP_FACTOR + (1 - WARMUP_FACTOR) * done)
        return LR * GAMMA ** sum(self.iteration >= m for m in MILESTONES)

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = self.rate() * group["lr_mult"]
        self.iteration += 1
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        return super().step(closure)


def optimizer(net):
    """Biases learn twice as fast and do not decay."""
    named = list(net.named_parameters())
    biases = [p for name, p in named if name.endswith("bias")]
    others = [p for name, p in named if not name.endswith("bias")]
    groups = [
        {"params": biases, "lr_mult": 2.0, "weight_decay": 0.0},
        {"params": others, "lr_mult": 1.0},
    ]
    return ScheduledSGD(groups, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
