"""Faulty ports of the PoolFormer."""

from ..bank import Change


def _blocks(*names):
    """Return names of variables in each block of the Keras port."""
    blocks = ("stack1.0", "stack1.1", "stack2.0")
    return "|".join(f"{block}.{name}" for block in blocks for name in names)


def _stages(*names):
    """Return names of stacked variables in both stages of the Flax port."""
    return "|".join(f"stage_{i}/{name}" for i in range(2) for name in names)


_BLOCK = (
    "attn_gn.gamma attn_gamma.weight mlp_gn.gamma mlp_gn.beta mlp_conv_1.kernel"
    " mlp_conv_1.bias mlp_conv_2.kernel mlp_conv_2.bias mlp_gamma.weight"
).split()

FAULTS = [
    Change(
        "tf_style",
        "kernels of the strided convolutions have columns before rows",
        "layer.set_weights([kernel.permute(2, 3, 1, 0), bias])",
        "layer.set_weights([kernel.permute(3, 2, 1, 0), bias])",
        parameter="stem_conv.kernel|stack2_conv.kernel",
        at='outputs = torch.einsum("nhwcij,ijco->nhwo", patches, self.kernel)',
    ),
    Change(
        "tf_style",
        "both scales of a block read the first",
        'block.mlp_gamma.set_weights(scale("layer_scale_2"))',
        'block.mlp_gamma.set_weights(scale("layer_scale_1"))',
        parameter=_blocks("mlp_gamma.weight"),
        at="return inputs * self.weight|return attn_out + self.mlp_gamma(",
    ),
    Change(
        "tf_style",
        "each block of a stack is loaded from the first",
        'load_block(block, torch_weights, f"network.{index}.{i}")',
        'load_block(block, torch_weights, f"network.{index}.0")',
        parameter="|".join(f"stack1.1.{name}" for name in _BLOCK),
    ),
    Change(
        "tf_style",
        "last norm has beta before gamma",
        "net.output_ln.set_weights([gamma, beta])",
        "net.output_ln.set_weights([beta, gamma])",
        parameter="output_ln.gamma|output_ln.beta",
        at="scale = self.gamma * torch.rsqrt(|shift = shift + self.beta"
        "|return self.predictions(self.output_ln(pooled))",
    ),
    Change(
        "tf_style",
        "SAME before the downsampling, with zeros only behind",
        "self.stack2_pad = ZeroPadding2D(((1, 1), (1, 1)))",
        "self.stack2_pad = ZeroPadding2D(((0, 1), (0, 1)))",
        at="above = inputs.new_zeros(|below = inputs.new_zeros("
        "|beside = inputs.new_zeros(|behind = inputs.new_zeros("
        "|inputs = torch.cat([beside|return torch.cat([above"
        "|patches = inputs.unfold(1|patches = patches.unfold(2"
        '|outputs = torch.einsum("nhwcij|self.stack2_conv(self.stack2_pad(features))',
    ),
    Change(
        "tf_style",
        "epsilon of Keras in the norms of the blocks",
        "def __init__(self, channels, epsilon=1e-5, center=True):",
        "def __init__(self, channels, epsilon=1e-3, center=True):",
        at="scale = self.gamma * torch.rsqrt(variance + self.epsilon)",
    ),
    Change(
        "tf_style",
        "pooling without the identity taken off",
        "return self.attn_pool(inputs) - inputs",
        "return self.attn_pool(inputs)",
        reference="return self.pool(x) - x",
    ),
    Change(
        "tf_style",
        "last norm comes before the global average, over all places",
        "        pooled = torch.mean(features, dim=(1, 2))\n"
        "        return self.predictions(self.output_ln(pooled))\n",
        "        pooled = torch.mean(self.output_ln(features), dim=(1, 2))\n"
        "        return self.predictions(pooled)\n",
    ),
    Change(
        "tf_style",
        "zeros around the picture count in the average",
        "        counts = self.window_sum(torch.ones_like(inputs[:1, ..., :1]))\n",
        "        counts = self.pool_size**2\n",
        at="return self.window_sum(inputs) / counts",
    ),
    Change(
        "tf_style",
        "pixels from -1 to 1, as the mode tf has them",
        "    images = images.float() / 255.0\n"
        "    images = images - torch.tensor([0.485, 0.456, 0.406])\n"
        "    return images / torch.tensor([0.229, 0.224, 0.225])\n",
        "    return images.float() / 127.5 - 1.0\n",
    ),
    Change(
        "tf_style",
        "smoothing gives its share to the other classes only",
        "    y_true = y_true * (1.0 - label_smoothing) + label_smoothing / CLASSES\n",
        "    others = (1.0 - y_true) / (CLASSES - 1)\n"
        "    y_true = y_true * (1.0 - label_smoothing) + label_smoothing * others\n",
        at="return torch.sum(y_true * (log_sum - y_pred), dim=-1)",
    ),
    Change(
        "tf_style",
        "moments carry no gradient",
        "    return mean, variance\n",
        "    return mean.detach(), variance.detach()\n",
        at="scale = self.gamma * torch.rsqrt(|shift = -mean * scale"
        "|return inputs * scale + shift",
    ),
    Change(
        "tf_style",
        "steps are not counted",
        "            self.update_step(name, variable, variable.grad, rate)\n"
        "        self.iterations += 1\n",
        "            self.update_step(name, variable, variable.grad, rate)\n",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "jax_style",
        "kernels of one pixel are reshaped where they are to be transposed",
        "return weight.flatten(1).t()",
        "return weight.reshape(weight.shape[1], weight.shape[0])",
        parameter=_stages("up/kernel", "down/kernel"),
        at='return torch.einsum("...i,ij->...j", x, kernel) + bias',
    ),
    Change(
        "jax_style",
        "scale of the second norm is that of the first",
        '"norm_2/scale": "norm2.weight"',
        '"norm_2/scale": "norm1.weight"',
        parameter=_stages("norm_2/scale"),
        at="y = (x - mean) * (torch.rsqrt(var + GROUP_EPS) * scale)"
        "|hidden = mlp(p, group_norm(",
    ),
    Change(
        "jax_style",
        "kernels are turned by half a turn, as for a true convolution",
        'return torch.einsum("oihw->hwio", weight)',
        'return torch.einsum("oihw->hwio", weight).flip(0, 1)',
        parameter="stem/kernel|reduce/kernel",
        at="y = nn.functional.conv2d(lhs, rhs, stride=strides)",
    ),
    Change(
        "jax_style",
        "bias of the head stays at zero",
        '"head/bias": state["head.bias"]',
        '"head/bias": torch.zeros_like(state["head.bias"])',
        parameter="head/bias",
        at='return dense(params["head/kernel"], params["head/bias"], x)'
        '|return torch.einsum("...i,ij->...j", x, kernel) + bias',
    ),
    Change(
        "jax_style",
        "gelu is approximate, as is the default there",
        "def gelu(x, approximate=False):",
        "def gelu(x, approximate=True):",
        at='cdf = 0.5 * (1.0 + torch.tanh(|return x * cdf|x = gelu(dense(p["up/kernel"]',
    ),
    Change(
        "jax_style",
        "what is mixed is added without its scale",
        'x = x + p["gain_1"] * mixed',
        "x = x + mixed",
        reference="self.layer_scale_1[:, None, None]",
    ),
    Change(
        "jax_style",
        "second half reads what came in, beside the first",
        '    x = x + p["gain_1"] * mixed\n'
        '    hidden = mlp(p, group_norm(x, p["norm_2/scale"], p["norm_2/bias"]))\n'
        '    return x + p["gain_2"] * hidden\n',
        '    hidden = mlp(p, group_norm(x, p["norm_2/scale"], p["norm_2/bias"]))\n'
        '    return x + p["gain_1"] * mixed + p["gain_2"] * hidden\n',
    ),
    Change(
        "jax_style",
        "padding of the stem is half of its window",
        '    x = conv(scope(params, "stem"), x, (4, 4), ((2, 2), (2, 2)))\n',
        '    x = conv(scope(params, "stem"), x, (4, 4), ((3, 3), (3, 3)))\n',
        at="lhs = nn.functional.pad(|y = nn.functional.conv2d(lhs, rhs",
    ),
    Change(
        "jax_style",
        "statistics of the group norm go over the batch, too",
        "    mean = torch.mean(x, dim=(1, 2, 3), keepdim=True)\n"
        "    mean_square = torch.mean(x * x, dim=(1, 2, 3), keepdim=True)\n",
        "    mean = torch.mean(x)\n    mean_square = torch.mean(x * x)\n",
    ),
    Change(
        "jax_style",
        "shares of the band come to one along the wrong axis",
        "return near / torch.sum(near, dim=1, keepdim=True)",
        "return near / torch.sum(near, dim=0, keepdim=True)",
        at='pooled = torch.einsum("pi,qj,bijc->bpqc", rows, columns, x)'
        "|rows, columns = band(",
    ),
    Change(
        "jax_style",
        "crop begins one pixel to the right where the rest is odd",
        "start = (size - crop) // 2",
        "start = (size - crop + 1) // 2",
        at="return torch.arange(start, start + crop)"
        "|rows, columns = centre(|x = x[:, rows[:, None]",
    ),
    Change(
        "jax_style",
        "mean over the classes, too",
        'return -torch.einsum("bk,bk->b", labels, log_p)',
        "return -torch.mean(labels * log_p, dim=-1)",
    ),
    Change(
        "jax_style",
        "what has more than one axis decays, and stacked norms and biases have two",
        'return {path: path.endswith("kernel") for path in params}',
        "return {path: leaf.ndim > 1 for path, leaf in params.items()}",
        phase="optimizer",
    ),
]
