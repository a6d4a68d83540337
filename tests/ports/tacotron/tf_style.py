"""As for TF 1: (batch, time, channels), one kernel per cell of [x, h], norms folded away."""

from pathlib import Path

import torch
from torch import nn

num_mels = 10
outputs_per_step = 2
prenet_units = 12
FORGET_BIAS = 1.0


def variable(value):
    return nn.Parameter(value.contiguous().clone())


def sequence_mask(lengths, maxlen):
    return torch.arange(maxlen).unsqueeze(0) < lengths.unsqueeze(1)


def reverse_sequence(x, lengths):
    """Turn the first lengths[i] steps of x[i] around."""
    steps = torch.arange(x.shape[1]).unsqueeze(0)
    ends = lengths.unsqueeze(1)
    index = torch.where(steps < ends, ends - 1 - steps, steps)
    return torch.take_along_dim(x, index.unsqueeze(2), dim=1)


def same_conv(x, kernel, size):
    """Convolve (n, t, c) with a kernel of rows (size * c)."""
    side = (size - 1) // 2
    length = x.shape[1]
    x = nn.functional.pad(x, (0, 0, side, side))
    columns = torch.cat([x[:, k : k + length] for k in range(size)], dim=2)
    return torch.matmul(columns, kernel)


def rows(weight):
    """Return a kernel (out, in, size) as (size * in, out)."""
    return weight.permute(2, 1, 0).flatten(0, 1)


class Conv1D(nn.Module):
    """A convolution and its norm, as one."""

    def __init__(self, ckpt, scope, activation, epsilon=1e-5):
        super().__init__()
        kernel, bias = ckpt[scope + ".0.weight"], ckpt[scope + ".0.bias"]
        gamma, beta = ckpt[scope + ".1.weight"], ckpt[scope + ".1.bias"]
        moving_mean = ckpt[scope + ".1.running_mean"]
        moving_variance = ckpt[scope + ".1.running_var"]
        scale = gamma / (moving_variance + epsilon) ** 0.5
        self.size = kernel.shape[2]
        self.kernel = variable(rows(kernel) * scale)
        self.bias = variable(beta + (bias - moving_mean) * scale)
        self.activation = activation

    def forward(self, x):
        x = same_conv(x, self.kernel, self.size) + self.bias
        return x if self.activation is None else self.activation(x)


class Dense(nn.Module):
    def __init__(self, ckpt, scope, activation=None):
        super().__init__()
        self.kernel = variable(ckpt[scope + ".weight"].t())
        bias = ckpt.get(scope + ".bias")
        self.bias = None if bias is None else variable(bias)
        self.activation = activation

    def forward(self, x):
        x = torch.matmul(x, self.kernel)
        if self.bias is not None:
            x = x + self.bias
        return x if self.activation is None else self.activation(x)


class LSTMBlockCell(nn.Module):
    """Gates i, j, f, o of one matrix; the bias of the forget gate lacks its one."""

    def __init__(self, w_input, w_state, b_input, b_state):
        super().__init__()
        i, f, j, o = torch.cat([w_input, w_state], dim=1).t().chunk(4, dim=1)
        self.kernel = variable(torch.cat([i, j, f, o], dim=1))
        i, f, j, o = (b_input + b_state).chunk(4)
        self.bias = variable(torch.cat([i, j, f - FORGET_BIAS, o]))

    def zero_state(self, batch):
        zeros = torch.zeros(batch, len(self.bias) // 4)
        return zeros, zeros

    def forward(self, x, state):
        c, h = state
        gates = torch.matmul(torch.cat([x, h], dim=1), self.kernel) + self.bias
        i, j, f, o = gates.chunk(4, dim=1)
        c = torch.sigmoid(f + FORGET_BIAS) * c + torch.sigmoid(i) * torch.tanh(j)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, (c, h)


def lstm_weights(ckpt, scope, suffix=""):
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return [ckpt[f"{scope}.{name}{suffix}"] for name in names]


def dynamic_rnn(cell, x):
    state = cell.zero_state(x.shape[0])
    ys = []
    for x_t in x.unbind(1):
        y, state = cell(x_t, state)
        ys.append(y)
    return torch.stack(ys, dim=1)


class EncoderRNN(nn.Module):
    def __init__(self, ckpt, scope):
        super().__init__()
        self.fw = LSTMBlockCell(*lstm_weights(ckpt, scope, "_l0"))
        self.bw = LSTMBlockCell(*lstm_weights(ckpt, scope, "_l0_reverse"))

    def forward(self, x, lengths):
        ahead = dynamic_rnn(self.fw, x)
        back = dynamic_rnn(self.bw, reverse_sequence(x, lengths))
        back = reverse_sequence(back, lengths)
        heard = sequence_mask(lengths, x.shape[1]).unsqueeze(2)
        return torch.where(heard, torch.cat([ahead, back], dim=2), 0.0)


class LocationSensitiveAttention(nn.Module):
    def __init__(self, ckpt, scope):
        super().__init__()
        filters = ckpt[scope + ".location_layer.conv.weight"]
        self.size = filters.shape[2]
        self.location_filters = variable(rows(filters))
        self.location_layer = Dense(ckpt, scope + ".location_layer.dense")
        self.query_layer = Dense(ckpt, scope + ".query_layer")
        self.memory_layer = Dense(ckpt, scope + ".memory_layer")
        self.attention_v = variable(ckpt[scope + ".v.weight"].flatten())

    def setup(self, memory, lengths):
        self.values = memory
        self.keys = self.memory_layer(memory)
        self.heard = sequence_mask(lengths, memory.shape[1])

    def forward(self, query, alignments, cumulated):
        past = torch.stack([alignments, cumulated], dim=2)
        f = same_conv(past, self.location_filters, self.size)
        hidden = self.keys + self.query_layer(query).unsqueeze(1)
        hidden = torch.tanh(hidden + self.location_layer(f))
        energy = torch.sum(self.attention_v * hidden, dim=2)
        energy = torch.where(self.heard, energy, -torch.inf)
        return torch.softmax(energy, dim=1)


class DecoderCell(nn.Module):
    def __init__(self, ckpt, scope):
        super().__init__()
        self.prenet_1 = Dense(ckpt, scope + ".prenet.layers.0", torch.relu)
        self.prenet_2 = Dense(ckpt, scope + ".prenet.layers.1", torch.relu)
        # here the context stands before the frames
        w, *others = lstm_weights(ckpt, scope + ".attention_rnn")
        w = torch.cat([w[:, prenet_units:], w[:, :prenet_units]], dim=1)
        self.attention_lstm = LSTMBlockCell(w, *others)
        self.attention = LocationSensitiveAttention(ckpt, scope + ".attention")
        self.decoder_lstm = LSTMBlockCell(*lstm_weights(ckpt, scope + ".decoder_rnn"))
        self.frame_projection = Dense(ckpt, scope + ".linear_projection")
        self.stop_projection = Dense(ckpt, scope + ".gate_layer")

    def zero_state(self, memory):
        batch, length, depth = memory.shape
        return (
            self.attention_lstm.zero_state(batch),
            self.decoder_lstm.zero_state(batch),
            torch.zeros(batch, depth),
            torch.zeros(batch, length),
            torch.zeros(batch, length),
        )

    def forward(self, frames, state):
        state_1, state_2, context, alignments, cumulated = state
        frames = self.prenet_2(self.prenet_1(frames))
        output, state_1 = self.attention_lstm(
            torch.cat([context, frames], dim=1), state_1
        )
        alignments = self.attention(output, alignments, cumulated)
        expanded = alignments.unsqueeze(2)
        attended = torch.sum(expanded * self.attention.values, dim=1)
        summed = cumulated + alignments
        lstm_output, state_2 = self.decoder_lstm(
            torch.cat([output, attended], dim=1), state_2
        )
        features = torch.cat([lstm_output, attended], dim=1)
        outputs = self.frame_projection(features), self.stop_projection(features)
        return outputs, (state_1, state_2, attended, alignments, summed)


class Tacotron(nn.Module):
    def __init__(self, ckpt):
        super().__init__()
        self.embedding_table = variable(ckpt["encoder.embedding.weight"])
        self.encoder_convs = nn.Sequential(
            *(Conv1D(ckpt, f"encoder.convolutions.{i}", torch.relu) for i in range(3))
        )
        self.encoder_rnn = EncoderRNN(ckpt, "encoder.lstm")
        self.decoder_cell = DecoderCell(ckpt, "decoder")
        activations = [torch.tanh, torch.tanh, torch.tanh, None]
        self.postnet = nn.Sequential(
            *(
                Conv1D(ckpt, f"postnet.convolutions.{i}", activation)
                for i, activation in enumerate(activations)
            )
        )

    def forward(self, inputs, input_lengths, targets, target_lengths):
        """targets: (n, t, mels)."""
        embedded = self.embedding_table[inputs]
        memory = self.encoder_rnn(self.encoder_convs(embedded), input_lengths)

        n, t, _ = targets.shape
        grouped = targets.reshape(n, t // outputs_per_step, -1)
        self.decoder_cell.attention.setup(memory, input_lengths)
        state = self.decoder_cell.zero_state(memory)
        fed = torch.zeros_like(grouped[:, 0])
        frames, stops, alignments = [], [], []
        for step in range(t // outputs_per_step):
            (frame, stop), state = self.decoder_cell(fed, state)
            frames.append(frame)
            stops.append(stop)
            alignments.append(state[3])
            fed = grouped[:, step]

        spoken = sequence_mask(target_lengths, t)
        decoded = torch.stack(frames, dim=1).reshape(n, t, num_mels)
        refined = decoded + self.postnet(decoded)
        decoded = torch.where(spoken.unsqueeze(2), decoded, 0.0)
        refined = torch.where(spoken.unsqueeze(2), refined, 0.0)
        stop = torch.cat(stops, dim=1)
        stop = torch.where(spoken[:, ::outputs_per_step], stop, 1000.0)
        return decoded, refined, stop, torch.stack(alignments, dim=1)


def model():
    ckpt = torch.load(Path(__file__).with_name("weights.pt"))
    return Tacotron(ckpt)


def forward(net, batch):
    decoded, refined, stop, alignments = net(
        batch["text"],
        batch["text_lengths"],
        batch["mels"].swapaxes(1, 2),
        batch["mel_lengths"],
    )
    return {
        "mel": decoded.swapaxes(1, 2),
        "mel_postnet": refined.swapaxes(1, 2),
        "gate": stop,
        "alignments": alignments,
    }


def sigmoid_cross_entropy(logits, labels):
    positive = torch.relu(logits) - logits * labels
    return torch.mean(positive + torch.log1p(torch.exp(-torch.abs(logits))))


def loss(output, batch):
    before = torch.mean(torch.square(output["mel"] - batch["mels"]))
    after = torch.mean(torch.square(output["mel_postnet"] - batch["mels"]))
    return before + after + sigmoid_cross_entropy(output["gate"], batch["gate"])


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=1e-3, eps=1e-6)
