"""After PaddlePaddle: fused kernels of norm, sum and ReLU; what leaves a branch is one filter.

1x1 filters are matrices [in, out]; the others are [out, in, height, width].
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

CHANNELS = (8, 16, 32)
NUM_KEYPOINTS = 7
TRAIN_HEIGHT, TRAIN_WIDTH = 64, 48
HM_HEIGHT, HM_WIDTH = 16, 12

# ------------------------------------------------------------------------ kernels


class FusedBNAddAct(torch.autograd.Function):
    """relu(batch_norm(x) + z); z and the ReLU may be left out."""

    @staticmethod
    def forward(ctx, x, scale, bias, mean, variance, z, act, epsilon):
        inv_std = (variance + epsilon) ** -0.5
        x_hat = (x - mean.view(-1, 1, 1)) * inv_std.view(-1, 1, 1)
        y = x_hat * scale.view(-1, 1, 1) + bias.view(-1, 1, 1)
        if z is not None:
            y = y + z
        if act:
            y = y.clamp(min=0)
        ctx.save_for_backward(x_hat, scale, inv_std, y)
        ctx.act, ctx.has_z = act, z is not None
        return y

    @staticmethod
    def backward(ctx, dy):
        x_hat, scale, inv_std, y = ctx.saved_tensors
        if ctx.act:
            dy = dy * (y > 0)
        d_bias = dy.sum((0, 2, 3))
        d_scale = (dy * x_hat).sum((0, 2, 3))
        count = dy.shape[0] * dy.shape[2] * dy.shape[3]
        centered = dy - (d_bias / count).view(-1, 1, 1)
        centered = centered - x_hat * (d_scale / count).view(-1, 1, 1)
        dx = centered * (scale * inv_std).view(-1, 1, 1)
        dz = dy if ctx.has_z else None
        return dx, d_scale, d_bias, None, None, dz, None, None


class BatchNorm(nn.Module):
    def __init__(self, num_channels, act=None, momentum=0.9, epsilon=1e-5):
        super().__init__()
        self.act, self.momentum, self.epsilon = act, momentum, epsilon
        self.scale = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))
        self.register_buffer("_mean", torch.zeros(num_channels))
        self.register_buffer("_variance", torch.ones(num_channels))

    @torch.no_grad()
    def statistics(self, x):
        if not self.training:
            return self._mean, self._variance
        mean = x.mean((0, 2, 3))
        variance = x.var((0, 2, 3), correction=0)
        count = x.numel() // x.shape[1]
        keep = self.momentum
        self._mean.copy_(keep * self._mean + (1 - keep) * mean)
        unbiased = variance * (count / (count - 1))
        self._variance.copy_(keep * self._variance + (1 - keep) * unbiased)
        return mean, variance

    def forward(self, x, z=None):
        mean, variance = self.statistics(x)
        return FusedBNAddAct.apply(
            x,
            self.scale,
            self.bias,
            mean,
            variance,
            z,
            self.act == "relu",
            self.epsilon,
        )


class ConvNormLayer(nn.Module):
    def __init__(self, ch_in, ch_out, filter_size, stride=1, act=None):
        super().__init__()
        self.stride, self.filter_size = stride, filter_size
        if filter_size == 1:
            self.weight = nn.Parameter(torch.zeros(ch_in, ch_out))
        else:
            size = (ch_out, ch_in, filter_size, filter_size)
            self.weight = nn.Parameter(torch.zeros(size))
        self.norm = BatchNorm(ch_out, act)

    def forward(self, x, z=None):
        if self.filter_size == 1:
            out = torch.einsum("nihw,io->nohw", x, self.weight)
        else:
            padding = (self.filter_size - 1) // 2
            out = F.conv2d(x, self.weight, stride=self.stride, padding=padding)
        return self.norm(out, z)


# ------------------------------------------------------------------------ network


class BasicBlock(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.conv1 = ConvNormLayer(ch, ch, 3, act="relu")
        self.conv2 = ConvNormLayer(ch, ch, 3, act="relu")

    def forward(self, x):
        return self.conv2(self.conv1(x), x)


class BottleneckBlock(nn.Module):
    def __init__(self, ch_in, ch_mid, ch_out):
        super().__init__()
        self.conv1 = ConvNormLayer(ch_in, ch_mid, 1, act="relu")
        self.conv2 = ConvNormLayer(ch_mid, ch_mid, 3, act="relu")
        self.conv3 = ConvNormLayer(ch_mid, ch_out, 1, act="relu")
        self.conv_down = ConvNormLayer(ch_in, ch_out, 1)

    def forward(self, x):
        return self.conv3(self.conv2(self.conv1(x)), self.conv_down(x))


def upsample_nearest(x, ratio):
    n, c, h, w = x.shape
    x = x.reshape(n, c, h, 1, w, 1).expand(n, c, h, ratio, w, ratio)
    return x.reshape(n, c, h * ratio, w * ratio)


class FuseLayers(nn.Module):
    """Everything a branch sends up is one 1x1 filter; so is its first step down.

    ``residual_up_j`` has the outputs for the branches above, the highest first;
    ``residual_down_j`` those for the branch right below and then those that go further
    down, through a ReLU and ``residual_deep_j``.
    """

    def __init__(self, branches, outputs):
        super().__init__()
        self.branches, self.outputs = branches, outputs
        for j in range(branches):
            above, ch = list(CHANNELS[: min(j, outputs)]), CHANNELS[j]
            if above:
                self.add_module(f"residual_up_{j}", ConvNormLayer(ch, sum(above), 1))
            below = outputs - 1 - j
            if below > 0:
                ch_out = CHANNELS[j + 1] + (ch if below > 1 else 0)
                down = ConvNormLayer(ch, ch_out, 3, stride=2)
                self.add_module(f"residual_down_{j}", down)
            if below > 1:
                deep = ConvNormLayer(ch, CHANNELS[j + 2], 3, stride=2)
                self.add_module(f"residual_deep_{j}", deep)

    def sent(self, j, x):
        """What a branch sends to each branch, itself as well."""
        messages = {}
        if j < self.outputs:
            messages[j] = x
        above = CHANNELS[: min(j, self.outputs)]
        if above:
            parts = getattr(self, f"residual_up_{j}")(x).split(above, 1)
            for i, part in enumerate(parts):
                messages[i] = upsample_nearest(part, 2 ** (j - i))
        if j + 1 < self.outputs:
            y = getattr(self, f"residual_down_{j}")(x)
            messages[j + 1] = y[:, : CHANNELS[j + 1]]
        if j + 2 < self.outputs:
            further = F.relu(y[:, CHANNELS[j + 1] :])
            messages[j + 2] = getattr(self, f"residual_deep_{j}")(further)
        return messages

    def forward(self, feats):
        sent = [self.sent(j, x) for j, x in enumerate(feats)]
        outs = []
        for i in range(self.outputs):
            arrived = [messages[i] for messages in sent]
            outs.append(F.relu(torch.stack(arrived).sum(0)))
        return outs


class HighResolutionModule(nn.Module):
    def __init__(self, branches, num_blocks, outputs):
        super().__init__()
        self.num_blocks = num_blocks
        for j in range(branches):
            for k in range(num_blocks):
                self.add_module(f"branch_{j}_block_{k}", BasicBlock(CHANNELS[j]))
        self.fuse = FuseLayers(branches, outputs)

    def forward(self, feats):
        outs = []
        for j, x in enumerate(feats):
            for k in range(self.num_blocks):
                x = getattr(self, f"branch_{j}_block_{k}")(x)
            outs.append(x)
        return self.fuse(outs)


class TopDownHRNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_layer1_1 = ConvNormLayer(3, 16, 3, stride=2, act="relu")
        self.conv_layer1_2 = ConvNormLayer(16, 16, 3, stride=2, act="relu")
        self.la1 = BottleneckBlock(16, 12, 24)
        self.tr1_1 = ConvNormLayer(24, CHANNELS[0], 3, act="relu")
        self.tr1_2 = ConvNormLayer(24, CHANNELS[1], 3, stride=2, act="relu")
        self.st2 = HighResolutionModule(2, num_blocks=2, outputs=2)
        self.tr2_3 = ConvNormLayer(CHANNELS[1], CHANNELS[2], 3, stride=2, act="relu")
        self.st3_1 = HighResolutionModule(3, num_blocks=1, outputs=3)
        self.st3_2 = HighResolutionModule(3, num_blocks=1, outputs=1)
        self.final_weight = nn.Parameter(torch.zeros(CHANNELS[0], NUM_KEYPOINTS))
        self.final_bias = nn.Parameter(torch.zeros(NUM_KEYPOINTS))

    def forward(self, image):
        x = self.conv_layer1_2(self.conv_layer1_1(image))
        x = self.la1(x)
        feats = self.st2([self.tr1_1(x), self.tr1_2(x)])
        feats.append(self.tr2_3(feats[-1]))
        feats = self.st3_2(self.st3_1(feats))
        hm = torch.matmul(feats[0].movedim(1, 3), self.final_weight) + self.final_bias
        return hm.movedim(3, 1)


# ------------------------------------------------------------------------ weights

NORM_KEYS = {
    "scale": "weight",
    "bias": "bias",
    "_mean": "running_mean",
    "_variance": "running_var",
}


def convert_layer(torch_dict, name, pairs):
    """One layer from one or several (convolution, norm); outputs stand one after another."""
    filters = torch.cat([torch_dict[f"{conv}.weight"] for conv, _ in pairs])
    if filters.shape[2:] == (1, 1):
        filters = filters.flatten(1).t()
    params = {f"{name}.weight": filters}
    for ours, theirs in NORM_KEYS.items():
        values = [torch_dict[f"{norm}.{theirs}"] for _, norm in pairs]
        params[f"{name}.norm.{ours}"] = torch.cat(values)
    return params


def convert_fuse(torch_dict, name, theirs, branches, outputs):
    def pair(target, source, step=0):
        layers = f"{theirs}.{target}.{source}"
        return f"{layers}.{3 * step}", f"{layers}.{3 * step + 1}"

    params = {}
    for j in range(branches):
        if j > 0:
            pairs = [pair(i, j) for i in range(min(j, outputs))]
            params |= convert_layer(torch_dict, f"{name}.residual_up_{j}", pairs)
        pairs = [pair(i, j) for i in range(j + 1, outputs)]
        if pairs:
            params |= convert_layer(torch_dict, f"{name}.residual_down_{j}", pairs)
        if len(pairs) > 1:
            deep = [pair(j + 2, j, step=1)]
            params |= convert_layer(torch_dict, f"{name}.residual_deep_{j}", deep)
    return params


def convert_module(torch_dict, name, theirs, branches, num_blocks, outputs):
    params = {}
    for j in range(branches):
        for k in range(num_blocks):
            block = f"{theirs}.branches.{j}.{k}"
            for i in (1, 2):
                pairs = [(f"{block}.conv{i}", f"{block}.bn{i}")]
                layer = f"{name}.branch_{j}_block_{k}.conv{i}"
                params |= convert_layer(torch_dict, layer, pairs)
    fuse = f"{theirs}.fuse_layers"
    return params | convert_fuse(torch_dict, f"{name}.fuse", fuse, branches, outputs)


LAYERS = {
    "conv_layer1_1": ("conv1", "bn1"),
    "conv_layer1_2": ("conv2", "bn2"),
    "la1.conv1": ("layer1.conv1", "layer1.bn1"),
    "la1.conv2": ("layer1.conv2", "layer1.bn2"),
    "la1.conv3": ("layer1.conv3", "layer1.bn3"),
    "la1.conv_down": ("layer1.downsample.0", "layer1.downsample.1"),
    "tr1_1": ("transition1.0.0", "transition1.0.1"),
    "tr1_2": ("transition1.1.0", "transition1.1.1"),
    "tr2_3": ("transition2.0", "transition2.1"),
}


def torch2paddle(torch_dict):
    params = {}
    for name, pair in LAYERS.items():
        params |= convert_layer(torch_dict, name, [pair])
    params |= convert_module(torch_dict, "st2", "stage2", 2, 2, 2)
    params |= convert_module(torch_dict, "st3_1", "stage3.0", 3, 1, 3)
    params |= convert_module(torch_dict, "st3_2", "stage3.1", 3, 1, 1)
    params["final_weight"] = torch_dict["final_layer.weight"][:, :, 0, 0].t()
    params["final_bias"] = torch_dict["final_layer.bias"]
    return params


def model():
    net = TopDownHRNet()
    torch_dict = torch.load(Path(__file__).with_name("weights.pt"))
    net.load_state_dict(torch2paddle(torch_dict))
    return net


# --------------------------------------------------------------------- transforms

PIXEL_MEAN = torch.tensor([0.485, 0.456, 0.406])
PIXEL_STD = torch.tensor([0.229, 0.224, 0.225])
FLIP_PERM = [[1, 2], [3, 4], [5, 6]]
RADIUS = 3


def normalize_image(image, is_scale=True):
    image = image.float()
    if is_scale:
        image = image * (1.0 / 255.0)
    return (image - PIXEL_MEAN) / PIXEL_STD


def random_flip(image, flip):
    flipped = image.clone()
    flipped[flip] = image[flip].flip(2)
    return flipped


def flip_keypoints(joints, joints_vis, flip):
    joints, joints_vis = joints.clone(), joints_vis.clone()
    joints[flip, :, 0] = TRAIN_WIDTH - 1 - joints[flip, :, 0]
    rows = flip.nonzero()
    for left, right in FLIP_PERM:
        swapped = [right, left]
        joints[rows, [left, right]] = joints[rows, swapped]
        joints_vis[rows, [left, right]] = joints_vis[rows, swapped]
    return joints, joints_vis


def gaussian_patch(sigma=1.0):
    """[7, 7], with a border of zeros."""
    size = 2 * RADIUS + 1
    x = torch.arange(size).float()
    y = x[:, None]
    x0 = y0 = size // 2
    patch = torch.exp(-((x - x0) ** 2 + (y - y0) ** 2) / (2 * sigma**2))
    return F.pad(patch, (1, 1, 1, 1))


def to_heatmaps(joints, joints_vis):
    """Looks up each place of a map in the patch around its joint."""
    patch = gaussian_patch()
    feat_stride = torch.tensor([TRAIN_WIDTH / HM_WIDTH, TRAIN_HEIGHT / HM_HEIGHT])
    mu = (joints / feat_stride + 0.5).floor().long()
    ul, br = mu - RADIUS, mu + RADIUS + 1
    limit = torch.tensor([HM_WIDTH, HM_HEIGHT])
    outside = ((ul >= limit) | (br <= 0)).any(2)

    columns = torch.arange(HM_WIDTH) - mu[:, :, :1] + RADIUS + 1
    rows = torch.arange(HM_HEIGHT) - mu[:, :, 1:] + RADIUS + 1
    columns = columns.clamp(0, len(patch) - 1)
    rows = rows.clamp(0, len(patch) - 1)
    target = patch[rows[:, :, :, None], columns[:, :, None, :]]

    target_weight = torch.tensor([0.0, 0.6, 1.0]).take(joints_vis)
    target_weight = target_weight.masked_fill(outside, 0.0)
    return target, target_weight


def forward(net, batch):
    image = random_flip(normalize_image(batch["image"]), batch["flip"])
    return net(image.permute(0, 3, 1, 2).contiguous())


# --------------------------------------------------------------------------- loss

JOINT_WEIGHT = torch.tensor([1.0, 0.9, 0.9, 1.5, 1.5, 1.2, 1.2])


class KeyPointMSELoss:
    """Of each keypoint on its own; then their mean."""

    def __init__(self, loss_scale=0.5):
        self.loss_scale = loss_scale

    def __call__(self, output, target, target_weight):
        heatmaps_pred = output.flatten(2).unbind(1)
        heatmaps_gt = target.flatten(2).unbind(1)
        weights = target_weight.unsqueeze(2).unbind(1)
        total = 0.0
        for pred, gt, weight in zip(heatmaps_pred, heatmaps_gt, weights):
            error = pred * weight - gt * weight
            total = total + self.loss_scale * (error * error).mean()
        return total / len(weights)


def loss(output, batch):
    joints, joints_vis = flip_keypoints(
        batch["joints"], batch["visible"], batch["flip"]
    )
    target, target_weight = to_heatmaps(joints, joints_vis)
    return KeyPointMSELoss()(output, target, target_weight * JOINT_WEIGHT)


# ---------------------------------------------------------------------- optimizer


class L2Decay:
    def __init__(self, coeff):
        self.coeff = coeff

    def __call__(self, param, grad):
        return grad + self.coeff * param


class LinearWarmup:
    def __init__(self, learning_rate, warmup_steps, start_lr):
        self.learning_rate, self.start_lr = learning_rate, start_lr
        self.warmup_steps = warmup_steps
        self.last_epoch = 0

    def __call__(self):
        if self.last_epoch >= self.warmup_steps:
            return self.learning_rate
        share = self.last_epoch / self.warmup_steps
        return self.start_lr + (self.learning_rate - self.start_lr) * share

    def step(self):
        self.last_epoch += 1


class Adam(torch.optim.Optimizer):
    """Powers of the betas are kept with each parameter, as accumulators."""

    def __init__(self, scheduler, beta1, beta2, epsilon, groups):
        super().__init__(groups, {"regularizer": None})
        self.scheduler = scheduler
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon

    def add_accumulators(self, param):
        acc = self.state[param]
        if not acc:
            acc["moment1"] = torch.zeros_like(param)
            acc["moment2"] = torch.zeros_like(param)
            acc["beta1_pow"] = torch.tensor(self.beta1)
            acc["beta2_pow"] = torch.tensor(self.beta2)
        return acc

    @torch.no_grad()
    def step(self, closure=None):
        lr = self.scheduler()
        for group in self.param_groups:
            for param in group["params"]:
                grad = param.grad
                if group["regularizer"] is not None:
                    grad = group["regularizer"](param, grad)
                self.append_optimize_op(param, grad, lr)
        self.scheduler.step()

    def append_optimize_op(self, param, grad, lr):
        acc = self.add_accumulators(param)
        acc["moment1"].mul_(self.beta1).add_((1 - self.beta1) * grad)
        acc["moment2"].mul_(self.beta2).add_((1 - self.beta2) * grad * grad)
        bias2 = (1 - acc["beta2_pow"]).sqrt()
        denom = acc["moment2"].sqrt() + self.epsilon * bias2
        lr_t = lr * bias2 / (1 - acc["beta1_pow"])
        param.sub_(lr_t * acc["moment1"] / denom)
        acc["beta1_pow"].mul_(self.beta1)
        acc["beta2_pow"].mul_(self.beta2)


def optimizer(net):
    """Filters have a regularizer; scales and biases have their own attribute without."""
    filters, others = [], []
    for name, param in net.named_parameters():
        (filters if name.endswith("weight") else others).append(param)
    groups = [
        {"params": filters, "regularizer": L2Decay(0.01)},
        {"params": others, "regularizer": None},
    ]
    scheduler = LinearWarmup(learning_rate=4e-3, warmup_steps=3, start_lr=1e-3)
    return Adam(scheduler, 0.9, 0.99, 1e-4, groups)
