"""Faulty ports of the small promptable segmenter."""

from ..bank import Change


def _each(places, names):
    """Return the names of parameters at each of these places."""
    return "|".join(
        f"{place}.{name}" for place in places.split() for name in names.split()
    )


_LAYERS = " ".join(f"backbone.transformer_layers.{i}" for i in range(3))
_DECODER_LAYERS = "masks.decoder_layers.0 masks.decoder_layers.1"
_HEADS = " ".join(
    [f"{layer}.attention" for layer in _LAYERS.split()]
    + [
        f"{layer}.{name}"
        for layer in _DECODER_LAYERS.split()
        for name in ("among_tokens", "read_image", "read_tokens")
    ]
    + ["masks.last_read"]
)
_BLOCKS = " ".join(f"vision.blocks.{i}" for i in range(3))
_READS = "last " + " ".join(
    f"ways.{i}.{name}" for i in (0, 1) for name in ("own", "ask", "answer")
)

FAULTS = [
    Change(
        "channels_last",
        "height and width of kernels exchanged",
        "permute(2, 3, 1, 0))\n        self.bias = None",
        "permute(3, 2, 1, 0))\n        self.bias = None",
        parameter="backbone.patching.kernel|backbone.neck_2.kernel",
    ),
    Change(
        "channels_last",
        "kernels of the upscaling flipped",
        'permute(2, 3, 1, 0))\n        self.bias = variable(weights[name + ".bias"])',
        "permute(2, 3, 1, 0).flip(0, 1))\n"
        '        self.bias = variable(weights[name + ".bias"])',
        parameter="masks.upscale_1.kernel|masks.upscale_2.kernel",
    ),
    Change(
        "channels_last",
        "weights into the heads are not transposed",
        "weight.T.reshape(channels, heads, -1)",
        "weight.reshape(channels, heads, -1)",
        parameter=_each(_HEADS, "query.kernel key.kernel value.kernel"),
    ),
    Change(
        "channels_last",
        "tables of steps exchanged",
        'self.vertical = variable(weights[name + ".rel_pos_h"])\n'
        '        self.horizontal = variable(weights[name + ".rel_pos_w"])',
        'self.vertical = variable(weights[name + ".rel_pos_w"])\n'
        '        self.horizontal = variable(weights[name + ".rel_pos_h"])',
        parameter=_each(_LAYERS, "attention.vertical attention.horizontal"),
    ),
    Change(
        "channels_last",
        "norms after reading and after the MLP exchanged",
        'LayerNormalization(weights, name + ".norm2", 1e-5)\n'
        '        self.hidden = Dense(weights, name + ".mlp.0")\n'
        '        self.contract = Dense(weights, name + ".mlp.2")\n'
        '        self.mlp_norm = LayerNormalization(weights, name + ".norm3", 1e-5)',
        'LayerNormalization(weights, name + ".norm3", 1e-5)\n'
        '        self.hidden = Dense(weights, name + ".mlp.0")\n'
        '        self.contract = Dense(weights, name + ".mlp.2")\n'
        '        self.mlp_norm = LayerNormalization(weights, name + ".norm2", 1e-5)',
        parameter=_each(
            _DECODER_LAYERS,
            "read_image_norm.gamma read_image_norm.beta mlp_norm.gamma mlp_norm.beta",
        ),
    ),
    Change(
        "channels_last",
        "foreground before background",
        '"not_a_point background foreground',
        '"not_a_point foreground background',
        parameter="prompts.kinds",
        at="self.kinds[labels + 1]",
    ),
    Change(
        "channels_last",
        "steps the other way",
        "place.unsqueeze(1) - place.unsqueeze(0)",
        "place.unsqueeze(0) - place.unsqueeze(1)",
        at='rows = torch.einsum("|columns = torch.einsum("',
    ),
    Change(
        "channels_last",
        "windows put back by columns",
        "windows.unflatten(0, (-1, *counts)).swapaxes(2, 3)",
        "windows.unflatten(0, (-1, *counts)).permute(0, 2, 3, 1, 4, 5)",
        at="x = x.flatten(3, 4).flatten(1, 2)|x = shortcut + x",
    ),
    Change(
        "channels_last",
        "points lie at corners of pixels",
        "((coordinates + 0.5) / IMAGE_SIZE)",
        "(coordinates / IMAGE_SIZE)",
    ),
    Change(
        "channels_last",
        "positions in the values",
        "self.read_image(tokens + token_positions, image, placed_image)",
        "self.read_image(tokens + token_positions, placed_image, placed_image)",
        at='return torch.einsum("...c,cnd->...nd", x',
    ),
    Change(
        "channels_last",
        "epsilon of Keras",
        "1e-6)",
        "1e-3)",
        at="torch.rsqrt(",
    ),
    Change(
        "channels_last",
        "gelu of tanh",
        'approximate="none"',
        'approximate="tanh"',
    ),
    Change(
        "channels_last",
        "residual around the first attention of the tokens",
        "tokens = self.among_tokens(tokens, tokens, tokens)",
        "tokens = tokens + self.among_tokens(tokens, tokens, tokens)",
    ),
    Change(
        "by_pixels",
        "channels of a patch outside of its pixels",
        'w=s["patch_embed.weight"].permute(0, 2, 3, 1).flatten(1)',
        'w=s["patch_embed.weight"].flatten(1)',
        parameter="vision.patch.w",
    ),
    Change(
        "by_pixels",
        "queries of all heads before the keys",
        "return x.unflatten(0, (3, self.heads, -1)).transpose(0, 1).flatten(0, 2)",
        "return x",
        parameter=_each(_BLOCKS, "qkv qkv_b"),
        at="q, k, v = heads(x, self.heads).chunk(3, dim=-1)",
    ),
    Change(
        "by_pixels",
        "channels of a block inside of its places",
        "return weight.flatten(1).t()",
        "return weight.permute(0, 2, 3, 1).flatten(1).t()",
        parameter="grow.w1|grow.w2",
    ),
    Change(
        "by_pixels",
        "hypernetworks stacked from the last",
        "nets = range(self.masks)",
        "nets = range(self.masks)[::-1]",
        parameter=_each("hyper", "w1 b1 w2 b2 w3 b3"),
    ),
    Change(
        "by_pixels",
        "values before keys",
        '"kv"',
        '"vk"',
        parameter=_each(_READS, "kv kv_b"),
        at="key, value = self.kv.chunk(2)|key_b, value_b = self.kv_b.chunk(2)",
    ),
    Change(
        "by_pixels",
        "norm of the last layer for the final norm",
        'gain=inner["norm_final.weight"], shift=inner["norm_final.bias"]',
        'gain=inner["layers.1.norm4.weight"], shift=inner["layers.1.norm4.bias"]',
        parameter="last_norm.gain|last_norm.shift",
    ),
    Change(
        "by_pixels",
        "phases are not in turns",
        '2 * math.pi * s["gaussian"]',
        's["gaussian"].clone()',
        parameter="places.turns",
        at="phase = F.linear(xy, self.turns.t())",
    ),
    Change(
        "by_pixels",
        "steps from scaled queries",
        "self.steps(q, p.steps, side)",
        "self.steps(q / q.shape[-1] ** 0.5, p.steps, side)",
        at='by_step = torch.einsum("',
    ),
    Change(
        "by_pixels",
        "cosines before sines",
        "(phase.sin(), phase.cos())",
        "(phase.cos(), phase.sin())",
    ),
    Change(
        "by_pixels",
        "shapes begin one early",
        "t[:, 1 : self.masks + 1]",
        "t[:, : self.masks]",
        at='torch.einsum("nmc,mcd->nmd", t, p.w1)',
    ),
    Change(
        "by_pixels",
        "norm inside of the residual",
        "t = self.norm(t + self.ask(t, t_place, z, z_place), 1)",
        "t = t + self.norm(self.ask(t, t_place, z, z_place), 1)",
    ),
    Change(
        "by_pixels",
        "tokens are keys without their places",
        "self.answer(z, z_place, t, t_place)",
        "self.answer(z, z_place, t, 0)",
        at="k = F.linear(other + other_place, key, key_b)",
    ),
    Change(
        "by_pixels",
        "across and down exchanged in the image",
        "(place % SIDE, place // SIDE)",
        "(place // SIDE, place % SIDE)",
        at="xy = (xy + 0.5) * (2 / size) - 1|phase = F.linear(xy",
    ),
]
