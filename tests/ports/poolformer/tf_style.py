"""After Keras: NHWC and HWIO, layers that get their weights in lists, moments, pads by hand."""

import math
from pathlib import Path

import torch
from torch import nn

INPUT_SHAPE = (32, 40, 3)
NUM_BLOCKS = [2, 1]
OUT_CHANNELS = [16, 32]
MLP_RATIOS = [3, 2]
CLASSES = 7


class Layer(nn.Module):
    def add_weight(self, name, *shape):
        self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    @torch.no_grad()
    def set_weights(self, arrays):
        """In the order in which they were added."""
        weights = list(self.parameters())
        if [tuple(w.shape) for w in weights] != [tuple(a.shape) for a in arrays]:
            raise ValueError("weights of other shapes")
        for weight, array in zip(weights, arrays):
            weight.copy_(array)


class ZeroPadding2D(Layer):
    def __init__(self, padding):
        super().__init__()
        (self.top, self.bottom), (self.left, self.right) = padding

    def forward(self, inputs):
        batch, height, width, channels = inputs.shape
        beside = inputs.new_zeros(batch, height, self.left, channels)
        behind = inputs.new_zeros(batch, height, self.right, channels)
        inputs = torch.cat([beside, inputs, behind], dim=2)
        width = width + self.left + self.right
        above = inputs.new_zeros(batch, self.top, width, channels)
        below = inputs.new_zeros(batch, self.bottom, width, channels)
        return torch.cat([above, inputs, below], dim=1)


class Conv2D(Layer):
    """padding="valid" """

    def __init__(self, channels, filters, kernel_size, strides=1):
        super().__init__()
        self.kernel_size, self.strides = kernel_size, strides
        self.add_weight("kernel", kernel_size, kernel_size, channels, filters)
        self.add_weight("bias", filters)

    def forward(self, inputs):
        patches = inputs.unfold(1, self.kernel_size, self.strides)
        patches = patches.unfold(2, self.kernel_size, self.strides)
        outputs = torch.einsum("nhwcij,ijco->nhwo", patches, self.kernel)
        return outputs + self.bias


class Dense(Layer):
    def __init__(self, channels, units):
        super().__init__()
        self.add_weight("kernel", channels, units)
        self.add_weight("bias", units)

    def forward(self, inputs):
        return torch.matmul(inputs, self.kernel) + self.bias


def moments(inputs, axes):
    mean = torch.mean(inputs, dim=axes, keepdim=True)
    variance = torch.mean(torch.square(inputs - mean), dim=axes, keepdim=True)
    return mean, variance


class Normalization(Layer):
    """Of all axes but the batch: one group."""

    def __init__(self, channels, epsilon=1e-5, center=True):
        super().__init__()
        self.epsilon = epsilon
        self.add_weight("gamma", channels)
        if center:
            self.add_weight("beta", channels)
        else:
            self.beta = None

    def forward(self, inputs):
        mean, variance = moments(inputs, tuple(range(1, inputs.ndim)))
        scale = self.gamma * torch.rsqrt(variance + self.epsilon)
        shift = -mean * scale
        if self.beta is not None:
            shift = shift + self.beta
        return inputs * scale + shift


class ChannelAffine(Layer):
    def __init__(self, channels):
        super().__init__()
        self.add_weight("weight", channels)

    def forward(self, inputs):
        return inputs * self.weight


class AveragePooling2D(Layer):
    """padding="same", strides=1: what is padded does not count."""

    def __init__(self, pool_size):
        super().__init__()
        self.pool_size = pool_size
        side = (pool_size // 2, pool_size // 2)
        self.pad = ZeroPadding2D((side, side))

    def window_sum(self, inputs):
        height, width = inputs.shape[1:3]
        padded = self.pad(inputs)
        across = sum(padded[:, :, j : j + width] for j in range(self.pool_size))
        return sum(across[:, i : i + height] for i in range(self.pool_size))

    def forward(self, inputs):
        counts = self.window_sum(torch.ones_like(inputs[:1, ..., :1]))
        return self.window_sum(inputs) / counts


def gelu(inputs):
    return 0.5 * inputs * (1.0 + torch.erf(inputs / math.sqrt(2.0)))


class MetaFormerBlock(Layer):
    def __init__(self, channels, mlp_ratio):
        super().__init__()
        self.attn_gn = Normalization(channels, center=False)
        self.attn_pool = AveragePooling2D(3)
        self.attn_gamma = ChannelAffine(channels)
        self.mlp_gn = Normalization(channels)
        self.mlp_conv_1 = Conv2D(channels, mlp_ratio * channels, 1)
        self.mlp_conv_2 = Conv2D(mlp_ratio * channels, channels, 1)
        self.mlp_gamma = ChannelAffine(channels)

    def pool_mixer(self, inputs):
        return self.attn_pool(inputs) - inputs

    def forward(self, inputs):
        attn = self.pool_mixer(self.attn_gn(inputs))
        attn_out = inputs + self.attn_gamma(attn)
        mlp = gelu(self.mlp_conv_1(self.mlp_gn(attn_out)))
        return attn_out + self.mlp_gamma(self.mlp_conv_2(mlp))


class PoolFormer(Layer):
    def __init__(self):
        super().__init__()
        self.stem_pad = ZeroPadding2D(((2, 2), (2, 2)))
        self.stem_conv = Conv2D(INPUT_SHAPE[-1], OUT_CHANNELS[0], 7, 4)
        self.stack1 = self.stack(0)
        self.stack2_pad = ZeroPadding2D(((1, 1), (1, 1)))
        self.stack2_conv = Conv2D(OUT_CHANNELS[0], OUT_CHANNELS[1], 3, 2)
        self.stack2 = self.stack(1)
        self.output_ln = Normalization(OUT_CHANNELS[-1], epsilon=1e-6)
        self.predictions = Dense(OUT_CHANNELS[-1], CLASSES)

    def stack(self, index):
        return nn.Sequential(
            *(
                MetaFormerBlock(OUT_CHANNELS[index], MLP_RATIOS[index])
                for _ in range(NUM_BLOCKS[index])
            )
        )

    def forward(self, inputs):
        features = self.stack1(self.stem_conv(self.stem_pad(inputs)))
        features = self.stack2(self.stack2_conv(self.stack2_pad(features)))
        pooled = torch.mean(features, dim=(1, 2))
        return self.predictions(self.output_ln(pooled))


# ------------------------------------------------------------------------ weights


def load_block(block, torch_weights, name):
    def conv(key):
        kernel = torch_weights[f"{name}.{key}.weight"]
        return [kernel.permute(2, 3, 1, 0), torch_weights[f"{name}.{key}.bias"]]

    def scale(key):
        return [torch_weights[f"{name}.{key}"]]

    block.attn_gn.set_weights(scale("norm1.weight"))
    block.attn_gamma.set_weights(scale("layer_scale_1"))
    block.mlp_gn.set_weights(scale("norm2.weight") + scale("norm2.bias"))
    block.mlp_conv_1.set_weights(conv("mlp.fc1"))
    block.mlp_conv_2.set_weights(conv("mlp.fc2"))
    block.mlp_gamma.set_weights(scale("layer_scale_2"))


def load_weights(net, torch_weights):
    def pair(key):
        return [torch_weights[f"{key}.weight"], torch_weights[f"{key}.bias"]]

    for layer, key in (
        (net.stem_conv, "patch_embed.proj"),
        (net.stack2_conv, "network.1.proj"),
    ):
        kernel, bias = pair(key)
        layer.set_weights([kernel.permute(2, 3, 1, 0), bias])
    for stack, index in ((net.stack1, 0), (net.stack2, 2)):
        for i, block in enumerate(stack.children()):
            load_block(block, torch_weights, f"network.{index}.{i}")
    gamma, beta = pair("norm")
    net.output_ln.set_weights([gamma, beta])
    kernel, bias = pair("head")
    net.predictions.set_weights([kernel.t(), bias])


def model():
    net = PoolFormer()
    load_weights(net, torch.load(Path(__file__).with_name("weights.pt")))
    return net


# --------------------------------------------------------------------------- data


def central_crop(images, height, width):
    top = (images.shape[1] - height) // 2
    left = (images.shape[2] - width) // 2
    return images[:, top : top + height, left : left + width]


def preprocess_input(images):
    """mode="torch" """
    images = images.float() / 255.0
    images = images - torch.tensor([0.485, 0.456, 0.406])
    return images / torch.tensor([0.229, 0.224, 0.225])


def forward(net, batch):
    images = central_crop(batch["image"], *INPUT_SHAPE[:2])
    return net(preprocess_input(images))


# --------------------------------------------------------------------------- loss


def categorical_crossentropy(y_true, y_pred, label_smoothing):
    """from_logits=True"""
    y_true = y_true * (1.0 - label_smoothing) + label_smoothing / CLASSES
    y_pred = y_pred - torch.amax(y_pred, dim=-1, keepdim=True)
    log_sum = torch.log(torch.sum(torch.exp(y_pred), dim=-1, keepdim=True))
    return torch.sum(y_true * (log_sum - y_pred), dim=-1)


def loss(output, batch):
    y_true = torch.eye(CLASSES)[batch["label"]]
    return torch.mean(categorical_crossentropy(y_true, output, label_smoothing=0.1))


# ---------------------------------------------------------------------- optimizer


class AdamW(torch.optim.Optimizer):
    def __init__(self, model, learning_rate, weight_decay, warmup_steps):
        self.variables = dict(model.named_parameters())
        super().__init__(list(self.variables.values()), {})
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.warmup_steps = warmup_steps
        self.beta_1, self.beta_2, self.epsilon = 0.9, 0.99, 1e-7
        self.iterations = 0
        self.momentums = {n: torch.zeros_like(v) for n, v in self.variables.items()}
        self.velocities = {n: torch.zeros_like(v) for n, v in self.variables.items()}

    def current_rate(self):
        progress = (self.iterations + 1) / self.warmup_steps
        return self.learning_rate * min(progress, 1.0)

    def update_step(self, name, variable, gradient, rate):
        local_step = self.iterations + 1
        m, v = self.momentums[name], self.velocities[name]
        m.add_((gradient - m) * (1.0 - self.beta_1))
        v.add_((torch.square(gradient) - v) * (1.0 - self.beta_2))
        m_hat = m / (1.0 - self.beta_1**local_step)
        v_hat = v / (1.0 - self.beta_2**local_step)
        variable.sub_(rate * m_hat / (torch.sqrt(v_hat) + self.epsilon))

    @torch.no_grad()
    def step(self, closure=None):
        rate = self.current_rate()
        for name, variable in self.variables.items():
            if name.endswith(".kernel"):
                variable.sub_(variable * self.weight_decay * rate)
            self.update_step(name, variable, variable.grad, rate)
        self.iterations += 1


def optimizer(net):
    return AdamW(net, learning_rate=8e-3, weight_decay=0.2, warmup_steps=4)
