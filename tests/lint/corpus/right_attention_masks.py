import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class SelfAttention(nn.Module):
    def __init__(self, dim, heads, max_len=2048):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.register_buffer("causal", torch.ones(max_len, max_len).tril().bool(), persistent=False)

    def forward(self, x, pad_mask=None):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~self.causal[:t, :t], lowest)
        if pad_mask is not None:
            scores = scores.masked_fill(pad_mask[:, None, None], lowest)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, t, d))


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x):
        t = torch.arange(x.size(1), device=x.device, dtype=torch.float32)
        freqs = torch.outer(t, self.inv_freq)
        emb = torch.cat([freqs, freqs], dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * h).to(x.dtype)


class Model(nn.Module):
    def __init__(self, vocab, dim=512, heads=8, layers=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(SelfAttention(dim, heads) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids, pad_mask=None):
        h = self.embed(ids)
        for block in self.blocks:
            h = h + block(h, pad_mask)
        return self.head(self.norm(h))


@torch.inference_mode()
def generate(path, ids, steps):
    model = Model(32000)
    model.load_state_dict(torch.load(path, weights_only=True))
    model = model.half().cuda().eval()
    for _ in range(steps):
        probs = torch.softmax(model(ids)[:, -1].float(), dim=-1)
        ids = torch.cat([ids, torch.multinomial(probs, 1)], dim=1)
    return ids
