"""Faulty ports of the transducer."""

from ..bank import Change

_KERAS_CELLS = ("encoder.lstm_1.cell", "encoder.lstm_2.cell", "prediction.lstm.cell")
_FLAX_CELLS = ("encoder/lstm_0", "encoder/lstm_1", "predictor/lstm")

FAULTS = [
    Change(
        "keras_style",
        "one of the two biases of a cell is not loaded",
        '"bias": state[f"{name}.bias_ih_l0"] + state[f"{name}.bias_hh_l0"]',
        '"bias": state[f"{name}.bias_ih_l0"]',
        parameter="|".join(f"{cell}.bias" for cell in _KERAS_CELLS),
        at="z = z + self.bias",
    ),
    Change(
        "keras_style",
        "hard sigmoid in the gates, the older default",
        "        return torch.sigmoid(x)\n",
        "        return torch.clamp(0.2 * x + 0.5, 0.0, 1.0)\n",
        at="i = self.recurrent_activation(|f = self.recurrent_activation("
        "|o = self.recurrent_activation(",
    ),
    Change(
        "keras_style",
        "epsilon of the layer norm left at its default",
        "    epsilon = 1e-5\n",
        "    epsilon = 1e-3\n",
        at="inv = torch.rsqrt(variance + self.epsilon)",
    ),
    Change(
        "keras_style",
        "rows of the first kernel stay in the order of frames, bins",
        '    first["kernel"] = frames_inside(first["kernel"])\n',
        "",
        parameter="encoder.lstm_1.cell.kernel",
        at="z = torch.matmul(inputs, self.kernel)|pairs = torch.stack([x[:, 0::2]"
        "|return torch.flatten(pairs, 2)",
    ),
    Change(
        "keras_style",
        "mean and deviation are taken over padding, too",
        'weight = sequence_mask(batch["frames"], x.shape[1])[:, :, None].to(x.dtype)',
        "weight = torch.ones_like(x[:, :, :1])",
        at="count = torch.sum(weight|mean = torch.sum(x * weight|centred = (x - mean)"
        "|variance = torch.sum(torch.square(centred)",
    ),
    Change(
        "keras_style",
        "start token stands behind the labels",
        "tokens = torch.cat([start, labels], dim=1)",
        "tokens = torch.cat([labels, start], dim=1)",
        at="return self.embeddings[inputs]|return self.lstm(self.embedding(tokens))",
        reference="tokens = F.pad(labels, (1, 0)",
    ),
    Change(
        "keras_style",
        "activation comes before the sum",
        "joint = torch.tanh(encoded + predicted)",
        "joint = torch.tanh(encoded) + torch.tanh(predicted)",
    ),
    Change(
        "keras_style",
        "states of a batch go on into the next",
        "weights, stateful=False",
        "weights, stateful=True",
        at="return self.states|h, c = self.get_initial_state(inputs)"
        "|self.states = h.detach()|new_h, new_c = self.cell(",
        steps=2,
    ),
    Change(
        "keras_style",
        "label is taken from the diagonal it leads to",
        "move = alpha + truth[:, d - 1]",
        "move = alpha + truth[:, d]",
    ),
    Change(
        "keras_style",
        "last blank is left out",
        "    log_likelihood = log_likelihood + blank[which, diagonal, label_length]\n",
        "",
        at="log_likelihood = forward_variables[which, diagonal|return -log_likelihood",
        reference="return lattice[corner] + blank[corner]",
    ),
    Change(
        "keras_style",
        "mean of the utterances' costs for a label",
        'return torch.sum(costs) / torch.sum(batch["sizes"])',
        'return torch.mean(costs / batch["sizes"])',
    ),
    Change(
        "keras_style",
        "bias that stands for two moves as one",
        'return 2.0 if name.endswith("cell.bias") else 1.0',
        'return 2.0 if name.endswith("lstm.bias") else 1.0',
        phase="optimizer",
    ),
    Change(
        "keras_style",
        "each gradient is clipped by its own norm",
        "        norm = torch.sqrt(torch.sum(torch.stack(squares)))\n"
        "        return [g * limit / torch.clamp(norm, min=limit) for g in gradients]\n",
        "        norms = [torch.sqrt(square) for square in squares]\n"
        "        norms = [torch.clamp(norm, min=limit) for norm in norms]\n"
        "        return [g * limit / norm for g, norm in zip(gradients, norms)]\n",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "flax_style",
        "gates are read in the order i, f, o, g",
        'zip("ifgo", kernels, biases)',
        'zip("ifog", kernels, biases)',
        parameter="|".join(
            f"{cell}/{side}{gate}/{leaf}"
            for cell in _FLAX_CELLS
            for side in "ih"
            for gate in "go"
            for leaf in ("kernel", "bias")
        ),
        at="g = torch.tanh(dense(|o = torch.sigmoid(dense(",
    ),
    Change(
        "flax_style",
        "both norms are the first",
        'norm_params(f"encoder.norms.{i}")',
        'norm_params("encoder.norms.0")',
        parameter="encoder/norm_1/scale|encoder/norm_1/bias",
        at='return y * params["scale"] + params["bias"]',
    ),
    Change(
        "flax_style",
        "logarithm has a floor instead of a summand",
        "return torch.log(mel + 1e-3)",
        "return torch.log(torch.clamp(mel, min=1e-3))",
    ),
    Change(
        "flax_style",
        "variance is divided by the number of frames",
        "var = (offset**2).sum(0) / (count - 1)",
        "var = (offset**2).sum(0) / count",
    ),
    Change(
        "flax_style",
        "second frame of a pair comes first",
        "torch.cat([pairs[:, 0], pairs[:, 1]], dim=-1)",
        "torch.cat([pairs[:, 1], pairs[:, 0]], dim=-1)",
    ),
    Change(
        "flax_style",
        "output of a cell without the tanh",
        "h = o * torch.tanh(c)",
        "h = o * c",
    ),
    Change(
        "flax_style",
        "hidden state carries no gradient back in time",
        "    c, h = carry\n",
        "    c, h = carry[0], carry[1].detach()\n",
        at='dense(params["hi"], h)|dense(params["hf"], h)|dense(params["hg"], h)'
        '|dense(params["ho"], h)|return lstm_cell(params, carry, x)',
    ),
    Change(
        "flax_style",
        "last token is taken for the blank",
        "blank = log_probs[..., BLANK]",
        "blank = log_probs[..., -1]",
    ),
    Change(
        "flax_style",
        "sum of the labels before counts the next one",
        "before = torch.cumsum(emit_t, dim=-1) - emit_t",
        "before = torch.cumsum(emit_t, dim=-1)",
        at="alpha = before + cumulative_logsumexp(",
    ),
    Change(
        "flax_style",
        "scan of the lattice goes on behind an utterance's end",
        "left = torch.where((t < lengths)[:, None], leaving, left)",
        "left = leaving",
        at="return -torch.take_along_dim(left",
    ),
    Change(
        "flax_style",
        "loss is divided by the labels with their padding",
        "return each.sum() / sizes.sum()",
        "return each.sum() / labels.numel()",
    ),
    Change(
        "flax_style",
        "embedding does not decay, as it is no kernel",
        'decayed = ("kernel", "embedding")',
        'decayed = ("kernel",)',
        phase="optimizer",
        steps=2,
    ),
    Change(
        "flax_style",
        "rate is one step late",
        "step = count + 1\n        return -peak",
        "step = max(count, 1)\n        return -peak",
        phase="optimizer",
        steps=2,
    ),
]
