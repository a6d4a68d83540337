"""A small HiFi-GAN: a spectrogram to a waveform, judged by periods and by its spectrum."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

RATE, FFT, HOP, MELS = 1600, 32, 8, 6
SLOPE = 0.1
UPSAMPLE = ((4, 8), (2, 4))
DILATIONS = (1, 3)
PERIODS = (2, 3)


def mel_filters():
    """Triangles between equally spaced mels."""
    top = 2595 * torch.log10(torch.tensor(1 + RATE / 2 / 700))
    hertz = 700 * (10 ** (torch.linspace(0, 1, MELS + 2) * top / 2595) - 1)
    bins = torch.linspace(0, RATE / 2, FFT // 2 + 1)
    width = hertz.diff()
    ramps = hertz[:, None] - bins[None, :]
    lower = -ramps[:-2] / width[:-1, None]
    upper = ramps[2:] / width[1:, None]
    return torch.minimum(lower, upper).clamp(min=0)


class MelSpectrogram(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(FFT), persistent=False)
        self.register_buffer("basis", mel_filters(), persistent=False)

    def forward(self, y):
        pad = (FFT - HOP) // 2
        y = F.pad(y.unsqueeze(1), (pad, pad), mode="reflect").squeeze(1)
        spec = torch.stft(
            y,
            FFT,
            hop_length=HOP,
            win_length=FFT,
            window=self.window,
            center=False,
            return_complex=True,
        )
        spec = torch.sqrt(torch.view_as_real(spec).pow(2).sum(-1) + 1e-9)
        return torch.log(torch.clamp(self.basis @ spec, min=1e-5))


class ResBlock(nn.Module):
    def __init__(self, channels, kernel):
        super().__init__()
        self.convs1 = nn.ModuleList()
        self.convs2 = nn.ModuleList()
        for d in DILATIONS:
            pad = d * (kernel - 1) // 2
            one = nn.Conv1d(channels, channels, kernel, dilation=d, padding=pad)
            two = nn.Conv1d(channels, channels, kernel, padding=kernel // 2)
            self.convs1.append(weight_norm(one))
            self.convs2.append(weight_norm(two))

    def forward(self, x):
        for c1, c2 in zip(self.convs1, self.convs2):
            xt = c1(F.leaky_relu(x, SLOPE))
            x = c2(F.leaky_relu(xt, SLOPE)) + x
        return x


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        width = 12
        self.conv_pre = weight_norm(nn.Conv1d(MELS, width, 7, padding=3))
        self.ups = nn.ModuleList()
        self.resblocks = nn.ModuleList()
        for rate, kernel in UPSAMPLE:
            up = nn.ConvTranspose1d(
                width, width // 2, kernel, rate, padding=(kernel - rate) // 2
            )
            self.ups.append(weight_norm(up))
            width //= 2
            self.resblocks.extend([ResBlock(width, 3), ResBlock(width, 5)])
        self.conv_post = weight_norm(nn.Conv1d(width, 1, 7, padding=3))

    def forward(self, x):
        x = self.conv_pre(x)
        for i, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, SLOPE))
            xs = self.resblocks[2 * i](x) + self.resblocks[2 * i + 1](x)
            x = xs / 2
        x = F.leaky_relu(x)
        return torch.tanh(self.conv_post(x))


class PeriodDiscriminator(nn.Module):
    def __init__(self, period):
        super().__init__()
        self.period = period
        self.convs = nn.ModuleList(
            [
                weight_norm(nn.Conv2d(1, 4, (5, 1), (3, 1), padding=(2, 0))),
                weight_norm(nn.Conv2d(4, 6, (5, 1), (1, 1), padding=(2, 0))),
            ]
        )
        self.conv_post = weight_norm(nn.Conv2d(6, 1, (3, 1), padding=(1, 0)))

    def forward(self, x):
        fmap = []
        b, c, t = x.shape
        if t % self.period != 0:
            n_pad = self.period - (t % self.period)
            x = F.pad(x, (0, n_pad), "reflect")
            t = t + n_pad
        x = x.view(b, c, t // self.period, self.period)
        for conv in self.convs:
            x = F.leaky_relu(conv(x), SLOPE)
            fmap.append(x)
        x = self.conv_post(x)
        fmap.append(x)
        return torch.flatten(x, 1, -1), fmap


class HifiGan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = Generator()
        self.discriminators = nn.ModuleList(PeriodDiscriminator(p) for p in PERIODS)
        self.mel = MelSpectrogram()

    def forward(self, wave):
        mel = self.mel(wave)
        fake = self.generator(mel)
        real = wave.unsqueeze(1)
        return {
            "mel": mel,
            "fake": fake,
            "fake_mel": self.mel(fake.squeeze(1)),
            "real": [d(real) for d in self.discriminators],
            "judged": [d(fake) for d in self.discriminators],
        }


def feature_loss(fmap_r, fmap_g):
    loss: torch.Tensor | int = 0
    for dr, dg in zip(fmap_r, fmap_g):
        for rl, gl in zip(dr, dg):
            loss += torch.mean(torch.abs(rl - gl))
    return loss * 2


def model():
    torch.manual_seed(620)
    net = HifiGan()
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if name.endswith("original0"):
                weight.mul_(torch.rand_like(weight) + 0.9)
    return net


def batches():
    generator = torch.Generator().manual_seed(621)
    time = torch.arange(104) / 1600
    pitch = 60 + 200 * torch.rand(2, 3, 1, generator=generator)
    loud = torch.rand(2, 3, 1, generator=generator) * 0.3
    wave = (loud * torch.sin(2 * torch.pi * pitch * time)).sum(1)
    return [wave + 0.01 * torch.randn(2, 104, generator=generator)]


def forward(net, batch):
    out = net(batch)
    adversarial = sum(torch.mean((1 - score) ** 2) for score, _ in out["judged"])
    maps_real = [fmap for _, fmap in out["real"]]
    maps_fake = [fmap for _, fmap in out["judged"]]
    return {
        "wave": out["fake"],
        "mel": 45 * F.l1_loss(out["mel"], out["fake_mel"]),
        "features": feature_loss(maps_real, maps_fake),
        "adversarial": adversarial,
    }


def loss(output, batch):
    return output["mel"] + output["features"] + output["adversarial"]


def optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=2e-4, betas=(0.8, 0.99))
