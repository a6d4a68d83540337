"""Faulty ports of TabNet."""

from ..bank import Change


def _each(pattern, *ranges):
    """Return the names that a pattern with places makes of all their values."""
    names = [pattern]
    for values in ranges:
        names = [name.replace("*", str(v), 1) for name in names for v in values]
    return "|".join(names)


FAULTS = [
    Change(
        "keras_style",
        "scores of the attention stay in the order of the other columns",
        'Dense(self.kernel(name + ".fc")[:, order])',
        'Dense(self.kernel(name + ".fc"))',
        parameter=_each("coef_*.dense.kernel", range(3)),
        at="outputs = torch.matmul(inputs, self.kernel)",
    ),
    Change(
        "keras_style",
        "norm of the inputs stays in the order of the other features",
        '[v[order] for v in self.norm("initial_bn")]',
        'self.norm("initial_bn")',
        parameter=_each(
            "feature_norm.*", ("gamma", "beta", "moving_mean", "moving_variance")
        ),
        at="return (inputs - mean) * scale + self.beta"
        "|scale = self.gamma * torch.rsqrt(",
    ),
    Change(
        "keras_style",
        "last kernel is reshaped, not transposed",
        'Dense(self.kernel("head"), self.state["head.bias"])',
        'Dense(self.state["head.weight"].reshape(8, 3), self.state["head.bias"])',
        parameter="logits.kernel",
        at="outputs = torch.matmul(inputs, self.kernel)",
    ),
    Change(
        "keras_style",
        "norms of the last two layers are loaded from the first two",
        '[self.virtual_norm(f"{name}.norms.{i}") for i in range(4)]',
        '[self.virtual_norm(f"{name}.norms.{i % 2}") for i in range(4)]',
        parameter=_each(
            "transform_*.norm_*.*",
            range(4),
            (3, 4),
            ("gamma", "beta", "moving_mean", "moving_variance"),
        ),
        at="return (inputs - mean) * scale + self.beta"
        "|scale = self.gamma * torch.rsqrt(",
    ),
    Change(
        "keras_style",
        "first half of the units is the gate",
        "return act[:, :n_units] * torch.sigmoid(act[:, n_units:])",
        "return torch.sigmoid(act[:, :n_units]) * act[:, n_units:]",
    ),
    Change(
        "keras_style",
        "second shared layer is added without the root",
        "        f2 = (f1 + f2) * root\n",
        "        f2 = f1 + f2\n",
        reference="* math.sqrt(0.5)",
    ),
    Change(
        "keras_style",
        "one is taken from the mean, not from the sum over the support",
        "tau_z = (tau_sum - 1.0) / k_z.to(logits.dtype)",
        "tau_z = tau_sum / k_z.to(logits.dtype) - 1.0",
        at="return torch.maximum(torch.zeros_like(z), z - tau_z)",
    ),
    Change(
        "keras_style",
        "prior scales come before the norm of the scores",
        "        mask_values = self.norm(mask_values)\n"
        "        mask_values = mask_values * prior_scales\n",
        "        mask_values = mask_values * prior_scales\n"
        "        mask_values = self.norm(mask_values)\n",
        at="mask_values = self.norm(mask_values)"
        "|return (inputs - mean) * scale + self.beta",
    ),
    Change(
        "keras_style",
        "masks are laid over what was masked before",
        "torch.matmul(mask_values, self.spread) * features",
        "torch.matmul(mask_values, self.spread) * masked_features",
    ),
    Change(
        "keras_style",
        "each feature of an embedding has the whole share of its column",
        "torch.full((1, dim), 1.0 / dim)",
        "torch.full((1, dim), 1.0)",
        at="torch.matmul(mask_values, self.spread) * features"
        '|self.register_buffer("spread"',
    ),
    Change(
        "keras_style",
        "last category of each table is taken for an unknown one",
        "inputs[name] = codes * (codes < rows)",
        "inputs[name] = codes * (codes < rows - 1)",
    ),
    Change(
        "keras_style",
        "weights of the classes are averaged over the batch",
        "torch.sum(losses * sample_weight) / torch.sum(sample_weight)",
        "torch.mean(losses * sample_weight)",
    ),
    Change(
        "keras_style",
        "epsilon is not scaled as the second moment is",
        "        epsilon = self.epsilon * root\n",
        "        epsilon = self.epsilon\n",
        phase="optimizer",
    ),
    Change(
        "numpy_style",
        "values and gates of the own layers change places",
        'p[f"own{i}_v"], p[f"own{i}_g"] = torch.tensor_split(own, 2, dim=1)',
        'p[f"own{i}_g"], p[f"own{i}_v"] = torch.tensor_split(own, 2, dim=1)',
        parameter=_each("own*_*", range(2), "vg"),
        at="w @ x,",
    ),
    Change(
        "numpy_style",
        "arrays of the attention are those of the first step each time",
        's[f"attentive.{t}.{key}"] for t in range(STEPS)',
        's[f"attentive.0.{key}"] for t in range(STEPS)',
        parameter=_each("att_*", ("w", "scale", "shift", "mean", "var")),
        at='net["att_w"][step] @ a|z = batch_norm(',
    ),
    Change(
        "numpy_style",
        "norms of the gated layers run over the layers before the passes",
        "for name in passes for i in range(4)]",
        "for i in range(4) for name in passes]",
        parameter=_each("glu_*", ("scale", "shift", "mean", "var")),
        at="return scale[:, None] * centered",
    ),
    Change(
        "numpy_style",
        "tables of embeddings are reshaped, not transposed",
        's[f"embedder.tables.{c}.weight"].T',
        's[f"embedder.tables.{c}.weight"].reshape(EMBEDDED[c][::-1])',
        parameter=_each("emb*", range(3)),
        at='parts.append(net[f"emb{c}"][:, code])',
    ),
    Change(
        "numpy_style",
        "virtual batches take every third example",
        "group = torch.arange(x.shape[1]) // size",
        "group = torch.arange(x.shape[1]) % -(-x.shape[1] // size)",
        at="member = (group[:, None] == |mu = x @ member / counts",
    ),
    Change(
        "numpy_style",
        "normalized by the deviation of a sample",
        "std = torch.sqrt(sigma2 + EPS)",
        "std = torch.sqrt(sigma2 * counts / (counts - 1) + EPS)",
        at="return scale[:, None] * centered / std[:, group]",
    ),
    Change(
        "numpy_style",
        "gate has a tanh",
        "return value * sigmoid(gate)",
        "return value * torch.tanh(gate)",
    ),
    Change(
        "numpy_style",
        "decisions are summed before they are clipped",
        "        decisions.append(torch.clip(d, min=0))\n"
        "    total = torch.stack(decisions).sum(0)\n",
        "        decisions.append(d)\n"
        "    total = torch.clip(torch.stack(decisions).sum(0), min=0)\n",
        reference="F.relu(out[:, :N_D])",
    ),
    Change(
        "numpy_style",
        "prior of a step forgets the steps before the last",
        "prior = (RELAX - mask) * prior",
        "prior = RELAX - mask",
        reference="prior = prior * (GAMMA - mask)",
    ),
    Change(
        "numpy_style",
        "losses of capital are not taken for skewed",
        "IS_LOG = [False, False, False, True, True, False]",
        "IS_LOG = [False, False, False, True, False, False]",
        at="torch.where(is_log, torch.log1p(numeric), numeric)"
        "|numeric, is_log = numeric.T",
    ),
    Change(
        "numpy_style",
        "what is missing becomes zero",
        "torch.where(numeric == numeric, numeric, torch.tensor(MEDIAN)[:, None])",
        "torch.where(numeric == numeric, numeric, torch.tensor(0.0))",
    ),
    Change(
        "numpy_style",
        "no gradient goes back from the entropy to the masks",
        "entropies.append(-(mask * torch.log(mask + TINY)).sum() / n)",
        "entropies.append(-(mask * torch.log(mask + TINY)).sum().detach() / n)",
    ),
    Change(
        "numpy_style",
        "rate falls in stairs",
        "return 0.005 * 0.8 ** (self.t / 4)",
        "return 0.005 * 0.8 ** (self.t // 4)",
        phase="optimizer",
        steps=2,
    ),
]
