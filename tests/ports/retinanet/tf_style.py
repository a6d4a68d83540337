"""After TensorFlow: NHWC, kernels HWIO, padding by hand, anchors as y, x, height, width.

Anchors of a cell have all aspect ratios of each octave; the output has the order of the
other framework.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

PARAMS: dict[str, Any] = {
    "image_mean": (123.7, 116.3, 103.5),
    "image_stddev": (58.4, 57.1, 57.4),
    "num_classes": 4,
    "min_level": 2,
    "max_level": 5,
    "num_scales": 2,
    "aspect_ratios": (0.5, 1.0, 2.0),
    "anchor_scale": 2.0,
    "fpn_filters": 32,
    "head_convs": 2,
    "class_prior": 0.05,
    "matched_threshold": 0.5,
    "unmatched_threshold": 0.4,
    "scale_factors": (10.0, 10.0, 5.0, 5.0),
    "alpha": 0.25,
    "gamma": 2.0,
    "delta": 1.0 / 9.0,
    "box_loss_weight": 0.5,
    "learning_rate": 0.01,
    "warmup_steps": 4,
    "warmup_factor": 0.25,
    "boundaries": (8, 11),
    "momentum": 0.9,
    "l2_weight_decay": 0.05,
    "decayed": r".*kernel$",
}
NUM_ANCHORS = PARAMS["num_scales"] * len(PARAMS["aspect_ratios"])

# ------------------------------------------------------------------------ layers


def fixed_padding(size, kernel_size, strides):
    """How much before and behind; does not depend on the size."""
    pad_total = kernel_size - 1
    pad_beg = pad_total // 2
    return pad_beg, pad_total - pad_beg


class Conv2D(nn.Module):
    def __init__(self, inputs, filters, kernel_size, strides=1, bias_value=None):
        super().__init__()
        self.kernel_size, self.strides = kernel_size, strides
        shape = (kernel_size, kernel_size, inputs, filters)
        self.kernel = nn.Parameter(torch.zeros(shape))
        self.bias = None
        if bias_value is not None:
            self.bias = nn.Parameter(torch.full((filters,), bias_value))

    def forward(self, x):
        rows = fixed_padding(x.shape[1], self.kernel_size, self.strides)
        cols = fixed_padding(x.shape[2], self.kernel_size, self.strides)
        x = nn.functional.pad(x, (0, 0, *cols, *rows))
        patches = x.unfold(1, self.kernel_size, self.strides)
        patches = patches.unfold(2, self.kernel_size, self.strides)
        y = torch.einsum("bhwcij,ijcd->bhwd", patches, self.kernel)
        return y if self.bias is None else y + self.bias


class BatchNormalization(nn.Module):
    moving_mean: torch.Tensor
    moving_variance: torch.Tensor

    def __init__(self, channels, trainable=True, momentum=0.9, epsilon=1e-5):
        super().__init__()
        self.trainable = trainable
        self.momentum, self.epsilon = momentum, epsilon
        self.gamma = nn.Parameter(torch.ones(channels), requires_grad=trainable)
        self.beta = nn.Parameter(torch.zeros(channels), requires_grad=trainable)
        self.register_buffer("moving_mean", torch.zeros(channels))
        self.register_buffer("moving_variance", torch.ones(channels))

    @torch.no_grad()
    def assign_moving_average(self, variable, value):
        variable.sub_((variable - value) * (1.0 - self.momentum))

    def forward(self, x):
        if self.training and self.trainable:
            mean = torch.mean(x, dim=(0, 1, 2))
            variance = torch.mean(torch.square(x - mean), dim=(0, 1, 2))
            count = x.numel() // x.shape[3]
            self.assign_moving_average(self.moving_mean, mean)
            unbiased = variance * (count / (count - 1))
            self.assign_moving_average(self.moving_variance, unbiased)
        else:
            mean, variance = self.moving_mean, self.moving_variance
        inv = torch.rsqrt(variance + self.epsilon) * self.gamma
        return x * inv + (self.beta - mean * inv)


# -------------------------------------------------------------------------- model


class ResidualBlock(nn.Module):
    def __init__(self, inputs, filters, strides, trainable_norms=True):
        super().__init__()
        if strides > 1:
            self.projection = Conv2D(inputs, filters, 1, strides)
            self.projection_bn = BatchNormalization(filters, trainable_norms)
        self.conv_0 = Conv2D(inputs, filters, 3, strides)
        self.bn_0 = BatchNormalization(filters, trainable_norms)
        self.conv_1 = Conv2D(filters, filters, 3)
        self.bn_1 = BatchNormalization(filters, trainable_norms)

    def forward(self, inputs):
        shortcut = inputs
        if hasattr(self, "projection"):
            shortcut = self.projection_bn(self.projection(inputs))
        x = torch.relu(self.bn_0(self.conv_0(inputs)))
        x = self.bn_1(self.conv_1(x))
        return torch.relu(x + shortcut)


class Resnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = Conv2D(3, 16, 3, strides=2)
        self.stem.kernel.requires_grad_(False)
        self.stem_bn = BatchNormalization(16, trainable=False)
        self.block_group1 = ResidualBlock(16, 16, 1, trainable_norms=False)
        self.block_group2 = ResidualBlock(16, 24, 2)
        self.block_group3 = ResidualBlock(24, 32, 2)
        self.block_group4 = ResidualBlock(32, 48, 2)

    def forward(self, images):
        net = torch.relu(self.stem_bn(self.stem(images)))
        net = self.block_group1(net)
        endpoints = {}
        endpoints[2] = self.block_group2(net)
        endpoints[3] = self.block_group3(endpoints[2])
        endpoints[4] = self.block_group4(endpoints[3])
        return endpoints


def nearest_upsampling(data, target):
    """Twice as large, cut to the size of the target."""
    data = torch.repeat_interleave(data, 2, dim=1)
    data = torch.repeat_interleave(data, 2, dim=2)
    return data[:, : target.shape[1], : target.shape[2]]


class Fpn(nn.Module):
    def __init__(self, channels, filters):
        super().__init__()
        for level, inputs in channels.items():
            self.add_module(f"l{level}", Conv2D(inputs, filters, 1, bias_value=0.0))
            self.add_module(
                f"post_hoc_d{level}", Conv2D(filters, filters, 3, bias_value=0.0)
            )
        self.p5 = Conv2D(filters, filters, 3, strides=2, bias_value=0.0)

    def forward(self, endpoints):
        feats_lateral = {
            level: getattr(self, f"l{level}")(feat) for level, feat in endpoints.items()
        }
        feats = {4: feats_lateral[4]}
        for level in (3, 2):
            top_down = nearest_upsampling(feats[level + 1], feats_lateral[level])
            feats[level] = top_down + feats_lateral[level]
        outputs = {}
        for level in (2, 3, 4):
            outputs[level] = getattr(self, f"post_hoc_d{level}")(feats[level])
        outputs[5] = self.p5(outputs[4])
        return outputs


class Head(nn.Module):
    def __init__(self, filters, values, bias_value):
        super().__init__()
        self.values = values
        for i in range(PARAMS["head_convs"]):
            self.add_module(f"conv_{i}", Conv2D(filters, filters, 3, bias_value=0.0))
        self.predict = Conv2D(filters, NUM_ANCHORS * values, 3, bias_value=bias_value)

    def forward(self, features):
        for i in range(PARAMS["head_convs"]):
            features = torch.relu(getattr(self, f"conv_{i}")(features))
        outputs = self.predict(features)
        return torch.reshape(outputs, (len(outputs), -1, self.values))


class Retinanet(nn.Module):
    def __init__(self):
        super().__init__()
        filters, prior = PARAMS["fpn_filters"], torch.tensor(PARAMS["class_prior"])
        self.resnet = Resnet()
        self.fpn = Fpn({2: 24, 3: 32, 4: 48}, filters)
        bias_value = -torch.log((1.0 - prior) / prior).item()
        self.class_net = Head(filters, PARAMS["num_classes"], bias_value)
        self.box_net = Head(filters, 4, 0.0)

    def forward(self, images):
        features = self.fpn(self.resnet(images))
        levels = range(PARAMS["min_level"], PARAMS["max_level"] + 1)
        cls_outputs = [self.class_net(features[level]) for level in levels]
        box_outputs = [self.box_net(features[level]) for level in levels]
        return torch.cat(cls_outputs, dim=1), torch.cat(box_outputs, dim=1)


# --------------------------------------------------------------------- checkpoint


def octave_major(value, values_per_anchor):
    """Last axis: all ratios of each octave, where the other has octaves of each ratio."""
    ratios = len(PARAMS["aspect_ratios"])
    shape = (ratios, PARAMS["num_scales"], values_per_anchor)
    return value.unflatten(-1, shape).transpose(-3, -2).flatten(-3)


def yxhw(value):
    """Last axis: the codes of each anchor."""
    return value.unflatten(-1, (-1, 4))[..., [1, 0, 3, 2]].flatten(-2)


def variables_from_torch(state):
    """Values by the names of here."""
    variables = {}

    def conv(name, key):
        kernel = torch.permute(state[f"{key}.weight"], (2, 3, 1, 0))
        variables[f"{name}.kernel"] = kernel
        if f"{key}.bias" in state:
            variables[f"{name}.bias"] = state[f"{key}.bias"]

    def norm(name, key):
        variables[f"{name}.gamma"] = state[f"{key}.weight"]
        variables[f"{name}.beta"] = state[f"{key}.bias"]
        variables[f"{name}.moving_mean"] = state[f"{key}.running_mean"]
        variables[f"{name}.moving_variance"] = state[f"{key}.running_var"]

    conv("resnet.stem", "backbone.conv1")
    norm("resnet.stem_bn", "backbone.bn1")
    for i in (1, 2, 3, 4):
        group, layer = f"resnet.block_group{i}", f"backbone.layer{i}"
        for j in (0, 1):
            conv(f"{group}.conv_{j}", f"{layer}.conv{j + 1}")
            norm(f"{group}.bn_{j}", f"{layer}.bn{j + 1}")
        if i > 1:
            conv(f"{group}.projection", f"{layer}.downsample.0")
            norm(f"{group}.projection_bn", f"{layer}.downsample.1")
    for i, level in enumerate((2, 3, 4)):
        conv(f"fpn.l{level}", f"fpn.inner.{i}")
        conv(f"fpn.post_hoc_d{level}", f"fpn.layer.{i}")
    conv("fpn.p5", "fpn.extra")
    for name, key in (("class_net", "classification"), ("box_net", "regression")):
        for i in range(PARAMS["head_convs"]):
            conv(f"{name}.conv_{i}", f"{key}.conv.{2 * i}")
        conv(f"{name}.predict", f"{key}.predict")
    for kind in ("kernel", "bias"):
        name = f"class_net.predict.{kind}"
        variables[name] = octave_major(variables[name], PARAMS["num_classes"])
        name = f"box_net.predict.{kind}"
        variables[name] = yxhw(octave_major(variables[name], 4))
    return variables


@torch.no_grad()
def assign(net, values):
    variables = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    for name, value in values.items():
        variables[name].copy_(value)


def model():
    net = Retinanet()
    state = torch.load(Path(__file__).with_name("weights.pt"))
    assign(net, variables_from_torch(state))
    return net.train()


# ------------------------------------------------------------------------- images


def normalize_image(batch):
    """Zeros beyond the picture."""
    image = torch.permute(batch["image"], (0, 2, 3, 1)).to(torch.float32)
    image = image - torch.tensor(PARAMS["image_mean"])
    image = image / torch.tensor(PARAMS["image_stddev"])
    height, width = batch["size"][:, 0, None], batch["size"][:, 1, None]
    row_mask = (torch.arange(image.shape[1]) < height).float()
    column_mask = (torch.arange(image.shape[2]) < width).float()
    mask = row_mask[:, :, None, None] * column_mask[:, None, :, None]
    return image * mask


def to_torch_order(outputs):
    """Anchors of a cell: all octaves of each ratio."""
    shape = (-1, PARAMS["num_scales"], len(PARAMS["aspect_ratios"]))
    return outputs.unflatten(1, shape).transpose(2, 3).flatten(1, 3)


def from_torch_order(outputs):
    shape = (-1, len(PARAMS["aspect_ratios"]), PARAMS["num_scales"])
    return outputs.unflatten(1, shape).transpose(2, 3).flatten(1, 3)


def forward(net, batch):
    cls_outputs, box_outputs = net(normalize_image(batch))
    return {
        "logits": to_torch_order(cls_outputs),
        "deltas": to_torch_order(box_outputs)[..., [1, 0, 3, 2]],
    }


# ------------------------------------------------------------------------ anchors


def anchor_shapes(level):
    """[anchors of a cell, 2]: height and width, octave by octave."""
    stride = 2**level
    shapes = []
    for octave in range(PARAMS["num_scales"]):
        base = PARAMS["anchor_scale"] * stride * 2 ** (octave / PARAMS["num_scales"])
        for aspect in PARAMS["aspect_ratios"]:
            shapes.append([base * aspect**0.5, base / aspect**0.5])
    return torch.tensor(shapes)


def generate_anchors(image_height, image_width):
    """[anchors, 4]: centre and size."""
    anchors = []
    for level in range(PARAMS["min_level"], PARAMS["max_level"] + 1):
        stride = 2**level
        yc = torch.arange(stride / 2, image_height + stride / 2, stride)
        xc = torch.arange(stride / 2, image_width + stride / 2, stride)
        sizes = anchor_shapes(level)
        centers = torch.cartesian_prod(yc, xc)
        centers = torch.repeat_interleave(centers, len(sizes), dim=0)
        sizes = sizes.repeat(len(yc) * len(xc), 1)
        anchors.append(torch.cat([centers, sizes], dim=1))
    return torch.cat(anchors, dim=0)


def center_size_encode(boxes):
    """Left, top, right, bottom -> y, x, height, width."""
    xmin, ymin, xmax, ymax = torch.unbind(boxes, dim=1)
    y, x = 0.5 * (ymin + ymax), 0.5 * (xmin + xmax)
    return torch.stack([y, x, ymax - ymin, xmax - xmin], dim=1)


def intersection_over_union(gt, anchors):
    """[boxes, anchors]"""
    gt_yx, gt_hw = gt[:, None, :2], gt[:, None, 2:]
    yx, hw = anchors[None, :, :2], anchors[None, :, 2:]
    lower = torch.maximum(gt_yx - 0.5 * gt_hw, yx - 0.5 * hw)
    upper = torch.minimum(gt_yx + 0.5 * gt_hw, yx + 0.5 * hw)
    overlap = torch.relu(upper - lower)
    intersection = overlap[..., 0] * overlap[..., 1]
    union = gt_hw[..., 0] * gt_hw[..., 1] + hw[..., 0] * hw[..., 1] - intersection
    return intersection / union


def argmax_matcher(similarity, matched_threshold, unmatched_threshold):
    """Row of each column; -1 unmatched, -2 ignored."""
    if similarity.shape[0] == 0:
        return torch.full((similarity.shape[1],), -1)
    values, matches = torch.max(similarity, dim=0)
    below = values < unmatched_threshold
    between = torch.logical_and(values < matched_threshold, ~below)
    matches = torch.where(below, -1, matches)
    matches = torch.where(between, -2, matches)
    # Each row has the column where it is greatest.
    forced = torch.argmax(similarity, dim=1)
    columns = torch.arange(similarity.shape[1])
    indicator = (forced[:, None] == columns[None, :]).long()
    is_forced, forced_rows = torch.max(indicator, dim=0)
    return torch.where(is_forced > 0, forced_rows, matches)


def label_anchors(anchors, gt_boxes, gt_labels, image_size):
    """Class targets (one-hot), class weights, box targets, box weights of a picture."""
    is_inside = torch.all(anchors[:, :2] < image_size, dim=1)
    gt = center_size_encode(gt_boxes)
    similarity = intersection_over_union(gt, anchors)
    similarity = torch.where(is_inside, similarity, torch.zeros_like(similarity))
    matches = argmax_matcher(
        similarity, PARAMS["matched_threshold"], PARAMS["unmatched_threshold"]
    )
    matches = torch.where(is_inside, matches, -2)

    is_matched = matches >= 0
    # Class 0 is the background.
    padded_labels = torch.cat([torch.zeros(1, dtype=torch.long), gt_labels + 1])
    labels = padded_labels[torch.clamp(matches + 1, min=0)]
    one_hot = torch.eye(PARAMS["num_classes"] + 1)[labels]
    cls_targets = one_hot[:, 1:]
    cls_weights = (matches > -2).float()

    # What is unmatched has itself as its box.
    padded = torch.cat([anchors[:1], gt], dim=0)
    boxes = padded[torch.clamp(matches + 1, min=0)]
    boxes = torch.where(is_matched[:, None], boxes, anchors)
    t_yx = (boxes[:, :2] - anchors[:, :2]) / anchors[:, 2:]
    t_hw = torch.log(boxes[:, 2:]) - torch.log(anchors[:, 2:])
    box_targets = torch.cat([t_yx, t_hw], dim=1)
    box_targets = box_targets * torch.tensor(PARAMS["scale_factors"])
    return cls_targets, cls_weights, box_targets, is_matched.float()


# --------------------------------------------------------------------------- loss


def sigmoid_cross_entropy(labels, logits):
    relu_logits = torch.relu(logits)
    return relu_logits - logits * labels + torch.log1p(torch.exp(-torch.abs(logits)))


def focal_loss(logits, targets, weights, normalizer):
    """The modulator is (1 - p_t)**gamma, made of logits."""
    cross_entropy = sigmoid_cross_entropy(targets, logits)
    alpha, gamma = PARAMS["alpha"], PARAMS["gamma"]
    neg_logits = -1.0 * logits
    modulator = torch.exp(
        gamma * targets * neg_logits - gamma * torch.log1p(torch.exp(neg_logits))
    )
    each = modulator * cross_entropy
    each = torch.where(targets == 1.0, alpha * each, (1.0 - alpha) * each)
    return torch.sum(each * weights[..., None]) / normalizer


def huber_loss(y_true, y_pred, weights, delta):
    error = torch.abs(y_pred - y_true)
    quadratic = torch.clamp(error, max=delta)
    each = 0.5 * torch.square(quadratic) + delta * (error - quadratic)
    return torch.sum(each * weights[..., None])


def box_loss(box_outputs, box_targets, weights, normalizer):
    delta = PARAMS["delta"]
    each = huber_loss(box_targets, box_outputs, weights, delta) / delta
    return each / normalizer


def loss(output, batch):
    cls_outputs = from_torch_order(output["logits"])
    box_outputs = from_torch_order(output["deltas"][..., [1, 0, 3, 2]])
    anchors = generate_anchors(*batch["image"].shape[2:])
    labelled = [
        label_anchors(anchors, target["boxes"], target["labels"], image_size)
        for target, image_size in zip(batch["targets"], batch["size"])
    ]
    cls_targets, cls_weights, box_targets, box_weights = map(
        torch.stack, zip(*labelled)
    )
    num_positives = torch.clamp(torch.sum(box_weights), min=1.0)
    cls = focal_loss(cls_outputs, cls_targets, cls_weights, num_positives)
    box = box_loss(box_outputs, box_targets, box_weights, num_positives)
    return cls + PARAMS["box_loss_weight"] * box


# ---------------------------------------------------------------------- optimizer


def learning_rate_schedule(global_step):
    """Linear warm-up, then stairs."""
    base, warmup_steps = PARAMS["learning_rate"], PARAMS["warmup_steps"]
    initial = base * PARAMS["warmup_factor"]
    if global_step < warmup_steps:
        return initial + global_step / warmup_steps * (base - initial)
    stairs = sum(global_step >= boundary for boundary in PARAMS["boundaries"])
    return base * 0.1**stairs


class SGD(torch.optim.Optimizer):
    """Velocities have the rate in them; they are scaled where it changes."""

    def __init__(self, named_variables, learning_rate, momentum):
        named = [(name, v) for name, v in named_variables if v.requires_grad]
        super().__init__([v for _, v in named], {})
        self.decays = [bool(re.match(PARAMS["decayed"], name)) for name, _ in named]
        self.learning_rate, self.momentum = learning_rate, momentum
        self.iterations = 0

    @torch.no_grad()
    def step(self, closure=None):
        lr = self.learning_rate(self.iterations)
        last = self.learning_rate(max(self.iterations - 1, 0))
        for variable, decays in zip(self.param_groups[0]["params"], self.decays):
            gradient = variable.grad
            if decays:
                gradient = gradient + PARAMS["l2_weight_decay"] * variable
            slots = self.state[variable]
            if not slots:
                slots["velocity"] = torch.zeros_like(variable)
            velocity = slots["velocity"]
            velocity.mul_(self.momentum * lr / last)
            velocity.sub_(lr * gradient)
            variable.add_(velocity)
        self.iterations += 1


def optimizer(net):
    return SGD(net.named_parameters(), learning_rate_schedule, PARAMS["momentum"])
