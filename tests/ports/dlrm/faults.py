"""Faulty ports of the DLRM."""

from ..bank import Change


def _crosses(name, layers=range(3)):
    """Return the names of a variable in the cross layers of the first port."""
    return "|".join(f"crosses.{i}.{name}" for i in layers)


FAULTS = [
    Change(
        "tf_style",
        "square matrices of the experts stay [out, in]",
        'c = torch.transpose(self.state[name + ".c"], 1, 2)',
        'c = self.state[name + ".c"]',
        parameter=_crosses("c"),
        at="projected = torch.tanh(torch.matmul(projected, self.c))",
    ),
    Change(
        "tf_style",
        "biases of the cross layers keep the dense vector first",
        'self.dense_last(self.state[name + ".bias"], 0)',
        'self.state[name + ".bias"]',
        parameter=_crosses("bias"),
        at="expanded = torch.matmul(projected, self.u) + self.bias",
    ),
    Change(
        "tf_style",
        "rows of the pairs are not reordered",
        "        pairs = pairs[self.pair_order()]\n",
        "",
        parameter="top.dense_0.kernel",
        at="outputs = torch.matmul(inputs, self.kernel)|outputs = layer(outputs)",
    ),
    Change(
        "tf_style",
        "every cross layer reads the last projection of the first",
        'u = torch.transpose(self.state[name + ".u"], 1, 2)',
        'u = torch.transpose(self.state["cross.0.u"], 1, 2)',
        parameter=_crosses("u", (1, 2)),
        at="expanded = torch.matmul(projected, self.u) + self.bias",
    ),
    Change(
        "tf_style",
        "means are divided by the root of the count, as sqrtn is",
        "return torch.div(summed, torch.clamp(counts, min=1.0)[:, None])",
        "return torch.div(summed, torch.sqrt(torch.clamp(counts, min=1.0))[:, None])",
        at="self.embedding[name](inputs[name], COMBINER[name])",
    ),
    Change(
        "tf_style",
        "no tanh behind the first projection",
        "projected = torch.tanh(torch.matmul(x[None], self.v))",
        "projected = torch.matmul(x[None], self.v)",
        reference="h = torch.tanh(F.linear(x, v))",
    ),
    Change(
        "tf_style",
        "gates are normalised over the batch",
        "gating = exps / torch.sum(exps, dim=-1, keepdim=True)",
        "gating = exps / torch.sum(exps, dim=0, keepdim=True)",
    ),
    Change(
        "tf_style",
        "shortcut of the cross layers comes from the input of the network",
        "return torch.sum(weighted, dim=0) + x\n",
        "return torch.sum(weighted, dim=0) + x0\n",
    ),
    Change(
        "tf_style",
        "bias is added behind the product with the input",
        "        expanded = torch.matmul(projected, self.u) + self.bias\n"
        "        expert_outputs = x0[None] * expanded\n",
        "        expanded = torch.matmul(projected, self.u)\n"
        "        expert_outputs = x0[None] * expanded + self.bias\n",
    ),
    Change(
        "tf_style",
        "deviations are taken for variances",
        '"variance": torch.square(std)',
        '"variance": std',
        parameter="normalization.variance",
        at="return (inputs - self.mean) / torch.sqrt(self.variance)",
    ),
    Change(
        "tf_style",
        "first bucket of the hashes is kept for padding",
        'buckets = torch.remainder(buckets, VOCABULARY["history"])',
        'buckets = torch.remainder(buckets, VOCABULARY["history"] - 1) + 1',
    ),
    Change(
        "tf_style",
        "divided by the size of the batch, not by the weights",
        "return torch.sum(losses * sample_weight) / torch.sum(sample_weight)",
        "return torch.sum(losses * sample_weight) / len(losses)",
        reference="total / weight.sum()",
    ),
    Change(
        "tf_style",
        "accumulators of Adagrad begin at zero",
        "def __init__(self, learning_rate, initial_accumulator_value=0.1,",
        "def __init__(self, learning_rate, initial_accumulator_value=0.0,",
        phase="optimizer",
    ),
    Change(
        "jax_style",
        "tables are joined in the order of their names",
        '[state[f"tables.{name}.weight"] for name in FEATURES]',
        '[state[f"tables.{name}.weight"] for name in sorted(FEATURES)]',
        parameter="params.embed.table",
        at='return torch.einsum("bfl,bfld->bfd", weights, p["table"][rows])'
        '|"rows": ids + first_rows()[:, None]',
    ),
    Change(
        "jax_style",
        "scale and offset of the norm are exchanged",
        '{"scale": state["bottom.bn.weight"], "offset": state["bottom.bn.bias"]}',
        '{"scale": state["bottom.bn.bias"], "offset": state["bottom.bn.weight"]}',
        parameter="params.bottom.norm.scale|params.bottom.norm.offset",
        at='return p["scale"] * y + p["offset"], stats',
    ),
    Change(
        "jax_style",
        "last projections of the experts are reshaped, not transposed",
        '"u": torch.permute(stack("u"), (0, 1, 3, 2))',
        '"u": torch.reshape(stack("u"), stack("v").shape)',
        parameter="params.cross.u",
        at='high = torch.einsum("bes,eso->beo", low, p["u"])',
    ),
    Change(
        "jax_style",
        "norm divides by the unbiased deviation",
        "    y = (x - mean) / torch.sqrt(var + BN_EPS)\n",
        "    var = var * len(x) / (len(x) - 1)\n"
        "    y = (x - mean) / torch.sqrt(var + BN_EPS)\n",
        at="y = (x - mean) / torch.sqrt(var + BN_EPS)"
        '|return p["scale"] * y + p["offset"], stats',
    ),
    Change(
        "jax_style",
        "dot products are scaled as in attention",
        'gram = torch.einsum("bfd,bgd->bfg", fields, fields)',
        'gram = torch.einsum("bfd,bgd->bfg", fields, fields) / WIDTH**0.5',
        at="return gram[:, first, second]",
    ),
    Change(
        "jax_style",
        "bottom MLP ends without an activation",
        'return torch.relu(dense(p["out"], torch.relu(x))), stats',
        'return dense(p["out"], torch.relu(x)), stats',
        reference="return F.relu(self.fc2(x))",
    ),
    Change(
        "jax_style",
        "gate looks at the input of the network, not at that of its layer",
        'mixed = torch.einsum("be,beo->bo", gate(p, x), high + p["b"])',
        'mixed = torch.einsum("be,beo->bo", gate(p, x0), high + p["b"])',
        at='logits = torch.einsum("bi,ie->be", x, p["gate"])',
    ),
    Change(
        "jax_style",
        "bags hold the first id of the next one",
        "inside = torch.arange(MAX_IDS) < lengths[:, None]",
        "inside = torch.arange(MAX_IDS) <= lengths[:, None]",
        at="return torch.where(inside, values[safe], fill), inside"
        "|weights = inside.float()",
    ),
    Change(
        "jax_style",
        "half-life is taken for a time constant",
        "weights = weights * torch.pow(2.0, -age / 5.0)",
        "weights = weights * torch.exp(-age / 5.0)",
    ),
    Change(
        "jax_style",
        "padding counts where tags are averaged",
        'inside = ids > 0 if name == "tags" else ids >= 0',
        "inside = ids >= 0",
        at="weights = inside.float()|total = torch.sum(weights, dim=1, keepdim=True)",
    ),
    Change(
        "jax_style",
        "weight of the clicks is on what was not clicked",
        "nll = -(2.5 * click * log_p + (1.0 - click) * log_not_p)",
        "nll = -(click * log_p + 2.5 * (1.0 - click) * log_not_p)",
    ),
    Change(
        "jax_style",
        "no gradient goes back through the first factor of the cross layers",
        "return x + x0 * mixed",
        "return x + x0.detach() * mixed",
    ),
    Change(
        "jax_style",
        "warm-up begins at a rate of zero",
        "return min((count + 1.0) / steps, 1.0)",
        "return min(count / steps, 1.0)",
        phase="optimizer",
    ),
]
