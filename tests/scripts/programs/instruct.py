"""Supervised fine-tuning of a small decoder: packed rows of prompts and answers, loss on answers.

The base model has its own trainer's layout, and lacks the two tokens of the chat format.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

IGNORE, PAD, BOS, EOS, BASE_VOCAB = -100, 0, 1, 2, 40
USER, BOT, VOCAB = 40, 41, 42  # new tokens
TASKS = {3: lambda w: w[::-1], 4: sorted, 5: lambda w: w[1:] + w[:1], 6: lambda w: w[::2]}
RENAMED = {"tok_embeddings": "embed", "layers": "blocks", "attention.w": ""}
RENAMED |= {"attention_norm": "norm1", "ffn_norm": "norm2"}
RENAMED |= {"feed_forward.w1": "gate", "feed_forward.w2": "down", "feed_forward.w3": "up"}


class args:
    seed, samples, row, micro_batch, accumulate, steps = 5, 90, 44, 3, 2, 4
    dim, depth, heads, kv_heads, inner, theta = 32, 2, 4, 2, 48, 1000.0
    lr, embed_lr, warmup, total = 4e-3, 1e-3, 3, 20
    weight_decay, clip, z_loss = 0.1, 0.5, 0.02


def make_sample(rng):
    task = torch.randint(3, 7, (), generator=rng).item()
    size = torch.randint(3, 8, (1,), generator=rng).tolist()
    word = torch.randint(7, BASE_VOCAB, size, generator=rng).tolist()
    return [BOS, USER, task, *word, BOT], [*TASKS[task](word), EOS]


def encode(prompt, answer):
    """Inputs, and what comes after each of them where that is to be learned."""
    tokens = prompt + answer
    labels = [IGNORE] * len(prompt) + answer
    return tokens[:-1], labels[1:]


def pack(samples, length):
    """First fit."""
    rows = []
    for tokens, labels in samples:
        row = next((r for r in rows if len(r["tokens"]) + len(tokens) <= length), None)
        if row is None:
            rows.append(row := {"tokens": [], "labels": [], "segments": [], "positions": []})
        number = row["segments"][-1] + 1 if row["segments"] else 0
        row["tokens"] += tokens
        row["labels"] += labels
        row["segments"] += [number] * len(tokens)
        row["positions"] += range(len(tokens))
    return rows


def collate(rows):
    fill = {"tokens": PAD, "labels": IGNORE, "segments": -1, "positions": 0}
    length = max(len(row["tokens"]) for row in rows)
    batch = {}
    for key, value in fill.items():
        padded = [row[key] + [value] * (length - len(row[key])) for row in rows]
        batch[key] = torch.tensor(padded)
    segments = batch.pop("segments")
    same = segments[:, :, None] == segments[:, None, :]
    batch["mask"] = same & torch.ones(length, length, dtype=torch.bool).tril()
    return batch


class RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        unit = x * scale
        ctx.save_for_backward(unit, weight, scale)
        return unit * weight

    @staticmethod
    def backward(ctx, grad):
        unit, weight, scale = ctx.saved_tensors
        grad_weight = (grad * unit).flatten(0, -2).sum(0)
        grad = grad * weight
        grad = grad - unit * (grad * unit).mean(-1, keepdim=True)
        return scale * grad, grad_weight, None


class AnswerLoss(torch.autograd.Function):
    """Sum over the answers' tokens of -log p + z * log(Z)^2."""

    @staticmethod
    def forward(ctx, logits, labels, z):
        keep = labels != IGNORE
        chosen, labels = logits[keep], labels[keep]
        log_z = chosen.logsumexp(-1)
        nll = log_z - chosen.gather(-1, labels[:, None]).squeeze(-1)
        ctx.save_for_backward(chosen, labels, log_z, keep)
        ctx.z = z
        return nll.sum() + z * log_z.square().sum()

    @staticmethod
    def backward(ctx, grad):
        chosen, labels, log_z, keep = ctx.saved_tensors
        delta = (chosen - log_z[:, None]).exp()
        delta *= (1 + 2 * ctx.z * log_z)[:, None]
        delta[torch.arange(len(labels)), labels] -= 1
        out = delta.new_zeros(*keep.shape, VOCAB)
        out[keep] = grad * delta
        return out, None, None


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return RMSNormFunction.apply(x, self.weight, self.eps)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    def __init__(self, dim, heads, kv_heads, inner):
        super().__init__()
        self.size, self.share = dim // heads, heads // kv_heads
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.q, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(dim, dim // self.share, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(dim, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, dim, bias=False)

    def attend(self, x, cos, sin, mask):
        split = (f(x).unflatten(-1, (-1, self.size)) for f in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in split)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(self.share, 1) for t in (k, v))
        scores = q @ k.mT / math.sqrt(self.size)
        scores = scores.masked_fill(~mask[:, None], float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x, cos, sin, mask):
        x = x + self.attend(self.norm1(x), cos, sin, mask)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        dims = args.dim, args.heads, args.kv_heads, args.inner
        self.embed = nn.Embedding(VOCAB, args.dim)
        self.blocks = nn.ModuleList(Block(*dims) for _ in range(args.depth))
        self.norm = RMSNorm(args.dim)
        self.head = nn.Linear(args.dim, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        size = args.dim // args.heads
        self.freqs = args.theta ** (-torch.arange(0, size, 2) / size)

    def forward(self, tokens, positions, mask):
        x = self.embed(tokens) * math.sqrt(self.embed.embedding_dim)
        angles = (positions[:, :, None] * self.freqs)[:, None]  # [rows, 1, length, size / 2]
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin(), mask)
        return self.head(self.norm(x))


def base_checkpoint():
    """As its trainer saves it: rotary pairs are neighbours, norms are distances from one."""
    rng = torch.Generator().manual_seed(2024)
    dim, inner, kv = args.dim, args.inner, args.dim * args.kv_heads // args.heads
    shapes = {"attention.wq": (dim, dim), "attention.wk": (kv, dim), "attention.wv": (kv, dim)}
    shapes |= {"attention.wo": (dim, dim), "attention_norm": (dim,), "ffn_norm": (dim,)}
    shapes |= {"feed_forward.w1": (inner, dim), "feed_forward.w3": (inner, dim)}
    shapes |= {"feed_forward.w2": (dim, inner)}
    every = {f"layers.{i}.{k}": s for i in range(args.depth) for k, s in shapes.items()}
    model = {"tok_embeddings.weight": 0.3 * torch.randn(dim, generator=rng)}
    for key, shape in (every | {"norm": (dim,), "tok_embeddings": (BASE_VOCAB, dim)}).items():
        std = 1.4 / math.sqrt(shape[1]) if len(shape) == 2 else 0.3
        value = std * torch.randn(shape, generator=rng)
        model[f"{key}.weight"] = value + model.get(f"{key}.weight", 0.0)
    return model


def load_base(model, saved):
    state = {}
    for key, value in saved.items():
        if "norm" in key:
            value = value + 1
        if ".wq." in key or ".wk." in key:  # neighbours -> halves
            pairs = value.unflatten(0, (-1, len(model.freqs), 2))
            value = pairs.transpose(1, 2).flatten(0, 2)
        if key.startswith("tok_embeddings"):
            fresh = value.mean(0, keepdim=True).repeat(VOCAB - BASE_VOCAB, 1)
            value = torch.cat([value, fresh])
        for old, new in RENAMED.items():
            key = key.replace(old, new)
        state[key] = value
    assert not model.load_state_dict(state, strict=False).unexpected_keys


def make_optimizer(model):
    table = model.embed.weight
    weights = [p for p in model.blocks.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": weights, "weight_decay": args.weight_decay}, {"params": norms}]
    groups.append({"params": [table], "lr": args.embed_lr})
    opt = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    up, total = args.warmup + 1, args.total
    return opt, LambdaLR(opt, lambda i: min((i + 1) / up, (total - i) / (total - up)))


@torch.no_grad()
def evaluate(model, loader):
    parts = [(batch.pop("labels"), model(**batch)) for batch in loader]
    loss = sum(AnswerLoss.apply(logits, labels, 0.0) for labels, logits in parts)
    return loss / sum((labels != IGNORE).sum() for labels, _ in parts)


def main():
    torch.manual_seed(args.seed)
    rng = torch.Generator().manual_seed(args.seed + 1)
    samples = [encode(*make_sample(rng)) for _ in range(args.samples)]
    held_out, training = pack(samples[:12], args.row), pack(samples[12:], args.row)
    held_out = DataLoader(held_out, args.micro_batch, collate_fn=collate)
    training = DataLoader(training, args.micro_batch, collate_fn=collate, shuffle=True)
    batches = (batch for _ in range(99) for batch in training)
    model = Decoder()
    load_base(model, base_checkpoint())
    opt, schedule = make_optimizer(model)
    for step in range(args.steps):
        micro = [next(batches) for _ in range(args.accumulate)]
        count = sum((batch["labels"] != IGNORE).sum() for batch in micro)
        opt.zero_grad()
        for batch in micro:
            labels = batch.pop("labels")
            loss = AnswerLoss.apply(model(**batch), labels, args.z_loss) / count
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        opt.step()
        schedule.step()
        print(f"step {step}: loss {loss:.4f}, norm {norm:.3f}")
    print(f"held out: {evaluate(model, held_out):.4f}")


if __name__ == "__main__":
    main()
