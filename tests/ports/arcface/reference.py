"""A small ArcFace: a shuffled backbone, a global depthwise convolution, an angular margin."""

import math

import torch
from torch import nn
from torch.nn import functional as F

HEIGHT, WIDTH = 40, 32
EMBEDDING, IDENTITIES, UNKNOWN = 32, 20, -1
SCALE, MARGIN = 16.0, 0.8
FLIP_WEIGHT = 0.5
BN_EPS, NECK_EPS, BN_MOMENTUM = 1e-5, 2e-5, 0.2
LR, MOMENTUM = 0.1, 0.9
WEIGHT_DECAY, HEAD_DECAY = 0.02, 0.08
WARMUP, TOTAL, POWER = 2, 10, 2


def conv_bn(inp, out, kernel=1, stride=1, depthwise=False):
    return [
        nn.Conv2d(
            inp,
            out,
            kernel,
            stride,
            padding=kernel // 2,
            groups=inp if depthwise else 1,
            bias=False,
        ),
        nn.BatchNorm2d(out, eps=BN_EPS, momentum=BN_MOMENTUM),
    ]


def channel_shuffle(x, groups):
    b, c, h, w = x.shape
    x = x.view(b, groups, c // groups, h, w).transpose(1, 2)
    return x.reshape(b, c, h, w)


class ShuffleUnit(nn.Module):
    """With a stride both branches see all channels, without one each sees its half."""

    def __init__(self, inp, out, stride):
        super().__init__()
        self.stride = stride
        half = out // 2
        seen = inp if stride > 1 else half
        self.branch1 = nn.Sequential()
        if stride > 1:
            self.branch1 = nn.Sequential(
                *conv_bn(inp, inp, 3, stride, depthwise=True),
                *conv_bn(inp, half),
                nn.PReLU(half),
            )
        self.branch2 = nn.Sequential(
            *conv_bn(seen, half),
            nn.PReLU(half),
            *conv_bn(half, half, 3, stride, depthwise=True),
            *conv_bn(half, half),
            nn.PReLU(half),
        )

    def forward(self, x):
        if self.stride > 1:
            out = torch.cat([self.branch1(x), self.branch2(x)], dim=1)
        else:
            x1, x2 = x.chunk(2, dim=1)
            out = torch.cat([x1, self.branch2(x2)], dim=1)
        return channel_shuffle(out, 2)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 16, 3, stride=2), nn.PReLU(16))
        self.units = nn.Sequential(
            ShuffleUnit(16, 32, 2),
            ShuffleUnit(32, 32, 1),
            ShuffleUnit(32, 48, 2),
            ShuffleUnit(48, 48, 1),
            ShuffleUnit(48, 48, 1),
        )
        self.tail = nn.Sequential(*conv_bn(48, 64), nn.PReLU(64))
        self.gdc = nn.Conv2d(64, 64, (HEIGHT // 8, WIDTH // 8), groups=64, bias=False)
        self.gdc_bn = nn.BatchNorm2d(64, eps=BN_EPS, momentum=BN_MOMENTUM)
        self.fc = nn.Linear(64, EMBEDDING, bias=False)
        # Its scale is one for good: the embedding is normalised behind it.
        self.neck = nn.BatchNorm1d(EMBEDDING, eps=NECK_EPS, momentum=BN_MOMENTUM)
        self.neck.weight.requires_grad_(False)

    def forward(self, x):
        x = self.tail(self.units(self.stem(x)))
        x = self.gdc_bn(self.gdc(x)).flatten(1)
        return self.neck(self.fc(x))


class ArcMargin(nn.Module):
    """Cosines, that of the label with its angle made wider.

    Where angle and margin are more than half a turn, the cosine is lowered instead; with
    an easy margin only angles below a quarter are made wider.
    """

    def __init__(self, features, classes, easy_margin=False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, features))
        self.easy_margin = easy_margin
        self.cos_m, self.sin_m = math.cos(MARGIN), math.sin(MARGIN)
        self.threshold = math.cos(math.pi - MARGIN)
        self.mm = math.sin(math.pi - MARGIN) * MARGIN

    def forward(self, embedding, label):
        cosine = F.linear(F.normalize(embedding), F.normalize(self.weight))
        sine = torch.sqrt((1 - cosine.square()).clamp(min=1e-6))
        phi = cosine * self.cos_m - sine * self.sin_m
        if self.easy_margin:
            phi = torch.where(cosine > 0, phi, cosine)
        else:
            phi = torch.where(cosine > self.threshold, phi, cosine - self.mm)
        is_label = label.unsqueeze(1) == torch.arange(len(self.weight))
        return SCALE * torch.where(is_label, phi, cosine)


class ArcFace(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.head = ArcMargin(EMBEDDING, IDENTITIES)

    @torch.no_grad()
    def steady(self, x):
        """The embedding as it is in use, by the running statistics."""
        mode = self.backbone.training
        self.backbone.eval()
        embedding = self.backbone(x)
        self.backbone.train(mode)
        return embedding

    def forward(self, x, label):
        mirrored = self.steady(x.flip(3))
        embedding = self.backbone(x)
        return {
            "logits": self.head(embedding, label),
            "embedding": embedding,
            "mirrored": mirrored,
        }


def model():
    torch.manual_seed(1901)
    net = ArcFace()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight)
            elif isinstance(module, nn.PReLU):
                module.weight.uniform_(0.05, 0.5)
            elif isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 1.5)
        neck = net.backbone.neck
        neck.bias.normal_(0, 1)
        neck.running_mean.normal_(0, 0.2)
        neck.running_var.uniform_(0.5, 1.5)
        net.head.weight.normal_(0, 0.3)
        # Some begin on the far side, where angle and margin pass half a turn.
        net.head.weight[2::6].mul_(0.3).sub_(neck.bias / 3)
    return net


def batches():
    """Drawn faces: an oval, two eyes and a mouth, places and colours of each identity."""
    generator = torch.Generator().manual_seed(1910)

    def rand(*size):
        return torch.rand(*size, generator=generator)

    def randn(*size):
        return torch.randn(*size, generator=generator)

    skin, eyes, hair = rand(3, 20, 3) * 0.6 + 0.2
    shape = rand(20, 6)
    down = torch.arange(44.0).view(1, 44, 1)
    across = torch.arange(36.0).view(1, 1, 36)

    def spot(y, x, high, wide):
        y, x, high, wide = (v.view(-1, 1, 1) for v in (y, x, high, wide))
        far = ((down - y) / high) ** 2 + ((across - x) / wide) ** 2
        return torch.sigmoid(4 * (1 - far)).unsqueeze(3)

    made = []
    for size in (12, 10, 12):
        identity = torch.randint(0, 20, (size,), generator=generator)
        s = shape[identity] + 0.08 * randn(size, 6)
        y, x = 22 + 1.5 * randn(size), 18 + 1.5 * randn(size)
        image = (0.5 + 0.2 * randn(size, 1, 1, 3)).expand(size, 44, 36, 3)
        image = image + 0.01 * randn(size, 1, 1, 3) * down.unsqueeze(3)
        one = torch.ones(size)
        parts = (
            (hair, spot(y - 6, x, 15 + 3 * s[:, 0], 13 + 2 * s[:, 1])),
            (skin, spot(y, x, 14 + 3 * s[:, 0], 9 + 3 * s[:, 1])),
            (eyes, spot(y - 4, x - 4 - 2 * s[:, 2], 1.5 + s[:, 3], 2 + s[:, 3])),
            (eyes, spot(y - 4, x + 4 + 2 * s[:, 2], 1.5 + s[:, 3], 2 + s[:, 3])),
            (1 - eyes, spot(y + 6 + 2 * s[:, 4], x, 1.5 * one, 3 + 3 * s[:, 5])),
        )
        for colours, cover in parts:
            colour = colours[identity].view(-1, 1, 1, 3)
            image = image + cover * (colour - image)
        light = 0.8 + 0.4 * rand(size, 1, 1, 1)
        image = 255 * light * image + 6 * randn(size, 44, 36, 3)
        label = identity.masked_fill(rand(size) < 0.15, -1)
        label[1] = -1
        made.append(
            {
                "image": image.clamp(0, 255).to(torch.uint8),
                "corner": torch.randint(0, 5, (size, 2), generator=generator),
                "mirror": rand(size) < 0.5,
                "label": label,
            }
        )
    return made


def preprocess(batch):
    """Bytes of rows, columns and colours -> crops in [-1, 1], some mirrored."""
    x = batch["image"].permute(0, 3, 1, 2).float() / 255
    x = (x - 0.5) / 0.5
    crops = []
    for item, (top, left), mirror in zip(x, batch["corner"].tolist(), batch["mirror"]):
        crop = item[:, top : top + HEIGHT, left : left + WIDTH]
        crops.append(crop.flip(2) if mirror else crop)
    return torch.stack(crops)


def forward(net, batch):
    return net(preprocess(batch), batch["label"])


def loss(output, batch):
    """Faces without a known identity only have to look the same in a mirror."""
    entropy = F.cross_entropy(output["logits"], batch["label"], ignore_index=UNKNOWN)
    same = F.cosine_similarity(output["embedding"], output["mirrored"])
    return entropy + FLIP_WEIGHT * (1 - same).mean()


class PolySGD(torch.optim.SGD):
    """The rate rises in a line, then falls as a power of what is left."""

    done = 0

    def rate(self):
        step = self.done + 1
        if step <= WARMUP:
            return LR * step / WARMUP
        return LR * (1 - (step - WARMUP) / (TOTAL - WARMUP)) ** POWER

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = self.rate()
        self.done += 1
        return super().step(closure)


def optimizer(net):
    """Norms, biases and slopes do not decay; the classes' weights decay more."""
    trained = [p for p in net.backbone.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
        {"params": [net.head.weight], "weight_decay": HEAD_DECAY},
    ]
    return PolySGD(groups, lr=LR, momentum=MOMENTUM)
