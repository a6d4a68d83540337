"""A small hybrid in the manner of Granite: blocks of Mamba-2 and of attention by turns."""

import math

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, HIDDEN = 40, 32, 48
LAYERS = ("mamba", "attention", "mamba")
EPS = 1e-5
RESIDUAL = 0.6
SOFTCAP = 8.0
# State space
HEADS, HEAD_DIM, GROUPS, STATE, KERNEL, CHUNK = 4, 12, 2, 8, 4, 8
INNER = HEADS * HEAD_DIM
CONV_DIM = INNER + 2 * GROUPS * STATE
# Attention
Q_HEADS, KV_HEADS, ATTN_DIM, ROTARY, WINDOW = 4, 2, 12, 8, 7
ROPE_BASE, ROPE_FACTOR, LOW_FREQ, HIGH_FREQ, ORIGINAL = 50.0, 4.0, 1.0, 4.0, 48
# Training
Z_LOSS = 1e-2
LR, BETAS, ADAM_EPS, WEIGHT_DECAY = 5e-3, (0.9, 0.95), 1e-5, 0.2


class RMSNorm(nn.Module):
    """The weight is what is added to one."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return x * (1 + self.weight)


def segsum(x):
    """Sums from j + 1 to i for each pair; -inf above the diagonal."""
    size = x.shape[-1]
    total = x.cumsum(-1)
    out = total[..., :, None] - total[..., None, :]
    keep = torch.ones(size, size, dtype=torch.bool).tril()
    return out.masked_fill(~keep, -torch.inf)


def chunk_scan(x, a, b, c):
    """x [n, l, h, p], a [n, l, h], b and c [n, l, h, s]; l is a multiple of the chunk."""
    x, a, b, c = (t.unflatten(1, (-1, CHUNK)) for t in (x, a, b, c))
    a = a.permute(0, 3, 1, 2)
    a_cum = a.cumsum(-1)
    inside = torch.exp(segsum(a))
    y_diag = torch.einsum("nclhs,nckhs,nhclk,nckhp->nclhp", c, b, inside, x)
    decay = torch.exp(a_cum[..., -1:] - a_cum)
    states = torch.einsum("nclhs,nhcl,nclhp->nchps", b, decay, x)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
    between = torch.exp(segsum(F.pad(a_cum[..., -1], (1, 0))))
    states = torch.einsum("nhzc,nchps->nzhps", between, states)[:, :-1]
    y_off = torch.einsum("nclhs,nchps,nhcl->nclhp", c, states, torch.exp(a_cum))
    return (y_diag + y_off).flatten(1, 2)


class MambaMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, INNER + CONV_DIM + HEADS, bias=False)
        self.conv1d = nn.Conv1d(
            CONV_DIM, CONV_DIM, KERNEL, groups=CONV_DIM, padding=KERNEL - 1
        )
        self.A_log = nn.Parameter(torch.zeros(HEADS))
        self.D = nn.Parameter(torch.ones(HEADS))
        self.dt_bias = nn.Parameter(torch.zeros(HEADS))
        self.norm = RMSNorm(INNER)
        self.out_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, u):
        n, length, _ = u.shape
        z, xbc, dt = self.in_proj(u).split([INNER, CONV_DIM, HEADS], dim=-1)
        xbc = self.conv1d(xbc.transpose(1, 2))[..., :length].transpose(1, 2)
        xbc = F.silu(xbc)
        x, b, c = xbc.split([INNER, GROUPS * STATE, GROUPS * STATE], dim=-1)
        dt = F.softplus(dt + self.dt_bias)
        a = -torch.exp(self.A_log) * dt
        x = x.view(n, length, HEADS, HEAD_DIM)
        b = b.view(n, length, GROUPS, STATE).repeat_interleave(HEADS // GROUPS, dim=2)
        c = c.view(n, length, GROUPS, STATE).repeat_interleave(HEADS // GROUPS, dim=2)
        extra = -length % CHUNK
        xs = F.pad(x * dt.unsqueeze(-1), (0, 0, 0, 0, 0, extra))
        b, c = (F.pad(t, (0, 0, 0, 0, 0, extra)) for t in (b, c))
        y = chunk_scan(xs, F.pad(a, (0, 0, 0, extra)), b, c)[:, :length]
        y = y + self.D.unsqueeze(-1) * x
        y = self.norm(y.flatten(2) * F.silu(z))
        return self.out_proj(y)


def rope_frequencies():
    """Long waves are stretched, short ones stay, those between are mixed."""
    freqs = ROPE_BASE ** -(torch.arange(0, ROTARY, 2).float() / ROTARY)
    turns = ORIGINAL * freqs / (2 * math.pi)
    smooth = ((turns - LOW_FREQ) / (HIGH_FREQ - LOW_FREQ)).clamp(0, 1)
    return (1 - smooth) * freqs / ROPE_FACTOR + smooth * freqs


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, Q_HEADS * ATTN_DIM, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * ATTN_DIM, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * ATTN_DIM, bias=False)
        self.o_proj = nn.Linear(Q_HEADS * ATTN_DIM, WIDTH, bias=False)
        self.q_norm = RMSNorm(ATTN_DIM)
        self.k_norm = RMSNorm(ATTN_DIM)
        self.sinks = nn.Parameter(torch.zeros(Q_HEADS))
        self.register_buffer("inv_freq", rope_frequencies(), persistent=False)

    def rope(self, x):
        """Only the first part of a head turns."""
        angles = torch.outer(torch.arange(x.shape[2]).float(), self.inv_freq)
        angles = torch.cat([angles, angles], dim=-1)
        turned, kept = x[..., :ROTARY], x[..., ROTARY:]
        turned = turned * angles.cos() + rotate_half(turned) * angles.sin()
        return torch.cat([turned, kept], dim=-1)

    def forward(self, x):
        n, length, _ = x.shape
        q = self.q_proj(x).view(n, length, Q_HEADS, ATTN_DIM).transpose(1, 2)
        k = self.k_proj(x).view(n, length, KV_HEADS, ATTN_DIM).transpose(1, 2)
        v = self.v_proj(x).view(n, length, KV_HEADS, ATTN_DIM).transpose(1, 2)
        q, k = self.rope(self.q_norm(q)), self.rope(self.k_norm(k))
        k = k.repeat_interleave(Q_HEADS // KV_HEADS, dim=1)
        v = v.repeat_interleave(Q_HEADS // KV_HEADS, dim=1)
        scores = q @ k.transpose(-2, -1) * ATTN_DIM**-0.5
        place = torch.arange(length)
        back = place[:, None] - place
        scores = scores.masked_fill((back < 0) | (back >= WINDOW), -torch.inf)
        sinks = self.sinks.view(1, -1, 1, 1).expand(n, -1, length, 1)
        probs = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        out = (probs @ v).transpose(1, 2).flatten(2)
        return self.o_proj(out)


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.input_norm = RMSNorm(WIDTH)
        self.mixer = MambaMixer() if kind == "mamba" else Attention()
        self.post_norm = RMSNorm(WIDTH)
        self.mlp = SwiGLU()

    def forward(self, x):
        x = x + RESIDUAL * self.mixer(self.input_norm(x))
        return x + RESIDUAL * self.mlp(self.post_norm(x))


class Hybrid(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Block(kind) for kind in LAYERS])
        self.norm = RMSNorm(WIDTH)

    def forward(self, tokens):
        x = self.embed(tokens) * WIDTH**0.5
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return SOFTCAP * torch.tanh(logits / SOFTCAP)


def model():
    torch.manual_seed(2410)
    net = Hybrid()
    with torch.no_grad():
        nn.init.normal_(net.embed.weight, std=0.25)
        for module in net.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1.2 * module.in_features**-0.5)
            elif isinstance(module, nn.Conv1d):
                module.weight.normal_(0, 0.5)
                module.bias.normal_(0, 0.3)
            elif isinstance(module, RMSNorm):
                module.weight.normal_(0, 0.3)
            elif isinstance(module, MambaMixer):
                module.A_log.uniform_(math.log(0.3), math.log(3.0))
                module.D.normal_(1.0, 0.4)
                dt = torch.empty(HEADS).uniform_(0.1, 0.8)
                module.dt_bias.copy_(torch.log(torch.expm1(dt)))
            elif isinstance(module, Attention):
                module.sinks.normal_(0.5, 0.8)
    return net


def batches():
    """Steps around a ring of tokens with some noise; the rest of a row is padding."""
    generator = torch.Generator().manual_seed(2411)
    made = []
    for size, length in ((3, 22), (4, 19)):
        start = torch.randint(1, 40, (size, 1), generator=generator)
        stride = torch.randint(1, 6, (size, 1), generator=generator)
        tokens = 1 + (start + stride * torch.arange(length)) % 39
        noise = torch.randint(1, 40, (size, length), generator=generator)
        noisy = torch.rand(size, length, generator=generator) < 0.3
        tokens = torch.where(noisy, noise, tokens)
        lengths = length - torch.arange(size) * 2
        prompts = torch.randint(3, 8, (size,), generator=generator)
        padding = torch.arange(length) >= lengths[:, None]
        made.append(
            {
                "tokens": tokens.masked_fill(padding, 0),
                "length": lengths,
                "prompt": prompts,
            }
        )
    return made


def forward(net, batch):
    return net(batch["tokens"])


def loss(output, batch):
    """Only what follows the prompt is learned."""
    logits, target = output[:, :-1], batch["tokens"][:, 1:]
    place = torch.arange(1, target.shape[1] + 1)
    keep = (place >= batch["prompt"][:, None]) & (place < batch["length"][:, None])
    ce = F.cross_entropy(logits[keep], target[keep])
    z = torch.logsumexp(logits[keep], dim=-1)
    return ce + Z_LOSS * z.pow(2).mean()


def optimizer(net):
    """Matrices decay; norms, convolutions and what belongs to heads do not."""
    decay = [p for p in net.parameters() if p.ndim == 2]
    rest = [p for p in net.parameters() if p.ndim != 2]
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=ADAM_EPS)
