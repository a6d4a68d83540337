"""After Keras: layers with kernels of in x out, einsum with the heads first, channels last.

Frames are gathered with a table of indices. Tokens are [batch, channels, frames, depth].
"""

import math
from pathlib import Path

import torch
from torch import nn

FRAME_LENGTH, FRAME_STEP = 12, 6
NUM_HEADS, KEY_DIM = 4, 8
NUM_LAYERS = 3
SCALER = {
    "mean_": [18.0, 52.0, 1013.0, 3.5, 240.0],
    "scale_": [6.0, 15.0, 9.0, 1.6, 110.0],
}


# ----------------------------------------------------------------- layers


class Layer(nn.Module):
    def add_weight(self, name, value, trainable=True):
        value = value.detach().clone().contiguous()
        if trainable:
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)


class ReversibleInstanceNormalization(Layer):
    """Inputs [batch, time, channels]; ``inverse`` takes the moments of ``forward``."""

    epsilon = 1e-5

    def __init__(self, gamma, beta):
        super().__init__()
        self.add_weight("gamma", gamma)
        self.add_weight("beta", beta)

    def moments(self, inputs):
        count = inputs.shape[1]
        mean = torch.sum(inputs, dim=1, keepdim=True) / count
        centred = inputs - mean
        variance = torch.sum(torch.square(centred), dim=1, keepdim=True) / count
        return mean, torch.sqrt(variance + self.epsilon)

    def forward(self, inputs):
        mean, stddev = self.moments(inputs)
        outputs = (inputs - mean) * (self.gamma / stddev) + self.beta
        return outputs, (mean, stddev)

    def inverse(self, inputs, moments):
        mean, stddev = moments
        outputs = (inputs - self.beta) / (self.gamma + self.epsilon**2)
        return outputs * stddev + mean


class PatchEmbedding(Layer):
    """[batch, time, channels] -> [batch, channels, frames, depth]."""

    def __init__(self, kernel, bias, embeddings):
        super().__init__()
        self.add_weight("kernel", kernel)
        self.add_weight("bias", bias)
        self.add_weight("embeddings", embeddings)

    def frame(self, signal):
        """[batch, time, channels] -> [batch, frames, frame_length, channels]."""
        last = signal[:, -1:, :]
        signal = torch.cat([signal, torch.tile(last, (1, FRAME_STEP, 1))], dim=1)
        num_frames = 1 + (signal.shape[1] - FRAME_LENGTH) // FRAME_STEP
        starts = torch.arange(num_frames) * FRAME_STEP
        indices = starts[:, None] + torch.arange(FRAME_LENGTH)[None, :]
        frames = torch.index_select(signal, 1, indices.reshape(-1))
        return frames.unflatten(1, (num_frames, FRAME_LENGTH))

    def forward(self, inputs):
        frames = self.frame(inputs)
        tokens = torch.einsum("bnlc,ld->bcnd", frames, self.kernel) + self.bias
        return tokens + self.embeddings


class BatchNormalization(Layer):
    """Over all axes but the last."""

    momentum = 0.9
    epsilon = 1e-5

    def __init__(self, gamma, beta, moving_mean, moving_variance):
        super().__init__()
        self.add_weight("gamma", gamma)
        self.add_weight("beta", beta)
        self.add_weight("moving_mean", moving_mean, trainable=False)
        self.add_weight("moving_variance", moving_variance, trainable=False)

    def forward(self, inputs):
        axes = (0, 1, 2)
        mean = torch.mean(inputs, dim=axes)
        variance = torch.mean(torch.square(inputs - mean), dim=axes)
        count = inputs[..., 0].numel()
        self.update(self.moving_mean, mean)
        self.update(self.moving_variance, variance * count / (count - 1))
        inv = torch.rsqrt(variance + self.epsilon) * self.gamma
        return inputs * inv + (self.beta - mean * inv)

    @torch.no_grad()
    def update(self, variable, value):
        variable.copy_(variable * self.momentum + value * (1.0 - self.momentum))


class RealformerAttention(Layer):
    """Kernels of query, key and value [heads, depth, key_dim], of the output the reverse."""

    def __init__(self, query, query_bias, key, value, output):
        super().__init__()
        self.add_weight("query_kernel", query)
        self.add_weight("query_bias", query_bias)
        self.add_weight("key_kernel", key)
        self.add_weight("value_kernel", value)
        self.add_weight("output_kernel", output)

    def forward(self, x, previous):
        query = torch.einsum("bcnd,hdk->hbcnk", x, self.query_kernel)
        query = query + self.query_bias[:, None, None, None, :]
        key = torch.einsum("bcnd,hdk->hbcnk", x, self.key_kernel)
        value = torch.einsum("bcnd,hdk->hbcnk", x, self.value_kernel)
        query = query * (1.0 / math.sqrt(KEY_DIM))
        logits = torch.einsum("hbcqk,hbcsk->hbcqs", query, key)
        if previous is not None:
            logits = logits + previous
        probs = torch.softmax(logits, dim=-1)
        heads = torch.einsum("hbcqs,hbcsk->hbcqk", probs, value)
        return torch.einsum("hbcqk,hkd->bcqd", heads, self.output_kernel), logits


class Dense(Layer):
    def __init__(self, kernel, bias=None):
        super().__init__()
        self.add_weight("kernel", kernel)
        self.use_bias = bias is not None
        if self.use_bias:
            self.add_weight("bias", bias)

    def forward(self, inputs):
        outputs = torch.tensordot(inputs, self.kernel, dims=1)
        return outputs + self.bias if self.use_bias else outputs


def gelu(x):
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


class EncoderBlock(nn.Module):
    def __init__(self, attention, norm_1, ffn_1, ffn_2, norm_2):
        super().__init__()
        self.attention, self.norm_1 = attention, norm_1
        self.ffn_1, self.ffn_2, self.norm_2 = ffn_1, ffn_2, norm_2

    def forward(self, x, previous):
        attended, logits = self.attention(x, previous)
        x = self.norm_1(x + attended)
        hidden = gelu(self.ffn_1(x))
        x = self.norm_2(x + self.ffn_2(hidden))
        return x, logits


class PatchTST(nn.Module):
    def __init__(self, revin, embedding, blocks, head):
        super().__init__()
        self.revin, self.embedding = revin, embedding
        for i, block in enumerate(blocks):
            self.add_module(f"block_{i}", block)
        self.head = head

    def forward(self, inputs):
        x, moments = self.revin(inputs)
        x = self.embedding(x)
        logits = None
        for i in range(NUM_LAYERS):
            x, logits = getattr(self, f"block_{i}")(x, logits)
        x = torch.reshape(x, (x.shape[0], x.shape[1], -1))
        x = torch.permute(self.head(x), (0, 2, 1))
        return self.revin.inverse(x, moments)


# ----------------------------------------------------------------- weights


class TorchCheckpoint:
    def __init__(self, path):
        self.state = torch.load(path)

    def kernel(self, name):
        return self.state[name + ".weight"].T

    def dense(self, name):
        return Dense(self.kernel(name), self.state.get(name + ".bias"))

    def norm(self, name):
        keys = ("weight", "bias", "running_mean", "running_var")
        return BatchNormalization(*(self.state[f"{name}.{key}"] for key in keys))

    def attention(self, name):
        def split(short):
            kernel = self.kernel(f"{name}.{short}")
            kernel = kernel.reshape(-1, NUM_HEADS, KEY_DIM)
            return torch.permute(kernel, (1, 0, 2))

        query_bias = self.state[name + ".W_Q.bias"].reshape(NUM_HEADS, KEY_DIM)
        output = self.kernel(name + ".to_out").reshape(NUM_HEADS, KEY_DIM, -1)
        return RealformerAttention(
            split("W_Q"), query_bias, split("W_K"), split("W_V"), output
        )

    def block(self, name):
        return EncoderBlock(
            attention=self.attention(name + ".attn"),
            norm_1=self.norm(name + ".norm_attn"),
            ffn_1=self.dense(name + ".ff.0"),
            ffn_2=self.dense(name + ".ff.2"),
            norm_2=self.norm(name + ".norm_ff"),
        )

    def head(self):
        """Rows go from [depth, frames] to [frames, depth], as they are flattened here."""
        kernel = self.kernel("head").reshape(NUM_HEADS * KEY_DIM, -1, 16)
        kernel = torch.permute(kernel, (1, 0, 2)).reshape(-1, 16)
        return Dense(kernel, self.state["head.bias"])

    def build(self):
        state = self.state
        return PatchTST(
            ReversibleInstanceNormalization(
                state["revin.affine_weight"], state["revin.affine_bias"]
            ),
            PatchEmbedding(self.kernel("W_P"), state["W_P.bias"], state["W_pos"]),
            [self.block(f"layers.{i}") for i in range(NUM_LAYERS)],
            self.head(),
        )


def model():
    return TorchCheckpoint(Path(__file__).with_name("weights.pt")).build()


# ----------------------------------------------------------------- training


def transform(x):
    mean = torch.tensor(SCALER["mean_"])
    scale = torch.tensor(SCALER["scale_"])
    return (x - mean) / scale


def forward(net, batch):
    return net(transform(batch["past"]))


def mean_squared_error(y_true, y_pred):
    return torch.mean(torch.square(y_pred - y_true), dim=-1)


def mean_absolute_error(y_true, y_pred):
    return torch.mean(torch.abs(y_pred - y_true), dim=-1)


def loss(output, batch, mae_weight=0.1):
    y_true = transform(batch["future"])
    per_step = mean_squared_error(y_true, output)
    per_step = per_step + mae_weight * mean_absolute_error(y_true, output)
    return torch.mean(per_step)


class OneCycle:
    """A rate for each iteration, the first being 0."""

    def __init__(self, peak, steps, warmup=0.4, divisor=5.0, final_divisor=1e3):
        self.initial, self.peak = peak / divisor, peak
        self.final = self.initial / final_divisor
        self.top = warmup * steps - 1.0
        self.fall = (steps - 1.0) - self.top

    def __call__(self, step):
        if step <= self.top:
            rise = math.sin(0.5 * math.pi * step / self.top) ** 2
            return self.initial + (self.peak - self.initial) * rise
        left = math.cos(0.5 * math.pi * (step - self.top) / self.fall) ** 2
        return self.final + (self.peak - self.final) * left


class AdamW(torch.optim.Optimizer):
    """Both corrections of the moments are in the rate; epsilon is made to fit them."""

    beta_1, beta_2, epsilon = 0.9, 0.999, 1e-8

    def __init__(self, named_variables, learning_rate, weight_decay, global_clipnorm):
        named_variables = list(named_variables)
        super().__init__([v for _, v in named_variables], {})
        self.names = [name for name, _ in named_variables]
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.global_clipnorm = global_clipnorm
        self.iterations = 0

    def uses_decay(self, name):
        return name.endswith("kernel")

    def clip(self, gradients):
        square = sum(torch.sum(torch.square(g)) for g in gradients)
        factor = self.global_clipnorm / (torch.sqrt(square) + 1e-6)
        factor = torch.clamp(factor, max=1.0)
        return [g * factor for g in gradients]

    @torch.no_grad()
    def step(self, closure=None):
        variables = self.param_groups[0]["params"]
        gradients = self.clip([v.grad for v in variables])
        lr = self.learning_rate(self.iterations)
        self.iterations += 1
        root = math.sqrt(1.0 - self.beta_2**self.iterations)
        alpha = lr * root / (1.0 - self.beta_1**self.iterations)
        for name, variable, gradient in zip(self.names, variables, gradients):
            slots = self.state[variable]
            if not slots:
                slots["m"] = torch.zeros_like(variable)
                slots["v"] = torch.zeros_like(variable)
            m, v = slots["m"], slots["v"]
            if self.uses_decay(name):
                variable.sub_(variable * self.weight_decay * lr)
            m.add_((gradient - m) * (1.0 - self.beta_1))
            v.add_((torch.square(gradient) - v) * (1.0 - self.beta_2))
            variable.sub_(alpha * m / (torch.sqrt(v) + self.epsilon * root))


def optimizer(net):
    return AdamW(
        net.named_parameters(),
        learning_rate=OneCycle(1e-2, steps=12),
        weight_decay=0.1,
        global_clipnorm=0.5,
    )
