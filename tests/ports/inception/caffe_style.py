"""After Caffe: a table of layers by name, blobs, a solver; pixels in the order B, G, R.

Layers with a gradient of their own have Forward and Backward; normalising and scaling
are two layers, and running statistics are sums with their weight beside them.
"""

import math
from pathlib import Path

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

TRANSFORM_PARAM = {
    "crop_height": 32,
    "crop_width": 40,
    "mean_value": (103.53, 116.28, 123.675),
    "scale": 0.0173520736,
}
SOLVER_PARAM = {
    "base_lr": 0.045,
    "lr_policy": "step",
    "gamma": 0.7,
    "stepsize": 2,
    "momentum": 0.9,
    "rms_decay": 0.9,
    "delta": 0.1,
    "weight_decay": 0.005,
    "clip_gradients": 2.0,
}
LOSS_WEIGHT = {"loss1/loss": 0.3, "loss3/loss": 1.0}
LABEL_SMOOTHING = 0.1


# ---------------------------------------------------------------- the table


def conv(name, bottom, h=1, w=1, stride=1):
    """Convolution, BatchNorm, Scale and ReLU, the last three in place."""
    pad = {"pad_h": h // 2, "pad_w": w // 2}
    kernel = {"kernel_h": h, "kernel_w": w, "stride": stride}
    return [
        (name, "Convolution", [bottom], name, kernel | pad),
        (name + "/bn", "BatchNorm", [name], name, {"eps": 1e-3}),
        (name + "/scale", "Scale", [name], name, {}),
        (name + "/relu", "ReLU", [name], name, {}),
    ]


def pool(name, bottom, method, kernel, stride=1, pad=0):
    param = {"method": method, "kernel_size": kernel, "stride": stride, "pad": pad}
    return (name, "Pooling", [bottom], name, param)


def lrn(name, bottom):
    param = {"local_size": 5, "alpha": 0.4, "beta": 0.75}
    return (name, "LRN", [bottom], name, param)


LAYERS = [
    *conv("conv1/5x5_s2", "data", 5, 5, stride=2),
    pool("pool1/3x3_s2", "conv1/5x5_s2", "MAX", 3, stride=2),
    lrn("pool1/norm1", "pool1/3x3_s2"),
    *conv("conv2/3x3_reduce", "pool1/norm1"),
    *conv("conv2/3x3", "conv2/3x3_reduce", 3, 3),
    lrn("conv2/norm2", "conv2/3x3"),
    # inception 3a
    *conv("inception_3a/1x1", "conv2/norm2"),
    *conv("inception_3a/3x3_reduce", "conv2/norm2"),
    *conv("inception_3a/3x3", "inception_3a/3x3_reduce", 3, 3),
    *conv("inception_3a/5x5_reduce", "conv2/norm2"),
    *conv("inception_3a/5x5_a", "inception_3a/5x5_reduce", 3, 3),
    *conv("inception_3a/5x5_b", "inception_3a/5x5_a", 3, 3),
    pool("inception_3a/pool", "conv2/norm2", "MAX", 3, pad=1),
    *conv("inception_3a/pool_proj", "inception_3a/pool"),
    (
        "inception_3a/output",
        "Concat",
        [
            "inception_3a/1x1",
            "inception_3a/3x3",
            "inception_3a/5x5_b",
            "inception_3a/pool_proj",
        ],
        "inception_3a/output",
        {},
    ),
    # auxiliary classifier
    pool("loss1/ave_pool", "inception_3a/output", "AVE", 5, stride=3),
    *conv("loss1/conv", "loss1/ave_pool"),
    ("loss1/fc", "InnerProduct", ["loss1/conv"], "loss1/fc", {}),
    ("loss1/fc/relu", "ReLU", ["loss1/fc"], "loss1/fc", {}),
    ("loss1/classifier", "InnerProduct", ["loss1/fc"], "loss1/classifier", {}),
    # inception 3b
    *conv("inception_3b/1x1", "inception_3a/output"),
    *conv("inception_3b/3x3_reduce", "inception_3a/output"),
    *conv("inception_3b/3x3", "inception_3b/3x3_reduce", 3, 3),
    *conv("inception_3b/7x7_reduce", "inception_3a/output"),
    *conv("inception_3b/1x7", "inception_3b/7x7_reduce", 1, 7),
    *conv("inception_3b/7x1", "inception_3b/1x7", 7, 1),
    pool("inception_3b/pool", "inception_3a/output", "AVE", 3, pad=1),
    *conv("inception_3b/pool_proj", "inception_3b/pool"),
    (
        "inception_3b/output",
        "Concat",
        [
            "inception_3b/1x1",
            "inception_3b/3x3",
            "inception_3b/7x1",
            "inception_3b/pool_proj",
        ],
        "inception_3b/output",
        {},
    ),
    pool("pool3/3x3_s2", "inception_3b/output", "MAX", 3, stride=2),
    # inception 4a
    *conv("inception_4a/1x1", "pool3/3x3_s2"),
    *conv("inception_4a/3x3_reduce", "pool3/3x3_s2"),
    *conv("inception_4a/3x3", "inception_4a/3x3_reduce", 3, 3),
    *conv("inception_4a/5x5_reduce", "pool3/3x3_s2"),
    *conv("inception_4a/5x5_a", "inception_4a/5x5_reduce", 3, 3),
    *conv("inception_4a/5x5_b", "inception_4a/5x5_a", 3, 3),
    pool("inception_4a/pool", "pool3/3x3_s2", "MAX", 3, pad=1),
    *conv("inception_4a/pool_proj", "inception_4a/pool"),
    (
        "inception_4a/output",
        "Concat",
        [
            "inception_4a/1x1",
            "inception_4a/3x3",
            "inception_4a/5x5_b",
            "inception_4a/pool_proj",
        ],
        "inception_4a/output",
        {},
    ),
    ("pool4/ave", "GlobalAve", ["inception_4a/output"], "pool4/ave", {}),
    ("loss3/classifier", "InnerProduct", ["pool4/ave"], "loss3/classifier", {}),
]


# ---------------------------------------------------------------- layers


class Layer(nn.Module):
    """``blobs`` are learned."""

    def __init__(self, param, blobs):
        super().__init__()
        self.param = param
        self.blobs = nn.ParameterList([nn.Parameter(b.clone()) for b in blobs])


class Convolution(Layer):
    """im2col and a product of matrices."""

    def forward(self, bottom):
        p = self.param
        kernel, pad = (p["kernel_h"], p["kernel_w"]), (p["pad_h"], p["pad_w"])
        height, width = (
            (n + 2 * around - size) // p["stride"] + 1
            for n, around, size in zip(bottom.shape[2:], pad, kernel)
        )
        weight = self.blobs[0]
        if kernel == (1, 1):
            col = bottom.flatten(2)
        else:
            col = F.unfold(bottom, kernel, padding=pad, stride=p["stride"])
        top = torch.matmul(weight.flatten(1), col)
        return top.view(len(bottom), len(weight), height, width)


class BatchNormFunction(Function):
    """Without scale and shift."""

    @staticmethod
    def forward(ctx, bottom, eps):
        mean = bottom.mean((0, 2, 3), keepdim=True)
        centred = bottom - mean
        variance = centred.square().mean((0, 2, 3), keepdim=True)
        deviation = torch.sqrt(variance + eps)
        top = centred / deviation
        ctx.save_for_backward(top, deviation)
        ctx.mark_non_differentiable(mean, variance)
        return top, mean, variance

    @staticmethod
    def backward(ctx, top_diff, _mean, _variance):
        top, deviation = ctx.saved_tensors
        diff = (top_diff * top).mean((0, 2, 3), keepdim=True) * top
        diff = diff + top_diff.mean((0, 2, 3), keepdim=True)
        return (top_diff - diff) / deviation, None


class BatchNorm(Layer):
    """Statistics are sums; what they have to be divided by comes third."""

    moving_average_fraction = 0.9

    def __init__(self, param, blobs):
        super().__init__(param, [])
        for name, blob in zip(("mean", "variance", "factor"), blobs):
            self.register_buffer(name, blob.clone())

    def forward(self, bottom):
        top, mean, variance = BatchNormFunction.apply(bottom, self.param["eps"])
        m = bottom.numel() / bottom.shape[1]
        with torch.no_grad():
            for blob in (self.mean, self.variance, self.factor):
                blob.mul_(self.moving_average_fraction)
            self.mean.add_(mean.flatten())
            self.variance.add_(variance.flatten(), alpha=m / (m - 1))
            self.factor.add_(1)
        return top


class Scale(Layer):
    def forward(self, bottom):
        scale, shift = self.blobs
        return bottom * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)


class ReLU(Layer):
    def forward(self, bottom):
        return torch.clamp(bottom, min=0)


class LRNFunction(Function):
    """Across channels."""

    @staticmethod
    def over_channels(x, size):
        """Sum of the channels that are less than half a window away."""
        half = size // 2
        return F.pad(x, (0, 0, 0, 0, half, half)).unfold(1, size, 1).sum(-1)

    @staticmethod
    def forward(ctx, bottom, size, alpha, beta):
        squares = LRNFunction.over_channels(bottom * bottom, size)
        scale = 1 + alpha / size * squares
        top = bottom * scale.pow(-beta)
        ctx.save_for_backward(bottom, top, scale)
        ctx.param = size, alpha, beta
        return top

    @staticmethod
    def backward(ctx, top_diff):
        bottom, top, scale = ctx.saved_tensors
        size, alpha, beta = ctx.param
        ratio = LRNFunction.over_channels(top_diff * top / scale, size)
        across = 2 * alpha * beta / size * bottom * ratio
        return top_diff * scale.pow(-beta) - across, None, None, None


class LRN(Layer):
    def forward(self, bottom):
        p = self.param
        return LRNFunction.apply(bottom, p["local_size"], p["alpha"], p["beta"])


def pooled_length(length, kernel, stride, pad):
    """Rounded up, but the last window must not begin behind the map."""
    pooled = math.ceil((length + 2 * pad - kernel) / stride) + 1
    if pad and (pooled - 1) * stride >= length + pad:
        pooled -= 1
    return pooled


def windows(x, kernel, stride, pad, fill):
    """(n, c, pooled height, pooled width, kernel * kernel), and the padding."""
    ends = []
    for length in (x.shape[3], x.shape[2]):
        pooled = pooled_length(length, kernel, stride, pad)
        ends += [pad, (pooled - 1) * stride + kernel - length - pad]
    x = F.pad(x, ends, value=fill)
    return x.unfold(2, kernel, stride).unfold(3, kernel, stride).flatten(4), ends


class MaxPoolFunction(Function):
    @staticmethod
    def forward(ctx, bottom, kernel, stride, pad):
        seen, ends = windows(bottom, kernel, stride, pad, -torch.inf)
        top, mask = seen.max(-1)
        ctx.save_for_backward(mask)
        ctx.param = kernel, stride, ends, bottom.shape
        return top

    @staticmethod
    def backward(ctx, top_diff):
        (mask,) = ctx.saved_tensors
        kernel, stride, ends, (n, c, height, width) = ctx.param
        spread = top_diff.new_zeros(*top_diff.shape, kernel * kernel)
        spread.scatter_(-1, mask[..., None], top_diff[..., None])
        col = spread.permute(0, 1, 4, 2, 3).reshape(n, c * kernel * kernel, -1)
        left, right, above, below = ends
        whole = (height + above + below, width + left + right)
        diff = F.fold(col, whole, kernel, stride=stride)
        diff = diff[:, :, above : above + height, left : left + width]
        return diff, None, None, None


class Pooling(Layer):
    def forward(self, bottom):
        p = self.param
        kernel, stride, pad = p["kernel_size"], p["stride"], p["pad"]
        if p["method"] == "MAX":
            return MaxPoolFunction.apply(bottom, kernel, stride, pad)
        seen, _ = windows(bottom, kernel, stride, pad, 0.0)
        # A window may reach into the padding, not over it.
        rows, columns = (
            torch.tensor(
                [
                    min(first + kernel, length + 2 * pad) - first
                    for first in range(0, pooled * stride, stride)
                ]
            )
            for length, pooled in zip(bottom.shape[2:], seen.shape[2:])
        )
        pool_size = rows[:, None] * columns
        return seen.sum(-1) / pool_size


class GlobalAve(Layer):
    def forward(self, bottom):
        return bottom.sum((2, 3)) / (bottom.shape[2] * bottom.shape[3])


class Concat(Layer):
    def forward(self, *bottoms):
        return torch.cat(bottoms, dim=1)


class InnerProduct(Layer):
    def forward(self, bottom):
        weight, bias = self.blobs
        return torch.addmm(bias, bottom.flatten(1), weight.T)


class SoftmaxWithLoss(Function):
    """The mean over the batch; a label is a distribution."""

    @staticmethod
    def forward(ctx, score, label):
        shifted = score - score.amax(1, keepdim=True)
        log_prob = shifted - shifted.exp().sum(1, keepdim=True).log()
        ctx.save_for_backward(log_prob.exp(), label)
        return -(label * log_prob).sum() / len(label)

    @staticmethod
    def backward(ctx, top_diff):
        prob, label = ctx.saved_tensors
        return top_diff * (prob - label) / len(label), None


# ---------------------------------------------------------------- net


TYPES = {
    kind.__name__: kind
    for kind in (
        Convolution,
        BatchNorm,
        Scale,
        ReLU,
        LRN,
        Pooling,
        GlobalAve,
        Concat,
        InnerProduct,
    )
}


class Net(nn.Module):
    def __init__(self, table, weights):
        super().__init__()
        self.table = [(name, bottoms, top) for name, _, bottoms, top, _ in table]
        self.layers = nn.ModuleDict(
            {
                name: TYPES[kind](param, weights.get(name, []))
                for name, kind, _, _, param in table
            }
        )

    def forward(self, data):
        blobs = {"data": data}
        for name, bottoms, top in self.table:
            blobs[top] = self.layers[name](*(blobs[b] for b in bottoms))
        return blobs


FROM_TORCH = {
    "conv1/5x5_s2": "conv1",
    "conv2/3x3_reduce": "conv2",
    "conv2/3x3": "conv3",
    "loss1/conv": "aux.conv",
    **{
        f"inception_{block}/{ours}": f"inception{block}.{theirs}"
        for block in ("3a", "3b", "4a")
        for ours, theirs in (
            ("1x1", "branch1x1"),
            ("3x3_reduce", "branch3x3.0"),
            ("3x3", "branch3x3.1"),
            ("pool_proj", "branch_pool"),
        )
    },
    **{
        f"inception_{block}/{ours}": f"inception{block}.branch5x5.{i}"
        for block in ("3a", "4a")
        for i, ours in enumerate(("5x5_reduce", "5x5_a", "5x5_b"))
    },
    "inception_3b/7x7_reduce": "inception3b.branch7x7.0",
    "inception_3b/1x7": "inception3b.branch7x7.1",
    "inception_3b/7x1": "inception3b.branch7x7.2",
}


def copy_trained_layers(state):
    """A dict of the blobs of each layer, from the weights of the other framework."""
    blobs = {}
    for name, source in FROM_TORCH.items():
        bn = source + ".bn."
        weight = state[source + ".conv.weight"]
        if name.startswith("conv1"):
            weight = weight.flip(1)  # B, G, R
        # Where 1 + 0.9 + 0.81 + ... ends.
        factor = torch.tensor(1 / (1 - BatchNorm.moving_average_fraction))
        mean, variance = state[bn + "running_mean"], state[bn + "running_var"]
        blobs[name] = [weight]
        blobs[name + "/bn"] = [mean * factor, variance * factor, factor]
        blobs[name + "/scale"] = [state[bn + "weight"], state[bn + "bias"]]
    for name, source in (
        ("loss1/fc", "aux.fc1"),
        ("loss1/classifier", "aux.fc2"),
        ("loss3/classifier", "fc"),
    ):
        blobs[name] = [state[source + ".weight"], state[source + ".bias"]]
    return blobs


def model():
    state = torch.load(Path(__file__).with_name("weights.pt"))
    return Net(LAYERS, copy_trained_layers(state))


# ---------------------------------------------------------------- training


def data_transformer(image, corner, mirror):
    """Crop, mirror, subtract the mean and scale; a pixel is looked up where it comes from."""
    p = TRANSFORM_PARAM
    n, channels = image.shape[:2]
    height, width = p["crop_height"], p["crop_width"]
    row = corner[:, :1] + torch.arange(height)
    column = torch.arange(width)
    column = torch.where(mirror[:, None], width - 1 - column, column)
    column = corner[:, 1:] + column
    item = torch.arange(n)[:, None, None, None]
    bgr = torch.arange(channels).flip(0)[:, None, None]
    datum = image[item, bgr, row[:, None, :, None], column[:, None, None, :]]
    mean_value = torch.tensor(p["mean_value"])[:, None, None]
    return (datum.float() - mean_value) * p["scale"]


def forward(net, batch):
    data = data_transformer(batch["image"], batch["corner"], batch["flip"])
    blobs = net(data)
    return {"logits": blobs["loss3/classifier"], "aux": blobs["loss1/classifier"]}


def loss(output, batch):
    classes = output["logits"].shape[1]
    label = torch.full_like(output["logits"], LABEL_SMOOTHING / classes)
    label[torch.arange(len(label)), batch["label"]] += 1 - LABEL_SMOOTHING
    loss1 = SoftmaxWithLoss.apply(output["aux"], label)
    loss3 = SoftmaxWithLoss.apply(output["logits"], label)
    return LOSS_WEIGHT["loss1/loss"] * loss1 + LOSS_WEIGHT["loss3/loss"] * loss3


class RMSPropSolver(torch.optim.Optimizer):
    """With momentum of the steps without their rate."""

    def __init__(self, net, param):
        self.solver = param
        self.iter = 0
        learned, decay_mult = [], []
        for name, _, _, _, _ in LAYERS:
            for blob in net.layers[name].blobs:
                learned.append(blob)
                decay_mult.append(float(blob.ndim > 1))
        super().__init__(learned, {})
        self.learned, self.decay_mult = learned, decay_mult
        self.mean_square = [torch.zeros_like(blob) for blob in learned]
        self.history = [torch.zeros_like(blob) for blob in learned]

    def get_learning_rate(self):
        current_step = self.iter // self.solver["stepsize"]
        return self.solver["base_lr"] * self.solver["gamma"] ** current_step

    def clip_gradients(self):
        sumsq_diff = sum(torch.sum(blob.grad * blob.grad) for blob in self.learned)
        l2norm_diff = torch.sqrt(sumsq_diff)
        if l2norm_diff > self.solver["clip_gradients"]:
            scale_factor = self.solver["clip_gradients"] / l2norm_diff
            for blob in self.learned:
                blob.grad.mul_(scale_factor)

    def regularize(self, i):
        local_decay = self.solver["weight_decay"] * self.decay_mult[i]
        self.learned[i].grad.add_(self.learned[i], alpha=local_decay)

    def compute_update_value(self, i, rate):
        diff, decay = self.learned[i].grad, self.solver["rms_decay"]
        self.mean_square[i].mul_(decay).addcmul_(diff, diff, value=1 - decay)
        step = diff / (torch.sqrt(self.mean_square[i]) + self.solver["delta"])
        self.history[i].mul_(self.solver["momentum"]).add_(step)
        self.learned[i].grad.copy_(self.history[i]).mul_(rate)

    @torch.no_grad()
    def step(self, closure=None):
        rate = self.get_learning_rate()
        self.clip_gradients()
        for i, blob in enumerate(self.learned):
            self.regularize(i)
            self.compute_update_value(i, rate)
            blob.sub_(blob.grad)
        self.iter += 1


def optimizer(net):
    return RMSPropSolver(net, SOLVER_PARAM)
