"""A small PoolFormer: average pooling less the identity mixes the tokens."""

import torch
from torch import nn
from torch.nn import functional as F

NUM_CLASSES, SIZE = 7, (32, 40)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DIMS, DEPTHS, MLP_RATIOS = (16, 32), (2, 1), (3, 2)
POOL_SIZE = 3
SMOOTHING = 0.1
LR, WARMUP, WEIGHT_DECAY = 8e-3, 4, 0.2


class PatchEmbed(nn.Module):
    def __init__(self, inp, dim, patch, stride, padding):
        super().__init__()
        self.proj = nn.Conv2d(inp, dim, patch, stride, padding)

    def forward(self, x):
        return self.proj(x)


class GroupNorm(nn.GroupNorm):
    """One group."""

    def __init__(self, dim, bias=True):
        super().__init__(1, dim)
        if not bias:
            self.register_parameter("bias", None)


class Pooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool = nn.AvgPool2d(
            POOL_SIZE, stride=1, padding=POOL_SIZE // 2, count_include_pad=False
        )

    def forward(self, x):
        return self.pool(x) - x


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1 = nn.Conv2d(dim, hidden, 1)
        self.act = nn.GELU()
        self.fc2 = nn.Conv2d(hidden, dim, 1)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    """The first norm has no bias: the token mixer forgets it."""

    def __init__(self, dim, mlp_ratio):
        super().__init__()
        self.norm1 = GroupNorm(dim, bias=False)
        self.token_mixer = Pooling()
        self.norm2 = GroupNorm(dim)
        self.mlp = Mlp(dim, mlp_ratio * dim)
        self.layer_scale_1 = nn.Parameter(torch.ones(dim))
        self.layer_scale_2 = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        x = x + self.layer_scale_1[:, None, None] * self.token_mixer(self.norm1(x))
        return x + self.layer_scale_2[:, None, None] * self.mlp(self.norm2(x))


class PoolFormer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = PatchEmbed(3, DIMS[0], 7, 4, 2)
        network = []
        for i, dim in enumerate(DIMS):
            if i > 0:
                network.append(PatchEmbed(DIMS[i - 1], dim, 3, 2, 1))
            blocks = [Block(dim, MLP_RATIOS[i]) for _ in range(DEPTHS[i])]
            network.append(nn.Sequential(*blocks))
        self.network = nn.ModuleList(network)
        self.norm = nn.LayerNorm(DIMS[-1], eps=1e-6)
        self.head = nn.Linear(DIMS[-1], NUM_CLASSES)

    def forward(self, x):
        x = self.patch_embed(x)
        for part in self.network:
            x = part(x)
        return self.head(self.norm(x.mean(dim=(-2, -1))))


def model():
    """As after some epochs: scales are no longer small."""
    torch.manual_seed(2111)
    net = PoolFormer()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.GroupNorm | nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                module.bias.normal_(0, 0.2)
            elif isinstance(module, Block):
                module.layer_scale_1.uniform_(0.4, 1.1)
                module.layer_scale_2.uniform_(0.4, 1.1)
        net.patch_embed.proj.weight.mul_(0.4)
        net.patch_embed.proj.bias.mul_(0.4)
    return net


def batches():
    """Rings whose width and colour depend on the class, on grey ground."""
    generator = torch.Generator().manual_seed(2112)
    rows, columns = torch.arange(36.0).view(36, 1), torch.arange(45.0)
    tints = torch.tensor([[0.9, 0.2, 0.1], [0.1, 0.8, 0.3], [0.2, 0.3, 0.9]])
    made = []
    for size in (6, 5):
        label = torch.randint(0, 7, (size,), generator=generator)
        images = []
        for kind in label.tolist():
            y, x, grey = torch.rand(3, generator=generator)
            away = torch.sqrt((rows - 8 - 20 * y) ** 2 + (columns - 8 - 29 * x) ** 2)
            ring = torch.sin(away / (0.8 + 0.35 * kind)) * torch.exp(-away / 18)
            image = 60 + 100 * grey + 110 * ring.unsqueeze(2) * tints[kind % 3]
            image = image + 16 * torch.randn(36, 45, 3, generator=generator)
            images.append(image.clamp(0, 255).to(torch.uint8))
        made.append({"image": torch.stack(images), "label": label})
    return made


def forward(net, batch):
    """Crop at the centre and standardize."""
    x = batch["image"].permute(0, 3, 1, 2).float() / 255
    top, left = ((a - b) // 2 for a, b in zip(x.shape[2:], SIZE))
    x = x[:, :, top : top + SIZE[0], left : left + SIZE[1]]
    x = (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    return net(x)


def loss(output, batch):
    return F.cross_entropy(output, batch["label"], label_smoothing=SMOOTHING)


class WarmupAdamW(torch.optim.AdamW):
    """The rate rises in a line."""

    done = 0

    def step(self, closure=None):
        self.done += 1
        for group in self.param_groups:
            group["lr"] = LR * min(1.0, self.done / WARMUP)
        return super().step(closure)


def optimizer(net):
    """Norms, scales of layers and biases do not decay."""
    decay = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim == 1]
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return WarmupAdamW(groups, lr=LR, betas=(0.9, 0.99), eps=1e-7)
