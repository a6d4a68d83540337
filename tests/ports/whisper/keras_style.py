"""After Keras: channels last, kernels of heads [model, heads, size], masks as added numbers.

Optimizer, schedule and losses are written out as TensorFlow has them.
"""

import math
from pathlib import Path

import numpy as np
import torch
from torch import nn

CONFIG = {
    "hidden_dim": 48,
    "num_heads": 4,
    "num_layers": 2,
    "vocabulary_size": 40,
    "max_encoder_length": 28,
    "pad_id": 0,
    "start_id": 1,
    "end_id": 2,
}
LARGE_NEGATIVE = -1e9


# ------------------------------------------------------------------- ops


def cast(x):
    return x.to(torch.float32)


def stop_gradient(x):
    return x.detach()


def softmax(x):
    e = torch.exp(x - torch.amax(x, dim=-1, keepdim=True))
    return e / torch.sum(e, dim=-1, keepdim=True)


def gelu(x):
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def sequence_mask(lengths, maxlen):
    return torch.arange(maxlen)[None, :] < lengths[:, None]


def subsampled(lengths, stride=2):
    return -(lengths // -stride)


# ---------------------------------------------------------------- layers


class Layer(nn.Module):
    """Holds variables."""

    def __init__(self, **variables):
        super().__init__()
        for name, value in variables.items():
            value = value.clone().contiguous()
            self.register_parameter(name, nn.Parameter(value))


class Dense(Layer):
    def forward(self, inputs):
        return torch.tensordot(inputs, self.kernel, dims=1) + self.bias


class MultiHeadDense(Layer):
    """[batch, time, model] -> [batch, heads, time, size]"""

    def forward(self, inputs):
        outputs = torch.einsum("btd,dhk->bhtk", inputs, self.kernel)
        if hasattr(self, "bias"):
            outputs = outputs + self.bias[:, None, :]
        return outputs


class MergeHeads(Layer):
    def forward(self, inputs):
        return torch.einsum("bhtk,hkd->btd", inputs, self.kernel) + self.bias


class Conv1D(Layer):
    """Kernel [width, in, out]; zeros stand on both sides, whatever the stride."""

    strides = 1
    padding = (1, 1)

    def forward(self, inputs):
        inputs = nn.functional.pad(inputs, (0, 0, *self.padding))
        windows = inputs.unfold(1, self.kernel.shape[0], self.strides)
        return torch.einsum("btcw,wcf->btf", windows, self.kernel) + self.bias


class StridedConv1D(Conv1D):
    strides = 2


class LayerNormalization(Layer):
    epsilon = 1e-5

    def forward(self, inputs):
        mean = torch.mean(inputs, dim=-1, keepdim=True)
        centered = inputs - mean
        variance = torch.mean(torch.square(centered), dim=-1, keepdim=True)
        inv = torch.rsqrt(variance + self.epsilon)
        return centered * inv * self.gamma + self.beta


class CachedMultiHeadAttention(nn.Module):
    def __init__(self, query_dense, key_dense, value_dense, output_dense):
        super().__init__()
        self.query_dense, self.key_dense = query_dense, key_dense
        self.value_dense, self.output_dense = value_dense, output_dense

    def forward(self, query, value, attention_bias):
        query = self.query_dense(query)
        key = self.key_dense(value)
        value = self.value_dense(value)
        query = query * (1.0 / math.sqrt(query.shape[-1]))
        scores = torch.einsum("bhqk,bhsk->bhqs", query, key)
        probabilities = softmax(scores + attention_bias)
        context = torch.einsum("bhqs,bhsk->bhqk", probabilities, value)
        return self.output_dense(context)


class FeedForward(nn.Module):
    def __init__(self, intermediate, output):
        super().__init__()
        self.intermediate, self.output = intermediate, output

    def forward(self, inputs):
        return self.output(gelu(self.intermediate(inputs)))


class Composite(nn.Module):
    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


class EncoderLayer(Composite):
    def forward(self, x, padding_bias):
        normed = self.self_attention_norm(x)
        x = x + self.self_attention(normed, normed, padding_bias)
        return x + self.feedforward(self.feedforward_norm(x))


class DecoderLayer(Composite):
    def forward(self, x, self_bias, encoded, cross_bias):
        normed = self.self_attention_norm(x)
        x = x + self.self_attention(normed, normed, self_bias)
        normed = self.cross_attention_norm(x)
        x = x + self.cross_attention(normed, encoded, cross_bias)
        return x + self.feedforward(self.feedforward_norm(x))


class TokenAndPositionEmbedding(Layer):
    def forward(self, ids):
        depth = self.token_table.shape[1]
        tokens = torch.index_select(self.token_table, 0, torch.flatten(ids))
        tokens = torch.reshape(tokens, (*ids.shape, depth)) * math.sqrt(depth)
        return tokens + self.position_table[None, : ids.shape[1]]

    def reverse(self, outputs):
        """Logits from the same table."""
        return torch.einsum("btd,vd->btv", outputs, self.token_table)


def sine_position_encoding(length, hidden_dim, max_wavelength=10000.0):
    half = hidden_dim // 2
    position = np.arange(length, dtype=np.float64)[:, np.newaxis]
    rates = np.power(max_wavelength, -np.arange(half) / (half - 1.0))
    angles = position * rates[np.newaxis, :]
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return torch.tensor(table, dtype=torch.float32)


# ----------------------------------------------------------------- model


class WhisperBackbone(nn.Module):
    def __init__(self, layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        positions = sine_position_encoding(
            CONFIG["max_encoder_length"], CONFIG["hidden_dim"]
        )
        self.register_buffer("encoder_positions", positions)
        self.averages = Averages(self)

    def encode(self, features, padding_bias):
        x = gelu(self.encoder_conv_1(features))
        x = gelu(self.encoder_conv_2(x))
        x = x + self.encoder_positions[None, : x.shape[1]]
        for i in range(CONFIG["num_layers"]):
            x = getattr(self, f"encoder_layer_{i}")(x, padding_bias)
        return self.encoder_norm(x)

    def decode(self, ids, encoded, self_bias, cross_bias):
        x = self.decoder_embedding(ids)
        for i in range(CONFIG["num_layers"]):
            layer = getattr(self, f"decoder_layer_{i}")
            x = layer(x, self_bias, encoded, cross_bias)
        return self.decoder_embedding.reverse(self.decoder_norm(x))

    def voice(self, encoded, alpha=0.3):
        """A part of the gradient goes to the encoder."""
        x = alpha * encoded + (1.0 - alpha) * stop_gradient(encoded)
        return self.voice_dense(x)[..., 0]

    def forward(self, inputs):
        features, ids = inputs["encoder_features"], inputs["decoder_token_ids"]
        frame_mask = sequence_mask(inputs["encoder_lengths"], features.shape[1] // 2)
        frame_bias = (1.0 - cast(frame_mask)) * LARGE_NEGATIVE
        frame_bias = frame_bias[:, None, None, :]
        token_bias = cast(ids == CONFIG["pad_id"]) * LARGE_NEGATIVE
        causal = torch.tril(torch.ones(ids.shape[1], ids.shape[1]))
        causal_bias = (1.0 - causal) * LARGE_NEGATIVE
        self_bias = torch.minimum(causal_bias, token_bias[:, None, None, :])

        encoded = self.encode(features, frame_bias)
        logits = self.decode(ids, encoded, self_bias, frame_bias)
        return logits, self.voice(encoded)


class Averages(nn.Module):
    """Exponential moving averages of the trainable variables."""

    def __init__(self, net):
        super().__init__()
        self.shapes = [tuple(v.shape) for v in net.parameters()]
        flat = [torch.flatten(v.detach()) for v in net.parameters()]
        self.register_buffer("flat", torch.cat(flat))

    def update(self, variables, num_updates, decay=0.99):
        decay = min(decay, (1.0 + num_updates) / (10.0 + num_updates))
        flat = torch.cat([torch.flatten(v) for v in variables])
        self.flat.sub_((1.0 - decay) * (self.flat - flat))


# --------------------------------------------------------------- weights


class TorchCheckpoint:
    def __init__(self, path):
        self.state = torch.load(path)

    def dense(self, name):
        kernel = torch.transpose(self.state[name + ".weight"], 0, 1)
        return Dense(kernel=kernel, bias=self.state[name + ".bias"])

    def norm(self, name):
        return LayerNormalization(
            gamma=self.state[name + ".weight"], beta=self.state[name + ".bias"]
        )

    def conv(self, name, cls):
        """[out, in, width] -> [width, in, out]"""
        kernel = torch.permute(self.state[name + ".weight"], (2, 1, 0))
        return cls(kernel=kernel, bias=self.state[name + ".bias"])

    def heads(self, name):
        kernel = torch.transpose(self.state[name + ".weight"], 0, 1)
        shape = (CONFIG["num_heads"], -1)
        variables = {"kernel": torch.reshape(kernel, (kernel.shape[0], *shape))}
        if name + ".bias" in self.state:
            bias = self.state[name + ".bias"]
            variables["bias"] = torch.reshape(bias, shape)
        return MultiHeadDense(**variables)

    def merge(self, name):
        kernel = torch.transpose(self.state[name + ".weight"], 0, 1)
        kernel = torch.reshape(kernel, (CONFIG["num_heads"], -1, kernel.shape[1]))
        return MergeHeads(kernel=kernel, bias=self.state[name + ".bias"])

    def attention(self, name):
        return CachedMultiHeadAttention(
            query_dense=self.heads(name + ".query"),
            key_dense=self.heads(name + ".key"),
            value_dense=self.heads(name + ".value"),
            output_dense=self.merge(name + ".out"),
        )

    def layer(self, name, cls):
        layers = {
            "self_attention": self.attention(name + ".attn"),
            "self_attention_norm": self.norm(name + ".attn_ln"),
        }
        if cls is DecoderLayer:
            layers["cross_attention"] = self.attention(name + ".cross_attn")
            layers["cross_attention_norm"] = self.norm(name + ".cross_attn_ln")
        layers["feedforward"] = FeedForward(
            self.dense(name + ".mlp.0"), self.dense(name + ".mlp.2")
        )
        layers["feedforward_norm"] = self.norm(name + ".mlp_ln")
        return cls(**layers)

    def build(self):
        layers = {
            "encoder_conv_1": self.conv("encoder.conv1", Conv1D),
            "encoder_conv_2": self.conv("encoder.conv2", StridedConv1D),
            "encoder_norm": self.norm("encoder.ln_post"),
            "decoder_embedding": TokenAndPositionEmbedding(
                token_table=self.state["decoder.token_embedding.weight"],
                position_table=self.state["decoder.positional_embedding"],
            ),
            "decoder_norm": self.norm("decoder.ln"),
            "voice_dense": self.dense("vad_head"),
        }
        for i in range(CONFIG["num_layers"]):
            encoder, decoder = f"encoder.blocks.{i}", f"decoder.blocks.{i}"
            layers[f"encoder_layer_{i}"] = self.layer(encoder, EncoderLayer)
            layers[f"decoder_layer_{i}"] = self.layer(decoder, DecoderLayer)
        return WhisperBackbone(layers)


def model():
    return TorchCheckpoint(Path(__file__).with_name("weights.pt")).build()


# ---------------------------------------------------------- preprocessing


def audio_features(power, frames, dynamic_range=4.0):
    """[batch, mels, time] -> [batch, time, mels]"""
    power = torch.transpose(power, 1, 2)
    log10 = torch.log(torch.clamp(power, min=1e-10)) / math.log(10.0)
    maximum = torch.amax(log10, dim=(1, 2), keepdim=True)
    log10 = torch.clamp(log10, min=maximum - dynamic_range)
    mask = cast(sequence_mask(frames, power.shape[1]))
    return (0.25 * log10 + 1.0) * mask[:, :, None]


def token_ids(words):
    """Inputs of the decoder, and what it is to say."""
    start = torch.full_like(words[:, :1], CONFIG["start_id"])
    pad = torch.full_like(start, CONFIG["pad_id"])
    inputs = torch.cat([start, words], dim=1)
    labels = torch.cat([words, pad], dim=1)
    length = torch.count_nonzero(words, dim=1)[:, None]
    is_end = torch.arange(labels.shape[1])[None, :] == length
    return inputs, torch.where(is_end, CONFIG["end_id"], labels)


def forward(net, batch):
    frames = batch["frames"]
    inputs, _ = token_ids(batch["words"])
    logits, voice = net(
        {
            "encoder_features": audio_features(batch["power"], frames),
            "encoder_lengths": subsampled(frames),
            "decoder_token_ids": inputs,
        }
    )
    return {"logits": logits, "vad": voice}


# ---------------------------------------------------------------- losses


def categorical_crossentropy(y_true, logits, label_smoothing):
    num_classes = logits.shape[-1]
    one_hot = cast(y_true[..., None] == torch.arange(num_classes))
    y_true = one_hot * (1.0 - label_smoothing) + label_smoothing / num_classes
    log_probs = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    return -torch.sum(y_true * log_probs, dim=-1)


def weighted_cross_entropy_with_logits(labels, logits, pos_weight):
    log_weight = 1.0 + (pos_weight - 1.0) * labels
    softplus = torch.log1p(torch.exp(-torch.abs(logits))) + torch.relu(-logits)
    return (1.0 - labels) * logits + log_weight * softplus


def masked_mean(values, mask):
    mask = cast(mask)
    return torch.sum(values * mask) / torch.sum(mask)


def loss(output, batch):
    _, labels = token_ids(batch["words"])
    token_losses = categorical_crossentropy(labels, output["logits"], 0.1)
    token_loss = masked_mean(token_losses, labels != CONFIG["pad_id"])

    vad = output["vad"]
    speech = torch.reshape(cast(batch["speech"]), (*vad.shape, 2))
    speech = torch.amax(speech, dim=-1)
    voice_losses = weighted_cross_entropy_with_logits(speech, vad, pos_weight=1.8)
    frame_mask = sequence_mask(subsampled(batch["frames"]), vad.shape[1])
    return token_loss + 0.5 * masked_mean(voice_losses, frame_mask)


# -------------------------------------------------------------- training


class InverseSquareRoot:
    """A linear warm-up, then the inverse square root; the first step is 0."""

    def __init__(self, peak, warmup_steps):
        self.peak, self.warmup_steps = peak, warmup_steps

    def __call__(self, step):
        step = step + 1.0
        decay = self.peak * math.sqrt(self.warmup_steps)
        return decay * min(step**-0.5, step * self.warmup_steps**-1.5)


class Adam(torch.optim.Optimizer):
    """Keras's form; epsilon is made to fit the correction in alpha."""

    beta_1, beta_2, epsilon = 0.9, 0.98, 1e-6

    def __init__(self, net, learning_rate, global_clipnorm):
        super().__init__(net.parameters(), {})
        self.averages = net.averages
        self.learning_rate = learning_rate
        self.global_clipnorm = global_clipnorm
        self.iterations = 0

    def clip(self, gradients):
        squares = [torch.sum(torch.square(g)) for g in gradients]
        norm = torch.sqrt(torch.sum(torch.stack(squares)))
        ratio = self.global_clipnorm / torch.clamp(norm, min=self.global_clipnorm)
        return [g * ratio for g in gradients]

    def update_step(self, gradient, variable, lr):
        slots = self.state[variable]
        if not slots:
            slots["m"] = torch.zeros_like(variable)
            slots["v"] = torch.zeros_like(variable)
        m, v = slots["m"], slots["v"]
        root = math.sqrt(1.0 - self.beta_2**self.iterations)
        alpha = lr * root / (1.0 - self.beta_1**self.iterations)
        m.add_((gradient - m) * (1.0 - self.beta_1))
        v.add_((torch.square(gradient) - v) * (1.0 - self.beta_2))
        variable.sub_(alpha * m / (torch.sqrt(v) + self.epsilon * root))

    @torch.no_grad()
    def step(self, closure=None):
        variables = self.param_groups[0]["params"]
        gradients = self.clip([v.grad for v in variables])
        lr = self.learning_rate(self.iterations)
        self.iterations += 1
        for gradient, variable in zip(gradients, variables):
            self.update_step(gradient, variable, lr)
        self.averages.update(variables, self.iterations)


def optimizer(net):
    schedule = InverseSquareRoot(peak=4e-3, warmup_steps=2)
    return Adam(net, learning_rate=schedule, global_clipnorm=1.0)
