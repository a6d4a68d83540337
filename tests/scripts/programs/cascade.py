"""Organ and lesion in two stages: a coarse net, and a refiner that reads its softened answer.

The refiner's gradient reaches the coarse net from the second step on. A slow copy of both
looks at the same crops with other noise, and the two have to agree more and more.
"""

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    seed: int = 5
    images: int = 20
    side: int = 32
    crop: int = 24
    batch: int = 5
    steps: int = 3
    width: int = 12
    classes: int = 3
    temperature: float = 2.0
    frozen: int = 1  # steps in which the coarse net hears nothing of the refiner
    gamma: float = 2.0
    smooth: float = 1.0
    near: float = 3.0  # extra weight of a pixel on a boundary
    sigma: float = 2.0
    coarse: float = 0.5
    half: float = 0.3
    agree: float = 12.0
    ramp: int = 4
    noise: float = 0.3
    lr: float = 0.1
    momentum: float = 0.9
    decay: float = 0.02
    clip: float = 1.0
    total: int = 12
    power: float = 0.9
    ema: float = 0.99


cfg = Config()


# ------------------------------------------------------------------ pictures


def phantoms(n, side, rng):
    """Grey pictures of an organ with a lesion, unevenly lit, and what each pixel is."""
    ys, xs = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    images, labels = [], []
    for _ in range(n):
        cy, cx, ry, rx = torch.rand(4, generator=rng).tolist()
        cy, cx, ry, rx = 11 + 10 * cy, 11 + 10 * cx, 8 + 4 * ry, 6 + 5 * rx
        organ = ((ys - cy) / ry) ** 2 + ((xs - cx) / rx) ** 2 < 1
        dy, dx, r = torch.rand(3, generator=rng).tolist()
        away = (ys - cy - 6 * dy + 3) ** 2 + (xs - cx - 6 * dx + 3) ** 2
        lesion = (away < (2.5 + 2 * r) ** 2) & organ
        grey = 40.0 + 50.0 * organ + 30.0 * lesion + 0.6 * xs
        images.append(grey + 12.0 * torch.randn(side, side, generator=rng))
        labels.append(organ.long() + lesion.long())
    return torch.stack(images)[:, None], torch.stack(labels)


def cut_out(image, label, rng):
    """One random crop, perhaps mirrored."""
    top, left = torch.randint(cfg.side - cfg.crop + 1, (2,), generator=rng).tolist()
    image = image[:, top : top + cfg.crop, left : left + cfg.crop]
    label = label[top : top + cfg.crop, left : left + cfg.crop]
    if torch.rand((), generator=rng) < 0.5:
        image = image.flip(-1)
        label = label.flip(-1)
    return image, label


def batches(images, labels, rng):
    """Endless; a new order every time round."""
    while True:
        order = torch.randperm(len(images), generator=rng)
        for rows in order.split(cfg.batch):
            pairs = [cut_out(images[row], labels[row], rng) for row in rows]
            yield tuple(torch.stack(part) for part in zip(*pairs))


# ------------------------------------------------------------------ boundaries


def squared_distance(mask):
    """To the nearest True pixel of the same picture, one axis after the other."""
    far = float(mask.shape[1] ** 2 + mask.shape[2] ** 2)
    d = torch.where(mask, 0.0, far)
    for axis in (1, 2):
        at = torch.arange(mask.shape[axis])
        gap = (at[:, None] - at).float().square()
        rows = d.movedim(axis, -1).unsqueeze(-2)
        d = (rows + gap).amin(-1).movedim(-1, axis)
    return d


def boundary_weight(label):
    """Pixels count more, the nearer they are to a change of the label."""
    edge = torch.zeros_like(label, dtype=torch.bool)
    edge[:, :-1] |= label[:, 1:] != label[:, :-1]
    edge[:, :, :-1] |= label[:, :, 1:] != label[:, :, :-1]
    return 1.0 + cfg.near * torch.exp(-squared_distance(edge) / (2 * cfg.sigma**2))


class DiceFocal(torch.autograd.Function):
    """Focal loss, weighted by pixel and class, plus the mean of one minus soft Dice."""

    @staticmethod
    def forward(ctx, logits, target, weight, alpha):
        p = logits.softmax(1)
        weight = weight * (target * alpha[:, None, None]).sum(1)
        weight = weight / weight.sum()
        hit = (p * target).sum(1).clamp(min=1e-6)
        focal = -(weight * (1 - hit) ** cfg.gamma * hit.log()).sum()
        both = 2 * (p * target).sum((0, 2, 3)) + cfg.smooth
        size = (p + target).sum((0, 2, 3)) + cfg.smooth
        ctx.save_for_backward(p, target, weight, hit, both, size)
        return focal + (1 - both / size).mean()

    @staticmethod
    def backward(ctx, grad):
        p, target, weight, hit, both, size = ctx.saved_tensors
        miss = 1 - hit
        by_hit = cfg.gamma * miss ** (cfg.gamma - 1) * hit.log() - miss**cfg.gamma / hit
        both, size = both[:, None, None], size[:, None, None]
        by_p = (weight * by_hit)[:, None] * target
        by_p = by_p + (both - 2 * target * size) / size**2 / len(both)
        by_logits = p * (by_p - (by_p * p).sum(1, keepdim=True))
        return grad * by_logits, None, None, None


# ------------------------------------------------------------------ nets


class StdConv(nn.Conv2d):
    """Convolution whose filters have mean nought and the length one."""

    def forward(self, x):
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        size = w.square().sum((1, 2, 3), keepdim=True)
        w = w / torch.sqrt(size + 1e-5)
        return self._conv_forward(x, w, None)


class Block(nn.Module):
    def __init__(self, n_in, n_out, stride=1, dilation=1):
        super().__init__()
        self.conv = StdConv(n_in, n_out, 3, stride, dilation, dilation, bias=False)
        self.norm = nn.GroupNorm(4, n_out)

    def forward(self, x):
        return F.leaky_relu(self.norm(self.conv(x)), 0.1)


class Coarse(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 5, padding=2)
        self.down = Block(width, 2 * width, stride=2)
        self.mid = Block(2 * width, 2 * width)
        self.low_head = nn.Conv2d(2 * width, classes, 1)
        self.up = Block(3 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image):
        fine = F.leaky_relu(self.stem(image), 0.1)
        low = self.down(fine)
        low = low + self.mid(low)
        high = F.interpolate(low, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.up(torch.cat([fine, high], 1))), self.low_head(low)


class Cascade(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.coarse = Coarse(width, classes)
        self.first = Block(1 + classes, width)
        self.second = Block(width, width, dilation=2)
        self.delta = nn.Conv2d(width, classes, 1)
        self.register_buffer("alpha", torch.ones(classes))

    def forward(self, image, frozen=False):
        coarse, half = self.coarse(image)
        told = coarse.detach() if frozen else coarse
        soft = (told / cfg.temperature).softmax(1)
        h = self.first(torch.cat([image, soft], 1))
        h = h + self.second(h)
        return told + self.delta(h), coarse, half


def wavelets(n):
    """The filters of the old pipeline: [5, 5, n], by row, column, filter."""
    at = torch.arange(5.0) - 2
    y, x = torch.meshgrid(at, at, indexing="ij")
    turn = torch.arange(n) * (0.6 * math.pi / n) + 0.2
    along = x[..., None] * turn.cos() + y[..., None] * turn.sin()
    return torch.sin(1.3 * along + 0.4) * torch.exp(-(x**2 + y**2) / 5)[..., None]


@torch.no_grad()
def begin(model, labels):
    """Stem from the old pipeline, biases and class weights from how frequent classes are."""
    bank = wavelets(len(model.coarse.stem.weight))
    model.coarse.stem.weight.copy_(bank.permute(2, 0, 1)[:, None] / 2)
    share = torch.bincount(labels.flatten(), minlength=cfg.classes) / labels.numel()
    model.coarse.head.bias.copy_(share.log())
    model.coarse.low_head.bias.copy_(share.log())
    rare = share.rsqrt()
    model.alpha.copy_(rare / rare.mean())


# ------------------------------------------------------------------ training


def ramp_up(step):
    rest = 1 - min(1.0, (step + 1) / cfg.ramp)
    return cfg.agree * math.exp(-5 * rest**2)


@torch.no_grad()
def follow(teacher, model, step):
    keep = min(cfg.ema, (step + 1) / (step + 5))
    for slow, fast in zip(teacher.parameters(), model.parameters()):
        slow.mul_(keep).add_(fast, alpha=1 - keep)


def supervised(model, outputs, label):
    refined, coarse, half = outputs
    target = F.one_hot(label, cfg.classes).movedim(-1, 1).float()
    weight = boundary_weight(label)
    loss = DiceFocal.apply(refined, target, weight, model.alpha)
    loss = loss + cfg.coarse * DiceFocal.apply(coarse, target, weight, model.alpha)
    target, weight = target[:, :, ::2, ::2], weight[:, ::2, ::2]
    return loss + cfg.half * DiceFocal.apply(half, target, weight, model.alpha)


def main():
    torch.manual_seed(cfg.seed)
    rng = torch.Generator().manual_seed(cfg.seed + 1)
    images, labels = phantoms(cfg.images, cfg.side, rng)
    images = (images - images.mean()) / images.std()
    model = Cascade(cfg.width, cfg.classes)
    begin(model, labels)
    teacher = copy.deepcopy(model).requires_grad_(False)
    filters = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": filters, "weight_decay": cfg.decay}, {"params": others}]
    opt = torch.optim.SGD(groups, cfg.lr, momentum=cfg.momentum)
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda n: (1 - n / cfg.total) ** cfg.power
    )
    stream = batches(images, labels, rng)
    for step in range(cfg.steps):
        image, label = next(stream)
        ours = image + cfg.noise * torch.randn(image.shape, generator=rng)
        theirs = image + cfg.noise * torch.randn(image.shape, generator=rng)
        outputs = model(ours, frozen=step < cfg.frozen)
        with torch.no_grad():
            wanted = teacher(theirs)[0].softmax(1)
        apart = (outputs[0].softmax(1) - wanted).square().sum(1).mean()
        loss = supervised(model, outputs, label) + ramp_up(step) * apart
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        opt.step()
        sched.step()
        follow(teacher, model, step)
        print(f"{step}: loss {loss:.5f} apart {apart:.5f} norm {norm:.4f}")
    hit = (teacher(images)[0].argmax(1) == labels).float().mean()
    print(f"pixels right {hit:.4f}")


if __name__ == "__main__":
    main()
