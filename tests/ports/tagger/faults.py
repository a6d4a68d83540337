"""Faulty ports of the small tagger."""

from ..bank import Change

_BLOCK = (
    "ln_attn.scale",
    "ln_attn.offset",
    "attn.qkv",
    "attn.q_bias",
    "attn.v_bias",
    "attn.proj.kernel",
    "attn.proj.bias",
    "ln_ffn.scale",
    "ln_ffn.offset",
    *(
        f"ffn.{name}.{kind}"
        for name in ("up", "gate", "down")
        for kind in ("kernel", "bias")
    ),
)

FAULTS = [
    Change(
        "fused",
        "kernels of the two halves exchanged",
        'up, gate = take("wi.weight").t().chunk(2, dim=1)',
        'gate, up = take("wi.weight").t().chunk(2, dim=1)',
        parameter="|".join(
            f"blocks.{i}.ffn.{name}.kernel" for i in (0, 1) for name in ("up", "gate")
        ),
    ),
    Change(
        "fused",
        "approximation of the activation",
        "F.gelu(self.gate(x))",
        'F.gelu(self.gate(x), approximate="tanh")',
    ),
    Change(
        "fused",
        "activation of the other half",
        "F.gelu(self.gate(x)) * self.up(x)",
        "self.gate(x) * F.gelu(self.up(x))",
    ),
    Change(
        "fused",
        "keys before queries",
        'for n in ("query", "key", "value")]',
        'for n in ("key", "query", "value")]',
        parameter="blocks.0.attn.qkv|blocks.1.attn.qkv",
    ),
    Change(
        "fused",
        "heads outside of the three",
        "        qkv = qkv.view(b, n, 3, self.heads, c // self.heads)\n"
        "        q, k, v = qkv.permute(2, 0, 3, 1, 4)\n",
        "        qkv = qkv.view(b, n, self.heads, 3, c // self.heads)\n"
        "        q, k, v = qkv.permute(3, 0, 2, 1, 4)\n",
    ),
    Change(
        "fused",
        "slopes begin at one",
        "torch.arange(1, heads + 1)",
        "torch.arange(heads)",
        at="slope = ratio **|return -(slope.view",
    ),
    Change(
        "fused",
        "scaled by the whole width",
        "attn_mask=attn_bias)",
        "attn_mask=attn_bias, scale=c**-0.5)",
    ),
    Change(
        "fused",
        "padding not hidden",
        "attn_bias = self.alibi(tokens.shape[1]) + hide",
        "attn_bias = self.alibi(tokens.shape[1])",
        reference="masked_fill(hidden",
        at="y = F.scaled_dot_product_attention(",
    ),
    Change(
        "fused",
        "epsilon of another library",
        "epsilon=1e-5",
        "epsilon=1e-3",
        at="return (x - mean) * torch.rsqrt(",
    ),
    Change("fused", "unbiased variance", "correction=0", "correction=1"),
    Change(
        "fused",
        "square kernel is not transposed",
        'Dense(sd["dense.weight"].t().contiguous()',
        'Dense(sd["dense.weight"].contiguous()',
        parameter="pre.kernel",
    ),
    Change(
        "fused",
        "mean over the labels",
        "return -(weight * picked).sum() / weight.sum()",
        "return -(weight * picked).mean()",
    ),
    Change(
        "fused",
        "first norm for the second",
        'Norm(take("norm2.weight"), take("norm2.bias"))',
        'Norm(take("norm1.weight"), take("norm1.bias"))',
        parameter="|".join(
            f"blocks.{i}.ln_ffn.{name}" for i in (0, 1) for name in ("scale", "offset")
        ),
    ),
    Change(
        "fused",
        "both blocks read the first layer",
        'sd[f"layers.{i}.{name}"]',
        'sd[f"layers.{i * 0}.{name}"]',
        parameter="|".join(f"blocks.1.{name}" for name in _BLOCK),
    ),
    Change(
        "fused",
        "residual of the normed",
        "        return x + self.ffn(self.ln_ffn(x))\n",
        "        x = self.ln_ffn(x)\n        return x + self.ffn(x)\n",
    ),
    Change(
        "fused",
        "norms and biases decay",
        '"weight_decay": 0}',
        '"weight_decay": 0.05}',
        phase="optimizer",
    ),
    Change(
        "einsums",
        "heads interleaved in the merge",
        "merge.t().unflatten(0, (HEADS, -1))",
        "merge.t().unflatten(0, (-1, HEADS)).transpose(0, 1)",
        parameter="layer0:o|layer1:o",
    ),
    Change(
        "einsums",
        "merge is not transposed",
        "merge.t().unflatten(0, (HEADS, -1))",
        "merge.unflatten(0, (HEADS, -1))",
        parameter="layer0:o|layer1:o",
    ),
    Change(
        "einsums",
        "gate before value",
        "value, gate = both + ",
        "gate, value = both + ",
        at="value * gelu(gate)",
    ),
    Change(
        "einsums",
        "far is near",
        "/ math.sqrt(q.shape[-1]) - near",
        "/ math.sqrt(q.shape[-1]) + near",
    ),
    Change(
        "einsums",
        "scores not scaled",
        "q, k) / math.sqrt(q.shape[-1]) - near",
        "q, k) - near",
        reference="scores = q @ k.transpose(-1, -2) /",
    ),
    Change(
        "einsums",
        "queries without a bias",
        ' + p[at + "q_add"][:, None]',
        "",
        reference="self.query(x)",
    ),
    Change(
        "einsums",
        "no activation in the head",
        'torch.tanh(torch.einsum("btd,ed->bte", x, p["dense"]) + p["dense_add"])',
        'torch.einsum("btd,ed->bte", x, p["dense"]) + p["dense_add"]',
        reference="torch.tanh(self.dense(self.norm(x)))",
        at='return torch.einsum("bte,ce->btc"',
    ),
    Change(
        "einsums",
        "head's weights from the other side",
        '"btd,ed->bte"',
        '"btd,de->bte"',
    ),
    Change(
        "einsums",
        "weights of all tokens in the mean",
        "/ (rare * scored).sum()",
        "/ rare.sum()",
    ),
    Change(
        "einsums",
        "commonest tag weighs another",
        "rare = 1.0 - 0.6 * (gold == 0)",
        "rare = 1.0 - 0.4 * (gold == 0)",
        at="each = -logs.gather(|return each.sum()",
    ),
    Change(
        "einsums",
        "no last norm",
        '    x = layer_norm(p, "leave", x)\n',
        "",
        reference="torch.tanh(self.dense(self.norm(x)))",
        at="x = torch.tanh(",
    ),
    Change(
        "einsums",
        "slopes of eight heads",
        "slope = 0.25 ** torch.arange(",
        "slope = 0.5 ** torch.arange(",
        at="near = slope",
    ),
    Change(
        "einsums",
        "first norm twice",
        'layer_norm(p, at + "between", x)',
        'layer_norm(p, at + "before", x)',
    ),
    Change(
        "einsums",
        "biases decay",
        'plain = ("gain", "shift", "_add")',
        'plain = ("gain", "shift")',
        phase="optimizer",
    ),
]
