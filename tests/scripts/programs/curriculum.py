"""Reverse-and-add with a GRU encoder-decoder, from short numbers to long ones.

The source is a number, the target the sum of it and of its mirror image, least
significant digit first: 47 -> 47 + 74 = 121. Starts from the encoder of a copying model
that was trained in another framework.
"""

import math
import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.optim.lr_scheduler import LambdaLR

PAD, BOS, EOS = 0, 1, 2
DIGIT = 3  # token of the digit 0
VOCAB = DIGIT + 10


@dataclass
class Config:
    seed: int = 29
    steps: int = 3
    batch: int = 16
    embed: int = 16
    hidden: int = 24
    attend: int = 20
    smooth: float = 0.1
    power: float = 0.75
    lr: float = 0.05
    warmup: int = 4
    clip: float = 0.02
    teacher: float = 0.9
    teacher_decay: float = 0.6
    teacher_floor: float = 0.1
    grow: int = 1


def digits_of(number):
    return [int(c) + DIGIT for c in str(number)]


def example(number: int) -> tuple[Tensor, Tensor]:
    """Tokens of a number, and of the number plus its mirror image, last digit first."""
    total = number + int(str(number)[::-1])
    target = digits_of(total)[::-1]
    return torch.tensor(digits_of(number)), torch.tensor(target)


def make_buckets(rng: random.Random, per: int = 120) -> list[list[int]]:
    """Numbers of 2 and 3 digits, then of 4 and 5, then of 6 and 7."""
    buckets = []
    for low in (2, 4, 6):
        sizes = [rng.choice((low, low + 1)) for _ in range(per)]
        buckets.append([rng.randrange(10 ** (n - 1), 10**n) for n in sizes])
    return buckets


class Curriculum:
    """Draws batches from the buckets that are open; another opens after `grow` batches."""

    def __init__(self, buckets, batch, grow, gen):
        self.buckets, self.batch, self.grow, self.gen = buckets, batch, grow, gen
        self.drawn = 0

    def draw(self):
        opened = min(1 + self.drawn // self.grow, len(self.buckets))
        pool = [number for bucket in self.buckets[:opened] for number in bucket]
        picks = torch.randint(len(pool), (self.batch,), generator=self.gen)
        self.drawn += 1
        return collate([pool[i] for i in picks.tolist()])


def collate(numbers):
    """Longest source first; target in and target out are one token apart."""
    numbers = sorted(numbers, reverse=True)
    sources, sums = zip(*(example(number) for number in numbers))
    bos, eos = torch.tensor([[BOS], [EOS]])
    source = pad_sequence(sources, batch_first=True, padding_value=PAD)
    fed = pad_sequence([torch.cat([bos, s]) for s in sums], batch_first=True)
    wanted = pad_sequence([torch.cat([s, eos]) for s in sums], batch_first=True)
    lengths = torch.tensor([len(s) for s in sources])
    return source, lengths, fed, wanted


def token_counts(numbers) -> Tensor:
    counts = torch.zeros(VOCAB)
    counts[DIGIT:] = 1.0
    for number in numbers:
        counts += torch.bincount(example(number)[1], minlength=VOCAB)
        counts[EOS] += 1
    return counts


class MaskedSoftmax(torch.autograd.Function):
    """Softmax over the last dimension where the mask is true, zero elsewhere."""

    @staticmethod
    def forward(ctx, score, mask):
        top = score.masked_fill(~mask, -math.inf).amax(-1, keepdim=True)
        weight = (score - top).exp() * mask
        weight = weight / weight.sum(-1, keepdim=True)
        ctx.save_for_backward(weight)
        return weight

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        inner = (grad * weight).sum(-1, keepdim=True)
        return weight * (grad - inner), None


class SmoothedNLL(torch.autograd.Function):
    """Mean over real tokens of the cross entropy with labels smoothed towards a prior."""

    @staticmethod
    def forward(ctx, logits, wanted, prior, smooth):
        logp = logits.log_softmax(-1)
        soft = smooth * prior + (1 - smooth) * F.one_hot(wanted, logits.shape[-1])
        real = (wanted != PAD).unsqueeze(-1)
        count = real.sum()
        ctx.save_for_backward(logp, soft, real, count)
        return -(soft * logp * real).sum() / count

    @staticmethod
    def backward(ctx, grad):
        logp, soft, real, count = ctx.saved_tensors
        return grad * (logp.exp() - soft) * real / count, None, None, None


class Attention(nn.Module):
    """Additive, with a learned penalty on what was attended to before."""

    def __init__(self, query: int, key: int, width: int):
        super().__init__()
        self.query = nn.Linear(query, width)
        self.key = nn.Linear(key, width, bias=False)
        self.cover = nn.Parameter(torch.full((width,), -0.5))
        self.energy = nn.Linear(width, 1, bias=False)

    def forward(self, state, keys, memory, mask, covered):
        mix = self.query(state)[:, None] + keys + covered[..., None] * self.cover
        score = self.energy(torch.tanh(mix)).squeeze(-1)
        weight = MaskedSoftmax.apply(score, mask)
        context = torch.bmm(weight[:, None], memory).squeeze(1)
        return context, covered + weight


class Cell(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inp = nn.Linear(width, 3 * hidden)
        self.rec = nn.Linear(hidden, 3 * hidden)

    def forward(self, x, h):
        xr, xz, xn = self.inp(self.norm(x)).chunk(3, -1)
        hr, hz, hn = self.rec(h).chunk(3, -1)
        reset, update = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
        new = torch.tanh(xn + reset * hn)
        return (1 - update) * new + update * h


class ReverseAdd(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, c.embed, padding_idx=PAD)
        self.encoder = nn.GRU(c.embed, c.hidden, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * c.hidden, c.hidden)
        self.attention = Attention(c.hidden, 2 * c.hidden, c.attend)
        self.cell = Cell(c.embed + 2 * c.hidden, c.hidden)
        self.mix = nn.Linear(3 * c.hidden, c.embed)
        self.unigram = nn.Parameter(torch.zeros(VOCAB))
        self.register_buffer("prior", torch.full((VOCAB,), 1 / VOCAB))

    def encode(self, source, lengths):
        packed = pack_padded_sequence(self.embed(source), lengths, batch_first=True)
        out, last = self.encoder(packed)
        memory, _ = pad_packed_sequence(out, batch_first=True)
        state = torch.tanh(self.bridge(torch.cat([last[0], last[1]], -1)))
        return memory, state

    def forward(self, source, lengths, fed, teacher, gen):
        memory, state = self.encode(source, lengths)
        mask = source != PAD
        keys = self.attention.key(memory)
        covered = torch.zeros(source.shape)
        token, logits = fed[:, 0], []
        for t in range(fed.shape[1]):
            context, covered = self.attention(state, keys, memory, mask, covered)
            state = self.cell(torch.cat([self.embed(token), context], -1), state)
            mixed = torch.tanh(self.mix(torch.cat([state, context], -1)))
            logits.append(mixed @ self.embed.weight.T + self.unigram)
            if t + 1 < fed.shape[1]:
                forced = torch.rand(len(fed), generator=gen) < teacher
                guess = logits[-1].detach().argmax(-1)
                token = torch.where(forced, fed[:, t + 1], guess)
        return torch.stack(logits, 1)


def copier(c: Config) -> dict[str, Tensor]:
    """As it was saved: kernels [in, 3 out], gates update, reset, new; digits first."""
    gen = torch.Generator().manual_seed(404)
    saved = {"vectors": torch.randn(VOCAB, c.embed, generator=gen)}
    for side in ("forward", "backward"):
        for kind, rows in (("kernel", c.embed), ("recurrent", c.hidden)):
            values = torch.randn(rows, 3 * c.hidden, generator=gen)
            saved[f"{side}/{kind}"] = values * rows**-0.5
        saved[f"{side}/bias"] = 0.3 * torch.randn(2, 3 * c.hidden, generator=gen)
    return saved


@torch.no_grad()
def warm_start(model: ReverseAdd, saved: dict[str, Tensor], counts: Tensor, c: Config):
    def gates(values):
        update, reset, new = values.chunk(3, -1)
        return torch.cat([reset, update, new], -1)

    theirs = [10, 11, 12, *range(10)]
    model.embed.weight.copy_(saved["vectors"][theirs] * c.embed**-0.5)
    model.embed.weight[PAD] = 0
    for side, end in (("forward", ""), ("backward", "_reverse")):
        kernel, recurrent = saved[f"{side}/kernel"], saved[f"{side}/recurrent"]
        getattr(model.encoder, f"weight_ih_l0{end}").copy_(gates(kernel).T)
        getattr(model.encoder, f"weight_hh_l0{end}").copy_(gates(recurrent).T)
        bias = gates(saved[f"{side}/bias"])
        getattr(model.encoder, f"bias_ih_l0{end}").copy_(bias[0])
        getattr(model.encoder, f"bias_hh_l0{end}").copy_(bias[1])
    tempered = counts**c.power
    model.prior.copy_(tempered / tempered.sum())
    model.unigram.copy_((counts + 0.1).div(counts.sum()).log())


class Factored(torch.optim.Optimizer):
    """Adafactor with sums of rows and columns, steps relative to the size of weights."""

    def __init__(self, params, lr, threshold=1.0, start=1e-5, eps=1e-8, least=1e-2):
        super().__init__(params, {"lr": lr, "threshold": threshold, "eps": eps})
        self.start, self.least = start, least

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, square = self.state[p], p.grad.square() + group["eps"]
                if not state:
                    state["step"] = 0
                    if p.ndim == 2:
                        state["row"] = torch.full((p.shape[0],), self.start)
                        state["col"] = torch.full((p.shape[1],), self.start)
                    else:
                        state["full"] = torch.full_like(p, self.start)
                state["step"] += 1
                fresh = (1 + state["step"]) ** -0.8
                if p.ndim == 2:
                    row = state["row"].lerp_(square.mean(1), fresh)
                    col = state["col"].lerp_(square.mean(0), fresh)
                    second = torch.outer(row / row.mean(), col)
                else:
                    second = state["full"].lerp_(square, fresh)
                update = p.grad * second.rsqrt()
                rms = update.square().mean().sqrt()
                update = update / (rms / group["threshold"]).clamp(min=1.0)
                size = p.square().mean().sqrt().clamp(min=self.least)
                p -= group["lr"] * size * update


def main(c: Config):
    torch.manual_seed(c.seed)
    buckets = make_buckets(random.Random(c.seed))
    draws = torch.Generator().manual_seed(c.seed + 1)
    coins = torch.Generator().manual_seed(c.seed + 2)
    data = Curriculum(buckets, c.batch, c.grow, draws)

    model = ReverseAdd(c)
    warm_start(model, copier(c), token_counts(buckets[0]), c)
    opt = Factored(model.parameters(), c.lr)
    ramp = LambdaLR(opt, lambda n: min(1.0, (n + 1) / c.warmup))
    teacher = c.teacher
    for step in range(c.steps):
        source, lengths, fed, wanted = data.draw()
        logits = model(source, lengths, fed, teacher, coins)
        loss = SmoothedNLL.apply(logits, wanted, model.prior, c.smooth)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), c.clip)
        opt.step()
        ramp.step()
        teacher = max(c.teacher_floor, teacher * c.teacher_decay)
        print(f"step {step} loss {loss.item():.5f} longest {int(lengths[0])}")


if __name__ == "__main__":
    main(Config())
