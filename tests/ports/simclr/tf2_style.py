"""After TensorFlow 2: channels last, kernels HWIO, both views of an image in one tensor.

Norms are synchronised between replicas, here parts of the batch. The slots of LARS hold
the rate, as there.
"""

import math
import re
from pathlib import Path

import torch
from torch import nn
from torch.autograd import Function

FLAGS = {
    "image_size": 16,
    "num_classes": 5,
    "num_replicas": 2,
    "train_batch_size": 8,
    "learning_rate": 0.06,
    "learning_rate_scaling": "sqrt",
    "warmup_steps": 2,
    "train_steps": 12,
    "momentum": 0.9,
    "weight_decay": 0.02,
    "temperature": 0.3,
    "hidden_norm": True,
}
BATCH_NORM_EPSILON = 1e-5
BATCH_NORM_DECAY = 0.9
LARGE_NUM = 1e9
EETA_DEFAULT = 0.05


# ------------------------------------------------------------------ data_util


def crop_and_resize(images, begin, size, crop_size):
    """Bilinear; begin and size (batch, 2) of rows and columns, in parts of the image."""

    def positions(axis):
        length = images.shape[axis + 1]
        centres = (torch.arange(crop_size) + 0.5) / crop_size
        place = begin[:, axis, None] + size[:, axis, None] * centres
        place = torch.clip(place * length - 0.5, 0.0, length - 1.0)
        low = torch.floor(place)
        high = torch.clip(low + 1.0, max=length - 1.0)
        return low.long(), high.long(), place - low

    y0, y1, y_lerp = positions(0)
    x0, x1, x_lerp = positions(1)
    n = torch.arange(images.shape[0])[:, None, None]
    x_lerp = x_lerp[:, None, :, None]

    def row(y):
        left = images[n, y[:, :, None], x0[:, None, :]]
        right = images[n, y[:, :, None], x1[:, None, :]]
        return left + (right - left) * x_lerp

    top, bottom = row(y0), row(y1)
    return top + (bottom - top) * y_lerp[:, :, None, None]


def rgb_to_grayscale(images):
    return torch.tensordot(images, torch.tensor([0.299, 0.587, 0.114]), 1)[..., None]


def clip(images):
    return torch.clip(images, 0.0, 1.0)


def adjust_contrast(images, factor):
    mean = torch.mean(rgb_to_grayscale(images), dim=(1, 2), keepdim=True)
    return (images - mean) * factor + mean


def adjust_saturation(images, factor):
    gray = rgb_to_grayscale(images)
    return gray + (images - gray) * factor


def adjust_hue(images, delta):
    """One matrix for each image: there to YIQ, around and back."""
    to_yiq = torch.tensor(
        [[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]],
        dtype=torch.float64,
    )
    delta = delta.double()
    rotation = torch.eye(3, dtype=torch.float64).repeat(delta.shape[0], 1, 1)
    rotation[:, 1, 1] = torch.cos(delta)
    rotation[:, 1, 2] = -torch.sin(delta)
    rotation[:, 2, 1] = torch.sin(delta)
    rotation[:, 2, 2] = torch.cos(delta)
    matrix = torch.linalg.inv(to_yiq) @ rotation @ to_yiq
    return torch.einsum("bhwc,bdc->bhwd", images, matrix.float())


def color_jitter(images, strength):
    factors = strength[:, :, None, None, None]
    images = clip(images * factors[:, 0])
    images = clip(adjust_contrast(images, factors[:, 1]))
    images = clip(adjust_saturation(images, factors[:, 2]))
    return clip(adjust_hue(images, strength[:, 3]))


def random_apply(images, chosen, changed):
    return torch.where(chosen[:, None, None, None], changed, images)


def preprocess_for_train(images, features, view):
    box = features["box"][:, view]
    images = crop_and_resize(images, box[:, :2], box[:, 2:], FLAGS["image_size"])
    images = random_apply(images, features["flip"][:, view], torch.flip(images, (2,)))
    jittered = color_jitter(images, features["jitter"][:, view])
    images = random_apply(images, features["is_jittered"][:, view], jittered)
    gray = rgb_to_grayscale(images).expand_as(images)
    images = random_apply(images, features["is_grey"][:, view], gray)
    mean = torch.tensor([0.4914, 0.4822, 0.4465])
    stddev = torch.tensor([0.2470, 0.2435, 0.2616])
    return (images - mean) / stddev


def map_fn(features):
    """[batch, height, width, 6]."""
    images = torch.permute(features["image"], (0, 2, 3, 1)).float() / 255.0
    views = [preprocess_for_train(images, features, view) for view in range(2)]
    return torch.cat(views, dim=-1)


# --------------------------------------------------------------------- resnet


class Layer(nn.Module):
    def add_weight(self, name, shape):
        self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


class Conv2dFixedPadding(Layer):
    """kernel [height, width, in, out]; the padding does not depend on the input's size."""

    def __init__(self, kernel_size, inputs, filters, strides=1):
        super().__init__()
        self.kernel_size, self.strides = kernel_size, strides
        self.add_weight("kernel", (kernel_size, kernel_size, inputs, filters))

    def forward(self, inputs):
        pad_total = self.kernel_size - 1
        pad_beg = pad_total // 2
        pad_end = pad_total - pad_beg
        inputs = nn.functional.pad(inputs, (0, 0, pad_beg, pad_end, pad_beg, pad_end))
        outputs = nn.functional.conv2d(
            torch.permute(inputs, (0, 3, 1, 2)),
            torch.permute(self.kernel, (3, 2, 0, 1)),
            stride=self.strides,
        )
        return torch.permute(outputs, (0, 2, 3, 1))


class SyncBatchNormalization(Layer):
    def __init__(self, size, center=True):
        super().__init__()
        self.center = center
        self.add_weight("gamma", (size,))
        if center:
            self.add_weight("beta", (size,))
        self.register_buffer("moving_mean", torch.zeros(size))
        self.register_buffer("moving_variance", torch.ones(size))

    def moments(self, inputs):
        """Of all replicas, from those of each."""
        size = inputs.shape[-1]
        shards = torch.reshape(inputs, (FLAGS["num_replicas"], -1, size))
        shard_mean = torch.mean(shards, dim=1)
        shard_variance = torch.mean(torch.square(shards - shard_mean[:, None]), dim=1)
        mean = torch.mean(shard_mean, dim=0)
        between = torch.mean(torch.square(shard_mean - mean), dim=0)
        variance = torch.mean(shard_variance, dim=0) + between
        return mean, variance, inputs[..., 0].numel()

    def forward(self, inputs):
        mean, variance, count = self.moments(inputs)
        with torch.no_grad():
            bessel = count / (count - 1)
            for moving, value in (
                (self.moving_mean, mean),
                (self.moving_variance, variance * bessel),
            ):
                moving.sub_((moving - value) * (1.0 - BATCH_NORM_DECAY))
        inv = torch.rsqrt(variance + BATCH_NORM_EPSILON) * self.gamma
        outputs = inputs * inv - mean * inv
        return outputs + self.beta if self.center else outputs


class BatchNormRelu(nn.Module):
    def __init__(self, size, relu=True, center=True):
        super().__init__()
        self.relu = relu
        self.batch_normalization = SyncBatchNormalization(size, center)

    def forward(self, inputs):
        outputs = self.batch_normalization(inputs)
        return torch.relu(outputs) if self.relu else outputs


class ResidualBlock(nn.Module):
    def __init__(self, inputs, filters, strides, use_projection):
        super().__init__()
        self.use_projection = use_projection
        if use_projection:
            self.conv2d_proj = Conv2dFixedPadding(1, inputs, filters, strides)
            self.bn_relu_proj = BatchNormRelu(filters, relu=False)
        self.conv2d_0 = Conv2dFixedPadding(3, inputs, filters, strides)
        self.bn_relu_0 = BatchNormRelu(filters)
        self.conv2d_1 = Conv2dFixedPadding(3, filters, filters)
        self.bn_relu_1 = BatchNormRelu(filters, relu=False)

    def forward(self, inputs):
        shortcut = inputs
        if self.use_projection:
            shortcut = self.bn_relu_proj(self.conv2d_proj(inputs))
        inputs = self.bn_relu_0(self.conv2d_0(inputs))
        inputs = self.bn_relu_1(self.conv2d_1(inputs))
        return torch.relu(inputs + shortcut)


class Resnet(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.initial_conv = Conv2dFixedPadding(3, 3, width)
        self.initial_bn_relu = BatchNormRelu(width)
        self.block_0 = ResidualBlock(width, width, 1, use_projection=False)
        self.block_1 = ResidualBlock(width, 24, 2, use_projection=True)
        self.block_2 = ResidualBlock(24, 32, 2, use_projection=True)

    def forward(self, inputs):
        inputs = self.initial_bn_relu(self.initial_conv(inputs))
        for block in (self.block_0, self.block_1, self.block_2):
            inputs = block(inputs)
        return torch.mean(inputs, dim=(1, 2))


# ---------------------------------------------------------------------- model


class Dense(Layer):
    def __init__(self, inputs, units, use_bias):
        super().__init__()
        self.use_bias = use_bias
        self.add_weight("kernel", (inputs, units))
        if use_bias:
            self.add_weight("bias", (units,))

    def forward(self, inputs):
        outputs = torch.matmul(inputs, self.kernel)
        return outputs + self.bias if self.use_bias else outputs


class LinearLayer(nn.Module):
    """A bias is part of the norm, where there is one."""

    def __init__(self, inputs, units, use_bias=True, use_bn=False):
        super().__init__()
        self.use_bn = use_bn
        self.dense = Dense(inputs, units, use_bias and not use_bn)
        if use_bn:
            self.bn_relu = BatchNormRelu(units, relu=False, center=use_bias)

    def forward(self, inputs):
        outputs = self.dense(inputs)
        return self.bn_relu(outputs) if self.use_bn else outputs


class ProjectionHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.nl_0 = LinearLayer(32, 32, use_bias=True, use_bn=True)
        self.nl_1 = LinearLayer(32, 16, use_bias=False, use_bn=True)

    def forward(self, inputs):
        return self.nl_1(torch.relu(self.nl_0(inputs)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.resnet_model = Resnet()
        self.projection_head = ProjectionHead()
        self.head_supervised = LinearLayer(32, FLAGS["num_classes"])

    def forward(self, inputs):
        features = torch.cat(torch.split(inputs, 3, dim=-1), dim=0)
        hiddens = self.resnet_model(features)
        projections = self.projection_head(hiddens)
        logits = self.head_supervised(hiddens.detach())
        return projections, logits

    def supervised_head_l2(self):
        """Half the sum of squares, as l2_loss is there."""
        kernels = [
            v for k, v in self.named_parameters() if re.search("head_sup.*kernel", k)
        ]
        return sum(torch.sum(torch.square(v)) / 2.0 for v in kernels)


# ------------------------------------------------------------------ objective


class SoftmaxCrossEntropyWithLogits(Function):
    """labels and logits [batch, classes]; losses [batch]."""

    @staticmethod
    def forward(ctx, labels, logits):
        shifted = logits - torch.amax(logits, dim=-1, keepdim=True)
        exp = torch.exp(shifted)
        total = torch.sum(exp, dim=-1, keepdim=True)
        ctx.save_for_backward(labels, exp / total)
        return torch.sum(labels * (torch.log(total) - shifted), dim=-1)

    @staticmethod
    def backward(ctx, upstream):
        labels, softmax = ctx.saved_tensors
        return None, upstream[:, None] * (softmax - labels)


def softmax_cross_entropy_with_logits(labels, logits):
    return SoftmaxCrossEntropyWithLogits.apply(labels, logits)


def l2_normalize(x, axis):
    square_sum = torch.sum(torch.square(x), dim=axis, keepdim=True)
    return x * torch.rsqrt(torch.clip(square_sum, min=1e-12))


def add_contrastive_loss(hidden1, hidden2):
    """Each view is looked for among all others of both; the mean of both directions."""
    temperature = FLAGS["temperature"]
    if FLAGS["hidden_norm"]:
        hidden1, hidden2 = l2_normalize(hidden1, -1), l2_normalize(hidden2, -1)
    batch_size = hidden1.shape[0]
    index = torch.arange(batch_size)
    labels = nn.functional.one_hot(index, batch_size * 2).float()
    masks = nn.functional.one_hot(index, batch_size).float()

    logits_aa = torch.matmul(hidden1, hidden1.T) / temperature
    logits_aa = logits_aa - masks * LARGE_NUM
    logits_bb = torch.matmul(hidden2, hidden2.T) / temperature
    logits_bb = logits_bb - masks * LARGE_NUM
    logits_ab = torch.matmul(hidden1, hidden2.T) / temperature
    logits_ba = torch.matmul(hidden2, hidden1.T) / temperature

    loss_a = softmax_cross_entropy_with_logits(
        labels, torch.cat([logits_ab, logits_aa], dim=1)
    )
    loss_b = softmax_cross_entropy_with_logits(
        labels, torch.cat([logits_ba, logits_bb], dim=1)
    )
    return torch.mean(loss_a + loss_b) / 2.0


def add_supervised_loss(labels, logits):
    return torch.mean(softmax_cross_entropy_with_logits(labels, logits))


# ----------------------------------------------------------------- checkpoint


def assign(layer, **values):
    with torch.no_grad():
        for name, value in values.items():
            getattr(layer, name).copy_(value)


def load_torch_checkpoint(net, state):
    def conv(layer, name):
        assign(layer, kernel=torch.permute(state[name + ".weight"], (2, 3, 1, 0)))

    def norm(layer, name):
        values = {
            "gamma": state[name + ".weight"],
            "moving_mean": state[name + ".running_mean"],
            "moving_variance": state[name + ".running_var"],
        }
        if name + ".bias" in state:
            values["beta"] = state[name + ".bias"]
        assign(layer.batch_normalization, **values)

    def dense(layer, name):
        assign(layer, kernel=state[name + ".weight"].T)
        if layer.use_bias:
            assign(layer, bias=state[name + ".bias"])

    resnet = net.resnet_model
    conv(resnet.initial_conv, "encoder.conv1")
    norm(resnet.initial_bn_relu, "encoder.bn1")
    for i, block in enumerate((resnet.block_0, resnet.block_1, resnet.block_2), 1):
        for j in (0, 1):
            conv(getattr(block, f"conv2d_{j}"), f"encoder.layer{i}.conv{j + 1}")
            norm(getattr(block, f"bn_relu_{j}"), f"encoder.layer{i}.bn{j + 1}")
        if block.use_projection:
            conv(block.conv2d_proj, f"encoder.layer{i}.downsample.0")
            norm(block.bn_relu_proj, f"encoder.layer{i}.downsample.1")

    head = net.projection_head
    for i, layer in enumerate((head.nl_0, head.nl_1), 1):
        dense(layer.dense, f"projector.fc{i}")
        norm(layer.bn_relu, f"projector.bn{i}")
    dense(net.head_supervised.dense, "probe")


# ------------------------------------------------------------------------ run


def model():
    net = Model()
    state = torch.load(Path(__file__).with_name("weights.pt"))
    load_torch_checkpoint(net, state)
    return net


def forward(net, batch):
    projections, logits = net(map_fn(batch))
    return {
        "projection": torch.stack(torch.chunk(projections, 2)),
        "logits": torch.stack(torch.chunk(logits, 2)),
        "l2": net.supervised_head_l2(),
    }


def loss(output, batch):
    contrastive = add_contrastive_loss(output["projection"][0], output["projection"][1])
    labels = nn.functional.one_hot(batch["label"], FLAGS["num_classes"]).float()
    labels = torch.cat([labels, labels], dim=0)
    logits = torch.cat(torch.unbind(output["logits"]), dim=0)
    supervised = add_supervised_loss(labels, logits)
    return contrastive + supervised + FLAGS["weight_decay"] * output["l2"]


class WarmUpAndCosineDecay:
    def __init__(self, base_learning_rate):
        batch_size = FLAGS["train_batch_size"]
        if FLAGS["learning_rate_scaling"] == "linear":
            self.scaled_lr = base_learning_rate * batch_size / 256.0
        else:
            self.scaled_lr = base_learning_rate * math.sqrt(batch_size)

    def __call__(self, step):
        """The rate of a step; the first is 1."""
        warmup_steps = FLAGS["warmup_steps"]
        if step < warmup_steps:
            return self.scaled_lr * step / warmup_steps
        decay_steps = FLAGS["train_steps"] - warmup_steps
        progress = min(step - warmup_steps, decay_steps) / decay_steps
        return self.scaled_lr * math.cos(math.pi * progress / 2.0) ** 2


class LARSOptimizer(torch.optim.Optimizer):
    """What is excluded from the decay does not adapt either."""

    def __init__(self, named, learning_rate, exclude):
        named = list(named)
        self.names = [name for name, _ in named]
        super().__init__([v for _, v in named], {})
        self.learning_rate = learning_rate
        self.exclude = exclude
        self.iterations = 0

    def is_excluded(self, name):
        return any(re.search(pattern, name) for pattern in self.exclude)

    @torch.no_grad()
    def step(self, closure=None):
        self.iterations += 1
        lr = self.learning_rate(self.iterations)
        last_lr = self.learning_rate(max(self.iterations - 1, 1))
        for name, param in zip(self.names, self.param_groups[0]["params"]):
            grad = param.grad
            trust_ratio = torch.ones(())
            if not self.is_excluded(name):
                grad = grad + FLAGS["weight_decay"] * param
                w_norm, g_norm = torch.linalg.norm(param), torch.linalg.norm(grad)
                trust_ratio = torch.where(
                    (w_norm > 0) & (g_norm > 0),
                    EETA_DEFAULT * w_norm / g_norm,
                    trust_ratio,
                )
            scaled_lr = lr * trust_ratio
            slots = self.state[param]
            if not slots:
                slots["Momentum"] = torch.zeros_like(param)
            # The rate is inside the slot: what is in there goes over to the new one.
            momentum = FLAGS["momentum"] * lr / last_lr
            next_v = momentum * slots["Momentum"] + scaled_lr * grad
            slots["Momentum"] = next_v
            param.sub_(next_v)


def optimizer(net):
    return LARSOptimizer(
        net.named_parameters(),
        WarmUpAndCosineDecay(FLAGS["learning_rate"]),
        exclude=["batch_normalization", "bias", "head_supervised"],
    )
