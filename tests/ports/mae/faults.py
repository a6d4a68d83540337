"""Faulty ports of the masked autoencoder."""

from ..bank import Change


def _each(names):
    """Return the names of parameters in each layer of the tree."""
    layers = [f"encoder.layer_{i}" for i in range(3)]
    layers += [f"decoder.layer_{i}" for i in range(2)]
    return "|".join(f"params.{at}.{name}" for at in layers for name in names.split())


FAULTS = [
    Change(
        "flax_style",
        "pixels of the first kernel in the order of channels first",
        'embed["kernel"].unflatten(0, (size, size, 3))',
        'embed["kernel"].unflatten(0, (3, size, size)).permute(1, 2, 0, 3)',
        parameter="params.encoder.embed.kernel",
        at='x = torch.einsum("bnpqc,pqcd->bnd"',
    ),
    Change(
        "flax_style",
        "rows come before columns in the positions",
        "for place in (column, row):",
        "for place in (row, column):",
        parameter="encoder_pos|decoder_pos",
        at="x = x + pos|x = torch.cat([cls, x + pos]",
    ),
    Change(
        "flax_style",
        "row of zeros for the class token stands behind the positions, not before",
        "x = torch.cat([cls, x + pos], dim=1)",
        "x = torch.cat([cls, x], dim=1) + nn.functional.pad(pos, (0, 0, 0, 1))",
        reference="+ self.decoder_pos_embed",
    ),
    Change(
        "flax_style",
        "order of the places taken for their rank",
        "rank = torch.sum(noise[:, :, None] > noise[:, None, :], dim=-1)",
        "rank = torch.argsort(noise, dim=-1)",
        at="return one_hot(rank|return (index[..., None] =="
        '|x = torch.einsum("bkn,bnd->bkd"',
        reference="ids_restore = torch.argsort(ids_shuffle",
    ),
    Change(
        "flax_style",
        "mask token is added at seen places too",
        'x = x + hidden[:, :, None] * p["mask_token"]',
        'x = x + p["mask_token"]',
    ),
    Change(
        "flax_style",
        "variance of the target is biased",
        "variance = squares / (count - 1)",
        "variance = squares / count",
        at="return centred * torch.rsqrt(",
        reference="var = target.var(",
    ),
    Change(
        "flax_style",
        "logits are scaled by the width of all heads",
        "query = query / math.sqrt(depth)",
        "query = query / math.sqrt(x.shape[-1])",
        at='weights = softmax(torch.einsum("bqhk,bshk->bhqs"',
    ),
    Change(
        "flax_style",
        "heads vary fastest in the kernels of query, key and value",
        "weight.T.unflatten(1, (heads, -1))",
        "weight.T.unflatten(1, (-1, heads)).transpose(1, 2)",
        parameter=_each(
            "attention.query.kernel attention.key.kernel attention.value.kernel"
        ),
    ),
    Change(
        "flax_style",
        "square kernel behind the attention is not transposed",
        '.proj.weight").T.unflatten',
        '.proj.weight").unflatten',
        parameter=_each("attention.out.kernel"),
    ),
    Change(
        "flax_style",
        "gelu is approximate, as is the default there",
        "approximate=False",
        "approximate=True",
        at="inner = |return 0.5 * x * (1.0 + torch.tanh(inner))"
        '|return dense(p["wo"], gelu(',
        reference="return self.fc2(F.gelu(",
    ),
    Change(
        "flax_style",
        "class token carries no gradient back to the encoder",
        "cls, x = x[:, :1], x[:, 1:]",
        "cls, x = x[:, :1].detach(), x[:, 1:]",
        at='x = dense(p["embed"], latent)|x = torch.cat([cls, x + pos]',
    ),
    Change(
        "flax_style",
        "layers are numbered from nought, as the embedding",
        'return 1 + int(path.split(".")[1]',
        'return int(path.split(".")[1]',
        phase="optimizer",
    ),
    Change(
        "flax_style",
        "both moments are corrected with the first beta",
        "nu_hat = nu[k] / (1.0 - b2**count)",
        "nu_hat = nu[k] / (1.0 - b1**count)",
        phase="optimizer",
    ),
    Change(
        "lean",
        "bias of the last layer stays in the order of channels last",
        'colours_first(state["decoder_pred.bias"])',
        'state["decoder_pred.bias"]',
        parameter="pixels_bias",
        at="y = torch.addmm(self.pixels_bias",
    ),
    Change(
        "lean",
        "positions of the painter run down the columns",
        "self.where_painted.flatten(1)",
        "self.where_painted.transpose(1, 2).flatten(1)",
    ),
    Change(
        "lean",
        "seen places of the pictures run into each other",
        ".view(-1, SEEN).t()",
        ".view(SEEN, -1)",
        at="x = x.gather(0, place|canvas = canvas.scatter(0, index",
    ),
    Change(
        "lean",
        "scales of layers and of branches change places in the stack",
        'torch.stack([each("gamma_1"), each("gamma_2")], dim=1)',
        'torch.stack([each("gamma_1"), each("gamma_2")]).reshape(layers, 2, -1)',
        parameter="seer.damp|painter.damp",
        at="x = torch.addcmul(x, h, self.damp[",
    ),
    Change(
        "lean",
        "biases go kind by kind where the weights go head by head",
        "torch.stack([q_bias, torch.zeros_like(q_bias), v_bias], dim=1)",
        "torch.stack([q_bias, torch.zeros_like(q_bias), v_bias])",
        at="packed = torch.addmm(bias.flatten()",
    ),
    Change(
        "lean",
        "second residual starts behind the norm",
        "h = Norm.apply(x, self.norms[i, 1])",
        "x = h = Norm.apply(x, self.norms[i, 1])",
        at="x = torch.addcmul(x, h, self.damp[i, 1])",
        reference="return x + self.gamma_2",
    ),
    Change(
        "lean",
        "seen places are put on top of the positions",
        "        canvas = canvas.scatter(0, index, y[1:])\n"
        "        canvas = canvas + self.where_painted.flatten(1).t()[:, None]\n",
        "        canvas = canvas + self.where_painted.flatten(1).t()[:, None]\n"
        "        canvas = canvas.scatter(0, index, y[1:])\n",
        at="canvas = canvas.scatter(|canvas = canvas + self.where_painted",
        reference="+ self.decoder_pos_embed",
    ),
    Change(
        "lean",
        "mean taken for constant in the gradient of the norm",
        "return (g - g.mean(1, keepdim=True) - unit * along) * inv, g_affine",
        "return (g - unit * along) * inv, g_affine",
        at="Norm.apply(",
    ),
    Change(
        "lean",
        "slope of gelu without the bell",
        "return g * (below + x * bell)",
        "return g * below",
        at="Gelu.apply(",
    ),
    Change(
        "lean",
        "gradient of the softmax by its diagonal alone",
        "return p * (g - (g * p).sum(-1, keepdim=True))",
        "return p * (g - g * p)",
        at="Softmax.apply(",
    ),
    Change(
        "lean",
        "loss on the seen patches",
        'hidden = output["mask"] > 0',
        'hidden = output["mask"] < 1',
        at="tiles = tiles.permute(|SquaredError.apply(",
        reference='return (error * output["mask"]).sum()',
    ),
    Change(
        "lean",
        "shares of the layers in the wrong order",
        "torch.arange(len(p), 0, -1)",
        "torch.arange(1, len(p) + 1)",
        phase="optimizer",
    ),
    Change(
        "lean",
        "vectors decay, for in a stack they have two dimensions",
        "self.fades = [fades(name) for name in self.names]",
        "self.fades = [0.05 * (p.dim() > 1) for _, p in named]",
        phase="optimizer",
        steps=2,
    ),
]
