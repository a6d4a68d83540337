"""Faulty ports of the small ShuffleNet v2."""

from ..bank import Change

_UNITS = ("Stage2/unit_1", "Stage2/unit_2", "Stage2/unit_3", "Stage3/unit_1")
_POINTWISE = [
    f"{unit}/conv1x1_{which}/weights"
    for unit in (*_UNITS, "Stage3/unit_2")
    for which in ("before", "after")
]
_POINTWISE += [f"Stage{i}/unit_1/second_branch/conv1x1_after/weights" for i in (2, 3)]
_POINTWISE += ["Conv5/weights"]
_SECOND = [
    f"Stage{i}/unit_1/second_branch/depthwise/{name}"
    for i in (2, 3)
    for name in (
        "depthwise_weights",
        "BatchNorm/gamma",
        "BatchNorm/beta",
        "BatchNorm/moving_mean",
        "BatchNorm/moving_variance",
    )
]
_NORMS = [f"features.{i}.{name}.bn" for i in (0, 3) for name in ("pw", "dw", "linear")]
_NORMS += [f"features.{i}.branch_main.{j}.bn" for i in (1, 2, 4) for j in range(3)]
_NORMS += ["first_conv.bn", "conv_last.bn"]
_RUNNING = [f"{norm}.running_{kind}" for norm in _NORMS for kind in ("mean", "var")]


def _slim(names):
    """Names of variables and of their shadows."""
    shadows = [f"{name}/ExponentialMovingAverage" for name in names]
    return "|".join([*names, *shadows])


def _both(names):
    """Names in the network and in its average."""
    return "|".join(f"{root}.{name}" for root in ("net", "ema_net") for name in names)


FAULTS = [
    Change(
        "tf_slim_style",
        "kernels of one pixel are reshaped, not turned",
        "torch.transpose(torch.reshape(kernel, (outputs, inputs)), 0, 1)",
        "torch.reshape(kernel, (inputs, outputs))",
        parameter=_slim(_POINTWISE),
        at="net = torch.matmul(inputs, weights[0, 0])",
    ),
    Change(
        "tf_slim_style",
        "second branch gets the depthwise layer of the first",
        'depthwise(scope + "/depthwise", f"{block.lower()}.0.branch1", 0)',
        'depthwise(scope + "/depthwise", f"{block.lower()}.0.branch2", 3)',
        parameter=_slim(_SECOND),
    ),
    Change(
        "tf_slim_style",
        "epsilon of slim",
        '"epsilon": 1e-5',
        '"epsilon": 1e-3',
        at="factor = torch.rsqrt(variance + epsilon)",
    ),
    Change(
        "tf_slim_style",
        "pooling is padded at the end only, as SAME does",
        "    padded = fixed_padding(inputs, size)\n",
        "    padded = nn.functional.pad(inputs, (0, 0, 0, 1, 0, 1))\n",
        at="taps = torch.stack(list(windows(padded, size, stride))"
        "|return torch.amax(taps, dim=4)",
    ),
    Change(
        "tf_slim_style",
        "halves are put together without a shuffle",
        "z = torch.stack([x, y], dim=4)",
        "z = torch.stack([x, y], dim=3)",
        at="return torch.reshape(z, (n, h, w, 2 * depth))",
        reference="return x.transpose(1, 2).reshape(b, c, h, w)",
    ),
    Change(
        "tf_slim_style",
        "depthwise convolutions are rectified, as is the default",
        "stride, activation_fn=None):",
        "stride, activation_fn=torch.relu):",
        at="return net if activation_fn is None",
    ),
    Change(
        "tf_slim_style",
        "variance of the batch is a constant for the gradient",
        "factor = torch.rsqrt(variance + epsilon)",
        "factor = torch.rsqrt(variance.detach() + epsilon)",
        at="variance = torch.mean(torch.square(inputs - mean)"
        "|return inputs * factor + (",
    ),
    Change(
        "tf_slim_style",
        "smoothing as for two classes",
        "+ smoothing / NUM_CLASSES",
        "+ 0.5 * smoothing",
        at="losses = torch.sum(labels * (log_sum",
    ),
    Change(
        "tf_slim_style",
        "brighter than white is kept",
        "    image = torch.clamp(image, 0.0, 255.0)\n",
        "",
        at="return (image - torch.tensor(RGB_MEANS))",
        reference="return (bright.clamp(max=1) - MEAN) / STD",
    ),
    Change(
        "tf_slim_style",
        "plain momentum, not that of Nesterov",
        'PARAMS["momentum"], use_nesterov=True)',
        'PARAMS["momentum"])',
        phase="optimizer",
    ),
    Change(
        "tf_slim_style",
        "decay of the rate is linear, as is the default",
        '"power": 2.0,',
        '"power": 1.0,',
        phase="optimizer",
        steps=3,
    ),
    Change(
        "tf_slim_style",
        "depthwise kernels do not decay",
        'if name.endswith("weights"):',
        'if name.endswith("/weights"):',
        phase="optimizer",
    ),
    Change(
        "tf_slim_style",
        "average follows faster in the first steps",
        'ExponentialMovingAverage(PARAMS["moving_average_decay"])',
        'ExponentialMovingAverage(PARAMS["moving_average_decay"], self.global_step)',
        phase="optimizer",
    ),
    Change(
        "megengine_style",
        "first kernel still takes red first",
        'self.weight("conv1.0").flip(1)',
        'self.weight("conv1.0")',
        parameter=_both(["first_conv.conv.weight"]),
    ),
    Change(
        "megengine_style",
        "columns of the last kernel are for shuffled channels",
        "        kernel = kernel.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)\n",
        "",
        parameter=_both(["conv_last.conv.weight"]),
        at="x = self.conv_last(self.features(x))",
    ),
    Change(
        "megengine_style",
        "groups of the fused kernel exchanged",
        'torch.stack([self.weight(f"{proj}.2"), self.weight(f"{main}.5")])',
        'torch.stack([self.weight(f"{main}.5"), self.weight(f"{proj}.2")])',
        parameter=_both([f"features.{i}.linear.conv.weight" for i in (0, 3)]),
    ),
    Change(
        "megengine_style",
        "momentum taken for the share of what is new",
        "running_var, momentum=0.9, eps",
        "running_var, momentum=0.1, eps",
        parameter=_both(_RUNNING),
        at="self.running_mean *= self.momentum|self.running_mean += (1 -"
        "|self.running_var *= self.momentum|self.running_var += (1 -",
    ),
    Change(
        "megengine_style",
        "branch works on the half that is to be passed on",
        "x_proj, x = shuffled_halves(old_x)",
        "x, x_proj = shuffled_halves(old_x)",
        at="return torch.cat((x_proj, self.branch_main(x)), 1)",
    ),
    Change(
        "megengine_style",
        "no unit that goes down shuffles what it gets",
        "shuffle=stage > 2",
        "shuffle=False",
        at="both = torch.cat((x, self.pw(x)), 1)",
        reference="return channel_shuffle(out, 2)",
    ),
    Change(
        "megengine_style",
        "gradient of the norm without what comes through the variance",
        "(grad - grad.mean(axes, keepdim=True) - x_hat * along)",
        "(grad - grad.mean(axes, keepdim=True))",
        at="x_hat, mean, var = NormalizeBatch.apply(",
    ),
    Change(
        "megengine_style",
        "share of the label is not made smaller",
        "scaled = (1 - label_smooth) * primary_term",
        "scaled = primary_term",
    ),
    Change(
        "megengine_style",
        "means of the colours in the other order",
        "BGR_MEAN = [103.530, 116.280, 123.675]",
        "BGR_MEAN = [123.675, 116.280, 103.530]",
        at="image = (image - torch.tensor(BGR_MEAN))",
    ),
    Change(
        "megengine_style",
        "norms decay, as their weights have four axes",
        'is_kernel = name.endswith("conv.weight") or name == "classifier.weight"',
        'is_kernel = name.endswith("weight") and param.dim() > 1',
        phase="optimizer",
    ),
    Change(
        "megengine_style",
        "warm-up begins at zero",
        "return self.base_lr * (self.cur_step + 1) / warm",
        "return self.base_lr * self.cur_step / warm",
        phase="optimizer",
    ),
    Change(
        "megengine_style",
        "velocity fades once in the step, as without a look ahead",
        "param -= lr * m * m * v",
        "param -= lr * m * v",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "megengine_style",
        "running values are not averaged",
        "in self.ema_net.state_dict().items():",
        "in self.ema_net.named_parameters():",
        parameter="|".join(f"ema_net.{name}" for name in _RUNNING),
        at="value.copy_(value * decay",
        phase="optimizer",
    ),
]
