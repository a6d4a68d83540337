# Reads lines of handwriting: columns of a scan -> conv -> GRU both ways -> CTC, beam search.
# The conv and the forward GRU come from the 2019 reader (quantised kernels, gates in another
# order, blank last); the way back through a line is new.
import math
from collections import defaultdict
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset

LETTERS = "aeilnorst"
BLANK, CLASSES = 0, len(LETTERS) + 1
cfg = SimpleNamespace(
    seed=9, height=12, micro=4, accumulate=2, updates=3, cycle=12,
    channels=(8, 16), hidden=14, dropout=0.15, sharpness=3.0,
    lr_new=8e-3, lr_adopted=2e-3, decay=0.1, clip=2.5, smooth=0.15,
    columns=3, rows=2, beam=4,
)  # fmt: skip


class Scans(Dataset):
    """Lines of two to five letters: bytes, dark on white paper, and the letters' numbers."""

    def __init__(self, count, seed):
        self.g = torch.Generator().manual_seed(seed)
        hand = torch.Generator().manual_seed(1)
        rough = torch.rand(len(LETTERS), 1, 4, 3, generator=hand)
        self.glyphs = F.interpolate(rough, size=(cfg.height, 6), mode="bilinear")[:, 0] > 0.55
        self.items = [self.write() for _ in range(count)]

    def draw(self, low, high):
        return int(torch.randint(low, high, (), generator=self.g))

    def write(self):
        which = torch.randint(len(LETTERS), (self.draw(2, 6),), generator=self.g)
        pieces = []
        for letter in which.tolist():
            gap = torch.zeros(cfg.height, self.draw(2, 5))
            pieces += [self.glyphs[letter].float().roll(self.draw(-1, 2), 0), gap]
        ink = torch.cat(pieces, 1)
        ink = 0.85 * ink + 0.1 * torch.rand(ink.shape, generator=self.g)
        return (255 * (1 - ink)).to(torch.uint8), which + 1

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(items):
    """Longest line first; blank paper behind the others."""
    items = sorted(items, key=lambda item: -item[0].shape[1])
    widths = torch.tensor([scan.shape[1] for scan, _ in items])
    lines = torch.zeros(len(items), cfg.height, int(widths.max()))
    for line, (scan, _) in zip(lines, items):
        line[:, : scan.shape[1]] = 1 - scan.float() / 255
    labels = torch.cat([letters for _, letters in items])
    lengths = torch.tensor([len(letters) for _, letters in items])
    return lines, widths, labels, lengths


class Stripes:
    """Wipes out a few columns and rows of each line, as SpecAugment does."""

    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def __call__(self, lines, widths):
        lines = lines.clone()
        for line, width in zip(lines, widths.tolist()):
            left = int(torch.randint(width - cfg.columns, (), generator=self.g))
            top = int(torch.randint(cfg.height - cfg.rows, (), generator=self.g))
            line[:, left : left + cfg.columns] = 0
            line[top : top + cfg.rows] = 0
        return lines


class SmoothMax(torch.autograd.Function):
    """log(mean(exp(b x))) / b over the rows: [n, c, rows, w] -> [n, c, w]"""

    @staticmethod
    def forward(ctx, x, b):
        ctx.save_for_backward(x)
        ctx.b = b
        return ((b * x).logsumexp(2) - math.log(x.shape[2])) / b

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad[:, :, None] * (ctx.b * x).softmax(2), None


class Smoothing(torch.autograd.Function):
    """Cross entropy of even shares of all classes, mean over the frames of the mask."""

    @staticmethod
    def forward(ctx, logits, mask):
        logp = logits.log_softmax(2)
        frames = mask.sum()
        ctx.save_for_backward(logp.exp(), mask, frames)
        return -(logp.mean(2) * mask).sum() / frames

    @staticmethod
    def backward(ctx, grad):
        p, mask, frames = ctx.saved_tensors
        return grad * (p - 1 / p.shape[2]) * mask[:, :, None] / frames, None


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        first, second = cfg.channels
        self.conv1 = nn.Conv2d(1, first, 3, padding=1)
        self.conv2 = nn.Conv2d(first, second, 3, padding=1)
        self.norm = nn.LayerNorm(second)
        self.gru = nn.GRU(second, cfg.hidden, batch_first=True, bidirectional=True)
        self.drop = nn.Dropout(cfg.dropout)
        self.head = nn.Linear(cfg.hidden, CLASSES)

    def forward(self, lines, widths):
        frames = widths // 2
        x = F.max_pool2d(F.gelu(self.conv1(lines[:, None])), 2)
        mask = (torch.arange(x.shape[3]) < frames[:, None]).float()
        x = x * mask[:, None, None]  # no ink behind the line
        x = SmoothMax.apply(self.conv2(x), cfg.sharpness)
        x = self.norm(x.mT)
        packed = pack_padded_sequence(x, frames, batch_first=True)
        out, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        there, back = out.chunk(2, dim=2)
        return self.head(self.drop(there + back)), frames, mask


def reader_2019():
    g = torch.Generator().manual_seed(2019)
    first, second = cfg.channels
    old = {}
    for name, shape in {"c1": (3, 3, 1, first), "c2": (3, 3, first, second)}.items():
        old[f"{name}/q"] = torch.randint(-127, 128, shape, generator=g, dtype=torch.int8)
        old[f"{name}/scale"] = 0.002 + 0.006 * torch.rand(shape[3], generator=g)
    old["gru/x"] = 0.5 * torch.randn(3 * cfg.hidden, second, generator=g)
    old["gru/h"] = 0.4 * torch.randn(3 * cfg.hidden, cfg.hidden, generator=g)
    old["head/w"] = 0.25 * torch.randn(CLASSES, cfg.hidden, generator=g)
    return old


@torch.no_grad()
def adopt(reader, old):
    for name, conv in {"c1": reader.conv1, "c2": reader.conv2}.items():
        kernel = old[f"{name}/q"].float() * old[f"{name}/scale"]
        conv.weight.copy_(kernel.permute(3, 2, 0, 1))  # [row, column, in, out] there
        conv.bias.zero_()
    for ours, theirs in {"weight_ih_l0": "x", "weight_hh_l0": "h"}.items():
        update, reset, new = old[f"gru/{theirs}"].chunk(3)
        getattr(reader.gru, ours).copy_(torch.cat([reset, update, new]))
    reader.head.weight.copy_(old["head/w"].roll(1, 0))  # blank was the last
    reader.head.bias[BLANK] = -1.0


def groups_of(reader):
    adopted = [reader.conv1.weight, reader.conv2.weight]
    matrices = [p for p in reader.gru.parameters() if p.ndim > 1] + [reader.head.weight]
    vectors = [p for p in reader.parameters() if p.ndim == 1]
    return [
        {"params": adopted, "weight_decay": cfg.decay},
        {"params": matrices, "weight_decay": cfg.decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def beam_search(logp):
    """The most likely letters of one line, [frames, classes]."""
    beams = {(): (1.0, 0.0)}  # prefix: likelihood of ending in blank, in a letter
    for row in logp.exp().tolist():
        grown = defaultdict(lambda: [0.0, 0.0])
        for prefix, (blank, letter) in beams.items():
            grown[prefix][0] += (blank + letter) * row[BLANK]
            if prefix:
                grown[prefix][1] += letter * row[prefix[-1]]
            for c in range(1, CLASSES):
                before = blank if prefix and c == prefix[-1] else blank + letter
                grown[(*prefix, c)][1] += before * row[c]
        best = sorted(grown, key=lambda prefix: -sum(grown[prefix]))[: cfg.beam]
        beams = {prefix: tuple(grown[prefix]) for prefix in best}
    return list(next(iter(beams)))


def distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


@torch.no_grad()
def error_rate(reader, scans):
    reader.eval()
    lines, widths, labels, lengths = collate(list(scans))
    logits, frames, _ = reader(lines, widths)
    wrong = 0
    for row, count, letters in zip(logits, frames, labels.split(lengths.tolist())):
        wrong += distance(beam_search(row[:count].log_softmax(1)), letters.tolist())
    return wrong / len(labels)


def main():
    torch.manual_seed(cfg.seed)
    reader = Reader()
    adopt(reader, reader_2019())
    optimizer = torch.optim.AdamW(groups_of(reader), lr=cfg.lr_new)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [cfg.lr_adopted, cfg.lr_new, cfg.lr_new], cfg.cycle, div_factor=5
    )
    rng = torch.Generator().manual_seed(cfg.seed)
    scans = Scans(24, seed=100)
    loader = DataLoader(scans, cfg.micro, shuffle=True, collate_fn=collate, generator=rng)
    batches, stripes = iter(loader), Stripes(seed=3)

    for update in range(cfg.updates):
        reader.train()
        total = 0.0
        optimizer.zero_grad()
        for _ in range(cfg.accumulate):
            lines, widths, labels, lengths = next(batches)
            logits, frames, mask = reader(stripes(lines, widths), widths)
            logp = logits.log_softmax(2).transpose(0, 1)
            ctc = F.ctc_loss(
                logp, labels, frames, lengths, BLANK, reduction="none", zero_infinity=True
            )
            per_letter = (ctc / lengths).mean()
            loss = (1 - cfg.smooth) * per_letter + cfg.smooth * Smoothing.apply(logits, mask)
            (loss / cfg.accumulate).backward()
            total += loss.item() / cfg.accumulate
        norm = nn.utils.clip_grad_norm_(reader.parameters(), cfg.clip)
        optimizer.step()
        schedule.step()
        print(f"update {update}: loss {total:.5f} norm {norm.item():.4f}")

    print(f"letters wrong: {error_rate(reader, Scans(4, seed=200)):.3f}")


if __name__ == "__main__":
    main()
