"""A small masked autoencoder of pictures: a ViT sees a few patches and paints the others."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

HEIGHT, WIDTH, PATCH = 16, 24, 4
GRID = (HEIGHT // PATCH, WIDTH // PATCH)
MASK_RATIO = 0.625
LR, MIN_LR, WARMUP, TOTAL = 2e-3, 1e-5, 2, 12
WEIGHT_DECAY, LAYER_DECAY = 0.05, 0.75


def sincos_1d(dim, pos):
    omega = 1 / 10000 ** (np.arange(dim // 2) / (dim / 2))
    out = np.outer(pos.reshape(-1), omega)
    return np.concatenate([np.sin(out), np.cos(out)], axis=1)


def sincos_2d(dim, grid, cls_token=True):
    """(places, dim): the first half says the column, the second the row."""
    rows, columns = np.meshgrid(np.arange(grid[0]), np.arange(grid[1]), indexing="ij")
    halves = [sincos_1d(dim // 2, columns), sincos_1d(dim // 2, rows)]
    pos = np.concatenate(halves, axis=1)
    if cls_token:
        pos = np.concatenate([np.zeros([1, dim]), pos], axis=0)
    return torch.from_numpy(pos).float().unsqueeze(0)


class Attention(nn.Module):
    """As in BEiT, keys have no bias."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(dim))
        self.v_bias = nn.Parameter(torch.zeros(dim))
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        qkv = F.linear(x, self.qkv.weight, bias)
        qkv = qkv.reshape(b, n, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.gamma_1 = nn.Parameter(torch.ones(dim))
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, 2 * dim)
        self.gamma_2 = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        x = x + self.gamma_1 * self.attn(self.norm1(x))
        return x + self.gamma_2 * self.mlp(self.norm2(x))


def patchify(images):
    """(b, c, h, w) -> (b, places, patch * patch * c)."""
    b, c, h, w = images.shape
    x = images.reshape(b, c, h // PATCH, PATCH, w // PATCH, PATCH)
    x = torch.einsum("bchpwq->bhwpqc", x)
    return x.reshape(b, -1, PATCH * PATCH * c)


class MaskedAutoencoder(nn.Module):
    def __init__(
        self, dim=24, depth=3, heads=3, decoder_dim=16, decoder_depth=2, decoder_heads=2
    ):
        super().__init__()
        pixels = PATCH * PATCH * 3
        self.patch_embed = nn.Linear(pixels, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.register_buffer("pos_embed", sincos_2d(dim, GRID))
        self.blocks = nn.ModuleList([Block(dim, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim, eps=1e-6)

        self.decoder_embed = nn.Linear(dim, decoder_dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_dim))
        self.register_buffer("decoder_pos_embed", sincos_2d(decoder_dim, GRID))
        self.decoder_blocks = nn.ModuleList(
            [Block(decoder_dim, decoder_heads) for _ in range(decoder_depth)]
        )
        self.decoder_norm = nn.LayerNorm(decoder_dim, eps=1e-6)
        self.decoder_pred = nn.Linear(decoder_dim, pixels)

    def random_masking(self, x, noise):
        """Keep the places with the least noise, in the order of it."""
        b, n, d = x.shape
        keep = int(n * (1 - MASK_RATIO))
        ids_shuffle = torch.argsort(noise, dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        ids_keep = ids_shuffle[:, :keep]
        x = torch.gather(x, 1, ids_keep.unsqueeze(-1).expand(-1, -1, d))
        mask = torch.ones(b, n)
        mask[:, :keep] = 0
        return x, torch.gather(mask, 1, ids_restore), ids_restore

    def encode(self, images, noise):
        x = self.patch_embed(patchify(images)) + self.pos_embed[:, 1:]
        x, mask, ids_restore = self.random_masking(x, noise)
        cls_token = self.cls_token + self.pos_embed[:, :1]
        x = torch.cat([cls_token.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x), mask, ids_restore

    def decode(self, latent, ids_restore):
        x = self.decoder_embed(latent)
        b, n = ids_restore.shape
        mask_tokens = self.mask_token.expand(b, n + 1 - x.shape[1], -1)
        places = torch.cat([x[:, 1:], mask_tokens], dim=1)
        index = ids_restore.unsqueeze(-1).expand(-1, -1, x.shape[2])
        places = torch.gather(places, 1, index)
        x = torch.cat([x[:, :1], places], dim=1) + self.decoder_pos_embed
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_pred(self.decoder_norm(x))[:, 1:]

    def forward(self, images, noise):
        latent, mask, ids_restore = self.encode(images, noise)
        return self.decode(latent, ids_restore), mask


def model():
    torch.manual_seed(2110)
    net = MaskedAutoencoder()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "norm" in name and name.endswith("weight"):
                p.uniform_(0.6, 1.4)
            elif "gamma" in name:
                p.uniform_(0.3, 1.1)
            elif "token" in name:
                p.normal_(0, 0.5)
            elif p.ndim == 1:
                p.normal_(0, 0.2)
            else:
                nn.init.xavier_uniform_(p)
                p.mul_(1.3)
    return net


def batches():
    """A bright disc on a slope of colours; the noise says what is seen."""
    generator = torch.Generator().manual_seed(2111)
    down = torch.arange(16.0).view(1, 1, 16, 1)
    across = torch.arange(24.0).view(1, 1, 1, 24)
    made = []
    for size in (4, 3, 4):
        start, slope, turn = torch.rand(3, size, 3, 1, 1, generator=generator)
        image = 60 + 80 * start + 6 * (slope - 0.5) * down + 4 * (turn - 0.5) * across
        centre = torch.rand(2, size, 1, 1, 1, generator=generator)
        away = (down - 4 - 8 * centre[0]).square() + (across - 4 - 16 * centre[1]) ** 2
        image = image + 90 * torch.exp(-away / 12)
        image = image + 3 * torch.randn(image.shape, generator=generator)
        noise = torch.rand(size, 24, generator=generator)
        made.append({"image": image.clamp(0, 255).to(torch.uint8), "noise": noise})
    return made


def normalize(image):
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    return (image / 255 - mean) / std


def forward(net, batch):
    pred, mask = net(normalize(batch["image"]), batch["noise"])
    return {"pred": pred, "mask": mask}


def loss(output, batch):
    target = patchify(normalize(batch["image"]))
    mean = target.mean(dim=-1, keepdim=True)
    var = target.var(dim=-1, keepdim=True)
    target = (target - mean) / (var + 1e-6) ** 0.5

    error = (output["pred"] - target).square().mean(dim=-1)
    return (error * output["mask"]).sum() / output["mask"].sum()


class ScheduledAdamW(torch.optim.AdamW):
    """The rate rises for a few steps and falls as a cosine."""

    done = 0

    def rate(self):
        if self.done < WARMUP:
            return LR * (self.done + 1) / WARMUP
        passed = (self.done - WARMUP) / (TOTAL - WARMUP)
        return MIN_LR + (LR - MIN_LR) * 0.5 * (1 + math.cos(math.pi * passed))

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = self.rate() * group["lr_scale"]
        self.done += 1
        return super().step(closure)


def layer_id(name, depth):
    """0 for what comes before the blocks, depth + 1 for what comes behind."""
    if name.startswith(("patch_embed", "cls_token")):
        return 0
    if name.startswith("blocks."):
        return int(name.split(".")[1]) + 1
    return depth + 1


def optimizer(net):
    depth = len(net.blocks)
    groups = {}
    for name, p in net.named_parameters():
        decays = p.ndim > 1 and not name.endswith("_token")
        number = layer_id(name, depth)
        group = groups.setdefault(
            (number, decays),
            {
                "params": [],
                "weight_decay": WEIGHT_DECAY if decays else 0.0,
                "lr_scale": LAYER_DECAY ** (depth + 1 - number),
            },
        )
        group["params"].append(p)
    return ScheduledAdamW(list(groups.values()), lr=LR, betas=(0.9, 0.95))
