"""Reversed sentences in another alphabet: an encoder and a decoder, labels smoothed, resumed in the middle."""

import copy
import io
import math

import torch
from torch import nn

PAD, BOS, EOS, WORDS = 0, 1, 2, 20
DIM, HEADS, SHARD, ACCUMULATE, WARMUP = 16, 4, 6, 2, 3
SMOOTHING, PEAK, CLIP = 0.1, 4e-3, 0.8


def sentences(seed, size):
    g = torch.Generator().manual_seed(seed)
    for _ in range(size):
        words = torch.randint(3, WORDS, (int(torch.randint(3, 8, (1,), generator=g)),), generator=g)
        yield words.tolist(), [3 + (word * 5) % (WORDS - 3) for word in reversed(words.tolist())]


def padded(rows):
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def collate(pairs):
    source = padded([words + [EOS] for words, _ in pairs])
    target = padded([[BOS] + words + [EOS] for _, words in pairs])
    return source, target


class Positions(nn.Module):
    def __init__(self, dim, longest=32):
        super().__init__()
        place = torch.arange(longest)[:, None]
        rate = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
        table = torch.zeros(longest, dim)
        table[:, 0::2] = torch.sin(place * rate)
        table[:, 1::2] = torch.cos(place * rate)
        self.register_buffer("table", table)

    def forward(self, x):
        return x + self.table[: x.shape[1]]


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, DIM, padding_idx=PAD)
        self.places = Positions(DIM)
        self.drop = nn.Dropout(0.1)
        common = {"dim_feedforward": 24, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(DIM, HEADS, norm_first=True, activation="gelu", **common),
            num_layers=2,
            norm=nn.LayerNorm(DIM),
            enable_nested_tensor=False,
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(DIM, HEADS, norm_first=True, activation="gelu", **common),
            num_layers=2,
            norm=nn.LayerNorm(DIM),
        )
        self.out = nn.Linear(DIM, WORDS)
        for name, weight in self.named_parameters():
            if weight.dim() > 1 and not name.startswith("words"):
                nn.init.xavier_uniform_(weight)
        nn.init.normal_(self.words.weight[3:], std=DIM**-0.5)
        self.out.weight = self.words.weight

    def embed(self, tokens):
        return self.drop(self.places(self.words(tokens) * math.sqrt(DIM)))

    def encode(self, source):
        hidden = source == PAD
        return self.encoder(self.embed(source), src_key_padding_mask=hidden), hidden

    def decode(self, target, memory, hidden):
        length = target.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = self.decoder(
            self.embed(target),
            memory,
            tgt_mask=later,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=hidden,
        )
        return self.out(x)

    def forward(self, source, target):
        memory, hidden = self.encode(source)
        return self.decode(target, memory, hidden)


class Smoothed(nn.Module):
    """Cross entropy to a label that has most of the mass; the rest is spread over the other words."""

    def __init__(self, smoothing):
        super().__init__()
        self.smoothing = smoothing

    def forward(self, logits, labels):
        logs = logits.log_softmax(-1)
        there = labels != PAD
        sure = -logs.gather(-1, labels[..., None]).squeeze(-1)
        spread = -logs.mean(-1)
        loss = (1 - self.smoothing) * sure + self.smoothing * spread
        return loss.masked_fill(~there, 0.0).sum(), there.sum()


def rate(step):
    """Inverse square root after a linear warm-up; the first step is 1."""
    return PEAK * min(step / WARMUP, math.sqrt(WARMUP / step))


def pretrained():
    """A model whose encoder and words come from an earlier run."""
    torch.manual_seed(70)
    earlier = Translator().state_dict()
    torch.manual_seed(71)
    model = Translator()
    kept = {name: value for name, value in earlier.items() if name.startswith(("encoder", "words"))}
    model.load_state_dict(kept, strict=False)
    with torch.no_grad():
        model.out.bias[EOS] = 0.5
    return model


def saved(model, optimizer, step):
    file = io.BytesIO()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, file)
    file.seek(0)
    return file


def resumed(file):
    state = torch.load(file, weights_only=True)
    model = Translator()
    model.load_state_dict(state["model"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-6)
    optimizer.load_state_dict(state["optimizer"])
    return model, optimizer, state["step"]


@torch.no_grad()
def evaluate(model, pairs, criterion):
    model.eval()
    source, target = collate(pairs)
    total, count = criterion(model(source, target[:, :-1]), target[:, 1:])
    memory, hidden = model.encode(source)
    said = torch.full((len(pairs), 1), BOS)
    for _ in range(4):
        best = model.decode(said, memory, hidden)[:, -1].argmax(-1)
        said = torch.cat([said, best[:, None]], 1)
    right = (said[:, 1:] == target[:, 1:5]).float().mean()
    return (total / count).item(), right.item()


def update(model, optimizer, shards, criterion, step):
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    optimizer.zero_grad()
    tokens = sum(int((target[:, 1:] != PAD).sum()) for _, target in shards)
    total = 0.0
    for source, target in shards:
        logits = model(source, target[:, :-1])
        summed, _ = criterion(logits, target[:, 1:])
        loss = summed / tokens
        loss.backward()
        total += loss.item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return total, norm.item()


def main():
    criterion = Smoothed(SMOOTHING)
    model = pretrained()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-6)
    valid = list(sentences(999, 5))
    best, kept = float("inf"), None
    step = 0
    for epoch in range(3):
        torch.manual_seed(80 + epoch)
        model.train()
        pairs = list(sentences(100 + epoch, SHARD * ACCUMULATE))
        shards = [collate(pairs[i::ACCUMULATE]) for i in range(ACCUMULATE)]
        step += 1
        total, norm = update(model, optimizer, shards, criterion, step)
        held, right = evaluate(model, valid, criterion)
        if held < best:
            best, kept = held, copy.deepcopy(model.state_dict())
        if epoch == 0:
            model, optimizer, step = resumed(saved(model, optimizer, step))
        print(epoch, f"{total:.5f} {norm:.5f} {held:.5f} {right:.3f}")
    model.load_state_dict(kept)


main()
