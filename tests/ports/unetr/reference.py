"""A small UNETR: a ViT on patches of a volume, a convolutional decoder on two scales."""

import torch
from torch import nn
from torch.nn import functional as F

NUM_CLASSES, IGNORE = 4, 255
SIZE, PATCH = (12, 16, 20), 4
GRID = tuple(side // PATCH for side in SIZE)
CHANNELS, DIM, HEADS, DEPTH, MLP_DIM = 2, 24, 3, 3, 48
HALF, FULL = 16, 8
SLOPE = 0.01
CLASS_WEIGHTS = (0.4, 1.2, 0.9, 1.5)
SMOOTHING, DICE_SMOOTH = 0.1, 1.0
SCALE_WEIGHTS = {"full": 2 / 3, "half": 1 / 3}
LR, WEIGHT_DECAY, BETAS, EPS = 4e-3, 0.2, (0.9, 0.98), 1e-6
CLIP_NORM, TOTAL, POWER = 0.5, 10, 0.9


class PatchEmbed(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Conv3d(CHANNELS, DIM, PATCH, stride=PATCH)
        self.pos_embed = nn.Parameter(torch.zeros(1, GRID[0] * GRID[1] * GRID[2], DIM))

    def forward(self, x):
        x = self.proj(x).flatten(2).transpose(1, 2)
        return x + self.pos_embed


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).view(b, n, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(b, n, c)
        return self.proj(x)


class LayerScale(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * self.gamma


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.ls1 = LayerScale(dim)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        self.ls2 = LayerScale(dim)

    def forward(self, x):
        x = x + self.ls1(self.attn(self.norm1(x)))
        h = F.gelu(self.fc1(self.norm2(x)))
        return x + self.ls2(self.fc2(h))


class UpBlock(nn.Module):
    """Twice as large in each direction."""

    def __init__(self, inp, out):
        super().__init__()
        self.conv = nn.ConvTranspose3d(inp, out, 2, stride=2, bias=False)
        self.norm = nn.InstanceNorm3d(out, affine=True)

    def forward(self, x):
        return F.leaky_relu(self.norm(self.conv(x)), SLOPE)


class ResBlock(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.conv1 = nn.Conv3d(inp, out, 3, padding=1, bias=False)
        self.norm1 = nn.InstanceNorm3d(out, affine=True)
        self.conv2 = nn.Conv3d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.InstanceNorm3d(out, affine=True)
        self.conv3 = nn.Conv3d(inp, out, 1, bias=False)
        self.norm3 = nn.InstanceNorm3d(out, affine=True)

    def forward(self, x):
        h = F.leaky_relu(self.norm1(self.conv1(x)), SLOPE)
        h = self.norm2(self.conv2(h))
        return F.leaky_relu(h + self.norm3(self.conv3(x)), SLOPE)


class UNETR(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.blocks = nn.ModuleList([Block(DIM, HEADS, MLP_DIM) for _ in range(DEPTH)])
        self.norm = nn.LayerNorm(DIM, eps=1e-6)
        # Skips: the volume itself, the first block and the second.
        self.stem = ResBlock(CHANNELS, FULL)
        self.skip1 = nn.Sequential(UpBlock(DIM, HALF), UpBlock(HALF, FULL))
        self.skip2 = UpBlock(DIM, HALF)
        self.up2 = UpBlock(DIM, HALF)
        self.dec2 = ResBlock(2 * HALF, HALF)
        self.up1 = UpBlock(HALF, FULL)
        self.dec1 = ResBlock(3 * FULL, FULL)
        self.head_half = nn.Conv3d(HALF, NUM_CLASSES, 1)
        self.head_full = nn.Conv3d(FULL, NUM_CLASSES, 1)

    def to_volume(self, tokens):
        return tokens.transpose(1, 2).unflatten(2, GRID)

    def forward(self, x):
        tokens = self.patch_embed(x)
        hidden = []
        for block in self.blocks:
            tokens = block(tokens)
            hidden.append(tokens)
        bottom = self.to_volume(self.norm(tokens))

        half = torch.cat(
            [self.up2(bottom), self.skip2(self.to_volume(hidden[1]))], dim=1
        )
        half = self.dec2(half)

        full = torch.cat(
            [self.up1(half), self.skip1(self.to_volume(hidden[0])), self.stem(x)], dim=1
        )
        full = self.dec1(full)
        return {"full": self.head_full(full), "half": self.head_half(half)}


def model():
    torch.manual_seed(2103)
    net = UNETR()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.LayerNorm | nn.InstanceNorm3d):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, LayerScale):
                module.gamma.uniform_(0.3, 0.9)
            elif isinstance(module, nn.Linear | nn.Conv3d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
        for module in net.modules():
            if isinstance(module, Attention):
                module.qkv.weight.mul_(1.4)
            elif isinstance(module, ResBlock):
                module.conv1.weight.mul_(0.5)
        net.patch_embed.pos_embed.normal_(0, 0.5)
    return net


def batches():
    """Bodies with balls and rods in two contrasts; outside it is dark and unknown."""
    generator = torch.Generator().manual_seed(2104)
    z = torch.arange(12.0).view(12, 1, 1)
    y, x = torch.arange(16.0).view(16, 1), torch.arange(20.0)
    contrasts = torch.tensor([[140.0, 90], [230, 40], [60, 190], [190, 170]])
    made = []
    for size in (2, 3):
        images, labels = [], []
        for _ in range(size):
            place = torch.rand(3, generator=generator)
            body = (
                ((z - 4.5 - 2 * place[0]) / 6.5) ** 2
                + ((y - 7 - 2 * place[1]) / 7.5) ** 2
                + ((x - 9 - 2 * place[2]) / 9.5) ** 2
            ) < 1
            label = torch.zeros(12, 16, 20, dtype=torch.uint8)
            for kind in (1, 2, 3, 1, 2, 3):
                cz, cy, cx, r = torch.rand(4, generator=generator)
                dz, dy, dx = z - 2 - 8 * cz, y - 3 - 10 * cy, x - 4 - 12 * cx
                away = torch.sqrt(dz**2 + dy**2 + (0.4 if kind == 3 else 1.0) * dx**2)
                label[away < 1.5 + 1.5 * r] = kind
            image = contrasts[label.long()].permute(3, 0, 1, 2)
            tilt = torch.randn(2, 3, 1, 1, 1, generator=generator)
            slope = tilt[:, 0] * (z - 6) + tilt[:, 1] * (y - 8) + tilt[:, 2] * (x - 10)
            noise = 25 * torch.randn(image.shape, generator=generator)
            image = (image + 3 * slope + noise).clamp(0, 400).round() * body
            label[~body] = 0
            # Nobody looked at the last slices of a volume and at its far corner.
            label[-2:] = 255
            label[:, :4, :5] = 255
            images.append(image)
            labels.append(label)
        made.append({"image": torch.stack(images), "label": torch.stack(labels)})
    return made


def normalise(image):
    """Mean 0 and deviation 1 where any contrast is bright; 0 outside."""
    inside = (image > 0).any(dim=1, keepdim=True).float()
    count = inside.sum(dim=(2, 3, 4), keepdim=True)
    mean = (image * inside).sum(dim=(2, 3, 4), keepdim=True) / count
    centred = (image - mean) * inside
    std = (centred.square().sum(dim=(2, 3, 4), keepdim=True) / count).sqrt()
    return centred / std.clamp(min=1e-8)


def forward(net, batch):
    return net(normalise(batch["image"]))


def dice_loss(logits, target):
    """Over the whole batch for each class but the first."""
    valid = (target != IGNORE).unsqueeze(1)
    probs = logits.softmax(dim=1) * valid
    one_hot = F.one_hot(target.where(target != IGNORE, 0), NUM_CLASSES)
    one_hot = one_hot.permute(0, 4, 1, 2, 3) * valid
    both = (probs * one_hot).sum(dim=(0, 2, 3, 4))
    total = (probs + one_hot).sum(dim=(0, 2, 3, 4))
    dice = (2 * both + DICE_SMOOTH) / (total + DICE_SMOOTH)
    return 1 - dice[1:].mean()


def loss(output, batch):
    total = 0.0
    for scale, weight in SCALE_WEIGHTS.items():
        logits = output[scale]
        label = batch["label"].unsqueeze(1).float()
        target = F.interpolate(label, logits.shape[2:], mode="nearest")
        target = target.squeeze(1).long()
        ce = F.cross_entropy(
            logits,
            target,
            torch.tensor(CLASS_WEIGHTS),
            ignore_index=IGNORE,
            label_smoothing=SMOOTHING,
        )
        total = total + weight * (ce + dice_loss(logits, target))
    return total


class PolyAdamW(torch.optim.AdamW):
    """Clips the gradients; the rate falls as a power of what is left."""

    done = 0

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, CLIP_NORM)
        for group in self.param_groups:
            group["lr"] = LR * (1 - self.done / TOTAL) ** POWER
        self.done += 1
        return super().step(closure)


def optimizer(net):
    """Norms and positions do not decay; all others do."""
    decay, rest = [], []
    for module in net.modules():
        spared = isinstance(module, nn.LayerNorm | nn.InstanceNorm3d)
        for name, p in module.named_parameters(recurse=False):
            (rest if spared or name == "pos_embed" else decay).append(p)
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return PolyAdamW(groups, lr=LR, betas=BETAS, eps=EPS)
