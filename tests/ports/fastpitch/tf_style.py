"""After TensorFlow: Keras layers over [batch, time, channels], masks of ones and zeros."""

import math
import re
from pathlib import Path

import torch
from torch import nn

VOCAB_SIZE = 20
HIDDEN_SIZE = 24
NUM_ATTENTION_HEADS = 2
ATTENTION_HEAD_SIZE = 10
INTERMEDIATE_SIZE = 40
NUM_HIDDEN_LAYERS = 2
PREDICTOR_FILTERS = 20
PREDICTOR_CONVS = 2
KERNEL_SIZE = 3
NUM_MELS = 12
MAX_POSITIONS = 128
LAYER_NORM_EPS = 1e-5


def add_weight(shape):
    return nn.Parameter(torch.empty(shape))


class Dense(nn.Module):
    def __init__(self, input_dim, units, use_bias=True):
        super().__init__()
        self.kernel = add_weight((input_dim, units))
        self.bias = add_weight((units,)) if use_bias else None

    def forward(self, inputs):
        outputs = torch.tensordot(inputs, self.kernel, dims=([-1], [0]))
        if self.bias is not None:
            outputs = outputs + self.bias
        return outputs


class Conv1D(nn.Module):
    """A kernel of [width, in, out]; SAME."""

    def __init__(self, input_dim, filters, kernel_size):
        super().__init__()
        self.kernel = add_weight((kernel_size, input_dim, filters))
        self.bias = add_weight((filters,))

    def forward(self, inputs):
        width = self.kernel.shape[0]
        left = (width - 1) // 2
        padded = nn.functional.pad(inputs, (0, 0, left, width - 1 - left))
        ncw = torch.permute(padded, (0, 2, 1))
        outputs = nn.functional.conv1d(ncw, torch.permute(self.kernel, (2, 1, 0)))
        return torch.permute(outputs, (0, 2, 1)) + self.bias


class LayerNormalization(nn.Module):
    def __init__(self, units, epsilon):
        super().__init__()
        self.epsilon = epsilon
        self.gamma = add_weight((units,))
        self.beta = add_weight((units,))

    def forward(self, inputs):
        centered = inputs - torch.mean(inputs, dim=-1, keepdim=True)
        variance = torch.mean(torch.square(centered), dim=-1, keepdim=True)
        normalized = centered * torch.rsqrt(variance + self.epsilon)
        return normalized * self.gamma + self.beta


class Embedding(nn.Module):
    def __init__(self, input_dim, output_dim):
        super().__init__()
        self.embeddings = add_weight((input_dim, output_dim))

    def forward(self, ids):
        flat = torch.index_select(self.embeddings, 0, torch.flatten(ids))
        return torch.reshape(flat, (*ids.shape, -1))


def sequence_mask(lengths, maxlen):
    return (torch.arange(maxlen)[None, :] < lengths[:, None]).float()


def positional_encoding(length, depth):
    """Sines of all even dimensions, then cosines of all odd ones."""
    positions = torch.arange(length, dtype=torch.float64)[:, None]
    dims = torch.arange(depth)[None, :]
    exponents = 2 * torch.div(dims, 2, rounding_mode="floor") / depth
    angles = positions / torch.pow(10000.0, exponents.double())
    sines = torch.sin(angles[:, 0::2])
    cosines = torch.cos(angles[:, 1::2])
    return torch.cat([sines, cosines], dim=-1).float()


def softmax(logits):
    exps = torch.exp(logits - torch.amax(logits, dim=-1, keepdim=True))
    return exps / torch.sum(exps, dim=-1, keepdim=True)


class TFSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        all_head_size = NUM_ATTENTION_HEADS * ATTENTION_HEAD_SIZE
        self.query = Dense(HIDDEN_SIZE, all_head_size, use_bias=False)
        self.key = Dense(HIDDEN_SIZE, all_head_size, use_bias=False)
        self.value = Dense(HIDDEN_SIZE, all_head_size, use_bias=False)

    def transpose_for_scores(self, x):
        batch_size, seq_len = x.shape[:2]
        shape = (batch_size, seq_len, NUM_ATTENTION_HEADS, ATTENTION_HEAD_SIZE)
        return torch.permute(torch.reshape(x, shape), (0, 2, 1, 3))

    def forward(self, hidden_states, attention_mask):
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(ATTENTION_HEAD_SIZE)
        adder = (1.0 - attention_mask[:, None, None, :]) * -1e9
        attention_probs = softmax(attention_scores + adder)
        context_layer = torch.matmul(attention_probs, value_layer)
        context_layer = torch.permute(context_layer, (0, 2, 1, 3))
        return torch.reshape(context_layer, (*hidden_states.shape[:2], -1))


class TFSelfOutput(nn.Module):
    def __init__(self):
        super().__init__()
        all_head_size = NUM_ATTENTION_HEADS * ATTENTION_HEAD_SIZE
        self.dense = Dense(all_head_size, HIDDEN_SIZE, use_bias=False)
        self.layer_norm = LayerNormalization(HIDDEN_SIZE, LAYER_NORM_EPS)

    def forward(self, context, input_tensor):
        attended = self.dense(context)
        return self.layer_norm(attended + input_tensor)


class TFConvFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1d_1 = Conv1D(HIDDEN_SIZE, INTERMEDIATE_SIZE, KERNEL_SIZE)
        self.conv1d_2 = Conv1D(INTERMEDIATE_SIZE, HIDDEN_SIZE, KERNEL_SIZE)
        self.layer_norm = LayerNormalization(HIDDEN_SIZE, LAYER_NORM_EPS)

    def forward(self, input_tensor):
        hidden_states = self.conv1d_1(input_tensor)
        hidden_states = torch.relu(hidden_states)
        hidden_states = self.conv1d_2(hidden_states)
        return self.layer_norm(hidden_states + input_tensor)


class TFFastPitchLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = TFSelfAttention()
        self.attention_output = TFSelfOutput()
        self.feed_forward = TFConvFeedForward()

    def forward(self, hidden_states, mask):
        context = self.attention(hidden_states, mask)
        attention_output = self.attention_output(context, hidden_states)
        masked_attention_output = attention_output * mask[..., None]
        layer_output = self.feed_forward(masked_attention_output)
        return layer_output * mask[..., None]


class TFTransformerStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(TFFastPitchLayer() for _ in range(NUM_HIDDEN_LAYERS))
        table = positional_encoding(MAX_POSITIONS, HIDDEN_SIZE)
        self.register_buffer("position_table", table, persistent=False)

    def forward(self, inputs, mask):
        positions = self.position_table[: inputs.shape[1]]
        hidden_states = (inputs + positions) * mask[..., None]
        for layer in self.layer:
            hidden_states = layer(hidden_states, mask)
        return hidden_states


class TFVariantPredictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        for i in range(PREDICTOR_CONVS):
            channels = PREDICTOR_FILTERS if i else HIDDEN_SIZE
            self.convs.append(Conv1D(channels, PREDICTOR_FILTERS, KERNEL_SIZE))
            self.norms.append(LayerNormalization(PREDICTOR_FILTERS, LAYER_NORM_EPS))
        self.output_layer = Dense(PREDICTOR_FILTERS, 1)

    def forward(self, encoder_hidden_states, mask):
        outputs = encoder_hidden_states
        for conv, norm in zip(self.convs, self.norms):
            outputs = norm(torch.relu(conv(outputs)))
        outputs = self.output_layer(outputs)
        return torch.squeeze(outputs, -1) * mask


def frame_to_character(durations, max_frames):
    """Which character each frame belongs to; behind the end it is the last one."""
    ends = torch.cumsum(durations, dim=1)
    frames = torch.arange(max_frames).repeat(durations.shape[0], 1)
    indices = torch.searchsorted(ends, frames, right=True)
    return torch.clamp(indices, max=durations.shape[1] - 1)


def length_regulator(hidden_states, durations):
    mel_lengths = torch.sum(durations, dim=1)
    max_frames = int(torch.amax(mel_lengths))
    indices = frame_to_character(durations, max_frames)
    indices = indices[..., None].expand(-1, -1, hidden_states.shape[-1])
    repeated = torch.take_along_dim(hidden_states, indices, dim=1)
    return repeated, sequence_mask(mel_lengths, max_frames)


class TFFastPitch(nn.Module):
    def __init__(self):
        super().__init__()
        self.character_embeddings = Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.encoder = TFTransformerStack()
        self.duration_predictor = TFVariantPredictor()
        self.pitch_predictor = TFVariantPredictor()
        self.pitch_embeddings = Conv1D(1, HIDDEN_SIZE, KERNEL_SIZE)
        self.decoder = TFTransformerStack()
        self.mel_dense = Dense(HIDDEN_SIZE, NUM_MELS)

    def forward(self, input_ids, input_lengths, duration_gts, pitch_gts):
        mask = sequence_mask(input_lengths, input_ids.shape[1])
        embedding_output = self.character_embeddings(input_ids)
        encoder_output = self.encoder(embedding_output, mask)
        duration_outputs = self.duration_predictor(encoder_output, mask)
        pitch_outputs = self.pitch_predictor(encoder_output, mask)
        pitch_embedding = self.pitch_embeddings(pitch_gts[..., None])
        conditioned = encoder_output + pitch_embedding
        regulated, mel_mask = length_regulator(conditioned, duration_gts)
        decoder_output = self.decoder(regulated, mel_mask)
        mel_outputs = self.mel_dense(decoder_output)
        return mel_outputs, duration_outputs, pitch_outputs


# --------------------------------------------------------------------- checkpoint


class TorchCheckpoint:
    """Reads a state dict and sets the weights of Keras layers."""

    def __init__(self, state_dict):
        self.state_dict = state_dict

    def array(self, name):
        return self.state_dict[name]

    @staticmethod
    def assign(variable, value):
        assert variable.shape == value.shape, (variable.shape, value.shape)
        with torch.no_grad():
            variable.copy_(value)

    def dense(self, layer, name):
        self.assign(layer.kernel, self.array(f"{name}.weight").T)
        if layer.bias is not None:
            self.assign(layer.bias, self.array(f"{name}.bias"))

    def conv(self, layer, name):
        kernel = torch.permute(self.array(f"{name}.weight"), (2, 1, 0))
        self.assign(layer.kernel, kernel)
        self.assign(layer.bias, self.array(f"{name}.bias"))

    def norm(self, layer, name):
        self.assign(layer.gamma, self.array(f"{name}.weight"))
        self.assign(layer.beta, self.array(f"{name}.bias"))

    def stack(self, stack, name):
        for i, layer in enumerate(stack.layer):
            attn, ff = f"{name}.layers.{i}.dec_attn", f"{name}.layers.{i}.pos_ff"
            qkv = self.array(f"{attn}.qkv_net.weight")
            query, key, value = torch.split(qkv, qkv.shape[0] // 3, dim=0)
            self.assign(layer.attention.query.kernel, query.T)
            self.assign(layer.attention.key.kernel, key.T)
            self.assign(layer.attention.value.kernel, value.T)
            out = self.array(f"{attn}.o_net.weight")
            self.assign(layer.attention_output.dense.kernel, out.T)
            self.norm(layer.attention_output.layer_norm, f"{attn}.layer_norm")
            self.conv(layer.feed_forward.conv1d_1, f"{ff}.core_net.0")
            self.conv(layer.feed_forward.conv1d_2, f"{ff}.core_net.2")
            self.norm(layer.feed_forward.layer_norm, f"{ff}.layer_norm")

    def predictor(self, predictor, name):
        for i, (conv, norm) in enumerate(zip(predictor.convs, predictor.norms)):
            self.conv(conv, f"{name}.layers.{i}.conv")
            self.norm(norm, f"{name}.layers.{i}.norm")
        self.dense(predictor.output_layer, f"{name}.fc")

    def restore(self, net):
        embeddings = self.array("encoder.word_emb.weight")
        self.assign(net.character_embeddings.embeddings, embeddings)
        self.stack(net.encoder, "encoder")
        self.predictor(net.duration_predictor, "duration_predictor")
        self.predictor(net.pitch_predictor, "pitch_predictor")
        self.conv(net.pitch_embeddings, "pitch_emb")
        self.stack(net.decoder, "decoder")
        self.dense(net.mel_dense, "proj")


def model():
    net = TFFastPitch()
    weights = torch.load(Path(__file__).with_name("weights.pt"))
    TorchCheckpoint(weights).restore(net)
    return net


# ------------------------------------------------------------------------ dataset

F0_MEAN, F0_STD = 214.72, 65.72


def divide_no_nan(x, y):
    return torch.where(y == 0, torch.zeros_like(x), x / torch.clamp(y, min=1.0))


def average_by_duration(f0, durations):
    """[batch, frames] in Hz -> [batch, characters], standardized; 0 has no voice."""
    segments = frame_to_character(durations, f0.shape[1])
    voiced = (f0 > 0).float()
    standardized = (f0 - F0_MEAN) / F0_STD * voiced
    zeros = torch.zeros(durations.shape)
    sums = torch.scatter_add(zeros, 1, segments, standardized)
    counts = torch.scatter_add(zeros, 1, segments, voiced)
    return divide_no_nan(sums, counts)


def forward(net, batch):
    pitch_gts = average_by_duration(batch["pitch"], batch["durs"])
    mel, log_dur, pitch = net(
        batch["text"], batch["text_lens"], batch["durs"], pitch_gts
    )
    return {"mel": mel, "log_dur": log_dur, "pitch": pitch}


# --------------------------------------------------------------------------- loss

DURATION_LOSS_WEIGHT, PITCH_LOSS_WEIGHT = 0.3, 0.2


def mean_squared_error(y_true, y_pred, sample_weight):
    """Over the last axis, then over what counts."""
    per_item = torch.mean(torch.square(y_pred - y_true), dim=-1)
    return torch.sum(per_item * sample_weight) / torch.sum(sample_weight)


def loss(output, batch):
    durations = batch["durs"]
    mask = sequence_mask(batch["text_lens"], durations.shape[1])
    mel_mask = sequence_mask(torch.sum(durations, dim=1), batch["mel"].shape[1])
    mel_loss = mean_squared_error(batch["mel"], output["mel"], mel_mask)
    log_durations = torch.log1p(durations.float())
    duration_loss = mean_squared_error(
        log_durations[..., None], output["log_dur"][..., None], mask
    )
    pitch_gts = average_by_duration(batch["pitch"], durations)
    pitch_loss = mean_squared_error(
        pitch_gts[..., None], output["pitch"][..., None], mask
    )
    total = mel_loss + DURATION_LOSS_WEIGHT * duration_loss
    return total + PITCH_LOSS_WEIGHT * pitch_loss


# ---------------------------------------------------------------------- optimizer


class AdamWeightDecay(torch.optim.Optimizer):
    def __init__(self, named_variables, learning_rate, weight_decay_rate, exclude):
        self.var_names, variables = zip(*named_variables)
        super().__init__(variables, {"lr": learning_rate})
        self.weight_decay_rate, self.exclude = weight_decay_rate, exclude
        self.beta_1, self.beta_2, self.epsilon = 0.9, 0.98, 1e-8
        self.iterations = 0

    def do_use_weight_decay(self, name):
        return not any(re.search(pattern, name) for pattern in self.exclude)

    def slot(self, var, name):
        return self.state[var].setdefault(name, torch.zeros_like(var))

    @torch.no_grad()
    def step(self, closure=None):
        self.iterations += 1
        group = self.param_groups[0]
        beta_1_power = self.beta_1**self.iterations
        beta_2_power = self.beta_2**self.iterations
        for name, var in zip(self.var_names, group["params"]):
            grad = var.grad
            m, v = self.slot(var, "m"), self.slot(var, "v")
            m.copy_(self.beta_1 * m + (1.0 - self.beta_1) * grad)
            v.copy_(self.beta_2 * v + (1.0 - self.beta_2) * torch.square(grad))
            m_hat = m / (1.0 - beta_1_power)
            v_hat = v / (1.0 - beta_2_power)
            update = m_hat / (torch.sqrt(v_hat) + self.epsilon)
            if self.do_use_weight_decay(name):
                update = update + self.weight_decay_rate * var
            var.sub_(group["lr"] * update)


def optimizer(net):
    return AdamWeightDecay(
        net.named_parameters(),
        learning_rate=2e-3,
        weight_decay_rate=0.1,
        exclude=["gamma$", "beta$", "bias$", "embeddings$"],
    )
