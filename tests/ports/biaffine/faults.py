"""Faulty ports of the biaffine parser."""

from ..bank import Change

_CELLS = tuple(f"lstm_{i}.{side}" for i in (0, 1) for side in ("fwd", "bwd"))
_BACKWARD = tuple(f"bilstm_{i}.backward_layer.cell" for i in (1, 2))
_LINEAR = 'return torch.matmul(x, params["w"]) + params["b"]'


def _each(modules, *names):
    """Return the names of parameters in each of these modules."""
    return "|".join(f"{module}.{name}" for module in modules for name in names)


FAULTS = [
    Change(
        "haiku_style",
        "gates keep the order of PyTorch",
        "        return [i, g, f, o]\n",
        "        return [i, f, g, o]\n",
        parameter=_each(_CELLS, "w", "b"),
        at="i, g, f, o = torch.chunk(linear(params, x_and_h)|" + _LINEAR,
    ),
    Change(
        "haiku_style",
        "states to start with are sorted by sides before layers",
        'row = 2 * layer + (suffix != "")',
        'row = layer + hp.num_layers * (suffix != "")',
        parameter=_each(("lstm_0.bwd", "lstm_1.fwd"), "hidden", "cell"),
        at='hidden = params["hidden"].expand(|cell = params["cell"].expand('
        "|_, ys = scan(step, initial_state(|x_and_h = torch.cat([x, state.hidden]"
        "|cell = f * state.cell",
    ),
    Change(
        "haiku_style",
        "biases of the fused layer have all dependents before all heads",
        'biases = [state[f"{name}.linear.bias"] for name in names]',
        'biases = [state[f"{name}.linear.bias"] for name in names[::2] + names[1::2]]',
        parameter="mlps.b",
        at='hidden = leaky_relu(linear(params["mlps"], features))|' + _LINEAR,
    ),
    Change(
        "haiku_style",
        "forget gates do not start open",
        "f = torch.sigmoid(f + 1.0)",
        "f = torch.sigmoid(f)",
        at="cell = f * state.cell",
    ),
    Change(
        "haiku_style",
        "padding turns around with the words",
        "index = (length - 1 - place) % x.shape[0]",
        "index = x.shape[0] - 1 - place",
        at="return torch.index_select(x, 0, index)|return vmap(flip_sequence"
        '|backwards = lstm(params["bwd"], flip_sequences(',
    ),
    Change(
        "haiku_style",
        "mean of the squares is taken for the variance",
        "variance = torch.mean(torch.square(x), -1, keepdim=True) - torch.square(mean)",
        "variance = torch.mean(torch.square(x), -1, keepdim=True)",
        at='inv = params["scale"] * torch.rsqrt(|return inv * (x - mean)',
    ),
    Change(
        "haiku_style",
        "zeros of padding take part in the maximum",
        "torch.amax(torch.where(mask > 0, x, -1e30), 1)",
        "torch.amax(x * mask, 1)",
        at="return torch.where(torch.sum(mask, 1) > 0, pooled",
        reference="x.masked_fill(letters.eq(PAD).unsqueeze(1), -1e4)",
    ),
    Change(
        "haiku_style",
        "words beyond the table take its last row",
        "ids = torch.where(words < hp.vocab, words, hp.unk)",
        "ids = torch.clamp(words, max=hp.vocab - 1)",
        at='return params["embeddings"][ids]',
    ),
    Change(
        "haiku_style",
        "scores are divided by the root of the dependents' width",
        "/ math.sqrt(head.shape[-1])",
        "/ math.sqrt(dep.shape[-1])",
    ),
    Change(
        "haiku_style",
        "arcs teach the directions too",
        "stop_gradient(log_sigmoid(order * side))",
        "log_sigmoid(order * side)",
        reference="F.logsigmoid(order * side).detach()",
    ),
    Change(
        "haiku_style",
        "linear terms of the labels lie along the other axis",
        "of_dep[:, None] + of_head[None, :]",
        "of_dep[None, :] + of_head[:, None]",
    ),
    Change(
        "haiku_style",
        "softmax runs over the dependents",
        "log_softmax(torch.where(allowed, arcs, -1e30))",
        "log_softmax(torch.where(allowed, arcs, -1e30).T).T",
        at="arc_nll = -log_probs[place, heads]",
    ),
    Change(
        "haiku_style",
        "roots are counted with the words",
        'torch.sum(batch["words"][:, 1:] > 0)',
        'torch.sum(batch["words"] > 0)',
        at="return torch.sum(torch.sum(sums, 0) * costs) / count",
    ),
    Change(
        "keras_style",
        "rows of the given vectors stand one lower",
        'set_weights(net.word_vectors, state["pretrained"])',
        'set_weights(net.word_vectors, torch.roll(state["pretrained"], 1, 0))',
        parameter="word_vectors.embeddings",
        at="x = trained + self.word_vectors(words)"
        "|flat = torch.index_select(self.embeddings",
    ),
    Change(
        "keras_style",
        "backward layers get the recurrent kernels of the forward ones",
        'state[f"{prefix}weight_hh_{suffix}"].T',
        'state[f"{prefix}weight_hh_l{layer}"].T',
        parameter=_each(_BACKWARD, "recurrent_kernel"),
        at="z = z + torch.matmul(h_tm1, self.recurrent_kernel)",
    ),
    Change(
        "keras_style",
        "scale and shift of the norm are swapped",
        'state["norm.weight"], state["norm.bias"]',
        'state["norm.bias"], state["norm.weight"]',
        parameter="normalization.gamma|normalization.beta",
        at="return normalized * self.gamma + self.beta|x = self.normalization(x)",
    ),
    Change(
        "keras_style",
        "heads have the slope of Keras",
        "leaky_relu(self.head(inputs), negative_slope=0.1)",
        "leaky_relu(self.head(inputs))",
        at="return torch.relu(x) - negative_slope",
    ),
    Change(
        "keras_style",
        "outputs of the backward layer are not turned back",
        "torch.flip(self.backward_layer(inputs, mask), dims=(1,))",
        "self.backward_layer(inputs, mask)",
        at="return torch.cat([y, y_rev], dim=-1)",
    ),
    Change(
        "keras_style",
        "gates have the hard sigmoid",
        "torch.sigmoid(z",
        "nn.functional.hardsigmoid(z",
        at="c = f * c_tm1 + i * torch.tanh(z2)|h = o * torch.tanh(c)",
    ),
    Change(
        "keras_style",
        "convolution sees only what came before",
        "(0, 0, side, side)",
        "(0, 0, 2 * side, 0)",
        at='windows = windows.unfold(1|return torch.einsum("bscw,wcf->bsf"'
        "|x = torch.tanh(self.conv(x))",
    ),
    Change(
        "keras_style",
        "vector of padding is learned",
        "x = switch(mask, self.embedding(inputs), torch.tensor(0.0))",
        "x = self.embedding(inputs)",
        at="flat = torch.index_select(self.embeddings",
        reference="x = self.embed(letters)",
    ),
    Change(
        "keras_style",
        "ones stand before the features",
        "nn.functional.pad(inputs, (0, 1), value=1.0)",
        "nn.functional.pad(inputs, (1, 0), value=1.0)",
        at="dependents = self.with_bias(|heads = self.with_bias("
        '|left = torch.einsum("bdi,ijl->bdlj"|return torch.einsum("bdlj,bhj->bdhl"',
    ),
    Change(
        "keras_style",
        "sides have the wrong sign",
        "torch.triu(ones, 1) - torch.tril(ones, -1)",
        "torch.tril(ones, -1) - torch.triu(ones, 1)",
        at="return -softplus(-order * direction)",
    ),
    Change(
        "keras_style",
        "padding is masked among the dependents",
        "padding[:, None, :]",
        "padding[:, :, None]",
        at="return arcs * (1.0 - forbidden)",
        reference="~inside.unsqueeze(1) | itself",
    ),
    Change(
        "keras_style",
        "labels are taken at the best head, not at the right one",
        '    labels = gather_heads(output["labels"], heads)\n',
        '    labels = gather_heads(output["labels"], torch.argmax(arcs, dim=-1))\n',
        at="return torch.gather(tensor, 2, index)"
        '|"labels": sparse_categorical_crossentropy(',
    ),
    Change(
        "keras_style",
        "mean of each sentence, then over the sentences",
        "    return torch.sum(values * sample_weight) / torch.sum(sample_weight)\n",
        "    sums = torch.sum(values * sample_weight, dim=1)\n"
        "    return torch.mean(sums / torch.sum(sample_weight, dim=1))\n",
    ),
]
