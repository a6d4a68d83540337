"""Faulty ports of the CaiT."""

from ..bank import Change

_ENCODER = "params.encoder."
_SOFTMAX = "unnormalized = torch.exp(|return unnormalized / torch.sum("
_MIXING = 'return torch.einsum("NM,BN...->BM...", transform, logits)'
_NORM = "mul = torch.rsqrt(|return (x - mean) * mul + params"
_DENSE = "outputs = torch.matmul(inputs, self.kernel)"
_KERAS_SOFTMAX = "exps = torch.exp(|return exps / torch.sum("


def _keras(name):
    """Return the names of a variable in each layer of the Keras port."""
    layers = ("sa_layers.0", "sa_layers.1", "sa_layers.2", "ca_layers.0", "ca_layers.1")
    return "|".join(f"backbone.{layer}.{name}" for layer in layers)


FAULTS = [
    Change(
        "flax_style",
        "mixing before the softmax is not transposed",
        '{"kernel": src["attn.proj_l.weight"].T}',
        '{"kernel": src["attn.proj_l.weight"]}',
        parameter=_ENCODER + "attention.pre_softmax.kernel",
        at='logits = talking_heads(params["pre_softmax"]["kernel"]|' + _MIXING,
    ),
    Change(
        "flax_style",
        "table of positions is read with columns first",
        'state["pos_embed"].reshape(1, rows, -1, cfg.embed_dim)',
        'state["pos_embed"].reshape(1, -1, rows, cfg.embed_dim).transpose(1, 2)',
        parameter="params.pos_embedding",
        at='x = x + params["pos_embedding"]',
    ),
    Change(
        "flax_style",
        "fused rows are taken for heads that have a query, a key and a value each",
        'qkv = src["attn.qkv.weight"].reshape(3, *heads, cfg.embed_dim)',
        'qkv = src["attn.qkv.weight"].reshape(cfg.num_heads, 3, -1, cfg.embed_dim)\n'
        "    qkv = torch.swapaxes(qkv, 0, 1)",
        parameter=_ENCODER + "attention.qkv.kernel",
        at='qkv = torch.einsum("BTD,DINH->IBTNH"',
    ),
    Change(
        "flax_style",
        "scores of the class token are not scaled",
        "weights = softmax(logits / math.sqrt(query.shape[-1]))",
        "weights = softmax(logits)",
        at=_SOFTMAX,
        reference="q = self.split(self.q(x[:, :1])) * self.scale",
    ),
    Change(
        "flax_style",
        "heads are mixed twice before the softmax",
        "    weights = softmax(logits)\n"
        '    weights = talking_heads(params["post_softmax"]["kernel"], weights)\n'
        '    weights = weights + params["post_softmax"]["bias"][:, None, None]\n',
        '    logits = talking_heads(params["post_softmax"]["kernel"], logits)\n'
        '    logits = logits + params["post_softmax"]["bias"][:, None, None]\n'
        "    weights = softmax(logits)\n",
        at=f'{_MIXING}|{_SOFTMAX}|encoded = torch.einsum("BNTS,BSNH->BTNH"',
        reference="attn = self.proj_w(",
    ),
    Change(
        "flax_style",
        "square of the mean is not taken from the variance",
        "torch.rsqrt(mean2 - torch.square(mean) + epsilon)",
        "torch.rsqrt(mean2 + epsilon)",
        at="return (x - mean) * mul + params",
    ),
    Change(
        "flax_style",
        "error function of the activation gets its argument unscaled",
        "torch.erf(x / math.sqrt(2.0))",
        "torch.erf(x)",
        at="hidden = gelu(",
        reference="F.gelu(self.fc1(x))",
    ),
    Change(
        "flax_style",
        "second skip of a layer comes from before the attention",
        '    x = x + y * params["scale_att"]\n'
        '    y = feed_forward(params["mlp"], layer_norm(params["norm_mlp"], x))\n',
        '    y = x + y * params["scale_att"]\n'
        '    y = feed_forward(params["mlp"], layer_norm(params["norm_mlp"], y))\n',
        at='return x + y * params["scale_mlp"]',
    ),
    Change(
        "flax_style",
        "tokens are pooled before they are normed",
        "pooled = torch.mean(norm(x), dim=1)",
        "pooled = norm(torch.mean(x, dim=1))",
        at=_NORM,
        reference="self.head_aux(x[:, 1:].mean(dim=1))",
    ),
    Change(
        "flax_style",
        "image goes to its partner, and not the partner's to it",
        "torch.index_select(x, 0, partner)",
        "torch.index_select(x, 0, torch.argsort(partner))",
        at="images = mix(",
    ),
    Change(
        "flax_style",
        "true label keeps its full weight beside the smoothing",
        "return (1.0 - alpha) * nll - alpha * torch.mean(logp, dim=-1)",
        "return nll - alpha * torch.mean(logp, dim=-1)",
        at="return lam * own + (1.0 - lam) * other",
        reference="F.one_hot(label, NUM_CLASSES) * (1 - SMOOTHING) + low",
    ),
    Change(
        "flax_style",
        "token learns from what it tells the patches",
        "teacher = stop_gradient(softmax(logits))",
        "teacher = softmax(logits)",
        at=_SOFTMAX
        + "|aux = aux + cfg.self_target * softmax_cross_entropy(pooled, teacher)"
        "|return -torch.sum(labels * log_softmax(logits), dim=-1)",
        reference="said = logits.detach().softmax(dim=-1)",
    ),
    Change(
        "flax_style",
        "only the token is normed before the class attention",
        "    inputs = torch.cat([cls[:, None], tokens], dim=1)\n"
        '    y = class_attention(params["attention"], '
        'layer_norm(params["norm_att"], inputs))\n',
        '    query = layer_norm(params["norm_att"], cls[:, None])\n'
        "    inputs = torch.cat([query, tokens], dim=1)\n"
        '    y = class_attention(params["attention"], inputs)\n',
        at='return torch.einsum("...D,DNH->...NH", inputs, params["kernel"])'
        '|key = dense_general(params["key"]|value = dense_general(params["value"]',
        reference="self.attn(self.norm1(both))",
    ),
    Change(
        "keras_style",
        "channels stay first in a patch's kernel",
        "    kernel = torch.permute(kernel, (0, 2, 3, 1))\n",
        "",
        parameter="backbone.patch_encoder.projection.kernel",
        at=_DENSE + "|encoded = torch.flatten(self.projection(patches), 1, 2)",
    ),
    Change(
        "keras_style",
        "scale behind the feed-forward is that behind the attention",
        'layer.ffn_scale.gamma.copy_(state[prefix + "gamma_2"])',
        'layer.ffn_scale.gamma.copy_(state[prefix + "gamma_1"])',
        parameter=_keras("ffn_scale.gamma"),
        at="return inputs * self.gamma|return x + self.ffn_scale(outputs)",
    ),
    Change(
        "keras_style",
        "queries and keys are split off in the wrong order",
        "query, key, value = torch.split(state",
        "key, query, value = torch.split(state",
        parameter="|".join(
            f"backbone.sa_layers.{i}.attention.{name}.kernel"
            for i in range(3)
            for name in ("query", "key")
        ),
        at=f"query = split_heads(self.query(inputs))|key = split_heads(self.key(|{_DENSE}",
    ),
    Change(
        "keras_style",
        "softmax runs over the heads, which are last",
        "softmax(scores, axis=2)",
        "softmax(scores)",
        at=_KERAS_SOFTMAX,
    ),
    Change(
        "keras_style",
        "heads are joined without being put behind the tokens",
        "def join_heads(x):\n    x = torch.permute(x, (0, 2, 1, 3))\n"
        "    return torch.reshape(x, (x.shape[0], x.shape[1], -1))\n",
        "def join_heads(x):\n    return torch.reshape(x, (x.shape[0], x.shape[2], -1))\n",
        at="return self.projection(join_heads(context))|" + _DENSE,
        reference="x = (attn @ v).transpose(1, 2).reshape(b, n, c)",
    ),
    Change(
        "keras_style",
        "first row of the positions is left to the class token",
        "        positions = torch.arange(encoded.shape[1])\n",
        "        places = encoded.shape[1]\n"
        "        positions = torch.clamp(torch.arange(places) + 1, max=places - 1)\n",
        at="return encoded + torch.index_select(self.position_embedding",
    ),
    Change(
        "keras_style",
        "class token is averaged with the patches",
        "cls, patches = representation[:, 0], representation[:, 1:]",
        "cls, patches = representation[:, 0], representation",
        at="averaged = torch.mean(patches, dim=1)",
        reference="self.head_aux(x[:, 1:].mean(dim=1))",
    ),
    Change(
        "keras_style",
        "patches too go through the feed-forward of the class layers",
        "return torch.cat([self.feed_forward(cls), patches], dim=1)",
        "return self.feed_forward(torch.cat([cls, patches], dim=1))",
        at="outputs = self.ffn_contract(|return x + self.ffn_scale(outputs)",
    ),
    Change(
        "keras_style",
        "class token goes in before the first layer",
        "        for layer in self.sa_layers:\n            encoded = layer(encoded)\n"
        "        encoded = self.class_token(encoded)\n",
        "        encoded = self.class_token(encoded)\n"
        "        for layer in self.sa_layers:\n            encoded = layer(encoded)\n",
        at="return torch.cat([tokens, inputs], dim=1)",
    ),
    Change(
        "keras_style",
        "layer scale is behind the sum",
        "encoded_patches = encoded_patches + self.attention_scale(attended)",
        "encoded_patches = self.attention_scale(encoded_patches + attended)",
        at="return inputs * self.gamma",
        reference="x = x + self.gamma_1 * self.attn(self.norm1(x))",
    ),
    Change(
        "keras_style",
        "labels of all images are mixed alike",
        "y_l = torch.reshape(lam, (-1, 1))",
        "y_l = torch.mean(lam)",
        at="labels = labels_two + y_l * (labels - labels_two)",
        reference="target = lam[:, None] * target + (1 - lam[:, None]) * target[partner]",
    ),
    Change(
        "keras_style",
        "what the token says is smoothed like the labels",
        "self.distillation_loss = CategoricalCrossentropy()",
        "self.distillation_loss = CategoricalCrossentropy(label_smoothing)",
        at="return y_true * (1.0 - self.label_smoothing) + share"
        "|hit = torch.sum(y_true * y_pred, dim=-1)"
        "|soft = self.distillation_loss(teacher, patch_logits)",
    ),
    Change(
        "keras_style",
        "pixels are divided by the variance",
        "/ torch.sqrt(variance)",
        "/ variance",
    ),
]
