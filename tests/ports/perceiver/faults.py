"""Faulty ports of the latents that read a table."""

from ..bank import Change

FAULTS = [
    Change(
        "dictionary",
        "gate is the first half",
        'up, gate = w[at + ".enter.weight"].chunk(2)',
        'gate, up = w[at + ".enter.weight"].chunk(2)',
        parameter="layers_0_mlp_a_up_w|layers_0_mlp_a_gate_w",
    ),
    Change(
        "dictionary",
        "heads are the inner axis",
        "return matrix.t().unflatten(1, (HEADS, -1))",
        "return matrix.t().unflatten(1, (-1, HEADS)).transpose(1, 2)",
        parameter="layers_0_read_q|layers_0_read_k|layers_0_read_v",
    ),
    Change(
        "dictionary",
        "context is not normed",
        'other = x if context is None else normalize(context, p["norm_context"])',
        "other = x if context is None else context",
        at='heads_of(other, p["k"])|other = x if context is None',
    ),
    Change(
        "dictionary",
        "gelu by tanh",
        "gate = 0.5 * gate * (1 + torch.erf(gate / 2**0.5))",
        'gate = torch.nn.functional.gelu(gate, approximate="tanh")',
    ),
    Change(
        "dictionary",
        "scores by the whole width",
        "q.shape[-1] ** -0.5",
        "(3 * q.shape[-1]) ** -0.5",
    ),
    Change(
        "dictionary",
        "hidden cells are read in the first reading too",
        'attend(x, layer["read"], cells, keep)',
        'attend(x, layer["read"], cells)',
        at='attend(x, layer["read"], cells)|scores = torch.einsum|torch.softmax(scores',
    ),
    Change(
        "dictionary",
        "no norm before the second gate",
        'gated(normalize(x, layer["norm_b"]), layer["mlp_b"])',
        'gated(x, layer["mlp_b"])',
    ),
    Change(
        "dictionary",
        "norms of the two gates exchanged",
        '"norm_a": norm(f"norms.{2 * i}")',
        '"norm_a": norm(f"norms.{2 * i + 1}")',
        parameter="layers_0_norm_a_gain|layers_0_norm_a_bias",
    ),
    Change(
        "dictionary",
        "mean over the features",
        'x = normalize(x, p["last"]).sum(1) / x.shape[1]',
        'x = normalize(x, p["last"]).sum(1) / x.shape[2]',
    ),
    Change(
        "dictionary",
        "offset before the scale",
        'values = values * p["scale"] + p["offset"]',
        'values = (values + p["offset"]) * p["scale"]',
    ),
    Change(
        "dictionary",
        "beta of another library",
        "torch.where(apart < 0.5, apart**2, apart - 0.25)",
        "torch.where(apart < 1, 0.5 * apart**2, apart - 0.5)",
    ),
    Change(
        "dictionary",
        "smoothing shared by the others alone",
        "* 0.95 + 0.05 / 4",
        "* (0.95 - 0.05 / 3) + 0.05 / 3",
    ),
    Change(
        "dictionary",
        "usual second beta",
        "beta1=0.9, beta2=0.98",
        "beta1=0.9, beta2=0.999",
        at='state["v"] = two|one, two = group|rate = group',
        phase="optimizer",
        steps=2,
    ),
    Change(
        "dictionary",
        "residual around the talk left out",
        'x = x + attend(x, layer["talk"])',
        'x = attend(x, layer["talk"])',
    ),
]
