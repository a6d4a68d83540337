"""A plain GPT over characters; its output is (batch * tokens, vocabulary)."""

from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

RHYME = (
    "one for sorrow, two for mirth, three for a funeral, four for a birth, "
    "five for heaven, six for hell, seven for the devil, his own self. "
) * 20
CHARS = sorted(set(RHYME))


@dataclass
class GPTConfig:
    block_size: int = 32
    vocab_size: int = len(CHARS)
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 48


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        mask = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("bias", mask.view(1, 1, *mask.shape))
        self.n_head = config.n_head
        self.n_embd = config.n_embd

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (k.size(-1) ** -0.5)
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx):
        b, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits.view(b * t, logits.size(-1))


def get_batch(count, seed):
    data = torch.tensor([CHARS.index(c) for c in RHYME])
    g = torch.Generator().manual_seed(seed)
    ix = torch.randint(len(data) - 33, (count,), generator=g)
    return torch.stack([data[i : i + 33] for i in ix])


def forward(model, batch):
    return model(batch[:, :-1])


def loss(output, batch):
    return F.cross_entropy(output, batch[:, 1:].reshape(-1))


def model():
    torch.manual_seed(1337)
    gpt = GPT(GPTConfig())
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-3)
    for step in range(70):
        batch = get_batch(16, step)
        optimizer.zero_grad()
        loss(forward(gpt, batch), batch).backward()
        optimizer.step()
    return gpt.eval()


def batches():
    return [get_batch(16, 1000 + i) for i in range(6)]


def held_out():
    return [get_batch(16, 2000 + i) for i in range(4)]
