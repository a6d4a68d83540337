"""After Keras: layers with kernels, pictures channels last, a checkpoint read by names."""

import math
from pathlib import Path

import torch
from torch import nn

CONFIG = {
    "filters": 12,
    "num_heads": (2, 3),
    "expansion": 2.66,
    "epsilon": 1e-5,
    "divisor": 4,
    "gradient_clip": 1.0,
    "learning_rate": 1e-3,
    "minimum_learning_rate": 1e-5,
    "decay_steps": 8,
    "weight_decay": 0.1,
}


# ---------------------------------------------------------------------- layers


def weight(*shape):
    return nn.Parameter(torch.zeros(shape))


class PointwiseConv2D(nn.Module):
    def __init__(self, inputs, filters):
        super().__init__()
        self.kernel = weight(inputs, filters)
        self.bias = weight(filters)

    def call(self, x):
        return torch.tensordot(x, self.kernel, dims=([3], [0])) + self.bias

    forward = call


class Conv2D(nn.Module):
    """Kernel [3, 3, in, out]; same padding."""

    def __init__(self, inputs, filters, use_bias=True):
        super().__init__()
        self.kernel = weight(3, 3, inputs, filters)
        self.bias = weight(filters) if use_bias else None

    def call(self, x):
        nchw, oihw = x.permute(0, 3, 1, 2), self.kernel.permute(3, 2, 0, 1)
        y = nn.functional.conv2d(nchw, oihw, padding=1).permute(0, 2, 3, 1)
        if self.bias is not None:
            y = y + self.bias
        return y

    forward = call


class DepthwiseConv2D(nn.Module):
    """Kernel [3, 3, channels, 1]; same padding."""

    def __init__(self, channels):
        super().__init__()
        self.channels = channels
        self.depthwise_kernel = weight(3, 3, channels, 1)
        self.bias = weight(channels)

    def call(self, x):
        nchw, kernel = x.permute(0, 3, 1, 2), self.depthwise_kernel.permute(2, 3, 0, 1)
        y = nn.functional.conv2d(nchw, kernel, padding=1, groups=self.channels)
        return y.permute(0, 2, 3, 1) + self.bias

    forward = call


class ChannelNormalization(nn.Module):
    """Over the last axis. Without beta the mean stays in."""

    def __init__(self, channels, center):
        super().__init__()
        self.center = center
        self.gamma = weight(channels)
        if center:
            self.beta = weight(channels)

    def call(self, x):
        mean = x.mean(dim=-1, keepdim=True)
        centred = x - mean
        variance = (centred * centred).mean(dim=-1, keepdim=True)
        stddev = torch.sqrt(variance + CONFIG["epsilon"])
        if self.center:
            return centred / stddev * self.gamma + self.beta
        return x / stddev * self.gamma

    forward = call


def l2_normalize(x, axis, epsilon=1e-12):
    square_sum = torch.square(x).sum(dim=axis, keepdim=True)
    return x * torch.rsqrt(square_sum.clamp(min=epsilon))


def softmax(x, axis=-1):
    e = torch.exp(x - x.amax(dim=axis, keepdim=True).detach())
    return e / e.sum(dim=axis, keepdim=True)


def gelu(x):
    """x times the normal distribution function."""
    return x * torch.special.ndtr(x)


def space_to_depth(x, size=2):
    """Channels are the last to change: place in the block first."""
    n, h, w, c = x.shape
    x = x.view(n, h // size, size, w // size, size, c).transpose(2, 3)
    return x.reshape(n, h // size, w // size, size * size * c)


def depth_to_space(x, size=2):
    n, h, w, c = x.shape
    c = c // (size * size)
    x = x.view(n, h, w, size, size, c).transpose(2, 3)
    return x.reshape(n, h * size, w * size, c)


class TransposedAttention(nn.Module):
    def __init__(self, channels, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query = PointwiseConv2D(channels, channels)
        self.query_depthwise = DepthwiseConv2D(channels)
        self.key = PointwiseConv2D(channels, channels)
        self.key_depthwise = DepthwiseConv2D(channels)
        self.value = PointwiseConv2D(channels, channels)
        self.value_depthwise = DepthwiseConv2D(channels)
        self.projection = PointwiseConv2D(channels, channels)
        self.alpha = weight(num_heads)

    def heads_first(self, x):
        """[n, h, w, channels] -> [n, heads, channels of a head, h * w]"""
        n, h, w, c = x.shape
        x = x.reshape(n, h * w, self.num_heads, c // self.num_heads)
        return x.permute(0, 2, 3, 1)

    def call(self, x):
        q = self.heads_first(self.query_depthwise(self.query(x)))
        k = self.heads_first(self.key_depthwise(self.key(x)))
        v = self.heads_first(self.value_depthwise(self.value(x)))
        q = l2_normalize(q, axis=-1)
        k = l2_normalize(k, axis=-1)
        similarity = torch.matmul(q, k.transpose(2, 3))
        similarity = self.alpha.view(1, -1, 1, 1) * similarity
        attended = torch.matmul(softmax(similarity, axis=-1), v)
        attended = attended.permute(0, 3, 1, 2).reshape(x.shape)
        return self.projection(attended)

    forward = call


class GatedFeedForward(nn.Module):
    def __init__(self, channels):
        super().__init__()
        hidden = int(channels * CONFIG["expansion"])
        self.expand = PointwiseConv2D(channels, 2 * hidden)
        self.depthwise = DepthwiseConv2D(2 * hidden)
        self.contract = PointwiseConv2D(hidden, channels)

    def call(self, x):
        x = self.depthwise(self.expand(x))
        gate, content = torch.split(x, x.shape[-1] // 2, dim=-1)
        return self.contract(gelu(gate) * content)

    forward = call


class RestormerBlock(nn.Module):
    def __init__(self, channels, num_heads, center):
        super().__init__()
        self.attention_norm = ChannelNormalization(channels, center)
        self.attention = TransposedAttention(channels, num_heads)
        self.feed_forward_norm = ChannelNormalization(channels, center)
        self.feed_forward = GatedFeedForward(channels)

    def call(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))

    forward = call


class RestormerModel(nn.Module):
    def __init__(self):
        super().__init__()
        filters, heads = CONFIG["filters"], CONFIG["num_heads"]
        self.embedding = Conv2D(3, filters, use_bias=False)
        self.encoder = RestormerBlock(filters, heads[0], center=True)
        self.downsample = Conv2D(filters, filters // 2, use_bias=False)
        self.middle = RestormerBlock(2 * filters, heads[1], center=True)
        self.upsample = Conv2D(2 * filters, 4 * filters, use_bias=False)
        self.reduction = PointwiseConv2D(2 * filters, filters)
        self.decoder = RestormerBlock(filters, heads[0], center=False)
        self.to_rgb = Conv2D(filters, 3)
        order = torch.arange(2 * filters).reshape(4, -1).T.flatten()
        self.register_buffer("depth_order", order)

    def call(self, inputs):
        shallow = self.encoder(self.embedding(inputs))
        x = space_to_depth(self.downsample(shallow))
        x = self.middle(x.index_select(-1, self.depth_order))
        x = depth_to_space(self.upsample(x))
        x = self.reduction(torch.concat((x, shallow), dim=-1))
        residual = self.to_rgb(self.decoder(x))
        return inputs + residual

    forward = call


# ------------------------------------------------------------------ checkpoint

STAGES = {
    "embedding": "patch_embed.proj",
    "encoder": "encoder_level1",
    "downsample": "down1_2.body.0",
    "middle": "latent",
    "upsample": "up2_1.body.0",
    "reduction": "reduce_chan_level1",
    "decoder": "decoder_level1",
    "to_rgb": "output",
}
LAYERS = {
    "attention_norm": "norm1.body",
    "feed_forward_norm": "norm2.body",
    "attention.projection": "attn.project_out",
    "feed_forward.expand": "ffn.project_in",
    "feed_forward.depthwise": "ffn.dwconv",
    "feed_forward.contract": "ffn.project_out",
}
PARTS = ("query", "key", "value")


def part(array, index):
    """One of query, key and value."""
    return torch.chunk(array, 3, dim=0)[index]


def assign(layer, weight, bias=None):
    """Turn a kernel of PyTorch as the layer needs it."""
    if isinstance(layer, Conv2D):
        layer.kernel.copy_(weight.permute(2, 3, 1, 0))
    elif isinstance(layer, DepthwiseConv2D):
        layer.depthwise_kernel.copy_(weight.permute(2, 3, 0, 1))
    elif isinstance(layer, PointwiseConv2D):
        layer.kernel.copy_(weight.reshape(weight.shape[:2]).t())
    else:
        layer.gamma.copy_(weight)
    if bias is not None:
        getattr(layer, "beta" if hasattr(layer, "beta") else "bias").copy_(bias)


def load_attention(attention, arrays, prefix):
    attention.alpha.copy_(arrays[prefix + ".temperature"].flatten())
    for index, name in enumerate(PARTS):
        for suffix, source in (("", "qkv"), ("_depthwise", "qkv_dwconv")):
            kernel = part(arrays[f"{prefix}.{source}.weight"], index)
            bias = part(arrays[f"{prefix}.{source}.bias"], index)
            assign(attention.get_submodule(name + suffix), kernel, bias)


def block_to_depth(kernel):
    """Filters of the pixel shuffle in the order of depth_to_space."""
    return kernel.unflatten(0, (-1, 4)).transpose(0, 1).flatten(0, 1)


@torch.no_grad()
def load_weights(net, arrays):
    for name, stage in net.named_children():
        prefix = STAGES[name]
        if not isinstance(stage, RestormerBlock):
            kernel = arrays[prefix + ".weight"]
            if name == "upsample":
                kernel = block_to_depth(kernel)
            assign(stage, kernel, arrays.get(prefix + ".bias"))
            continue
        for layer, source in LAYERS.items():
            source = f"{prefix}.{source}"
            bias = arrays.get(source + ".bias")
            assign(stage.get_submodule(layer), arrays[source + ".weight"], bias)
        load_attention(stage.attention, arrays, prefix + ".attn")


def model():
    net = RestormerModel()
    load_weights(net, torch.load(Path(__file__).with_name("weights.pt")))
    return net


# ------------------------------------------------------------------------ data


def rescale(image):
    return image.permute(0, 2, 3, 1).float() * (1.0 / 255.0)


def reflect_pad(image, axis):
    """Pixels before the last one come again behind it."""
    size = image.shape[axis]
    missing = -size % CONFIG["divisor"]
    tail = image.narrow(axis, size - 1 - missing, missing)
    return torch.concat((image, tail.flip(axis)), dim=axis)


def forward(net, batch):
    noisy = rescale(batch["noisy"])
    height, width = noisy.shape[1], noisy.shape[2]
    padded = reflect_pad(reflect_pad(noisy, axis=1), axis=2)
    restored = net(padded)[:, :height, :width, :]
    return restored.permute(0, 3, 1, 2)


# ------------------------------------------------------------------------ loss


class CharbonnierLoss:
    def __init__(self, epsilon=1e-3):
        self.epsilon = epsilon

    def __call__(self, y_true, y_pred):
        return torch.hypot(y_pred - y_true, torch.full_like(y_true, self.epsilon))


class EdgeLoss:
    """Compares what a pyramid loses in one of its steps."""

    def __init__(self, base):
        self.base = base
        taps = torch.tensor([1.0, 5.0, 8.0, 5.0, 1.0]) / 20.0
        self.kernel = torch.outer(taps, taps)

    def gaussian(self, image):
        x = image.permute(0, 3, 1, 2)
        for axis in (2, 3):
            size = x.shape[axis]
            first, last = x.narrow(axis, 0, 1), x.narrow(axis, size - 1, 1)
            x = torch.concat((first, first, x, last, last), dim=axis)
        n, c, h, w = x.shape
        x = x.reshape(n * c, 1, h, w)
        x = nn.functional.conv2d(x, self.kernel[None, None])
        return x.reshape(n, c, h - 4, w - 4).permute(0, 2, 3, 1)

    def pyramid_step(self, image):
        small = self.gaussian(image)[:, ::2, ::2, :]
        large = torch.zeros_like(image)
        large[:, ::2, ::2, :] = 4.0 * small
        return image - self.gaussian(large)

    def __call__(self, y_true, y_pred):
        return self.base(self.pyramid_step(y_true), self.pyramid_step(y_pred))


def sequence_mask(lengths, maximum):
    return (torch.arange(maximum) < lengths.unsqueeze(1)).float()


def loss(output, batch):
    y_pred, y_true = output.permute(0, 2, 3, 1), rescale(batch["clean"])
    _, height, width, channels = y_true.shape
    rows = sequence_mask(batch["extent"][:, 0], height)
    columns = sequence_mask(batch["extent"][:, 1], width)
    sample_weight = (rows[:, :, None] * columns[:, None, :]).unsqueeze(-1)
    charbonnier = CharbonnierLoss()
    edge_loss = EdgeLoss(charbonnier)
    values = charbonnier(y_true, y_pred) * sample_weight
    pixels = values.sum() / (sample_weight.sum() * channels)
    edges = edge_loss(y_true * sample_weight, y_pred * sample_weight)
    return pixels + edges.mean() * 0.05


# ------------------------------------------------------------------- optimizer


class CosineDecay:
    def __init__(self, initial_rate, minimum_rate, steps):
        self.initial_rate, self.minimum_rate = initial_rate, minimum_rate
        self.steps = steps

    def __call__(self, step):
        angle = math.pi * min(step, self.steps) / self.steps
        span = self.initial_rate - self.minimum_rate
        return self.minimum_rate + span * (1.0 + math.cos(angle)) / 2.0


class AdamW(torch.optim.Optimizer):
    def __init__(self, net, schedule, weight_decay, global_clipnorm):
        self.variables = dict(net.named_parameters())
        super().__init__(list(self.variables.values()), {})
        self.schedule, self.weight_decay = schedule, weight_decay
        self.global_clipnorm = global_clipnorm
        self.beta_1, self.beta_2, self.epsilon = 0.9, 0.999, 1e-8
        self.iterations = 0
        self.momentums = {k: torch.zeros_like(v) for k, v in self.variables.items()}
        self.velocities = {k: torch.zeros_like(v) for k, v in self.variables.items()}
        self.excluded = ("gamma", "beta", "bias", "alpha")

    def clipped(self, gradients):
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
        ratio = self.global_clipnorm / torch.clamp(norm, min=self.global_clipnorm)
        return {name: g * ratio for name, g in gradients.items()}

    def uses_weight_decay(self, name):
        return name.rpartition(".")[2] not in self.excluded

    @torch.no_grad()
    def step(self, closure=None):
        gradients = self.clipped({k: v.grad for k, v in self.variables.items()})
        rate = self.schedule(self.iterations)
        self.iterations += 1
        correction_1 = 1.0 - self.beta_1**self.iterations
        correction_2 = 1.0 - self.beta_2**self.iterations
        for name, variable in self.variables.items():
            if self.uses_weight_decay(name):
                variable.sub_(variable * (rate * self.weight_decay))
            m, v, g = self.momentums[name], self.velocities[name], gradients[name]
            m.add_((g - m) * (1.0 - self.beta_1))
            v.add_((g.square() - v) * (1.0 - self.beta_2))
            denominator = torch.sqrt(v / correction_2) + self.epsilon
            variable.sub_(rate / correction_1 * m / denominator)


def optimizer(net):
    schedule = CosineDecay(
        CONFIG["learning_rate"], CONFIG["minimum_learning_rate"], CONFIG["decay_steps"]
    )
    return AdamW(net, schedule, CONFIG["weight_decay"], CONFIG["gradient_clip"])
