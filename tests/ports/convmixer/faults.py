"""Faulty ports of the ConvMixer."""

from ..bank import Change


def _mixers(*names):
    """Return names of variables in each block of the Keras port."""
    return "|".join(f"mixers.{i}.{name}" for i in range(3) for name in names)


def _arrays(*names):
    """Return names of arrays of each block of the folded port."""
    return "|".join(f"b{i}_{name}" for i in range(3) for name in names)


FAULTS = [
    Change(
        "keras_style",
        "width comes before height in the depthwise kernels",
        'return [self.tensors[prefix + ".weight"].permute(2, 3, 0, 1)]',
        'return [self.tensors[prefix + ".weight"].permute(3, 2, 0, 1)]',
        parameter=_mixers("dw_large.depthwise_kernel", "dw_small.depthwise_kernel"),
        at="nchw, kernel, padding|kernel = self.depthwise_kernel.permute"
        "|x = self.bn_large(self.dw_large(inputs))"
        "|x = x + self.bn_small(self.dw_small(inputs))",
    ),
    Change(
        "keras_style",
        "norm of the small branch reads the weights of the large one",
        'block.bn_small.set_weights(ckpt.batch_norm(prefix + ".spatial.small_norm"))',
        'block.bn_small.set_weights(ckpt.batch_norm(prefix + ".spatial.large_norm"))',
        parameter=_mixers(
            "bn_small.gamma",
            "bn_small.beta",
            "bn_small.moving_mean",
            "bn_small.moving_variance",
        ),
        at="return normalized * self.gamma + self.beta"
        "|x = x + self.bn_small(self.dw_small(inputs))",
    ),
    Change(
        "keras_style",
        "pointwise kernels are reshaped where they are to be transposed",
        "return [kernel[:, :, 0, 0].T, bias]",
        "return [kernel.reshape(kernel.shape[1], kernel.shape[0]), bias]",
        parameter=_mixers("pointwise.kernel")
        + "|mixers.2.se.se_reduce.kernel|mixers.2.se.se_expand.kernel",
        at="return torch.matmul(inputs, self.kernel) + self.bias"
        "|x = self.pointwise(x)|self.se_reduce(|self.se_expand(",
    ),
    Change(
        "keras_style",
        "moving variances are not loaded",
        'keys = ("weight", "bias", "running_mean", "running_var")',
        'keys = ("weight", "bias", "running_mean")',
        parameter="stem.stem_bn.moving_variance|"
        + _mixers(
            "bn_large.moving_variance",
            "bn_small.moving_variance",
            "bn_out.moving_variance",
        ),
        at="normalized = (inputs - mean) / torch.sqrt(|return self.stem_bn(x)",
    ),
    Change(
        "keras_style",
        "stem is padded as SAME pads",
        "        side = PATCH_KERNEL // 2\n"
        "        self.stem_pad = ZeroPadding2D(((side, side), (side, side)))\n",
        "        self.stem_pad = ZeroPadding2D(((1, 1), (1, 2)))\n",
        at="return nn.functional.pad(inputs, (0, 0, left"
        "|x = self.stem_conv(self.stem_pad(inputs))"
        "|outputs = nn.functional.conv2d(nchw, oihw",
    ),
    Change(
        "keras_style",
        "epsilon of the norms is the default of Keras",
        "def __init__(self, filters, momentum=0.9, epsilon=1e-5, frozen=False):",
        "def __init__(self, filters, momentum=0.9, epsilon=1e-3, frozen=False):",
        at="normalized = (inputs - mean) / torch.sqrt(|return self.stem_bn(x)",
    ),
    Change(
        "keras_style",
        "gelu is approximate",
        "def gelu(x, approximate=False):",
        "def gelu(x, approximate=True):",
        at="inner = math.sqrt(|return 0.5 * x * (1.0 + torch.tanh(inner))|x = gelu(x)",
    ),
    Change(
        "keras_style",
        "norm of a block stands before the activation",
        "x = self.bn_out(gelu(x))",
        "x = gelu(self.bn_out(x))",
        at="normalized = (inputs - mean) / torch.sqrt(",
    ),
    Change(
        "keras_style",
        "gate is the hard sigmoid of Keras",
        "return 1.0 / (1.0 + torch.exp(-x))",
        "return torch.clamp(0.2 * x + 0.5, 0.0, 1.0)",
        at="x = sigmoid(self.se_expand(x))",
    ),
    Change(
        "keras_style",
        "rates of stochastic depth do not reach the last block",
        "last = NUM_BLOCKS - 1\n",
        "last = NUM_BLOCKS\n",
        at="return [1.0 - STOCHASTIC_DEPTH_RATE * i / last"
        "|x = gelu(x) * self.survival_probability",
    ),
    Change(
        "keras_style",
        "means of the colours are blue first",
        "RGB_MEAN = (0.485, 0.456, 0.406)",
        "RGB_MEAN = (0.406, 0.456, 0.485)",
        at="x = x - torch.tensor(RGB_MEAN)|return x / torch.tensor(RGB_STD)",
    ),
    Change(
        "keras_style",
        "labels of the second loss are smoothed too",
        'CategoricalCrossentropy()(y_true, output["aux"])',
        'CategoricalCrossentropy(LABEL_SMOOTHING)(y_true, output["aux"])',
        at="y_true = y_true * (1.0 - self.label_smoothing)"
        "|y_true = y_true + self.label_smoothing / num_classes"
        "|return torch.mean(-torch.sum(y_true",
    ),
    Change(
        "keras_style",
        "scales of the norms decay",
        'exclude=("gamma", "beta", "bias"),',
        'exclude=("beta", "bias"),',
        phase="optimizer",
    ),
    Change(
        "folded_style",
        "first weights stay red first",
        'weight = state["embed.proj.weight"].flip(1)',
        'weight = state["embed.proj.weight"]',
        parameter="stem_w",
        at="y = torch.matmul(weight.T, cols) + bias[:, None]",
    ),
    Change(
        "folded_style",
        "pairs of the norms have the shift first",
        'torch.stack([state[source + ".weight"], state[source + ".bias"]])',
        'torch.stack([state[source + ".bias"], state[source + ".weight"]])',
        parameter="stem_n|" + _arrays("n7", "n3", "n1"),
        at="scale = norm[0] / torch.sqrt(var + EPS)"
        "|return scale, norm[1] - mean * scale"
        "|return y * scale[:, None] + shift[:, None], oh, ow",
    ),
    Change(
        "folded_style",
        "halves of the last weights change places",
        'arrays["out_avg"], arrays["out_max"] = state',
        'arrays["out_max"], arrays["out_avg"] = state',
        parameter="out_avg|out_max",
        at="logits = avg @ net.out_avg",
    ),
    Change(
        "folded_style",
        "each block has the pointwise bias of the first",
        'arrays[f"b{b}_pb"] = state[at + "channel.bias"]',
        'arrays[f"b{b}_pb"] = state["blocks.0.channel.bias"]',
        parameter="b1_pb|b2_pb",
        at='y = torch.einsum("io,nip->nop", weight, x) + bias[:, None]',
    ),
    Change(
        "folded_style",
        "small window begins one tap late in the large one",
        "first = (K_LARGE - K_SMALL) // 2\n",
        "first = (K_LARGE - K_SMALL) // 2 + 1\n",
        at="side = torch.arange(first|return (side[:, None] * K_LARGE"
        "|cols[:, :, centre]|kernel = (large * scale7)",
    ),
    Change(
        "folded_style",
        "pixels are normed with the unbiased variance",
        "return mean, (centred * centred).mean((0, 2))",
        "count = x.shape[0] * x.shape[2]\n"
        "    return mean, (centred * centred).sum((0, 2)) / (count - 1)",
        at="scale = norm[0] / torch.sqrt(var + EPS)",
    ),
    Change(
        "folded_style",
        "what survives is a share of the sum, not of the branch",
        "x = x + KEEP[b] * y",
        "x = KEEP[b] * (x + y)",
    ),
    Change(
        "folded_style",
        "nothing is cut off between the two layers of the gate",
        "s = torch.addmm(b1, s, w1).clamp(min=0)",
        "s = torch.addmm(b1, s, w1)",
        at="s = torch.addmm(b2, s, w2)",
        reference="F.relu(self.reduce(squeezed))",
    ),
    Change(
        "folded_style",
        "slope of the activation is the share alone",
        "return g * (cdf + x * pdf)",
        "return g * cdf",
        at="y = Gelu.apply(",
    ),
    Change(
        "folded_style",
        "windows run over the right edge by one pixel",
        "(col >= 0) & (col < w)",
        "(col >= 0) & (col <= w)",
        at="return x[:, :, pixel] * inside"
        "|cols = read_windows(|pixel, inside, oh, ow = window_table("
        "|pixel, inside, _, _ = window_table(",
    ),
    Change(
        "folded_style",
        "smoothing is shared by the other classes only",
        "    off = smooth / N_CLASSES\n",
        "    off = smooth / (N_CLASSES - 1)\n",
        at="table = torch.full(|table.fill_diagonal_(|return table[label]"
        '|main = SoftmaxLoss.apply(output["logits"]',
    ),
    Change(
        "folded_style",
        "gradient of the loss is that of a sum",
        "return g * (p - target) / len(p), None",
        "return g * (p - target), None",
        at="main = SoftmaxLoss.apply(|aux = SoftmaxLoss.apply(",
    ),
    Change(
        "folded_style",
        "momentum begins anew at each step",
        '            kept["m"] = m\n',
        "",
        phase="optimizer",
        steps=2,
    ),
]
