"""After MindSpore: cells with construct, primitives made once, Dense kernels [in, out]."""

import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

embed_dims = (12, 20, 33, 40)
num_heads = (1, 2, 3, 5)
hidden_dims = (48, 60, 66, 90)
depths = (1, 2, 2, 1)
kernel_sizes = (7, 3, 3, 3)
strides = (4, 2, 2, 2)
sr_ratios = (4, 1, 2, 1)
pool_sizes = (None, (3, 4), None, None)
table_size = (6, 11)
class_hidden = 72
num_classes = 7


class Cell(nn.Module):
    def forward(self, *inputs):
        return self.construct(*inputs)


def Parameter(*shape):
    return nn.Parameter(torch.zeros(shape))


# --------------------------------------------------------------------- primitives


class BatchMatMul:
    def __init__(self, transpose_b=False):
        self.transpose_b = transpose_b

    def __call__(self, x, y):
        return torch.matmul(x, y.mT if self.transpose_b else y)


class Softmax:
    def __init__(self, axis=-1):
        self.axis = axis

    def __call__(self, x):
        x = torch.exp(x - torch.amax(x, dim=self.axis, keepdim=True).detach())
        return x / torch.sum(x, dim=self.axis, keepdim=True)


class LogSoftmax:
    def __init__(self, axis=-1):
        self.axis = axis

    def __call__(self, x):
        return x - torch.logsumexp(x, dim=self.axis, keepdim=True)


class AdaptiveAvgPool2D:
    def __init__(self, output_size):
        self.output_size = output_size

    def along(self, x, axis, size):
        """The mean of each window; windows overlap where sizes do not divide."""
        length, means = x.shape[axis], []
        for i in range(size):
            begin, end = i * length // size, -(-(i + 1) * length // size)
            window = torch.narrow(x, axis, begin, end - begin)
            means.append(torch.mean(window, dim=axis, keepdim=True))
        return torch.cat(means, dim=axis)

    def __call__(self, x):
        height, width = self.output_size
        return self.along(self.along(x, 2, height), 3, width)


class ResizeBilinear:
    """[channels, height, width]; the centres of pixels are at halves."""

    def __init__(self, size):
        self.size = size

    def along(self, x, axis, size):
        length = x.shape[axis]
        place = (torch.arange(size) + 0.5) * length / size - 0.5
        place = torch.clamp(place, 0.0, length - 1.0)
        lower = torch.floor(place).long()
        upper = torch.clamp(lower + 1, max=length - 1)
        lerp = (place - lower).reshape(-1, *[1] * (2 - axis))
        below = torch.index_select(x, axis, lower)
        above = torch.index_select(x, axis, upper)
        return below + (above - below) * lerp

    def __call__(self, x):
        height, width = self.size
        return self.along(self.along(x, 1, height), 2, width)


class OneHot:
    def __call__(self, indices, depth, on_value, off_value):
        hit = indices[..., None] == torch.arange(depth)
        return torch.where(hit, on_value, off_value)


# -------------------------------------------------------------------------- cells


class Dense(Cell):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.weight = Parameter(in_channels, out_channels)
        self.bias = Parameter(out_channels)

    def construct(self, x):
        y = torch.addmm(self.bias, x.flatten(0, -2), self.weight)
        return y.reshape(*x.shape[:-1], -1)


class Conv2d(Cell):
    def __init__(self, inp, out, kernel_size, stride=1, pad_mode="same", group=1):
        super().__init__()
        self.kernel_size, self.stride = kernel_size, stride
        self.pad_mode, self.group = pad_mode, group
        self.weight = Parameter(out, inp // group, kernel_size, kernel_size)
        self.bias = Parameter(out)

    def pads(self, size):
        total = (-(-size // self.stride) - 1) * self.stride + self.kernel_size - size
        before = max(total, 0) // 2
        return before, max(total, 0) - before

    def construct(self, x):
        if self.pad_mode == "same":
            x = F.pad(x, (*self.pads(x.shape[3]), *self.pads(x.shape[2])))
        x = torch.conv2d(x, self.weight, None, self.stride, groups=self.group)
        return x + self.bias.reshape(1, -1, 1, 1)


class LayerNorm(Cell):
    def __init__(self, channels, begin_norm_axis=-1, epsilon=1e-7):
        super().__init__()
        self.begin_norm_axis, self.epsilon = begin_norm_axis, epsilon
        self.gamma, self.beta = Parameter(channels), Parameter(channels)

    def construct(self, x):
        axes = tuple(range(self.begin_norm_axis % x.ndim, x.ndim))
        x = x - torch.mean(x, dim=axes, keepdim=True)
        variance = torch.mean(x * x, dim=axes, keepdim=True)
        return x / torch.sqrt(variance + self.epsilon) * self.gamma + self.beta


class GELU(Cell):
    def construct(self, x):
        return x * (0.5 + 0.5 * torch.erf(x * math.sqrt(0.5)))


class ReLU(Cell):
    def construct(self, x):
        return torch.clamp(x, min=0.0)


def to_map(x, height, width):
    """[batch, places, channels] -> [batch, channels, height, width]."""
    return x.permute(0, 2, 1).reshape(x.shape[0], x.shape[2], height, width)


def to_sequence(x):
    return x.reshape(x.shape[0], x.shape[1], -1).permute(0, 2, 1)


class PatchEmbedding(Cell):
    def __init__(self, inp, dim, kernel_size, stride):
        super().__init__()
        self.projection = Conv2d(inp, dim, kernel_size, stride)
        self.layernorm = LayerNorm(dim, epsilon=1e-5)

    def construct(self, x):
        x = self.projection(x)
        height, width = x.shape[2:]
        return self.layernorm(to_sequence(x)), height, width


class MultiHeadAttention(Cell):
    """Rows of keys and of values stand side by side in each head."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.scale_factor = math.sqrt(math.sqrt(dim // heads))
        self.query = Dense(dim, dim)
        self.key_value = Dense(dim, 2 * dim)
        self.projection = Dense(dim, dim)
        self.score = BatchMatMul(transpose_b=True)
        self.context = BatchMatMul()
        self.softmax = Softmax()

    def split_heads(self, x):
        return x.reshape(x.shape[0], x.shape[1], self.heads, -1).permute(0, 2, 1, 3)

    def merge_heads(self, x):
        batch, _, places, _ = x.shape
        return x.permute(0, 2, 1, 3).reshape(batch, places, -1)

    def construct(self, x, memory):
        query = self.split_heads(self.query(x))
        key_value = self.split_heads(self.key_value(memory))
        key, value = torch.split(key_value, query.shape[-1], dim=-1)
        score = self.score(query / self.scale_factor, key / self.scale_factor)
        weights = self.softmax(score)
        return self.projection(self.merge_heads(self.context(weights, value)))


class StridedReduction(Cell):
    def __init__(self, dim, ratio):
        super().__init__()
        self.conv = Conv2d(dim, dim, ratio, ratio, pad_mode="valid")
        self.layernorm = LayerNorm(dim, epsilon=1e-5)

    def construct(self, x, height, width):
        x = self.conv(to_map(x, height, width))
        return self.layernorm(to_sequence(x))


class PooledReduction(Cell):
    def __init__(self, dim, pool_size):
        super().__init__()
        self.pool = AdaptiveAvgPool2D(pool_size)
        self.conv = Conv2d(dim, dim, 1)
        self.layernorm = LayerNorm(dim, epsilon=1e-5)
        self.gelu = GELU()

    def construct(self, x, height, width):
        x = self.conv(self.pool(to_map(x, height, width)))
        return self.gelu(self.layernorm(to_sequence(x)))


class MixFeedForward(Cell):
    def __init__(self, dim, hidden, linear):
        super().__init__()
        self.mapping = Dense(dim, hidden)
        self.relu = ReLU() if linear else None
        self.depthwise = Conv2d(hidden, hidden, 3, group=hidden)
        self.gelu = GELU()
        self.projection = Dense(hidden, dim)

    def construct(self, x, height, width):
        x = self.mapping(x)
        if self.relu is not None:
            x = self.relu(x)
        x = to_sequence(self.depthwise(to_map(x, height, width)))
        return self.projection(self.gelu(x))


class EncoderLayer(Cell):
    def __init__(self, i):
        super().__init__()
        dim = embed_dims[i]
        self.layernorm1 = LayerNorm(dim, epsilon=1e-6)
        self.attention = MultiHeadAttention(dim, num_heads[i])
        self.reduction: Cell | None = None
        if pool_sizes[i] is not None:
            self.reduction = PooledReduction(dim, pool_sizes[i])
        elif sr_ratios[i] > 1:
            self.reduction = StridedReduction(dim, sr_ratios[i])
        self.layernorm2 = LayerNorm(dim, epsilon=1e-6)
        self.output = MixFeedForward(dim, hidden_dims[i], pool_sizes[i] is not None)

    def construct(self, x, height, width):
        residual = x
        x = self.layernorm1(x)
        memory = x
        if self.reduction is not None:
            memory = self.reduction(x, height, width)
        x = residual + self.attention(x, memory)
        residual = x
        x = self.output(self.layernorm2(x), height, width)
        return residual + x


class Stage(Cell):
    def __init__(self, i):
        super().__init__()
        inp, dim = (3, *embed_dims)[i], embed_dims[i]
        self.embedding = PatchEmbedding(inp, dim, kernel_sizes[i], strides[i])
        self.position_table = Parameter(dim, *table_size) if i == 0 else None
        self.layers = nn.ModuleList([EncoderLayer(i) for _ in range(depths[i])])
        self.layernorm = LayerNorm(dim, epsilon=1e-6)

    def construct(self, x):
        x, height, width = self.embedding(x)
        if self.position_table is not None:
            table = ResizeBilinear((height, width))(self.position_table)
            x = x + to_sequence(table[None])
        for layer in self.layers:
            x = layer(x, height, width)
        return to_map(self.layernorm(x), height, width)


class ClassAttention(Cell):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.class_token = Parameter(1, 1, dim)
        self.layernorm1 = LayerNorm(dim, epsilon=1e-6)
        self.attention = MultiHeadAttention(dim, heads)
        self.gamma1 = Parameter(dim)
        self.layernorm2 = LayerNorm(dim, epsilon=1e-6)
        self.mapping = Dense(dim, hidden)
        self.gelu = GELU()
        self.projection = Dense(hidden, dim)
        self.gamma2 = Parameter(dim)

    def construct(self, x):
        token = torch.tile(self.class_token, (x.shape[0], 1, 1))
        normed = self.layernorm1(token)
        memory = torch.cat((normed, self.layernorm1(x)), dim=1)
        token = token + self.gamma1 * self.attention(normed, memory)
        x = self.mapping(self.layernorm2(token))
        token = token + self.gamma2 * self.projection(self.gelu(x))
        return token[:, 0]


class PyramidVisionTransformer(Cell):
    def __init__(self):
        super().__init__()
        dim = embed_dims[-1]
        self.stages = nn.ModuleList([Stage(i) for i in range(len(embed_dims))])
        self.class_attention = ClassAttention(dim, num_heads[-1], class_hidden)
        self.classifier = Dense(dim, num_classes)
        self.auxiliary = Dense(embed_dims[-2], num_classes)

    def construct(self, x):
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        logits = self.classifier(self.class_attention(to_sequence(x)))
        pooled = torch.mean(features[-2], dim=(2, 3))
        return logits, self.auxiliary(pooled)


# --------------------------------------------------------------------- checkpoint


def load_pair(cell, src, name):
    """Weight and bias; a norm has gamma and beta."""
    weight, bias = src[name + ".weight"], src[name + ".bias"]
    if isinstance(cell, LayerNorm):
        cell.gamma.copy_(weight)
        cell.beta.copy_(bias)
        return
    cell.weight.copy_(weight.T if isinstance(cell, Dense) else weight)
    cell.bias.copy_(bias)


def sort_by_heads(rows, heads):
    """Keys of all heads, values of all heads -> keys and values of each head."""
    return rows.unflatten(0, (2, heads, -1)).transpose(0, 1).flatten(0, 2)


def load_attention(cell, src, prefix):
    load_pair(cell.query, src, prefix + "q")
    weight = sort_by_heads(src[prefix + "kv.weight"], cell.heads)
    cell.key_value.weight.copy_(weight.T)
    bias = sort_by_heads(src[prefix + "kv.bias"], cell.heads)
    cell.key_value.bias.copy_(bias)
    cell.projection.weight.copy_(src[prefix + "proj.weight"].T)
    cell.projection.bias.copy_(src[prefix + "proj.bias"])


def load_layer(cell, src, prefix):
    load_pair(cell.layernorm1, src, prefix + "norm1")
    load_attention(cell.attention, src, prefix + "attn.")
    if cell.reduction is not None:
        load_pair(cell.reduction.conv, src, prefix + "attn.sr")
        load_pair(cell.reduction.layernorm, src, prefix + "attn.norm")
    load_pair(cell.layernorm2, src, prefix + "norm2")
    load_pair(cell.output.mapping, src, prefix + "mlp.fc1")
    load_pair(cell.output.depthwise, src, prefix + "mlp.dwconv")
    load_pair(cell.output.projection, src, prefix + "mlp.fc2")


def load_stage(cell, src, prefix):
    load_pair(cell.embedding.projection, src, prefix + "patch_embed.proj")
    load_pair(cell.embedding.layernorm, src, prefix + "patch_embed.norm")
    if cell.position_table is not None:
        table = src[prefix + "pos_embed"].reshape(*table_size, -1)
        cell.position_table.copy_(table.permute(2, 0, 1))
    for i, layer in enumerate(cell.layers):
        load_layer(layer, src, f"{prefix}blocks.{i}.")
    load_pair(cell.layernorm, src, prefix + "norm")


def load_class_attention(cell, src, prefix):
    cell.class_token.copy_(src[prefix + "cls_token"])
    load_pair(cell.layernorm1, src, prefix + "norm1")
    load_attention(cell.attention, src, prefix)
    cell.gamma1.copy_(src[prefix + "gamma_1"])
    load_pair(cell.layernorm2, src, prefix + "norm2")
    load_pair(cell.mapping, src, prefix + "fc1")
    load_pair(cell.projection, src, prefix + "fc2")
    cell.gamma2.copy_(src[prefix + "gamma_2"])


@torch.no_grad()
def load_param_into_net(net, src):
    for i, stage in enumerate(net.stages):
        load_stage(stage, src, f"stages.{i}.")
    load_class_attention(net.class_attention, src, "class_attn.")
    load_pair(net.classifier, src, "head")
    load_pair(net.auxiliary, src, "aux_head")


def model():
    net = PyramidVisionTransformer()
    load_param_into_net(net, torch.load(Path(__file__).with_name("weights.pt")))
    return net


# ----------------------------------------------------------------------- training

mean = (123.7, 101.3, 88.5)
std = (58.4, 47.1, 66.4)
smooth_factor = 0.1
aux_factor = 0.4


def normalize(image):
    """As vision.Normalize: one channel after the other."""
    channels = [
        (channel - m) * (1.0 / s)
        for channel, m, s in zip(torch.unbind(image.float(), dim=1), mean, std)
    ]
    return torch.stack(channels, dim=1)


def forward(net, batch):
    logits, aux = net(normalize(batch["image"]))
    return {"logits": logits, "aux": aux}


class CrossEntropySmooth(Cell):
    """One value for each image."""

    def __init__(self):
        super().__init__()
        self.on_value = 1.0 - smooth_factor + smooth_factor / num_classes
        self.off_value = smooth_factor / num_classes
        self.onehot, self.log_softmax = OneHot(), LogSoftmax()

    def construct(self, logits, label):
        label = self.onehot(label, num_classes, self.on_value, self.off_value)
        return -torch.sum(label * self.log_softmax(logits), dim=-1)


class CrossEntropyMixed(Cell):
    def __init__(self):
        super().__init__()
        self.ce = CrossEntropySmooth()

    def construct(self, logits, label, share):
        first = self.ce(logits, label[:, 0])
        second = self.ce(logits, label[:, 1])
        return torch.mean(second + share * (first - second))


def loss(output, batch):
    ce = CrossEntropyMixed()
    main = ce(output["logits"], batch["label"], batch["share"])
    aux = ce(output["aux"], batch["label"], batch["share"])
    return main + aux_factor * aux


class AdamWeightDecay(torch.optim.Optimizer):
    """Each group has its decay; the moments are corrected for their start."""

    def __init__(self, params, learning_rate, beta1, beta2, eps):
        super().__init__(params, {"weight_decay": 0.0})
        self.learning_rate, self.eps = learning_rate, eps
        self.beta1, self.beta2 = beta1, beta2
        self.global_step = 0

    def update(self, param, decay):
        slots, grad = self.state[param], param.grad
        m = slots.setdefault("m", torch.zeros_like(param))
        v = slots.setdefault("v", torch.zeros_like(param))
        m.lerp_(grad, 1.0 - self.beta1)
        v.lerp_(grad * grad, 1.0 - self.beta2)
        bias1 = 1.0 - self.beta1**self.global_step
        bias2 = math.sqrt(1.0 - self.beta2**self.global_step)
        step = (m / bias1) / (torch.sqrt(v) / bias2 + self.eps)
        param.sub_(self.learning_rate * (step + decay * param))

    @torch.no_grad()
    def step(self, closure=None):
        self.global_step += 1
        for group in self.param_groups:
            for param in group["params"]:
                self.update(param, group["weight_decay"])


def optimizer(net):
    named = dict(net.named_parameters())
    decayed = [p for name, p in named.items() if name.endswith("weight")]
    others = [p for name, p in named.items() if not name.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
    return AdamWeightDecay(groups, 2e-3, beta1=0.9, beta2=0.98, eps=1e-6)
