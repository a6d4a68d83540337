"""NHWC layers with build-time weights, as of a Keras project."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def forward(self, *args):
        return self.call(*args)

    def add(self, name, value):
        self.register_parameter(name, nn.Parameter(value.clone().contiguous()))


class Conv2D(Layer):
    def __init__(self, kernel, strides=1):
        super().__init__()
        self.add("kernel", kernel.permute(2, 3, 1, 0))
        self.strides = strides

    def call(self, x):
        pad = self.kernel.shape[0] // 2
        x = F.pad(x, (0, 0, pad, pad, pad, pad))
        k = self.kernel.permute(3, 2, 0, 1)
        return F.conv2d(x.permute(0, 3, 1, 2), k, stride=self.strides).permute(
            0, 2, 3, 1
        )


class BatchNormalization(Layer):
    def __init__(self, w, at, momentum=0.9, epsilon=1e-5):
        super().__init__()
        self.momentum, self.epsilon = momentum, epsilon
        self.add("gamma", w[at + ".weight"])
        self.add("beta", w[at + ".bias"])
        self.register_buffer("moving_mean", w[at + ".running_mean"].clone())
        self.register_buffer("moving_variance", w[at + ".running_var"].clone())

    def call(self, x):
        variance, mean = torch.var_mean(x, dim=(0, 1, 2), correction=0)
        count = x.numel() / x.shape[-1]
        with torch.no_grad():
            keep = self.momentum
            self.moving_mean.copy_(keep * self.moving_mean + (1 - keep) * mean)
            unbiased = variance * (count / (count - 1))
            self.moving_variance.copy_(
                keep * self.moving_variance + (1 - keep) * unbiased
            )
        scaled = (x - mean) / torch.sqrt(variance + self.epsilon)
        return self.gamma * scaled + self.beta


class Dense(Layer):
    def __init__(self, weight, bias=None):
        super().__init__()
        self.add("kernel", weight.T)
        if bias is not None:
            self.add("bias", bias)
        self.has_bias = bias is not None

    def call(self, x):
        y = torch.matmul(x, self.kernel)
        return y + self.bias if self.has_bias else y


class ResBlock(Layer):
    def __init__(self, w, at):
        super().__init__()
        self.conv_a = Conv2D(w[at + ".conv1.weight"], strides=2)
        self.bn_a = BatchNormalization(w, at + ".bn1")
        self.conv_b = Conv2D(w[at + ".conv2.weight"])
        self.bn_b = BatchNormalization(w, at + ".bn2")
        self.shortcut = Dense(w[at + ".down.weight"][:, :, 0, 0])

    def call(self, x):
        y = torch.relu(self.bn_a(self.conv_a(x)))
        y = self.bn_b(self.conv_b(y))
        n, h, w, c = x.shape
        pooled = x.reshape(n, h // 2, 2, w // 2, 2, c).mean(dim=(2, 4))
        return torch.relu(self.shortcut(pooled) + y)


class TextTower(Layer):
    def __init__(self, w):
        super().__init__()
        self.add("embeddings", w["words.table.weight"])
        self.add("taps", w["words.conv.weight"].permute(2, 1, 0))
        self.add("taps_bias", w["words.conv.bias"])
        self.add("gamma", w["words.norm.weight"])
        self.add("beta", w["words.norm.bias"])
        self.hidden = Dense(w["words.project.0.weight"], w["words.project.0.bias"])
        self.out = Dense(w["words.project.2.weight"], w["words.project.2.bias"])

    def embed(self, tokens):
        # the row of the padding gets no gradient
        rows = self.embeddings[tokens]
        return torch.where((tokens == 0)[..., None], rows.detach(), rows)

    def conv(self, x):
        before, after = F.pad(x, (0, 0, 1, 0))[:, :-1], F.pad(x, (0, 0, 0, 1))[:, 1:]
        taps = torch.cat([before, x, after], dim=-1)
        return taps @ self.taps.flatten(0, 1) + self.taps_bias

    def call(self, tokens):
        x = self.embed(tokens)
        x = x + F.gelu(self.conv(x))
        mean = x.mean(-1, keepdim=True)
        var = (x - mean).pow(2).mean(-1, keepdim=True)
        x = self.gamma * ((x - mean) / (var + 1e-5).sqrt()) + self.beta
        mask = tokens.ne(0).to(x.dtype)
        pooled = torch.einsum("ntc,nt->nc", x, mask / mask.sum(1, keepdim=True))
        return self.out(F.gelu(self.hidden(pooled)))


class DualEncoder(Layer):
    def __init__(self, w):
        super().__init__()
        self.stage1 = ResBlock(w, "pictures.block1")
        self.stage2 = ResBlock(w, "pictures.block2")
        self.image_head = Dense(w["pictures.project.weight"])
        self.text = TextTower(w)
        self.add("temperature", w["log_scale"])

    def call(self, image, tokens):
        x = self.stage2(self.stage1(image.permute(0, 2, 3, 1)))
        u = self.image_head(x.mean(dim=(1, 2)))
        v = self.text(tokens)
        u = u / torch.linalg.vector_norm(u, dim=1, keepdim=True)
        v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True)
        return torch.einsum("ic,jc->ij", u, v) * torch.exp(self.temperature)


def model():
    return DualEncoder(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["image"], batch["ids"])


def smoothed(scores, axis):
    n = scores.shape[0]
    logp = torch.log_softmax(scores, dim=axis)
    wanted = torch.eye(n, dtype=scores.dtype) * 0.9 + 0.1 / n
    return -(wanted * logp).sum() / n


def loss(output, batch):
    return 0.5 * (smoothed(output, 1) + smoothed(output, 0))


class Momentum(torch.optim.Optimizer):
    def __init__(self, groups, rate, momentum=0.9, dampening=0.1):
        defaults = dict(rate=rate, momentum=momentum, dampening=dampening, l2=0.0)
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad + group["l2"] * p
                if "velocity" not in self.state[p]:
                    self.state[p]["velocity"] = g.clone()
                else:
                    v = self.state[p]["velocity"]
                    v.mul_(group["momentum"]).add_(g, alpha=1 - group["dampening"])
                p -= group["rate"] * self.state[p]["velocity"]


def optimizer(net):
    kernels = [p for p in net.parameters() if p.dim() >= 2]
    vectors = [p for p in net.parameters() if p.dim() < 2]
    return Momentum([{"params": vectors}, {"params": kernels, "l2": 5e-3}], 0.05)
