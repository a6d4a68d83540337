"""A small TimesNet: periods found by the FFT, series folded to two dimensions by each."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

CHANNELS, SEQ_LEN, PRED_LEN, SEASON = 5, 44, 14, 14
D_MODEL, D_FF, LAYERS, TOP_K, NUM_KERNELS = 16, 24, 2, 3, 3
CHANNEL_WEIGHTS = (1.0, 0.4, 1.6, 0.7, 1.2)
FREQ_WEIGHT = 0.6
LR, MIN_LR, TOTAL, WEIGHT_DECAY = 1e-2, 1e-3, 6, 0.1


def positional_table(length, dim):
    position = torch.arange(length).float().unsqueeze(1)
    rate = torch.exp(torch.arange(0, dim, 2).float() * -(math.log(10000.0) / dim))
    table = torch.zeros(length, dim)
    table[:, 0::2] = torch.sin(position * rate)
    table[:, 1::2] = torch.cos(position * rate)
    return table


class DataEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Conv1d(
            CHANNELS, D_MODEL, 3, padding=1, padding_mode="circular", bias=False
        )
        self.hour = nn.Embedding(24, D_MODEL)
        self.weekday = nn.Embedding(7, D_MODEL)
        self.month = nn.Embedding(12, D_MODEL)
        table = positional_table(SEQ_LEN, D_MODEL)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x, marks):
        month, weekday, hour = marks.unbind(dim=2)
        x = self.token(x.transpose(1, 2)).transpose(1, 2)
        calendar = self.hour(hour) + self.weekday(weekday) + self.month(month - 1)
        return x + calendar + self.table


class InceptionBlock(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.kernels = nn.ModuleList(
            [nn.Conv2d(inp, out, 2 * i + 1, padding=i) for i in range(NUM_KERNELS)]
        )

    def forward(self, x):
        return torch.stack([conv(x) for conv in self.kernels], dim=-1).mean(-1)


def find_periods(x, k):
    """Return the strongest periods of the batch, and their amplitudes in each series."""
    amplitude = torch.fft.rfft(x, dim=1, norm="ortho").abs()
    strength = amplitude.detach().mean(dim=(0, 2))
    strength[0] = 0
    top = strength.topk(k).indices
    return (x.shape[1] // top).tolist(), amplitude.mean(dim=-1)[:, top]


class TimesBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            InceptionBlock(D_MODEL, D_FF), nn.GELU(), InceptionBlock(D_FF, D_MODEL)
        )

    def forward(self, x):
        b, t, n = x.shape
        periods, amplitude = find_periods(x, TOP_K)
        results: Any = []
        for period in periods:
            length = math.ceil(t / period) * period
            out = F.pad(x, (0, 0, 0, length - t))
            out = out.reshape(b, length // period, period, n).permute(0, 3, 1, 2)
            out = self.conv(out)
            out = out.permute(0, 2, 3, 1).reshape(b, length, n)
            results.append(out[:, :t])
        results = torch.stack(results, dim=-1)
        weight = F.softmax(amplitude, dim=1)
        return (results * weight[:, None, None, :]).sum(dim=-1) + x


class TimesNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = DataEmbedding()
        self.predict_linear = nn.Linear(SEQ_LEN, SEQ_LEN + PRED_LEN)
        self.blocks = nn.ModuleList([TimesBlock() for _ in range(LAYERS)])
        self.layer_norm = nn.LayerNorm(D_MODEL)
        self.projection = nn.Linear(D_MODEL, CHANNELS)

    def forward(self, x, marks):
        mean = x.mean(dim=1, keepdim=True)
        x = x - mean
        std = torch.sqrt(x.var(dim=1, keepdim=True, unbiased=False) + 1e-5)
        x = self.embedding(x / std, marks)
        x = self.predict_linear(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = self.layer_norm(block(x))
        x = self.projection(x)
        x = x * std + mean
        return x[:, -PRED_LEN:]


def model():
    torch.manual_seed(2210)
    net = TimesNet()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(0, 0.3)
        net.embedding.token.weight.normal_(0, 0.35)
        net.layer_norm.weight.uniform_(0.6, 1.4)
        net.layer_norm.bias.normal_(0, 0.2)
        net.projection.bias.normal_(0, 0.2)
        # What follows is what was a season ago.
        linear = net.predict_linear
        linear.weight.normal_(0, 0.04)
        linear.bias.normal_(0, 0.2)
        rows = torch.arange(SEQ_LEN + PRED_LEN)
        linear.weight[rows, rows.where(rows < SEQ_LEN, rows - SEASON)] += 1.0
    return net


def batches():
    """Hourly sums of waves of some periods, with a trend, noise and gaps in what follows."""
    generator = torch.Generator().manual_seed(2211)
    time = torch.arange(58.0).view(-1, 1)
    level = torch.tensor([3.0, -1.0, 0.5, 8.0, 0.0])
    scale = torch.tensor([1.0, 2.5, 0.4, 1.5, 0.8])
    made = []
    for size in (4, 3):
        series: Any = []
        for _ in range(size):
            x = 0.02 * torch.randn(5, generator=generator) * time
            for period, height in ((14.5, 1.3), (8.3, 0.9), (24.0, 0.7), (5.0, 0.5)):
                phase = 2 * math.pi * torch.rand(5, generator=generator)
                heights = height * (0.6 + torch.rand(5, generator=generator))
                x = x + heights * torch.sin(2 * math.pi * time / period + phase)
            x = x + 0.25 * torch.randn(x.shape, generator=generator)
            series.append(level + scale * x)
        series = torch.stack(series)
        start = torch.randint(0, 24 * 300, (size, 1), generator=generator)
        hours = start + torch.arange(44)
        marks = torch.stack([hours // 720 + 1, hours // 24 % 7, hours % 24], dim=2)
        target = series[:, 44:]
        observed = torch.rand(target.shape, generator=generator) > 0.15
        made.append(
            {
                "x": series[:, :44],
                "marks": marks,
                "y": target.where(observed, 0.0),
                "observed": observed,
            }
        )
    return made


def forward(net, batch):
    return net(batch["x"], batch["marks"])


def loss(output, batch):
    """Near hours count more; what was not observed counts in neither part."""
    observed = batch["observed"].float()
    error = (output - batch["y"]) * observed
    near = torch.arange(1.0, PRED_LEN + 1).rsqrt().unsqueeze(1)
    weight = near * torch.tensor(CHANNEL_WEIGHTS) * observed
    mae = (weight * error.abs()).sum() / weight.sum()
    spectrum = torch.fft.rfft(error, dim=1, norm="ortho")
    return mae + FREQ_WEIGHT * spectrum.abs().mean()


class CosineAdamW(torch.optim.AdamW):
    """The rate is set before each step."""

    done = 0

    def step(self, closure=None):
        cosine = 0.5 * (1 + math.cos(math.pi * self.done / TOTAL))
        for group in self.param_groups:
            group["lr"] = MIN_LR + (LR - MIN_LR) * cosine
        self.done += 1
        return super().step(closure)


def optimizer(net):
    """Norms, biases and the calendar do not decay."""
    decay, rest = [], []
    for name, p in net.named_parameters():
        calendar = name.startswith(
            ("embedding.hour", "embedding.weekday", "embedding.month")
        )
        (rest if calendar or p.ndim == 1 else decay).append(p)
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return CosineAdamW(groups, lr=LR, betas=(0.9, 0.98), eps=1e-7)
