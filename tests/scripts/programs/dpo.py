"""Preference optimisation of a tiny decoder: which of two answers to a prompt is the sorted one.

The policy is the supervised model with that run's adapters, trained on; the reference is the
same model, frozen, and is asked only once.
"""

import argparse
import copy
import math
import random

import torch
import torch.nn.functional as F
from torch import nn

PAD, BOS, SEP, EOS, FIRST, WORDS = 0, 1, 2, 3, 4, 28
IGNORE = -100

options = {"pairs": 40, "held_out": 8, "max_prompt": 7, "micro": 4, "accumulate": 2}
options |= {"dim": 32, "depth": 2, "heads": 4, "rank": 4, "alpha": 10.0}
options |= {"beta": 0.3, "smoothing": 0.1, "sft": 0.25, "seed": 3, "steps": 4}
options |= {"lr": 1e-2, "weight_decay": 0.2, "clip": 1.0, "warmup": 2, "horizon": 12}
parser = argparse.ArgumentParser()
for option, value in options.items():
    parser.add_argument("--" + option.replace("_", "-"), type=type(value), default=value)


def make_pairs(count, dice):
    pairs = []
    for _ in range(count):
        word = [dice.randrange(FIRST, WORDS) for _ in range(dice.randint(3, 8))]
        good, bad = sorted(word), sorted(word)
        i, j = dice.sample(range(len(bad)), 2)
        bad[i], bad[j] = bad[j], dice.randrange(FIRST, WORDS)
        if dice.random() < 0.3:
            bad = bad[:-1]
        pairs.append({"prompt": [BOS, *word, SEP], "chosen": good, "rejected": bad})
    return pairs


def tokenize(pair, key, max_prompt):
    prompt = pair["prompt"][-max_prompt:]
    answer = pair[key] + [EOS]
    return prompt + answer, [IGNORE] * len(prompt) + answer


def collate(pairs, max_prompt):
    """Chosen answers, then rejected ones; padded on the left."""
    rows = [tokenize(pair, key, max_prompt) for key in ("chosen", "rejected") for pair in pairs]
    length = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), length), PAD)
    labels = torch.full((len(rows), length), IGNORE)
    for i, (row_ids, row_labels) in enumerate(rows):
        ids[i, length - len(row_ids) :] = torch.tensor(row_ids)
        labels[i, length - len(row_ids) :] = torch.tensor(row_labels)
    return ids, labels, ids != PAD


def micro_batches(count, size, seed):
    shuffler = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(count, generator=shuffler).tolist()
        for start in range(0, count - size + 1, size):
            yield order[start : start + size]


class AnswerLogProb(torch.autograd.Function):
    """Sum of the log-probabilities of each row's labels."""

    @staticmethod
    def forward(ctx, logits, labels):
        known = labels != IGNORE
        target = labels.clamp(min=0).unsqueeze(-1)
        logp = logits - logits.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(logp, target, known)
        return (logp.gather(-1, target).squeeze(-1) * known).sum(-1)

    @staticmethod
    def backward(ctx, grad):
        logp, target, known = ctx.saved_tensors
        delta = -logp.exp()
        delta.scatter_add_(-1, target, torch.ones_like(delta[..., :1]))
        return grad[:, None, None] * delta * known.unsqueeze(-1), None


class PreferenceLoss(torch.autograd.Function):
    """-(1 - s) log sigmoid(beta m) - s log sigmoid(-beta m)"""

    @staticmethod
    def forward(ctx, margin, beta, smoothing):
        x = beta * margin
        ctx.save_for_backward(x)
        ctx.beta, ctx.smoothing = beta, smoothing
        return -(1 - smoothing) * F.logsigmoid(x) - smoothing * F.logsigmoid(-x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        slope = ctx.smoothing * torch.sigmoid(x) - (1 - ctx.smoothing) * torch.sigmoid(-x)
        return grad * ctx.beta * slope, None, None


class LoraLinear(nn.Linear):
    def __init__(self, inside, outside, rank, alpha):
        super().__init__(inside, outside)
        self.lora_a = nn.Parameter(torch.empty(rank, inside))
        self.lora_b = nn.Parameter(torch.zeros(outside, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.scale = alpha / rank

    def forward(self, x):
        return super().forward(x) + self.scale * (x @ self.lora_a.T @ self.lora_b.T)


class Attention(nn.Module):
    def __init__(self, dim, heads, rank, alpha):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (LoraLinear(dim, dim, rank, alpha) for _ in range(4))
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
        self.register_buffer("slopes", slopes)

    def forward(self, x, seen):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).mT for f in (self.q, self.k, self.v))
        scores = torch.einsum("bidh,bjdh->bhij", q, k) / math.sqrt(q.shape[-2])
        place = torch.arange(x.shape[1])
        away = place[:, None] - place[None, :]
        scores = scores - self.slopes[:, None, None] * away
        allowed = (away >= 0) & seen[:, None, None, :]
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        mixed = torch.einsum("bhij,bjdh->bihd", scores.softmax(-1), v)
        return self.o(mixed.flatten(2))


class Block(nn.Module):
    def __init__(self, dim, *attention):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, *attention)
        self.fc, self.proj = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x, seen):
        x = x + self.attn(self.ln_1(x), seen)
        return x + self.proj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class Policy(nn.Module):
    def __init__(self, args):
        super().__init__()
        shape = args.dim, args.heads, args.rank, args.alpha
        self.wte = nn.Embedding(WORDS, args.dim)
        self.h = nn.ModuleList(Block(*shape) for _ in range(args.depth))
        self.ln_f = nn.LayerNorm(args.dim)

    def forward(self, ids, labels, seen):
        x = self.wte(ids)
        for block in self.h:
            x = block(x, seen)
        logits = self.ln_f(x) @ self.wte.weight.T
        return AnswerLogProb.apply(logits[:, :-1], labels[:, 1:])


def supervised_run(args):
    """What the supervised run saved: weights [in, out] with q, k, v in one, and its adapters."""
    gen = torch.Generator().manual_seed(77)
    d, adapters = args.dim, {}
    base = {"wte.weight": 0.4 * torch.randn(WORDS, d, generator=gen)}
    shapes = {"attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d)}
    shapes |= {"mlp.c_fc": (d, 2 * d), "mlp.c_proj": (2 * d, d)}
    for i in range(args.depth):
        for name, (rows, cols) in shapes.items():
            base[f"h.{i}.{name}.weight"] = torch.randn(rows, cols, generator=gen) / rows**0.5
            base[f"h.{i}.{name}.bias"] = 0.1 * torch.randn(cols, generator=gen)
        for letter in "qkvo":
            a, b = torch.randn(2, d, args.rank, generator=gen)
            adapters[f"h.{i}.attn.{letter}"] = 0.2 * a.T, 0.1 * b
    for name in [f"h.{i}.ln_{n}" for i in range(args.depth) for n in (1, 2)] + ["ln_f"]:
        base[f"{name}.weight"] = 1 + 0.2 * torch.randn(d, generator=gen)
        base[f"{name}.bias"] = 0.1 * torch.randn(d, generator=gen)
    return base, adapters


def load_base(model, base):
    state = {}
    for key, value in base.items():
        if ".c_" in key:
            value = value.T if value.ndim == 2 else value
        if "c_attn" in key:
            for letter, part in zip("qkv", value.chunk(3)):
                state[key.replace("c_attn", letter)] = part
        else:
            key = key.replace("attn.c_proj", "attn.o")
            state[key.replace("mlp.c_", "")] = value
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all("lora" in key or "slopes" in key for key in missing)


def load_adapters(model, adapters):
    for name, (a, b) in adapters.items():
        layer = model.get_submodule(name)
        layer.lora_a.data, layer.lora_b.data = a.clone(), b.clone()


@torch.no_grad()
def reference_logps(reference, pairs, args):
    out = []
    for start in range(0, len(pairs), args.micro):
        logps = reference(*collate(pairs[start : start + args.micro], args.max_prompt))
        out += zip(*(half.tolist() for half in logps.chunk(2)))
    return out


def margins(chosen, rejected, told):
    """How much more than the reference the policy prefers the chosen answer."""
    told_chosen, told_rejected = torch.tensor(told).unbind(1)
    return (chosen - told_chosen) - (rejected - told_rejected)


@torch.no_grad()
def evaluate(model, pairs, told, args):
    model.eval()
    gained = margins(*model(*collate(pairs, args.max_prompt)).chunk(2), told)
    return args.beta * gained.mean().item(), (gained > 0).float().mean().item()


def main():
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    dice = random.Random(args.seed)
    train, held_out = make_pairs(args.pairs, dice), make_pairs(args.held_out, dice)
    base, adapters = supervised_run(args)
    model = Policy(args)
    load_base(model, base)
    load_adapters(model, adapters)
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    told, told_held_out = (reference_logps(reference, p, args) for p in (train, held_out))

    for name, p in model.named_parameters():
        p.requires_grad_("lora" in name or "ln_" in name)
    learning = [p for p in model.parameters() if p.requires_grad]
    low_rank = [p for p in learning if p.ndim == 2]
    norms = [p for p in learning if p.ndim == 1]
    groups = [{"params": low_rank}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, args.lr, (0.9, 0.95), weight_decay=args.weight_decay)

    def factor(step):
        done = max(0, step - args.warmup) / (args.horizon - args.warmup)
        return min(1, (step + 1) / (args.warmup + 1)) * (1 + math.cos(math.pi * done)) / 2

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    stream = micro_batches(len(train), args.micro, args.seed + 1)
    model.train()
    for step in range(args.steps):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(args.accumulate):
            rows = next(stream)
            ids, labels, seen = collate([train[row] for row in rows], args.max_prompt)
            chosen, rejected = model(ids, labels, seen).chunk(2)
            margin = margins(chosen, rejected, [told[row] for row in rows])
            preference = PreferenceLoss.apply(margin, args.beta, args.smoothing)
            tokens = (labels[: len(rows)] != IGNORE).sum()
            loss = preference.mean() - args.sft * chosen.sum() / tokens
            (loss / args.accumulate).backward()
            total += loss.item() / args.accumulate
        norm = nn.utils.clip_grad_norm_(learning, args.clip)
        optimizer.step()
        scheduler.step()
        print(f"step {step} | loss {total:.5f} | norm {norm:.3f}")
    gain, accuracy = evaluate(model, held_out, told_held_out, args)
    print(f"held out | margin {gain:.4f} | accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
