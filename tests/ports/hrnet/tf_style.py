"""After TensorFlow 2 and Keras: channels last, kernels HWIO, variables named as Keras does."""

import math
from pathlib import Path

import torch
from torch import nn

BN_MOMENTUM = 0.9
BN_EPSILON = 1e-5
FILTERS = [8, 16, 32]
KEYPOINTS = 7

# ------------------------------------------------------------------------- layers


def zero_padding_2d(inputs, padding):
    return nn.functional.pad(inputs, (0, 0, padding, padding, padding, padding))


def up_sampling_2d(inputs, size):
    """Nearest: rows and columns are repeated."""
    outputs = torch.repeat_interleave(inputs, size, dim=1)
    return torch.repeat_interleave(outputs, size, dim=2)


class Conv2D(nn.Module):
    """VALID over what ``zero_padding_2d`` gives, as patches times the kernel."""

    def __init__(self, inputs, filters, kernel_size, strides=1, use_bias=False):
        super().__init__()
        self.kernel_size, self.strides = kernel_size, strides
        shape = (kernel_size, kernel_size, inputs, filters)
        self.kernel = nn.Parameter(torch.zeros(shape))
        if use_bias:
            self.bias = nn.Parameter(torch.zeros(filters))
        self.use_bias = use_bias

    def forward(self, inputs):
        inputs = zero_padding_2d(inputs, self.kernel_size // 2)
        patches = inputs.unfold(1, self.kernel_size, self.strides)
        patches = patches.unfold(2, self.kernel_size, self.strides)
        outputs = torch.einsum("nhwcij,ijco->nhwo", patches, self.kernel)
        if self.use_bias:
            outputs = outputs + self.bias
        return outputs


class BatchNormalization(nn.Module):
    """As the fused kernel: moving variance is that of a sample."""

    def __init__(self, filters, momentum=BN_MOMENTUM, epsilon=BN_EPSILON):
        super().__init__()
        self.momentum, self.epsilon = momentum, epsilon
        self.gamma = nn.Parameter(torch.ones(filters))
        self.beta = nn.Parameter(torch.zeros(filters))
        self.register_buffer("moving_mean", torch.zeros(filters))
        self.register_buffer("moving_variance", torch.ones(filters))

    @torch.no_grad()
    def assign_moving_average(self, variable, value):
        variable.sub_((variable - value) * (1.0 - self.momentum))

    def forward(self, inputs):
        if self.training:
            mean = torch.mean(inputs, dim=(0, 1, 2))
            variance = torch.mean(torch.square(inputs - mean), dim=(0, 1, 2))
            size = math.prod(inputs.shape[:3])
            self.assign_moving_average(self.moving_mean, mean)
            self.assign_moving_average(
                self.moving_variance, variance * size / (size - 1)
            )
        else:
            mean = self.get_buffer("moving_mean")
            variance = self.get_buffer("moving_variance")
        inv = torch.rsqrt(variance + self.epsilon) * self.gamma
        return inputs * inv + (self.beta - mean * inv)


class ConvBN(nn.Module):
    def __init__(self, inputs, filters, kernel_size, strides=1, activation=None):
        super().__init__()
        self.conv = Conv2D(inputs, filters, kernel_size, strides)
        self.bn = BatchNormalization(filters)
        self.activation = activation

    def forward(self, inputs):
        outputs = self.bn(self.conv(inputs))
        return outputs if self.activation is None else self.activation(outputs)


# ------------------------------------------------------------------------- blocks


class BasicBlock(nn.Module):
    def __init__(self, filters):
        super().__init__()
        self.conv_a = ConvBN(filters, filters, 3, activation=torch.relu)
        self.conv_b = ConvBN(filters, filters, 3)

    def forward(self, inputs):
        residual = self.conv_b(self.conv_a(inputs))
        return torch.relu(inputs + residual)


class BottleneckBlock(nn.Module):
    def __init__(self, inputs, filters, expansion=2):
        super().__init__()
        self.conv_a = ConvBN(inputs, filters, 1, activation=torch.relu)
        self.conv_b = ConvBN(filters, filters, 3, activation=torch.relu)
        self.conv_c = ConvBN(filters, filters * expansion, 1)
        self.shortcut = ConvBN(inputs, filters * expansion, 1)

    def forward(self, inputs):
        residual = self.conv_c(self.conv_b(self.conv_a(inputs)))
        return torch.relu(self.shortcut(inputs) + residual)


class Downsample(nn.Module):
    """Strided convolutions one after the other; the last one is linear."""

    def __init__(self, source, target):
        super().__init__()
        self.steps = nn.ModuleList()
        inputs = FILTERS[source]
        for level in range(source + 1, target + 1):
            last = level == target
            filters = FILTERS[target] if last else inputs
            activation = None if last else torch.relu
            self.steps.append(ConvBN(inputs, filters, 3, 2, activation))

    def forward(self, inputs):
        for step in self.steps:
            inputs = step(inputs)
        return inputs


class Upsample(nn.Module):
    def __init__(self, source, target):
        super().__init__()
        self.project = ConvBN(FILTERS[source], FILTERS[target], 1)
        self.size = 2 ** (source - target)

    def forward(self, inputs):
        return up_sampling_2d(self.project(inputs), self.size)


class FuseLayers(nn.Module):
    def __init__(self, num_inputs, num_outputs):
        super().__init__()
        self.num_inputs, self.num_outputs = num_inputs, num_outputs
        self.paths = nn.ModuleDict()
        for source in range(num_inputs):
            for target in range(num_outputs):
                if source != target:
                    kind = Downsample if source < target else Upsample
                    self.paths[f"from_{source}_to_{target}"] = kind(source, target)

    def forward(self, branches):
        fused = []
        for target in range(self.num_outputs):
            total = branches[target]
            for source in range(self.num_inputs):
                if source != target:
                    path = self.paths[f"from_{source}_to_{target}"]
                    total = total + path(branches[source])
            fused.append(torch.relu(total))
        return fused


class HRModule(nn.Module):
    def __init__(self, num_branches, num_blocks, num_outputs):
        super().__init__()
        self.branches = nn.ModuleList()
        for filters in FILTERS[:num_branches]:
            blocks = [BasicBlock(filters) for _ in range(num_blocks)]
            self.branches.append(nn.Sequential(*blocks))
        self.fuse = FuseLayers(num_branches, num_outputs)

    def forward(self, inputs):
        return self.fuse([net(x) for net, x in zip(self.branches, inputs)])


class HRNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem_1 = ConvBN(3, 16, 3, 2, torch.relu)
        self.stem_2 = ConvBN(16, 16, 3, 2, torch.relu)
        self.stage_1 = BottleneckBlock(16, 12)
        self.to_branch_0 = ConvBN(24, FILTERS[0], 3, 1, torch.relu)
        self.to_branch_1 = ConvBN(24, FILTERS[1], 3, 2, torch.relu)
        self.stage_2 = HRModule(2, num_blocks=2, num_outputs=2)
        self.to_branch_2 = ConvBN(FILTERS[1], FILTERS[2], 3, 2, torch.relu)
        self.stage_3_a = HRModule(3, num_blocks=1, num_outputs=3)
        self.stage_3_b = HRModule(3, num_blocks=1, num_outputs=1)
        self.heatmaps = Conv2D(FILTERS[0], KEYPOINTS, 1, use_bias=True)

    def forward(self, images):
        features = self.stage_1(self.stem_2(self.stem_1(images)))
        high, low = self.to_branch_0(features), self.to_branch_1(features)
        high, low = self.stage_2([high, low])
        branches = self.stage_3_a([high, low, self.to_branch_2(low)])
        (high,) = self.stage_3_b(branches)
        return self.heatmaps(high)


# ------------------------------------------------------------------------ weights


class Checkpoint:
    """Puts the arrays of a PyTorch checkpoint into Keras layers."""

    def __init__(self, path):
        self.state = torch.load(path)

    def assign(self, variable, key, perm=None):
        array = self.state[key]
        if perm is not None:
            array = torch.permute(array, perm)
        assert variable.shape == array.shape, key
        with torch.no_grad():
            variable.copy_(array)

    def conv(self, layer, name):
        self.assign(layer.kernel, f"{name}.weight", perm=(2, 3, 1, 0))
        if layer.use_bias:
            self.assign(layer.bias, f"{name}.bias")

    def norm(self, layer, name):
        self.assign(layer.gamma, f"{name}.weight")
        self.assign(layer.beta, f"{name}.bias")
        self.assign(layer.moving_mean, f"{name}.running_mean")
        self.assign(layer.moving_variance, f"{name}.running_var")

    def conv_bn(self, layer, conv_name, bn_name):
        self.conv(layer.conv, conv_name)
        self.norm(layer.bn, bn_name)

    def sequential(self, layer, name, start=0):
        self.conv_bn(layer, f"{name}.{start}", f"{name}.{start + 1}")

    def block(self, block, name):
        self.conv_bn(block.conv_a, f"{name}.conv1", f"{name}.bn1")
        self.conv_bn(block.conv_b, f"{name}.conv2", f"{name}.bn2")
        if isinstance(block, BottleneckBlock):
            self.conv_bn(block.conv_c, f"{name}.conv3", f"{name}.bn3")
            self.sequential(block.shortcut, f"{name}.downsample")

    def fuse(self, fuse, name):
        for path_name, path in fuse.paths.items():
            _, source, _, target = path_name.split("_")
            prefix = f"{name}.{target}.{source}"
            if isinstance(path, Upsample):
                self.sequential(path.project, prefix)
            else:
                for i, step in enumerate(path.steps):
                    self.sequential(step, prefix, start=3 * i)

    def module(self, module, name):
        for i, branch in enumerate(module.branches):
            for j, block in enumerate(branch):
                self.block(block, f"{name}.branches.{i}.{j}")
        self.fuse(module.fuse, f"{name}.fuse_layers")


def model():
    net = HRNet()
    checkpoint = Checkpoint(Path(__file__).with_name("weights.pt"))
    checkpoint.conv_bn(net.stem_1, "conv1", "bn1")
    checkpoint.conv_bn(net.stem_2, "conv2", "bn2")
    checkpoint.block(net.stage_1, "layer1")
    checkpoint.sequential(net.to_branch_0, "transition1.0")
    checkpoint.sequential(net.to_branch_1, "transition1.1")
    checkpoint.module(net.stage_2, "stage2")
    checkpoint.sequential(net.to_branch_2, "transition2")
    checkpoint.module(net.stage_3_a, "stage3.0")
    checkpoint.module(net.stage_3_b, "stage3.1")
    checkpoint.conv(net.heatmaps, "final_layer")
    return net


# --------------------------------------------------------------------------- data

IMAGE_SHAPE = (64, 48, 3)
HEATMAP_SHAPE = (16, 12)
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)
FLIPPED_ORDER = [0, 2, 1, 4, 3, 6, 5]
SIGMA = 1.0


def preprocess_image(image, flip):
    image = image.to(torch.float32)
    image = (image - torch.tensor(IMAGENET_MEAN)) / torch.tensor(IMAGENET_STD)
    if flip:
        image = torch.flip(image, (1,))
    return image


def preprocess_keypoints(keypoints, visibility, flip):
    """[keypoints, 2] as x and y."""
    if flip:
        x, y = torch.unbind(keypoints, dim=-1)
        keypoints = torch.stack([IMAGE_SHAPE[1] - 1.0 - x, y], dim=-1)
        keypoints = keypoints[FLIPPED_ORDER]
        visibility = visibility[FLIPPED_ORDER]
    return keypoints, visibility


def gaussian_1d(centers, length):
    """[keypoints, length]; zero where more than three sigmas away."""
    distance = torch.arange(length, dtype=torch.float32) - centers[:, None]
    values = torch.exp(-0.5 * torch.square(distance / SIGMA))
    return torch.where(torch.abs(distance) <= 3.0 * SIGMA, values, 0.0)


def encode_heatmaps(keypoints):
    """[height, width, keypoints], from a row and a column for each keypoint."""
    centers = torch.floor(keypoints / 4.0 + 0.5)
    columns = gaussian_1d(centers[:, 0], HEATMAP_SHAPE[1])
    rows = gaussian_1d(centers[:, 1], HEATMAP_SHAPE[0])
    return torch.einsum("kh,kw->hwk", rows, columns)


def sample_weights(keypoints, visibility):
    """Occluded keypoints count less; without a trace on the map they do not count."""
    weights = torch.where(visibility == 2, 1.0, 0.6)
    weights = torch.where(visibility > 0, weights, 0.0)
    height, width = HEATMAP_SHAPE
    x, y = torch.unbind(torch.floor(keypoints / 4.0 + 0.5), dim=-1)
    in_x = (x - 3 < width) & (x + 3 >= 0)
    in_y = (y - 3 < height) & (y + 3 >= 0)
    return weights * (in_x & in_y).to(torch.float32)


def make_labels(batch):
    heatmaps, weights = [], []
    for keypoints, visibility, flip in zip(
        batch["joints"], batch["visible"], batch["flip"]
    ):
        keypoints, visibility = preprocess_keypoints(keypoints, visibility, flip)
        heatmaps.append(encode_heatmaps(keypoints))
        weights.append(sample_weights(keypoints, visibility))
    return torch.stack(heatmaps), torch.stack(weights)


def forward(net, batch):
    pairs = zip(batch["image"], batch["flip"])
    images = torch.stack([preprocess_image(image, flip) for image, flip in pairs])
    return torch.permute(net(images), (0, 3, 1, 2))


# --------------------------------------------------------------------------- loss

KEYPOINT_WEIGHTS = (1.0, 0.9, 0.9, 1.5, 1.5, 1.2, 1.2)


def loss(output, batch):
    """Half the mean over all keypoints, also over those that do not count."""
    y_pred = torch.permute(output, (0, 2, 3, 1))
    y_true, weights = make_labels(batch)
    weights = weights * torch.tensor(KEYPOINT_WEIGHTS)
    squared = torch.square(weights[:, None, None, :] * (y_true - y_pred))
    per_keypoint = torch.mean(squared, dim=(0, 1, 2))
    return 0.5 * torch.mean(per_keypoint)


# ---------------------------------------------------------------------- optimizer


class Adam(torch.optim.Optimizer):
    """Bias corrections are in the rate; gradients of regularisers are added here."""

    def __init__(self, variables, learning_rate, beta_1, beta_2, epsilon):
        names, values = zip(*variables)
        super().__init__(values, {})
        self.names = names
        self.learning_rate = learning_rate
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.regularizers = {}
        self.iterations = 0

    def regularized(self, name, gradient, variable):
        for suffix, l2 in self.regularizers.items():
            if name.endswith(suffix):
                gradient = gradient + 2.0 * l2 * variable
        return gradient

    @torch.no_grad()
    def step(self, closure=None):
        self.iterations += 1
        lr = self.learning_rate(self.iterations)
        correction = math.sqrt(1.0 - self.beta_2**self.iterations)
        alpha = lr * correction / (1.0 - self.beta_1**self.iterations)
        for name, variable in zip(self.names, self.param_groups[0]["params"]):
            gradient = self.regularized(name, variable.grad, variable)
            slots = self.state[variable]
            if not slots:
                slots["m"] = torch.zeros_like(variable)
                slots["v"] = torch.zeros_like(variable)
            m, v = slots["m"], slots["v"]
            m.add_((gradient - m) * (1.0 - self.beta_1))
            v.add_((torch.square(gradient) - v) * (1.0 - self.beta_2))
            variable.sub_(alpha * m / (torch.sqrt(v) + self.epsilon * correction))


def warm_up(peak, steps):
    return lambda iteration: peak * min(iteration, steps) / steps


def optimizer(net):
    schedule = warm_up(peak=4e-3, steps=4)
    adam = Adam(net.named_parameters(), schedule, 0.9, 0.99, 1e-4)
    adam.regularizers["kernel"] = 0.005
    return adam
