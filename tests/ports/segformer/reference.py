"""A small SegFormer: overlapping patches, attention with reduced keys, an all-linear head."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

NUM_CLASSES, IGNORE = 6, 255
SIZE = (60, 76)
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
DIMS, HEADS, DEPTHS = (16, 32, 64), (2, 2, 4), (2, 2, 1)
MLP_RATIOS, SR_RATIOS, HEAD_DIM = (4, 4, 3), (4, 2, 1), 32
CLASS_WEIGHTS = (0.5, 1.2, 0.9, 1.6, 0.8, 1.3)
SMOOTHING, DICE_WEIGHT = 0.1, 0.7
LR, HEAD_SCALE, WEIGHT_DECAY = 2e-3, 10.0, 0.1
WARMUP, WARMUP_RATIO, TOTAL, POWER = 2, 0.3, 12, 0.9


class OverlapPatchEmbed(nn.Module):
    def __init__(self, inp, dim, patch, stride):
        super().__init__()
        self.proj = nn.Conv2d(inp, dim, patch, stride, padding=patch // 2)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        x = self.proj(x)
        h, w = x.shape[2:]
        return self.norm(x.flatten(2).transpose(1, 2)), h, w


class EfficientAttention(nn.Module):
    """Keys have no bias: softmax forgets it."""

    def __init__(self, dim, heads, sr_ratio):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.sr = None
        if sr_ratio > 1:
            self.sr = nn.Conv2d(dim, dim, sr_ratio, sr_ratio)
            self.norm = nn.LayerNorm(dim)

    def forward(self, x, h, w):
        b, n, c = x.shape
        q = self.q(x).view(b, n, self.heads, -1).transpose(1, 2)
        if self.sr is not None:
            x = self.sr(x.transpose(1, 2).reshape(b, c, h, w))
            x = self.norm(x.flatten(2).transpose(1, 2))
        kv = self.kv(x).view(b, -1, 2, self.heads, c // self.heads)
        k, v = kv.permute(2, 0, 3, 1, 4)
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(b, n, c)
        return self.proj(x)


class MixFFN(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x, h, w):
        x = self.fc1(x)
        b, _, c = x.shape
        x = self.dwconv(x.transpose(1, 2).reshape(b, c, h, w))
        x = F.gelu(x.flatten(2).transpose(1, 2))
        return self.fc2(x)


class Block(nn.Module):
    def __init__(self, dim, heads, mlp_ratio, sr_ratio):
        super().__init__()
        norm = partial(nn.LayerNorm, eps=1e-6)
        self.norm1 = norm(dim)
        self.attn = EfficientAttention(dim, heads, sr_ratio)
        self.norm2 = norm(dim)
        self.mlp = MixFFN(dim, mlp_ratio * dim)

    def forward(self, x, h, w):
        x = x + self.attn(self.norm1(x), h, w)
        return x + self.mlp(self.norm2(x), h, w)


class Stage(nn.Module):
    """The norm of the last stage has no bias: the norm of the head forgets it."""

    def __init__(self, i):
        super().__init__()
        dim = DIMS[i]
        first, last = i == 0, i == len(DIMS) - 1
        self.patch_embed = OverlapPatchEmbed(
            3 if first else DIMS[i - 1], dim, 7 if first else 3, 4 if first else 2
        )
        self.blocks = nn.ModuleList(
            [
                Block(dim, HEADS[i], MLP_RATIOS[i], SR_RATIOS[i])
                for _ in range(DEPTHS[i])
            ]
        )
        self.norm = nn.LayerNorm(dim, eps=1e-6, bias=not last)

    def forward(self, x):
        x, h, w = self.patch_embed(x)
        for block in self.blocks:
            x = block(x, h, w)
        x = self.norm(x)
        return x.transpose(1, 2).reshape(len(x), -1, h, w)


class MixTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([Stage(i) for i in range(len(DIMS))])

    def forward(self, x):
        outs = []
        for stage in self.stages:
            x = stage(x)
            outs.append(x)
        return outs


class SegFormerHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_c = nn.ModuleList(
            [nn.Linear(dim, HEAD_DIM, bias=False) for dim in DIMS]
        )
        self.linear_fuse = nn.Conv2d(HEAD_DIM * len(DIMS), HEAD_DIM, 1, bias=False)
        self.bn = nn.BatchNorm2d(HEAD_DIM)
        self.linear_pred = nn.Conv2d(HEAD_DIM, NUM_CLASSES, 1)

    def forward(self, features):
        size = features[0].shape[2:]
        maps = []
        for linear, x in zip(self.linear_c, features):
            x = linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            maps.append(F.interpolate(x, size, mode="bilinear", align_corners=False))
        # The deepest comes first.
        x = self.linear_fuse(torch.cat(maps[::-1], dim=1))
        return self.linear_pred(F.relu(self.bn(x)))


class SegFormer(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = MixTransformer()
        self.decode_head = SegFormerHead()

    def forward(self, x):
        return self.decode_head(self.backbone(x))


def model():
    torch.manual_seed(2105)
    net = SegFormer()
    with torch.no_grad():
        for name, module in net.named_modules():
            if isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
                module.weight.uniform_(0.6, 1.4)
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                if name.endswith((".q", ".kv")):
                    module.weight.mul_(1.3)
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
        net.decode_head.bn.running_mean.normal_(0, 0.3)
        net.decode_head.bn.running_var.uniform_(0.5, 1.5)
    return net


def batches():
    """Discs and boxes on sloping ground, blue first; 0 is what nobody gave a name."""
    generator = torch.Generator().manual_seed(2106)
    down, across = torch.arange(56.0).view(56, 1), torch.arange(71.0)
    colours = torch.tensor(
        [[120, 40, 60], [60, 150, 60], [50, 80, 170], [190, 170, 60], [170, 70, 180.0]]
    )
    made = []
    for size in (3, 4, 3):
        images, labels = [], []
        for _ in range(size):
            grey = 70 + 60 * torch.rand(3, generator=generator)
            tilt = torch.randn(2, generator=generator)
            slope = 0.6 * (tilt[0] * (down - 28) + tilt[1] * (across - 35))
            image = grey + slope.unsqueeze(2)
            label = torch.ones(56, 71, dtype=torch.uint8)
            for _ in range(6):
                kind = int(torch.randint(0, 6, (), generator=generator))
                y, x, r = torch.rand(3, generator=generator)
                dy, dx = (down - 56 * y).abs(), (across - 71 * x).abs()
                away = (
                    torch.maximum(dy, 0.7 * dx) if kind > 3 else (dy**2 + dx**2).sqrt()
                )
                inside = away < 6 + 9 * r
                image = torch.where(inside.unsqueeze(2), colours[kind - 1], image)
                label[inside] = kind + 1 if kind else 0
                label[(away - 6 - 9 * r).abs() < 1] = 0
            noise = 14 * torch.randn(image.shape, generator=generator)
            images.append((image + noise).clamp(0, 255).to(torch.uint8))
            labels.append(label)
        made.append(
            {
                "image": torch.stack(images),
                "label": torch.stack(labels),
                "flip": torch.arange(size) % 3 != 1,
            }
        )
    return made


def augment(x, flip, fill):
    """Flip some from left to right, then pad at the bottom and at the right."""
    x = torch.stack([item.flip(-1) if f else item for item, f in zip(x, flip)])
    height, width = x.shape[-2:]
    return F.pad(x, (0, SIZE[1] - width, 0, SIZE[0] - height), value=fill)


def forward(net, batch):
    x = batch["image"].flip(-1).permute(0, 3, 1, 2).float()
    x = (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    return net(augment(x, batch["flip"], 0.0))


def targets(batch, size):
    """Labels without the class of what has no name, as small as the logits."""
    label = batch["label"].long() - 1
    label = augment(label.where(label >= 0, IGNORE), batch["flip"], IGNORE)
    label = F.interpolate(label.unsqueeze(1).float(), size, mode="nearest")
    return label.squeeze(1).long()


def dice_loss(logits, target):
    """For each picture and class; squares below."""
    valid = (target != IGNORE).unsqueeze(1)
    probs = logits.softmax(dim=1) * valid
    one_hot = F.one_hot(target.where(target != IGNORE, 0), NUM_CLASSES)
    one_hot = one_hot.permute(0, 3, 1, 2) * valid
    num = 2 * (probs * one_hot).sum(dim=(2, 3)) + 1
    den = (probs**2 + one_hot**2).sum(dim=(2, 3)) + 1
    return (1 - num / den).mean()


def loss(output, batch):
    target = targets(batch, output.shape[2:])
    ce = F.cross_entropy(
        output,
        target,
        torch.tensor(CLASS_WEIGHTS),
        ignore_index=IGNORE,
        label_smoothing=SMOOTHING,
    )
    return ce + DICE_WEIGHT * dice_loss(output, target)


class PolyAdamW(torch.optim.AdamW):
    """The rate rises in a line, then falls as a power of what is left."""

    done = 0

    def factor(self):
        if self.done < WARMUP:
            return WARMUP_RATIO + (1 - WARMUP_RATIO) * self.done / WARMUP
        return (1 - (self.done - WARMUP) / (TOTAL - WARMUP)) ** POWER

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = LR * group["scale"] * self.factor()
        self.done += 1
        return super().step(closure)


def optimizer(net):
    """The head learns faster; norms and biases do not decay."""
    groups = []
    for part, scale in ((net.backbone, 1.0), (net.decode_head, HEAD_SCALE)):
        decay = [p for p in part.parameters() if p.ndim > 1]
        rest = [p for p in part.parameters() if p.ndim == 1]
        groups += [
            {"params": decay, "scale": scale, "weight_decay": WEIGHT_DECAY},
            {"params": rest, "scale": scale, "weight_decay": 0.0},
        ]
    return PolyAdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
