"""Faulty ports of the translator."""

from ..bank import Change


def _of(prefixes, names):
    """Return the names of parameters behind each of the prefixes."""
    return "|".join(p + name for p in prefixes.split() for name in names.split())


_ATTENTIONS = " ".join(
    f"params.{kind}."
    for kind in (
        "encoder.layers_0.attention",
        "encoder.layers_1.attention",
        "decoder.layers_0.self_attention",
        "decoder.layers_1.self_attention",
        "decoder.layers_0.cross_attention",
        "decoder.layers_1.cross_attention",
    )
)

FAULTS = [
    Change(
        "marian_cpp",
        "keys are packed before queries",
        'part(f"{new}_self_qkv", q, k, v)',
        'part(f"{new}_self_qkv", k, q, v)',
        parameter=_of(
            "encoder_l1_self encoder_l2_self decoder_l1_self decoder_l2_self",
            "_Wqkv _bqkv",
        ),
        at="q, k, v = torch.split(packed",
    ),
    Change(
        "marian_cpp",
        "norm behind the context is read from that behind the self-attention",
        'norm(f"{new}_context_Wo", f"{old}.cross_attn_norm")',
        'norm(f"{new}_context_Wo", f"{old}.self_attn_norm")',
        parameter=_of(
            "decoder_l1_context_Wo decoder_l2_context_Wo", "_ln_scale _ln_bias"
        ),
    ),
    Change(
        "marian_cpp",
        "timescales reach the greatest, as in tensor2tensor",
        "increment = math.log(10000.0) / timescales",
        "increment = math.log(10000.0) / (timescales - 1)",
        parameter="signal",
        at="* x + self.signal[:width]",
    ),
    Change(
        "marian_cpp",
        "masks of sentences are repeated as a whole, where heads vary fastest",
        "((1.0 - mask) * ninf).repeat_interleave(self.heads, dim=0)",
        "((1.0 - mask) * ninf).repeat(self.heads, 1, 1)",
        at="SoftmaxNode.apply(z + log_mask)",
    ),
    Change(
        "marian_cpp",
        "norm comes before the addition",
        "        x = x + previous\n"
        '        scale, bias = self.get(prefix + "_ln_scale"), self.get(prefix + "_ln_bias")\n'
        "        rows = x.reshape(-1, x.shape[-1])\n"
        "        return LayerNormalizationNode.apply(rows, scale, bias).view(x.shape)\n",
        '        scale, bias = self.get(prefix + "_ln_scale"), self.get(prefix + "_ln_bias")\n'
        "        rows = x.reshape(-1, x.shape[-1])\n"
        "        x = LayerNormalizationNode.apply(rows, scale, bias).view(x.shape)\n"
        "        return x + previous\n",
        at="rows = x.reshape(",
        reference="x = self.self_attn_norm(x + self.self_attn(",
    ),
    Change(
        "marian_cpp",
        "words are shifted by one place of the flat list",
        "        start = self.indices.new_full((self.size,), PAD_ID)\n"
        "        return torch.cat([start, self.indices[: -self.size]])\n",
        "        start = self.indices.new_full((1,), PAD_ID)\n"
        "        return torch.cat([start, self.indices[:-1]])\n",
        at="RowsNode.apply(",
    ),
    Change(
        "marian_cpp",
        "mean taken for constant in the gradient of the norm",
        "adj_x = (cols * adj - sum_adj - unit * sum_adj_unit) / (cols * sigma)",
        "adj_x = (cols * adj - unit * sum_adj_unit) / (cols * sigma)",
        at="LayerNormalizationNode.apply(",
    ),
    Change(
        "marian_cpp",
        "slope of swish lacks the gate in its second term",
        "return adj * (gate + x * gate * (1 - gate))",
        "return adj * (gate + x * (1 - gate))",
        at="SwishNode.apply(",
    ),
    Change(
        "marian_cpp",
        "row without a gradient is that of EOS, as if padding were 0",
        "adj = adj * (indices != PAD_ID)",
        "adj = adj * (indices != EOS_ID)",
        at="RowsNode.apply(",
    ),
    Change(
        "marian_cpp",
        "smoothing sums over the vocabulary",
        "alpha * logprobs.mean(1, keepdim=True)",
        "alpha * logprobs.sum(1, keepdim=True)",
    ),
    Change(
        "marian_cpp",
        "padded places are counted as words",
        "labels.append(target.mask.sum())",
        "labels.append(target.mask.numel())",
        at="return sum(costs) / sum(labels)",
    ),
    Change(
        "marian_cpp",
        "warm-up is one update ahead",
        "rate *= min(1.0, self.updates / warmup)",
        "rate *= min(1.0, (self.updates + 1) / warmup)",
        phase="optimizer",
    ),
    Change(
        "marian_cpp",
        "gradients are clipped by their root mean square",
        "norm = torch.sqrt((grads * grads).sum())",
        "norm = torch.sqrt((grads * grads).mean())",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "t5x_style",
        "heads vary fastest in the kernels of query, key and value",
        '"kernel": kernel.reshape(kernel.shape[0], heads, -1),',
        '"kernel": kernel.reshape(kernel.shape[0], -1, heads).transpose(1, 2),',
        parameter=_of(_ATTENTIONS, "query.kernel key.kernel value.kernel"),
    ),
    Change(
        "t5x_style",
        "square kernel behind the attention is not transposed",
        'kernel = state[name + ".out_proj.weight"].T',
        'kernel = state[name + ".out_proj.weight"]',
        parameter=_of(_ATTENTIONS, "out.kernel"),
    ),
    Change(
        "t5x_style",
        "positions are scaled with the embeddings",
        "    x = x * math.sqrt(CONFIG.emb_dim)\n"
        "    return x + positions[None, : x.shape[1]]\n",
        "    x = x + positions[None, : x.shape[1]]\n"
        "    return x * math.sqrt(CONFIG.emb_dim)\n",
    ),
    Change(
        "t5x_style",
        "words do not see themselves",
        "return index[:, None, :, None] >= index[:, None, None, :]",
        "return index[:, None, :, None] > index[:, None, None, :]",
        at="weights = torch.softmax(logits + bias",
    ),
    Change(
        "t5x_style",
        "padding of the source is taken for 0, as there",
        "encoder_keep = encoder_tokens != CONFIG.pad_id",
        "encoder_keep = encoder_tokens > 0",
        at="weights = torch.softmax(logits + bias",
    ),
    Change(
        "t5x_style",
        "queries are not scaled, as in T5",
        "    depth = query.shape[-1]\n    query = query / math.sqrt(depth)\n",
        "",
        at='logits = torch.einsum("bqhk,bshk->bhqs"',
        reference="x = F.scaled_dot_product_attention(",
    ),
    Change(
        "t5x_style",
        "tied table learns nothing from the logits",
        'torch.einsum("bld,vd->blv", y, embedding)',
        'torch.einsum("bld,vd->blv", y, embedding.detach())',
    ),
    Change(
        "t5x_style",
        "gradient of the loss ignores the weights of words",
        "return g[..., None] * (exp_shifted / sum_exp - targets), None",
        "return exp_shifted / sum_exp - targets, None",
        at="each = CrossEntropyWithLogits.apply(",
    ),
    Change(
        "t5x_style",
        "smoothing goes to the other words alone",
        "    low_confidence = label_smoothing / vocab_size\n"
        "    confidence = 1.0 - label_smoothing + low_confidence\n",
        "    low_confidence = label_smoothing / (vocab_size - 1)\n"
        "    confidence = 1.0 - label_smoothing\n",
        at="return hot * confidence +|each = CrossEntropyWithLogits.apply(",
    ),
    Change(
        "t5x_style",
        "mean of the means of micro-batches",
        "        loss_sum = loss_sum + torch.sum(each * weights)\n"
        "        weight_sum = weight_sum + torch.sum(weights)\n",
        "        loss_sum = loss_sum + torch.sum(each * weights) / torch.sum(weights)\n"
        "        weight_sum = weight_sum + 1.0\n",
        at="return loss_sum / weight_sum",
    ),
    Change(
        "t5x_style",
        "EOS stands at the end of the padded row",
        "torch.where(torch.arange(tokens.shape[1]) == length,",
        "torch.where(torch.arange(tokens.shape[1]) == tokens.shape[1] - 1,",
        at="x = torch.matmul(one_hot(tokens",
    ),
    Change(
        "t5x_style",
        "rate falls during the warm-up too",
        "math.sqrt(max(step, warmup_steps))",
        "math.sqrt(step)",
        phase="optimizer",
    ),
    Change(
        "t5x_style",
        "clipping comes behind Adam",
        "        clip_by_global_norm(1.0),\n"
        "        scale_by_adam(b1=0.9, b2=0.98, eps=1e-9),\n",
        "        scale_by_adam(b1=0.9, b2=0.98, eps=1e-9),\n"
        "        clip_by_global_norm(1.0),\n",
        phase="optimizer",
    ),
]
