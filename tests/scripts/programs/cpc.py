"""Contrastive predictive coding of short utterances.

Frames of the raw wave are told from other frames, one to three steps ahead, by what a
GRU has heard so far. What stays the same of a speaker is followed by a moving average
and taken off the frames. The recurrent part comes from last year's run in Keras.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    seed: int = 5
    rate: int = 4000
    speakers: int = 6
    utterances: int = 72
    crop: int = 600
    half: int = 8
    halves: int = 2
    filters: int = 16
    frame: int = 24
    context: int = 32
    ahead: int = 3
    fade: float = 0.8  # what a step further ahead counts less
    negatives: int = 10
    follow: float = 0.9
    scale: float = 2.5
    emphasis: float = 0.9
    lr: float = 4e-3
    warm: int = 4
    clip: float = 0.2
    steps: int = 3


# ------------------------------------------------------------------ utterances


class Corpus:
    """Hums of a few speakers as 16 bit samples: pitch, two formants and breath."""

    def __init__(self, c, rng):
        self.c, self.rng = c, rng
        self.pitch = 90 + 140 * torch.rand(c.speakers, generator=rng)
        self.formants = 300 + 1200 * torch.rand(c.speakers, 2, generator=rng)
        self.speaker = torch.randint(c.speakers, (c.utterances,), generator=rng)
        self.waves = [self.hum(int(s)) for s in self.speaker]

    def hum(self, speaker):
        length = int(torch.randint(700, 1000, (), generator=self.rng))
        t = torch.arange(length) / self.c.rate
        glide = 1 + 0.3 * torch.randn((), generator=self.rng) * t
        wave = torch.zeros(length)
        for n in range(1, 8):
            tone = n * self.pitch[speaker] * glide
            near = torch.exp(-(((tone[:, None] - self.formants[speaker]) / 200) ** 2)).sum(1)
            wave += (0.1 + near) * torch.sin(2 * math.pi * tone * t)
        wave = wave * (1 + torch.sin(2 * math.pi * 6 * t + length)) + 0.3
        wave += 0.4 * torch.randn(length, generator=self.rng)
        loud = 500 + 2500 * torch.rand((), generator=self.rng)
        return (loud * wave).round().clamp(-32768, 32767).to(torch.int16)

    def batches(self):
        """Endless: crops [half, crop] and who speaks."""
        c = self.c
        while True:
            order = torch.randperm(c.utterances, generator=self.rng)
            for rows in order.split(c.half):
                crops = []
                for row in rows.tolist():
                    wave = self.waves[row]
                    room = len(wave) - c.crop
                    start = int(torch.randint(room, (), generator=self.rng))
                    crops.append(wave[start : start + c.crop])
                yield self.prepare(torch.stack(crops)), self.speaker[rows]

    def prepare(self, samples):
        wave = samples.float() / 32768
        wave = F.pad(wave[:, 1:] - self.c.emphasis * wave[:, :-1], (1, 0))
        wave = wave - wave.mean(1, keepdim=True)
        return wave / wave.std(1, keepdim=True)


def draw_negatives(total, many, rng):
    """For each of all frames some others; each is drawn as often as any."""
    return torch.stack([torch.randperm(total, generator=rng) for _ in range(many)], 1)


# ------------------------------------------------------------------ loss


class ScaledLogSoftmax(torch.autograd.Function):
    """log softmax of exp(log_scale) * x over the last dimension."""

    @staticmethod
    def forward(ctx, x, log_scale):
        scale = log_scale.exp()
        scaled = scale * x
        out = scaled - scaled.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(scaled, scale, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        scaled, scale, out = ctx.saved_tensors
        slope = grad - out.exp() * grad.sum(-1, keepdim=True)
        return scale * slope, (slope * scaled).sum()


def info_nce(net, frames, heard, others):
    """Mean over the steps ahead, nearer ones first and foremost; and how often it is right."""
    size, length, width = frames.shape
    flat = frames.reshape(-1, width)
    number = torch.arange(size * length).view(size, length)
    total, right, weights = 0.0, 0.0, 0.0
    for k, predictor in enumerate(net.predictors, 1):
        told = predictor(heard[:, :-k])
        target = number[:, k:]
        wrong = others[target]
        like = (told * frames[:, k:]).sum(-1, keepdim=True)
        unlike = (told.unsqueeze(2) * flat[wrong]).sum(-1)
        unlike = unlike.masked_fill(wrong == target.unsqueeze(2), -100.0)
        logits = torch.cat([like, unlike], -1) / math.sqrt(width)
        share = ScaledLogSoftmax.apply(logits, net.log_scale)
        weight = net.c.fade ** (k - 1)
        total = total - weight * share[..., 0].mean()
        right += weight * (logits.argmax(-1) == 0).float().mean().item()
        weights += weight
    return total / weights, right / weights


# ------------------------------------------------------------------ network


class ChannelNorm(nn.Module):
    """Each frame on its own, over its channels: [batch, channels, time]."""

    def __init__(self, channels, eps=1e-4):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1))
        self.eps = eps

    def forward(self, x):
        var, mean = torch.var_mean(x, dim=1, keepdim=True, correction=0)
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


class CPC(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.bank = nn.Conv1d(1, c.filters, 20, stride=5, padding=8, bias=False)
        self.norm1 = ChannelNorm(c.filters)
        self.conv2 = nn.Conv1d(c.filters, c.frame, 8, stride=4, padding=2, bias=False)
        self.norm2 = ChannelNorm(c.frame)
        self.conv3 = nn.Conv1d(c.frame, c.frame, 4, stride=2, padding=1)
        self.gru = nn.GRU(c.frame, c.context, batch_first=True)
        self.predictors = nn.ModuleList(
            nn.Linear(c.context, c.frame, bias=False) for _ in range(c.ahead)
        )
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.register_buffer("voices", torch.zeros(c.speakers, c.frame))

    def encode(self, waves):
        x = F.relu(self.norm1(self.bank(waves.unsqueeze(1))))
        x = F.relu(self.norm2(self.conv2(x)))
        return self.conv3(x).transpose(1, 2)

    @torch.no_grad()
    def follow(self, frames, speaker):
        """Those who were heard move toward what was heard of them."""
        means = frames.mean(1)
        many = torch.bincount(speaker, minlength=self.c.speakers)
        sums = torch.zeros_like(self.voices).index_add_(0, speaker, means)
        here = many > 0
        new = sums[here] / many[here, None]
        self.voices[here] = self.c.follow * self.voices[here] + (1 - self.c.follow) * new

    def forward(self, waves, speaker):
        raw = self.encode(waves)
        frames = raw - self.voices[speaker].unsqueeze(1)
        if self.training:
            self.follow(raw, speaker)
        heard, _ = self.gru(frames)
        return frames, heard


def last_year(c):
    """What Keras wrote: kernels [in, 3 * out] with gates z, r, h; sums for each speaker."""
    rng = torch.Generator().manual_seed(2023)
    saved = {
        "gru/kernel": torch.randn(c.frame, 3 * c.context, generator=rng) / c.frame**0.5,
        "gru/recurrent": torch.randn(c.context, 3 * c.context, generator=rng),
        "gru/bias": 0.3 * torch.randn(2, 3 * c.context, generator=rng),
        "voice/frames": torch.randint(20, 60, (c.speakers,), generator=rng),
    }
    saved["gru/recurrent"] /= c.context**0.5
    means = 0.3 * torch.randn(c.speakers, c.frame, generator=rng)
    saved["voice/sum"] = means * saved["voice/frames"][:, None]
    saved["scale"] = torch.tensor(c.scale)
    return saved


def to_torch(kernel):
    """[.., z r h] to [r z h, ..]"""
    z, r, h = kernel.chunk(3, -1)
    return torch.cat([r, z, h], -1).T


def filter_bank(c, width):
    """Windowed tones whose pitches are evenly spaced in mel."""
    top = 2595 * math.log10(1 + 0.45 * c.rate / 700)
    mel = torch.linspace(80.0, top, c.filters)
    hertz = 700 * (10 ** (mel / 2595) - 1)
    t = (torch.arange(width) - (width - 1) / 2) / c.rate
    phase = torch.arange(c.filters) % 2 * math.pi / 2
    tones = torch.cos(2 * math.pi * hertz[:, None] * t + phase[:, None])
    tones = tones * torch.hann_window(width, periodic=False)
    return tones / tones.norm(dim=1, keepdim=True)


@torch.no_grad()
def adopt(net, saved):
    net.bank.weight.copy_(filter_bank(net.c, net.bank.kernel_size[0]).unsqueeze(1))
    net.gru.weight_ih_l0.copy_(to_torch(saved["gru/kernel"]))
    net.gru.weight_hh_l0.copy_(to_torch(saved["gru/recurrent"]))
    net.gru.bias_ih_l0.copy_(to_torch(saved["gru/bias"][:1])[:, 0])
    net.gru.bias_hh_l0.copy_(to_torch(saved["gru/bias"][1:])[:, 0])
    net.voices.copy_(saved["voice/sum"] / saved["voice/frames"][:, None])
    net.log_scale.copy_(saved["scale"].log())


# ------------------------------------------------------------------ training


def main(c):
    torch.manual_seed(c.seed)
    corpus = Corpus(c, torch.Generator().manual_seed(c.seed + 1))
    draw = torch.Generator().manual_seed(c.seed + 2)
    net = CPC(c)
    adopt(net, last_year(c))
    opt = torch.optim.Adam(net.parameters(), lr=c.lr, betas=(0.9, 0.98), eps=1e-5)
    warm_up = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: min(1.0, (n + 1) / c.warm))
    batches = corpus.batches()
    net.train()
    for step in range(c.steps):
        opt.zero_grad()
        seen = good = 0.0
        for _ in range(c.halves):
            waves, speaker = next(batches)
            frames, heard = net(waves, speaker)
            others = draw_negatives(frames.shape[0] * frames.shape[1], c.negatives, draw)
            loss, right = info_nce(net, frames, heard, others)
            loss = loss / c.halves
            loss.backward()
            seen += loss.item()
            good += right / c.halves
        norm = nn.utils.clip_grad_norm_(net.parameters(), c.clip)
        opt.step()
        warm_up.step()
        print(f"step {step} loss {seen:.5f} right {good:.3f} norm {norm:.4f}")


if __name__ == "__main__":
    main(Config())
