"""After Keras: layers with weights of their own, [batch, time, channel] throughout.

Complex numbers are pairs of real ones, and the convolution is a product with a Toeplitz matrix.
"""

import math
from pathlib import Path

import torch
from torch import nn

UNITS, STATES, BLOCKS, CLASSES = 16, 8, 3, 5
LABEL_SMOOTHING = 0.1


# ------------------------------------------------------------------- layers


class Layer(nn.Module):
    def set_weights(self, **weights):
        for name, value in weights.items():
            value = value.detach().clone(memory_format=torch.contiguous_format)
            self.register_parameter(name, nn.Parameter(value))
        return self


class Normalization(nn.Module):
    """Statistics are known beforehand."""

    def __init__(self, mean, variance):
        super().__init__()
        self.mean, self.variance = torch.tensor(mean), torch.tensor(variance)

    def forward(self, inputs):
        return (inputs - self.mean) / torch.sqrt(self.variance)


class Dense(Layer):
    def forward(self, inputs):
        return torch.matmul(inputs, self.kernel) + self.bias


class EinsumDense(Layer):
    def __init__(self, equation):
        super().__init__()
        self.equation = equation

    def forward(self, inputs):
        return torch.einsum(self.equation, inputs, self.kernel) + self.bias


class LayerNormalization(Layer):
    def __init__(self, epsilon=1e-5):
        super().__init__()
        self.epsilon = epsilon

    def forward(self, inputs):
        mean = torch.mean(inputs, dim=-1, keepdim=True)
        centered = inputs - mean
        variance = torch.mean(centered * centered, dim=-1, keepdim=True)
        return self.gamma * (centered / torch.sqrt(variance + self.epsilon)) + self.beta


def complex_multiply(a, b):
    (a_re, a_im), (b_re, b_im) = a, b
    return a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re


def complex_divide(a, b):
    b_re, b_im = b
    re, im = complex_multiply(a, (b_re, -b_im))
    square = b_re * b_re + b_im * b_im
    return re / square, im / square


class DiagonalSSM(Layer):
    """Weights are [channel, state]; each stands for itself and its conjugate."""

    def discretized(self, pole, step):
        rate, angle = pole[0] * step, pole[1] * step
        decay = torch.exp(rate)
        grown = decay * torch.cos(angle) - 1.0, decay * torch.sin(angle)
        return rate, angle, complex_divide(grown, pole)

    def impulse_response(self, timesteps):
        """[time, channel]"""
        step = torch.exp(self.log_step)[:, None]
        pole = -torch.exp(self.log_decay), self.frequency
        rate, angle, gain = self.discretized(pole, step)
        c_re, c_im = complex_multiply((self.c_real, self.c_imag), gain)
        t = torch.arange(timesteps, dtype=torch.float32)[:, None, None]
        envelope = torch.exp(t * rate)
        wave = c_re * torch.cos(t * angle) - c_im * torch.sin(t * angle)
        return 2.0 * torch.sum(envelope * wave, dim=-1)

    def toeplitz(self, response):
        """[out time, in time, channel], zero where the input is later"""
        t = torch.arange(len(response))
        lag = t[:, None] - t[None, :]
        matrix = response[torch.clamp(lag, min=0)]
        return torch.where((lag >= 0)[..., None], matrix, 0.0)

    def forward(self, inputs):
        response = self.impulse_response(inputs.shape[1])
        outputs = torch.einsum("tsc,bsc->btc", self.toeplitz(response), inputs)
        return outputs + self.skip * inputs


def gelu(x):
    return x * 0.5 * torch.special.erfc(-x / math.sqrt(2.0))


class S4DBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = LayerNormalization()
        self.ssm = DiagonalSSM()
        self.projection = EinsumDense("btc,cgd->btgd")

    def gated(self, inputs):
        projected = self.projection(inputs)
        return projected[:, :, 0] * torch.sigmoid(projected[:, :, 1])

    def forward(self, inputs):
        x = self.norm(inputs)
        x = self.ssm(x)
        x = gelu(x)
        return inputs + self.gated(x)


class GlobalAveragePooling1D(nn.Module):
    def forward(self, inputs, mask):
        mask = mask[..., None].to(inputs.dtype)
        return torch.sum(inputs * mask, dim=1) / torch.sum(mask, dim=1)


def sequence_mask(lengths, maxlen):
    return torch.arange(maxlen)[None, :] < lengths[:, None]


class S4DClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.normalization = Normalization((2.0, -1.5, 0.5), (2.25, 0.64, 6.25))
        self.embedding = Dense()
        self.blocks = nn.ModuleList([S4DBlock() for _ in range(BLOCKS)])
        self.final_norm = LayerNormalization()
        self.pooling = GlobalAveragePooling1D()
        self.head = Dense()

    def forward(self, series, lengths):
        x = self.embedding(self.normalization(series))
        for block in self.blocks:
            x = block(x)
        mask = sequence_mask(lengths, x.shape[1])
        return self.head(self.pooling(self.final_norm(x), mask))


# --------------------------------------------------------------- checkpoint


def load_dense(layer, state, name):
    kernel = torch.transpose(state[f"{name}.weight"], 0, 1)
    layer.set_weights(kernel=kernel, bias=state[f"{name}.bias"])


def load_norm(layer, state, name):
    layer.set_weights(gamma=state[f"{name}.weight"], beta=state[f"{name}.bias"])


def load_projection(layer, state, name):
    """Rows of torch are all values, then all gates."""
    kernel = state[f"{name}.weight"].reshape(2, UNITS, UNITS)
    bias = state[f"{name}.bias"].reshape(2, UNITS)
    layer.set_weights(kernel=torch.permute(kernel, (2, 0, 1)), bias=bias)


def load_ssm(layer, state, name):
    c = state[f"{name}.kernel.C"]
    layer.set_weights(
        log_step=state[f"{name}.kernel.log_dt"],
        log_decay=state[f"{name}.kernel.log_A_real"],
        frequency=state[f"{name}.kernel.A_imag"],
        c_real=c[..., 0],
        c_imag=c[..., 1],
        skip=state[f"{name}.D"],
    )


def model():
    state = torch.load(Path(__file__).with_name("weights.pt"))
    net = S4DClassifier()
    load_dense(net.embedding, state, "encoder")
    for i, block in enumerate(net.blocks):
        load_norm(block.norm, state, f"layers.{i}.norm")
        load_ssm(block.ssm, state, f"layers.{i}.s4d")
        load_projection(block.projection, state, f"layers.{i}.s4d.output_linear")
    load_norm(net.final_norm, state, "norm")
    load_dense(net.head, state, "decoder")
    return net


# ----------------------------------------------------------------- training


def forward(net, batch):
    return net(batch["series"], batch["lengths"])


def categorical_crossentropy(y_true, logits):
    y_true = y_true * (1.0 - LABEL_SMOOTHING) + LABEL_SMOOTHING / CLASSES
    shifted = logits - torch.amax(logits, dim=-1, keepdim=True).detach()
    log_total = torch.log(torch.sum(torch.exp(shifted), dim=-1, keepdim=True))
    return torch.sum(y_true * (log_total - shifted), dim=-1)


def loss(output, batch):
    y_true = torch.eye(CLASSES)[batch["label"]]
    return torch.mean(categorical_crossentropy(y_true, output))


class AdamW:
    """Works on the variables it is built with; bias corrections are in the rate."""

    def __init__(self, learning_rate, weight_decay=0.0):
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.beta_1, self.beta_2, self.epsilon = 0.9, 0.999, 1e-8
        self.iterations = 0

    def build(self, variables):
        self.variables = variables
        self.momentums = [torch.zeros_like(v) for v in variables]
        self.velocities = [torch.zeros_like(v) for v in variables]

    def apply(self):
        self.iterations += 1
        root = math.sqrt(1.0 - self.beta_2**self.iterations)
        alpha = self.learning_rate * root / (1.0 - self.beta_1**self.iterations)
        for v, m, s in zip(self.variables, self.momentums, self.velocities):
            v.sub_(v * self.weight_decay * self.learning_rate)
            m.add_((v.grad - m) * (1.0 - self.beta_1))
            s.add_((torch.square(v.grad) - s) * (1.0 - self.beta_2))
            v.sub_(alpha * m / (torch.sqrt(s) + self.epsilon * root))


class MultiOptimizer(torch.optim.Optimizer):
    def __init__(self, optimizers_and_variables):
        groups = [variables for _, variables in optimizers_and_variables]
        super().__init__([v for variables in groups for v in variables], {})
        self.optimizers = [optimizer for optimizer, _ in optimizers_and_variables]
        for optimizer, variables in optimizers_and_variables:
            optimizer.build(variables)

    @torch.no_grad()
    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.apply()


def is_slow(name):
    return ".ssm." in name and not name.endswith("skip")


def optimizer(net):
    named = list(net.named_parameters())
    slow = [v for name, v in named if is_slow(name)]
    fast = [v for name, v in named if not is_slow(name)]
    slow_optimizer = AdamW(learning_rate=1e-3)
    fast_optimizer = AdamW(learning_rate=4e-3, weight_decay=0.1)
    return MultiOptimizer([(slow_optimizer, slow), (fast_optimizer, fast)])
