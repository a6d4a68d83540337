"""After TensorFlow 1: variables by scope, a feed, cells with gates i, j, f, o, lists of steps.

Kernels are [in, out], those of the cells have inputs over hidden; a state is (c, h).
"""

from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

HParams = namedtuple(
    "HParams", "vocab_size emb_dim enc_hidden_dim dec_hidden_dim attn_size cov_loss_wt"
)
hps = HParams(150, 40, 34, 52, 46, 1.5)
PAD_ID, UNK_ID, STOP_ID = 0, 1, 3
FORGET_BIAS = 1.0
LSTMStateTuple = namedtuple("LSTMStateTuple", "c h")


class Graph(nn.Module):
    """Variables by their full name; a scope is open while its part is built."""

    def __init__(self, checkpoint):
        super().__init__()
        self.scope = []
        for name, value in checkpoint.items():
            self.register_parameter(name, nn.Parameter(value.clone().contiguous()))

    @contextmanager
    def variable_scope(self, name):
        self.scope.append(name)
        yield
        self.scope.pop()

    def get_variable(self, name):
        return getattr(self, "/".join([*self.scope, name]))

    def forward(self, batch):
        feed = make_feed_dict(batch)
        with self.variable_scope("seq2seq"):
            return add_seq2seq(self, feed)


# ------------------------------------------------------------------------------ feed


def fill(seqs, value):
    """Lists of ids, all of them padded to the longest."""
    longest = max(len(seq) for seq in seqs)
    return torch.tensor([seq + [value] * (longest - len(seq)) for seq in seqs])


def without_oovs(ids):
    return [i if i < hps.vocab_size else UNK_ID for i in ids]


def get_dec_inp_targ_seqs(sequence):
    """The summary between marks -> what goes in and what is to come out."""
    stop = sequence.index(STOP_ID)
    return without_oovs(sequence[:stop]), sequence[1 : stop + 1]


def make_feed_dict(batch):
    extended = [[i for i in ids if i != PAD_ID] for ids in batch["article"].tolist()]
    pairs = [get_dec_inp_targ_seqs(ids) for ids in batch["summary"].tolist()]
    enc_lens = torch.tensor([len(ids) for ids in extended])
    dec_lens = torch.tensor([len(target) for _, target in pairs])
    return {
        "enc_batch": fill([without_oovs(ids) for ids in extended], PAD_ID),
        "enc_batch_extend_vocab": fill(extended, PAD_ID),
        "enc_lens": enc_lens,
        "enc_padding_mask": sequence_mask(enc_lens),
        "max_art_oovs": max(batch["oovs"].tolist()),
        "dec_batch": fill([inp for inp, _ in pairs], PAD_ID),
        "target_batch": fill([target for _, target in pairs], PAD_ID),
        "dec_padding_mask": sequence_mask(dec_lens),
    }


# ------------------------------------------------------------------------------- ops


def sequence_mask(lengths):
    return (torch.arange(int(lengths.max()))[None, :] < lengths[:, None]).float()


def softmax(logits):
    exps = torch.exp(logits - torch.amax(logits, 1, keepdim=True).detach())
    return exps / torch.sum(exps, 1, keepdim=True)


def conv2d(inputs, kernel):
    """inputs [N, T, 1, in], kernel [1, 1, in, out]."""
    return torch.einsum("nhwi,i...->nhw...", inputs, kernel[0, 0])


def scatter_nd(indices, updates, shape):
    """Values with the same place are added up."""
    zeros = torch.zeros(shape)
    return zeros.index_put(torch.unbind(indices, -1), updates, accumulate=True)


def gather_nd(params, indices):
    return params[torch.unbind(indices, -1)]


def xw_plus_b(x, weights, biases):
    return torch.matmul(x, weights) + biases


def linear(graph, args, scope):
    with graph.variable_scope(scope):
        matrix, bias = graph.get_variable("Matrix"), graph.get_variable("Bias")
        return xw_plus_b(torch.cat(args, 1), matrix, bias)


# ------------------------------------------------------------------------------- rnn


def lstm_cell(graph, inputs, state):
    with graph.variable_scope("lstm_cell"):
        kernel, bias = graph.get_variable("kernel"), graph.get_variable("bias")
    gate_inputs = torch.matmul(torch.cat([inputs, state.h], 1), kernel) + bias
    i, j, f, o = torch.split(gate_inputs, state.h.shape[1], 1)
    kept = state.c * torch.sigmoid(f + FORGET_BIAS)
    new_c = kept + torch.sigmoid(i) * torch.tanh(j)
    new_h = torch.tanh(new_c) * torch.sigmoid(o)
    return new_h, LSTMStateTuple(new_c, new_h)


def dynamic_rnn(graph, inputs, sequence_length, units):
    """Behind the end the output is zero and the state is handed on."""
    zero_output = torch.zeros(inputs.shape[0], units)
    state = LSTMStateTuple(zero_output, zero_output)
    output_ta = []
    for time, input_t in enumerate(torch.unbind(torch.permute(inputs, (1, 0, 2)))):
        output, new_state = lstm_cell(graph, input_t, state)
        copy_cond = (time >= sequence_length)[:, None]
        output_ta.append(torch.where(copy_cond, zero_output, output))
        new_c = torch.where(copy_cond, state.c, new_state.c)
        new_h = torch.where(copy_cond, state.h, new_state.h)
        state = LSTMStateTuple(new_c, new_h)
    return torch.permute(torch.stack(output_ta), (1, 0, 2)), state


def reverse_sequence(inputs, seq_lengths):
    """Turns the first steps of each row, as many as it has."""
    steps = torch.arange(inputs.shape[1])[None, :]
    turned = seq_lengths[:, None] - 1 - steps
    index = torch.where(turned >= 0, turned, steps)
    batch_nums = torch.arange(inputs.shape[0])[:, None].expand_as(index)
    return gather_nd(inputs, torch.stack((batch_nums, index), 2))


def bidirectional_dynamic_rnn(graph, inputs, sequence_length, units):
    with graph.variable_scope("fw"):
        output_fw, st_fw = dynamic_rnn(graph, inputs, sequence_length, units)
    with graph.variable_scope("bw"):
        inputs_reverse = reverse_sequence(inputs, sequence_length)
        tmp, st_bw = dynamic_rnn(graph, inputs_reverse, sequence_length, units)
    output_bw = reverse_sequence(tmp, sequence_length)
    return torch.cat((output_fw, output_bw), 2), st_fw, st_bw


# ----------------------------------------------------------------------------- model


def add_encoder(graph, inputs, seq_len):
    with graph.variable_scope("encoder/bidirectional_rnn"):
        return bidirectional_dynamic_rnn(graph, inputs, seq_len, hps.enc_hidden_dim)


def reduce_states(graph, fw_st, bw_st):
    with graph.variable_scope("reduce_final_st"):
        w_reduce_c = graph.get_variable("w_reduce_c")
        w_reduce_h = graph.get_variable("w_reduce_h")
        bias_reduce_c = graph.get_variable("bias_reduce_c")
        bias_reduce_h = graph.get_variable("bias_reduce_h")
    old_c = torch.cat([fw_st.c, bw_st.c], 1)
    old_h = torch.cat([fw_st.h, bw_st.h], 1)
    new_c = torch.relu(torch.matmul(old_c, w_reduce_c) + bias_reduce_c)
    new_h = torch.relu(torch.matmul(old_h, w_reduce_h) + bias_reduce_h)
    return LSTMStateTuple(new_c, new_h)


def masked_attention(e, enc_padding_mask):
    """Softmax over all places, then those of the article come to 1 again."""
    attn_dist = softmax(e) * enc_padding_mask
    masked_sums = torch.sum(attn_dist, 1)
    return attn_dist / torch.reshape(masked_sums, [-1, 1])


def attention(graph, decoder_state, encoder, coverage):
    """encoder: states and features [N, T, 1, size], mask [N, T]; coverage [N, T, 1, 1]."""
    encoder_states, encoder_features, enc_padding_mask = encoder
    decoder_features = linear(graph, [*decoder_state], "Linear")
    decoder_features = decoder_features[:, None, None, :]
    with graph.variable_scope("coverage"):
        coverage_features = conv2d(coverage, graph.get_variable("w_c"))
    features = torch.tanh(encoder_features + decoder_features + coverage_features)
    e = torch.sum(graph.get_variable("v") * features, [2, 3])
    attn_dist = masked_attention(e, enc_padding_mask)
    weights = attn_dist[:, :, None, None]
    context_vector = torch.sum(weights * encoder_states, [1, 2])
    return context_vector, attn_dist, coverage + weights


def attention_decoder(graph, emb_dec_inputs, initial_state, enc_states, mask):
    """Lists with an item for each step, and the coverages before the steps."""
    state = initial_state
    encoder_states = enc_states[:, :, None, :]
    features = conv2d(encoder_states, graph.get_variable("W_h"))
    encoder = (encoder_states, features, mask)
    context_vector = torch.zeros(enc_states.shape[0], enc_states.shape[2])
    coverage = torch.zeros(*mask.shape, 1, 1)
    outputs, attn_dists, p_gens, coverages = [], [], [], []
    for inp in emb_dec_inputs:
        x = linear(graph, [inp, context_vector], "input")
        cell_output, new_state = lstm_cell(graph, x, state)
        coverages.append(coverage)
        context_vector, attn_dist, coverage = attention(
            graph, new_state, encoder, coverage
        )
        state = new_state
        attn_dists.append(attn_dist)
        switch = linear(graph, [context_vector, state.c, state.h, x], "calculate_pgen")
        p_gens.append(torch.sigmoid(switch))
        output = linear(graph, [cell_output, context_vector], "AttnOutputProjection")
        outputs.append(output)
    return outputs, attn_dists, p_gens, coverages


def calc_final_dist(feed, vocab_dists, attn_dists, p_gens):
    """Both distributions over the vocabulary and the words that only the articles have."""
    batch_size, attn_len = feed["enc_batch_extend_vocab"].shape
    vocab_dists = [p_gen * dist for p_gen, dist in zip(p_gens, vocab_dists)]
    attn_dists = [(1.0 - p_gen) * dist for p_gen, dist in zip(p_gens, attn_dists)]
    extra_zeros = torch.zeros(batch_size, feed["max_art_oovs"])
    vocab_dists_extended = [torch.cat([dist, extra_zeros], 1) for dist in vocab_dists]
    batch_nums = torch.tile(torch.arange(batch_size)[:, None], [1, attn_len])
    indices = torch.stack((batch_nums, feed["enc_batch_extend_vocab"]), 2)
    shape = [batch_size, hps.vocab_size + feed["max_art_oovs"]]
    attn_dists_projected = [scatter_nd(indices, dist, shape) for dist in attn_dists]
    return [v + c for v, c in zip(vocab_dists_extended, attn_dists_projected)]


def mask_and_avg(values, padding_mask):
    """values: a list with [N] for each step; the mean of the means of the sentences."""
    dec_lens = torch.sum(padding_mask, 1)
    values_per_step = [v * padding_mask[:, step] for step, v in enumerate(values)]
    values_per_ex = sum(values_per_step) / dec_lens
    return torch.mean(values_per_ex)


def coverage_loss(attn_dists, coverages, padding_mask):
    covlosses = []
    for a, coverage in zip(attn_dists, coverages):
        covered = torch.minimum(a, coverage[:, :, 0, 0])
        covlosses.append(torch.sum(covered, 1))
    return mask_and_avg(covlosses, padding_mask)


def nll_loss(feed, final_dists):
    batch_nums = torch.arange(feed["target_batch"].shape[0])
    loss_per_step = []
    for dec_step, dist in enumerate(final_dists):
        targets = feed["target_batch"][:, dec_step]
        gold_probs = gather_nd(dist, torch.stack((batch_nums, targets), 1))
        loss_per_step.append(-torch.log(gold_probs + 1e-5))
    return mask_and_avg(loss_per_step, feed["dec_padding_mask"])


def add_seq2seq(graph, feed):
    with graph.variable_scope("embedding"):
        embedding = graph.get_variable("embedding")
    emb_enc_inputs = nn.functional.embedding(feed["enc_batch"], embedding)
    emb_dec_inputs = [
        nn.functional.embedding(ids, embedding)
        for ids in torch.unbind(feed["dec_batch"], 1)
    ]
    enc_outputs, fw_st, bw_st = add_encoder(graph, emb_enc_inputs, feed["enc_lens"])
    dec_in_state = reduce_states(graph, fw_st, bw_st)
    with graph.variable_scope("decoder/attention_decoder"):
        outputs, attn_dists, p_gens, coverages = attention_decoder(
            graph, emb_dec_inputs, dec_in_state, enc_outputs, feed["enc_padding_mask"]
        )
    with graph.variable_scope("output_projection"):
        w, v = graph.get_variable("w"), graph.get_variable("v")
    vocab_dists = [softmax(xw_plus_b(output, w, v)) for output in outputs]
    final_dists = calc_final_dist(feed, vocab_dists, attn_dists, p_gens)
    covered = coverage_loss(attn_dists, coverages, feed["dec_padding_mask"])
    return nll_loss(feed, final_dists) + hps.cov_loss_wt * covered


# ------------------------------------------------------------------------ checkpoint


def gates_ijfo(value):
    i, f, j, o = torch.chunk(value, 4)
    return torch.cat([i, j, f, o])


def cell_variables(state, name, suffix=""):
    """Kernel [inputs and hidden, 4 units] and bias; the open forget gate is the cell's."""
    inputs, hidden = (
        state[f"{name}.weight_ih{suffix}"],
        state[f"{name}.weight_hh{suffix}"],
    )
    yield "kernel", gates_ijfo(torch.cat([inputs, hidden], 1)).T
    bias = state[f"{name}.bias_ih{suffix}"] + state[f"{name}.bias_hh{suffix}"]
    i, j, f, o = torch.chunk(gates_ijfo(bias), 4)
    yield "bias", torch.cat([i, j, f - FORGET_BIAS, o])


def c_before_h(weight, before, after=0):
    """Columns of [before, h, c, after] as [before, c, h, after]."""
    units = hps.dec_hidden_dim
    first, h, c, last = torch.split(weight, [before, units, units, after], 1)
    return torch.cat([first, c, h, last], 1)


def attention_variables(state, name):
    yield "W_h", state[name + ".W_h.weight"].T[None, None]
    yield "v", state[name + ".v.weight"][0]
    yield "coverage/w_c", state[name + ".W_c.weight"].T[None, None]
    yield "Linear/Matrix", c_before_h(state[name + ".W_s.weight"], 0).T
    yield "Linear/Bias", state[name + ".W_s.bias"]


def linear_variables(scope, weight, bias):
    yield scope + "/Matrix", weight.T
    yield scope + "/Bias", bias


def decoder_variables(state):
    for name, value in cell_variables(state, "decoder.cell"):
        yield "lstm_cell/" + name, value
    yield from attention_variables(state, "decoder.attention")
    merge = state["decoder.merge.weight"]
    yield from linear_variables("input", merge, state["decoder.merge.bias"])
    before = 2 * hps.enc_hidden_dim
    switch = c_before_h(state["decoder.switch.weight"], before, hps.emb_dim)
    bias = state["decoder.switch.bias"]
    yield from linear_variables("calculate_pgen", switch, bias)
    project, bias = state["decoder.project.weight"], state["decoder.project.bias"]
    yield from linear_variables("AttnOutputProjection", project, bias)


def variables(state):
    """Weights of the torch model -> variables by full name."""
    out = {"embedding/embedding": state["embed.weight"]}
    for direction, suffix in (("fw", "_l0"), ("bw", "_l0_reverse")):
        for name, value in cell_variables(state, "encoder.lstm", suffix):
            scope = f"encoder/bidirectional_rnn/{direction}/lstm_cell"
            out[f"{scope}/{name}"] = value
    for part in "ch":
        reduce = f"encoder.reduce_{part}"
        out[f"reduce_final_st/w_reduce_{part}"] = state[reduce + ".weight"].T
        out[f"reduce_final_st/bias_reduce_{part}"] = state[reduce + ".bias"]
    for name, value in decoder_variables(state):
        out["decoder/attention_decoder/" + name] = value
    out["output_projection/w"] = state["decoder.out.weight"].T
    out["output_projection/v"] = state["decoder.out.bias"]
    return {"seq2seq/" + name: value for name, value in out.items()}


def model():
    return Graph(variables(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    return {"loss": net(batch)}


def loss(output, batch):
    return output["loss"]
