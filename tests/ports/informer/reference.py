"""A small Informer: only the most active queries attend, and the encoder distils its series."""

import math

import torch
from torch import nn
from torch.nn import functional as F

CHANNELS, TARGETS = 5, 3
SEQ_LEN, LABEL_LEN, PRED_LEN = 38, 13, 11
D_MODEL, HEADS, D_FF = 28, 4, 44
E_LAYERS, D_LAYERS, FACTOR = 3, 2, 2
MONTHS, DAYS, WEEKDAYS, HOURS = 13, 32, 7, 24
CHANNEL_WEIGHTS = (1.0, 0.4, 1.7)
DELTA, START_WEIGHT, SLOPE_WEIGHT = 0.8, 0.3, 0.5
LR, BETAS, EPS, HALVE_EVERY = 2e-3, (0.9, 0.98), 1e-6, 2


def positional_table(length, dim):
    position = torch.arange(length).float().unsqueeze(1)
    rate = torch.exp(torch.arange(0, dim, 2).float() * -(math.log(10000.0) / dim))
    table = torch.zeros(length, dim)
    table[:, 0::2] = torch.sin(position * rate)
    table[:, 1::2] = torch.cos(position * rate)
    return table


class SeriesNorm(nn.Module):
    """Each series by what was observed of it; undone for the targets, the last channels."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(CHANNELS))
        self.bias = nn.Parameter(torch.zeros(CHANNELS))

    def statistics(self, x, observed):
        count = observed.sum(dim=1, keepdim=True).clamp(min=1)
        mean = (x * observed).sum(dim=1, keepdim=True) / count
        var = ((x - mean).square() * observed).sum(dim=1, keepdim=True) / count
        return mean, torch.sqrt(var + 1e-5)

    def forward(self, x, observed, mean, std):
        return ((x - mean) / std * self.weight + self.bias) * observed

    def undo(self, y, mean, std):
        y = (y - self.bias[-TARGETS:]) / self.weight[-TARGETS:]
        return y * std[..., -TARGETS:] + mean[..., -TARGETS:]


class DataEmbedding(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.value = nn.Conv1d(
            CHANNELS, D_MODEL, 3, padding=1, padding_mode="circular", bias=False
        )
        self.month = nn.Embedding(MONTHS, D_MODEL)
        self.day = nn.Embedding(DAYS, D_MODEL)
        self.weekday = nn.Embedding(WEEKDAYS, D_MODEL)
        self.hour = nn.Embedding(HOURS, D_MODEL)
        table = positional_table(length, D_MODEL)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x, marks):
        month, day, weekday, hour = marks.unbind(dim=2)
        value = self.value(x.transpose(1, 2)).transpose(1, 2)
        calendar = self.hour(hour) + self.weekday(weekday)
        calendar = calendar + self.day(day) + self.month(month)
        return value + self.table + calendar


class FullAttention(nn.Module):
    def forward(self, q, k, v):
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        return scores.softmax(dim=-1) @ v


class ProbAttention(nn.Module):
    """The keys that tell which queries are active are drawn once."""

    def __init__(self, length, causal, generator):
        super().__init__()
        self.causal = causal
        self.top = FACTOR * math.ceil(math.log(length))
        sample = torch.randint(length, (length, self.top), generator=generator)
        self.register_buffer("sample", sample)

    def most_active(self, q, k):
        sampled = torch.einsum("bhld,bhlud->bhlu", q, k[:, :, self.sample])
        measure = sampled.amax(dim=-1) - sampled.sum(dim=-1) / k.shape[2]
        return measure.topk(self.top, dim=-1).indices

    def forward(self, q, k, v):
        top = self.most_active(q, k).unsqueeze(-1)
        active = q.gather(2, top.expand(-1, -1, -1, q.shape[-1]))
        scores = active @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if self.causal:
            later = torch.arange(k.shape[2]) > top
            scores = scores.masked_fill(later, -torch.inf)
            context = v.cumsum(dim=2)
        else:
            context = v.mean(dim=2, keepdim=True).expand_as(v)
        update = scores.softmax(dim=-1) @ v
        return context.scatter(2, top.expand_as(update), update)


class AttentionLayer(nn.Module):
    def __init__(self, attention, mix=False):
        super().__init__()
        self.attention, self.mix = attention, mix
        self.query = nn.Linear(D_MODEL, D_MODEL, bias=False)
        self.key = nn.Linear(D_MODEL, D_MODEL, bias=False)
        self.value = nn.Linear(D_MODEL, D_MODEL, bias=False)
        self.out = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x, memory):
        q = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k = self.key(memory).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        v = self.value(memory).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        out = self.attention(q, k, v)
        if not self.mix:
            out = out.transpose(1, 2)
        return self.out(out.reshape(x.shape))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(D_MODEL, D_FF, 1)
        self.conv2 = nn.Conv1d(D_FF, D_MODEL, 1)

    def forward(self, x):
        return self.conv2(F.gelu(self.conv1(x.transpose(1, 2)))).transpose(1, 2)


class EncoderLayer(nn.Module):
    def __init__(self, length, generator):
        super().__init__()
        self.attention = AttentionLayer(ProbAttention(length, False, generator))
        self.norm1 = nn.LayerNorm(D_MODEL)
        self.ff = FeedForward()
        self.norm2 = nn.LayerNorm(D_MODEL)

    def forward(self, x):
        x = self.norm1(x + self.attention(x, x))
        return self.norm2(x + self.ff(x))


class Distill(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(D_MODEL, D_MODEL, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm1d(D_MODEL)

    def forward(self, x):
        x = F.elu(self.norm(self.conv(x.transpose(1, 2))))
        return F.max_pool1d(x, 3, stride=2, padding=1).transpose(1, 2)


class Encoder(nn.Module):
    def __init__(self, generator):
        super().__init__()
        lengths = [SEQ_LEN]
        for _ in range(E_LAYERS - 1):
            lengths.append((lengths[-1] - 1) // 2 + 1)
        self.layers = nn.ModuleList([EncoderLayer(n, generator) for n in lengths])
        self.distill = nn.ModuleList([Distill() for _ in lengths[1:]])
        self.norm = nn.LayerNorm(D_MODEL)

    def forward(self, x):
        for layer, distill in zip(self.layers[:-1], self.distill):
            x = distill(layer(x))
        return self.norm(self.layers[-1](x))


class DecoderLayer(nn.Module):
    def __init__(self, generator):
        super().__init__()
        attention = ProbAttention(LABEL_LEN + PRED_LEN, True, generator)
        self.self_attention = AttentionLayer(attention, mix=True)
        self.cross_attention = AttentionLayer(FullAttention())
        self.ff = FeedForward()
        self.norm1 = nn.LayerNorm(D_MODEL)
        self.norm2 = nn.LayerNorm(D_MODEL)
        self.norm3 = nn.LayerNorm(D_MODEL)

    def forward(self, x, memory):
        x = self.norm1(x + self.self_attention(x, x))
        x = self.norm2(x + self.cross_attention(x, memory))
        return self.norm3(x + self.ff(x))


class Informer(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(2012)
        self.series_norm = SeriesNorm()
        self.enc_embedding = DataEmbedding(SEQ_LEN)
        self.dec_embedding = DataEmbedding(LABEL_LEN + PRED_LEN)
        self.encoder = Encoder(generator)
        self.decoder = nn.ModuleList([DecoderLayer(generator) for _ in range(D_LAYERS)])
        self.norm = nn.LayerNorm(D_MODEL)
        self.projection = nn.Linear(D_MODEL, TARGETS)

    def forward(self, past, observed, marks):
        mean, std = self.series_norm.statistics(past, observed)
        x = self.series_norm(past, observed, mean, std)
        memory = self.encoder(self.enc_embedding(x, marks[:, :SEQ_LEN]))
        y = F.pad(x[:, -LABEL_LEN:], (0, 0, 0, PRED_LEN))
        y = self.dec_embedding(y, marks[:, SEQ_LEN - LABEL_LEN :])
        for layer in self.decoder:
            y = layer(y, memory)
        y = self.projection(self.norm(y))
        y = self.series_norm.undo(y, mean, std)
        return {
            "start": y[:, :LABEL_LEN],
            "forecast": y[:, LABEL_LEN:],
            "scale": std[..., -TARGETS:],
        }


def model():
    torch.manual_seed(2013)
    net = Informer()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.LayerNorm | nn.BatchNorm1d):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Linear | nn.Conv1d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(0, 0.4)
            elif isinstance(module, SeriesNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.3)
        for module in net.modules():
            if isinstance(module, AttentionLayer):
                module.query.weight.mul_(1.4)
            elif isinstance(module, Distill):
                module.norm.running_mean.normal_(0, 0.2)
                module.norm.running_var.uniform_(0.6, 1.4)
    return net


def batches():
    """Hours of waves with a trend, noise and gaps; the calendar starts anywhere in a year."""
    generator = torch.Generator().manual_seed(2014)
    time = torch.arange(49.0).view(1, -1, 1)
    level = torch.tensor([3.0, -1.0, 0.5, 8.0, 0.0])
    scale = torch.tensor([1.0, 2.5, 0.4, 1.5, 0.8])
    made = []
    for size in (6, 2):
        x = 0.03 * torch.randn(size, 1, 5, generator=generator) * time
        for period, height in ((24.0, 1.2), (12.0, 0.5), (17.3, 0.8), (5.2, 0.4)):
            phase = 6.3 * torch.rand(size, 1, 5, generator=generator)
            heights = height * (0.6 + torch.rand(size, 1, 5, generator=generator))
            x = x + heights * torch.sin(6.2832 * time / period + phase)
        x = x + 0.2 * torch.randn(size, 49, 5, generator=generator)
        x = level + scale * x
        start = torch.randint(0, 24 * 300, (size, 1), generator=generator)
        hours = start + torch.arange(49)
        days = hours // 24
        calendar = [days // 30 + 1, days % 30 + 1, days % 7, hours % 24]
        observed = torch.rand(x.shape, generator=generator) > 0.12
        x = x.where(observed, 0.0)
        made.append(
            {
                "past": x[:, :38],
                "past_observed": observed[:, :38],
                "marks": torch.stack(calendar, dim=2),
                "future": x[:, 38:, 2:],
                "future_observed": observed[:, 38:, 2:],
            }
        )
    return made


def forward(net, batch):
    return net(batch["past"], batch["past_observed"].float(), batch["marks"])


def forecast_loss(error, observed):
    """Near hours count more, and so does what is far off."""
    near = torch.arange(1.0, PRED_LEN + 1).rsqrt().unsqueeze(1)
    far_off = error.detach().abs() / (1 + error.detach().abs())
    weight = near * torch.tensor(CHANNEL_WEIGHTS) * observed * (0.5 + far_off)
    huber = F.huber_loss(error, torch.zeros_like(error), reduction="none", delta=DELTA)
    return (weight * huber).sum() / weight.sum()


def slope_loss(error, observed):
    """Steps from hour to hour, where both were observed."""
    both = observed[:, 1:] * observed[:, :-1]
    return (error.diff(dim=1).abs() * both).sum() / both.sum()


def start_loss(output, batch):
    """What the decoder was given comes out of it again."""
    known = batch["past"][:, -LABEL_LEN:, -TARGETS:]
    observed = batch["past_observed"][:, -LABEL_LEN:, -TARGETS:].float()
    error = (output["start"] - known) / output["scale"]
    return (error.square() * observed).sum() / observed.sum()


def loss(output, batch):
    observed = batch["future_observed"].float()
    error = (output["forecast"] - batch["future"]) / output["scale"]
    total = forecast_loss(error, observed) + SLOPE_WEIGHT * slope_loss(error, observed)
    return total + START_WEIGHT * start_loss(output, batch)


class HalvingAdam(torch.optim.Adam):
    """The rate is halved after every few steps."""

    done = 0

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = LR * 0.5 ** (self.done // HALVE_EVERY)
        self.done += 1
        return super().step(closure)


def optimizer(net):
    return HalvingAdam(net.parameters(), lr=LR, betas=BETAS, eps=EPS)
