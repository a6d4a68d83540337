"""Neighbourhood attention by gathering: tokens are [batch, tokens, features].

Which tokens a query sees, and the entry of the bias table for each, is worked out beforehand
in plain Python for the size of each level. Weights are [in, out]; kernels are HWIO and see
their input through an index, too.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn


@dataclass
class Level:
    features: int
    heads: int
    layers: int
    window: int
    rows: int
    columns: int


LEVELS = [
    Level(features=16, heads=2, layers=2, window=5, rows=12, columns=14),
    Level(features=32, heads=4, layers=2, window=3, rows=6, columns=7),
]
LN_EPS = 1e-5


# ---- indices


def first_neighbour(i, length, window, dilation):
    """Where the window of i begins, in steps of the dilation from i's own remainder."""
    members = len(range(i % dilation, length, dilation))
    start = i // dilation - window // 2
    return min(max(start, 0), members - window)


def axis_table(length, window, dilation):
    """For each place: (key, offset of key from query counted from zero) of its window."""
    table = []
    for i in range(length):
        start = first_neighbour(i, length, window, dilation)
        line = []
        for n in range(start, start + window):
            key = n * dilation + i % dilation
            line.append((key, n - i // dilation + window - 1))
        table.append(line)
    return table


def neighbour_tables(level, dilation):
    """Two of [tokens, window * window]: tokens that are keys, and entries of the bias table."""
    across = axis_table(level.columns, level.window, dilation)
    down = axis_table(level.rows, level.window, dilation)
    side = 2 * level.window - 1
    keys, entries = [], []
    for row in down:
        for column in across:
            keys.append([r * level.columns + c for r, _ in row for c, _ in column])
            entries.append([dr * side + dc for _, dr in row for _, dc in column])
    return torch.tensor(keys), torch.tensor(entries)


# ---- layers


def parameter(*shape):
    return nn.Parameter(torch.zeros(shape))


class Affine(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.w = parameter(n_in, n_out)
        self.b = parameter(n_out)

    def forward(self, x):
        return torch.addmm(self.b, x.flatten(0, -2), self.w).view(*x.shape[:-1], -1)


class Norm(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.scale = parameter(features)
        self.offset = parameter(features)

    def forward(self, x):
        var, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        return (x - mean) * torch.rsqrt(var + LN_EPS) * self.scale + self.offset


class HalvingConv(nn.Module):
    """3x3, stride 2, one pixel of zeros all around; pixels are [b, rows, columns, c]."""

    def __init__(self, n_in, n_out, bias=True):
        super().__init__()
        self.kernel = parameter(3, 3, n_in, n_out)
        self.b = parameter(n_out) if bias else None

    def forward(self, x):
        taps = torch.arange(3)
        rows = 2 * torch.arange((x.shape[1] + 1) // 2)[:, None] + taps
        columns = 2 * torch.arange((x.shape[2] + 1) // 2)[:, None] + taps
        x = nn.functional.pad(x, (0, 0, 1, 1, 1, 1))
        patches = x[:, rows[:, None, :, None], columns[None, :, None, :]]
        y = torch.einsum("bhwijc,ijco->bhwo", patches, self.kernel)
        return y if self.b is None else y + self.b


def gelu(x):
    return x * (0.5 + 0.5 * torch.erf(x / math.sqrt(2.0)))


def softmax(x):
    x = torch.exp(x - x.amax(dim=-1, keepdim=True))
    return x / x.sum(dim=-1, keepdim=True)


class GatherAttention(nn.Module):
    def __init__(self, level, dilation):
        super().__init__()
        features, heads = level.features, level.heads
        self.depth = features // heads
        self.wq = parameter(features, heads, self.depth)
        self.wk = parameter(features, heads, self.depth)
        self.wv = parameter(features, heads, self.depth)
        self.bq = parameter(heads, self.depth)
        self.bv = parameter(heads, self.depth)
        self.wo = parameter(heads, self.depth, features)
        self.bo = parameter(features)
        self.bias_table = parameter((2 * level.window - 1) ** 2, heads)
        keys, entries = neighbour_tables(level, dilation)
        self.register_buffer("keys", keys)
        self.register_buffer("entries", entries)

    def forward(self, x):
        q = torch.einsum("btf,fnd->btnd", x, self.wq) + self.bq
        k = torch.einsum("btf,fnd->btnd", x, self.wk)
        v = torch.einsum("btf,fnd->btnd", x, self.wv) + self.bv
        # [batch, tokens, window * window, heads, depth]
        k_near = k[:, self.keys]
        v_near = v[:, self.keys]
        scores = torch.einsum("btnd,btsnd->btns", q, k_near)
        scores = scores / math.sqrt(self.depth)
        position = self.bias_table[self.entries]
        scores = scores + position.transpose(1, 2)
        probs = softmax(scores)
        context = torch.einsum("btns,btsnd->btnd", probs, v_near)
        return torch.einsum("btnd,ndf->btf", context, self.wo) + self.bo


class Layer(nn.Module):
    def __init__(self, level, dilation):
        super().__init__()
        features = level.features
        self.attention_norm = Norm(features)
        self.attention = GatherAttention(level, dilation)
        self.attention_gain = parameter(features)
        self.mlp_norm = Norm(features)
        self.up = Affine(features, 3 * features)
        self.down = Affine(3 * features, features)
        self.mlp_gain = parameter(features)

    def forward(self, x):
        y = self.attention(self.attention_norm(x))
        x = torch.addcmul(x, y, self.attention_gain)
        y = self.down(gelu(self.up(self.mlp_norm(x))))
        return torch.addcmul(x, y, self.mlp_gain)


class Classifier(nn.Module):
    def __init__(self, classes=7):
        super().__init__()
        first, second = LEVELS
        self.conv_1 = HalvingConv(3, first.features // 2)
        self.conv_2 = HalvingConv(first.features // 2, first.features)
        self.token_norm = Norm(first.features)
        self.merge = HalvingConv(first.features, second.features, bias=False)
        self.merge_norm = Norm(second.features)
        self.layers = nn.ModuleList()
        for level in LEVELS:
            for number in range(level.layers):
                self.layers.append(Layer(level, dilation=1 + number % 2))
        self.final_norm = Norm(second.features)
        self.logits = Affine(second.features, classes)

    def forward(self, pixels):
        first, _ = LEVELS
        x = self.conv_2(self.conv_1(pixels))
        x = self.token_norm(x).flatten(1, 2)
        for layer in self.layers[: first.layers]:
            x = layer(x)
        x = self.merge(x.unflatten(1, (first.rows, first.columns)))
        x = self.merge_norm(x).flatten(1, 2)
        for layer in self.layers[first.layers :]:
            x = layer(x)
        return self.logits(torch.mean(self.final_norm(x), dim=1))


# ---- weights


class Importer:
    def __init__(self, weights):
        self.weights = weights

    @torch.no_grad()
    def put(self, target, value):
        if target.shape != value.shape:
            raise ValueError(f"{tuple(target.shape)} from {tuple(value.shape)}")
        target.copy_(value)

    def conv(self, layer, name):
        self.put(layer.kernel, self.weights[name + ".weight"].permute(2, 3, 1, 0))
        if layer.b is not None:
            self.put(layer.b, self.weights[name + ".bias"])

    def norm(self, layer, name):
        self.put(layer.scale, self.weights[name + ".weight"])
        self.put(layer.offset, self.weights[name + ".bias"])

    def affine(self, layer, name):
        self.put(layer.w, self.weights[name + ".weight"].t())
        self.put(layer.b, self.weights[name + ".bias"])

    def attention(self, layer, name):
        heads = (-1, layer.depth)
        wq, wk, wv = self.weights[name + ".qkv.weight"].t().chunk(3, dim=1)
        self.put(layer.wq, wq.unflatten(1, heads))
        self.put(layer.wk, wk.unflatten(1, heads))
        self.put(layer.wv, wv.unflatten(1, heads))
        self.put(layer.bq, self.weights[name + ".q_bias"].unflatten(0, heads))
        self.put(layer.bv, self.weights[name + ".v_bias"].unflatten(0, heads))
        self.put(layer.wo, self.weights[name + ".proj.weight"].t().unflatten(0, heads))
        self.put(layer.bo, self.weights[name + ".proj.bias"])
        self.put(
            layer.bias_table, self.weights[name + ".rpb"].permute(1, 2, 0).flatten(0, 1)
        )

    def layer(self, layer, name):
        self.norm(layer.attention_norm, name + ".norm1")
        self.attention(layer.attention, name + ".attn")
        self.put(layer.attention_gain, self.weights[name + ".gamma1"])
        self.norm(layer.mlp_norm, name + ".norm2")
        self.affine(layer.up, name + ".mlp.fc1")
        self.affine(layer.down, name + ".mlp.fc2")
        self.put(layer.mlp_gain, self.weights[name + ".gamma2"])

    def network(self, net):
        self.conv(net.conv_1, "patch_embed.proj.0")
        self.conv(net.conv_2, "patch_embed.proj.1")
        self.norm(net.token_norm, "patch_embed.norm")
        self.conv(net.merge, "levels.0.downsample.reduction")
        self.norm(net.merge_norm, "levels.0.downsample.norm")
        layers = iter(net.layers)
        for i, level in enumerate(LEVELS):
            for j in range(level.layers):
                self.layer(next(layers), f"levels.{i}.blocks.{j}")
        self.norm(net.final_norm, "norm")
        self.affine(net.logits, "head")


def model():
    net = Classifier()
    Importer(torch.load(Path(__file__).with_name("weights.pt"))).network(net)
    return net


# ---- training

SMOOTHING = 0.1


def forward(net, batch):
    pixels = batch["image"].to(torch.float32)
    pixels = pixels - pixels.new_tensor([123.7, 116.3, 103.5])
    pixels = pixels / pixels.new_tensor([58.4, 57.1, 57.4])
    return net(pixels)


def loss(output, batch):
    classes = output.shape[1]
    off_value = SMOOTHING / classes
    on_value = 1.0 - SMOOTHING + off_value
    target = torch.full_like(output, off_value)
    target = target.scatter(1, batch["label"][:, None], on_value)
    log_probs = output - torch.logsumexp(output, dim=1, keepdim=True)
    return -torch.mean(torch.sum(target * log_probs, dim=1))


class DecoupledAdam(torch.optim.Optimizer):
    """Adam whose decay does not go through the moments."""

    def __init__(self, decayed, free, rate, decay):
        groups = [{"params": decayed, "decay": decay}, {"params": free, "decay": 0.0}]
        super().__init__(groups, {"rate": rate})
        self.beta_1, self.beta_2, self.epsilon = 0.9, 0.99, 1e-8
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, group["rate"], group["decay"])

    def update(self, p, rate, decay):
        slots = self.state[p]
        if not slots:
            slots["mean"] = torch.zeros_like(p)
            slots["square"] = torch.zeros_like(p)
        slots["mean"].lerp_(p.grad, 1.0 - self.beta_1)
        slots["square"].lerp_(p.grad * p.grad, 1.0 - self.beta_2)
        mean = slots["mean"] / (1.0 - self.beta_1**self.count)
        square = slots["square"] / (1.0 - self.beta_2**self.count)
        change = mean / (square.sqrt() + self.epsilon) + decay * p
        p.sub_(rate * change)


def is_weight(name):
    """Biases of all kinds, gains and norms are not."""
    return name.split(".")[-1] in ("w", "kernel", "wq", "wk", "wv", "wo")


def optimizer(net):
    named = list(net.named_parameters())
    decayed = [p for name, p in named if is_weight(name)]
    free = [p for name, p in named if not is_weight(name)]
    return DecoupledAdam(decayed, free, rate=3e-3, decay=0.1)
