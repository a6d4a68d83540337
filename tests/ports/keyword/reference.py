"""A small keyword spotter: log-mel features, separable convolutions, a GRU with attention."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

SAMPLE_RATE, N_FFT, WIN_LENGTH, HOP = 8000, 256, 200, 100
N_MELS, F_MIN, F_MAX = 16, 60.0, 3800.0
PREEMPHASIS = 0.97
HIDDEN, ATTENTION, NUM_CLASSES = 14, 10, 7
CLASS_WEIGHTS = (0.5, 1.0, 1.6, 0.8, 1.3, 2.2, 1.0)
SMOOTHING = 0.1
MAX_LR, TOTAL_STEPS, PCT_START = 1e-2, 20, 0.3
WEIGHT_DECAY, MAX_NORM = 0.2, 0.5


def mel_filters():
    """HTK mel scale, Slaney area normalisation: (bins, mels)."""

    def hz_to_mel(hz):
        return 2595 * math.log10(1 + hz / 700)

    mels = torch.linspace(
        hz_to_mel(F_MIN), hz_to_mel(F_MAX), N_MELS + 2, dtype=torch.float64
    )
    points = 700 * (10 ** (mels / 2595) - 1)
    freqs = torch.linspace(0, SAMPLE_RATE / 2, N_FFT // 2 + 1, dtype=torch.float64)
    slopes = points[None, :] - freqs[:, None]
    diff = points[1:] - points[:-1]
    down = -slopes[:, :-2] / diff[:-1]
    up = slopes[:, 2:] / diff[1:]
    filters = torch.minimum(down, up).clamp(min=0)
    filters = filters * (2 / (points[2:] - points[:-2]))
    return filters.float()


class Frontend(nn.Module):
    """Waveforms to normalised log-mel features."""

    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(WIN_LENGTH))
        self.register_buffer("mel", mel_filters())
        # How loud a band must be to leave the linear part of the logarithm.
        self.log_gain = nn.Parameter(torch.zeros(N_MELS))

    def spectrogram(self, wave):
        wave = torch.cat([wave[:, :1], wave[:, 1:] - PREEMPHASIS * wave[:, :-1]], dim=1)
        spec = torch.stft(
            wave,
            N_FFT,
            hop_length=HOP,
            win_length=WIN_LENGTH,
            window=self.window,
            center=True,
            pad_mode="reflect",
            return_complex=True,
        )
        return spec.real.square() + spec.imag.square()

    def forward(self, wave, frames):
        power = self.spectrogram(wave).transpose(1, 2)
        x = torch.log1p(power @ self.mel * self.log_gain.exp())

        valid = (torch.arange(x.shape[1]) < frames[:, None]).unsqueeze(2)
        count = frames[:, None, None]
        mean = (x * valid).sum(1, keepdim=True) / count
        var = ((x - mean).square() * valid).sum(1, keepdim=True) / count
        x = (x - mean) / torch.sqrt(var + 1e-3)
        return x.masked_fill(~valid, 0.0)


def spec_augment(x, freq_masks, time_masks):
    """x (batch, frames, mels); masks (batch, 2): first and width."""
    mels, frames = torch.arange(x.shape[2]), torch.arange(x.shape[1])
    start, width = freq_masks[:, :1], freq_masks[:, 1:]
    hide_mels = (mels >= start) & (mels < start + width)
    start, width = time_masks[:, :1], time_masks[:, 1:]
    hide_frames = (frames >= start) & (frames < start + width)
    return x.masked_fill(hide_mels[:, None, :] | hide_frames[:, :, None], 0.0)


class DepthwiseSeparable(nn.Module):
    def __init__(self, inp, out, stride):
        super().__init__()
        self.depthwise = nn.Conv2d(
            inp, inp, 3, stride=stride, padding=1, groups=inp, bias=False
        )
        self.norm1 = nn.BatchNorm2d(inp)
        self.pointwise = nn.Conv2d(inp, out, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)

    def forward(self, x):
        x = F.relu(self.norm1(self.depthwise(x)))
        return F.relu(self.norm2(self.pointwise(x)))


class AttentionPool(nn.Module):
    def __init__(self, inp, hidden):
        super().__init__()
        self.proj = nn.Linear(inp, hidden)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, x, valid):
        scores = self.score(torch.tanh(self.proj(x))).squeeze(2)
        weights = scores.masked_fill(~valid, float("-inf")).softmax(dim=1)
        return torch.bmm(weights.unsqueeze(1), x).squeeze(1)


class KeywordSpotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.frontend = Frontend()
        self.stem = nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.block1 = DepthwiseSeparable(8, 12, stride=1)
        self.block2 = DepthwiseSeparable(12, 12, stride=(2, 1))
        self.gru = nn.GRU(12 * N_MELS // 4, HIDDEN, batch_first=True)
        self.pool = AttentionPool(HIDDEN, ATTENTION)
        self.head = nn.Linear(2 * HIDDEN, NUM_CLASSES)

    def forward(self, wave, lengths, freq_masks, time_masks):
        frames = 1 + lengths // HOP
        x = self.frontend(wave, frames)
        x = spec_augment(x, freq_masks, time_masks)

        x = x.transpose(1, 2).unsqueeze(1)
        x = F.relu(self.norm(self.stem(x)))
        x = self.block2(self.block1(x))
        x = x.flatten(1, 2).transpose(1, 2)

        steps = (frames - 1) // 2 + 1
        packed = pack_padded_sequence(x, steps, batch_first=True, enforce_sorted=False)
        packed, last = self.gru(packed)
        x, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
        valid = torch.arange(x.shape[1]) < steps[:, None]
        pooled = self.pool(x, valid)
        return self.head(torch.cat([pooled, last[0]], dim=1))


def model():
    torch.manual_seed(1804)
    net = KeywordSpotter()
    with torch.no_grad():
        net.frontend.log_gain.uniform_(2.0, 4.0)
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 1.5)
        net.pool.score.weight.mul_(6)
        net.head.weight.mul_(2)
    return net


def batches():
    """Two tones each, one after the other, in noise, that end early or late."""
    generator = torch.Generator().manual_seed(1209)
    made = []
    kinds = ([2350, 1420, 1880, 2110, 1230], [1310, 2260, 1750, 2040])
    for kind in kinds:
        size, longest = len(kind), max(kind)
        lengths = torch.tensor(kind)
        time = torch.arange(longest) / 8000
        tones = 150 + 2800 * torch.rand(size, 2, 1, generator=generator) ** 2
        wave = torch.sin(6.2831853 * tones * time)
        wave = torch.where(time < 0.09, wave[:, 0], 0.6 * wave[:, 1])
        wave = 0.5 * wave + 0.2 * torch.randn(size, longest, generator=generator)
        wave = wave * (torch.arange(longest) < lengths[:, None])
        label = torch.randint(0, 7, (size,), generator=generator)
        shift = int(torch.randint(1, size, (), generator=generator))
        first = torch.randint(2, 11, (size, 2), generator=generator)
        width = torch.randint(2, 4, (size, 2), generator=generator)
        made.append(
            {
                "wave": wave,
                "length": lengths,
                "label": label,
                "partner": (torch.arange(size) + shift) % size,
                "lam": 0.55 + 0.4 * torch.rand(size, generator=generator),
                "freq_mask": torch.stack([first[:, 0], width[:, 0]], 1),
                "time_mask": torch.stack([first[:, 1], width[:, 1]], 1),
            }
        )
    return made


def forward(net, batch):
    """Mixup of the waveforms; the mixture is as long as the longer of the two."""
    partner, lam = batch["partner"], batch["lam"].unsqueeze(1)
    wave = lam * batch["wave"] + (1 - lam) * batch["wave"][partner]
    lengths = torch.maximum(batch["length"], batch["length"][partner])
    return net(wave, lengths, batch["freq_mask"], batch["time_mask"])


def loss(output, batch):
    weight = torch.tensor(CLASS_WEIGHTS)
    label, lam = batch["label"], batch["lam"]
    other = label[batch["partner"]]

    def criterion(target):
        return F.cross_entropy(
            output, target, weight=weight, label_smoothing=SMOOTHING, reduction="none"
        )

    total = lam * criterion(label) + (1 - lam) * criterion(other)
    return total.sum() / (lam * weight[label] + (1 - lam) * weight[other]).sum()


def cosine(start, end, fraction):
    return end + (start - end) / 2 * (1 + math.cos(math.pi * fraction))


class OneCycleAdamW(torch.optim.AdamW):
    """Clips by norm; the rate goes up and down again, the first beta down and up."""

    done = 0

    def step(self, closure=None):
        peak = PCT_START * TOTAL_STEPS - 1
        if self.done <= peak:
            fraction = self.done / peak
            lr = cosine(MAX_LR / 10, MAX_LR, fraction)
            beta1 = cosine(0.95, 0.85, fraction)
        else:
            fraction = (self.done - peak) / (TOTAL_STEPS - 1 - peak)
            lr = cosine(MAX_LR, MAX_LR / 1000, fraction)
            beta1 = cosine(0.85, 0.95, fraction)
        for group in self.param_groups:
            group["lr"] = lr
            group["betas"] = (beta1, group["betas"][1])
        self.done += 1
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        return super().step(closure)


def optimizer(net):
    """Only matrices and kernels decay."""
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1]},
        {"params": [p for p in net.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return OneCycleAdamW(
        groups, lr=MAX_LR, betas=(0.95, 0.99), weight_decay=WEIGHT_DECAY
    )
