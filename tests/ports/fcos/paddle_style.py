"""After PaddleDetection: a register of modules, settings by their names, targets level by level.

Frozen norms are folded to a scale and a shift of each channel. Distances are those over the
stride; class 0 is the background.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

SETTINGS: dict[str, dict[str, Any]] = {
    "FCOS": {"backbone": "ResNet", "neck": "FPN", "fcos_head": "FCOSHead"},
    "ResNet": {
        "stem": 12,
        "ch_outs": (16, 24, 40),
        "blocks": (1, 2, 1),
        "strides": (1, 2, 2),
        "return_idx": (1, 2),
    },
    "FPN": {
        "in_channels": (24, 40),
        "out_channel": 32,
        "extra_stage": 2,
        "relu_before_extra_convs": (False, True),
    },
    "FCOSFeat": {"feat_in": 32, "feat_out": 32, "num_convs": 2, "norm_groups": 4},
    "FCOSHead": {
        "fcos_feat": "FCOSFeat",
        "num_classes": 5,
        "fpn_stride": (8, 16, 32, 64),
        "centerness_on_reg": True,
    },
    "Gt2FCOSTarget": {
        "object_sizes_boundary": (26, 42, 58),
        "center_sampling_radius": 1.5,
        "downsample_ratios": (8, 16, 32, 64),
        "norm_reg_targets": True,
    },
    "FCOSLoss": {
        "loss_alpha": 0.25,
        "loss_gamma": 2.0,
        "iou_loss_type": "giou",
        "reg_weights": 1.5,
    },
    "NormalizeImage": {
        "mean": (122.8 / 255, 115.9 / 255, 101.4 / 255),
        "std": (59.3 / 255, 56.7 / 255, 60.2 / 255),
        "is_scale": True,
    },
    "LearningRate": {"base_lr": 0.01, "warmup_steps": 2, "warmup_factor": 1.0 / 3.0},
    "OptimizerBuilder": {"momentum": 0.9, "l2_decay": 0.02},
}
INF = 1e8
MODULES: dict[str, Any] = {}


def register(cls):
    MODULES[cls.__name__] = cls
    return cls


def create(name):
    """Build what is registered; settings that name a module are built as well."""
    settings = {}
    for key, value in SETTINGS[name].items():
        named = isinstance(value, str) and value in MODULES
        settings[key] = create(value) if named else value
    return MODULES[name](**settings)


# ------------------------------------------------------------------------- layers


class Conv2D(nn.Module):
    def __init__(
        self, in_channels, out_channels, kernel_size, stride=1, bias_attr=None
    ):
        super().__init__()
        shape = (out_channels, in_channels, kernel_size, kernel_size)
        self.weight = nn.Parameter(torch.zeros(shape))
        self.bias = (
            None if bias_attr is False else nn.Parameter(torch.zeros(out_channels))
        )
        self._stride, self._padding = stride, (kernel_size - 1) // 2

    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias, self._stride, self._padding)


class AffineChannel(nn.Module):
    """What a norm with fixed statistics comes to."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, num_channels):
        super().__init__()
        self.register_buffer("weight", torch.ones(num_channels))
        self.register_buffer("bias", torch.zeros(num_channels))

    def forward(self, x):
        out = x * self.weight.reshape(1, -1, 1, 1)
        return out + self.bias.reshape(1, -1, 1, 1)


class GroupNorm(nn.Module):
    def __init__(self, num_groups, num_channels, epsilon=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))
        self._num_groups, self._epsilon = num_groups, epsilon

    def forward(self, x):
        groups = x.reshape(x.shape[0], self._num_groups, -1)
        variance, mean = torch.var_mean(groups, 2, correction=0, keepdim=True)
        groups = (groups - mean) / torch.sqrt(variance + self._epsilon)
        out = groups.reshape(x.shape) * self.weight[:, None, None]
        return out + self.bias[:, None, None]


class ConvNormLayer(nn.Module):
    def __init__(
        self, ch_in, ch_out, filter_size, stride=1, norm_groups=None, act=None
    ):
        super().__init__()
        self.conv = Conv2D(ch_in, ch_out, filter_size, stride, bias_attr=False)
        is_frozen = norm_groups is None
        self.norm: nn.Module = (
            AffineChannel(ch_out) if is_frozen else GroupNorm(norm_groups, ch_out)
        )
        self.act = act

    def forward(self, inputs):
        out = self.norm(self.conv(inputs))
        if self.act is not None:
            out = self.act(out)
        return out


# ----------------------------------------------------------------------- backbone


class BasicBlock(nn.Module):
    def __init__(self, ch_in, ch_out, stride, shortcut):
        super().__init__()
        self.shortcut = shortcut
        if not shortcut:
            self.short = ConvNormLayer(ch_in, ch_out, 1, stride)
        self.branch2a = ConvNormLayer(ch_in, ch_out, 3, stride, act=F.relu)
        self.branch2b = ConvNormLayer(ch_out, ch_out, 3)

    def forward(self, inputs):
        out = self.branch2a(inputs)
        out = self.branch2b(out)
        short = inputs if self.shortcut else self.short(inputs)
        out = out + short
        return F.relu(out)


class Blocks(nn.Module):
    def __init__(self, ch_in, ch_out, count, stride):
        super().__init__()
        self.blocks = []
        for i in range(count):
            first = i == 0
            block = BasicBlock(
                ch_in if first else ch_out, ch_out, stride if first else 1, not first
            )
            self.add_module(str(i), block)
            self.blocks.append(block)

    def forward(self, inputs):
        block_out = inputs
        for block in self.blocks:
            block_out = block(block_out)
        return block_out


@register
class ResNet(nn.Module):
    def __init__(self, stem, ch_outs, blocks, strides, return_idx):
        super().__init__()
        self.return_idx = return_idx
        self.conv1 = ConvNormLayer(3, stem, 5, 2, act=F.relu)
        self.conv1.conv.weight.requires_grad_(False)
        self.res_layers = []
        ch_in = stem
        for i, (ch_out, count, stride) in enumerate(zip(ch_outs, blocks, strides)):
            res_layer = Blocks(ch_in, ch_out, count, stride)
            self.add_module(f"res{i + 2}", res_layer)
            self.res_layers.append(res_layer)
            ch_in = ch_out

    def forward(self, image):
        x = self.conv1(image)
        x = F.max_pool2d(x, kernel_size=3, stride=2, padding=1)
        outs = []
        for idx, stage in enumerate(self.res_layers):
            x = stage(x)
            if idx in self.return_idx:
                outs.append(x)
        return outs


# --------------------------------------------------------------------------- neck


@register
class FPN(nn.Module):
    def __init__(self, in_channels, out_channel, extra_stage, relu_before_extra_convs):
        super().__init__()
        self.num_levels, self.extra_stage = len(in_channels), extra_stage
        self.relu_before_extra_convs = relu_before_extra_convs
        self.lateral_convs, self.fpn_convs = [], []
        for i, ch_in in enumerate(in_channels):
            lateral = Conv2D(ch_in, out_channel, 1)
            self.add_module(f"fpn_inner_res{i + 3}_sum_lateral", lateral)
            self.lateral_convs.append(lateral)
            fpn_conv = Conv2D(out_channel, out_channel, 3)
            self.add_module(f"fpn_res{i + 3}_sum", fpn_conv)
            self.fpn_convs.append(fpn_conv)
        for i in range(extra_stage):
            extra = Conv2D(out_channel, out_channel, 3, 2)
            self.add_module(f"fpn_{self.num_levels + i + 3}", extra)
            self.fpn_convs.append(extra)

    def forward(self, body_feats):
        laterals = [conv(x) for conv, x in zip(self.lateral_convs, body_feats)]
        for lvl in range(self.num_levels - 1, 0, -1):
            size = laterals[lvl - 1].shape[2:]
            upsample = F.interpolate(laterals[lvl], size=size, mode="nearest")
            laterals[lvl - 1] = laterals[lvl - 1] + upsample
        fpn_output = [self.fpn_convs[i](x) for i, x in enumerate(laterals)]
        for i in range(self.extra_stage):
            extra_source = fpn_output[-1]
            if self.relu_before_extra_convs[i]:
                extra_source = F.relu(extra_source)
            fpn_output.append(self.fpn_convs[self.num_levels + i](extra_source))
        return fpn_output


# --------------------------------------------------------------------------- head


class ScaleReg(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale_reg = nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return inputs * self.scale_reg


@register
class FCOSFeat(nn.Module):
    def __init__(self, feat_in, feat_out, num_convs, norm_groups):
        super().__init__()
        self.cls_subnet_convs, self.reg_subnet_convs = [], []
        self.feat_out = feat_out
        for kind in ("cls", "reg"):
            for i in range(num_convs):
                ch_in = feat_in if i == 0 else feat_out
                conv = ConvNormLayer(ch_in, feat_out, 3, norm_groups=norm_groups)
                self.add_module(f"fcos_head_{kind}_tower_conv_{i}", conv)
                getattr(self, f"{kind}_subnet_convs").append(conv)

    def forward(self, fpn_feat):
        cls_feat, reg_feat = fpn_feat, fpn_feat
        for cls_conv, reg_conv in zip(self.cls_subnet_convs, self.reg_subnet_convs):
            cls_feat = F.relu(cls_conv(cls_feat))
            reg_feat = F.relu(reg_conv(reg_feat))
        return cls_feat, reg_feat


@register
class FCOSHead(nn.Module):
    def __init__(self, fcos_feat, num_classes, fpn_stride, centerness_on_reg):
        super().__init__()
        self.fcos_feat = fcos_feat
        self.centerness_on_reg = centerness_on_reg
        feat = fcos_feat.feat_out
        self.fcos_head_cls = Conv2D(feat, num_classes, 3)
        self.fcos_head_reg = Conv2D(feat, 4, 3)
        self.fcos_head_centerness = Conv2D(feat, 1, 3)
        self.scales_regs = []
        for stride in fpn_stride:
            scale = ScaleReg()
            self.add_module(f"p{stride.bit_length() - 1}_feat", scale)
            self.scales_regs.append(scale)

    def forward(self, fpn_feats):
        cls_logits_list, bboxes_reg_list, centerness_list = [], [], []
        for scale_reg, fpn_feat in zip(self.scales_regs, fpn_feats):
            fcos_cls_feat, fcos_reg_feat = self.fcos_feat(fpn_feat)
            cls_logits = self.fcos_head_cls(fcos_cls_feat)
            bbox_reg = scale_reg(self.fcos_head_reg(fcos_reg_feat))
            if self.centerness_on_reg:
                centerness = self.fcos_head_centerness(fcos_reg_feat)
            else:
                centerness = self.fcos_head_centerness(fcos_cls_feat)
            cls_logits_list.append(cls_logits)
            bboxes_reg_list.append(torch.exp(bbox_reg))
            centerness_list.append(centerness)
        return cls_logits_list, bboxes_reg_list, centerness_list


@register
class FCOS(nn.Module):
    def __init__(self, backbone, neck, fcos_head):
        super().__init__()
        self.backbone, self.neck, self.fcos_head = backbone, neck, fcos_head

    def forward(self, image):
        body_feats = self.backbone(image)
        fpn_feats = self.neck(body_feats)
        return self.fcos_head(fpn_feats)


# --------------------------------------------------------------------- pretrained


def fold_norm(state, key, epsilon=1e-5):
    """Scale and shift of a norm with fixed statistics."""
    scale = state[f"{key}.weight"] / torch.sqrt(state[f"{key}.running_var"] + epsilon)
    shift = state[f"{key}.bias"] - state[f"{key}.running_mean"] * scale
    return {"weight": scale, "bias": shift}


def backbone_params(state):
    params = {}

    def conv_norm(name, conv, norm):
        params[f"backbone.{name}.conv.weight"] = state[f"backbone.{conv}.weight"]
        for kind, value in fold_norm(state, f"backbone.{norm}").items():
            params[f"backbone.{name}.norm.{kind}"] = value

    conv_norm("conv1", "conv1", "bn1")
    for i, count in enumerate(SETTINGS["ResNet"]["blocks"]):
        for j in range(count):
            ours, theirs = f"res{i + 2}.{j}", f"layer{i + 1}.{j}"
            conv_norm(f"{ours}.branch2a", f"{theirs}.conv1", f"{theirs}.bn1")
            conv_norm(f"{ours}.branch2b", f"{theirs}.conv2", f"{theirs}.bn2")
            if j == 0:
                short = f"{theirs}.downsample"
                conv_norm(f"{ours}.short", f"{short}.0", f"{short}.1")
    return params


CONVS = {
    "neck.fpn_inner_res3_sum_lateral": "fpn.lateral3",
    "neck.fpn_inner_res4_sum_lateral": "fpn.lateral4",
    "neck.fpn_res3_sum": "fpn.output3",
    "neck.fpn_res4_sum": "fpn.output4",
    "neck.fpn_5": "fpn.p5",
    "neck.fpn_6": "fpn.p6",
    "fcos_head.fcos_head_cls": "head.cls_logits",
    "fcos_head.fcos_head_reg": "head.bbox_pred",
    "fcos_head.fcos_head_centerness": "head.centerness",
}


def other_params(state):
    params = {}
    for name, key in CONVS.items():
        for kind in ("weight", "bias"):
            params[f"{name}.{kind}"] = state[f"{key}.{kind}"]
    for kind, tower in (("cls", "cls_tower"), ("reg", "bbox_tower")):
        for i in range(SETTINGS["FCOSFeat"]["num_convs"]):
            name = f"fcos_head.fcos_feat.fcos_head_{kind}_tower_conv_{i}"
            conv, norm = f"head.{tower}.{3 * i}", f"head.{tower}.{3 * i + 1}"
            params[f"{name}.conv.weight"] = state[f"{conv}.weight"]
            params[f"{name}.norm.weight"] = state[f"{norm}.weight"]
            params[f"{name}.norm.bias"] = state[f"{norm}.bias"]
    for i, scale in enumerate(state["head.scales"]):
        params[f"fcos_head.p{i + 3}_feat.scale_reg"] = scale.reshape(1)
    return params


def model():
    net = create("FCOS")
    state = torch.load(Path(__file__).with_name("weights.pt"))
    net.load_state_dict(backbone_params(state) | other_params(state))
    return net


# -------------------------------------------------------------------------- reader


@register
class NormalizeImage:
    def __init__(self, mean, std, is_scale):
        self.mean, self.std, self.is_scale = mean, std, is_scale

    def __call__(self, im):
        im = im.to(torch.float32)
        if self.is_scale:
            im = im / 255.0
        mean = torch.tensor(self.mean)[:, None, None]
        std = torch.tensor(self.std)[:, None, None]
        return (im - mean) / std


def pad_batch(batch):
    """Pictures without what is beyond them, normalized, on a canvas of zeros."""
    normalize = create("NormalizeImage")
    canvas = torch.zeros(batch["image"].shape)
    for i, (h, w) in enumerate(batch["size"].tolist()):
        im = batch["image"][i, :, :h, :w]
        canvas[i, :, :h, :w] = normalize(im)
    return canvas


@register
class Gt2FCOSTarget:
    """Targets of a picture for each level: [h, w, 1], [h, w, 4], [h, w, 1]."""

    def __init__(
        self,
        object_sizes_boundary,
        center_sampling_radius,
        downsample_ratios,
        norm_reg_targets,
    ):
        self.center_sampling_radius = center_sampling_radius
        self.downsample_ratios = downsample_ratios
        self.norm_reg_targets = norm_reg_targets
        bounds = [-1, *object_sizes_boundary, INF]
        self.object_sizes_of_interest = [
            [bounds[i], bounds[i + 1]] for i in range(len(bounds) - 1)
        ]

    def _compute_points(self, w, h):
        locations, shapes = [], []
        for stride in self.downsample_ratios:
            shift_x = torch.arange(0, w, stride, dtype=torch.float32)
            shift_y = torch.arange(0, h, stride, dtype=torch.float32)
            shift_y, shift_x = torch.meshgrid(shift_y, shift_x, indexing="ij")
            location = torch.stack([shift_x.reshape(-1), shift_y.reshape(-1)], dim=1)
            locations.append(location + stride // 2)
            shapes.append(shift_x.shape)
        return locations, shapes

    def _check_inside_boxes_limited(self, gt_bbox, xs, ys, num_points_each_level):
        """Inside the box and near its centre."""
        cx = (gt_bbox[:, 0] + gt_bbox[:, 2]) / 2
        cy = (gt_bbox[:, 1] + gt_bbox[:, 3]) / 2
        inside = []
        beg = 0
        for stride, num in zip(self.downsample_ratios, num_points_each_level):
            reach = self.center_sampling_radius * stride
            xmin = torch.maximum(cx - reach, gt_bbox[:, 0])
            ymin = torch.maximum(cy - reach, gt_bbox[:, 1])
            xmax = torch.minimum(cx + reach, gt_bbox[:, 2])
            ymax = torch.minimum(cy + reach, gt_bbox[:, 3])
            x, y = xs[beg : beg + num], ys[beg : beg + num]
            sides = torch.stack([x - xmin, y - ymin, xmax - x, ymax - y], dim=2)
            inside.append(torch.min(sides, dim=2).values > 0)
            beg += num
        return torch.cat(inside)

    def _limits(self, num_points_each_level):
        interest = torch.tensor(self.object_sizes_of_interest)
        return interest.repeat_interleave(torch.tensor(num_points_each_level), dim=0)

    def _centerness(self, reg_target):
        left_right = reg_target[:, [0, 2]].clip(min=0.01)
        top_bottom = reg_target[:, [1, 3]].clip(min=0.01)
        lr_ratio = left_right.min(dim=1).values / left_right.max(dim=1).values
        tb_ratio = top_bottom.min(dim=1).values / top_bottom.max(dim=1).values
        return torch.sqrt(lr_ratio * tb_ratio)

    def __call__(self, im_shape, gt_bbox, gt_class):
        points, shapes = self._compute_points(im_shape[1], im_shape[0])
        counts = [len(each) for each in points]
        if len(gt_bbox) == 0:
            gt_bbox, gt_class = (
                torch.full((1, 4), -INF),
                torch.zeros(1, dtype=torch.long),
            )
        xs, ys = torch.cat(points)[:, :, None].unbind(1)
        x1, y1, x2, y2 = gt_bbox.unbind(1)
        reg_targets = torch.stack([xs - x1, ys - y1, x2 - xs, y2 - ys], dim=2)
        is_inside_box = self._check_inside_boxes_limited(gt_bbox, xs, ys, counts)
        limits = self._limits(counts)
        max_reg_targets = torch.max(reg_targets, dim=2).values
        is_match_current_level = (max_reg_targets > limits[:, :1]) & (
            max_reg_targets <= limits[:, 1:]
        )
        points2gtarea = ((x2 - x1) * (y2 - y1)).repeat(len(xs), 1)
        points2gtarea[~is_inside_box] = INF
        points2gtarea[~is_match_current_level] = INF
        points2min_area, points2min_area_ind = points2gtarea.min(dim=1)
        labels = gt_class[points2min_area_ind] + 1
        labels[points2min_area == INF] = 0
        reg_target = reg_targets[torch.arange(len(xs)), points2min_area_ind]
        ctn_targets = self._centerness(reg_target)
        return self._split(labels, reg_target, ctn_targets, counts, shapes)

    def _split(self, labels, reg_target, ctn_targets, counts, shapes):
        out = []
        for lvl, (each, reg, ctn) in enumerate(
            zip(
                labels.split(counts),
                reg_target.split(counts),
                ctn_targets.split(counts),
            )
        ):
            grid = tuple(shapes[lvl])
            if self.norm_reg_targets:
                reg = reg / self.downsample_ratios[lvl]
            out.append((each.view(*grid, 1), reg.view(*grid, 4), ctn.view(*grid, 1)))
        return out


def make_targets(batch):
    """Labels, distances and centre-ness; each a list over the levels with the batch first."""
    gt2target = create("Gt2FCOSTarget")
    samples = []
    for gt_bbox, gt_class in zip(batch["boxes"], batch["labels"]):
        there = gt_class >= 0
        samples.append(
            gt2target(batch["image"].shape[2:], gt_bbox[there], gt_class[there])
        )
    levels = [[torch.stack(each) for each in zip(*level)] for level in zip(*samples)]
    return [list(each) for each in zip(*levels)]


# --------------------------------------------------------------------------- losses


def flatten_tensor(inputs, channel_first=False):
    """[-1, channels]"""
    if channel_first:
        inputs = inputs.permute(0, 2, 3, 1)
    return inputs.reshape(-1, inputs.shape[-1])


def sigmoid_focal_loss(logit, label, alpha, gamma):
    prob = torch.sigmoid(logit)
    ce_loss = F.softplus(logit) - logit * label
    p_t = prob * label + (1 - prob) * (1 - label)
    alpha_t = alpha * label + (1 - alpha) * (1 - label)
    return torch.sum(alpha_t * ((1 - p_t) ** gamma) * ce_loss)


@register
class FCOSLoss(nn.Module):
    def __init__(self, loss_alpha, loss_gamma, iou_loss_type, reg_weights):
        super().__init__()
        self.loss_alpha, self.loss_gamma = loss_alpha, loss_gamma
        self.iou_loss_type, self.reg_weights = iou_loss_type, reg_weights

    def _iou_loss(self, pred, targets, weights):
        """By the distances; a place lies in both boxes."""
        plw, pth, prw, pbh = pred.unbind(1)
        tlw, tth, trw, tbh = targets.unbind(1)
        area_target = (tlw + trw) * (tth + tbh)
        area_predict = (plw + prw) * (pth + pbh)
        ilw, irw = torch.minimum(plw, tlw), torch.minimum(prw, trw)
        ith, ibh = torch.minimum(pth, tth), torch.minimum(pbh, tbh)
        area_inter = (ilw + irw) * (ith + ibh)
        area_union = area_predict + area_target - area_inter
        ious = area_inter / area_union
        if self.iou_loss_type == "giou":
            clw, crw = torch.maximum(plw, tlw), torch.maximum(prw, trw)
            cth, cbh = torch.maximum(pth, tth), torch.maximum(pbh, tbh)
            area_circum = (clw + crw) * (cth + cbh)
            ious = ious - (area_circum - area_union) / area_circum
        return (1.0 - ious) * weights

    def forward(
        self, cls_logits, bboxes_reg, centerness, tag_labels, tag_bboxes, tag_center
    ):
        cls_logits_flatten = torch.cat([flatten_tensor(x, True) for x in cls_logits])
        bboxes_reg_flatten = torch.cat([flatten_tensor(x, True) for x in bboxes_reg])
        centerness_flatten = torch.cat([flatten_tensor(x, True) for x in centerness])
        tag_labels_flatten = torch.cat([flatten_tensor(x) for x in tag_labels]).squeeze(
            1
        )
        tag_bboxes_flatten = torch.cat([flatten_tensor(x) for x in tag_bboxes])
        tag_center_flatten = torch.cat([flatten_tensor(x) for x in tag_center])

        mask_positive = tag_labels_flatten > 0
        num_positive = torch.clip(mask_positive.sum().float(), min=1.0)
        positive_idx = torch.nonzero(mask_positive).squeeze(1)

        num_classes = cls_logits_flatten.shape[1]
        one_hot = F.one_hot(tag_labels_flatten, num_classes=1 + num_classes)
        tag_labels_bin = one_hot[:, 1:].float()
        cls_loss = sigmoid_focal_loss(
            cls_logits_flatten, tag_labels_bin, self.loss_alpha, self.loss_gamma
        )

        pos_center = tag_center_flatten.index_select(0, positive_idx).squeeze(1)
        reg_loss = self._iou_loss(
            bboxes_reg_flatten.index_select(0, positive_idx),
            tag_bboxes_flatten.index_select(0, positive_idx),
            pos_center,
        )

        ctn_logit = centerness_flatten.index_select(0, positive_idx).squeeze(1)
        ctn_loss = -pos_center * F.logsigmoid(ctn_logit)
        ctn_loss = ctn_loss - (1.0 - pos_center) * F.logsigmoid(-ctn_logit)
        return {
            "loss_cls": cls_loss / num_positive,
            "loss_box": self.reg_weights * reg_loss.sum() / num_positive,
            "loss_centerness": ctn_loss.sum() / num_positive,
        }


# ------------------------------------------------------------------------- interface


def forward(net, batch):
    """The levels one after another: [N, places, channels], distances in pixels."""
    cls_logits, bboxes_reg, centerness = net(pad_batch(batch))
    strides = SETTINGS["FCOSHead"]["fpn_stride"]
    bboxes = [reg * stride for reg, stride in zip(bboxes_reg, strides)]
    ctn = torch.cat([x.flatten(2) for x in centerness], dim=2)
    return {
        "logits": torch.cat([x.flatten(2) for x in cls_logits], dim=2).permute(0, 2, 1),
        "distances": torch.cat([x.flatten(2) for x in bboxes], dim=2).permute(0, 2, 1),
        "centerness": ctn.squeeze(1),
    }


def split_levels(x, grids):
    """[N, places, channels] -> a list of [N, channels, h, w]."""
    parts = x.permute(0, 2, 1).split([h * w for h, w in grids], dim=2)
    return [part.unflatten(2, tuple(grid)) for part, grid in zip(parts, grids)]


def loss(output, batch):
    tag_labels, tag_bboxes, tag_center = make_targets(batch)
    grids = [x.shape[1:3] for x in tag_labels]
    strides = SETTINGS["FCOSHead"]["fpn_stride"]
    bboxes = split_levels(output["distances"], grids)
    bboxes = [x / stride for x, stride in zip(bboxes, strides)]
    losses = create("FCOSLoss")(
        split_levels(output["logits"], grids),
        bboxes,
        split_levels(output["centerness"].unsqueeze(2), grids),
        tag_labels,
        tag_bboxes,
        tag_center,
    )
    return sum(losses.values())


# ------------------------------------------------------------------------- optimizer


class LearningRate:
    def __init__(self, base_lr, warmup_steps, warmup_factor):
        self.base_lr, self.warmup_steps = base_lr, warmup_steps
        self.warmup_factor = warmup_factor

    def __call__(self, last_epoch):
        if last_epoch < self.warmup_steps:
            return self.base_lr * self.warmup_factor
        return self.base_lr


class Momentum(torch.optim.Optimizer):
    """Rate and decay of a parameter are in its group."""

    def __init__(self, learning_rate, momentum, parameters):
        super().__init__(parameters, {})
        self._learning_rate, self._momentum = learning_rate, momentum
        self._last_epoch = 0

    @torch.no_grad()
    def step(self, closure=None):
        lr = self._learning_rate(self._last_epoch)
        for group in self.param_groups:
            for param in group["params"]:
                grad = param.grad + group["regularizer"] * param
                state = self.state[param]
                if "velocity" not in state:
                    state["velocity"] = torch.zeros_like(param)
                velocity = state["velocity"].mul_(self._momentum).add_(grad)
                param.sub_(lr * group["learning_rate"] * velocity)
        self._last_epoch += 1


def optimizer(net):
    """Biases have twice the rate and no L2Decay."""
    settings = SETTINGS["OptimizerBuilder"]
    parameters = []
    for name, param in net.named_parameters():
        if not param.requires_grad:
            continue
        bias = name.endswith("bias")
        parameters.append(
            {
                "params": [param],
                "learning_rate": 2.0 if bias else 1.0,
                "regularizer": 0.0 if bias else settings["l2_decay"],
            }
        )
    return Momentum(
        LearningRate(**SETTINGS["LearningRate"]), settings["momentum"], parameters
    )
