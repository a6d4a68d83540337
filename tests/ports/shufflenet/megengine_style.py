"""After MegEngine: NCHW and BGR, grouped kernels (groups, out, in, height, width).

Weights of norms are (1, channels, 1, 1). A unit shuffles what it gets, and hands out its
halves one after the other. Both branches of a unit that goes down are one: their depthwise
kernels, their norms, and their last kernels as two groups.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

CHANNELS = (16, 32, 64, 80)
REPEATS = (3, 2)
BGR_MEAN = [103.530, 116.280, 123.675]
BGR_STD = [57.375, 57.120, 58.395]

# ----------------------------------------------------------------- megengine.module


class NormalizeBatch(Function):
    """Zero mean and unit variance over all but the channels."""

    @staticmethod
    def forward(ctx, inp, eps):
        axes = (0, 2, 3)
        mean = inp.mean(axes, keepdim=True)
        var = (inp * inp).mean(axes, keepdim=True) - mean * mean
        inv_std = (var + eps) ** -0.5
        x_hat = (inp - mean) * inv_std
        ctx.save_for_backward(x_hat, inv_std)
        ctx.mark_non_differentiable(mean, var)
        return x_hat, mean, var

    @staticmethod
    def backward(ctx, grad, _mean, _var):
        x_hat, inv_std = ctx.saved_tensors
        axes = (0, 2, 3)
        along = (grad * x_hat).mean(axes, keepdim=True)
        return inv_std * (grad - grad.mean(axes, keepdim=True) - x_hat * along), None


class BatchNorm2d(nn.Module):
    """``momentum`` is what the running values keep."""

    def __init__(self, weight, bias, running_mean, running_var, momentum=0.9, eps=1e-5):
        super().__init__()
        self.momentum, self.eps = momentum, eps
        shape = (1, -1, 1, 1)
        self.weight = nn.Parameter(weight.reshape(shape).clone())
        self.bias = nn.Parameter(bias.reshape(shape).clone())
        self.register_buffer("running_mean", running_mean.reshape(shape).clone())
        self.register_buffer("running_var", running_var.reshape(shape).clone())

    @torch.no_grad()
    def track(self, mean, var, reduce_size):
        unbiased = var * reduce_size / (reduce_size - 1)
        self.running_mean *= self.momentum
        self.running_mean += (1 - self.momentum) * mean
        self.running_var *= self.momentum
        self.running_var += (1 - self.momentum) * unbiased

    def forward(self, inp):
        x_hat, mean, var = NormalizeBatch.apply(inp, self.eps)
        self.track(mean, var, inp.numel() // inp.shape[1])
        return x_hat * self.weight + self.bias


class Conv2d(nn.Module):
    """Groups are read from the kernel, where it has five axes."""

    def __init__(self, weight, stride=1, padding=0):
        super().__init__()
        self.weight = nn.Parameter(weight.clone().contiguous())
        self.stride, self.padding = stride, padding

    def forward(self, inp):
        groups = self.weight.shape[0] if self.weight.dim() == 5 else 1
        weight = self.weight.flatten(0, -4)
        return F.conv2d(inp, weight, None, self.stride, self.padding, groups=groups)


class Linear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.bias = nn.Parameter(bias.clone())

    def forward(self, inp):
        return torch.addmm(self.bias, inp, self.weight.t())


class ConvBn(nn.Module):
    def __init__(self, conv, bn, relu=True):
        super().__init__()
        self.conv, self.bn, self.relu = conv, bn, relu

    def forward(self, x):
        x = self.bn(self.conv(x))
        return x.clamp(min=0) if self.relu else x


# ---------------------------------------------------------------------------- model


def shuffled_halves(x):
    """(n, c, h, w) with one branch behind the other -> two of (n, c / 2, h, w)."""
    n, c, h, w = x.shape
    x = x.reshape(n, 2, 2, c // 4, h, w)
    x = x.permute(2, 0, 3, 1, 4, 5)
    return x.reshape(2, n, c // 2, h, w)


class ShuffleV2Block(nn.Module):
    def __init__(self, pw, dw, linear):
        super().__init__()
        self.branch_main = nn.Sequential(pw, dw, linear)

    def forward(self, old_x):
        x_proj, x = shuffled_halves(old_x)
        return torch.cat((x_proj, self.branch_main(x)), 1)


class ShuffleV2Down(nn.Module):
    """What comes from the stem is not to be shuffled."""

    def __init__(self, pw, dw, linear, shuffle):
        super().__init__()
        self.pw, self.dw, self.linear = pw, dw, linear
        self.shuffle = shuffle

    def forward(self, x):
        if self.shuffle:
            x = torch.cat(tuple(shuffled_halves(x)), 1)
        both = torch.cat((x, self.pw(x)), 1)
        return self.linear(self.dw(both))


class ShuffleNetV2(nn.Module):
    def __init__(self, first_conv, features, conv_last, classifier):
        super().__init__()
        self.first_conv = first_conv
        self.features = nn.Sequential(*features)
        self.conv_last = conv_last
        self.classifier = classifier

    def forward(self, x):
        x = self.first_conv(x)
        x = F.max_pool2d(x, (3, 1), (2, 1), (1, 0))
        x = F.max_pool2d(x, (1, 3), (1, 2), (0, 1))
        x = self.conv_last(self.features(x))
        x = F.avg_pool2d(x, x.shape[2:])
        return self.classifier(x.flatten(1))


class TrainModel(nn.Module):
    def __init__(self, net, ema_net):
        super().__init__()
        self.net, self.ema_net = net, ema_net
        for param in ema_net.parameters():
            param.requires_grad = False

    def forward(self, x):
        return self.net(x)


# -------------------------------------------------------------------------- weights


class Loader:
    def __init__(self, state, root):
        self.state, self.root = state, root

    def weight(self, name):
        return self.state[f"{self.root}.{name}.weight"]

    def bn(self, *names):
        """One norm, or several side by side."""
        parts = ("weight", "bias", "running_mean", "running_var")
        found = [
            torch.cat([self.state[f"{self.root}.{name}.{part}"] for name in names])
            for part in parts
        ]
        return BatchNorm2d(*found)

    def first_conv(self):
        kernel = self.weight("conv1.0").flip(1)
        return ConvBn(Conv2d(kernel, 1, 1), self.bn("conv1.1"))

    def block(self, name):
        main = f"{name}.branch2"
        dw = self.weight(f"{main}.3")[:, None]
        return ShuffleV2Block(
            ConvBn(Conv2d(self.weight(f"{main}.0")), self.bn(f"{main}.1")),
            ConvBn(Conv2d(dw, 1, 1), self.bn(f"{main}.4"), relu=False),
            ConvBn(Conv2d(self.weight(f"{main}.5")), self.bn(f"{main}.6")),
        )

    def down(self, name, shuffle):
        proj, main = f"{name}.branch1", f"{name}.branch2"
        dw = torch.cat([self.weight(f"{proj}.0"), self.weight(f"{main}.3")])[:, None]
        linear = torch.stack([self.weight(f"{proj}.2"), self.weight(f"{main}.5")])
        return ShuffleV2Down(
            ConvBn(Conv2d(self.weight(f"{main}.0")), self.bn(f"{main}.1")),
            ConvBn(Conv2d(dw, 2, 1), self.bn(f"{proj}.1", f"{main}.4"), relu=False),
            ConvBn(Conv2d(linear), self.bn(f"{proj}.3", f"{main}.6")),
            shuffle,
        )

    def conv_last(self):
        """Nothing shuffles before it: its columns are moved instead."""
        kernel = self.weight("conv5.0")
        kernel = kernel.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return ConvBn(Conv2d(kernel), self.bn("conv5.1"))

    def net(self):
        features = []
        for stage, repeat in enumerate(REPEATS, 2):
            features.append(self.down(f"stage{stage}.0", shuffle=stage > 2))
            for i in range(1, repeat):
                features.append(self.block(f"stage{stage}.{i}"))
        bias = self.state[f"{self.root}.fc.bias"]
        classifier = Linear(self.weight("fc"), bias)
        return ShuffleNetV2(self.first_conv(), features, self.conv_last(), classifier)


def model():
    state = torch.load(Path(__file__).with_name("weights.pt"))
    return TrainModel(Loader(state, "network").net(), Loader(state, "average").net())


# ------------------------------------------------------------------ data.transform


def random_crop(image, offset, output_size=(24, 20)):
    """All crops at once, by their rows and columns."""
    n = torch.arange(len(image))[:, None, None]
    rows = offset[:, :1] + torch.arange(output_size[0])
    columns = offset[:, 1:] + torch.arange(output_size[1])
    return image[n, rows[:, :, None], columns[:, None, :]]


def transform(batch):
    """RGB (n, height, width, 3) of bytes -> BGR (n, 3, height, width)."""
    image = random_crop(batch["image"], batch["offset"]).flip(3).float()
    image = torch.minimum(
        image * batch["gain"][:, None, None, None], image.new_tensor(255)
    )
    mirrored = image.flip(2)
    image = torch.where(batch["flip"][:, None, None, None], mirrored, image)
    image = (image - torch.tensor(BGR_MEAN)) / torch.tensor(BGR_STD)
    return image.permute(0, 3, 1, 2)


def forward(net, batch):
    return net(transform(batch))


# ------------------------------------------------------------------------- training


def cross_entropy(pred, label, label_smooth):
    log_z = torch.logsumexp(pred, 1)
    primary_term = pred.gather(1, label[:, None])[:, 0]
    mean_term = pred.mean(1)
    scaled = (1 - label_smooth) * primary_term + label_smooth * mean_term
    return (log_z - scaled).mean()


def loss(output, batch):
    return cross_entropy(output, batch["label"], label_smooth=0.1)


def get_parameters(net):
    """Those that decay, and the others."""
    decay, others = [], []
    for name, param in net.named_parameters():
        is_kernel = name.endswith("conv.weight") or name == "classifier.weight"
        (decay if is_kernel else others).append(param)
    return decay, others


class ScheduledSGD(torch.optim.Optimizer):
    """Velocity is taken into account before it is renewed: twice faded in the step."""

    def __init__(self, net, ema_net, base_lr=0.1, momentum=0.9, weight_decay=0.02):
        decay, others = get_parameters(net)
        groups = [
            {"params": decay, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        super().__init__(groups, {"momentum": momentum})
        self.net, self.ema_net = net, ema_net
        self.base_lr = base_lr
        self.cur_step = 0

    def adjust_learning_rate(self, warm=2, total=9, min_lr=0.004):
        if self.cur_step < warm:
            return self.base_lr * (self.cur_step + 1) / warm
        remaining = (total - 1 - self.cur_step) / (total - warm)
        return min_lr + (self.base_lr - min_lr) * remaining * remaining

    @torch.no_grad()
    def step(self, closure=None):
        lr = self.adjust_learning_rate()
        for group in self.param_groups:
            m, decay = group["momentum"], group["weight_decay"]
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["velocity"] = torch.zeros_like(param)
                v = state["velocity"]
                pull = decay * param
                param *= 1 - lr * (1 + m) * decay
                param -= lr * (1 + m) * param.grad
                param -= lr * m * m * v
                v *= m
                v += param.grad + pull
        self.cur_step += 1
        self.update_ema()

    @torch.no_grad()
    def update_ema(self, decay=0.8):
        now = self.net.state_dict()
        for name, value in self.ema_net.state_dict().items():
            value.copy_(value * decay + now[name] * (1 - decay))


def optimizer(net):
    return ScheduledSGD(net.net, net.ema_net)
