"""A small tagger: an encoder with linear biases of distance and gated feed-forward layers."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, TAGS, DIM, HEADS, HIDDEN, LAYERS = 30, 6, 16, 4, 22, 2


def slopes(heads):
    """One half to the power of 8/heads, 16/heads and so on."""
    return torch.tensor([2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(DIM, DIM)
        self.key = nn.Linear(DIM, DIM, bias=False)
        self.value = nn.Linear(DIM, DIM)
        self.out = nn.Linear(DIM, DIM)

    def split(self, x):
        return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)

    def forward(self, x, bias):
        q, k, v = map(self.split, (self.query(x), self.key(x), self.value(x)))
        scores = q @ k.transpose(-1, -2) / (DIM // HEADS) ** 0.5
        weights = torch.softmax(scores + bias, dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class GatedLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi = nn.Linear(DIM, 2 * HIDDEN)
        self.wo = nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        x, gate = self.wi(x).chunk(2, dim=-1)
        return self.wo(x * F.gelu(gate))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(DIM)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(DIM)
        self.mlp = GatedLinear()

    def forward(self, x, bias):
        x = x + self.attention(self.norm1(x), bias)
        return x + self.mlp(self.norm2(x))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, DIM, padding_idx=0)
        self.shapes = nn.Embedding(4, DIM)
        self.embed_norm = nn.LayerNorm(DIM, eps=1e-12)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.dense = nn.Linear(DIM, DIM)
        self.tags = nn.Linear(DIM, TAGS)
        self.register_buffer("slopes", slopes(HEADS), persistent=False)

    def bias(self, mask):
        place = torch.arange(mask.shape[1])
        distance = (place[:, None] - place[None, :]).abs()
        bias = -self.slopes[:, None, None] * distance
        hidden = ~mask[:, None, None, :]
        return bias[None].masked_fill(hidden, torch.finfo(bias.dtype).min)

    def forward(self, words, shapes, mask):
        x = self.embed_norm(self.words(words) + self.shapes(shapes))
        bias = self.bias(mask)
        for layer in self.layers:
            x = layer(x, bias)
        return self.tags(torch.tanh(self.dense(self.norm(x))))


def model():
    torch.manual_seed(720)
    net = Tagger()
    with torch.no_grad():
        for name, value in net.named_parameters():
            if "norm" in name and name.endswith("weight"):
                value.uniform_(0.6, 1.5)
            elif name.endswith("bias"):
                value.normal_(0, 0.2)
            elif "layers" in name:
                value.mul_(2.0)
    return net


def batches():
    generator = torch.Generator().manual_seed(721)
    lengths = torch.tensor([9, 6, 4])
    mask = torch.arange(9) < lengths[:, None]
    words = torch.randint(1, 30, (3, 9), generator=generator) * mask
    shapes = torch.randint(0, 4, (3, 9), generator=generator) * mask
    labels = torch.randint(0, 6, (3, 9), generator=generator)
    inside = torch.rand(3, 9, generator=generator) < 0.2
    labels = labels.masked_fill(~mask | inside, -100)
    return [{"words": words, "shapes": shapes, "mask": mask, "labels": labels}]


def forward(net, batch):
    return net(batch["words"], batch["shapes"], batch["mask"])


def loss(output, batch):
    weight = torch.tensor([0.4, 1.0, 1.0, 1.0, 1.5, 1.0])
    return F.cross_entropy(
        output.flatten(0, 1), batch["labels"].flatten(), weight, ignore_index=-100
    )


def optimizer(net):
    decayed = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.05)
