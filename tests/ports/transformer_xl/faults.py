"""Faulty ports of Transformer-XL."""

from ..bank import Change

_PLACED = "by_distance = torch.einsum(|by_place = torch.gather(|phase = distance"
_ALLOWED = "logits = torch.where(allowed|softmax(logits)"
_CONTEXT = "context = torch.cat([memory|k = torch.einsum(|v = torch.einsum("

FAULTS = [
    Change(
        "static_shapes",
        "distances are one too far",
        "torch.arange(span).to(self.table.dtype), width",
        "torch.arange(1, span + 1).to(self.table.dtype), width",
        at=_PLACED + "|return torch.cat([torch.sin",
    ),
    Change(
        "static_shapes",
        "positions from the start of the memory",
        "distance.clamp(min=0),",
        "(span - 1 - distance.clamp(min=0)),",
        at=_PLACED,
    ),
    Change(
        "static_shapes",
        "biases of content and of position exchanged",
        'self.content = nn.Parameter(params["r_w_bias"].clone())\n'
        '        self.position = nn.Parameter(params["r_r_bias"].clone())',
        'self.content = nn.Parameter(params["r_r_bias"].clone())\n'
        '        self.position = nn.Parameter(params["r_w_bias"].clone())',
        parameter="content|position",
        at="by_content = torch.einsum(|by_distance = torch.einsum(",
    ),
    Change(
        "static_shapes",
        "sines between cosines",
        "torch.cat([torch.sin(phase), torch.cos(phase)], dim=1)",
        "torch.stack([torch.sin(phase), torch.cos(phase)], dim=2).flatten(1)",
        at='r = torch.einsum("pw,whd->hpd"',
    ),
    Change(
        "static_shapes",
        "empty places of the memory are seen",
        "allowed = (distance >= 0) & filled",
        "allowed = distance >= 0",
        at=_ALLOWED,
    ),
    Change(
        "static_shapes",
        "a token does not see itself",
        "allowed = (distance >= 0) & filled",
        "allowed = (distance > 0) & filled",
        at=_ALLOWED,
    ),
    Change(
        "static_shapes",
        "memory carries gradient",
        "torch.cat([past, x], dim=1)[:, -MEMORY:].detach()",
        "torch.cat([past, x], dim=1)[:, -MEMORY:]",
        at="context = torch.cat([memory|memory = torch.stack(",
    ),
    Change(
        "static_shapes",
        "memory keeps the first",
        "torch.cat([past, x], dim=1)[:, -MEMORY:].detach()",
        "torch.cat([past, x], dim=1)[:, :MEMORY].detach()",
        at="memory = torch.stack(|" + _CONTEXT,
    ),
    Change(
        "static_shapes",
        "kernels of heads split the other way",
        "weight.T.reshape(width, heads, size)",
        "weight.T.reshape(width, size, heads).transpose(1, 2)",
        parameter="|".join(
            f"blocks.{i}.attention.{name}"
            for i in (0, 1)
            for name in ("query", "key", "value", "relative")
        ),
        at="q = torch.einsum(|k = torch.einsum(|v = torch.einsum(|r = torch.einsum(",
    ),
    Change(
        "static_shapes",
        "embeddings are not scaled",
        "x = self.table[tokens[:, start : start + SEGMENT]] * width**0.5",
        "x = self.table[tokens[:, start : start + SEGMENT]]",
        reference="self.word_emb(tokens) * WIDTH**0.5",
    ),
    Change(
        "static_shapes",
        "epsilon of Flax",
        "def layer_norm(x, scale, bias, eps=1e-5)",
        "def layer_norm(x, scale, bias, eps=1e-3)",
        at="return (x - mean) * torch.rsqrt(",
    ),
    Change(
        "static_shapes",
        "epsilon is within the root",
        'torch.sqrt(nu_hat) + group["eps"]',
        'torch.sqrt(nu_hat + group["eps"])',
        phase="optimizer",
    ),
    Change(
        "loops",
        "memory of what the layer gives",
        "                fresh = x.detach()\n"
        "                kept = fresh if past is None else torch.cat((past, fresh), 1)\n"
        "                memory[i] = kept[:, -6:]\n"
        "                x = layer(x, past, self.waves, self.u, self.v)\n",
        "                x = layer(x, past, self.waves, self.u, self.v)\n"
        "                fresh = x.detach()\n"
        "                kept = fresh if past is None else torch.cat((past, fresh), 1)\n"
        "                memory[i] = kept[:, -6:]\n",
        at="fresh = x.detach()|memory[i] = |kept = |context = x if past|key, value = self.key_value(",
    ),
    Change(
        "loops",
        "keys and values exchanged",
        "torch.cat([qkv[1, at], qkv[2, at]])",
        "torch.cat([qkv[2, at], qkv[1, at]])",
        parameter="|".join(
            f"layers.{i}.heads.{h}.key_value{end}"
            for i in (0, 1)
            for h in range(3)
            for end in ("", ".weight")
        ),
        at="key, value = self.key_value(",
    ),
    Change(
        "loops",
        "distances are not turned",
        "far[:last].flip(0).t()",
        "far[:last].t()",
    ),
    Change(
        "loops",
        "position is not divided",
        "(seen + place) / math.sqrt(SIZE)",
        "seen / math.sqrt(SIZE) + place",
        at="place = (q[",
    ),
    Change(
        "loops",
        "residual around the norm",
        "x = self.norm_a(self.join(torch.cat(parts, -1)) + x)",
        "x = self.norm_a(self.join(torch.cat(parts, -1))) + x",
    ),
]
