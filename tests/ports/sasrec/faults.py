"""Faulty ports of the sequence recommender."""

from ..bank import Change

_NORMS = "x = Standardize.apply("
_QKV = [
    f"block_{i}/attention/{name}/kernel"
    for i in (0, 1)
    for name in ("query", "key", "value")
]

FAULTS = [
    Change(
        "tf_style",
        "padding is attended to",
        "torch.maximum(ahead[None, :, :], padded[:, None, :])",
        "ahead[None, :, :].expand(len(padded), -1, -1)",
        at="return hidden[:, None] * NEGATIVE|logits = logits + gaps.permute(",
    ),
    Change(
        "tf_style",
        "default epsilon of the layer",
        "epsilon=1e-5",
        "epsilon=1e-3",
        at='scale = v["gamma"] * torch.rsqrt(',
    ),
    Change(
        "tf_style",
        "gelu by tanh",
        "0.5 * x * (1.0 + torch.erf(x / np.sqrt(2.0)))",
        "0.5 * x * (1.0 + torch.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))",
    ),
    Change(
        "tf_style",
        "heads vary fastest in the rows of the output kernel",
        "kernel.reshape(heads, -1, kernel.shape[1])",
        "kernel.reshape(-1, heads, kernel.shape[1]).transpose(0, 1)",
        parameter="|".join(f"block_{i}/attention/output/kernel" for i in (0, 1)),
    ),
    Change(
        "tf_style",
        "kernels of query, key and value are not turned",
        ".T\n        return kernel.reshape(len(kernel), heads, -1)",
        "\n        return kernel.reshape(len(kernel), heads, -1)",
        parameter="|".join(_QKV),
    ),
    Change(
        "tf_style",
        "positions count from nought",
        "torch.arange(1, length + 1)[None] - num_padding",
        "torch.arange(length)[None] - num_padding",
        at='x = x + v["position/embeddings"]',
    ),
    Change(
        "tf_style",
        "second residual starts behind the norm",
        '        y = layer_normalization(block.enter("ln_ffn"), x)\n'
        '        y = feed_forward(block.enter("ffn"), y)\n',
        '        x = layer_normalization(block.enter("ln_ffn"), x)\n'
        '        y = feed_forward(block.enter("ffn"), x)\n',
        at="x = x + y",
        reference="return x + self.ffn(self.norm2(x))",
    ),
    Change(
        "tf_style",
        "column of padding stays, the last item's goes",
        "torch.matmul(flat, table.T)[:, 1:]",
        "torch.matmul(flat, table.T)[:, :-1]",
    ),
    Change(
        "tf_style",
        "no gradient to the table from the logits",
        "torch.matmul(flat, table.T)[:, 1:]",
        "torch.matmul(flat, table.detach().T)[:, 1:]",
        at="table = v[|x = table[ids]",
    ),
    Change(
        "tf_style",
        "mean over events, with a target or not",
        "torch.sum(per_example * weights) / torch.sum(weights)",
        "torch.mean(per_example * weights)",
    ),
    Change(
        "tf_style",
        "smoothing shared by the other items alone",
        "one_hot * (1.0 - smoothing) + smoothing / depth",
        "one_hot * (1.0 - smoothing) + (1.0 - one_hot) * smoothing / (depth - 1)",
        at="per_example = -torch.sum(soft",
    ),
    Change(
        "tf_style",
        "every gradient is clipped by itself",
        'grads = clip_by_global_norm(grads, PARAMS["clip_norm"])',
        'grads = [clip_by_global_norm([g], PARAMS["clip_norm"])[0] for g in grads]',
        phase="optimizer",
        steps=2,
    ),
    Change(
        "tf_style",
        "rate falls with the steps themselves, not in units of the warm-up",
        "fall = (step / self.warmup_steps) ** -0.5",
        "fall = step**-0.5",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "manual",
        "packed as three matrices, not head by head",
        "qkv = torch.stack([p.view(HEADS, SIZE, WIDTH) for p in parts], dim=1)",
        "qkv = torch.cat(parts)",
        parameter="layers.0.qkv|layers.1.qkv",
        at="qkv = (self.qkv @ x).view(",
    ),
    Change(
        "manual",
        "events of other users are seen",
        "return same & (self.rank[:, None] >= self.rank)",
        "return self.rank[:, None] >= self.rank",
        at="score = score.masked_fill(|y = Attend.apply(",
    ),
    Change(
        "manual",
        "order is not inverted on the way back",
        "self.by_user = torch.argsort(order)",
        "self.by_user = order",
        at="return logits[:, events.by_user]",
    ),
    Change(
        "manual",
        "last events stay in the order in which users end",
        "column[self.user[ends]] = ends.nonzero()[:, 0]",
        "column[:] = ends.nonzero()[:, 0]",
        at="taste = x[:, events.last()]",
    ),
    Change(
        "manual",
        "gap from the asked event to the asking",
        "(self.hour[:, None] - self.hour).clamp(min=0)",
        "(self.hour - self.hour[:, None]).clamp(min=0)",
        at="return sum((waited > edge)|return table[:, bucket]|bias = GapBias.apply(",
    ),
    Change(
        "manual",
        "positions are scaled as items are",
        "x = x * math.sqrt(WIDTH) + Look.apply(self.ranks, events.rank)",
        "x = (x + Look.apply(self.ranks, events.rank)) * math.sqrt(WIDTH)",
    ),
    Change(
        "manual",
        "row of padding is kept, the last item's is not",
        'state["item.weight"][1:].t()',
        'state["item.weight"][:-1].t()',
        parameter="catalogue",
    ),
    Change(
        "manual",
        "deviation taken for constant in the gradient of the norm",
        "gx = (g - g.mean(0) - unit * along) * inv",
        "gx = (g - g.mean(0)) * inv",
        at=_NORMS,
    ),
    Change(
        "manual",
        "gradient of the keys is not scaled",
        "gk = q @ gscore * SIZE**-0.5",
        "gk = q @ gscore",
        at="return torch.stack([gq, gk, gv], dim=1)|y = Attend.apply(",
    ),
    Change(
        "manual",
        "of gradients for one row the last remains",
        "rows.index_add_(1, index.flatten(), grad.flatten(1))",
        "rows[:, index.flatten()] += grad.flatten(1)",
        at="Look.apply(",
    ),
    Change(
        "manual",
        "gradient of the surprise is divided by all events",
        "return grad * (logp.exp() - wanted) * counted / counted.sum(), None",
        "return grad * (logp.exp() - wanted) * counted / len(counted), None",
        at="surprise = SmoothedSurprise.apply(",
    ),
    Change(
        "manual",
        "rate is read before the step is counted",
        "        self.t += 1\n        rate = self.rate()\n",
        "        rate = self.rate()\n        self.t += 1\n",
        phase="optimizer",
    ),
    Change(
        "manual",
        "whole names are looked for, so the layers do not decay",
        'fade * (n.rpartition(".")[2] in self.fades)',
        "fade * (n in self.fades)",
        phase="optimizer",
    ),
]
