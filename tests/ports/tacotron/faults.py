"""Faulty ports of the small Tacotron."""

from ..bank import Change


def _each(places, names):
    """Return the names of parameters at each of these places."""
    return "|".join(
        f"{place}.{name}" for place in places.split() for name in names.split()
    )


_CELLS = "encoder_rnn.fw encoder_rnn.bw decoder_cell.attention_lstm decoder_cell.decoder_lstm"
_CONVS = " ".join(
    f"{net}.{i}"
    for net, count in (("encoder_convs", 3), ("postnet", 4))
    for i in range(count)
)

FAULTS = [
    Change(
        "tf_style",
        "gates of the kernels in the order of torch",
        "self.kernel = variable(torch.cat([i, j, f, o], dim=1))",
        "self.kernel = variable(torch.cat([i, f, j, o], dim=1))",
        parameter=_each(_CELLS, "kernel"),
    ),
    Change(
        "tf_style",
        "one of the forget gate counted twice",
        "torch.cat([i, j, f - FORGET_BIAS, o])",
        "torch.cat([i, j, f, o])",
        parameter=_each(_CELLS, "bias"),
        at="torch.sigmoid(f + FORGET_BIAS)",
    ),
    Change(
        "tf_style",
        "biases of the state left out",
        "(b_input + b_state).chunk(4)",
        "b_input.chunk(4)",
        parameter=_each(_CELLS, "bias"),
    ),
    Change(
        "tf_style",
        "epsilon of Keras",
        "epsilon=1e-5",
        "epsilon=1e-3",
        parameter=_each(_CONVS, "kernel bias"),
    ),
    Change(
        "tf_style",
        "bias of the convolution goes around the norm",
        "beta + (bias - moving_mean) * scale",
        "beta + bias - moving_mean * scale",
        parameter=_each(_CONVS, "bias"),
    ),
    Change(
        "tf_style",
        "backward cell reads the forward weights",
        'lstm_weights(ckpt, scope, "_l0_reverse")',
        'lstm_weights(ckpt, scope, "_l0")',
        parameter="encoder_rnn.bw.kernel|encoder_rnn.bw.bias",
    ),
    Change(
        "tf_style",
        "columns of frames and context not exchanged",
        "        w = torch.cat([w[:, prenet_units:], w[:, :prenet_units]], dim=1)\n",
        "",
        parameter="decoder_cell.attention_lstm.kernel",
        at="output, state_1 = self.attention_lstm(|torch.cat([context, frames], dim=1)",
    ),
    Change(
        "tf_style",
        "backward outputs stay reversed",
        "        back = reverse_sequence(back, lengths)\n",
        "",
        at="torch.cat([ahead, back], dim=2)",
        reference="x, _ = self.lstm(x)",
    ),
    Change(
        "tf_style",
        "padding is reversed too",
        "index = torch.where(steps < ends, ends - 1 - steps, steps)",
        "index = x.shape[1] - 1 - steps + 0 * ends",
        at="return torch.take_along_dim(",
    ),
    Change(
        "tf_style",
        "weights of the last step alone for the sum of all",
        "summed = cumulated + alignments",
        "summed = alignments",
        at="past = torch.stack([alignments, cumulated], dim=2)",
        reference="cumulative = cumulative + weights",
    ),
    Change(
        "tf_style",
        "sum of the weights carries no gradient",
        "summed = cumulated + alignments",
        "summed = cumulated + alignments.detach()",
        at="return torch.softmax(energy, dim=1)",
        reference="cumulative = cumulative + weights",
    ),
    Change(
        "tf_style",
        "frames of the first cell's output",
        "torch.cat([lstm_output, attended], dim=1)",
        "torch.cat([output, attended], dim=1)",
    ),
    Change(
        "tf_style",
        "postnet of the frames behind the mask",
        "        refined = decoded + self.postnet(decoded)\n"
        "        decoded = torch.where(spoken.unsqueeze(2), decoded, 0.0)\n",
        "        decoded = torch.where(spoken.unsqueeze(2), decoded, 0.0)\n"
        "        refined = decoded + self.postnet(decoded)\n",
        at="decoded = torch.where(spoken|refined = decoded + self.postnet("
        "|x = nn.functional.pad(x, (0, 0, side|columns = torch.cat(|return torch.matmul(columns",
    ),
    Change(
        "pure_scan",
        "directions exchanged in the stack",
        'sides = ("_l0", "_l0_reverse")',
        'sides = ("_l0_reverse", "_l0")',
        parameter="enc_rnn/x|enc_rnn/h|enc_rnn/b",
    ),
    Change(
        "pure_scan",
        "gates of the encoder's biases in the order of torch",
        "torch.stack([by_gate(bias) for bias in each])",
        "torch.stack([bias.unflatten(0, (4, -1)) for bias in each])",
        parameter="enc_rnn/b",
    ),
    Change(
        "pure_scan",
        "kernels of the state are not transposed",
        'p[name + "/h"] = by_gate(w[at + "weight_hh"])',
        'p[name + "/h"] = by_gate(w[at + "weight_hh"]).permute(2, 1, 0)',
        parameter="cell1/h|cell2/h",
    ),
    Change(
        "pure_scan",
        "taps of the postnet reversed",
        'p[f"post{i}/w"] = w[at + ".0.weight"].permute(2, 1, 0)',
        'p[f"post{i}/w"] = w[at + ".0.weight"].permute(2, 1, 0).flip(0)',
        parameter="post0/w|post1/w|post2/w|post3/w",
    ),
    Change(
        "pure_scan",
        "all of the encoder's layers have the first norm",
        '[w[f"{at}.1.{source}"] for at in encoder]',
        '[w[f"{encoder[0]}.1.{source}"] for at in encoder]',
        parameter="enc_conv/scale|enc_conv/offset|enc_conv/mean|enc_conv/var",
    ),
    Change(
        "pure_scan",
        "sum of the weights before the weights",
        "torch.stack([share, total], dim=-1)",
        "torch.stack([total, share], dim=-1)",
        parameter="attend/place",
        at="place = conv(torch.stack(",
    ),
    Change(
        "pure_scan",
        "padding hidden after the softmax",
        "torch.softmax(score + (heard - 1) * 1e9, dim=-1)",
        "torch.softmax(score, dim=-1) * heard",
        reference='energies.masked_fill(mask, float("-inf"))',
    ),
    Change(
        "pure_scan",
        "cell and output of the second cell exchanged in the carry",
        "return ((h1, c1), (h2, c2), context",
        "return ((h1, c1), (c2, h2), context",
        at='torch.einsum("bh,hgk->bgk", h2, p["cell2/h"])|h2, c2 = lstm(z, c2)'
        "|cell = f * cell + i * g",
    ),
    Change(
        "pure_scan",
        "padded on the left alone",
        "(0, 0, size // 2, size // 2)",
        "(0, 0, size - 1, 0)",
        at='return x.unfold(1, size, 1)|return torch.einsum("btck,kcd->btd"',
    ),
    Change(
        "pure_scan",
        "last frames come before the first",
        "torch.cat([torch.zeros_like(groups[:1]), groups[:-1]])",
        "torch.roll(groups, 1, dims=0)",
        reference="torch.cat([go, frames], dim=1)",
        at='frame = torch.clamp(shifted @ p["prenet/0"], min=0)',
    ),
    Change(
        "pure_scan",
        "the two frames of a step interleaved",
        "mel = y[..., :-1].reshape(b, t, m)",
        "mel = y[..., :-1].unflatten(-1, (m, -1)).transpose(2, 3).reshape(b, t, m)",
    ),
    Change(
        "pure_scan",
        "activation on the last layer of the postnet",
        "if layer < 3:",
        "if layer < 4:",
        at="x = torch.tanh(x)",
    ),
    Change(
        "pure_scan",
        "mean over the spoken frames alone",
        "(wrong**2).mean(dim=(1, 2, 3)).sum()",
        '(wrong**2).sum() / (batch["mel_lengths"].sum() * MEL)',
    ),
]
