"""After PaddlePaddle: layers with weights [in_features, out_features], series in NCL.

Inside, a series stays [batch, channels, time], so folding is a reshape.
"""

import math
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

CONFIG = {
    "in_channels": 5,
    "seq_len": 44,
    "pred_len": 14,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 2,
    "top_k": 3,
    "kernel_sizes": (1, 3, 5),
    "epsilon": 1e-5,
}
LOSS = {"channel_weight": [1.0, 0.4, 1.6, 0.7, 1.2], "alpha": 0.6}
SOLVER = {
    "learning_rate": 0.01,
    "eta_min": 0.001,
    "T_max": 6,
    "beta1": 0.9,
    "beta2": 0.98,
    "epsilon": 1e-7,
    "weight_decay": 0.1,
}


class Layer(nn.Module):
    def create_parameter(self, shape):
        return nn.Parameter(torch.zeros(*shape))


class Linear(Layer):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = self.create_parameter([in_features, out_features])
        self.bias = self.create_parameter([out_features])

    def forward(self, x):
        return torch.matmul(x, self.weight) + self.bias


class Embedding(Layer):
    def __init__(self, num_embeddings, embedding_dim):
        super().__init__()
        self.weight = self.create_parameter([num_embeddings, embedding_dim])

    def forward(self, x):
        return torch.index_select(self.weight, 0, x.flatten()).reshape(*x.shape, -1)


class CircularConv1D(Layer):
    def __init__(self, in_channels, out_channels, kernel_size):
        super().__init__()
        self.side = kernel_size // 2
        self.weight = self.create_parameter([out_channels, in_channels, kernel_size])

    def forward(self, x):
        before, after = x[:, :, -self.side :], x[:, :, : self.side]
        x = torch.concat([before, x, after], dim=2)
        return F.conv1d(x, self.weight)


class Conv2D(Layer):
    def __init__(self, in_channels, out_channels, kernel_size, padding=0):
        super().__init__()
        self.padding = padding
        shape = [out_channels, in_channels, kernel_size, kernel_size]
        self.weight = self.create_parameter(shape)
        self.bias = self.create_parameter([out_channels])

    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias, padding=self.padding)


class ChannelNorm(Layer):
    """LayerNorm over the axis 1 of NCL."""

    def __init__(self, num_features, epsilon):
        super().__init__()
        self.epsilon = epsilon
        self.scale = self.create_parameter([num_features, 1])
        self.shift = self.create_parameter([num_features, 1])

    def forward(self, x):
        x = x - torch.mean(x, dim=1, keepdim=True)
        variance = torch.mean(torch.square(x), dim=1, keepdim=True)
        x = x / torch.sqrt(variance + self.epsilon)
        return x * self.scale + self.shift


def sinusoid(max_len, hidden_size):
    """[hidden_size, max_len], sines in even rows."""
    position = np.arange(max_len)[None, :]
    row = np.arange(hidden_size)[:, None]
    angle = position / np.power(10000.0, (row // 2 * 2) / hidden_size)
    table = np.where(row % 2 == 0, np.sin(angle), np.cos(angle))
    return torch.from_numpy(table.astype("float32"))


class SeriesEmbedding(Layer):
    def __init__(self, in_channels, hidden_size, seq_len):
        super().__init__()
        self.value_embed = CircularConv1D(in_channels, hidden_size, 3)
        self.month_embed = Embedding(12, hidden_size)
        self.day_embed = Embedding(7, hidden_size)
        self.hour_embed = Embedding(24, hidden_size)
        self.register_buffer("pos_embed", sinusoid(seq_len, hidden_size))

    def forward(self, x, x_mark):
        temporal = self.month_embed(x_mark[:, :, 0] - 1)
        temporal = temporal + self.day_embed(x_mark[:, :, 1])
        temporal = temporal + self.hour_embed(x_mark[:, :, 2])
        out = self.value_embed(x) + self.pos_embed
        return out + torch.permute(temporal, [0, 2, 1])


class Inception(Layer):
    def __init__(self, in_channels, out_channels, kernel_sizes):
        super().__init__()
        self.branches = nn.ModuleList(
            [
                Conv2D(in_channels, out_channels, size, padding=size // 2)
                for size in kernel_sizes
            ]
        )

    def forward(self, x):
        out = self.branches[0](x)
        for branch in self.branches[1:]:
            out = out + branch(x)
        return out / len(self.branches)


class PeriodSearch(Layer):
    def __init__(self, top_k):
        super().__init__()
        self.top_k = top_k

    def forward(self, x):
        total = x.shape[2]
        amp = torch.abs(torch.fft.rfft(x, dim=2, norm="ortho"))
        amp = torch.mean(amp, dim=1)
        power = torch.mean(amp, dim=0)[1:]
        order = torch.argsort(power.detach(), descending=True)
        index = order[: self.top_k] + 1
        periods = [total // int(i) for i in index]
        return periods, torch.index_select(amp, 1, index)


class TimesBlock(Layer):
    def __init__(self, config):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.search = PeriodSearch(config["top_k"])
        self.inception_in = Inception(hidden, inner, config["kernel_sizes"])
        self.inception_out = Inception(inner, hidden, config["kernel_sizes"])

    def fold(self, x, period):
        rest = x.shape[2] % period
        if rest:
            x = F.pad(x, [0, period - rest])
        return torch.reshape(x, [x.shape[0], x.shape[1], -1, period])

    def forward(self, x):
        periods, amp = self.search(x)
        weight = F.softmax(amp, dim=-1)
        out = x
        for i, period in enumerate(periods):
            plane = self.fold(x, period)
            plane = self.inception_in(plane)
            plane = F.gelu(plane)
            plane = self.inception_out(plane)
            line = torch.flatten(plane, start_dim=2)[:, :, : x.shape[2]]
            out = out + line * weight[:, i].reshape(-1, 1, 1)
        return out


class TimesNet(Layer):
    def __init__(self, config):
        super().__init__()
        self.pred_len = config["pred_len"]
        self.epsilon = config["epsilon"]
        seq_len, hidden = config["seq_len"], config["hidden_size"]
        self.embed = SeriesEmbedding(config["in_channels"], hidden, seq_len)
        self.extend = Linear(seq_len, seq_len + self.pred_len)
        self.layers = nn.ModuleList(
            [TimesBlock(config) for _ in range(config["num_layers"])]
        )
        self.norm = ChannelNorm(hidden, config["epsilon"])
        self.head = Linear(hidden, config["in_channels"])

    def forward(self, x, x_mark):
        x = torch.permute(x, [0, 2, 1])
        mean = torch.mean(x, dim=2, keepdim=True)
        var = torch.mean(torch.square(x - mean), dim=2, keepdim=True)
        stdev = torch.sqrt(var + self.epsilon)
        h = self.embed((x - mean) / stdev, x_mark)
        h = self.extend(h)
        for layer in self.layers:
            h = layer(h)
            h = self.norm(h)
        h = h[:, :, -self.pred_len :]
        y = self.head(torch.permute(h, [0, 2, 1]))
        y = torch.permute(y, [0, 2, 1])
        y = y * stdev + mean
        return torch.permute(y, [0, 2, 1])


# ------------------------------------------------------------------ weights

RENAME = [
    ("embedding.token.", "embed.value_embed."),
    ("embedding.month.", "embed.month_embed."),
    ("embedding.weekday.", "embed.day_embed."),
    ("embedding.hour.", "embed.hour_embed."),
    ("predict_linear.", "extend."),
    ("layer_norm.weight", "norm.scale"),
    ("layer_norm.bias", "norm.shift"),
    ("projection.", "head."),
    ("blocks.", "layers."),
    (".conv.0.kernels.", ".inception_in.branches."),
    (".conv.2.kernels.", ".inception_out.branches."),
]


def convert(torch_state):
    state = {}
    for key, value in torch_state.items():
        for old, new in RENAME:
            key = key.replace(old, new)
        if key in ("extend.weight", "head.weight"):
            value = torch.t(value)
        if key.startswith("norm."):
            value = torch.unsqueeze(value, 1)
        state[key] = value.contiguous()
    return state


def set_state_dict(net, state):
    for name, parameter in net.named_parameters():
        value = state[name]
        if list(value.shape) != list(parameter.shape):
            raise ValueError(
                f"{name}: {list(value.shape)}, not {list(parameter.shape)}"
            )
        with torch.no_grad():
            parameter.copy_(value)


def model():
    net = TimesNet(CONFIG)
    state = convert(torch.load(Path(__file__).with_name("weights.pt")))
    set_state_dict(net, state)
    return net


# ------------------------------------------------------------------ training


def forward(net, batch):
    return net(batch["x"], batch["marks"])


class ForecastLoss(Layer):
    def __init__(self, channel_weight, alpha, pred_len):
        super().__init__()
        step = torch.arange(1, pred_len + 1, dtype=torch.float32)
        weight = torch.tensor(channel_weight) / torch.sqrt(step).unsqueeze(1)
        self.register_buffer("weight", weight)
        self.alpha = alpha

    def forward(self, pred, label, mask):
        mask = mask.to(torch.float32)
        diff = (pred - label) * mask
        weight = self.weight * mask
        l1 = torch.sum(weight * torch.abs(diff)) / torch.sum(weight)
        freq = torch.fft.rfft(diff, dim=1, norm="ortho")
        return l1 + self.alpha * torch.mean(torch.abs(freq))


criterion = ForecastLoss(**LOSS, pred_len=CONFIG["pred_len"])


def loss(output, batch):
    return criterion(output, batch["y"], batch["observed"])


class CosineAnnealingDecay:
    def __init__(self, learning_rate, T_max, eta_min):
        self.base_lr, self.T_max, self.eta_min = learning_rate, T_max, eta_min
        self.last_epoch = 0

    def get_lr(self):
        cosine = math.cos(math.pi * self.last_epoch / self.T_max)
        return self.eta_min + (self.base_lr - self.eta_min) * (1 + cosine) / 2

    def step(self):
        self.last_epoch += 1


class AdamW(torch.optim.Optimizer):
    def __init__(self, net, scheduler, apply_decay_param_fun):
        self.named = list(net.named_parameters())
        super().__init__([p for _, p in self.named], {})
        self.scheduler = scheduler
        self.apply_decay_param_fun = apply_decay_param_fun

    @torch.no_grad()
    def step(self, closure=None):
        lr = self.scheduler.get_lr()
        beta1, beta2 = SOLVER["beta1"], SOLVER["beta2"]
        for name, p in self.named:
            acc = self.state[p]
            if not acc:
                acc["moment1"] = torch.zeros_like(p)
                acc["moment2"] = torch.zeros_like(p)
                acc["beta1_pow"], acc["beta2_pow"] = 1.0, 1.0
            acc["beta1_pow"] *= beta1
            acc["beta2_pow"] *= beta2
            if self.apply_decay_param_fun(name):
                p.mul_(1.0 - lr * SOLVER["weight_decay"])
            acc["moment1"].mul_(beta1).add_((1.0 - beta1) * p.grad)
            acc["moment2"].mul_(beta2).add_((1.0 - beta2) * torch.square(p.grad))
            moment1 = acc["moment1"] / (1.0 - acc["beta1_pow"])
            moment2 = acc["moment2"] / (1.0 - acc["beta2_pow"])
            p.sub_(lr * moment1 / (torch.sqrt(moment2) + SOLVER["epsilon"]))
        self.scheduler.step()


NO_DECAY = ("bias", "norm.", "month_embed", "day_embed", "hour_embed")


def optimizer(net):
    scheduler = CosineAnnealingDecay(
        SOLVER["learning_rate"], T_max=SOLVER["T_max"], eta_min=SOLVER["eta_min"]
    )
    return AdamW(
        net,
        scheduler,
        apply_decay_param_fun=lambda name: not any(part in name for part in NO_DECAY),
    )
