"""A forecaster: reversible norm, trend and season, patches with attention, quantiles."""

import torch
from torch import nn
from torch.nn import functional as F

LENGTH, HORIZON, CHANNELS = 30, 8, 3
PATCH, STRIDE, WIDTH, HEADS = 6, 4, 12, 3
QUANTILES = (0.1, 0.5, 0.9)


class MovingAverage(nn.Module):
    """Means of a window; the ends are repeated."""

    def __init__(self, size):
        super().__init__()
        self.before = (size - 1) // 2
        self.after = size - 1 - self.before
        self.mean = nn.AvgPool1d(size, stride=1)

    def forward(self, x):
        first = x[..., :1].repeat(1, 1, self.before)
        last = x[..., -1:].repeat(1, 1, self.after)
        return self.mean(torch.cat([first, x, last], -1))


class RevIN(nn.Module):
    def __init__(self, channels, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1))

    def forward(self, x):
        mean = x.mean(-1, keepdim=True).detach()
        var = x.var(-1, keepdim=True, unbiased=False).detach()
        std = torch.sqrt(var + self.eps)
        return (x - mean) / std * self.weight + self.bias, (mean, std)

    def undo(self, y, moments):
        mean, std = (part.unsqueeze(-1) for part in moments)
        y = (y - self.bias.unsqueeze(-1)) / (self.weight.unsqueeze(-1) + self.eps**2)
        return y * std + mean


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm1 = nn.BatchNorm1d(WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.norm2 = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.norm1(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.feed(x)
        return self.norm2(x.transpose(1, 2)).transpose(1, 2)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = RevIN(CHANNELS)
        self.average = MovingAverage(8)
        self.trend = nn.Linear(LENGTH, HORIZON * len(QUANTILES))
        self.embed = nn.Linear(PATCH, WIDTH)
        self.patches = (LENGTH + STRIDE - PATCH) // STRIDE + 1
        self.position = nn.Parameter(torch.randn(self.patches, WIDTH) * 0.3)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(self.patches * WIDTH, HORIZON * len(QUANTILES))

    def forward(self, history):
        x, moments = self.scale(history)
        trend = self.average(x)
        season = F.pad(x - trend, (0, STRIDE), mode="replicate")
        patches = season.unfold(-1, PATCH, STRIDE)
        tokens = self.embed(patches) + self.position
        tokens = tokens.flatten(0, 1)
        for layer in self.layers:
            tokens = layer(tokens)
        tokens = tokens.unflatten(0, x.shape[:2]).flatten(2)
        y = self.head(tokens) + self.trend(trend)
        y = y.unflatten(-1, (HORIZON, len(QUANTILES)))
        return self.scale.undo(y, moments)


def model():
    torch.manual_seed(420)
    net = Forecaster()
    with torch.no_grad():
        net.scale.weight.uniform_(0.7, 1.5)
        net.scale.bias.normal_(0, 0.3)
        for layer in net.layers:
            layer.attention.in_proj_bias.normal_(0, 0.2)
            layer.attention.out_proj.bias.normal_(0, 0.2)
            for norm in (layer.norm1, layer.norm2):
                norm.weight.uniform_(0.6, 1.4)
                norm.bias.normal_(0, 0.2)
    return net


def batches():
    generator = torch.Generator().manual_seed(421)
    time = torch.arange(38) / 5
    speed = torch.rand(2, 3, 1, generator=generator) + 0.5
    waves = torch.sin(speed * time) + 0.05 * time * speed
    noise = torch.randn(2, 3, 38, generator=generator)
    series = 3 * waves + 0.3 * noise + 2
    return [{"history": series[..., :30], "future": series[..., 30:]}]


def forward(net, batch):
    return net(batch["history"])


def loss(output, batch):
    levels = torch.tensor(QUANTILES, dtype=output.dtype)
    error = batch["future"].unsqueeze(-1) - output
    pinball = torch.maximum(levels * error, (levels - 1) * error)
    weights = 0.9 ** torch.arange(HORIZON, dtype=output.dtype)
    weights = weights / weights.sum()
    crossed = F.relu(output[..., :-1] - output[..., 1:]).mean()
    return (pinball.mean((0, 1, 3)) * weights).sum() + 0.5 * crossed


def optimizer(net):
    return torch.optim.SGD(
        net.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3
    )
