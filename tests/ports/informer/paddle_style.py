"""After PaddleTS: layers with weights [in_features, out_features], series in NLC.

Heads come last but one: [batch, length, num_heads, head_dim], until scores are made.
"""

import math
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

CONFIG = {
    "in_chunk_len": 38,
    "start_token_len": 13,
    "out_chunk_len": 11,
    "in_channels": 5,
    "out_channels": 3,
    "d_model": 28,
    "nhead": 4,
    "ffn_channels": 44,
    "num_encoder_layers": 3,
    "num_decoder_layers": 2,
    "factor": 2,
    "freq_sizes": (13, 32, 7, 24),
    "epsilon": 1e-5,
}
LOSS = {"channel_weight": [1.0, 0.4, 1.7], "delta": 0.8, "alpha": 0.5, "beta": 0.3}


class Layer(nn.Module):
    def create_parameter(self, shape):
        return nn.Parameter(torch.zeros(*shape))


class Linear(Layer):
    def __init__(self, in_features, out_features, bias_attr=True):
        super().__init__()
        self.weight = self.create_parameter([in_features, out_features])
        self.bias = self.create_parameter([out_features]) if bias_attr else None

    def forward(self, x):
        out = torch.matmul(x, self.weight)
        return out if self.bias is None else out + self.bias


class Embedding(Layer):
    def __init__(self, num_embeddings, embedding_dim):
        super().__init__()
        self.weight = self.create_parameter([num_embeddings, embedding_dim])

    def forward(self, x):
        return torch.index_select(self.weight, 0, x.flatten()).reshape(*x.shape, -1)


class Conv1D(Layer):
    """Kernels of 3 over NLC; weights are [out_channels, in_channels, kernel_size]."""

    def __init__(self, in_channels, out_channels, padding_mode="zeros"):
        super().__init__()
        self.padding_mode = padding_mode
        self.weight = self.create_parameter([out_channels, in_channels, 3])

    def pad(self, x):
        if self.padding_mode == "circular":
            return torch.concat([x[:, -1:], x, x[:, :1]], dim=1)
        return F.pad(x, [0, 0, 1, 1])

    def forward(self, x):
        x = torch.permute(self.pad(x), [0, 2, 1])
        return torch.permute(F.conv1d(x, self.weight), [0, 2, 1])


class LayerNorm(Layer):
    def __init__(self, normalized_shape, epsilon=1e-5):
        super().__init__()
        self.epsilon = epsilon
        self.weight = self.create_parameter([normalized_shape])
        self.bias = self.create_parameter([normalized_shape])

    def forward(self, x):
        mean = torch.mean(x, dim=-1, keepdim=True)
        variance = torch.mean(torch.square(x - mean), dim=-1, keepdim=True)
        out = (x - mean) / torch.sqrt(variance + self.epsilon)
        return out * self.weight + self.bias


class BatchNorm1D(Layer):
    """data_format="NLC"; the momentum is what stays."""

    def __init__(self, num_features, momentum=0.9, epsilon=1e-5):
        super().__init__()
        self.momentum, self.epsilon = momentum, epsilon
        self.weight = self.create_parameter([num_features])
        self.bias = self.create_parameter([num_features])
        self.register_buffer("_mean", torch.zeros(num_features))
        self.register_buffer("_variance", torch.ones(num_features))

    @torch.no_grad()
    def update(self, mean, variance, count):
        unbiased = variance * count / (count - 1)
        self._mean.copy_(self._mean * self.momentum + mean * (1 - self.momentum))
        self._variance.copy_(
            self._variance * self.momentum + unbiased * (1 - self.momentum)
        )

    def forward(self, x):
        mean, variance = self._mean, self._variance
        if self.training:
            mean = torch.mean(x, dim=[0, 1])
            variance = torch.mean(torch.square(x - mean), dim=[0, 1])
            self.update(mean, variance, x.shape[0] * x.shape[1])
        scale = self.weight / torch.sqrt(variance + self.epsilon)
        return x * scale + (self.bias - mean * scale)


# ------------------------------------------------------------------ embeddings


def position_table(max_len, d_model):
    position = np.arange(max_len)[:, None]
    div_term = np.exp(np.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
    table = np.zeros([max_len, d_model], dtype="float32")
    table[:, 0::2] = np.sin(position * div_term)
    table[:, 1::2] = np.cos(position * div_term)
    return torch.from_numpy(table)


class TemporalEmbedding(Layer):
    """One table for all parts of the calendar, months first."""

    def __init__(self, freq_sizes, d_model):
        super().__init__()
        self.embed = Embedding(sum(freq_sizes), d_model)
        starts = np.cumsum([0, *freq_sizes[:-1]])
        self.register_buffer("offset", torch.from_numpy(starts), persistent=False)

    def forward(self, x_mark):
        return torch.sum(self.embed(x_mark + self.offset), dim=2)


class DataEmbedding(Layer):
    def __init__(self, config, max_len):
        super().__init__()
        d_model = config["d_model"]
        self.value_embedding = Conv1D(config["in_channels"], d_model, "circular")
        self.temporal_embedding = TemporalEmbedding(config["freq_sizes"], d_model)
        self.register_buffer("pe", position_table(max_len, d_model), persistent=False)

    def forward(self, x, x_mark):
        out = self.value_embedding(x) + self.temporal_embedding(x_mark)
        return out + self.pe


# ------------------------------------------------------------------- attention


class ProbSparseAttention(Layer):
    """All scores are made at once; the drawn ones and the active rows are taken from them."""

    def __init__(self, length, factor, mask_flag):
        super().__init__()
        self.mask_flag = mask_flag
        self.u = factor * int(np.ceil(np.log(length)))
        index = torch.zeros(length, self.u, dtype=torch.int64)
        self.register_buffer("index_sample", index)

    def measure(self, scores):
        index = self.index_sample.expand(*scores.shape[:2], -1, -1)
        sampled = torch.take_along_dim(scores, index, dim=-1)
        largest = torch.max(sampled, dim=-1).values
        return largest - torch.sum(sampled, dim=-1) / scores.shape[-1]

    def initial_context(self, values):
        if self.mask_flag:
            return torch.cumsum(values, dim=2)
        return torch.mean(values, dim=2, keepdim=True).expand(values.shape)

    def forward(self, queries, keys, values):
        scores = torch.matmul(queries, torch.transpose(keys, 2, 3))
        _, index = torch.topk(self.measure(scores), self.u, dim=-1)
        rows = torch.unsqueeze(index, -1)
        active = torch.take_along_dim(scores, rows, dim=2)
        active = active * (1.0 / math.sqrt(queries.shape[-1]))
        if self.mask_flag:
            size = scores.shape[-1]
            future = torch.triu(torch.ones(size, size, dtype=torch.bool), diagonal=1)
            active = torch.where(future[index], -1e9, active)
        weights = F.softmax(active, dim=-1)
        update = torch.matmul(weights, values)
        context = self.initial_context(values)
        rows = torch.broadcast_to(rows, update.shape)
        return torch.scatter(context, 2, rows, update)


class SelfAttention(Layer):
    """With mix the heads are laid one behind the other in time."""

    def __init__(self, d_model, nhead, inner, mix):
        super().__init__()
        self.nhead, self.inner, self.mix = nhead, inner, mix
        self.qkv_proj = Linear(d_model, 3 * d_model, bias_attr=False)
        self.out_proj = Linear(d_model, d_model)

    def forward(self, x):
        batch, length, d_model = x.shape
        qkv = self.qkv_proj(x)
        qkv = torch.reshape(qkv, [batch, length, 3, self.nhead, -1])
        q, k, v = torch.unbind(torch.permute(qkv, [2, 0, 3, 1, 4]))
        out = self.inner(q, k, v)
        if not self.mix:
            out = torch.permute(out, [0, 2, 1, 3])
        return self.out_proj(torch.reshape(out, [batch, length, d_model]))


class CrossAttention(Layer):
    def __init__(self, d_model, nhead):
        super().__init__()
        self.nhead = nhead
        self.q_proj = Linear(d_model, d_model, bias_attr=False)
        self.kv_proj = Linear(d_model, 2 * d_model, bias_attr=False)
        self.out_proj = Linear(d_model, d_model)

    def forward(self, x, memory):
        head_dim = x.shape[-1] // self.nhead
        q = self.q_proj(x) * head_dim**-0.5
        q = torch.reshape(q, [*x.shape[:2], self.nhead, head_dim])
        kv = self.kv_proj(memory)
        kv = torch.reshape(kv, [*memory.shape[:2], 2, self.nhead, head_dim])
        k, v = kv[:, :, 0], kv[:, :, 1]
        product = torch.einsum("blhd,bmhd->bhlm", q, k)
        weights = F.softmax(product, dim=-1)
        out = torch.einsum("bhlm,bmhd->blhd", weights, v)
        return self.out_proj(torch.flatten(out, start_dim=2))


# ---------------------------------------------------------------------- layers


class FFN(Layer):
    def __init__(self, d_model, channels):
        super().__init__()
        self.linear1 = Linear(d_model, channels)
        self.linear2 = Linear(channels, d_model)

    def forward(self, x):
        return self.linear2(F.gelu(self.linear1(x)))


class ConvLayer(Layer):
    """Half as long."""

    def __init__(self, d_model, epsilon):
        super().__init__()
        self.down_conv = Conv1D(d_model, d_model)
        self.norm = BatchNorm1D(d_model, epsilon=epsilon)

    def forward(self, x):
        x = self.norm(self.down_conv(x))
        x = F.elu(x)
        x = torch.permute(x, [0, 2, 1])
        x = F.max_pool1d(x, kernel_size=3, stride=2, padding=1)
        return torch.permute(x, [0, 2, 1])


class EncoderLayer(Layer):
    def __init__(self, config, length):
        super().__init__()
        d_model, epsilon = config["d_model"], config["epsilon"]
        inner = ProbSparseAttention(length, config["factor"], mask_flag=False)
        self.attention = SelfAttention(d_model, config["nhead"], inner, mix=False)
        self.norm1 = LayerNorm(d_model, epsilon)
        self.ffn = FFN(d_model, config["ffn_channels"])
        self.norm2 = LayerNorm(d_model, epsilon)

    def forward(self, x):
        x = x + self.attention(x)
        x = self.norm1(x)
        y = self.ffn(x)
        return self.norm2(x + y)


class Encoder(Layer):
    def __init__(self, config):
        super().__init__()
        self.attn_layers, self.conv_layers = nn.ModuleList(), nn.ModuleList()
        length, last = config["in_chunk_len"], config["num_encoder_layers"] - 1
        for i in range(last + 1):
            self.attn_layers.append(EncoderLayer(config, length))
            if i < last:
                conv_layer = ConvLayer(config["d_model"], config["epsilon"])
                self.conv_layers.append(conv_layer)
            length = (length + 1) // 2
        self.norm = LayerNorm(config["d_model"], config["epsilon"])

    def forward(self, x):
        for i, attn_layer in enumerate(self.attn_layers):
            x = attn_layer(x)
            if i < len(self.conv_layers):
                x = self.conv_layers[i](x)
        return self.norm(x)


class DecoderLayer(Layer):
    def __init__(self, config, length):
        super().__init__()
        d_model, epsilon = config["d_model"], config["epsilon"]
        inner = ProbSparseAttention(length, config["factor"], mask_flag=True)
        self.self_attention = SelfAttention(d_model, config["nhead"], inner, mix=True)
        self.norm1 = LayerNorm(d_model, epsilon)
        self.cross_attention = CrossAttention(d_model, config["nhead"])
        self.norm2 = LayerNorm(d_model, epsilon)
        self.ffn = FFN(d_model, config["ffn_channels"])
        self.norm3 = LayerNorm(d_model, epsilon)

    def forward(self, x, memory):
        x = self.norm1(x + self.self_attention(x))
        x = self.norm2(x + self.cross_attention(x, memory))
        return self.norm3(x + self.ffn(x))


class RevIN(Layer):
    """Statistics are kept from norm to denorm."""

    def __init__(self, num_features, num_targets, epsilon):
        super().__init__()
        self.targets = slice(num_features - num_targets, None)
        self.epsilon = epsilon
        self.affine_weight = self.create_parameter([num_features])
        self.affine_bias = self.create_parameter([num_features])

    def norm(self, x, mask):
        share = mask / torch.clip(torch.sum(mask, dim=1, keepdim=True), min=1.0)
        self.mean = torch.sum(x * share, dim=1, keepdim=True)
        square = torch.square(x - self.mean)
        variance = torch.sum(square * share, dim=1, keepdim=True)
        self.stdev = torch.sqrt(variance + self.epsilon)
        x = (x - self.mean) / self.stdev
        x = x * self.affine_weight + self.affine_bias
        return x * mask

    def denorm(self, x):
        weight, bias = self.affine_weight[self.targets], self.affine_bias[self.targets]
        x = (x - bias) / weight
        return x * self.stdev[:, :, self.targets] + self.mean[:, :, self.targets]


class InformerModel(Layer):
    def __init__(self, config):
        super().__init__()
        self.start_token_len = config["start_token_len"]
        self.out_chunk_len = config["out_chunk_len"]
        self.in_chunk_len = config["in_chunk_len"]
        dec_len = self.start_token_len + self.out_chunk_len
        d_model, epsilon = config["d_model"], config["epsilon"]
        out_channels = config["out_channels"]
        self.revin = RevIN(config["in_channels"], out_channels, epsilon)
        self.enc_embedding = DataEmbedding(config, self.in_chunk_len)
        self.dec_embedding = DataEmbedding(config, dec_len)
        self.encoder = Encoder(config)
        self.decoder = nn.ModuleList()
        for _ in range(config["num_decoder_layers"]):
            self.decoder.append(DecoderLayer(config, dec_len))
        self.dec_norm = LayerNorm(d_model, epsilon)
        self.projection = Linear(d_model, out_channels)

    def start_token(self, x):
        token = x[:, -self.start_token_len :]
        zeros = torch.zeros(x.shape[0], self.out_chunk_len, x.shape[2])
        return torch.concat([token, zeros], dim=1)

    def forward(self, past, mask, x_mark):
        x = self.revin.norm(past, mask)
        past_mark = x_mark[:, : self.in_chunk_len]
        future_mark = x_mark[:, self.in_chunk_len - self.start_token_len :]
        memory = self.encoder(self.enc_embedding(x, past_mark))
        out = self.dec_embedding(self.start_token(x), future_mark)
        for layer in self.decoder:
            out = layer(out, memory)
        out = self.projection(self.dec_norm(out))
        return self.revin.denorm(out)


# --------------------------------------------------------------------- weights

RENAME = [
    ("series_norm.weight", "revin.affine_weight"),
    ("series_norm.bias", "revin.affine_bias"),
    ("embedding.value.", "embedding.value_embedding."),
    ("encoder.layers.", "encoder.attn_layers."),
    ("encoder.distill.", "encoder.conv_layers."),
    (".conv.weight", ".down_conv.weight"),
    ("running_mean", "_mean"),
    ("running_var", "_variance"),
    (".attention.sample", ".inner.index_sample"),
    ("attention.out.", "attention.out_proj."),
    (".ff.conv1.", ".ffn.linear1."),
    (".ff.conv2.", ".ffn.linear2."),
]
CALENDAR = ("month", "day", "weekday", "hour")


def rename(key):
    if key.startswith("norm."):
        return "dec_" + key
    for old, new in RENAME:
        key = key.replace(old, new)
    return key


def join(weights):
    """Of several torch layers a Linear that has their outputs side by side."""
    return torch.concat([torch.t(weight) for weight in weights], dim=1)


def convert_attention(torch_state, prefix):
    q, k, v = (torch_state[f"{prefix}.{n}.weight"] for n in ("query", "key", "value"))
    if prefix.endswith("cross_attention"):
        return {
            f"{prefix}.q_proj.weight": torch.t(q),
            f"{prefix}.kv_proj.weight": join([k, v]),
        }
    prefix = rename(prefix + ".")
    return {f"{prefix}qkv_proj.weight": join([q, k, v])}


def convert_calendar(torch_state, prefix):
    tables = [torch_state[f"{prefix}.{name}.weight"] for name in CALENDAR]
    return {f"{prefix}.temporal_embedding.embed.weight": torch.concat(tables)}


def is_linear(key):
    names = (".linear1.weight", ".linear2.weight", ".out_proj.weight")
    return key.endswith(names) or key == "projection.weight"


def convert(torch_state):
    state = {}
    for key, value in torch_state.items():
        prefix = key.rpartition(".")[0]
        module, _, name = prefix.rpartition(".")
        if name == "query":
            state.update(convert_attention(torch_state, module))
        if name == "month":
            state.update(convert_calendar(torch_state, module))
        key = rename(key)
        if ".linear" in key and value.ndim == 3:
            value = torch.squeeze(value, 2)
        state[key] = torch.t(value) if is_linear(key) else value
    return state


def set_state_dict(net, state):
    for name, value in net.state_dict().items():
        loaded = state[name].contiguous()
        if list(value.shape) != list(loaded.shape):
            raise ValueError(f"{name}: {list(loaded.shape)}, not {list(value.shape)}")
        value.copy_(loaded)


def model():
    net = InformerModel(CONFIG)
    state = convert(torch.load(Path(__file__).with_name("weights.pt")))
    set_state_dict(net, state)
    return net


# -------------------------------------------------------------------- training


def forward(net, batch):
    mask = batch["past_observed"].to(torch.float32)
    out = net(batch["past"], mask, batch["marks"])
    start, forecast = torch.split(out, [net.start_token_len, net.out_chunk_len], dim=1)
    scale = net.revin.stdev[:, :, net.revin.targets]
    return {"start": start, "forecast": forecast, "scale": scale}


def smooth_l1(diff, delta):
    """Not divided by delta, as in Paddle."""
    size = torch.abs(diff)
    return torch.where(size < delta, 0.5 * size * size, delta * (size - 0.5 * delta))


class InformerLoss(Layer):
    def __init__(self, channel_weight, delta, alpha, beta, out_chunk_len):
        super().__init__()
        step = torch.arange(1, out_chunk_len + 1, dtype=torch.float32)
        weight = torch.tensor(channel_weight) / torch.sqrt(step).unsqueeze(1)
        self.register_buffer("weight", weight)
        self.delta, self.alpha, self.beta = delta, alpha, beta

    def point(self, diff, mask):
        size = torch.abs(diff).detach()
        weight = self.weight * mask * (1.5 - 1.0 / (1.0 + size))
        return torch.sum(weight * smooth_l1(diff, self.delta)) / torch.sum(weight)

    def slope(self, diff, mask):
        mask = mask[:, 1:] * mask[:, :-1]
        step = diff[:, 1:] - diff[:, :-1]
        return torch.sum(torch.abs(step) * mask) / torch.sum(mask)

    def start(self, diff, mask):
        return torch.sum(torch.square(diff * mask)) / torch.sum(mask)

    def forward(self, output, batch):
        mask = batch["future_observed"].to(torch.float32)
        diff = (output["forecast"] - batch["future"]) / output["scale"]
        steps, channels = output["start"].shape[1:]
        known = batch["past"][:, -steps:, -channels:]
        known_mask = batch["past_observed"][:, -steps:, -channels:].to(torch.float32)
        known_diff = (output["start"] - known) / output["scale"]
        total = self.point(diff, mask) + self.alpha * self.slope(diff, mask)
        return total + self.beta * self.start(known_diff, known_mask)


criterion = InformerLoss(**LOSS, out_chunk_len=CONFIG["out_chunk_len"])


def loss(output, batch):
    return criterion(output, batch)


class StepDecay:
    def __init__(self, learning_rate, step_size, gamma):
        self.base_lr, self.step_size, self.gamma = learning_rate, step_size, gamma
        self.last_epoch = 0

    def get_lr(self):
        return self.base_lr * self.gamma ** (self.last_epoch // self.step_size)

    def step(self):
        self.last_epoch += 1


class Adam(torch.optim.Optimizer):
    def __init__(self, scheduler, parameters, beta1, beta2, epsilon):
        super().__init__(parameters, {})
        self.scheduler = scheduler
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.beta1_pow, self.beta2_pow = 1.0, 1.0

    @torch.no_grad()
    def step(self, closure=None):
        lr = self.scheduler.get_lr()
        self.beta1_pow *= self.beta1
        self.beta2_pow *= self.beta2
        for p in self.param_groups[0]["params"]:
            acc = self.state[p]
            if not acc:
                acc["moment1"] = torch.zeros_like(p)
                acc["moment2"] = torch.zeros_like(p)
            acc["moment1"].mul_(self.beta1).add_((1.0 - self.beta1) * p.grad)
            square = torch.square(p.grad)
            acc["moment2"].mul_(self.beta2).add_((1.0 - self.beta2) * square)
            moment1 = acc["moment1"] / (1.0 - self.beta1_pow)
            moment2 = acc["moment2"] / (1.0 - self.beta2_pow)
            p.sub_(lr * moment1 / (torch.sqrt(moment2) + self.epsilon))
        self.scheduler.step()


def optimizer(net):
    scheduler = StepDecay(2e-3, step_size=2, gamma=0.5)
    return Adam(scheduler, net.parameters(), beta1=0.9, beta2=0.98, epsilon=1e-6)
