"""A small promptable segmenter: image encoder with windows, points and boxes, masks and scores."""

import math

import torch
import torch.nn.functional as F
from torch import nn

IMAGE, PATCH = 32, 4
GRID = IMAGE // PATCH
WIDTH, DIM = 24, 32
MASKS = 4


class LayerNorm2d(nn.Module):
    def __init__(self, channels, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class GridAttention(nn.Module):
    """Attention on a square grid, with a bias for steps down and one for steps across."""

    def __init__(self, size, heads=3):
        super().__init__()
        self.heads = heads
        self.scale = (WIDTH // heads) ** -0.5
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.rel_pos_h = nn.Parameter(torch.randn(2 * size - 1, WIDTH // heads))
        self.rel_pos_w = nn.Parameter(torch.randn(2 * size - 1, WIDTH // heads))
        place = torch.arange(size)
        steps = place[:, None] - place[None, :] + size - 1
        self.register_buffer("steps", steps, persistent=False)

    def forward(self, x):
        n, h, w, c = x.shape
        qkv = self.qkv(x).reshape(n, h * w, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        on_grid = q.unflatten(2, (h, w))
        down = torch.einsum("nahwc,hkc->nahwk", on_grid, self.rel_pos_h[self.steps])
        across = torch.einsum("nahwc,wkc->nahwk", on_grid, self.rel_pos_w[self.steps])
        bias = down[..., :, None] + across[..., None, :]
        scores = scores + bias.reshape(scores.shape)
        y = scores.softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(n, h, w, c))


class EncoderBlock(nn.Module):
    def __init__(self, window=0):
        super().__init__()
        self.window = window
        self.norm1 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.attn = GridAttention(window or GRID)
        self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def in_windows(self, x):
        n, h, w, c = x.shape
        size = self.window
        x = F.pad(x, (0, 0, 0, -w % size, 0, -h % size))
        rows, columns = x.shape[1] // size, x.shape[2] // size
        x = x.reshape(n, rows, size, columns, size, c).transpose(2, 3)
        y = self.attn(x.reshape(-1, size, size, c))
        y = y.reshape(n, rows, columns, size, size, c).transpose(2, 3)
        return y.reshape(n, rows * size, columns * size, c)[:, :h, :w]

    def forward(self, x):
        y = self.norm1(x)
        x = x + (self.in_windows(y) if self.window else self.attn(y))
        return x + self.mlp(self.norm2(x))


class ImageEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.pos_embed = nn.Parameter(torch.randn(1, GRID, GRID, WIDTH) * 0.5)
        self.blocks = nn.ModuleList(EncoderBlock(window) for window in (3, 0, 3))
        self.neck = nn.Sequential(
            nn.Conv2d(WIDTH, DIM, 1, bias=False),
            LayerNorm2d(DIM),
            nn.Conv2d(DIM, DIM, 3, padding=1, bias=False),
            LayerNorm2d(DIM),
        )

    def forward(self, image):
        x = self.patch_embed(image).permute(0, 2, 3, 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.neck(x.permute(0, 3, 1, 2))


class PromptEncoder(nn.Module):
    """Points have the labels 1 and 0, or -1 where there is none; a box is two corners."""

    def __init__(self):
        super().__init__()
        self.register_buffer("gaussian", torch.randn(2, DIM // 2))
        self.background = nn.Parameter(torch.randn(DIM))
        self.foreground = nn.Parameter(torch.randn(DIM))
        self.top_left = nn.Parameter(torch.randn(DIM))
        self.bottom_right = nn.Parameter(torch.randn(DIM))
        self.not_a_point = nn.Parameter(torch.randn(DIM))
        self.no_mask = nn.Parameter(torch.randn(DIM))

    def encode(self, xy):
        angle = 2 * math.pi * ((2 * xy - 1) @ self.gaussian)
        return torch.cat((angle.sin(), angle.cos()), dim=-1)

    def dense_positions(self):
        middle = (torch.arange(GRID) + 0.5) / GRID
        y, x = torch.meshgrid(middle, middle, indexing="ij")
        return self.encode(torch.stack((x, y), dim=-1)).permute(2, 0, 1)

    def forward(self, points, labels, boxes):
        at = self.encode((points + 0.5) / IMAGE)
        label = labels.unsqueeze(-1)
        at = torch.where(label == -1, self.not_a_point, at)
        at = torch.where(label == 0, at + self.background, at)
        at = torch.where(label == 1, at + self.foreground, at)
        corners = self.encode((boxes.reshape(-1, 2, 2) + 0.5) / IMAGE)
        corners = corners + torch.stack((self.top_left, self.bottom_right))
        return torch.cat((at, corners), dim=1), self.no_mask.view(1, DIM, 1, 1)


class Attention(nn.Module):
    """Attention of fewer channels inside than outside."""

    def __init__(self, downsample=1, heads=4):
        super().__init__()
        inner = DIM // downsample
        self.heads = heads
        self.q_proj = nn.Linear(DIM, inner)
        self.k_proj = nn.Linear(DIM, inner)
        self.v_proj = nn.Linear(DIM, inner)
        self.out_proj = nn.Linear(inner, DIM)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, q, k, v):
        q = self.split(self.q_proj(q))
        k = self.split(self.k_proj(k))
        v = self.split(self.v_proj(v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        y = scores.softmax(dim=-1) @ v
        return self.out_proj(y.transpose(1, 2).flatten(2))


class TwoWayBlock(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first = first
        self.self_attn = Attention()
        self.norm1 = nn.LayerNorm(DIM)
        self.token_to_image = Attention(downsample=2)
        self.norm2 = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(
            nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM)
        )
        self.norm3 = nn.LayerNorm(DIM)
        self.image_to_token = Attention(downsample=2)
        self.norm4 = nn.LayerNorm(DIM)

    def forward(self, tokens, image, token_pos, image_pos):
        if self.first:
            tokens = self.self_attn(tokens, tokens, tokens)
        else:
            q = tokens + token_pos
            tokens = tokens + self.self_attn(q, q, tokens)
        tokens = self.norm1(tokens)
        q, k = tokens + token_pos, image + image_pos
        tokens = self.norm2(tokens + self.token_to_image(q, k, image))
        tokens = self.norm3(tokens + self.mlp(tokens))
        q, k = tokens + token_pos, image + image_pos
        image = self.norm4(image + self.image_to_token(k, q, tokens))
        return tokens, image


class TwoWayTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(TwoWayBlock(i == 0) for i in range(2))
        self.final_attn = Attention(downsample=2)
        self.norm_final = nn.LayerNorm(DIM)

    def forward(self, image, image_pos, token_pos):
        image = image.flatten(2).transpose(1, 2)
        image_pos = image_pos.flatten(1).transpose(0, 1)
        tokens = token_pos
        for layer in self.layers:
            tokens, image = layer(tokens, image, token_pos, image_pos)
        y = self.final_attn(tokens + token_pos, image + image_pos, image)
        return self.norm_final(tokens + y), image


class Head(nn.Module):
    """Three layers, with no activation behind the last."""

    def __init__(self, outputs):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(a, b) for a, b in ((DIM, DIM), (DIM, DIM), (DIM, outputs))
        )

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class MaskDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.iou_token = nn.Parameter(torch.randn(1, DIM))
        self.mask_tokens = nn.Parameter(torch.randn(MASKS, DIM))
        self.transformer = TwoWayTransformer()
        self.upscale = nn.Sequential(
            nn.ConvTranspose2d(DIM, DIM // 4, 2, 2),
            LayerNorm2d(DIM // 4),
            nn.GELU(),
            nn.ConvTranspose2d(DIM // 4, DIM // 8, 2, 2),
            nn.GELU(),
        )
        self.hyper = nn.ModuleList(Head(DIM // 8) for _ in range(MASKS))
        self.iou_head = Head(MASKS)

    def forward(self, image, image_pos, sparse, dense):
        own = torch.cat((self.iou_token, self.mask_tokens))
        tokens = torch.cat((own.expand(len(sparse), -1, -1), sparse), dim=1)
        tokens, seen = self.transformer(image + dense, image_pos, tokens)
        iou = self.iou_head(tokens[:, 0])
        seen = seen.transpose(1, 2).unflatten(2, (GRID, GRID))
        features = self.upscale(seen)
        weights = [net(tokens[:, 1 + i]) for i, net in enumerate(self.hyper)]
        masks = torch.stack(weights, dim=1) @ features.flatten(2)
        return {"masks": masks.unflatten(2, features.shape[2:]), "iou": iou}


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.image_encoder = ImageEncoder()
        self.prompt_encoder = PromptEncoder()
        self.mask_decoder = MaskDecoder()

    def forward(self, image, points, labels, boxes):
        image = self.image_encoder(image)
        sparse, dense = self.prompt_encoder(points, labels, boxes)
        where = self.prompt_encoder.dense_positions()
        return self.mask_decoder(image, where, sparse, dense)


def model():
    torch.manual_seed(860)
    net = Segmenter()
    with torch.no_grad():
        for name, value in net.named_parameters():
            if value.dim() == 1 and name.endswith("weight"):
                value.uniform_(0.6, 1.5)
            elif name.endswith("bias"):
                value.normal_(0, 0.25)
            elif name.endswith("weight"):
                value.mul_(2.0)
    return net


def batches():
    generator = torch.Generator().manual_seed(861)
    image = torch.randn(2, 3, 32, 32, generator=generator)
    image = image + image.roll(1, 3) + image.roll(2, 2)
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    first = (x - 11).abs() / 8 + (y - 18).abs() / 5 < 1
    second = ((x - 21) / 6) ** 2 + ((y - 9) / 8) ** 2 < 1
    return [
        {
            "image": image,
            "points": torch.tensor(
                [[[10.0, 17.0], [27.0, 5.0]], [[22.0, 8.0], [0, 0]]]
            ),
            "labels": torch.tensor([[1, 0], [1, -1]]),
            "boxes": torch.tensor([[3.0, 13.0, 19.0, 23.0], [15.0, 1.0, 27.0, 17.0]]),
            "target": torch.stack((first, second)).float(),
        }
    ]


def forward(net, batch):
    return net(batch["image"], batch["points"], batch["labels"], batch["boxes"])


def loss(output, batch):
    logits = output["masks"]
    target = batch["target"].unsqueeze(1).expand_as(logits)
    prob = logits.sigmoid()
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    hit = prob * target + (1 - prob) * (1 - target)
    focal = (ce * (1 - hit) ** 2).mean(dim=(2, 3))
    both = (prob * target).sum(dim=(2, 3))
    either = prob.sum(dim=(2, 3)) + target.sum(dim=(2, 3))
    dice = 1 - (2 * both + 1) / (either + 1)
    iou = (both / (either - both)).detach()
    return (20 * focal + dice).mean() + F.mse_loss(output["iou"], iou)


def optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=8e-4, weight_decay=0.1)
