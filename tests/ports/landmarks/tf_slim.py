"""As in TF-Slim: pictures are NHWC, kernels HWIO, variables have scopes for names.

SAME padding, batch norm, image resizing, the moving average and the optimizer are
written out, as they do not exist here.
"""

import math
from pathlib import Path

import torch
from torch import nn

FLAGS = {
    "image_height": 32,
    "image_width": 24,
    "heatmap_stride": 2,
    "softmax_beta": 8.0,
    "gaussian_sigma": 1.2,
    "wing_w": 5.0,
    "wing_epsilon": 2.0,
    "batch_norm_decay": 0.97,
    "batch_norm_epsilon": 1e-3,
    "learning_rate": 0.03,
    "decay_steps": 8,
    "momentum": 0.9,
    "weight_decay": 4e-3,
    "ema_decay": 0.99,
}
LOSS_WEIGHTS = {"heatmap": 10.0, "wing": 0.2, "visibility": 0.5}


# ------------------------------------------------------------- variables


class Graph(nn.Module):
    """Variables by name: those that are trained, and those that move along."""

    def __init__(self, trainable, moving):
        super().__init__()
        for name, value in trainable.items():
            self.register_parameter(name, nn.Parameter(value.clone().contiguous()))
        for name, value in moving.items():
            self.register_buffer(name, value.clone().contiguous())
        for name, value in trainable.items():
            self.register_buffer(shadow_name(name), value.clone().contiguous())

    def __getitem__(self, name):
        return getattr(self, name)

    def forward(self, images):
        return landmark_net(self, images)


def shadow_name(name):
    return f"{name}/ExponentialMovingAverage"


# ------------------------------------------------------------------- ops


def same_pads(size, kernel_size, stride, rate):
    """Pixels before and after; an odd one comes after."""
    effective = (kernel_size - 1) * rate + 1
    steps = -(-size // stride)
    total = max((steps - 1) * stride + effective - size, 0)
    return total // 2, total - total // 2


def pad_same(inputs, kernel_size, stride, rate=1):
    top, bottom = same_pads(inputs.shape[1], kernel_size, stride, rate)
    left, right = same_pads(inputs.shape[2], kernel_size, stride, rate)
    return nn.functional.pad(inputs, (0, 0, left, right, top, bottom))


def conv2d(graph, inputs, scope, stride=1, rate=1):
    weights = graph[f"{scope}/weights"]
    padded = pad_same(inputs, weights.shape[0], stride, rate)
    outputs = nn.functional.conv2d(
        padded.permute(0, 3, 1, 2),
        weights.permute(3, 2, 0, 1),
        stride=stride,
        dilation=rate,
    )
    return outputs.permute(0, 2, 3, 1)


def separable_conv2d(graph, inputs, scope, stride):
    """Depthwise weights (height, width, in, 1), pointwise weights (1, 1, in, out)."""
    depthwise = graph[f"{scope}/depthwise_weights"]
    pointwise = graph[f"{scope}/pointwise_weights"]
    padded = pad_same(inputs, depthwise.shape[0], stride)
    outputs = nn.functional.conv2d(
        padded.permute(0, 3, 1, 2),
        depthwise.permute(2, 3, 0, 1),
        stride=stride,
        groups=inputs.shape[-1],
    )
    return torch.einsum("nchw,co->nhwo", outputs, pointwise[0, 0])


def fully_connected(graph, inputs, scope):
    return inputs @ graph[f"{scope}/weights"] + graph[f"{scope}/biases"]


def batch_norm(graph, inputs, scope):
    scope = f"{scope}/BatchNorm"
    pixels = inputs.reshape(-1, inputs.shape[-1])
    mean = pixels.mean(0)
    variance = (pixels - mean).square().mean(0)
    with torch.no_grad():
        count = pixels.shape[0]
        unbiased = variance * count / (count - 1)
        assign_moving_average(graph[f"{scope}/moving_mean"], mean)
        assign_moving_average(graph[f"{scope}/moving_variance"], unbiased)
    stddev = torch.sqrt(variance + FLAGS["batch_norm_epsilon"])
    normalized = (inputs - mean) / stddev
    return normalized * graph[f"{scope}/gamma"] + graph[f"{scope}/beta"]


def assign_moving_average(variable, value):
    variable.sub_((variable - value) * (1 - FLAGS["batch_norm_decay"]))


def max_pool(inputs):
    n, h, w, c = inputs.shape
    return inputs.reshape(n, h // 2, 2, w // 2, 2, c).amax((2, 4))


def resize_axis(inputs, axis):
    """To the double size, between the centres of pixels."""
    size = inputs.shape[axis]
    position = ((torch.arange(2 * size) + 0.5) / 2 - 0.5).clamp(min=0)
    lower = position.floor().long()
    upper = (lower + 1).clamp(max=size - 1)
    shape = [1, 1, 1, 1]
    shape[axis] = -1
    fraction = (position - lower).reshape(shape)
    before = inputs.index_select(axis, lower)
    after = inputs.index_select(axis, upper)
    return before + (after - before) * fraction


def resize_bilinear(inputs):
    return resize_axis(resize_axis(inputs, 1), 2)


def resize_nearest_neighbor(inputs):
    n, h, w, c = inputs.shape
    outputs = inputs[:, :, None, :, None].expand(n, h, 2, w, 2, c)
    return outputs.reshape(n, 2 * h, 2 * w, c)


# ----------------------------------------------------------------- model


def conv_bn_relu(graph, inputs, scope, stride=1, rate=1):
    net = conv2d(graph, inputs, scope, stride, rate)
    return torch.relu(batch_norm(graph, net, scope))


def squeeze_and_excite(graph, inputs, scope):
    net = inputs.mean((1, 2))
    net = torch.relu(fully_connected(graph, net, f"{scope}/reduce"))
    net = fully_connected(graph, net, f"{scope}/expand")
    gate = nn.functional.relu6(net + 3.0) / 6.0
    return inputs * gate[:, None, None, :]


def residual_unit(graph, inputs, scope, rate=1):
    net = conv_bn_relu(graph, inputs, f"{scope}/conv1", rate=rate)
    net = conv2d(graph, net, f"{scope}/conv2")
    net = batch_norm(graph, net, f"{scope}/conv2")
    net = squeeze_and_excite(graph, net, f"{scope}/se")
    return torch.relu(inputs + net)


def reduction_unit(graph, inputs, scope):
    net = separable_conv2d(graph, inputs, scope, stride=2)
    net = batch_norm(graph, net, scope)
    shortcut = max_pool(inputs)
    missing = net.shape[-1] - shortcut.shape[-1]
    shortcut = nn.functional.pad(shortcut, (0, missing))
    return torch.relu(shortcut + net)


def landmark_net(graph, images):
    end_points = {}
    net = conv_bn_relu(graph, images, "stem", stride=2)
    net = residual_unit(graph, net, "block1")
    end_points["C1"] = net
    net = reduction_unit(graph, net, "reduce1")
    net = residual_unit(graph, net, "block2", rate=2)
    end_points["C2"] = net
    net = reduction_unit(graph, net, "reduce2")
    net = residual_unit(graph, net, "block3")
    end_points["C3"] = net

    top_down = resize_bilinear(conv2d(graph, end_points["C3"], "fpn/lateral3"))
    lateral = conv2d(graph, end_points["C2"], "fpn/lateral2")
    net = torch.cat([top_down, lateral], dim=-1)
    net = conv_bn_relu(graph, net, "fpn/smooth2")
    lateral = conv2d(graph, end_points["C1"], "fpn/lateral1")
    net = resize_nearest_neighbor(net) + lateral
    net = conv_bn_relu(graph, net, "fpn/smooth1")

    heatmaps = conv2d(graph, net, "heatmaps") + graph["heatmaps/biases"]
    pooled = end_points["C3"].mean((1, 2))
    visibility = fully_connected(graph, pooled, "visibility")
    return heatmaps, spatial_softmax(heatmaps), visibility


def spatial_softmax(heatmaps):
    """(n, h, w, points) -> expected x and y, from 0 to 1."""
    n, h, w, points = heatmaps.shape
    logits = FLAGS["softmax_beta"] * heatmaps.reshape(n, h * w, points)
    attention = torch.softmax(logits, dim=1)
    pos_y, pos_x = torch.meshgrid(
        (torch.arange(h) + 0.5) / h, (torch.arange(w) + 0.5) / w, indexing="ij"
    )
    expected_x = torch.sum(attention * pos_x.reshape(1, -1, 1), dim=1)
    expected_y = torch.sum(attention * pos_y.reshape(1, -1, 1), dim=1)
    return torch.stack([expected_x, expected_y], dim=-1)


# ------------------------------------------------------------ checkpoint


def convert(state):
    """Names and layouts of the checkpoint -> trainable and moving variables."""
    trainable, moving = {}, {}

    def conv(scope, name):
        kernel = state[f"{name}.weight"]
        trainable[f"{scope}/weights"] = kernel.permute(2, 3, 1, 0)

    def norm(scope, name):
        scope = f"{scope}/BatchNorm"
        trainable[f"{scope}/gamma"] = state[f"{name}.weight"]
        trainable[f"{scope}/beta"] = state[f"{name}.bias"]
        moving[f"{scope}/moving_mean"] = state[f"{name}.running_mean"]
        moving[f"{scope}/moving_variance"] = state[f"{name}.running_var"]

    def dense(scope, name):
        trainable[f"{scope}/weights"] = state[f"{name}.weight"].flatten(1).t()
        trainable[f"{scope}/biases"] = state[f"{name}.bias"]

    conv("stem", "stem.conv")
    norm("stem", "stem.bn")
    for i in (1, 2, 3):
        for j in (1, 2):
            conv(f"block{i}/conv{j}", f"layer{i}.conv{j}")
            norm(f"block{i}/conv{j}", f"layer{i}.bn{j}")
        dense(f"block{i}/se/reduce", f"layer{i}.se.fc1")
        dense(f"block{i}/se/expand", f"layer{i}.se.fc2")
        conv(f"fpn/lateral{i}", f"lateral{i}")
    for i in (1, 2):
        depthwise = state[f"down{i}.depthwise.weight"].permute(2, 3, 0, 1)
        pointwise = state[f"down{i}.pointwise.weight"].permute(2, 3, 1, 0)
        trainable[f"reduce{i}/depthwise_weights"] = depthwise
        trainable[f"reduce{i}/pointwise_weights"] = pointwise
        norm(f"reduce{i}", f"down{i}.bn")
        conv(f"fpn/smooth{i}", f"smooth{i}.0")
        norm(f"fpn/smooth{i}", f"smooth{i}.1")
    conv("heatmaps", "heatmap_head")
    trainable["heatmaps/biases"] = state["heatmap_head.bias"]
    dense("visibility", "visibility_head")
    return trainable, moving


def model():
    checkpoint = torch.load(Path(__file__).with_name("weights.pt"))
    return Graph(*convert(checkpoint))


# -------------------------------------------------------------- training


def preprocess(image):
    return image.permute(0, 2, 3, 1).float() / 127.5 - 1.0


def forward(net, batch):
    heatmaps, points, visibility = net(preprocess(batch["image"]))
    return {
        "heatmaps": heatmaps.permute(0, 3, 1, 2),
        "points": points,
        "visibility": visibility,
    }


def make_labels(points, height, width):
    """Heat maps with one blot each, (n, height, width, points)."""
    centre = points / FLAGS["heatmap_stride"] - 0.5
    x = torch.arange(width).reshape(1, 1, -1, 1) - centre[:, None, None, :, 0]
    y = torch.arange(height).reshape(1, -1, 1, 1) - centre[:, None, None, :, 1]
    exponent = -(x * x + y * y) / (2 * FLAGS["gaussian_sigma"] ** 2)
    return torch.exp(exponent)


def heatmap_loss(heatmaps, points, weights):
    _, height, width, _ = heatmaps.shape
    error = torch.square(heatmaps - make_labels(points, height, width))
    error = error * weights[:, None, None, :]
    return torch.sum(error) / (torch.sum(weights) * height * width)


def wing_loss(predictions, points, weights):
    w, epsilon = FLAGS["wing_w"], FLAGS["wing_epsilon"]
    scale = torch.tensor([FLAGS["image_width"], FLAGS["image_height"]])
    x = torch.abs(predictions * scale - points)
    c = w * (1.0 - math.log(1.0 + w / epsilon))
    losses = torch.where(w > x, w * torch.log(1.0 + x / epsilon), x - c)
    losses = torch.sum(losses, dim=2) * weights
    return torch.sum(losses) / torch.sum(weights)


def sigmoid_cross_entropy(logits, labels):
    softplus = torch.log1p(torch.exp(-torch.abs(logits)))
    return torch.mean(torch.relu(logits) - logits * labels + softplus)


def loss(output, batch):
    weights = batch["visible"]
    heatmaps = output["heatmaps"].permute(0, 2, 3, 1)
    losses = {
        "heatmap": heatmap_loss(heatmaps, batch["points"], weights),
        "wing": wing_loss(output["points"], batch["points"], weights),
        "visibility": sigmoid_cross_entropy(output["visibility"], weights),
    }
    return sum(LOSS_WEIGHTS[name] * value for name, value in losses.items())


class ExponentialMovingAverage:
    def __init__(self, graph, names):
        self.graph, self.names = graph, names

    def apply(self, num_updates):
        decay = min(FLAGS["ema_decay"], (1 + num_updates) / (10 + num_updates))
        for name in self.names:
            shadow = self.graph[shadow_name(name)]
            shadow.mul_(decay).add_(self.graph[name], alpha=1 - decay)


def cosine_decay(global_step):
    progress = global_step / FLAGS["decay_steps"]
    return FLAGS["learning_rate"] * 0.5 * (1.0 + math.cos(math.pi * progress))


class MomentumOptimizer(torch.optim.Optimizer):
    """Slots accumulate gradients; the rate comes in when they are applied."""

    def __init__(self, graph):
        named = dict(graph.named_parameters())
        super().__init__(list(named.values()), {})
        self.named = named
        self.ema = ExponentialMovingAverage(graph, list(named))
        self.global_step = 0

    def regularized(self, name):
        return name.endswith("weights")

    @torch.no_grad()
    def step(self, closure=None):
        learning_rate = cosine_decay(self.global_step)
        momentum = FLAGS["momentum"]
        for name, variable in self.named.items():
            grad = variable.grad
            if self.regularized(name):
                grad = grad + FLAGS["weight_decay"] * variable
            slot = self.state[variable]
            if "momentum" not in slot:
                slot["momentum"] = torch.zeros_like(variable)
            accum = slot["momentum"].mul_(momentum).add_(grad)
            variable.sub_(learning_rate * grad + learning_rate * momentum * accum)
        self.global_step += 1
        self.ema.apply(self.global_step)


def optimizer(net):
    return MomentumOptimizer(net)
