# Spelling by tones: a hybrid CTC and attention recogniser on synthetic utterances.
# Features are made here, the encoder's recurrence comes from a released model.
import math
from argparse import Namespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

hp = Namespace(
    seed=23, utterances=48, batch=4, accumulate=2, updates=3,
    rate=8000, window=200, hop=80, fft=256, bands=24, preemphasis=0.97,
    width=24, hidden=16, dropout=0.1, ctc=0.3, smoothing=0.1,
    peak=0.2, warmup=4, betas=(0.9, 0.98), eps=1e-8, clip=1.0,
    freq_mask=5, time_mask=8,
)  # fmt: skip
BLANK, EDGE = 0, 1  # EDGE starts and ends what the decoder writes
LETTERS = "abcdefgh"
VOCAB = 2 + len(LETTERS)
PAD = -100
SPOKEN = torch.tensor([30.0, 7.0, 12.0, 18.0, 40.0, 9.0, 8.0, 20.0])  # per thousand


# --- utterances


def utterance(rng):
    """A letter is two tones with a swell; more frequent letters are spoken faster."""
    many = int(torch.randint(3, 7, (), generator=rng))
    letters = torch.multinomial(SPOKEN, many, replacement=True, generator=rng)
    parts = []
    for letter in letters.tolist():
        seconds = 0.11 + 0.07 * torch.rand((), generator=rng).item()
        t = torch.arange(int(seconds * hp.rate)) / hp.rate
        low, high = 250.0 + 90.0 * letter, 3200.0 - 230.0 * letter
        voice = torch.sin(2 * math.pi * low * t) + 0.5 * torch.sin(2 * math.pi * high * t)
        parts.append(voice * torch.sin(math.pi * t / seconds))
    wave = torch.cat(parts)
    return wave + 0.05 * torch.randn(len(wave), generator=rng), letters + 2


# --- features


def to_mel(hertz):
    return 2595.0 * math.log10(1 + hertz / 700.0)


def from_mel(mel):
    return 700.0 * (10 ** (mel / 2595.0) - 1)


def mel_filters():
    """Triangles [bins, bands]."""
    edges = from_mel(torch.linspace(to_mel(60.0), to_mel(hp.rate / 2), hp.bands + 2))
    bins = torch.linspace(0, hp.rate / 2, hp.fft // 2 + 1)[:, None]
    left, peak, right = edges[:-2], edges[1:-1], edges[2:]
    up, down = (bins - left) / (peak - left), (right - bins) / (right - peak)
    return torch.minimum(up, down).clamp(min=0)


def log_mel(wave, filters):
    """Frames by bands."""
    wave = torch.cat([wave[:1], wave[1:] - hp.preemphasis * wave[:-1]])
    frames = wave.unfold(0, hp.window, hp.hop)
    frames = frames * torch.hann_window(hp.window)
    spectrum = torch.fft.rfft(frames, n=hp.fft).abs().square()
    return torch.log(spectrum @ filters + 1e-4)


def mask(features, rng):
    """A stripe of bands and a stripe of time become nought."""
    features = features.clone()
    wide = int(torch.randint(1, hp.freq_mask + 1, (), generator=rng))
    low = int(torch.randint(hp.bands - wide, (), generator=rng))
    long = int(torch.randint(3, hp.time_mask + 1, (), generator=rng))
    begin = int(torch.randint(len(features) - long, (), generator=rng))
    features[:, low : low + wide] = 0.0
    features[begin : begin + long] = 0.0
    return features


def batches(corpus, moments, filters, rng):
    """Endless micro-batches: features, their lengths, letters, their lengths."""
    mean, std = moments
    while True:
        order = torch.randperm(len(corpus), generator=rng)
        for rows in order.split(hp.batch):
            waves, texts = zip(*(corpus[i] for i in rows.tolist()), strict=True)
            features = [(log_mel(wave, filters) - mean) / std for wave in waves]
            features = [mask(f, rng) for f in features]
            frames = torch.tensor([len(f) for f in features])
            letters = torch.tensor([len(text) for text in texts])
            padded = pad_sequence(features, batch_first=True)
            yield padded, frames, pad_sequence(texts, True, PAD), letters


def for_decoder(texts):
    """What the decoder reads, and what it has to write: one further, ending in EDGE."""
    edge = torch.full((len(texts), 1), EDGE)
    reads = torch.cat([edge, texts.clamp(min=BLANK)], 1)
    writes = torch.cat([texts, torch.full_like(edge, PAD)], 1)
    ends = (texts != PAD).sum(1, keepdim=True)
    return reads, writes.scatter(1, ends, EDGE)


# --- loss


class SmoothedLoss(torch.autograd.Function):
    """Mean cross entropy of logits [n, v] with smoothed labels; PAD does not count."""

    @staticmethod
    def forward(ctx, logits, target, smoothing):
        logp = logits.log_softmax(1)
        real = target != PAD
        index = target.clamp(min=0)[:, None]
        wanted = torch.full_like(logp, smoothing / logp.shape[1])
        wanted.scatter_add_(1, index, torch.full_like(logp[:, :1], 1 - smoothing))
        many = real.sum()
        ctx.save_for_backward(logp, wanted, real, many)
        return -((wanted * logp).sum(1) * real).sum() / many

    @staticmethod
    def backward(ctx, grad):
        logp, wanted, real, many = ctx.saved_tensors
        slope = (logp.exp() - wanted) * real[:, None]
        return grad * slope / many, None, None


# --- model


class Subsample(nn.Module):
    """Two strided convolutions: a quarter of the frames."""

    def __init__(self, width, channels=8):
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.proj = nn.Linear(channels * (hp.bands // 4), width)

    def forward(self, x, lengths):
        h = F.relu(self.conv1(x.unsqueeze(1)))
        h = F.relu(self.conv2(h))
        h = self.proj(h.transpose(1, 2).flatten(2))
        return h, (lengths + 3) // 4


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.subsample = Subsample(hp.width)
        self.drop = nn.Dropout(hp.dropout)
        self.gru = nn.GRU(hp.width, hp.hidden, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(2 * hp.hidden)

    def forward(self, x, lengths):
        h, lengths = self.subsample(x, lengths)
        h = self.drop(h)
        packed = pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return self.norm(h), lengths


class Decoder(nn.Module):
    """A recurrent speller that looks at the encoder's frames."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hp.width)
        self.gru = nn.GRU(hp.width, hp.width, batch_first=True)
        self.query = nn.Linear(hp.width, hp.width, bias=False)
        self.key = nn.Linear(2 * hp.hidden, hp.width, bias=False)
        self.value = nn.Linear(2 * hp.hidden, hp.width)
        self.join = nn.Linear(2 * hp.width, hp.width)
        self.out = nn.Linear(hp.width, VOCAB)
        self.out.weight = self.embed.weight

    def forward(self, reads, memory, lengths):
        h, _ = self.gru(self.embed(reads))
        query, key, value = self.query(h), self.key(memory), self.value(memory)
        score = query @ key.transpose(1, 2) / math.sqrt(hp.width)
        beyond = torch.arange(memory.shape[1]) >= lengths[:, None]
        score = score.masked_fill(beyond[:, None], -math.inf)
        context = score.softmax(2) @ value
        h = torch.tanh(self.join(torch.cat([h, context], 2)))
        return self.out(h)


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.ctc = nn.Linear(2 * hp.hidden, VOCAB)
        self.decoder = Decoder()

    def forward(self, x, frames, texts, letters):
        memory, lengths = self.encoder(x, frames)
        logp = self.ctc(memory).log_softmax(2).transpose(0, 1)
        flat = texts[texts != PAD]
        ctc = F.ctc_loss(logp, flat, lengths, letters, blank=BLANK, reduction="sum")
        reads, writes = for_decoder(texts)
        logits = self.decoder(reads, memory, lengths)
        spelled = SmoothedLoss.apply(logits.flatten(0, 1), writes.flatten(), hp.smoothing)
        return ctc / letters.sum(), spelled


def released():
    """The public model's recurrence. Its gates are update, reset, new; ours begin with reset."""
    rng = torch.Generator().manual_seed(1905)
    saved = {}
    for way in ("l0", "l0_reverse"):
        for name, size in (("weight_ih", (hp.width,)), ("weight_hh", (hp.hidden,))):
            shape = 3, hp.hidden, *size
            saved[f"{name}_{way}"] = 0.35 * torch.randn(shape, generator=rng)
        for name in ("bias_ih", "bias_hh"):
            bias = 0.2 * torch.randn(3, hp.hidden, generator=rng)
            saved[f"{name}_{way}"] = bias + torch.tensor([[0.5], [-0.5], [0.0]])
    return saved


@torch.no_grad()
def adopt(model, saved):
    for name, p in model.encoder.gru.named_parameters():
        update, reset, new = saved[name]
        p.copy_(torch.cat([reset, update, new]))
    share = SPOKEN / SPOKEN.sum()
    model.ctc.bias[2:] = share.log()
    model.ctc.bias[BLANK] = 1.0


# --- training


def noam(update):
    """Of the peak: up over the warm-up, then down by the inverse square root."""
    t = update + 1
    return hp.width**-0.5 * min(t**-0.5, t * hp.warmup**-1.5)


@torch.no_grad()
def heard(model, batch):
    """Greedy reading of the CTC branch: the share of utterances with all letters."""
    model.eval()
    x, frames, texts, letters = batch
    memory, lengths = model.encoder(x, frames)
    right = 0
    for path, size, text, many in zip(
        model.ctc(memory).argmax(2), lengths, texts, letters, strict=True
    ):
        said = path[:size].unique_consecutive()
        right += torch.equal(said[said != BLANK], text[:many])
    return right / len(texts)


def main():
    torch.manual_seed(hp.seed)
    rng = torch.Generator().manual_seed(hp.seed)
    corpus = [utterance(rng) for _ in range(hp.utterances)]
    filters = mel_filters()
    everything = torch.cat([log_mel(wave, filters) for wave, _ in corpus])
    moments = everything.mean(0), everything.std(0)
    stream = batches(corpus, moments, filters, rng)

    model = Recogniser()
    adopt(model, released())
    opt = torch.optim.Adam(model.parameters(), lr=hp.peak, betas=hp.betas, eps=hp.eps)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, noam)
    print(f"at first {heard(model, next(stream)):.2f} heard right")
    model.train()
    for update in range(hp.updates):
        opt.zero_grad()
        total = 0.0
        for _ in range(hp.accumulate):
            ctc, spelled = model(*next(stream))
            loss = hp.ctc * ctc + (1 - hp.ctc) * spelled
            loss = loss / hp.accumulate
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), hp.clip)
        opt.step()
        sched.step()
        print(f"update {update} loss {total:.5f} norm {norm.item():.4f}")


if __name__ == "__main__":
    main()
