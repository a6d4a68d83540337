"""After Paddle: channels first, heads over one flattened pyramid, all pictures matched at once.

A tower is a list of functions. Each 3x3 convolution of a head takes the cells of all levels
in a row and gathers their neighbours by a table.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

ResNet = {"ch_in": 16, "stages": (16, 24, 32, 48), "freeze_at": 0, "freeze_norm": (0,)}
FPNConfig: dict[str, Any] = {"in_channels": (24, 32, 48), "out_channel": 32}
HeadConfig = {"num_classes": 4, "num_anchors": 6, "stacked_convs": 2}
AnchorConfig: dict[str, Any] = {
    "strides": (4, 8, 16, 32),
    "octave_base_scale": 2.0,
    "scales_per_octave": 2,
    "aspect_ratios": (0.5, 1.0, 2.0),
}
MaxIoUAssigner = {"positive_overlap": 0.5, "negative_overlap": 0.4}
BBoxCoder = {"weights": (10.0, 10.0, 5.0, 5.0)}
FocalLoss = {"gamma": 2.0, "alpha": 0.25, "loss_weight": 1.0}
SmoothL1Loss = {"beta": 0.1111111111111111, "loss_weight": 0.5}
NormalizeImage = {"mean": (123.7, 116.3, 103.5), "std": (58.4, 57.1, 57.4)}
LearningRate = {
    "base_lr": 0.01,
    "milestones": (8, 11),
    "gamma": 0.1,
    "warmup_steps": 4,
    "start_factor": 0.25,
}
OptimizerBuilder = {"momentum": 0.9, "regularizer": 0.05}

# ----------------------------------------------------------------------- backbone


class BatchNorm2D(nn.Module):
    """Momentum is the part of the old statistics that stays."""

    _mean: torch.Tensor
    _variance: torch.Tensor

    def __init__(self, channels, use_global_stats=False, momentum=0.9, epsilon=1e-5):
        super().__init__()
        trained = not use_global_stats
        self.weight = nn.Parameter(torch.ones(channels), requires_grad=trained)
        self.bias = nn.Parameter(torch.zeros(channels), requires_grad=trained)
        self.register_buffer("_mean", torch.zeros(channels))
        self.register_buffer("_variance", torch.ones(channels))
        self._use_global_stats = use_global_stats
        self._momentum, self._epsilon = momentum, epsilon

    def forward(self, x):
        mean, variance = self._mean, self._variance
        if self.training and not self._use_global_stats:
            variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
            with torch.no_grad():
                n = x.numel() // x.shape[1]
                keep = self._momentum
                self._mean.mul_(keep).add_(mean * (1 - keep))
                sample_variance = variance * n / (n - 1)
                self._variance.mul_(keep).add_(sample_variance * (1 - keep))
        x = x - mean[:, None, None]
        x = x / (variance + self._epsilon).sqrt()[:, None, None]
        return x * self.weight[:, None, None] + self.bias[:, None, None]


class Conv2D(nn.Module):
    def __init__(self, ch_in, ch_out, filter_size, stride=1, bias=True):
        super().__init__()
        shape = (ch_out, ch_in, filter_size, filter_size)
        self.weight = nn.Parameter(torch.zeros(shape))
        self.bias = nn.Parameter(torch.zeros(ch_out)) if bias else None
        self._stride, self._padding = stride, (filter_size - 1) // 2

    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias, self._stride, self._padding)


class ConvNormLayer(nn.Module):
    def __init__(self, ch_in, ch_out, filter_size, stride=1, freeze_norm=False):
        super().__init__()
        self.conv = Conv2D(ch_in, ch_out, filter_size, stride, bias=False)
        self.norm = BatchNorm2D(ch_out, use_global_stats=freeze_norm)

    def forward(self, x):
        return self.norm(self.conv(x))


class BasicBlock(nn.Module):
    def __init__(self, ch_in, ch_out, stride, freeze_norm):
        super().__init__()
        self.branch2a = ConvNormLayer(ch_in, ch_out, 3, stride, freeze_norm)
        self.branch2b = ConvNormLayer(ch_out, ch_out, 3, 1, freeze_norm)
        self.short = None
        if stride != 1:
            self.short = ConvNormLayer(ch_in, ch_out, 1, stride, freeze_norm)

    def forward(self, inputs):
        out = F.relu(self.branch2a(inputs))
        out = self.branch2b(out)
        short = inputs if self.short is None else self.short(inputs)
        return F.relu(out + short)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        ch_in = ResNet["ch_in"]
        self.conv1 = ConvNormLayer(3, ch_in, 3, 2, freeze_norm=True)
        self.res_layers = nn.ModuleList()
        for i, ch_out in enumerate(ResNet["stages"]):
            freeze = i in ResNet["freeze_norm"]
            block = BasicBlock(ch_in, ch_out, 1 if i == 0 else 2, freeze)
            self.res_layers.append(block)
            ch_in = ch_out
        if ResNet["freeze_at"] >= 0:
            self.conv1.conv.weight.requires_grad_(False)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        outs = []
        for stage in self.res_layers:
            x = stage(x)
            outs.append(x)
        return outs[1:]


# --------------------------------------------------------------------------- neck


def upsample_nearest(x, size):
    """Each cell takes the one of the coarser map where its corner lies."""
    h, w = x.shape[2:]
    rows = torch.arange(size[0]) * h // size[0]
    columns = torch.arange(size[1]) * w // size[1]
    return x[:, :, rows][:, :, :, columns]


class FPN(nn.Module):
    def __init__(self):
        super().__init__()
        out = FPNConfig["out_channel"]
        self.lateral_convs = nn.ModuleList()
        self.fpn_convs = nn.ModuleList()
        for ch_in in FPNConfig["in_channels"]:
            self.lateral_convs.append(Conv2D(ch_in, out, 1))
            self.fpn_convs.append(Conv2D(out, out, 3))
        self.extra_conv = Conv2D(out, out, 3, stride=2)

    def forward(self, body_feats):
        laterals = [conv(x) for conv, x in zip(self.lateral_convs, body_feats)]
        for lvl in range(len(laterals) - 1, 0, -1):
            upsample = upsample_nearest(laterals[lvl], laterals[lvl - 1].shape[2:])
            laterals[lvl - 1] = laterals[lvl - 1] + upsample
        outs = [conv(x) for conv, x in zip(self.fpn_convs, laterals)]
        outs.append(self.extra_conv(outs[-1]))
        return outs


# --------------------------------------------------------------------------- head


def flatten_pyramid(feats):
    """[N, C, cells] with the cells of all levels in a row."""
    return torch.cat([x.flatten(2) for x in feats], dim=2)


def neighbour_table(shapes):
    """[9, cells]: where the neighbours are; beyond the edge it is the cell behind all."""
    total = sum(h * w for h, w in shapes)
    tables, start = [], 0
    for h, w in shapes:
        rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        taps = []
        for dy in (-1, 0, 1):
            for dx in (-1, 0, 1):
                y, x = rows + dy, columns + dx
                there = (y >= 0) & (y < h) & (x >= 0) & (x < w)
                taps.append(torch.where(there, start + y * w + x, total).flatten())
        tables.append(torch.stack(taps))
        start += h * w
    return torch.cat(tables, dim=1)


class RetinaHead(nn.Module):
    def __init__(self):
        super().__init__()
        ch = FPNConfig["out_channel"]
        anchors = HeadConfig["num_anchors"]
        sizes = {"cls": HeadConfig["num_classes"], "reg": 4}
        for kind, size in sizes.items():
            outs = [ch] * HeadConfig["stacked_convs"] + [anchors * size]
            for i, ch_out in enumerate(outs):
                weight = nn.Parameter(torch.zeros(ch_out, ch * 9))
                self.register_parameter(f"{kind}_w_{i}", weight)
                bias = nn.Parameter(torch.zeros(ch_out, 1))
                self.register_parameter(f"{kind}_b_{i}", bias)

    def conv(self, name, i, table, x):
        weight, bias = getattr(self, f"{name}_w_{i}"), getattr(self, f"{name}_b_{i}")
        x = F.pad(x, (0, 1))[:, :, table]
        return torch.matmul(weight, x.flatten(1, 2)) + bias

    def functions(self, kind, table):
        """The tower: convolutions with ReLU between."""
        tower = []
        for i in range(HeadConfig["stacked_convs"]):
            tower.append(partial(self.conv, kind, i, table))
            tower.append(F.relu)
        tower.append(partial(self.conv, kind, HeadConfig["stacked_convs"], table))
        return tower

    def forward(self, neck_feats):
        table = neighbour_table([x.shape[2:] for x in neck_feats])
        pyramid = flatten_pyramid(neck_feats)
        outs = []
        for kind, size in (("cls", HeadConfig["num_classes"]), ("reg", 4)):
            x = pyramid
            for function in self.functions(kind, table):
                x = function(x)
            outs.append(x.transpose(1, 2).reshape(len(x), -1, size))
        return outs


class RetinaNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.neck = FPN()
        self.head = RetinaHead()

    def forward(self, image):
        cls_logits, bboxes_reg = self.head(self.neck(self.backbone(image)))
        return {"logits": cls_logits, "deltas": bboxes_reg}


# --------------------------------------------------------------------- pretrained


def convert(state):
    """Names of here; kernels of the heads as matrices."""
    params = {}

    def copy(name, key):
        params[f"{name}.weight"] = state[f"{key}.weight"]
        if f"{key}.bias" in state:
            params[f"{name}.bias"] = state[f"{key}.bias"]

    def conv_norm(name, conv, norm):
        copy(f"{name}.conv", conv)
        copy(f"{name}.norm", norm)
        params[f"{name}.norm._mean"] = state[f"{norm}.running_mean"]
        params[f"{name}.norm._variance"] = state[f"{norm}.running_var"]

    conv_norm("backbone.conv1", "backbone.conv1", "backbone.bn1")
    for i in range(4):
        stage, layer = f"backbone.res_layers.{i}", f"backbone.layer{i + 1}"
        conv_norm(f"{stage}.branch2a", f"{layer}.conv1", f"{layer}.bn1")
        conv_norm(f"{stage}.branch2b", f"{layer}.conv2", f"{layer}.bn2")
        if i > 0:
            short = f"{layer}.downsample"
            conv_norm(f"{stage}.short", f"{short}.0", f"{short}.1")
    for i in range(3):
        copy(f"neck.lateral_convs.{i}", f"fpn.inner.{i}")
        copy(f"neck.fpn_convs.{i}", f"fpn.layer.{i}")
    copy("neck.extra_conv", "fpn.extra")
    for kind, key in (("cls", "classification"), ("reg", "regression")):
        names = [f"{key}.conv.0", f"{key}.conv.2", f"{key}.predict"]
        for i, name in enumerate(names):
            params[f"head.{kind}_w_{i}"] = state[f"{name}.weight"].flatten(1)
            params[f"head.{kind}_b_{i}"] = state[f"{name}.bias"].unsqueeze(1)
    return params


def model():
    net = RetinaNet()
    net.load_state_dict(convert(torch.load(Path(__file__).with_name("weights.pt"))))
    return net.train()


# --------------------------------------------------------------------------- data


def pad_batch(batch):
    """Normalized pictures on a canvas of zeros."""
    mean = torch.tensor(NormalizeImage["mean"])[:, None, None]
    std = torch.tensor(NormalizeImage["std"])[:, None, None]
    canvas = torch.zeros(batch["image"].shape)
    for i, (h, w) in enumerate(batch["size"].tolist()):
        im = batch["image"][i, :, :h, :w].float()
        canvas[i, :, :h, :w] = (im - mean) / std
    return canvas


def pad_gt(targets):
    """Boxes [N, most, 4] and classes [N, most] with zeros behind, and a mask."""
    most = max(len(target["boxes"]) for target in targets)
    gt_bbox = torch.zeros(len(targets), most, 4)
    gt_class = torch.zeros(len(targets), most, dtype=torch.long)
    pad_gt_mask = torch.zeros(len(targets), most, dtype=torch.bool)
    for i, target in enumerate(targets):
        num = len(target["boxes"])
        gt_bbox[i, :num] = target["boxes"]
        gt_class[i, :num] = target["labels"]
        pad_gt_mask[i, :num] = True
    return gt_bbox, gt_class, pad_gt_mask


def forward(net, batch):
    return net(pad_batch(batch))


# ------------------------------------------------------------------------ anchors


def cell_anchors(stride):
    """[6, 4] around the middle of a cell."""
    octaves = torch.arange(AnchorConfig["scales_per_octave"])
    scales = 2.0 ** (octaves / AnchorConfig["scales_per_octave"])
    scales = scales * AnchorConfig["octave_base_scale"] * stride
    anchors = []
    for ratio in AnchorConfig["aspect_ratios"]:
        h = scales * ratio**0.5
        w = scales / ratio**0.5
        anchors.append(torch.stack([-w / 2, -h / 2, w / 2, h / 2], dim=1))
    return torch.cat(anchors)


def anchor_generator(height, width):
    every = []
    for stride in AnchorConfig["strides"]:
        shift_x = torch.arange(-(-width // stride)) * stride + stride / 2
        shift_y = torch.arange(-(-height // stride)) * stride + stride / 2
        x = shift_x.repeat(len(shift_y))
        y = shift_y.repeat_interleave(len(shift_x))
        shifts = torch.stack([x, y, x, y], dim=1)
        every.append((shifts[:, None] + cell_anchors(stride)).reshape(-1, 4))
    return torch.cat(every)


def bbox_overlaps(gt_bbox, anchors):
    """[N, boxes, anchors]"""
    px1, py1, px2, py2 = anchors.unbind(-1)
    gx1, gy1, gx2, gy2 = gt_bbox.unsqueeze(2).unbind(-1)
    w = (torch.minimum(px2, gx2) - torch.maximum(px1, gx1)).clip(0)
    h = (torch.minimum(py2, gy2) - torch.maximum(py1, gy1)).clip(0)
    area_p = (px2 - px1) * (py2 - py1)
    area_g = (gx2 - gx1) * (gy2 - gy1)
    return w * h / (area_p + area_g - w * h)


def assign(gt_bbox, pad_gt_mask, anchors, valid):
    """Matched box [N, anchors], and what it is: 1 positive, 0 negative, -1 ignored."""
    ious = bbox_overlaps(gt_bbox, anchors) * valid.unsqueeze(1)
    max_ious, matched = ious.max(dim=1)
    labels = torch.full_like(matched, -1)
    labels[max_ious < MaxIoUAssigner["negative_overlap"]] = 0
    labels[max_ious >= MaxIoUAssigner["positive_overlap"]] = 1

    best = F.one_hot(ious.argmax(dim=2), len(anchors)).bool()
    best = best & pad_gt_mask.unsqueeze(2)
    is_best = best.any(dim=1)
    matched = torch.where(is_best, best.long().argmax(dim=1), matched)
    labels = labels.masked_fill(is_best, 1)
    return matched, labels.masked_fill(~valid, -1)


def bbox2delta(src_boxes, tgt_boxes):
    src_w = src_boxes[..., 2] - src_boxes[..., 0]
    src_h = src_boxes[..., 3] - src_boxes[..., 1]
    src_ctr_x = src_boxes[..., 0] + 0.5 * src_w
    src_ctr_y = src_boxes[..., 1] + 0.5 * src_h
    tgt_w = tgt_boxes[..., 2] - tgt_boxes[..., 0]
    tgt_h = tgt_boxes[..., 3] - tgt_boxes[..., 1]
    tgt_ctr_x = tgt_boxes[..., 0] + 0.5 * tgt_w
    tgt_ctr_y = tgt_boxes[..., 1] + 0.5 * tgt_h
    wx, wy, ww, wh = BBoxCoder["weights"]
    dx = wx * (tgt_ctr_x - src_ctr_x) / src_w
    dy = wy * (tgt_ctr_y - src_ctr_y) / src_h
    dw = ww * torch.log(tgt_w / src_w)
    dh = wh * torch.log(tgt_h / src_h)
    return torch.stack((dx, dy, dw, dh), dim=-1)


# --------------------------------------------------------------------------- loss


def sigmoid_focal_loss(logit, label):
    """[N, anchors, classes], by logarithms of sigmoids."""
    log_p, log_not_p = F.logsigmoid(logit), F.logsigmoid(-logit)
    alpha, gamma = FocalLoss["alpha"], FocalLoss["gamma"]
    positive = -alpha * (1.0 - torch.sigmoid(logit)) ** gamma * log_p
    negative = -(1.0 - alpha) * torch.sigmoid(logit) ** gamma * log_not_p
    return label * positive + (1.0 - label) * negative


def smooth_l1_loss(pred, target):
    beta = SmoothL1Loss["beta"]
    diff = (pred - target).abs()
    return torch.where(diff < beta, 0.5 * diff * diff / beta, diff - 0.5 * beta)


def loss(output, batch):
    cls_logits, bboxes_reg = output["logits"], output["deltas"]
    anchors = anchor_generator(*batch["image"].shape[2:])
    center_x = (anchors[:, 0] + anchors[:, 2]) / 2
    center_y = (anchors[:, 1] + anchors[:, 3]) / 2
    im_h, im_w = batch["size"][:, :1], batch["size"][:, 1:]
    valid = (center_x < im_w) & (center_y < im_h)

    gt_bbox, gt_class, pad_gt_mask = pad_gt(batch["targets"])
    matched, labels = assign(gt_bbox, pad_gt_mask, anchors, valid)
    positive = labels == 1
    tgt_class = gt_class.gather(1, matched)
    # Negatives have the class behind the last.
    background = HeadConfig["num_classes"]
    tgt_class = torch.where(positive, tgt_class, background)
    one_hot = F.one_hot(tgt_class, background + 1)[..., :background].float()
    tgt_bbox = gt_bbox.gather(1, matched.unsqueeze(2).expand(-1, -1, 4))
    tgt_delta = bbox2delta(anchors.expand_as(tgt_bbox)[positive], tgt_bbox[positive])

    avg_factor = max(1.0, float(positive.sum()))
    loss_cls = sigmoid_focal_loss(cls_logits, one_hot) * (labels >= 0).unsqueeze(2)
    loss_cls = FocalLoss["loss_weight"] * loss_cls.sum() / avg_factor
    loss_reg = smooth_l1_loss(bboxes_reg[positive], tgt_delta)
    loss_reg = SmoothL1Loss["loss_weight"] * loss_reg.sum() / avg_factor
    return loss_cls + loss_reg


# ---------------------------------------------------------------------- optimizer


class PiecewiseDecay:
    def __init__(self, base_lr, milestones, gamma):
        self.base_lr, self.milestones, self.gamma = base_lr, milestones, gamma

    def get_lr(self, step):
        passed = sum(step >= milestone for milestone in self.milestones)
        return self.base_lr * self.gamma**passed


class LinearWarmup:
    def __init__(self, after, warmup_steps, start_factor):
        self.after, self.warmup_steps = after, warmup_steps
        self.start_factor = start_factor
        self.last_epoch = 0

    def get_lr(self):
        if self.last_epoch < self.warmup_steps:
            alpha = self.last_epoch / self.warmup_steps
            factor = self.start_factor * (1.0 - alpha) + alpha
            return self.after.base_lr * factor
        return self.after.get_lr(self.last_epoch)

    def step(self):
        self.last_epoch += 1


class L2Decay:
    def __init__(self, coeff):
        self.coeff = coeff

    def __call__(self, grad, param):
        return grad + self.coeff * param


class Momentum(torch.optim.Optimizer):
    def __init__(self, learning_rate, momentum, parameters, regularizer):
        super().__init__(parameters, {})
        self._learning_rate, self._momentum = learning_rate, momentum
        self._regularizer = regularizer

    @torch.no_grad()
    def step(self, closure=None):
        lr = self._learning_rate.get_lr()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    grad = param.grad
                    if group["need_decay"]:
                        grad = self._regularizer(grad, param)
                    self._append_optimize_op(param, grad, lr)
        self._learning_rate.step()

    def _append_optimize_op(self, param, grad, lr):
        state = self.state[param]
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(param)
        velocity = state["velocity"]
        velocity.copy_(self._momentum * velocity + grad)
        param.sub_(lr * velocity)


def optimizer(net):
    """Biases (columns in the heads) and norms have no regularizer."""
    params_with_decay, params_without_decay = [], []
    for name, param in net.named_parameters():
        if not param.requires_grad:
            continue
        plain = "norm" in name or "bias" in name or "_b_" in name
        (params_without_decay if plain else params_with_decay).append(param)
    decay = PiecewiseDecay(
        LearningRate["base_lr"], LearningRate["milestones"], LearningRate["gamma"]
    )
    return Momentum(
        LinearWarmup(decay, LearningRate["warmup_steps"], LearningRate["start_factor"]),
        OptimizerBuilder["momentum"],
        [
            {"params": params_with_decay, "need_decay": True},
            {"params": params_without_decay, "need_decay": False},
        ],
        L2Decay(OptimizerBuilder["regularizer"]),
    )
