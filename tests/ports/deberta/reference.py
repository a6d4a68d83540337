"""A small DeBERTa with the sharing of ALBERT: contents and positions look at each other."""

import math

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, EMBED, DIM, HEADS, HIDDEN, PASSES = 34, 8, 16, 2, 28, 3
BUCKETS, FARTHEST = 6, 12
EPS = 1e-7


def log_buckets(apart):
    """Near positions for themselves, farther ones together."""
    middle = BUCKETS // 2
    near = (apart < middle) & (apart > -middle)
    size = torch.where(near, middle - 1, apart.abs())
    power = torch.log(size / middle) / math.log((FARTHEST - 1) / middle)
    far = torch.ceil(power * (middle - 1)) + middle
    return torch.where(size <= middle, apart, far.long() * apart.sign())


class DisentangledAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(DIM, DIM)
        self.key = nn.Linear(DIM, DIM)
        self.value = nn.Linear(DIM, DIM)
        self.dense = nn.Linear(DIM, DIM)

    def split(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(-3, -2)

    def forward(self, x, allowed, positions, buckets):
        q, k, v = map(self.split, (self.query(x), self.key(x), self.value(x)))
        scale = math.sqrt(3 * q.shape[-1])
        scores = q @ k.transpose(-1, -2) / scale
        pos_key = self.split(self.key(positions))
        pos_query = self.split(self.query(positions))
        last = 2 * BUCKETS - 1
        index = (buckets + BUCKETS).clamp(0, last).expand(scores.shape)
        c2p = q @ pos_key.transpose(-1, -2)
        scores = scores + c2p.gather(-1, index) / scale
        index = (BUCKETS - buckets).clamp(0, last).expand(scores.shape)
        p2c = k @ pos_query.transpose(-1, -2)
        scores = scores + p2c.gather(-1, index).transpose(-1, -2) / scale
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=-1).masked_fill(~allowed, 0.0)
        return self.dense((weights @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = DisentangledAttention()
        self.attention_norm = nn.LayerNorm(DIM, eps=EPS)
        self.ffn = nn.Linear(DIM, HIDDEN)
        self.ffn_output = nn.Linear(HIDDEN, DIM)
        self.output_norm = nn.LayerNorm(DIM, eps=EPS)

    def forward(self, x, *where):
        x = self.attention_norm(x + self.attention(x, *where))
        hidden = F.gelu(self.ffn(x), approximate="tanh")
        return self.output_norm(x + self.ffn_output(hidden))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, EMBED, padding_idx=0)
        self.types = nn.Embedding(2, EMBED)
        self.embed_norm = nn.LayerNorm(EMBED, eps=EPS)
        self.embed_proj = nn.Linear(EMBED, DIM)
        self.rel_embeddings = nn.Embedding(2 * BUCKETS, DIM)
        self.rel_norm = nn.LayerNorm(DIM, eps=EPS)
        self.layer = Layer()
        self.pooler = nn.Linear(DIM, DIM)
        self.order = nn.Linear(DIM, 2)
        self.transform = nn.Linear(DIM, EMBED)
        self.transform_norm = nn.LayerNorm(EMBED, eps=EPS)
        self.words_bias = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, words, types, mask):
        x = self.embed_norm(self.words(words) + self.types(types))
        x = self.embed_proj(x) * mask[..., None]
        place = torch.arange(words.shape[1])
        buckets = log_buckets(place[:, None] - place)
        allowed = (mask[:, :, None] & mask[:, None, :])[:, None]
        positions = self.rel_norm(self.rel_embeddings.weight)
        for _ in range(PASSES):
            x = self.layer(x, allowed, positions, buckets)
        order = self.order(torch.tanh(self.pooler(x[:, 0])))
        x = F.gelu(self.transform(x), approximate="tanh")
        x = self.transform_norm(x)
        return {"words": x @ self.words.weight.T + self.words_bias, "order": order}


def model():
    torch.manual_seed(740)
    net = Encoder()
    with torch.no_grad():
        for name, value in net.named_parameters():
            if "norm" in name and name.endswith("weight"):
                value.uniform_(0.6, 1.5)
            elif name.endswith("bias"):
                value.normal_(0, 0.2)
            elif "attention" in name:
                value.mul_(2.5)
    return net


def batches():
    generator = torch.Generator().manual_seed(741)
    lengths = torch.tensor([11, 7, 5])
    mask = torch.arange(11) < lengths[:, None]
    words = torch.randint(3, 34, (3, 11), generator=generator) * mask
    hidden = (torch.rand(3, 11, generator=generator) < 0.4) & mask
    hidden[:, 0] = False
    return [
        {
            "words": words.masked_fill(hidden, 2),
            "types": ((torch.arange(11) >= lengths[:, None] // 2) & mask).long(),
            "mask": mask,
            "labels": words.masked_fill(~hidden, -100),
            "order": torch.tensor([1, 0, 1]),
        }
    ]


def forward(net, batch):
    return net(batch["words"], batch["types"], batch["mask"])


def loss(output, batch):
    words = F.cross_entropy(output["words"].flatten(0, 1), batch["labels"].flatten())
    return words + F.cross_entropy(output["order"], batch["order"])


def optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-6)
