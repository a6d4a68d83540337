"""After TensorFlow and Keras: batch, time, rows, columns, channels; kernels are HWIO.

The encoder runs layer by layer, each over the whole sequence. Gates are i, f, c, o.
"""

import math
from pathlib import Path

import torch
from torch import nn

PAST, FUTURE = 5, 4
MISSING = 255
SCALE = 250.0
FILTERS_LOW, FILTERS_HIGH = 16, 24


# ------------------------------------------------------------------ backend


def conv2d(x, kernel, strides=1, padding="valid"):
    """NHWC and HWIO; SAME pads more at the end where it cannot pad evenly."""
    if padding == "same":
        pads = []
        for size, k in zip(x.shape[1:3], kernel.shape[:2]):
            out = -(-size // strides)
            total = max((out - 1) * strides + k - size, 0)
            pads.append((total // 2, total - total // 2))
        (top, bottom), (left, right) = pads
        x = nn.functional.pad(x, (0, 0, left, right, top, bottom))
    x = torch.permute(x, (0, 3, 1, 2))
    y = nn.functional.conv2d(x, torch.permute(kernel, (3, 2, 0, 1)), stride=strides)
    return torch.permute(y, (0, 2, 3, 1))


def conv2d_transpose(x, kernel, strides):
    """SAME; the kernel is HW, out, in."""
    x = torch.permute(x, (0, 3, 1, 2))
    w = torch.permute(kernel, (3, 2, 0, 1))
    crop = (kernel.shape[0] - strides) // 2
    y = nn.functional.conv_transpose2d(x, w, stride=strides, padding=crop)
    return torch.permute(y, (0, 2, 3, 1))


def hard_sigmoid(x):
    return torch.clamp(0.2 * x + 0.5, 0.0, 1.0)


# ------------------------------------------------------------------- layers


class Layer(nn.Module):
    def __init__(self, **weights):
        super().__init__()
        for name, value in weights.items():
            self.register_parameter(name, nn.Parameter(value.clone().contiguous()))

    def forward(self, *args, **kwargs):
        return self.call(*args, **kwargs)


class ZeroPadding2D(Layer):
    def __init__(self, padding=1):
        super().__init__()
        self.padding = padding

    def call(self, x):
        p = self.padding
        return nn.functional.pad(x, (0, 0, p, p, p, p))


class Conv2D(Layer):
    def __init__(self, weights, strides=1, padding="valid"):
        super().__init__(**weights)
        self.strides = strides
        self.padding = padding

    def call(self, x):
        return conv2d(x, self.kernel, self.strides, self.padding) + self.bias


class Conv2DTranspose(Layer):
    def __init__(self, weights, strides=2):
        super().__init__(**weights)
        self.strides = strides

    def call(self, x):
        return conv2d_transpose(x, self.kernel, self.strides) + self.bias


class GroupNormalization(Layer):
    def __init__(self, weights, groups, epsilon=1e-5):
        super().__init__(**weights)
        self.groups = groups
        self.epsilon = epsilon

    def call(self, x):
        grouped = torch.reshape(x, (*x.shape[:3], self.groups, -1))
        mean = torch.mean(grouped, dim=(1, 2, 4), keepdim=True)
        variance = torch.mean(torch.square(grouped - mean), dim=(1, 2, 4), keepdim=True)
        normalized = (grouped - mean) / torch.sqrt(variance + self.epsilon)
        return torch.reshape(normalized, x.shape) * self.gamma + self.beta


class LeakyReLU(Layer):
    def __init__(self, alpha=0.2):
        super().__init__()
        self.alpha = alpha

    def call(self, x):
        return torch.maximum(x, self.alpha * x)


class TimeDistributed(Layer):
    """Time goes into the batch for the layer inside."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x):
        y = self.layer(torch.flatten(x, 0, 1))
        return torch.reshape(y, (*x.shape[:2], *y.shape[1:]))


class PeepholeConvLSTM2D(Layer):
    """ConvLSTM2D with gates that look at the cell; states are [h, c]."""

    def __init__(
        self, weights, filters, recurrent_activation=torch.sigmoid, stateful=False
    ):
        super().__init__(**weights)
        self.filters = filters
        self.recurrent_activation = recurrent_activation
        self.stateful = stateful
        self.states = None

    def get_initial_state(self, batch):
        if self.stateful and self.states is not None:
            return self.states
        zeros = torch.zeros(batch, *self.peephole_i.shape)
        return [zeros, zeros]

    def step(self, x_t, states):
        h_tm1, c_tm1 = states
        z = conv2d(h_tm1, self.recurrent_kernel, padding="same") + self.bias
        if x_t is not None:
            z = z + conv2d(x_t, self.kernel, padding="same")
        z_i, z_f, z_c, z_o = torch.split(z, self.filters, dim=-1)
        i = self.recurrent_activation(z_i + self.peephole_i * c_tm1)
        f = self.recurrent_activation(z_f + self.peephole_f * c_tm1)
        c = f * c_tm1 + i * torch.tanh(z_c)
        o = self.recurrent_activation(z_o + self.peephole_o * c)
        h = o * torch.tanh(c)
        return h, [h, c]

    def call(self, x):
        """Return the sequence of h and the last states."""
        states = self.get_initial_state(x.shape[0])
        outputs = []
        for x_t in torch.unbind(x, dim=1):
            h, states = self.step(x_t, states)
            outputs.append(h)
        if self.stateful:
            self.states = [state.detach() for state in states]
        return torch.stack(outputs, dim=1), states


# -------------------------------------------------------------------- model


class Nowcaster(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.stem = nn.Sequential(
            ZeroPadding2D(),
            Conv2D(w["down1.0"], strides=2),
            GroupNormalization(w["down1.1"], groups=2),
            LeakyReLU(),
        )
        self.reduction = nn.Sequential(
            ZeroPadding2D(),
            Conv2D(w["down2.0"], strides=2),
            GroupNormalization(w["down2.1"], groups=4),
            LeakyReLU(),
        )
        self.encoder_low = PeepholeConvLSTM2D(w["enc1"], FILTERS_LOW)
        self.encoder_high = PeepholeConvLSTM2D(w["enc2"], FILTERS_HIGH)
        self.decoder_high = PeepholeConvLSTM2D(w["dec2"], FILTERS_HIGH)
        self.decoder_low = PeepholeConvLSTM2D(w["dec1"], FILTERS_LOW)
        self.expansion = nn.Sequential(
            Conv2DTranspose(w["up2.0"]),
            GroupNormalization(w["up2.1"], groups=3),
            LeakyReLU(),
        )
        self.expansion_out = nn.Sequential(
            Conv2DTranspose(w["up1.0"]),
            GroupNormalization(w["up1.1"], groups=2),
            LeakyReLU(),
        )
        self.rain_map = Conv2D(w["head"])

    def encode(self, inputs):
        x = TimeDistributed(self.stem)(inputs)
        x, low = self.encoder_low(x)
        x = TimeDistributed(self.reduction)(x)
        _, high = self.encoder_high(x)
        return low, high

    def forward(self, inputs):
        low, high = self.encode(inputs)
        previous = inputs[:, -1]
        outputs = []
        for _ in range(FUTURE):
            h, high = self.decoder_high.step(None, high)
            features = [self.expansion(h), self.stem(previous)]
            h, low = self.decoder_low.step(torch.cat(features, dim=-1), low)
            frame = torch.sigmoid(self.rain_map(self.expansion_out(h)))
            outputs.append(frame)
            previous = torch.cat([frame, torch.ones_like(frame)], dim=-1)
        return torch.stack(outputs, dim=1)


# ------------------------------------------------------------------ weights


def converted(state):
    """Weights by the names of the checkpoint's layers."""

    def conv(name):
        kernel = torch.permute(state[f"{name}.weight"], (2, 3, 1, 0))
        return {"kernel": kernel, "bias": state[f"{name}.bias"]}

    def conv_transpose(name):
        kernel = torch.permute(state[f"{name}.weight"], (2, 3, 1, 0))
        return {"kernel": kernel, "bias": state[f"{name}.bias"]}

    def norm(name):
        return {"gamma": state[f"{name}.weight"], "beta": state[f"{name}.bias"]}

    def gates(x):
        """i, f, o, c -> i, f, c, o along the last axis."""
        i, f, o, c = torch.chunk(x, 4, dim=-1)
        return torch.cat([i, f, c, o], dim=-1)

    def peephole(name):
        return torch.permute(state[name], (1, 2, 0))

    def conv_lstm(name, inputs):
        both = conv(f"{name}.conv")
        kernel = gates(both["kernel"])
        weights = {
            "recurrent_kernel": kernel[:, :, inputs:],
            "bias": gates(both["bias"]),
            "peephole_i": peephole(f"{name}.w_ci"),
            "peephole_f": peephole(f"{name}.w_cf"),
            "peephole_o": peephole(f"{name}.w_co"),
        }
        if inputs:
            weights["kernel"] = kernel[:, :, :inputs]
        return weights

    return {
        "down1.0": conv("down1.0"),
        "down1.1": norm("down1.1"),
        "enc1": conv_lstm("enc1", 8),
        "down2.0": conv("down2.0"),
        "down2.1": norm("down2.1"),
        "enc2": conv_lstm("enc2", 16),
        "dec2": conv_lstm("dec2", 0),
        "up2.0": conv_transpose("up2.0"),
        "up2.1": norm("up2.1"),
        "dec1": conv_lstm("dec1", 12 + 8),
        "up1.0": conv_transpose("up1.0"),
        "up1.1": norm("up1.1"),
        "head": conv("head"),
    }


def model():
    return Nowcaster(converted(torch.load(Path(__file__).with_name("weights.pt"))))


# --------------------------------------------------------------------- data


def parse(frames):
    """Bytes [batch, time, rows, columns] -> values and mask [..., 1]."""
    frames = frames[..., None]
    mask = torch.not_equal(frames, MISSING).to(torch.float32)
    values = frames.to(torch.float32) / SCALE * mask
    return values, mask


def forward(net, batch):
    values, mask = parse(batch["frames"][:, :PAST])
    return net(torch.cat([values, mask], dim=-1))[..., 0]


# --------------------------------------------------------------------- loss


class BalancedError:
    """Weights by mm/h, as a table of lower bounds and weights."""

    table = ((2.0, 2.0), (5.0, 5.0), (10.0, 10.0), (30.0, 30.0))

    def __init__(self, mae_share=0.5):
        self.mae_share = mae_share

    def rain_rate(self, values):
        dbz = 70.0 * values - 10.0
        return torch.pow(10.0, (dbz / 10.0 - math.log10(58.53)) / 1.56)

    def weights(self, y_true):
        rate = self.rain_rate(y_true)
        weights = torch.ones_like(rate)
        for bound, weight in self.table:
            weights = torch.where(rate >= bound, weight, weights)
        return weights

    def __call__(self, y_true, y_pred, sample_weight):
        error = y_true - y_pred
        losses = torch.square(error) + self.mae_share * torch.abs(error)
        losses = losses * self.weights(y_true) * sample_weight
        return torch.sum(losses) / torch.sum(sample_weight)


def loss(output, batch):
    y_true, mask = parse(batch["frames"][:, -FUTURE:])
    return BalancedError()(y_true, output[..., None], mask)


# ---------------------------------------------------------------- optimizer


class CosineDecay:
    def __init__(self, initial_learning_rate, decay_steps, alpha=0.0):
        self.initial_learning_rate = initial_learning_rate
        self.decay_steps = decay_steps
        self.alpha = alpha

    def __call__(self, step):
        cosine = 0.5 * (1.0 + math.cos(math.pi * step / self.decay_steps))
        decayed = (1.0 - self.alpha) * cosine + self.alpha
        return self.initial_learning_rate * decayed


class Adam(torch.optim.Optimizer):
    """Epsilon is that of the paper's second form, where nothing is corrected but the rate."""

    beta_1, beta_2 = 0.9, 0.995
    epsilon = 1e-5

    def __init__(self, variables, learning_rate, clipvalue):
        super().__init__(variables, {})
        self.learning_rate = learning_rate
        self.clipvalue = clipvalue
        self.iterations = 0

    @torch.no_grad()
    def step(self, closure=None):
        lr = self.learning_rate(self.iterations)
        self.iterations += 1
        correction = math.sqrt(1.0 - self.beta_2**self.iterations)
        alpha = lr * correction / (1.0 - self.beta_1**self.iterations)
        epsilon_hat = self.epsilon * correction
        for variable in self.param_groups[0]["params"]:
            gradient = torch.clip(variable.grad, -self.clipvalue, self.clipvalue)
            slots = self.state[variable]
            if not slots:
                slots["m"] = torch.zeros_like(variable)
                slots["v"] = torch.zeros_like(variable)
            m, v = slots["m"], slots["v"]
            m.add_((gradient - m) * (1.0 - self.beta_1))
            v.add_((torch.square(gradient) - v) * (1.0 - self.beta_2))
            variable.sub_(m * alpha / (torch.sqrt(v) + epsilon_hat))


def optimizer(net):
    schedule = CosineDecay(1e-2, decay_steps=10, alpha=0.05)
    return Adam(net.parameters(), schedule, clipvalue=0.02)
