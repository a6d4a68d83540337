"""Faulty ports of FastPitch."""

from ..bank import Change

_STACKS = ("encoder", "decoder")


def _layers(names):
    """Return names of variables in each layer of the Keras port."""
    return "|".join(
        f"{stack}.layer.{i}.{name}"
        for stack in _STACKS
        for i in range(2)
        for name in names.split()
    )


def _predictors(names):
    """Return names of variables of both predictors of the Keras port."""
    return "|".join(
        f"{kind}_predictor.{name}"
        for kind in ("duration", "pitch")
        for name in names.split()
    )


def _arrays(scopes, names):
    """Return names of arrays in each of these scopes of the other port."""
    return "|".join(f"{s}/{name}" for s in scopes for name in names.split())


FAULTS = [
    Change(
        "tf_style",
        "queries and keys are taken the other way round",
        "query, key, value = torch.split(",
        "key, query, value = torch.split(",
        parameter=_layers("attention.query.kernel attention.key.kernel"),
        at="self.transpose_for_scores(self.query(|self.transpose_for_scores(self.key(",
    ),
    Change(
        "tf_style",
        "kernels are turned round in time",
        'kernel = torch.permute(self.array(f"{name}.weight"), (2, 1, 0))\n',
        'kernel = torch.permute(self.array(f"{name}.weight"), (2, 1, 0))\n'
        "        kernel = torch.flip(kernel, (0,))\n",
        parameter="|".join(
            [
                _layers("feed_forward.conv1d_1.kernel feed_forward.conv1d_2.kernel"),
                _predictors("convs.0.kernel convs.1.kernel"),
                "pitch_embeddings.kernel",
            ]
        ),
        at="outputs = nn.functional.conv1d(",
    ),
    Change(
        "tf_style",
        "second norm of a predictor is loaded from the first",
        'self.norm(norm, f"{name}.layers.{i}.norm")',
        'self.norm(norm, f"{name}.layers.0.norm")',
        parameter=_predictors("norms.1.gamma norms.1.beta"),
        at="outputs = norm(torch.relu(conv(outputs)))",
    ),
    Change(
        "tf_style",
        "output kernel of the attention is reshaped, not transposed",
        "self.assign(layer.attention_output.dense.kernel, out.T)",
        "kernel = layer.attention_output.dense.kernel\n"
        "            self.assign(kernel, torch.reshape(out, kernel.shape))",
        parameter=_layers("attention_output.dense.kernel"),
        at="attended = self.dense(context)",
    ),
    Change(
        "tf_style",
        "scores are divided by the root of the hidden size",
        "attention_scores / math.sqrt(ATTENTION_HEAD_SIZE)",
        "attention_scores / math.sqrt(HIDDEN_SIZE)",
    ),
    Change(
        "tf_style",
        "epsilon of Keras in the norms",
        "LAYER_NORM_EPS = 1e-5",
        "LAYER_NORM_EPS = 1e-3",
        at="normalized = centered * torch.rsqrt(variance + self.epsilon)"
        "|return self.layer_norm(|outputs = norm(torch.relu(conv(outputs)))",
    ),
    Change(
        "tf_style",
        "input is added behind the norm of the attention",
        "return self.layer_norm(attended + input_tensor)",
        "return self.layer_norm(attended) + input_tensor",
    ),
    Change(
        "tf_style",
        "mish between the convolutions",
        "        hidden_states = torch.relu(hidden_states)\n",
        "        softplus = nn.functional.softplus(hidden_states)\n"
        "        hidden_states = hidden_states * torch.tanh(softplus)\n",
    ),
    Change(
        "tf_style",
        "convolutions are causal",
        "left = (width - 1) // 2",
        "left = width - 1",
        at="padded = nn.functional.pad(inputs|outputs = nn.functional.conv1d(",
    ),
    Change(
        "tf_style",
        "each dimension has a frequency of its own",
        'exponents = 2 * torch.div(dims, 2, rounding_mode="floor") / depth',
        "exponents = dims / depth",
        at="angles = positions / torch.pow("
        "|cosines = torch.cos(angles"
        "|return torch.cat([sines, cosines], dim=-1)"
        "|table = positional_encoding("
        "|positions = self.position_table["
        "|hidden_states = (inputs + positions) * mask",
    ),
    Change(
        "tf_style",
        "first frame of a character still belongs to the one before",
        "torch.searchsorted(ends, frames, right=True)",
        "torch.searchsorted(ends, frames, right=False)",
        at="return torch.clamp(indices, max=durations.shape[1] - 1)"
        "|indices = frame_to_character(durations, max_frames)"
        "|segments = frame_to_character(",
    ),
    Change(
        "tf_style",
        "sums of errors are divided by padding, too",
        "return torch.sum(per_item * sample_weight) / torch.sum(sample_weight)",
        "return torch.mean(per_item * sample_weight)",
    ),
    Change(
        "tf_style",
        "names without decay are those of another library",
        'exclude=["gamma$", "beta$", "bias$", "embeddings$"]',
        'exclude=["LayerNorm", "bias$", "embeddings$"]',
        phase="optimizer",
    ),
    Change(
        "jax_style",
        "each head has its query, key and value side by side",
        "    qkv = qkv.unflatten(1, (3, HEADS, -1))\n"
        '    return torch.einsum("lzhkd->lzdhk", qkv)\n',
        "    qkv = qkv.unflatten(1, (HEADS, 3, -1))\n"
        '    return torch.einsum("lhzkd->lzdhk", qkv)\n',
        parameter="encoder/attn/w_qkv|decoder/attn/w_qkv",
        at='query, key, value = torch.einsum("btd,zdhk->zbhtk"',
    ),
    Change(
        "jax_style",
        "norm behind the feed-forward is loaded from that behind the attention",
        'norm(f"{scope}/ffn/ln", *[f"{n}.pos_ff.layer_norm" for n in layers])',
        'norm(f"{scope}/ffn/ln", *[f"{n}.dec_attn.layer_norm" for n in layers])',
        parameter=_arrays(_STACKS, "ffn/ln/scale ffn/ln/offset"),
        at='z = layer_norm(subtree(ffn, "ln")',
    ),
    Change(
        "jax_style",
        "predictors have each other's weights",
        '    predictor("duration", "duration_predictor")\n'
        '    predictor("pitch", "pitch_predictor")\n',
        '    predictor("duration", "pitch_predictor")\n'
        '    predictor("pitch", "duration_predictor")\n',
        parameter=_arrays(
            ("duration", "pitch"),
            "conv_0/w conv_0/b ln_0/scale ln_0/offset "
            "conv_1/w conv_1/b ln_1/scale ln_1/offset out/w out/b",
        ),
        at='log_dur = predictor(subtree(params, "duration")'
        '|pitch = predictor(subtree(params, "pitch")',
    ),
    Change(
        "jax_style",
        "last row of the embedding is left out instead of the first",
        'state["encoder.word_emb.weight"][1:]',
        'state["encoder.word_emb.weight"][:-1]',
        parameter="embed/table",
        at="return one_hot @ table",
    ),
    Change(
        "jax_style",
        "variance of a sample in the norms",
        "    var = torch.mean(x * x, dim=-1, keepdim=True) - mean * mean\n",
        "    var = torch.var(x, dim=-1, keepdim=True)\n",
        at="return (x - mean) / torch.sqrt(var + eps)"
        "|y = layer_norm(|z = layer_norm(|x = layer_norm(",
    ),
    Change(
        "jax_style",
        "softmax over the queries",
        "torch.logsumexp(logits, dim=-1, keepdim=True)",
        "torch.logsumexp(logits, dim=-2, keepdim=True)",
    ),
    Change(
        "jax_style",
        "rectified behind the second convolution, too",
        'return conv(subtree(p, "down"), hidden)',
        'return torch.clamp(conv(subtree(p, "down"), hidden), min=0.0)',
    ),
    Change(
        "jax_style",
        "pitch is added before it is predicted",
        '    pitch = predictor(subtree(params, "pitch"), hidden, mask)\n'
        '    hidden = hidden + conv(subtree(params, "pitch_embed"), '
        "pitch_target[..., None])\n",
        '    hidden = hidden + conv(subtree(params, "pitch_embed"), '
        "pitch_target[..., None])\n"
        '    pitch = predictor(subtree(params, "pitch"), hidden, mask)\n',
        at='pitch = predictor(subtree(params, "pitch")'
        '|hidden = hidden + conv(subtree(params, "pitch_embed")',
    ),
    Change(
        "jax_style",
        "places are counted from one",
        "angles = torch.arange(length)[:, None] * rates[None, :]",
        "angles = torch.arange(1, length + 1)[:, None] * rates[None, :]",
        at="return torch.cat([torch.sin(angles), torch.cos(angles)]"
        "|places = sinusoids(|x = x + torch.where(mask[..., None], places, 0.0)",
    ),
    Change(
        "jax_style",
        "places behind the end are not zero behind the norm of the attention",
        "    x = torch.where(keep, y, 0.0)\n    z = layer_norm(subtree(ffn",
        "    x = y\n    z = layer_norm(subtree(ffn",
        at="z = layer_norm(subtree(ffn",
        reference="out = self.dec_attn(inp, mask) * mask.unsqueeze(2)",
    ),
    Change(
        "jax_style",
        "logarithm of durations of at least one",
        "torch.log(durs + 1.0)",
        "torch.log(torch.clamp(durs, min=1).float())",
        at="squared = (output[name] - targets[name]) ** 2",
        reference="torch.log(durs.float() + 1)",
    ),
    Change(
        "jax_style",
        "no gradient goes back from the predictors",
        '    log_dur = predictor(subtree(params, "duration"), hidden, mask)\n'
        '    pitch = predictor(subtree(params, "pitch"), hidden, mask)\n',
        "    stopped = hidden.detach()\n"
        '    log_dur = predictor(subtree(params, "duration"), stopped, mask)\n'
        '    pitch = predictor(subtree(params, "pitch"), stopped, mask)\n',
    ),
    Change(
        "jax_style",
        "moments are not corrected for their start at zero",
        "            first = mu[name] / (1 - b1**count)\n"
        "            second = nu[name] / (1 - b2**count)\n",
        "            first = mu[name]\n            second = nu[name]\n",
        phase="optimizer",
    ),
]
