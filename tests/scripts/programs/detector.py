# Boxes without anchors: coloured rectangles on noise, found by a small FCOS with two levels.
# The backbone comes from a classifier that saw BGR images and was saved channels last.
import argparse
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int, default=3)
flags.add_argument("--size", type=int, default=32)
flags.add_argument("--images", type=int, default=64)
flags.add_argument("--micro", type=int, default=4)
flags.add_argument("--accumulate", type=int, default=2)
flags.add_argument("--steps", type=int, default=3)
flags.add_argument("--width", type=int, default=16)
flags.add_argument("--lr", type=float, default=0.04)
flags.add_argument("--momentum", type=float, default=0.9)
flags.add_argument("--decay", type=float, default=0.05)
flags.add_argument("--warmup", type=int, default=2)
flags.add_argument("--total", type=int, default=12)
flags.add_argument("--ema", type=float, default=0.9)
flags.add_argument("--prior", type=float, default=0.05)
args = flags.parse_args([])

CLASSES = 3
STRIDES = (4, 8)
RANGES = ((0.0, 7.0), (7.0, math.inf))  # longest distance to a side, by level
ALPHA, GAMMA = 0.25, 2.0


# ---- images


def paint(rng):
    """An image in 0..255 (RGB), its boxes as x0, y0, x1, y1, and their classes."""
    size = args.size
    image = 90 + 25 * torch.randn(3, size, size, generator=rng)
    count = int(torch.randint(1, 4, (), generator=rng))
    boxes, labels = [], []
    for _ in range(count):
        w, h = torch.randint(6, 20, (2,), generator=rng).tolist()
        x = int(torch.randint(0, size - w + 1, (), generator=rng))
        y = int(torch.randint(0, size - h + 1, (), generator=rng))
        label = int(torch.randint(CLASSES, (), generator=rng))
        image[:, y : y + h, x : x + w] *= 0.5
        image[label, y : y + h, x : x + w] += 110
        boxes.append([x, y, x + w, y + h])
        labels.append(label)
    return image.clamp(0, 255), torch.tensor(boxes).float(), torch.tensor(labels)


def mirror(image, boxes):
    """Left and right exchanged, of the boxes too."""
    x0, y0, x1, y1 = boxes.unbind(1)
    return image.flip(2), torch.stack([args.size - x1, y0, args.size - x0, y1], 1)


def batches(data, rng):
    """Endless micro-batches of shuffled images, one half of them mirrored."""
    while True:
        order = torch.randperm(len(data), generator=rng)
        for rows in order.split(args.micro):
            batch = []
            for i in rows.tolist():
                image, boxes, labels = data[i]
                if torch.rand((), generator=rng) < 0.5:
                    image, boxes = mirror(image, boxes)
                batch.append((image, boxes, labels))
            yield batch


def grid(level):
    """Middles of the cells of a level, as x and y in pixels, row by row."""
    stride = STRIDES[level]
    ticks = (torch.arange(args.size // stride) + 0.5) * stride
    y, x = torch.meshgrid(ticks, ticks, indexing="ij")
    return torch.stack([x.flatten(), y.flatten()], 1)


def assign(boxes, labels, points, ranges):
    """For each point its class (CLASSES is background) and distances to the sides.

    A point belongs to the smallest of the boxes around it that its level is to find.
    """
    x, y = points[:, None, 0], points[:, None, 1]
    sides = [x - boxes[:, 0], y - boxes[:, 1], boxes[:, 2] - x, boxes[:, 3] - y]
    sides = torch.stack(sides, -1)
    far = sides.amax(-1)
    fits = (sides.amin(-1) > 0) & (far > ranges[:, :1]) & (far <= ranges[:, 1:])
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    cost = torch.where(fits, area, math.inf)
    least, owner = cost.min(1)
    classes = torch.where(least < math.inf, labels[owner], CLASSES)
    return classes, sides[torch.arange(len(points)), owner]


# ---- losses


class Focal(torch.autograd.Function):
    """Sum of the sigmoid focal loss, with the gradient written out."""

    @staticmethod
    def forward(ctx, logit, target):
        sign = 2 * target - 1
        weight = ALPHA * target + (1 - ALPHA) * (1 - target)
        logp = F.logsigmoid(sign * logit)
        miss = 1 - logp.exp()
        ctx.save_for_backward(logp, miss, weight, sign)
        return -(weight * miss**GAMMA * logp).sum()

    @staticmethod
    def backward(ctx, grad):
        logp, miss, weight, sign = ctx.saved_tensors
        slope = GAMMA * (1 - miss) * logp - miss
        return grad * sign * weight * miss**GAMMA * slope, None


def giou_loss(told, true):
    """One minus the generalised overlap of boxes around the same points."""
    inter = torch.minimum(told, true)
    outer = torch.maximum(told, true)
    both = area_of(inter)
    union = area_of(told) + area_of(true) - both
    hull = area_of(outer)
    return 1 - both / union + (hull - union) / hull


def area_of(sides):
    left, top, right, bottom = sides.unbind(-1)
    return (left + right) * (top + bottom)


def centreness(sides):
    across, along = sides[:, [0, 2]], sides[:, [1, 3]]
    ratio = across.amin(1) / across.amax(1) * (along.amin(1) / along.amax(1))
    return ratio.sqrt()


def criterion(classes, sides, centre, wanted, true):
    """Focal loss of all points; overlap and centreness of those within a box."""
    onehot = F.one_hot(wanted, CLASSES + 1)[..., :CLASSES].float()
    inside = wanted < CLASSES
    many = inside.sum().clamp(min=1)
    focal = Focal.apply(classes, onehot) / many
    middle = centreness(true[inside])
    overlap = (giou_loss(sides[inside], true[inside]) * middle).sum() / middle.sum()
    central = F.binary_cross_entropy_with_logits(centre[inside], middle)
    return focal + overlap + central


# ---- network


def conv(a, b, stride=1):
    parts = [nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.GroupNorm(4, b), nn.ReLU()]
    return nn.Sequential(*parts)


class Detector(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("pixel_mean", torch.zeros(3, 1, 1))
        self.register_buffer("pixel_std", torch.ones(3, 1, 1))
        self.stem = conv(3, width, 2)
        self.c2 = conv(width, width, 2)
        self.c3 = conv(width, 2 * width, 2)
        self.lateral2 = nn.Conv2d(width, width, 1)
        self.lateral3 = nn.Conv2d(2 * width, width, 1)
        self.smooth = nn.Conv2d(width, width, 3, padding=1)
        self.tower_class = conv(width, width)
        self.tower_box = conv(width, width)
        self.classes = nn.Conv2d(width, CLASSES, 3, padding=1)
        self.sides = nn.Conv2d(width, 4, 3, padding=1)
        self.centre = nn.Conv2d(width, 1, 3, padding=1)
        self.level_scale = nn.Parameter(torch.ones(len(STRIDES)))

    def pyramid(self, image):
        x = self.stem((image - self.pixel_mean) / self.pixel_std)
        fine = self.c2(x)
        coarse = self.c3(fine)
        top = self.lateral3(coarse)
        up = F.interpolate(top, scale_factor=2, mode="nearest")
        return self.smooth(self.lateral2(fine) + up), top

    def forward(self, image):
        told = []
        for level, features in enumerate(self.pyramid(image)):
            h = self.tower_class(features)
            g = self.tower_box(features)
            sides = (self.level_scale[level] * self.sides(g)).exp() * STRIDES[level]
            outs = (self.classes(h), sides, self.centre(g))
            told.append([out.flatten(2).transpose(1, 2) for out in outs])
        classes, sides, centre = (torch.cat(parts, 1) for parts in zip(*told))
        return classes, sides, centre.squeeze(2)


def classifier(width):
    """What the classifier was saved as: kernels [height, width, in, out], pixels in 0..1."""
    rng = torch.Generator().manual_seed(77)
    saved = {
        "mean": [0.36, 0.40, 0.43],
        "var": [0.040, 0.052, 0.068],
    }  # blue, green, red
    for name, a, b in (
        ("stem", 3, width),
        ("c2", width, width),
        ("c3", width, 2 * width),
    ):
        saved[name] = torch.randn(3, 3, a, b, generator=rng) * (2 / (9 * a)) ** 0.5
        saved[f"{name}/gain"] = 1 + 0.2 * torch.randn(b, generator=rng)
    return saved


@torch.no_grad()
def load_backbone(net, saved):
    for name in ("stem", "c2", "c3"):
        kernel = saved[name]
        if name == "stem":
            kernel = kernel.flip(2)
        block = getattr(net, name)
        block[0].weight.copy_(kernel.permute(3, 2, 0, 1))
        block[1].weight.copy_(saved[f"{name}/gain"])
    mean, var = torch.tensor(saved["mean"]), torch.tensor(saved["var"])
    net.pixel_mean.copy_(255 * mean.flip(0).view(3, 1, 1))
    net.pixel_std.copy_(255 * var.flip(0).sqrt().view(3, 1, 1))
    net.classes.bias.fill_(-math.log((1 - args.prior) / args.prior))


def rate(step):
    """Linear warm-up, then half a cosine."""
    if step < args.warmup:
        return (step + 1) / (args.warmup + 1)
    return 0.5 * (
        1 + math.cos(math.pi * (step - args.warmup) / (args.total - args.warmup))
    )


@torch.no_grad()
def follow(average, net):
    for ours, theirs in zip(average.parameters(), net.parameters()):
        ours.mul_(args.ema).add_(theirs, alpha=1 - args.ema)


torch.manual_seed(args.seed)
rng = torch.Generator().manual_seed(args.seed)
data = [paint(rng) for _ in range(args.images)]
stream = batches(data, rng)
points = torch.cat([grid(level) for level in range(len(STRIDES))])
per_level = torch.tensor([(args.size // s) ** 2 for s in STRIDES])
ranges = torch.tensor(RANGES).repeat_interleave(per_level, 0)

net = Detector(args.width)
load_backbone(net, classifier(args.width))
average = copy.deepcopy(net).requires_grad_(False)
decayed = [p for p in net.parameters() if p.ndim > 1]
plain = [p for p in net.parameters() if p.ndim <= 1]
groups = [{"params": decayed, "weight_decay": args.decay}, {"params": plain}]
opt = torch.optim.SGD(groups, lr=args.lr, momentum=args.momentum, nesterov=True)
sched = torch.optim.lr_scheduler.LambdaLR(opt, rate)
for step in range(args.steps):
    opt.zero_grad()
    seen = 0.0
    for _ in range(args.accumulate):
        images, boxes, labels = zip(*next(stream))
        pairs = [assign(b, k, points, ranges) for b, k in zip(boxes, labels)]
        wanted, true = (torch.stack(part) for part in zip(*pairs))
        loss = criterion(*net(torch.stack(images)), wanted, true) / args.accumulate
        loss.backward()
        seen += loss.item()
    opt.step()
    sched.step()
    follow(average, net)
    print(f"step {step} loss {seen:.5f} rate {sched.get_last_lr()[0]:.4f}")
