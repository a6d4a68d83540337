"""A small diffusion transformer: adaLN-Zero blocks, noise and a range of variances."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

CHANNELS, SIZE, PATCH, CLASSES = 2, 8, 2, 5
WIDTH, HEADS, DEPTH, HIDDEN, FREQUENCIES = 24, 3, 3, 48, 16
STEPS = 60
LR, WEIGHT_DECAY, CLIP_NORM = 2e-3, 0.2, 1.0
VLB_WEIGHT = 1e-3


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def sincos_1d(dim, pos):
    omega = 1.0 / 10000 ** (np.arange(dim // 2, dtype=np.float64) / (dim / 2))
    out = np.einsum("m,d->md", pos.reshape(-1), omega)
    return np.concatenate([np.sin(out), np.cos(out)], axis=1)


def sincos_2d(dim, side):
    """The first half is of the column, the second of the row."""
    axis = np.arange(side, dtype=np.float64)
    columns, rows = np.meshgrid(axis, axis)
    return np.concatenate([sincos_1d(dim // 2, columns), sincos_1d(dim // 2, rows)], 1)


class PatchEmbed(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(CHANNELS, WIDTH, PATCH, stride=PATCH)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class TimestepEmbedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(FREQUENCIES, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)
        )

    @staticmethod
    def timestep_embedding(t, dim, max_period=10000):
        half = dim // 2
        freqs = torch.exp(-math.log(max_period) * torch.arange(half) / half)
        args = t[:, None].float() * freqs[None]
        return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)

    def forward(self, t):
        return self.mlp(self.timestep_embedding(t, FREQUENCIES))


class LabelEmbedder(nn.Module):
    """The last row is for labels that were dropped."""

    def __init__(self):
        super().__init__()
        self.embedding_table = nn.Embedding(CLASSES + 1, WIDTH)

    def forward(self, labels, drop):
        labels = torch.where(drop, CLASSES, labels)
        return self.embedding_table(labels)


class Attention(nn.Module):
    """Keys have no bias: softmax forgets it."""

    def __init__(self):
        super().__init__()
        self.scale = (WIDTH // HEADS) ** -0.5
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(WIDTH))
        self.v_bias = nn.Parameter(torch.zeros(WIDTH))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, n, c = x.shape
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        qkv = F.linear(x, self.qkv.weight, bias)
        q, k, v = qkv.reshape(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        x = attn.softmax(dim=-1) @ v
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, HIDDEN)
        self.act = nn.GELU(approximate="tanh")
        self.fc2 = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class DiTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.attn = Attention()
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x, c):
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = (
            self.adaLN_modulation(c).chunk(6, dim=1)
        )
        h = self.attn(modulate(self.norm1(x), shift_msa, scale_msa))
        x = x + gate_msa.unsqueeze(1) * h
        h = self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))
        return x + gate_mlp.unsqueeze(1) * h


class FinalLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_final = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(WIDTH, PATCH * PATCH * 2 * CHANNELS)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))

    def forward(self, x, c):
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.x_embedder = PatchEmbed()
        self.t_embedder = TimestepEmbedder()
        self.y_embedder = LabelEmbedder()
        pos_embed = torch.from_numpy(sincos_2d(WIDTH, SIZE // PATCH)).float()
        self.register_buffer("pos_embed", pos_embed.unsqueeze(0))
        self.blocks = nn.ModuleList([DiTBlock() for _ in range(DEPTH)])
        self.final_layer = FinalLayer()

    def unpatchify(self, x):
        side = SIZE // PATCH
        x = x.reshape(len(x), side, side, PATCH, PATCH, 2 * CHANNELS)
        x = torch.einsum("nhwpqc->nchpwq", x)
        return x.reshape(len(x), 2 * CHANNELS, SIZE, SIZE)

    def forward(self, x, t, y, drop):
        x = self.x_embedder(x) + self.pos_embed
        c = self.t_embedder(t) + self.y_embedder(y, drop)
        for block in self.blocks:
            x = block(x, c)
        return self.unpatchify(self.final_layer(x, c))


class GaussianDiffusion:
    """Tables are made in double precision."""

    def __init__(self):
        scale = 1000 / STEPS
        betas = np.linspace(scale * 0.0001, scale * 0.02, STEPS, dtype=np.float64)
        alphas = 1.0 - betas
        cumprod = np.cumprod(alphas)
        prev = np.append(1.0, cumprod[:-1])
        variance = betas * (1.0 - prev) / (1.0 - cumprod)
        self.sqrt_alphas_cumprod = np.sqrt(cumprod)
        self.sqrt_one_minus_alphas_cumprod = np.sqrt(1.0 - cumprod)
        self.sqrt_recip_alphas_cumprod = np.sqrt(1.0 / cumprod)
        self.sqrt_recipm1_alphas_cumprod = np.sqrt(1.0 / cumprod - 1)
        self.log_betas = np.log(betas)
        # The first variance is zero; the second stands in its place.
        self.posterior_log_variance_clipped = np.log(
            np.append(variance[1], variance[1:])
        )
        self.posterior_mean_coef1 = betas * np.sqrt(prev) / (1.0 - cumprod)
        self.posterior_mean_coef2 = (1.0 - prev) * np.sqrt(alphas) / (1.0 - cumprod)

    @staticmethod
    def extract(table, t):
        return torch.from_numpy(table)[t].float().view(-1, 1, 1, 1)

    def q_sample(self, x_start, t, noise):
        return (
            self.extract(self.sqrt_alphas_cumprod, t) * x_start
            + self.extract(self.sqrt_one_minus_alphas_cumprod, t) * noise
        )

    def q_posterior_mean(self, x_start, x_t, t):
        return (
            self.extract(self.posterior_mean_coef1, t) * x_start
            + self.extract(self.posterior_mean_coef2, t) * x_t
        )

    def predict_xstart(self, x_t, t, eps):
        return (
            self.extract(self.sqrt_recip_alphas_cumprod, t) * x_t
            - self.extract(self.sqrt_recipm1_alphas_cumprod, t) * eps
        )

    def p_log_variance(self, values, t):
        min_log = self.extract(self.posterior_log_variance_clipped, t)
        max_log = self.extract(self.log_betas, t)
        frac = (values + 1) / 2
        return frac * max_log + (1 - frac) * min_log

    def vb_terms_bpd(self, eps, values, x_start, x_t, t):
        """Bits for each value; the likelihood of latents is a density."""
        true_mean = self.q_posterior_mean(x_start, x_t, t)
        true_log_variance = self.extract(self.posterior_log_variance_clipped, t)
        mean = self.q_posterior_mean(self.predict_xstart(x_t, t, eps), x_t, t)
        log_variance = self.p_log_variance(values, t)
        kl = normal_kl(true_mean, true_log_variance, mean, log_variance)
        nll = normal_nll(x_start, mean, log_variance)
        kl, nll = mean_flat(kl) / math.log(2.0), mean_flat(nll) / math.log(2.0)
        return torch.where(t == 0, nll, kl)


def mean_flat(x):
    return x.mean(dim=list(range(1, x.ndim)))


def normal_kl(mean1, logvar1, mean2, logvar2):
    return 0.5 * (
        -1.0
        + logvar2
        - logvar1
        + torch.exp(logvar1 - logvar2)
        + (mean1 - mean2) ** 2 * torch.exp(-logvar2)
    )


def normal_nll(x, mean, logvar):
    squared = (x - mean) ** 2 * torch.exp(-logvar)
    return 0.5 * (math.log(2 * math.pi) + logvar + squared)


DIFFUSION = GaussianDiffusion()


def model():
    """As if trained for a while: nothing is zero any more."""
    torch.manual_seed(2212)
    net = DiT()
    with torch.no_grad():
        for name, param in net.named_parameters():
            if name.endswith("bias"):
                param.normal_(0, 0.2)
            elif "embedding_table" in name:
                param.normal_(0, 0.7)
            elif "t_embedder" in name:
                param.normal_(0, 1.2 / math.sqrt(param.shape[1]))
            else:
                gain = 2.0 if "fc1" in name else 1.0
                param.normal_(0, gain / math.sqrt(param[0].numel()))
    return net


def batches():
    """Waves in two channels, as steep and as turned as their class; all kinds of times."""
    generator = torch.Generator().manual_seed(2213)
    rows, columns = torch.arange(8.0)[:, None], torch.arange(8.0)
    times = ([0, 7, 21, 38, 59], [3, 0, 14, 45, 30])
    made = []
    for number, t in enumerate(times):
        label = torch.randint(0, 5, (5,), generator=generator)
        turn = (0.3 + 0.5 * label).view(-1, 1, 1)
        phase = 6.28 * torch.rand(5, 1, 1, generator=generator)
        wave = torch.cos(turn) * rows + torch.sin(turn) * columns
        latent = torch.stack([torch.sin(0.8 * wave + phase), 0.1 * wave - 0.4], dim=1)
        latent = latent + 0.2 * torch.randn(latent.shape, generator=generator)
        noise = torch.randn(latent.shape, generator=generator)
        made.append(
            {
                "latent": latent,
                "noise": noise,
                "t": torch.tensor(t),
                "label": label,
                "drop": torch.arange(5) % 3 == number + 1,
            }
        )
    return made


def forward(net, batch):
    x_t = DIFFUSION.q_sample(batch["latent"], batch["t"], batch["noise"])
    return {"x_t": x_t, "pred": net(x_t, batch["t"], batch["label"], batch["drop"])}


def loss(output, batch):
    """The bound teaches the variance only: the mean is frozen in it."""
    eps, values = output["pred"].chunk(2, dim=1)
    mse = mean_flat((batch["noise"] - eps) ** 2)
    vb = DIFFUSION.vb_terms_bpd(
        eps.detach(), values, batch["latent"], output["x_t"], batch["t"]
    )
    return (mse + VLB_WEIGHT * STEPS * vb).mean()


class ClippedAdamW(torch.optim.AdamW):
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, CLIP_NORM)
        return super().step(closure)


def optimizer(net):
    """Neither biases nor labels decay."""
    table = net.y_embedder.embedding_table.weight
    decay = [p for p in net.parameters() if p.ndim > 1 and p is not table]
    rest = [p for p in net.parameters() if p.ndim == 1 or p is table]
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return ClippedAdamW(groups, lr=LR, betas=(0.9, 0.99), eps=1e-8)
