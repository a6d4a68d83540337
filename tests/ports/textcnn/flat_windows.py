"""As from C++: each kind of word once, sentences in buckets, one matrix for all windows.

All windows are of the longest width; the kernels of the others have zeros behind. Words and
n-grams share a table, loss and highway have gradients by hand, and training works on one
long memory. Columns of features begin with the longest windows.
"""

from itertools import accumulate
from pathlib import Path

import torch
from torch import nn
from torch.autograd import Function

WORDS, GRAMS = 64, 240
FILTERS, WIDEST, KINDS = 14, 5, 4
WEIGHT = (0.6, 1.0, 1.7, 0.8, 1.4)
BUCKET = 3


# -------------------------------------------------------- gradients by hand


class Carry(Function):
    """x goes on where the gate is shut; both (n, 2 d): what is new, and the gate."""

    @staticmethod
    def forward(ctx, x, both):
        fresh, gate = both.chunk(2, 1)
        fresh, gate = fresh.clamp(min=0), gate.sigmoid()
        ctx.save_for_backward(x, fresh, gate)
        return x + gate * (fresh - x)

    @staticmethod
    def backward(ctx, grad):
        x, fresh, gate = ctx.saved_tensors
        d_fresh = grad * gate * (fresh > 0)
        d_gate = grad * (fresh - x) * gate * (1 - gate)
        return grad * (1 - gate), torch.cat([d_fresh, d_gate], 1)


class Surprise(Function):
    """-sum(share * log softmax(score)); rows of share need not come to one."""

    @staticmethod
    def forward(ctx, score, share):
        score = score - score.max(1, keepdim=True).values
        log_p = score - score.exp().sum(1, keepdim=True).log()
        ctx.save_for_backward(log_p, share)
        return -(share * log_p).sum()

    @staticmethod
    def backward(ctx, grad):
        log_p, share = ctx.saved_tensors
        return grad * (log_p.exp() * share.sum(1, keepdim=True) - share), None


class Peak(Function):
    """Greatest of x (n, steps, channels) at each channel, of those that count."""

    @staticmethod
    def forward(ctx, x, counts):
        top, seat = x.masked_fill(~counts, -torch.inf).max(1)
        ctx.save_for_backward(seat)
        ctx.steps = x.shape[1]
        return top

    @staticmethod
    def backward(ctx, grad):
        (seat,) = ctx.saved_tensors
        d_x = grad.new_zeros(len(grad), ctx.steps, grad.shape[1])
        return d_x.scatter_(1, seat[:, None], grad[:, None]), None


# ------------------------------------------------------------------ subwords


def fnv(chars, n):
    """FNV-1a of each run of n bytes; numbers of 32 bits run over, as they do in C."""
    h = torch.tensor(0x811C9DC5 - (1 << 32), dtype=torch.int32)
    last = chars.shape[1] - n + 1
    for i in range(n):
        h = (h ^ chars[:, i : i + last]) * 16777619
    return h.long() & 0xFFFFFFFF


def gram_counts(letters, like):
    """How often each bucket occurs in a word, (kinds, GRAMS); letters (kinds, w) bytes."""
    big = (letters > 64) & (letters < 91)
    letters = letters | big.byte() << 5
    kinds, w = letters.shape
    chars = torch.zeros(kinds, w + 2, dtype=torch.int32)
    chars[:, 0] = 60
    chars[:, 1:-1] = letters.view(torch.int8).int()
    end = 1 + (letters > 0).sum(1)
    chars[torch.arange(kinds), end] = 62
    counts = like.new_zeros(kinds, GRAMS)
    for n in (3, 4):
        inside = chars[:, n - 1 :] != 0
        counts.scatter_add_(1, fnv(chars, n) % GRAMS, inside.to(like.dtype))
    return counts


# ------------------------------------------------------------------- the net


class Classifier(nn.Module):
    def __init__(self, memory):
        super().__init__()
        for name, value in memory.items():
            self.register_parameter(name, nn.Parameter(value.contiguous()))
        width = torch.arange(WIDEST, WIDEST - KINDS, -1)
        self.register_buffer("width", width)
        self.register_buffer("taps", torch.arange(WIDEST)[:, None] < width)

    def spell(self, letters):
        """Letters (kinds, w) -> the greatest answer of each filter to three letters."""
        glyph = letters.long() - 30
        glyph[letters > 126] = 1
        table = nn.functional.pad(self.glyphs, (0, 0, 1, 0))
        x = table[glyph.clamp(min=0)]
        x = nn.functional.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1)
        x = x.flatten(2) @ self.spelling + self.spelling_bias
        inside = (letters > 0)[:, :, None]
        return Peak.apply(x, inside | (letters[:, :1] == 0)[:, None]).tanh()

    def look_up(self, kinds):
        """(kinds, 1 + w): the word's number and its letters -> features (kinds, d)."""
        number, letters = kinds[:, 0], kinds[:, 1:].to(torch.uint8)
        number = torch.where(number < WORDS, number, 1)
        row = torch.index_select(self.rows, 0, (number - 1).clamp(min=0))
        counts = gram_counts(letters, like=self.rows)
        total = counts.sum(1, keepdim=True).clamp(min=1)
        mean = counts @ self.rows[WORDS - 1 :] / total
        x = torch.cat([row, mean, self.spell(letters)], 1)
        return x * (number > 0)[:, None]

    def scan(self, x, length):
        """x (sentences, steps, d) -> peaks (sentences, KINDS * FILTERS)."""
        steps = x.shape[1]
        x = nn.functional.pad(x, (0, 0, 0, WIDEST - 1))
        windows = x.unfold(1, WIDEST, 1).flatten(2)
        kernel = self.wide * self.taps[:, :, None]
        y = windows @ kernel.flatten(0, 1).flatten(1)
        last = (length[:, None] - self.width).clamp(min=0)
        counts = torch.arange(steps)[:, None] <= last[:, None]
        peak = Peak.apply(y, counts.repeat_interleave(FILTERS, 2))
        return (peak + self.wide_bias).relu()

    def forward(self, words, letters):
        both = torch.cat([words[:, :, None], letters.long()], 2)
        kinds, seat = both.flatten(0, 1).unique(dim=0, return_inverse=True)
        features = self.look_up(kinds)
        seat = seat.view(words.shape)

        length = (words > 0).sum(1)
        order = length.argsort(descending=True, stable=True)
        peaks = []
        for bucket in order.split(BUCKET):
            longest = int(length[bucket[0]])
            x = features[seat[bucket, :longest]]
            peaks.append(self.scan(x, length[bucket]))
        x = torch.cat(peaks)[order.argsort()]

        x = Carry.apply(x, torch.addmm(self.turn_bias, x, self.turn))
        return torch.addmm(self.out_bias, x, self.out)


# ------------------------------------------------------------------- weights


def longest_first(x):
    """Features in the first dimension, of widths 2 to 5 -> of widths 5 to 2."""
    return x.unflatten(0, (KINDS, FILTERS)).flip(0).flatten(0, 1)


def read(state):
    wide = torch.zeros(state["convs.0.weight"].shape[1], WIDEST, KINDS, FILTERS)
    for i in range(KINDS):
        kernel = state[f"convs.{i}.weight"]
        wide[:, : kernel.shape[2], KINDS - 1 - i] = kernel.permute(1, 2, 0)

    def turn(name):
        """Both sides of the square matrix are features."""
        weight = longest_first(state[f"highway.{name}.weight"])
        return longest_first(weight.t())

    words = state["word_embed.weight"][1:]
    biases = [state[f"convs.{i}.bias"] for i in reversed(range(KINDS))]
    parts = ("transform", "gate")
    turn_biases = [longest_first(state[f"highway.{name}.bias"]) for name in parts]
    return {
        "rows": torch.cat([words, state["subword_embed.weight"]]),
        "glyphs": state["char_cnn.embed.weight"][1:],
        "spelling": state["char_cnn.conv.weight"].flatten(1).t(),
        "spelling_bias": state["char_cnn.conv.bias"],
        "wide": wide,
        "wide_bias": torch.cat(biases),
        "turn": torch.cat([turn(name) for name in parts], 1),
        "turn_bias": torch.cat(turn_biases),
        "out": longest_first(state["fc.weight"].t()),
        "out_bias": state["fc.bias"],
    }


def model():
    return Classifier(read(torch.load(Path(__file__).with_name("weights.pt"))))


# ------------------------------------------------------------------ training


def forward(net, batch):
    return net(batch["words"], batch["letters"])


def loss(output, batch, smooth=0.1):
    weight = output.new_tensor(WEIGHT)
    label = batch["label"][:, None]
    share = torch.full_like(output, smooth / len(WEIGHT))
    share.scatter_(1, label, smooth / len(WEIGHT) + 1 - smooth)
    share = share * weight / weight[label].sum()
    return Surprise.apply(output, share)


class LongMemory(torch.optim.Optimizer):
    """Adam with decay; gradients and both moments lie one behind the other."""

    fading = ("spelling", "wide", "turn", "out")
    top, warm, end = 2e-2, 2, 12
    fade, limit, radius = 0.2, 2.0, 2.0

    def __init__(self, named):
        self.names = [name for name, _ in named]
        params = [p for _, p in named]
        super().__init__(params, {})
        ends = list(accumulate(p.numel() for p in params))
        self.spans = [slice(e - p.numel(), e) for e, p in zip(ends, params)]
        self.grad, self.m, self.v = params[0].new_zeros(3, ends[-1])
        self.t = 0

    def rate(self):
        rising = self.t / self.warm
        falling = (self.end + 1 - self.t) / (self.end - self.warm)
        return self.top * min(rising, falling, 1)

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        self.t += 1
        rate = self.rate()
        for p, span in zip(params, self.spans):
            self.grad[span] = p.grad.reshape(-1)
        length = torch.sqrt(self.grad @ self.grad)
        self.grad *= torch.clamp(self.limit / length, max=1)
        self.m += 0.1 * (self.grad - self.m)
        self.v += 0.02 * (self.grad * self.grad - self.v)
        m = self.m / (1 - 0.9**self.t)
        v = self.v / (1 - 0.98**self.t)
        move = rate * m / (v.sqrt() + 1e-8)
        for name, p, span in zip(self.names, params, self.spans):
            if name in self.fading:
                p *= 1 - rate * self.fade
            p -= move[span].view_as(p)
            if name == "out":
                p *= (self.radius / p.square().sum(0).sqrt()).clamp(max=1)


def optimizer(net):
    return LongMemory(list(net.named_parameters()))
