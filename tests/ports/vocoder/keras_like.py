"""Channels last, kernels (time, in, out), weight norms of its own; frames cut by hand."""

import math
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

ALPHA = 0.1


class Normed(nn.Module):
    """A kernel of which each slice of one axis has the length of its gain."""

    def __init__(self, sd, prefix):
        super().__init__()
        g = sd[prefix + ".parametrizations.weight.original0"]
        v = sd[prefix + ".parametrizations.weight.original1"]
        self.direction = nn.Parameter(v.flatten(2).permute(2, 1, 0).contiguous())
        self.gain = nn.Parameter(g.flatten())
        self.bias = nn.Parameter(sd[prefix + ".bias"])

    def forward(self):
        length = (self.direction**2).sum((0, 1)).sqrt()
        return self.direction * (self.gain / length)


class Conv1D(nn.Module):
    """x (batch, time, channels), kernel (time, in, out)."""

    def __init__(self, sd, prefix, dilation=1):
        super().__init__()
        self.kernel = Normed(sd, prefix)
        self.dilation = dilation

    def forward(self, x):
        kernel = self.kernel()
        taps = len(kernel)
        reach = self.dilation * (taps - 1)
        x = F.pad(x, (0, 0, reach // 2, reach - reach // 2))
        length = x.shape[1] - reach
        y = self.kernel.bias
        for tap in range(taps):
            start = tap * self.dilation
            y = y + x[:, start : start + length] @ kernel[tap]
        return y


class Conv1DTranspose(nn.Module):
    """Kernel (time, out, in); both ends are cut to a multiple of the rate."""

    def __init__(self, sd, prefix, rate):
        super().__init__()
        self.kernel = Normed(sd, prefix)
        self.rate = rate

    def forward(self, x):
        n, t, _ = x.shape
        kernel = self.kernel()
        taps, out, _ = kernel.shape
        pieces = torch.einsum("nti,koi->ntko", x, kernel)
        y = x.new_zeros(n, (t - 1) * self.rate + taps, out)
        for tap in range(taps):
            y[:, tap : tap + (t - 1) * self.rate + 1 : self.rate] += pieces[:, :, tap]
        cut = (taps - self.rate) // 2
        return y[:, cut : y.shape[1] - cut] + self.kernel.bias


class Residual(nn.Module):
    def __init__(self, sd, prefix):
        super().__init__()
        self.first = nn.ModuleList(
            Conv1D(sd, f"{prefix}.convs1.{i}", d) for i, d in enumerate((1, 3))
        )
        self.second = nn.ModuleList(
            Conv1D(sd, f"{prefix}.convs2.{i}") for i in range(2)
        )

    def forward(self, x):
        for first, second in zip(self.first, self.second):
            y = first(torch.where(x > 0, x, ALPHA * x))
            y = second(torch.where(y > 0, y, ALPHA * y))
            x = x + y
        return x


class Vocoder(nn.Module):
    def __init__(self, sd):
        super().__init__()
        at = "generator."
        self.first = Conv1D(sd, at + "conv_pre")
        rates = (4, 2)
        self.up = nn.ModuleList(
            Conv1DTranspose(sd, f"{at}ups.{i}", rate) for i, rate in enumerate(rates)
        )
        self.residual = nn.ModuleList(
            Residual(sd, f"{at}resblocks.{i}") for i in range(4)
        )
        self.last = Conv1D(sd, at + "conv_post")

    def forward(self, mel):
        x = self.first(mel)
        for stage, up in enumerate(self.up):
            x = up(torch.where(x > 0, x, ALPHA * x))
            pair = self.residual[2 * stage : 2 * stage + 2]
            x = torch.stack([block(x) for block in pair]).mean(0)
        x = torch.where(x > 0, x, 0.01 * x)
        return torch.tanh(self.last(x))[..., 0]


class Columns(nn.Module):
    """A wave in columns of one period, convolved along each column."""

    def __init__(self, sd, prefix, period):
        super().__init__()
        self.period = period
        self.layers = nn.ModuleList(
            Normed(sd, prefix + name) for name in ("convs.0", "convs.1", "conv_post")
        )

    def convolved(self, x, layer, stride):
        kernel = layer()
        half = len(kernel) // 2
        x = F.pad(x, (0, 0, half, half))
        frames = x.unfold(1, len(kernel), stride)
        return torch.einsum("ntik,kio->nto", frames, kernel) + layer.bias

    def forward(self, wave):
        n, t = wave.shape
        missing = -t % self.period
        if missing:
            mirrored = wave[:, t - 1 - missing : t - 1].flip(1)
            wave = torch.cat([wave, mirrored], 1)
        x = (
            wave.reshape(n, -1, self.period)
            .transpose(1, 2)
            .reshape(n * self.period, -1, 1)
        )
        one = F.leaky_relu(self.convolved(x, self.layers[0], 3), ALPHA)
        two = F.leaky_relu(self.convolved(one, self.layers[1], 1), ALPHA)
        return [one, two, self.convolved(two, self.layers[2], 1)]


def mel_matrix(rate=1600, fft=32, mels=6):
    def to_mel(hertz):
        return 2595 * math.log10(1 + hertz / 700)

    edges = [to_mel(rate / 2) * i / (mels + 1) for i in range(mels + 2)]
    edges = [700 * (10 ** (mel / 2595) - 1) for mel in edges]
    frequencies = np.arange(fft // 2 + 1) * rate / fft
    columns = []
    for low, middle, high in zip(edges, edges[1:], edges[2:]):
        rising = (frequencies - low) / (middle - low)
        falling = (high - frequencies) / (high - middle)
        columns.append(np.maximum(0, np.minimum(rising, falling)))
    return torch.tensor(np.stack(columns, 1), dtype=torch.float32)


class Spectrum(nn.Module):
    """Frames times cosines and sines; magnitudes in mels (batch, time, mels)."""

    def __init__(self, fft=32, hop=8):
        super().__init__()
        self.fft, self.hop = fft, hop
        n = np.arange(fft)
        window = 0.5 - 0.5 * np.cos(2 * np.pi * n / fft)
        turns = np.exp(-2j * np.pi * np.outer(n, np.arange(fft // 2 + 1)) / fft)
        turns = turns * window[:, None]
        self.register_buffer("real", torch.tensor(turns.real, dtype=torch.float32))
        self.register_buffer("imag", torch.tensor(turns.imag, dtype=torch.float32))
        self.register_buffer("mels", mel_matrix(fft=fft))

    def forward(self, wave):
        side = (self.fft - self.hop) // 2
        left = wave[:, 1 : side + 1].flip(1)
        right = wave[:, -side - 1 : -1].flip(1)
        frames = torch.cat([left, wave, right], 1).unfold(1, self.fft, self.hop)
        power = (frames @ self.real) ** 2 + (frames @ self.imag) ** 2
        return (power + 1e-9).sqrt().matmul(self.mels).clamp(min=1e-5).log()


class Gan(nn.Module):
    def __init__(self, sd):
        super().__init__()
        self.spectrum = Spectrum()
        self.vocoder = Vocoder(sd)
        self.two = Columns(sd, "discriminators.0.", 2)
        self.three = Columns(sd, "discriminators.1.", 3)

    def forward(self, wave):
        mel = self.spectrum(wave)
        made = self.vocoder(mel)
        error = (mel - self.spectrum(made)).abs().mean()
        matching = 0.0
        adversarial = 0.0
        for judge in (self.two, self.three):
            for real, fake in zip(judge(wave), judge(made)):
                matching = matching + 2 * (real - fake).abs().mean()
            adversarial = adversarial + (fake - 1).square().mean()
        return made[:, None], 45 * error, matching, adversarial


def model():
    return Gan(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    names = ("wave", "mel", "features", "adversarial")
    return dict(zip(names, net(batch)))


def loss(output, batch):
    return output["mel"] + output["features"] + output["adversarial"]


def optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=2e-4, betas=(0.8, 0.99))
