"""After Gluon: layout TNC, cells with i2h and h2h, products over all steps, one-hot copies."""

from pathlib import Path

import torch
from torch import nn

VOCAB_SIZE, EMBED_SIZE, ENC_SIZE, DEC_SIZE = 150, 40, 34, 52
PAD_INDEX, UNK_INDEX = 0, 1
COVERAGE_LAMBDA, EPSILON = 1.5, 1e-5
LARGE_NEGATIVE = -1e18

# ------------------------------------------------------------------------- operators


def fully_connected(data, weight, bias=None):
    """FullyConnected with flatten=False."""
    out = torch.einsum("...i,oi->...o", data, weight)
    return out if bias is None else out + bias


def batch_dot(lhs, rhs, transpose_b=False):
    return torch.bmm(lhs, rhs.swapaxes(1, 2) if transpose_b else rhs)


def pick(data, index):
    """The one value of the last axis that the index names."""
    return torch.take_along_dim(data, index[..., None], dim=-1)[..., 0]


def one_hot(indices, depth):
    return (indices[..., None] == torch.arange(depth)).float()


def steps_before(length, valid_length):
    """[T, N]: ones for the steps that a sequence has."""
    return (torch.arange(length)[:, None] < valid_length[None, :]).float()


def sequence_mask(data, valid_length):
    mask = steps_before(data.shape[0], valid_length)
    return data * mask.reshape(*mask.shape, *[1] * (data.ndim - 2))


def sequence_last(data, valid_length):
    return data[valid_length - 1, torch.arange(data.shape[1])]


def sequence_reverse(data, valid_length):
    """Padding stays behind."""
    rows = []
    for n, count in enumerate(valid_length.tolist()):
        rows.append(torch.cat([data[:count, n].flip(0), data[count:, n]]))
    return torch.stack(rows, dim=1)


# ---------------------------------------------------------------------------- blocks


class Block(nn.Module):
    """Its parameters come as a dictionary."""

    def __init__(self, params):
        super().__init__()
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value.clone().contiguous()))


class Dense(Block):
    def forward(self, data):
        return fully_connected(data, self.weight, getattr(self, "bias", None))


class Embedding(Block):
    """Words that the table lacks are looked up as one."""

    def forward(self, data):
        data = torch.where(data < VOCAB_SIZE, data, UNK_INDEX)
        return torch.index_select(self.weight, 0, data.flatten()).unflatten(
            0, data.shape
        )


def lstm_step(gates, prev_c):
    """gates [N, 4C]: in, forget, transform, out."""
    in_gate, forget_gate, in_transform, out_gate = gates.chunk(4, dim=1)
    kept = torch.sigmoid(forget_gate) * prev_c
    next_c = kept + torch.sigmoid(in_gate) * torch.tanh(in_transform)
    return torch.sigmoid(out_gate) * torch.tanh(next_c), next_c


class BiLSTM(Block):
    """One layer with parameters l0 for the way there and r0 for the way back."""

    def unroll(self, data, valid_length, d):
        i2h_weight, i2h_bias = self.get(d, "i2h_weight"), self.get(d, "i2h_bias")
        h2h_weight, h2h_bias = self.get(d, "h2h_weight"), self.get(d, "h2h_bias")
        i2h = fully_connected(data, i2h_weight, i2h_bias)
        h = c = torch.zeros(data.shape[1], ENC_SIZE)
        hs, cs = [], []
        for step in i2h:
            h, c = lstm_step(step + fully_connected(h, h2h_weight, h2h_bias), c)
            hs.append(h)
            cs.append(c)
        outputs, cells = torch.stack(hs), torch.stack(cs)
        last = [sequence_last(s, valid_length) for s in (outputs, cells)]
        return sequence_mask(outputs, valid_length), last

    def get(self, direction, name):
        return getattr(self, f"{direction}0_{name}")

    def forward(self, data, valid_length):
        """TNC -> outputs TNC and states [h and c, N, C], both directions in C."""
        there, l_last = self.unroll(data, valid_length, "l")
        data = sequence_reverse(data, valid_length)
        back, r_last = self.unroll(data, valid_length, "r")
        back = sequence_reverse(back, valid_length)
        states = [torch.cat(pair, dim=1) for pair in zip(l_last, r_last)]
        return torch.cat([there, back], dim=2), torch.stack(states)


class Bridge(Block):
    """States h and c of the encoder to those of the decoder, at once."""

    def forward(self, states):
        reduced = batch_dot(states, self.weight, transpose_b=True) + self.bias
        h, c = torch.relu(reduced)
        return [h, c]


class LSTMCell(Block):
    def forward(self, inputs, states):
        i2h = fully_connected(inputs, self.i2h_weight, self.i2h_bias)
        h2h = fully_connected(states[0], self.h2h_weight, self.h2h_bias)
        next_h, next_c = lstm_step(i2h + h2h, states[1])
        return next_h, [next_h, next_c]


class CoverageAttentionCell(Block):
    """Scores of an MLP; memory and weights are time first."""

    def project_key(self, memory):
        return fully_connected(memory, self.key_weight)

    def forward(self, states, memory, key, memory_length, coverage):
        h, c = states
        query = fully_connected(h, self.query_h_weight, self.query_bias)
        query = query + fully_connected(c, self.query_c_weight)
        covered = coverage[:, :, None] * self.coverage_weight
        mid = torch.tanh(key + query[None] + covered)
        score = torch.einsum("tna,a->tn", mid, self.score_weight)
        steps = torch.arange(memory.shape[0])[:, None]
        score = torch.where(steps < memory_length, score, LARGE_NEGATIVE)
        att_weights = torch.softmax(score, dim=0)
        context = batch_dot(att_weights.T[:, None], memory.swapaxes(0, 1))
        return context[:, 0], att_weights


class PointerDecoder(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.merge_word = Dense(params["merge_word"])
        self.merge_context = Dense(params["merge_context"])
        self.cell = LSTMCell(params["cell"])
        self.attention = CoverageAttentionCell(params["attention"])
        self.switch = Block(params["switch"])
        self.hidden = Dense(params["hidden"])
        self.decoder = Dense(params["decoder"])

    def unroll(self, words, states, memory, memory_length):
        """Outputs of all steps, each of them time first."""
        key = self.attention.project_key(memory)
        merged = self.merge_word(words)
        context = torch.zeros_like(memory[0])
        coverage = torch.zeros(memory.shape[:2])
        steps = []
        for word in merged:
            x = word + self.merge_context(context)
            h, states = self.cell(x, states)
            context, att = self.attention(states, memory, key, memory_length, coverage)
            coverage = coverage + att
            steps.append((x, h, states[1], context, att.T))
        return [torch.stack(items) for items in zip(*steps)]

    def generate(self, x, h, c, context):
        """The log of the odds that a word is from the vocabulary, [T, N, 1]."""
        switch = self.switch
        from_states = fully_connected(h, switch.h_weight)
        from_states = from_states + fully_connected(c, switch.c_weight)
        from_context = fully_connected(context, switch.context_weight)
        from_input = fully_connected(x, switch.input_weight)
        return from_states + from_context + from_input + switch.bias

    def forward(self, words, states, memory, memory_length, article, depth):
        x, h, c, context, att = self.unroll(words, states, memory, memory_length)
        logits = self.decoder(self.hidden(torch.cat([h, context], dim=2)))
        missing = depth - logits.shape[2]
        absent = torch.full((*logits.shape[:2], missing), LARGE_NEGATIVE)
        vocab = torch.softmax(torch.cat([logits, absent], dim=2), dim=2)
        copied = batch_dot(att.swapaxes(0, 1), one_hot(article.T, depth))
        p_gen = torch.sigmoid(self.generate(x, h, c, context))
        probs = p_gen * vocab + (1.0 - p_gen) * copied.swapaxes(0, 1)
        return probs, att


class PointerGenerator(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.embedding = Embedding(params["embedding"])
        self.encoder = BiLSTM(params["encoder"])
        self.bridge = Bridge(params["bridge"])
        self.decoder = PointerDecoder(params["decoder"])

    def forward(self, batch):
        article, summary = batch["article"].T, batch["summary"].T
        data, label = summary[:-1], summary[1:]
        article_length = torch.count_nonzero(article != PAD_INDEX, dim=0)
        label_length = torch.count_nonzero(label != PAD_INDEX, dim=0)
        depth = VOCAB_SIZE + int(torch.max(batch["oovs"]))

        memory, states = self.encoder(self.embedding(article), article_length)
        words = self.embedding(data)
        states = self.bridge(states)
        probs, att = self.decoder(words, states, memory, article_length, article, depth)
        nll = NLLLoss()(probs, label, label_length)
        return nll + CoverageLoss(COVERAGE_LAMBDA)(att, label_length)


# ---------------------------------------------------------------------------- losses


class NLLLoss:
    def __call__(self, probs, label, valid_length):
        losses = -torch.log(pick(probs, label) + EPSILON)
        per_sample = torch.sum(sequence_mask(losses, valid_length), dim=0)
        return torch.mean(per_sample / valid_length)


class CoverageLoss:
    """att [T, N, places]; what was covered is the sum of the steps before."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, att, valid_length):
        before = torch.cumsum(att[:-1], dim=0)
        again = torch.sum(torch.minimum(att[1:], before), dim=2)
        again = sequence_mask(again, valid_length - 1)
        per_sample = torch.sum(again, dim=0) / valid_length
        return self.weight * torch.mean(per_sample)


# ------------------------------------------------------------------------ parameters


def lstm_params(state, name, suffix=""):
    return {
        "i2h_weight": state[f"{name}.weight_ih{suffix}"],
        "h2h_weight": state[f"{name}.weight_hh{suffix}"],
        "i2h_bias": state[f"{name}.bias_ih{suffix}"],
        "h2h_bias": state[f"{name}.bias_hh{suffix}"],
    }


def encoder_params(state):
    params = {}
    for direction, suffix in (("l", "_l0"), ("r", "_l0_reverse")):
        for key, value in lstm_params(state, "encoder.lstm", suffix).items():
            params[f"{direction}0_{key}"] = value
    return params


def bridge_params(state):
    names = ("encoder.reduce_h", "encoder.reduce_c")
    weight = torch.stack([state[f"{name}.weight"] for name in names])
    bias = torch.stack([state[f"{name}.bias"] for name in names])
    return {"weight": weight, "bias": bias[:, None]}


def attention_params(state):
    source = "decoder.attention."
    query_h, query_c = state[source + "W_s.weight"].chunk(2, dim=1)
    return {
        "key_weight": state[source + "W_h.weight"],
        "query_h_weight": query_h,
        "query_c_weight": query_c,
        "query_bias": state[source + "W_s.bias"],
        "coverage_weight": state[source + "W_c.weight"].flatten(),
        "score_weight": state[source + "v.weight"].flatten(),
    }


def switch_params(state):
    sizes = [2 * ENC_SIZE, DEC_SIZE, DEC_SIZE, EMBED_SIZE]
    context, h, c, x = state["decoder.switch.weight"].split(sizes, dim=1)
    return {
        "context_weight": context,
        "h_weight": h,
        "c_weight": c,
        "input_weight": x,
        "bias": state["decoder.switch.bias"],
    }


def dense_params(state, name):
    return {"weight": state[name + ".weight"], "bias": state[name + ".bias"]}


def decoder_params(state):
    sizes = [EMBED_SIZE, 2 * ENC_SIZE]
    word, context = state["decoder.merge.weight"].split(sizes, dim=1)
    return {
        "merge_word": {"weight": word, "bias": state["decoder.merge.bias"]},
        "merge_context": {"weight": context},
        "cell": lstm_params(state, "decoder.cell"),
        "attention": attention_params(state),
        "switch": switch_params(state),
        "hidden": dense_params(state, "decoder.project"),
        "decoder": dense_params(state, "decoder.out"),
    }


def convert(state):
    return {
        "embedding": {"weight": state["embed.weight"]},
        "encoder": encoder_params(state),
        "bridge": bridge_params(state),
        "decoder": decoder_params(state),
    }


def model():
    return PointerGenerator(convert(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    return {"loss": net(batch)}


def loss(output, batch):
    return output["loss"]
