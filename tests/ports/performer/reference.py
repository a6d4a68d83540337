"""A small Performer: FAVOR+ in an encoder and in a causal decoder, rotary positions, ReZero."""

import math

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, PAD = 24, 0
DIM, HEADS, HEAD_DIM = 36, 3, 12
ROTARY, BASE = 8, 10000.0
FEATURES, FEATURE_EPS, SUM_EPS = 20, 1e-3, 1e-6
HIDDEN = 48
ENCODER_DEPTH, DECODER_DEPTH = 1, 2
SMOOTHING = 0.1
LR, WARMUP, CLIP, WEIGHT_DECAY = 4e-3, 3, 0.6, 0.1
BETAS, ADAM_EPS = (0.9, 0.98), 1e-6


def orthogonal_gaussian(rows, columns):
    """Rows are orthogonal in blocks; their lengths are those of Gaussian vectors."""
    blocks = []
    for start in range(0, rows, columns):
        q, _ = torch.linalg.qr(torch.randn(columns, columns))
        blocks.append(q.T[: min(columns, rows - start)])
    lengths = torch.randn(rows, columns).norm(dim=1)
    return lengths.unsqueeze(1) * torch.cat(blocks)


def rotary_table(length):
    inv_freq = BASE ** (-torch.arange(0, ROTARY, 2).float() / ROTARY)
    angles = torch.arange(length).float().unsqueeze(1) * inv_freq
    angles = angles.repeat_interleave(2, dim=-1)
    return angles.cos(), angles.sin()


def rotate_every_two(x):
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((-odd, even), dim=-1).flatten(-2)


def apply_rotary(x, table):
    cos, sin = table
    rotated, passed = x[..., :ROTARY], x[..., ROTARY:]
    rotated = rotated * cos + rotate_every_two(rotated) * sin
    return torch.cat((rotated, passed), dim=-1)


def softmax_kernel(x, projection, is_query):
    """Positive random features of the softmax kernel."""
    x = x * HEAD_DIM**-0.25
    dash = x @ projection.T
    diag = (x**2).sum(dim=-1, keepdim=True) / 2
    over = (-1,) if is_query else (-1, -2)
    top = dash.amax(dim=over, keepdim=True).detach()
    return FEATURES**-0.5 * (torch.exp(dash - diag - top) + FEATURE_EPS)


def linear_attention(q, k, v):
    context = k.transpose(-2, -1) @ v
    norm = q @ k.sum(dim=-2).unsqueeze(-1)
    return (q @ context) / (norm + SUM_EPS)


def causal_linear_attention(q, k, v):
    context = torch.einsum("bhnm,bhnd->bhnmd", k, v).cumsum(dim=2)
    norm = (q * k.cumsum(dim=2)).sum(dim=-1, keepdim=True)
    return torch.einsum("bhnm,bhnmd->bhnd", q, context) / (norm + SUM_EPS)


class FastAttention(nn.Module):
    def __init__(self, causal=False):
        super().__init__()
        self.causal = causal
        self.to_q = nn.Linear(DIM, DIM, bias=False)
        self.to_k = nn.Linear(DIM, DIM, bias=False)
        self.to_v = nn.Linear(DIM, DIM, bias=False)
        self.to_out = nn.Linear(DIM, DIM)
        projection = orthogonal_gaussian(FEATURES, HEAD_DIM)
        self.register_buffer("projection", projection)

    def split(self, x):
        return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)

    def forward(self, x, context=None, mask=None, table=None):
        context = x if context is None else context
        q = self.split(self.to_q(x))
        k = self.split(self.to_k(context))
        v = self.split(self.to_v(context))
        if table is not None:
            q, k = apply_rotary(q, table), apply_rotary(k, table)
        q = softmax_kernel(q, self.projection, is_query=True)
        k = softmax_kernel(k, self.projection, is_query=False)
        if mask is not None:
            k = k * mask[:, None, :, None]
        attend = causal_linear_attention if self.causal else linear_attention
        out = attend(q, k, v).transpose(1, 2).flatten(2)
        return self.to_out(out)


class GLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(DIM, 2 * HIDDEN)
        self.w2 = nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        gate, value = self.w1(x).chunk(2, dim=-1)
        return self.w2(F.gelu(gate) * value)


class EncoderBlock(nn.Module):
    """The norms stand before."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(DIM)
        self.attn = FastAttention()
        self.norm2 = nn.LayerNorm(DIM)
        self.ff = GLU()

    def forward(self, x, mask, table):
        x = x + self.attn(self.norm1(x), mask=mask, table=table)
        return x + self.ff(self.norm2(x))


class DecoderBlock(nn.Module):
    """ReZero: no norms, a number for each branch."""

    def __init__(self):
        super().__init__()
        self.attn = FastAttention(causal=True)
        self.attn_gain = nn.Parameter(torch.zeros(()))
        self.cross = FastAttention()
        self.cross_gain = nn.Parameter(torch.zeros(()))
        self.ff = GLU()
        self.ff_gain = nn.Parameter(torch.zeros(()))

    def forward(self, x, memory, mask, table):
        x = x + self.attn_gain * self.attn(x, table=table)
        x = x + self.cross_gain * self.cross(x, memory, mask)
        return x + self.ff_gain * self.ff(x)


class Performer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.encoder = nn.ModuleList([EncoderBlock() for _ in range(ENCODER_DEPTH)])
        self.encoder_norm = nn.LayerNorm(DIM)
        self.decoder = nn.ModuleList([DecoderBlock() for _ in range(DECODER_DEPTH)])
        self.norm = nn.LayerNorm(DIM)
        self.out_bias = nn.Parameter(torch.zeros(VOCAB))

    def encode(self, source):
        mask = source != PAD
        x = self.embed(source) * math.sqrt(DIM)
        table = rotary_table(source.shape[1])
        for block in self.encoder:
            x = block(x, mask, table)
        return self.encoder_norm(x), mask

    def forward(self, source, target):
        memory, mask = self.encode(source)
        x = self.embed(target) * math.sqrt(DIM)
        table = rotary_table(target.shape[1])
        for block in self.decoder:
            x = block(x, memory, mask, table)
        return self.norm(x) @ self.embed.weight.T + self.out_bias


def model():
    torch.manual_seed(2009)
    net = Performer()
    with torch.no_grad():
        net.embed.weight.normal_(0, DIM**-0.5)
        net.out_bias.normal_(0, 0.2)
        for name, module in net.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Linear):
                module.weight.normal_(0, module.in_features**-0.5)
                if name.endswith((".to_q", ".to_k")):
                    module.weight.mul_(1.2)
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
            elif isinstance(module, DecoderBlock):
                for gain in (module.attn_gain, module.cross_gain, module.ff_gain):
                    gain.uniform_(0.4, 1.0)
    return net


def batches():
    """Words, and most of them backwards between a first and a last mark."""
    generator = torch.Generator().manual_seed(2010)
    made = []
    for lengths in ((9, 6, 11, 4), (7, 11, 5, 10)):
        source = torch.zeros(4, 11, dtype=torch.long)
        target = torch.zeros(4, 12, dtype=torch.long)
        for row, count in enumerate(lengths):
            words = torch.randint(3, 24, (count,), generator=generator)
            source[row, :count] = words
            kept = words.flip(0)[: count - count // 4]
            target[row, 0] = 1
            target[row, 1 : 1 + len(kept)] = kept
            target[row, 1 + len(kept)] = 2
        made.append({"source": source, "target": target})
    return made


def forward(net, batch):
    return net(batch["source"], batch["target"][:, :-1])


def loss(output, batch):
    return F.cross_entropy(
        output.flatten(0, 1),
        batch["target"][:, 1:].flatten(),
        ignore_index=PAD,
        label_smoothing=SMOOTHING,
    )


class WarmupAdamW(torch.optim.AdamW):
    """Clips by the norm of all; the rate rises in a line and falls as a root."""

    done = 0

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, CLIP)
        self.done += 1
        rate = LR * min(self.done / WARMUP, math.sqrt(WARMUP / self.done))
        for group in self.param_groups:
            group["lr"] = rate
        return super().step(closure)


def optimizer(net):
    """Only matrices decay, and the embedding does not."""
    decay, rest = [], []
    for name, param in net.named_parameters():
        matrix = param.ndim > 1 and not name.startswith("embed")
        (decay if matrix else rest).append(param)
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return WarmupAdamW(groups, lr=LR, betas=BETAS, eps=ADAM_EPS)
