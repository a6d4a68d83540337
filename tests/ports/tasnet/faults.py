"""Faulty ports of the speech separator."""

from ..bank import Change


def _each(blocks, names):
    """Return the names of parameters in each of some blocks, ``{}`` being its number."""
    return "|".join(name.format(i) for i in blocks for name in names.split())


FAULTS = [
    Change(
        "keras_style",
        "filters of the masks stay in the order of speakers first",
        '"masks": [speakers_last(value) for value in conv("separator.masks")],',
        '"masks": conv("separator.masks"),',
        parameter="mask_layer.kernel|mask_layer.bias",
        at="x = torch.sigmoid(self.mask_layer(x))"
        "|return torch.reshape(x, (*x.shape[:2], -1, NUM_SPEAKERS))"
        "|return torch.tensordot(inputs, self.kernel[0]",
    ),
    Change(
        "keras_style",
        "skip stands before residual in the kernel that does both",
        'for part in ("res", "skip")]',
        'for part in ("skip", "res")]',
        parameter=_each(range(5), "block_{}.project.kernel block_{}.project.bias"),
        at="residual, skip = torch.split("
        "|return torch.tensordot(inputs, self.kernel[0]|x = self.project(x)",
    ),
    Change(
        "keras_style",
        "second alpha of a block is filled from the first",
        '"alpha_2": state[f"{prefix}.prelu2.weight"],',
        '"alpha_2": state[f"{prefix}.prelu1.weight"],',
        parameter=_each(range(6), "block_{}.activation_2.alpha"),
        at="x = self.activation_2(x)|return torch.relu(inputs) - self.alpha",
    ),
    Change(
        "keras_style",
        "epsilon of Keras",
        "axis=(1, 2), epsilon=1e-8",
        "axis=(1, 2), epsilon=1e-3",
        at="scale = self.gamma * torch.rsqrt(variance + self.epsilon)",
    ),
    Change(
        "keras_style",
        "padding counts in the statistics",
        "mean, variance = self.weighted_moments(inputs, mask)",
        "mean, variance = self.weighted_moments(inputs, torch.ones_like(mask))",
        at="divisor = torch.sum(weights|mean = torch.sum(weights * inputs"
        "|variance = torch.sum(weights * squared",
    ),
    Change(
        "keras_style",
        "dilation goes on growing in the second repeat",
        "dilation_rate = 2 ** (i % CYCLE)",
        "dilation_rate = 2**i",
        at="total = self.dilation_rate * (width - 1)|padded = nn.functional.pad(inputs, (0, 0, before"
        "|start = tap * self.dilation_rate|outputs = outputs + padded[:, start",
    ),
    Change(
        "keras_style",
        "padding is causal",
        "before = total // 2",
        "before = total",
        at="padded = nn.functional.pad(inputs, (0, 0, before"
        "|outputs = outputs + padded[:, start",
    ),
    Change(
        "keras_style",
        "zeros before the signal are not cut off again",
        "return outputs[:, FRAME_STEP : FRAME_STEP + samples]",
        "return outputs[:, :samples]",
    ),
    Change(
        "keras_style",
        "one order of the speakers for the whole batch",
        "    per_utterance = torch.minimum(straight, crossed) / NUM_SPEAKERS\n"
        "    return torch.mean(per_utterance)\n",
        "    better = torch.minimum(torch.mean(straight), torch.mean(crossed))\n"
        "    return better / NUM_SPEAKERS\n",
    ),
    Change(
        "keras_style",
        "projection is taken for constant",
        "target = alpha[:, None] * y_true",
        "target = (alpha[:, None] * y_true).detach()",
        at="alpha = torch.sum(y_true * y_pred",
        reference="projection = dot * target",
    ),
    Change(
        "keras_style",
        "decibels of power, not of amplitude",
        "decibels * (LOG_10 / 20.0)",
        "decibels * (LOG_10 / 10.0)",
    ),
    Change(
        "keras_style",
        "rate falls at every step, not in stairs",
        "4e-3, decay_steps=2, decay_rate=0.5, staircase=True",
        "4e-3, decay_steps=2, decay_rate=0.5",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "keras_style",
        "each gradient is clipped by a norm of its own",
        "        squares = [torch.sum(torch.square(g)) for g in gradients]\n"
        "        norm = torch.sqrt(torch.sum(torch.stack(squares)))\n"
        "        factor = self.global_clipnorm / torch.clamp(norm, min=self.global_clipnorm)\n"
        "        return [g * factor for g in gradients]\n",
        "        limit = self.global_clipnorm\n"
        "        norms = [torch.linalg.vector_norm(g) for g in gradients]\n"
        "        factors = [limit / torch.clamp(norm, min=limit) for norm in norms]\n"
        "        return [g * factor for g, factor in zip(gradients, factors)]\n",
        phase="optimizer",
        steps=3,
    ),
    Change(
        "flax_style",
        "kernel of the decoder is not turned over",
        '"decoder": {"kernel": torch.flip(decoder, (0,))},',
        '"decoder": {"kernel": decoder},',
        parameter="params.decoder.kernel",
        at='waves = conv_transpose(sources|return torch.einsum("btcw,wco->bto"',
    ),
    Change(
        "flax_style",
        "biases of the dense layers are not loaded",
        'return {"kernel": kernel, "bias": state[f"{name}.bias"]}',
        'return {"kernel": kernel, "bias": torch.zeros(kernel.shape[1])}',
        parameter="|".join(
            [
                "params.separator.bottleneck.bias",
                "params.separator.masks.bias",
                _each(
                    range(6),
                    "params.separator.block_{}.in.bias"
                    " params.separator.block_{}.skip.bias",
                ),
                _each(range(5), "params.separator.block_{}.residual.bias"),
            ]
        ),
        at='return torch.einsum("btc,co->bto"|logits = logits + p["masks"]["bias"]',
    ),
    Change(
        "flax_style",
        "first norm of a block is filled from the second",
        '            "norm_in": norm_of(f"{name}.norm1"),\n',
        '            "norm_in": norm_of(f"{name}.norm2"),\n',
        parameter=_each(
            range(6),
            "params.separator.block_{}.norm_in.scale"
            " params.separator.block_{}.norm_in.bias",
        ),
        at='return torch.where(where, y * p["scale"]',
    ),
    Change(
        "flax_style",
        "norm is over time alone, of each channel",
        "    axes = (1, 2)\n",
        "    axes = (1,)\n",
        at="count = torch.sum(where, dim=axes|mean = torch.sum(x, dim=axes"
        "|var = torch.sum(torch.square(centred), dim=axes",
    ),
    Change(
        "flax_style",
        "gradient of the slope is a mean",
        "d_slope = torch.sum(g * torch.clamp(x, max=0))",
        "d_slope = torch.mean(g * torch.clamp(x, max=0))",
        at="return LeakySlope.apply(x",
    ),
    Change(
        "flax_style",
        "masked features carry no gradient to the encoder",
        "sources = (masks * encoded).flatten(0, 1)",
        "sources = (masks * encoded.detach()).flatten(0, 1)",
        reference="separated = masks * features",
    ),
    Change(
        "flax_style",
        "norm comes before the activation",
        '    h = prelu(p["act_in"], h)\n'
        '    h = global_layer_norm(p["norm_in"], h, valid)\n',
        '    h = global_layer_norm(p["norm_in"], h, valid)\n'
        '    h = prelu(p["act_in"], h)\n',
        at='h = prelu(p["act_in"], h)',
    ),
    Change(
        "flax_style",
        "masks are shares of the speakers",
        "return torch.sigmoid(logits)",
        "return torch.softmax(logits, dim=0)",
    ),
    Change(
        "flax_style",
        "sum of the skips begins with what the first block takes",
        "skips = torch.zeros_like(x)",
        "skips = x",
        at="skips = skips + skip",
    ),
    Change(
        "flax_style",
        "estimates keep their mean",
        "estimates = remove_mean(output, valid)",
        "estimates = torch.where(valid, output, 0.0)",
    ),
    Change(
        "flax_style",
        "last frame of each utterance is left out",
        "valid = torch.arange(encoded.shape[1]) <= last_frame[:, None]",
        "valid = torch.arange(encoded.shape[1]) < last_frame[:, None]",
    ),
    Change(
        "flax_style",
        "rate is halved one step too late",
        "if count >= boundary:",
        "if count > boundary:",
        phase="optimizer",
        steps=3,
    ),
    Change(
        "flax_style",
        "state of the chain is not kept",
        "updates, self.opt_state = self.tx.update(grads, self.opt_state)",
        "updates, _ = self.tx.update(grads, self.opt_state)",
        phase="optimizer",
        steps=2,
    ),
]
