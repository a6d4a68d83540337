"""A small CoAtNet: two stages of MBConv, two of attention with a bias of relative places."""

import torch
from torch import nn
from torch.nn import functional as F

NUM_CLASSES, IGNORE = 9, -1
SIZE, CELL = (44, 72), 32
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STEM = (8, 12)
# Width, blocks and kernel of a stage of convolutions.
CONV_STAGES = ((16, 1, 3), (20, 2, 5))
# Width, blocks, heads, width of a head and hidden width of a stage of attention.
ATTN_STAGES = ((24, 2, 3, 10, 60), (40, 1, 4, 9, 88))
EXPANSION, REDUCTION = 4, 8
POOL_HEADS, POOL_HEAD_DIM, FEATURES = 5, 7, 48
BN_EPS, LN_EPS = 1e-3, 1e-5
SMOOTHING, TEMPERATURE = 0.1, 2.0
AUX_WEIGHT, DISTILL_WEIGHT = 0.4, 0.3
LR, WEIGHT_DECAY, BETAS, ADAM_EPS = 2e-3, 0.05, (0.9, 0.95), 1e-6


def halved(size):
    return tuple(-(-side // 2) for side in size)


def same_pad(x, kernel, stride, value=0.0):
    """As TensorFlow pads: what is odd goes below and to the right."""
    pads = []
    for side in (x.shape[-1], x.shape[-2]):
        total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads, value=value)


def max_pool(x):
    return F.max_pool2d(same_pad(x, 3, 2, -torch.inf), 3, 2)


class Conv2dSame(nn.Conv2d):
    def forward(self, x):
        x = same_pad(x, self.kernel_size[0], self.stride[0])
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, 1, self.groups)


class BatchNormAct(nn.BatchNorm2d):
    """Statistics are those of the batch."""

    def __init__(self, channels):
        super().__init__(channels, eps=BN_EPS, track_running_stats=False)

    def forward(self, x):
        return F.gelu(super().forward(x), approximate="tanh")


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class SqueezeExcite(nn.Module):
    def __init__(self, channels, reduced):
        super().__init__()
        self.fc1 = nn.Conv2d(channels, reduced, 1)
        self.fc2 = nn.Conv2d(reduced, channels, 1)

    def forward(self, x):
        gate = self.fc2(F.silu(self.fc1(x.mean((2, 3), keepdim=True))))
        return x * gate.sigmoid()


class MBConv(nn.Module):
    def __init__(self, inp, out, kernel, stride):
        super().__init__()
        mid = EXPANSION * out
        self.shortcut = nn.Conv2d(inp, out, 1) if stride == 2 else None
        self.pre_norm = BatchNormAct(inp)
        self.conv1 = nn.Conv2d(inp, mid, 1, bias=False)
        self.norm1 = BatchNormAct(mid)
        self.conv2 = Conv2dSame(mid, mid, kernel, stride, groups=mid, bias=False)
        self.norm2 = BatchNormAct(mid)
        self.se = SqueezeExcite(mid, mid // REDUCTION)
        self.conv3 = nn.Conv2d(mid, out, 1, bias=False)

    def forward(self, x):
        shortcut = x
        if self.shortcut is not None:
            # Windows over the edge count only what is inside.
            shortcut = self.shortcut(F.avg_pool2d(x, 2, ceil_mode=True))
        x = self.norm1(self.conv1(self.pre_norm(x)))
        x = self.norm2(self.conv2(x))
        return shortcut + self.conv3(self.se(x))


class RelPosBias(nn.Module):
    """A row for each difference of places, query minus key."""

    def __init__(self, heads, size):
        super().__init__()
        height, width = size
        rows = (2 * height - 1) * (2 * width - 1)
        self.table = nn.Parameter(torch.zeros(rows, heads))
        y = torch.arange(height).repeat_interleave(width)
        x = torch.arange(width).repeat(height)
        dy = y[:, None] - y + height - 1
        dx = x[:, None] - x + width - 1
        index = dy * (2 * width - 1) + dx
        self.register_buffer("index", index, persistent=False)

    def forward(self, scores):
        return scores + self.table[self.index].permute(2, 0, 1)


class Attention(nn.Module):
    def __init__(self, inp, out, heads, head_dim, size):
        super().__init__()
        self.heads = heads
        self.scale = head_dim**-0.5
        self.qkv = nn.Linear(inp, 3 * heads * head_dim, bias=False)
        self.rel_pos = RelPosBias(heads, size)
        self.proj = nn.Linear(heads * head_dim, out)

    def forward(self, x):
        qkv = self.qkv(x).unflatten(2, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q * self.scale @ k.transpose(-2, -1)
        attn = self.rel_pos(scores).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    def __init__(self, inp, out, heads, head_dim, hidden, size, stride):
        super().__init__()
        self.shortcut = nn.Conv2d(inp, out, 1) if stride == 2 else None
        self.norm1 = LayerNorm2d(inp, eps=LN_EPS)
        self.attn = Attention(inp, out, heads, head_dim, size)
        self.norm2 = nn.LayerNorm(out, eps=LN_EPS)
        self.fc1 = nn.Linear(out, hidden)
        self.fc2 = nn.Linear(hidden, out)

    def forward(self, x):
        y = self.norm1(x)
        if self.shortcut is not None:
            x, y = self.shortcut(max_pool(x)), max_pool(y)
        size = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)
        x = x + self.attn(y.flatten(2).transpose(1, 2))
        x = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return x.transpose(1, 2).unflatten(2, size)


class AttentionPool(nn.Module):
    """A learned query looks at the cells that the picture fills."""

    def __init__(self, dim):
        super().__init__()
        inner = POOL_HEADS * POOL_HEAD_DIM
        self.norm = LayerNorm2d(dim, eps=LN_EPS)
        self.query = nn.Parameter(torch.zeros(POOL_HEADS, POOL_HEAD_DIM))
        self.kv = nn.Linear(dim, 2 * inner, bias=False)
        self.proj = nn.Linear(inner, FEATURES)

    def forward(self, x, size):
        filled = (size + CELL - 1) // CELL
        rows = torch.arange(x.shape[2]) < filled[:, :1]
        columns = torch.arange(x.shape[3]) < filled[:, 1:]
        mask = (rows[:, :, None] & columns[:, None, :]).flatten(1)
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        kv = self.kv(tokens).unflatten(2, (2, POOL_HEADS, -1))
        k, v = kv.permute(2, 0, 3, 1, 4)
        scores = (k @ self.query[:, :, None]).squeeze(-1) * POOL_HEAD_DIM**-0.5
        scores = scores.masked_fill(~mask[:, None, :], -torch.inf)
        pooled = scores.softmax(dim=-1)[:, :, None, :] @ v
        return self.proj(pooled.flatten(1))


class CoAtNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem1 = Conv2dSame(3, STEM[0], 3, stride=2, bias=False)
        self.stem_norm = BatchNormAct(STEM[0])
        self.stem2 = Conv2dSame(STEM[0], STEM[1], 3)
        width, size = STEM[1], halved(SIZE)
        stages = []
        for out, depth, kernel in CONV_STAGES:
            size, blocks = halved(size), []
            for i in range(depth):
                blocks.append(MBConv(width, out, kernel, 2 if i == 0 else 1))
                width = out
            stages.append(nn.Sequential(*blocks))
        self.aux_norm = nn.LayerNorm(width, eps=LN_EPS)
        self.aux_head = nn.Linear(width, NUM_CLASSES)
        for out, depth, heads, head_dim, hidden in ATTN_STAGES:
            size, blocks = halved(size), []
            for i in range(depth):
                stride = 2 if i == 0 else 1
                block = TransformerBlock(
                    width, out, heads, head_dim, hidden, size, stride
                )
                blocks.append(block)
                width = out
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)
        self.pool = AttentionPool(width)
        self.head = nn.Linear(FEATURES, NUM_CLASSES)

    def classify(self, image, size):
        x = self.stem2(self.stem_norm(self.stem1(image)))
        x = self.stages[1](self.stages[0](x))
        aux = self.aux_head(self.aux_norm(x.mean((2, 3))))
        x = self.stages[3](self.stages[2](x))
        features = torch.tanh(self.pool(x, size))
        return {"logits": self.head(features), "aux": aux}

    def forward(self, batch):
        return loss(forward(self, batch), batch)


def model():
    torch.manual_seed(2106)
    net = CoAtNet()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.3)
            elif isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                if module.bias is not None:
                    module.bias.normal_(0, 0.3)
        for module in net.modules():
            if isinstance(module, SqueezeExcite):
                module.fc1.weight.mul_(2.5)
                module.fc2.weight.mul_(2.0)
            elif isinstance(module, RelPosBias):
                module.table.normal_(0, 0.8)
            elif isinstance(module, Attention):
                module.qkv.weight.mul_(1.3)
            elif isinstance(module, AttentionPool):
                module.query.normal_(0, 1.5)
        net.stem1.weight.mul_(0.3)
    return net


def batches():
    """Stripes and a disc, by class; a picture fills the upper left of its canvas."""
    generator = torch.Generator().manual_seed(2107)
    rows, columns = torch.arange(44.0)[:, None], torch.arange(72.0)
    made = []
    for count in (7, 6):
        label = torch.randint(0, 9, (count,), generator=generator)
        height = torch.randint(24, 45, (count,), generator=generator)
        width = torch.randint(20, 73, (count,), generator=generator)
        height[1], width[2] = 32, 64
        kind = label.view(count, 1, 1, 1)
        phase, grey, light = torch.rand(3, count, 1, 1, 1, generator=generator)
        turn = 0.35 * kind
        wave = torch.cos(turn) * rows + torch.sin(turn) * columns
        colour = torch.arange(3.0).view(3, 1, 1) * (1 + kind)
        image = torch.sin(0.45 * wave + 6.28 * phase + 0.7 * colour)
        away = (rows - 8 - 20 * grey) ** 2 + (columns - 9 - 40 * phase) ** 2
        image = 70 + 90 * grey + (25 + 35 * light) * image
        image = image + 50 * (away < (4 + kind) ** 2)
        image = image + 16 * torch.randn(image.shape, generator=generator)
        inside = (rows < height.view(-1, 1, 1, 1)) & (columns < width.view(-1, 1, 1, 1))
        label[count // 2] = -1
        made.append(
            {
                "image": (image.clamp(0, 255) * inside).to(torch.uint8),
                "size": torch.stack([height, width], dim=1),
                "label": label,
            }
        )
    return made


def normalise(image):
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    return (image.float() / 255 - mean) / std


def forward(net, batch):
    return net.classify(normalise(batch["image"]), batch["size"])


def cross_entropy(logits, label):
    """Pictures without a label do not count."""
    return F.cross_entropy(
        logits, label, ignore_index=IGNORE, label_smoothing=SMOOTHING
    )


def distillation(student, teacher):
    """The teacher learns nothing from it; every picture counts."""
    soft = (teacher.detach() / TEMPERATURE).softmax(dim=-1)
    log_probs = (student / TEMPERATURE).log_softmax(dim=-1)
    return TEMPERATURE**2 * F.kl_div(log_probs, soft, reduction="batchmean")


def loss(output, batch):
    main = cross_entropy(output["logits"], batch["label"])
    aux = cross_entropy(output["aux"], batch["label"])
    distilled = distillation(output["aux"], output["logits"])
    return main + AUX_WEIGHT * aux + DISTILL_WEIGHT * distilled


def optimizer(net):
    """Weights of layers decay; norms, biases, tables and the query do not."""
    decay, rest = [], []
    for name, p in net.named_parameters():
        decays = p.ndim > 1 and name.endswith("weight")
        (decay if decays else rest).append(p)
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=ADAM_EPS)
