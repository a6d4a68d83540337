# Acoustic model of the reading machine: phones in, frames of log mel out. Durations are
# those of the aligner; pitch and energy are looked up in buckets. Frames are made here,
# from the samples, with a window of our own.
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

SEED = 23
PHONES, DIM, MELS, BUCKETS = 20, 24, 12, 8  # phone 0 is the padding
RATE, FFT, HOP, FLOOR = 8000, 64, 16, 1e-3
CORPUS, MICRO, ACCUMULATE, STEPS = 36, 4, 2, 3
WARMUP, BETAS, EPS, CLIP = 16, (0.9, 0.98), 1e-6, 1.0
W_DURATION, W_PITCH, W_ENERGY = 0.5, 0.3, 0.3


class Utterance(NamedTuple):
    phones: Tensor  # [p]
    length: Tensor  # [p], in frames
    pitch: Tensor  # [p], in Hz
    wave: Tensor  # [HOP * frames]


def speak(gen) -> Utterance:
    """Buzzing with two overtones; which ones are loud depends on the phone."""
    many = int(torch.randint(5, 10, (), generator=gen))
    phones = torch.randint(1, PHONES, (many,), generator=gen)
    length = torch.randint(1, 6, (many,), generator=gen) + (phones % 3 == 0)
    pitch = 130 * torch.exp(0.3 * torch.randn(many, generator=gen))
    loud = 0.2 + 0.8 * torch.rand(many, generator=gen)
    each = length * HOP
    phase = (2 * math.pi / RATE * pitch.double().repeat_interleave(each)).cumsum(0)
    colour = (phones / PHONES).repeat_interleave(each)
    wave = phase.sin() + colour * (5 * phase).sin() + (1 - colour) * (12 * phase).sin()
    wave = wave.float() * loud.repeat_interleave(each)
    wave = wave + 0.02 * torch.randn(len(wave), generator=gen)
    return Utterance(phones, length, pitch, wave)


def batches(corpus, gen):
    """Endless, in a new order every time round."""
    while True:
        order = torch.randperm(len(corpus), generator=gen).tolist()
        for start in range(0, len(order), MICRO):
            yield collate([corpus[i] for i in order[start : start + MICRO]])


def collate(parts):
    phones, length, pitch, wave = (pad_sequence(x, True) for x in zip(*parts))
    logs = torch.log(pitch.clamp(min=1.0))
    pitch = (logs - PITCH_MEAN) / PITCH_STD
    return phones, length, pitch, wave


# ---- frames


def mel_filters() -> Tensor:
    """Triangles, evenly spaced in mel, each with the area one: [bins, MELS]."""
    top = 2595 * math.log10(1 + RATE / 2 / 700)
    corners = 700 * (10 ** (torch.linspace(0, top, MELS + 2) / 2595) - 1)
    bins = torch.linspace(0, RATE / 2, FFT // 2 + 1)[:, None]
    low, mid, high = corners[:-2], corners[1:-1], corners[2:]
    up, down = (bins - low) / (mid - low), (high - bins) / (high - mid)
    area = (high - low) / 2
    return 100 * torch.minimum(up, down).clamp(min=0) / area


class Frontend(nn.Module):
    def __init__(self):
        super().__init__()
        at = torch.arange(FFT)
        window = 0.5 - 0.5 * torch.cos(2 * math.pi * at / FFT)
        angle = 2 * math.pi / FFT * at[:, None] * torch.arange(FFT // 2 + 1)
        self.register_buffer("window", window)
        self.register_buffer("waves", torch.stack([angle.cos(), -angle.sin()]))
        self.register_buffer("filters", mel_filters())

    def forward(self, wave):
        """Log mel [n, t, MELS] and loudness [n, t]."""
        side = (FFT - HOP) // 2
        frames = F.pad(wave, (side, side)).unfold(1, FFT, HOP)
        real, imag = ((frames * self.window) @ part for part in self.waves)
        size = torch.sqrt(real.square() + imag.square() + 1e-9)
        mel = torch.log((size @ self.filters).clamp(min=FLOOR))
        return mel, torch.log(size.norm(dim=2))


def by_phone(values, length):
    """Means of values of frames over the frames of each phone; nought for padding."""
    owner = torch.zeros(length.shape[0], values.shape[1], length.shape[1])
    for row, many in zip(owner, length):
        index = torch.arange(len(many)).repeat_interleave(many)
        row[: len(index)] = F.one_hot(index, len(many)).float()
    return torch.einsum("ntp,nt->np", owner, values) / length.clamp(min=1)


# ---- kernels


class ChannelNorm(torch.autograd.Function):
    """Layer norm over the last axis."""

    @staticmethod
    def forward(ctx, x, gain, shift):
        centred = x - x.mean(-1, keepdim=True)
        scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
        normed = centred * scale
        ctx.save_for_backward(normed, scale, gain)
        return normed * gain + shift

    @staticmethod
    def backward(ctx, grad):
        normed, scale, gain = ctx.saved_tensors
        g = grad * gain
        along = (g * normed).mean(-1, keepdim=True)
        by_x = scale * (g - g.mean(-1, keepdim=True) - normed * along)
        return by_x, (grad * normed).sum((0, 1)), grad.sum((0, 1))


class Regulate(torch.autograd.Function):
    """Each phone as often as it has frames: [n, p, c] -> [n, t, c]."""

    @staticmethod
    def forward(ctx, x, length):
        ctx.save_for_backward(length)
        return pad_sequence(
            [r.repeat_interleave(m, 0) for r, m in zip(x, length)], True
        )

    @staticmethod
    def backward(ctx, grad):
        (length,) = ctx.saved_tensors
        back = grad.new_zeros(*length.shape, grad.shape[2])
        for row, from_frames, many in zip(back, grad, length):
            owner = torch.arange(len(many)).repeat_interleave(many)
            row.index_add_(0, owner, from_frames[: len(owner)])
        return back, None


class MaskedL1(torch.autograd.Function):
    """Mean absolute difference over the frames that are there."""

    @staticmethod
    def forward(ctx, guess, target, mask):
        gap = (guess - target) * mask
        many = mask.sum() * guess.shape[-1]
        ctx.save_for_backward(gap, many)
        return gap.abs().sum() / many

    @staticmethod
    def backward(ctx, grad):
        gap, many = ctx.saved_tensors
        return grad * gap.sign() / many, None, None


def masked_mse(guess, target, mask):
    return ((guess - target).square() * mask).sum() / mask.sum()


# ---- model


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return ChannelNorm.apply(x, self.gain, self.shift)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.norm = Norm(width)

    def forward(self, x, mask):
        return self.norm(x + F.relu(self.conv(x.mT).mT)) * mask


class Predictor(nn.Module):
    """One number for each phone."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.norm = Norm(width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return self.out(self.norm(F.relu(self.conv(x.mT).mT))).squeeze(2)


class Voice(nn.Module):
    def __init__(self, pitch_edges, energy_edges):
        super().__init__()
        self.phones = nn.Embedding(PHONES, DIM, padding_idx=0)
        self.encoder = nn.ModuleList([Block(DIM), Block(DIM)])
        self.duration, self.pitch, self.energy = (Predictor(DIM) for _ in range(3))
        self.of_pitch = nn.Embedding(BUCKETS, DIM)
        self.of_energy = nn.Embedding(BUCKETS, DIM)
        self.decoder = nn.ModuleList([Block(DIM), Block(DIM)])
        self.to_mel = nn.Linear(DIM, MELS)
        self.post = nn.ModuleList([nn.Conv1d(MELS, DIM, 5, padding=2)])
        self.post.append(nn.Conv1d(DIM, MELS, 5, padding=2))
        self.register_buffer("pitch_edges", pitch_edges)
        self.register_buffer("energy_edges", energy_edges)
        turn = torch.arange(100)[:, None] / 100 ** (torch.arange(0, DIM, 2) / DIM)
        self.register_buffer("position", torch.cat([turn.sin(), turn.cos()], 1))

    def forward(self, phones, length, pitch, energy):
        there = (phones > 0).float()[:, :, None]
        x = self.phones(phones)
        for block in self.encoder:
            x = block(x, there)
        guesses = self.duration(x.detach()), self.pitch(x), self.energy(x)
        x = x + self.of_pitch(torch.bucketize(pitch, self.pitch_edges))
        x = x + self.of_energy(torch.bucketize(energy, self.energy_edges))
        y = Regulate.apply(x, length)
        frames = length.sum(1)
        spoken = (torch.arange(y.shape[1]) < frames[:, None]).float()[:, :, None]
        y = (y + self.position[: y.shape[1]]) * spoken
        for block in self.decoder:
            y = block(y, spoken)
        rough = self.to_mel(y) * spoken
        extra = torch.tanh(self.post[0](rough.mT))
        fine = rough + self.post[1](extra).mT
        return guesses, rough, fine, there[:, :, 0], spoken


def articulation() -> Tensor:
    """Where and how phones 1, 2, ... are made, spread over the embedding."""
    ids = torch.arange(1, PHONES)[:, None]
    features = (ids >> torch.arange(5)) % 2 * 2.0 - 1.0
    spread = torch.cos(torch.arange(5)[:, None] * (torch.arange(DIM) + 0.5) * 0.7)
    return features @ spread / math.sqrt(5)


def noam(n):
    return DIM**-0.5 * min((n + 1) ** -0.5, (n + 1) * WARMUP**-1.5)


# ---- begin

torch.manual_seed(SEED)
gen = torch.Generator().manual_seed(SEED + 1)
corpus = [speak(gen) for _ in range(CORPUS)]
every_pitch = torch.cat([u.pitch for u in corpus]).log()
PITCH_STD, PITCH_MEAN = (x.item() for x in torch.std_mean(every_pitch))
frontend = Frontend()
heard = [frontend(u.wave[None]) for u in corpus]
every_energy = torch.cat(
    [by_phone(e, u.length[None])[0] for u, (_, e) in zip(corpus, heard)]
)
inner = torch.arange(1, BUCKETS) / BUCKETS
pitch_edges = torch.quantile((every_pitch - PITCH_MEAN) / PITCH_STD, inner)
energy_edges = torch.quantile(every_energy, inner)
model = Voice(pitch_edges, energy_edges)
with torch.no_grad():
    model.phones.weight[1:] = articulation()
    model.to_mel.bias.copy_(torch.cat([mel[0] for mel, _ in heard]).mean(0))
opt = torch.optim.Adam(model.parameters(), lr=1.0, betas=BETAS, eps=EPS)
sched = torch.optim.lr_scheduler.LambdaLR(opt, noam)

stream = batches(corpus, gen)
for step in range(STEPS):
    opt.zero_grad()
    seen = 0.0
    for _ in range(ACCUMULATE):
        phones, length, pitch, wave = next(stream)
        with torch.no_grad():
            mel, loudness = frontend(wave)
            energy = by_phone(loudness, length)
        guesses, rough, fine, there, spoken = model(phones, length, pitch, energy)
        wanted = torch.log1p(length.float()), pitch, energy
        terms = [masked_mse(g, w, there) for g, w in zip(guesses, wanted)]
        loss = MaskedL1.apply(rough, mel, spoken) + MaskedL1.apply(fine, mel, spoken)
        loss = loss + W_DURATION * terms[0] + W_PITCH * terms[1] + W_ENERGY * terms[2]
        loss = loss / ACCUMULATE
        loss.backward()
        seen += loss.item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    opt.step()
    sched.step()
    print(
        f"update {step}: loss {seen:.5f} norm {norm:.4f} rate {sched.get_last_lr()[0]:.5f}"
    )
