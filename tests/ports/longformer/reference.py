"""A small Longformer: sliding windows in chunks, one dilated layer, a global first token."""

import math

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, PAD, SEP, TYPES = 40, 1, 2, 2
LABELS, IGNORE = 5, -100
DIM, HEADS, FFN = 24, 3, 48
WINDOW, DILATIONS = 3, (1, 2, 1)
MULTIPLE = WINDOW * max(DILATIONS)
POSITIONS = PAD + 1 + 24
NORM_EPS = 1e-5
LR, WEIGHT_DECAY, BETAS, EPS = 4e-3, 0.1, (0.9, 0.98), 1e-6
CLIP_NORM, WARMUP, TOTAL = 0.5, 2, 10


class Embeddings(nn.Module):
    """Positions are counted from behind the padding index; padding stays there."""

    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(VOCAB, DIM, padding_idx=PAD)
        self.position = nn.Embedding(POSITIONS, DIM, padding_idx=PAD)
        self.segment = nn.Embedding(TYPES, DIM)
        self.norm = nn.LayerNorm(DIM, eps=NORM_EPS)

    def forward(self, ids, types, mask):
        places = mask.long().cumsum(dim=1) * mask + PAD
        return self.norm(self.word(ids) + self.position(places) + self.segment(types))


class SlidingWindowAttention(nn.Module):
    """Keys have no bias: softmax forgets it."""

    def __init__(self, dilation):
        super().__init__()
        self.dilation = dilation
        self.query = nn.Linear(DIM, DIM)
        self.key = nn.Linear(DIM, DIM, bias=False)
        self.value = nn.Linear(DIM, DIM)
        self.query_global = nn.Linear(DIM, DIM)
        self.key_global = nn.Linear(DIM, DIM, bias=False)
        self.value_global = nn.Linear(DIM, DIM)
        self.out = nn.Linear(DIM, DIM)

    def heads(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def chunk(self, x):
        """(b, h, l, d) -> (b, h, dilation, chunks, window, d)."""
        x = x.unflatten(2, (-1, self.dilation)).transpose(2, 3)
        return x.unflatten(3, (-1, WINDOW))

    def neighbours(self, x):
        """Each chunk with the one before and the one behind it."""
        x = self.chunk(x).flatten(3, 4)
        x = F.pad(x, (0, 0, WINDOW, WINDOW))
        return x.unfold(3, 3 * WINDOW, WINDOW).mT

    def unchunk(self, x):
        return x.flatten(3, 4).transpose(2, 3).flatten(2, 3)

    def local(self, x, mask):
        q = self.heads(self.query(x)) / math.sqrt(DIM // HEADS)
        k, v = self.heads(self.key(x)), self.heads(self.value(x))
        lowest = torch.finfo(x.dtype).min

        rows, columns = torch.arange(WINDOW)[:, None], torch.arange(3 * WINDOW)
        band = (columns - rows - WINDOW).abs() <= WINDOW
        # The global token has a column of its own.
        seen = mask.clone()
        seen[:, 0] = False
        seen = self.neighbours(seen.float()[:, None, :, None]).mT > 0
        scores = self.chunk(q) @ self.neighbours(k).mT
        scores = scores.masked_fill(~(band & seen), lowest)
        first = self.chunk(q @ k[:, :, :1].mT)

        probs = torch.cat([first, scores], dim=-1).softmax(dim=-1)
        probs = probs * self.chunk(mask[:, None, :, None])
        mixed = probs[..., 1:] @ self.neighbours(v)
        mixed = mixed + probs[..., :1] * v[:, :, None, None, :1]
        return self.unchunk(mixed)

    def first(self, x, mask):
        q = self.heads(self.query_global(x[:, :1])) / math.sqrt(DIM // HEADS)
        k, v = self.heads(self.key_global(x)), self.heads(self.value_global(x))
        scores = q @ k.mT
        scores = scores.masked_fill(~mask[:, None, None], torch.finfo(scores.dtype).min)
        return scores.softmax(dim=-1) @ v

    def forward(self, x, mask):
        mixed = torch.cat([self.first(x, mask), self.local(x, mask)[:, :, 1:]], dim=2)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.attn = SlidingWindowAttention(dilation)
        self.norm1 = nn.LayerNorm(DIM, eps=NORM_EPS)
        self.fc1 = nn.Linear(DIM, FFN)
        self.fc2 = nn.Linear(FFN, DIM)
        self.norm2 = nn.LayerNorm(DIM, eps=NORM_EPS)

    def forward(self, x, mask):
        x = self.norm1(x + self.attn(x, mask))
        return self.norm2(x + self.fc2(F.gelu(self.fc1(x))))


class LongformerForTokenClassification(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = Embeddings()
        self.layers = nn.ModuleList([Layer(dilation) for dilation in DILATIONS])
        self.classifier = nn.Linear(DIM, LABELS)

    def forward(self, ids, types):
        length = ids.shape[1]
        more = -length % MULTIPLE
        ids, types = F.pad(ids, (0, more), value=PAD), F.pad(types, (0, more))
        mask = ids != PAD
        x = self.embeddings(ids, types, mask)
        for layer in self.layers:
            x = layer(x, mask)
        return self.classifier(x[:, :length])


def model():
    torch.manual_seed(2004)
    net = LongformerForTokenClassification()
    with torch.no_grad():
        for name, module in net.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(0, 0.6)
                if module.padding_idx is not None:
                    module.weight[module.padding_idx].zero_()
            elif isinstance(module, nn.Linear):
                module.weight.normal_(0, module.in_features**-0.5)
                if "query" in name or "key" in name:
                    module.weight.mul_(1.3)
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
    return net


def batches():
    """A question, a text and padding; the first token has the label of the text."""
    generator = torch.Generator().manual_seed(2005)
    made = []
    for lengths in ((21, 14, 21, 14), (16, 11, 16)):
        shape = (len(lengths), max(lengths))
        ids = torch.randint(3, 40, shape, generator=generator)
        labels = (ids % 7 + ids.roll(1, 1) % 3) % 5
        later = torch.rand(shape, generator=generator) < 0.15
        types = torch.zeros(shape, dtype=torch.long)
        ids[:, 0] = 0
        for row, length in enumerate(lengths):
            middle = int(torch.randint(4, 7, (), generator=generator))
            later[row, middle] = later[row, length - 1] = True
            ids[row, middle] = ids[row, length - 1] = 2
            ids[row, length:] = 1
            types[row, middle + 1 : length] = 1
            later[row, length:] = True
            labels[row, 0] = labels[row, middle + 1]
        later[:, 0] = False
        labels = labels.masked_fill(later, -100)
        made.append({"ids": ids, "types": types, "labels": labels})
    return made


def forward(net, batch):
    return net(batch["ids"], batch["types"])


def loss(output, batch):
    return F.cross_entropy(
        output.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE
    )


class WarmupAdamW(torch.optim.AdamW):
    """Clips; the rate rises in a line and falls in another."""

    done = 0

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, CLIP_NORM)
        self.done += 1
        factor = min(self.done / WARMUP, (TOTAL - self.done) / (TOTAL - WARMUP))
        for group in self.param_groups:
            group["lr"] = LR * factor
        return super().step(closure)


def optimizer(net):
    """Norms and biases do not decay."""
    decay, rest = [], []
    for name, p in net.named_parameters():
        (rest if name.endswith("bias") or "norm" in name else decay).append(p)
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return WarmupAdamW(groups, lr=LR, betas=BETAS, eps=EPS)
