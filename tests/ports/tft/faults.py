"""Faulty ports of the Temporal Fusion Transformer."""

from ..bank import Change

_SELECTIONS = {
    "static_variable_selection": 4,
    "historical_selection": 7,
    "future_selection": 5,
}
_CONTEXTS = ("variable_selection", "enrichment", "state_h", "state_c")
_NETWORKS = [
    *(f"{selection}.sparse_weights" for selection in _SELECTIONS),
    *(f"{name}.grns.{i}" for name, count in _SELECTIONS.items() for i in range(count)),
    *(f"static_context_{context}" for context in _CONTEXTS),
    "static_enrichment",
    "decoder_0.feed_forward",
    "decoder_1.feed_forward",
]
_GATES = [
    *(f"{network}.add_and_norm" for network in _NETWORKS),
    "decoder_0.add_and_norm",
    "decoder_1.add_and_norm",
    "lstm_add_and_norm",
    "final_add_and_norm",
]
_DENSE = ("kernel", "bias")
_GATED = [
    f"gating_layer.{layer}.{kind}"
    for layer in ("activation_layer", "gated_layer")
    for kind in _DENSE
]


def _each(owners, names):
    """Return all names of all owners."""
    return "|".join(f"{owner}{name}" for owner in owners for name in names)


FAULTS = [
    Change(
        "keras_style",
        "kernels of the selections keep torch's rows, variables before units",
        "        self.units_first(sparse_weights.hidden_1, variables)\n",
        "",
        parameter=_each(_SELECTIONS, [".sparse_weights.hidden_1.kernel"]),
        at="hidden = self.hidden_1(x)|outputs = torch.matmul(inputs, self.kernel)",
    ),
    Change(
        "keras_style",
        "halves of the gated linear units are exchanged",
        "activation_layer=Dense(kernel[:, :units], bias[:units]),\n"
        "            gated_layer=Dense(kernel[:, units:], bias[units:]),\n",
        "activation_layer=Dense(kernel[:, units:], bias[units:]),\n"
        "            gated_layer=Dense(kernel[:, :units], bias[:units]),\n",
        parameter=_each([f"{gate}." for gate in _GATES], _GATED),
        at="gate = torch.sigmoid(self.gated_layer(x))"
        "|return self.activation_layer(x) * gate",
    ),
    Change(
        "keras_style",
        "context of the cells is loaded from that of the hidden states",
        'self.grn("context_cell")',
        'self.grn("context_hidden")',
        parameter=_each(
            ["static_context_state_c."],
            [
                *(f"hidden_{i}.{kind}" for i in (1, 2) for kind in _DENSE),
                *(f"add_and_norm.{name}" for name in _GATED),
                "add_and_norm.layer_norm.gamma",
                "add_and_norm.layer_norm.beta",
            ],
        ),
        at="static_context_state_c = self.static_context_state_c(",
    ),
    Change(
        "keras_style",
        "second cells read the kernel of the first layer",
        'self.arrays[f"{name}.weight_ih_l{n}"].T',
        'self.arrays[f"{name}.weight_ih_l0"].T',
        parameter="history_lstm.cells.1.kernel|future_lstm.cells.1.kernel",
        at="z = inputs @ self.kernel",
    ),
    Change(
        "keras_style",
        "epsilon of Keras in the norms",
        "def __init__(self, gamma, beta, epsilon=1e-5):",
        "def __init__(self, gamma, beta, epsilon=1e-3):",
        at="inv = self.gamma * torch.rsqrt(variance + self.epsilon)"
        "|return inputs * inv + (self.beta|return self.layer_norm(skip",
    ),
    Change(
        "keras_style",
        "context is added behind the activation",
        "        if self.additional_context is not None:\n"
        "            hidden = hidden + self.additional_context(additional_context)\n"
        "        hidden = elu(hidden)\n",
        "        hidden = elu(hidden)\n"
        "        if self.additional_context is not None:\n"
        "            hidden = hidden + self.additional_context(additional_context)\n",
        at="hidden = elu(hidden)|hidden = hidden + self.additional_context(",
    ),
    Change(
        "keras_style",
        "scores are divided by the root of the whole width",
        "temper = math.sqrt(ks.shape[-1])",
        "temper = math.sqrt(q.shape[-1])",
        at="attn = torch.bmm(qs, ks.transpose(1, 2)) / temper",
    ),
    Change(
        "keras_style",
        "states run on behind the end of a short history",
        'historical_features, [initial] * PARAMS["lstm_layers"], mask\n',
        'historical_features, [initial] * PARAMS["lstm_layers"]\n',
        at="h = torch.where(keep|c = torch.where(keep|states[n] = (h, c)"
        "|h, c = cell(x, states[n])|return torch.stack(outputs, dim=1), states",
        reference="past, length, batch_first=True",
    ),
    Change(
        "keras_style",
        "inputs go through the gate, and what the LSTM gives is added",
        "self.lstm_add_and_norm(lstm_layer, input_embeddings)",
        "self.lstm_add_and_norm(input_embeddings, lstm_layer)",
    ),
    Change(
        "keras_style",
        "attention sees the next day",
        "causal = torch.cumsum(torch.eye(steps), dim=0)",
        "causal = torch.tril(torch.ones(steps, steps), diagonal=1)",
        at="return causal * (1.0|mask = get_decoder_mask("
        "|return scores + -1e9|attn = softmax(hard_softmax_mask(attn, mask))",
    ),
    Change(
        "keras_style",
        "a year has 365 days",
        '"days_per_year": 365.25,',
        '"days_per_year": 365.0,',
        at="angle = (2.0 * math.pi",
    ),
    Change(
        "keras_style",
        "days that do not count stay in what the loss is divided by",
        "normaliser = torch.sum(torch.abs(y) * sample_weight)",
        "normaliser = torch.sum(torch.abs(y))",
        at="return 2.0 * total / normaliser",
        reference='total = (batch["target"].abs() * counted).sum()',
    ),
    Change(
        "keras_style",
        "embeddings decay",
        'exclude_from_weight_decay=["bias", "gamma", "beta", "embeddings"]',
        'exclude_from_weight_decay=["bias", "gamma", "beta"]',
        phase="optimizer",
        steps=2,
    ),
    Change(
        "jax_style",
        "gates of the matrices stay in torch's order",
        '"w": reorder_gates(w.T),',
        '"w": w.T,',
        parameter=_each(["past/lstm/", "future/lstm/"], ["layer_0/w", "layer_1/w"]),
        at="gated = torch.cat([x, state.hidden], dim=-1)",
    ),
    Change(
        "jax_style",
        "what is added to the forget gate is not taken from the biases",
        '"b": torch.cat([i, g, f - 1.0, o]),',
        '"b": torch.cat([i, g, f, o]),',
        parameter=_each(["past/lstm/", "future/lstm/"], ["layer_0/b", "layer_1/b"]),
        at="gated = torch.cat([x, state.hidden], dim=-1)|f = torch.sigmoid(f + 1.0)",
    ),
    Change(
        "jax_style",
        "heads are taken by turns",
        "v.unflatten(-1, (NUM_HEADS, -1)) for",
        "v.unflatten(-1, (-1, NUM_HEADS)).mT for",
        parameter=_each(["fusion/blocks/attention/"], ["query/w", "query/b", "key/w"]),
        at='query = torch.einsum("btd,dhk->bhtk"|key = torch.einsum("bsd,dhk->bhsk"'
        '|query = query + p["query"]["b"]',
    ),
    Change(
        "jax_style",
        "future reads the LSTM of the past",
        '"lstm": load_lstm(sd, "decoder"),',
        '"lstm": load_lstm(sd, "encoder"),',
        parameter=_each(
            ["future/lstm/"], ["layer_0/w", "layer_0/b", "layer_1/w", "layer_1/b"]
        ),
        at="gated = torch.cat([x, state.hidden], dim=-1)|_, decoded = deep_lstm(",
    ),
    Change(
        "jax_style",
        "gate is the first half",
        "value, gate = torch.tensor_split(x, 2, dim=-1)",
        "gate, value = torch.tensor_split(x, 2, dim=-1)",
        at="return value * torch.sigmoid(gate)",
    ),
    Change(
        "jax_style",
        "weights of the variables come to one over the series",
        'weights = softmax(grn(p["weights"], flat, context))',
        'weights = softmax(grn(p["weights"], flat, context), axis=0)',
        at="return torch.exp(x - torch.logsumexp(x, axis",
    ),
    Change(
        "jax_style",
        "heads are added up",
        "weights = torch.mean(softmax(logits + bias), dim=1)",
        "weights = torch.sum(softmax(logits + bias), dim=1)",
        reference="heads.mean(dim=1)",
    ),
    Change(
        "jax_style",
        "future starts from the contexts, not from where the past ended",
        "    states, encoded = deep_lstm(\n",
        "    _, encoded = deep_lstm(\n",
        at='    _, decoded = deep_lstm(|gated = torch.cat([x, state.hidden], dim=-1) @ p["w"]'
        "|cell = f * state.cell",
    ),
    Change(
        "jax_style",
        "attention looks at days that a short history does not have",
        "    allowed = past[None, None] & exists[:, None, None, :]\n",
        "    allowed = past.expand(len(exists), 1, -1, -1)\n",
        at="return torch.where(allowed, 0.0|bias = attention_bias(lengths)"
        "|weights = torch.mean(softmax(logits + bias), dim=1)",
    ),
    Change(
        "jax_style",
        "row of no event stands at the end of its table",
        'F.pad(p[name]["table"], (0, 0, 1, 0))',
        'F.pad(p[name]["table"], (0, 0, 0, 1))',
        at="embedded.append(table[inputs[name]])",
    ),
    Change(
        "jax_style",
        "prediction less target, so that the levels change sides",
        'error = batch["target"][..., None] - output["quantiles"]',
        'error = output["quantiles"] - batch["target"][..., None]',
        at="return error * (levels - (error < 0).float())",
    ),
    Change(
        "jax_style",
        "states carry no gradient from the future to the past",
        "        finals.append(final)\n",
        "        finals.append(LSTMState(*(s.detach() for s in final)))\n",
        at="states, encoded = deep_lstm(|_, decoded = deep_lstm(",
    ),
    Change(
        "jax_style",
        "clipped behind the moments",
        "        clip_by_global_norm(0.5),\n"
        "        scale_by_adam(b1=0.9, b2=0.98, eps=1e-6),\n",
        "        scale_by_adam(b1=0.9, b2=0.98, eps=1e-6),\n"
        "        clip_by_global_norm(0.5),\n",
        phase="optimizer",
    ),
]
