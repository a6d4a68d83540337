"""After GluonTS: hybrid blocks that are given F and their parameters, series in NTC.

Lagged values are features of each step. Attention runs over [batch * heads, time, units];
projections of queries, keys and values are interleaved by heads.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

# ------------------------------------------------------------------- operators


class nd:  # noqa: N801 - named as in MXNet
    """Operators with the names that MXNet gives them."""

    @staticmethod
    def FullyConnected(data, weight, bias=None):
        """flatten=False; weights are [num_hidden, in_units]."""
        out = torch.matmul(data, torch.swapaxes(weight, 0, 1))
        return out if bias is None else out + bias

    @staticmethod
    def Convolution(data, weight):
        """layout="NCW", no bias."""
        return nn.functional.conv1d(data, weight, padding=weight.shape[2] // 2)

    @staticmethod
    def MaxPooling(data, kernel, stride, pad):
        """layout="NTC"."""
        data = nn.functional.pad(data, (0, 0, pad, pad), value=-math.inf)
        return torch.amax(data.unfold(1, kernel, stride), dim=-1)

    @staticmethod
    def LayerNorm(data, gamma, beta, eps=1e-5):
        centred = data - torch.mean(data, dim=-1, keepdim=True)
        var = torch.mean(torch.square(centred), dim=-1, keepdim=True)
        return centred * torch.rsqrt(var + eps) * gamma + beta

    @staticmethod
    def LeakyReLU(data, act_type):
        if act_type == "gelu":
            return 0.5 * data * (1.0 + torch.erf(data / math.sqrt(2.0)))
        if act_type == "elu":
            below = torch.exp(torch.clamp(data, max=0.0)) - 1.0
            return torch.where(data > 0.0, data, below)
        raise ValueError(act_type)

    @staticmethod
    def batch_dot(lhs, rhs, transpose_b=False):
        return torch.bmm(lhs, torch.swapaxes(rhs, 1, 2) if transpose_b else rhs)

    @staticmethod
    def softmax(data):
        exps = torch.exp(data - torch.amax(data, dim=-1, keepdim=True).detach())
        return exps / torch.sum(exps, dim=-1, keepdim=True)

    @staticmethod
    def topk_mask(data, k):
        """ret_typ="mask", axis=-1"""
        _, index = torch.topk(data, k, dim=-1)
        return torch.zeros_like(data).scatter(-1, index, 1.0)

    @staticmethod
    def slice_axis(data, axis, begin, end):
        end = data.shape[axis] if end is None else end % data.shape[axis]
        begin = begin % data.shape[axis]
        return torch.narrow(data, axis, begin, end - begin)


class HybridBlock(nn.Module):
    def get(self, name, *shape, grad_req="write"):
        if grad_req == "null":
            self.register_buffer(name, torch.zeros(shape))
        else:
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, *args):
        own = {**self._parameters, **self._buffers}
        return self.hybrid_forward(nd, *args, **own)

    def hybrid_forward(self, F, *args, **params):
        raise NotImplementedError


# ---------------------------------------------------------------------- blocks


class Dense(HybridBlock):
    def __init__(self, units, in_units):
        super().__init__()
        self.get("weight", units, in_units)
        self.get("bias", units)

    def hybrid_forward(self, F, x, weight, bias):
        return F.FullyConnected(x, weight, bias)


class LayerNorm(HybridBlock):
    def __init__(self, in_channels):
        super().__init__()
        self.get("gamma", in_channels)
        self.get("beta", in_channels)

    def hybrid_forward(self, F, x, gamma, beta):
        return F.LayerNorm(x, gamma, beta)


class BatchNorm(HybridBlock):
    """axis=-1; the momentum is that of the moving statistics."""

    def __init__(self, in_channels, momentum=0.9, epsilon=1e-5):
        super().__init__()
        self.momentum, self.epsilon = momentum, epsilon
        self.get("gamma", in_channels)
        self.get("beta", in_channels)
        self.get("moving_mean", in_channels, grad_req="null")
        self.get("moving_var", in_channels, grad_req="null")

    @torch.no_grad()
    def move(self, moving, value):
        moving.copy_(moving * self.momentum + value * (1.0 - self.momentum))

    def hybrid_forward(self, F, x, gamma, beta, moving_mean, moving_var):
        mean, var = moving_mean, moving_var
        if self.training:
            flat = torch.reshape(x, (-1, x.shape[-1]))
            mean = torch.mean(flat, dim=0)
            var = torch.mean(torch.square(flat), dim=0) - torch.square(mean)
            self.move(moving_mean, mean)
            self.move(moving_var, var * len(flat) / (len(flat) - 1))
        x_hat = (x - mean) / torch.sqrt(var + self.epsilon)
        return x_hat * gamma + beta


class ObservedScaler(HybridBlock):
    """Location and scale of each item, [batch, 1, variables]; scaled back for targets."""

    def __init__(self, num_variables, num_targets, minimum_scale=1e-5):
        super().__init__()
        self.num_targets, self.minimum_scale = num_targets, minimum_scale
        self.get("gamma", num_variables)
        self.get("beta", num_variables)

    def hybrid_forward(self, F, data, observed, gamma, beta):
        num_observed = torch.sum(observed, dim=1, keepdim=True)
        num_observed = torch.clamp(num_observed, min=1.0)
        loc = torch.sum(data * observed, dim=1, keepdim=True) / num_observed
        deviation = (data - loc) * observed
        var = torch.sum(torch.square(deviation), dim=1, keepdim=True) / num_observed
        scale = torch.sqrt(var + self.minimum_scale)
        scaled = deviation / scale * gamma + beta * observed
        return scaled, loc, scale

    def target(self, array):
        return nd.slice_axis(array, axis=-1, begin=-self.num_targets, end=None)

    def unscale(self, out, loc, scale):
        slope = self.target(scale) / self.target(self.gamma)
        return (out - self.target(self.beta)) * slope + self.target(loc)


# ------------------------------------------------------------------- features


def get_lagged_subsequences(F, sequence, indices):
    """Of a ring, [batch, time, variables] -> [batch, time, variables * lags]."""
    length = sequence.shape[1]
    ring = torch.cat([sequence, sequence, sequence], dim=1)
    lagged = [
        F.slice_axis(ring, axis=1, begin=length - lag, end=2 * length - lag)
        for lag in indices
    ]
    stacked = torch.stack(lagged, dim=-1)
    return torch.reshape(stacked, (*sequence.shape[:2], -1))


def sinusoidal_position_encoding(length, units):
    """Pairs of a sine and a cosine."""
    pair = torch.arange(units // 2, dtype=torch.float32)
    rate = torch.pow(10000.0, -2.0 * pair / units)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * rate[None, :]
    pairs = torch.stack([torch.sin(angle), torch.cos(angle)], dim=-1)
    return torch.reshape(pairs, (length, units))


class FeatureEmbedder(HybridBlock):
    """Embeddings of all features, added up."""

    def __init__(self, cardinalities, units):
        super().__init__()
        self.num_features = len(cardinalities)
        for i, cardinality in enumerate(cardinalities):
            self.get(f"cat_{i}_weight", cardinality, units)

    def hybrid_forward(self, F, features, **weights):
        total: Any = 0.0
        for i in range(self.num_features):
            feature = features[:, :, i]
            total = total + nn.functional.embedding(feature, weights[f"cat_{i}_weight"])
        return total


class InputEmbedding(HybridBlock):
    lags_seq = (1, 0, -1)

    def __init__(self, num_variables, units, length, cardinalities):
        super().__init__()
        self.length, self.units = length, units
        self.get("lag_weight", units, num_variables * len(self.lags_seq))
        self.time_embedder = FeatureEmbedder(cardinalities, units)

    def hybrid_forward(self, F, data, time_feat, lag_weight):
        lags = get_lagged_subsequences(F, data, self.lags_seq)
        value = F.FullyConnected(lags, lag_weight)
        position = sinusoidal_position_encoding(self.length, self.units)
        return value + position + self.time_embedder(time_feat)


# ------------------------------------------------------------------- attention


def split_heads(x, heads, parts):
    """[batch, time, heads * parts * units] -> parts of [batch * heads, time, units]."""
    x = torch.reshape(x, (x.shape[0], x.shape[1], heads, parts, -1))
    x = torch.permute(x, (3, 0, 2, 1, 4))
    return torch.unbind(torch.flatten(x, 1, 2))


def merge_heads(x, heads):
    x = torch.reshape(x, (-1, heads, x.shape[1], x.shape[2]))
    return torch.flatten(torch.swapaxes(x, 1, 2), 2, 3)


def stack_heads(x, heads):
    """Heads stay before the time, and both are cut anew into steps."""
    return torch.reshape(x, (-1, x.shape[1], heads * x.shape[2]))


class ProbSparseCell(HybridBlock):
    """sample_count says how often a key was drawn for a query."""

    def __init__(self, length, factor, causal):
        super().__init__()
        self.causal = causal
        self.num_active = factor * math.ceil(math.log(length))
        self.get("sample_count", length, length, grad_req="null")

    def activity(self, scores, sample_count):
        length = scores.shape[-1]
        drawn = torch.where(sample_count > 0, scores, -math.inf)
        return torch.amax(drawn, -1) - torch.sum(scores * sample_count, -1) / length

    def lazy_values(self, F, value, past):
        if self.causal:
            return F.batch_dot(past.expand(value.shape[0], -1, -1), value)
        return torch.mean(value, dim=1, keepdim=True)

    def hybrid_forward(self, F, query, key, value, sample_count):
        scores = F.batch_dot(query, key, transpose_b=True)
        active = F.topk_mask(self.activity(scores, sample_count), self.num_active)
        step = torch.arange(value.shape[1])
        past = (step[:, None] >= step[None, :]).to(value.dtype)
        scores = scores / math.sqrt(query.shape[-1])
        if self.causal:
            scores = scores - 1e30 * (1.0 - past)
        attended = F.batch_dot(F.softmax(scores), value)
        lazy = self.lazy_values(F, value, past)
        return torch.where(active[:, :, None] > 0, attended, lazy)


class SparseSelfAttention(HybridBlock):
    def __init__(self, units, heads, cell, join):
        super().__init__()
        self.heads, self.cell, self.join = heads, cell, join
        self.get("in_weight", 3 * units, units)
        self.proj = Dense(units, units)

    def hybrid_forward(self, F, x, in_weight):
        qkv = F.FullyConnected(x, in_weight)
        query, key, value = split_heads(qkv, self.heads, 3)
        out = self.cell(query, key, value)
        return self.proj(self.join(out, self.heads))


class EncoderDecoderAttention(HybridBlock):
    def __init__(self, units, heads):
        super().__init__()
        self.heads = heads
        self.get("query_weight", units, units)
        self.get("key_value_weight", 2 * units, units)
        self.proj = Dense(units, units)

    def hybrid_forward(self, F, x, memory, query_weight, key_value_weight):
        (query,) = split_heads(F.FullyConnected(x, query_weight), self.heads, 1)
        memory = F.FullyConnected(memory, key_value_weight)
        key, value = split_heads(memory, self.heads, 2)
        query = query / math.sqrt(query.shape[-1])
        att_weights = F.softmax(F.batch_dot(query, key, transpose_b=True))
        out = merge_heads(F.batch_dot(att_weights, value), self.heads)
        return self.proj(out)


# ----------------------------------------------------------------- transformer


class PositionwiseFFN(HybridBlock):
    """With the residual and the norm that follow it."""

    def __init__(self, units, hidden_size):
        super().__init__()
        self.ffn_1 = Dense(hidden_size, units)
        self.ffn_2 = Dense(units, hidden_size)
        self.layer_norm = LayerNorm(units)

    def hybrid_forward(self, F, x):
        out = F.LeakyReLU(self.ffn_1(x), act_type="gelu")
        out = self.ffn_2(out)
        return self.layer_norm(out + x)


class DistillingBlock(HybridBlock):
    def __init__(self, units):
        super().__init__()
        self.get("weight", units, units, 3)
        self.batch_norm = BatchNorm(units)

    def hybrid_forward(self, F, x, weight):
        out = F.Convolution(torch.swapaxes(x, 1, 2), weight)
        out = self.batch_norm(torch.swapaxes(out, 1, 2))
        out = F.LeakyReLU(out, act_type="elu")
        return F.MaxPooling(out, kernel=3, stride=2, pad=1)


class EncoderCell(HybridBlock):
    def __init__(self, units, hidden_size, heads, length, factor):
        super().__init__()
        cell = ProbSparseCell(length, factor, causal=False)
        self.attention = SparseSelfAttention(units, heads, cell, merge_heads)
        self.layer_norm = LayerNorm(units)
        self.ffn = PositionwiseFFN(units, hidden_size)

    def hybrid_forward(self, F, x):
        out = self.attention(x)
        out = self.layer_norm(out + x)
        return self.ffn(out)


class DecoderCell(HybridBlock):
    def __init__(self, units, hidden_size, heads, length, factor):
        super().__init__()
        cell = ProbSparseCell(length, factor, causal=True)
        self.attention_in = SparseSelfAttention(units, heads, cell, stack_heads)
        self.layer_norm_in = LayerNorm(units)
        self.attention_inter = EncoderDecoderAttention(units, heads)
        self.layer_norm_inter = LayerNorm(units)
        self.ffn = PositionwiseFFN(units, hidden_size)

    def hybrid_forward(self, F, x, memory):
        out = self.attention_in(x)
        x = self.layer_norm_in(x + out)
        out = self.attention_inter(x, memory)
        x = self.layer_norm_inter(x + out)
        return self.ffn(x)


class InformerNetwork(HybridBlock):
    def __init__(
        self,
        context_length=38,
        label_length=13,
        prediction_length=11,
        num_variables=5,
        num_targets=3,
        units=28,
        hidden_size=44,
        num_heads=4,
        factor=2,
        encoder_lengths=(38, 19, 10),
        num_decoder_cells=2,
        cardinality=(13, 32, 7, 24),
    ):
        super().__init__()
        self.context_length, self.label_length = context_length, label_length
        self.prediction_length = prediction_length
        target_length = label_length + prediction_length
        common = units, hidden_size, num_heads
        self.scaler = ObservedScaler(num_variables, num_targets)
        self.enc_input = InputEmbedding(
            num_variables, units, context_length, cardinality
        )
        self.dec_input = InputEmbedding(
            num_variables, units, target_length, cardinality
        )
        self.enc_cells, self.dec_cells = nn.ModuleList(), nn.ModuleList()
        self.distilling = nn.ModuleList()
        for length in encoder_lengths:
            self.enc_cells.append(EncoderCell(*common, length, factor))
        for _ in encoder_lengths[1:]:
            self.distilling.append(DistillingBlock(units))
        for _ in range(num_decoder_cells):
            self.dec_cells.append(DecoderCell(*common, target_length, factor))
        self.enc_norm, self.dec_norm = LayerNorm(units), LayerNorm(units)
        self.target_proj = Dense(num_targets, units)

    def encode(self, data, time_feat):
        memory = self.enc_cells[0](self.enc_input(data, time_feat))
        for distilling, cell in zip(self.distilling, self.enc_cells[1:]):
            memory = distilling(memory)
            memory = cell(memory)
        return self.enc_norm(memory)

    def decode(self, F, data, time_feat, memory):
        label = F.slice_axis(data, axis=1, begin=-self.label_length, end=None)
        unknown = torch.zeros_like(data[:, : self.prediction_length])
        out = self.dec_input(torch.cat([label, unknown], dim=1), time_feat)
        for cell in self.dec_cells:
            out = cell(out, memory)
        return self.target_proj(self.dec_norm(out))

    def hybrid_forward(self, F, past_target, past_observed_values, time_feat):
        observed = past_observed_values.to(past_target.dtype)
        data, loc, scale = self.scaler(past_target, observed)
        past_feat = F.slice_axis(time_feat, axis=1, begin=0, end=self.context_length)
        begin = self.context_length - self.label_length
        dec_feat = F.slice_axis(time_feat, axis=1, begin=begin, end=None)
        memory = self.encode(data, past_feat)
        out = self.decode(F, data, dec_feat, memory)
        out = self.scaler.unscale(out, loc, scale)
        return out, self.scaler.target(scale)


# ------------------------------------------------------------------ parameters

NUM_HEADS = 4


def interleave(weights):
    """Rows of each head: its part of the first weight, then of the second and so on."""
    parts = [torch.unflatten(weight, 0, (NUM_HEADS, -1)) for weight in weights]
    return torch.flatten(torch.stack(parts, dim=1), 0, 2)


def count_samples(sample):
    """Indices [length, drawn] -> how often each key is among them."""
    hot = nn.functional.one_hot(sample, len(sample))
    return torch.sum(hot, dim=1).to(torch.float32)


def convert_dense(source, ours, theirs):
    weight = source[f"{theirs}.weight"]
    if weight.ndim == 3:
        weight = torch.squeeze(weight, -1)
    return {f"{ours}.weight": weight, f"{ours}.bias": source[f"{theirs}.bias"]}


def convert_norm(source, ours, theirs):
    return {
        f"{ours}.gamma": source[f"{theirs}.weight"],
        f"{ours}.beta": source[f"{theirs}.bias"],
    }


def convert_embedding(source, ours, theirs):
    lag_weight = torch.flatten(source[f"{theirs}.value.weight"], 1)
    arg_params = {f"{ours}.lag_weight": lag_weight}
    for i, name in enumerate(("month", "day", "weekday", "hour")):
        table = source[f"{theirs}.{name}.weight"]
        arg_params[f"{ours}.time_embedder.cat_{i}_weight"] = table
    return arg_params


def convert_sparse(source, ours, theirs):
    weights = [source[f"{theirs}.{n}.weight"] for n in ("query", "key", "value")]
    return {
        f"{ours}.in_weight": interleave(weights),
        f"{ours}.cell.sample_count": count_samples(
            source[f"{theirs}.attention.sample"]
        ),
        **convert_dense(source, f"{ours}.proj", f"{theirs}.out"),
    }


def convert_cross(source, ours, theirs):
    weights = [source[f"{theirs}.{n}.weight"] for n in ("key", "value")]
    return {
        f"{ours}.query_weight": source[f"{theirs}.query.weight"],
        f"{ours}.key_value_weight": interleave(weights),
        **convert_dense(source, f"{ours}.proj", f"{theirs}.out"),
    }


def convert_ffn(source, ours, theirs, norm):
    return {
        **convert_dense(source, f"{ours}.ffn_1", f"{theirs}.ff.conv1"),
        **convert_dense(source, f"{ours}.ffn_2", f"{theirs}.ff.conv2"),
        **convert_norm(source, f"{ours}.layer_norm", f"{theirs}.{norm}"),
    }


def convert_distilling(source, ours, theirs):
    return {
        f"{ours}.weight": source[f"{theirs}.conv.weight"],
        f"{ours}.batch_norm.moving_mean": source[f"{theirs}.norm.running_mean"],
        f"{ours}.batch_norm.moving_var": source[f"{theirs}.norm.running_var"],
        **convert_norm(source, f"{ours}.batch_norm", f"{theirs}.norm"),
    }


def convert_encoder(source):
    arg_params = convert_norm(source, "enc_norm", "encoder.norm")
    for i in range(3):
        ours, theirs = f"enc_cells.{i}", f"encoder.layers.{i}"
        arg_params |= convert_sparse(source, f"{ours}.attention", f"{theirs}.attention")
        arg_params |= convert_norm(source, f"{ours}.layer_norm", f"{theirs}.norm1")
        arg_params |= convert_ffn(source, f"{ours}.ffn", theirs, "norm2")
    for i in range(2):
        arg_params |= convert_distilling(
            source, f"distilling.{i}", f"encoder.distill.{i}"
        )
    return arg_params


def convert_decoder(source):
    arg_params = convert_norm(source, "dec_norm", "norm")
    for i in range(2):
        ours, theirs = f"dec_cells.{i}", f"decoder.{i}"
        arg_params |= convert_sparse(
            source, f"{ours}.attention_in", f"{theirs}.self_attention"
        )
        arg_params |= convert_norm(source, f"{ours}.layer_norm_in", f"{theirs}.norm1")
        arg_params |= convert_cross(
            source, f"{ours}.attention_inter", f"{theirs}.cross_attention"
        )
        arg_params |= convert_norm(
            source, f"{ours}.layer_norm_inter", f"{theirs}.norm2"
        )
        arg_params |= convert_ffn(source, f"{ours}.ffn", theirs, "norm3")
    return arg_params


def convert(source):
    return {
        **convert_norm(source, "scaler", "series_norm"),
        **convert_embedding(source, "enc_input", "enc_embedding"),
        **convert_embedding(source, "dec_input", "dec_embedding"),
        **convert_encoder(source),
        **convert_decoder(source),
        **convert_dense(source, "target_proj", "projection"),
    }


def model():
    net = InformerNetwork()
    net.load_state_dict(convert(torch.load(Path(__file__).with_name("weights.pt"))))
    return net


# ------------------------------------------------------------------------ loss


def forward(net, batch):
    out, scale = net(batch["past"], batch["past_observed"], batch["marks"])
    start = nd.slice_axis(out, axis=1, begin=0, end=net.label_length)
    forecast = nd.slice_axis(out, axis=1, begin=net.label_length, end=None)
    return {"start": start, "forecast": forecast, "scale": scale}


def weighted_average(x, weights):
    return torch.sum(x * weights) / torch.sum(weights)


class HuberLoss:
    """Gluon divides by rho; that is taken back."""

    def __init__(self, rho):
        self.rho = rho

    def __call__(self, error):
        error = torch.abs(error)
        beyond = error - 0.5 * self.rho
        within = (0.5 / self.rho) * torch.square(error)
        return torch.where(error > self.rho, beyond, within) * self.rho


def horizon_weights(prediction_length):
    return torch.pow(torch.arange(prediction_length) + 1.0, -0.5)[:, None]


def forecast_loss(error, observed):
    target_weights = torch.tensor([1.0, 0.4, 1.7])
    size = torch.abs(error.detach())
    difficulty = 0.5 + size / (size + 1.0)
    weights = horizon_weights(error.shape[1]) * target_weights * difficulty
    return weighted_average(HuberLoss(0.8)(error), weights * observed)


def slope_loss(error, observed):
    before, after = error[:, :-1], error[:, 1:]
    both = torch.logical_and(observed[:, :-1] > 0, observed[:, 1:] > 0)
    return weighted_average(torch.abs(after - before), both.to(error.dtype))


def label_loss(output, batch):
    label_length, num_targets = output["start"].shape[1:]
    past = torch.flip(batch["past"], [1])[:, :label_length, -num_targets:]
    observed = torch.flip(batch["past_observed"], [1])[:, :label_length, -num_targets:]
    error = (torch.flip(output["start"], [1]) - past) / output["scale"]
    return weighted_average(torch.square(error), observed.to(error.dtype))


def loss(output, batch):
    observed = batch["future_observed"].to(output["forecast"].dtype)
    error = output["forecast"] / output["scale"] - batch["future"] / output["scale"]
    near = forecast_loss(error, observed)
    return near + 0.5 * slope_loss(error, observed) + 0.3 * label_loss(output, batch)


# --------------------------------------------------------------------- trainer


class FactorScheduler:
    def __init__(self, step, factor, base_lr):
        self.step, self.factor, self.base_lr = step, factor, base_lr

    def __call__(self, num_update):
        return self.base_lr * self.factor ** ((num_update - 1) // self.step)


class Adam:
    """The corrections of both moments are in the rate, and in what keeps it finite."""

    def __init__(self, lr_scheduler, beta1, beta2, epsilon):
        self.lr_scheduler = lr_scheduler
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon

    def create_state(self, weight):
        return torch.zeros_like(weight), torch.zeros_like(weight)

    def update(self, t, weight, grad, state):
        mean, var = state
        coef1, coef2 = 1.0 - self.beta1**t, math.sqrt(1.0 - self.beta2**t)
        lr = self.lr_scheduler(t) * coef2 / coef1
        mean.copy_(self.beta1 * mean + (1.0 - self.beta1) * grad)
        var.copy_(self.beta2 * var + (1.0 - self.beta2) * torch.square(grad))
        weight.sub_(lr * mean / (torch.sqrt(var) + self.epsilon * coef2))


class Trainer(torch.optim.Optimizer):
    def __init__(self, params, rule):
        super().__init__(list(params.values()), {})
        self.rule, self.num_update = rule, 0
        self.states = [rule.create_state(p.detach()) for p in params.values()]

    @torch.no_grad()
    def step(self, closure=None):
        self.num_update += 1
        for weight, state in zip(self.param_groups[0]["params"], self.states):
            self.rule.update(self.num_update, weight, weight.grad, state)


def optimizer(net):
    scheduler = FactorScheduler(step=2, factor=0.5, base_lr=2e-3)
    rule = Adam(scheduler, beta1=0.9, beta2=0.98, epsilon=1e-6)
    return Trainer(dict(net.named_parameters()), rule)
