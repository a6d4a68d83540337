"""After Keras: layers with NHWC inputs, HWIO kernels, set_weights in the order of Keras."""

import math
from pathlib import Path

import torch
from torch import nn

FILTERS = 24
NUM_BLOCKS = 3
NUM_CLASSES = 5
LARGE_KERNEL, SMALL_KERNEL = 7, 3
PATCH_KERNEL, PATCH_STRIDE = 5, 3
SE_RATIO = 0.25
STOCHASTIC_DEPTH_RATE = 0.3
LABEL_SMOOTHING = 0.1
AUX_LOSS_WEIGHT = 0.4
RGB_MEAN = (0.485, 0.456, 0.406)
RGB_STD = (0.229, 0.224, 0.225)


# ----------------------------------------------------------------- activations


def gelu(x, approximate=False):
    if approximate:
        coeff = 0.044715
        inner = math.sqrt(2.0 / math.pi) * (x + coeff * torch.pow(x, 3))
        return 0.5 * x * (1.0 + torch.tanh(inner))
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def sigmoid(x):
    return 1.0 / (1.0 + torch.exp(-x))


# ---------------------------------------------------------------------- layers


class Layer(nn.Module):
    def add_weight(self, name, shape, initializer="zeros", trainable=True):
        value = torch.ones(shape) if initializer == "ones" else torch.zeros(shape)
        if trainable:
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

    def set_weights(self, weights):
        """Trainable weights come first."""
        variables = [*self.parameters(), *self.buffers()]
        with torch.no_grad():
            for variable, value in zip(variables, weights, strict=False):
                variable.copy_(value)


class ZeroPadding2D(Layer):
    def __init__(self, padding):
        super().__init__()
        self.padding = padding

    def forward(self, inputs):
        (top, bottom), (left, right) = self.padding
        return nn.functional.pad(inputs, (0, 0, left, right, top, bottom))


class Conv2D(Layer):
    """Padding is valid."""

    def __init__(self, in_filters, filters, kernel_size, strides):
        super().__init__()
        self.strides = strides
        self.add_weight("kernel", (kernel_size, kernel_size, in_filters, filters))
        self.add_weight("bias", (filters,))

    def forward(self, inputs):
        nchw = inputs.permute(0, 3, 1, 2)
        oihw = self.kernel.permute(3, 2, 0, 1)
        outputs = nn.functional.conv2d(nchw, oihw, stride=self.strides)
        return outputs.permute(0, 2, 3, 1) + self.bias


class DepthwiseConv2D(Layer):
    """Padding is same; there is no bias."""

    def __init__(self, filters, kernel_size):
        super().__init__()
        self.add_weight("depthwise_kernel", (kernel_size, kernel_size, filters, 1))

    def forward(self, inputs):
        nchw = inputs.permute(0, 3, 1, 2)
        kernel = self.depthwise_kernel.permute(2, 3, 0, 1)
        outputs = nn.functional.conv2d(
            nchw, kernel, padding="same", groups=nchw.shape[1]
        )
        return outputs.permute(0, 2, 3, 1)


class Dense(Layer):
    def __init__(self, in_units, units):
        super().__init__()
        self.add_weight("kernel", (in_units, units))
        self.add_weight("bias", (units,))

    def forward(self, inputs):
        return torch.matmul(inputs, self.kernel) + self.bias


class BatchNormalization(Layer):
    """Not trainable means inference, as in Keras; gamma and beta still learn here."""

    def __init__(self, filters, momentum=0.9, epsilon=1e-5, frozen=False):
        super().__init__()
        self.momentum, self.epsilon, self.frozen = momentum, epsilon, frozen
        self.add_weight("gamma", (filters,), "ones")
        self.add_weight("beta", (filters,))
        self.add_weight("moving_mean", (filters,), trainable=False)
        self.add_weight("moving_variance", (filters,), "ones", trainable=False)

    @torch.no_grad()
    def update(self, mean, variance, count):
        """The fused kernel of cuDNN keeps the unbiased variance."""
        fresh = variance * (count / (count - 1))
        for moving, value in ((self.moving_mean, mean), (self.moving_variance, fresh)):
            moving.copy_(moving * self.momentum + value * (1.0 - self.momentum))

    def forward(self, inputs):
        mean, variance = self.moving_mean, self.moving_variance
        if self.training and not self.frozen:
            mean = torch.mean(inputs, dim=(0, 1, 2))
            variance = torch.mean(torch.square(inputs - mean), dim=(0, 1, 2))
            self.update(mean, variance, inputs[..., 0].numel())
        normalized = (inputs - mean) / torch.sqrt(variance + self.epsilon)
        return normalized * self.gamma + self.beta


class GlobalAveragePooling2D(Layer):
    def forward(self, inputs):
        return torch.mean(inputs, dim=(1, 2))


class GlobalMaxPooling2D(Layer):
    def forward(self, inputs):
        return torch.amax(inputs, dim=(1, 2))


# ----------------------------------------------------------------------- model


class PatchStem(nn.Module):
    def __init__(self):
        super().__init__()
        side = PATCH_KERNEL // 2
        self.stem_pad = ZeroPadding2D(((side, side), (side, side)))
        self.stem_conv = Conv2D(3, FILTERS, PATCH_KERNEL, PATCH_STRIDE)
        self.stem_bn = BatchNormalization(FILTERS, frozen=True)

    def forward(self, inputs):
        x = self.stem_conv(self.stem_pad(inputs))
        x = gelu(x)
        return self.stem_bn(x)


class SqueezeAndExcitation(nn.Module):
    def __init__(self):
        super().__init__()
        bottleneck = int(FILTERS * SE_RATIO)
        self.squeeze = GlobalAveragePooling2D()
        self.se_reduce = Dense(FILTERS, bottleneck)
        self.se_expand = Dense(bottleneck, FILTERS)

    def forward(self, inputs):
        x = torch.relu(self.se_reduce(self.squeeze(inputs)))
        x = sigmoid(self.se_expand(x))
        return inputs * x[:, None, None, :]


class ConvMixerBlock(nn.Module):
    def __init__(self, survival_probability, use_se):
        super().__init__()
        self.survival_probability = survival_probability
        self.dw_large = DepthwiseConv2D(FILTERS, LARGE_KERNEL)
        self.bn_large = BatchNormalization(FILTERS)
        self.dw_small = DepthwiseConv2D(FILTERS, SMALL_KERNEL)
        self.bn_small = BatchNormalization(FILTERS)
        self.pointwise = Dense(FILTERS, FILTERS)
        self.bn_out = BatchNormalization(FILTERS)
        self.se = SqueezeAndExcitation() if use_se else None

    def forward(self, inputs):
        x = self.bn_large(self.dw_large(inputs))
        x = x + self.bn_small(self.dw_small(inputs))
        x = gelu(x) * self.survival_probability
        x = inputs + x
        x = self.pointwise(x)
        x = self.bn_out(gelu(x))
        return x if self.se is None else self.se(x)


def survival_probabilities():
    last = NUM_BLOCKS - 1
    return [1.0 - STOCHASTIC_DEPTH_RATE * i / last for i in range(NUM_BLOCKS)]


class ConvMixerClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = PatchStem()
        self.mixers = nn.ModuleList(
            ConvMixerBlock(p, use_se=i + 1 == NUM_BLOCKS)
            for i, p in enumerate(survival_probabilities())
        )
        self.avg_pool = GlobalAveragePooling2D()
        self.max_pool = GlobalMaxPooling2D()
        self.predictions = Dense(2 * FILTERS, NUM_CLASSES)
        self.aux_predictions = Dense(FILTERS, NUM_CLASSES)

    def forward(self, images):
        x = self.stem(images)
        endpoints = []
        for mixer in self.mixers:
            x = mixer(x)
            endpoints.append(x)
        aux = self.aux_predictions(self.avg_pool(endpoints[-2]))
        features = torch.cat([self.avg_pool(x), self.max_pool(x)], dim=-1)
        return self.predictions(features), aux


# --------------------------------------------------------------------- weights


class TorchCheckpoint:
    def __init__(self, path):
        self.tensors = torch.load(path)

    def conv(self, prefix):
        kernel = self.tensors[prefix + ".weight"].permute(2, 3, 1, 0)
        return [kernel, self.tensors[prefix + ".bias"]]

    def depthwise(self, prefix):
        """[filters, 1, height, width] -> [height, width, filters, 1]."""
        return [self.tensors[prefix + ".weight"].permute(2, 3, 0, 1)]

    def dense(self, prefix):
        kernel, bias = (self.tensors[f"{prefix}.{k}"] for k in ("weight", "bias"))
        return [kernel.T, bias]

    def pointwise(self, prefix):
        """A convolution of one pixel is a dense layer."""
        kernel, bias = (self.tensors[f"{prefix}.{k}"] for k in ("weight", "bias"))
        return [kernel[:, :, 0, 0].T, bias]

    def batch_norm(self, prefix):
        keys = ("weight", "bias", "running_mean", "running_var")
        return [self.tensors[f"{prefix}.{key}"] for key in keys]


def convert_block(block, ckpt, prefix):
    block.dw_large.set_weights(ckpt.depthwise(prefix + ".spatial.large"))
    block.bn_large.set_weights(ckpt.batch_norm(prefix + ".spatial.large_norm"))
    block.dw_small.set_weights(ckpt.depthwise(prefix + ".spatial.small"))
    block.bn_small.set_weights(ckpt.batch_norm(prefix + ".spatial.small_norm"))
    block.pointwise.set_weights(ckpt.pointwise(prefix + ".channel"))
    block.bn_out.set_weights(ckpt.batch_norm(prefix + ".norm"))
    if block.se is not None:
        block.se.se_reduce.set_weights(ckpt.pointwise(prefix + ".excite.reduce"))
        block.se.se_expand.set_weights(ckpt.pointwise(prefix + ".excite.expand"))


def model():
    net = ConvMixerClassifier()
    ckpt = TorchCheckpoint(Path(__file__).with_name("weights.pt"))
    net.stem.stem_conv.set_weights(ckpt.conv("embed.proj"))
    net.stem.stem_bn.set_weights(ckpt.batch_norm("embed.norm"))
    for i, mixer in enumerate(net.mixers):
        convert_block(mixer, ckpt, f"blocks.{i}")
    net.predictions.set_weights(ckpt.dense("head"))
    net.aux_predictions.set_weights(ckpt.dense("aux_head"))
    return net


# -------------------------------------------------------------------- training


def preprocess_input(images):
    x = images.to(torch.float32) / 255.0
    x = x - torch.tensor(RGB_MEAN)
    return x / torch.tensor(RGB_STD)


def forward(net, batch):
    logits, aux = net(preprocess_input(batch["image"]))
    return {"logits": logits, "aux": aux}


class CategoricalCrossentropy:
    """From logits; the mean over the batch."""

    def __init__(self, label_smoothing=0.0):
        self.label_smoothing = label_smoothing

    def __call__(self, y_true, y_pred):
        num_classes = y_true.shape[-1]
        y_true = y_true * (1.0 - self.label_smoothing)
        y_true = y_true + self.label_smoothing / num_classes
        shifted = y_pred - torch.amax(y_pred, dim=-1, keepdim=True)
        log_norm = torch.log(torch.sum(torch.exp(shifted), dim=-1, keepdim=True))
        return torch.mean(-torch.sum(y_true * (shifted - log_norm), dim=-1))


def loss(output, batch):
    y_true = nn.functional.one_hot(batch["label"], NUM_CLASSES).to(torch.float32)
    main_loss = CategoricalCrossentropy(LABEL_SMOOTHING)(y_true, output["logits"])
    aux_loss = CategoricalCrossentropy()(y_true, output["aux"])
    return main_loss + AUX_LOSS_WEIGHT * aux_loss


class SGD(torch.optim.Optimizer):
    """Velocity holds the rate; decay is a penalty in the gradient."""

    def __init__(self, named_variables, learning_rate, momentum, l2, exclude):
        self.named_variables = dict(named_variables)
        super().__init__(list(self.named_variables.values()), {})
        self.learning_rate, self.momentum = learning_rate, momentum
        self.l2, self.exclude = l2, exclude

    @torch.no_grad()
    def step(self, closure=None):
        for name, variable in self.named_variables.items():
            gradient = variable.grad
            if not name.endswith(self.exclude):
                gradient = gradient + self.l2 * variable
            slots = self.state[variable]
            if "velocity" not in slots:
                slots["velocity"] = torch.zeros_like(variable)
            update = self.learning_rate * gradient
            velocity = self.momentum * slots["velocity"] - update
            slots["velocity"] = velocity
            variable.add_(self.momentum * velocity - update)


def optimizer(net):
    return SGD(
        net.named_parameters(),
        learning_rate=0.05,
        momentum=0.9,
        l2=0.05,
        exclude=("gamma", "beta", "bias"),
    )
