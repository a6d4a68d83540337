"""After OpenMMLab: config dictionaries, tokens with a shape beside them, an FCOS-like head.

Pictures stay BGR; the projection of patches is turned around once, when it is loaded.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

norm_cfg = dict(num_groups=4, eps=1e-5)
model_cfg = dict(
    data_preprocessor=dict(
        mean=[103.53, 116.28, 123.675],
        std=[57.375, 57.12, 58.395],
        pad_size_divisor=8,
    ),
    backbone=dict(
        embed_dims=24,
        num_heads=3,
        feedforward_channels=48,
        patch_size=8,
        pretrain_size=4,
        window_size=4,
        global_attn_indexes=(1,),
        global_rel_size=6,
        num_layers=3,
    ),
    neck=dict(in_channels=24, out_channels=16),
    bbox_head=dict(num_classes=5, feat_channels=16, stacked_convs=2),
    train_cfg=dict(
        strides=(4, 8, 16),
        regress_ranges=((0, 12), (12, 24), (24, 1e8)),
        center_sample_radius=1.5,
        loss_cls=dict(gamma=2.0, alpha=0.25, loss_weight=1.0),
        loss_bbox=dict(eps=1e-6, loss_weight=2.0),
    ),
)
optim_wrapper = dict(
    optimizer=dict(lr=4e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.2),
    paramwise_cfg=dict(decay_rate=0.7, num_layers=3),
    param_scheduler=dict(start_factor=0.25, end=3),
)


class DetDataPreprocessor(nn.Module):
    def __init__(self, mean, std, pad_size_divisor):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), False)
        self.pad_size_divisor = pad_size_divisor

    def forward(self, imgs):
        inputs = (imgs.permute(0, 3, 1, 2).float() - self.mean) / self.std
        h, w = inputs.shape[-2:]
        divisor = self.pad_size_divisor
        target_h = (h + divisor - 1) // divisor * divisor
        target_w = (w + divisor - 1) // divisor * divisor
        return F.pad(inputs, (0, target_w - w, 0, target_h - h), "constant", 0)


class PatchEmbed(nn.Module):
    def __init__(self, embed_dims, patch_size):
        super().__init__()
        self.projection = nn.Conv2d(3, embed_dims, patch_size, stride=patch_size)

    def forward(self, x):
        x = self.projection(x)
        out_size = (x.shape[2], x.shape[3])
        return x.flatten(2).transpose(1, 2), out_size


class DecomposedAttention(nn.Module):
    def __init__(self, embed_dims, num_heads, rel_size):
        super().__init__()
        self.num_heads = num_heads
        self.head_dims = embed_dims // num_heads
        self.scale = self.head_dims**-0.5
        self.q_proj = nn.Linear(embed_dims, embed_dims, bias=True)
        self.k_proj = nn.Linear(embed_dims, embed_dims, bias=False)
        self.v_proj = nn.Linear(embed_dims, embed_dims, bias=True)
        self.out_proj = nn.Linear(embed_dims, embed_dims)
        shape = (2 * rel_size - 1, self.head_dims)
        self.rel_pos_h = nn.Parameter(torch.zeros(shape))
        self.rel_pos_w = nn.Parameter(torch.zeros(shape))

    @staticmethod
    def rel_pos(table, size):
        max_rel_dist = 2 * size - 1
        if table.size(0) != max_rel_dist:
            table = table.t().unsqueeze(0)
            table = F.interpolate(table, size=max_rel_dist, mode="linear")
            table = table.squeeze(0).t()
        # The last row first: keys go the other way than distances.
        rows = [table[i : i + size].flip(0) for i in range(size)]
        return torch.stack(rows)

    def attn_bias(self, q, hw_shape):
        H, W = hw_shape
        q = q.reshape(-1, H, W, self.head_dims)
        Rh = self.rel_pos(self.rel_pos_h, H)
        Rw = self.rel_pos(self.rel_pos_w, W)
        bias_h = torch.matmul(q, Rh.transpose(1, 2))
        bias_w = torch.matmul(q.transpose(1, 2), Rw.transpose(1, 2)).transpose(1, 2)
        bias = bias_h.unsqueeze(4) + bias_w.unsqueeze(3)
        return bias.reshape(-1, H * W, H * W)

    def heads(self, x):
        B, N, _ = x.shape
        x = x.reshape(B, N, self.num_heads, self.head_dims)
        return x.transpose(1, 2).reshape(B * self.num_heads, N, self.head_dims)

    def forward(self, x, hw_shape):
        B, N, C = x.shape
        q = self.heads(self.q_proj(x))
        k = self.heads(self.k_proj(x))
        v = self.heads(self.v_proj(x))
        attn = torch.baddbmm(
            self.attn_bias(q, hw_shape), q, k.transpose(1, 2), alpha=self.scale
        )
        out = torch.bmm(F.softmax(attn, dim=-1), v)
        out = out.reshape(B, self.num_heads, N, self.head_dims).transpose(1, 2)
        return self.out_proj(out.reshape(B, N, C))


class FFN(nn.Module):
    """Adds what it is given as identity."""

    def __init__(self, embed_dims, feedforward_channels):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(nn.Linear(embed_dims, feedforward_channels), nn.GELU()),
            nn.Linear(feedforward_channels, embed_dims),
        )

    def forward(self, x, identity):
        return identity + self.layers(x)


class TransformerEncoderLayer(nn.Module):
    def __init__(
        self, embed_dims, num_heads, feedforward_channels, window_size, rel_size
    ):
        super().__init__()
        self.window_size = window_size
        self.ln1 = nn.LayerNorm(embed_dims, eps=1e-6)
        self.attn = DecomposedAttention(embed_dims, num_heads, rel_size)
        self.ln2 = nn.LayerNorm(embed_dims, eps=1e-6)
        self.ffn = FFN(embed_dims, feedforward_channels)

    def window_msa(self, x, hw_shape):
        """One window after the other is cut out of the padded map and put back."""
        B, _, C = x.shape
        H, W = hw_shape
        ws = self.window_size
        pad_b, pad_r = (ws - H % ws) % ws, (ws - W % ws) % ws
        x = F.pad(x.view(B, H, W, C), (0, 0, 0, pad_r, 0, pad_b))
        strips = [strip.split(ws, dim=2) for strip in x.split(ws, dim=1)]
        nums = [len(strip) for strip in strips]
        windows = torch.stack([w.flatten(1, 2) for strip in strips for w in strip])
        out = self.attn(windows.flatten(0, 1), (ws, ws))
        out = out.view(sum(nums), B, ws, ws, C).split(nums)
        out = torch.cat([torch.cat(strip.unbind(0), dim=2) for strip in out], dim=1)
        return out[:, :H, :W].reshape(B, H * W, C)

    def forward(self, x, hw_shape):
        if self.window_size > 0:
            x = x + self.window_msa(self.ln1(x), hw_shape)
        else:
            x = x + self.attn(self.ln1(x), hw_shape)
        return self.ffn(self.ln2(x), identity=x)


class ViT(nn.Module):
    def __init__(
        self,
        embed_dims,
        num_heads,
        feedforward_channels,
        patch_size,
        pretrain_size,
        window_size,
        global_attn_indexes,
        global_rel_size,
        num_layers,
    ):
        super().__init__()
        self.pretrain_size = pretrain_size
        self.patch_embed = PatchEmbed(embed_dims, patch_size)
        self.pos_embed = nn.Parameter(torch.zeros(1, pretrain_size**2 + 1, embed_dims))
        self.layers = nn.ModuleList()
        for i in range(num_layers):
            is_global = i in global_attn_indexes
            layer = TransformerEncoderLayer(
                embed_dims,
                num_heads,
                feedforward_channels,
                window_size=0 if is_global else window_size,
                rel_size=global_rel_size if is_global else window_size,
            )
            self.layers.append(layer)

    def resize_pos_embed(self, dst_shape, num_extra_tokens=1):
        src = self.pos_embed[:, num_extra_tokens:]
        src = src.transpose(1, 2).unflatten(2, (self.pretrain_size, -1))
        dst = F.interpolate(src, size=dst_shape, mode="bicubic", align_corners=False)
        return dst.flatten(2).transpose(1, 2)

    def forward(self, x):
        x, hw_shape = self.patch_embed(x)
        x = x + self.resize_pos_embed(hw_shape)
        for layer in self.layers:
            x = layer(x, hw_shape)
        return x.transpose(1, 2).unflatten(2, hw_shape).contiguous()


class LN2d(nn.LayerNorm):
    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2).contiguous()


class ConvModule(nn.Module):
    """conv, norm, act; a bias only where no norm follows."""

    def __init__(self, in_channels, out_channels, kernel_size, norm, act=False):
        super().__init__()
        padding = kernel_size // 2
        self.conv = nn.Conv2d(
            in_channels, out_channels, kernel_size, padding=padding, bias=False
        )
        self.norm = norm
        self.with_activation = act

    def forward(self, x):
        x = self.norm(self.conv(x))
        return F.relu(x, inplace=True) if self.with_activation else x


class SimpleFPN(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.upsample = nn.ConvTranspose2d(in_channels, in_channels // 2, 2, 2)
        self.lateral_convs = nn.ModuleList()
        self.fpn_convs = nn.ModuleList()
        for channels in (in_channels // 2, in_channels, in_channels):
            self.lateral_convs.append(
                ConvModule(channels, out_channels, 1, LN2d(out_channels, eps=1e-6))
            )
            self.fpn_convs.append(
                ConvModule(out_channels, out_channels, 3, LN2d(out_channels, eps=1e-6))
            )

    def forward(self, x):
        inputs = [self.upsample(x), x, F.max_pool2d(x, kernel_size=2, stride=2)]
        laterals = [conv(inp) for conv, inp in zip(self.lateral_convs, inputs)]
        return tuple(conv(lateral) for conv, lateral in zip(self.fpn_convs, laterals))


class Scale(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x):
        return x * self.scale


class FCOSHead(nn.Module):
    """Distances are in strides."""

    def __init__(self, num_classes, feat_channels, stacked_convs):
        super().__init__()
        self.cls_convs, self.reg_convs = nn.ModuleList(), nn.ModuleList()
        for _ in range(stacked_convs):
            for convs in (self.cls_convs, self.reg_convs):
                norm = nn.GroupNorm(num_channels=feat_channels, **norm_cfg)
                convs.append(
                    ConvModule(feat_channels, feat_channels, 3, norm, act=True)
                )
        self.conv_cls = nn.Conv2d(feat_channels, num_classes, 3, padding=1)
        self.conv_reg = nn.Conv2d(feat_channels, 4, 3, padding=1)
        self.scales = nn.ModuleList(Scale() for _ in model_cfg["train_cfg"]["strides"])

    def forward_single(self, x, scale):
        cls_feat, reg_feat = x, x
        for cls_layer in self.cls_convs:
            cls_feat = cls_layer(cls_feat)
        cls_score = self.conv_cls(cls_feat)
        for reg_layer in self.reg_convs:
            reg_feat = reg_layer(reg_feat)
        bbox_pred = scale(self.conv_reg(reg_feat)).exp()
        return cls_score, bbox_pred

    def forward(self, feats):
        outs = [self.forward_single(x, scale) for x, scale in zip(feats, self.scales)]
        return tuple(map(list, zip(*outs)))


class SingleStageDetector(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.data_preprocessor = DetDataPreprocessor(**cfg["data_preprocessor"])
        self.backbone = ViT(**cfg["backbone"])
        self.neck = SimpleFPN(**cfg["neck"])
        self.bbox_head = FCOSHead(**cfg["bbox_head"])

    def forward(self, imgs):
        x = self.backbone(self.data_preprocessor(imgs))
        return self.bbox_head(self.neck(x))


def convert_vit(ckpt):
    """Returns the part of the backbone under its names here."""
    new_ckpt = {}
    for k, v in ckpt.items():
        if not k.startswith("backbone."):
            continue
        new_k = k.replace("blocks.", "layers.")
        if "patch_embed" in k:
            new_k = k.replace("patch_embed.", "patch_embed.projection.")
            if k.endswith("weight"):
                v = v[:, [2, 1, 0]]
        elif ".norm" in k:
            new_k = new_k.replace(".norm1.", ".ln1.").replace(".norm2.", ".ln2.")
        elif ".mlp." in k:
            new_k = new_k.replace(".mlp.fc1.", ".ffn.layers.0.0.")
            new_k = new_k.replace(".mlp.fc2.", ".ffn.layers.1.")
        elif "qkv" in k:
            prefix = new_k.replace("qkv.weight", "")
            w_q, w_k, w_v = v.reshape(3, -1, v.shape[1]).unbind(0)
            new_ckpt[prefix + "q_proj.weight"] = w_q
            new_ckpt[prefix + "k_proj.weight"] = w_k
            new_ckpt[prefix + "v_proj.weight"] = w_v
            continue
        elif "attn." in k:
            new_k = new_k.replace(".q_bias", ".q_proj.bias")
            new_k = new_k.replace(".v_bias", ".v_proj.bias")
            new_k = new_k.replace(".attn.proj.", ".attn.out_proj.")
        new_ckpt[new_k] = v
    return new_ckpt


def convert_neck_and_head(ckpt):
    new_ckpt = {}
    for k, v in ckpt.items():
        parts = k.split(".")
        if parts[0] == "fpn":
            level, layer, kind = int(parts[2]), int(parts[3]), parts[4]
            convs = "lateral_convs" if layer < 3 else "fpn_convs"
            module = "conv" if layer % 2 else "norm"
            new_k = f"neck.{convs}.{level}.{module}.{kind}"
            if layer == 0:
                new_k = f"neck.upsample.{kind}"
        elif parts[0] == "head" and "tower" in k:
            convs = {"cls_tower": "cls_convs", "bbox_tower": "reg_convs"}[parts[1]]
            idx, place = divmod(int(parts[2]), 3)
            new_k = f"bbox_head.{convs}.{idx}.{('conv', 'norm')[place]}.{parts[3]}"
        elif k == "head.scales":
            for i, scale in enumerate(v):
                new_ckpt[f"bbox_head.scales.{i}.scale"] = scale
            continue
        elif parts[0] == "head":
            new_k = k.replace("head.cls_logits", "bbox_head.conv_cls")
            new_k = new_k.replace("head.bbox_pred", "bbox_head.conv_reg")
        else:
            continue
        new_ckpt[new_k] = v
    return new_ckpt


def model():
    ckpt = torch.load(Path(__file__).with_name("weights.pt"), map_location="cpu")
    detector = SingleStageDetector(model_cfg)
    state_dict = {**convert_vit(ckpt), **convert_neck_and_head(ckpt)}
    detector.load_state_dict(state_dict, strict=True)
    return detector


def forward(net, batch):
    cls_scores, bbox_preds = net(batch["image"])
    strides = model_cfg["train_cfg"]["strides"]
    bbox_preds = [pred * stride for pred, stride in zip(bbox_preds, strides)]
    return dict(
        logits=torch.cat([s.permute(0, 2, 3, 1).flatten(1, 2) for s in cls_scores], 1),
        distances=torch.cat(
            [p.permute(0, 2, 3, 1).flatten(1, 2) for p in bbox_preds], 1
        ),
    )


class MlvlPointGenerator:
    def __init__(self, strides, offset=0.5):
        self.strides, self.offset = strides, offset

    def single_level_grid_priors(self, featmap_size, stride):
        feat_h, feat_w = featmap_size
        shift_x = (torch.arange(feat_w) + self.offset) * stride
        shift_y = (torch.arange(feat_h) + self.offset) * stride
        xx = shift_x.repeat(feat_h)
        yy = shift_y.view(-1, 1).repeat(1, feat_w).view(-1)
        return torch.stack([xx, yy], dim=-1)

    def grid_priors(self, featmap_sizes):
        return [
            self.single_level_grid_priors(size, stride)
            for size, stride in zip(featmap_sizes, self.strides)
        ]


def get_targets_single(gt_bboxes, gt_labels, points, regress_ranges, radius, bg):
    num_points, num_gts = points.size(0), gt_labels.size(0)
    widths = gt_bboxes[:, 2] - gt_bboxes[:, 0]
    heights = gt_bboxes[:, 3] - gt_bboxes[:, 1]
    areas = (widths * heights)[None].repeat(num_points, 1)
    gts = gt_bboxes[None].expand(num_points, num_gts, 4)
    xs, ys = points[:, 0:1].expand(-1, num_gts), points[:, 1:2].expand(-1, num_gts)
    bbox_targets = torch.stack(
        (xs - gts[..., 0], ys - gts[..., 1], gts[..., 2] - xs, gts[..., 3] - ys), -1
    )
    center_xs = (gts[..., 0] + gts[..., 2]) / 2
    center_ys = (gts[..., 1] + gts[..., 3]) / 2
    left = torch.maximum(center_xs - radius[:, None], gts[..., 0])
    top = torch.maximum(center_ys - radius[:, None], gts[..., 1])
    right = torch.minimum(center_xs + radius[:, None], gts[..., 2])
    bottom = torch.minimum(center_ys + radius[:, None], gts[..., 3])
    center_bbox = torch.stack((xs - left, ys - top, right - xs, bottom - ys), -1)
    inside_gt_bbox_mask = center_bbox.min(-1)[0] > 0
    max_regress_distance = bbox_targets.max(-1)[0]
    inside_regress_range = (max_regress_distance >= regress_ranges[:, :1]) & (
        max_regress_distance <= regress_ranges[:, 1:]
    )
    areas[~inside_gt_bbox_mask] = float("inf")
    areas[~inside_regress_range] = float("inf")
    min_area, min_area_inds = areas.min(dim=1)
    labels = gt_labels[min_area_inds]
    labels[torch.isinf(min_area)] = bg
    return labels, bbox_targets[range(num_points), min_area_inds]


def py_sigmoid_focal_loss(pred, target, gamma, alpha, loss_weight, avg_factor):
    pred_sigmoid = pred.sigmoid()
    target = target.type_as(pred)
    pt = (1 - pred_sigmoid) * target + pred_sigmoid * (1 - target)
    focal_weight = (alpha * target + (1 - alpha) * (1 - target)) * pt.pow(gamma)
    bce = F.binary_cross_entropy_with_logits(pred, target, reduction="none")
    return loss_weight * (bce * focal_weight).sum() / avg_factor


def distance2bbox(points, distance):
    x1y1 = points - distance[..., :2]
    x2y2 = points + distance[..., 2:]
    return torch.cat([x1y1, x2y2], -1)


def giou_loss(pred, target, weight, eps, loss_weight, avg_factor):
    area1 = (pred[:, 2] - pred[:, 0]) * (pred[:, 3] - pred[:, 1])
    area2 = (target[:, 2] - target[:, 0]) * (target[:, 3] - target[:, 1])
    lt = torch.max(pred[:, :2], target[:, :2])
    rb = torch.min(pred[:, 2:], target[:, 2:])
    wh = (rb - lt).clamp(min=0)
    overlap = wh[:, 0] * wh[:, 1]
    union = (area1 + area2 - overlap).clamp(min=eps)
    enclosed_lt = torch.min(pred[:, :2], target[:, :2])
    enclosed_rb = torch.max(pred[:, 2:], target[:, 2:])
    enclose_wh = (enclosed_rb - enclosed_lt).clamp(min=0)
    enclose_area = (enclose_wh[:, 0] * enclose_wh[:, 1]).clamp(min=eps)
    gious = overlap / union - (enclose_area - union) / enclose_area
    return loss_weight * ((1 - gious) * weight).sum() / avg_factor


def centerness_target(pos_bbox_targets):
    left_right = pos_bbox_targets[:, [0, 2]]
    top_bottom = pos_bbox_targets[:, [1, 3]]
    centerness = (left_right.min(dim=-1)[0] / left_right.max(dim=-1)[0]) * (
        top_bottom.min(dim=-1)[0] / top_bottom.max(dim=-1)[0]
    )
    return torch.sqrt(centerness)


def loss(output, batch):
    cfg, num_classes = model_cfg["train_cfg"], model_cfg["bbox_head"]["num_classes"]
    h, w = (-(-side // 8) for side in batch["image"].shape[1:3])
    prior_generator = MlvlPointGenerator(cfg["strides"])
    mlvl_points = prior_generator.grid_priors(
        [(2 * h, 2 * w), (h, w), (h // 2, w // 2)]
    )
    regress_ranges, radius = [], []
    for points, limits, stride in zip(
        mlvl_points, cfg["regress_ranges"], cfg["strides"]
    ):
        regress_ranges.append(points.new_tensor(limits)[None].expand_as(points))
        radius.append(
            points.new_full((len(points),), stride * cfg["center_sample_radius"])
        )
    all_points = torch.cat(mlvl_points)
    all_ranges, all_radius = torch.cat(regress_ranges), torch.cat(radius)

    labels, bbox_targets = [], []
    for gt_bboxes, gt_labels in zip(batch["boxes"], batch["labels"]):
        keep = gt_labels != -1
        img_labels, img_targets = get_targets_single(
            gt_bboxes[keep],
            gt_labels[keep],
            all_points,
            all_ranges,
            all_radius,
            num_classes,
        )
        labels.append(img_labels)
        bbox_targets.append(img_targets)
    flatten_labels, flatten_targets = torch.cat(labels), torch.cat(bbox_targets)
    flatten_points = all_points.repeat(len(labels), 1)
    flatten_cls_scores = output["logits"].reshape(-1, num_classes)
    flatten_bbox_preds = output["distances"].reshape(-1, 4)

    pos_inds = ((flatten_labels >= 0) & (flatten_labels < num_classes)).nonzero()
    pos_inds = pos_inds.reshape(-1)
    target = flatten_labels[:, None] == torch.arange(num_classes)[None]
    loss_cls = py_sigmoid_focal_loss(
        flatten_cls_scores,
        target,
        **cfg["loss_cls"],
        avg_factor=max(len(pos_inds), 1),
    )
    pos_targets, pos_points = flatten_targets[pos_inds], flatten_points[pos_inds]
    pos_centerness = centerness_target(pos_targets)
    loss_bbox = giou_loss(
        distance2bbox(pos_points, flatten_bbox_preds[pos_inds]),
        distance2bbox(pos_points, pos_targets),
        weight=pos_centerness,
        **cfg["loss_bbox"],
        avg_factor=pos_centerness.sum().clamp(min=1e-6),
    )
    return loss_cls + loss_bbox


def get_layer_id_for_vit(var_name, max_layer_id):
    if var_name in ("backbone.pos_embed",) or var_name.startswith(
        "backbone.patch_embed"
    ):
        return 0
    if var_name.startswith("backbone.layers"):
        return int(var_name.split(".")[2]) + 1
    return max_layer_id - 1


class LayerDecayOptimizerConstructor:
    def __init__(self, optimizer_cfg, paramwise_cfg):
        self.optimizer_cfg, self.paramwise_cfg = optimizer_cfg, paramwise_cfg

    def __call__(self, net, cls, **kwargs):
        groups = {}
        num_layers = self.paramwise_cfg["num_layers"] + 2
        decay_rate = self.paramwise_cfg["decay_rate"]
        for name, param in net.named_parameters():
            layer_id = get_layer_id_for_vit(name, num_layers)
            if param.ndim <= 1 or "pos_embed" in name or "rel_pos" in name:
                group_name, weight_decay = f"layer_{layer_id}_no_decay", 0.0
            else:
                group_name = f"layer_{layer_id}_decay"
                weight_decay = self.optimizer_cfg["weight_decay"]
            if group_name not in groups:
                lr_scale = decay_rate ** (num_layers - layer_id - 1)
                groups[group_name] = dict(
                    params=[],
                    weight_decay=weight_decay,
                    lr=lr_scale * self.optimizer_cfg["lr"],
                )
            groups[group_name]["params"].append(param)
        return cls(list(groups.values()), **self.optimizer_cfg, **kwargs)


class OptimWrapper(torch.optim.AdamW):
    """The rate grows in a line from a part of it."""

    def __init__(self, params, scheduler, **kwargs):
        super().__init__(params, **kwargs)
        self.scheduler, self.cur_iter = scheduler, 0
        self.base_lrs = [group["lr"] for group in self.param_groups]

    def step(self, closure=None):
        start, end = self.scheduler["start_factor"], self.scheduler["end"]
        factor = start + (1 - start) * min(self.cur_iter, end) / end
        for group, base_lr in zip(self.param_groups, self.base_lrs):
            group["lr"] = base_lr * factor
        self.cur_iter += 1
        return super().step(closure)


def optimizer(net):
    constructor = LayerDecayOptimizerConstructor(
        optim_wrapper["optimizer"], optim_wrapper["paramwise_cfg"]
    )
    return constructor(net, OptimWrapper, scheduler=optim_wrapper["param_scheduler"])
