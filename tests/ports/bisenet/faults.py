"""Faulty ports of the BiSeNet."""

from ..bank import Change

_TF_STAGES = "context_path.encoder.block"
_TF_UNITS = ("0.0", "1.0", "1.1", "2.0")
_TF_DEPTHWISE = "|".join(
    [f"{_TF_STAGES}.{i}.separable.depthwise.depthwise_kernel" for i in _TF_UNITS]
    + [
        f"{_TF_STAGES}.{i}.projection.depthwise.depthwise_kernel"
        for i in _TF_UNITS
        if i.endswith(".0")
    ]
)
_MM_HEAD = (
    "convs.0.conv.weight",
    "convs.0.norm.weight",
    "convs.0.norm.bias",
    "conv_seg.weight",
    "conv_seg.bias",
)

FAULTS = [
    Change(
        "tf_style",
        "width comes before height in the depthwise kernels",
        "return torch.permute(array, (2, 3, 0, 1))",
        "return torch.permute(array, (3, 2, 0, 1))",
        parameter=_TF_DEPTHWISE,
        at='return torch.einsum("bhwckl,klc->bhwc", windows, taps)',
    ),
    Change(
        "tf_style",
        "both attentions read the kernel of the last",
        "        values[name] = variable_value(name, array).contiguous()\n"
        "    net.load_state_dict(values)\n",
        "        values[name] = variable_value(name, array).contiguous()\n"
        '    shared = values["context_path.refine_32.attention.kernel"]\n'
        '    values["context_path.refine_16.attention.kernel"] = shared\n'
        "    net.load_state_dict(values)\n",
        parameter="context_path.refine_16.attention.kernel",
    ),
    Change(
        "tf_style",
        "kernels of dense layers are reshaped, not transposed",
        "        return array[:, :, 0, 0].T\n",
        "        return array.reshape(array.shape[1], array.shape[0])\n",
        parameter="feature_fusion.squeeze.kernel|feature_fusion.excitation.kernel"
        "|context_path.refine_16.attention.kernel"
        "|context_path.refine_32.attention.kernel",
        at="outputs = torch.matmul(inputs, self.kernel)",
    ),
    Change(
        "tf_style",
        "the two smoothing convolutions are exchanged",
        '(r"^context\\.conv_head(\\d+)\\.", r"context_path.smooth_\\1."),',
        '(r"^context\\.conv_head16\\.", "context_path.smooth_32."),\n'
        '    (r"^context\\.conv_head32\\.", "context_path.smooth_16."),',
        parameter="|".join(
            f"context_path.smooth_{n}.{part}"
            for n in (16, 32)
            for part in ("conv2d.kernel", "batch_norm.gamma", "batch_norm.beta")
        ),
        at="context16 = self.smooth_32(|context8 = self.smooth_16(",
    ),
    Change(
        "tf_style",
        "SAME where convolutions have strides",
        "    if strides > 1:\n"
        "        pads = fixed_pads(kernel_size)\n"
        "        return pad_hw(inputs, pads, pads)\n",
        "",
        at="padded = pad_inputs(inputs, self.kernel_size, self.strides)"
        "|nchw = nn.functional.conv2d(nchw, oihw"
        "|windows = extract_windows(pad_inputs("
        "|rows = same_pads(inputs.shape[1]|return pad_hw(inputs, rows, same_pads("
        "|return nn.functional.pad(inputs, (0, 0, *columns, *rows))",
    ),
    Change(
        "tf_style",
        "epsilon of Keras in the norms",
        "BATCH_NORM_EPSILON = 1e-5",
        "BATCH_NORM_EPSILON = 1e-3",
        at="inv = torch.rsqrt(variance + self.epsilon) * self.gamma"
        "|return (inputs - mean) * inv + self.beta",
    ),
    Change(
        "tf_style",
        "swish, not the hard one",
        "return x * torch.clamp(x + 3.0, 0.0, 6.0) / 6.0",
        "return x * torch.sigmoid(x)",
        at="net = hard_swish(self.depthwise_norm(",
    ),
    Change(
        "tf_style",
        "groups come last where channels are shuffled",
        "grouped = inputs.unflatten(-1, (groups, channels // groups))",
        "grouped = inputs.unflatten(-1, (channels // groups, groups))",
        at="return torch.transpose(grouped, -1, -2).flatten(-2)"
        "|return shuffle(torch.cat([self.projection(inputs), residual], dim=-1))"
        "|return shuffle(torch.cat([identity, residual], dim=-1))",
        reference="x = x.view(b, groups, c // groups, h, w).transpose(1, 2)",
    ),
    Change(
        "tf_style",
        "edges are resized without aligned corners",
        "self.logits_edges = LogitsLayer(32, 16, 1, align_corners=True)",
        "self.logits_edges = LogitsLayer(32, 16, 1)",
        at="return resize_bilinear(logits, size, self.align_corners)"
        '|"detail": self.logits_edges(spatial, size)'
        "|source = (torch.arange(out_size) + 0.5) * (in_size / out_size) - 0.5"
        "|rows = images[:, top] + |return rows[:, :, left] + ",
    ),
    Change(
        "tf_style",
        "pixels go from -1 to 1, as for another encoder",
        "    images = (images - torch.tensor(CHANNEL_MEANS)) / torch.tensor(CHANNEL_STDS)\n",
        "    images = images * 2.0 - 1.0\n",
    ),
    Change(
        "tf_style",
        "centre of the Laplacian weighs 9",
        "return 9.0 * maps - box_sum(maps)",
        "return 10.0 * maps - box_sum(maps)",
        at="response = laplacian(torch.where(",
    ),
    Change(
        "tf_style",
        "number of hard pixels is taken for the batch, not for each picture",
        "num_kept = top_k * batch_size",
        "num_kept = top_k",
        at="kth_loss = torch.topk(pixel_losses.detach(), num_kept)[0][-1]"
        "|if torch.sum(is_hard) < num_kept:|is_hard = pixel_losses >= kth_loss"
        "|return torch.sum(pixel_losses * is_hard) / torch.sum(is_hard)",
        reference="kept = min_kept * len(label)",
    ),
    Change(
        "tf_style",
        "velocities hold the rate of their own step",
        "            velocity.mul_(self.momentum).add_(gradient)\n"
        "            lookahead = self.momentum * velocity + gradient\n"
        "            variable.sub_(rate * multiplier * lookahead)\n",
        "            gradient = gradient * rate * multiplier\n"
        "            velocity.mul_(self.momentum).add_(gradient)\n"
        "            lookahead = self.momentum * velocity + gradient\n"
        "            variable.sub_(lookahead)\n",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "mmseg_style",
        "auxiliary heads read each other's weights",
        '    "head_aux8.": "auxiliary_head.0.",\n    "head_aux16.": "auxiliary_head.1.",\n',
        '    "head_aux8.": "auxiliary_head.1.",\n    "head_aux16.": "auxiliary_head.0.",\n',
        parameter="|".join(
            f"auxiliary_head.{i}.{part}" for i in (0, 1) for part in _MM_HEAD
        ),
    ),
    Change(
        "mmseg_style",
        "gate keeps its first values, as its keys have another name",
        '    "fusion.excite.": "backbone.ffm.fc2.",\n',
        '    "fusion.excite.": "backbone.ffm.conv_atten.1.",\n',
        parameter="backbone.ffm.fc2.weight|backbone.ffm.fc2.bias",
        at="x_atten = self.fc2(F.relu(self.fc1(x_atten))).sigmoid()",
    ),
    Change(
        "mmseg_style",
        "halves of the fusing kernel are exchanged",
        "proj_sp, proj_cp = value.flatten(1).chunk(2, dim=1)",
        "proj_cp, proj_sp = value.flatten(1).chunk(2, dim=1)",
        parameter="backbone.ffm.proj_sp.weight|backbone.ffm.proj_cp.weight",
        at="x_fuse = self.proj_sp(x_sp) + self.proj_cp(x_cp)",
    ),
    Change(
        "mmseg_style",
        "norms of the attentions read scale as bias and bias as scale",
        '    "bn_atten.": "atten_conv_layer.1.norm.",\n',
        '    "bn_atten.weight": "atten_conv_layer.1.norm.bias",\n'
        '    "bn_atten.bias": "atten_conv_layer.1.norm.weight",\n'
        '    "bn_atten.": "atten_conv_layer.1.norm.",\n',
        parameter="|".join(
            f"backbone.context_path.arm{n}.atten_conv_layer.1.norm.{part}"
            for n in (16, 32)
            for part in ("weight", "bias")
        ),
        at="return x * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)",
    ),
    Change(
        "mmseg_style",
        "attention has the default activation before its sigmoid",
        "ConvModule(out_channel, out_channel, 1, act_cfg=None),",
        "ConvModule(out_channel, out_channel, 1),",
        at="x = self.activate(x)|return x * self.atten_conv_layer(x)",
    ),
    Change(
        "mmseg_style",
        "context is resized in the default mode",
        'x_16_up = resize(x_16_sum, x_8.shape[2:], "bilinear", self.align_corners)',
        "x_16_up = resize(x_16_sum, x_8.shape[2:])",
        at="return F.interpolate(x, tuple(size), mode=mode",
    ),
    Change(
        "mmseg_style",
        "hard sigmoid of another version",
        "def __init__(self, bias=3.0, divisor=6.0, min_value=0.0, max_value=1.0):",
        "def __init__(self, bias=1.0, divisor=2.0, min_value=0.0, max_value=1.0):",
        at="x = (x + self.bias) / self.divisor"
        "|return x.clamp(self.min_value, self.max_value)|return x * self.gate(x)",
    ),
    Change(
        "mmseg_style",
        "the first half goes through the branch",
        "            pair = (x1, self.branch2(x2))\n",
        "            pair = (self.branch2(x1), x2)\n",
        at="return torch.stack(pair, dim=2).flatten(1, 2)|x1, x2 = x.chunk(2, dim=1)",
    ),
    Change(
        "mmseg_style",
        "deviations of the channels are in the order of BGR",
        "std=[51.0, 68.85, 58.65]",
        "std=[58.65, 68.85, 51.0]",
        at='std = torch.tensor(self.data_preprocessor["std"])'
        "|return (image.movedim(-1, 1).float() - mean) / std",
    ),
    Change(
        "mmseg_style",
        "shares of the scales go from the coarsest to the finest",
        "fuse_kernel=(6, 3, 1)",
        "fuse_kernel=(1, 3, 6)",
        at="self.fuse_kernel = torch.tensor(fuse_kernel)"
        "|return F.conv2d(torch.cat(pyramid, dim=1), self.fuse_kernel).squeeze(1)",
        reference="target = target + share * F.interpolate(",
    ),
    Change(
        "mmseg_style",
        "divided by all pixels with a label, not by those that were kept",
        "avg_factor = seg_weight.sum()",
        "avg_factor = (label != ignore_index).sum()",
        at="return self.loss_weight * weight_reduce_loss(loss_ce"
        "|return loss.mean() if avg_factor is None else loss.sum() / avg_factor",
        reference="return hard.mean()",
    ),
    Change(
        "mmseg_style",
        "fast rate for all that has head in its name",
        '            "decode_head": dict(lr_mult=10.0),\n'
        '            "auxiliary_head": dict(lr_mult=10.0),\n',
        '            "head": dict(lr_mult=10.0),\n',
        phase="optimizer",
        steps=2,
    ),
    Change(
        "mmseg_style",
        "no Nesterov",
        "momentum=0.9, nesterov=True",
        "momentum=0.9",
        phase="optimizer",
        steps=2,
    ),
]
