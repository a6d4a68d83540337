"""Faulty ports of the HRNet."""

from ..bank import Change

_BLOCKS = (
    "stage_2.branches.0.0",
    "stage_2.branches.0.1",
    "stage_2.branches.1.0",
    "stage_2.branches.1.1",
    "stage_3_a.branches.0.0",
    "stage_3_a.branches.1.0",
    "stage_3_a.branches.2.0",
    "stage_3_b.branches.0.0",
    "stage_3_b.branches.1.0",
    "stage_3_b.branches.2.0",
)
_STEPS_DOWN = (
    "stage_2.fuse.paths.from_0_to_1.steps.0",
    "stage_3_a.fuse.paths.from_0_to_1.steps.0",
    "stage_3_a.fuse.paths.from_0_to_2.steps.0",
    "stage_3_a.fuse.paths.from_0_to_2.steps.1",
    "stage_3_a.fuse.paths.from_1_to_2.steps.0",
)
_SQUARE_KERNELS = (
    "stem_1",
    "stem_2",
    "stage_1.conv_b",
    "to_branch_0",
    "to_branch_1",
    "to_branch_2",
    *(f"{block}.conv_{x}" for block in _BLOCKS for x in "ab"),
    *_STEPS_DOWN,
)
_LAST_MODULE = (
    *(f"stage_3_b.branches.{i}.0.conv_{x}" for i in range(3) for x in "ab"),
    "stage_3_b.fuse.paths.from_1_to_0.project",
    "stage_3_b.fuse.paths.from_2_to_0.project",
)
_POINTWISE = (
    "la1.conv1",
    "la1.conv3",
    "la1.conv_down",
    "st2.fuse.residual_up_1",
    "st3_1.fuse.residual_up_1",
    "st3_1.fuse.residual_up_2",
    "st3_2.fuse.residual_up_1",
    "st3_2.fuse.residual_up_2",
)


def _keras(layers, kernel=True):
    """Return the variables of norms, and of convolutions too."""
    names = ["bn.gamma", "bn.beta", "bn.moving_mean", "bn.moving_variance"]
    names += ["conv.kernel"] if kernel else []
    return "|".join(f"{layer}.{name}" for layer in layers for name in names)


def _paddle(layers, weight=True):
    names = ["norm.scale", "norm.bias", "norm._mean", "norm._variance"]
    names += ["weight"] if weight else []
    return "|".join(f"{layer}.{name}" for layer in layers for name in names)


FAULTS = [
    Change(
        "tf_style",
        "width comes before height in the kernels",
        "perm=(2, 3, 1, 0)",
        "perm=(3, 2, 1, 0)",
        parameter="|".join(f"{layer}.conv.kernel" for layer in _SQUARE_KERNELS),
        at='outputs = torch.einsum("nhwcij,ijco->nhwo"',
    ),
    Change(
        "tf_style",
        "norm after the second convolution of a block reads that after the first",
        'f"{name}.conv2", f"{name}.bn2"',
        'f"{name}.conv2", f"{name}.bn1"',
        parameter=_keras(
            [*(f"{block}.conv_b" for block in _BLOCKS), "stage_1.conv_b"], kernel=False
        ),
        at="return inputs * inv + (self.beta - mean * inv)"
        "|inv = torch.rsqrt(variance + self.epsilon) * self.gamma",
    ),
    Change(
        "tf_style",
        "last module reads the weights of the one before",
        'checkpoint.module(net.stage_3_b, "stage3.1")',
        'checkpoint.module(net.stage_3_b, "stage3.0")',
        parameter=_keras(_LAST_MODULE),
        at='outputs = torch.einsum("nhwcij,ijco->nhwo"',
    ),
    Change(
        "tf_style",
        "bias of the heatmaps stays zero",
        "        if layer.use_bias:\n"
        '            self.assign(layer.bias, f"{name}.bias")\n',
        "",
        parameter="heatmaps.bias",
        at="outputs = outputs + self.bias",
    ),
    Change(
        "tf_style",
        "SAME where the convolutions have strides",
        "        inputs = zero_padding_2d(inputs, self.kernel_size // 2)\n",
        "        pad = self.kernel_size - self.strides\n"
        "        top, below = pad // 2, pad - pad // 2\n"
        "        inputs = nn.functional.pad(inputs, (0, 0, top, below, top, below))\n",
        at="patches = inputs.unfold(1,|patches = patches.unfold(2,"
        '|outputs = torch.einsum("nhwcij,ijco->nhwo"|outputs = self.bn(self.conv(',
    ),
    Change(
        "tf_style",
        "epsilon of Keras in the norms",
        "BN_EPSILON = 1e-5",
        "BN_EPSILON = 1e-3",
        at="inv = torch.rsqrt(variance + self.epsilon)"
        "|return inputs * inv + (self.beta|outputs = self.bn(self.conv(",
    ),
    Change(
        "tf_style",
        "ReLU also before the sum in the basic blocks",
        "        self.conv_b = ConvBN(filters, filters, 3)\n",
        "        self.conv_b = ConvBN(filters, filters, 3, activation=torch.relu)\n",
        at="return outputs if self.activation is None"
        "|residual = self.conv_b(self.conv_a(inputs))|return torch.relu(inputs + ",
    ),
    Change(
        "tf_style",
        "no ReLU between two steps down",
        "            activation = None if last else torch.relu\n"
        "            self.steps.append(ConvBN(inputs, filters, 3, 2, activation))\n",
        "            self.steps.append(ConvBN(inputs, filters, 3, 2))\n",
        at="return outputs if self.activation is None|inputs = step(inputs)",
        reference="row[0](xs[0])",
    ),
    Change(
        "tf_style",
        "maps that grow are tiled, not stretched",
        "    outputs = torch.repeat_interleave(inputs, size, dim=1)\n"
        "    return torch.repeat_interleave(outputs, size, dim=2)\n",
        "    return torch.tile(inputs, (1, size, size, 1))\n",
        at="return up_sampling_2d(",
    ),
    Change(
        "tf_style",
        "centers of the heatmaps are cut, not rounded",
        "torch.floor(keypoints / 4.0 + 0.5)",
        "torch.floor(keypoints / 4.0)",
    ),
    Change(
        "tf_style",
        "mirrored keypoints are one pixel to the right",
        "torch.stack([IMAGE_SHAPE[1] - 1.0 - x, y], dim=-1)",
        "torch.stack([IMAGE_SHAPE[1] - x, y], dim=-1)",
        reference="IMAGE_SIZE[1] - 1 - x",
    ),
    Change(
        "tf_style",
        "weights stand outside the square",
        "torch.square(weights[:, None, None, :] * (y_true - y_pred))",
        "weights[:, None, None, :] * torch.square(y_true - y_pred)",
    ),
    Change(
        "tf_style",
        "factor of the regularizer is the decay, not half of it",
        'adam.regularizers["kernel"] = 0.005',
        'adam.regularizers["kernel"] = 0.01',
        phase="optimizer",
    ),
    Change(
        "paddle_style",
        "1x1 filters are reshaped, not transposed",
        "filters = filters.flatten(1).t()",
        "filters = filters.reshape(filters.shape[1], -1)",
        parameter="|".join(f"{layer}.weight" for layer in _POINTWISE),
        at='out = torch.einsum("nihw,io->nohw"',
    ),
    Change(
        "paddle_style",
        "filters that go up stand with the nearest branch first",
        "pairs = [pair(i, j) for i in range(min(j, outputs))]",
        "pairs = [pair(i, j) for i in reversed(range(min(j, outputs)))]",
        parameter=_paddle(["st3_1.fuse.residual_up_2"]),
        at='parts = getattr(self, f"residual_up_{j}")(x).split('
        '|out = torch.einsum("nihw,io->nohw"',
    ),
    Change(
        "paddle_style",
        "norm of the shortcut is that of the third convolution",
        '("layer1.downsample.0", "layer1.downsample.1")',
        '("layer1.downsample.0", "layer1.bn3")',
        parameter=_paddle(["la1.conv_down"], weight=False),
        at="self.conv_down(x)",
    ),
    Change(
        "paddle_style",
        "all blocks of a branch read the first",
        'block = f"{theirs}.branches.{j}.{k}"',
        'block = f"{theirs}.branches.{j}.0"',
        parameter=_paddle(
            f"st2.branch_{j}_block_1.conv{i}" for j in (0, 1) for i in (1, 2)
        ),
        at="out = F.conv2d(",
    ),
    Change(
        "paddle_style",
        "what is added comes after the ReLU",
        "        if z is not None:\n"
        "            y = y + z\n"
        "        if act:\n"
        "            y = y.clamp(min=0)\n"
        "        ctx.save_for_backward(x_hat, scale, inv_std, y)\n"
        "        ctx.act, ctx.has_z = act, z is not None\n"
        "        return y\n",
        "        if act:\n"
        "            y = y.clamp(min=0)\n"
        "        ctx.save_for_backward(x_hat, scale, inv_std, y)\n"
        "        ctx.act, ctx.has_z = act, z is not None\n"
        "        return y if z is None else y + z\n",
        at="return FusedBNAddAct.apply(|return self.norm(out, z)"
        "|return self.conv2(self.conv1(x), x)|self.conv_down(x))",
    ),
    Change(
        "paddle_style",
        "variance of a sample in the norms",
        "        return mean, variance\n",
        "        return mean, unbiased\n",
        at="inv_std = (variance + epsilon) ** -0.5|x_hat = (x - mean.view("
        "|return FusedBNAddAct.apply(|return self.norm(out, z)",
    ),
    Change(
        "paddle_style",
        "bilinear where maps grow",
        "    n, c, h, w = x.shape\n"
        "    x = x.reshape(n, c, h, 1, w, 1).expand(n, c, h, ratio, w, ratio)\n"
        "    return x.reshape(n, c, h * ratio, w * ratio)\n",
        '    return F.interpolate(x, scale_factor=ratio, mode="bilinear")\n',
        at="messages[i] = upsample_nearest(",
    ),
    Change(
        "paddle_style",
        "what goes further down is taken from the front",
        "further = F.relu(y[:, CHANNELS[j + 1] :])",
        "further = F.relu(y[:, : CHANNELS[j]])",
        at='messages[j + 2] = getattr(self, f"residual_deep_{j}")',
    ),
    Change(
        "paddle_style",
        "mean over the branches, not their sum",
        "outs.append(F.relu(torch.stack(arrived).sum(0)))",
        "outs.append(F.relu(torch.stack(arrived).mean(0)))",
    ),
    Change(
        "paddle_style",
        "no two before the square of sigma",
        "/ (2 * sigma**2)",
        "/ sigma**2",
        at="target = patch[rows[",
    ),
    Change(
        "paddle_style",
        "occluded joints count as much as visible ones",
        "torch.tensor([0.0, 0.6, 1.0]).take(joints_vis)",
        "(joints_vis > 0).float()",
        at="target_weight = target_weight.masked_fill(",
    ),
    Change(
        "paddle_style",
        "gradient of a norm takes the deviation as a constant",
        "        centered = centered - x_hat * (d_scale / count).view(-1, 1, 1)\n",
        "",
        at="centered = dy - |dx = centered * (scale|return FusedBNAddAct.apply("
        "|return self.norm(out, z)|return dx, d_scale",
    ),
    Change(
        "paddle_style",
        "powers of the betas stay where they were",
        '        acc["beta1_pow"].mul_(self.beta1)\n'
        '        acc["beta2_pow"].mul_(self.beta2)\n',
        "",
        phase="optimizer",
        steps=2,
    ),
]
