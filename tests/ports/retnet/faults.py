"""Faulty ports of the model that retains."""

from ..bank import Change

FAULTS = [
    Change(
        "recurrent",
        "memory is read before it is written",
        "        memory = self.gamma * memory + k[..., :, None] * v[..., None, :]\n"
        "        weight = self.gamma * weight + 1.0\n"
        '        y = torch.einsum("nhk,nhkv->nhv", q, memory) / weight[..., 0].sqrt()\n',
        "        weight = self.gamma * weight + 1.0\n"
        '        y = torch.einsum("nhk,nhkv->nhv", q, memory) / weight[..., 0].sqrt()\n'
        "        memory = self.gamma * memory + k[..., :, None] * v[..., None, :]\n",
        at="y = torch.einsum|memory = self.gamma * memory",
    ),
    Change(
        "recurrent",
        "heads fade at twice the rate",
        "2.0 ** -(2.0 + torch.arange(HEADS))",
        "2.0 ** -(1.0 + torch.arange(HEADS))",
        parameter="layers.0.mix.gamma|layers.1.mix.gamma",
        at="self.gamma * memory|self.gamma * weight|gamma = 1.0 - 2.0",
    ),
    Change(
        "recurrent",
        "state is not handed on",
        "y, state = self.step(x[:, t], t, state)",
        "y, _ = self.step(x[:, t], t, state)",
        at="memory = self.gamma * memory|weight = self.gamma * weight",
    ),
    Change(
        "recurrent",
        "places begin with one in the query alone",
        "q = self.rotate(q.reshape(n, HEADS, -1), t)",
        "q = self.rotate(q.reshape(n, HEADS, -1), t + 1)",
        at="theta = t *",
    ),
    Change(
        "recurrent",
        "speeds of rotary attention",
        "theta = t * 10000.0 ** -(torch.arange(half) / (half - 1))",
        "theta = t * 10000.0 ** -(torch.arange(half) / half)",
    ),
    Change(
        "recurrent",
        "value and gate exchanged in the fused kernel",
        'names = ("query", "key", "value", "gate")',
        'names = ("query", "key", "gate", "value")',
        parameter="layers.0.mix.w_in|layers.1.mix.w_in",
        at="x @ self.w_in",
    ),
    Change(
        "recurrent",
        "gate is a sigmoid",
        "(g * torch.sigmoid(g))",
        "torch.sigmoid(g)",
    ),
    Change(
        "recurrent",
        "smoothing is left out",
        "smooth = log_z - (0.9 * picked + 0.1 * z.mean(1))",
        "smooth = log_z - picked",
    ),
    Change(
        "recurrent",
        "all parameters decay",
        "dict(params=plain, weight_decay=0.0)",
        "dict(params=plain, weight_decay=0.05)",
        phase="optimizer",
    ),
    Change(
        "chunkwise",
        "the embedding is not scaled",
        "    x = x * x.shape[-1] ** 0.5\n",
        "",
        at='embedding(ids, params["emb"])',
        reference="self.embed(ids) * math.sqrt(DIM)",
    ),
    Change(
        "chunkwise",
        "the state is read one step too fresh",
        "from_state = gamma[:, None] ** (i + 1)",
        "from_state = gamma[:, None] ** i",
        at="to_state = gamma[:, None]",
    ),
    Change(
        "chunkwise",
        "the key's kernel is not split into halves",
        '"wk": halves(w[mix + "key.weight"])',
        '"wk": heads(w[mix + "key.weight"])',
        parameter="params.l0_wk|params.l1_wk",
    ),
    Change(
        "chunkwise",
        "the state does not fade from chunk to chunk",
        "state = carried * state + faded",
        "state = state + faded",
    ),
    Change(
        "chunkwise",
        "the second layer has the norms of the first",
        'f"blocks.{i}.norm1.weight"',
        '"blocks.0.norm1.weight"',
        parameter="params.l1_g1",
    ),
    Change(
        "chunkwise",
        "near scores in half precision",
        'near = torch.einsum("bhid,bhjd->bhij", q[:, :, at], k[:, :, at]) * inside',
        "q16, k16 = q[:, :, at].half(), k[:, :, at].half()\n"
        '        near = torch.einsum("bhid,bhjd->bhij", q16, k16).float() * inside',
    ),
    Change(
        "chunkwise",
        "padding is counted",
        "return (each * known).sum() / known.sum()",
        "return (each * known).mean()",
    ),
]
