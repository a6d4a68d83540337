"""After TensorFlow: channels last, HWIO kernels, variables by name, a Keras-like optimizer."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

BATCH_NORM_EPSILON = 1e-5
BATCH_NORM_DECAY = 0.9
CHANNEL_MEANS = [0.42, 0.45, 0.38]
CHANNEL_STDS = [0.20, 0.27, 0.23]
BLOCK_SPECS = [(24, 1), (32, 2), (48, 1)]
NUM_CLASSES = 6
IGNORE_LABEL = 255

# ------------------------------------------------------------------------- layers


def pad_hw(inputs, rows, columns):
    return nn.functional.pad(inputs, (0, 0, *columns, *rows))


def fixed_pads(kernel_size):
    """Padding that does not depend on the size of the input."""
    total = kernel_size - 1
    return total // 2, total - total // 2


def same_pads(size, kernel_size, strides):
    total = max((-(-size // strides) - 1) * strides + kernel_size - size, 0)
    return total // 2, total - total // 2


def pad_inputs(inputs, kernel_size, strides):
    if strides > 1:
        pads = fixed_pads(kernel_size)
        return pad_hw(inputs, pads, pads)
    rows = same_pads(inputs.shape[1], kernel_size, strides)
    return pad_hw(inputs, rows, same_pads(inputs.shape[2], kernel_size, strides))


def extract_windows(inputs, kernel_size, strides):
    """[b, h, w, c] -> [b, rows, columns, c, k, k]."""
    windows = inputs.unfold(1, kernel_size, strides)
    return windows.unfold(2, kernel_size, strides)


def max_pool_3x3(inputs):
    """After a relu, where zeros at the rim are as good as minus infinity."""
    padded = pad_hw(inputs, (1, 1), (1, 1))
    return torch.amax(extract_windows(padded, 3, 2), dim=(-2, -1))


def hard_swish(x):
    return x * torch.clamp(x + 3.0, 0.0, 6.0) / 6.0


def global_average_pool(inputs):
    return torch.mean(inputs, dim=(1, 2))


def interpolation(in_size, out_size, align_corners):
    """Indices of the two neighbours, and how far the second is in."""
    if align_corners:
        source = torch.arange(out_size) * ((in_size - 1) / (out_size - 1))
    else:
        source = (torch.arange(out_size) + 0.5) * (in_size / out_size) - 0.5
    source = torch.clamp(source, min=0.0)
    lower = torch.clamp(torch.floor(source).long(), max=in_size - 1)
    upper = torch.clamp(lower + 1, max=in_size - 1)
    return lower, upper, source - lower


def resize_bilinear(images, size, align_corners=False):
    top, bottom, y_lerp = interpolation(images.shape[1], size[0], align_corners)
    left, right, x_lerp = interpolation(images.shape[2], size[1], align_corners)
    y_lerp, x_lerp = y_lerp[:, None, None], x_lerp[:, None]
    rows = images[:, top] + (images[:, bottom] - images[:, top]) * y_lerp
    return rows[:, :, left] + (rows[:, :, right] - rows[:, :, left]) * x_lerp


class Conv2D(nn.Module):
    """Kernel: [height, width, in, out]."""

    def __init__(self, inputs, filters, kernel_size, strides=1, use_bias=False):
        super().__init__()
        self.kernel_size, self.strides = kernel_size, strides
        self.kernel = nn.Parameter(
            torch.zeros(kernel_size, kernel_size, inputs, filters)
        )
        self.bias = nn.Parameter(torch.zeros(filters)) if use_bias else None

    def forward(self, inputs):
        if self.kernel_size == 1:
            outputs = torch.einsum("bhwi,io->bhwo", inputs, self.kernel[0, 0])
        else:
            padded = pad_inputs(inputs, self.kernel_size, self.strides)
            nchw = torch.permute(padded, (0, 3, 1, 2))
            oihw = torch.permute(self.kernel, (3, 2, 0, 1))
            nchw = nn.functional.conv2d(nchw, oihw, stride=self.strides)
            outputs = torch.permute(nchw, (0, 2, 3, 1))
        return outputs if self.bias is None else outputs + self.bias


class DepthwiseConv2D(nn.Module):
    """Kernel: [height, width, channels, 1]."""

    def __init__(self, channels, strides):
        super().__init__()
        self.strides = strides
        self.depthwise_kernel = nn.Parameter(torch.zeros(3, 3, channels, 1))

    def forward(self, inputs):
        windows = extract_windows(pad_inputs(inputs, 3, self.strides), 3, self.strides)
        taps = self.depthwise_kernel[..., 0]
        return torch.einsum("bhwckl,klc->bhwc", windows, taps)


class Dense(nn.Module):
    """Kernel: [in, out]."""

    def __init__(self, inputs, units, use_bias=True):
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(inputs, units))
        self.bias = nn.Parameter(torch.zeros(units)) if use_bias else None

    def forward(self, inputs):
        outputs = torch.matmul(inputs, self.kernel)
        return outputs if self.bias is None else outputs + self.bias


class BatchNormalization(nn.Module):
    """Over all axes but the last."""

    def __init__(self, channels, momentum=BATCH_NORM_DECAY, epsilon=BATCH_NORM_EPSILON):
        super().__init__()
        self.momentum, self.epsilon = momentum, epsilon
        self.gamma = nn.Parameter(torch.ones(channels))
        self.beta = nn.Parameter(torch.zeros(channels))
        self.register_buffer("moving_mean", torch.zeros(channels))
        self.register_buffer("moving_variance", torch.ones(channels))

    @torch.no_grad()
    def assign_moving_average(self, variable, value):
        variable.sub_((variable - value) * (1.0 - self.momentum))

    def forward(self, inputs):
        mean, variance = self.moving_mean, self.moving_variance
        if self.training:
            axes = tuple(range(inputs.ndim - 1))
            mean = torch.mean(inputs, dim=axes)
            variance = torch.mean(torch.square(inputs - mean), dim=axes)
            count = inputs[..., 0].numel()
            self.assign_moving_average(self.moving_mean, mean)
            unbiased = variance * (count / (count - 1))
            self.assign_moving_average(self.moving_variance, unbiased)
        inv = torch.rsqrt(variance + self.epsilon) * self.gamma
        return (inputs - mean) * inv + self.beta


class ConvBlock(nn.Module):
    def __init__(self, inputs, filters, kernel_size=3, strides=1):
        super().__init__()
        self.conv2d = Conv2D(inputs, filters, kernel_size, strides)
        self.batch_norm = BatchNormalization(filters)

    def forward(self, inputs):
        return torch.relu(self.batch_norm(self.conv2d(inputs)))


class SeparableBlock(nn.Module):
    def __init__(self, inputs, filters, strides):
        super().__init__()
        self.depthwise = DepthwiseConv2D(inputs, strides)
        self.depthwise_norm = BatchNormalization(inputs)
        self.pointwise = Conv2D(inputs, filters, 1)
        self.pointwise_norm = BatchNormalization(filters)

    def forward(self, inputs):
        net = hard_swish(self.depthwise_norm(self.depthwise(inputs)))
        return torch.relu(self.pointwise_norm(self.pointwise(net)))


# ------------------------------------------------------------------------- network


def shuffle(inputs, groups=2):
    channels = inputs.shape[-1]
    grouped = inputs.unflatten(-1, (groups, channels // groups))
    return torch.transpose(grouped, -1, -2).flatten(-2)


class DownUnit(nn.Module):
    def __init__(self, inputs, filters):
        super().__init__()
        half = filters // 2
        self.projection = SeparableBlock(inputs, half, 2)
        self.bottleneck = ConvBlock(inputs, half, 1)
        self.separable = SeparableBlock(half, half, 2)

    def forward(self, inputs):
        residual = self.separable(self.bottleneck(inputs))
        return shuffle(torch.cat([self.projection(inputs), residual], dim=-1))


class BasicUnit(nn.Module):
    def __init__(self, filters):
        super().__init__()
        half = filters // 2
        self.bottleneck = ConvBlock(half, half, 1)
        self.separable = SeparableBlock(half, half, 1)

    def forward(self, inputs):
        identity, residual = torch.tensor_split(inputs, 2, dim=-1)
        residual = self.separable(self.bottleneck(residual))
        return shuffle(torch.cat([identity, residual], dim=-1))


class ShuffleBackbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.root = ConvBlock(3, 16, 3, 2)
        self.block = nn.ModuleList()
        inputs = 16
        for filters, repeats in BLOCK_SPECS:
            units = [DownUnit(inputs, filters)]
            units += [BasicUnit(filters) for _ in range(repeats - 1)]
            self.block.append(nn.ModuleList(units))
            inputs = filters

    def forward(self, inputs):
        net = max_pool_3x3(self.root(inputs))
        endpoints = []
        units: Any
        for units in self.block:
            for unit in units:
                net = unit(net)
            endpoints.append(net)
        return endpoints


class AttentionModule(nn.Module):
    def __init__(self, inputs, filters):
        super().__init__()
        self.transform = ConvBlock(inputs, filters)
        self.attention = Dense(filters, filters, use_bias=False)
        self.attention_norm = BatchNormalization(filters)

    def forward(self, inputs):
        net = self.transform(inputs)
        scores = self.attention_norm(self.attention(global_average_pool(net)))
        return net * torch.sigmoid(scores)[:, None, None, :]


class ContextBranch(nn.Module):
    def __init__(self, filters=32):
        super().__init__()
        self.encoder = ShuffleBackbone()
        self.refine_16 = AttentionModule(BLOCK_SPECS[1][0], filters)
        self.refine_32 = AttentionModule(BLOCK_SPECS[2][0], filters)
        self.global_context = ConvBlock(BLOCK_SPECS[2][0], filters, 1)
        self.smooth_32 = ConvBlock(filters, filters)
        self.smooth_16 = ConvBlock(filters, filters)

    def forward(self, inputs):
        os8, os16, os32 = self.encoder(inputs)
        pooled = self.global_context(global_average_pool(os32)[:, None, None, :])
        net = self.refine_32(os32) + pooled
        context16 = self.smooth_32(resize_bilinear(net, os16.shape[1:3]))
        net = self.refine_16(os16) + context16
        context8 = self.smooth_16(resize_bilinear(net, os8.shape[1:3]))
        return context8, context16


class SpatialBranch(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_1 = ConvBlock(3, 16, 7, 2)
        self.conv_2 = ConvBlock(16, 16, 3, 2)
        self.conv_3 = ConvBlock(16, 24, 3, 2)
        self.project = ConvBlock(24, 32, 1)

    def forward(self, inputs):
        return self.project(self.conv_3(self.conv_2(self.conv_1(inputs))))


class FusionModule(nn.Module):
    def __init__(self, filters=48):
        super().__init__()
        self.mix = ConvBlock(64, filters, 1)
        self.squeeze = Dense(filters, filters // 4)
        self.excitation = Dense(filters // 4, filters)

    def forward(self, spatial, context):
        net = self.mix(torch.cat([spatial, context], dim=-1))
        gate = torch.relu(self.squeeze(global_average_pool(net)))
        gate = torch.sigmoid(self.excitation(gate))
        return net * (1.0 + gate[:, None, None, :])


class LogitsLayer(nn.Module):
    def __init__(self, inputs, filters, outputs, align_corners=False):
        super().__init__()
        self.align_corners = align_corners
        self.conv = ConvBlock(inputs, filters)
        self.logits = Conv2D(
            inputs=filters, filters=outputs, kernel_size=1, use_bias=True
        )

    def forward(self, inputs, size):
        logits = self.logits(self.conv(inputs))
        return resize_bilinear(logits, size, self.align_corners)


class BilateralNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.spatial_path = SpatialBranch()
        self.context_path = ContextBranch()
        self.feature_fusion = FusionModule()
        self.logits_main = LogitsLayer(48, 32, NUM_CLASSES, align_corners=True)
        self.logits_os8 = LogitsLayer(32, 24, NUM_CLASSES)
        self.logits_os16 = LogitsLayer(32, 24, NUM_CLASSES)
        self.logits_edges = LogitsLayer(32, 16, 1, align_corners=True)

    def forward(self, images):
        size = images.shape[1:3]
        spatial = self.spatial_path(images)
        context8, context16 = self.context_path(images)
        fused = self.feature_fusion(spatial, context8)
        return {
            "out": self.logits_main(fused, size),
            "aux8": self.logits_os8(context8, size),
            "aux16": self.logits_os16(context16, size),
            "detail": self.logits_edges(spatial, size),
        }


# ------------------------------------------------------------------------- weights

RENAMES = [
    (r"^spatial\.conv_out\.", "spatial_path.project."),
    (r"^spatial\.conv(\d)\.", r"spatial_path.conv_\1."),
    (r"^context\.backbone\.stem\.", "context_path.encoder.root."),
    (r"^context\.backbone\.stages\.", "context_path.encoder.block."),
    (r"^context\.arm(\d+)\.", r"context_path.refine_\1."),
    (r"^context\.conv_avg\.", "context_path.global_context."),
    (r"^context\.conv_head(\d+)\.", r"context_path.smooth_\1."),
    (r"^fusion\.convblk\.", "feature_fusion.mix."),
    (r"^fusion\.squeeze\.", "feature_fusion.squeeze."),
    (r"^fusion\.excite\.", "feature_fusion.excitation."),
    (r"^head_aux(\d+)\.", r"logits_os\1."),
    (r"^head_detail\.", "logits_edges."),
    (r"^head\.", "logits_main."),
    (r"\.shortcut\.", ".projection."),
    (r"\.reduce\.", ".bottleneck."),
    (r"\.conv_atten\.", ".attention."),
    (r"\.bn_atten\.", ".attention_norm."),
    (r"(refine_\d+)\.conv\.", r"\1.transform."),
    (r"\.dw\.weight$", ".depthwise.depthwise_kernel"),
    (r"\.pw\.", ".pointwise."),
    (r"\.bn1\.", ".depthwise_norm."),
    (r"\.bn2\.", ".pointwise_norm."),
    (r"\.conv_out\.", ".logits."),
    (r"\.conv\.weight$", ".conv2d.kernel"),
    (r"\.bn\.", ".batch_norm."),
    (r"norm\.weight$", "norm.gamma"),
    (r"norm\.bias$", "norm.beta"),
    (r"\.running_mean$", ".moving_mean"),
    (r"\.running_var$", ".moving_variance"),
    (r"\.weight$", ".kernel"),
]


def variable_name(key):
    for pattern, replacement in RENAMES:
        key = re.sub(pattern, replacement, key)
    return key


def variable_value(name, array):
    if name.endswith("depthwise_kernel"):
        return torch.permute(array, (2, 3, 0, 1))
    if re.search(r"\.(attention|squeeze|excitation)\.kernel$", name):
        return array[:, :, 0, 0].T
    if name.endswith("kernel"):
        return torch.permute(array, (2, 3, 1, 0))
    return array


def load_checkpoint(net, path):
    values = {}
    for key, array in torch.load(path).items():
        if key.endswith("num_batches_tracked"):
            continue
        name = variable_name(key)
        values[name] = variable_value(name, array).contiguous()
    net.load_state_dict(values)
    return net


def model():
    path = Path(__file__).with_name("weights.pt")
    return load_checkpoint(BilateralNetwork(), path)


def forward(net, batch):
    images = batch["image"].float() / 255.0
    images = (images - torch.tensor(CHANNEL_MEANS)) / torch.tensor(CHANNEL_STDS)
    outputs = net(images)
    return {name: torch.permute(y, (0, 3, 1, 2)) for name, y in outputs.items()}


# ---------------------------------------------------------------------------- loss

MAIN_HARD_PROB, MAIN_TOP_K = 0.02, 1500
AUX_HARD_PROB, AUX_TOP_K = 0.2, 500


def sparse_cross_entropy(labels, logits):
    """Logits: [pixels, classes]."""
    shifted = logits - torch.amax(logits, dim=-1, keepdim=True).detach()
    log_sum = torch.log(torch.sum(torch.exp(shifted), dim=-1))
    return log_sum - torch.gather(shifted, 1, labels[:, None])[:, 0]


def hard_example_mining_loss(labels, logits, hard_prob, top_k):
    batch_size = labels.shape[0]
    labels = labels.reshape(-1)
    not_ignore = labels != IGNORE_LABEL
    logits = torch.permute(logits, (0, 2, 3, 1)).reshape(len(labels), -1)
    pixel_losses = sparse_cross_entropy(labels * not_ignore, logits) * not_ignore
    num_kept = top_k * batch_size
    kth_loss = torch.topk(pixel_losses.detach(), num_kept)[0][-1]
    is_hard = pixel_losses > -torch.log(torch.tensor(hard_prob))
    if torch.sum(is_hard) < num_kept:
        is_hard = pixel_losses >= kth_loss
    is_hard = is_hard.float()
    return torch.sum(pixel_losses * is_hard) / torch.sum(is_hard)


def box_sum(maps):
    """Sums of 3x3 windows, with zeros beyond the rim."""
    padded = nn.functional.pad(maps, (1, 1, 1, 1))
    rows = padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]
    return rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]


def laplacian(maps):
    return 9.0 * maps - box_sum(maps)


def edge_map(labels):
    """Edges on three scales, each brought back to the size of the labels."""
    response = laplacian(torch.where(labels == IGNORE_LABEL, 0, labels).float())
    edges = (response > 0.1).float()
    pyramid = torch.zeros_like(edges)
    for step, weight in ((1, 0.6), (2, 0.3), (4, 0.1)):
        coarse = edges[:, ::step, ::step]
        fine = torch.repeat_interleave(coarse, step, dim=1)
        pyramid = pyramid + weight * torch.repeat_interleave(fine, step, dim=2)
    return pyramid


def edge_loss(labels, logits):
    logits = logits[:, 0]
    edges = edge_map(labels)
    mask = (labels != IGNORE_LABEL).float()
    sigmoid_ce = torch.relu(logits) - logits * edges
    sigmoid_ce = sigmoid_ce + torch.log1p(torch.exp(-torch.abs(logits)))
    mean_ce = torch.sum(sigmoid_ce * mask) / torch.sum(mask)

    predicted = torch.sigmoid(logits) * mask
    edges = edges * mask
    intersection = torch.sum(predicted * edges, dim=(1, 2))
    union = torch.sum(predicted + edges, dim=(1, 2))
    dice = 1.0 - (2.0 * intersection + 1.0) / (union + 1.0)
    return mean_ce + torch.mean(dice)


def loss(output, batch):
    labels = batch["label"].long()
    total = hard_example_mining_loss(labels, output["out"], MAIN_HARD_PROB, MAIN_TOP_K)
    for name in ("aux8", "aux16"):
        total = total + 0.4 * hard_example_mining_loss(
            labels, output[name], AUX_HARD_PROB, AUX_TOP_K
        )
    return total + 0.8 * edge_loss(labels, output["detail"])


# ----------------------------------------------------------------------- optimizer


class PolynomialDecay:
    def __init__(self, initial_learning_rate, decay_steps, power):
        self.initial_learning_rate = initial_learning_rate
        self.decay_steps = decay_steps
        self.power = power

    def __call__(self, step):
        left = 1.0 - min(step, self.decay_steps) / self.decay_steps
        return self.initial_learning_rate * left**self.power


class SGD(torch.optim.Optimizer):
    """Named variables; velocities are sums of gradients, without the rate."""

    def __init__(self, net, learning_rate, momentum, l2, iterations=0):
        self.named = dict(net.named_parameters())
        super().__init__(list(self.named.values()), {})
        self.learning_rate, self.momentum, self.l2 = learning_rate, momentum, l2
        self.iterations = iterations
        self.velocities = {n: torch.zeros_like(v) for n, v in self.named.items()}

    @torch.no_grad()
    def step(self, closure=None):
        rate = self.learning_rate(self.iterations)
        for name, variable in self.named.items():
            gradient = variable.grad
            if name.endswith("kernel"):
                gradient = gradient + self.l2 * variable
            multiplier = 10.0 if name.startswith("logits") else 1.0
            velocity = self.velocities[name]
            velocity.mul_(self.momentum).add_(gradient)
            lookahead = self.momentum * velocity + gradient
            variable.sub_(rate * multiplier * lookahead)
        self.iterations += 1


def optimizer(net):
    schedule = PolynomialDecay(2e-3, decay_steps=10, power=0.9)
    return SGD(net, schedule, momentum=0.9, l2=5e-3, iterations=3)
