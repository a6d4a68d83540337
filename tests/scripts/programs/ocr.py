"""Reading lines of capitals: CTC, and a speller that is shown the letters as it learns."""

from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Sampler


@dataclass(frozen=True)
class Config:
    seed: int = 41
    lines: int = 56
    batch: int = 7
    accumulate: int = 2
    slips: float = 0.12
    fusion: float = 0.4
    gamma: float = 1.5
    smoothing: float = 0.1
    ctc: float = 0.35
    guide: float = 2.0
    lr: float = 0.06
    warmup: int = 3


cfg = Config()
BLANK, EDGE, FIRST, PAD = 0, 1, 2, -1
# Units of width, strokes as x y x y, uses in a thousand letters.
GLYPHS = {
    "A": (4, "0620 2046 1434", 82), "E": (3, "0006 0030 0323 0636", 127),
    "H": (4, "0006 4046 0343", 61), "I": (1, "0006", 70), "L": (3, "0006 0636", 40),
    "N": (4, "0006 0046 4046", 67), "T": (4, "0040 2026", 91),
    "V": (4, "0026 4026", 30), "Z": (3, "0030 3006 0636", 22),
}  # fmt: skip
VOCAB = FIRST + len(GLYPHS)


def draw(text, scale, pen, slant=0.0, top=4.0):
    """Ink of [20, width] pixels, by their distance to the nearest stroke."""
    ends, x = [], 4.0
    for letter in text:
        wide, strokes, _ = GLYPHS[letter]
        digits = torch.tensor([int(digit) for digit in strokes.replace(" ", "")])
        ends.append(digits.view(-1, 2, 2) * scale + torch.tensor([x, top]))
        x += wide * scale + 3.0
    start, end = torch.cat(ends).unbind(1)
    spot = torch.cartesian_prod(torch.arange(20.0), torch.arange(x)).flip(1)
    spot = spot[:, None] + (spot[:, None, 1:] - 9.0) * torch.tensor([slant, 0.0])
    along = ((spot - start) * (end - start)).sum(2) / (end - start).square().sum(1)
    gap = spot - start.lerp(end, along.clamp(0, 1)[:, :, None])
    return torch.sigmoid((pen - gap.norm(dim=2).amin(1).view(20, -1)) / 0.3)


def corpus(rng):
    """Standardised ink of the slips with the codes of their letters, and blank paper."""
    share = torch.tensor([float(uses) for _, _, uses in GLYPHS.values()])
    items = []
    for many in torch.randint(3, 8, (cfg.lines,), generator=rng).tolist():
        picks = torch.multinomial(share, many, replacement=True, generator=rng)
        size, pen, slant, top, left, right = torch.rand(6, generator=rng).tolist()
        text = [list(GLYPHS)[pick] for pick in picks]
        ink = draw(text, 1.7 + size / 2, 0.7 + pen / 2, 0.4 * slant - 0.2, 2 + 2 * top)
        light = torch.linspace(0.7 + 0.3 * left, 0.7 + 0.3 * right, ink.shape[1])
        grain = 0.02 * torch.randn(ink.shape, generator=rng)
        grey = (255 * (light * (1 - 0.8 * ink) + grain)).round().clamp(0, 255) / 255
        items.append((1 - grey / grey.quantile(0.9, dim=0), picks + FIRST))
    std, mean = torch.std_mean(torch.cat([page.flatten() for page, _ in items]))
    return [((page - mean) / std, codes) for page, codes in items], float(-mean / std)


class ByWidth(Sampler):
    """Batches of rows of like width, shuffled in their bucket and among themselves."""

    def __init__(self, widths, rng):
        self.order = sorted(range(len(widths)), key=widths.__getitem__)
        self.rng = rng

    def __iter__(self):
        batches = []
        for bucket in torch.tensor(self.order).split(2 * cfg.batch):
            mixed = bucket[torch.randperm(len(bucket), generator=self.rng)]
            batches += mixed.split(cfg.batch)
        for turn in torch.randperm(len(batches), generator=self.rng):
            yield batches[turn].tolist()


def collate(items, blank, rng):
    """Pads with blank paper; what the speller is shown has a few wrong letters."""
    pages, texts = zip(*items, strict=True)
    widths = torch.tensor([page.shape[1] for page in pages])
    image = pad_sequence([page.T for page in pages], True, blank).mT
    codes = pad_sequence(texts, True, PAD)
    edge = torch.full((len(texts), 1), EDGE)
    slip = torch.rand(codes.shape, generator=rng) < cfg.slips
    other = torch.randint(FIRST, VOCAB, codes.shape, generator=rng)
    reads = torch.cat([edge, torch.where(slip, other, codes.clamp(min=EDGE))], 1)
    ends = (codes != PAD).sum(1, keepdim=True)
    writes = torch.cat([codes, PAD * edge], 1).scatter(1, ends, EDGE)
    return image, widths, codes, reads, writes


class ColumnPool(torch.autograd.Function):
    """Sums the rows of [n, channel, row, column] by a softmax of their own values."""

    @staticmethod
    def forward(ctx, h, sharp):
        share = (sharp * h).softmax(2)
        pooled = (share * h).sum(2, keepdim=True)
        ctx.save_for_backward(share, 1 + sharp * (h - pooled))
        return pooled.squeeze(2)

    @staticmethod
    def backward(ctx, grad):
        share, pull = ctx.saved_tensors
        return grad[:, :, None] * share * pull, None


class FocalLoss(torch.autograd.Function):
    """Sum of smoothed cross entropies, each less the surer the right letter is."""

    @staticmethod
    def forward(ctx, logits, target, weight):
        logp = logits.log_softmax(1)
        hot = F.one_hot(target.clamp(min=0), logp.shape[1])
        wanted = hot * (1 - cfg.smoothing) + cfg.smoothing / logp.shape[1]
        cost = -(wanted * logp).sum(1)
        sure = (hot * logp).sum(1).exp()
        weight = weight[target] * (target != PAD)
        ctx.save_for_backward(logp.exp(), hot, wanted, cost, sure, weight)
        return (weight * (1 - sure) ** cfg.gamma * cost).sum()

    @staticmethod
    def backward(ctx, grad):
        p, hot, wanted, cost, sure, weight = ctx.saved_tensors
        focus = (1 - sure) ** cfg.gamma
        bend = cfg.gamma * (1 - sure) ** (cfg.gamma - 1) * sure * cost
        slope = focus[:, None] * (p - wanted) + bend[:, None] * (p - hot)
        return grad * weight[:, None] * slope, None, None


class PaperNorm(nn.Module):
    """Batch norm over the columns that are paper, not padding; padding becomes nought."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width, 1, 1))
        self.bias = nn.Parameter(0.1 * torch.randn(width, 1, 1))

    def forward(self, h, mask):
        many = mask.sum() * h.shape[2]
        mean = (h * mask).sum((0, 2, 3), keepdim=True) / many
        var = ((h - mean) * mask).square().sum((0, 2, 3), keepdim=True) / many
        h = (h - mean) / (var + 1e-5).sqrt()
        return F.relu(h * self.weight + self.bias) * mask


class Speller(nn.Module):
    """Writes letter by letter; where it looks depends on where it looked before."""

    def __init__(self, width, embed=12, pen=17):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, embed)
        self.bridge = nn.Linear(width, 2 * pen)
        self.cell = nn.LSTMCell(embed + width, pen)
        self.query = nn.Linear(pen, 15, bias=False)
        self.key = nn.Linear(width, 15)
        self.place = nn.Conv1d(1, 15, 5, padding=2, bias=False)
        self.energy = nn.Linear(15, 1, bias=False)
        self.out = nn.Linear(pen + width, VOCAB)
        self.register_buffer("follows", torch.zeros(VOCAB, VOCAB))

    def forward(self, memory, mask, reads):
        look = mask / mask.sum(1, keepdim=True)
        context = (look[:, :, None] * memory).sum(1)
        h, c = torch.tanh(self.bridge(context)).chunk(2, 1)
        keys, logits, looks = self.key(memory), [], []
        for code in reads.unbind(1):
            h, c = self.cell(torch.cat([self.embed(code), context], 1), (h, c))
            place = self.place(look[:, None]).mT
            match = torch.tanh(keys + place + self.query(h)[:, None])
            score = self.energy(match).squeeze(2)
            look = score.masked_fill(mask == 0, -torch.inf).softmax(1)
            context = (look[:, :, None] * memory).sum(1)
            logits += [self.out(torch.cat([h, context], 1)) + self.follows[code]]
            looks += [look]
        return torch.stack(logits, 1), torch.stack(looks, 1)


class Reader(nn.Module):
    def __init__(self, a=9, b=14, hidden=11):
        super().__init__()
        self.stem = nn.Conv2d(1, a, 5, stride=(2, 1), padding=2, bias=False)
        self.norm1 = PaperNorm(a)
        self.down = nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False)
        self.norm2 = PaperNorm(b)
        self.mix = nn.Conv2d(b, b, 3, padding=1, bias=False)
        self.norm3 = PaperNorm(b)
        self.lstm = nn.LSTM(2 * b, hidden, batch_first=True, bidirectional=True)
        self.ctc = nn.Linear(2 * hidden, VOCAB)
        self.speller = Speller(2 * hidden)
        self.register_buffer("rarity", torch.ones(VOCAB))

    def forward(self, image, widths, codes, reads, writes):
        """Sums over the batch: of CTC, of the speller, of looks far from the diagonal."""
        frames, sizes = (widths + 1) // 2, (codes != PAD).sum(1)
        wide = (torch.arange(image.shape[2]) < widths[:, None]).float()
        mask = (torch.arange(int(frames.max())) < frames[:, None]).float()
        h = self.norm1(self.stem(image[:, None]), wide[:, None, None])
        h = self.norm2(self.down(h), mask[:, None, None])
        h = h + self.norm3(self.mix(h), mask[:, None, None])
        h = torch.cat([ColumnPool.apply(h, 1.5), h.mean(2)], 1).mT
        packed = pack_padded_sequence(h, frames, True, enforce_sorted=False)
        memory, _ = pad_packed_sequence(self.lstm(packed)[0], True)

        logp = self.ctc(memory).log_softmax(2).transpose(0, 1)
        ctc = F.ctc_loss(logp, codes[codes != PAD], frames, sizes, reduction="sum")
        logits, looks = self.speller(memory, mask, reads)
        spelt = FocalLoss.apply(logits.flatten(0, 1), writes.flatten(), self.rarity)
        across = torch.arange(mask.shape[1]) / frames[:, None]
        through = torch.arange(writes.shape[1]) / (sizes[:, None] + 1)
        off = (across[:, None] - through[:, :, None]) / 0.25
        far = (1 - torch.exp(-0.5 * off.square())) * (writes != PAD)[:, :, None]
        return ctc, spelt, (far * looks).sum()


@torch.no_grad()
def prepare(reader, texts):
    """What is known before: shapes of letters, which follow which, how many of each."""
    for row, letter in enumerate(GLYPHS, FIRST):
        shape = F.adaptive_avg_pool2d(draw(letter, 2.0, 1.0)[None], (4, 3)).flatten()
        reader.speller.embed.weight[row] = (shape - shape.mean()) / shape.std()
    pairs = torch.full((VOCAB, VOCAB), 0.2)
    for codes in texts:
        path = F.pad(codes, (1, 1), value=EDGE)
        pairs.index_put_((path[:-1], path[1:]), torch.ones(()), accumulate=True)
    reader.speller.follows.copy_(cfg.fusion * F.normalize(pairs, p=1, dim=1).log())
    uses = torch.cat([*texts, torch.full((len(texts),), EDGE)]).bincount()
    rare = uses.clamp(min=1).float().rsqrt()
    reader.rarity.copy_(rare / rare[EDGE:].mean())
    reader.ctc.bias[BLANK] += 1.0
    for bias in (reader.lstm.bias_ih_l0, reader.lstm.bias_ih_l0_reverse):
        bias.view(4, -1)[1] += 1.0  # gates: in, forget, cell, out


class NovoGrad(torch.optim.Optimizer):
    """Momentum of gradients that are divided by a moving norm of their tensor."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state, power = self.state[p], p.grad.square().sum()
                if not state:
                    state.update(power=power, speed=torch.zeros_like(p))
                state["power"].lerp_(power, 1 - group["hold"])
                push = p.grad / (state["power"].sqrt() + 1e-8) + group["decay"] * p
                state["speed"].mul_(group["keep"]).add_(push)
                p.sub_(group["lr"] * state["speed"])


def main():
    torch.manual_seed(cfg.seed)
    rng = torch.Generator().manual_seed(cfg.seed)
    items, blank = corpus(rng)
    sampler = ByWidth([page.shape[1] for page, _ in items], rng)
    fill = partial(collate, blank=blank, rng=rng)
    loader = DataLoader(items, batch_sampler=sampler, collate_fn=fill)
    reader = Reader()
    prepare(reader, [codes for _, codes in items])

    groups = [{"params": [], "clip": clip} for clip in (1.5, 0.4, 4.0)]
    for name, p in reader.named_parameters():
        kind = 2 if name.startswith(("ctc", "speller")) else int("lstm" in name)
        groups[kind]["params"].append(p)
    groups[2]["lr"] = 0.5 * cfg.lr
    opt = NovoGrad(groups, {"lr": cfg.lr, "keep": 0.9, "hold": 0.7, "decay": 0.02})
    warm = torch.optim.lr_scheduler.LinearLR(opt, 1 / cfg.warmup, 1.0, cfg.warmup - 1)

    stream = iter(loader)
    while batches := list(islice(stream, cfg.accumulate)):
        letters = sum(int((codes != PAD).sum()) for _, _, codes, _, _ in batches)
        opt.zero_grad()
        for batch in batches:
            ctc, spelt, guide = reader(*batch)
            loss = cfg.ctc * ctc + (1 - cfg.ctc) * spelt + cfg.guide * guide
            (loss / letters).backward()
        for group in groups:
            nn.utils.clip_grad_norm_(group["params"], group["clip"])
        opt.step()
        print(f"rate {warm.get_last_lr()[0]:.3f}, loss {loss / letters:.4f}")  # noqa: T201
        warm.step()


if __name__ == "__main__":
    main()
