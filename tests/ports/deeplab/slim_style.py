"""Moved from a script for TF-slim: variables in scopes, NHWC, SAME padding, functional layers.

Names of variables are those of the checkpoints, so that these can still be read.
"""

import collections
import math
from pathlib import Path

import torch
from torch import nn

FLAGS = {
    "ignore_label": 255,
    "num_classes": 6,
    "base_learning_rate": 0.02,
    "last_layer_gradient_multiplier": 10.0,
    "learning_power": 0.9,
    "training_number_of_steps": 24,
    "slow_start_step": 3,
    "slow_start_ratio": 0.25,
    "momentum": 0.9,
    "weight_decay": 0.01,
    "batch_norm_decay": 0.97,
    "batch_norm_epsilon": 1e-5,
    "dice_loss_weight": 0.5,
    "auxiliary_loss_weight": 0.4,
}
TRAIN_CROP_SIZE, PADDED_SIZE = (56, 72), (64, 80)
MEAN_PIXEL = [0.45, 0.43, 0.40]
STD_PIXEL = [0.24, 0.22, 0.23]
LABEL_WEIGHTS = [0.4, 1.0, 1.3, 0.8, 1.7, 1.1]

Unit = collections.namedtuple("Unit", ["scope", "stride", "rate"])
BLOCKS = {
    "block1": [Unit("unit_1", 1, 1)],
    "block2": [Unit("unit_1", 2, 1)],
    "block3": [Unit("unit_1", 1, 2), Unit("unit_2", 1, 4)],
}
ATROUS_RATES = [2, 3]


# ------------------------------------------------------------------ operations


def same_pads(size, kernel_size, stride, rate):
    """What SAME puts before and behind an axis of this size."""
    effective = (kernel_size - 1) * rate + 1
    out = math.ceil(size / stride)
    total = max((out - 1) * stride + effective - size, 0)
    return total // 2, total - total // 2


def pad_spatial(inputs, rows, cols):
    return nn.functional.pad(inputs, (0, 0, *cols, *rows))


def nn_conv2d(inputs, filters, stride=1, rate=1, padding="SAME", groups=1):
    """inputs [batch, height, width, in], filters [height, width, in, out]."""
    if padding == "SAME":
        rows = same_pads(inputs.shape[1], filters.shape[0], stride, rate)
        cols = same_pads(inputs.shape[2], filters.shape[1], stride, rate)
        inputs = pad_spatial(inputs, rows, cols)
    outputs = nn.functional.conv2d(
        torch.permute(inputs, (0, 3, 1, 2)),
        torch.permute(filters, (3, 2, 0, 1)),
        stride=stride,
        dilation=rate,
        groups=groups,
    )
    return torch.permute(outputs, (0, 2, 3, 1))


def nn_depthwise_conv2d(inputs, filters, rate):
    """filters [height, width, in, 1]."""
    filters = torch.transpose(filters, 2, 3)
    return nn_conv2d(inputs, filters, rate=rate, groups=inputs.shape[3])


def max_pool2d_same(inputs, kernel_size, stride):
    """As conv2d_same: what is padded does not depend on the size of the inputs."""
    before = (kernel_size - 1) // 2
    behind = kernel_size - 1 - before
    inputs = pad_spatial(inputs, (before, behind), (before, behind))
    inputs = torch.permute(inputs, (0, 3, 1, 2))
    outputs = nn.functional.max_pool2d(inputs, kernel_size, stride)
    return torch.permute(outputs, (0, 2, 3, 1))


def resize_axis(images, axis, out_size):
    in_size = images.shape[axis]
    source = (torch.arange(out_size) + 0.5) * (in_size / out_size) - 0.5
    floor = torch.floor(source)
    lower = torch.clamp(floor, min=0).long()
    upper = torch.clamp(floor + 1, max=in_size - 1).long()
    shape = [1, 1, 1, 1]
    shape[axis] = out_size
    lerp = torch.reshape(source - floor, shape)
    low = torch.index_select(images, axis, lower)
    high = torch.index_select(images, axis, upper)
    return low + (high - low) * lerp


def resize_bilinear(images, size):
    """Half pixel centers, as of version 2."""
    return resize_axis(resize_axis(images, 1, size[0]), 2, size[1])


def one_hot(labels, depth):
    """Rows of zeros for labels that are no class."""
    return (labels[..., None] == torch.arange(depth)).float()


# ----------------------------------------------------------------------- model


class DeepLab(nn.Module):
    def __init__(self, variables):
        super().__init__()
        for name, value in variables.items():
            value = value.clone().contiguous()
            if "/moving_" in name:
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value))

    def get_variable(self, name):
        return getattr(self, name)

    def batch_norm(self, inputs, scope):
        """The variance that moves is unbiased, as in the fused operation."""
        mean = torch.mean(inputs, dim=(0, 1, 2))
        variance = torch.mean(torch.square(inputs - mean), dim=(0, 1, 2))
        count = inputs.shape[0] * inputs.shape[1] * inputs.shape[2]
        decay = FLAGS["batch_norm_decay"]
        with torch.no_grad():
            moving_mean = self.get_variable(scope + "/moving_mean")
            moving_mean.mul_(decay).add_(mean * (1 - decay))
            moving_variance = self.get_variable(scope + "/moving_variance")
            unbiased = variance * (count / (count - 1))
            moving_variance.mul_(decay).add_(unbiased * (1 - decay))
        gamma = self.get_variable(scope + "/gamma")
        beta = self.get_variable(scope + "/beta")
        scale = gamma * torch.rsqrt(variance + FLAGS["batch_norm_epsilon"])
        return (inputs - mean) * scale + beta

    def conv2d(self, inputs, scope, stride=1, rate=1, padding="SAME", relu=True):
        filters = self.get_variable(scope + "/weights")
        net = nn_conv2d(inputs, filters, stride, rate, padding)
        net = self.batch_norm(net, scope + "/BatchNorm")
        return torch.relu(net) if relu else net

    def conv2d_same(self, inputs, scope, stride, rate=1):
        """With a stride, what is padded does not depend on the size of the inputs."""
        if stride == 1:
            return self.conv2d(inputs, scope, rate=rate)
        kernel_size = self.get_variable(scope + "/weights").shape[0]
        pad_total = (kernel_size - 1) * rate
        before = pad_total // 2
        pads = (before, pad_total - before)
        inputs = pad_spatial(inputs, pads, pads)
        return self.conv2d(inputs, scope, stride, rate, padding="VALID")

    def split_separable_conv2d(self, inputs, scope, rate=1):
        filters = self.get_variable(scope + "_depthwise/depthwise_weights")
        net = nn_depthwise_conv2d(inputs, filters, rate)
        return self.conv2d(net, scope + "_pointwise")

    def bottleneck(self, inputs, scope, stride, rate):
        scope = scope + "/bottleneck_v1"
        shortcut = inputs
        if hasattr(self, scope + "/shortcut/weights"):
            shortcut = self.conv2d(inputs, scope + "/shortcut", stride, relu=False)
        residual = self.conv2d(inputs, scope + "/conv1")
        residual = self.conv2d_same(residual, scope + "/conv2", stride, rate)
        residual = self.conv2d(residual, scope + "/conv3", relu=False)
        return torch.relu(shortcut + residual)

    def extract_features(self, images):
        net = self.conv2d_same(images, "resnet_v1/conv1", stride=2)
        net = max_pool2d_same(net, 3, stride=2)
        end_points = {}
        for block, units in BLOCKS.items():
            for unit in units:
                scope = f"resnet_v1/{block}/{unit.scope}"
                net = self.bottleneck(net, scope, unit.stride, unit.rate)
            end_points[block] = net
        return net, end_points

    def atrous_pyramid(self, features):
        height, width = features.shape[1:3]
        image_feature = torch.mean(features, dim=(1, 2), keepdim=True)
        image_feature = self.conv2d(image_feature, "image_pooling")
        branch_logits = [resize_bilinear(image_feature, (height, width))]
        branch_logits.append(self.conv2d(features, "aspp0"))
        for i, rate in enumerate(ATROUS_RATES, 1):
            branch = self.split_separable_conv2d(features, f"aspp{i}", rate)
            branch_logits.append(branch)
        return self.conv2d(torch.cat(branch_logits, dim=3), "concat_projection")

    def refine_by_decoder(self, features, low_level):
        low_level = self.conv2d(low_level, "decoder/feature_projection0")
        features = resize_bilinear(features, low_level.shape[1:3])
        net = torch.cat([features, low_level], dim=3)
        return self.split_separable_conv2d(net, "decoder/decoder_conv0")

    def branch_logits(self, features, scope):
        net = nn_conv2d(features, self.get_variable(scope + "/weights"))
        return net + self.get_variable(scope + "/biases")

    def forward(self, images):
        size = images.shape[1:3]
        features, end_points = self.extract_features(images)
        features = self.atrous_pyramid(features)
        features = self.refine_by_decoder(features, end_points["block1"])
        semantic = self.branch_logits(features, "logits/semantic")
        auxiliary = self.conv2d(end_points["block2"], "auxiliary/conv")
        auxiliary = self.branch_logits(auxiliary, "auxiliary/logits")
        return resize_bilinear(semantic, size), resize_bilinear(auxiliary, size)


# ------------------------------------------------------------------ checkpoint


def from_torch(state):
    variables = {}

    def conv(scope, name):
        weight = state[name + ".weight"]
        variables[scope + "/weights"] = torch.permute(weight, (2, 3, 1, 0))

    def norm(scope, name):
        scope += "/BatchNorm"
        variables[scope + "/gamma"] = state[name + ".weight"]
        variables[scope + "/beta"] = state[name + ".bias"]
        variables[scope + "/moving_mean"] = state[name + ".running_mean"]
        variables[scope + "/moving_variance"] = state[name + ".running_var"]

    def conv_norm(scope, name):
        conv(scope, name + ".0")
        norm(scope, name + ".1")

    def separable(scope, name):
        weight = state[name + ".depthwise.weight"]
        weight = torch.permute(weight, (2, 3, 0, 1))
        variables[scope + "_depthwise/depthwise_weights"] = weight
        conv(scope + "_pointwise", name + ".pointwise")
        norm(scope + "_pointwise", name + ".bn")

    def logits(scope, name):
        conv(scope, name)
        variables[scope + "/biases"] = state[name + ".bias"]

    conv_norm("resnet_v1/conv1", "backbone.stem")
    for scope, name in (
        ("block1/unit_1", "layer1"),
        ("block2/unit_1", "layer2"),
        ("block3/unit_1", "layer3.0"),
        ("block3/unit_2", "layer3.1"),
    ):
        scope, name = f"resnet_v1/{scope}/bottleneck_v1", f"backbone.{name}"
        if name + ".downsample.0.weight" in state:
            conv_norm(scope + "/shortcut", name + ".downsample")
        for i in (1, 2, 3):
            conv_norm(f"{scope}/conv{i}", f"{name}.conv{i}")

    conv("image_pooling", "aspp.pooling.1")
    norm("image_pooling", "aspp.pooling.2")
    conv_norm("aspp0", "aspp.convs.0")
    separable("aspp1", "aspp.convs.1")
    separable("aspp2", "aspp.convs.2")
    conv_norm("concat_projection", "aspp.project")
    conv_norm("decoder/feature_projection0", "decoder.low_project")
    separable("decoder/decoder_conv0", "decoder.fuse")
    logits("logits/semantic", "decoder.classifier")
    conv_norm("auxiliary/conv", "aux.0")
    logits("auxiliary/logits", "aux.1")

    # The pooled features come first here, the low-level ones last.
    weights = variables["concat_projection/weights"]
    weights = torch.roll(weights, 16, dims=2)
    variables["concat_projection/weights"] = weights
    for name in ("depthwise/depthwise_weights", "pointwise/weights"):
        name = "decoder/decoder_conv0_" + name
        variables[name] = torch.roll(variables[name], 16, dims=2)
    return variables


def model():
    return DeepLab(from_torch(torch.load(Path(__file__).with_name("weights.pt"))))


# ------------------------------------------------------------------------ data


def pad_crop_flip(image, corner, flip, pad_value):
    """image [height, width, channels], pad_value [channels]."""
    height, width, channels = image.shape
    padded_height, padded_width = PADDED_SIZE
    canvas = pad_value.expand(padded_height, padded_width, channels).clone()
    canvas[:height, :width] = image
    crop_height, crop_width = TRAIN_CROP_SIZE
    offset_height, offset_width = int(corner[0]), int(corner[1])
    crop = canvas[
        offset_height : offset_height + crop_height,
        offset_width : offset_width + crop_width,
    ]
    return torch.flip(crop, (1,)) if flip else crop


def preprocess_images(batch):
    mean, std = torch.tensor(MEAN_PIXEL), torch.tensor(STD_PIXEL)
    images = []
    for i, image in enumerate(batch["image"]):
        image = torch.permute(image, (1, 2, 0)).float()
        image = torch.clamp(image * batch["brightness"][i], 0.0, 255.0) / 255.0
        image = pad_crop_flip(image, batch["corner"][i], batch["flip"][i], mean)
        images.append((image - mean) / std)
    return torch.stack(images)


def preprocess_labels(batch):
    ignore = torch.tensor([FLAGS["ignore_label"]])
    labels = []
    for i, label in enumerate(batch["label"][..., None]):
        label = pad_crop_flip(label, batch["corner"][i], batch["flip"][i], ignore)
        labels.append(label[..., 0])
    return torch.stack(labels)


def forward(net, batch):
    """Logits with channels second, as the evaluation wants them."""
    semantic, auxiliary = net(preprocess_images(batch))
    return {
        "out": torch.permute(semantic, (0, 3, 1, 2)),
        "aux": torch.permute(auxiliary, (0, 3, 1, 2)),
    }


# -------------------------------------------------------------------- training


def softmax_cross_entropy_loss(logits, labels):
    """logits [pixels, classes], labels [pixels]; ignored labels weigh nothing."""
    labels = one_hot(labels, FLAGS["num_classes"])
    weights = torch.sum(labels * torch.tensor(LABEL_WEIGHTS), dim=1)
    shifted = logits - torch.amax(logits, dim=1, keepdim=True).detach()
    log_sum = torch.log(torch.sum(torch.exp(shifted), dim=1))
    pixel_losses = log_sum - torch.sum(labels * shifted, dim=1)
    return torch.sum(pixel_losses * weights) / torch.sum(weights)


def soft_dice_loss(logits, labels):
    not_ignored = (labels != FLAGS["ignore_label"]).float()
    labels = one_hot(labels, FLAGS["num_classes"])
    predictions = torch.softmax(logits, dim=1) * not_ignored[:, None]
    overlap = torch.sum(predictions * labels, dim=0)
    union = torch.sum(predictions, dim=0) + torch.sum(labels, dim=0)
    return torch.mean(1.0 - (2.0 * overlap + 1.0) / (union + 1.0))


def loss(output, batch):
    labels = torch.reshape(preprocess_labels(batch), (-1,))

    def flat(logits):
        logits = torch.permute(logits, (0, 2, 3, 1))
        return torch.reshape(logits, (-1, FLAGS["num_classes"]))

    semantic, auxiliary = flat(output["out"]), flat(output["aux"])
    total = softmax_cross_entropy_loss(semantic, labels)
    total = total + FLAGS["dice_loss_weight"] * soft_dice_loss(semantic, labels)
    auxiliary_loss = softmax_cross_entropy_loss(auxiliary, labels)
    return total + FLAGS["auxiliary_loss_weight"] * auxiliary_loss


def get_model_learning_rate(global_step):
    """Polynomial decay; in the first steps a part of it."""
    remaining = 1.0 - global_step / FLAGS["training_number_of_steps"]
    learning_rate = FLAGS["base_learning_rate"] * remaining ** FLAGS["learning_power"]
    if global_step < FLAGS["slow_start_step"]:
        ratio = FLAGS["slow_start_ratio"]
        learning_rate *= ratio + (1.0 - ratio) * global_step / FLAGS["slow_start_step"]
    return learning_rate


class MomentumOptimizer(torch.optim.Optimizer):
    def __init__(self, named_variables, momentum, weight_decay, multiplier):
        named_variables = list(named_variables)
        super().__init__([v for _, v in named_variables], {})
        self.names = [name for name, _ in named_variables]
        self.momentum, self.weight_decay = momentum, weight_decay
        self.multiplier = multiplier
        self.global_step = 0

    def is_regularized(self, name):
        return name.endswith("weights")

    def gradient_multiplier(self, name):
        return 1.0 if name.startswith("resnet_v1/") else self.multiplier

    @torch.no_grad()
    def step(self, closure=None):
        learning_rate = get_model_learning_rate(self.global_step)
        for name, var in zip(self.names, self.param_groups[0]["params"]):
            grad = var.grad
            if self.is_regularized(name):
                grad = grad + self.weight_decay * var
            grad = grad * self.gradient_multiplier(name)
            slots = self.state[var]
            if "accum" not in slots:
                slots["accum"] = torch.zeros_like(var)
            accum = slots["accum"].mul_(self.momentum).add_(grad)
            var.sub_(learning_rate * (grad + self.momentum * accum))
        self.global_step += 1


def optimizer(net):
    return MomentumOptimizer(
        net.named_parameters(),
        momentum=FLAGS["momentum"],
        weight_decay=FLAGS["weight_decay"],
        multiplier=FLAGS["last_layer_gradient_multiplier"],
    )
