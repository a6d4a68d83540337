"""Finds boxes in pictures: anchors on two scales are matched, focal loss, smooth distances of boxes; AMP, accumulated."""

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

SIZE, KINDS, ACCUMULATE = 32, 3, 2
STRIDES, SHAPES = (4, 8), ((1.0, 1.0), (1.4, 0.7))
NEAR, FAR = 0.6, 0.35


def anchors():
    """Return the anchors of all scales as (anchors, 4): middle, width and height."""
    boxes = []
    for stride in STRIDES:
        middle = (torch.arange(SIZE // stride) + 0.5) * stride
        y, x = torch.meshgrid(middle, middle, indexing="ij")
        for wide, high in SHAPES:
            side = torch.full_like(x, 2.0 * stride)
            boxes.append(torch.stack([x, y, side * wide, side * high], -1).reshape(-1, 4))
    return torch.cat(boxes)


def corners(boxes):
    middle, size = boxes[..., :2], boxes[..., 2:]
    return torch.cat([middle - size / 2, middle + size / 2], -1)


def overlap(left, right):
    """Return the intersection over the union of all pairs of boxes given by corners."""
    low = torch.maximum(left[:, None, :2], right[None, :, :2])
    high = torch.minimum(left[:, None, 2:], right[None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    area = [(boxes[:, 2:] - boxes[:, :2]).prod(-1) for boxes in (left, right)]
    return shared / (area[0][:, None] + area[1][None] - shared)


@torch.no_grad()
def matched(anchor, boxes, kinds):
    """Return by anchor its kind (KINDS is nothing, -1 neither) and the shift to its box."""
    share = overlap(corners(anchor), corners(boxes))
    best, which = share.max(1)
    best[share.argmax(0)] = 1.0
    which[share.argmax(0)] = torch.arange(len(boxes))
    kind = kinds[which]
    kind = torch.where(best < NEAR, -1, kind)
    kind = torch.where(best < FAR, KINDS, kind)
    box = boxes[which]
    middle = (box[:, :2] - anchor[:, :2]) / anchor[:, 2:]
    size = torch.log(box[:, 2:] / anchor[:, 2:])
    return kind, torch.cat([middle / 0.1, size / 0.2], 1)


class Head(nn.Module):
    def __init__(self, width, outputs, prior=None):
        super().__init__()
        self.tower = nn.Conv2d(width, width, 3, padding=1)
        self.leave = nn.Conv2d(width, len(SHAPES) * outputs, 1)
        self.outputs = outputs
        if prior is not None:
            nn.init.constant_(self.leave.bias, -math.log((1 - prior) / prior))

    def forward(self, x):
        y = self.leave(F.relu(self.tower(x)))
        rows, _, high, wide = y.shape
        y = y.view(rows, len(SHAPES), self.outputs, high, wide)
        return y.permute(0, 1, 3, 4, 2).reshape(rows, -1, self.outputs)


class Detector(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 5, stride=4, padding=2)
        self.norm = nn.BatchNorm2d(width)
        self.deep = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.lateral = nn.Conv2d(width, width, 1)
        self.kind = Head(width, KINDS, prior=0.05)
        self.box = Head(width, 4)

    def forward(self, picture):
        fine = F.relu(self.norm(self.stem(picture)))
        coarse = F.relu(self.deep(fine))
        raised = F.interpolate(coarse, scale_factor=2, mode="bilinear", align_corners=False)
        levels = [self.lateral(fine) + raised, coarse]
        kinds = torch.cat([self.kind(level) for level in levels], 1)
        boxes = torch.cat([self.box(level) for level in levels], 1)
        return kinds, boxes


def focal(logits, target, alpha=0.25, gamma=2.0):
    entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    chance = logits.sigmoid()
    miss = chance * (1 - target) + (1 - chance) * target
    weight = alpha * target + (1 - alpha) * (1 - target)
    return weight * miss**gamma * entropy


def loss_of(kinds, boxes, targets, anchor):
    kind_loss, box_loss, found = 0.0, 0.0, 0
    for logits, shift, (true_boxes, true_kinds) in zip(kinds.float(), boxes.float(), targets):
        kind, wanted = matched(anchor, true_boxes, true_kinds)
        judged, positive = kind >= 0, (kind >= 0) & (kind < KINDS)
        hot = F.one_hot(kind[judged], KINDS + 1)[:, :KINDS].float()
        kind_loss = kind_loss + focal(logits[judged], hot).sum()
        box_loss = box_loss + F.smooth_l1_loss(
            shift[positive], wanted[positive], beta=0.5, reduction="sum"
        )
        found += int(positive.sum())
    return kind_loss / max(found, 1), box_loss / max(4 * found, 1)


def scene(number):
    g = torch.Generator().manual_seed(2000 + number)
    count = 1 + number % 3
    size = 6 + 8 * torch.rand(count, 2, generator=g)
    middle = size / 2 + torch.rand(count, 2, generator=g) * (SIZE - size)
    kinds = torch.randint(KINDS, (count,), generator=g)
    boxes = torch.cat([middle, size], 1)
    picture = 0.2 * torch.randn(1, SIZE, SIZE, generator=g)
    for (left, top, right, bottom), kind in zip(corners(boxes).round().int().tolist(), kinds):
        picture[0, top:bottom, left:right] += (kind + 1) / 2
    return picture, boxes, kinds


def mirrored(picture, boxes, kinds):
    boxes = boxes.clone()
    boxes[:, 0] = SIZE - boxes[:, 0]
    return picture.flip(-1), boxes, kinds


def batches(size=3):
    number = 0
    while True:
        scenes = [scene(number + i) for i in range(size)]
        scenes[0] = mirrored(*scenes[0])
        yield torch.stack([s[0] for s in scenes]), [(s[1], s[2]) for s in scenes]
        number += size


def train(amp=True, steps=3):
    torch.manual_seed(70)
    model, anchor = Detector(), anchors()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=5e-2, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=8, power=2.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, enabled=amp)
    loader = batches()
    for step in range(steps):
        for micro in range(ACCUMULATE):
            picture, targets = next(loader)
            with torch.autocast("cpu", torch.bfloat16) if amp else nullcontext():
                kinds, boxes = model(picture)
            kind_loss, box_loss = loss_of(kinds, boxes, targets, anchor)
            scaler.scale((kind_loss + 0.5 * box_loss) / ACCUMULATE).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        print(step, f"{kind_loss.item():.5f} {box_loss.item():.5f}")


train()
