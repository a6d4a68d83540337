"""A small Pyramid Vision Transformer v2 with class attention and an auxiliary head."""

import math

import torch
from torch import nn
from torch.nn import functional as F

CLASSES = 7
DIMS, HEADS, HIDDEN, DEPTHS = (
    (12, 20, 33, 40),
    (1, 2, 3, 5),
    (48, 60, 66, 90),
    (1, 2, 2, 1),
)
PATCHES, STRIDES = (7, 3, 3, 3), (4, 2, 2, 2)
# The second stage pools what is attended to; the others have a strided convolution.
REDUCTIONS, POOLS = (4, 1, 2, 1), (None, (3, 4), None, None)
# The first stage has learned positions for a grid of this size.
GRID = (6, 11)
CLASS_HIDDEN = 72
MEAN, STD = (123.7, 101.3, 88.5), (58.4, 47.1, 66.4)
SMOOTHING, AUX_WEIGHT = 0.1, 0.4
LR, WEIGHT_DECAY, BETAS, EPS = 2e-3, 0.1, (0.9, 0.98), 1e-6


class OverlapPatchEmbed(nn.Module):
    def __init__(self, inp, dim, patch, stride):
        super().__init__()
        self.proj = nn.Conv2d(inp, dim, patch, stride=stride, padding=patch // 2)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        x = self.proj(x)
        h, w = x.shape[2:]
        return self.norm(x.flatten(2).transpose(1, 2)), h, w


class Attention(nn.Module):
    def __init__(self, dim, heads, reduction, pool):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.linear = pool is not None
        self.reduction = reduction
        if self.linear:
            self.pool = nn.AdaptiveAvgPool2d(pool)
            self.sr = nn.Conv2d(dim, dim, 1)
            self.norm = nn.LayerNorm(dim)
        elif reduction > 1:
            self.sr = nn.Conv2d(dim, dim, reduction, stride=reduction)
            self.norm = nn.LayerNorm(dim)

    def reduced(self, x, h, w):
        if not self.linear and self.reduction == 1:
            return x
        x = x.transpose(1, 2).unflatten(2, (h, w))
        if self.linear:
            x = self.pool(x)
        x = self.norm(self.sr(x).flatten(2).transpose(1, 2))
        return F.gelu(x) if self.linear else x

    def forward(self, x, h, w):
        b, n, c = x.shape
        q = self.q(x).view(b, n, self.heads, -1).transpose(1, 2)
        kv = self.kv(self.reduced(x, h, w)).view(b, -1, 2, self.heads, c // self.heads)
        k, v = kv.permute(2, 0, 3, 1, 4)
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(b, n, c)
        return self.proj(x)


class Mlp(nn.Module):
    def __init__(self, dim, hidden, linear):
        super().__init__()
        self.linear = linear
        self.fc1 = nn.Linear(dim, hidden)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x, h, w):
        x = self.fc1(x)
        if self.linear:
            x = F.relu(x)
        x = self.dwconv(x.transpose(1, 2).unflatten(2, (h, w)))
        x = F.gelu(x.flatten(2).transpose(1, 2))
        return self.fc2(x)


class Block(nn.Module):
    def __init__(self, dim, heads, hidden, reduction, pool):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads, reduction, pool)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, hidden, pool is not None)

    def forward(self, x, h, w):
        x = x + self.attn(self.norm1(x), h, w)
        return x + self.mlp(self.norm2(x), h, w)


class ClassAttention(nn.Module):
    """A token for the class looks at itself and at all others."""

    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.gamma_1 = nn.Parameter(torch.ones(dim))
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        self.gamma_2 = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        b, _, c = x.shape
        cls = self.cls_token.expand(b, -1, -1)
        u = self.norm1(torch.cat([cls, x], dim=1))
        q = self.q(u[:, :1]).view(b, 1, self.heads, -1).transpose(1, 2)
        kv = self.kv(u).view(b, -1, 2, self.heads, c // self.heads)
        k, v = kv.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        cls = cls + self.gamma_1 * self.proj(out)
        hidden = F.gelu(self.fc1(self.norm2(cls)))
        cls = cls + self.gamma_2 * self.fc2(hidden)
        return cls[:, 0]


class Stage(nn.Module):
    def __init__(self, i):
        super().__init__()
        inp = DIMS[i - 1] if i else 3
        dim = DIMS[i]
        self.patch_embed = OverlapPatchEmbed(inp, dim, PATCHES[i], STRIDES[i])
        self.pos_embed = None
        if i == 0:
            self.pos_embed = nn.Parameter(torch.zeros(1, GRID[0] * GRID[1], dim))
        self.blocks = nn.ModuleList(
            Block(dim, HEADS[i], HIDDEN[i], REDUCTIONS[i], POOLS[i])
            for _ in range(DEPTHS[i])
        )
        self.norm = nn.LayerNorm(dim, eps=1e-6)

    def positions(self, h, w):
        table = self.pos_embed.unflatten(1, GRID).permute(0, 3, 1, 2)
        table = F.interpolate(table, size=(h, w), mode="bilinear", align_corners=False)
        return table.flatten(2).transpose(1, 2)

    def forward(self, x):
        x, h, w = self.patch_embed(x)
        if self.pos_embed is not None:
            x = x + self.positions(h, w)
        for block in self.blocks:
            x = block(x, h, w)
        return self.norm(x).transpose(1, 2).unflatten(2, (h, w))


class PyramidVisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(Stage(i) for i in range(len(DIMS)))
        self.class_attn = ClassAttention(DIMS[-1], HEADS[-1], CLASS_HIDDEN)
        self.head = nn.Linear(DIMS[-1], CLASSES)
        self.aux_head = nn.Linear(DIMS[-2], CLASSES)

    def forward(self, x):
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        cls = self.class_attn(x.flatten(2).transpose(1, 2))
        aux = self.aux_head(maps[-2].mean(dim=(2, 3)))
        return {"logits": self.head(cls), "aux": aux}


def model():
    torch.manual_seed(2311)
    net = PyramidVisionTransformer()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                module.bias.normal_(0, 0.2)
        for module in net.modules():
            if isinstance(module, Attention | ClassAttention):
                module.q.weight.mul_(1.5)
        net.stages[0].pos_embed.normal_(0, 0.6)
        net.class_attn.cls_token.normal_(0, 0.7)
        net.class_attn.gamma_1.uniform_(0.4, 1.3)
        net.class_attn.gamma_2.uniform_(0.3, 0.9)
    return net


def batches():
    """Gratings in colours, two of them mixed; the share is that of the first label."""
    generator = torch.Generator().manual_seed(2312)
    colours = torch.tensor([[90.0, 20, -40], [-50, 60, 30], [40, -60, 80]])
    made = []
    for size, height, width in ((4, 33, 65), (5, 33, 97)):
        y, x = torch.arange(height * 1.0)[:, None], torch.arange(width * 1.0)
        labels = torch.randint(0, 7, (size, 2), generator=generator)
        share = 0.5 + 0.45 * torch.rand(size, generator=generator)
        images = []
        for pair, part in zip(labels.tolist(), share.tolist()):
            image = torch.zeros(3, height, width)
            for label, weight in zip(pair, (part, 1 - part)):
                phase, wave = torch.rand(2, generator=generator).tolist()
                angle = math.pi * label / 7
                along = x * math.cos(angle) + y * math.sin(angle)
                grating = torch.sin(along / (1.5 + 1.5 * wave) + 6.3 * phase)
                falloff = torch.exp(-(((y - 12 - 9 * phase) / 14) ** 2))
                image += weight * colours[label % 3, :, None, None] * grating * falloff
            noise = 20 * torch.randn(image.shape, generator=generator)
            image = (image + noise + 115).clamp(0, 255).round()
            images.append(image.to(torch.uint8))
        made.append({"image": torch.stack(images), "label": labels, "share": share})
    return made


def forward(net, batch):
    mean = torch.tensor(MEAN).view(1, 3, 1, 1)
    std = torch.tensor(STD).view(1, 3, 1, 1)
    return net((batch["image"].float() - mean) / std)


def loss(output, batch):
    """Cross entropy with both labels; the auxiliary head learns the same."""
    share = batch["share"].unsqueeze(1)
    first, second = F.one_hot(batch["label"], CLASSES).float().unbind(1)
    target = share * first + (1 - share) * second
    main = F.cross_entropy(output["logits"], target, label_smoothing=SMOOTHING)
    aux = F.cross_entropy(output["aux"], target, label_smoothing=SMOOTHING)
    return main + AUX_WEIGHT * aux


def optimizer(net):
    """Matrices and kernels decay; norms, biases, positions and the class token do not."""
    named = list(net.named_parameters())
    spared = ("pos_embed", "cls_token")
    decay = [p for name, p in named if p.ndim > 1 and not name.endswith(spared)]
    rest = [p for name, p in named if p.ndim == 1 or name.endswith(spared)]
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
