"""Layers as Keras has them: (batch, time, bins, channels), gates z, r, h, masks for time."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

UNITS = 12
BLANK = 0
LOG_ZERO = -1e30


class Conv2D(nn.Module):
    """kernel (time, bins, in, out); the input was padded before."""

    def __init__(self, kernel, strides):
        super().__init__()
        self.kernel = nn.Parameter(kernel)
        self.strides = strides

    def forward(self, inputs):
        x = inputs.permute(0, 3, 1, 2)
        x = F.conv2d(x, self.kernel.permute(3, 2, 0, 1), stride=self.strides)
        return x.permute(0, 2, 3, 1)


class ZeroPadding2D(nn.Module):
    def __init__(self, padding):
        super().__init__()
        (self.top, self.bottom), (self.left, self.right) = padding

    def forward(self, inputs):
        return F.pad(inputs, (0, 0, self.left, self.right, self.top, self.bottom))


class BatchNormalization(nn.Module):
    """Of the last axis. With a mask (batch, time), only the steps it has are counted."""

    def __init__(self, gamma, beta, moving_mean, moving_variance, momentum=0.9):
        super().__init__()
        self.gamma = nn.Parameter(gamma)
        self.beta = nn.Parameter(beta)
        self.register_buffer("moving_mean", moving_mean)
        self.register_buffer("moving_variance", moving_variance)
        self.momentum = momentum
        self.epsilon = 1e-5

    def moments(self, inputs, mask):
        axes = tuple(range(inputs.ndim - 1))
        if mask is None:
            weight = torch.ones(inputs.shape[:-1] + (1,))
        else:
            weight = mask[..., None].float()
        count = weight.sum()
        mean = torch.sum(inputs * weight, axes) / count
        variance = torch.sum(torch.square(inputs - mean) * weight, axes) / count
        return mean, variance, count

    def forward(self, inputs, mask=None):
        mean, variance, count = self.moments(inputs, mask)
        with torch.no_grad():
            sample_variance = variance * count / (count - 1)
            self.assign_moving_average(self.moving_mean, mean)
            self.assign_moving_average(self.moving_variance, sample_variance)
        scale = self.gamma * torch.rsqrt(variance + self.epsilon)
        return inputs * scale + (self.beta - mean * scale)

    def assign_moving_average(self, variable, value):
        variable.sub_((variable - value) * (1 - self.momentum))


def clipped_relu(x, max_value=2.0):
    return torch.minimum(torch.relu(x), torch.tensor(max_value))


class GRUCell(nn.Module):
    """reset_after=True: the biases are those of the input and of the state."""

    def __init__(self, kernel, recurrent_kernel, bias):
        super().__init__()
        self.kernel = nn.Parameter(kernel)
        self.recurrent_kernel = nn.Parameter(recurrent_kernel)
        self.bias = nn.Parameter(bias)

    def forward(self, inputs, h_tm1):
        input_bias, recurrent_bias = torch.unbind(self.bias)

        matrix_x = torch.matmul(inputs, self.kernel) + input_bias
        x_z, x_r, x_h = torch.split(matrix_x, UNITS, dim=-1)

        matrix_inner = torch.matmul(h_tm1, self.recurrent_kernel) + recurrent_bias
        recurrent_z, recurrent_r, recurrent_h = torch.split(matrix_inner, UNITS, dim=-1)

        z = torch.sigmoid(x_z + recurrent_z)
        r = torch.sigmoid(x_r + recurrent_r)
        hh = torch.tanh(x_h + r * recurrent_h)

        return z * h_tm1 + (1 - z) * hh


class RNN(nn.Module):
    """Where the mask is False the state stays and the output is zero."""

    def __init__(self, cell, go_backwards=False):
        super().__init__()
        self.cell = cell
        self.go_backwards = go_backwards

    def forward(self, inputs, mask):
        steps = list(zip(torch.unbind(inputs, dim=1), torch.unbind(mask, dim=1)))
        if self.go_backwards:
            steps.reverse()
        state = torch.zeros(inputs.shape[0], UNITS)
        outputs = []
        for x, keep in steps:
            new_state = self.cell(x, state)
            state = torch.where(keep[:, None], new_state, state)
            outputs.append(torch.where(keep[:, None], state, torch.zeros_like(state)))
        return torch.stack(outputs, dim=1)


class Bidirectional(nn.Module):
    def __init__(self, forward_cell, backward_cell):
        super().__init__()
        self.forward_layer = RNN(forward_cell)
        self.backward_layer = RNN(backward_cell, go_backwards=True)

    def forward(self, inputs, mask):
        y = self.forward_layer(inputs, mask)
        y_rev = self.backward_layer(inputs, mask)
        y_rev = torch.flip(y_rev, dims=[1])
        return torch.cat([y, y_rev], dim=-1)


class Dense(nn.Module):
    def __init__(self, kernel, bias):
        super().__init__()
        self.kernel = nn.Parameter(kernel)
        self.bias = nn.Parameter(bias)

    def forward(self, inputs):
        return torch.matmul(inputs, self.kernel) + self.bias


class SpeechModel(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.conv_1_pad = ZeroPadding2D(padding=((2, 2), (3, 3)))
        self.conv_1 = Conv2D(*weights["conv_1"], strides=(2, 2))
        self.conv_1_bn = BatchNormalization(*weights["conv_1_bn"])
        self.conv_2_pad = ZeroPadding2D(padding=((1, 1), (2, 2)))
        self.conv_2 = Conv2D(*weights["conv_2"], strides=(1, 2))
        self.conv_2_bn = BatchNormalization(*weights["conv_2_bn"])
        self.bidirectional_1 = Bidirectional(
            GRUCell(*weights["gru_1_forward"]), GRUCell(*weights["gru_1_backward"])
        )
        self.gru_2_bn = BatchNormalization(*weights["gru_2_bn"])
        self.bidirectional_2 = Bidirectional(
            GRUCell(*weights["gru_2_forward"]), GRUCell(*weights["gru_2_backward"])
        )
        self.dense = Dense(*weights["dense"])

    def forward(self, inputs, mask):
        frames = mask[:, :, None, None].float()

        x = self.conv_1(self.conv_1_pad(inputs))
        x = self.conv_1_bn(x * frames)
        x = clipped_relu(x) * frames

        x = self.conv_2(self.conv_2_pad(x))
        x = self.conv_2_bn(x * frames)
        x = clipped_relu(x) * frames

        x = torch.reshape(x, x.shape[:2] + (-1,))
        x = self.bidirectional_1(x, mask)
        x = self.gru_2_bn(x, mask)
        x = self.bidirectional_2(x, mask)
        return torch.log_softmax(self.dense(x), dim=-1)


# Weights of the other framework


def conv_weights(state, name):
    return [state[f"{name}.weight"].permute(3, 2, 1, 0).contiguous()]


def norm_weights(state, name):
    parts = ("weight", "bias", "running_mean", "running_var")
    return [state[f"{name}.{part}"] for part in parts]


def zrh(weight):
    """From r, z, n."""
    r, z, n = torch.chunk(weight, 3)
    return torch.cat([z, r, n])


def gru_weights(state, name, direction, shape=None):
    suffix = "_l0_reverse" if direction == "backward" else "_l0"
    kernel = zrh(state[f"{name}.weight_ih{suffix}"]).t()
    if shape is not None:
        # the features were flattened as (channels, bins)
        channels, bins = shape
        kernel = kernel.reshape(channels, bins, -1).transpose(0, 1).flatten(0, 1)
    recurrent_kernel = zrh(state[f"{name}.weight_hh{suffix}"]).t()
    biases = [zrh(state[f"{name}.bias_{kind}{suffix}"]) for kind in ("ih", "hh")]
    return [kernel.contiguous(), recurrent_kernel.contiguous(), torch.stack(biases)]


def convert(state):
    return {
        "conv_1": conv_weights(state, "conv1.conv"),
        "conv_1_bn": norm_weights(state, "conv1.norm"),
        "conv_2": conv_weights(state, "conv2.conv"),
        "conv_2_bn": norm_weights(state, "conv2.norm"),
        "gru_1_forward": gru_weights(state, "rnn1.gru", "forward", shape=(8, 4)),
        "gru_1_backward": gru_weights(state, "rnn1.gru", "backward", shape=(8, 4)),
        "gru_2_bn": norm_weights(state, "rnn2.norm"),
        "gru_2_forward": gru_weights(state, "rnn2.gru", "forward"),
        "gru_2_backward": gru_weights(state, "rnn2.gru", "backward"),
        "dense": [state["head.weight"].t().contiguous(), state["head.bias"]],
    }


def model():
    return SpeechModel(convert(torch.load(Path(__file__).with_name("weights.pt"))))


# Data


def sequence_mask(lengths, maxlen):
    return torch.arange(maxlen)[None, :] < lengths[:, None]


def conv_output_length(length):
    return (length + 1) // 2


def preprocess(batch):
    """(batch, bins, time) -> (batch, time, bins, 1), standardised."""
    x = torch.log1p(batch["sound"]).transpose(1, 2)
    weight = sequence_mask(batch["frames"], x.shape[1])[:, :, None].float()
    count = batch["frames"][:, None, None] * x.shape[2]
    mean = torch.sum(x * weight, (1, 2), keepdim=True) / count
    centred = (x - mean) * weight
    variance = torch.sum(torch.square(centred), (1, 2), keepdim=True) / (count - 1)
    return (centred / torch.sqrt(variance))[..., None]


def forward(net, batch):
    x = preprocess(batch)
    steps = conv_output_length(x.shape[1])
    mask = sequence_mask(conv_output_length(batch["frames"]), steps)
    return net(x, mask).transpose(0, 1)


# Connectionist temporal classification


def ctc_states(labels):
    """(batch, 2 * labels + 1): blanks between, before and behind."""
    blanks = torch.full_like(labels, BLANK)
    states = torch.stack([blanks, labels], dim=2).flatten(1)
    return torch.cat([states, blanks[:, :1]], dim=1)


def shifted(alpha, by):
    return F.pad(alpha, (by, 0), value=LOG_ZERO)[:, : alpha.shape[1]]


def ctc_loss(log_probs, labels, input_length, label_length):
    """Negative logarithm of the probability of each example's labels."""
    states = ctc_states(labels)
    differs = states != torch.roll(states, 2, dims=1)
    can_skip = (states != BLANK) & differs
    start = torch.arange(states.shape[1]) < 2

    log_p = torch.gather(log_probs[0], 1, states)
    alpha = torch.where(start, log_p, LOG_ZERO)
    for t in range(1, log_probs.shape[0]):
        log_p = torch.gather(log_probs[t], 1, states)
        skip = torch.where(can_skip, shifted(alpha, 2), LOG_ZERO)
        paths = torch.stack([alpha, shifted(alpha, 1), skip])
        new_alpha = torch.logsumexp(paths, dim=0) + log_p
        alpha = torch.where((t < input_length)[:, None], new_alpha, alpha)

    last = 2 * label_length[:, None]
    end_blank = torch.gather(alpha, 1, last)
    end_label = torch.gather(alpha, 1, last - 1)
    return -torch.logaddexp(end_blank, end_label)[:, 0]


def loss(output, batch):
    input_length = conv_output_length(batch["frames"])
    each = ctc_loss(output, batch["labels"], input_length, batch["sizes"])
    return torch.mean(each / batch["sizes"])


# Optimizer


class SGD(torch.optim.Optimizer):
    """Nesterov's momentum; kernels decay; gradients are clipped together."""

    def __init__(self, net, learning_rate, momentum, global_clipnorm, l2):
        names, variables = zip(*net.named_parameters())
        super().__init__(variables, {})
        self.is_kernel = [name.endswith("kernel") for name in names]
        self.velocities = [torch.zeros_like(v) for v in variables]
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.global_clipnorm = global_clipnorm
        self.l2 = l2

    def clip_by_global_norm(self, grads):
        norm = torch.sqrt(sum(torch.sum(torch.square(g)) for g in grads))
        scale = self.global_clipnorm / torch.clamp(norm, min=self.global_clipnorm)
        return [g * scale for g in grads]

    @torch.no_grad()
    def step(self, closure=None):
        variables = self.param_groups[0]["params"]
        grads = self.clip_by_global_norm([v.grad for v in variables])
        rows = zip(variables, grads, self.velocities, self.is_kernel)
        for variable, grad, velocity, is_kernel in rows:
            if is_kernel:
                grad = grad + self.l2 * variable
            velocity.mul_(self.momentum).sub_(self.learning_rate * grad)
            variable.add_(self.momentum * velocity - self.learning_rate * grad)


def optimizer(net):
    return SGD(net, learning_rate=0.02, momentum=0.9, global_clipnorm=1.0, l2=5e-3)
