"""Faulty ports of the Performer."""

from ..bank import Change

_SELF = (
    "encoder.layer_0.attention",
    "decoder.layer_0.self_attention",
    "decoder.layer_1.self_attention",
)
_CROSS = ("decoder.layer_0.encoder_attention", "decoder.layer_1.encoder_attention")
_LAYERS = ("encoder.layer_0", "decoder.layer_0", "decoder.layer_1")
_MIXES = ("enc.0.mix", "dec.0.mix", "dec.1.mix")
_LOOKS = ("dec.0.look", "dec.1.look")


def _tree(parts, leaves):
    """Return names of leaves in the tree of the JAX port."""
    return "|".join(
        f"params.{part}.{leaf}" for part in parts for leaf in leaves.split()
    )


def _each(parts, leaves):
    """Return names of parameters in parts of the recurrent port."""
    return "|".join(f"{part}.{leaf}" for part in parts for leaf in leaves.split())


FAULTS = [
    Change(
        "jax_style",
        "pairs of queries and keys stay by turns",
        "        query, key = query[..., order], key[..., order]\n",
        "",
        parameter=_tree(_SELF, "query.kernel key.kernel"),
        at="query = dense_heads(p.query|key = dense_heads(p.key"
        '|return torch.einsum("ble,ehd->blhd"',
    ),
    Change(
        "jax_style",
        "random features do not follow the order of the depths",
        "        features = features[order]\n",
        "",
        parameter=_tree(_SELF, "random_features"),
        at='data_dash = torch.einsum("blhd,dm->blhm"'
        "|query_prime = nonneg|key_prime = nonneg",
    ),
    Change(
        "jax_style",
        "kernel behind the heads has depth before heads",
        "    out = out.reshape(cfg.num_heads, cfg.head_dim, cfg.emb_dim)\n",
        "    out = out.reshape(cfg.head_dim, cfg.num_heads, cfg.emb_dim).transpose(0, 1)\n",
        parameter=_tree(_SELF + _CROSS, "out.kernel"),
        at='return torch.einsum("blhd,hde->ble", x, p.out.kernel)',
    ),
    Change(
        "jax_style",
        "gate and what it lets through are swapped",
        '        "wi_0": {"kernel": kernels[0], "bias": biases[0]},\n'
        '        "wi_1": {"kernel": kernels[1], "bias": biases[1]},\n',
        '        "wi_0": {"kernel": kernels[1], "bias": biases[1]},\n'
        '        "wi_1": {"kernel": kernels[0], "bias": biases[0]},\n',
        parameter=_tree(
            [f"{layer}.mlp" for layer in _LAYERS],
            "wi_0.kernel wi_0.bias wi_1.kernel wi_1.bias",
        ),
        at="gate = gelu(dense(p.wi_0, x))|return dense(p.wo, gate * dense(p.wi_1, x))"
        '|return torch.einsum("...i,io->...o", x, p.kernel)',
    ),
    Change(
        "jax_style",
        "gate is a swish",
        "return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))",
        "return x * torch.sigmoid(x)",
        at="gate = gelu(dense(p.wi_0, x))",
    ),
    Change(
        "jax_style",
        "queries and keys are both divided by the whole root",
        "data_normalizer = 1.0 / math.sqrt(math.sqrt(data.shape[-1]))",
        "data_normalizer = 1.0 / math.sqrt(data.shape[-1])",
        at='data_dash = torch.einsum("blhd,dm->blhm", data_normalizer * data'
        "|diag_data = diag_data / 2.0 * data_normalizer",
        reference="HEAD_DIM**-0.25",
    ),
    Change(
        "jax_style",
        "each key is stabilized by its own maximum",
        "attention_dims = (3,) if is_query else (1, 3)",
        "attention_dims = (3,)",
        at="stabilizer = torch.amax(|exponent = data_dash - diag_data - stabilizer",
    ),
    Change(
        "jax_style",
        "padding is taken from the values and not from the keys",
        "        key_prime = torch.where(padding_mask[:, :, None, None], key_prime, 0.0)\n",
        "        value = torch.where(padding_mask[:, :, None, None], value, 0.0)\n",
        at='ks_sum = torch.sum(ks, dim=1)|denominator = torch.einsum("bihm,bhm->bih"'
        "|x = noncausal_attention(",
        reference="k = k * mask",
    ),
    Change(
        "jax_style",
        "wavelengths are spread over the whole head",
        "fraction = np.arange(0, cfg.rotary_dim, 2) / cfg.rotary_dim",
        "fraction = np.arange(0, cfg.rotary_dim, 2) / cfg.head_dim",
        at="turned_first = |turned_second = |query = apply_rotary(|key = apply_rotary("
        "|return torch.tensor(sin, dtype|timescale = cfg.rotary|radians = np."
        "|sin, cos = np.sin|rotary = sinusoids(",
    ),
    Change(
        "jax_style",
        "embedding is scaled by the width of a head",
        "* math.sqrt(cfg.emb_dim)",
        "* math.sqrt(cfg.head_dim)",
        at="x = embed(p.token_embed, tokens)",
        reference="* math.sqrt(DIM)",
    ),
    Change(
        "jax_style",
        "right word has nothing of the smoothed part",
        "    low_confidence = cfg.label_smoothing / cfg.vocab_size\n"
        "    confidence = 1.0 - cfg.label_smoothing + low_confidence\n",
        "    confidence = 1.0 - cfg.label_smoothing\n"
        "    low_confidence = cfg.label_smoothing / (cfg.vocab_size - 1)\n",
        at="soft_targets = torch.where(|xent = -torch.sum(soft_targets",
    ),
    Change(
        "jax_style",
        "gradients of the sums run forward in time",
        "sums_ct = reverse_cumsum(outer, axis=1)",
        "sums_ct = torch.cumsum(outer, dim=1)",
        at='k_ct = torch.einsum("blhmd,blhd->blhm"|v_ct = torch.einsum('
        "|numerator = CausalNumerator.apply(",
    ),
    Change(
        "jax_style",
        "embedding decays",
        'return path.endswith("kernel")',
        'return path.endswith(("kernel", "embedding"))',
        phase="optimizer",
    ),
    Change(
        "scan",
        "keys come before queries in the fused weights",
        'self.fused(key, "qkv")',
        'self.fused(key, "kqv")',
        parameter=_each(_MIXES, "qkv.w"),
        at="q, k, v = torch.chunk(self.qkv(x), 3|y = torch.tensordot(x, self.w",
    ),
    Change(
        "scan",
        "weights behind the heads of the recurrence are not turned",
        '        out = self.affine(key + ".to_out")\n',
        '        out = key + ".to_out"\n'
        '        out = Affine(self.saved[out + ".weight"], self.saved[out + ".bias"])\n',
        parameter=_each(_MIXES, "out.w"),
        at="return self.out(torch.stack(steps)|return self.out(read(state, q)"
        "|y = torch.tensordot(x, self.w",
    ),
    Change(
        "scan",
        "gains of the lookup and of the gated unit are swapped",
        'branches = ("attn", "cross", "ff")',
        'branches = ("attn", "ff", "cross")',
        parameter="dec.0.gain|dec.1.gain",
        at="x = x + self.look(x, memory) * self.gain[1]"
        "|x = x + self.glu(x) * self.gain[2]",
    ),
    Change(
        "scan",
        "lookup has the directions of the recurrence",
        'self.affine(key + ".to_out"), self.omega(key))\n\n    def gated',
        'self.affine(key + ".to_out"), '
        'self.omega(key.replace("cross", "attn")))\n\n    def gated',
        parameter=_each(_LOOKS, "kernel.omega"),
        at="along = torch.matmul(x, self.omega)|k, v = self.kernel.key(heads(k))"
        "|q = self.kernel.query(heads(self.q(x)))",
    ),
    Change(
        "scan",
        "a step reads before it has written",
        "            state = write(state, k_t, v_t)\n"
        "            steps.append(read(state, q_t))\n",
        "            steps.append(read(state, q_t))\n"
        "            state = write(state, k_t, v_t)\n",
        at="both = (q.unsqueeze(-1) * state)|return both[..., :-1] /"
        "|for q_t, k_t, v_t in zip(|steps.append(read(state|state = write(state, k_t",
    ),
    Change(
        "scan",
        "variance divides by one less",
        "torch.var(x, -1, keepdim=True, unbiased=False)",
        "torch.var(x, -1, keepdim=True)",
        at="return self.g * (centred / torch.sqrt(spread",
    ),
    Change(
        "scan",
        "gain takes what goes past the recurrence too",
        "x = x + branch * self.gain[0]",
        "x = (x + branch) * self.gain[0]",
    ),
    Change(
        "scan",
        "shortcut of the gated unit begins behind the norm",
        "        return x + self.glu(self.ln_b(x))\n",
        "        x = self.ln_b(x)\n        return x + self.glu(x)\n",
    ),
    Change(
        "scan",
        "second layer goes on with the state of the first",
        "        for layer in self.dec:\n            state = zero_state(len(tokens))\n",
        "        state = zero_state(len(tokens))\n        for layer in self.dec:\n",
        at="x, state = layer(x, encoded|return state + k.unsqueeze(-1)"
        "|state = write(state, k_t, v_t)|both = (q.unsqueeze(-1) * state)",
    ),
    Change(
        "scan",
        "wavelength has a zero less",
        "TURNED, WAVELENGTH = 8, 10000.0",
        "TURNED, WAVELENGTH = 8, 1000.0",
        at="speed = WAVELENGTH|angle = torch.outer(|c, s = torch.cos(angle)"
        '|return torch.stack([torch.stack([c|pairs = torch.einsum("tpij'
        "|matrices = turn_matrices(|q, k = turn(heads(q)",
    ),
    Change(
        "scan",
        "one step of padding is there",
        "there = (times < lengths)",
        "there = (times <= lengths)",
        at="state = torch.where(there_t|encoded, there = self.encode(source)",
    ),
    Change(
        "scan",
        "padding counts in the mean",
        "return cost[wanted != PAD_TOKEN].mean()",
        "return (cost * (wanted != PAD_TOKEN)).mean()",
    ),
    Change(
        "scan",
        "ramp begins at nothing",
        "        self.t += 1\n"
        "        rate = PEAK_RATE * min(self.t / RAMP, (RAMP / self.t) ** 0.5)\n",
        "        rate = PEAK_RATE * min(self.t / RAMP, (RAMP / max(self.t, 1)) ** 0.5)\n"
        "        self.t += 1\n",
        phase="optimizer",
    ),
]
