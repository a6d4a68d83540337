"""A small Conv-TasNet: two speakers out of one channel, whichever comes first."""

from itertools import permutations

import torch
from torch import nn
from torch.nn import functional as F

SPEAKERS = 2
FILTERS, WINDOW, STRIDE = 64, 16, 8
BOTTLENECK, HIDDEN, KERNEL = 48, 96, 3
LAYERS, REPEATS = 3, 2
EPS = 1e-8
LR, HALVE_EVERY, MAX_NORM = 4e-3, 2, 5.0


class GlobalLayerNorm(nn.Module):
    """Over channels and time of each utterance; frames behind its end are 0."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1))

    def forward(self, x, mask):
        count = x.shape[1] * mask.sum(dim=(1, 2), keepdim=True)
        mean = (x * mask).sum(dim=(1, 2), keepdim=True) / count
        centered = (x - mean) * mask
        var = centered.pow(2).sum(dim=(1, 2), keepdim=True) / count
        x = self.weight * centered / torch.sqrt(var + EPS) + self.bias
        return x * mask


class ConvBlock(nn.Module):
    """Depthwise separable convolution; the last block has no residual output."""

    def __init__(self, dilation, last):
        super().__init__()
        self.conv = nn.Conv1d(BOTTLENECK, HIDDEN, 1)
        self.prelu1 = nn.PReLU()
        self.norm1 = GlobalLayerNorm(HIDDEN)
        self.dconv = nn.Conv1d(
            HIDDEN,
            HIDDEN,
            KERNEL,
            padding=dilation * (KERNEL - 1) // 2,
            dilation=dilation,
            groups=HIDDEN,
        )
        self.prelu2 = nn.PReLU()
        self.norm2 = GlobalLayerNorm(HIDDEN)
        self.res = None if last else nn.Conv1d(HIDDEN, BOTTLENECK, 1)
        self.skip = nn.Conv1d(HIDDEN, BOTTLENECK, 1)

    def forward(self, x, mask):
        y = self.norm1(self.prelu1(self.conv(x)), mask)
        y = self.norm2(self.prelu2(self.dconv(y)), mask)
        if self.res is not None:
            x = x + self.res(y)
        return x, self.skip(y)


class Separator(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = GlobalLayerNorm(FILTERS)
        self.bottleneck = nn.Conv1d(FILTERS, BOTTLENECK, 1)
        blocks = []
        for repeat in range(REPEATS):
            for layer in range(LAYERS):
                last = repeat == REPEATS - 1 and layer == LAYERS - 1
                blocks.append(ConvBlock(2**layer, last))
        self.blocks = nn.ModuleList(blocks)
        self.prelu = nn.PReLU()
        self.masks = nn.Conv1d(BOTTLENECK, SPEAKERS * FILTERS, 1)

    def forward(self, features, mask):
        x = self.bottleneck(self.norm(features, mask))
        total = 0
        for block in self.blocks:
            x, skip = block(x, mask)
            total = total + skip
        masks = torch.sigmoid(self.masks(self.prelu(total)))
        return masks.unflatten(1, (SPEAKERS, FILTERS))


class ConvTasNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Conv1d(1, FILTERS, WINDOW, stride=STRIDE, bias=False)
        self.separator = Separator()
        self.decoder = nn.ConvTranspose1d(FILTERS, 1, WINDOW, stride=STRIDE, bias=False)

    def forward(self, mixture, lengths):
        """(batch, time) -> (batch, speakers, time)"""
        b, t = mixture.shape
        # Each sample is in two windows.
        x = F.pad(mixture, (STRIDE, STRIDE + -t % STRIDE))
        features = F.relu(self.encoder(x.unsqueeze(1)))
        frames = (lengths + STRIDE - 1) // STRIDE + 1
        mask = torch.arange(features.shape[2]) < frames.view(b, 1, 1)

        masks = self.separator(features, mask.to(features.dtype))
        separated = masks * features.unsqueeze(1)
        x = self.decoder(separated.flatten(0, 1)).view(b, SPEAKERS, -1)
        return x[:, :, STRIDE : STRIDE + t]


def model():
    torch.manual_seed(1814)
    net = ConvTasNet()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, GlobalLayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.PReLU):
                module.weight.uniform_(0.05, 0.4)
            elif isinstance(module, nn.Conv1d):
                nn.init.xavier_normal_(module.weight)
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
        net.separator.masks.weight.mul_(1.5)
        # What comes out is somewhat like the mixture.
        net.decoder.weight.normal_(0, 0.3).add_(3 * net.encoder.weight)
    return net


def batches():
    """Two made-up voices each: a pitch that glides, formants, a little breath and hum."""
    generator = torch.Generator().manual_seed(1460)

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    made = []
    for lengths in ((617, 430, 555), (509, 660), (391, 533, 598)):
        longest = max(lengths)
        speech = torch.zeros(len(lengths), 2, longest, dtype=torch.int16)
        for row, length in enumerate(lengths):
            time = torch.arange(float(length)) / 8000
            for speaker in (0, 1):
                pitch = (110 + 90 * speaker) * (0.85 + 0.4 * rand(1))
                glide = 1 + 3 * (rand(1) - 0.5) * time
                formants = 400 + torch.tensor([400.0, 1500.0]) * rand(2)
                voice = 0.02 * torch.randn(length, generator=generator)
                for k in range(1, 14):
                    near = torch.exp(-(((k * pitch - formants) / 250) ** 2)).sum()
                    wave = torch.sin(6.2831853 * (k * pitch * glide * time + rand(1)))
                    voice = voice + (0.15 / k + 0.5 * near) * wave
                rhythm = 0.55 + 0.45 * torch.sin(40 * time + 6 * rand(1))
                voice = rhythm * voice + 0.3 * (rand(1) - 0.5)
                voice = (4500 * voice).round().clamp(-32768, 32767)
                speech[row, speaker, :length] = voice.to(torch.int16)
        gain = (8 * rand(len(lengths), 2) - 4).round(decimals=1)
        made.append({"speech": speech, "gain": gain, "lengths": torch.tensor(lengths)})
    return made


def sources(batch):
    """Speech from -1 to 1, each voice louder or softer by its decibels."""
    gain = torch.pow(10.0, batch["gain"] / 20).unsqueeze(2)
    return gain * batch["speech"].float() / 32768


def forward(net, batch):
    return net(sources(batch).sum(dim=1), batch["lengths"])


def si_snr(estimate, target, mask):
    """Scale-invariant signal-to-noise ratio in decibels over the last axis."""
    count = mask.sum(dim=-1, keepdim=True)
    estimate = (estimate - (estimate * mask).sum(-1, keepdim=True) / count) * mask
    target = (target - (target * mask).sum(-1, keepdim=True) / count) * mask
    dot = (estimate * target).sum(-1, keepdim=True)
    projection = dot * target / (target.pow(2).sum(-1, keepdim=True) + EPS)
    noise = estimate - projection
    ratio = projection.pow(2).sum(-1) / (noise.pow(2).sum(-1) + EPS)
    return 10 * torch.log10(ratio + EPS)


def loss(output, batch):
    """The better of both orders of the speakers, utterance by utterance."""
    mask = torch.arange(output.shape[2]) < batch["lengths"].view(-1, 1, 1)
    target, mask = sources(batch), mask.to(output.dtype)
    orders = [
        si_snr(output[:, list(order)], target, mask).mean(dim=1)
        for order in permutations(range(SPEAKERS))
    ]
    best = torch.stack(orders, dim=1).amax(dim=1)
    return -best.mean()


class HalvingAdam(torch.optim.Adam):
    """Clips the gradient; the rate is halved every few steps."""

    done = 0

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = LR * 0.5 ** (self.done // HALVE_EVERY)
        self.done += 1
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        return super().step(closure)


def optimizer(net):
    return HalvingAdam(net.parameters(), lr=LR)
