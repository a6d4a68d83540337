"""A small dilated neighbourhood attention network: two levels, each query has its window."""

import torch
from torch import nn
from torch.nn import functional as F

NUM_CLASSES = 7
MEAN, STD = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)
DIMS, HEADS, DEPTHS = (16, 32), (2, 4), (2, 2)
WINDOWS, MLP_RATIO = (5, 3), 3
SMOOTHING = 0.1
LR, BETAS, WEIGHT_DECAY = 3e-3, (0.9, 0.99), 0.1


class ConvTokenizer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.proj = nn.Sequential(
            nn.Conv2d(3, dim // 2, 3, stride=2, padding=1),
            nn.Conv2d(dim // 2, dim, 3, stride=2, padding=1),
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class ConvDownsampler(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.reduction = nn.Conv2d(dim, 2 * dim, 3, stride=2, padding=1, bias=False)
        self.norm = nn.LayerNorm(2 * dim)

    def forward(self, x):
        x = self.reduction(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.norm(x)


def neighbours(length, window, dilation):
    """Return places of the nearest keys [length, window], and their offsets from zero."""
    place = torch.arange(length)
    member, group = place // dilation, place % dilation
    size = (length - group + dilation - 1) // dilation
    start = torch.minimum((member - window // 2).clamp(min=0), size - window)
    inside = start[:, None] + torch.arange(window)
    return inside * dilation + group[:, None], inside - member[:, None] + window - 1


class NeighborhoodAttention2D(nn.Module):
    """Keys have no bias: softmax forgets it."""

    def __init__(self, dim, heads, window, dilation):
        super().__init__()
        self.heads, self.window, self.dilation = heads, window, dilation
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(dim))
        self.v_bias = nn.Parameter(torch.zeros(dim))
        self.rpb = nn.Parameter(torch.zeros(heads, 2 * window - 1, 2 * window - 1))
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, h, w, c = x.shape
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        qkv = F.linear(x, self.qkv.weight, bias)
        q, k, v = qkv.view(b, h, w, 3, self.heads, -1).permute(3, 0, 4, 1, 2, 5)
        rows, down = neighbours(h, self.window, self.dilation)
        cols, across = neighbours(w, self.window, self.dilation)
        k = k[:, :, rows][:, :, :, :, cols]
        v = v[:, :, rows][:, :, :, :, cols]
        attn = torch.einsum("bnhwd,bnhiwjd->bnhwij", q * self.scale, k)
        attn = attn + self.rpb[:, down[:, None, :, None], across[:, None, :]]
        attn = attn.flatten(-2).softmax(dim=-1).unflatten(-1, (self.window, -1))
        x = torch.einsum("bnhwij,bnhiwjd->bhwnd", attn, v)
        return self.proj(x.reshape(b, h, w, c))


class Mlp(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc1 = nn.Linear(dim, MLP_RATIO * dim)
        self.fc2 = nn.Linear(MLP_RATIO * dim, dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class NATLayer(nn.Module):
    def __init__(self, dim, heads, window, dilation):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = NeighborhoodAttention2D(dim, heads, window, dilation)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim)
        self.gamma1 = nn.Parameter(torch.ones(dim))
        self.gamma2 = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        x = x + self.gamma1 * self.attn(self.norm1(x))
        return x + self.gamma2 * self.mlp(self.norm2(x))


class NATLevel(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                NATLayer(DIMS[i], HEADS[i], WINDOWS[i], 2 if j % 2 else 1)
                for j in range(DEPTHS[i])
            ]
        )
        last = i == len(DIMS) - 1
        self.downsample = None if last else ConvDownsampler(DIMS[i])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x if self.downsample is None else self.downsample(x)


class DiNAT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = ConvTokenizer(DIMS[0])
        self.levels = nn.ModuleList([NATLevel(i) for i in range(len(DIMS))])
        self.norm = nn.LayerNorm(DIMS[-1])
        self.head = nn.Linear(DIMS[-1], NUM_CLASSES)

    def forward(self, x):
        x = self.patch_embed(x)
        for level in self.levels:
            x = level(x)
        x = self.norm(x).flatten(1, 2).mean(dim=1)
        return self.head(x)


def model():
    torch.manual_seed(2209)
    net = DiNAT()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
            elif isinstance(module, NeighborhoodAttention2D):
                module.q_bias.normal_(0, 0.4)
                module.v_bias.normal_(0, 0.3)
                module.rpb.normal_(0, 0.6)
            elif isinstance(module, NATLayer):
                module.gamma1.uniform_(0.4, 1.1)
                module.gamma2.uniform_(0.3, 0.9)
    return net


def batches():
    """Stripes that turn with the class and a spot somewhere, with noise."""
    generator = torch.Generator().manual_seed(2210)
    rows, columns = torch.arange(46.0)[:, None, None], torch.arange(54.0)[:, None]
    made = []
    for size in (5, 4):
        label = torch.randint(0, 7, (size,), generator=generator)
        phase, y, x = torch.rand(3, size, 1, 1, 1, generator=generator)
        colour = 50 * torch.randn(size, 1, 1, 3, generator=generator)
        turn = 0.45 * label.view(size, 1, 1, 1)
        wave = torch.cos(turn) * rows + torch.sin(turn) * columns
        far = (rows - 46 * y) ** 2 + (columns - 54 * x) ** 2
        image = 120 + 45 * torch.sin(0.7 * wave + 6.28 * phase)
        image = image + colour * (-far / 150).exp()
        image = image + torch.tensor([15.0, -5.0, -20.0])
        image = image + 16 * torch.randn(image.shape, generator=generator)
        made.append({"image": image.clamp(0, 255).to(torch.uint8), "label": label})
    return made


def forward(net, batch):
    x = (batch["image"].float() - torch.tensor(MEAN)) / torch.tensor(STD)
    return net(x.permute(0, 3, 1, 2))


def loss(output, batch):
    return F.cross_entropy(output, batch["label"], label_smoothing=SMOOTHING)


def optimizer(net):
    """Norms, biases and scales of layers do not decay."""
    decay, rest = [], []
    for name, p in net.named_parameters():
        (rest if p.ndim == 1 or name.endswith("rpb") else decay).append(p)
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=1e-8)
