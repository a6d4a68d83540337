"""After TensorFlow and Keras: channels last, kernels [y, x, in, out], padding "SAME"."""

from pathlib import Path

import torch
from torch import nn

FILTERS = 20
NUM_GROUPS = 2
NUM_BLOCKS = 3
SQUEEZE_UNITS = 5
RESIDUAL_SCALING = 0.4

# --------------------------------------------------------------------------- tf.nn


def same_padding(size):
    """Rows before and behind for a stride of 1."""
    return (size - 1) // 2, size // 2


def conv2d(x, filters, padding="SAME"):
    if padding == "SAME":
        top, bottom = same_padding(filters.shape[0])
        left, right = same_padding(filters.shape[1])
        x = nn.functional.pad(x, (0, 0, left, right, top, bottom))
    x = torch.permute(x, (0, 3, 1, 2))
    y = nn.functional.conv2d(x, torch.permute(filters, (3, 2, 0, 1)))
    return torch.permute(y, (0, 2, 3, 1))


def depth_to_space(x, block_size):
    """The place in a block changes slower than the channel."""
    batch, height, width, depth = x.shape
    depth = depth // block_size**2
    x = torch.reshape(x, (batch, height, width, block_size, block_size, depth))
    x = torch.permute(x, (0, 1, 3, 2, 4, 5))
    return torch.reshape(x, (batch, height * block_size, width * block_size, depth))


def avg_pool2d(x, ksize):
    """Strides as large as the window."""
    rows, columns = ksize
    batch, height, width, channels = x.shape
    shape = (batch, height // rows, rows, width // columns, columns, channels)
    return torch.mean(torch.reshape(x, shape), dim=(2, 4))


def erosion2d(x):
    """The least of 3 x 3; what is outside does not count."""
    x = nn.functional.pad(x, (0, 0, 1, 1, 1, 1), value=float("inf"))
    for axis in (1, 2):
        size = x.shape[axis] - 2
        shifted = [torch.narrow(x, axis, start, size) for start in range(3)]
        x = torch.amin(torch.stack(shifted), dim=0)
    return x


# ------------------------------------------------------------------------ tf.image


def convert_image_dtype(image):
    return image.to(torch.float32) * (1.0 / 255.0)


def resize_area(images, size):
    """tf.image.resize(images, size, method="area") where the factors are whole."""
    height, width = images.shape[1:3]
    return avg_pool2d(images, (height // size[0], width // size[1]))


def pad_reflect(x, axis):
    """The border itself does not come twice."""
    size = x.shape[axis]
    first, last = torch.narrow(x, axis, 1, 1), torch.narrow(x, axis, size - 2, 1)
    return torch.cat((first, x, last), dim=axis)


def sobel_edges(image):
    """[batch, height, width, channels, 2]: dy and dx."""
    smooth, slope = torch.tensor([1.0, 2.0, 1.0]), torch.tensor([-1.0, 0.0, 1.0])
    kernels = [torch.outer(slope, smooth), torch.outer(smooth, slope)]
    padded = pad_reflect(pad_reflect(image, axis=1), axis=2)
    patches = padded.unfold(1, 3, 1).unfold(2, 3, 1)
    edges = [torch.sum(patches * kernel, dim=(-2, -1)) for kernel in kernels]
    return torch.stack(edges, dim=-1)


# -------------------------------------------------------------------------- layers


class Layer(nn.Module):
    def add_weight(self, *shape, trainable=True):
        return nn.Parameter(torch.zeros(shape), requires_grad=trainable)

    def forward(self, inputs):
        return self.call(inputs)


class Conv2D(Layer):
    def __init__(self, inputs, filters, kernel_size=3):
        super().__init__()
        self.kernel = self.add_weight(kernel_size, kernel_size, inputs, filters)
        self.bias = self.add_weight(filters)

    def call(self, inputs):
        return conv2d(inputs, self.kernel) + self.bias


class Dense(Layer):
    def __init__(self, inputs, units, activation):
        super().__init__()
        self.kernel = self.add_weight(inputs, units)
        self.bias = self.add_weight(units)
        self.activation = activation

    def call(self, inputs):
        return self.activation(torch.matmul(inputs, self.kernel) + self.bias)


class PReLU(Layer):
    """shared_axes=[1, 2]"""

    def __init__(self, channels):
        super().__init__()
        self.alpha = self.add_weight(1, 1, channels)

    def call(self, inputs):
        pos = torch.relu(inputs)
        neg = -self.alpha * torch.relu(-inputs)
        return pos + neg


class GlobalAveragePooling2D(Layer):
    def call(self, inputs):
        return torch.mean(inputs, dim=(1, 2), keepdim=True)


class Normalization(Layer):
    """Colours around their mean, and back again."""

    def __init__(self):
        super().__init__()
        self.mean = self.add_weight(3, trainable=False)

    def call(self, inputs):
        return inputs - self.mean

    def invert(self, inputs):
        return inputs + self.mean


def sigmoid(x):
    return 1.0 / (1.0 + torch.exp(-x))


class SqueezeExcite(Layer):
    def __init__(self, channels):
        super().__init__()
        self.pool = GlobalAveragePooling2D()
        self.squeeze = Dense(channels, SQUEEZE_UNITS, torch.relu)
        self.excite = Dense(SQUEEZE_UNITS, channels, sigmoid)

    def call(self, inputs):
        gate = self.excite(self.squeeze(self.pool(inputs)))
        return inputs * gate


class AttentionBlock(Layer):
    def __init__(self, channels):
        super().__init__()
        self.conv_a = Conv2D(channels, channels)
        self.conv_b = Conv2D(channels, channels)
        self.channel_attention = SqueezeExcite(channels)

    def call(self, inputs):
        x = torch.relu(self.conv_a(inputs))
        x = self.channel_attention(self.conv_b(x))
        return torch.add(x * RESIDUAL_SCALING, inputs)


class ResidualGroup(Layer):
    def __init__(self, channels):
        super().__init__()
        self.blocks = nn.ModuleList(AttentionBlock(channels) for _ in range(NUM_BLOCKS))
        self.conv = Conv2D(channels, channels)

    def call(self, inputs):
        short_skip = inputs
        x = inputs
        for block in self.blocks:
            x = block(x)
        return torch.add(self.conv(x), short_skip)


class SubpixelUpsampling(Layer):
    def __init__(self, inputs, channels, block_size):
        super().__init__()
        self.block_size = block_size
        self.conv = Conv2D(inputs, channels * block_size**2)
        self.prelu = PReLU(channels)

    def call(self, inputs):
        x = depth_to_space(self.conv(inputs), self.block_size)
        return self.prelu(x)


class RCAN(Layer):
    def __init__(self):
        super().__init__()
        self.normalization = Normalization()
        self.shallow = Conv2D(3, FILTERS)
        self.groups = nn.ModuleList(ResidualGroup(FILTERS) for _ in range(NUM_GROUPS))
        self.deep = Conv2D(FILTERS, FILTERS)
        self.upsample_3x = SubpixelUpsampling(FILTERS, 18, block_size=3)
        self.rgb_3x = Conv2D(18, 3)
        self.upsample_2x = SubpixelUpsampling(18, 16, block_size=2)
        self.rgb_6x = Conv2D(16, 3)

    def call(self, inputs):
        x = long_skip = self.shallow(self.normalization(inputs))
        for group in self.groups:
            x = group(x)
        x = torch.add(self.deep(x), long_skip)
        x = self.upsample_3x(x)
        coarse = self.normalization.invert(self.rgb_3x(x))
        x = self.upsample_2x(x)
        fine = self.normalization.invert(self.rgb_6x(x))
        return coarse, fine


# ---------------------------------------------------------------------- checkpoint

CONVS = {
    "shallow": "head",
    "deep": "body_conv",
    "rgb_3x": "tail1",
    "rgb_6x": "tail2",
}
UPSAMPLERS = {"upsample_3x": "up1", "upsample_2x": "up2"}


def to_hwio(weight):
    return weight.permute(2, 3, 1, 0)


def set_conv(layer, checkpoint, name):
    layer.kernel.copy_(to_hwio(checkpoint[name + ".weight"]))
    layer.bias.copy_(checkpoint[name + ".bias"])


def set_dense(layer, checkpoint, name):
    """From a convolution of 1 x 1."""
    layer.kernel.copy_(checkpoint[name + ".weight"].flatten(1).T)
    layer.bias.copy_(checkpoint[name + ".bias"])


def blocks_first(filters, block_size):
    """The last axis as depth_to_space wants it."""
    return filters.unflatten(-1, (-1, block_size**2)).transpose(-1, -2).flatten(-2)


def set_upsampler(layer, checkpoint, name):
    kernel = to_hwio(checkpoint[name + ".conv.weight"])
    bias = checkpoint[name + ".conv.bias"]
    layer.conv.kernel.copy_(blocks_first(kernel, layer.block_size))
    layer.conv.bias.copy_(blocks_first(bias, layer.block_size))
    layer.prelu.alpha.copy_(checkpoint[name + ".act.weight"].reshape(1, 1, -1))


def set_group(group, checkpoint, prefix):
    for j, block in enumerate(group.blocks):
        name = f"{prefix}.body.{j}"
        set_conv(block.conv_a, checkpoint, name + ".conv1")
        set_conv(block.conv_b, checkpoint, name + ".conv2")
        attention = block.channel_attention
        set_dense(attention.squeeze, checkpoint, name + ".ca.conv_du.0")
        set_dense(attention.excite, checkpoint, name + ".ca.conv_du.2")
    set_conv(group.conv, checkpoint, prefix + ".conv")


@torch.no_grad()
def load_weights(net, checkpoint):
    net.normalization.mean.copy_(checkpoint["add_mean.bias"])
    for ours, theirs in CONVS.items():
        set_conv(getattr(net, ours), checkpoint, theirs)
    for i, group in enumerate(net.groups):
        set_group(group, checkpoint, f"body.{i}")
    for ours, theirs in UPSAMPLERS.items():
        set_upsampler(getattr(net, ours), checkpoint, theirs)


def model():
    net = RCAN()
    load_weights(net, torch.load(Path(__file__).with_name("weights.pt")))
    return net


# ---------------------------------------------------------------------------- data


def channels_last(x):
    return torch.permute(x, (0, 2, 3, 1))


def channels_first(x):
    return torch.permute(x, (0, 3, 1, 2))


def forward(net, batch):
    low = convert_image_dtype(channels_last(batch["low"]))
    coarse, fine = net(low)
    return {"x3": channels_first(coarse), "x6": channels_first(fine)}


# -------------------------------------------------------------------------- losses


class Charbonnier:
    """Weights are [batch, height, width, 1]; what they weigh has channels."""

    def __init__(self, epsilon=1e-3):
        self.epsilon = epsilon

    def reduce(self, values, sample_weight):
        sample_weight = sample_weight.expand_as(values)
        total = torch.sum(values * sample_weight)
        return total / torch.sum(sample_weight)

    def __call__(self, y_true, y_pred, sample_weight):
        error = torch.square(y_true - y_pred)
        return self.reduce(torch.sqrt(error + self.epsilon**2), sample_weight)


class SobelCharbonnier(Charbonnier):
    def __call__(self, y_true, y_pred, sample_weight):
        error = sobel_edges(y_true) - sobel_edges(y_pred)
        squares = torch.sum(torch.square(error), dim=-1)
        values = torch.sqrt(squares + self.epsilon**2)
        return self.reduce(values, erosion2d(sample_weight))


def masked_resize(images, mask, size):
    """Unknown pixels take no part in the mean of an area."""
    coverage = resize_area(mask, size)
    return resize_area(images * mask, size) / torch.clamp(coverage, min=1e-6), coverage


LOSS_WEIGHTS = {"fine": 1.0, "coarse": 0.5, "tiny": 0.25, "edges": 0.05}


def compute_losses(coarse, fine, y_true, mask, tiny_size):
    charbonnier, sobel = Charbonnier(), SobelCharbonnier()
    true_3x, mask_3x = masked_resize(y_true, mask, coarse.shape[1:3])
    true_1x, mask_1x = masked_resize(y_true, mask, tiny_size)
    pred_1x, _ = masked_resize(fine, mask, tiny_size)
    return {
        "fine": charbonnier(y_true, fine, mask),
        "coarse": charbonnier(true_3x, coarse, mask_3x),
        "tiny": charbonnier(true_1x, pred_1x, mask_1x),
        "edges": sobel(y_true, fine, mask),
    }


def loss(output, batch):
    coarse, fine = channels_last(output["x3"]), channels_last(output["x6"])
    y_true = convert_image_dtype(channels_last(batch["high"]))
    mask = batch["known"].unsqueeze(-1).to(torch.float32)
    losses = compute_losses(coarse, fine, y_true, mask, batch["low"].shape[2:])
    return sum(LOSS_WEIGHTS[name] * value for name, value in losses.items())


# ----------------------------------------------------------------------- optimizer


class ExponentialDecay:
    """Falls by steps: staircase=True."""

    def __init__(self, initial_learning_rate, decay_steps, decay_rate):
        self.initial_learning_rate = initial_learning_rate
        self.decay_steps, self.decay_rate = decay_steps, decay_rate

    def __call__(self, step):
        return self.initial_learning_rate * self.decay_rate ** (
            step // self.decay_steps
        )


class Adam(torch.optim.Optimizer):
    def __init__(self, variables, learning_rate, clipvalue, epsilon=1e-7):
        super().__init__(list(variables), {})
        self.learning_rate, self.clipvalue = learning_rate, clipvalue
        self.beta_1, self.beta_2, self.epsilon = 0.9, 0.999, epsilon
        self.iterations = 0

    @torch.no_grad()
    def step(self, closure=None):
        lr = self.learning_rate(self.iterations)
        self.iterations += 1
        correction_1 = 1.0 - self.beta_1**self.iterations
        correction_2 = 1.0 - self.beta_2**self.iterations
        for variable in self.param_groups[0]["params"]:
            gradient = torch.clamp(variable.grad, -self.clipvalue, self.clipvalue)
            slots = self.state[variable]
            if not slots:
                slots["m"] = torch.zeros_like(variable)
                slots["v"] = torch.zeros_like(variable)
            m, v = slots["m"], slots["v"]
            m.add_((gradient - m) * (1.0 - self.beta_1))
            v.add_((torch.square(gradient) - v) * (1.0 - self.beta_2))
            denominator = torch.sqrt(v / correction_2) + self.epsilon
            variable.sub_(lr / correction_1 * m / denominator)


def optimizer(net):
    schedule = ExponentialDecay(2e-3, decay_steps=3, decay_rate=0.5)
    variables = [v for v in net.parameters() if v.requires_grad]
    return Adam(variables, schedule, clipvalue=0.02, epsilon=1e-8)
