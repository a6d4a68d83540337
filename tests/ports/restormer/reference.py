"""A small Restormer: attention between channels and gated convolutions on two levels."""

import math

import torch
from torch import nn
from torch.nn import functional as F

DIM, HEADS, FFN_EXPANSION = 12, (2, 3), 2.66
WITH_BIAS, BIAS_FREE = "WithBias", "BiasFree"
LN_EPS = 1e-5
FACTOR = 4
CHARBONNIER_EPS = 1e-3
EDGE_WEIGHT = 0.05
LR, LR_MIN, TOTAL_STEPS = 1e-3, 1e-5, 8
WEIGHT_DECAY, CLIP_NORM = 0.1, 1.0


class BiasFreeLayerNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        sigma = x.var(-1, keepdim=True, unbiased=False)
        return x / torch.sqrt(sigma + LN_EPS) * self.weight


class WithBiasLayerNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        mu = x.mean(-1, keepdim=True)
        sigma = x.var(-1, keepdim=True, unbiased=False)
        return (x - mu) / torch.sqrt(sigma + LN_EPS) * self.weight + self.bias


class LayerNorm(nn.Module):
    """Over the channels of each pixel."""

    def __init__(self, dim, kind):
        super().__init__()
        self.body = (BiasFreeLayerNorm if kind == BIAS_FREE else WithBiasLayerNorm)(dim)

    def forward(self, x):
        n, c, h, w = x.shape
        flat = x.flatten(2).transpose(1, 2)
        return self.body(flat).transpose(1, 2).reshape(n, c, h, w)


class FeedForward(nn.Module):
    """Gated-DConv: one half of the channels opens the other."""

    def __init__(self, dim):
        super().__init__()
        hidden = int(dim * FFN_EXPANSION)
        self.project_in = nn.Conv2d(dim, hidden * 2, 1)
        self.dwconv = nn.Conv2d(hidden * 2, hidden * 2, 3, padding=1, groups=hidden * 2)
        self.project_out = nn.Conv2d(hidden, dim, 1)

    def forward(self, x):
        x1, x2 = self.dwconv(self.project_in(x)).chunk(2, dim=1)
        return self.project_out(F.gelu(x1) * x2)


class Attention(nn.Module):
    """Multi-DConv head transposed attention: channels look at channels."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))
        self.qkv = nn.Conv2d(dim, dim * 3, 1)
        self.qkv_dwconv = nn.Conv2d(dim * 3, dim * 3, 3, padding=1, groups=dim * 3)
        self.project_out = nn.Conv2d(dim, dim, 1)

    def forward(self, x):
        n, c, h, w = x.shape
        qkv = self.qkv_dwconv(self.qkv(x))
        q, k, v = (
            part.reshape(n, self.heads, c // self.heads, h * w)
            for part in qkv.chunk(3, dim=1)
        )
        q = F.normalize(q, dim=-1)
        k = F.normalize(k, dim=-1)
        attn = (q @ k.transpose(-2, -1)) * self.temperature
        attn = attn.softmax(dim=-1)
        out = (attn @ v).reshape(n, c, h, w)
        return self.project_out(out)


class TransformerBlock(nn.Module):
    def __init__(self, dim, heads, norm):
        super().__init__()
        self.norm1 = LayerNorm(dim, norm)
        self.attn = Attention(dim, heads)
        self.norm2 = LayerNorm(dim, norm)
        self.ffn = FeedForward(dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class OverlapPatchEmbed(nn.Module):
    def __init__(self, channels, dim):
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, 3, padding=1, bias=False)

    def forward(self, x):
        return self.proj(x)


class Downsample(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(dim, dim // 2, 3, padding=1, bias=False), nn.PixelUnshuffle(2)
        )

    def forward(self, x):
        return self.body(x)


class Upsample(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(dim, dim * 2, 3, padding=1, bias=False), nn.PixelShuffle(2)
        )

    def forward(self, x):
        return self.body(x)


class Restormer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = OverlapPatchEmbed(3, DIM)
        self.encoder_level1 = TransformerBlock(DIM, HEADS[0], WITH_BIAS)
        self.down1_2 = Downsample(DIM)
        self.latent = TransformerBlock(DIM * 2, HEADS[1], WITH_BIAS)
        self.up2_1 = Upsample(DIM * 2)
        self.reduce_chan_level1 = nn.Conv2d(DIM * 2, DIM, 1)
        self.decoder_level1 = TransformerBlock(DIM, HEADS[0], BIAS_FREE)
        self.output = nn.Conv2d(DIM, 3, 3, padding=1)

    def forward(self, inp_img):
        enc1 = self.encoder_level1(self.patch_embed(inp_img))
        latent = self.latent(self.down1_2(enc1))
        dec1 = torch.cat([self.up2_1(latent), enc1], dim=1)
        dec1 = self.decoder_level1(self.reduce_chan_level1(dec1))
        return self.output(dec1) + inp_img


def model():
    """As after some training: norms and temperatures are not at one any more."""
    torch.manual_seed(4101)
    net = Restormer()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "norm" in name:
                p.add_(0.25 * torch.randn_like(p))
            elif "temperature" in name:
                p.copy_(1.5 + 2.5 * torch.rand_like(p))
            elif name.endswith("dwconv.weight"):
                p.mul_(1.8)
            elif name.endswith("bias"):
                p.add_(0.1 * torch.randn_like(p))
    return net


def batches():
    """Coloured stripes with a disc under noise; some pictures end before the frame does."""
    generator = torch.Generator().manual_seed(4102)
    rows, columns = torch.arange(15.0)[:, None], torch.arange(22.0)
    made = []
    for size in (4, 3):
        clean, extent = [], []
        for i in range(size):
            turn, phase, grey, y, x, r = torch.rand(6, generator=generator).tolist()
            colour = torch.rand(3, 1, 1, generator=generator)
            wave = math.cos(3 * turn) * rows + math.sin(3 * turn) * columns
            image = 60 + 90 * grey + 60 * torch.sin(0.8 * wave + 6 * phase + 3 * colour)
            away = (rows - 15 * y) ** 2 + (columns - 22 * x) ** 2
            image = torch.where(away < (2 + 4 * r) ** 2, 255 * colour, image)
            height, width = (15, 22) if i % 3 == 1 else (11 + i, 20 - 2 * i)
            image[:, height:] = 0
            image[:, :, width:] = 0
            clean.append(image)
            extent.append([height, width])
        images = torch.stack(clean)
        noise = torch.randn(images.shape, generator=generator)
        level = 15 + 35 * torch.rand(size, 1, 1, 1, generator=generator)
        noisy = images + level * noise
        made.append(
            {
                "noisy": noisy.clamp(0, 255).to(torch.uint8),
                "clean": images.clamp(0, 255).to(torch.uint8),
                "extent": torch.tensor(extent),
            }
        )
    return made


def forward(net, batch):
    """Sides become multiples of FACTOR by reflection, and are cut again."""
    x = batch["noisy"].float() / 255
    h, w = x.shape[2:]
    x = F.pad(x, (0, -w % FACTOR, 0, -h % FACTOR), mode="reflect")
    return net(x)[:, :, :h, :w]


def charbonnier(x, y):
    return torch.sqrt((x - y) ** 2 + CHARBONNIER_EPS**2)


def conv_gauss(x):
    k = torch.tensor([[0.05, 0.25, 0.4, 0.25, 0.05]])
    kernel = (k.t() @ k).expand(3, 1, 5, 5)
    return F.conv2d(F.pad(x, (2, 2, 2, 2), mode="replicate"), kernel, groups=3)


def laplacian(x):
    """What is lost when a picture is made small and large again."""
    filtered = conv_gauss(x)
    spread = torch.zeros_like(filtered)
    spread[:, :, ::2, ::2] = filtered[:, :, ::2, ::2] * 4
    return x - conv_gauss(spread)


def loss(output, batch):
    clean = batch["clean"].float() / 255
    h, w = clean.shape[2:]
    height, width = batch["extent"][:, :, None, None].unbind(dim=1)
    inside = (torch.arange(h) < height).unsqueeze(-1) & (
        torch.arange(w) < width
    ).unsqueeze(-2)
    mask = inside.expand_as(clean).float()
    pixel_loss = (charbonnier(output, clean) * mask).sum() / mask.sum()
    edges, clean_edges = laplacian(output * mask), laplacian(clean * mask)
    return pixel_loss + EDGE_WEIGHT * charbonnier(edges, clean_edges).mean()


class CosineAdamW(torch.optim.AdamW):
    """Gradients are clipped by their norm; the rate falls as half a cosine."""

    done = 0

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, CLIP_NORM)
        progress = min(self.done / TOTAL_STEPS, 1.0)
        for group in self.param_groups:
            cosine = 0.5 * (1 + math.cos(math.pi * progress))
            group["lr"] = LR_MIN + (LR - LR_MIN) * cosine
        self.done += 1
        return super().step(closure)


def optimizer(net):
    """Norms, biases and temperatures do not decay."""
    decay, rest = [], []
    for name, p in net.named_parameters():
        kept = p.ndim == 1 or name.endswith("temperature")
        (rest if kept else decay).append(p)
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return CosineAdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
