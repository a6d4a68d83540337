"""After Keras: channels last, padding "same", kernels with outputs last, dense layers by einsum.

Letters of the einsums: b picture, i and j place of a query, x and y place of a key or of a
tap, c channels, n heads, d features of a head. Relative places are key minus query.
"""

import functools
import math
from pathlib import Path

import torch
from torch import nn

input_shape = (44, 72, 3)
num_classes = 9
stem_hsize = (8, 12)
hidden_sizes = (16, 20, 24, 40)
num_blocks = (1, 2, 2, 1)
block_types = ("mbconv", "mbconv", "tfm", "tfm")
kernel_sizes = (3, 5)
attention_heads = {24: (3, 10), 40: (4, 9)}
ffn_sizes = {24: 60, 40: 88}
pool_heads, pool_size, pre_logits = 5, 7, 48
total_strides = 32

# -------------------------------------------------------------------------- layers


def weight(*shape):
    return nn.Parameter(torch.zeros(shape))


def same_padding(size, window, strides):
    outputs = math.ceil(size / strides)
    total = max((outputs - 1) * strides + window - size, 0)
    return total // 2, total - total // 2


def extract_patches(images, window, strides, fill=0.0):
    """[b, height, width, c] -> [b, rows, columns, c, window, window]."""
    top, bottom = same_padding(images.shape[1], window, strides)
    left, right = same_padding(images.shape[2], window, strides)
    padding = (0, 0, left, right, top, bottom)
    images = nn.functional.pad(images, padding, value=fill)
    return images.unfold(1, window, strides).unfold(2, window, strides)


def max_pool2d(images, pool_size=3, strides=2):
    patches = extract_patches(images, pool_size, strides, fill=-torch.inf)
    return torch.amax(patches, dim=(4, 5))


def average_pool2d(images, pool_size=2, strides=2):
    patches = extract_patches(images, pool_size, strides)
    inside = extract_patches(torch.ones_like(images), pool_size, strides)
    return torch.sum(patches, dim=(4, 5)) / torch.sum(inside, dim=(4, 5))


def gelu(x, approximate=False):
    if approximate:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3))
        return 0.5 * x * (1.0 + torch.tanh(inner))
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def swish(x):
    return x * torch.sigmoid(x)


class Conv2D(nn.Module):
    """Kernel [height, width, in, out]."""

    def __init__(self, inputs, filters, kernel_size, strides=1, use_bias=True):
        super().__init__()
        self.kernel_size, self.strides = kernel_size, strides
        self.kernel = weight(kernel_size, kernel_size, inputs, filters)
        self.bias = weight(filters) if use_bias else None

    def forward(self, inputs):
        patches = extract_patches(inputs, self.kernel_size, self.strides)
        outputs = torch.einsum("bijcxy,xycd->bijd", patches, self.kernel)
        return outputs if self.bias is None else outputs + self.bias


class DepthwiseConv2D(nn.Module):
    """Kernel [height, width, channels, 1]; no bias."""

    def __init__(self, channels, kernel_size, strides):
        super().__init__()
        self.kernel_size, self.strides = kernel_size, strides
        self.depthwise_kernel = weight(kernel_size, kernel_size, channels, 1)

    def forward(self, inputs):
        patches = extract_patches(inputs, self.kernel_size, self.strides)
        outputs = torch.einsum("bijcxy,xycm->bijcm", patches, self.depthwise_kernel)
        return torch.flatten(outputs, 3)


class EinsumDense(nn.Module):
    def __init__(self, equation, kernel_shape, bias_shape=None):
        super().__init__()
        self.equation = equation
        self.kernel = weight(*kernel_shape)
        self.bias = weight(*bias_shape) if bias_shape else None

    def forward(self, inputs):
        outputs = torch.einsum(self.equation, inputs, self.kernel)
        return outputs if self.bias is None else outputs + self.bias


def dense(inputs, units):
    return EinsumDense("...c,cd->...d", (inputs, units), (units,))


class BatchNormalization(nn.Module):
    def __init__(self, channels, epsilon=1e-3):
        super().__init__()
        self.epsilon = epsilon
        self.gamma, self.beta = weight(channels), weight(channels)

    def forward(self, inputs):
        axes = (0, 1, 2)
        mean = torch.mean(inputs, dim=axes, keepdim=True)
        variance = torch.mean(torch.square(inputs - mean), dim=axes, keepdim=True)
        inv = torch.rsqrt(variance + self.epsilon) * self.gamma
        return inputs * inv + (self.beta - mean * inv)


class LayerNormalization(nn.Module):
    def __init__(self, channels, epsilon=1e-3):
        super().__init__()
        self.epsilon = epsilon
        self.gamma, self.beta = weight(channels), weight(channels)

    def forward(self, inputs):
        mean = torch.mean(inputs, dim=-1, keepdim=True)
        variance = torch.mean(torch.square(inputs - mean), dim=-1, keepdim=True)
        normalized = (inputs - mean) / torch.sqrt(variance + self.epsilon)
        return normalized * self.gamma + self.beta


# -------------------------------------------------------------------------- mbconv


class SqueezeExcite(nn.Module):
    def __init__(self, channels, units):
        super().__init__()
        self.squeeze = dense(channels, units)
        self.excite = dense(units, channels)

    def forward(self, inputs):
        pooled = torch.mean(inputs, dim=(1, 2), keepdim=True)
        gate = torch.sigmoid(self.excite(swish(self.squeeze(pooled))))
        return gate * inputs


class MBConvBlock(nn.Module):
    def __init__(self, inputs, hidden_size, kernel_size, strides):
        super().__init__()
        self.strides = strides
        inner = 4 * hidden_size
        self.pre_norm = BatchNormalization(inputs)
        self.expand_conv = Conv2D(inputs, inner, 1, use_bias=False)
        self.expand_norm = BatchNormalization(inner)
        self.depthwise_conv = DepthwiseConv2D(inner, kernel_size, strides)
        self.depthwise_norm = BatchNormalization(inner)
        self.se = SqueezeExcite(inner, inner // 8)
        self.shrink_conv = Conv2D(inner, hidden_size, 1, use_bias=False)
        if strides > 1:
            self.shortcut_conv = Conv2D(inputs, hidden_size, 1)
        self.activation = functools.partial(gelu, approximate=True)

    def shortcut_branch(self, shortcut):
        if self.strides > 1:
            shortcut = self.shortcut_conv(average_pool2d(shortcut))
        return shortcut

    def forward(self, inputs):
        output = self.activation(self.pre_norm(inputs))
        output = self.activation(self.expand_norm(self.expand_conv(output)))
        output = self.activation(self.depthwise_norm(self.depthwise_conv(output)))
        output = self.shrink_conv(self.se(output))
        return self.shortcut_branch(inputs) + output


# ----------------------------------------------------------------------- attention


def generate_lookup_tensor(length):
    """[query, key, relative place], one where the place is key minus query."""
    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    place = key - query + length - 1
    return nn.functional.one_hot(place, 2 * length - 1).float()


def reindex_2d(relative_bias, height, width):
    """[n, 2 * height - 1, 2 * width - 1] -> [n, i, j, x, y]."""
    by_height = generate_lookup_tensor(height)
    by_width = generate_lookup_tensor(width)
    reindexed = torch.einsum("nhw,ixh->nixw", relative_bias, by_height)
    return torch.einsum("nixw,jyw->nijxy", reindexed, by_width)


def softmax_2d(logits):
    """Over the last two axes."""
    top = torch.amax(logits, dim=(-2, -1), keepdim=True).detach()
    exps = torch.exp(logits - top)
    return exps / torch.sum(exps, dim=(-2, -1), keepdim=True)


class Attention(nn.Module):
    def __init__(self, inputs, hidden_size, height, width):
        super().__init__()
        heads, size = attention_heads[hidden_size]
        self.scale = 1.0 / math.sqrt(size)
        to_heads = ("bijc,cnd->bijnd", (inputs, heads, size))
        self.q = EinsumDense(*to_heads)
        self.k = EinsumDense(*to_heads)
        self.v = EinsumDense(*to_heads)
        self.o = EinsumDense(
            "bijnd,ndc->bijc", (heads, size, hidden_size), (hidden_size,)
        )
        self.relative_bias = weight(heads, 2 * height - 1, 2 * width - 1)

    def forward(self, inputs):
        q, k, v = self.q(inputs), self.k(inputs), self.v(inputs)
        q = q * self.scale
        logits = torch.einsum("bijnd,bxynd->bnijxy", q, k)
        logits = logits + reindex_2d(self.relative_bias, *inputs.shape[1:3])
        probs = softmax_2d(logits)
        return self.o(torch.einsum("bnijxy,bxynd->bijnd", probs, v))


class FFN(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.expand_dense = dense(hidden_size, ffn_sizes[hidden_size])
        self.shrink_dense = dense(ffn_sizes[hidden_size], hidden_size)

    def forward(self, inputs):
        return self.shrink_dense(gelu(self.expand_dense(inputs)))


class TransformerBlock(nn.Module):
    def __init__(self, inputs, hidden_size, height, width, strides):
        super().__init__()
        self.strides = strides
        self.attn_layer_norm = LayerNormalization(inputs, epsilon=1e-5)
        self.attention = Attention(inputs, hidden_size, height, width)
        self.ffn_layer_norm = LayerNormalization(hidden_size, epsilon=1e-5)
        self.ffn = FFN(hidden_size)
        if strides > 1:
            self.shortcut_proj = dense(inputs, hidden_size)

    def downsample(self, inputs):
        return max_pool2d(inputs) if self.strides > 1 else inputs

    def forward(self, inputs):
        shortcut = self.downsample(inputs)
        if self.strides > 1:
            shortcut = self.shortcut_proj(shortcut)
        output = self.downsample(self.attn_layer_norm(inputs))
        output = shortcut + self.attention(output)
        return output + self.ffn(self.ffn_layer_norm(output))


class AttentionPooling(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.layer_norm = LayerNormalization(hidden_size, epsilon=1e-5)
        self.query = weight(pool_heads, pool_size)
        to_heads = ("btc,cnd->btnd", (hidden_size, pool_heads, pool_size))
        self.key = EinsumDense(*to_heads)
        self.value = EinsumDense(*to_heads)
        self.output = EinsumDense(
            "bnd,ndc->bc", (pool_heads, pool_size, pre_logits), (pre_logits,)
        )

    def forward(self, inputs, mask):
        tokens = torch.flatten(self.layer_norm(inputs), 1, 2)
        key, value = self.key(tokens), self.value(tokens)
        query = self.query / math.sqrt(pool_size)
        logits = torch.einsum("nd,btnd->bnt", query, key)
        logits = logits - 1e9 * (1.0 - torch.flatten(mask, 1)[:, None, :])
        probs = torch.softmax(logits, dim=-1)
        return self.output(torch.einsum("bnt,btnd->bnd", probs, value))


# --------------------------------------------------------------------------- model


def sequence_mask(lengths, maxlen):
    return (torch.arange(maxlen)[None, :] < lengths[:, None]).float()


def cell_mask(size, height, width):
    """[b, height, width]; a cell counts where its picture has a pixel in it."""
    cells = torch.ceil(size / total_strides)
    rows = sequence_mask(cells[:, 0], height)
    columns = sequence_mask(cells[:, 1], width)
    return torch.einsum("bi,bj->bij", rows, columns)


class CoAtNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem_conv_0 = Conv2D(3, stem_hsize[0], 3, strides=2, use_bias=False)
        self.stem_norm_0 = BatchNormalization(stem_hsize[0])
        self.stem_conv_1 = Conv2D(stem_hsize[0], stem_hsize[1], 3)
        inputs, strides = stem_hsize[1], 2
        for stage, hidden_size in enumerate(hidden_sizes):
            strides *= 2
            height, width = (math.ceil(side / strides) for side in input_shape[:2])
            for index in range(num_blocks[stage]):
                step = 2 if index == 0 else 1
                block: nn.Module
                if block_types[stage] == "mbconv":
                    block = MBConvBlock(inputs, hidden_size, kernel_sizes[stage], step)
                else:
                    block = TransformerBlock(inputs, hidden_size, height, width, step)
                self.add_module(f"block_{stage:02d}_{index:02d}", block)
                inputs = hidden_size
        self.auxiliary_norm = LayerNormalization(hidden_sizes[1], epsilon=1e-5)
        self.auxiliary_dense = dense(hidden_sizes[1], num_classes)
        self.attention_pooling = AttentionPooling(inputs)
        self.predictions = dense(pre_logits, num_classes)

    def stage(self, stage, output):
        for index in range(num_blocks[stage]):
            output = getattr(self, f"block_{stage:02d}_{index:02d}")(output)
        return output

    def classify(self, images, size):
        output = self.stem_norm_0(self.stem_conv_0(images))
        output = self.stem_conv_1(gelu(output, approximate=True))
        output = self.stage(1, self.stage(0, output))
        averaged = torch.mean(output, dim=(1, 2))
        auxiliary = self.auxiliary_dense(self.auxiliary_norm(averaged))
        output = self.stage(3, self.stage(2, output))
        mask = cell_mask(size, *output.shape[1:3])
        pooled = torch.tanh(self.attention_pooling(output, mask))
        return self.predictions(pooled), auxiliary

    def forward(self, batch):
        return loss(forward(self, batch), batch)


# ------------------------------------------------------------------------- weights

LAYERS = {
    "stem1": "stem_conv_0",
    "stem_norm": "stem_norm_0",
    "stem2": "stem_conv_1",
    "aux_norm": "auxiliary_norm",
    "aux_head": "auxiliary_dense",
    "pool.norm": "attention_pooling.layer_norm",
    "head": "predictions",
}
MBCONV = {
    "shortcut": "shortcut_conv",
    "pre_norm": "pre_norm",
    "conv1": "expand_conv",
    "norm1": "expand_norm",
    "conv2": "depthwise_conv",
    "norm2": "depthwise_norm",
    "se.fc1": "se.squeeze",
    "se.fc2": "se.excite",
    "conv3": "shrink_conv",
}
TRANSFORMER = {
    "shortcut": "shortcut_proj",
    "norm1": "attn_layer_norm",
    "norm2": "ffn_layer_norm",
    "fc1": "ffn.expand_dense",
    "fc2": "ffn.shrink_dense",
}


def set_weights(layer, kernel, bias):
    if isinstance(layer, BatchNormalization | LayerNormalization):
        layer.gamma.copy_(kernel)
        layer.beta.copy_(bias)
        return
    if isinstance(layer, DepthwiseConv2D):
        layer.depthwise_kernel.copy_(kernel.permute(2, 3, 0, 1))
        return
    if isinstance(layer, Conv2D):
        layer.kernel.copy_(kernel.permute(2, 3, 1, 0))
    else:
        layer.kernel.copy_(kernel.flatten(1).T)
    if bias is not None:
        layer.bias.copy_(bias)


def set_heads(layer, kernel):
    """[heads * size, inputs] -> [inputs, heads, size]."""
    inputs, heads, size = layer.kernel.shape
    layer.kernel.copy_(kernel.T.reshape(inputs, heads, size))


def set_output(layer, kernel, bias):
    layer.kernel.copy_(kernel.T.reshape(layer.kernel.shape))
    layer.bias.copy_(bias)


def set_attention(layer, state, prefix):
    for part, kernel in zip("qkv", state[prefix + "qkv.weight"].chunk(3)):
        set_heads(getattr(layer, part), kernel)
    set_output(layer.o, state[prefix + "proj.weight"], state[prefix + "proj.bias"])
    table = state[prefix + "rel_pos.table"].T.reshape(layer.relative_bias.shape)
    layer.relative_bias.copy_(torch.flip(table, dims=(1, 2)))


def set_pooling(layer, state):
    layer.query.copy_(state["pool.query"])
    for part, kernel in zip(("key", "value"), state["pool.kv.weight"].chunk(2)):
        set_heads(getattr(layer, part), kernel)
    set_output(layer.output, state["pool.proj.weight"], state["pool.proj.bias"])


@torch.no_grad()
def load_torch_weights(net, state):
    layers = dict(net.named_modules())
    names = dict(LAYERS)
    for stage, kind in enumerate(block_types):
        for index in range(num_blocks[stage]):
            theirs, ours = f"stages.{stage}.{index}", f"block_{stage:02d}_{index:02d}"
            sublayers = MBCONV if kind == "mbconv" else TRANSFORMER
            for old, new in sublayers.items():
                names[f"{theirs}.{old}"] = f"{ours}.{new}"
            if kind == "tfm":
                set_attention(layers[ours].attention, state, f"{theirs}.attn.")
    for theirs, ours in names.items():
        if ours in layers:
            kernel, bias = state[f"{theirs}.weight"], state.get(f"{theirs}.bias")
            set_weights(layers[ours], kernel, bias)
    set_pooling(net.attention_pooling, state)


def model():
    net = CoAtNet()
    load_torch_weights(net, torch.load(Path(__file__).with_name("weights.pt")))
    return net


# ---------------------------------------------------------------------------- data

pixel_mean = (0.485 * 255, 0.456 * 255, 0.406 * 255)
pixel_variance = ((0.229 * 255) ** 2, (0.224 * 255) ** 2, (0.225 * 255) ** 2)


def preprocess(images):
    images = torch.permute(images, (0, 2, 3, 1)).float()
    images = images - torch.tensor(pixel_mean)
    return images / torch.sqrt(torch.tensor(pixel_variance))


def forward(net, batch):
    logits, auxiliary = net.classify(preprocess(batch["image"]), batch["size"])
    return {"logits": logits, "aux": auxiliary}


# ---------------------------------------------------------------------------- loss

label_smoothing = 0.1
temperature = 2.0
auxiliary_weight, distillation_weight = 0.4, 0.3


def log_softmax(x):
    shifted = x - torch.amax(x, dim=-1, keepdim=True).detach()
    return shifted - torch.log(torch.sum(torch.exp(shifted), dim=-1, keepdim=True))


def categorical_crossentropy(labels, logits):
    """Sum over pictures with a label, by their number."""
    sample_weight = (labels >= 0).float()
    y_true = nn.functional.one_hot(torch.clamp(labels, min=0), num_classes).float()
    y_true = y_true * (1.0 - label_smoothing) + label_smoothing / num_classes
    losses = -torch.sum(y_true * log_softmax(logits), dim=-1)
    return torch.sum(losses * sample_weight) / torch.sum(sample_weight)


def kl_divergence(y_true, y_pred, epsilon=1e-7):
    y_true = torch.clamp(y_true, epsilon, 1.0)
    y_pred = torch.clamp(y_pred, epsilon, 1.0)
    return torch.sum(y_true * torch.log(y_true / y_pred), dim=-1)


def distillation_loss(teacher, student):
    teacher = torch.softmax(teacher.detach() / temperature, dim=-1)
    student = torch.softmax(student / temperature, dim=-1)
    return torch.mean(kl_divergence(teacher, student)) * temperature**2


def loss(output, batch):
    labels, logits, auxiliary = batch["label"], output["logits"], output["aux"]
    total = categorical_crossentropy(labels, logits)
    total = total + auxiliary_weight * categorical_crossentropy(labels, auxiliary)
    return total + distillation_weight * distillation_loss(logits, auxiliary)


class AdamW(torch.optim.Optimizer):
    """With exclude_from_weight_decay, and the bias correction in the rate."""

    def __init__(self, named, learning_rate, weight_decay, beta_1, beta_2, epsilon):
        self.names = {p: name for name, p in named}
        super().__init__(list(self.names), {})
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.iterations = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.iterations += 1
        correction_1 = 1.0 - self.beta_1**self.iterations
        correction_2 = math.sqrt(1.0 - self.beta_2**self.iterations)
        alpha = self.learning_rate * correction_2 / correction_1
        for variable, name in self.names.items():
            slots = self.state[variable]
            if not slots:
                slots["m"] = torch.zeros_like(variable)
                slots["v"] = torch.zeros_like(variable)
            gradient, m, v = variable.grad, slots["m"], slots["v"]
            if name.endswith("kernel"):
                variable.sub_(variable * self.weight_decay * self.learning_rate)
            m.add_((gradient - m) * (1.0 - self.beta_1))
            v.add_((torch.square(gradient) - v) * (1.0 - self.beta_2))
            variable.sub_(m * alpha / (torch.sqrt(v) + self.epsilon * correction_2))


def optimizer(net):
    return AdamW(
        net.named_parameters(),
        learning_rate=2e-3,
        weight_decay=0.05,
        beta_1=0.9,
        beta_2=0.95,
        epsilon=1e-6,
    )
