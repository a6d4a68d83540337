"""Faulty ports of the small Gemma."""

from ..bank import Change

_BLOCKS = [f"periods.{i}.{place}" for i in (0, 1) for place in ("near", "far")]
_NORMS = "pre_attention_norm post_attention_norm pre_ffw_norm post_ffw_norm"
_WEIGHTS = "attn.qkv_einsum attn.out_einsum mlp.gating_einsum mlp.linear"


def _each(names, kind, blocks=_BLOCKS):
    """Return the names of parameters of these blocks."""
    return "|".join(
        f"{block}.{name}.{kind}" for block in blocks for name in names.split()
    )


_EXCHANGED = ["periods.0.far", "periods.1.near"]

FAULTS = [
    Change(
        "einsum_heads",
        "rows are reshaped, not transposed",
        "weight.unflatten(0, (-1, SIZE)).transpose(1, 2)",
        "weight.reshape(-1, WIDTH, SIZE)",
        parameter=_each("attn.qkv_einsum", "w"),
    ),
    Change(
        "einsum_heads",
        "heads interleaved on the way out",
        "out.unflatten(0, (N_HEADS, SIZE))",
        "out.unflatten(0, (SIZE, N_HEADS)).transpose(0, 1)",
        parameter=_each("attn.out_einsum", "w"),
    ),
    Change(
        "einsum_heads",
        "values before keys",
        '_proj.weight"]) for n in "qkv"]',
        '_proj.weight"]) for n in "qvk"]',
        parameter=_each("attn.qkv_einsum", "w"),
        at="q, k, v = heads.split(",
    ),
    Change(
        "einsum_heads",
        "norms around attention exchanged",
        '    "pre_attention_norm": "pre_attn_norm",\n'
        '    "post_attention_norm": "post_attn_norm",\n',
        '    "pre_attention_norm": "post_attn_norm",\n'
        '    "post_attention_norm": "pre_attn_norm",\n',
        parameter=_each("pre_attention_norm post_attention_norm", "scale"),
    ),
    Change(
        "einsum_heads",
        "norms of queries and keys exchanged",
        '"attn.query_norm": "attn.q_norm",\n    "attn.key_norm": "attn.k_norm"',
        '"attn.query_norm": "attn.k_norm",\n    "attn.key_norm": "attn.q_norm"',
        parameter=_each("attn.query_norm attn.key_norm", "scale"),
    ),
    Change(
        "einsum_heads",
        "near blocks from the first layers, far from the last",
        "{2 * period + place}",
        "{PERIODS * place + period}",
        parameter="|".join(
            [
                _each(_WEIGHTS, "w", _EXCHANGED),
                _each(_NORMS, "scale", _EXCHANGED),
                _each("attn.query_norm attn.key_norm", "scale", _EXCHANGED),
            ]
        ),
    ),
    Change(
        "einsum_heads",
        "window one wider",
        "(apart < self.window)",
        "(apart <= self.window)",
        at="return seen|logits = torch.where(",
    ),
    Change(
        "einsum_heads",
        "far blocks have the window",
        "self.near = Block(SPAN, 100.0)\n        self.far = Block(None, 10_000.0)",
        "self.near = Block(None, 100.0)\n        self.far = Block(SPAN, 10_000.0)",
        at="if self.window|seen = seen & (apart|return seen|logits = torch.where(",
    ),
    Change(
        "einsum_heads",
        "capped after the mask",
        "        logits = torch.tanh(logits / ATTN_CAP) * ATTN_CAP\n"
        "        logits = torch.where(self.visible(positions), logits, MASKED)\n",
        "        logits = torch.where(self.visible(positions), logits, MASKED)\n"
        "        logits = torch.tanh(logits / ATTN_CAP) * ATTN_CAP\n",
        at="logits = torch.where(|logits = torch.tanh(logits / ATTN_CAP)",
    ),
    Change(
        "einsum_heads",
        "scaled by the size of a head",
        "q = q * (WIDTH // N_HEADS) ** -0.5",
        "q = q * SIZE**-0.5",
        at='logits = torch.einsum("btkgh,bskh->bkgts"',
    ),
    Change(
        "einsum_heads",
        "queries in groups the other way",
        "q.unflatten(2, (N_GROUPS, N_HEADS // N_GROUPS))",
        "q.unflatten(2, (N_HEADS // N_GROUPS, N_GROUPS)).transpose(2, 3)",
        at='logits = torch.einsum("btkgh,bskh->bkgts"',
    ),
    Change(
        "einsum_heads",
        "activation by the error function",
        'F.gelu(gate, approximate="tanh")',
        "F.gelu(gate)",
    ),
    Change(
        "einsum_heads",
        "residual of the normed",
        "return x + ffw_output",
        "return ffw_input + ffw_output",
    ),
    Change(
        "stacked_layers",
        "one is not added for the heads' norms",
        "permute(each + 1) for each",
        "permute(each) for each",
        parameter="attn_q_norm|attn_k_norm",
    ),
    Change(
        "stacked_layers",
        "keys are not permuted",
        "torch.cat([permute(q), permute(k), v])",
        "torch.cat([permute(q), k, v])",
        parameter="attn_qkv",
    ),
    Change(
        "stacked_layers",
        "values are permuted too",
        "torch.cat([permute(q), permute(k), v])",
        "torch.cat([permute(q), permute(k), permute(v)])",
        parameter="attn_qkv",
    ),
    Change(
        "stacked_layers",
        "heads' norms are not permuted",
        "[permute(each + 1) for each in self.layers(key)]",
        "[each + 1 for each in self.layers(key)]",
        parameter="attn_q_norm|attn_k_norm",
    ),
    Change(
        "stacked_layers",
        "permuted from neighbours to halves",
        "rows.unflatten(0, (-1, 2, N_ROT // 2))",
        "rows.unflatten(0, (-1, N_ROT // 2, 2))",
        parameter="attn_qkv|attn_q_norm|attn_k_norm",
        at="even, odd = x[|pairs = torch.stack(",
    ),
    Change(
        "stacked_layers",
        "gate and up interleaved",
        "torch.cat([gate, up])",
        "torch.stack([gate, up], dim=1).flatten(0, 1)",
        parameter="ffn_gate_up",
        at="gate, up = both[",
    ),
    Change(
        "stacked_layers",
        "last norm of a layer reads the key of another",
        'self.norm("post_mlp_norm")',
        'self.norm("post_attn_norm")',
        parameter="ffn_post_norm",
    ),
    Change(
        "stacked_layers",
        "epsilon of another model",
        "RMS_EPS = 1e-6",
        "RMS_EPS = 1e-5",
        at="return F.rms_norm(",
    ),
    Change(
        "stacked_layers",
        "heads' norms after the turn",
        "q_cur = rope(rms_norm(q_cur, self.attn_q_norm[il]), table)\n"
        "        k_cur = rope(rms_norm(k_cur, self.attn_k_norm[il]), table)\n",
        "q_cur = rms_norm(rope(q_cur, table), self.attn_q_norm[il])\n"
        "        k_cur = rms_norm(rope(k_cur, table), self.attn_k_norm[il])\n",
    ),
    Change(
        "stacked_layers",
        "heads of keys and values tiled",
        "_cur.repeat_interleave(N_HEAD // N_HEAD_KV, dim=2)",
        "_cur.repeat(1, 1, N_HEAD // N_HEAD_KV, 1)",
    ),
    Change(
        "stacked_layers",
        "every third layer is without a window",
        "is_swa = il % 2 == 0",
        "is_swa = il % 3 < 2",
        at="table, mask = swa if",
    ),
    Change(
        "stacked_layers",
        "last scores are not capped",
        "return torch.tanh(cur / F_SOFTCAP_OUT) * F_SOFTCAP_OUT",
        "return cur",
        at="cur = F.linear(rms_norm(inp, self.output_norm)",
        reference="return softcap(self.norm(x)",
    ),
    Change(
        "stacked_layers",
        "embedding is not scaled",
        "F.embedding(tokens, self.token_embd) * N_EMBD**0.5",
        "F.embedding(tokens, self.token_embd)",
        reference="x = self.embed(tokens) * DIM**0.5",
    ),
]
