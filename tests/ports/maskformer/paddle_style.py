"""After PaddleSeg and PaddleDetection: Linear weights [in, out], one weight for q, k and v.

A mask is True where a query may attend; the criterion keeps its losses by name.
"""

import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

cfg = {
    "stem_channels": 12,
    "num_filters": [16, 20, 26, 34],
    "conv_dim": 20,
    "num_groups": 5,
    "mask_dim": 18,
    "hidden_dim": 28,
    "nheads": 4,
    "dim_feedforward": 44,
    "dec_layers": 4,
    "num_feature_levels": 3,
    "mlp_hidden": [32, 24],
    "num_queries": 9,
    "num_classes": 5,
}

# ------------------------------------------------------------------------- layers


class Linear(nn.Module):
    """Weight: [in, out]."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x):
        return torch.matmul(x, self.weight) + self.bias


class LayerNorm(nn.Module):
    def __init__(self, normalized_shape, epsilon=1e-5):
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.bias = nn.Parameter(torch.zeros(normalized_shape))

    def forward(self, x):
        mean = torch.mean(x, dim=-1, keepdim=True)
        variance = torch.mean(torch.square(x - mean), dim=-1, keepdim=True)
        out = (x - mean) / torch.sqrt(variance + self.epsilon)
        return out * self.weight + self.bias


class BatchNorm(nn.Module):
    """The momentum is what is kept of the moving statistics."""

    def __init__(self, num_channels, act=None, momentum=0.9, epsilon=1e-5):
        super().__init__()
        self.act, self.momentum, self.epsilon = act, momentum, epsilon
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))
        self.register_buffer("_mean", torch.zeros(num_channels))
        self.register_buffer("_variance", torch.ones(num_channels))

    @torch.no_grad()
    def update(self, mean, variance, count):
        keep, unbiased = self.momentum, variance * (count / (count - 1))
        self._mean.copy_(keep * self._mean + (1 - keep) * mean)
        self._variance.copy_(keep * self._variance + (1 - keep) * unbiased)

    def statistics(self, x):
        if not self.training:
            return self._mean, self._variance
        variance, mean = torch.var_mean(x, dim=[0, 2, 3], correction=0)
        self.update(mean, variance, x.numel() // x.shape[1])
        return mean, variance

    def forward(self, x):
        mean, variance = self.statistics(x)
        scale = self.weight / torch.sqrt(variance + self.epsilon)
        shift = self.bias - mean * scale
        out = x * scale.reshape([-1, 1, 1]) + shift.reshape([-1, 1, 1])
        return F.relu(out) if self.act == "relu" else out


class GroupNorm(nn.Module):
    def __init__(self, num_groups, num_channels, epsilon=1e-5):
        super().__init__()
        self.num_groups, self.epsilon = num_groups, epsilon
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))

    def forward(self, x):
        grouped = x.reshape([x.shape[0], self.num_groups, -1])
        mean = torch.mean(grouped, dim=-1, keepdim=True)
        centered = grouped - mean
        variance = torch.mean(centered * centered, dim=-1, keepdim=True)
        out = centered / torch.sqrt(variance + self.epsilon)
        out = out.reshape(x.shape) * self.weight.reshape([1, -1, 1, 1])
        return out + self.bias.reshape([1, -1, 1, 1])


class ConvBNLayer(nn.Module):
    def __init__(self, in_ch, out_ch, kernel_size, stride=1, act=None, vd_mode=False):
        super().__init__()
        self.vd_mode = vd_mode
        padding = (kernel_size - 1) // 2
        self._conv = nn.Conv2d(in_ch, out_ch, kernel_size, stride, padding, bias=False)
        self._batch_norm = BatchNorm(out_ch, act=act)

    def forward(self, inputs):
        if self.vd_mode:
            inputs = F.avg_pool2d(
                inputs, 2, 2, padding=0, ceil_mode=True, count_include_pad=False
            )
        return self._batch_norm(self._conv(inputs))


class ConvGNLayer(nn.Module):
    def __init__(self, in_ch, out_ch, kernel_size):
        super().__init__()
        padding = (kernel_size - 1) // 2
        self.conv = nn.Conv2d(in_ch, out_ch, kernel_size, padding=padding, bias=False)
        self.norm = GroupNorm(cfg["num_groups"], out_ch)

    def forward(self, x):
        return self.norm(self.conv(x))


# ----------------------------------------------------------------------- backbone


class BasicBlock(nn.Module):
    def __init__(self, in_ch, out_ch, stride):
        super().__init__()
        self.conv0 = ConvBNLayer(in_ch, out_ch, 3, stride, act="relu")
        self.conv1 = ConvBNLayer(out_ch, out_ch, 3)
        self.short = ConvBNLayer(in_ch, out_ch, 1, vd_mode=stride != 1)

    def forward(self, inputs):
        y = self.conv1(self.conv0(inputs))
        return F.relu(self.short(inputs) + y)


class ResNet_vd(nn.Module):
    def __init__(self):
        super().__init__()
        in_ch = cfg["stem_channels"]
        self.conv1_1 = ConvBNLayer(3, in_ch, 3, stride=2, act="relu")
        self.stage_list = []
        for block, out_ch in enumerate(cfg["num_filters"]):
            stride = 1 if block == 0 else 2
            self.add_module(f"bb_{block}_0", BasicBlock(in_ch, out_ch, stride))
            self.stage_list.append(f"bb_{block}_0")
            in_ch = out_ch

    def forward(self, inputs):
        y = F.max_pool2d(self.conv1_1(inputs), 3, 2, 1)
        feat_list = []
        for name in self.stage_list:
            y = getattr(self, name)(y)
            feat_list.append(y)
        return feat_list


# ------------------------------------------------------------------ pixel decoder


class BasePixelDecoder(nn.Module):
    """Layers are listed from the top, the smallest features, down."""

    def __init__(self):
        super().__init__()
        conv_dim, in_channels = cfg["conv_dim"], cfg["num_filters"][::-1]
        self.top_conv = ConvGNLayer(in_channels[0], conv_dim, 3)
        self.lateral_convs = nn.ModuleList()
        self.output_convs = nn.ModuleList()
        for in_ch in in_channels[1:]:
            self.lateral_convs.append(ConvGNLayer(in_ch, conv_dim, 1))
            self.output_convs.append(ConvGNLayer(conv_dim, conv_dim, 3))
        self.mask_features = nn.Conv2d(conv_dim, cfg["mask_dim"], 3, padding=1)

    def forward(self, feat_list):
        top, *below = feat_list[::-1]
        y = F.relu(self.top_conv(top))
        multi_scale_features = [y]
        for x, lateral_conv, output_conv in zip(
            below, self.lateral_convs, self.output_convs
        ):
            cur_fpn = lateral_conv(x)
            y = cur_fpn + F.interpolate(y, size=cur_fpn.shape[-2:], mode="nearest")
            y = F.relu(output_conv(y))
            if len(multi_scale_features) < cfg["num_feature_levels"]:
                multi_scale_features.append(y)
        return self.mask_features(y), multi_scale_features


# -------------------------------------------------------------------- transformer


def sine_position_embedding(h, w, embed_dim, temperature=10000.0):
    """[1, h * w, embed_dim]; a cosine is a sine that is a quarter ahead."""
    pos_dim = embed_dim // 2
    channel = torch.arange(pos_dim, dtype=torch.float32)
    omega = 1.0 / temperature ** (2.0 * torch.floor(channel / 2.0) / pos_dim)
    phase = (channel % 2) * (math.pi / 2.0)
    y_embed = torch.arange(1, h + 1, dtype=torch.float32) / (h + 1e-6)
    x_embed = torch.arange(1, w + 1, dtype=torch.float32) / (w + 1e-6)
    grid_y, grid_x = torch.meshgrid(y_embed, x_embed, indexing="ij")
    pos = [
        torch.sin(grid.reshape([-1, 1]) * (2.0 * math.pi) * omega + phase)
        for grid in (grid_y, grid_x)
    ]
    return torch.concat(pos, dim=1).unsqueeze(0)


class MultiHeadAttention(nn.Module):
    """in_proj_weight: [embed_dim, 3 * embed_dim], the columns of q, k and v side by side."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.in_proj_weight = nn.Parameter(torch.zeros(embed_dim, 3 * embed_dim))
        self.out_proj = Linear(embed_dim, embed_dim)

    def compute_qkv(self, tensor, index):
        start = index * self.embed_dim
        weight = self.in_proj_weight[:, start : start + self.embed_dim]
        tensor = torch.matmul(tensor, weight)
        tensor = tensor.reshape([*tensor.shape[:2], self.num_heads, self.head_dim])
        return tensor.permute([0, 2, 1, 3])

    def forward(self, query, key, value, attn_mask=None):
        q, k, v = (self.compute_qkv(t, i) for i, t in enumerate([query, key, value]))
        product = torch.matmul(
            q * float(self.head_dim) ** -0.5, k.permute([0, 1, 3, 2])
        )
        if attn_mask is not None:
            product = product + (attn_mask.to(product.dtype) - 1.0) * 1e9
        weights = F.softmax(product, dim=-1)
        out = torch.matmul(weights, v).permute([0, 2, 1, 3])
        return self.out_proj(out.reshape([*out.shape[:2], self.embed_dim]))


class TransformerDecoderLayer(nn.Module):
    def __init__(self, d_model, nhead, dim_feedforward):
        super().__init__()
        self.cross_attn = MultiHeadAttention(d_model, nhead)
        self.self_attn = MultiHeadAttention(d_model, nhead)
        self.linear1 = Linear(d_model, dim_feedforward)
        self.linear2 = Linear(dim_feedforward, d_model)
        self.norm1 = LayerNorm(d_model)
        self.norm2 = LayerNorm(d_model)
        self.norm3 = LayerNorm(d_model)

    def with_pos_embed(self, tensor, pos_embed):
        return tensor if pos_embed is None else tensor + pos_embed

    def forward(self, tgt, memory, memory_mask, pos_embed, query_pos_embed):
        residual = tgt
        q = self.with_pos_embed(tgt, query_pos_embed)
        k = self.with_pos_embed(memory, pos_embed)
        tgt = self.cross_attn(q, k, value=memory, attn_mask=memory_mask)
        tgt = self.norm1(residual + tgt)

        residual = tgt
        q = k = self.with_pos_embed(tgt, query_pos_embed)
        tgt = self.self_attn(q, k, value=tgt)
        tgt = self.norm2(residual + tgt)

        residual = tgt
        tgt = self.linear2(F.relu(self.linear1(tgt)))
        return self.norm3(residual + tgt)


class MLP(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.layers = nn.ModuleList(Linear(n, k) for n, k in zip(dims[:-1], dims[1:]))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(x)) if i < len(self.layers) - 1 else layer(x)
        return x


class MaskTransformer(nn.Module):
    """The 1x1 convolutions of all levels are one weight [level, in, out]."""

    def __init__(self):
        super().__init__()
        dim, levels = cfg["hidden_dim"], cfg["num_feature_levels"]
        self.input_proj_weight = nn.Parameter(torch.zeros(levels, cfg["conv_dim"], dim))
        self.input_proj_bias = nn.Parameter(torch.zeros(levels, dim))
        self.level_embed = nn.Parameter(torch.zeros(levels, dim))
        self.query_feat = nn.Parameter(torch.zeros(cfg["num_queries"], dim))
        self.query_embed = nn.Parameter(torch.zeros(cfg["num_queries"], dim))
        self.layers = nn.ModuleList(
            TransformerDecoderLayer(dim, cfg["nheads"], cfg["dim_feedforward"])
            for _ in range(cfg["dec_layers"])
        )
        self.decoder_norm = LayerNorm(dim)
        self.class_embed = Linear(dim, cfg["num_classes"] + 1)
        self.mask_embed = MLP([dim, *cfg["mlp_hidden"], cfg["mask_dim"]])

    def flatten_levels(self, feats):
        memory, pos, shapes = [], [], []
        for level, feat in enumerate(feats):
            h, w = feat.shape[-2:]
            feat = feat.flatten(2).permute([0, 2, 1])
            feat = torch.matmul(feat, self.input_proj_weight[level])
            feat = feat + self.input_proj_bias[level] + self.level_embed[level]
            memory.append(feat)
            pos.append(sine_position_embedding(h, w, cfg["hidden_dim"]))
            shapes.append([h, w])
        return memory, pos, shapes

    def get_pred(self, tgt, mask_features):
        decoder_output = self.decoder_norm(tgt)
        pred_logits = self.class_embed(decoder_output)
        mask_embed = self.mask_embed(decoder_output)
        pred_masks = torch.bmm(mask_embed, mask_features.flatten(2))
        return pred_logits, pred_masks.unflatten(2, mask_features.shape[-2:])

    @torch.no_grad()
    def get_attn_mask(self, pred_masks, shape):
        """[batch, 1, queries, places]; a query that would see nothing sees all."""
        mask = F.interpolate(pred_masks, shape, mode="bilinear", align_corners=False)
        mask = mask.flatten(2) >= 0
        mask = torch.logical_or(mask, ~torch.any(mask, dim=-1, keepdim=True))
        return mask.unsqueeze(1)

    def forward(self, feats, mask_features):
        memory, pos, shapes = self.flatten_levels(feats)
        tgt = torch.tile(self.query_feat, [mask_features.shape[0], 1, 1])
        logits, masks = self.get_pred(tgt, mask_features)
        dec_logits, dec_masks = [logits], [masks]
        for i, layer in enumerate(self.layers):
            level = i % cfg["num_feature_levels"]
            attn_mask = self.get_attn_mask(masks, shapes[level])
            tgt = layer(tgt, memory[level], attn_mask, pos[level], self.query_embed)
            logits, masks = self.get_pred(tgt, mask_features)
            dec_logits.append(logits)
            dec_masks.append(masks)
        return torch.stack(dec_logits), torch.stack(dec_masks)


class MaskFormer(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = ResNet_vd()
        self.pixel_decoder = BasePixelDecoder()
        self.transformer = MaskTransformer()

    def forward(self, x):
        mask_features, feats = self.pixel_decoder(self.backbone(x))
        return self.transformer(feats, mask_features)


# ------------------------------------------------------------------------ weights

BN_KEYS = {
    "weight": "weight",
    "bias": "bias",
    "running_mean": "_mean",
    "running_var": "_variance",
}


def conv_bn(src, conv, norm, ours):
    new = {f"{ours}._conv.weight": src[f"{conv}.weight"]}
    for theirs, leaf in BN_KEYS.items():
        new[f"{ours}._batch_norm.{leaf}"] = src[f"{norm}.{theirs}"]
    return new


def convert_backbone(src):
    new = conv_bn(src, "backbone.conv", "backbone.norm", "backbone.conv1_1")
    for block in range(len(cfg["num_filters"])):
        theirs = f"backbone.stages.{block}"
        for i, ours in enumerate(["conv0", "conv1", "short"], start=1):
            ours = f"backbone.bb_{block}_0.{ours}"
            new |= conv_bn(src, f"{theirs}.conv{i}", f"{theirs}.norm{i}", ours)
    return new


def convert_pixel_decoder(src):
    """Their lists begin at the largest features."""
    pairs = {"top_conv": "output.3"}
    for i in range(3):
        pairs[f"lateral_convs.{i}"] = f"lateral.{2 - i}"
        pairs[f"output_convs.{i}"] = f"output.{2 - i}"
    new = {}
    for ours, theirs in pairs.items():
        for leaf in ("conv.weight", "norm.weight", "norm.bias"):
            new[f"pixel_decoder.{ours}.{leaf}"] = src[f"pixel_decoder.{theirs}.{leaf}"]
    for leaf in ("weight", "bias"):
        name = f"pixel_decoder.mask_features.{leaf}"
        new[name] = src[name]
    return new


def linear(src, theirs, ours):
    return {
        f"{ours}.weight": src[f"{theirs}.weight"].T,
        f"{ours}.bias": src[f"{theirs}.bias"],
    }


def convert_layer(src, theirs, ours):
    new = {}
    for attn, name in (
        ("cross_attn", "cross_attention"),
        ("self_attn", "self_attention"),
    ):
        projs = [src[f"{theirs}.{name}.{x}_proj.weight"] for x in "qkv"]
        new[f"{ours}.{attn}.in_proj_weight"] = torch.concat(projs, dim=0).T
        new |= linear(src, f"{theirs}.{name}.out_proj", f"{ours}.{attn}.out_proj")
    for i in (1, 2):
        new |= linear(src, f"{theirs}.fc{i}", f"{ours}.linear{i}")
    for i in (1, 2, 3):
        for leaf in ("weight", "bias"):
            new[f"{ours}.norm{i}.{leaf}"] = src[f"{theirs}.norm{i}.{leaf}"]
    return new


def convert_transformer(src):
    projs = [f"decoder.project.{i}" for i in range(cfg["num_feature_levels"])]
    weights = [src[f"{proj}.weight"].flatten(1).T for proj in projs]
    new = {
        "transformer.input_proj_weight": torch.stack(weights),
        "transformer.input_proj_bias": torch.stack([src[f"{p}.bias"] for p in projs]),
        "transformer.level_embed": src["decoder.level.weight"],
        "transformer.query_feat": src["decoder.query.weight"],
        "transformer.query_embed": src["decoder.query_pos.weight"],
        "transformer.decoder_norm.weight": src["decoder.norm.weight"],
        "transformer.decoder_norm.bias": src["decoder.norm.bias"],
    }
    for i in range(cfg["dec_layers"]):
        new |= convert_layer(src, f"decoder.layers.{i}", f"transformer.layers.{i}")
    new |= linear(src, "decoder.class_head", "transformer.class_embed")
    for i in range(3):
        layer = f"mask_head.layers.{i}", f"mask_embed.layers.{i}"
        new |= linear(src, f"decoder.{layer[0]}", f"transformer.{layer[1]}")
    return new


def convert(src):
    return convert_backbone(src) | convert_pixel_decoder(src) | convert_transformer(src)


def model():
    net = MaskFormer()
    net.load_state_dict(convert(torch.load(Path(__file__).with_name("weights.pt"))))
    return net


# --------------------------------------------------------------------------- data


class Normalize:
    """Of pixels from 0 to 1."""

    def __init__(self, mean, std):
        self.mean = torch.tensor(mean).reshape([-1, 1, 1])
        self.std = torch.tensor(std).reshape([-1, 1, 1])

    def __call__(self, im):
        return (im / 255.0 - self.mean) / self.std


def pad_batch(images, size):
    """Zeros at the right and at the bottom."""
    padded = []
    for im in images:
        h, w = im.shape[-2:]
        padded.append(F.pad(im, [0, size[1] - w, 0, size[0] - h]))
    return torch.stack(padded)


def forward(net, batch):
    transform = Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    images = []
    for im, (h, w) in zip(batch["image"], batch["extent"].tolist()):
        images.append(transform(im[:, :h, :w]))
    pred_logits, pred_masks = net(pad_batch(images, batch["image"].shape[-2:]))
    return {"classes": pred_logits, "masks": pred_masks}


# --------------------------------------------------------------------------- loss


def point_sample(inputs, point_coords):
    """inputs [n, 1, h, w], point_coords [n, p, 2] -> [n, p]."""
    grid = (2.0 * point_coords - 1.0).unsqueeze(2)
    out = F.grid_sample(
        inputs, grid, mode="bilinear", padding_mode="zeros", align_corners=False
    )
    return out.flatten(1)


def get_uncertain_point_coords(coarse_logits, point_coords, num_uncertain):
    """Rows are taken from all candidates of all masks, one after the other."""
    num_boxes, num_sampled = point_coords.shape[:2]
    point_logits = point_sample(coarse_logits, point_coords)
    point_uncertainties = -torch.abs(point_logits)
    _, idx = torch.topk(point_uncertainties, k=num_uncertain, dim=1)
    shift = num_sampled * torch.arange(num_boxes)
    idx = idx + shift[:, None]
    return point_coords.reshape([-1, 2])[idx.flatten()].reshape([num_boxes, -1, 2])


def sigmoid_focal_loss(logit, label, normalizer, alpha=0.25, gamma=2.0):
    prob = torch.sigmoid(logit)
    abs_exp = torch.log1p(torch.exp(-torch.abs(logit)))
    ce_loss = torch.clamp(logit, min=0) - logit * label + abs_exp
    wrong = prob + label - 2.0 * prob * label
    loss = ce_loss * torch.pow(wrong, gamma)
    loss = loss * (label * (2.0 * alpha - 1.0) + 1.0 - alpha)
    return torch.sum(torch.mean(loss, dim=1)) / normalizer


def sigmoid_dice_loss(logit, label, normalizer):
    prob = torch.sigmoid(logit)
    numerator = 2.0 * torch.sum(prob * label, dim=1)
    denominator = torch.sum(prob, dim=1) + torch.sum(label, dim=1)
    loss = 1.0 - (numerator + 1.0) / (denominator + 1.0)
    return torch.sum(loss) / normalizer


class MaskFormerLoss(nn.Module):
    def __init__(self, num_classes, eos_coef, weight_dict, num_points=(26, 11)):
        super().__init__()
        self.num_classes, self.weight_dict = num_classes, weight_dict
        self.num_candidates, self.num_uncertain = num_points
        class_weight = torch.ones(num_classes + 1)
        class_weight[-1] = eos_coef
        self.register_buffer("class_weight", class_weight)

    def get_index(self, matched):
        """For each pair: its image, its query and its object."""
        batch_idx, src_idx = torch.nonzero(matched >= 0).unbind(1)
        return batch_idx, src_idx, matched[batch_idx, src_idx]

    def loss_labels(self, logits, labels, index):
        batch_idx, src_idx, tgt_idx = index
        target = torch.full(logits.shape[:2], self.num_classes)
        target[batch_idx, src_idx] = labels[batch_idx, tgt_idx]
        log_prob = F.log_softmax(logits, dim=-1)
        picked = torch.take_along_dim(log_prob, target.unsqueeze(-1), dim=-1)
        weight = self.class_weight[target]
        return {"loss_ce": -torch.sum(picked.squeeze(-1) * weight) / torch.sum(weight)}

    def get_points(self, src_masks, points):
        candidates = points[:, : self.num_candidates]
        uncertain = get_uncertain_point_coords(
            src_masks, candidates, self.num_uncertain
        )
        return torch.concat([uncertain, points[:, self.num_candidates :]], dim=1)

    def loss_masks(self, masks, batch, index):
        batch_idx, src_idx, tgt_idx = index
        num_masks = max(len(batch_idx), 1)
        src_masks = masks[batch_idx, src_idx].unsqueeze(1)
        target_masks = batch["masks"][batch_idx, tgt_idx].unsqueeze(1)
        with torch.no_grad():
            points = self.get_points(src_masks, batch["points"][batch_idx, tgt_idx])
            point_labels = point_sample(target_masks, points)
        point_logits = point_sample(src_masks, points)
        return {
            "loss_mask": sigmoid_focal_loss(point_logits, point_labels, num_masks),
            "loss_dice": sigmoid_dice_loss(point_logits, point_labels, num_masks),
        }

    def forward(self, pred_logits, pred_masks, batch):
        index = self.get_index(batch["matched"])
        losses = {}
        for i in range(len(pred_logits)):
            layer = self.loss_labels(pred_logits[i], batch["kinds"], index)
            layer.update(self.loss_masks(pred_masks[i], batch, index))
            for name, value in layer.items():
                losses[f"{name}_{i}"] = value * self.weight_dict[name]
        return losses


criterion = MaskFormerLoss(
    num_classes=cfg["num_classes"],
    eos_coef=0.1,
    weight_dict={"loss_ce": 2.0, "loss_mask": 10.0, "loss_dice": 3.0},
)


def loss(output, batch):
    return sum(criterion(output["classes"], output["masks"], batch).values())


# ---------------------------------------------------------------------- optimizer


class AdamW(torch.optim.Optimizer):
    """The rate is that of the schedule times the ratio of a group."""

    def __init__(self, groups, learning_rate, beta1, beta2, epsilon, grad_clip):
        super().__init__(groups, {})
        self.learning_rate, self.grad_clip = learning_rate, grad_clip
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.last_epoch = 0

    def clip(self):
        params = [p for group in self.param_groups for p in group["params"]]
        global_norm = torch.sqrt(sum(torch.sum(torch.square(p.grad)) for p in params))
        clip_var = self.grad_clip / torch.clamp(global_norm, min=self.grad_clip)
        return {p: p.grad * clip_var for p in params}

    def update(self, param, grad, lr, beta1_pow, beta2_pow):
        slots = self.state[param]
        if not slots:
            slots["moment1"], slots["moment2"] = 0.0 * param, 0.0 * param
        slots["moment1"] = self.beta1 * slots["moment1"] + (1 - self.beta1) * grad
        slots["moment2"] = (
            self.beta2 * slots["moment2"] + (1 - self.beta2) * grad * grad
        )
        lr = lr * math.sqrt(1 - beta2_pow) / (1 - beta1_pow)
        epsilon = self.epsilon * math.sqrt(1 - beta2_pow)
        param.sub_(lr * slots["moment1"] / (torch.sqrt(slots["moment2"]) + epsilon))

    @torch.no_grad()
    def step(self, closure=None):
        grads = self.clip()
        base = self.learning_rate * (1 - self.last_epoch / 10) ** 0.9
        self.last_epoch += 1
        powers = self.beta1**self.last_epoch, self.beta2**self.last_epoch
        for group in self.param_groups:
            lr = base * group["lr_ratio"]
            for param in group["params"]:
                param.mul_(1.0 - lr * group["coeff"])
                self.update(param, grads[param], lr, *powers)


def apply_decay_param_fun(name):
    tables = ("level_embed", "query_feat", "query_embed")
    return "norm" not in name and not name.endswith(tables)


def optimizer(net):
    groups = [
        {
            "params": [param],
            "coeff": 0.05 if apply_decay_param_fun(name) else 0.0,
            "lr_ratio": 0.1 if name.startswith("backbone.") else 1.0,
        }
        for name, param in net.named_parameters()
    ]
    return AdamW(groups, 2e-3, beta1=0.9, beta2=0.98, epsilon=1e-6, grad_clip=0.5)
