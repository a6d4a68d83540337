"""A small ViTDet: windows and relative positions, a simple pyramid, a dense head.

The classifying token of the table is from pretraining; no place in the picture has it.
"""

import torch
from torch import nn
from torch.nn import functional as F

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
NUM_CLASSES, PATCH, DIM, HEADS, MLP_DIM = 5, 8, 24, 3, 48
PRETRAIN_GRID, WINDOWS = 4, (4, 0, 4)
GLOBAL_REL_SIZE = 6
FPN_DIM, HEAD_CONVS, GROUPS = 16, 2, 4
STRIDES = (4, 8, 16)
RANGES = ((0, 12), (12, 24), (24, 1e8))
RADIUS, ALPHA, GAMMA, BOX_WEIGHT = 1.5, 0.25, 2.0, 2.0
LR, WEIGHT_DECAY, LAYER_DECAY, WARMUP = 4e-3, 0.2, 0.7, 4


def window_partition(x, size):
    """(b, h, w, c) -> (b * windows, size, size, c), zeros at the bottom and at the right."""
    b, h, w, c = x.shape
    pad_h, pad_w = -h % size, -w % size
    x = F.pad(x, (0, 0, 0, pad_w, 0, pad_h))
    hp, wp = h + pad_h, w + pad_w
    x = x.view(b, hp // size, size, wp // size, size, c)
    return x.transpose(2, 3).reshape(-1, size, size, c), (hp, wp)


def window_unpartition(windows, size, padded, original):
    (hp, wp), (h, w) = padded, original
    x = windows.view(-1, hp // size, wp // size, size, size, windows.shape[-1])
    x = x.transpose(2, 3).reshape(-1, hp, wp, windows.shape[-1])
    return x[:, :h, :w]


def get_rel_pos(size, table):
    """(size, size, dim): what stands for each query and key along one side."""
    length = 2 * size - 1
    if len(table) != length:
        table = F.interpolate(table.T[None], length, mode="linear")[0].T
    steps = torch.arange(size)
    return table[steps[:, None] - steps[None, :] + size - 1]


class Attention(nn.Module):
    """Keys have no bias."""

    def __init__(self, dim, heads, rel_size):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(dim))
        self.v_bias = nn.Parameter(torch.zeros(dim))
        self.proj = nn.Linear(dim, dim)
        self.rel_pos_h = nn.Parameter(torch.zeros(2 * rel_size - 1, dim // heads))
        self.rel_pos_w = nn.Parameter(torch.zeros(2 * rel_size - 1, dim // heads))

    def forward(self, x):
        b, h, w, c = x.shape
        bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])
        qkv = F.linear(x, self.qkv.weight, bias).view(b, h * w, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).flatten(1, 2)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        r_q = q.view(-1, h, w, c // self.heads)
        rel_h = torch.einsum("bhwc,hkc->bhwk", r_q, get_rel_pos(h, self.rel_pos_h))
        rel_w = torch.einsum("bhwc,wkc->bhwk", r_q, get_rel_pos(w, self.rel_pos_w))
        attn = attn.view(-1, h, w, h, w) + rel_h[..., None] + rel_w[..., None, :]
        attn = attn.view(-1, h * w, h * w).softmax(dim=-1)
        x = (attn @ v).view(b, self.heads, h, w, -1)
        return self.proj(x.permute(0, 2, 3, 1, 4).reshape(b, h, w, c))


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, window):
        super().__init__()
        self.window = window
        self.norm1 = nn.LayerNorm(DIM, eps=1e-6)
        self.attn = Attention(DIM, HEADS, window or GLOBAL_REL_SIZE)
        self.norm2 = nn.LayerNorm(DIM, eps=1e-6)
        self.mlp = Mlp(DIM, MLP_DIM)

    def forward(self, x):
        shortcut = x
        x = self.norm1(x)
        if self.window:
            original = x.shape[1:3]
            x, padded = window_partition(x, self.window)
            x = self.attn(x)
            x = window_unpartition(x, self.window, padded, original)
        else:
            x = self.attn(x)
        x = shortcut + x
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + PRETRAIN_GRID**2, DIM))
        self.blocks = nn.Sequential(*[Block(window) for window in WINDOWS])

    def abs_pos(self, size):
        table = self.pos_embed[:, 1:].view(1, PRETRAIN_GRID, PRETRAIN_GRID, DIM)
        table = F.interpolate(table.permute(0, 3, 1, 2), size, mode="bicubic")
        return table.permute(0, 2, 3, 1)

    def forward(self, x):
        x = self.patch_embed(x).permute(0, 2, 3, 1)
        x = x + self.abs_pos(x.shape[1:3])
        return self.blocks(x).permute(0, 3, 1, 2)


class LayerNorm2d(nn.Module):
    def __init__(self, channels, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class SimpleFeaturePyramid(nn.Module):
    """From the one map: twice as large, the same, and half as large."""

    def __init__(self):
        super().__init__()
        up = nn.ConvTranspose2d(DIM, DIM // 2, 2, 2)
        resized = ((up, DIM // 2), (nn.Identity(), DIM), (nn.MaxPool2d(2, 2), DIM))
        self.stages = nn.ModuleList()
        for resize, dim in resized:
            stage = nn.Sequential(
                resize,
                nn.Conv2d(dim, FPN_DIM, 1, bias=False),
                LayerNorm2d(FPN_DIM),
                nn.Conv2d(FPN_DIM, FPN_DIM, 3, padding=1, bias=False),
                LayerNorm2d(FPN_DIM),
            )
            self.stages.append(stage)

    def forward(self, x):
        return [stage(x) for stage in self.stages]


def tower():
    layers = []
    for _ in range(HEAD_CONVS):
        layers += [
            nn.Conv2d(FPN_DIM, FPN_DIM, 3, padding=1, bias=False),
            nn.GroupNorm(GROUPS, FPN_DIM),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)


class DenseHead(nn.Module):
    """The same for all levels, but for a scale of the distances."""

    def __init__(self):
        super().__init__()
        self.cls_tower, self.bbox_tower = tower(), tower()
        self.cls_logits = nn.Conv2d(FPN_DIM, NUM_CLASSES, 3, padding=1)
        self.bbox_pred = nn.Conv2d(FPN_DIM, 4, 3, padding=1)
        self.scales = nn.Parameter(torch.ones(len(STRIDES)))

    def forward(self, features):
        logits, distances = [], []
        for x, scale, stride in zip(features, self.scales, STRIDES):
            logits.append(self.cls_logits(self.cls_tower(x)).flatten(2))
            ltrb = torch.exp(self.bbox_pred(self.bbox_tower(x)) * scale) * stride
            distances.append(ltrb.flatten(2))
        return {
            "logits": torch.cat(logits, dim=2).transpose(1, 2),
            "distances": torch.cat(distances, dim=2).transpose(1, 2),
        }


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = ViT()
        self.fpn = SimpleFeaturePyramid()
        self.head = DenseHead()

    def forward(self, x):
        return self.head(self.fpn(self.backbone(x)))


def model():
    torch.manual_seed(2203)
    net = Detector()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.LayerNorm | nn.GroupNorm | LayerNorm2d):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
            elif isinstance(module, Attention):
                for p in (module.q_bias, module.v_bias):
                    p.normal_(0, 0.3)
                for p in (module.rel_pos_h, module.rel_pos_w):
                    p.normal_(0, 0.4)
        net.backbone.pos_embed.normal_(0, 0.4)
        net.head.cls_logits.weight.mul_(0.5)
        net.head.cls_logits.bias.sub_(1.5)
        net.head.bbox_pred.weight.mul_(0.4)
        net.head.bbox_pred.bias.add_(0.5)
        net.head.scales.copy_(torch.tensor([0.8, 1.0, 1.2]))
    return net


def batches():
    """Coloured boxes on sloping ground, blue first; a label of -1 fills up the rows."""
    generator = torch.Generator().manual_seed(2204)
    height, width = 52, 68
    down, across = torch.arange(float(height))[:, None], torch.arange(float(width))
    colours = torch.tensor(
        [[200, 60, 40], [50, 170, 70], [60, 70, 200], [190, 180, 50], [150, 60, 170.0]]
    )
    made = []
    for count in (3, 2):
        images, boxes, labels = [], [], []
        for number in range(count):
            tilt = torch.randn(2, generator=generator)
            slope = 0.7 * (tilt[0] * (down - 26) + tilt[1] * (across - 34))
            image = 70 + 70 * torch.rand(3, generator=generator) + slope[:, :, None]
            rows = torch.zeros(4, 4)
            row_labels = torch.full((4,), -1)
            for i, longest in enumerate((50, 34, 20, 14)[: 4 - number % 2]):
                label = int(torch.randint(0, 5, (), generator=generator))
                r = torch.rand(4, generator=generator)
                h, w = longest * (0.6 + 0.3 * r[0]), longest * (0.7 + 0.3 * r[1])
                y, x = (height - h) * r[2], (width - w) * r[3]
                inside = (down >= y) & (down < y + h) & (across >= x) & (across < x + w)
                image = torch.where(inside[:, :, None], colours[label], image)
                rows[i] = torch.stack([x, y, x + w, y + h])
                row_labels[i] = label
            noise = 14 * torch.randn(image.shape, generator=generator)
            images.append((image + noise).clamp(0, 255).to(torch.uint8))
            boxes.append(rows)
            labels.append(row_labels)
        made.append(
            {
                "image": torch.stack(images),
                "boxes": torch.stack(boxes),
                "labels": torch.stack(labels),
            }
        )
    return made


def forward(net, batch):
    x = batch["image"].flip(-1).permute(0, 3, 1, 2).float()
    x = (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    h, w = x.shape[2:]
    return net(F.pad(x, (0, -w % PATCH, 0, -h % PATCH)))


def locations(image_size):
    """Middles of all cells, their strides and the ranges of distances they are for."""
    grid_h, grid_w = (-(-side // PATCH) for side in image_size)
    sizes = ((2 * grid_h, 2 * grid_w), (grid_h, grid_w), (grid_h // 2, grid_w // 2))
    points, strides, ranges = [], [], []
    for (h, w), stride, limits in zip(sizes, STRIDES, RANGES):
        y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        points.append((torch.stack([x, y], dim=2).view(-1, 2) + 0.5) * stride)
        strides.append(torch.full((h * w,), float(stride)))
        ranges.append(torch.tensor(limits).float().expand(h * w, 2))
    return torch.cat(points), torch.cat(strides), torch.cat(ranges)


def assign(points, strides, ranges, boxes, labels):
    """For one picture: the class of each point and its distances; the smallest box wins."""
    boxes, labels = boxes[labels >= 0], labels[labels >= 0]
    lt = points[:, None] - boxes[:, :2]
    rb = boxes[:, 2:] - points[:, None]
    ltrb = torch.cat([lt, rb], dim=2)
    inside = ltrb.amin(dim=2) > 0
    centers = (boxes[:, :2] + boxes[:, 2:]) / 2
    away = (points[:, None] - centers).abs().amax(dim=2)
    near = away < RADIUS * strides[:, None]
    largest = ltrb.amax(dim=2)
    in_range = (largest >= ranges[:, :1]) & (largest <= ranges[:, 1:])
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1).expand(len(points), -1)
    areas = areas.masked_fill(~(inside & near & in_range), float("inf"))
    smallest, index = areas.min(dim=1)
    label = labels[index].masked_fill(smallest.isinf(), NUM_CLASSES)
    return label, ltrb[torch.arange(len(points)), index]


def sigmoid_focal_loss(logits, targets):
    p = torch.sigmoid(logits)
    ce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    alpha_t = ALPHA * targets + (1 - ALPHA) * (1 - targets)
    return (alpha_t * ce * (1 - p_t) ** GAMMA).sum()


def giou(pred, target):
    """Of two boxes that are distances from the same point."""
    pred_area = (pred[:, 0] + pred[:, 2]) * (pred[:, 1] + pred[:, 3])
    target_area = (target[:, 0] + target[:, 2]) * (target[:, 1] + target[:, 3])
    common, hull = torch.minimum(pred, target), torch.maximum(pred, target)
    inter = (common[:, 0] + common[:, 2]) * (common[:, 1] + common[:, 3])
    enclosing = (hull[:, 0] + hull[:, 2]) * (hull[:, 1] + hull[:, 3])
    union = pred_area + target_area - inter
    return inter / union - (enclosing - union) / enclosing


def centerness(ltrb):
    lr, tb = ltrb[:, 0::2], ltrb[:, 1::2]
    ratio = (lr.amin(1) / lr.amax(1)) * (tb.amin(1) / tb.amax(1))
    return ratio.sqrt()


def loss(output, batch):
    points, strides, ranges = locations(batch["image"].shape[1:3])
    found = [
        assign(points, strides, ranges, b, k)
        for b, k in zip(batch["boxes"], batch["labels"])
    ]
    labels = torch.cat([label for label, _ in found])
    targets = torch.cat([ltrb for _, ltrb in found])
    positive = labels < NUM_CLASSES
    logits = output["logits"].flatten(0, 1)
    one_hot = F.one_hot(labels, NUM_CLASSES + 1)[:, :NUM_CLASSES].float()
    cls_loss = sigmoid_focal_loss(logits, one_hot) / positive.sum().clamp(min=1)
    pred, targets = output["distances"].flatten(0, 1)[positive], targets[positive]
    weight = centerness(targets)
    box_loss = (weight * (1 - giou(pred, targets))).sum() / weight.sum().clamp(min=1e-6)
    return cls_loss + BOX_WEIGHT * box_loss


def layer_of(name):
    if name.startswith("backbone.blocks."):
        return int(name.split(".")[2]) + 1
    return 0 if name.startswith("backbone.") else len(WINDOWS) + 1


def has_decay(name, p):
    return p.ndim > 1 and "pos_embed" not in name and "rel_pos" not in name


class WarmupAdamW(torch.optim.AdamW):
    done = 0

    def step(self, closure=None):
        self.done += 1
        for group in self.param_groups:
            group["lr"] = LR * group["scale"] * min(1.0, self.done / WARMUP)
        return super().step(closure)


def optimizer(net):
    """Lower layers learn slower; norms, biases and tables of positions do not decay."""
    groups = []
    for name, p in net.named_parameters():
        groups.append(
            {
                "params": [p],
                "scale": LAYER_DECAY ** (len(WINDOWS) + 1 - layer_of(name)),
                "weight_decay": WEIGHT_DECAY if has_decay(name, p) else 0.0,
            }
        )
    return WarmupAdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
