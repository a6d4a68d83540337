"""A small Hyena: a language model of gates and long convolutions with implicit filters."""

import math

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, HIDDEN, DEPTH = 32, 12, 24, 3
ORDER, MAX_LENGTH = 2, 32
PAD = 0


def fftconv(u, k, bias):
    """Convolve causally: zeros up to twice the length, so that nothing comes around.

    Args:
        u: (batch, width, length).
        k: (width, length).
        bias: (width), how much of the input passes by.
    """
    length = u.shape[-1]
    fft_size = 2 * length
    k_f = torch.fft.rfft(k, n=fft_size) / fft_size
    u_f = torch.fft.rfft(u, n=fft_size)
    y = torch.fft.irfft(u_f * k_f, n=fft_size, norm="forward")[..., :length]
    return y + u * bias.unsqueeze(-1)


class Sin(nn.Module):
    def __init__(self, dim, w=3.0):
        super().__init__()
        self.freq = nn.Parameter(w * torch.ones(1, dim))

    def forward(self, x):
        return torch.sin(self.freq * x)


class PositionalEmbedding(nn.Module):
    """Time from 0 to 1, then real and imaginary parts of waves over the longest text."""

    def __init__(self, emb_dim, seq_len):
        super().__init__()
        bands = (emb_dim - 1) // 2
        t = torch.linspace(0, 1, seq_len)[None, :, None]
        w = 2 * math.pi * torch.arange(seq_len)[None, :, None] / seq_len
        f = torch.linspace(1e-4, bands - 1, bands)[None, None]
        z = torch.exp(-1j * f * w)
        z = torch.cat([t, z.real, z.imag], dim=-1)
        self.register_buffer("z", z, persistent=False)
        self.register_buffer("t", t, persistent=False)

    def forward(self, length):
        return self.z[:, :length], self.t[:, :length]


class ExponentialModulation(nn.Module):
    def __init__(
        self, channels, fast_decay_pct=0.3, slow_decay_pct=1.5, target=1e-2, shift=0.05
    ):
        super().__init__()
        self.shift = shift
        max_decay = math.log(target) / fast_decay_pct
        min_decay = math.log(target) / slow_decay_pct
        deltas = torch.linspace(min_decay, max_decay, channels)[None, None]
        self.register_buffer("deltas", deltas)

    def forward(self, t, h):
        decay = torch.exp(-t * self.deltas.abs())
        return h * (decay + self.shift)


class HyenaFilter(nn.Module):
    def __init__(self, channels, emb_dim=7, width=16):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(channels))
        self.pos_emb = PositionalEmbedding(emb_dim, MAX_LENGTH)
        # one activation, with one set of frequencies, in both places
        act = Sin(width)
        self.implicit_filter = nn.Sequential(
            nn.Linear(emb_dim, width),
            act,
            nn.Linear(width, width),
            act,
            nn.Linear(width, channels, bias=False),
        )
        self.modulation = ExponentialModulation(channels)

    def forward(self, length):
        """Return the filters (order, width, length)."""
        z, t = self.pos_emb(length)
        h = self.implicit_filter(z)
        h = self.modulation(t, h)
        h = h / torch.norm(h, p=1, dim=1, keepdim=True)
        return h[0].t().unflatten(0, (ORDER, WIDTH))


class HyenaOperator(nn.Module):
    def __init__(self):
        super().__init__()
        inner = (ORDER + 1) * WIDTH
        self.in_proj = nn.Linear(WIDTH, inner)
        self.short_filter = nn.Conv1d(inner, inner, 3, padding=2, groups=inner)
        self.filter_fn = HyenaFilter(ORDER * WIDTH)
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, u):
        length = u.shape[1]
        u = self.in_proj(u).transpose(1, 2)
        uc = self.short_filter(u)[..., :length]
        *x, v = uc.split(WIDTH, dim=1)
        k = self.filter_fn(length)
        bias = self.filter_fn.bias.view(ORDER, WIDTH)
        for o, x_i in enumerate(reversed(x)):
            v = x_i * fftconv(v, k[o], bias[o])
        return self.out_proj(v.transpose(1, 2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.mixer = HyenaOperator()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x):
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class HyenaLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.embeddings.weight

    def forward(self, input_ids):
        x = self.embeddings(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.ln_f(x))


def model():
    torch.manual_seed(990)
    net = HyenaLM()
    with torch.no_grad():
        net.embeddings.weight.mul_(0.5)
        for module in net.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, HyenaOperator):
                module.in_proj.weight.normal_(0, 0.4)
                module.short_filter.weight[:, :, -1].add_(0.7)
                module.out_proj.weight.normal_(0, 0.2)
            elif isinstance(module, Mlp):
                module.fc2.weight.mul_(2.5)
            elif isinstance(module, Sin):
                module.freq.uniform_(1.0, 4.0)
    return net


def batches():
    generator = torch.Generator().manual_seed(991)
    made = []
    for length, ends in ((25, (25, 18, 22)), (21, (16, 21, 19))):
        tokens = torch.randint(1, 32, (3, length), generator=generator)
        real = torch.arange(length) < torch.tensor(ends)[:, None]
        made.append({"input_ids": tokens * real})
    return made


def forward(net, batch):
    return net(batch["input_ids"][:, :-1])


def loss(output, batch):
    labels = batch["input_ids"][:, 1:]
    return F.cross_entropy(
        output.flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction="mean"
    )


def optimizer(net):
    """Filters learn at a rate of their own, and decay no more than biases do."""
    filters, decayed, rest = [], [], []
    for name, value in net.named_parameters():
        if ".filter_fn." in name:
            filters.append(value)
        elif value.dim() >= 2:
            decayed.append(value)
        else:
            rest.append(value)
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0.0},
        {"params": filters, "weight_decay": 0.0, "lr": 1e-3},
    ]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.98))
