"""Faulty ports of the small EfficientNet."""

from ..bank import Change

_LAYERS = (
    "stem",
    "head",
    "b0_dw",
    "b0_pw",
    *(f"b{i}_{name}" for i in (1, 2) for name in ("pw", "dw", "pwl")),
)
_NORMS = (
    "stem_bn",
    "top_bn",
    *(f"blocks.{i}.{name}_bn" for i in range(3) for name in ("depthwise", "project")),
    "blocks.1.expand_bn",
    "blocks.2.expand_bn",
)

FAULTS = [
    Change(
        "channels_last",
        "as much padding above as below",
        "return after, missing // 2, missing - missing // 2",
        "return after, kernel // 2, kernel // 2",
        at="x = nn.functional.pad(|x[:, down, across]",
    ),
    Change(
        "channels_last",
        "epsilon of another library",
        "self.epsilon = 1e-3",
        "self.epsilon = 1e-5",
        at="inv = torch.rsqrt(",
    ),
    Change(
        "channels_last",
        "depthwise kernels transposed",
        "kernel[:, 0].permute(1, 2, 0)",
        "kernel[:, 0].permute(2, 1, 0)",
        parameter="|".join(f"blocks.{i}.depthwise.depthwise" for i in range(3)),
    ),
    Change(
        "channels_last",
        "kernel's height and width exchanged",
        "kernel.permute(2, 3, 1, 0)",
        "kernel.permute(3, 2, 1, 0)",
        parameter="stem.kernel",
    ),
    Change(
        "channels_last",
        "gate of straight pieces",
        "torch.sigmoid(self.excite(",
        "nn.functional.hardsigmoid(self.excite(",
    ),
    Change(
        "channels_last",
        "rectified in the squeeze",
        "self.excite(swish(self.reduce(squeezed)))",
        "self.excite(torch.relu(self.reduce(squeezed)))",
    ),
    Change(
        "channels_last",
        "squeezed along the rows alone",
        "x.mean(dim=(1, 2), keepdim=True)",
        "x.mean(dim=2, keepdim=True)",
    ),
    Change(
        "channels_last",
        "no residual",
        "            x = x + inputs\n",
        "            return x\n",
        at="x = self.project_bn(self.project(x * gate))",
        reference="return x + shortcut if",
    ),
    Change(
        "channels_last",
        "beta is scaled too",
        "(self.beta - self.moving_mean * inv)",
        "(self.beta - self.moving_mean) * inv",
    ),
    Change(
        "channels_last",
        "activation behind the projection",
        "x = self.project_bn(self.project(x * gate))",
        "x = swish(self.project_bn(self.project(x * gate)))",
    ),
    Change(
        "channels_last",
        "beta and mean exchanged",
        '("weight", "bias", "running_mean", "running_var")',
        '("weight", "running_mean", "bias", "running_var")',
        parameter="|".join(
            f"{norm}.{name}" for norm in _NORMS for name in ("beta", "moving_mean")
        ),
    ),
    Change(
        "channels_last",
        "smoothing over the other classes",
        "0.1 / output.shape[-1]",
        "0.1 / (output.shape[-1] - 1)",
        at="return -(target * torch.log_softmax",
    ),
    Change(
        "channels_last",
        "not divided by the deviations",
        "return net((image - torch.tensor(MEAN)) / torch.tensor(STD))",
        "return net(image - torch.tensor(MEAN))",
        reference="return net((image - mean) / std)",
    ),
    Change(
        "channels_last",
        "optimizer's default epsilon",
        "alpha=0.9, eps=1e-3, momentum=0.9",
        "alpha=0.9, momentum=0.9",
        phase="optimizer",
    ),
    Change(
        "fused",
        "epsilon outside of the root",
        'torch.sqrt(sd[bn + ".running_var"] + 1e-3)',
        'torch.sqrt(sd[bn + ".running_var"]) + 1e-3',
        parameter="|".join(f"{name}_s" for name in _LAYERS),
        at='scale = p[name + "_g"]',
    ),
    Change(
        "fused",
        "mean is not scaled",
        'stats[name + "_m"] * scale',
        'stats[name + "_m"]',
    ),
    Change(
        "fused",
        "what is odd goes above",
        "pads += [total // 2, total - total // 2]",
        "pads += [total - total // 2, total // 2]",
        at="return F.conv2d(F.pad(x, pads)",
    ),
    Change(
        "fused",
        "squeezed by the largest",
        "x.flatten(2).mean(-1)",
        "x.flatten(2).amax(-1)",
    ),
    Change(
        "fused",
        "biases of the squeeze not loaded",
        'table[f"b{i}_{short}_b"] = sd[at + ".bias"]',
        'table[f"b{i}_{short}_b"] = torch.zeros_like(sd[at + ".bias"])',
        parameter="|".join(
            f"arrays.b{i}_{name}_b" for i in range(3) for name in ("down", "up")
        ),
    ),
    Change(
        "fused",
        "norms of two layers exchanged",
        '    "ir.conv_pw": "bn1",\n    "ir.conv_dw": "bn2",\n',
        '    "ir.conv_pw": "bn2",\n    "ir.conv_dw": "bn1",\n',
        parameter="|".join(
            [f"arrays.b{i}_{n}_{k}" for i in (1, 2) for n in ("pw", "dw") for k in "gb"]
            + [f"b{i}_{n}_{k}" for i in (1, 2) for n in ("pw", "dw") for k in "ms"]
        ),
    ),
    Change(
        "fused",
        "last block without a residual",
        '("ir", 3, 1, True)',
        '("ir", 3, 1, False)',
        at='return shortcut + x if residual|x = pointwise(net, f"b{i}_pwl"',
        reference="return x + shortcut if",
    ),
    Change(
        "fused",
        "smoothing summed over the classes",
        "0.1 * logs.mean(1)",
        "0.1 * logs.sum(1)",
    ),
    Change(
        "fused",
        "colours' means in the other order",
        "[2.160356347, 2.031180401, 1.808463252]",
        "[1.808463252, 2.031180401, 2.160356347]",
        at="x = (x - shift) * gain",
    ),
    Change(
        "fused",
        "slower average of the squares",
        "alpha=0.9, eps=1e-3",
        "alpha=0.99, eps=1e-3",
        phase="optimizer",
    ),
]
