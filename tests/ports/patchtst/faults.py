"""Faulty ports of the patch transformer."""

from ..bank import Change


def _each(names):
    """Return the names of parameters in each block."""
    return "|".join(f"block_{i}.{name}" for i in range(3) for name in names.split())


FAULTS = [
    Change(
        "keras_style",
        "rows of the last kernel stay in the order of channels first",
        'kernel = self.kernel("head").reshape(NUM_HEADS * KEY_DIM, -1, 16)\n'
        "        kernel = torch.permute(kernel, (1, 0, 2)).reshape(-1, 16)\n",
        'kernel = self.kernel("head")\n',
        parameter="head.kernel",
        at="x = torch.permute(self.head(x)",
    ),
    Change(
        "keras_style",
        "columns of the kernels are split into heads last",
        "kernel = kernel.reshape(-1, NUM_HEADS, KEY_DIM)\n"
        "            return torch.permute(kernel, (1, 0, 2))\n",
        "kernel = kernel.reshape(-1, KEY_DIM, NUM_HEADS)\n"
        "            return torch.permute(kernel, (2, 0, 1))\n",
        parameter=_each(
            "attention.query_kernel attention.key_kernel attention.value_kernel"
        ),
        at="hdk->hbcnk",
    ),
    Change(
        "keras_style",
        "zeros behind the series",
        "torch.tile(last, (1, FRAME_STEP, 1))",
        "torch.zeros_like(last).tile((1, FRAME_STEP, 1))",
    ),
    Change(
        "keras_style",
        "tokens are scaled by the root of their depth",
        "return tokens + self.embeddings",
        "return tokens * math.sqrt(tokens.shape[-1]) + self.embeddings",
    ),
    Change(
        "keras_style",
        "epsilon of Keras",
        "    momentum = 0.9\n    epsilon = 1e-5\n",
        "    momentum = 0.9\n    epsilon = 1e-3\n",
        at="inv = torch.rsqrt(variance + self.epsilon)",
    ),
    Change(
        "keras_style",
        "shares are handed to the next layer, not scores",
        "self.output_kernel), logits",
        "self.output_kernel), probs",
        at="logits = logits + previous",
    ),
    Change(
        "keras_style",
        "scores of the layer before carry no gradient back",
        "logits = logits + previous",
        "logits = logits + previous.detach()",
    ),
    Change(
        "keras_style",
        "deviation and mean are put back before the affine part is undone",
        "        outputs = (inputs - self.beta) / (self.gamma + self.epsilon**2)\n"
        "        return outputs * stddev + mean\n",
        "        outputs = inputs * stddev + mean\n"
        "        return (outputs - self.beta) / (self.gamma + self.epsilon**2)\n",
    ),
    Change(
        "keras_style",
        "affine part is constant where it is undone",
        "outputs = (inputs - self.beta) / (self.gamma + self.epsilon**2)",
        "gamma, beta = self.gamma.detach(), self.beta.detach()\n"
        "        outputs = (inputs - beta) / (gamma + self.epsilon**2)",
        reference="x = (x - self.affine_bias)",
    ),
    Change(
        "keras_style",
        "absolute value of the mean of errors, not the mean of absolute values",
        "return torch.mean(torch.abs(y_pred - y_true), dim=-1)",
        "return torch.abs(torch.mean(y_pred - y_true, dim=-1))",
    ),
    Change(
        "keras_style",
        "whatever has two axes decays, so do positions and the biases of heads",
        "if self.uses_decay(name):",
        "if variable.ndim > 1:",
        phase="optimizer",
        steps=3,
    ),
    Change(
        "keras_style",
        "each gradient is clipped by a norm of its own",
        "        square = sum(torch.sum(torch.square(g)) for g in gradients)\n"
        "        factor = self.global_clipnorm / (torch.sqrt(square) + 1e-6)\n"
        "        factor = torch.clamp(factor, max=1.0)\n"
        "        return [g * factor for g in gradients]\n",
        "        norms = [torch.sqrt(torch.sum(torch.square(g))) for g in gradients]\n"
        "        factors = [self.global_clipnorm / (norm + 1e-6) for norm in norms]\n"
        "        return [g * f.clamp(max=1.0) for g, f in zip(gradients, factors)]\n",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "keras_style",
        "iterations count up before the rate is asked for",
        "        lr = self.learning_rate(self.iterations)\n"
        "        self.iterations += 1\n",
        "        self.iterations += 1\n"
        "        lr = self.learning_rate(self.iterations)\n",
        phase="optimizer",
    ),
    Change(
        "jax_style",
        "biases of the queries start from nought",
        '"layers/q_bias": stack("attn.W_Q.bias").unflatten(1, (heads, -1)),',
        '"layers/q_bias": torch.zeros(CONFIG["layers"], heads, d_model // heads),',
        parameter="params.layers/q_bias",
        at='query = query + w["q_bias"]',
    ),
    Change(
        "jax_style",
        "norms of both halves are stacked before the layers",
        'stack("norm_ff." + name)], 1)',
        'stack("norm_ff." + name)]).reshape(\n'
        '            CONFIG["layers"], 2, -1\n'
        "        )",
        parameter="params.layers/scale|params.layers/bias|stats",
        at="y, mean, var = Normalize.apply(|return unit * scale + bias",
    ),
    Change(
        "jax_style",
        "square kernel behind the attention is not transposed",
        'stack("attn.to_out.weight").mT.unflatten',
        'stack("attn.to_out.weight").unflatten',
        parameter="params.layers/out",
        at='return torch.einsum("mqhk,hkd->mqd"',
    ),
    Change(
        "jax_style",
        "divided by the root of the deviation, as if it were a variance",
        "return (x - MEAN) / STD",
        "return (x - MEAN) / torch.sqrt(STD)",
    ),
    Change(
        "jax_style",
        "frames end with the series, not begin with it",
        "first, last = 0, x.shape[1] - size",
        "first, last = x.shape[1] % stride, x.shape[1] - size",
        at="for i in starts",
    ),
    Change(
        "jax_style",
        "series are taken apart as if the batch came first",
        "y = torch.permute(y.reshape(channels, batch, -1), (1, 2, 0))",
        "y = torch.permute(y.reshape(batch, channels, -1), (0, 2, 1))",
    ),
    Change(
        "jax_style",
        "gelu is approximate, as is the default there",
        "approximate=False",
        "approximate=True",
        at='inner = |return 0.5 * x * (1.0 + torch.tanh(inner))|y = gelu(x @ w["up"]',
    ),
    Change(
        "jax_style",
        "residual of the second half starts before the first norm",
        'x, first = batch_norm(x + y, w["scale"][0], w["bias"][0], stats[0], train)\n'
        '    y = gelu(x @ w["up"]',
        "x = x + y\n"
        '    z, first = batch_norm(x, w["scale"][0], w["bias"][0], stats[0], train)\n'
        '    y = gelu(z @ w["up"]',
        at="x, second = batch_norm(",
    ),
    Change(
        "jax_style",
        "no sum in the gradient of softmax",
        "return y * (g - torch.sum(g * y, dim=-1, keepdim=True))",
        "return y * (1.0 - y) * g",
        at="shares = Softmax.apply(",
    ),
    Change(
        "jax_style",
        "variance taken for constant in the gradient of the norm",
        "(g - (d_bias + unit * d_scale) / count)",
        "(g - d_bias / count)",
        at="y, mean, var = Normalize.apply(",
    ),
    Change(
        "jax_style",
        "halves of squares, as l2_loss has them",
        "return torch.mean(torch.square(error)",
        "return torch.mean(0.5 * torch.square(error)",
    ),
    Change(
        "jax_style",
        "decay goes through the moments",
        "        scale_by_adam(),\n        add_decayed_weights(0.1),\n",
        "        add_decayed_weights(0.1),\n        scale_by_adam(),\n",
        phase="optimizer",
    ),
    Change(
        "jax_style",
        "rate rises along a line",
        "weight = (1.0 - math.cos(math.pi * share)) / 2.0",
        "weight = share",
        phase="optimizer",
        steps=2,
    ),
]
