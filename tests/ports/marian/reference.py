"""A small Marian: a post-norm Transformer that translates from one vocabulary into the same."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

VOCAB, EOS, PAD = 44, 0, 43
D_MODEL, HEADS, FFN_DIM, LAYERS, MAX_LENGTH = 32, 4, 56, 2, 24
LABEL_SMOOTHING = 0.1
LR, WARMUP, BETAS, EPS = 6e-3, 2, (0.9, 0.98), 1e-9
MAX_NORM, EMA_DECAY = 1.0, 0.999


def sinusoids(length, dim):
    """Sines in the first half of the channels, cosines in the second."""
    position = np.arange(length)[:, None]
    angle = position / np.power(10000, 2 * np.arange(dim // 2) / dim)
    table = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
    return torch.from_numpy(table).float()


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def split(self, x):
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, memory, mask):
        q = self.split(self.q_proj(x))
        k = self.split(self.k_proj(memory))
        v = self.split(self.v_proj(memory))
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out_proj(x.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.fc2(F.silu(self.fc1(x)))


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = Attention(D_MODEL, HEADS)
        self.self_attn_norm = nn.LayerNorm(D_MODEL)
        self.ffn = FeedForward(D_MODEL, FFN_DIM)
        self.final_norm = nn.LayerNorm(D_MODEL)

    def forward(self, x, mask):
        x = self.self_attn_norm(x + self.self_attn(x, x, mask))
        return self.final_norm(x + self.ffn(x))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = Attention(D_MODEL, HEADS)
        self.self_attn_norm = nn.LayerNorm(D_MODEL)
        self.cross_attn = Attention(D_MODEL, HEADS)
        self.cross_attn_norm = nn.LayerNorm(D_MODEL)
        self.ffn = FeedForward(D_MODEL, FFN_DIM)
        self.final_norm = nn.LayerNorm(D_MODEL)

    def forward(self, x, mask, memory, memory_mask):
        x = self.self_attn_norm(x + self.self_attn(x, x, mask))
        x = self.cross_attn_norm(x + self.cross_attn(x, memory, memory_mask))
        return self.final_norm(x + self.ffn(x))


class Marian(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(VOCAB, D_MODEL, padding_idx=PAD)
        self.register_buffer("positions", sinusoids(MAX_LENGTH, D_MODEL))
        self.encoder = nn.ModuleList([EncoderLayer() for _ in range(LAYERS)])
        self.decoder = nn.ModuleList([DecoderLayer() for _ in range(LAYERS)])
        self.final_logits_bias = nn.Parameter(torch.zeros(VOCAB))
        self.embed_scale = math.sqrt(D_MODEL)

    def embed(self, tokens):
        x = self.shared(tokens) * self.embed_scale
        return x + self.positions[: tokens.shape[1]]

    def forward(self, source, target):
        """source (batch, s), target (batch, t) -> logits (batch, t, words)."""
        memory_mask = (source != PAD)[:, None, None, :]
        x = self.embed(source)
        for layer in self.encoder:
            x = layer(x, memory_mask)
        memory = x

        length = target.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = causal & (target != PAD)[:, None, None, :]
        x = self.embed(shift_right(target))
        for layer in self.decoder:
            x = layer(x, mask, memory, memory_mask)
        return F.linear(x, self.shared.weight, self.final_logits_bias)


def add_eos(tokens):
    """Put EOS behind the last word of each sentence."""
    tokens = F.pad(tokens, (0, 1), value=PAD)
    lengths = (tokens != PAD).sum(dim=1, keepdim=True)
    return tokens.scatter(1, lengths, EOS)


def shift_right(target):
    """The decoder starts with the padding's token."""
    return F.pad(target, (1, 0), value=PAD)[:, :-1]


def model():
    torch.manual_seed(1706)
    net = Marian()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "norm" in name and name.endswith("weight"):
                p.uniform_(0.6, 1.4)
            elif p.ndim == 1:
                p.normal_(0, 0.15)
            elif name == "shared.weight":
                p.normal_(0, D_MODEL**-0.5)
            else:
                nn.init.xavier_uniform_(p)
                p.mul_(1.4)
    return net


def batches():
    """Two micro-batches each: the words backwards, in another part of the vocabulary.

    Some words become two. Rows end in padding; EOS is still to be added.
    """
    generator = torch.Generator().manual_seed(6762)

    def padded(sentences):
        longest = max(len(sentence) for sentence in sentences)
        return torch.tensor([s + [43] * (longest - len(s)) for s in sentences])

    made = []
    for shapes in (
        ([4, 9, 6, 7], [5, 3, 4]),
        ([8, 5, 10], [3, 6, 4, 5]),
        ([6, 9], [7, 4, 3]),
    ):
        micro = []
        for lengths in shapes:
            sources, targets = [], []
            for length in lengths:
                drawn = 20 * torch.rand(length, generator=generator) ** 1.5
                words = (2 + drawn.long()).tolist()
                sources.append(words)
                target = []
                for word in reversed(words):
                    target += [word + 20] if word % 7 else [word + 20, 42]
                targets.append(target)
            micro.append({"source": padded(sources), "target": padded(targets)})
        made.append({"micro": micro})
    return made


def forward(net, batch):
    return [
        net(add_eos(micro["source"]), add_eos(micro["target"]))
        for micro in batch["micro"]
    ]


def loss(output, batch):
    """Micro-batches count by their words, not each as one."""
    total, words = torch.zeros(()), 0
    for logits, micro in zip(output, batch["micro"]):
        target = add_eos(micro["target"])
        total = total + F.cross_entropy(
            logits.flatten(0, 1),
            target.flatten(),
            ignore_index=PAD,
            label_smoothing=LABEL_SMOOTHING,
            reduction="sum",
        )
        words = words + (target != PAD).sum()
    return total / words


class MarianAdam(torch.optim.Adam):
    """Warm-up, then the inverse square root; averages of the parameters on the side."""

    def __init__(self, params):
        super().__init__(params, lr=LR, betas=BETAS, eps=EPS)
        self.done = 0
        self.params = self.param_groups[0]["params"]
        self.average = [p.detach().clone() for p in self.params]

    def step(self, closure=None):
        self.done += 1
        nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        rate = LR * min(self.done / WARMUP, math.sqrt(WARMUP / self.done))
        self.param_groups[0]["lr"] = rate
        super().step(closure)
        decay = min(EMA_DECAY, (1 + self.done) / (10 + self.done))
        with torch.no_grad():
            for average, p in zip(self.average, self.params):
                average.lerp_(p, 1 - decay)


def optimizer(net):
    return MarianAdam(net.parameters())
