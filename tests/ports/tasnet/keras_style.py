"""After Keras: channels last, kernels [width, in, out], layers that are called with a mask.

Residual and skip outputs are one dense layer; speakers are the last axis. Signals are cut
into frames and added up again by hand, as tf.signal does it.
"""

import math
from pathlib import Path

import torch
from torch import nn

NUM_SPEAKERS = 2
FRAME_LENGTH, FRAME_STEP = 16, 8
UNITS = 48
NUM_BLOCKS, CYCLE = 6, 3
LOG_10 = math.log(10.0)


# ---------------------------------------------------------------------- tf.signal


def frame(signals, frame_length, frame_step):
    """[batch, samples] -> [batch, frames, frame_length]"""
    num_frames = 1 + (signals.shape[1] - frame_length) // frame_step
    starts = torch.arange(num_frames) * frame_step
    indices = starts[:, None] + torch.arange(frame_length)[None, :]
    return signals[:, indices]


def overlap_and_add(frames, frame_step):
    """[frames, frame_length, ...] -> [samples, ...]"""
    num_frames, frame_length = frames.shape[:2]
    starts = torch.arange(num_frames) * frame_step
    indices = starts[:, None] + torch.arange(frame_length)[None, :]
    samples = (num_frames - 1) * frame_step + frame_length
    signals = frames.new_zeros((samples, *frames.shape[2:]))
    return signals.index_add(0, indices.flatten(), frames.flatten(0, 1))


# ------------------------------------------------------------------------- layers


def variable(value):
    return nn.Parameter(value.clone().contiguous())


class Conv1D(nn.Module):
    """Pointwise where the kernel has a width of 1; no more is needed."""

    def __init__(self, kernel, bias):
        super().__init__()
        self.kernel = variable(kernel)
        self.bias = variable(bias)

    def forward(self, inputs):
        return torch.tensordot(inputs, self.kernel[0], dims=1) + self.bias


class DepthwiseConv1D(nn.Module):
    """A kernel [width, channels, 1]; padding is SAME."""

    def __init__(self, kernel, bias, dilation_rate):
        super().__init__()
        self.depthwise_kernel = variable(kernel)
        self.bias = variable(bias)
        self.dilation_rate = dilation_rate

    def forward(self, inputs):
        width, time = self.depthwise_kernel.shape[0], inputs.shape[1]
        total = self.dilation_rate * (width - 1)
        before = total // 2
        padded = nn.functional.pad(inputs, (0, 0, before, total - before))
        outputs = self.bias
        for tap in range(width):
            start = tap * self.dilation_rate
            kernel = self.depthwise_kernel[tap, :, 0]
            outputs = outputs + padded[:, start : start + time] * kernel
        return outputs


class PReLU(nn.Module):
    """One alpha, shared by all axes."""

    def __init__(self, alpha):
        super().__init__()
        self.alpha = variable(alpha)

    def forward(self, inputs):
        return torch.relu(inputs) - self.alpha * torch.relu(-inputs)


class GlobalLayerNormalization(nn.Module):
    def __init__(self, gamma, beta, axis=(1, 2), epsilon=1e-8):
        super().__init__()
        self.gamma = variable(gamma)
        self.beta = variable(beta)
        self.axis = axis
        self.epsilon = epsilon

    def weighted_moments(self, inputs, weights):
        """As tf.nn.weighted_moments."""
        weights = weights.expand_as(inputs)
        divisor = torch.sum(weights, self.axis, keepdim=True)
        mean = torch.sum(weights * inputs, self.axis, keepdim=True) / divisor
        squared = torch.square(inputs - mean)
        variance = torch.sum(weights * squared, self.axis, keepdim=True) / divisor
        return mean, variance

    def forward(self, inputs, mask):
        mask = mask.to(inputs.dtype)[:, :, None]
        mean, variance = self.weighted_moments(inputs, mask)
        scale = self.gamma * torch.rsqrt(variance + self.epsilon)
        return (inputs * scale + (self.beta - mean * scale)) * mask


class TemporalBlock(nn.Module):
    def __init__(self, weights, dilation_rate):
        super().__init__()
        self.expand = Conv1D(*weights["expand"])
        self.activation_1 = PReLU(weights["alpha_1"])
        self.normalization_1 = GlobalLayerNormalization(*weights["norm_1"])
        kernel, bias = weights["depthwise"]
        self.depthwise = DepthwiseConv1D(kernel, bias, dilation_rate)
        self.activation_2 = PReLU(weights["alpha_2"])
        self.normalization_2 = GlobalLayerNormalization(*weights["norm_2"])
        self.project = Conv1D(*weights["project"])

    def forward(self, inputs, mask):
        x = self.expand(inputs)
        x = self.activation_1(x)
        x = self.normalization_1(x, mask)
        x = self.depthwise(x)
        x = self.activation_2(x)
        x = self.normalization_2(x, mask)
        x = self.project(x)
        if x.shape[-1] == UNITS:
            return inputs, x
        residual, skip = torch.split(x, UNITS, dim=-1)
        return inputs + residual, skip


class ConvTasNet(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.encoder_kernel = variable(weights["encoder"])
        self.normalization = GlobalLayerNormalization(*weights["norm"])
        self.bottleneck = Conv1D(*weights["bottleneck"])
        for i in range(NUM_BLOCKS):
            dilation_rate = 2 ** (i % CYCLE)
            block = TemporalBlock(weights[f"block_{i}"], dilation_rate)
            self.add_module(f"block_{i}", block)
        self.activation = PReLU(weights["alpha"])
        self.mask_layer = Conv1D(*weights["masks"])
        self.decoder_kernel = variable(weights["decoder"])

    def encode(self, samples):
        frames = frame(samples, FRAME_LENGTH, FRAME_STEP)
        return torch.relu(torch.matmul(frames, self.encoder_kernel[:, 0]))

    def separate(self, encoded, mask):
        """[batch, frames, filters] -> [batch, frames, filters, speakers]"""
        x = self.normalization(encoded, mask)
        x = self.bottleneck(x)
        skips = []
        for i in range(NUM_BLOCKS):
            x, skip = getattr(self, f"block_{i}")(x, mask)
            skips.append(skip)
        x = self.activation(torch.sum(torch.stack(skips), dim=0))
        x = torch.sigmoid(self.mask_layer(x))
        return torch.reshape(x, (*x.shape[:2], -1, NUM_SPEAKERS))

    def decode(self, masked):
        """[batch, frames, filters, speakers] -> [batch, samples, speakers]"""
        frames = torch.einsum("btfs,wf->twbs", masked, self.decoder_kernel[:, 0])
        samples = overlap_and_add(frames, FRAME_STEP)
        return torch.permute(samples, (1, 0, 2))

    def forward(self, inputs, lengths):
        samples = inputs.shape[1]
        whole = math.ceil(samples / FRAME_STEP) * FRAME_STEP
        behind = whole - samples + FRAME_STEP
        padded = nn.functional.pad(inputs, (FRAME_STEP, behind))
        encoded = self.encode(padded)
        num_frames = torch.ceil(lengths / FRAME_STEP) + 1
        mask = torch.arange(encoded.shape[1])[None, :] < num_frames[:, None]
        masks = self.separate(encoded, mask)
        outputs = self.decode(masks * encoded[..., None])
        return outputs[:, FRAME_STEP : FRAME_STEP + samples]


# ------------------------------------------------------------------------ weights


def convert(state):
    """From PyTorch's names and layouts."""

    def conv(name):
        kernel = torch.permute(state[f"{name}.weight"], (2, 1, 0))
        return kernel, state[f"{name}.bias"]

    def depthwise(name):
        kernel = torch.permute(state[f"{name}.weight"], (2, 0, 1))
        return kernel, state[f"{name}.bias"]

    def norm(name):
        return state[f"{name}.weight"][:, 0], state[f"{name}.bias"][:, 0]

    def project(name):
        """Residual and skip beside each other."""
        names = [f"{name}.{part}" for part in ("res", "skip")]
        parts = [conv(n) for n in names if f"{n}.weight" in state]
        kernels, biases = zip(*parts)
        return torch.cat(kernels, dim=-1), torch.cat(biases, dim=-1)

    def speakers_last(value):
        value = torch.unflatten(value, -1, (NUM_SPEAKERS, -1))
        return torch.flatten(value.transpose(-1, -2), -2)

    weights = {
        "encoder": torch.permute(state["encoder.weight"], (2, 1, 0)),
        "norm": norm("separator.norm"),
        "bottleneck": conv("separator.bottleneck"),
        "alpha": state["separator.prelu.weight"],
        "masks": [speakers_last(value) for value in conv("separator.masks")],
        "decoder": torch.permute(state["decoder.weight"], (2, 1, 0)),
    }
    for i in range(NUM_BLOCKS):
        prefix = f"separator.blocks.{i}"
        weights[f"block_{i}"] = {
            "expand": conv(f"{prefix}.conv"),
            "alpha_1": state[f"{prefix}.prelu1.weight"],
            "norm_1": norm(f"{prefix}.norm1"),
            "depthwise": depthwise(f"{prefix}.dconv"),
            "alpha_2": state[f"{prefix}.prelu2.weight"],
            "norm_2": norm(f"{prefix}.norm2"),
            "project": project(prefix),
        }
    return weights


def model():
    return ConvTasNet(convert(torch.load(Path(__file__).with_name("weights.pt"))))


# --------------------------------------------------------------- dataset and loss


def from_pcm(speech):
    return speech.to(torch.float32) / 2.0**15


def amplify(signals, decibels):
    """[batch, speakers, samples] by [batch, speakers]"""
    amplitude = torch.exp(decibels * (LOG_10 / 20.0))
    return signals * amplitude[:, :, None]


def prepare(batch):
    """Mixture [batch, samples] and targets [batch, speakers, samples]."""
    targets = amplify(from_pcm(batch["speech"]), batch["gain"])
    return torch.sum(targets, dim=1), targets


def forward(net, batch):
    mixture, _ = prepare(batch)
    return torch.permute(net(mixture, batch["lengths"]), (0, 2, 1))


def zero_mean(signal, mask):
    mean = torch.sum(signal * mask, dim=-1) / torch.sum(mask, dim=-1)
    return (signal - mean[:, None]) * mask


def scale_invariant_snr(y_true, y_pred, mask, epsilon=1e-8):
    """One value in decibels for each row."""
    y_true, y_pred = zero_mean(y_true, mask), zero_mean(y_pred, mask)
    energy = torch.sum(torch.square(y_true), dim=-1)
    alpha = torch.sum(y_true * y_pred, dim=-1) / (energy + epsilon)
    target = alpha[:, None] * y_true
    signal = torch.sum(torch.square(target), dim=-1)
    distortion = torch.sum(torch.square(y_pred - target), dim=-1)
    ratio = signal / (distortion + epsilon)
    return 10.0 * torch.log(ratio + epsilon) / LOG_10


def loss(output, batch):
    _, targets = prepare(batch)
    mask = torch.arange(output.shape[-1])[None, :] < batch["lengths"][:, None]
    mask = mask.to(output.dtype)
    first, second = targets[:, 0], targets[:, 1]
    one, other = output[:, 0], output[:, 1]
    straight = -scale_invariant_snr(first, one, mask)
    straight = straight - scale_invariant_snr(second, other, mask)
    crossed = -scale_invariant_snr(first, other, mask)
    crossed = crossed - scale_invariant_snr(second, one, mask)
    per_utterance = torch.minimum(straight, crossed) / NUM_SPEAKERS
    return torch.mean(per_utterance)


# ---------------------------------------------------------------------- optimizer


class ExponentialDecay:
    def __init__(self, initial, decay_steps, decay_rate, staircase=False):
        self.initial = initial
        self.decay_steps = decay_steps
        self.decay_rate = decay_rate
        self.staircase = staircase

    def __call__(self, step):
        exponent = step / self.decay_steps
        if self.staircase:
            exponent = math.floor(exponent)
        return self.initial * self.decay_rate**exponent


class Adam(torch.optim.Optimizer):
    """Both corrections of the moments are in the rate; epsilon is made to fit them."""

    beta_1, beta_2, epsilon = 0.9, 0.999, 1e-8

    def __init__(self, variables, learning_rate, global_clipnorm):
        super().__init__(variables, {})
        self.learning_rate = learning_rate
        self.global_clipnorm = global_clipnorm
        self.iterations = 0

    def clip(self, gradients):
        squares = [torch.sum(torch.square(g)) for g in gradients]
        norm = torch.sqrt(torch.sum(torch.stack(squares)))
        factor = self.global_clipnorm / torch.clamp(norm, min=self.global_clipnorm)
        return [g * factor for g in gradients]

    @torch.no_grad()
    def step(self, closure=None):
        variables = self.param_groups[0]["params"]
        gradients = self.clip([v.grad for v in variables])
        lr = self.learning_rate(self.iterations)
        self.iterations += 1
        root = math.sqrt(1.0 - self.beta_2**self.iterations)
        alpha = lr * root / (1.0 - self.beta_1**self.iterations)
        for variable, gradient in zip(variables, gradients):
            slots = self.state[variable]
            if not slots:
                slots["m"] = torch.zeros_like(variable)
                slots["v"] = torch.zeros_like(variable)
            m, v = slots["m"], slots["v"]
            m.add_((gradient - m) * (1.0 - self.beta_1))
            v.add_((torch.square(gradient) - v) * (1.0 - self.beta_2))
            variable.sub_(alpha * m / (torch.sqrt(v) + self.epsilon * root))


def optimizer(net):
    learning_rate = ExponentialDecay(
        4e-3, decay_steps=2, decay_rate=0.5, staircase=True
    )
    return Adam(net.parameters(), learning_rate, global_clipnorm=5.0)
