"""Faulty ports of the BigBird."""

from ..bank import Change


def _in_layers(prefix, names):
    """Return the names of parameters in both layers."""
    return "|".join(f"{prefix}{i}.{name}" for i in (0, 1) for name in names.split())


FAULTS = [
    # Parameters.
    Change(
        "jax_style",
        "heads come behind their features in the output projection",
        "kernel.reshape(CFG.num_heads, -1, kernel.shape[-1])}",
        "kernel.reshape(\n        -1, CFG.num_heads, kernel.shape[-1]\n"
        "    ).transpose(0, 1)}",
        parameter=_in_layers("encoder.layer_", "attention.out.kernel"),
        at='return torch.einsum("bhlk,hkd->bld", mixed, p["out"]["kernel"])',
    ),
    Change(
        "jax_style",
        "kernels of queries and keys are swapped",
        '            "out": from_heads(linear(w, f"{name}.attention_output")),\n'
        "        },\n",
        '            "out": from_heads(linear(w, f"{name}.attention_output")),\n'
        "        }\n"
        "        | {\n"
        '            "query": {\n'
        '                "kernel": to_heads(linear(w, f"{name}.attention.key"))["kernel"],\n'
        '                "bias": to_heads(linear(w, f"{name}.attention.query"))["bias"],\n'
        "            },\n"
        '            "key": {\n'
        '                "kernel": to_heads(linear(w, f"{name}.attention.query"))["kernel"]\n'
        "            },\n"
        "        },\n",
        parameter=_in_layers(
            "encoder.layer_", "attention.query.kernel attention.key.kernel"
        ),
        at='y = torch.einsum("bld,dhk->bhlk", x, p["kernel"])',
    ),
    Change(
        "jax_style",
        "both norms of a layer are those of the attention",
        '"mlp_ln": norm(w, f"{name}.output_norm"),',
        '"mlp_ln": norm(w, f"{name}.attention_norm"),',
        parameter=_in_layers("encoder.layer_", "mlp_ln.scale mlp_ln.bias"),
        at='return layer_norm(p["mlp_ln"], x + y)',
    ),
    Change(
        "jax_style",
        "kernel of the pooler is not transposed",
        '"pool": linear(w, "pooler"),',
        '"pool": {"kernel": w["pooler.weight"], "bias": w["pooler.bias"]},',
        parameter="pool.kernel",
        at="return torch.tanh(dense(p, x[:, 0]))",
    ),
    Change(
        "tf_style",
        "values come before keys in the fused kernel",
        'names = ("query", "key", "value")',
        'names = ("query", "value", "key")',
        parameter=_in_layers("encoder_layers.", "attn_layer.qkv_kernel"),
        at="qkv = torch.matmul(inputs, self.qkv_kernel)|query, key, value = torch.split",
    ),
    Change(
        "tf_style",
        "bias of the masked tokens is not loaded",
        '        self.values["masked_lm.output_bias"] = self.reader["predictions.bias"]\n',
        "",
        parameter="masked_lm.output_bias",
        at="return embedder.linear(input_tensor) + self.output_bias",
    ),
    Change(
        "tf_style",
        "every layer reads the dense kernels of the first",
        'self.dense(f"{ours}.{name}", f"{theirs}.{source}")',
        'self.dense(f"{ours}.{name}", f"layers.0.{source}")',
        parameter="|".join(
            f"encoder_layers.1.{layer}.{name}"
            for layer in ("projection_layer", "expand_layer", "contract_layer")
            for name in ("kernel", "bias")
        ),
        at="outputs = torch.matmul(inputs, self.kernel) + self.bias"
        "|attention_output = self.projection_layer(",
    ),
    # Operators.
    Change(
        "jax_style",
        "gelu by the error function",
        "def gelu(x, approximate=True):",
        "def gelu(x, approximate=False):",
        at="return 0.5 * x * torch.erfc(|return x / (1.0 + torch.exp("
        '|y = dense(p["mlp"]["wo"], gelu(|x = layer_norm(p["ln"], gelu(',
        reference='approximate="tanh"',
    ),
    Change(
        "jax_style",
        "softmax of the sparse rows is taken in each block",
        "weights = softmax(logits, (-2, -1))",
        "weights = softmax(logits, -1)",
        at="unnormalized = torch.exp(|return unnormalized / torch.sum(",
        reference="scores.softmax(dim=-1)",
    ),
    Change(
        "jax_style",
        "shortcut around the feed-forward begins before the attention",
        '    x = layer_norm(p["attention_ln"], x + attention(p["attention"], x, valid, table))\n'
        '    y = dense(p["mlp"]["wo"], gelu(dense(p["mlp"]["wi"], x)))\n',
        '    y = layer_norm(p["attention_ln"], x + attention(p["attention"], x, valid, table))\n'
        '    y = dense(p["mlp"]["wo"], gelu(dense(p["mlp"]["wi"], y)))\n',
        at='return layer_norm(p["mlp_ln"], x + y)',
    ),
    Change(
        "jax_style",
        "values are gathered by the columns of the first head",
        "seen_values = take_blocks(in_blocks(value, 2), columns)",
        "seen_values = in_blocks(value, 2)[:, :, columns[0]]",
    ),
    Change(
        "jax_style",
        "pooler takes the mean of all tokens",
        "return torch.tanh(dense(p, x[:, 0]))",
        "return torch.tanh(dense(p, torch.mean(x, dim=1)))",
    ),
    Change(
        "tf_style",
        "norm of the masked tokens comes before the activation",
        "input_tensor = self.norm_layer(gelu(self.extra_layer(input_tensor)))",
        "input_tensor = gelu(self.norm_layer(self.extra_layer(input_tensor)))",
    ),
    Change(
        "tf_style",
        "shortcut is added behind the norm",
        "return self.output_layer_norm(layer_output + attention_output)",
        "return self.output_layer_norm(layer_output) + attention_output",
    ),
    Change(
        "tf_style",
        "scores are scaled by the width of all heads",
        "attention_scores * (1.0 / math.sqrt(self.size_per_head))",
        "attention_scores * (1.0 / math.sqrt(inputs.shape[-1]))",
    ),
    Change(
        "tf_style",
        "heads are merged without turning them back",
        "        context_layer = torch.permute(context_layer, (0, 2, 1, 3))\n",
        "",
        at="context_layer = context_layer.reshape(inputs.shape)",
        reference="context.permute(0, 2, 3, 1, 4)",
    ),
    # Tables, masks and constants.
    Change(
        "jax_style",
        "all layers have the table of the first",
        "drawn = random_columns(CFG.table_seed + layer)",
        "drawn = random_columns(CFG.table_seed)",
        at="columns = torch.cat([fixed.expand(|return x[:, head, columns]"
        "|seen_keys = take_blocks(|seen_values = take_blocks("
        "|token_bias = in_blocks(bias, 1)[:, columns]",
    ),
    Change(
        "jax_style",
        "window next to an end counts the end's block twice",
        "fresh = (window > 0) & (window < last)",
        "fresh = (window >= 0) & (window <= last)",
        at="logits = logits + token_bias + column_bias"
        "|counts = torch.cat(|return columns, torch.where(counts"
        "|counts = nn.functional.pad(",
    ),
    Change(
        "tf_style",
        "window has no block to the right",
        "    distance = torch.abs(index[:, None] - index[None, :])\n"
        "    band = (distance <= 1).float()\n",
        "    distance = index[:, None] - index[None, :]\n"
        "    band = ((distance >= 0) & (distance <= 1)).float()\n",
        at="attention_mask = self.rand_mask[None] * to_mask"
        "|adder = (1.0 - attention_mask)|attention_scores = attention_scores + adder",
    ),
    Change(
        "tf_style",
        "keys of padding are not masked",
        "attention_mask = self.rand_mask[None] * to_mask",
        "attention_mask = self.rand_mask[None] * torch.ones_like(to_mask)",
        at="adder = (1.0 - attention_mask)|attention_scores = attention_scores + adder",
    ),
    Change(
        "tf_style",
        "positions are counted from one",
        "self.position_table[0 : input_ids.shape[1]]",
        "self.position_table[1 : input_ids.shape[1] + 1]",
        at="output = output + torch.unsqueeze(positions, 0)",
    ),
    # Loss, gradients and the optimizer.
    Change(
        "jax_style",
        "divided by all tokens, not by those that were masked",
        "token_loss = torch.sum(losses * weight) / torch.sum(weight)",
        "token_loss = torch.mean(losses * weight)",
        reference="tokens = F.cross_entropy(",
    ),
    Change(
        "jax_style",
        "biases with two axes decay",
        'return path.rpartition(".")[2] in ("kernel", "embedding")',
        "return array.ndim > 1",
        phase="optimizer",
    ),
    Change(
        "tf_style",
        "losses of the classes are summed",
        "return masked_lm_loss + 0.5 * torch.mean(class_losses)",
        "return masked_lm_loss + 0.5 * torch.sum(class_losses)",
    ),
    Change(
        "tf_style",
        "table of the words gets no gradient from the scores",
        "torch.transpose(self.word_embeddings, 0, 1)",
        "torch.transpose(self.word_embeddings.detach(), 0, 1)",
        at="return embedder.linear(input_tensor)",
        reference="F.linear(self.norm(x), table",
    ),
    Change(
        "tf_style",
        "decay goes through the moments",
        "next_param = param - self.learning_rate * decay",
        "grad = grad + decay",
        phase="optimizer",
    ),
]
