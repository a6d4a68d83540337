"""A small Gated PixelCNN: two masked stacks, gates biased by the label, eight grey levels."""

import math

import torch
from torch import nn
from torch.nn import functional as F

CHANNELS, LEVELS = 2, 8
NUM_CLASSES, LABEL_DIM = 5, 10
WIDTH, SKIP_WIDTH = 24, 32
KERNELS = (5, 3, 3)
LR, DECAY_RATE, DECAY_STEPS = 4e-3, 0.5, 3
BETAS, EPS = (0.95, 0.9995), 1e-4


def channel_groups(width):
    """The image channel that each feature belongs to."""
    return torch.arange(width) * CHANNELS // width


class VerticalConv(nn.Conv2d):
    """Sees the rows above and its own one."""

    def __init__(self, inp, out, k):
        super().__init__(inp, out, k, padding=k // 2)
        mask = torch.ones(k, k)
        mask[k // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x):
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=self.padding)


class HorizontalConv(nn.Conv2d):
    """Sees what is to the left; of its own pixel, channels before (A) or up to (B) its own."""

    def __init__(self, kind, inp, out, k, parts=1, bias=True):
        super().__init__(inp, out, (1, k), padding=(0, k // 2), bias=bias)
        outer = channel_groups(out // parts).repeat(parts)[:, None]
        inner = channel_groups(inp)[None, :]
        mask = torch.zeros(out, inp, 1, k)
        mask[..., : k // 2] = 1
        mask[:, :, 0, k // 2] = (outer > inner if kind == "A" else outer >= inner) * 1.0
        self.register_buffer("mask", mask)

    def forward(self, x):
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=self.padding)


def gate(x, label):
    value, gain = (x + label[:, :, None, None]).chunk(2, dim=1)
    return torch.tanh(value) * torch.sigmoid(gain)


class GatedBlock(nn.Module):
    """The horizontal stack ends in the head: the last block has no h_out."""

    def __init__(self, kind, inp, k, last):
        super().__init__()
        self.residual = kind == "B"
        self.v_conv = VerticalConv(inp, 2 * WIDTH, k)
        self.v_label = nn.Linear(LABEL_DIM, 2 * WIDTH, bias=False)
        self.v_to_h = nn.Conv2d(WIDTH, 2 * WIDTH, 1)
        self.h_conv = HorizontalConv(kind, inp, 2 * WIDTH, k, parts=2, bias=False)
        self.h_label = nn.Linear(LABEL_DIM, 2 * WIDTH, bias=False)
        self.h_out = None if last else HorizontalConv("B", WIDTH, WIDTH, 1)
        self.h_skip = HorizontalConv("B", WIDTH, SKIP_WIDTH, 1)

    def forward(self, v, h, label):
        v = gate(self.v_conv(v), self.v_label(label))
        above = F.pad(v, (0, 0, 1, 0))[:, :, :-1]
        x = self.h_conv(h) + self.v_to_h(above)
        x = gate(x, self.h_label(label))
        skip = self.h_skip(x)
        if self.h_out is not None:
            x = self.h_out(x)
            h = h + x if self.residual else x
        return v, h, skip


class GatedPixelCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.label_embed = nn.Embedding(NUM_CLASSES, LABEL_DIM)
        self.blocks = nn.ModuleList(
            [
                GatedBlock(
                    "B" if i else "A",
                    WIDTH if i else CHANNELS,
                    k,
                    last=i == len(KERNELS) - 1,
                )
                for i, k in enumerate(KERNELS)
            ]
        )
        self.head1 = HorizontalConv("B", SKIP_WIDTH, SKIP_WIDTH, 1)
        self.head2 = HorizontalConv("B", SKIP_WIDTH, CHANNELS * LEVELS, 1)

    def forward(self, image, label):
        label = self.label_embed(label)
        v = h = 2 * image.float() / (LEVELS - 1) - 1
        skips = 0
        for block in self.blocks:
            v, h, skip = block(v, h, label)
            skips = skips + skip
        x = self.head1(F.relu(skips))
        x = self.head2(F.relu(x))
        return x.unflatten(1, (CHANNELS, LEVELS)).transpose(1, 2)


def model():
    torch.manual_seed(1606)
    net = GatedPixelCNN()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                module.weight.mul_(1.3)
                if module.bias is not None:
                    module.bias.normal_(0, 0.3)
            elif isinstance(module, nn.Linear):
                module.weight.normal_(0, 0.25)
    return net


def batches():
    """Stripes whose tilt depends on the class; the second channel lags behind the first."""
    generator = torch.Generator().manual_seed(1607)
    rows, columns = torch.arange(9.0)[:, None], torch.arange(7.0)
    made = []
    for size in (6, 5):
        label = torch.randint(0, 5, (size,), generator=generator)
        phase, lag = torch.rand(2, size, 1, 1, 1, generator=generator)
        turn = (0.3 + 0.55 * label).view(size, 1, 1, 1)
        wave = torch.cos(turn) * rows + torch.sin(turn) * columns
        behind = torch.arange(2.0)[:, None, None] * (0.5 + lag)
        image = 3.5 + 3 * torch.sin(0.9 * wave + 6.28 * phase - behind)
        image = image + 0.7 * torch.randn(size, 2, 9, 7, generator=generator)
        image = image.round().clamp(0, 7).to(torch.uint8)
        made.append({"image": image, "label": label})
    return made


def forward(net, batch):
    return net(batch["image"], batch["label"])


def loss(output, batch):
    """Bits per dimension."""
    return F.cross_entropy(output, batch["image"].long()) / math.log(2)


class DecayedAdam(torch.optim.Adam):
    done = 0

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = LR * DECAY_RATE ** (self.done / DECAY_STEPS)
        self.done += 1
        return super().step(closure)


def optimizer(net):
    return DecayedAdam(net.parameters(), lr=LR, betas=BETAS, eps=EPS)
