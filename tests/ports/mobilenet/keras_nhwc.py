"""As keras.applications writes it: channels last, layers by name, kernels (h, w, in, out)."""

from pathlib import Path

import torch
from torch import nn


def relu(x):
    return torch.maximum(x, torch.zeros_like(x))


def hard_sigmoid(x):
    return torch.clamp(x + 3.0, 0.0, 6.0) * (1.0 / 6.0)


def hard_swish(x):
    return x * hard_sigmoid(x)


def patches(x, size, stride):
    """(n, h, w, c) -> (n, h, w, c, size, size)."""
    pad = (size // 2, size // 2)
    x = nn.functional.pad(x, (0, 0, *pad, *pad))
    return x.unfold(1, size, stride).unfold(2, size, stride)


class Conv2D(nn.Module):
    def __init__(self, weight, stride=1):
        super().__init__()
        self.kernel = nn.Parameter(weight.permute(2, 3, 1, 0).contiguous())
        self.stride = stride

    def forward(self, x):
        h, w, c, filters = self.kernel.shape
        columns = patches(x, h, self.stride).permute(0, 1, 2, 4, 5, 3)
        shape = columns.shape[:3]
        rows = columns.reshape(-1, h * w * c)
        return (rows @ self.kernel.reshape(h * w * c, filters)).reshape(*shape, filters)


class DepthwiseConv2D(nn.Module):
    def __init__(self, weight, stride=1):
        super().__init__()
        self.depthwise_kernel = nn.Parameter(weight.permute(2, 3, 0, 1).contiguous())
        self.stride = stride

    def forward(self, x):
        kernel = self.depthwise_kernel[..., 0]
        windows = patches(x, kernel.shape[0], self.stride)
        return torch.einsum("nhwcij,ijc->nhwc", windows, kernel)


class BatchNormalization(nn.Module):
    def __init__(self, weights, prefix, momentum=0.99, epsilon=1e-3):
        super().__init__()
        self.gamma = nn.Parameter(weights[prefix + ".weight"].clone())
        self.beta = nn.Parameter(weights[prefix + ".bias"].clone())
        self.register_buffer("moving_mean", weights[prefix + ".running_mean"].clone())
        self.register_buffer(
            "moving_variance", weights[prefix + ".running_var"].clone()
        )
        self.momentum = momentum
        self.epsilon = epsilon

    def forward(self, x):
        mean = x.mean(dim=(0, 1, 2))
        variance = (x - mean).square().mean(dim=(0, 1, 2))
        self.assign(mean.detach(), variance.detach(), x[..., 0].numel())
        inv = self.gamma * torch.rsqrt(variance + self.epsilon)
        return x * inv + (self.beta - mean * inv)

    @torch.no_grad()
    def assign(self, mean, variance, count):
        variance = variance * (count / (count - 1))
        self.moving_mean -= (self.moving_mean - mean) * (1 - self.momentum)
        self.moving_variance -= (self.moving_variance - variance) * (1 - self.momentum)


class Dense(nn.Module):
    def __init__(self, weights, prefix):
        super().__init__()
        kernel = weights[prefix + ".weight"].flatten(1)
        self.kernel = nn.Parameter(kernel.t().contiguous())
        self.bias = nn.Parameter(weights[prefix + ".bias"].clone())

    def forward(self, x):
        return x @ self.kernel + self.bias


class Squeeze(nn.Module):
    def __init__(self, weights, prefix):
        super().__init__()
        self.reduce = Dense(weights, prefix + ".fc1")
        self.expand = Dense(weights, prefix + ".fc2")

    def forward(self, x):
        gate = x.sum(dim=(1, 2)) / (x.shape[1] * x.shape[2])
        gate = relu(self.reduce(gate))
        gate = hard_sigmoid(self.expand(gate))
        return x * gate[:, None, None, :]


class Block(nn.Module):
    def __init__(self, weights, prefix, stride, activation, *, expand, squeeze, add):
        super().__init__()
        self.activation = activation
        self.add = add
        at = 0
        self.expand = self.squeeze = None
        if expand:
            self.expand = Conv2D(weights[f"{prefix}.{at}.0.weight"])
            self.expand_bn = BatchNormalization(weights, f"{prefix}.{at}.1")
            at += 1
        self.depthwise = DepthwiseConv2D(weights[f"{prefix}.{at}.0.weight"], stride)
        self.depthwise_bn = BatchNormalization(weights, f"{prefix}.{at}.1")
        at += 1
        if squeeze:
            self.squeeze = Squeeze(weights, f"{prefix}.{at}")
            at += 1
        self.project = Conv2D(weights[f"{prefix}.{at}.0.weight"])
        self.project_bn = BatchNormalization(weights, f"{prefix}.{at}.1")

    def forward(self, inputs):
        x = inputs
        if self.expand is not None:
            x = self.activation(self.expand_bn(self.expand(x)))
        x = self.depthwise_bn(self.depthwise(x))
        x = self.activation(x)
        if self.squeeze is not None:
            x = self.squeeze(x)
        x = self.project_bn(self.project(x))
        return inputs + x if self.add else x


class MobileNet(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.stem = Conv2D(w["features.0.0.weight"], stride=2)
        self.stem_bn = BatchNormalization(w, "features.0.1")
        self.block_0 = Block(
            w, "features.1.block", 1, relu, expand=False, squeeze=True, add=True
        )
        self.block_1 = Block(
            w, "features.2.block", 2, relu, expand=True, squeeze=False, add=False
        )
        self.block_2 = Block(
            w, "features.3.block", 1, hard_swish, expand=True, squeeze=True, add=True
        )
        self.top = Conv2D(w["features.4.0.weight"])
        self.top_bn = BatchNormalization(w, "features.4.1")
        self.hidden = Dense(w, "classifier.0")
        self.logits = Dense(w, "classifier.2")

    def forward(self, image):
        x = image.permute(0, 2, 3, 1)
        x = hard_swish(self.stem_bn(self.stem(x)))
        x = self.block_2(self.block_1(self.block_0(x)))
        x = hard_swish(self.top_bn(self.top(x)))
        x = x.mean(dim=(1, 2))
        return self.logits(hard_swish(self.hidden(x)))


def model():
    return MobileNet(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["image"])


def loss(logits, batch):
    classes = logits.shape[-1]
    hot = nn.functional.one_hot(batch["label"], classes).to(logits.dtype)
    soft = hot * (1 - 0.1) + 0.1 / classes
    shifted = logits - logits.max(dim=-1, keepdim=True).values
    log_probs = shifted - shifted.exp().sum(dim=-1, keepdim=True).log()
    return -(soft * log_probs).sum(dim=-1).mean()


class RMSProp(torch.optim.Optimizer):
    def __init__(self, params, rate=0.002, rho=0.9, momentum=0.9, epsilon=0.002):
        super().__init__(params, {"rate": rate})
        self.rho, self.momentum, self.epsilon = rho, momentum, epsilon

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad + 1e-4 * p
                slots = self.state[p]
                if not slots:
                    slots["rms"] = torch.zeros_like(p)
                    slots["momentum"] = torch.zeros_like(p)
                rms = self.rho * slots["rms"] + (1 - self.rho) * grad * grad
                increment = grad / (rms.sqrt() + self.epsilon)
                slots["rms"] = rms
                slots["momentum"] = self.momentum * slots["momentum"] + increment
                p -= group["rate"] * slots["momentum"]


def optimizer(net):
    return RMSProp(net.parameters())
