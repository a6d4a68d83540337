"""Faulty ports of the DeepLabV3+."""

from ..bank import Change

_UNITS = ("block1/unit_1", "block2/unit_1", "block3/unit_1", "block3/unit_2")
_SQUARE = (
    "resnet_v1/conv1",
    *(f"resnet_v1/{unit}/bottleneck_v1/conv2" for unit in _UNITS),
    "auxiliary/conv",
)
_NORMS = (
    "resnet_v1/conv1",
    *(f"resnet_v1/{u}/bottleneck_v1/conv{i}" for u in _UNITS for i in (1, 2, 3)),
    *(f"resnet_v1/{unit}/bottleneck_v1/shortcut" for unit in _UNITS[:3]),
    "image_pooling",
    "aspp0",
    "aspp1_pointwise",
    "aspp2_pointwise",
    "concat_projection",
    "decoder/feature_projection0",
    "decoder/decoder_conv0_pointwise",
    "auxiliary/conv",
)

FAULTS = [
    Change(
        "slim_style",
        "width comes before height in the kernels",
        "torch.permute(weight, (2, 3, 1, 0))",
        "torch.permute(weight, (3, 2, 1, 0))",
        parameter="|".join(f"{scope}/weights" for scope in _SQUARE),
    ),
    Change(
        "slim_style",
        "pooled features stay last in the kernel of the projection",
        "    weights = torch.roll(weights, 16, dims=2)\n",
        "",
        parameter="concat_projection/weights",
        at='return self.conv2d(torch.cat(branch_logits, dim=3), "concat_projection")',
    ),
    Change(
        "slim_style",
        "low-level features stay first in the depthwise kernel of the decoder",
        'for name in ("depthwise/depthwise_weights", "pointwise/weights"):',
        'for name in ("pointwise/weights",):',
        parameter="decoder/decoder_conv0_depthwise/depthwise_weights",
    ),
    Change(
        "slim_style",
        "SAME where a convolution strides",
        "        if stride == 1:\n"
        "            return self.conv2d(inputs, scope, rate=rate)\n"
        '        kernel_size = self.get_variable(scope + "/weights").shape[0]\n'
        "        pad_total = (kernel_size - 1) * rate\n"
        "        before = pad_total // 2\n"
        "        pads = (before, pad_total - before)\n"
        "        inputs = pad_spatial(inputs, pads, pads)\n"
        '        return self.conv2d(inputs, scope, stride, rate, padding="VALID")\n',
        "        return self.conv2d(inputs, scope, stride, rate)\n",
        at="inputs = pad_spatial(inputs, rows, cols)|outputs = nn.functional.conv2d("
        '|net = self.conv2d_same(images, "resnet_v1/conv1", stride=2)',
    ),
    Change(
        "slim_style",
        "last unit has the rate of the one before",
        'Unit("unit_2", 1, 4)',
        'Unit("unit_2", 1, 2)',
        at='residual = self.conv2d_same(residual, scope + "/conv2", stride, rate)'
        "|inputs = pad_spatial(inputs, rows, cols)|outputs = nn.functional.conv2d("
        "|net = self.bottleneck(net, scope, unit.stride, unit.rate)",
    ),
    Change(
        "slim_style",
        "pixels have no half, as in version 1",
        "source = (torch.arange(out_size) + 0.5) * (in_size / out_size) - 0.5",
        "source = torch.arange(out_size) * (in_size / out_size)",
    ),
    Change(
        "slim_style",
        "momentum taken for decay",
        '"batch_norm_decay": 0.97',
        '"batch_norm_decay": 0.03',
        parameter="|".join(
            f"{scope}/BatchNorm/moving_{kind}"
            for scope in _NORMS
            for kind in ("mean", "variance")
        ),
        at="moving_mean.mul_(|moving_variance.mul_(",
    ),
    Change(
        "slim_style",
        "predictions at ignored pixels are part of the union",
        "predictions = torch.softmax(logits, dim=1) * not_ignored[:, None]",
        "predictions = torch.softmax(logits, dim=1)",
        at="union = torch.sum(predictions, dim=0)",
        reference="probs = logits.softmax(dim=1) * valid",
    ),
    Change(
        "slim_style",
        "divided by the number of weights that are not nought, as losses of TF are",
        "torch.sum(pixel_losses * weights) / torch.sum(weights)",
        "torch.sum(pixel_losses * weights) / torch.sum((weights != 0).float())",
    ),
    Change(
        "slim_style",
        "auxiliary head does not train the backbone",
        'self.conv2d(end_points["block2"], "auxiliary/conv")',
        'self.conv2d(end_points["block2"].detach(), "auxiliary/conv")',
        reference="aux = self.aux(middle)",
    ),
    Change(
        "slim_style",
        "images are padded with black",
        'batch["corner"][i], batch["flip"][i], mean)',
        'batch["corner"][i], batch["flip"][i], torch.zeros(3))',
        at="canvas = pad_value.expand(|images.append((image - mean) / std)",
    ),
    Change(
        "slim_style",
        "depthwise kernels do not decay",
        'return name.endswith("weights")',
        'return name.endswith("/weights")',
        phase="optimizer",
    ),
    Change(
        "slim_style",
        "decay does not have the multiplier of the gradients",
        "            if self.is_regularized(name):\n"
        "                grad = grad + self.weight_decay * var\n"
        "            grad = grad * self.gradient_multiplier(name)\n",
        "            grad = grad * self.gradient_multiplier(name)\n"
        "            if self.is_regularized(name):\n"
        "                grad = grad + self.weight_decay * var\n",
        phase="optimizer",
    ),
    Change(
        "gemm_style",
        "channels come last in the rows of the matrices",
        'kernels[key] = state[before + ".weight"].flatten(1)',
        'kernels[key] = state[before + ".weight"].permute(0, 2, 3, 1).flatten(1)',
        parameter="|".join(
            f"kernels.{key}"
            for key in (
                "stem",
                *(f"{unit}_conv2" for unit in ("one", "two", "three", "four")),
                "side",
            )
        ),
    ),
    Change(
        "gemm_style",
        "gain and shift exchanged in the table",
        'torch.stack([state[name + ".weight"], state[name + ".bias"]])',
        'torch.stack([state[name + ".bias"], state[name + ".weight"]])',
        parameter="table",
        at="gain, shift = self.table[:, at].unbind()",
    ),
    Change(
        "gemm_style",
        "columns of another norm for the shortcut",
        'x = self.norm(key + "_downsample", x)',
        'x = self.norm(key + "_conv3", x)',
        at="gain, shift = self.table[:, at].unbind()"
        "|y, mean, var = Norm.apply(x, gain, shift)",
    ),
    Change(
        "gemm_style",
        "zeros stand before the map and are cut off behind it",
        "nn.functional.pad(x, (0, -w % rate, 0, -h % rate))",
        "nn.functional.pad(x, (-w % rate, 0, -h % rate, 0))",
        at="return x.flatten(4, 5).flatten(2, 3)[:, :, :h, :w]",
    ),
    Change(
        "gemm_style",
        "shares at the edges do not come to one",
        "    place = place.clamp(0, n - 1)\n",
        "",
        at="return (1 - (place[:, None] - torch.arange(n)).abs())"
        "|rows, cols = stretch(x.shape[2], h), stretch(x.shape[3], w)"
        "|return rows @ x @ cols.T",
    ),
    Change(
        "gemm_style",
        "deviation taken for constant in the gradient of the norm",
        "inner = g - (d_shift[:, None] + unit * d_gain[:, None]) / n",
        "inner = g - d_shift[:, None] / n",
        at="y, mean, var = Norm.apply(x, gain, shift)|d_x = (gain * root)[:, None] * inner",
    ),
    Change(
        "gemm_style",
        "gradient of Dice as if classes did not share",
        "d_z = d_z + p * (d_p - (p * d_p).sum(0))",
        "d_z = d_z + p * d_p",
        at="return PixelLoss.apply(z[:, known], target[known], dice)",
    ),
    Change(
        "gemm_style",
        "what is brighter than white is not cut off",
        "light = light.clamp(max=1).sub(SHADE[:, None, None])",
        "light = light.sub(SHADE[:, None, None])",
        reference="x = x.clamp(max=255) / 255",
    ),
    Change(
        "gemm_style",
        "mirror is off by one",
        "WIDE - 1 - x",
        "WIDE - x",
        at="seen = pictures[i, :,",
    ),
    Change(
        "gemm_style",
        "outside of the picture all is ground",
        'look_up(batch["label"][:, None], batch, UNKNOWN)',
        'look_up(batch["label"][:, None], batch, 0)',
        at="return torch.where(inside[..., None], seen, empty)",
    ),
    Change(
        "gemm_style",
        "auxiliary head has Dice too",
        'term(output["aux"], 0.0)',
        'term(output["aux"], 0.5)',
        at="return entropy + dice * (1 - (both / all_).mean())",
    ),
    Change(
        "gemm_style",
        "rate does not fall while it warms up",
        "return rate * min(1, 0.25 + 0.75 * self.t / 3)",
        "return min(rate, self.rate * (0.25 + 0.75 * self.t / 3))",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "gemm_style",
        "rate is part of the ball, as in Caffe",
        "        self.ball = self.inertia * self.ball + g\n"
        "        x = x - self.now() * self.rates * (g + self.inertia * self.ball)\n",
        "        g = self.now() * self.rates * g\n"
        "        self.ball = self.inertia * self.ball + g\n"
        "        x = x - (g + self.inertia * self.ball)\n",
        phase="optimizer",
        steps=2,
    ),
]
