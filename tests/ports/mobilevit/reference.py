"""A small MobileViT: inverted residuals and transformers over unfolded patches."""

import math

import torch
from torch import nn
from torch.nn import functional as F

NUM_CLASSES = 6
HEADS, LAYERS, PATCH = 4, 2, 2
EXPANSION = 2
IGNORE, SMOOTHING = -1, 0.1
START_LR, BASE_LR, LAST_LR = 0.01, 0.1, 0.01
WARMUP_STEPS, TOTAL_STEPS = 4, 40
MOMENTUM, WEIGHT_DECAY = 0.9, 0.05


class ConvLayer(nn.Module):
    def __init__(self, inputs, outputs, kernel, stride=1, groups=1, act=True):
        super().__init__()
        self.conv = nn.Conv2d(
            inputs,
            outputs,
            kernel,
            stride=stride,
            padding=kernel // 2,
            groups=groups,
            bias=False,
        )
        self.norm = nn.BatchNorm2d(outputs)
        self.act = nn.SiLU() if act else nn.Identity()

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


class InvertedResidual(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        hidden = inputs * EXPANSION
        self.shortcut = stride == 1 and inputs == outputs
        self.exp_1x1 = ConvLayer(inputs, hidden, 1)
        self.conv_3x3 = ConvLayer(hidden, hidden, 3, stride, groups=hidden)
        self.red_1x1 = ConvLayer(hidden, outputs, 1, act=False)

    def forward(self, x):
        y = self.red_1x1(self.conv_3x3(self.exp_1x1(x)))
        return x + y if self.shortcut else y


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.head_dim = dim // HEADS
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def split(self, x):
        return x.view(*x.shape[:2], HEADS, self.head_dim).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        y = scores.softmax(dim=-1) @ v
        return self.proj(y.transpose(1, 2).reshape(x.shape))


class TransformerLayer(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.silu(self.fc1(self.norm2(x))))


class MobileViTBlock(nn.Module):
    def __init__(self, channels, dim):
        super().__init__()
        self.local_3x3 = ConvLayer(channels, channels, 3)
        self.local_1x1 = nn.Conv2d(channels, dim, 1, bias=False)
        self.layers = nn.Sequential(
            *(TransformerLayer(dim, 2 * dim) for _ in range(LAYERS))
        )
        self.norm = nn.LayerNorm(dim)
        self.conv_proj = ConvLayer(dim, channels, 1)
        self.fusion = ConvLayer(2 * channels, channels, 3)

    def unfold(self, x):
        """(n, d, h, w) -> (n * pixels of a patch, patches, d)."""
        n, d, h, w = x.shape
        x = x.reshape(n * d * (h // PATCH), PATCH, w // PATCH, PATCH).transpose(1, 2)
        x = x.reshape(n, d, -1, PATCH * PATCH).transpose(1, 3)
        return x.reshape(n * PATCH * PATCH, -1, d)

    def fold(self, x, size):
        n, d = len(x) // PATCH**2, x.shape[-1]
        rows, columns = size[0] // PATCH, size[1] // PATCH
        x = x.reshape(n, PATCH * PATCH, rows * columns, d).transpose(1, 3)
        x = x.reshape(n * d * rows, columns, PATCH, PATCH).transpose(1, 2)
        return x.reshape(n, d, *size)

    def forward(self, x):
        y = self.local_1x1(self.local_3x3(x))
        size = y.shape[2:]
        padded = [math.ceil(side / PATCH) * PATCH for side in size]
        if padded != list(size):
            y = F.interpolate(y, padded, mode="bilinear", align_corners=False)
        y = self.norm(self.layers(self.unfold(y)))
        y = self.fold(y, padded)
        if padded != list(size):
            y = F.interpolate(y, size, mode="bilinear", align_corners=False)
        y = self.conv_proj(y)
        return self.fusion(torch.cat([x, y], dim=1))


class MobileViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = ConvLayer(3, 8, 3, stride=2)
        self.layer_1 = nn.Sequential(InvertedResidual(8, 12))
        self.layer_2 = nn.Sequential(
            InvertedResidual(12, 16, stride=2), InvertedResidual(16, 16)
        )
        self.layer_3 = nn.Sequential(MobileViTBlock(16, 20))
        self.layer_4 = nn.Sequential(
            InvertedResidual(16, 24, stride=2), MobileViTBlock(24, 24)
        )
        self.exp_1x1 = ConvLayer(24, 48, 1)
        self.classifier = nn.Linear(48, NUM_CLASSES)

    def forward(self, x):
        x = self.layer_2(self.layer_1(self.stem(x)))
        x = self.layer_4(self.layer_3(x))
        x = self.exp_1x1(x).mean(dim=(2, 3))
        return self.classifier(x)


def model():
    """As after some steps: norms and biases are away from ones and zeros."""
    torch.manual_seed(2110)
    net = MobileViT()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
                module.weight.normal_(0.8, 0.15)
                module.bias.normal_(0.0, 0.2)
            if isinstance(module, nn.Conv2d):
                module.weight.mul_(2.0)
            if isinstance(module, nn.Linear):
                module.bias.normal_(0.0, 0.2)
            if isinstance(module, Attention):
                module.q.weight.mul_(2.0)
                module.k.weight.mul_(2.0)
                module.v.weight.mul_(1.5)
        net.classifier.weight.mul_(2.0)
    return net


def batches():
    """Stripes whose direction and colour depend on the class; -1 is without a label."""
    generator = torch.Generator().manual_seed(2178)
    rows, columns = torch.arange(40.0)[:, None], torch.arange(32.0)
    made = []
    for size in (10, 9):
        label = torch.randint(0, 6, (size,), generator=generator)
        phase, contrast, grey = torch.rand(3, size, 1, 1, 1, generator=generator)
        turn = 0.5 * label.view(size, 1, 1)
        wave = torch.cos(turn) * rows + torch.sin(turn) * columns
        colour = torch.arange(3.0) * (1 + label.view(size, 1, 1, 1))
        image = torch.sin(0.4 * wave[..., None] + 6.28 * phase + 0.8 * colour)
        image = 70 + 90 * grey + (30 + 40 * contrast) * image
        noise = torch.randn(size, 40, 32, 3, generator=generator)
        image = (image + 18 * noise).clamp(0, 255).to(torch.uint8)
        label[size // 2] = -1
        made.append({"image": image, "label": label})
    return made


def forward(net, batch):
    """Pictures come as bytes, red first; the net sees blue first, from 0 to 1."""
    pixels = batch["image"].permute(0, 3, 1, 2).flip(1)
    return net(pixels.float() / 255)


def loss(output, batch):
    return F.cross_entropy(
        output, batch["label"], ignore_index=IGNORE, label_smoothing=SMOOTHING
    )


def learning_rate(step):
    if step < WARMUP_STEPS:
        return START_LR + (BASE_LR - START_LR) * step / WARMUP_STEPS
    done = min(1.0, (step - WARMUP_STEPS) / (TOTAL_STEPS - WARMUP_STEPS))
    return LAST_LR + (BASE_LR - LAST_LR) * 0.5 * (1 + math.cos(math.pi * done))


class WarmupSGD(torch.optim.SGD):
    """Norms and biases do not decay."""

    def __init__(self, net):
        params = list(net.parameters())
        groups = [
            {"params": [p for p in params if p.ndim > 1]},
            {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.done = 0
        super().__init__(
            groups,
            lr=START_LR,
            momentum=MOMENTUM,
            weight_decay=WEIGHT_DECAY,
            nesterov=True,
        )

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = learning_rate(self.done)
        self.done += 1
        return super().step(closure)


def optimizer(net):
    return WarmupSGD(net)
