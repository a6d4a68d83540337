"""After TensorFlow: tf.signal's frames and filters, NHWC, Keras layers, variables by name.

A picture has frames for its height and mels for its width. The recurrent layer is the one
with ``reset_after=True``; its gates come in the order z, r, h.
"""

import math
from pathlib import Path

import torch
from torch import nn

HPARAMS = {
    "sample_rate": 8000,
    "frame_length": 200,
    "frame_step": 100,
    "fft_length": 256,
    "num_mel_bins": 16,
    "lower_edge_hertz": 60.0,
    "upper_edge_hertz": 3800.0,
    "gru_units": 14,
    "learning_rate": 1e-2,
    "total_steps": 20,
    "clip_norm": 0.5,
    "weight_decay": 0.2,
}
CLASS_WEIGHT = {0: 0.5, 1: 1.0, 2: 1.6, 3: 0.8, 4: 1.3, 5: 2.2, 6: 1.0}


# ------------------------------------------------------------------ tf.signal


def hann_window(window_length, periodic=True):
    even = 1 - window_length % 2
    n = window_length + (1 if periodic else 0) * even - 1
    count = torch.arange(window_length, dtype=torch.float64)
    return (0.5 - 0.5 * torch.cos(2 * math.pi * count / n)).float()


def stft(signals, frame_length, frame_step, fft_length):
    """[batch, samples] -> [batch, frames, bins]; what is missing of a frame is behind it."""
    half = frame_length // 2
    signals = nn.functional.pad(signals[:, None], (half, half), mode="reflect")[:, 0]
    framed = signals.unfold(-1, frame_length, frame_step)
    framed = framed * hann_window(frame_length)
    return torch.fft.rfft(framed, n=fft_length)


def hertz_to_mel(frequencies):
    return 1127.0 * torch.log1p(frequencies / 700.0)


def linear_to_mel_weight_matrix(bins, sample_rate, lower, upper, num_mel_bins):
    """[bins, mels], triangles over hertz of area one."""
    f64 = torch.float64
    edges = hertz_to_mel(torch.tensor([lower, upper], dtype=f64))
    edges = torch.linspace(edges[0], edges[1], num_mel_bins + 2, dtype=f64)
    edges = 700.0 * torch.expm1(edges / 1127.0)
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    hertz = torch.linspace(0.0, sample_rate / 2.0, bins, dtype=f64)[:, None]
    rising = (hertz - left) / (centre - left)
    falling = (right - hertz) / (right - centre)
    weights = torch.maximum(torch.zeros((), dtype=f64), torch.minimum(rising, falling))
    enorm = 2.0 / (right - left)
    return (weights * enorm).float()


def sequence_mask(lengths, maxlen):
    return torch.arange(maxlen)[None, :] < lengths[:, None]


# --------------------------------------------------------------------- layers


class Layer(nn.Module):
    """Variables are what the checkpoint has for the layer; ``moving`` ones are not trained."""

    def __init__(self, variables):
        super().__init__()
        for name, value in variables.items():
            value = value.clone().contiguous()
            if name.startswith("moving"):
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value))


class LogCompression(Layer):
    def forward(self, mel):
        return torch.log(1.0 + mel * torch.exp(self.gain))


class Conv2D(Layer):
    """kernel [height, width, in, out]; one pixel of zeros around the inputs of 3 x 3."""

    strides = (1, 1)

    def forward(self, inputs):
        pad = self.kernel.shape[0] // 2
        x = nn.functional.pad(inputs, (0, 0, pad, pad, pad, pad))
        kernel = torch.permute(self.kernel, (3, 2, 0, 1))
        x = torch.permute(x, (0, 3, 1, 2))
        y = nn.functional.conv2d(x, kernel, stride=self.strides)
        return torch.permute(y, (0, 2, 3, 1))


class DepthwiseConv2D(Layer):
    """depthwise_kernel [height, width, channels, 1]."""

    strides = (1, 1)

    def forward(self, inputs):
        x = nn.functional.pad(inputs, (0, 0, 1, 1, 1, 1))
        kernel = torch.permute(self.depthwise_kernel, (2, 3, 0, 1))
        x = torch.permute(x, (0, 3, 1, 2))
        y = nn.functional.conv2d(x, kernel, stride=self.strides, groups=x.shape[1])
        return torch.permute(y, (0, 2, 3, 1))


class BatchNormalization(Layer):
    momentum = 0.9
    epsilon = 1e-5

    def forward(self, inputs):
        mean = torch.mean(inputs, dim=(0, 1, 2))
        variance = torch.mean(torch.square(inputs - mean), dim=(0, 1, 2))
        self.assign_moving_averages(mean, variance, inputs[..., 0].numel())
        inv = self.gamma / torch.sqrt(variance + self.epsilon)
        return inputs * inv + (self.beta - mean * inv)

    @torch.no_grad()
    def assign_moving_averages(self, mean, variance, count):
        bessel = count / (count - 1)
        self.moving_mean.sub_((self.moving_mean - mean) * (1 - self.momentum))
        self.moving_variance.sub_(
            (self.moving_variance - variance * bessel) * (1 - self.momentum)
        )


class GRU(Layer):
    def forward(self, inputs, mask):
        """Return the outputs [batch, time, units] and the last state."""
        units = HPARAMS["gru_units"]
        x = torch.matmul(inputs, self.kernel) + self.bias[0]
        h = torch.zeros(inputs.shape[0], units)
        outputs = []
        for t in range(inputs.shape[1]):
            inner = torch.matmul(h, self.recurrent_kernel) + self.bias[1]
            x_z, x_r, x_h = torch.split(x[:, t], units, dim=-1)
            recurrent_z, recurrent_r, recurrent_h = torch.split(inner, units, dim=-1)
            z = torch.sigmoid(x_z + recurrent_z)
            r = torch.sigmoid(x_r + recurrent_r)
            hh = torch.tanh(x_h + r * recurrent_h)
            new_h = z * h + (1 - z) * hh
            h = torch.where(mask[:, t, None], new_h, h)
            outputs.append(h)
        return torch.stack(outputs, dim=1), h


class Dense(Layer):
    def forward(self, inputs):
        y = torch.matmul(inputs, self.kernel)
        return y + self.bias if hasattr(self, "bias") else y


# ---------------------------------------------------------------------- model


def make_layer(name, variables):
    if "depthwise_kernel" in variables:
        return DepthwiseConv2D(variables)
    if "gamma" in variables:
        return BatchNormalization(variables)
    if "recurrent_kernel" in variables:
        return GRU(variables)
    if "gain" in variables:
        return LogCompression(variables)
    return Conv2D(variables) if variables["kernel"].ndim == 4 else Dense(variables)


class Model(nn.Module):
    def __init__(self, checkpoint):
        super().__init__()
        for name, variables in checkpoint.items():
            self.add_module(name, make_layer(name, variables))
        self.conv.strides = (2, 2)
        self.ds_conv_2_depthwise.strides = (1, 2)

    def log_mel(self, audio, num_frames):
        emphasised = audio[:, 1:] - 0.97 * audio[:, :-1]
        audio = torch.cat([audio[:, :1], emphasised], dim=1)
        stfts = stft(
            audio,
            HPARAMS["frame_length"],
            HPARAMS["frame_step"],
            HPARAMS["fft_length"],
        )
        power = torch.square(torch.abs(stfts))
        mel_matrix = linear_to_mel_weight_matrix(
            power.shape[-1],
            HPARAMS["sample_rate"],
            HPARAMS["lower_edge_hertz"],
            HPARAMS["upper_edge_hertz"],
            HPARAMS["num_mel_bins"],
        )
        features = self.log_compression(torch.tensordot(power, mel_matrix, 1))

        weight = sequence_mask(num_frames, features.shape[1])[..., None].float()
        total = torch.sum(weight, dim=1, keepdim=True)
        mean = torch.sum(features * weight, dim=1, keepdim=True) / total
        mean_sq = (
            torch.sum(torch.square(features) * weight, dim=1, keepdim=True) / total
        )
        stddev = torch.sqrt(mean_sq - torch.square(mean) + 1e-3)
        return (features - mean) / stddev * weight

    def augment(self, features, freq_mask, time_mask):
        time = torch.arange(features.shape[1])[None, :, None]
        mel = torch.arange(features.shape[2])[None, None, :]
        first, size = freq_mask[:, 0, None, None], freq_mask[:, 1, None, None]
        keep_mel = torch.logical_or(mel < first, mel >= first + size)
        first, size = time_mask[:, 0, None, None], time_mask[:, 1, None, None]
        keep_time = torch.logical_or(time < first, time >= first + size)
        keep = torch.logical_and(keep_mel, keep_time)
        return torch.where(keep, features, torch.zeros_like(features))

    def ds_conv(self, x, name):
        x = getattr(self, name + "_depthwise")(x)
        x = torch.relu(getattr(self, name + "_depthwise_bn")(x))
        x = getattr(self, name + "_pointwise")(x)
        return torch.relu(getattr(self, name + "_pointwise_bn")(x))

    def forward(self, audio, num_samples, freq_mask, time_mask):
        num_frames = num_samples // HPARAMS["frame_step"] + 1
        x = self.log_mel(audio, num_frames)
        x = self.augment(x, freq_mask, time_mask)

        x = self.conv(x[..., None])
        x = torch.relu(self.conv_bn(x))
        x = self.ds_conv(x, "ds_conv_1")
        x = self.ds_conv(x, "ds_conv_2")
        x = torch.reshape(x, (x.shape[0], x.shape[1], -1))

        mask = sequence_mask((num_frames + 1) // 2, x.shape[1])
        x, state = self.gru(x, mask)
        score = self.attention_score(torch.tanh(self.attention(x)))
        score = torch.where(mask[..., None], score, torch.full_like(score, -1e9))
        alignment = torch.softmax(score, dim=1)
        context = torch.sum(alignment * x, dim=1)
        return self.logits(torch.cat([context, state], dim=-1))


# ----------------------------------------------------------------- checkpoint


def from_torch(state):
    """Weights of the torch model -> variables of each layer."""

    def conv(name):
        """Frames are the height here and the width there."""
        return {"kernel": torch.permute(state[name + ".weight"], (3, 2, 1, 0))}

    def depthwise(name):
        kernel = torch.permute(state[name + ".weight"], (3, 2, 0, 1))
        return {"depthwise_kernel": kernel}

    def norm(name):
        return {
            "gamma": state[name + ".weight"],
            "beta": state[name + ".bias"],
            "moving_mean": state[name + ".running_mean"],
            "moving_variance": state[name + ".running_var"],
        }

    def dense(name):
        variables = {"kernel": state[name + ".weight"].T}
        if name + ".bias" in state:
            variables["bias"] = state[name + ".bias"]
        return variables

    def gates(value):
        r, z, h = torch.chunk(value, 3)
        return torch.cat([z, r, h])

    def gru(name):
        kernel = gates(state[name + ".weight_ih_l0"])
        # Inputs go from [channels, mels] to [mels, channels].
        kernel = kernel.reshape(-1, 12, 4).transpose(1, 2).flatten(1)
        biases = [gates(state[f"{name}.bias_{kind}_l0"]) for kind in ("ih", "hh")]
        return {
            "kernel": kernel.T,
            "recurrent_kernel": gates(state[name + ".weight_hh_l0"]).T,
            "bias": torch.stack(biases),
        }

    checkpoint = {
        "log_compression": {"gain": state["frontend.log_gain"]},
        "conv": conv("stem"),
        "conv_bn": norm("norm"),
    }
    for i in (1, 2):
        checkpoint[f"ds_conv_{i}_depthwise"] = depthwise(f"block{i}.depthwise")
        checkpoint[f"ds_conv_{i}_depthwise_bn"] = norm(f"block{i}.norm1")
        checkpoint[f"ds_conv_{i}_pointwise"] = conv(f"block{i}.pointwise")
        checkpoint[f"ds_conv_{i}_pointwise_bn"] = norm(f"block{i}.norm2")
    checkpoint["gru"] = gru("gru")
    checkpoint["attention"] = dense("pool.proj")
    checkpoint["attention_score"] = dense("pool.score")
    checkpoint["logits"] = dense("head")
    return checkpoint


# ------------------------------------------------------------------- training


def model():
    return Model(from_torch(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    """The audio of two examples is mixed."""
    audio, num_samples, partner = batch["wave"], batch["length"], batch["partner"]
    mix = batch["lam"][:, None]
    audio = audio * mix + torch.index_select(audio, 0, partner) * (1.0 - mix)
    num_samples = torch.maximum(num_samples, num_samples[partner])
    return net(audio, num_samples, batch["freq_mask"], batch["time_mask"])


def loss(output, batch, label_smoothing=0.1):
    num_classes = output.shape[-1]
    class_weight = torch.tensor([CLASS_WEIGHT[i] for i in range(num_classes)])
    one_hot = nn.functional.one_hot(batch["label"], num_classes).float()
    mix = batch["lam"][:, None]
    mixed = mix * one_hot + (1.0 - mix) * one_hot[batch["partner"]]
    smooth = mixed * (1.0 - label_smoothing) + label_smoothing / num_classes
    log_probs = torch.log_softmax(output, dim=-1)
    each = -torch.sum(class_weight * smooth * log_probs, dim=-1)
    return torch.sum(each) / torch.sum(mixed * class_weight)


class OneCycle:
    """Up for 5 steps, then down for 14."""

    def __init__(self, peak, total_steps):
        self.peak = peak
        self.top = round(0.3 * total_steps) - 1
        self.end = total_steps - 1

    def height(self, step):
        """1 at the top, 0 at both ends."""
        if step <= self.top:
            return (1 - math.cos(math.pi * step / self.top)) / 2
        return (1 + math.cos(math.pi * (step - self.top) / (self.end - self.top))) / 2

    def learning_rate(self, step):
        low = self.peak / 10 if step <= self.top else self.peak / 1000
        return low + (self.peak - low) * self.height(step)

    def beta_1(self, step):
        return 0.95 - 0.1 * self.height(step)


class AdamW(torch.optim.Optimizer):
    def __init__(self, named, schedule, beta_2, epsilon, weight_decay, clipnorm):
        named = list(named)
        super().__init__([v for _, v in named], {})
        self.is_kernel = [name.endswith("kernel") for name, _ in named]
        self.iterations = 0
        self.schedule = schedule
        self.beta_2, self.epsilon = beta_2, epsilon
        self.weight_decay, self.clipnorm = weight_decay, clipnorm

    @torch.no_grad()
    def step(self, closure=None):
        variables = self.param_groups[0]["params"]
        gradients = [v.grad for v in variables]
        square = torch.stack([torch.sum(torch.square(g)) for g in gradients])
        global_norm = torch.sqrt(torch.sum(square))
        scale = self.clipnorm / torch.clamp(global_norm, min=self.clipnorm)

        lr = self.schedule.learning_rate(self.iterations)
        beta_1 = self.schedule.beta_1(self.iterations)
        self.iterations += 1
        correction_1 = 1.0 - beta_1**self.iterations
        correction_2 = 1.0 - self.beta_2**self.iterations
        for v, gradient, is_kernel in zip(variables, gradients, self.is_kernel):
            slots = self.state[v]
            if not slots:
                slots["m"], slots["v"] = torch.zeros_like(v), torch.zeros_like(v)
            g = gradient * scale
            slots["m"].add_((g - slots["m"]) * (1.0 - beta_1))
            slots["v"].add_((torch.square(g) - slots["v"]) * (1.0 - self.beta_2))
            denominator = torch.sqrt(slots["v"] / correction_2) + self.epsilon
            if is_kernel:
                v.sub_(v * self.weight_decay * lr)
            v.sub_(lr / correction_1 * slots["m"] / denominator)


def optimizer(net):
    return AdamW(
        net.named_parameters(),
        OneCycle(HPARAMS["learning_rate"], HPARAMS["total_steps"]),
        beta_2=0.99,
        epsilon=1e-8,
        weight_decay=HPARAMS["weight_decay"],
        clipnorm=HPARAMS["clip_norm"],
    )
