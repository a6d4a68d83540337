"""After Keras: layers with build and call, channels last, kernels HWIO, boxes as y, x, y, x.

Pictures are BGR. One convolution gives the distances (top, left, bottom, right) and the
centre-ness.
"""

from pathlib import Path

import torch
from torch import nn

CLASSES = 5
LEVELS = (3, 4, 5, 6)
BGR_MEAN = (101.4, 115.9, 122.8)
BGR_STD = (60.2, 56.7, 59.3)
SIZE_LIMITS = (0.0, 26.0, 42.0, 58.0, float("inf"))

# ------------------------------------------------------------------------- layers


class Layer(nn.Module):
    """``build`` makes the weights from the shape of the inputs and returns that of the outputs."""

    def add_weight(self, name, shape, initializer="zeros", trainable=True):
        value = torch.ones(shape) if initializer == "ones" else torch.zeros(shape)
        if trainable:
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

    def build(self, input_shape):
        return input_shape

    def call(self, inputs):
        raise NotImplementedError

    def forward(self, inputs):
        return self.call(inputs)


class ZeroPadding2D(Layer):
    def __init__(self, padding):
        super().__init__()
        self.padding = padding

    def call(self, inputs):
        p = self.padding
        return nn.functional.pad(inputs, (0, 0, p, p, p, p))


def same_padding(size, kernel_size, strides):
    """Before and behind; one more behind where the sum is odd."""
    out = -(-size // strides)
    total = max((out - 1) * strides + kernel_size - size, 0)
    return total // 2, total - total // 2


class Conv2D(Layer):
    def __init__(
        self,
        filters,
        kernel_size,
        strides=1,
        padding="valid",
        use_bias=True,
        trainable=True,
    ):
        super().__init__()
        self.filters, self.kernel_size = filters, kernel_size
        self.strides, self.padding = strides, padding
        self.use_bias, self.trainable = use_bias, trainable

    def build(self, input_shape):
        size = self.kernel_size
        self.add_weight(
            "kernel",
            (size, size, input_shape[-1], self.filters),
            trainable=self.trainable,
        )
        if self.use_bias:
            self.add_weight("bias", (self.filters,), trainable=self.trainable)
        return (*input_shape[:-1], self.filters)

    def call(self, inputs):
        if self.padding == "same":
            rows = same_padding(inputs.shape[1], self.kernel_size, self.strides)
            columns = same_padding(inputs.shape[2], self.kernel_size, self.strides)
            inputs = nn.functional.pad(inputs, (0, 0, *columns, *rows))
        windows = inputs.unfold(1, self.kernel_size, self.strides)
        windows = windows.unfold(2, self.kernel_size, self.strides)
        outputs = torch.tensordot(windows, self.kernel, dims=([4, 5, 3], [0, 1, 2]))
        return outputs + self.bias if self.use_bias else outputs


class BatchNormalization(Layer):
    """Not trainable: what it has seen stays."""

    def __init__(self, epsilon=1e-3):
        super().__init__()
        self.epsilon = epsilon

    def build(self, input_shape):
        dim = input_shape[-1:]
        self.add_weight("gamma", dim, "ones", trainable=False)
        self.add_weight("beta", dim, trainable=False)
        self.add_weight("moving_mean", dim, trainable=False)
        self.add_weight("moving_variance", dim, "ones", trainable=False)
        return input_shape

    def call(self, inputs):
        deviation = torch.sqrt(self.moving_variance + self.epsilon)
        normalized = (inputs - self.moving_mean) / deviation
        return normalized * self.gamma + self.beta


class GroupNormalization(Layer):
    def __init__(self, groups=32, epsilon=1e-3):
        super().__init__()
        self.groups, self.epsilon = groups, epsilon

    def build(self, input_shape):
        self.add_weight("gamma", input_shape[-1:], "ones")
        self.add_weight("beta", input_shape[-1:])
        return input_shape

    def call(self, inputs):
        batch, height, width, channels = inputs.shape
        size = channels // self.groups
        grouped = torch.reshape(inputs, (batch, height, width, self.groups, size))
        mean = torch.mean(grouped, dim=(1, 2, 4), keepdim=True)
        variance = torch.mean(torch.square(grouped), dim=(1, 2, 4), keepdim=True)
        variance = variance - torch.square(mean)
        gamma = torch.reshape(self.gamma, (self.groups, size))
        beta = torch.reshape(self.beta, (self.groups, size))
        inv = gamma * torch.rsqrt(variance + self.epsilon)
        outputs = grouped * inv + (beta - mean * inv)
        return torch.reshape(outputs, inputs.shape)


class ReLU(Layer):
    def call(self, inputs):
        return torch.clamp(inputs, min=0.0)


class MaxPooling2D(Layer):
    """Windows of 3, strides of 2, behind padding of one."""

    def call(self, inputs):
        return inputs.unfold(1, 3, 2).unfold(2, 3, 2).amax(dim=(-2, -1))


class UpSampling2D(Layer):
    """Nearest."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def call(self, inputs):
        outputs = torch.repeat_interleave(inputs, self.size, dim=1)
        return torch.repeat_interleave(outputs, self.size, dim=2)


class Sequential(Layer):
    def __init__(self, **layers):
        super().__init__()
        self.names = tuple(layers)
        for name, layer in layers.items():
            self.add_module(name, layer)

    def build(self, input_shape):
        for name in self.names:
            input_shape = getattr(self, name).build(input_shape)
        return input_shape

    def call(self, inputs):
        for name in self.names:
            inputs = getattr(self, name)(inputs)
        return inputs


# ----------------------------------------------------------------------- backbone


class ResidualBlock(Layer):
    """Padding of its own where a step is two, so that it lies as in other frameworks."""

    def __init__(self, filters, strides=1):
        super().__init__()
        self.filters, self.strides = filters, strides
        self.pad = ZeroPadding2D(1)
        self.conv_1 = Conv2D(filters, 3, strides, use_bias=False)
        self.bn_1 = BatchNormalization(epsilon=1e-5)
        self.relu = ReLU()
        self.conv_2 = Conv2D(filters, 3, padding="same", use_bias=False)
        self.bn_2 = BatchNormalization(epsilon=1e-5)

    def build(self, input_shape):
        self.has_projection = input_shape[-1] != self.filters
        if self.has_projection:
            self.conv_0 = Conv2D(self.filters, 1, self.strides, use_bias=False)
            self.bn_0 = BatchNormalization(epsilon=1e-5)
            self.bn_0.build(self.conv_0.build(input_shape))
        shape = self.bn_1.build(self.conv_1.build(input_shape))
        return self.bn_2.build(self.conv_2.build(shape))

    def call(self, inputs):
        shortcut = inputs
        if self.has_projection:
            shortcut = self.bn_0(self.conv_0(inputs))
        x = self.relu(self.bn_1(self.conv_1(self.pad(inputs))))
        x = self.bn_2(self.conv_2(x))
        return self.relu(shortcut + x)


class ResNetBackbone(Layer):
    def __init__(self):
        super().__init__()
        self.stem = Sequential(
            pad=ZeroPadding2D(2),
            conv=Conv2D(12, 5, strides=2, use_bias=False, trainable=False),
            bn=BatchNormalization(epsilon=1e-5),
            relu=ReLU(),
            pool_pad=ZeroPadding2D(1),
            pool=MaxPooling2D(),
        )
        self.stack_0 = Sequential(block_0=ResidualBlock(16))
        self.stack_1 = Sequential(
            block_0=ResidualBlock(24, strides=2), block_1=ResidualBlock(24)
        )
        self.stack_2 = Sequential(block_0=ResidualBlock(40, strides=2))

    def build(self, input_shape):
        shape = self.stack_0.build(self.stem.build(input_shape))
        shapes = {"P3": self.stack_1.build(shape)}
        shapes["P4"] = self.stack_2.build(shapes["P3"])
        return shapes

    def call(self, inputs):
        outputs = {"P3": self.stack_1(self.stack_0(self.stem(inputs)))}
        outputs["P4"] = self.stack_2(outputs["P3"])
        return outputs


# ------------------------------------------------------------------------- pyramid


class FeaturePyramid(Layer):
    def __init__(self, filters=32):
        super().__init__()
        self.conv_c3_1x1 = Conv2D(filters, 1)
        self.conv_c4_1x1 = Conv2D(filters, 1)
        self.conv_c3_3x3 = Conv2D(filters, 3, padding="same")
        self.conv_c4_3x3 = Conv2D(filters, 3, padding="same")
        self.pad = ZeroPadding2D(1)
        self.conv_c5_3x3 = Conv2D(filters, 3, strides=2)
        self.conv_c6_3x3 = Conv2D(filters, 3, strides=2)
        self.relu = ReLU()
        self.upsample_2x = UpSampling2D(2)

    def build(self, input_shape):
        self.conv_c3_3x3.build(self.conv_c3_1x1.build(input_shape["P3"]))
        shape = self.conv_c4_3x3.build(self.conv_c4_1x1.build(input_shape["P4"]))
        return self.conv_c6_3x3.build(self.conv_c5_3x3.build(shape))

    def call(self, inputs):
        p3_output = self.conv_c3_1x1(inputs["P3"])
        p4_output = self.conv_c4_1x1(inputs["P4"])
        _, height, width, _ = p3_output.shape
        p3_output = p3_output + self.upsample_2x(p4_output)[:, :height, :width]
        p3_output = self.conv_c3_3x3(p3_output)
        p4_output = self.conv_c4_3x3(p4_output)
        p5_output = self.conv_c5_3x3(self.pad(p4_output))
        p6_output = self.conv_c6_3x3(self.pad(self.relu(p5_output)))
        return p3_output, p4_output, p5_output, p6_output


# --------------------------------------------------------------------------- head


def build_tower(filters=32):
    layers: dict[str, nn.Module] = {}
    for i in range(2):
        layers[f"conv_{i}"] = Conv2D(filters, 3, padding="same", use_bias=False)
        layers[f"norm_{i}"] = GroupNormalization(groups=4, epsilon=1e-5)
        layers[f"relu_{i}"] = ReLU()
    return Sequential(**layers)


class PredictionHead(Layer):
    """Class scores, distances over the stride, centre-ness: [batch, places, 5, 4 and 1]."""

    def __init__(self):
        super().__init__()
        self.class_tower, self.box_tower = build_tower(), build_tower()
        self.class_output = Conv2D(CLASSES, 3, padding="same")
        self.box_output = Conv2D(4 + 1, 3, padding="same")

    def build(self, input_shape):
        self.class_output.build(self.class_tower.build(input_shape))
        self.box_output.build(self.box_tower.build(input_shape))
        for level in LEVELS:
            self.add_weight(f"scale_p{level}", (), "ones")

    def call(self, inputs):
        class_outputs, box_outputs, center_outputs = [], [], []
        for level, feature in zip(LEVELS, inputs):
            batch = feature.shape[0]
            scores = self.class_output(self.class_tower(feature))
            class_outputs.append(torch.reshape(scores, (batch, -1, CLASSES)))
            boxes = self.box_output(self.box_tower(feature))
            boxes = torch.reshape(boxes, (batch, -1, 5))
            scale = getattr(self, f"scale_p{level}")
            box_outputs.append(torch.exp(boxes[..., :4] * scale))
            center_outputs.append(boxes[..., 4:])
        outputs = (class_outputs, box_outputs, center_outputs)
        return [torch.cat(each, dim=1) for each in outputs]


class FCOS(Layer):
    def __init__(self):
        super().__init__()
        self.backbone = ResNetBackbone()
        self.feature_pyramid = FeaturePyramid()
        self.prediction_head = PredictionHead()

    def build(self, input_shape):
        shapes = self.backbone.build(input_shape)
        self.prediction_head.build(self.feature_pyramid.build(shapes))

    def call(self, inputs):
        return self.prediction_head(self.feature_pyramid(self.backbone(inputs)))


# ------------------------------------------------------------------------- weights


def to_hwio(kernel):
    return torch.permute(kernel, (2, 3, 1, 0))


def load_conv(layer, weights, key):
    layer.kernel.copy_(to_hwio(weights[f"{key}.weight"]))
    if layer.use_bias:
        layer.bias.copy_(weights[f"{key}.bias"])


def load_batch_norm(layer, weights, key):
    layer.gamma.copy_(weights[f"{key}.weight"])
    layer.beta.copy_(weights[f"{key}.bias"])
    layer.moving_mean.copy_(weights[f"{key}.running_mean"])
    layer.moving_variance.copy_(weights[f"{key}.running_var"])


def load_block(block, weights, key):
    for i in (1, 2):
        load_conv(getattr(block, f"conv_{i}"), weights, f"{key}.conv{i}")
        load_batch_norm(getattr(block, f"bn_{i}"), weights, f"{key}.bn{i}")
    if block.has_projection:
        load_conv(block.conv_0, weights, f"{key}.downsample.0")
        load_batch_norm(block.bn_0, weights, f"{key}.downsample.1")


def load_backbone(backbone, weights):
    kernel = to_hwio(weights["backbone.conv1.weight"])
    backbone.stem.conv.kernel.copy_(torch.flip(kernel, dims=(2,)))
    load_batch_norm(backbone.stem.bn, weights, "backbone.bn1")
    load_block(backbone.stack_0.block_0, weights, "backbone.layer1.0")
    load_block(backbone.stack_1.block_0, weights, "backbone.layer2.0")
    load_block(backbone.stack_1.block_1, weights, "backbone.layer2.1")
    load_block(backbone.stack_2.block_0, weights, "backbone.layer3.0")


def load_pyramid(pyramid, weights):
    load_conv(pyramid.conv_c3_1x1, weights, "fpn.lateral3")
    load_conv(pyramid.conv_c4_1x1, weights, "fpn.lateral4")
    load_conv(pyramid.conv_c3_3x3, weights, "fpn.output3")
    load_conv(pyramid.conv_c4_3x3, weights, "fpn.output4")
    load_conv(pyramid.conv_c5_3x3, weights, "fpn.p5")
    load_conv(pyramid.conv_c6_3x3, weights, "fpn.p6")


def load_head(head, weights):
    for tower, key in ((head.class_tower, "cls_tower"), (head.box_tower, "bbox_tower")):
        for i in range(2):
            load_conv(getattr(tower, f"conv_{i}"), weights, f"head.{key}.{3 * i}")
            norm = getattr(tower, f"norm_{i}")
            norm.gamma.copy_(weights[f"head.{key}.{3 * i + 1}.weight"])
            norm.beta.copy_(weights[f"head.{key}.{3 * i + 1}.bias"])
    load_conv(head.class_output, weights, "head.cls_logits")
    # Left, top, right, bottom -> top, left, bottom, right
    order = [1, 0, 3, 2]
    box, center = weights["head.bbox_pred.weight"], weights["head.centerness.weight"]
    head.box_output.kernel.copy_(to_hwio(torch.cat([box[order], center])))
    box, center = weights["head.bbox_pred.bias"], weights["head.centerness.bias"]
    head.box_output.bias.copy_(torch.cat([box[order], center]))
    for level, scale in zip(LEVELS, weights["head.scales"]):
        getattr(head, f"scale_p{level}").copy_(scale)


def model():
    fcos = FCOS()
    fcos.build((None, None, None, 3))
    weights = torch.load(Path(__file__).with_name("weights.pt"))
    with torch.no_grad():
        load_backbone(fcos.backbone, weights)
        load_pyramid(fcos.feature_pyramid, weights)
        load_head(fcos.prediction_head, weights)
    return fcos


# ------------------------------------------------------------------------ pictures


def preprocess_input(images, sizes):
    """RGB bytes to normalized BGR, channels last; what lies beyond a picture is 0."""
    x = torch.permute(images, (0, 2, 3, 1)).to(torch.float32)
    x = torch.flip(x, dims=(-1,))
    x = (x - torch.tensor(BGR_MEAN)) / torch.tensor(BGR_STD)
    rows = torch.arange(x.shape[1])[None, :, None, None] < sizes[:, 0, None, None, None]
    columns = (
        torch.arange(x.shape[2])[None, None, :, None] < sizes[:, 1, None, None, None]
    )
    return torch.where(torch.logical_and(rows, columns), x, 0.0)


def place_strides(height, width):
    """[places]: the strides of the levels."""
    counts = [-(-height // 2**level) * -(-width // 2**level) for level in LEVELS]
    strides = torch.tensor([2.0**level for level in LEVELS])
    return torch.repeat_interleave(strides, torch.tensor(counts))


def forward(net, batch):
    scores, boxes, center = net(preprocess_input(batch["image"], batch["size"]))
    strides = place_strides(*batch["image"].shape[2:])
    top, left, bottom, right = torch.unbind(boxes * strides[:, None], dim=-1)
    return {
        "logits": scores,
        "distances": torch.stack([left, top, right, bottom], dim=-1),
        "centerness": torch.squeeze(center, dim=-1),
    }


# ------------------------------------------------------------------------- targets


class LabelEncoder:
    """Targets of all places of a batch, with background where no box is taken."""

    def __init__(self, radius=1.5):
        self.radius = radius

    def get_centers(self, height, width):
        """[places, 2]: y, x."""
        centers = []
        for level in LEVELS:
            stride = 2**level
            ry = (torch.arange(-(-height // stride)) + 0.5) * stride
            rx = (torch.arange(-(-width // stride)) + 0.5) * stride
            centers.append(torch.cartesian_prod(ry, rx))
        return torch.cat(centers, dim=0)

    def get_limits(self, strides):
        """Least and largest size of each place."""
        index = torch.log2(strides).long() - LEVELS[0]
        limits = torch.tensor(SIZE_LIMITS)
        return limits[index], limits[index + 1]

    def match(self, gt_boxes, gt_mask, centers, strides):
        """Index of the box [batch, places], and whether there is one."""
        boxes = gt_boxes[:, None]
        points = centers[None, :, None]
        distances = torch.cat(
            [points - boxes[..., :2], boxes[..., 2:] - points], dim=-1
        )
        size = torch.amax(distances, dim=-1)
        lower, upper = self.get_limits(strides)
        in_range = (size >= lower[:, None]) & (size <= upper[:, None])
        offsets = points - 0.5 * (boxes[..., :2] + boxes[..., 2:])
        radius = self.radius * strides[:, None]
        near = torch.amax(torch.abs(offsets), dim=-1) < radius
        inside = torch.amin(distances, dim=-1) > 0.0
        candidates = in_range & near & inside & gt_mask[:, None]

        sides = gt_boxes[..., 2:] - gt_boxes[..., :2]
        area = sides[..., 0] * sides[..., 1]
        cost = torch.where(candidates, area[:, None], float("inf"))
        return torch.argmin(cost, dim=-1), torch.any(candidates, dim=-1)

    def encode_batch(self, images_shape, gt_boxes, gt_classes):
        height, width = images_shape
        centers = self.get_centers(height, width)
        strides = place_strides(height, width)
        matched, positive = self.match(gt_boxes, gt_classes >= 0, centers, strides)
        boxes = torch.take_along_dim(gt_boxes, matched[..., None], dim=1)
        box_targets = torch.cat(
            [centers - boxes[..., :2], boxes[..., 2:] - centers], dim=-1
        )
        classes = torch.take_along_dim(gt_classes, matched, dim=1)
        class_targets = torch.where(positive, classes, CLASSES)
        return class_targets, box_targets, positive


def get_centerness(tlbr):
    """Only what a positive place has means something."""
    top, left, bottom, right = torch.unbind(torch.clamp(tlbr, min=1e-6), dim=-1)
    vertical = torch.minimum(top, bottom) / torch.maximum(top, bottom)
    horizontal = torch.minimum(left, right) / torch.maximum(left, right)
    return torch.sqrt(vertical * horizontal)


# -------------------------------------------------------------------------- losses


def sigmoid_cross_entropy_with_logits(labels, logits):
    softplus = torch.log1p(torch.exp(-torch.abs(logits)))
    return torch.clamp(logits, min=0.0) - logits * labels + softplus


class FocalLoss:
    """Sum over the classes."""

    def __init__(self, alpha=0.25, gamma=2.0):
        self.alpha, self.gamma = alpha, gamma

    def __call__(self, y_true, y_pred):
        cross_entropy = sigmoid_cross_entropy_with_logits(y_true, y_pred)
        probs = torch.sigmoid(y_pred)
        alpha = torch.where(y_true == 1.0, self.alpha, 1.0 - self.alpha)
        pt = torch.where(y_true == 1.0, probs, 1.0 - probs)
        loss = alpha * torch.pow(1.0 - pt, self.gamma) * cross_entropy
        return torch.sum(loss, dim=-1)


class GIoULoss:
    """Boxes as y, x, y, x."""

    def __call__(self, boxes_true, boxes_pred):
        t_ymin, t_xmin, t_ymax, t_xmax = torch.unbind(boxes_true, dim=-1)
        p_ymin, p_xmin, p_ymax, p_xmax = torch.unbind(boxes_pred, dim=-1)
        true_area = (t_ymax - t_ymin) * (t_xmax - t_xmin)
        pred_area = (p_ymax - p_ymin) * (p_xmax - p_xmin)
        height = torch.minimum(t_ymax, p_ymax) - torch.maximum(t_ymin, p_ymin)
        width = torch.minimum(t_xmax, p_xmax) - torch.maximum(t_xmin, p_xmin)
        intersection = torch.clamp(height, min=0.0) * torch.clamp(width, min=0.0)
        union = true_area + pred_area - intersection
        enclose_height = torch.maximum(t_ymax, p_ymax) - torch.minimum(t_ymin, p_ymin)
        enclose_width = torch.maximum(t_xmax, p_xmax) - torch.minimum(t_xmin, p_xmin)
        enclose_area = enclose_height * enclose_width
        giou = intersection / union + union / enclose_area - 1.0
        return 1.0 - giou


def decode_boxes(centers, tlbr):
    return torch.cat([centers - tlbr[..., :2], centers + tlbr[..., 2:]], dim=-1)


class FCOSLoss:
    """Each part is weighted place by place and divided by the positives of the batch."""

    def __init__(self, box_weight):
        self.box_weight = box_weight
        self.label_encoder = LabelEncoder()
        self.classification_loss, self.box_loss = FocalLoss(), GIoULoss()

    def __call__(self, images_shape, gt_boxes, gt_classes, outputs):
        scores, tlbr, center = outputs
        class_targets, box_targets, positive = self.label_encoder.encode_batch(
            images_shape, gt_boxes, gt_classes
        )
        one_hot = torch.eye(CLASSES + 1)[class_targets][..., :CLASSES]
        class_loss = torch.sum(self.classification_loss(one_hot, scores))

        mask = positive.to(torch.float32)
        center_targets = get_centerness(box_targets)
        centers = self.label_encoder.get_centers(*images_shape)
        true_boxes = decode_boxes(centers, box_targets)
        each_box = self.box_loss(true_boxes, decode_boxes(centers, tlbr))
        box_loss = torch.sum(torch.where(positive, each_box * center_targets, 0.0))
        each_center = sigmoid_cross_entropy_with_logits(center_targets, center)
        center_loss = torch.sum(each_center * mask)
        normalizer = torch.clamp(torch.sum(mask), min=1.0)
        return (class_loss + self.box_weight * box_loss + center_loss) / normalizer


fcos_loss = FCOSLoss(box_weight=1.5)


def loss(output, batch):
    left, top, right, bottom = torch.unbind(output["distances"], dim=-1)
    tlbr = torch.stack([top, left, bottom, right], dim=-1)
    outputs = (output["logits"], tlbr, output["centerness"])
    gt_boxes = batch["boxes"][..., [1, 0, 3, 2]]
    return fcos_loss(batch["image"].shape[2:], gt_boxes, batch["labels"], outputs)


# ----------------------------------------------------------------------- optimizer


class SGD(torch.optim.Optimizer):
    """Momenta without the rate; those of Keras carry it, and the rate changes here."""

    def __init__(self, named_variables, schedule, momentum, weight_decay):
        named = [(name, v) for name, v in named_variables if v.requires_grad]
        super().__init__([v for _, v in named], {})
        self.is_bias = [name.endswith(("bias", "beta")) for name, _ in named]
        self.schedule, self.momentum = schedule, momentum
        self.weight_decay, self.iterations = weight_decay, 0

    @torch.no_grad()
    def step(self, closure=None):
        learning_rate = self.schedule(self.iterations)
        for variable, is_bias in zip(self.param_groups[0]["params"], self.is_bias):
            gradient = variable.grad
            if not is_bias:
                gradient = gradient + self.weight_decay * variable
            slots = self.state[variable]
            last = slots.get("momentum", torch.zeros_like(variable))
            slots["momentum"] = self.momentum * last + gradient
            rate = 2.0 * learning_rate if is_bias else learning_rate
            variable.sub_(rate * slots["momentum"])
        self.iterations += 1


def learning_rate_schedule(step):
    return 0.01 / 3.0 if step < 2 else 0.01


def optimizer(net):
    return SGD(net.named_parameters(), learning_rate_schedule, 0.9, 0.02)
