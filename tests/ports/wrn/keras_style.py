"""After Keras: NHWC and HWIO, layers with regularisers, an optimizer with velocities.

The loss that is reported is the compiled one. The regularisers' losses come to it where the
train step takes gradients, in ``SGD.minimize``; nothing else decays.
"""

import math
from pathlib import Path

import torch
from torch import nn

HEIGHT, WIDTH, NUM_CLASSES = 16, 16, 7
BLOCKS_PER_STAGE = 2
RGB_MEAN = (0.4914, 0.4822, 0.4465)
RGB_STDDEV = (0.2470, 0.2435, 0.2616)
CONFIG = {
    "learning_rate": 0.1,
    "momentum": 0.9,
    "l2": 0.01,
    "warmup_steps": 2,
    "train_steps": 12,
    "ema_momentum": 0.9,
    "label_smoothing": 0.1,
    "consistency_weight": 8.0,
    "sharpen": 2.0,
}


# --------------------------------------------------------------- regularisers


class L2:
    def __init__(self, l2):
        self.l2 = l2

    def __call__(self, x):
        return self.l2 * torch.sum(torch.square(x))


# --------------------------------------------------------------------- layers


class Layer(nn.Module):
    """Variables are named as in Keras; the regulariser is for the kernel."""

    kernel_regularizer: L2 | None = None

    def add_weight(self, name, value, trainable=True):
        value = value.clone().contiguous()
        if trainable:
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

    def forward(self, *args, **kwargs):
        return self.call(*args, **kwargs)

    def loss(self):
        if self.kernel_regularizer is None:
            return None
        return self.kernel_regularizer(self.kernel)


class Conv2D(Layer):
    def __init__(self, kernel, strides=1, padding="same"):
        super().__init__()
        self.add_weight("kernel", kernel)
        self.strides = strides
        self.padding = padding
        self.kernel_regularizer = L2(CONFIG["l2"])

    def call(self, inputs):
        """SAME pads more at the end where it cannot pad evenly."""
        if self.padding == "same":
            pads = []
            for size, k in zip(inputs.shape[1:3], self.kernel.shape[:2]):
                outputs = -(-size // self.strides)
                total = max((outputs - 1) * self.strides + k - size, 0)
                pads.append((total // 2, total - total // 2))
            (top, bottom), (left, right) = pads
            inputs = nn.functional.pad(inputs, (0, 0, left, right, top, bottom))
        nchw = torch.permute(inputs, (0, 3, 1, 2))
        oihw = torch.permute(self.kernel, (3, 2, 0, 1))
        y = nn.functional.conv2d(nchw, oihw, stride=self.strides)
        return torch.permute(y, (0, 2, 3, 1))


class ZeroPadding2D(Layer):
    def __init__(self, padding):
        super().__init__()
        self.padding = padding

    def call(self, inputs):
        (top, bottom), (left, right) = self.padding
        return nn.functional.pad(inputs, (0, 0, left, right, top, bottom))


class Dense(Layer):
    def __init__(self, kernel, bias):
        super().__init__()
        self.add_weight("kernel", kernel)
        self.add_weight("bias", bias)
        self.kernel_regularizer = L2(CONFIG["l2"])

    def call(self, inputs):
        return torch.matmul(inputs, self.kernel) + self.bias


class LeakyReLU(Layer):
    def __init__(self, negative_slope=0.1):
        super().__init__()
        self.negative_slope = negative_slope

    def call(self, inputs):
        return torch.maximum(inputs, self.negative_slope * inputs)


class BatchNormalization(Layer):
    """The fused one: its moving variance is that of a sample."""

    moving_mean: torch.Tensor
    moving_variance: torch.Tensor

    def __init__(self, weights, momentum=0.9, epsilon=1e-5):
        super().__init__()
        gamma, beta, moving_mean, moving_variance = weights
        self.add_weight("gamma", gamma)
        self.add_weight("beta", beta)
        self.add_weight("moving_mean", moving_mean, trainable=False)
        self.add_weight("moving_variance", moving_variance, trainable=False)
        self.momentum = momentum
        self.epsilon = epsilon

    @torch.no_grad()
    def assign_moving_averages(self, mean, variance, count):
        sample_variance = variance * (count / (count - 1))
        for variable, value in (
            (self.moving_mean, mean),
            (self.moving_variance, sample_variance),
        ):
            variable.copy_(variable * self.momentum + value * (1.0 - self.momentum))

    def call(self, inputs, training):
        if training:
            mean = torch.mean(inputs, dim=(0, 1, 2))
            variance = torch.mean(torch.square(inputs - mean), dim=(0, 1, 2))
            self.assign_moving_averages(mean, variance, inputs[..., 0].numel())
        else:
            mean, variance = self.moving_mean, self.moving_variance
        inv = self.gamma * torch.rsqrt(variance + self.epsilon)
        return inputs * inv + (self.beta - mean * inv)


# ---------------------------------------------------------------------- model


class ResidualUnit(Layer):
    def __init__(self, weights, strides):
        super().__init__()
        self.bn_a = BatchNormalization(weights["bn_a"])
        self.relu_a = LeakyReLU()
        self.pad = ZeroPadding2D(((1, 1), (1, 1)))
        self.conv_a = Conv2D(weights["conv_a"], strides, padding="valid")
        self.bn_b = BatchNormalization(weights["bn_b"])
        self.relu_b = LeakyReLU()
        self.conv_b = Conv2D(weights["conv_b"])
        self.projection = None
        if "projection" in weights:
            self.projection = Conv2D(weights["projection"], strides, padding="valid")

    def call(self, inputs, training):
        x = self.relu_a(self.bn_a(inputs, training=training))
        residual = inputs
        if self.projection is not None:
            residual = self.projection(x)
        x = self.conv_a(self.pad(x))
        x = self.conv_b(self.relu_b(self.bn_b(x, training=training)))
        return torch.add(x, residual)


class WideResNet(Layer):
    def __init__(self, weights):
        super().__init__()
        self.stem = Conv2D(weights["stem"])
        self.units = nn.ModuleList()
        for stage, strides in enumerate((1, 2, 2)):
            for i in range(BLOCKS_PER_STAGE):
                unit = weights[f"stage{stage}_unit{i}"]
                self.units.append(ResidualUnit(unit, strides if i == 0 else 1))
        self.bn_top = BatchNormalization(weights["bn_top"])
        self.relu_top = LeakyReLU()
        self.predictions = Dense(*weights["predictions"])

    def call(self, inputs, training):
        x = self.stem(inputs)
        for unit in self.units:
            x = unit(x, training=training)
        x = self.relu_top(self.bn_top(x, training=training))
        return self.predictions(torch.mean(x, dim=(1, 2)))

    @property
    def weights(self):
        return [*self.parameters(), *self.buffers()]

    @property
    def trainable_weights(self):
        return list(self.parameters())

    @property
    def losses(self):
        losses = [m.loss() for m in self.modules() if isinstance(m, Layer)]
        return [loss for loss in losses if loss is not None]


class SemiSupervised(nn.Module):
    def __init__(self, student, teacher, num_updates):
        super().__init__()
        self.student = student
        self.teacher = teacher
        for variable in teacher.parameters():
            variable.requires_grad_(False)
        self.register_buffer("num_updates", num_updates.clone())

    def forward(self, images, teacher_images):
        return {
            "logits": self.student(images, training=self.training),
            "target": self.teacher(teacher_images, training=False),
        }


# -------------------------------------------------------------------- weights


def converted(state, root):
    def kernel(name):
        return torch.permute(state[f"{root}.{name}.weight"], (2, 3, 1, 0))

    def norm(name):
        names = ("weight", "bias", "running_mean", "running_var")
        return [state[f"{root}.{name}.{part}"] for part in names]

    weights = {"stem": kernel("conv1"), "bn_top": norm("bn")}
    for stage in range(3):
        for i in range(BLOCKS_PER_STAGE):
            name = f"group{stage + 1}.{i}"
            unit = {
                "bn_a": norm(f"{name}.bn1"),
                "conv_a": kernel(f"{name}.conv1"),
                "bn_b": norm(f"{name}.bn2"),
                "conv_b": kernel(f"{name}.conv2"),
            }
            if f"{root}.{name}.shortcut.weight" in state:
                unit["projection"] = kernel(f"{name}.shortcut")
            weights[f"stage{stage}_unit{i}"] = unit
    dense = torch.transpose(state[f"{root}.fc.weight"], 0, 1)
    weights["predictions"] = (dense, state[f"{root}.fc.bias"])
    return weights


def model():
    state = torch.load(Path(__file__).with_name("weights.pt"))
    student = WideResNet(converted(state, "student"))
    teacher = WideResNet(converted(state, "teacher"))
    return SemiSupervised(student, teacher, state["updates"])


# ----------------------------------------------------------------------- data


def random_crop(images, offsets, pad=2):
    padded = nn.functional.pad(
        torch.permute(images, (0, 3, 1, 2)), (pad,) * 4, mode="reflect"
    )
    padded = torch.permute(padded, (0, 2, 3, 1))
    crops = []
    for image, offset in zip(padded, offsets):
        offset_height, offset_width = offset.tolist()
        rows = image[offset_height : offset_height + HEIGHT]
        crops.append(rows[:, offset_width : offset_width + WIDTH])
    return torch.stack(crops)


def random_flip(images, flip):
    return torch.where(flip[:, None, None, None], torch.flip(images, (2,)), images)


def standardize(images):
    mean = torch.tensor(RGB_MEAN) * 255.0
    stddev = torch.tensor(RGB_STDDEV) * 255.0
    return (images - mean) / stddev


def random_cutout(images, center, mask_size=6):
    """Constant values of zero in the squares."""
    half = mask_size // 2
    row = torch.arange(HEIGHT) - center[:, :1]
    column = torch.arange(WIDTH) - center[:, 1:]
    in_rows = torch.logical_and(row >= -half, row < half)
    in_columns = torch.logical_and(column >= -half, column < half)
    hidden = torch.logical_and(in_rows[:, :, None], in_columns[:, None, :])
    return torch.where(hidden[..., None], torch.zeros_like(images), images)


def mixup(values, partner, lam):
    lam = torch.reshape(lam, (-1,) + (1,) * (values.ndim - 1))
    return values * lam + torch.index_select(values, 0, partner) * (1.0 - lam)


def forward(net, batch):
    images = random_crop(batch["image"].to(torch.float32), batch["offset"])
    images = standardize(random_flip(images, batch["flip"]))
    hidden = random_cutout(images, batch["hole"])
    mixed = mixup(hidden, batch["partner"], batch["lam"])
    return net(mixed, images)


# ----------------------------------------------------------------------- loss


class CategoricalCrossentropy:
    def __init__(self, label_smoothing):
        self.label_smoothing = label_smoothing

    def __call__(self, y_true, logits):
        smoothing, num_classes = self.label_smoothing, y_true.shape[-1]
        y_true = y_true * (1.0 - smoothing) + smoothing / num_classes
        log_probs = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
        return torch.mean(-torch.sum(y_true * log_probs, dim=-1))


class MeanSquaredError:
    def __call__(self, y_true, y_pred):
        squares = torch.mean(torch.square(y_true - y_pred), dim=-1)
        return torch.mean(squares)


def loss(output, batch):
    partner, lam = batch["partner"], batch["lam"]
    one_hot = nn.functional.one_hot(batch["label"], NUM_CLASSES)
    y_true = mixup(one_hot.to(torch.float32), partner, lam)
    supervised = CategoricalCrossentropy(CONFIG["label_smoothing"])(
        y_true, output["logits"]
    )

    sharpened = torch.softmax(output["target"] * CONFIG["sharpen"], dim=-1)
    target = mixup(sharpened, partner, lam)
    prediction = torch.softmax(output["logits"], dim=-1)
    consistency = MeanSquaredError()(target.detach(), prediction)
    return supervised + CONFIG["consistency_weight"] * consistency


# ------------------------------------------------------------------- training


class WarmUpCosineDecay:
    def __init__(self, base, warmup_steps, train_steps):
        self.base = base
        self.warmup_steps = warmup_steps
        self.decay_steps = train_steps - warmup_steps

    def __call__(self, step):
        if step < self.warmup_steps:
            return self.base * (step + 1) / self.warmup_steps
        progress = (step + 1 - self.warmup_steps) / self.decay_steps
        return self.base * math.cos(progress * 7.0 * math.pi / 16.0)


class MovingAverageCallback:
    """After tf.train.ExponentialMovingAverage with zero_debias: the momentum grows."""

    def __init__(self, model, momentum):
        self.model = model
        self.momentum = momentum

    @torch.no_grad()
    def on_train_batch_end(self):
        self.model.num_updates += 1
        power = self.momentum ** (self.model.num_updates.item() - 1)
        momentum = self.momentum * (1.0 - power) / (1.0 - self.momentum * power)
        student, teacher = self.model.student.weights, self.model.teacher.weights
        for value, average in zip(student, teacher):
            average.copy_(average * momentum + value * (1.0 - momentum))


class SGD(torch.optim.Optimizer):
    """Rates are inside of the velocities, which follow them when they change."""

    def __init__(self, model, learning_rate, momentum, callbacks):
        self.model = model
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.callbacks = callbacks
        self.iterations = 0
        self.last_lr = None
        super().__init__(model.student.trainable_weights, {})

    def regularization_gradients(self, variables):
        with torch.enable_grad():
            total = torch.sum(torch.stack(self.model.student.losses))
            return torch.autograd.grad(total, variables, allow_unused=True)

    @torch.no_grad()
    def minimize(self):
        variables = self.param_groups[0]["params"]
        decays = self.regularization_gradients(variables)
        lr = self.learning_rate(self.iterations)
        ratio = lr / self.last_lr if self.last_lr else 1.0
        for variable, decay in zip(variables, decays):
            gradient = variable.grad
            if decay is not None:
                gradient = gradient + decay
            slots = self.state[variable]
            if not slots:
                slots["momentum"] = torch.zeros_like(variable)
            m = slots["momentum"]
            m.copy_(m * ratio * self.momentum - gradient * lr)
            variable.add_(m * self.momentum - gradient * lr)
        self.iterations += 1
        self.last_lr = lr

    def step(self, closure=None):
        self.minimize()
        for callback in self.callbacks:
            callback.on_train_batch_end()


def optimizer(net):
    schedule = WarmUpCosineDecay(
        CONFIG["learning_rate"], CONFIG["warmup_steps"], CONFIG["train_steps"]
    )
    average = MovingAverageCallback(net, CONFIG["ema_momentum"])
    return SGD(net, schedule, CONFIG["momentum"], callbacks=[average])
