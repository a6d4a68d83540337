"""Faulty ports of the detector without anchors."""

from ..bank import Change

_KERAS_BLOCKS = (
    "stack_0.block_0",
    "stack_1.block_0",
    "stack_1.block_1",
    "stack_2.block_0",
)
_KERAS_PYRAMID = ("c3_1x1", "c4_1x1", "c3_3x3", "c4_3x3", "c5_3x3", "c6_3x3")
_TENSORDOT = "outputs = torch.tensordot(windows, self.kernel"

# Those of 1x1 are the same in both orders.
_LARGE_KERNELS = "|".join(
    (
        "backbone.stem.conv.kernel",
        *(f"backbone.{b}.conv_{i}.kernel" for b in _KERAS_BLOCKS for i in (1, 2)),
        *(f"feature_pyramid.conv_{c}.kernel" for c in _KERAS_PYRAMID if "3x3" in c),
        *(
            f"prediction_head.{kind}_tower.conv_{i}.kernel"
            for kind in ("class", "box")
            for i in (0, 1)
        ),
        "prediction_head.class_output.kernel",
        "prediction_head.box_output.kernel",
    )
)
_PADDLE_BLOCKS = ("res2.0", "res3.0", "res3.1", "res4.0")
_FOLDED = (
    "conv1",
    *(f"{block}.{b}" for block in _PADDLE_BLOCKS for b in ("branch2a", "branch2b")),
    *(f"{block}.short" for block in _PADDLE_BLOCKS if block.endswith("0")),
)
_TOWER = "fcos_head.fcos_feat.fcos_head_reg_tower_conv_{}.norm.{}"

FAULTS = [
    Change(
        "keras_style",
        "kernel of the stem still takes red first",
        "backbone.stem.conv.kernel.copy_(torch.flip(kernel, dims=(2,)))",
        "backbone.stem.conv.kernel.copy_(kernel)",
        parameter="backbone.stem.conv.kernel",
        at=_TENSORDOT,
    ),
    Change(
        "keras_style",
        "predictor of distances still has left first",
        "    order = [1, 0, 3, 2]\n",
        "    order = [0, 1, 2, 3]\n",
        parameter="prediction_head.box_output.kernel|prediction_head.box_output.bias",
        at=f"{_TENSORDOT}|return outputs + self.bias if self.use_bias"
        "|boxes = self.box_output(self.box_tower(feature))",
    ),
    Change(
        "keras_style",
        "rows and columns of the kernels are exchanged",
        "return torch.permute(kernel, (2, 3, 1, 0))",
        "return torch.permute(kernel, (3, 2, 1, 0))",
        parameter=_LARGE_KERNELS,
        at=_TENSORDOT,
    ),
    Change(
        "keras_style",
        "SAME padding in the stem, whose step is two",
        "            pad=ZeroPadding2D(2),\n"
        "            conv=Conv2D(12, 5, strides=2, use_bias=False, trainable=False),\n",
        "            conv=Conv2D(\n"
        '                12, 5, strides=2, padding="same", use_bias=False, trainable=False\n'
        "            ),\n",
        at="return total // 2, total - total // 2|rows = same_padding(|columns = same_padding("
        f"|inputs = nn.functional.pad(inputs, (0, 0, *columns, *rows))|{_TENSORDOT}",
    ),
    Change(
        "keras_style",
        "statistics are of a place in the groups over all groups",
        "dim=(1, 2, 4), keepdim=True",
        "dim=(1, 2, 3), keepdim=True",
        at="variance = variance - torch.square(mean)|inv = gamma * torch.rsqrt("
        "|outputs = grouped * inv",
    ),
    Change(
        "keras_style",
        "epsilon of Keras in the towers",
        "GroupNormalization(groups=4, epsilon=1e-5)",
        "GroupNormalization(groups=4)",
        at="inv = gamma * torch.rsqrt(|outputs = grouped * inv",
    ),
    Change(
        "keras_style",
        "coarsest level is made without the ReLU",
        "self.conv_c6_3x3(self.pad(self.relu(p5_output)))",
        "self.conv_c6_3x3(self.pad(p5_output))",
        reference="p6 = self.p6(F.relu(p5))",
    ),
    Change(
        "keras_style",
        "scale multiplies behind the exponential",
        "torch.exp(boxes[..., :4] * scale)",
        "torch.exp(boxes[..., :4]) * scale",
    ),
    Change(
        "keras_style",
        "radius of the finest level at all levels",
        "radius = self.radius * strides[:, None]",
        "radius = self.radius * 2 ** LEVELS[0]",
        at="near = torch.amax(torch.abs(offsets), dim=-1) < radius",
        reference="reach = (RADIUS * strides)",
    ),
    Change(
        "keras_style",
        "place takes the first of its boxes, not the smallest",
        "return torch.argmin(cost, dim=-1), torch.any(candidates, dim=-1)",
        "return torch.argmax(candidates.long(), dim=-1), torch.any(candidates, dim=-1)",
        at="boxes = torch.take_along_dim(gt_boxes|classes = torch.take_along_dim(gt_classes",
        reference="area.masked_fill(~(fits & central), math.inf).min(dim=1)",
    ),
    Change(
        "keras_style",
        "easy places weigh most in the focal loss",
        "torch.pow(1.0 - pt, self.gamma)",
        "torch.pow(pt, self.gamma)",
    ),
    Change(
        "keras_style",
        "target of the centre-ness is without its root",
        "return torch.sqrt(vertical * horizontal)",
        "return vertical * horizontal",
        reference=".prod(dim=1).sqrt()",
    ),
    Change(
        "keras_style",
        "centre-ness is learned in the background too",
        "center_loss = torch.sum(each_center * mask)",
        "center_loss = torch.sum(each_center)",
        reference='output["centerness"][i, foreground], central',
    ),
    Change(
        "paddle_style",
        "mean is taken off without the scale where norms are folded",
        'state[f"{key}.bias"] - state[f"{key}.running_mean"] * scale',
        'state[f"{key}.bias"] - state[f"{key}.running_mean"]',
        parameter="|".join(f"backbone.{name}.norm.bias" for name in _FOLDED),
        at="return out + self.bias.reshape(1, -1, 1, 1)",
    ),
    Change(
        "paddle_style",
        "norms of the box tower are those of the class tower",
        'f"head.{tower}.{3 * i + 1}"',
        'f"head.cls_tower.{3 * i + 1}"',
        parameter="|".join(
            _TOWER.format(i, n) for i in (0, 1) for n in ("weight", "bias")
        ),
        at="out = groups.reshape(x.shape) * self.weight[:, None, None]"
        "|return out + self.bias[:, None, None]",
    ),
    Change(
        "paddle_style",
        "scales of the levels go from the coarsest to the finest",
        'enumerate(state["head.scales"])',
        'enumerate(state["head.scales"].flip(0))',
        parameter="|".join(
            f"fcos_head.p{level}_feat.scale_reg" for level in (3, 4, 5, 6)
        ),
        at="return inputs * self.scale_reg|bbox_reg = scale_reg(self.fcos_head_reg(",
    ),
    Change(
        "paddle_style",
        "shortcut is added behind the activation",
        "        out = out + short\n        return F.relu(out)\n",
        "        return F.relu(out) + short\n",
        reference="return F.relu(out + x)",
    ),
    Change(
        "paddle_style",
        "centre-ness comes from the class tower",
        '"centerness_on_reg": True',
        '"centerness_on_reg": False',
        at="centerness = self.fcos_head_centerness(fcos_cls_feat)",
    ),
    Change(
        "paddle_style",
        "no gradient from the extra levels into the pyramid",
        "            extra_source = fpn_output[-1]\n",
        "            extra_source = fpn_output[-1].detach()\n",
        at="fpn_output = [self.fpn_convs[i](x)|extra_source = F.relu(extra_source)"
        "|fpn_output.append(self.fpn_convs[self.num_levels + i](extra_source))",
    ),
    Change(
        "paddle_style",
        "height and width of a picture are exchanged",
        'for i, (h, w) in enumerate(batch["size"].tolist()):',
        'for i, (w, h) in enumerate(batch["size"].tolist()):',
        at='im = batch["image"][i, :, :h, :w]|canvas[i, :, :h, :w] = normalize(im)',
    ),
    Change(
        "paddle_style",
        "points go down the columns",
        'torch.meshgrid(shift_y, shift_x, indexing="ij")',
        'torch.meshgrid(shift_y, shift_x, indexing="xy")',
        at="location = torch.stack([shift_x.reshape(-1)"
        "|locations.append(location + stride // 2)|xs, ys = torch.cat(points)",
    ),
    Change(
        "paddle_style",
        "sizes of interest begin one level too fine",
        "bounds = [-1, *object_sizes_boundary, INF]",
        "bounds = [-1, 13, *object_sizes_boundary]",
        at="[bounds[i], bounds[i + 1]] for i|self.object_sizes_of_interest = ["
        "|interest = torch.tensor(self.object_sizes_of_interest)"
        "|return interest.repeat_interleave(|is_match_current_level = (max_reg_targets"
        "|max_reg_targets <= limits[:, 1:]",
    ),
    Change(
        "paddle_style",
        "columns of the labels begin with the background",
        "tag_labels_bin = one_hot[:, 1:].float()",
        "tag_labels_bin = one_hot[:, :-1].float()",
    ),
    Change(
        "paddle_style",
        "excess of the hull is divided by the union",
        "ious = ious - (area_circum - area_union) / area_circum",
        "ious = ious - (area_circum - area_union) / area_union",
    ),
    Change(
        "paddle_style",
        "weights of the boxes keep an axis that spreads over all others",
        "tag_center_flatten.index_select(0, positive_idx).squeeze(1)",
        "tag_center_flatten.index_select(0, positive_idx)",
        at="return (1.0 - ious) * weights|ctn_loss = -pos_center * F.logsigmoid("
        "|ctn_loss = ctn_loss - (1.0 - pos_center)",
    ),
    Change(
        "paddle_style",
        "loss of the boxes is divided by the sum of its weights",
        "self.reg_weights * reg_loss.sum() / num_positive",
        "self.reg_weights * reg_loss.sum() / pos_center.sum()",
    ),
]
