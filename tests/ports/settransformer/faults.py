"""Faulty ports of the Set Transformer."""

from ..bank import Change

_BLOCKS = (
    "isab_0/gather",
    "isab_0/scatter",
    "isab_1/gather",
    "isab_1/scatter",
    "pma/block",
    "sab",
)
_LAYERS = (
    "blocks.0.to_inducing",
    "blocks.0.to_inputs",
    "blocks.1.to_inducing",
    "blocks.1.to_inputs",
    "pooling.attention_block",
    "seed_attention",
)


def _paths(names):
    """Return the paths of arrays in each block of the first port."""
    return "|".join(f"{block}/{n}" for block in _BLOCKS for n in names.split())


def _variables(names):
    """Return the names of variables in each block of the second port."""
    return "|".join(f"{layer}.{n}" for layer in _LAYERS for n in names.split())


FAULTS = [
    Change(
        "jax_style",
        "queries are not transposed",
        '"query/w": heads_last(state[name + ".q_proj.weight"])',
        '"query/w": state[name + ".q_proj.weight"].unflatten(1, (NUM_HEADS, -1))',
        parameter=_paths("attention/query/w"),
        at='q = torch.einsum("bnd,dhk->bnhk", inputs_q',
    ),
    Change(
        "jax_style",
        "values come before keys",
        "torch.stack([key, value], dim=1)",
        "torch.stack([value, key], dim=1)",
        parameter=_paths("attention/key_value/w"),
        at='kv = torch.einsum("bmd,dshk->sbmhk"|k, v = kv[0], kv[1]',
    ),
    Change(
        "jax_style",
        "every block has the inducing points of the first",
        'state[f"encoder.{i}.inducing"][0]',
        'state["encoder.0.inducing"][0]',
        parameter="isab_1/inducing",
        at='inducing = tile(p["inducing"]',
    ),
    Change(
        "jax_style",
        "log-variances come before means in the joint map",
        "torch.cat([mean[k], log_var[k]], -1)",
        "torch.cat([log_var[k], mean[k]], -1)",
        parameter="mixture/moments/w|mixture/moments/b",
        at='moments = linear(scope(p, "moments"), x)'
        "|means, raw = torch.tensor_split(moments"
        '|y = torch.einsum("...i,io->...o", x, p["w"])'
        '|return y + p["b"] if "b" in p else y',
    ),
    Change(
        "jax_style",
        "gelu by tanh",
        "    return 0.5 * x * (1.0 + torch.erf(x * 0.5**0.5))\n",
        "    inner = 0.7978845608028654 * (x + 0.044715 * x**3)\n"
        "    return 0.5 * x * (1.0 + torch.tanh(inner))\n",
        at='hidden = gelu(linear(scope(p, "up"), x))',
    ),
    Change(
        "jax_style",
        "scores are scaled by the width of all heads",
        "q = q * q.shape[-1] ** -0.5",
        "q = q * inputs_q.shape[-1] ** -0.5",
    ),
    Change(
        "jax_style",
        "norm takes the second moment for the variance",
        "torch.mean(torch.square(x), dim=-1, keepdim=True) - torch.square(mu)",
        "torch.mean(torch.square(x), dim=-1, keepdim=True)",
        at='inv = p["scale"] * torch.rsqrt(var + eps)'
        '|return inv * (x - mu) + p["offset"]',
    ),
    Change(
        "jax_style",
        "feed-forward is added to what came before the norm",
        '    h = layer_norm(scope(p, "norm_attention"), x + attended)\n'
        '    update = mlp(scope(p, "mlp"), h)\n',
        "    h = x + attended\n"
        '    update = mlp(scope(p, "mlp"), layer_norm(scope(p, "norm_attention"), h))\n',
        at='return layer_norm(scope(p, "norm_mlp"), h + update)',
    ),
    Change(
        "jax_style",
        "one point too many is real",
        "return index[None, :] < sizes[:, None]",
        "return index[None, :] <= sizes[:, None]",
    ),
    Change(
        "jax_style",
        "pooling attends to what is padded",
        'return attend_block(scope(p, "block"), seeds, features, valid)',
        'return attend_block(scope(p, "block"), seeds, features)',
        at="where = None if valid is None|weights = softmax(logits, where)",
        reference="scores.masked_fill(key_padding_mask",
    ),
    Change(
        "jax_style",
        "divided by the padded length of a set",
        "nll = -torch.sum(density, dim=1) / sizes",
        "nll = -torch.mean(density, dim=1)",
    ),
    Change(
        "jax_style",
        "second moments are not corrected for their start",
        "nu_hat = tree_map(lambda n: n / (1 - b2**count), nu)",
        "nu_hat = nu",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "jax_style",
        "biases and norms decay, too",
        'return {path: path.endswith("/w") for path in params}',
        'return {path: "/" in path for path in params}',
        phase="optimizer",
        steps=2,
    ),
    Change(
        "keras_style",
        "kernel is not transposed where its shape fits anyway",
        "            array = convert(name, checkpoint[checkpoint_name(name)])\n",
        "            array = checkpoint[checkpoint_name(name)]\n"
        "            if array.shape != variable.shape:\n"
        "                array = convert(name, array)\n",
        parameter="pooling.feed_forward.kernel",
        at="features = self.feed_forward(inputs)"
        "|outputs = torch.tensordot(inputs, self.kernel, dims=1)",
    ),
    Change(
        "keras_style",
        "biases of values are loaded from those of queries",
        "array = convert(name, checkpoint[checkpoint_name(name)])",
        'source = name.replace("value_dense.bias", "query_dense.bias")\n'
        "            array = convert(name, checkpoint[checkpoint_name(source)])",
        parameter=_variables("attention.value_dense.bias"),
        at="return outputs if self.bias is None else outputs + self.bias",
    ),
    Change(
        "keras_style",
        "both norms of a block read the second one",
        '(r"attention_norm\\.", "ln0."),',
        '(r"attention_norm\\.", "ln1."),',
        parameter=_variables("attention_norm.gamma attention_norm.beta"),
        at="scale = self.gamma / torch.sqrt(variance"
        "|return inputs * scale + (self.beta - mean * scale)"
        "|x = self.attention_norm(attended + x)",
    ),
    Change(
        "keras_style",
        "heads are the inner part of what leaves the attention",
        '    if name.endswith("kernel"):\n',
        '    if name.endswith("output_dense.kernel"):\n'
        '        heads = config["num_heads"]\n'
        "        return array.t().unflatten(0, (-1, heads)).transpose(0, 1)\n"
        '    if name.endswith("kernel"):\n',
        parameter=_variables("attention.output_dense.kernel"),
        at='torch.einsum("bnts,bsnh->btnh", scores, value)'
        "|outputs = torch.einsum(self.equation, inputs, self.kernel)",
    ),
    Change(
        "keras_style",
        "epsilon of Keras in the norms",
        "def __init__(self, units, epsilon=1e-5):",
        "def __init__(self, units, epsilon=1e-3):",
        at="scale = self.gamma / torch.sqrt(variance + self.epsilon)"
        "|x = self.attention_norm(attended + x)"
        "|return self.output_norm(outputs + x)",
    ),
    Change(
        "keras_style",
        "mask multiplies the probabilities, which no longer sum to one",
        "        if attention_mask is not None:\n"
        "            scores = scores + (1.0 - attention_mask[:, None, None, :]) * -1e9\n"
        "        return torch.softmax(scores, dim=-1)\n",
        "        scores = torch.softmax(scores, dim=-1)\n"
        "        if attention_mask is not None:\n"
        "            scores = scores * attention_mask[:, None, None, :]\n"
        "        return scores\n",
        at="scores = self.masked_softmax(scores, attention_mask)",
        reference="scores.masked_fill(key_padding_mask",
    ),
    Change(
        "keras_style",
        "softmax over the queries",
        "return torch.softmax(scores, dim=-1)",
        "return torch.softmax(scores, dim=-2)",
        at="scores = self.masked_softmax(scores, attention_mask)",
    ),
    Change(
        "keras_style",
        "nothing goes around the feed-forward",
        "return self.output_norm(outputs + x)",
        "return self.output_norm(outputs)",
        reference="return self.ln1(h + self.ff(h))",
    ),
    Change(
        "keras_style",
        "deviation is added to the log-variance as if it were one",
        "log_variance = log_variance + torch.log(stddev**2)",
        "log_variance = log_variance + torch.log(stddev)",
        reference='"log_vars": log_vars + 2 * std.log()',
    ),
    Change(
        "keras_style",
        "deviation of a sample",
        "variance = torch.sum(centered**2, dim=1, keepdim=True) / total",
        "variance = torch.sum(centered**2, dim=1, keepdim=True) / (total - 1.0)",
    ),
    Change(
        "keras_style",
        "bound of the log-variances is that of another model",
        '"log_variance_limit": 2.5,',
        '"log_variance_limit": 4.0,',
        at="log_variance = limit * torch.tanh(",
    ),
    Change(
        "keras_style",
        "entropy is a penalty",
        "return -torch.mean(per_set) - regularization",
        "return -torch.mean(per_set) + regularization",
    ),
    Change(
        "keras_style",
        "no gradient goes through the weights of the entropy",
        "entropy = torch.sum(torch.exp(log_weights) * -log_weights, dim=1)",
        "entropy = torch.sum(torch.exp(log_weights).detach() * -log_weights, dim=1)",
    ),
]
