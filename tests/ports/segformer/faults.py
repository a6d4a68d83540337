"""Faulty ports of the SegFormer."""

from ..bank import Change

_LAYERS = ("0.0", "0.1", "1.0", "1.1", "2.0")


def _each(names):
    """Return the names of variables in each layer of the Keras port."""
    return "|".join(f"encoder.block.{i}.{n}" for i in _LAYERS for n in names.split())


FAULTS = [
    Change(
        "tf_style",
        "width comes before height in the depthwise kernels",
        "return torch.permute(array, (2, 3, 0, 1))",
        "return torch.permute(array, (3, 2, 0, 1))",
        parameter=_each("mlp.dwconv.depthwise_kernel"),
        at="outputs = outputs + window * self.depthwise_kernel",
    ),
    Change(
        "tf_style",
        "both norms of a layer read the weights of the first",
        '(r"\\.layer_norm_(\\d)\\.", r".norm\\1."),',
        '(r"\\.layer_norm_(\\d)\\.", ".norm1."),',
        parameter=_each("layer_norm_2.gamma layer_norm_2.beta"),
        at="mlp_output = self.mlp(self.layer_norm_2(",
    ),
    Change(
        "tf_style",
        "SAME where patches overlap",
        "        embeddings = self.proj(pad_same(pixel_values, self.pad))\n",
        "        pads = [0, 0]\n"
        "        for side in (pixel_values.shape[2], pixel_values.shape[1]):\n"
        "            last = (side - 1) // self.proj.strides * self.proj.strides\n"
        "            total = max(last + 2 * self.pad + 1 - side, 0)\n"
        "            pads += [total // 2, total - total // 2]\n"
        "        embeddings = self.proj(nn.functional.pad(pixel_values, pads))\n",
        at="outputs = nn.functional.conv2d(",
    ),
    Change(
        "tf_style",
        "epsilon of Keras in the norms of patches and of reduced keys",
        "def __init__(self, units, epsilon=1e-5, center=True):",
        "def __init__(self, units, epsilon=1e-3, center=True):",
        at="scale = torch.rsqrt(variance + self.epsilon)"
        "|return self.layer_norm(embeddings)"
        "|reduced = self.layer_norm(self.sr(",
    ),
    Change(
        "tf_style",
        "norm of the head is not told that it trains",
        "    def forward(self, inputs):\n"
        "        mean, variance = self.moving_mean, self.moving_variance\n"
        "        if self.training:\n",
        "    def forward(self, inputs, training=False):\n"
        "        mean, variance = self.moving_mean, self.moving_variance\n"
        "        if training:\n",
        at="inv = torch.rsqrt(variance + self.epsilon)|return inputs * inv + (self.beta"
        "|hidden_states = self.batch_norm(",
        reference="self.bn(x)",
    ),
    Change(
        "tf_style",
        "each head has its keys and values side by side",
        "        key, value = torch.chunk(self.key_value(reduced), 2, dim=-1)\n",
        "        key_value = self.key_value(reduced)\n"
        "        key_value = key_value.unflatten(-1, (self.num_heads, 2, self.head_size))\n"
        "        key, value = torch.unbind(key_value, dim=-2)\n",
        at="key, value = self.split_heads(key), self.split_heads(value)",
    ),
    Change(
        "tf_style",
        "corners are aligned where maps grow",
        "    scale = in_size / out_size\n"
        "    source = (torch.arange(out_size) + 0.5) * scale - 0.5\n",
        "    scale = (in_size - 1) / (out_size - 1)\n"
        "    source = torch.arange(out_size) * scale\n",
        at="rows = upper + (lower - upper) * y_lerp"
        "|return first + (second - first) * x_lerp"
        "|all_hidden_states.append(resize_bilinear(",
    ),
    Change(
        "tf_style",
        "activation stands before the depthwise convolution",
        "hidden_states = gelu(self.dwconv(hidden_states))",
        "hidden_states = self.dwconv(gelu(hidden_states))",
    ),
    Change(
        "tf_style",
        "divided by the number of labels that count, not by their weights",
        "return torch.sum(unmasked_loss * mask) / torch.sum(sample_weight)",
        "return torch.sum(unmasked_loss * mask) / torch.sum(mask)",
    ),
    Change(
        "tf_style",
        "pixels without a name become -1, which nothing ignores",
        "mask = torch.where(mask == 0, ignore_index, mask - 1)",
        "mask = mask - 1",
        at='mask = (labels != config["semantic_loss_ignore_index"])',
        reference="label.where(label >= 0, IGNORE)",
    ),
    Change(
        "tf_style",
        "statistics of the batch carry no gradient",
        "            self.assign_moving_average(self.moving_variance, unbiased)\n",
        "            self.assign_moving_average(self.moving_variance, unbiased)\n"
        "            mean, variance = mean.detach(), variance.detach()\n",
        at="inv = torch.rsqrt(variance + self.epsilon)|return inputs * inv + (self.beta"
        "|hidden_states = self.batch_norm(",
        reference="self.bn(x)",
    ),
    Change(
        "tf_style",
        "list of what does not decay knows no norm of batches",
        'exclude_from_weight_decay(["gamma$", "beta$", "bias$"])',
        'exclude_from_weight_decay(["layer_norm", "bias$"])',
        phase="optimizer",
        steps=3,
    ),
    Change(
        "tf_style",
        "steps of the warm-up count for the decay",
        "step = min(step - self.warmup_steps, self.decay_steps)",
        "step = min(step, self.decay_steps)",
        phase="optimizer",
        steps=3,
    ),
    Change(
        "jax_style",
        "first kernel stays red first",
        '    embed = backbone["stage_0"]["embed"]\n'
        '    embed["kernel"] = embed["kernel"].unflatten(0, (3, -1)).flip(0).flatten(0, 1)\n',
        "",
        parameter="params.backbone.stage_0.embed.kernel",
        at='return torch.einsum("bpl,pe->ble", cols, p["kernel"])'
        '|x, grid = conv(p["embed"]',
    ),
    Change(
        "jax_style",
        "parts of the fusion go from the first stage to the last",
        "zip(STAGES, reversed(parts))",
        "zip(STAGES, parts)",
        parameter="params.head.fuse.stage_0.kernel|params.head.fuse.stage_2.kernel",
        at='fused = fused + dense(p["fuse"][name], x)'
        '|y = torch.einsum("...i,io->...o", x, p["kernel"])',
    ),
    Change(
        "jax_style",
        "gelu is approximate, as is the default there",
        "def gelu(x, approximate=False):",
        "def gelu(x, approximate=True):",
        at="cubic = |return x * 0.5 * (1.0 + torch.tanh(cubic))"
        '|return dense(p["down"], gelu(x))',
    ),
    Change(
        "jax_style",
        "reduction is padded as the patches are",
        'conv(p["reduce"], to_grid(x, grid), cfg.reduction, cfg.reduction)',
        'conv(\n            p["reduce"],\n            to_grid(x, grid),\n'
        "            cfg.reduction,\n            cfg.reduction,\n"
        "            cfg.reduction // 2,\n        )",
        at="return nn.functional.unfold(x, window|cols, grid = patches("
        '|return torch.einsum("bpl,pe->ble", cols',
    ),
    Change(
        "jax_style",
        "shortcut of the second half begins behind the norm",
        '    return x + mix_mlp(p["mlp"], layer_norm(p["ln_2"], x), grid)\n',
        '    x = layer_norm(p["ln_2"], x)\n    return x + mix_mlp(p["mlp"], x, grid)\n',
    ),
    Change(
        "jax_style",
        "shares at the edges do not come to one",
        "return near / torch.sum(near, dim=1, keepdim=True)",
        "return near",
        at='x = torch.einsum("ri,cj,bije->brce", rows, cols, x)|rows, cols = (',
    ),
    Change(
        "jax_style",
        "mean of the gradient is left out in the norm",
        "return rstd * (g - torch.mean(g, dim=-1, keepdim=True) - y * along), None",
        "return rstd * (g - y * along), None",
        at="y = Standardize.apply(",
    ),
    Change(
        "jax_style",
        "pixels without a label count as the first class",
        "weight = CLASS_WEIGHTS[safe] * known",
        "weight = CLASS_WEIGHTS[safe]",
        at="nll = -torch.sum(weight * picked)|torch.sum(weight)",
    ),
    Change(
        "jax_style",
        "probabilities are not squared below",
        'square = torch.einsum("blc,blc,bl->bc", p, p, known)',
        'square = torch.einsum("blc,bl->bc", p, known)',
        at="return torch.mean(1.0 - (2.0 * both + 1.0)",
        reference="den = (probs**2",
    ),
    Change(
        "jax_style",
        "label of a cell is that of its middle",
        "[:, ::4, ::4].flatten(1)",
        "[:, 2::4, 2::4].flatten(1)",
    ),
    Change(
        "jax_style",
        "decay goes through the moments",
        "        scale_by_adam(),\n        add_decayed_weights(weight_decay, mask),\n",
        "        add_decayed_weights(weight_decay, mask),\n        scale_by_adam(),\n",
        phase="optimizer",
    ),
    Change(
        "jax_style",
        "only the classifier has the rate of the head",
        "multi_transform(transforms, lambda path: path[0])",
        'multi_transform(\n            transforms, lambda path: "head" if "classify" in path'
        ' else "backbone"\n        ),\n',
        phase="optimizer",
    ),
    Change(
        "jax_style",
        "count of the moments stays where it was",
        "return updates, (count, mu, nu)",
        "return updates, (state[0], mu, nu)",
        phase="optimizer",
        steps=2,
    ),
]
