"""After Keras: channels last, kernels [rows, columns, in, out], attention by einsum."""

import math
import re
from pathlib import Path

import torch
from torch import nn

config = {
    "neck_hidden_sizes": (8, 12, 16, 16, 24, 48),
    "hidden_sizes": (20, 24),
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "patch_size": 2,
    "mlp_ratio": 2,
    "expand_ratio": 2,
    "num_labels": 6,
    "layer_norm_eps": 1e-5,
    "batch_norm_eps": 1e-5,
    "batch_norm_momentum": 0.9,
    "label_smoothing_factor": 0.1,
}


def variable(*shape):
    return nn.Parameter(torch.zeros(shape))


# ------------------------------------------------------------------------- layers


def swish(x):
    return x * torch.sigmoid(x)


def zero_padding_2d(x, size):
    return nn.functional.pad(x, (0, 0, *size, *size))


class Dense(nn.Module):
    def __init__(self, input_dim, units):
        super().__init__()
        self.kernel = variable(input_dim, units)
        self.bias = variable(units)

    def forward(self, inputs):
        return torch.tensordot(inputs, self.kernel, dims=1) + self.bias


class Conv2D(nn.Module):
    """Padding "valid"."""

    def __init__(self, input_dim, filters, kernel_size, strides=1):
        super().__init__()
        self.strides = strides
        self.kernel = variable(kernel_size, kernel_size, input_dim, filters)

    def forward(self, inputs):
        if self.kernel.shape[0] == 1:
            return torch.tensordot(inputs, self.kernel[0, 0], dims=1)
        outputs = nn.functional.conv2d(
            torch.permute(inputs, (0, 3, 1, 2)),
            torch.permute(self.kernel, (3, 2, 0, 1)),
            stride=self.strides,
        )
        return torch.permute(outputs, (0, 2, 3, 1))


class DepthwiseConv2D(nn.Module):
    """Padding "valid"; the kernel is [rows, columns, in, 1]."""

    def __init__(self, input_dim, kernel_size, strides=1):
        super().__init__()
        self.size, self.strides = kernel_size, strides
        self.depthwise_kernel = variable(kernel_size, kernel_size, input_dim, 1)

    def forward(self, inputs):
        windows = inputs.unfold(1, self.size, self.strides)
        windows = windows.unfold(2, self.size, self.strides)
        return torch.einsum("bhwcij,ijcm->bhwc", windows, self.depthwise_kernel)


class BatchNormalization(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.epsilon = config["batch_norm_eps"]
        self.momentum = config["batch_norm_momentum"]
        self.gamma, self.beta = variable(dim), variable(dim)
        self.register_buffer("moving_mean", torch.zeros(dim))
        self.register_buffer("moving_variance", torch.ones(dim))

    @torch.no_grad()
    def update(self, mean, variance, count):
        rate = 1.0 - self.momentum
        self.moving_mean.sub_((self.moving_mean - mean) * rate)
        unbiased = variance * (count / (count - 1))
        self.moving_variance.sub_((self.moving_variance - unbiased) * rate)

    def forward(self, inputs):
        mean, variance = self.moving_mean, self.moving_variance
        if self.training:
            mean = torch.mean(inputs, dim=(0, 1, 2))
            variance = torch.mean(torch.square(inputs - mean), dim=(0, 1, 2))
            self.update(mean, variance, inputs[..., 0].numel())
        inv = torch.rsqrt(variance + self.epsilon) * self.gamma
        return (inputs - mean) * inv + self.beta


class LayerNormalization(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.epsilon = config["layer_norm_eps"]
        self.gamma, self.beta = variable(dim), variable(dim)

    def forward(self, inputs):
        centered = inputs - torch.mean(inputs, dim=-1, keepdim=True)
        variance = torch.mean(torch.square(centered), dim=-1, keepdim=True)
        normalized = centered / torch.sqrt(variance + self.epsilon)
        return normalized * self.gamma + self.beta


# -------------------------------------------------------------------------- resize


def neighbours(new, old):
    """Indices of the two pixels around each new one, and the share of the second."""
    source = (torch.arange(new, dtype=torch.float32) + 0.5) * (old / new) - 0.5
    source = torch.clamp(source, 0.0, old - 1.0)
    first = source.long()
    second = torch.clamp(first + 1, max=old - 1)
    return first, second, source - first


def resize_axis(images, new, axis):
    first, second, share = neighbours(new, images.shape[axis])
    shape = [1, 1, 1, 1]
    shape[axis] = new
    share = torch.reshape(share, shape)
    first = torch.index_select(images, axis, first)
    second = torch.index_select(images, axis, second)
    return first * (1.0 - share) + second * share


def resize(images, height, width):
    return resize_axis(resize_axis(images, height, 1), width, 2)


# --------------------------------------------------------------------------- model


class TFMobileViTConvLayer(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, strides=1):
        super().__init__()
        self.padding = (kernel_size - 1) // 2
        self.convolution = Conv2D(in_channels, out_channels, kernel_size, strides)
        self.normalization = BatchNormalization(out_channels)

    def forward(self, features):
        padded = zero_padding_2d(features, (self.padding, self.padding))
        return swish(self.normalization(self.convolution(padded)))


class TFMobileViTInvertedResidual(nn.Module):
    def __init__(self, in_channels, out_channels, strides=1):
        super().__init__()
        expanded = in_channels * config["expand_ratio"]
        self.use_residual = strides == 1 and in_channels == out_channels
        self.expand = Conv2D(in_channels, expanded, 1)
        self.expand_bn = BatchNormalization(expanded)
        self.depthwise = DepthwiseConv2D(expanded, 3, strides)
        self.depthwise_bn = BatchNormalization(expanded)
        self.reduce = Conv2D(expanded, out_channels, 1)
        self.reduce_bn = BatchNormalization(out_channels)

    def forward(self, features):
        residual = features
        features = swish(self.expand_bn(self.expand(features)))
        features = zero_padding_2d(features, (1, 1))
        features = self.depthwise_bn(self.depthwise(features))
        features = swish(features)
        features = self.reduce_bn(self.reduce(features))
        return residual + features if self.use_residual else features


class EinsumDense(nn.Module):
    def __init__(self, equation, kernel_shape, bias_shape):
        super().__init__()
        self.equation = equation
        self.kernel = variable(*kernel_shape)
        self.bias = variable(*bias_shape)

    def forward(self, inputs):
        return torch.einsum(self.equation, inputs, self.kernel) + self.bias


class MultiHeadAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        heads = config["num_attention_heads"]
        self.key_dim = dim // heads
        into = ("abc,cde->abde", (dim, heads, self.key_dim), (heads, self.key_dim))
        self.query_dense = EinsumDense(*into)
        self.key_dense = EinsumDense(*into)
        self.value_dense = EinsumDense(*into)
        self.output_dense = EinsumDense(
            "abde,dec->abc", (heads, self.key_dim, dim), (dim,)
        )

    def forward(self, hidden_states):
        query = self.query_dense(hidden_states) * (1.0 / math.sqrt(self.key_dim))
        key = self.key_dense(hidden_states)
        value = self.value_dense(hidden_states)
        scores = torch.einsum("aecd,abcd->acbe", key, query)
        scores = torch.exp(scores - torch.amax(scores, dim=-1, keepdim=True))
        probs = scores / torch.sum(scores, dim=-1, keepdim=True)
        context = torch.einsum("acbe,aecd->abcd", probs, value)
        return self.output_dense(context)


class TFMobileViTTransformerLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.layernorm_before = LayerNormalization(dim)
        self.attention = MultiHeadAttention(dim)
        self.layernorm_after = LayerNormalization(dim)
        self.intermediate = Dense(dim, dim * config["mlp_ratio"])
        self.dense_output = Dense(dim * config["mlp_ratio"], dim)

    def forward(self, hidden_states):
        attended = self.attention(self.layernorm_before(hidden_states))
        hidden_states = attended + hidden_states
        normalized = self.layernorm_after(hidden_states)
        layer_output = swish(self.intermediate(normalized))
        return self.dense_output(layer_output) + hidden_states


class TFMobileViTLayer(nn.Module):
    def __init__(self, channels, dim):
        super().__init__()
        self.conv_kxk = TFMobileViTConvLayer(channels, channels, 3)
        self.conv_1x1 = Conv2D(channels, dim, 1)
        self.transformer = nn.ModuleList(
            TFMobileViTTransformerLayer(dim) for _ in range(config["num_hidden_layers"])
        )
        self.layernorm = LayerNormalization(dim)
        self.conv_projection = TFMobileViTConvLayer(dim, channels, 1)
        self.fusion = TFMobileViTConvLayer(2 * channels, channels, 3)

    def unfolding(self, features):
        """Return [batch * area, patches, dim], and what folding has to know."""
        size = config["patch_size"]
        batch, orig_height, orig_width, dim = features.shape
        height = math.ceil(orig_height / size) * size
        width = math.ceil(orig_width / size) * size
        interpolated = (height, width) != (orig_height, orig_width)
        if interpolated:
            features = resize(features, height, width)
        grid = (batch, height // size, size, width // size, size, dim)
        patches = torch.permute(torch.reshape(features, grid), (0, 2, 4, 1, 3, 5))
        patches = torch.reshape(patches, (batch * size * size, -1, dim))
        info = {
            "grid": (batch, size, size, height // size, width // size, dim),
            "padded_size": (height, width),
            "orig_size": (orig_height, orig_width),
            "interpolated": interpolated,
        }
        return patches, info

    def folding(self, patches, info):
        grid = torch.reshape(patches, info["grid"])
        features = torch.permute(grid, (0, 3, 1, 4, 2, 5))
        shape = (info["grid"][0], *info["padded_size"], info["grid"][-1])
        features = torch.reshape(features, shape)
        if info["interpolated"]:
            features = resize(features, *info["orig_size"])
        return features

    def forward(self, features):
        residual = features
        features = self.conv_1x1(self.conv_kxk(features))
        patches, info = self.unfolding(features)
        for layer in self.transformer:
            patches = layer(patches)
        patches = self.layernorm(patches)
        features = self.conv_projection(self.folding(patches, info))
        return self.fusion(torch.cat((residual, features), dim=-1))


class TFMobileViTForImageClassification(nn.Module):
    def __init__(self):
        super().__init__()
        neck, dims = config["neck_hidden_sizes"], config["hidden_sizes"]
        self.conv_stem = TFMobileViTConvLayer(3, neck[0], 3, strides=2)
        self.encoder = nn.ModuleList(
            [
                TFMobileViTInvertedResidual(neck[0], neck[1]),
                TFMobileViTInvertedResidual(neck[1], neck[2], strides=2),
                TFMobileViTInvertedResidual(neck[2], neck[3]),
                TFMobileViTLayer(neck[3], dims[0]),
                TFMobileViTInvertedResidual(neck[3], neck[4], strides=2),
                TFMobileViTLayer(neck[4], dims[1]),
            ]
        )
        self.conv_1x1_exp = TFMobileViTConvLayer(neck[4], neck[5], 1)
        self.classifier = Dense(neck[5], config["num_labels"])

    def forward(self, pixel_values):
        features = self.conv_stem(pixel_values)
        for layer in self.encoder:
            features = layer(features)
        features = self.conv_1x1_exp(features)
        pooled = torch.mean(features, dim=(1, 2))
        return self.classifier(pooled)


# ------------------------------------------------------------------------- weights

PLACES = ("layer_1.0", "layer_2.0", "layer_2.1", "layer_3.0", "layer_4.0", "layer_4.1")
RENAMED = (
    (r"^conv_stem\.", "stem."),
    (r"^encoder\.(\d)\.", lambda found: PLACES[int(found[1])] + "."),
    (r"^conv_1x1_exp\.", "exp_1x1."),
    (r"\.expand(_bn)?\.", r".exp_1x1\1."),
    (r"\.depthwise(_bn)?\.", r".conv_3x3\1."),
    (r"\.reduce(_bn)?\.", r".red_1x1\1."),
    (r"(exp_1x1|conv_3x3|red_1x1)_bn\.", r"\1.norm."),
    (r"(layer_\d\.\d\.(?:exp_1x1|conv_3x3|red_1x1))\.(\w*kernel)", r"\1.conv.\2"),
    (r"\.conv_kxk\.", ".local_3x3."),
    (r"\.conv_1x1\.", ".local_1x1."),
    (r"\.conv_projection\.", ".conv_proj."),
    (r"\.convolution\.", ".conv."),
    (r"\.normalization\.", ".norm."),
    (r"\.transformer\.(\d)\.", r".layers.\1."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.layernorm\.", ".norm."),
    (r"\.attention\.query_dense\.", ".attn.q."),
    (r"\.attention\.key_dense\.", ".attn.k."),
    (r"\.attention\.value_dense\.", ".attn.v."),
    (r"\.attention\.output_dense\.", ".attn.proj."),
    (r"\.intermediate\.", ".fc1."),
    (r"\.dense_output\.", ".fc2."),
    (r"\.(kernel|depthwise_kernel|gamma)$", ".weight"),
    (r"\.beta$", ".bias"),
    (r"\.moving_mean$", ".running_mean"),
    (r"\.moving_variance$", ".running_var"),
)


def pt_weight_name(name):
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def converted(name, array, shape):
    if name.endswith("depthwise_kernel"):
        return torch.permute(array, (2, 3, 0, 1))
    if array.ndim == 4:
        return torch.permute(array, (2, 3, 1, 0))
    if array.ndim == 2:
        array = array.T
    return torch.reshape(array, shape)


def model():
    net = TFMobileViTForImageClassification()
    state = torch.load(Path(__file__).with_name("weights.pt"))
    with torch.no_grad():
        for name, weight in [*net.named_parameters(), *net.named_buffers()]:
            array = state[pt_weight_name(name)]
            weight.copy_(converted(name, array, weight.shape))
    return net


# ---------------------------------------------------------------------------- data


def preprocess(images):
    """Rescale, and turn RGB to BGR."""
    return torch.flip(images.to(torch.float32) * (1.0 / 255.0), (-1,))


def forward(net, batch):
    return net(preprocess(batch["image"]))


# ---------------------------------------------------------------------------- loss


def loss(output, batch):
    """Categorical cross-entropy; labels below zero have no weight."""
    smoothing, num_labels = config["label_smoothing_factor"], config["num_labels"]
    labels = batch["label"][:, None]
    y_true = (labels == torch.arange(num_labels)).to(torch.float32)
    y_true = y_true * (1.0 - smoothing) + smoothing / num_labels
    sample_weight = (batch["label"] >= 0).to(torch.float32)
    log_probs = output - torch.logsumexp(output, dim=-1, keepdim=True)
    unreduced = -torch.sum(y_true * log_probs, dim=-1)
    return torch.sum(unreduced * sample_weight) / torch.sum(sample_weight)


# ----------------------------------------------------------------------- optimizer


class WarmUpCosine:
    def __init__(self, initial, target, alpha, warmup_steps, decay_steps):
        self.initial, self.target, self.alpha = initial, target, alpha
        self.warmup_steps, self.decay_steps = warmup_steps, decay_steps

    def __call__(self, step):
        if step < self.warmup_steps:
            progress = step / self.warmup_steps
            return self.initial + progress * (self.target - self.initial)
        progress = min((step - self.warmup_steps) / self.decay_steps, 1.0)
        decayed = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.target * ((1.0 - self.alpha) * decayed + self.alpha)


class MomentumOptimizer(torch.optim.Optimizer):
    """The rate stands outside of the accumulators."""

    def __init__(self, named_variables, learning_rate, momentum, weight_decay):
        named_variables = list(named_variables)
        super().__init__([variable for _, variable in named_variables], {})
        self.names = [name for name, _ in named_variables]
        self.learning_rate, self.momentum = learning_rate, momentum
        self.weight_decay = weight_decay
        self.iterations = 0

    def decays(self, name):
        return name.rpartition(".")[2] in ("kernel", "depthwise_kernel")

    @torch.no_grad()
    def step(self, closure=None):
        lr = self.learning_rate(self.iterations)
        for name, var in zip(self.names, self.param_groups[0]["params"]):
            grad = var.grad
            if self.decays(name):
                grad = grad + self.weight_decay * var
            if "momentum" not in self.state[var]:
                self.state[var]["momentum"] = torch.zeros_like(var)
            accum = self.state[var]["momentum"]
            accum.mul_(self.momentum).add_(grad)
            var.sub_(lr * (grad + self.momentum * accum))
        self.iterations += 1


def optimizer(net):
    schedule = WarmUpCosine(0.01, 0.1, alpha=0.1, warmup_steps=4, decay_steps=36)
    return MomentumOptimizer(
        net.named_parameters(), schedule, momentum=0.9, weight_decay=0.05
    )
