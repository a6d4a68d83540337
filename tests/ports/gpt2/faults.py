"""Faulty ports of GPT-2."""

from ..bank import Change

FAULTS = [
    Change("by_hand", "gelu exact", ', approximate="tanh"', ""),
    Change(
        "by_hand",
        "variance with correction",
        "(x - m).square().mean(-1, keepdim=True)",
        "x.var(-1, keepdim=True)",
    ),
    Change("by_hand", "eps 1e-3", "v + 1e-5", "v + 1e-3"),
    Change(
        "by_hand",
        "scale by the width",
        "math.sqrt(q.shape[-1])",
        "math.sqrt(x.shape[-1])",
    ),
    Change(
        "by_hand",
        "mask off by one",
        "dtype=torch.bool).tril()",
        "dtype=torch.bool).tril(1)",
    ),
    Change(
        "by_hand",
        "mask with -1e4 after softmax",
        's = s.masked_fill(~seen, float("-inf"))\n        y = s.softmax(-1) @ v',
        "y = s.softmax(-1).masked_fill(~seen, 0) @ v",
        at="s.softmax(-1)|math.sqrt(q.shape[-1])",
    ),
    Change(
        "by_hand",
        "proj not transposed",
        's[b + theirs + ".weight"] = w[a + ours + ".weight"].t()',
        's[b + theirs + ".weight"] = w[a + ours + ".weight"].t() if "mlp" in ours else w[a + ours + ".weight"]',
        parameter="blocks.0.mix.o.weight",
    ),
    Change(
        "by_hand",
        "k and v exchanged",
        'zip("qkv",',
        'zip("qvk",',
        parameter="blocks.0.mix.k.weight|blocks.0.mix.k.bias|blocks.0.mix.v.weight|blocks.0.mix.v.bias",
    ),
    Change(
        "by_hand",
        "positions left out",
        "        x = x + self.pos[: ids.shape[1]]\n",
        "",
        at="F.embedding(ids, self.tok)",
    ),
    Change("by_hand", "last norm left out", "self.last(x), self.tok", "x, self.tok"),
    Change(
        "by_hand",
        "heads not merged",
        "y.transpose(1, 2).flatten(2)",
        "y.flatten(2) if False else y.reshape(y.shape[0], y.shape[2], -1)",
    ),
    Change("by_hand", "no residual", "return x + self.down(h)", "return self.down(h)"),
    Change(
        "by_hand",
        "attention reads the plain x",
        "self.mix(self.n1(x))",
        "self.mix(x)",
        at="self.mix(x)|x = x + self.pos[|return x + self.down(h)",
    ),
    Change("by_hand", "loss not shifted", "batch[:, 1:, None]", "batch[:, :-1, None]"),
    Change("by_hand", "sum for mean", "-picked.mean()", "-picked.sum()"),
    Change(
        "by_hand",
        "decay of all",
        "weight_decay=0.0), dict",
        "weight_decay=0.1), dict",
        phase="optimizer",
    ),
    Change("by_hand", "usual betas", ", betas=(0.9, 0.95)", "", phase="optimizer"),
    Change(
        "by_hand",
        "norms of the layers exchanged",
        'names = {"ln_1": "n1", "ln_2": "n2"}',
        'names = {"ln_1": "n2", "ln_2": "n1"}',
        parameter="blocks.0.n1.g|blocks.0.n1.b|blocks.0.n2.g|blocks.0.n2.b",
    ),
    Change(
        "by_hand",
        "second block twice",
        "for block in self.blocks:\n",
        "for block in (self.blocks[1], self.blocks[1]):\n",
    ),
    Change(
        "by_hand",
        "blocks reversed",
        "for block in self.blocks:\n",
        "for block in reversed(self.blocks):\n",
    ),
]
