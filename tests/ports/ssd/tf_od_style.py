"""After the Object Detection API: NHWC, boxes as y x h w, target assigner and miner.

Variables lie in scopes and come in the order of their names. Anchors of a cell end with the
one of the interpolated scale; the output has the order of the other framework.
"""

import math
from pathlib import Path

import torch
from torch import nn

PIPELINE = {
    "num_classes": 4,
    "image_height": 76,
    "image_width": 100,
    "channel_means": (123.0, 117.0, 104.0),
    "pixel_scale": 64.0,
    "feature_maps": [(10, 13), (5, 7), (3, 4), (1, 2)],
    "strides": [8, 16, 32, 64],
    # In pixels; the last is only for the interpolated scale.
    "scales": [14.0, 26.0, 42.0, 60.0, 84.0],
    "aspect_ratios": [
        [1.0, 2.0, 1.0 / 2],
        [1.0, 2.0, 1.0 / 2, 3.0, 1.0 / 3],
        [1.0, 2.0, 1.0 / 2, 3.0, 1.0 / 3],
        [1.0, 2.0, 1.0 / 2],
    ],
    "interpolated_scale_aspect_ratio": 1.0,
    "scale_factors": [10.0, 10.0, 5.0, 5.0],
    "matched_threshold": 0.5,
    "max_negatives_per_positive": 3.0,
    "min_negatives_per_image": 0,
    "localization_weight": 1.5,
    "classification_weight": 1.0,
    "l2_regularizer_weight": 0.02,
    "rates": [0.01, 0.04, 0.004, 0.0004],
    "boundaries": [2, 8, 11],
    "momentum": 0.9,
    "bias_grad_multiplier": 2.0,
    "gradient_clipping_by_norm": 4.0,
}

# ------------------------------------------------------------------------ layers


def same_padding(size, kernel_size, stride, rate):
    effective = (kernel_size - 1) * rate + 1
    out = -(-size // stride)
    total = max((out - 1) * stride + effective - size, 0)
    before = total // 2
    return before, total - before


def pad_same(inputs, kernel_size, stride, rate=1, value=0.0):
    rows = same_padding(inputs.shape[1], kernel_size, stride, rate)
    columns = same_padding(inputs.shape[2], kernel_size, stride, rate)
    return nn.functional.pad(inputs, (0, 0, *columns, *rows), value=value)


def conv2d(scope, inputs, stride=1, rate=1, padding="SAME"):
    """inputs [batch, height, width, in], weights [height, width, in, out]."""
    if padding == "SAME":
        inputs = pad_same(inputs, scope.weights.shape[0], stride, rate)
    filters = torch.permute(scope.weights, (3, 2, 0, 1))
    x = torch.permute(inputs, (0, 3, 1, 2))
    x = nn.functional.conv2d(x, filters, stride=stride, dilation=rate)
    return torch.permute(x, (0, 2, 3, 1)) + scope.biases


def max_pool2d(inputs, kernel_size, stride):
    x = pad_same(inputs, kernel_size, stride, value=-math.inf)
    x = x.unfold(1, kernel_size, stride).unfold(2, kernel_size, stride)
    return torch.amax(x, dim=(-2, -1))


def l2_normalize(x, axis, epsilon=1e-12):
    square_sum = torch.sum(torch.square(x), dim=axis, keepdim=True)
    x_inv_norm = torch.rsqrt(torch.clamp(square_sum, min=epsilon))
    return x * x_inv_norm


# ------------------------------------------------------------------------- model


class Scope(nn.Module):
    """Variables by name, sorted, and scopes within scopes."""

    def __init__(self, variables):
        super().__init__()
        for name in sorted(variables):
            value = variables[name]
            if isinstance(value, dict):
                self.add_module(name, Scope(value))
            else:
                self.register_parameter(name, nn.Parameter(value.clone().contiguous()))


def extract_features(scope, preprocessed_inputs):
    """Return the four feature maps."""

    def conv_relu(net, name, **options):
        return torch.relu(conv2d(getattr(scope, name), net, **options))

    net = preprocessed_inputs
    for block in (1, 2, 3, 4):
        if block > 1:
            net = max_pool2d(net, 2, 2)
        net = conv_relu(net, f"conv{block}_1")
        net = conv_relu(net, f"conv{block}_2")
    normalized = l2_normalize(net, axis=-1) * scope.conv4_2_norm.gamma
    net = max_pool2d(net, 2, 2)
    net = conv_relu(net, "conv5_1")
    net = max_pool2d(net, 3, 1)
    net = conv_relu(net, "fc6", rate=2)
    fc7 = conv_relu(net, "fc7")
    net = conv_relu(fc7, "conv6_1")
    conv6_2 = conv_relu(net, "conv6_2", stride=2)
    net = conv_relu(conv6_2, "conv7_1")
    conv7_2 = conv_relu(net, "conv7_2", padding="VALID")
    return [normalized, fc7, conv6_2, conv7_2]


class SSDMetaArch(nn.Module):
    def __init__(self, checkpoint):
        super().__init__()
        for name in sorted(checkpoint):
            self.add_module(name, Scope(checkpoint[name]))

    def preprocess(self, image):
        """[batch, 3, height, width] of bytes -> NHWC floats."""
        means = torch.tensor(PIPELINE["channel_means"])
        inputs = torch.permute(image, (0, 2, 3, 1)).to(torch.float32)
        return (inputs - means) / PIPELINE["pixel_scale"]

    def forward(self, preprocessed_inputs):
        feature_maps = extract_features(self.FeatureExtractor, preprocessed_inputs)
        box_encodings, class_predictions = [], []
        for i, feature_map in enumerate(feature_maps):
            predictor = getattr(self, f"BoxPredictor_{i}")
            batch_size = feature_map.shape[0]
            boxes = conv2d(predictor.BoxEncodingPredictor, feature_map)
            box_encodings.append(torch.reshape(boxes, (batch_size, -1, 4)))
            classes = conv2d(predictor.ClassPredictor, feature_map)
            slots = PIPELINE["num_classes"] + 1
            class_predictions.append(torch.reshape(classes, (batch_size, -1, slots)))
        return torch.cat(box_encodings, dim=1), torch.cat(class_predictions, dim=1)


# ----------------------------------------------------------------------- anchors


def tile_anchors(i):
    """Corners [cells * anchors, 4] of a feature map, as ymin, xmin, ymax, xmax."""
    height, width = PIPELINE["image_height"], PIPELINE["image_width"]
    grid_height, grid_width = PIPELINE["feature_maps"][i]
    scales, aspect_ratios = box_specs(i)
    ratio_sqrts = torch.sqrt(aspect_ratios)
    heights = scales / ratio_sqrts
    widths = scales * ratio_sqrts
    stride = PIPELINE["strides"][i]
    offset = stride / 2
    y_centers = torch.arange(grid_height) * stride + offset
    x_centers = torch.arange(grid_width) * stride + offset
    y_centers = y_centers[:, None, None].expand(-1, grid_width, len(heights))
    x_centers = x_centers[None, :, None].expand(grid_height, -1, len(widths))
    bbox_centers = torch.stack([y_centers, x_centers], dim=3)
    bbox_sizes = torch.stack([heights, widths], dim=1).expand_as(bbox_centers)
    corners = [bbox_centers - 0.5 * bbox_sizes, bbox_centers + 0.5 * bbox_sizes]
    boxes = torch.reshape(torch.cat(corners, dim=3), (-1, 4))
    return boxes / torch.tensor([height, width, height, width])


def box_specs(i):
    scale, scale_next = PIPELINE["scales"][i : i + 2]
    ratios = PIPELINE["aspect_ratios"][i]
    aspect_ratios = [*ratios, PIPELINE["interpolated_scale_aspect_ratio"]]
    scales = [scale] * len(ratios) + [math.sqrt(scale * scale_next)]
    return torch.tensor(scales), torch.tensor(aspect_ratios)


def generate_anchors():
    return torch.cat([tile_anchors(i) for i in range(4)], dim=0)


def anchors_from_torch(i):
    """Where each anchor of a cell stands in the other framework."""
    count = len(PIPELINE["aspect_ratios"][i])
    return [0, *range(2, count + 1), 1]


def indices_from_torch():
    """The same for the anchors of all cells."""
    indices, start = [], 0
    for i, (rows, columns) in enumerate(PIPELINE["feature_maps"]):
        order = torch.tensor(anchors_from_torch(i))
        cells = start + torch.arange(rows * columns) * len(order)
        indices.append(torch.flatten(cells[:, None] + order))
        start += rows * columns * len(order)
    return torch.cat(indices)


# --------------------------------------------------------------- target assigner


def iou(boxlist1, boxlist2):
    y_min1, x_min1, y_max1, x_max1 = torch.split(boxlist1, 1, dim=1)
    y_min2, x_min2, y_max2, x_max2 = torch.split(boxlist2.T, 1, dim=0)
    intersect_heights = torch.relu(
        torch.minimum(y_max1, y_max2) - torch.maximum(y_min1, y_min2)
    )
    intersect_widths = torch.relu(
        torch.minimum(x_max1, x_max2) - torch.maximum(x_min1, x_min2)
    )
    intersections = intersect_heights * intersect_widths
    areas1 = (y_max1 - y_min1) * (x_max1 - x_min1)
    areas2 = (y_max2 - y_min2) * (x_max2 - x_min2)
    return intersections / (areas1 + areas2 - intersections)


def argmax_matcher(similarity_matrix, force_match_for_each_row=True):
    """Row for each column, or -1."""
    if similarity_matrix.shape[0] == 0:
        return torch.full((similarity_matrix.shape[1],), -1)
    matched_vals, matches = torch.max(similarity_matrix, dim=0)
    below = matched_vals < PIPELINE["matched_threshold"]
    matches = torch.where(below, torch.full_like(matches, -1), matches)
    if not force_match_for_each_row:
        return matches
    force_match_column_ids = torch.argmax(similarity_matrix, dim=1)
    columns = torch.arange(similarity_matrix.shape[1])
    indicators = (force_match_column_ids[:, None] == columns).long()
    force_match, force_match_row_ids = torch.max(indicators, dim=0)
    return torch.where(force_match > 0, force_match_row_ids, matches)


def gather_based_on_match(match, input_tensor, unmatched_value):
    gathered = torch.cat([unmatched_value[None], input_tensor], dim=0)
    return torch.index_select(gathered, 0, match + 1)


def center_coordinates_and_sizes(boxes):
    ymin, xmin, ymax, xmax = torch.unbind(boxes, dim=1)
    height, width = ymax - ymin, xmax - xmin
    return ymin + height / 2.0, xmin + width / 2.0, height, width


def encode_boxes(boxes, anchors):
    """ty, tx, th, tw."""
    ycenter_a, xcenter_a, ha, wa = center_coordinates_and_sizes(anchors)
    ycenter, xcenter, h, w = center_coordinates_and_sizes(boxes)
    ty = (ycenter - ycenter_a) / ha
    tx = (xcenter - xcenter_a) / wa
    th = torch.log(h / ha)
    tw = torch.log(w / wa)
    scale_factors = torch.tensor(PIPELINE["scale_factors"])
    return torch.stack([ty, tx, th, tw], dim=1) * scale_factors


def assign_targets(anchors, gt_boxes, gt_classes):
    """Targets of one image: classes as one-hot with background, boxes, weights, match."""
    match = argmax_matcher(iou(gt_boxes, anchors))
    num_classes = PIPELINE["num_classes"]
    one_hot = nn.functional.one_hot(gt_classes, num_classes + 1).float()
    background = torch.eye(num_classes + 1)[0]
    cls_targets = gather_based_on_match(match, one_hot, background)
    matched_boxes = gather_based_on_match(match, gt_boxes, torch.zeros(4))
    matched = match >= 0
    # What is not matched is encoded as the anchor itself.
    matched_boxes = torch.where(matched[:, None], matched_boxes, anchors)
    reg_targets = encode_boxes(matched_boxes, anchors)
    return cls_targets, reg_targets, matched.float(), match


# ------------------------------------------------------------------------ losses


def huber_loss(predictions, targets, weights, delta=1.0):
    """[batch, anchors]."""
    error = torch.abs(predictions - targets)
    quadratic = torch.clamp(error, max=delta)
    linear = error - quadratic
    each = 0.5 * torch.square(quadratic) + delta * linear
    return torch.sum(each * weights[..., None], dim=2)


def softmax_cross_entropy(logits, targets):
    log_probs = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    return -torch.sum(targets * log_probs, dim=-1)


def subsample(indices, match, max_negatives_per_positive, min_negatives):
    """Keep all positives and so many negatives, the first ones."""
    positives = match[indices] >= 0
    negatives = torch.logical_not(positives)
    num_positives = torch.sum(positives)
    max_negatives = torch.clamp(
        max_negatives_per_positive * num_positives, min=min_negatives
    )
    topk_negatives = torch.cumsum(negatives, dim=0) <= max_negatives
    keep = torch.logical_or(positives, torch.logical_and(negatives, topk_negatives))
    return indices[keep]


def hard_example_miner(location_losses, cls_losses, match_list):
    mined_location_losses, mined_cls_losses = [], []
    for i, match in enumerate(match_list):
        image_losses = cls_losses[i].detach()
        selected = torch.argsort(image_losses, descending=True)
        selected = subsample(
            selected,
            match,
            PIPELINE["max_negatives_per_positive"],
            PIPELINE["min_negatives_per_image"],
        )
        mined_location_losses.append(torch.sum(location_losses[i][selected]))
        mined_cls_losses.append(torch.sum(cls_losses[i][selected]))
    return torch.sum(torch.stack(mined_location_losses)), torch.sum(
        torch.stack(mined_cls_losses)
    )


def groundtruth(target, flip):
    """Boxes as ymin, xmin, ymax, xmax, turned as the image is."""
    xmin, ymin, xmax, ymax = torch.split(target["boxes"], 1, dim=1)
    if flip:
        xmin, xmax = 1.0 - xmax, 1.0 - xmin
    return torch.cat([ymin, xmin, ymax, xmax], dim=1)


def loss(output, batch):
    from_torch = indices_from_torch()
    box_encodings = output["loc"][:, from_torch][..., [1, 0, 3, 2]]
    class_predictions = output["conf"][:, from_torch]
    anchors = generate_anchors()
    assigned = [
        assign_targets(anchors, groundtruth(target, flip), target["labels"])
        for target, flip in zip(batch["targets"], batch["mirror"])
    ]
    cls_targets, reg_targets, reg_weights, match = map(torch.stack, zip(*assigned))

    location_losses = huber_loss(box_encodings, reg_targets, reg_weights)
    cls_losses = softmax_cross_entropy(class_predictions, cls_targets)
    localization_loss, classification_loss = hard_example_miner(
        location_losses, cls_losses, match
    )
    normalizer = torch.clamp(torch.sum(match >= 0).float(), min=1.0)
    localization_loss = PIPELINE["localization_weight"] * localization_loss
    classification_loss = PIPELINE["classification_weight"] * classification_loss
    return localization_loss / normalizer + classification_loss / normalizer


# -------------------------------------------------------------------- checkpoint


def from_torch(state):
    """Variables of each scope from the weights of the torch model."""

    def conv(name):
        weights = torch.permute(state[name + ".weight"], (2, 3, 1, 0))
        return {"weights": weights, "biases": state[name + ".bias"]}

    def predictor(name, i, code):
        """Anchors of a cell in the order of here; ``code`` is the order of the values."""

        def reorder(value):
            count = len(PIPELINE["aspect_ratios"][i]) + 1
            value = value.unflatten(0, (count, -1))
            return value[anchors_from_torch(i)][:, code].flatten(0, 1)

        weights = reorder(state[f"{name}.{i}.weight"])
        biases = reorder(state[f"{name}.{i}.bias"])
        return {"weights": torch.permute(weights, (2, 3, 1, 0)), "biases": biases}

    lower = [0, 2, 5, 7, 10, 12, 15, 17]
    names = [f"conv{block}_{layer}" for block in (1, 2, 3, 4) for layer in (1, 2)]
    extractor = {name: conv(f"lower.{i}") for name, i in zip(names, lower)}
    for name, key in (
        ("conv5_1", "upper.1"),
        ("fc6", "upper.4"),
        ("fc7", "upper.6"),
        ("conv6_1", "extra1.0"),
        ("conv6_2", "extra1.2"),
        ("conv7_1", "extra2.0"),
        ("conv7_2", "extra2.2"),
    ):
        extractor[name] = conv(key)
    extractor["conv4_2_norm"] = {"gamma": state["l2_norm.weight"]}
    checkpoint = {"FeatureExtractor": extractor}
    for i in range(4):
        checkpoint[f"BoxPredictor_{i}"] = {
            "BoxEncodingPredictor": predictor("loc", i, code=[1, 0, 3, 2]),
            "ClassPredictor": predictor("conf", i, code=[0, 1, 2, 3, 4]),
        }
    return checkpoint


# ---------------------------------------------------------------------- training


def model():
    state = torch.load(Path(__file__).with_name("weights.pt"))
    return SSDMetaArch(from_torch(state))


def forward(net, batch):
    inputs = net.preprocess(batch["image"])
    flip = batch["mirror"][:, None, None, None]
    inputs = torch.where(flip, torch.flip(inputs, (2,)), inputs)
    box_encodings, class_predictions = net(inputs)
    to_torch = torch.argsort(indices_from_torch())
    return {
        "loc": box_encodings[:, to_torch][..., [1, 0, 3, 2]],
        "conf": class_predictions[:, to_torch],
    }


def manual_stepping(global_step, boundaries, rates, warmup=True):
    if warmup and global_step < boundaries[0]:
        slope = (rates[1] - rates[0]) / boundaries[0]
        return rates[0] + slope * global_step
    return rates[sum(global_step >= boundary for boundary in boundaries)]


def l2_regularizer(variable):
    return PIPELINE["l2_regularizer_weight"] * torch.sum(torch.square(variable)) / 2


def clip_by_global_norm(gradients, clip_norm):
    squares = [torch.sum(torch.square(g)) for g in gradients]
    global_norm = torch.sqrt(torch.sum(torch.stack(squares)))
    scale = clip_norm / torch.clamp(global_norm, min=clip_norm)
    return [g * scale for g in gradients]


class MomentumOptimizer(torch.optim.Optimizer):
    def __init__(self, named_variables, learning_rate, momentum, clip_norm):
        named_variables = list(named_variables)
        super().__init__([v for _, v in named_variables], {})
        self.is_bias = [name.endswith("biases") for name, _ in named_variables]
        self.learning_rate, self.momentum = learning_rate, momentum
        self.clip_norm = clip_norm
        self.global_step = 0

    def regularized(self, gradients, variables):
        """The gradients with those of the regularization losses."""
        kernels = [v for v, bias in zip(variables, self.is_bias) if not bias]
        with torch.enable_grad():
            losses = torch.stack([l2_regularizer(v) for v in kernels])
            more = iter(torch.autograd.grad(torch.sum(losses), kernels))
        return [
            g if bias else g + next(more) for g, bias in zip(gradients, self.is_bias)
        ]

    @torch.no_grad()
    def step(self, closure=None):
        variables = self.param_groups[0]["params"]
        gradients = [v.grad for v in variables]
        gradients = clip_by_global_norm(gradients, self.clip_norm)
        multiplier = PIPELINE["bias_grad_multiplier"]
        gradients = [
            g * multiplier if bias else g for g, bias in zip(gradients, self.is_bias)
        ]
        gradients = self.regularized(gradients, variables)
        learning_rate = self.learning_rate(self.global_step)
        for v, g in zip(variables, gradients):
            slots = self.state[v]
            if not slots:
                slots["momentum"] = torch.zeros_like(v)
            accum = slots["momentum"].mul_(self.momentum).add_(g)
            v.sub_(learning_rate * accum)
        self.global_step += 1


def optimizer(net):
    def learning_rate(global_step):
        return manual_stepping(global_step, PIPELINE["boundaries"], PIPELINE["rates"])

    return MomentumOptimizer(
        net.named_parameters(),
        learning_rate,
        PIPELINE["momentum"],
        PIPELINE["gradient_clipping_by_norm"],
    )
