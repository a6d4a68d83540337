"""Faulty ports of the ArcFace."""

from ..bank import Change

_MX_UNITS = tuple(f"stage2_unit{i}" for i in (1, 2)) + tuple(
    f"stage3_unit{i}" for i in (1, 2, 3)
)
_MX_RELUS = (
    "stem",
    "stage2_unit1_proj",
    "stage3_unit1_proj",
    *(f"{unit}_{part}" for unit in _MX_UNITS for part in ("b", "d")),
    "conv_last",
)
_PD_UNIT = ("conv_pw", "conv_dw", "conv_linear")
_PD_NORMS = (
    "_conv1.bn",
    *(
        f"_block_list.{i}.{part}.bn"
        for i in (0, 2)
        for part in (
            "conv_dw_1",
            "conv_linear_1",
            "conv_pw_2",
            "conv_dw_2",
            "conv_linear_2",
        )
    ),
    *(f"_block_list.{i}.{part}.bn" for i in (1, 3, 4) for part in _PD_UNIT),
    "_last_conv.bn",
    "_global.bn",
    "_bn",
)

FAULTS = [
    Change(
        "mxnet_style",
        "slopes stay at their first value",
        'arg_params[name + "_relu_gamma"] = slope',
        'arg_params[name + "_relu_gamma"] = torch.full_like(slope, 0.25)',
        parameter="|".join(f"{name}_relu_gamma" for name in _MX_RELUS),
    ),
    Change(
        "mxnet_style",
        "last unit reads the weights of the one before",
        'branch = f"units.{index}.branch2"',
        'branch = f"units.{min(index, 3)}.branch2"',
        parameter="|".join(
            f"stage3_unit3_{name}"
            for part in ("b", "c_dw", "d")
            for name in (
                f"{part}_conv2d_weight",
                f"{part}_batchnorm_gamma",
                f"{part}_batchnorm_beta",
                f"{part}_batchnorm_moving_mean",
                f"{part}_batchnorm_moving_var",
                f"{part}_relu_gamma",
            )
            if name != "c_dw_relu_gamma"
        ),
    ),
    Change(
        "mxnet_style",
        "eps of the norms is the default of the symbol",
        '"bn_eps": 1e-5',
        '"bn_eps": 1e-3',
        at="inv_std = torch.rsqrt(var + eps)|scale = torch.rsqrt(moving_var + eps)"
        '|eps=config["bn_eps"]|BatchNorm.apply(',
    ),
    Change(
        "mxnet_style",
        "gammas are fixed, as is the default of the symbol",
        'eps=config["bn_eps"], fix_gamma=False):',
        'eps=config["bn_eps"], fix_gamma=True):',
        at="gamma = torch.ones_like(gamma)|return data_hat * gamma + beta"
        "|BatchNorm.apply(|return (data - moving_mean) * scale + beta",
    ),
    Change(
        "mxnet_style",
        "no gradient through the variance",
        "centred = out_grad - beta_grad / count - data_hat * gamma_grad / count",
        "centred = out_grad - beta_grad / count",
        at="data_grad = gamma * inv_std * centred|BatchNorm.apply(",
    ),
    Change(
        "mxnet_style",
        "shuffle is turned back, as for groups of two",
        "data = data.unflatten(-1, (2, num_filter // 2))",
        "data = data.unflatten(-1, (num_filter // 2, 2))",
        at="return data.swapaxes(-2, -1)",
    ),
    Change(
        "mxnet_style",
        "margin is the easy one",
        '"easy_margin": False',
        '"easy_margin": True',
        at="wide = zy >|slow = zy if|new_zy = torch.where(|return s * (cos_t"
        "|ArcMarginOp.apply(",
        reference="phi = torch.where(cosine > self.threshold",
    ),
    Change(
        "mxnet_style",
        "slope of the wider angle also beyond half a turn",
        "        slope = torch.where(wide, slope, torch.ones_like(slope))\n",
        "",
        at="slope = math.cos(m)|in_grad = ctx.s * out_grad|ArcMarginOp.apply(",
    ),
    Change(
        "mxnet_style",
        "gradient is divided by the batch, not by the valid labels",
        "grad = grad * (ctx.grad_scale / valid.sum())",
        "grad = grad * (ctx.grad_scale / len(valid))",
        at="return out_grad * grad, None|SoftmaxOutput.apply(",
    ),
    Change(
        "mxnet_style",
        "rows and columns of the corner are taken for each other",
        "y0, x0 = corner",
        "x0, y0 = corner",
        at="data = image[y0 : y0 + shape[1]",
    ),
    Change(
        "mxnet_style",
        "momentum keeps the old rate where the rate changes",
        "mom.mul_(self.momentum * correction)",
        "mom.mul_(self.momentum)",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "mxnet_style",
        "gammas decay too, as is the default",
        'if not name.endswith("_weight"):',
        'if not name.endswith(("_weight", "_gamma")):',
        phase="optimizer",
        steps=2,
    ),
    Change(
        "mxnet_style",
        "steps of the warm-up are not taken from those of the fall",
        "self.max_update, self.max_steps = max_update, max_update - warmup_steps",
        "self.max_update, self.max_steps = max_update, max_update",
        phase="optimizer",
        steps=3,
    ),
    Change(
        "paddle_style",
        "weights of the embedding reshaped, not turned",
        'params["fc"] = state["backbone.fc.weight"].t().contiguous()',
        'params["fc"] = state["backbone.fc.weight"].reshape(64, 32)',
        parameter="backbone._fc",
        at="y = torch.matmul(torch.flatten(y, 1), self._fc)",
    ),
    Change(
        "paddle_style",
        "first kernel stays RGB",
        '    first["conv"] = first["conv"].flip(1)\n',
        "",
        parameter="backbone._conv1.conv.weight",
        at='bgr = torch.flip(batch["image"], [-1])',
    ),
    Change(
        "paddle_style",
        "momentum of the norms is that of torch",
        "momentum=0.8, epsilon=1e-5",
        "momentum=0.2, epsilon=1e-5",
        parameter="|".join(
            f"backbone.{norm}.{kind}"
            for norm in _PD_NORMS
            for kind in ("_mean", "_variance")
        ),
        at="self._mean.mul_(keep)|self._variance.mul_(keep)|keep = self._momentum",
        steps=2,
    ),
    Change(
        "paddle_style",
        "mirrored faces by the statistics of the batch",
        "stable = self.backbone(reversed_x, training=False)",
        "stable = self.backbone(reversed_x, training=True)",
        at="variance, mean = torch.var_mean(|self._mean.mul_(keep)"
        "|self._variance.mul_(keep)|mean, variance = self._mean, self._variance",
        reference="self.backbone.eval()",
    ),
    Change(
        "paddle_style",
        "channels are not shuffled",
        "return torch.stack([x1, x2], dim=2).flatten(1, 2)",
        "return torch.cat([x1, x2], dim=1)",
        reference="return x.reshape(b, c, h, w)",
    ),
    Change(
        "paddle_style",
        "no activation in the first branch of stride 2",
        'self.conv_linear_1 = ConvBNLayer(params["linear_1"])',
        'self.conv_linear_1 = ConvBNLayer(params["linear_1"], act=False)',
        at="x1 = self.conv_linear_1(|return x if self.act is None"
        "|return x * factor.reshape(shape)",
        reference="self.branch1(x)",
    ),
    Change(
        "paddle_style",
        "weights normalised over the classes",
        "norms = torch.sqrt(torch.sum(self.weight**2, dim=0, keepdim=True))",
        "norms = torch.sqrt(torch.sum(self.weight**2, dim=1, keepdim=True))",
        at="cos = torch.matmul(inputs, self.weight / norms)",
    ),
    Change(
        "paddle_style",
        "cosine rises again where angle and margin pass half a turn",
        "phi = torch.where(theta < math.pi, torch.cos(theta) - margin3, lowered)",
        "phi = torch.cos(theta) - margin3",
        at="logit = torch.index_put(cos",
        reference="phi = torch.where(cosine > self.threshold",
    ),
    Change(
        "paddle_style",
        "length of the embedding is taken as a constant",
        "inputs / torch.sqrt(torch.sum(inputs**2, dim=1, keepdim=True))",
        "inputs / torch.sqrt(torch.sum(inputs**2, dim=1, keepdim=True)).detach()",
        reference="cosine = F.linear(F.normalize(embedding)",
    ),
    Change(
        "paddle_style",
        "mean of the loss over all faces, known or not",
        "return torch.sum(nll * valid) / torch.sum(valid)",
        "return torch.mean(nll * valid)",
        reference="entropy = F.cross_entropy(",
    ),
    Change(
        "paddle_style",
        "pictures are mirrored before the crop",
        "turned = corner[:, 1:] + width - 1 - torch.arange(width)",
        "turned = images.shape[2] - 1 - corner[:, 1:] - torch.arange(width)",
        at="columns = torch.where(flip[:, None]|return images[number, rows",
    ),
    Change(
        "paddle_style",
        "classes' weights have no decay of their own",
        '    own[net.head.weight] = L2Decay(Optimizer["head_coeff"])\n',
        "",
        phase="optimizer",
    ),
    Change(
        "paddle_style",
        "warm-up begins at a rate of zero",
        "start_lr=rate / warmup",
        "start_lr=0.0",
        phase="optimizer",
    ),
]
