"""Faulty ports of the detector with focal loss."""

from ..bank import Change

_TRAINED_NORMS = (
    *(f"res_layers.{i}.{b}" for i in (1, 2, 3) for b in ("branch2a", "branch2b")),
    *(f"res_layers.{i}.short" for i in (1, 2, 3)),
)

FAULTS = [
    Change(
        "tf_style",
        "square kernels of the towers have out before in",
        '            conv(f"{name}.conv_{i}", f"{key}.conv.{2 * i}")\n',
        '            conv(f"{name}.conv_{i}", f"{key}.conv.{2 * i}")\n'
        '            kernel = state[f"{key}.conv.{2 * i}.weight"]\n'
        '            variables[f"{name}.conv_{i}.kernel"] = kernel.permute(2, 3, 0, 1)\n',
        parameter="|".join(
            f"{net}.conv_{i}.kernel" for net in ("class_net", "box_net") for i in (0, 1)
        ),
        at='y = torch.einsum("bhwcij,ijcd->bhwd"',
    ),
    Change(
        "tf_style",
        "bias of the class predictor stays at the prior it starts from",
        "    return variables\n",
        '    del variables["class_net.predict.bias"]\n    return variables\n',
        parameter="class_net.predict.bias",
        at="return y if self.bias is None else y + self.bias",
    ),
    Change(
        "tf_style",
        "what lies beyond the picture is normalized black, not zero",
        "    return image * mask\n",
        "    return image\n",
        at="image = image / torch.tensor(",
        reference=".masked_fill(~inside, 0.0))",
    ),
    Change(
        "tf_style",
        "SAME padding where a step is two",
        "    pad_total = kernel_size - 1\n",
        "    out = -(-size // strides)\n"
        "    pad_total = max((out - 1) * strides + kernel_size - size, 0)\n",
        at="pad_beg = pad_total // 2|return pad_beg, pad_total - pad_beg"
        "|x = nn.functional.pad(x, (0, 0, *cols, *rows))",
    ),
    Change(
        "tf_style",
        "frozen norms take statistics of the batch",
        "if self.training and self.trainable:",
        "if self.training:",
        at="mean = torch.mean(x, dim=(0, 1, 2))|variance = torch.mean(torch.square("
        "|variable.sub_((variable - value)",
    ),
    Change(
        "tf_style",
        "smoothed maps go down the pyramid",
        "        feats = {4: feats_lateral[4]}\n"
        "        for level in (3, 2):\n"
        "            top_down = nearest_upsampling(feats[level + 1], feats_lateral[level])\n"
        "            feats[level] = top_down + feats_lateral[level]\n"
        "        outputs = {}\n"
        "        for level in (2, 3, 4):\n"
        '            outputs[level] = getattr(self, f"post_hoc_d{level}")(feats[level])\n',
        "        outputs = {4: self.post_hoc_d4(feats_lateral[4])}\n"
        "        for level in (3, 2):\n"
        "            top_down = nearest_upsampling(outputs[level + 1], feats_lateral[level])\n"
        "            feats = top_down + feats_lateral[level]\n"
        '            outputs[level] = getattr(self, f"post_hoc_d{level}")(feats)\n',
        at="data = torch.repeat_interleave(data, 2",
    ),
    Change(
        "tf_style",
        "anchors lie on the corners of the cells",
        "        yc = torch.arange(stride / 2, image_height + stride / 2, stride)\n"
        "        xc = torch.arange(stride / 2, image_width + stride / 2, stride)\n",
        "        yc = torch.arange(0, image_height, stride)\n"
        "        xc = torch.arange(0, image_width, stride)\n",
        at="centers = torch.cartesian_prod(yc, xc)"
        "|anchors.append(torch.cat([centers, sizes]",
    ),
    Change(
        "tf_style",
        "anchors that fit a box by half are background too",
        "    matches = torch.where(between, -2, matches)\n",
        "    matches = torch.where(between, -1, matches)\n",
        reference="matched[best < FG_IOU] = IGNORED",
    ),
    Change(
        "tf_style",
        "modulator carries no gradient",
        "    each = modulator * cross_entropy\n",
        "    each = modulator.detach() * cross_entropy\n",
        at="modulator = torch.exp(|gamma * targets * neg_logits",
    ),
    Change(
        "tf_style",
        "one is added to the number of positives",
        "num_positives = torch.clamp(torch.sum(box_weights), min=1.0)",
        "num_positives = torch.sum(box_weights) + 1.0",
        at="return torch.sum(each * weights[..., None]) / normalizer"
        "|return each / normalizer",
    ),
    Change(
        "tf_style",
        "Huber loss is not divided by its delta",
        "each = huber_loss(box_targets, box_outputs, weights, delta) / delta",
        "each = huber_loss(box_targets, box_outputs, weights, delta)",
        at="each = 0.5 * torch.square(quadratic)",
    ),
    Change(
        "tf_style",
        "velocities keep the old rate where the rate changes",
        "velocity.mul_(self.momentum * lr / last)",
        "velocity.mul_(self.momentum)",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "tf_style",
        "gammas decay too",
        '"decayed": r".*kernel$"',
        '"decayed": r".*(kernel|gamma)$"',
        phase="optimizer",
        steps=3,
    ),
    Change(
        "paddle_style",
        "kernels behind the laterals come from the coarsest first",
        'copy(f"neck.fpn_convs.{i}", f"fpn.layer.{i}")',
        'copy(f"neck.fpn_convs.{i}", f"fpn.layer.{2 - i}")',
        parameter="|".join(
            f"neck.fpn_convs.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")
        ),
        at="outs = [conv(x) for conv, x in zip(self.fpn_convs"
        "|return F.conv2d(x, self.weight",
    ),
    Change(
        "paddle_style",
        "momentum of the norms is that of torch",
        "use_global_stats=False, momentum=0.9,",
        "use_global_stats=False, momentum=0.1,",
        parameter="|".join(
            f"backbone.{norm}.norm.{kind}"
            for norm in _TRAINED_NORMS
            for kind in ("_mean", "_variance")
        ),
        at="keep = self._momentum|self._mean.mul_(keep)|self._variance.mul_(keep)",
        steps=2,
    ),
    Change(
        "paddle_style",
        "neighbours beyond the end of a row are those of the next row",
        "there = (y >= 0) & (y < h) & (x >= 0) & (x < w)",
        "cell = y * w + x\n                there = (cell >= 0) & (cell < h * w)",
        at="taps.append(torch.where(there|x = F.pad(x, (0, 1))[:, :, table]",
    ),
    Change(
        "paddle_style",
        "functions of a tower all have the last number",
        "tower.append(partial(self.conv, kind, i, table))",
        "tower.append(lambda x: self.conv(kind, i, table, x))",
        at="weight, bias = getattr(self|x = function(x)"
        "|return torch.matmul(weight, x.flatten(1, 2))",
    ),
    Change(
        "paddle_style",
        "no gradient through the upsampled maps",
        "laterals[lvl - 1] = laterals[lvl - 1] + upsample",
        "laterals[lvl - 1] = laterals[lvl - 1] + upsample.detach()",
        at="upsample = upsample_nearest(|return x[:, :, rows]",
    ),
    Change(
        "paddle_style",
        "extra level is made of the map that isn't smoothed",
        "outs.append(self.extra_conv(outs[-1]))",
        "outs.append(self.extra_conv(laterals[-1]))",
    ),
    Change(
        "paddle_style",
        "anchors beyond the picture count as background",
        "return matched, labels.masked_fill(~valid, -1)",
        "return matched, labels",
        at="loss_cls = sigmoid_focal_loss(cls_logits, one_hot)",
        reference="matched[~inside] = IGNORED",
    ),
    Change(
        "paddle_style",
        "background is class 0 and the others are not moved up",
        '    background = HeadConfig["num_classes"]\n'
        "    tgt_class = torch.where(positive, tgt_class, background)\n"
        "    one_hot = F.one_hot(tgt_class, background + 1)[..., :background].float()\n",
        '    num_classes = HeadConfig["num_classes"]\n'
        "    tgt_class = torch.where(positive, tgt_class, 0)\n"
        "    one_hot = F.one_hot(tgt_class, num_classes + 1)[..., 1:].float()\n",
    ),
    Change(
        "paddle_style",
        "alpha weighs negatives, the rest positives",
        "    positive = -alpha * (1.0 - torch.sigmoid(logit)) ** gamma * log_p\n"
        "    negative = -(1.0 - alpha) * torch.sigmoid(logit) ** gamma * log_not_p\n",
        "    positive = -(1.0 - alpha) * (1.0 - torch.sigmoid(logit)) ** gamma * log_p\n"
        "    negative = -alpha * torch.sigmoid(logit) ** gamma * log_not_p\n",
        at="return label * positive + (1.0 - label) * negative",
    ),
    Change(
        "paddle_style",
        "straight part of the smooth L1 loss lies half too low",
        "diff - 0.5 * beta)",
        "diff - 0.5)",
    ),
    Change(
        "paddle_style",
        "sides of boxes and anchors count both end pixels",
        "src_boxes[..., 2] - src_boxes[..., 0]\n"
        "    src_h = src_boxes[..., 3] - src_boxes[..., 1]\n"
        "    src_ctr_x = src_boxes[..., 0] + 0.5 * src_w\n"
        "    src_ctr_y = src_boxes[..., 1] + 0.5 * src_h\n"
        "    tgt_w = tgt_boxes[..., 2] - tgt_boxes[..., 0]\n"
        "    tgt_h = tgt_boxes[..., 3] - tgt_boxes[..., 1]\n",
        "src_boxes[..., 2] - src_boxes[..., 0] + 1\n"
        "    src_h = src_boxes[..., 3] - src_boxes[..., 1] + 1\n"
        "    src_ctr_x = src_boxes[..., 0] + 0.5 * src_w\n"
        "    src_ctr_y = src_boxes[..., 1] + 0.5 * src_h\n"
        "    tgt_w = tgt_boxes[..., 2] - tgt_boxes[..., 0] + 1\n"
        "    tgt_h = tgt_boxes[..., 3] - tgt_boxes[..., 1] + 1\n",
        at="dx = wx *|dy = wy *|dw = ww *|dh = wh *",
    ),
    Change(
        "paddle_style",
        "parameters of the head are not handed to the optimizer",
        "        if not param.requires_grad:\n",
        '        if not param.requires_grad or name.startswith("head"):\n',
        phase="optimizer",
    ),
    Change(
        "paddle_style",
        "warm-up is counted from one",
        "self.last_epoch = 0\n",
        "self.last_epoch = 1\n",
        phase="optimizer",
    ),
]
