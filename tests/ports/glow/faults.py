"""Faulty ports of Glow."""

from ..bank import Change

_STEPS = [f"revnet_{level}_{step}" for level in range(2) for step in range(2)]


def _variables(names):
    """Return names of variables of the first port, and those of their averages."""
    shadows = [
        f"shadow.{name.replace('.', '/')}/ExponentialMovingAverage" for name in names
    ]
    return "|".join([*names, *shadows])


def _arrays(names):
    """Return names of both levels of the second port, and those of their averages."""
    paths = [f"level_{level}/{name}" for level in range(2) for name in names]
    return "|".join([*paths, *(f"ema/{path}" for path in paths)])


FAULTS = [
    Change(
        "tf_style",
        "kernels of the first convolutions have columns before rows",
        'kernel = torch.permute(self.state[name + ".weight"], (2, 3, 1, 0))',
        'kernel = torch.permute(self.state[name + ".weight"], (3, 2, 1, 0))',
        parameter=_variables([f"{step}.conv_1.kernel" for step in _STEPS]),
        at="return conv2d_same(x, self.kernel)",
    ),
    Change(
        "tf_style",
        "biases of the last convolutions stay by turns",
        '"b": self.halves(self.state[name + ".conv.bias"])',
        '"b": self.state[name + ".conv.bias"]',
        parameter=_variables(
            [f"{scope}.conv_zeros.b" for scope in (*_STEPS, "pool_0")]
        ),
        at="x = conv2d_same(x, self.kernel) + self.b",
    ),
    Change(
        "tf_style",
        "activation norm behind space_to_depth keeps the order of torch",
        'self.actnorm(name + ".actnorm", order)',
        'self.actnorm(name + ".actnorm")',
        parameter=_variables(
            [f"revnet_{i}_0.actnorm.{kind}" for i in range(2) for kind in ("b", "logs")]
        ),
        at="x = x + self.b|x = x * torch.exp(self.logs)",
    ),
    Change(
        "tf_style",
        "nothing is added before the sigmoid of the scale",
        "scale = torch.sigmoid(logits + 2.0)",
        "scale = torch.sigmoid(logits)",
        reference="raw + 2.0",
    ),
    Change(
        "tf_style",
        "log-determinant of the activation norm is that of one pixel",
        "return x, objective + pixels * torch.sum(self.logs)",
        "return x, objective + torch.sum(self.logs)",
        reference="pixels * self.actnorm.logs.sum()",
    ),
    Change(
        "tf_style",
        "activation norm scales before it shifts",
        "        x = x + self.b\n        x = x * torch.exp(self.logs)\n",
        "        x = x * torch.exp(self.logs)\n        x = x + self.b\n",
        at="x = x * torch.exp(self.logs)|x = x + self.b",
    ),
    Change(
        "tf_style",
        "diagonal of the 1x1 convolution has no signs",
        "scale = self.sign_s * torch.exp(self.log_s)",
        "scale = torch.exp(self.log_s)",
        at="lower = self.lower * lower_mask",
        reference="torch.diag(self.sign_s",
    ),
    Change(
        "tf_style",
        "log-variance taken for a log-deviation",
        "torch.square(x - self.mean) / torch.exp(self.logvar)",
        "torch.square(x - self.mean) / torch.exp(2.0 * self.logvar)",
    ),
    Change(
        "tf_style",
        "noise is of one grey level, not of a bin",
        "x = x + noise / N_BINS",
        "x = x + noise / 256.0",
    ),
    Change(
        "tf_style",
        "bits are for a pixel, not for each of its channels",
        'n_dims = math.prod(int_shape(batch["image"])[1:])',
        'n_dims = math.prod(int_shape(batch["image"])[2:])',
        at='bits_x = output["nll"] / (',
    ),
    Change(
        "tf_style",
        "no gradient goes back through the prior of the split",
        "self.conv_zeros(z1)",
        "self.conv_zeros(z1.detach())",
    ),
    Change(
        "tf_style",
        "gradients are not clipped by value",
        "        gradients = [torch.clamp(g, -value, value) for g in gradients]\n",
        "",
        phase="optimizer",
        steps=3,
    ),
    Change(
        "tf_style",
        "averages take the variables from before the step",
        "            variable.sub_(learning_rate * m / ((1.0 - beta_1_power) * u))\n"
        "            self.update_average(name, variable)\n",
        "            self.update_average(name, variable)\n"
        "            variable.sub_(learning_rate * m / ((1.0 - beta_1_power) * u))\n",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "jax_style",
        "permuted the other way",
        'torch.argmax(stack(level, "invconv.p"), dim=2)',
        'torch.argmax(stack(level, "invconv.p"), dim=1)',
        parameter="level_0/perm|level_1/perm",
        at='y = y[..., constants["perm"]]',
    ),
    Change(
        "jax_style",
        "second norm of the coupling is loaded from the first",
        'norm(level, "block.4")',
        'norm(level, "block.1")',
        parameter=_arrays(["coupling/norm_mid/loc", "coupling/norm_mid/log_std"]),
        at='h = torch.relu(normalize(p["norm_mid"], h))',
    ),
    Change(
        "jax_style",
        "lower triangle comes before the upper one",
        '    y = x * diagonal + torch.einsum("bhwi,oi->bhwo", x, torch.triu(lu, 1))\n'
        '    y = y + torch.einsum("bhwi,oi->bhwo", y, torch.tril(lu, -1))\n',
        '    y = x + torch.einsum("bhwi,oi->bhwo", x, torch.tril(lu, -1))\n'
        '    y = y * diagonal + torch.einsum("bhwi,oi->bhwo", y, torch.triu(lu, 1))\n',
        at="y = x + torch.einsum(|y = y * diagonal + torch.einsum(",
    ),
    Change(
        "jax_style",
        "columns of a block come before its rows",
        "x = torch.permute(x, (0, 1, 3, 5, 2, 4))",
        "x = torch.permute(x, (0, 1, 3, 5, 4, 2))",
        at="return x.flatten(3)",
    ),
    Change(
        "jax_style",
        "zeros beside the columns all stand behind",
        "x = nn.functional.pad(x, (0, 0, 1, 1, 1, 1))",
        "x = nn.functional.pad(x, (0, 0, 0, 2, 1, 1))",
        at="torch.tensordot(x[:, i : i + height, j : j + width]",
    ),
    Change(
        "jax_style",
        "gelu behind the second norm of the coupling",
        'h = torch.relu(normalize(p["norm_mid"], h))',
        'h = nn.functional.gelu(normalize(p["norm_mid"], h))',
    ),
    Change(
        "jax_style",
        "log-density without its constant",
        "torch.sum(unit**2 + log_var + math.log(2.0 * math.pi))",
        "torch.sum(unit**2 + log_var)",
        reference="math.log(2 * math.pi)",
    ),
    Change(
        "jax_style",
        "log-determinant of the coupling is summed over the batch, too",
        "vmap(torch.sum)(log_scale)",
        "torch.sum(log_scale)",
    ),
    Change(
        "jax_style",
        "classes are counted from one",
        'table = params["classes"]["table"][label]',
        'table = params["classes"]["table"][label - 1]',
    ),
    Change(
        "jax_style",
        "mean over the classes in the loss of an example",
        "return -torch.sum(hot * torch.log_softmax(logits, dim=-1))",
        "return -torch.mean(hot * torch.log_softmax(logits, dim=-1))",
    ),
    Change(
        "jax_style",
        "loss of the labels does not reach the flow",
        'classify(params["head"], latent)',
        'classify(params["head"], latent.detach())',
        at="return torch.mean(latent.flatten(1, 2), dim=1)",
    ),
    Change(
        "jax_style",
        "clipped by norm before it is clipped by value",
        "            clip(0.2),\n            clip_by_global_norm(0.8),\n",
        "            clip_by_global_norm(0.8),\n            clip(0.2),\n",
        phase="optimizer",
        steps=3,
    ),
    Change(
        "jax_style",
        "average is divided as if it had started at zero, as is the default there",
        '        return average, {"average": average, "count": count}\n',
        "        unbiased = tree_map(lambda a: a / (1.0 - decay**count), average)\n"
        '        return unbiased, {"average": average, "count": count}\n',
        phase="optimizer",
    ),
]
