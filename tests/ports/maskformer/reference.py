"""A small MaskFormer: queries that look only where the layer before saw their mask."""

import math

import torch
from torch import nn
from torch.nn import functional as F

HEIGHT, WIDTH = 60, 92
PIXEL_MEAN, PIXEL_STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
STEM, STAGES = 12, (16, 20, 26, 34)
FPN_DIM, GROUPS, MASK_DIM = 20, 5, 18
DIM, HEADS, FFN_DIM, LAYERS, LEVELS = 28, 4, 44, 4, 3
MLP_DIMS = (32, 24)
QUERIES, CLASSES = 9, 5
TEMPERATURE = 10000.0
# Loss
NO_OBJECT, ALPHA, GAMMA = 0.1, 0.25, 2.0
CLASS_WEIGHT, FOCAL_WEIGHT, DICE_WEIGHT = 2.0, 10.0, 3.0
CANDIDATES, UNCERTAIN, RANDOM = 26, 11, 8
# Training
LR, BACKBONE_RATE, WEIGHT_DECAY, BETAS, EPS = 2e-3, 0.1, 0.05, (0.9, 0.98), 1e-6
CLIP_NORM, TOTAL, POWER = 0.5, 10, 0.9


class Block(nn.Module):
    """Two convolutions; the shortcut is pooled where they have a stride."""

    def __init__(self, inp, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inp, out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.pool = nn.AvgPool2d(stride, ceil_mode=True, count_include_pad=False)
        self.conv3 = nn.Conv2d(inp, out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out)

    def forward(self, x):
        h = F.relu(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        return F.relu(h + self.norm3(self.conv3(self.pool(x))))


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, STEM, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(STEM)
        widths = (STEM, *STAGES)
        self.stages = nn.ModuleList(
            [
                Block(inp, out, 2 if i else 1)
                for i, (inp, out) in enumerate(zip(widths, widths[1:]))
            ]
        )

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        return features


class ConvNorm(nn.Module):
    def __init__(self, inp, size):
        super().__init__()
        self.conv = nn.Conv2d(inp, FPN_DIM, size, padding=size // 2, bias=False)
        self.norm = nn.GroupNorm(GROUPS, FPN_DIM)

    def forward(self, x):
        return self.norm(self.conv(x))


class PixelDecoder(nn.Module):
    """From the smallest features to the largest; gives those for masks and three levels."""

    def __init__(self):
        super().__init__()
        self.lateral = nn.ModuleList([ConvNorm(width, 1) for width in STAGES[:-1]])
        inputs = (*[FPN_DIM] * (len(STAGES) - 1), STAGES[-1])
        self.output = nn.ModuleList([ConvNorm(width, 3) for width in inputs])
        self.mask_features = nn.Conv2d(FPN_DIM, MASK_DIM, 3, padding=1)

    def forward(self, features):
        y = F.relu(self.output[-1](features[-1]))
        levels = [y]
        for i in reversed(range(len(self.lateral))):
            side = self.lateral[i](features[i])
            y = side + F.interpolate(y, size=side.shape[2:], mode="nearest")
            y = F.relu(self.output[i](y))
            levels.append(y)
        return self.mask_features(y), levels[:LEVELS]


def sine_positions(height, width):
    """[height * width, DIM]; the first half of the features is for the row."""
    half = DIM // 2
    period = TEMPERATURE ** (2 * (torch.arange(half) // 2) / half)
    parts = []
    for size in (height, width):
        place = torch.arange(1.0, size + 1) / (size + 1e-6) * 2 * math.pi
        angle = place[:, None] / period
        parts.append(torch.stack([angle[:, 0::2].sin(), angle[:, 1::2].cos()], dim=2))
    rows, columns = (part.flatten(1) for part in parts)
    rows = rows[:, None].expand(-1, width, -1)
    columns = columns[None].expand(height, -1, -1)
    return torch.cat([rows, columns], dim=2).flatten(0, 1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(DIM, DIM, bias=False)
        self.k_proj = nn.Linear(DIM, DIM, bias=False)
        self.v_proj = nn.Linear(DIM, DIM, bias=False)
        self.out_proj = nn.Linear(DIM, DIM)

    def forward(self, q, k, v, closed=None):
        q = self.q_proj(q).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k = self.k_proj(k).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        v = self.v_proj(v).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) * (DIM // HEADS) ** -0.5
        if closed is not None:
            scores = scores.masked_fill(closed.unsqueeze(1), -torch.inf)
        out = scores.softmax(dim=-1) @ v
        return self.out_proj(out.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.cross_attention = Attention()
        self.norm1 = nn.LayerNorm(DIM)
        self.self_attention = Attention()
        self.norm2 = nn.LayerNorm(DIM)
        self.fc1 = nn.Linear(DIM, FFN_DIM)
        self.fc2 = nn.Linear(FFN_DIM, DIM)
        self.norm3 = nn.LayerNorm(DIM)

    def forward(self, x, query_pos, memory, memory_pos, closed):
        y = self.cross_attention(x + query_pos, memory + memory_pos, memory, closed)
        x = self.norm1(x + y)
        q = x + query_pos
        x = self.norm2(x + self.self_attention(q, q, x))
        return self.norm3(x + self.fc2(F.relu(self.fc1(x))))


class MLP(nn.Module):
    def __init__(self, *widths):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(inp, out) for inp, out in zip(widths, widths[1:])]
        )

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.ModuleList(
            [nn.Conv2d(FPN_DIM, DIM, 1) for _ in range(LEVELS)]
        )
        self.level = nn.Embedding(LEVELS, DIM)
        self.query = nn.Embedding(QUERIES, DIM)
        self.query_pos = nn.Embedding(QUERIES, DIM)
        self.layers = nn.ModuleList([DecoderLayer() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(DIM)
        self.class_head = nn.Linear(DIM, CLASSES + 1)
        self.mask_head = MLP(DIM, *MLP_DIMS, MASK_DIM)

    def heads(self, x, mask_features):
        x = self.norm(x)
        masks = torch.einsum("bqc,bchw->bqhw", self.mask_head(x), mask_features)
        return self.class_head(x), masks

    def closed(self, masks, size):
        """Where a query may not look; one that would see nothing looks everywhere."""
        masks = masks.detach()
        small = F.interpolate(masks, size=size, mode="bilinear", align_corners=False)
        closed = (small.sigmoid() < 0.5).flatten(2)
        return closed & ~closed.all(dim=-1, keepdim=True)

    def forward(self, mask_features, levels):
        sizes = [level.shape[2:] for level in levels]
        memory = [
            project(level).flatten(2).transpose(1, 2) + embedded
            for project, level, embedded in zip(self.project, levels, self.level.weight)
        ]
        places = [sine_positions(*size) for size in sizes]
        x = self.query.weight.expand(len(mask_features), -1, -1)
        predictions = [self.heads(x, mask_features)]
        for i, layer in enumerate(self.layers):
            j = i % LEVELS
            closed = self.closed(predictions[-1][1], sizes[j])
            x = layer(x, self.query_pos.weight, memory[j], places[j], closed)
            predictions.append(self.heads(x, mask_features))
        classes, masks = zip(*predictions)
        return {"classes": torch.stack(classes), "masks": torch.stack(masks)}


class MaskFormer(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.pixel_decoder = PixelDecoder()
        self.decoder = Decoder()

    def forward(self, image):
        return self.decoder(*self.pixel_decoder(self.backbone(image)))


def model():
    torch.manual_seed(2106)
    net = MaskFormer()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.LayerNorm | nn.BatchNorm2d | nn.GroupNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(0, 1.2)
        for module in net.modules():
            if isinstance(module, Attention):
                module.q_proj.weight.mul_(1.4)
            elif isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.6, 1.4)
        # Masks are open here and there, not all or nothing.
        for module in (
            net.pixel_decoder.mask_features,
            net.decoder.mask_head.layers[-1],
        ):
            module.weight.sub_(module.weight.mean(dim=1, keepdim=True)).mul_(1.3)
    return net


def batches():
    """Discs and boxes on a slope with noise; a kind has a colour, and corners are padding."""
    generator = torch.Generator().manual_seed(2113)
    y, x = torch.arange(60.0).view(60, 1), torch.arange(92.0)
    colours = torch.tensor(
        [[210.0, 60, 50], [60, 180, 70], [50, 80, 220], [220, 200, 60], [150, 70, 190]]
    )
    made = []
    for counts in ((5, 3, 6), (4, 6)):
        size = len(counts)
        image = 110 + 18 * torch.randn(size, 3, 60, 92, generator=generator)
        masks = torch.zeros(size, 6, 60, 92)
        kinds = torch.randint(0, 5, (size, 6), generator=generator)
        matched = torch.full((size, 9), -1)
        extent = torch.tensor([[60, 92], [52, 83], [57, 74]][:size])
        for i, count in enumerate(counts):
            (height, width), tilt = extent[i], torch.rand(2, generator=generator)
            image[i] += 0.9 * tilt[0] * (y - 30) + 0.7 * tilt[1] * (x - 46)
            free = torch.ones(60, 92, dtype=torch.bool)
            for j in range(count):
                cy, cx, ry, rx = torch.rand(4, generator=generator)
                dy = (y - height * (0.1 + 0.8 * cy)).abs() / (7 + 9 * ry)
                dx = (x - width * (0.1 + 0.8 * cx)).abs() / (8 + 14 * rx)
                inside = (dy**2 + dx**2 if j % 2 else torch.maximum(dy, dx)) < 1
                inside = inside & (y < height) & (x < width) & free
                free = free & ~inside
                masks[i, j] = inside.float()
                shade = colours[kinds[i, j]].view(3, 1, 1)
                image[i] = torch.where(inside, 0.7 * shade + 0.3 * image[i], image[i])
            order = torch.randperm(9, generator=generator)[:count]
            matched[i, order] = torch.arange(count)
        made.append(
            {
                "image": image.clamp(0, 255).round(),
                "extent": extent,
                "masks": masks,
                "kinds": kinds,
                # The object of each query, and -1 for none.
                "matched": matched,
                # Places (x, y) in the padded image at which an object is learned.
                "points": torch.rand(size, 6, 34, 2, generator=generator),
            }
        )
    return made


def forward(net, batch):
    mean = torch.tensor(PIXEL_MEAN).view(3, 1, 1)
    std = torch.tensor(PIXEL_STD).view(3, 1, 1)
    height, width = batch["extent"].view(-1, 2, 1, 1, 1).unbind(dim=1)
    inside = (torch.arange(HEIGHT).view(-1, 1) < height) & (torch.arange(WIDTH) < width)
    return net((batch["image"] - mean) / std * inside)


def sampled(masks, points):
    """masks [n, height, width], points [n, p, 2] from 0 to 1: what is there, [n, p]."""
    grid = 2 * points.unsqueeze(1) - 1
    values = F.grid_sample(masks.unsqueeze(1), grid, align_corners=False)
    return values[:, 0, 0]


def chosen_points(masks, points):
    """Those of the candidates that are nearest to a border, and some anywhere."""
    candidates, anywhere = points.split([CANDIDATES, RANDOM], dim=1)
    with torch.no_grad():
        unsure = -sampled(masks, candidates).abs()
    best = unsure.topk(UNCERTAIN, dim=1).indices
    candidates = candidates.take_along_dim(best.unsqueeze(-1), dim=1)
    return torch.cat([candidates, anywhere], dim=1)


def focal_loss(logits, target):
    """Mean over the points, sum over the masks."""
    prob = logits.sigmoid()
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    right = prob * target + (1 - prob) * (1 - target)
    alpha = ALPHA * target + (1 - ALPHA) * (1 - target)
    return (alpha * (1 - right) ** GAMMA * ce).mean(dim=1).sum()


def dice_loss(logits, target):
    prob = logits.sigmoid()
    both = 2 * (prob * target).sum(dim=1)
    total = prob.sum(dim=1) + target.sum(dim=1)
    return (1 - (both + 1) / (total + 1)).sum()


def loss(output, batch):
    """The same sum for what goes into the decoder and what leaves each layer."""
    sample, query = torch.where(batch["matched"] >= 0)
    found = batch["matched"][sample, query]
    kinds = torch.full(batch["matched"].shape, CLASSES)
    kinds[sample, query] = batch["kinds"][sample, found]
    weight = torch.ones(CLASSES + 1)
    weight[CLASSES] = NO_OBJECT
    masks, points = batch["masks"][sample, found], batch["points"][sample, found]
    total = 0.0
    for classes, all_masks in zip(output["classes"], output["masks"]):
        named = F.cross_entropy(classes.flatten(0, 1), kinds.flatten(), weight)
        ours = all_masks[sample, query]
        places = chosen_points(ours, points)
        logits, target = sampled(ours, places), sampled(masks, places)
        focal = focal_loss(logits, target) / len(masks)
        dice = dice_loss(logits, target) / len(masks)
        total = total + CLASS_WEIGHT * named + FOCAL_WEIGHT * focal + DICE_WEIGHT * dice
    return total


class PolyAdamW(torch.optim.AdamW):
    """Clips the gradients; the rates fall as a power of what is left."""

    done = 0

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, CLIP_NORM)
        for group in self.param_groups:
            group["lr"] = group["base"] * (1 - self.done / TOTAL) ** POWER
        self.done += 1
        return super().step(closure)


def optimizer(net):
    """Norms and tables do not decay; the backbone learns slowly."""
    spared = nn.LayerNorm | nn.BatchNorm2d | nn.GroupNorm | nn.Embedding
    groups = []
    for name, module in net.named_modules():
        rate = LR * (BACKBONE_RATE if name.startswith("backbone") else 1.0)
        decay = 0.0 if isinstance(module, spared) else WEIGHT_DECAY
        params = list(module.parameters(recurse=False))
        if params:
            groups.append({"params": params, "base": rate, "weight_decay": decay})
    return PolyAdamW(groups, lr=LR, betas=BETAS, eps=EPS)
