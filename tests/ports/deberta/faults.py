"""Faulty ports of the small DeBERTa."""

from ..bank import Change

FAULTS = [
    Change(
        "time_first",
        "queries and keys exchanged",
        '{"q": "query", "k": "key", ',
        '{"q": "key", "k": "query", ',
        parameter="|".join(
            f"attention.heads.{i}.{n}.{kind}"
            for i in (0, 1)
            for n in "qk"
            for kind in ("weight", "bias")
        ),
    ),
    Change(
        "time_first",
        "square weight transposed",
        'weights["layer.attention.dense.weight"].chunk(',
        'weights["layer.attention.dense.weight"].t().chunk(',
        parameter="attention.heads.0.o.weight|attention.heads.1.o.weight",
    ),
    Change(
        "time_first",
        "heads interleaved",
        '{long}.{kind}"].chunk(N_HEADS)',
        '{long}.{kind}"].unflatten(0, (-1, N_HEADS)).unbind(1)',
        parameter="|".join(
            f"attention.heads.{i}.{n}.{kind}"
            for i in (0, 1)
            for n in "qkv"
            for kind in ("weight", "bias")
        ),
    ),
    Change(
        "time_first",
        "norms of the layer exchanged",
        '    "layer.attention_norm": "norm_1",\n    "layer.output_norm": "norm_2",\n',
        '    "layer.attention_norm": "norm_2",\n    "layer.output_norm": "norm_1",\n',
        parameter="norm_1.g|norm_1.b|norm_2.g|norm_2.b",
    ),
    Change(
        "time_first",
        "distances the other way",
        "bucket(q - k) + SPAN",
        "bucket(k - q) + SPAN",
        at="return torch.tensor(rows)|key_at, query_at =",
    ),
    Change(
        "time_first",
        "far distances rounded down",
        "half + math.ceil(",
        "half + math.floor(",
        at="rows = [[bucket(|return torch.tensor(rows)|key_at, query_at =",
    ),
    Change(
        "time_first",
        "scaled as of one term",
        "(3 * q.shape[-1]) ** -0.5",
        "q.shape[-1] ** -0.5",
    ),
    Change(
        "time_first",
        "keys' positions seen from the queries",
        '"kbd,qkd->bqk", k, query_at',
        '"kbd,kqd->bqk", k, query_at',
    ),
    Change(
        "time_first",
        "positions without a norm",
        "table = self.norm_places(self.places)",
        "table = self.places",
        at="key_at, query_at =",
        reference="positions = self.rel_norm(",
    ),
    Change(
        "time_first",
        "padding hidden after the softmax alone",
        "        score = torch.where(visible, score, -1e9)\n",
        "",
        at="power = (score - |weight = power /",
        reference="scores = scores.masked_fill(~allowed",
    ),
    Change(
        "time_first",
        "first norm twice",
        "x = self.norm_2(x + self.down(",
        "x = self.norm_1(x + self.down(",
    ),
    Change(
        "time_first",
        "norm before the residual",
        "x = self.norm_2(x + self.down(gelu_new(self.up(x))))",
        "x = x + self.norm_2(self.down(gelu_new(self.up(x))))",
    ),
    Change(
        "time_first",
        "mean over all tokens",
        "(each * scored).sum() / scored.sum()",
        "(each * scored).mean()",
    ),
    Change(
        "packed_heads",
        "heads within the three",
        "weight.unflatten(1, (heads, -1)).permute(3, 1, 0, 2)",
        "weight.unflatten(1, (heads, -1)).permute(3, 0, 1, 2)",
        parameter="block.attn.in_kernel",
    ),
    Change(
        "packed_heads",
        "values before keys",
        'names = ["query", "key", "value"]',
        'names = ["query", "value", "key"]',
        parameter="block.attn.in_kernel|block.attn.in_bias",
    ),
    Change(
        "packed_heads",
        "square weight is not transposed",
        'sd[f"{prefix}dense.weight"].t().contiguous()',
        'sd[f"{prefix}dense.weight"].contiguous()',
        parameter="block.attn.out_kernel",
    ),
    Change(
        "packed_heads",
        "biases are not packed by heads",
        "bias.unflatten(1, (heads, -1)).transpose(0, 1)",
        "bias.unflatten(1, (heads, -1))",
        parameter="block.attn.in_bias",
    ),
    Change(
        "packed_heads",
        "norm of the words' head for the embedding",
        'self.norm_embed = Norm(sd, "embed_norm")',
        'self.norm_embed = Norm(sd, "transform_norm")',
        parameter="norm_embed.scale|norm_embed.offset",
    ),
    Change(
        "packed_heads",
        "bounds belong to the bucket before",
        "torch.tensor(FROM), right=True)",
        "torch.tensor(FROM))",
        at="return torch.where(inside|rows = torch.clamp(|hot = F.one_hot(",
    ),
    Change(
        "packed_heads",
        "table begins a row earlier",
        "torch.clamp(bucket + ATT_SPAN, ",
        "torch.clamp(bucket + ATT_SPAN - 1, ",
        at="hot = F.one_hot(",
    ),
    Change(
        "packed_heads",
        "positions not scaled",
        "self.position_scores(q * scale, k * scale, rel)",
        "self.position_scores(q, k, rel)",
        at="c2p = torch.bmm(|p2c = torch.bmm(",
        reference="scores = scores + c2p.gather(",
    ),
    Change(
        "packed_heads",
        "softmax over the queries",
        "alpha=scale), dim=2)",
        "alpha=scale), dim=1)",
    ),
    Change(
        "packed_heads",
        "mask inverted",
        "rel_scores + (1.0 - keep) * -1e30",
        "rel_scores + keep * -1e30",
    ),
    Change(
        "packed_heads",
        "heads not beside each other again",
        "context.permute(0, 2, 1, 3).reshape(n * t, width)",
        "context.reshape(n * t, width)",
    ),
    Change(
        "packed_heads",
        "words without a bias",
        "lm @ self.lexicon + self.lm_bias",
        "lm @ self.lexicon",
        reference="x @ self.words.weight.T + self.words_bias",
    ),
    Change(
        "packed_heads",
        "sum over the words",
        'F.log_softmax(output["words"][chosen], dim=-1), batch["labels"][chosen]\n',
        'F.log_softmax(output["words"][chosen], dim=-1), batch["labels"][chosen],\n'
        '        reduction="sum",\n',
        at="lm = F.nll_loss(|return lm + sop",
    ),
]
