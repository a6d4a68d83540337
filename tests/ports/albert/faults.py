"""Faulty ports of the ALBERT."""

from ..bank import Change


def _names(at, names):
    """Return the names of parameters below a module."""
    return "|".join(f"{at}.{name}" for name in names.split())


FAULTS = [
    Change(
        "keras_style",
        "heads vary fastest in the kernels of query, key and value",
        "torch.reshape(kernel, (kernel.shape[0], heads, -1))",
        "torch.reshape(kernel, (kernel.shape[0], -1, heads)).transpose(1, 2)",
        parameter=_names(
            "encoder.transformer.self_attention", "query.kernel key.kernel value.kernel"
        ),
    ),
    Change(
        "keras_style",
        "square kernel behind the attention is not transposed",
        "torch.reshape(kernel, (heads, -1, kernel.shape[1]))",
        "torch.reshape(kernel.T, (heads, -1, kernel.shape[1]))",
        parameter="encoder.transformer.self_attention.attention_output.kernel",
    ),
    Change(
        "keras_style",
        "query is scaled by the width of all heads",
        "1.0 / math.sqrt(float(self.key_dim))",
        "1.0 / math.sqrt(float(inputs.shape[-1]))",
        at='scores = torch.einsum("aecd,abcd->acbe"',
    ),
    Change(
        "keras_style",
        "mask along the queries, not along the keys",
        "adder[:, None, None, :]",
        "adder[:, None, :, None]",
    ),
    Change(
        "keras_style",
        "epsilon of the norms is the default there",
        "epsilon=1e-12",
        "epsilon=1e-3",
        at="inv = torch.rsqrt(variance + self.epsilon)|return inputs * inv",
    ),
    Change(
        "keras_style",
        "pooled token without tanh",
        "activation=torch.tanh",
        "activation=linear",
        at="pooled = self.pooler_transform(|return self.activation(outputs",
        reference="pooled = torch.tanh(",
    ),
    Change(
        "keras_style",
        "loss of the words is divided by all slots, used or not",
        "lm_denominator = torch.sum(weights)",
        "lm_denominator = float(weights.numel())",
        at="self.add_loss(lm_numerator / lm_denominator)",
    ),
    Change(
        "keras_style",
        "logits of the order taken for probabilities",
        "order_fn = SparseCategoricalCrossentropy(from_logits=True)",
        "order_fn = SparseCategoricalCrossentropy()",
        at="log_probs = torch.log(torch.clamp(|self.add_loss(torch.mean(order_fn(",
        reference="sentence_order_loss = F.cross_entropy(",
    ),
    Change(
        "keras_style",
        "separator of the first sentence counts to the second",
        ", exclusive=True)",
        ")",
        at='return total - x if exclusive|"input_type_ids": torch.minimum(segment',
        reference="behind = separators.cumsum(dim=1) - separators",
    ),
    Change(
        "keras_style",
        "table of words carries no gradient from the head",
        "table = self.encoder.word_embeddings.embeddings",
        "table = self.encoder.word_embeddings.embeddings.detach()",
        at="logits = torch.matmul(lm_data, embedding_table.T)",
    ),
    Change(
        "keras_style",
        "norms are excluded by a name that none has",
        '["layer_norm", "bias"]',
        '["LayerNorm", "bias"]',
        phase="optimizer",
        steps=2,
    ),
    Change(
        "keras_style",
        "accumulated gradients are kept for the next update",
        "self.accumulator.reset()",
        "self.accumulator.step = 0",
        phase="optimizer",
        steps=4,
    ),
    Change(
        "keras_style",
        "warm-up starts at nought",
        "(step + 1) / self.warmup_steps",
        "step / self.warmup_steps",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "megatron_style",
        "query, key and value one after the other, not head by head",
        "torch.stack(parts, dim=1)",
        "torch.stack(parts)",
        parameter=_names("layer.self_attention.query_key_value", "weight bias"),
    ),
    Change(
        "megatron_style",
        "two norms of the layer change places",
        '"layer.post_attention_layernorm": "encoder.layer.attention.LayerNorm",\n'
        '    "layer.mlp.dense_h_to_4h": "encoder.layer.ffn",\n'
        '    "layer.mlp.dense_4h_to_h": "encoder.layer.ffn_output",\n'
        '    "layer.post_mlp_layernorm": "encoder.layer.full_layer_layer_norm",\n',
        '"layer.post_attention_layernorm": "encoder.layer.full_layer_layer_norm",\n'
        '    "layer.mlp.dense_h_to_4h": "encoder.layer.ffn",\n'
        '    "layer.mlp.dense_4h_to_h": "encoder.layer.ffn_output",\n'
        '    "layer.post_mlp_layernorm": "encoder.layer.attention.LayerNorm",\n',
        parameter=_names("layer.post_attention_layernorm", "weight bias")
        + "|"
        + _names("layer.post_mlp_layernorm", "weight bias"),
    ),
    Change(
        "megatron_style",
        "scores of deep layers stay small",
        "self.scale_mask_softmax(scores, attention_mask, coeff)",
        "self.scale_mask_softmax(scores, attention_mask, 1.0)",
        at="scores = scores * scale|scores = torch.baddbmm(",
    ),
    Change(
        "megatron_style",
        "heads are not brought behind the sequence again",
        "context.transpose(0, 1).reshape(sq, b, h)",
        "context.reshape(sq, b, h)",
    ),
    Change(
        "megatron_style",
        "norm before the residual is added",
        "self.post_attention_layernorm(hidden_states + (output + bias))",
        "hidden_states + self.post_attention_layernorm(output + bias)",
    ),
    Change(
        "megatron_style",
        "cube in gelu is differentiated without its three",
        "slope = SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x * x)",
        "slope = SQRT_2_OVER_PI * (1 + 0.044715 * x * x)",
        at="ff = 0.5 * x * (1 - tanh_out * tanh_out) * slope|BiasGelu.apply(",
    ),
    Change(
        "megatron_style",
        "cross entropy drops the gradient that comes in",
        "        grad_input.mul_(grad_output[:, None])\n",
        "",
        at="grad_input[rows, target] -= 1.0|return grad_input, None"
        "|VocabCrossEntropy.apply(",
    ),
    Change(
        "megatron_style",
        "chosen places are counted with the batch first",
        "place * b + row",
        "row * s + place",
        at="chosen = hidden_states.flatten(0, 1).index_select(",
    ),
    Change(
        "megatron_style",
        "positions start at one",
        "torch.arange(input_ids.shape[1]).expand_as(input_ids)",
        "torch.arange(1, input_ids.shape[1] + 1).expand_as(input_ids)",
        at="embeddings = embeddings + self.position_embeddings(position_ids)",
    ),
    Change(
        "megatron_style",
        "loss of the words is divided by the number of texts",
        'lm_losses.sum() / batch["chosen"].sum()',
        'lm_losses.sum() / len(batch["tokens"])',
    ),
    Change(
        "megatron_style",
        "one trust ratio for query, key and value together",
        'parts = (ARGS["num_attention_heads"], 3) if "query_key_value" in name else (1, 1)',
        "parts = (1, 1)",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "megatron_style",
        "decay is added behind the trust ratio",
        '                update = update.add(p, alpha=ARGS["weight_decay"])\n'
        "                update = trusted(name, p, update)\n",
        "                update = trusted(name, p, update)\n"
        '                update = update.add(p, alpha=ARGS["weight_decay"])\n',
        phase="optimizer",
        steps=2,
    ),
    Change(
        "megatron_style",
        "second micro-batch overwrites the first",
        "grad.add_(p.grad)",
        "grad.copy_(p.grad)",
        phase="optimizer",
        steps=2,
    ),
]
