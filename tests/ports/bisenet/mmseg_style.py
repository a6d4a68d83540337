"""After MMSegmentation: configs as dicts, registries, ConvModules, losses with avg_factor."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

norm_cfg = dict(type="BN", eps=1e-5, momentum=0.1)

model_cfg = dict(
    type="EncoderDecoder",
    data_preprocessor=dict(
        mean=[107.1, 114.75, 96.9], std=[51.0, 68.85, 58.65], seg_pad_val=255
    ),
    backbone=dict(
        type="BiSeNetV1",
        backbone_cfg=dict(
            type="ShuffleNet", stem_channels=16, channels=(24, 32, 48), depths=(1, 2, 1)
        ),
        spatial_channels=(16, 16, 24, 32),
        context_channels=(32, 48),
        out_channels=32,
        fuse_channels=48,
        align_corners=False,
    ),
    decode_head=dict(
        type="FCNHead",
        in_channels=48,
        in_index=0,
        channels=32,
        num_classes=6,
        align_corners=True,
    ),
    auxiliary_head=[
        dict(
            type="FCNHead",
            in_channels=32,
            in_index=1,
            channels=24,
            num_classes=6,
            align_corners=False,
        ),
        dict(
            type="FCNHead",
            in_channels=32,
            in_index=2,
            channels=24,
            num_classes=6,
            align_corners=False,
        ),
        dict(
            type="FCNHead",
            in_channels=32,
            in_index=3,
            channels=16,
            num_classes=1,
            align_corners=True,
        ),
    ],
)

aux_loss_cfg = dict(
    type="CrossEntropyLoss",
    loss_weight=0.4,
    sampler=dict(type="OHEMPixelSampler", thresh=0.2, min_kept=500),
)
loss_cfg = dict(
    out=dict(
        type="CrossEntropyLoss",
        loss_weight=1.0,
        sampler=dict(type="OHEMPixelSampler", thresh=0.02, min_kept=1500),
    ),
    aux8=aux_loss_cfg,
    aux16=aux_loss_cfg,
    detail=dict(type="BoundaryLoss", loss_weight=0.8),
)

optim_wrapper = dict(
    optimizer=dict(type="SGD", lr=2e-3, momentum=0.9, nesterov=True, weight_decay=5e-3),
    paramwise_cfg=dict(
        custom_keys={
            "decode_head": dict(lr_mult=10.0),
            "auxiliary_head": dict(lr_mult=10.0),
        },
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
    ),
)
param_scheduler = dict(type="PolyLR", eta_min=0.0, power=0.9, begin=0, end=10)
resume_iter = 3

# ----------------------------------------------------------------------- registries


class Registry:
    def __init__(self):
        self.classes = {}

    def register_module(self, name=None):
        def register(cls):
            self.classes[name or cls.__name__] = cls
            return cls

        return register

    def build(self, cfg, **default_args):
        args = default_args | cfg
        return self.classes[args.pop("type")](**args)


MODELS, ACTIVATIONS, NORMS, LOSSES, SAMPLERS = (Registry() for _ in range(5))

# --------------------------------------------------------------------------- bricks


@ACTIVATIONS.register_module()
class ReLU(nn.ReLU):
    pass


@ACTIVATIONS.register_module()
class HSigmoid(nn.Module):
    def __init__(self, bias=3.0, divisor=6.0, min_value=0.0, max_value=1.0):
        super().__init__()
        self.bias, self.divisor = bias, divisor
        self.min_value, self.max_value = min_value, max_value

    def forward(self, x):
        x = (x + self.bias) / self.divisor
        return x.clamp(self.min_value, self.max_value)


@ACTIVATIONS.register_module()
class HSwish(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = HSigmoid()

    def forward(self, x):
        return x * self.gate(x)


@NORMS.register_module("BN")
class SyncedBatchNorm(nn.Module):
    """Statistics are of the whole batch, kept as PyTorch keeps them."""

    def __init__(self, num_features, eps, momentum):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x):
        if self.training:
            var, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0)
            n = x.numel() // x.size(1)
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var * n / (n - 1), self.momentum)
        else:
            mean = self.get_buffer("running_mean")
            var = self.get_buffer("running_var")
        mean, var = mean.view(1, -1, 1, 1), var.view(1, -1, 1, 1)
        x = (x - mean) / (var + self.eps).sqrt()
        return x * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


class ConvModule(nn.Module):
    """Convolution, norm and activation, each of the last two where it has a config."""

    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size,
        stride=1,
        padding=0,
        groups=1,
        norm_cfg=norm_cfg,
        act_cfg=dict(type="ReLU"),
    ):
        super().__init__()
        self.conv = nn.Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            groups=groups,
            bias=norm_cfg is None,
        )
        self.norm = (
            NORMS.build(norm_cfg, num_features=out_channels) if norm_cfg else None
        )
        self.activate = ACTIVATIONS.build(act_cfg) if act_cfg else None

    def forward(self, x):
        x = self.conv(x)
        if self.norm is not None:
            x = self.norm(x)
        if self.activate is not None:
            x = self.activate(x)
        return x


class DepthwiseSeparableConvModule(nn.Module):
    def __init__(self, in_channels, out_channels, stride, dw_act_cfg, pw_act_cfg):
        super().__init__()
        self.depthwise_conv = ConvModule(
            in_channels,
            in_channels,
            3,
            stride=stride,
            padding=1,
            groups=in_channels,
            act_cfg=dw_act_cfg,
        )
        self.pointwise_conv = ConvModule(
            in_channels, out_channels, 1, act_cfg=pw_act_cfg
        )

    def forward(self, x):
        return self.pointwise_conv(self.depthwise_conv(x))


def resize(x, size, mode="nearest", align_corners=None):
    return F.interpolate(x, tuple(size), mode=mode, align_corners=align_corners)


# ------------------------------------------------------------------------- backbones


class InvertedResidual(nn.Module):
    def __init__(self, in_channels, out_channels, stride):
        super().__init__()
        self.stride = stride
        branch_features = out_channels // 2
        acts = dict(dw_act_cfg=dict(type="HSwish"), pw_act_cfg=dict(type="ReLU"))
        if stride > 1:
            self.branch1 = DepthwiseSeparableConvModule(
                in_channels, branch_features, stride, **acts
            )
        self.branch2 = nn.Sequential(
            ConvModule(
                in_channels if stride > 1 else branch_features, branch_features, 1
            ),
            DepthwiseSeparableConvModule(
                branch_features, branch_features, stride, **acts
            ),
        )

    def forward(self, x):
        if self.stride > 1:
            pair = (self.branch1(x), self.branch2(x))
        else:
            x1, x2 = x.chunk(2, dim=1)
            pair = (x1, self.branch2(x2))
        # Channels of the two take turns.
        return torch.stack(pair, dim=2).flatten(1, 2)


@MODELS.register_module()
class ShuffleNet(nn.Module):
    def __init__(self, stem_channels, channels, depths):
        super().__init__()
        self.conv1 = ConvModule(3, stem_channels, 3, stride=2, padding=1)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layers = nn.ModuleList()
        in_channels = stem_channels
        for out_channels, depth in zip(channels, depths):
            layer = [InvertedResidual(in_channels, out_channels, 2)]
            for _ in range(1, depth):
                layer.append(InvertedResidual(out_channels, out_channels, 1))
            self.layers.append(nn.Sequential(*layer))
            in_channels = out_channels

    def forward(self, x):
        x = self.maxpool(self.conv1(x))
        outs = []
        for layer in self.layers:
            x = layer(x)
            outs.append(x)
        return tuple(outs)


class AttentionRefinementModule(nn.Module):
    def __init__(self, in_channels, out_channel):
        super().__init__()
        self.conv_layer = ConvModule(in_channels, out_channel, 3, padding=1)
        self.atten_conv_layer = nn.Sequential(
            nn.AdaptiveAvgPool2d((1, 1)),
            ConvModule(out_channel, out_channel, 1, act_cfg=None),
            nn.Sigmoid(),
        )

    def forward(self, x):
        x = self.conv_layer(x)
        return x * self.atten_conv_layer(x)


class ContextPath(nn.Module):
    def __init__(self, backbone_cfg, context_channels, out_channels, align_corners):
        super().__init__()
        self.align_corners = align_corners
        self.backbone = MODELS.build(backbone_cfg)
        self.arm16 = AttentionRefinementModule(context_channels[0], out_channels)
        self.arm32 = AttentionRefinementModule(context_channels[1], out_channels)
        self.conv_head32 = ConvModule(out_channels, out_channels, 3, padding=1)
        self.conv_head16 = ConvModule(out_channels, out_channels, 3, padding=1)
        self.gap_conv = nn.Sequential(
            nn.AdaptiveAvgPool2d((1, 1)),
            ConvModule(context_channels[1], out_channels, 1),
        )

    def forward(self, x):
        x_8, x_16, x_32 = self.backbone(x)
        x_gap = self.gap_conv(x_32)

        x_32_arm = self.arm32(x_32)
        x_32_sum = x_32_arm + x_gap
        x_32_up = resize(x_32_sum, x_16.shape[2:], "bilinear", self.align_corners)
        x_32_up = self.conv_head32(x_32_up)

        x_16_sum = self.arm16(x_16) + x_32_up
        x_16_up = resize(x_16_sum, x_8.shape[2:], "bilinear", self.align_corners)
        x_16_up = self.conv_head16(x_16_up)
        return x_16_up, x_32_up


class SpatialPath(nn.Module):
    def __init__(self, num_channels):
        super().__init__()
        self.layers = nn.Sequential(
            ConvModule(3, num_channels[0], 7, stride=2, padding=3),
            ConvModule(num_channels[0], num_channels[1], 3, stride=2, padding=1),
            ConvModule(num_channels[1], num_channels[2], 3, stride=2, padding=1),
            ConvModule(num_channels[2], num_channels[3], 1),
        )

    def forward(self, x):
        return self.layers(x)


class FeatureFusionModule(nn.Module):
    """Each path has its own projection; their sum is normed."""

    def __init__(self, spatial_channels, context_channels, out_channels, ratio=4):
        super().__init__()
        self.proj_sp = nn.Linear(spatial_channels, out_channels, bias=False)
        self.proj_cp = nn.Linear(context_channels, out_channels, bias=False)
        self.norm = NORMS.build(norm_cfg, num_features=out_channels)
        self.fc1 = nn.Linear(out_channels, out_channels // ratio)
        self.fc2 = nn.Linear(out_channels // ratio, out_channels)

    def forward(self, x_sp, x_cp):
        x_sp, x_cp = x_sp.movedim(1, -1), x_cp.movedim(1, -1)
        x_fuse = self.proj_sp(x_sp) + self.proj_cp(x_cp)
        x_fuse = F.relu(self.norm(x_fuse.movedim(-1, 1)))
        x_atten = F.adaptive_avg_pool2d(x_fuse, 1).flatten(1)
        x_atten = self.fc2(F.relu(self.fc1(x_atten))).sigmoid()
        x_atten = x_fuse * x_atten[:, :, None, None]
        return x_atten + x_fuse


@MODELS.register_module()
class BiSeNetV1(nn.Module):
    def __init__(
        self,
        backbone_cfg,
        spatial_channels,
        context_channels,
        out_channels,
        fuse_channels,
        align_corners,
    ):
        super().__init__()
        self.context_path = ContextPath(
            backbone_cfg, context_channels, out_channels, align_corners
        )
        self.spatial_path = SpatialPath(spatial_channels)
        self.ffm = FeatureFusionModule(
            spatial_channels[-1], out_channels, fuse_channels
        )

    def forward(self, x):
        x_context8, x_context16 = self.context_path(x)
        x_spatial = self.spatial_path(x)
        x_fuse = self.ffm(x_spatial, x_context8)
        return x_fuse, x_context8, x_context16, x_spatial


# ---------------------------------------------------------------------------- losses


def weight_reduce_loss(loss, weight=None, avg_factor=None):
    if weight is not None:
        loss = loss * weight
    return loss.mean() if avg_factor is None else loss.sum() / avg_factor


@SAMPLERS.register_module()
class OHEMPixelSampler:
    def __init__(self, thresh, min_kept):
        self.thresh, self.min_kept = thresh, min_kept

    @torch.no_grad()
    def sample(self, seg_logit, seg_label, ignore_index):
        """Weights: 1 where a pixel is kept."""
        batch_kept = self.min_kept * seg_label.size(0)
        valid_mask = seg_label != ignore_index
        seg_weight = seg_logit.new_zeros(seg_label.shape)
        valid_seg_weight = seg_weight[valid_mask]

        seg_prob = F.softmax(seg_logit, dim=1)
        tmp_label = seg_label.clone()
        tmp_label[tmp_label == ignore_index] = 0
        seg_prob = seg_prob.gather(1, tmp_label.unsqueeze(1)).squeeze(1)
        sort_prob, _ = seg_prob[valid_mask].sort()
        min_threshold = sort_prob[min(batch_kept, sort_prob.numel() - 1)]
        threshold = max(min_threshold, self.thresh)
        valid_seg_weight[seg_prob[valid_mask] < threshold] = 1.0
        seg_weight[valid_mask] = valid_seg_weight
        return seg_weight


@LOSSES.register_module()
class CrossEntropyLoss(nn.Module):
    def __init__(self, loss_weight, sampler):
        super().__init__()
        self.loss_weight = loss_weight
        self.sampler = SAMPLERS.build(sampler)

    def forward(self, cls_score, label, ignore_index):
        seg_weight = self.sampler.sample(cls_score, label, ignore_index)
        loss_ce = F.cross_entropy(
            cls_score, label, reduction="none", ignore_index=ignore_index
        )
        avg_factor = seg_weight.sum()
        return self.loss_weight * weight_reduce_loss(loss_ce, seg_weight, avg_factor)


@LOSSES.register_module()
class BoundaryLoss(nn.Module):
    """Binary cross-entropy and dice against edges of the labels on three scales."""

    def __init__(self, loss_weight, strides=(1, 2, 4), fuse_kernel=(6, 3, 1)):
        super().__init__()
        self.loss_weight = loss_weight
        self.strides = strides
        laplacian = -torch.ones(1, 1, 3, 3)
        laplacian[..., 1, 1] = 8.0
        self.laplacian_kernel = laplacian
        self.fuse_kernel = torch.tensor(fuse_kernel).view(1, 3, 1, 1) / 10

    @torch.no_grad()
    def boundary_targets(self, label, ignore_index):
        label = label.masked_fill(label == ignore_index, 0)[:, None].float()
        pyramid = []
        for stride in self.strides:
            edges = F.conv2d(label, self.laplacian_kernel, stride=stride, padding=1)
            edges = edges.clamp(min=0).gt(0.1).float()
            pyramid.append(resize(edges, label.shape[2:]))
        return F.conv2d(torch.cat(pyramid, dim=1), self.fuse_kernel).squeeze(1)

    def dice(self, pred, target, smooth=1.0):
        pred, target = pred.flatten(1), target.flatten(1)
        intersection = (pred * target).sum(1)
        total = pred.sum(1) + target.sum(1)
        return (1 - (2 * intersection + smooth) / (total + smooth)).mean()

    def forward(self, cls_score, label, ignore_index):
        pred = cls_score.squeeze(1)
        target = self.boundary_targets(label, ignore_index)
        valid = (label != ignore_index).float()
        bce = -target * F.logsigmoid(pred) - (1 - target) * F.logsigmoid(-pred)
        loss_bce = weight_reduce_loss(bce, valid, avg_factor=valid.sum())
        loss_dice = self.dice(pred.sigmoid() * valid, target * valid)
        return self.loss_weight * (loss_bce + loss_dice)


# ----------------------------------------------------------------------------- heads


@MODELS.register_module()
class FCNHead(nn.Module):
    def __init__(
        self,
        in_channels,
        in_index,
        channels,
        num_classes,
        align_corners,
    ):
        super().__init__()
        self.in_index = in_index
        self.align_corners = align_corners
        self.convs = nn.Sequential(ConvModule(in_channels, channels, 3, padding=1))
        self.conv_seg = nn.Conv2d(channels, num_classes, kernel_size=1)

    def forward(self, inputs, size):
        logits = self.conv_seg(self.convs(inputs[self.in_index]))
        return resize(logits, size, "bilinear", self.align_corners)


@MODELS.register_module()
class EncoderDecoder(nn.Module):
    def __init__(self, data_preprocessor, backbone, decode_head, auxiliary_head):
        super().__init__()
        self.data_preprocessor = data_preprocessor
        self.backbone = MODELS.build(backbone)
        self.decode_head = MODELS.build(decode_head)
        self.auxiliary_head = nn.ModuleList([MODELS.build(c) for c in auxiliary_head])

    def preprocess(self, image):
        mean = torch.tensor(self.data_preprocessor["mean"]).view(-1, 1, 1)
        std = torch.tensor(self.data_preprocessor["std"]).view(-1, 1, 1)
        return (image.movedim(-1, 1).float() - mean) / std

    def forward(self, image):
        inputs = self.preprocess(image)
        feats = self.backbone(inputs)
        heads = [self.decode_head, *self.auxiliary_head]
        return [head(feats, inputs.shape[2:]) for head in heads]


# ----------------------------------------------------------------------- checkpoints

PREFIXES = {
    "spatial.conv1.": "backbone.spatial_path.layers.0.",
    "spatial.conv2.": "backbone.spatial_path.layers.1.",
    "spatial.conv3.": "backbone.spatial_path.layers.2.",
    "spatial.conv_out.": "backbone.spatial_path.layers.3.",
    "context.backbone.stem.": "backbone.context_path.backbone.conv1.",
    "context.backbone.stages.": "backbone.context_path.backbone.layers.",
    "context.arm16.": "backbone.context_path.arm16.",
    "context.arm32.": "backbone.context_path.arm32.",
    "context.conv_avg.": "backbone.context_path.gap_conv.1.",
    "context.conv_head32.": "backbone.context_path.conv_head32.",
    "context.conv_head16.": "backbone.context_path.conv_head16.",
    "fusion.convblk.bn.": "backbone.ffm.norm.",
    "fusion.squeeze.": "backbone.ffm.fc1.",
    "fusion.excite.": "backbone.ffm.fc2.",
    "head.": "decode_head.",
    "head_aux8.": "auxiliary_head.0.",
    "head_aux16.": "auxiliary_head.1.",
    "head_detail.": "auxiliary_head.2.",
}
HEAD_PARTS = {
    "conv_out.": "conv_seg.",
    "conv.bn.": "convs.0.norm.",
    "conv.": "convs.0.",
}
UNIT_PARTS = {
    "shortcut.dw.": "branch1.depthwise_conv.conv.",
    "shortcut.bn1.": "branch1.depthwise_conv.norm.",
    "shortcut.pw.": "branch1.pointwise_conv.conv.",
    "shortcut.bn2.": "branch1.pointwise_conv.norm.",
    "reduce.bn.": "branch2.0.norm.",
    "reduce.": "branch2.0.",
    "separable.dw.": "branch2.1.depthwise_conv.conv.",
    "separable.bn1.": "branch2.1.depthwise_conv.norm.",
    "separable.pw.": "branch2.1.pointwise_conv.conv.",
    "separable.bn2.": "branch2.1.pointwise_conv.norm.",
}
ARM_PARTS = {
    "conv_atten.": "atten_conv_layer.1.conv.",
    "bn_atten.": "atten_conv_layer.1.norm.",
    "conv.bn.": "conv_layer.norm.",
    "conv.": "conv_layer.",
}


def renamed(name, parts):
    for old, new in parts.items():
        if name.startswith(old):
            return new + name[len(old) :]
    raise KeyError(name)


def convert_key(key):
    for old, new in PREFIXES.items():
        if not key.startswith(old):
            continue
        rest = key[len(old) :]
        if ".stages." in old:
            stage, unit, rest = rest.split(".", 2)
            return f"{new}{stage}.{unit}.{renamed(rest, UNIT_PARTS)}"
        if ".arm" in old:
            return new + renamed(rest, ARM_PARTS)
        if old.startswith("head"):
            return new + renamed(rest, HEAD_PARTS)
        return new + rest.replace("bn.", "norm.")
    raise KeyError(key)


def convert_state_dict(checkpoint):
    state_dict = {}
    for key, value in checkpoint.items():
        if key.endswith("num_batches_tracked"):
            continue
        if key == "fusion.convblk.conv.weight":
            proj_sp, proj_cp = value.flatten(1).chunk(2, dim=1)
            state_dict["backbone.ffm.proj_sp.weight"] = proj_sp
            state_dict["backbone.ffm.proj_cp.weight"] = proj_cp
            continue
        new_key = convert_key(key)
        if ".ffm.fc" in new_key and value.ndim == 4:
            value = value.flatten(1)
        state_dict[new_key] = value
    return state_dict


def model():
    torch.manual_seed(0)
    segmentor = MODELS.build(model_cfg)
    checkpoint = torch.load(Path(__file__).with_name("weights.pt"))
    segmentor.load_state_dict(convert_state_dict(checkpoint), strict=False)
    return segmentor


def forward(net, batch):
    names = ("out", "aux8", "aux16", "detail")
    return dict(zip(names, net(batch["image"])))


def loss(output, batch):
    seg_label = batch["label"].long()
    ignore_index = model_cfg["data_preprocessor"]["seg_pad_val"]
    losses = {}
    for name, cfg in loss_cfg.items():
        criterion = LOSSES.build(cfg)
        losses[f"loss_{name}"] = criterion(output[name], seg_label, ignore_index)
    return sum(losses.values())


# ------------------------------------------------------------------------- optimizer


class PolyLR:
    def __init__(self, eta_min, power, begin, end):
        self.eta_min, self.power, self.begin, self.end = eta_min, power, begin, end

    def at(self, base_lr, iteration):
        done = (iteration - self.begin) / (self.end - self.begin)
        return (base_lr - self.eta_min) * (1 - done) ** self.power + self.eta_min


class OptimWrapper(torch.optim.SGD):
    """Each parameter is a group of its own; the scheduler sets its rate before a step."""

    def __init__(self, net, optimizer, paramwise_cfg, scheduler, iteration):
        cfg = dict(optimizer)
        cfg.pop("type")
        self.scheduler, self.iteration = scheduler, iteration
        super().__init__(self.add_params(net, cfg, paramwise_cfg), **cfg)

    @staticmethod
    def add_params(net, cfg, paramwise_cfg):
        groups = []
        norms = tuple(NORMS.classes.values())
        custom_keys = paramwise_cfg["custom_keys"]
        for prefix, module in net.named_modules():
            for name, param in module.named_parameters(prefix, recurse=False):
                lr, decay = cfg["lr"], cfg["weight_decay"]
                for key in sorted(custom_keys, key=len, reverse=True):
                    if key in name:
                        lr = lr * custom_keys[key]["lr_mult"]
                        break
                if isinstance(module, norms):
                    decay = decay * paramwise_cfg["norm_decay_mult"]
                elif name.endswith(".bias"):
                    decay = decay * paramwise_cfg["bias_decay_mult"]
                groups.append(
                    {"params": [param], "lr": lr, "base_lr": lr, "weight_decay": decay}
                )
        return groups

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = self.scheduler.at(group["base_lr"], self.iteration)
        self.iteration += 1
        return super().step(closure)


def optimizer(net):
    scheduler_cfg = dict(param_scheduler)
    scheduler_cfg.pop("type")
    return OptimWrapper(
        net, scheduler=PolyLR(**scheduler_cfg), iteration=resume_iter, **optim_wrapper
    )
