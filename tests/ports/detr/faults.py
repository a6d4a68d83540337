"""Faulty ports of the detector."""

from ..bank import Change

FAULTS = [
    Change(
        "flax_like",
        "places are added to the values",
        "self.cross(x + query_pos, memory + pos, memory, bias)",
        "self.cross(x + query_pos, memory + pos, memory + pos, bias)",
    ),
    Change(
        "flax_like",
        "padding is attended to",
        "torch.where(pad, -torch.inf, 0.0)",
        "torch.where(pad, -1.0, 0.0)",
    ),
    Change(
        "flax_like",
        "scale of the whole width",
        "q = q / q.shape[-1] ** 0.5",
        "q = q / (q.shape[-1] * q.shape[-2]) ** 0.5",
    ),
    Change(
        "flax_like",
        "rows and columns exchanged",
        'self.param("row_embed", w["row.weight"])\n        self.param("col_embed", w["column.weight"])',
        'self.param("row_embed", w["column.weight"])\n        self.param("col_embed", w["row.weight"])',
        parameter="row_embed|col_embed",
    ),
    Change(
        "flax_like",
        "normed before the sum",
        "x = self.ln0(x + self.mha(qk, qk, x))",
        "x = x + self.ln0(self.mha(qk, qk, x))",
    ),
    Change(
        "flax_like",
        "queries not at the cross attention",
        "self.cross(x + query_pos, memory",
        "self.cross(x, memory",
        at="self.cross(x, memory",
        reference="x + query, memory + place",
    ),
    Change(
        "flax_like",
        "union counts the overlap twice",
        "t[:, 2] * t[:, 3] - inter",
        "t[:, 2] * t[:, 3]",
    ),
    Change(
        "flax_like",
        "plain mean of the classes",
        "(nll * weight).sum() / weight.sum()",
        "(nll * weight).mean()",
    ),
    Change(
        "flax_like",
        "frozen scale of the batch",
        "x = (x - self.bn_running_mean) / torch.sqrt(self.bn_running_var + 1e-5)",
        "x = (x - x.mean((0, 1, 2))) / torch.sqrt(x.var((0, 1, 2), unbiased=False) + 1e-5)",
    ),
    Change(
        "flax_like",
        "one rate for all",
        "dict(params=[net.stem], lr=1e-4)",
        "dict(params=[net.stem], lr=1e-3)",
        phase="optimizer",
    ),
    Change(
        "flax_like",
        "no norm at the end",
        "        y = self.ln(y)\n",
        "",
        at="self.class_head(y)|self.box_head(y)|self.decoder1(y|self.ln2(x + self.mlp(x))",
        reference="self.norm(y)",
    ),
    Change(
        "flax_like",
        "kernel of the way out is not transposed",
        'w[at + ".out_proj.weight"].T',
        'w[at + ".out_proj.weight"]',
        parameter="encoder.mha.out|decoder0.mha.out|decoder0.cross.out|decoder1.mha.out|decoder1.cross.out",
    ),
]
