"""A ConvMixer whose depthwise convolutions have a large and a small branch."""

import torch
import torch.nn.functional as F
from torch import nn

DIM, DEPTH, CLASSES = 24, 3, 5
DROP_PATH = 0.3
AUX_BLOCK, AUX_WEIGHT = 1, 0.4
SMOOTHING = 0.1
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LR, MOMENTUM, WEIGHT_DECAY = 0.05, 0.9, 0.05


class PatchEmbed(nn.Module):
    """The norm keeps the statistics that it was pretrained with."""

    def __init__(self, dim):
        super().__init__()
        self.proj = nn.Conv2d(3, dim, 5, stride=3, padding=2)
        self.norm = nn.BatchNorm2d(dim)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.norm(F.gelu(self.proj(x)))


class RepConv(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.large = nn.Conv2d(dim, dim, 7, padding=3, groups=dim, bias=False)
        self.large_norm = nn.BatchNorm2d(dim)
        self.small = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=False)
        self.small_norm = nn.BatchNorm2d(dim)

    def forward(self, x):
        large = self.large_norm(self.large(x))
        small = self.small_norm(self.small(x))
        return large + small


class SqueezeExcite(nn.Module):
    def __init__(self, dim, reduction=4):
        super().__init__()
        self.reduce = nn.Conv2d(dim, dim // reduction, 1)
        self.expand = nn.Conv2d(dim // reduction, dim, 1)

    def forward(self, x):
        squeezed = x.mean((2, 3), keepdim=True)
        gate = torch.sigmoid(self.expand(F.relu(self.reduce(squeezed))))
        return x * gate


class Block(nn.Module):
    def __init__(self, dim, drop_path, excite):
        super().__init__()
        self.keep = 1.0 - drop_path
        self.spatial = RepConv(dim)
        self.channel = nn.Conv2d(dim, dim, 1)
        self.norm = nn.BatchNorm2d(dim)
        self.excite = SqueezeExcite(dim) if excite else nn.Identity()

    def forward(self, x):
        x = x + self.keep * F.gelu(self.spatial(x))
        x = self.norm(F.gelu(self.channel(x)))
        return self.excite(x)


class ConvMixer(nn.Module):
    def __init__(self):
        super().__init__()
        rates = torch.linspace(0, DROP_PATH, DEPTH).tolist()
        self.embed = PatchEmbed(DIM)
        self.blocks = nn.ModuleList(
            Block(DIM, rate, excite=i == DEPTH - 1) for i, rate in enumerate(rates)
        )
        self.head = nn.Linear(2 * DIM, CLASSES)
        self.aux_head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        x = self.embed(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == AUX_BLOCK:
                aux = self.aux_head(x.mean((2, 3)))
        pooled = torch.cat([x.mean((2, 3)), x.amax((2, 3))], dim=1)
        return {"logits": self.head(pooled), "aux": aux}


def model():
    torch.manual_seed(3407)
    net = ConvMixer()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.6, 1.4)
            nn.init.normal_(module.bias, std=0.2)
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.4, 1.6)
    return net.train()


def batches():
    """Stripes whose direction and colour depend on the class, in bytes."""
    generator = torch.Generator().manual_seed(515)
    rows, columns = torch.arange(24.0)[:, None, None], torch.arange(32.0)[:, None]
    made = []
    for size in (6, 5):
        label = torch.randint(0, 5, (size,), generator=generator)
        phase, grey = torch.rand(2, size, 1, 1, 1, generator=generator)
        turn = (0.5 * label).view(size, 1, 1, 1)
        along = torch.cos(turn) * rows + torch.sin(turn) * columns
        colour = torch.arange(3.0) * (1 + label.view(size, 1, 1, 1))
        wave = torch.sin(0.7 * along + 6.28 * phase + 0.8 * colour)
        image = 90 + 60 * grey + 55 * wave
        image = image + 25 * torch.randn(size, 24, 32, 3, generator=generator)
        made.append({"image": image.clamp(0, 255).to(torch.uint8), "label": label})
    return made


def forward(net, batch):
    x = (batch["image"] / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    return net(x.permute(0, 3, 1, 2))


def loss(output, batch):
    label = batch["label"]
    main = F.cross_entropy(output["logits"], label, label_smoothing=SMOOTHING)
    return main + AUX_WEIGHT * F.cross_entropy(output["aux"], label)


def optimizer(net):
    params = list(net.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(
        groups, lr=LR, momentum=MOMENTUM, nesterov=True, weight_decay=WEIGHT_DECAY
    )
