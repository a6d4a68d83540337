"""A small BiSeNet: a spatial and a context path, fused; auxiliary heads and boundaries."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

NUM_CLASSES, IGNORE = 6, 255
MEAN, STD = (0.42, 0.45, 0.38), (0.20, 0.27, 0.23)
SPATIAL_DIM, CONTEXT_DIM, FUSED_DIM = 32, 32, 48
STAGE_DIMS, STAGE_DEPTHS = (24, 32, 48), (1, 2, 1)
# The smallest probability that is easy; how many of each picture are kept at least.
MAIN_OHEM, AUX_OHEM = (0.02, 1500), (0.2, 500)
AUX_WEIGHT, BOUNDARY_WEIGHT = 0.4, 0.8
LAPLACIAN = ((-1.0, -1.0, -1.0), (-1.0, 8.0, -1.0), (-1.0, -1.0, -1.0))
BOUNDARY_STRIDES, BOUNDARY_SHARES = (1, 2, 4), (0.6, 0.3, 0.1)
LR, HEAD_SCALE, MOMENTUM, WEIGHT_DECAY = 2e-3, 10.0, 0.9, 5e-3
FIRST_ITER, MAX_ITER, POWER = 3, 10, 0.9


class ConvBNReLU(nn.Module):
    def __init__(self, inp, out, ks=3, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(inp, out, ks, stride, padding=ks // 2, bias=False)
        self.bn = nn.BatchNorm2d(out)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


class SeparableConv(nn.Module):
    def __init__(self, inp, out, stride):
        super().__init__()
        self.dw = nn.Conv2d(inp, inp, 3, stride, padding=1, groups=inp, bias=False)
        self.bn1 = nn.BatchNorm2d(inp)
        self.pw = nn.Conv2d(inp, out, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)

    def forward(self, x):
        x = F.hardswish(self.bn1(self.dw(x)))
        return F.relu(self.bn2(self.pw(x)))


def channel_shuffle(x, groups=2):
    b, c, h, w = x.shape
    x = x.view(b, groups, c // groups, h, w).transpose(1, 2)
    return x.reshape(b, c, h, w)


class ShuffleUnit(nn.Module):
    """The first of a stage has two branches; the others leave one half as it is."""

    def __init__(self, inp, out, stride):
        super().__init__()
        half = out // 2
        self.shortcut = SeparableConv(inp, half, stride) if stride > 1 else None
        self.reduce = ConvBNReLU(inp if stride > 1 else half, half, 1)
        self.separable = SeparableConv(half, half, stride)

    def forward(self, x):
        if self.shortcut is not None:
            left, right = self.shortcut(x), x
        else:
            left, right = x.chunk(2, dim=1)
        right = self.separable(self.reduce(right))
        return channel_shuffle(torch.cat([left, right], dim=1))


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = ConvBNReLU(3, 16, 3, 2)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        self.stages = nn.ModuleList()
        inp = 16
        for dim, depth in zip(STAGE_DIMS, STAGE_DEPTHS):
            units = [
                ShuffleUnit(inp if i == 0 else dim, dim, 2 if i == 0 else 1)
                for i in range(depth)
            ]
            self.stages.append(nn.Sequential(*units))
            inp = dim

    def forward(self, x):
        x = self.pool(self.stem(x))
        feats = []
        for stage in self.stages:
            x = stage(x)
            feats.append(x)
        return feats


class AttentionRefinement(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.conv = ConvBNReLU(inp, out)
        self.conv_atten = nn.Conv2d(out, out, 1, bias=False)
        self.bn_atten = nn.BatchNorm2d(out)

    def forward(self, x):
        feat = self.conv(x)
        atten = feat.mean(dim=(2, 3), keepdim=True)
        atten = torch.sigmoid(self.bn_atten(self.conv_atten(atten)))
        return feat * atten


class ContextPath(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.arm16 = AttentionRefinement(STAGE_DIMS[1], CONTEXT_DIM)
        self.arm32 = AttentionRefinement(STAGE_DIMS[2], CONTEXT_DIM)
        self.conv_avg = ConvBNReLU(STAGE_DIMS[2], CONTEXT_DIM, 1)
        self.conv_head32 = ConvBNReLU(CONTEXT_DIM, CONTEXT_DIM)
        self.conv_head16 = ConvBNReLU(CONTEXT_DIM, CONTEXT_DIM)

    def forward(self, x):
        feat8, feat16, feat32 = self.backbone(x)
        avg = self.conv_avg(feat32.mean(dim=(2, 3), keepdim=True))
        up32 = self.arm32(feat32) + avg
        up32 = F.interpolate(
            up32, feat16.shape[2:], mode="bilinear", align_corners=False
        )
        up32 = self.conv_head32(up32)
        up16 = self.arm16(feat16) + up32
        up16 = F.interpolate(
            up16, feat8.shape[2:], mode="bilinear", align_corners=False
        )
        return self.conv_head16(up16), up32


class SpatialPath(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = ConvBNReLU(3, 16, 7, 2)
        self.conv2 = ConvBNReLU(16, 16, 3, 2)
        self.conv3 = ConvBNReLU(16, 24, 3, 2)
        self.conv_out = ConvBNReLU(24, SPATIAL_DIM, 1)

    def forward(self, x):
        return self.conv_out(self.conv3(self.conv2(self.conv1(x))))


class FeatureFusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.convblk = ConvBNReLU(SPATIAL_DIM + CONTEXT_DIM, FUSED_DIM, 1)
        self.squeeze = nn.Conv2d(FUSED_DIM, FUSED_DIM // 4, 1)
        self.excite = nn.Conv2d(FUSED_DIM // 4, FUSED_DIM, 1)

    def forward(self, spatial, context):
        feat = self.convblk(torch.cat([spatial, context], dim=1))
        atten = F.relu(self.squeeze(feat.mean(dim=(2, 3), keepdim=True)))
        atten = torch.sigmoid(self.excite(atten))
        return feat * atten + feat


class Head(nn.Module):
    def __init__(self, inp, mid, out, align_corners):
        super().__init__()
        self.align_corners = align_corners
        self.conv = ConvBNReLU(inp, mid)
        self.conv_out = nn.Conv2d(mid, out, 1)

    def forward(self, x, size):
        x = self.conv_out(self.conv(x))
        return F.interpolate(x, size, mode="bilinear", align_corners=self.align_corners)


class BiSeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.spatial = SpatialPath()
        self.context = ContextPath()
        self.fusion = FeatureFusion()
        self.head = Head(FUSED_DIM, 32, NUM_CLASSES, True)
        self.head_aux8 = Head(CONTEXT_DIM, 24, NUM_CLASSES, False)
        self.head_aux16 = Head(CONTEXT_DIM, 24, NUM_CLASSES, False)
        self.head_detail = Head(SPATIAL_DIM, 16, 1, True)

    def forward(self, x):
        size = x.shape[2:]
        spatial = self.spatial(x)
        context8, context16 = self.context(x)
        fused = self.fusion(spatial, context8)
        return {
            "out": self.head(fused, size),
            "aux8": self.head_aux8(context8, size),
            "aux16": self.head_aux16(context16, size),
            "detail": self.head_detail(spatial, size),
        }


def model():
    torch.manual_seed(1813)
    net = BiSeNet()
    with torch.no_grad():
        for name, module in net.named_modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0.9, 0.4)
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 1.5)
            elif isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                if name.endswith(("squeeze", "excite")):
                    module.weight.mul_(1.5)
                if module.bias is not None:
                    module.bias.normal_(0, 0.3)
    return net


def batches():
    """Discs and boxes on sloping ground; thin seams between them have no label."""
    generator = torch.Generator().manual_seed(1809)
    down, across = torch.arange(64.0).view(64, 1), torch.arange(88.0)
    colours = torch.tensor(
        [[60, 50, 150], [70, 160, 60], [180, 90, 50], [60, 170, 190], [190, 70, 170.0]]
    )
    made = []
    for size in (5, 4):
        images, labels = [], []
        for _ in range(size):
            grey = 50 + 100 * torch.rand(3, generator=generator)
            tilt = torch.randn(2, generator=generator)
            slope = 0.6 * (tilt[0] * (down - 32) + tilt[1] * (across - 44))
            image = grey + slope.unsqueeze(2)
            label = torch.zeros(64, 88, dtype=torch.uint8)
            for _ in range(7):
                kind = int(torch.randint(1, 6, (), generator=generator))
                y, x, r = torch.rand(3, generator=generator)
                dy, dx = (down - 64 * y).abs(), (across - 88 * x).abs()
                away = (
                    torch.maximum(dy, 0.7 * dx) if kind > 3 else (dy**2 + dx**2).sqrt()
                )
                inside = away < 6 + 10 * r
                image = torch.where(inside.unsqueeze(2), colours[kind - 1], image)
                label[inside] = kind
                label[(away - 6 - 10 * r).abs() < 0.6] = 255
            noise = 14 * torch.randn(image.shape, generator=generator)
            images.append((image + noise).clamp(0, 255).to(torch.uint8))
            labels.append(label)
        made.append({"image": torch.stack(images), "label": torch.stack(labels)})
    return made


def forward(net, batch):
    x = batch["image"].permute(0, 3, 1, 2).float() / 255
    return net((x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1))


def ohem_loss(logits, label, thresh, min_kept):
    """Mean over the pixels that are hard; over the hardest where these are too few."""
    losses = F.cross_entropy(logits, label, ignore_index=IGNORE, reduction="none")
    losses = losses.flatten()
    hard = losses[losses > -math.log(thresh)]
    kept = min_kept * len(label)
    if len(hard) < kept:
        hard = losses.topk(kept).values
    return hard.mean()


def boundary_target(label):
    """Shares of the scales on which a pixel is at the edge of a class."""
    kernel = torch.tensor(LAPLACIAN).view(1, 1, 3, 3)
    label = label.where(label != IGNORE, 0).unsqueeze(1).float()
    target: Any = 0.0
    for stride, share in zip(BOUNDARY_STRIDES, BOUNDARY_SHARES):
        edge = F.conv2d(label, kernel, stride=stride, padding=1).clamp(min=0)
        edge = (edge > 0.1).float()
        target = target + share * F.interpolate(edge, label.shape[2:], mode="nearest")
    return target.squeeze(1)


def boundary_loss(logits, label):
    logits = logits.squeeze(1)
    target, valid = boundary_target(label), (label != IGNORE).float()
    bce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    bce = (bce * valid).sum() / valid.sum()
    probs, target = torch.sigmoid(logits) * valid, target * valid
    num = 2 * (probs * target).sum(dim=(1, 2)) + 1
    den = probs.sum(dim=(1, 2)) + target.sum(dim=(1, 2)) + 1
    return bce + (1 - num / den).mean()


def loss(output, batch):
    label = batch["label"].long()
    main = ohem_loss(output["out"], label, *MAIN_OHEM)
    aux = sum(ohem_loss(output[k], label, *AUX_OHEM) for k in ("aux8", "aux16"))
    boundary = boundary_loss(output["detail"], label)
    return main + AUX_WEIGHT * aux + BOUNDARY_WEIGHT * boundary


class PolySGD(torch.optim.SGD):
    """The rate falls as a power of what is left; some iterations are behind."""

    done = FIRST_ITER

    def step(self, closure=None):
        factor = (1 - self.done / MAX_ITER) ** POWER
        for group in self.param_groups:
            group["lr"] = LR * group["scale"] * factor
        self.done += 1
        return super().step(closure)


def optimizer(net):
    """Heads learn faster; norms and biases do not decay."""
    groups = []
    for scale in (1.0, HEAD_SCALE):
        params = [
            p for n, p in net.named_parameters() if n.startswith("head") == (scale > 1)
        ]
        decay = [p for p in params if p.ndim > 1]
        rest = [p for p in params if p.ndim == 1]
        groups += [
            {"params": decay, "scale": scale, "weight_decay": WEIGHT_DECAY},
            {"params": rest, "scale": scale, "weight_decay": 0.0},
        ]
    return PolySGD(groups, lr=LR, momentum=MOMENTUM, nesterov=True)
