"""After MLX: channels stay last, kernels are [out, time, in], layers are small and flat."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn


@dataclass(frozen=True)
class ModelArgs:
    hidden_size: int = 32
    num_layers: int = 3
    num_heads: int = 4
    mlp_dims: int = 48
    conv_dims: tuple = (16, 24, 24)
    conv_kernels: tuple = (10, 4, 3)
    conv_strides: tuple = (5, 2, 2)
    conv_groups: int = 4
    pos_kernel: int = 8
    pos_groups: int = 4
    rel_buckets: int = 12
    rel_max_distance: int = 23
    code_dims: int = 12
    num_codes: int = 10
    temperature: float = 0.1
    mask_span: int = 4
    feature_grad_scale: float = 0.1
    unmasked_weight: float = 0.3
    penalty_weight: float = 2.0


ARGS = ModelArgs()


# Operations


def zeros(*shape):
    return nn.Parameter(torch.zeros(shape))


def stop_gradient(x):
    return x.detach()


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def sliding_windows(x, size, stride):
    """[batch, time, channels] -> [batch, windows, size, channels]"""
    count = (x.shape[1] - size) // stride + 1
    index = stride * torch.arange(count)[:, None] + torch.arange(size)
    return x[:, index]


def conv1d(x, weight, stride=1, groups=1):
    """A weight is [out, time, in / groups]."""
    windows = sliding_windows(x, weight.shape[1], stride)
    windows = windows.unflatten(-1, (groups, -1))
    weight = weight.unflatten(0, (groups, -1))
    return torch.einsum("blkgi,goki->blgo", windows, weight).flatten(-2)


class Linear(nn.Module):
    def __init__(self, input_dims, output_dims, bias=True):
        super().__init__()
        self.weight = zeros(output_dims, input_dims)
        if bias:
            self.bias = zeros(output_dims)

    def forward(self, x):
        y = x @ self.weight.T
        return y + self.bias if "bias" in self._parameters else y


class LayerNorm(nn.Module):
    def __init__(self, dims, eps=1e-5):
        super().__init__()
        self.weight, self.bias = zeros(dims), zeros(dims)
        self.eps = eps

    def forward(self, x):
        means = x.mean(-1, keepdim=True)
        var = x.var(-1, keepdim=True, correction=0)
        x = (x - means) * torch.rsqrt(var + self.eps)
        return self.weight * x + self.bias


class GroupNorm(nn.Module):
    """Groups are neighbours, as in PyTorch."""

    def __init__(self, num_groups, dims, eps=1e-5):
        super().__init__()
        self.weight, self.bias = zeros(dims), zeros(dims)
        self.num_groups, self.eps = num_groups, eps

    def forward(self, x):
        batch, time, dims = x.shape
        x = x.reshape(batch, time, self.num_groups, dims // self.num_groups)
        x = x.transpose(1, 2).reshape(batch, self.num_groups, -1)
        mean = x.mean(-1, keepdim=True)
        var = (x * x).mean(-1, keepdim=True) - mean * mean
        x = (x - mean) * torch.rsqrt(var + self.eps)
        x = x.reshape(batch, self.num_groups, time, -1).transpose(1, 2)
        return x.reshape(batch, time, dims) * self.weight + self.bias


# Layers


class ConvBlock(nn.Module):
    def __init__(self, inputs, outputs, kernel, stride, num_groups=None):
        super().__init__()
        self.weight = zeros(outputs, kernel, inputs)
        self.stride = stride
        if num_groups is not None:
            self.norm = GroupNorm(num_groups, outputs)
        else:
            self.bias = zeros(outputs)

    def forward(self, x):
        x = conv1d(x, self.weight, self.stride)
        x = self.norm(x) if hasattr(self, "norm") else x + self.bias
        return gelu(x)


class PositionEmbedding(nn.Module):
    """A convolution that sees one frame more behind than ahead."""

    def __init__(self, args):
        super().__init__()
        dims, kernel = args.hidden_size, args.pos_kernel
        self.groups, self.kernel = args.pos_groups, kernel
        self.direction = zeros(dims, kernel, dims // args.pos_groups)
        self.magnitude = zeros(1, kernel, 1)
        self.bias = zeros(dims)

    def forward(self, x):
        squares = torch.square(self.direction).sum((0, 2), keepdim=True)
        weight = self.magnitude * self.direction * torch.rsqrt(squares)
        before = self.kernel // 2
        x = nn.functional.pad(x, (0, 0, before, self.kernel - 1 - before))
        return gelu(conv1d(x, weight, groups=self.groups) + self.bias)


class RelativeBias(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.buckets, self.max_distance = args.rel_buckets, args.rel_max_distance
        self.table = zeros(args.num_heads, args.rel_buckets)

    def bucket_of(self, steps_back):
        half = self.buckets // 2
        near = half // 2
        steps = steps_back.abs()
        growth = math.log(self.max_distance / near)
        far = torch.log(steps.clip(1) / near) * (half - near) / growth + near
        bucket = torch.where(steps < near, steps, far.int().clip(0, half - 1))
        return torch.where(steps_back < 0, bucket + half, bucket)

    def forward(self, length):
        positions = torch.arange(length)
        bucket = self.bucket_of(positions[:, None] - positions[None])
        return self.table[:, bucket]


class Attention(nn.Module):
    def __init__(self, args):
        super().__init__()
        dims = args.hidden_size
        self.num_heads = args.num_heads
        self.query_proj = Linear(dims, dims)
        self.key_proj = Linear(dims, dims, bias=False)
        self.value_proj = Linear(dims, dims)
        self.out_proj = Linear(dims, dims)
        self.update_gate = Linear(dims // args.num_heads, 4)
        self.reset_gate = Linear(dims // args.num_heads, 4)
        self.gate_scale = zeros(args.num_heads)

    def bias_gate(self, x):
        """[batch, heads, time, 1]"""
        update = torch.sigmoid(self.update_gate(x).sum(-1))
        reset = torch.sigmoid(self.reset_gate(x).sum(-1))
        gate = update * (reset * self.gate_scale - 1) + 2
        return gate.transpose(1, 2)[..., None]

    def forward(self, x, position_bias, mask):
        B, L, D = x.shape
        queries = self.query_proj(x).reshape(B, L, self.num_heads, -1)
        keys = self.key_proj(x).reshape(B, L, self.num_heads, -1)
        values = self.value_proj(x).reshape(B, L, self.num_heads, -1)
        scale = math.sqrt(1 / queries.shape[-1])
        scores = scale * torch.einsum("bqhd,bkhd->bhqk", queries, keys)
        gate = self.bias_gate(x.reshape(B, L, self.num_heads, -1))
        scores = scores + gate * position_bias + mask
        scores = torch.exp(scores - stop_gradient(scores.amax(-1, keepdim=True)))
        probs = scores / scores.sum(-1, keepdim=True)
        mixed = torch.einsum("bhqk,bkhd->bqhd", probs, values)
        return self.out_proj(mixed.reshape(B, L, D)), position_bias


class EncoderLayer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.attention = Attention(args)
        self.ln1 = LayerNorm(args.hidden_size)
        self.ln2 = LayerNorm(args.hidden_size)
        self.linear1 = Linear(args.hidden_size, args.mlp_dims)
        self.linear2 = Linear(args.mlp_dims, args.hidden_size)

    def forward(self, x, position_bias, mask):
        y, position_bias = self.attention(x, position_bias, mask)
        x = self.ln1(x + y)
        y = self.linear2(gelu(self.linear1(x)))
        return self.ln2(x + y), position_bias


class HubertForMaskedUnits(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        inputs = (1, *args.conv_dims[:-1])
        self.extractor = nn.ModuleList(
            ConvBlock(i, o, k, s, args.conv_groups if n == 0 else None)
            for n, (i, o, k, s) in enumerate(
                zip(inputs, args.conv_dims, args.conv_kernels, args.conv_strides)
            )
        )
        self.feature_norm = LayerNorm(args.conv_dims[-1])
        self.feature_proj = Linear(args.conv_dims[-1], args.hidden_size)
        self.mask_token = zeros(args.hidden_size)
        self.position = PositionEmbedding(args)
        self.encoder_norm = LayerNorm(args.hidden_size)
        self.relative_bias = RelativeBias(args)
        self.encoder = nn.ModuleList(EncoderLayer(args) for _ in range(args.num_layers))
        self.code_proj = Linear(args.hidden_size, args.code_dims)
        self.codebook = zeros(args.code_dims, args.num_codes)

    def features(self, audio):
        x = audio[..., None]
        for block in self.extractor:
            x = block(x)
        scale = self.args.feature_grad_scale
        return scale * x + stop_gradient((1 - scale) * x)

    def similarity(self, x):
        x = x / torch.linalg.norm(x, dim=-1, keepdim=True)
        codes = self.codebook / torch.linalg.norm(self.codebook, dim=0)
        return x @ codes / self.args.temperature

    def forward(self, audio, frame_lengths, starts):
        x = self.features(audio)
        penalty = torch.square(x).mean()
        x = self.feature_proj(self.feature_norm(x))

        length = x.shape[1]
        masked = span_mask(starts, length, self.args.mask_span)[..., None].to(x.dtype)
        x = masked * self.mask_token + (1 - masked) * x
        keep = torch.arange(length) < frame_lengths[:, None]
        x = x * keep[..., None]
        x = self.encoder_norm(x + self.position(x))

        position_bias = self.relative_bias(length)
        mask = torch.where(keep, 0.0, -1e9)[:, None, None, :]
        for layer in self.encoder:
            x, position_bias = layer(x, position_bias, mask)
        return self.similarity(self.code_proj(x)), penalty


# Weights


def sanitize(weights):
    """Names and shapes of PyTorch -> those of here."""
    w = {}

    def copy(target, source, names=("weight", "bias")):
        for name in names:
            if f"{source}.{name}" in weights:
                w[f"{target}.{name}"] = weights[f"{source}.{name}"]

    for n in range(len(ARGS.conv_dims)):
        source = f"feature_extractor.layers.{n}"
        kernel = weights[f"{source}.conv.weight"]
        w[f"extractor.{n}.weight"] = kernel.transpose(1, 2)
        copy(f"extractor.{n}", f"{source}.conv", ["bias"])
        copy(f"extractor.{n}.norm", f"{source}.norm")

    copy("feature_norm", "feature_projection.norm")
    copy("feature_proj", "feature_projection.proj")
    copy("encoder_norm", "norm")
    copy("code_proj", "final_proj")
    w["mask_token"] = weights["mask_emb"]
    w["codebook"] = weights["codes"].T
    w["relative_bias.table"] = weights["positions.table.weight"].T

    norm = "pos_conv.conv.parametrizations.weight"
    w["position.magnitude"] = weights[f"{norm}.original0"].transpose(1, 2)
    w["position.direction"] = weights[f"{norm}.original1"].transpose(1, 2)
    copy("position", "pos_conv.conv", ["bias"])

    for n in range(ARGS.num_layers):
        source, target = f"layers.{n}", f"encoder.{n}"
        copy(f"{target}.ln1", f"{source}.norm1")
        copy(f"{target}.ln2", f"{source}.norm2")
        copy(f"{target}.linear1", f"{source}.fc1")
        copy(f"{target}.linear2", f"{source}.fc2")
        source, target = f"{source}.attn", f"{target}.attention"
        copy(f"{target}.query_proj", f"{source}.q")
        copy(f"{target}.key_proj", f"{source}.k")
        copy(f"{target}.value_proj", f"{source}.v")
        copy(f"{target}.out_proj", f"{source}.out")
        for name in ("weight", "bias"):
            update, reset = weights[f"{source}.gate.{name}"].split(4)
            w[f"{target}.update_gate.{name}"] = update
            w[f"{target}.reset_gate.{name}"] = reset
        w[f"{target}.gate_scale"] = weights[f"{source}.gate_const"].reshape(-1)
    return w


def model():
    net = HubertForMaskedUnits(ARGS)
    weights = torch.load(Path(__file__).with_name("weights.pt"))
    net.load_state_dict(sanitize(weights))
    return net


# Data and loss


def span_mask(starts, length, span):
    """Frames that follow a start by less than a span."""
    hits = torch.zeros(len(starts), length + 1)
    hits = hits.scatter_add(1, starts % (length + 1), torch.ones(starts.shape))
    total = torch.cumsum(hits[:, :length], dim=1)
    earlier = nn.functional.pad(total, (span, 0))[:, :length]
    return total - earlier > 0


def num_frames(lengths):
    for kernel, stride in zip(ARGS.conv_kernels, ARGS.conv_strides):
        lengths = 1 + (lengths - kernel) // stride
    return lengths


def normalize(audio, lengths):
    inside = (torch.arange(audio.shape[1]) < lengths[:, None]).to(audio.dtype)
    count = lengths[:, None].to(audio.dtype)
    mean = (audio * inside).sum(1, keepdim=True) / count
    centered = (audio - mean) * inside
    var = torch.square(centered).sum(1, keepdim=True) / count
    return centered / torch.sqrt(var + 1e-7)


def forward(net, batch):
    audio = normalize(batch["wave"], batch["lengths"])
    logits, penalty = net(audio, num_frames(batch["lengths"]), batch["starts"])
    return {"logits": logits, "penalty": penalty}


def loss(output, batch):
    logits, targets = output["logits"], batch["units"]
    length = targets.shape[1]
    picked = torch.take_along_dim(logits, targets[..., None], -1)[..., 0]
    losses = torch.logsumexp(logits, -1) - picked
    keep = torch.arange(length) < num_frames(batch["lengths"])[:, None]
    masked = span_mask(batch["starts"], length, ARGS.mask_span)
    on_masked = (keep & masked).to(losses.dtype)
    on_others = (keep & ~masked).to(losses.dtype)
    masked_loss = (losses * on_masked).sum() / on_masked.sum()
    others_loss = (losses * on_others).sum() / on_others.sum()
    total = masked_loss + ARGS.unmasked_weight * others_loss
    return total + ARGS.penalty_weight * output["penalty"]


# Optimizer


def linear_schedule(init, end, steps):
    return lambda step: init + (end - init) * min(step / steps, 1.0)


def join_schedules(first, second, boundary):
    return lambda step: first(step) if step < boundary else second(step - boundary)


class AdamW(torch.optim.Optimizer):
    def __init__(self, parameters, schedule, betas, eps, weight_decay):
        self.parameters = parameters
        super().__init__(list(parameters.values()), {})
        self.schedule, self.betas, self.eps = schedule, betas, eps
        self.weight_decay = weight_decay
        self.steps = 0

    def decays(self, name):
        return (
            name.endswith(".weight")
            and self.parameters[name].ndim > 1
            or (name == "position.direction")
        )

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        lr = self.schedule(self.steps)
        for name, parameter in self.parameters.items():
            if self.decays(name):
                parameter.mul_(1 - lr * self.weight_decay)
            self.apply_single(parameter, parameter.grad, lr)

    def apply_single(self, parameter, gradient, lr):
        state = self.state[parameter]
        if not state:
            state["m"] = torch.zeros_like(parameter)
            state["v"] = torch.zeros_like(parameter)
        b1, b2 = self.betas
        m = b1 * state["m"] + (1 - b1) * gradient
        v = b2 * state["v"] + (1 - b2) * torch.square(gradient)
        state["m"], state["v"] = m, v
        m = m / (1 - b1**self.steps)
        v = v / (1 - b2**self.steps)
        parameter.sub_(lr * m / (torch.sqrt(v) + self.eps))


def optimizer(net):
    peak, warmup, total = 2e-3, 3, 20
    schedule = join_schedules(
        linear_schedule(0.0, peak, warmup),
        linear_schedule(peak, 0.0, total - warmup),
        warmup,
    )
    parameters = dict(net.named_parameters())
    return AdamW(parameters, schedule, (0.9, 0.98), 1e-6, weight_decay=0.1)
