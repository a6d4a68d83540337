"""Faulty ports of the summarizer that copies."""

from ..bank import Change

_ENCODER = "seq2seq/encoder/bidirectional_rnn/"
_DECODER = "seq2seq/decoder/attention_decoder/"
_CELLS = tuple(
    scope + "lstm_cell/" for scope in (_ENCODER + "fw/", _ENCODER + "bw/", _DECODER)
)
_GATES = "gate_inputs = torch.matmul("
_XW = "return xw_plus_b(torch.cat(args, 1)|return torch.matmul(x, weights) + biases"
_DENSE = 'out = torch.einsum("...i,oi->...o"|return out if bias is None else out + bias'


def _each(names):
    """Return the names of variables in each of the three cells."""
    return "|".join(cell + name for cell in _CELLS for name in names.split())


FAULTS = [
    Change(
        "tf1_style",
        "gates stay in the order i, f, j, o",
        "return torch.cat([i, j, f, o])",
        "return torch.cat([i, f, j, o])",
        parameter=_each("kernel bias"),
        at="i, j, f, o = torch.split(gate_inputs|" + _GATES,
    ),
    Change(
        "tf1_style",
        "forget gates are opened in the bias and once more in the cell",
        "torch.cat([i, j, f - FORGET_BIAS, o])",
        "torch.cat([i, j, f, o])",
        parameter=_each("bias"),
        at="kept = state.c * torch.sigmoid(f + FORGET_BIAS)|" + _GATES,
    ),
    Change(
        "tf1_style",
        "rows of the hidden state stand over those of the inputs",
        "torch.cat([inputs, hidden], 1)",
        "torch.cat([hidden, inputs], 1)",
        parameter=_each("kernel"),
        at=_GATES,
    ),
    Change(
        "tf1_style",
        "padding is turned with the article",
        "index = torch.where(turned >= 0, turned, steps)",
        "index = inputs.shape[1] - 1 - steps + torch.zeros_like(turned)",
        at="return gather_nd(inputs, torch.stack((batch_nums, index)"
        "|return params[torch.unbind(indices, -1)]"
        "|inputs_reverse = reverse_sequence(|output_bw = reverse_sequence(",
    ),
    Change(
        "tf1_style",
        "state runs on behind the end of an article",
        "        new_c = torch.where(copy_cond, state.c, new_state.c)\n"
        "        new_h = torch.where(copy_cond, state.h, new_state.h)\n"
        "        state = LSTMStateTuple(new_c, new_h)\n",
        "        state = new_state\n",
        at="old_c = torch.cat([fw_st.c, bw_st.c]|old_h = torch.cat([fw_st.h, bw_st.h]"
        "|new_c = kept + torch.sigmoid(i)|new_h = torch.tanh(new_c)",
        reference="packed, (h, c) = self.lstm(packed)",
    ),
    Change(
        "tf1_style",
        "attention does not come to 1 once padding is left out",
        "    masked_sums = torch.sum(attn_dist, 1)\n"
        "    return attn_dist / torch.reshape(masked_sums, [-1, 1])\n",
        "    return attn_dist\n",
        at="attn_dist = softmax(e) * enc_padding_mask"
        "|context_vector = torch.sum(weights * encoder_states"
        "|weights = attn_dist[:, :, None, None]",
        reference="attention = scores.masked_fill(",
    ),
    Change(
        "tf1_style",
        "step counts as covered by itself in the loss",
        "        coverages.append(coverage)\n"
        "        context_vector, attn_dist, coverage = attention(\n"
        "            graph, new_state, encoder, coverage\n"
        "        )\n",
        "        context_vector, attn_dist, coverage = attention(\n"
        "            graph, new_state, encoder, coverage\n"
        "        )\n"
        "        coverages.append(coverage)\n",
        at="covered = torch.minimum(a, coverage",
    ),
    Change(
        "tf1_style",
        "nothing is learned through the coverage",
        "return context_vector, attn_dist, coverage + weights",
        "return context_vector, attn_dist, coverage + weights.detach()",
        reference="coverage = coverage + attention",
    ),
    Change(
        "tf1_style",
        "state before the step asks for the context",
        "            graph, new_state, encoder, coverage\n",
        "            graph, state, encoder, coverage\n",
        at='decoder_features = linear(graph, [*decoder_state], "Linear")|' + _XW,
    ),
    Change(
        "tf1_style",
        "of copies of the same word only one counts",
        "updates, accumulate=True)",
        "updates, accumulate=False)",
        at="attn_dists_projected = [scatter_nd(|return [v + c for v, c in zip(",
    ),
    Change(
        "tf1_style",
        "unknown words are looked up in the last row",
        "return [i if i < hps.vocab_size else UNK_ID for i in ids]",
        "return [min(i, hps.vocab_size - 1) for i in ids]",
        at='"enc_batch": fill(|"dec_batch": fill(|return torch.tensor([seq + '
        "|emb_enc_inputs = nn.functional.embedding(|nn.functional.embedding(ids",
    ),
    Change(
        "tf1_style",
        "mean over the words of all sentences",
        "    values_per_ex = sum(values_per_step) / dec_lens\n"
        "    return torch.mean(values_per_ex)\n",
        "    return torch.sum(sum(values_per_step)) / torch.sum(dec_lens)\n",
    ),
    Change(
        "tf1_style",
        "switch is turned around: its probability goes to the copies",
        "    vocab_dists = [p_gen * dist for p_gen, dist in zip(p_gens, vocab_dists)]\n"
        "    attn_dists = [(1.0 - p_gen) * dist",
        "    vocab_dists = [(1.0 - p_gen) * dist for p_gen, dist in zip(p_gens, vocab_dists)]\n"
        "    attn_dists = [p_gen * dist",
    ),
    Change(
        "gluon_style",
        "way back has the recurrent weights of the way there",
        'state[f"{name}.weight_hh{suffix}"]',
        'state[f"{name}.weight_hh{suffix[:3]}"]',
        parameter="encoder.r0_h2h_weight",
        at="h, c = lstm_step(step + fully_connected(h, h2h_weight|" + _DENSE,
    ),
    Change(
        "gluon_style",
        "vectors of the coverage and of the score have changed places",
        '        "coverage_weight": state[source + "W_c.weight"].flatten(),\n'
        '        "score_weight": state[source + "v.weight"].flatten(),\n',
        '        "coverage_weight": state[source + "v.weight"].flatten(),\n'
        '        "score_weight": state[source + "W_c.weight"].flatten(),\n',
        parameter="decoder.attention.coverage_weight|decoder.attention.score_weight",
        at="covered = coverage[:, :, None] * self.coverage_weight"
        '|score = torch.einsum("tna,a->tn"',
    ),
    Change(
        "gluon_style",
        "biases of the hidden state are added to those of the inputs and kept, too",
        '"i2h_bias": state[f"{name}.bias_ih{suffix}"],',
        '"i2h_bias": state[f"{name}.bias_ih{suffix}"] + state[f"{name}.bias_hh{suffix}"],',
        parameter="encoder.l0_i2h_bias|encoder.r0_i2h_bias|decoder.cell.i2h_bias",
        at="i2h = fully_connected(data, i2h_weight|i2h = fully_connected(inputs|"
        + _DENSE,
    ),
    Change(
        "gluon_style",
        "first place of the padding is attended to",
        "torch.where(steps < memory_length",
        "torch.where(steps <= memory_length",
        at="att_weights = torch.softmax(score",
    ),
    Change(
        "gluon_style",
        "start states go through a tangent",
        "h, c = torch.relu(reduced)",
        "h, c = torch.tanh(reduced)",
    ),
    Change(
        "gluon_style",
        "softmax of the scores is over the batch",
        "torch.softmax(score, dim=0)",
        "torch.softmax(score, dim=1)",
    ),
    Change(
        "gluon_style",
        "penalty takes the product with the coverage, not the smaller one",
        "torch.minimum(att[1:], before)",
        "att[1:] * before",
    ),
    Change(
        "gluon_style",
        "words out of the vocabulary have logits of zero",
        "torch.full((*logits.shape[:2], missing), LARGE_NEGATIVE)",
        "torch.zeros(*logits.shape[:2], missing)",
        at="vocab = torch.softmax(torch.cat([logits, absent]",
    ),
    Change(
        "gluon_style",
        "decoder starts with the memory for its output and the other way round",
        "return [h, c]",
        "return [c, h]",
        at="h, states = self.cell(x, states)|h2h = fully_connected(states[0]"
        "|next_h, next_c = lstm_step(i2h + h2h, states[1])"
        "|kept = torch.sigmoid(forget_gate) * prev_c|" + _DENSE,
    ),
    Change(
        "gluon_style",
        "words that go in are to come out",
        "data, label = summary[:-1], summary[1:]",
        "data, label = summary[:-1], summary[:-1]",
        at="label_length = torch.count_nonzero(|losses = -torch.log(pick(probs, label)"
        "|return torch.take_along_dim(data, index",
    ),
    Change(
        "gluon_style",
        "copies of unknown words are all the same word",
        "        copied = batch_dot(att.swapaxes(0, 1), one_hot(article.T, depth))\n",
        "        known = torch.where(article < VOCAB_SIZE, article, UNK_INDEX)\n"
        "        copied = batch_dot(att.swapaxes(0, 1), one_hot(known.T, depth))\n",
        at="return (indices[..., None] == torch.arange(depth)).float()"
        "|return torch.bmm(lhs, ",
    ),
    Change(
        "gluon_style",
        "steps behind the summary are punished for coming back",
        "        again = sequence_mask(again, valid_length - 1)\n",
        "",
        at="per_sample = torch.sum(again, dim=0) / valid_length",
        reference="(values * mask).sum(dim=1)",
    ),
    Change(
        "gluon_style",
        "switch sees the word without the context it was merged with",
        "steps.append((x, h, states[1]",
        "steps.append((word, h, states[1]",
        at="from_input = fully_connected(x, switch.input_weight)|" + _DENSE,
    ),
]
