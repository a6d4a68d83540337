"""Faulty ports of the DCGAN."""

from ..bank import Change

_CONVS = ("conv2d", "conv2d_1", "conv2d_2")
_VECTORS = "|".join(f"disc/conv_{i}/v0" for i in range(3))
_STATISTICS = [f"gen/norm_{i}/{kind}" for i in (0, 1) for kind in ("mean", "var")]
_SCALES = [f"gen/norm_{i}/{kind}" for i in (0, 1) for kind in ("scale", "offset")]
_KERNELS = ["gen/project/w", "gen/up_0/w", "gen/up_1/w"]

FAULTS = [
    Change(
        "keras_style",
        "first kernel is flattened with channels first",
        'first = torch.permute(state[name + ".main.0.weight"], (0, 2, 3, 1))',
        'first = state[name + ".main.0.weight"]',
        parameter="generator.dense.kernel|shadow.dense.kernel",
        at="x = self.dense(latent)|x = torch.reshape(x, (-1, 4, 4"
        '|y = torch.matmul(inputs, self.read("kernel"))',
    ),
    Change(
        "keras_style",
        "vector of the power iteration stays in the order of channels first",
        "        vector = torch.permute(vector, (1, 2, 0))\n",
        "",
        parameter="|".join(f"discriminator.{name}.vector_v" for name in _CONVS),
        at="u = l2_normalize(torch.matmul(v, w))",
    ),
    Change(
        "keras_style",
        "what a transposed convolution makes too much is cut off at the beginning",
        "nn.functional.conv_transpose2d(x, weight, stride=2, padding=1)",
        "nn.functional.conv_transpose2d(x, weight, stride=2)[:, :, 2:, 2:]",
    ),
    Change(
        "keras_style",
        "epsilon of Keras",
        "    epsilon = 1e-5\n",
        "    epsilon = 1e-3\n",
        at="inv = torch.rsqrt(variance + self.epsilon)",
    ),
    Change(
        "keras_style",
        "slope of Keras",
        "def leaky_relu(x, alpha=0.2):",
        "def leaky_relu(x, alpha=0.3):",
        at="return torch.maximum(x, alpha * x)|x = leaky_relu(",
    ),
    Change(
        "keras_style",
        "numbers of the groups go to neighbours",
        "y = torch.tile(y, (group_size, height, width, 1))",
        "y = torch.repeat_interleave(y, group_size, dim=0)\n"
        "    y = torch.tile(y, (1, height, width, 1))",
        at="return torch.cat([x, y], dim=-1)",
    ),
    Change(
        "keras_style",
        "no power iteration in the generator's pass",
        "self.discriminator(fake_images, training=True)",
        "self.discriminator(fake_images, training=False)",
        at="v = self.vector_v|v = l2_normalize(torch.matmul(u, w.T))|sigma = torch.matmul(",
        reference="fooled_score = net.discriminator(fake)",
    ),
    Change(
        "keras_style",
        "discriminator is trained in the generator's pass",
        "        self.discriminator.set_trainable(False)\n",
        "",
        at="generator_logits = self.discriminator(|self.discriminator.set_trainable(True)",
        reference="set_requires_grad(net.discriminator, False)",
    ),
    Change(
        "keras_style",
        "sigma is a constant for the gradient",
        "        sigma = torch.matmul(torch.matmul(v, w), u.T)\n",
        "            sigma = torch.matmul(torch.matmul(v, w), u.T)\n",
        at="return kernel / sigma",
    ),
    Change(
        "keras_style",
        "penalty pulls the norm to one",
        "return logits, torch.sum(torch.square(gradients), dim=(1, 2, 3))",
        "norm = torch.sqrt(torch.sum(torch.square(gradients), dim=(1, 2, 3)))\n"
        "        return logits, torch.square(norm - 1.0)",
    ),
    Change(
        "keras_style",
        "axis of the mirror is that of channels first",
        "flipped = torch.flip(images, (2,))",
        "flipped = torch.flip(images, (3,))",
        at="return torch.where(",
    ),
    Change(
        "keras_style",
        "correction of the second moment without its root",
        "root = (1.0 - self.beta_2**self.iterations) ** 0.5",
        "root = 1.0 - self.beta_2**self.iterations",
        phase="optimizer",
    ),
    Change(
        "keras_style",
        "updates of the average are counted from nought",
        "        self.num_updates += 1\n"
        "        decay = min(self.decay, (1.0 + self.num_updates) / (10.0 + self.num_updates))\n",
        "        decay = min(self.decay, (1.0 + self.num_updates) / (10.0 + self.num_updates))\n"
        "        self.num_updates += 1\n",
        phase="optimizer",
    ),
    Change(
        "haiku_style",
        "kernels of transposed convolutions are not turned",
        "torch.flip(state[name], (2, 3)).permute(2, 3, 0, 1)",
        "state[name].permute(2, 3, 0, 1)",
        parameter="|".join(
            f"{root}gen/up_{i}/w" for root in ("", "ema/") for i in (0, 1)
        ),
        at="return conv(dilated, w",
    ),
    Change(
        "haiku_style",
        "average starts from the generator",
        'gen("ema")',
        'gen("generator")',
        parameter="|".join(
            f"ema/{path}" for path in [*_KERNELS, "gen/up_1/b", *_SCALES, *_STATISTICS]
        ),
    ),
    Change(
        "haiku_style",
        "power iteration begins anew in each pass",
        'return sigma, {**state, path + "/v0": v}',
        "return sigma, state",
        parameter=_VECTORS,
        at='fixed, v = w.detach(), state|u = normalize(torch.einsum("ijc,ijco->o", v, fixed))',
    ),
    Change(
        "haiku_style",
        "gradient goes through the power iteration",
        "fixed, v = w.detach(), state",
        "fixed, v = w, state",
        at='u = normalize(torch.einsum("ijc,ijco->o", v, fixed))'
        '|v = normalize(torch.einsum("ijco,o->ijc", fixed, u))|sigma = torch.einsum(',
    ),
    Change(
        "haiku_style",
        "mean taken for constant in the gradient of batch norm",
        "(g - g_offset / rows - normed * g_scale / rows)",
        "(g - normed * g_scale / rows)",
        at="out, new_mean, new_var = BatchNorm.apply(",
    ),
    Change(
        "haiku_style",
        "channel of deviations has no border of zeros",
        "constant = conv(ones, w[:, :, -1:], padding=(1, 1))",
        "constant = torch.sum(w[:, :, -1] * ones[0, 0, 0], dim=(0, 1))",
        at="y = y + deviation[",
    ),
    Change(
        "haiku_style",
        "discriminator's loss trains the generator too",
        "fake, state = discriminator(params, state, fake_image.detach())",
        "fake, state = discriminator(params, state, fake_image)",
        reference="fake_score = net.discriminator(fake.detach())",
    ),
    Change(
        "haiku_style",
        "penalty is a constant for the gradient",
        "torch.autograd.grad(torch.sum(scores), x, create_graph=True)",
        "torch.autograd.grad(torch.sum(scores), x, retain_graph=True)",
        at='"penalty": torch.einsum("nhwc,nhwc->n"|real, gradient, state = score_and_grad(',
        reference="torch.autograd.grad(real_score.sum()",
    ),
    Change(
        "haiku_style",
        "new statistics of batch norm are dropped",
        "fake_image, state = generator(",
        "fake_image, _ = generator(",
        parameter="|".join([*_STATISTICS, *(f"ema/{path}" for path in _STATISTICS)]),
        at="self.store(state)|getattr(self, path).copy_(value)",
    ),
    Change(
        "haiku_style",
        "columns come before rows in the image",
        "image[torch.arange(n)[:, None], :, column].transpose(1, 2)",
        "image[torch.arange(n)[:, None], :, column]",
    ),
    Change(
        "haiku_style",
        "generator has a hinge too",
        'gen_loss = -torch.mean(output["fooled"])',
        'gen_loss = torch.mean(torch.relu(1.0 - output["fooled"]))',
    ),
    Change(
        "haiku_style",
        "discriminator has the betas of the generator",
        "b1=0.3, b2=0.99)",
        "b1=0.5, b2=0.999)",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "haiku_style",
        "rate of the average taken for its decay",
        "average.add_(rate * (params[path] - average))",
        "average.add_((1.0 - rate) * (params[path] - average))",
        phase="optimizer",
    ),
]
