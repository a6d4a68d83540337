"""After Keras: NHWC and HWIO, layers with masks, one bias for a recurrent cell.

The cost of CTC is written out: forward variables in logarithms over texts with blanks between.
"""

from pathlib import Path

import torch
from torch import nn

CHARACTERS = 10
UNITS = 48
BLANK_INDEX = 0
LOG_ZERO = -1e30
CONFIG = {
    "learning_rate": 1.5,
    "rho": 0.95,
    "epsilon": 1e-6,
    "global_clipnorm": 3.0,
    "l2": 0.01,
    "warmup_steps": 2,
    "total_steps": 12,
    "power": 0.9,
}


# ------------------------------------------------------------------------- layers


class Layer(nn.Module):
    def add_weight(self, name, value, trainable=True):
        value = value.clone().contiguous()
        if trainable:
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

    def forward(self, *args, **kwargs):
        return self.call(*args, **kwargs)


class Conv2D(Layer):
    """[rows, columns, in, out]"""

    def __init__(self, weights, padding="same"):
        super().__init__()
        for name, value in weights.items():
            self.add_weight(name, value)
        self.use_bias = "bias" in weights
        self.padding = padding

    def call(self, inputs):
        pad = (self.kernel.shape[0] - 1) // 2 if self.padding == "same" else 0
        kernel = torch.permute(self.kernel, (3, 2, 0, 1))
        outputs = nn.functional.conv2d(
            torch.permute(inputs, (0, 3, 1, 2)), kernel, padding=pad
        )
        outputs = torch.permute(outputs, (0, 2, 3, 1))
        return outputs + self.bias if self.use_bias else outputs


class BatchNormalization(Layer):
    """The fused one, whose moving variance is that of a sample."""

    moving_mean: torch.Tensor
    moving_variance: torch.Tensor

    def __init__(self, weights, momentum=0.9, epsilon=1e-5):
        super().__init__()
        for name, value in weights.items():
            self.add_weight(name, value, trainable=not name.startswith("moving"))
        self.momentum = momentum
        self.epsilon = epsilon

    def assign_moving_average(self, variable, value):
        with torch.no_grad():
            variable.sub_((variable - value) * (1.0 - self.momentum))

    def call(self, inputs, training):
        mean, variance = self.moving_mean, self.moving_variance
        if training:
            mean = torch.mean(inputs, dim=(0, 1, 2))
            variance = torch.mean(torch.square(inputs - mean), dim=(0, 1, 2))
            n = inputs[..., 0].numel()
            self.assign_moving_average(self.moving_mean, mean)
            self.assign_moving_average(self.moving_variance, variance * n / (n - 1))
        scale = self.gamma * torch.rsqrt(variance + self.epsilon)
        return (inputs - mean) * scale + self.beta


class ZeroPadding2D(Layer):
    def __init__(self, padding):
        super().__init__()
        self.padding = padding

    def call(self, inputs):
        (top, bottom), (left, right) = self.padding
        return nn.functional.pad(inputs, (0, 0, left, right, top, bottom))


class MaxPooling2D(Layer):
    def __init__(self, pool_size, strides):
        super().__init__()
        self.pool_size, self.strides = pool_size, strides

    def call(self, inputs):
        outputs = torch.permute(inputs, (0, 3, 1, 2))
        outputs = nn.functional.max_pool2d(outputs, self.pool_size, self.strides)
        return torch.permute(outputs, (0, 2, 3, 1))


class Dense(Layer):
    def __init__(self, weights):
        super().__init__()
        self.add_weight("kernel", weights["kernel"])
        self.add_weight("bias", weights["bias"])

    def call(self, inputs):
        return torch.matmul(inputs, self.kernel) + self.bias


class LSTM(Layer):
    """[batch, steps, features]; what is masked gives zeros and leaves the state."""

    def __init__(self, weights, go_backwards=False):
        super().__init__()
        self.add_weight("kernel", weights["kernel"])
        self.add_weight("recurrent_kernel", weights["recurrent_kernel"])
        self.add_weight("bias", weights["bias"])
        self.go_backwards = go_backwards

    def step(self, inputs, states):
        h_tm1, c_tm1 = states
        z = torch.matmul(inputs, self.kernel)
        z = z + torch.matmul(h_tm1, self.recurrent_kernel)
        z = z + self.bias
        z0, z1, z2, z3 = torch.chunk(z, 4, dim=1)
        i = torch.sigmoid(z0)
        f = torch.sigmoid(z1)
        c = f * c_tm1 + i * torch.tanh(z2)
        o = torch.sigmoid(z3)
        return o * torch.tanh(c), c

    def call(self, inputs, mask=None):
        if mask is None:
            mask = torch.ones(inputs.shape[:2], dtype=torch.bool)
        if self.go_backwards:
            inputs, mask = torch.flip(inputs, (1,)), torch.flip(mask, (1,))
        h = inputs.new_zeros(inputs.shape[0], UNITS)
        c = torch.zeros_like(h)
        outputs = []
        for t in range(inputs.shape[1]):
            keep = mask[:, t, None]
            new_h, new_c = self.step(inputs[:, t], (h, c))
            outputs.append(torch.where(keep, new_h, torch.zeros_like(new_h)))
            h = torch.where(keep, new_h, h)
            c = torch.where(keep, new_c, c)
        return torch.stack(outputs, dim=1)


class Bidirectional(Layer):
    """merge_mode is concat."""

    def __init__(self, weights):
        super().__init__()
        self.forward_layer = LSTM(weights["forward"])
        self.backward_layer = LSTM(weights["backward"], go_backwards=True)

    def call(self, inputs, mask=None):
        y = self.forward_layer(inputs, mask=mask)
        y_rev = torch.flip(self.backward_layer(inputs, mask=mask), (1,))
        return torch.cat([y, y_rev], dim=-1)


# -------------------------------------------------------------------------- model


class TextRecognizer(Layer):
    def __init__(self, weights):
        super().__init__()
        self.conv_1 = Conv2D(weights["conv_1"])
        self.pool_1 = MaxPooling2D((2, 2), strides=(2, 2))
        self.pad = ZeroPadding2D(((0, 0), (1, 1)))
        self.tall_pool = MaxPooling2D((2, 2), strides=(2, 1))
        for i in (2, 3, 4):
            padding = "valid" if i == 4 else "same"
            self.add_module(f"conv_{i}", Conv2D(weights[f"conv_{i}"], padding))
            self.add_module(f"bn_{i}", BatchNormalization(weights[f"bn_{i}"]))
        self.bidirectional_1 = Bidirectional(weights["bidirectional_1"])
        self.dense_1 = Dense(weights["dense_1"])
        self.bidirectional_2 = Bidirectional(weights["bidirectional_2"])
        self.dense_2 = Dense(weights["dense_2"])

    def call(self, images, mask, training):
        x = self.pool_1(torch.relu(self.conv_1(images)))
        x = torch.relu(self.bn_2(self.conv_2(x), training=training))
        x = self.tall_pool(self.pad(x))
        x = torch.relu(self.bn_3(self.conv_3(x), training=training))
        x = self.tall_pool(self.pad(x))
        x = torch.relu(self.bn_4(self.conv_4(x), training=training))

        x = torch.reshape(x, (x.shape[0], x.shape[2], -1))
        x = self.dense_1(self.bidirectional_1(x, mask=mask))
        x = self.bidirectional_2(x, mask=mask)
        return self.dense_2(x)


# ------------------------------------------------------------------------ weights


def from_torch(state):
    """Names and layouts of Keras; gates are i, f, c, o in both."""

    def conv(name):
        weights = {"kernel": torch.permute(state[f"{name}.weight"], (2, 3, 1, 0))}
        if f"{name}.bias" in state:
            weights["bias"] = state[f"{name}.bias"]
        return weights

    def batch_norm(name):
        return {
            "gamma": state[f"{name}.weight"],
            "beta": state[f"{name}.bias"],
            "moving_mean": state[f"{name}.running_mean"],
            "moving_variance": state[f"{name}.running_var"],
        }

    def lstm(name, suffix):
        bias = state[f"{name}.bias_ih_l0{suffix}"] + state[f"{name}.bias_hh_l0{suffix}"]
        return {
            "kernel": torch.transpose(state[f"{name}.weight_ih_l0{suffix}"], 0, 1),
            "recurrent_kernel": torch.transpose(
                state[f"{name}.weight_hh_l0{suffix}"], 0, 1
            ),
            "bias": bias,
        }

    weights = {"conv_1": conv("cnn.0")}
    for i, place in ((2, 3), (3, 5), (4, 7)):
        weights[f"conv_{i}"] = conv(f"cnn.{place}.conv")
        weights[f"bn_{i}"] = batch_norm(f"cnn.{place}.norm")
    for i in (1, 2):
        name = f"rnn.{i - 1}"
        weights[f"bidirectional_{i}"] = {
            "forward": lstm(f"{name}.rnn", ""),
            "backward": lstm(f"{name}.rnn", "_reverse"),
        }
        weights[f"dense_{i}"] = {
            "kernel": torch.transpose(state[f"{name}.embedding.weight"], 0, 1),
            "bias": state[f"{name}.embedding.bias"],
        }
    return weights


def model():
    state = torch.load(Path(__file__).with_name("weights.pt"))
    return TextRecognizer(from_torch(state))


# --------------------------------------------------------------------------- data


def sequence_mask(lengths, maxlen):
    return torch.arange(maxlen)[None, :] < lengths[:, None]


def input_length(batch):
    return torch.div(batch["width"], 2, rounding_mode="floor") + 1


def preprocess(batch):
    """Lines as [batch, height, width, 1] from -1 to 1."""
    images = batch["image"].to(torch.float32)[..., None] / 127.5 - 1.0
    inside = sequence_mask(batch["width"], images.shape[2])
    return images * inside[:, None, :, None]


def dense_labels(batch):
    """Texts one behind the other -> [batch, longest text], with blanks behind."""
    lengths = batch["length"]
    mask = sequence_mask(lengths, int(lengths.max()))
    labels = torch.full(mask.shape, BLANK_INDEX, dtype=batch["text"].dtype)
    return labels.masked_scatter(mask, batch["text"])


def forward(net, batch):
    images = preprocess(batch)
    steps = images.shape[2] // 2 + 1
    mask = sequence_mask(input_length(batch), steps)
    logits = net(images, mask, training=net.training)
    return torch.permute(logits, (1, 0, 2))  # steps first, as in the other program


# --------------------------------------------------------------------------- loss


def ctc_batch_cost(y_true, log_probs, input_length, label_length):
    """y_true [batch, letters], log_probs [batch, steps, classes] -> [batch]"""
    batch, letters = y_true.shape
    states = torch.full((batch, 2 * letters + 1), BLANK_INDEX)
    states[:, 1::2] = y_true
    emitted = torch.gather(
        log_probs, 2, states[:, None, :].expand(-1, log_probs.shape[1], -1)
    )

    # The blank between two letters may be passed over where they differ.
    two_back = nn.functional.pad(states, (2, 0), value=BLANK_INDEX)[:, :-2]
    passes = torch.logical_and(states != BLANK_INDEX, states != two_back)
    penalty = torch.where(passes, 0.0, LOG_ZERO)

    start = torch.arange(states.shape[1]) < 2
    alpha = torch.where(start, emitted[:, 0], LOG_ZERO)
    for t in range(1, log_probs.shape[1]):
        stay = alpha
        move = nn.functional.pad(alpha, (1, 0), value=LOG_ZERO)[:, :-1]
        skip = nn.functional.pad(alpha, (2, 0), value=LOG_ZERO)[:, :-2] + penalty
        moved = torch.logsumexp(torch.stack([stay, move, skip]), dim=0)
        active = (t < input_length)[:, None]
        alpha = torch.where(active, moved + emitted[:, t], alpha)

    final = 2 * label_length[:, None]
    ends = torch.cat([final, final - 1], dim=1)
    likelihood = torch.logsumexp(torch.gather(alpha, 1, ends), dim=1)
    possible = likelihood > 0.5 * LOG_ZERO
    return torch.where(possible, -likelihood, torch.zeros_like(likelihood))


def loss(output, batch):
    """The mean over the batch; texts that do not fit have no cost."""
    logits = torch.permute(output, (1, 0, 2))
    log_probs = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    costs = ctc_batch_cost(
        dense_labels(batch), log_probs, input_length(batch), batch["length"]
    )
    return torch.mean(costs)


# ---------------------------------------------------------------------- optimizer


class WarmUpPolynomialDecay:
    def __init__(self, initial_learning_rate, warmup_steps, total_steps, power):
        self.initial_learning_rate = initial_learning_rate
        self.warmup_steps = warmup_steps
        self.decay_steps = total_steps - warmup_steps
        self.power = power

    def __call__(self, step):
        if step < self.warmup_steps:
            return self.initial_learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / self.decay_steps
        return self.initial_learning_rate * (1.0 - progress) ** self.power


class Adadelta(torch.optim.Optimizer):
    """Kernels have a penalty, whose gradient comes behind the clipping.

    A cell's bias stands for two equal ones: it counts twice in the norm and moves twice.
    """

    def __init__(self, named, learning_rate, rho, epsilon, global_clipnorm, l2):
        self.names, variables = zip(*named)
        super().__init__(variables, {})
        self.learning_rate, self.rho, self.epsilon = learning_rate, rho, epsilon
        self.global_clipnorm, self.l2 = global_clipnorm, l2
        self.iterations = 0

    @staticmethod
    def copies(name):
        return 2.0 if name.endswith("_layer.bias") else 1.0

    def clip(self, gradients):
        total = sum(
            self.copies(name) * torch.sum(torch.square(g))
            for name, g in zip(self.names, gradients)
        )
        norm = torch.sqrt(total)
        scale = self.global_clipnorm / torch.clamp(norm, min=self.global_clipnorm)
        return [g * scale for g in gradients]

    @torch.no_grad()
    def step(self, closure=None):
        lr = self.learning_rate(self.iterations)
        self.iterations += 1
        variables = self.param_groups[0]["params"]
        gradients = self.clip([v.grad for v in variables])
        for name, variable, gradient in zip(self.names, variables, gradients):
            if name.endswith("kernel"):
                gradient = gradient + self.l2 * variable
            slots = self.state[variable]
            if not slots:
                slots["accumulated_grad"] = torch.zeros_like(variable)
                slots["accumulated_delta_var"] = torch.zeros_like(variable)
            grads, deltas = slots["accumulated_grad"], slots["accumulated_delta_var"]
            grads.mul_(self.rho).add_((1.0 - self.rho) * torch.square(gradient))
            delta = torch.sqrt(deltas + self.epsilon) * gradient
            delta = -delta / torch.sqrt(grads + self.epsilon)
            deltas.mul_(self.rho).add_((1.0 - self.rho) * torch.square(delta))
            variable.add_(lr * self.copies(name) * delta)


def optimizer(net):
    schedule = WarmUpPolynomialDecay(
        CONFIG["learning_rate"],
        CONFIG["warmup_steps"],
        CONFIG["total_steps"],
        CONFIG["power"],
    )
    return Adadelta(
        net.named_parameters(),
        schedule,
        CONFIG["rho"],
        CONFIG["epsilon"],
        CONFIG["global_clipnorm"],
        CONFIG["l2"],
    )
