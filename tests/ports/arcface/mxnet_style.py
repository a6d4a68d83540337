"""After MXNet: a symbol with names for its arguments, weights OHWI, losses with their gradient.

Norms, the margin and the outputs are operators with a backward pass of their own.
"""

import math
from pathlib import Path

import torch
from torch import nn
from torch.autograd import Function

# ------------------------------------------------------------------------- config

config = {
    "image_shape": (3, 40, 32),
    "emb_size": 32,
    "bn_mom": 0.8,
    "bn_eps": 1e-5,
    "fc1_eps": 2e-5,
    "fc7_wd_mult": 4.0,
    "loss_s": 16.0,
    "loss_m": 0.8,
    "easy_margin": False,
    "ignore_label": -1,
    "flip_weight": 0.5,
    "lr": 0.1,
    "mom": 0.9,
    "wd": 0.02,
    "warmup_steps": 2,
    "max_update": 10,
    "power": 2,
}
# name, output channels, stride
UNITS = (
    ("stage2_unit1", 32, 2),
    ("stage2_unit2", 32, 1),
    ("stage3_unit1", 48, 2),
    ("stage3_unit2", 48, 1),
    ("stage3_unit3", 48, 1),
)

# ---------------------------------------------------------------------- operators


class BatchNorm(Function):
    """Normalises all axes but the last; gives its mean and variance too."""

    @staticmethod
    def forward(ctx, data, gamma, beta, eps, fix_gamma):
        if fix_gamma:
            gamma = torch.ones_like(gamma)
        axes = tuple(range(data.dim() - 1))
        mean = data.mean(axes)
        var = (data - mean).square().mean(axes)
        inv_std = torch.rsqrt(var + eps)
        data_hat = (data - mean) * inv_std
        ctx.save_for_backward(data_hat, gamma, inv_std)
        ctx.axes, ctx.fix_gamma = axes, fix_gamma
        ctx.mark_non_differentiable(mean, var)
        return data_hat * gamma + beta, mean, var

    @staticmethod
    def backward(ctx, out_grad, _mean, _var):
        data_hat, gamma, inv_std = ctx.saved_tensors
        beta_grad = out_grad.sum(ctx.axes)
        gamma_grad = (out_grad * data_hat).sum(ctx.axes)
        count = out_grad.numel() // out_grad.shape[-1]
        centred = out_grad - beta_grad / count - data_hat * gamma_grad / count
        data_grad = gamma * inv_std * centred
        if ctx.fix_gamma:
            gamma_grad = torch.zeros_like(gamma_grad)
        return data_grad, gamma_grad, beta_grad, None, None


class ArcMarginOp(Function):
    """Adds the margin to the angle of the label and scales all."""

    @staticmethod
    def forward(ctx, cos_t, label, s, m, easy_margin):
        zy = cos_t.gather(1, label.clamp(min=0)[:, None])
        sin_t = (1.0 - zy * zy).clamp(min=1e-6).sqrt()
        wide = zy > (0.0 if easy_margin else math.cos(math.pi - m))
        slow = zy if easy_margin else zy - math.sin(math.pi - m) * m
        new_zy = torch.where(wide, zy * math.cos(m) - sin_t * math.sin(m), slow)
        slope = math.cos(m) + zy / sin_t * math.sin(m)
        slope = torch.where(wide, slope, torch.ones_like(slope))
        gt_one_hot = one_hot(label, cos_t.shape[1])
        ctx.save_for_backward(gt_one_hot, slope)
        ctx.s = s
        return s * (cos_t + gt_one_hot * (new_zy - zy))

    @staticmethod
    def backward(ctx, out_grad):
        gt_one_hot, slope = ctx.saved_tensors
        in_grad = ctx.s * out_grad * (1.0 + gt_one_hot * (slope - 1.0))
        return in_grad, None, None, None, None


class SoftmaxOutput(Function):
    """Cross entropy; its gradient is what the operator writes, over the valid labels."""

    @staticmethod
    def forward(ctx, data, label, ignore_label, grad_scale):
        prob = torch.softmax(data, dim=1)
        valid = (label != ignore_label).to(data.dtype)
        ctx.save_for_backward(prob, label, valid)
        ctx.grad_scale = grad_scale
        picked = prob.gather(1, label.clamp(min=0)[:, None])[:, 0]
        ce = -(picked + 1e-30).log() * valid
        return grad_scale * ce.sum() / valid.sum()

    @staticmethod
    def backward(ctx, out_grad):
        prob, label, valid = ctx.saved_tensors
        grad = (prob - one_hot(label, prob.shape[1])) * valid[:, None]
        grad = grad * (ctx.grad_scale / valid.sum())
        return out_grad * grad, None, None, None


class LinearRegressionOutput(Function):
    """Half of the squared distance of each example."""

    @staticmethod
    def forward(ctx, data, label, grad_scale):
        diff = data - label
        ctx.save_for_backward(diff)
        ctx.grad_scale = grad_scale / len(diff)
        return ctx.grad_scale * 0.5 * (diff * diff).sum()

    @staticmethod
    def backward(ctx, out_grad):
        (diff,) = ctx.saved_tensors
        return out_grad * ctx.grad_scale * diff, None, None


def one_hot(indices, depth):
    """Rows of zeros for indices below zero."""
    return (indices[:, None] == torch.arange(depth)).float()


def l2_normalization(data):
    """Mode instance."""
    return data / (data.square().sum(1, keepdim=True) + 1e-10).sqrt()


def fully_connected(data, weight):
    return torch.matmul(data, weight.t())


def convolution(data, weight, stride, pad):
    """Layout NHWC, kernels OHWI."""
    if weight.shape[1:3] == (1, 1):
        return torch.matmul(data, weight[:, 0, 0].t())
    data = data.permute(0, 3, 1, 2)
    kernel = weight.permute(0, 3, 1, 2)
    out = nn.functional.conv2d(data, kernel, stride=stride, padding=pad)
    return out.permute(0, 2, 3, 1)


def depthwise_convolution(data, weight, stride, pad):
    """One tap of the kernel after the other."""
    height, width = weight.shape[1:3]
    data = nn.functional.pad(data, (0, 0, pad, pad, pad, pad))
    rows = (data.shape[1] - height) // stride * stride + 1
    columns = (data.shape[2] - width) // stride * stride + 1
    out = 0.0
    for i in range(height):
        for j in range(width):
            tap = data[:, i : i + rows : stride, j : j + columns : stride]
            out = out + tap * weight[:, i, j, 0]
    return out


def leaky_relu(data, gamma):
    """act_type prelu."""
    return torch.relu(data) - gamma * torch.relu(-data)


# -------------------------------------------------------------------------- symbol


class Module(nn.Module):
    def __init__(self, arg_params, aux_params):
        super().__init__()
        for name, value in arg_params.items():
            self.register_parameter(name, nn.Parameter(value.clone().contiguous()))
        for name, value in aux_params.items():
            self.register_buffer(name, value.clone())
        # A fixed gamma has grad_req null.
        self.fc1_gamma.requires_grad_(False)

    def arg(self, name):
        return getattr(self, name)

    def batch_norm(self, name, data, is_train, eps=config["bn_eps"], fix_gamma=False):
        gamma, beta = self.arg(name + "_gamma"), self.arg(name + "_beta")
        moving_mean = self.arg(name + "_moving_mean")
        moving_var = self.arg(name + "_moving_var")
        if not is_train:
            scale = torch.rsqrt(moving_var + eps)
            if not fix_gamma:
                scale = gamma * scale
            return (data - moving_mean) * scale + beta
        out, mean, var = BatchNorm.apply(data, gamma, beta, eps, fix_gamma)
        count = data.numel() // data.shape[-1]
        mom = config["bn_mom"]
        with torch.no_grad():
            moving_mean.copy_(moving_mean * mom + mean * (1.0 - mom))
            unbiased = var * count / (count - 1)
            moving_var.copy_(moving_var * mom + unbiased * (1.0 - mom))
        return out

    def conv(self, name, data, is_train, stride=1, pad=0, act=True):
        data = convolution(data, self.arg(name + "_conv2d_weight"), stride, pad)
        data = self.batch_norm(name + "_batchnorm", data, is_train)
        return leaky_relu(data, self.arg(name + "_relu_gamma")) if act else data

    def conv_dw(self, name, data, is_train, stride, pad):
        weight = self.arg(name + "_conv2d_weight")
        data = depthwise_convolution(data, weight, stride, pad)
        return self.batch_norm(name + "_batchnorm", data, is_train)

    def residual(self, name, data, is_train, stride):
        data = self.conv(name + "_b", data, is_train)
        data = self.conv_dw(name + "_c_dw", data, is_train, stride, pad=1)
        return self.conv(name + "_d", data, is_train)

    def shuffle_unit(self, name, data, is_train, num_filter, stride):
        if stride == 1:
            shortcut, data = torch.split(data, num_filter // 2, dim=-1)
        else:
            shortcut = self.conv_dw(name + "_proj_dw", data, is_train, stride, pad=1)
            shortcut = self.conv(name + "_proj", shortcut, is_train)
        data = self.residual(name, data, is_train, stride)
        data = torch.cat([shortcut, data], dim=-1)
        # reshape (0, 0, 0, -4, 2, -1), swapaxes, reshape (0, 0, 0, -3)
        data = data.unflatten(-1, (2, num_filter // 2))
        return data.swapaxes(-2, -1).flatten(-2)

    def get_fc1(self, data, is_train):
        body = self.conv("stem", data, is_train, stride=2, pad=1)
        for name, num_filter, stride in UNITS:
            body = self.shuffle_unit(name, body, is_train, num_filter, stride)
        body = self.conv("conv_last", body, is_train)
        body = self.conv_dw("gdc", body, is_train, stride=1, pad=0)
        body = fully_connected(body.flatten(1), self.pre_fc1_weight)
        eps = config["fc1_eps"]
        return self.batch_norm("fc1", body, is_train, eps=eps, fix_gamma=True)

    def get_fc7(self, embedding, label):
        nweight = l2_normalization(self.fc7_weight)
        nembedding = l2_normalization(embedding)
        cos_t = fully_connected(nembedding, nweight)
        s, m = config["loss_s"], config["loss_m"]
        return ArcMarginOp.apply(cos_t, label, s, m, config["easy_margin"])

    def forward(self, data, label):
        with torch.no_grad():
            mirrored = self.get_fc1(torch.flip(data, (2,)), is_train=False)
        embedding = self.get_fc1(data, is_train=self.training)
        fc7 = self.get_fc7(embedding, label)
        return {"logits": fc7, "embedding": embedding, "mirrored": mirrored}


# ------------------------------------------------------------------------- params


def load_checkpoint(state):
    """arg_params and aux_params from the weights of torch."""
    arg_params, aux_params = {}, {}

    def ohwi(name, key):
        weight = state[f"backbone.{key}.weight"]
        arg_params[name + "_conv2d_weight"] = weight.permute(0, 2, 3, 1)

    def batchnorm(name, key):
        arg_params[name + "_gamma"] = state[f"backbone.{key}.weight"]
        arg_params[name + "_beta"] = state[f"backbone.{key}.bias"]
        aux_params[name + "_moving_mean"] = state[f"backbone.{key}.running_mean"]
        aux_params[name + "_moving_var"] = state[f"backbone.{key}.running_var"]

    def conv(name, key, first=0, act=True):
        ohwi(name, f"{key}.{first}")
        batchnorm(name + "_batchnorm", f"{key}.{first + 1}")
        if act:
            slope = state[f"backbone.{key}.{first + 2}.weight"]
            arg_params[name + "_relu_gamma"] = slope

    conv("stem", "stem")
    for index, (name, _, stride) in enumerate(UNITS):
        if stride > 1:
            conv(name + "_proj_dw", f"units.{index}.branch1", act=False)
            conv(name + "_proj", f"units.{index}.branch1", first=2)
        branch = f"units.{index}.branch2"
        conv(name + "_b", branch)
        conv(name + "_c_dw", branch, first=3, act=False)
        conv(name + "_d", branch, first=5)
    conv("conv_last", "tail")
    ohwi("gdc", "gdc")
    batchnorm("gdc_batchnorm", "gdc_bn")
    arg_params["pre_fc1_weight"] = state["backbone.fc.weight"]
    batchnorm("fc1", "neck")
    arg_params["fc7_weight"] = state["head.weight"]
    return arg_params, aux_params


def model():
    state = torch.load(Path(__file__).with_name("weights.pt"))
    return Module(*load_checkpoint(state))


# ---------------------------------------------------------------------- image iter


def next_sample(image, corner, mirror):
    shape = config["image_shape"]
    y0, x0 = corner
    data = image[y0 : y0 + shape[1], x0 : x0 + shape[2]]
    if mirror:
        data = torch.flip(data, (1,))
    return data


def image_iter(batch):
    """Crops of bytes, NHWC."""
    items = zip(batch["image"], batch["corner"].tolist(), batch["mirror"].tolist())
    return torch.stack([next_sample(*item) for item in items])


def forward(net, batch):
    data = image_iter(batch).float()
    data = (data - 127.5) * (1.0 / 127.5)
    return net(data, batch["label"])


def loss(output, batch):
    softmax = SoftmaxOutput.apply(
        output["logits"], batch["label"], config["ignore_label"], 1.0
    )
    one = l2_normalization(output["embedding"])
    other = l2_normalization(output["mirrored"])
    return softmax + LinearRegressionOutput.apply(one, other, config["flip_weight"])


# ----------------------------------------------------------------------- optimizer


class PolyScheduler:
    """Asked with the number of the update, which begins at one."""

    def __init__(self, max_update, base_lr, pwr, warmup_steps, warmup_begin_lr=0.0):
        self.base_lr, self.pwr = base_lr, pwr
        self.max_update, self.max_steps = max_update, max_update - warmup_steps
        self.warmup_steps, self.warmup_begin_lr = warmup_steps, warmup_begin_lr

    def __call__(self, num_update):
        if num_update < self.warmup_steps:
            increase = (self.base_lr - self.warmup_begin_lr) * num_update
            return self.warmup_begin_lr + increase / self.warmup_steps
        left = 1.0 - (num_update - self.warmup_steps) / self.max_steps
        return self.base_lr * left**self.pwr


class SGD(torch.optim.Optimizer):
    """The rate is part of the momentum, which is corrected where the rate changes."""

    def __init__(self, named, lr_scheduler, momentum, wd):
        named = [(name, weight) for name, weight in named if weight.requires_grad]
        super().__init__([weight for _, weight in named], {})
        self.names = [name for name, _ in named]
        self.lr_scheduler, self.momentum, self.wd = lr_scheduler, momentum, wd
        self.num_update = 0
        self.last_lr = None
        self.wd_mult = {}
        self.set_wd_mult({"fc7_weight": config["fc7_wd_mult"]})

    def set_wd_mult(self, args_wd_mult):
        """Only weights decay."""
        for name in self.names:
            if not name.endswith("_weight"):
                self.wd_mult[name] = 0.0
        self.wd_mult.update(args_wd_mult)

    def create_state(self, weight):
        return torch.zeros_like(weight)

    def update(self, name, weight, grad, lr, correction):
        wd = self.wd * self.wd_mult.get(name, 1.0)
        if weight not in self.state:
            self.state[weight] = {"mom": self.create_state(weight)}
        mom = self.state[weight]["mom"]
        mom.mul_(self.momentum * correction)
        mom.sub_(lr * (grad + wd * weight))
        weight.add_(mom)

    @torch.no_grad()
    def step(self, closure=None):
        self.num_update += 1
        lr = self.lr_scheduler(self.num_update)
        correction = 1.0 if self.last_lr is None else lr / self.last_lr
        for name, weight in zip(self.names, self.param_groups[0]["params"]):
            self.update(name, weight, weight.grad, lr, correction)
        self.last_lr = lr


def optimizer(net):
    scheduler = PolyScheduler(
        max_update=config["max_update"],
        base_lr=config["lr"],
        pwr=config["power"],
        warmup_steps=config["warmup_steps"],
    )
    return SGD(net.named_parameters(), scheduler, config["mom"], config["wd"])
