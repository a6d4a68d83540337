# NHWC layers with call(), in the style of a Keras port.
from pathlib import Path

import numpy as np
import torch


def swish(a):
    return a * torch.sigmoid(a)


class Layer(torch.nn.Module):
    def add_weight(self, name, value):
        setattr(self, name, torch.nn.Parameter(value.contiguous().clone()))

    def forward(self, *args):
        return self.call(*args)


class Dense(Layer):
    def __init__(self, state, prefix):
        super().__init__()
        w = state[prefix + ".weight"]
        self.add_weight("kernel", w.flatten(1).T)
        self.add_weight("bias", state[prefix + ".bias"])

    def call(self, a):
        return torch.tensordot(a, self.kernel, dims=1) + self.bias


class Conv(Layer):
    def __init__(self, state, prefix, strides=1):
        super().__init__()
        self.strides = strides
        self.add_weight("kernel", state[prefix + ".weight"].permute(2, 3, 1, 0))
        self.add_weight("bias", state[prefix + ".bias"])

    def call(self, a):
        a = a.permute(0, 3, 1, 2)
        k = self.kernel.permute(3, 2, 0, 1)
        y = torch.conv2d(a, k, stride=self.strides, padding=1)
        return y.permute(0, 2, 3, 1) + self.bias


class GroupNormalization(Layer):
    def __init__(self, state, prefix, groups=4, epsilon=1e-6):
        super().__init__()
        self.groups = groups
        self.epsilon = epsilon
        self.add_weight("gamma", state[prefix + ".weight"])
        self.add_weight("beta", state[prefix + ".bias"])

    def call(self, a):
        n, h, w, c = a.shape
        g = a.reshape(n, h * w, self.groups, c // self.groups)
        mean = g.mean((1, 3), keepdim=True)
        variance = ((g - mean) ** 2).mean((1, 3), keepdim=True)
        g = (g - mean) / torch.sqrt(variance + self.epsilon)
        return g.reshape(n, h, w, c) * self.gamma + self.beta


class Residual(Layer):
    def __init__(self, state, prefix):
        super().__init__()
        self.norm_a = GroupNormalization(state, prefix + ".norm1")
        self.conv_a = Conv(state, prefix + ".conv1")
        self.time_dense = Dense(state, prefix + ".emb")
        self.norm_b = GroupNormalization(state, prefix + ".norm2")
        self.conv_b = Conv(state, prefix + ".conv2")
        self.shortcut = None
        if prefix + ".skip.weight" in state:
            self.shortcut = Dense(state, prefix + ".skip")

    def call(self, a, e):
        y = self.conv_a(swish(self.norm_a(a)))
        film = self.time_dense(swish(e))
        half = film.shape[-1] // 2
        gamma = film[:, None, None, :half]
        beta = film[:, None, None, half:]
        y = self.norm_b(y)
        y = y + y * gamma + beta
        y = self.conv_b(swish(y))
        return y + (a if self.shortcut is None else self.shortcut(a))


class Attention(Layer):
    def __init__(self, state):
        super().__init__()
        self.norm = GroupNormalization(state, "attn.norm")
        w = state["attn.qkv.weight"].flatten(1)
        b = state["attn.qkv.bias"]
        for k, name in enumerate(("query", "key", "value")):
            part = {"p.weight": w.chunk(3)[k], "p.bias": b.chunk(3)[k]}
            setattr(self, name, Dense(part, "p"))
        self.proj_out = Dense(state, "attn.proj")

    def call(self, a):
        n, h, w, c = a.shape
        y = self.norm(a)
        score = torch.einsum("nhwc,nHWc->nhwHW", self.query(y), self.key(y))
        score = score.reshape(n, h, w, h * w) * float(1 / np.sqrt(c))
        score = torch.softmax(score, -1).reshape(n, h, w, h, w)
        y = torch.einsum("nhwHW,nHWc->nhwc", score, self.value(y))
        return a + self.proj_out(y)


class UNet(Layer):
    def __init__(self, state):
        super().__init__()
        self.dense0 = Dense(state, "time.0")
        self.dense1 = Dense(state, "time.2")
        self.conv_in = Conv(state, "stem")
        self.block_down = Residual(state, "down")
        self.downsample = Conv(state, "pool", strides=2)
        self.attention = Attention(state)
        self.block_mid = Residual(state, "mid")
        self.block_up = Residual(state, "up")
        self.norm_out = GroupNormalization(state, "norm")
        self.conv_out = Conv(state, "out")
        rates = 10000.0 ** (-np.arange(4) / 4)
        self.register_buffer("rates", torch.from_numpy(rates.astype(np.float32)))

    def call(self, image, t):
        angles = t.to(torch.float32).unsqueeze(-1) * self.rates
        e = torch.cat([torch.cos(angles), torch.sin(angles)], -1)
        e = self.dense1(swish(self.dense0(e)))
        a = self.conv_in(image.permute(0, 2, 3, 1))
        kept = self.block_down(a, e)
        a = self.downsample(kept)
        a = self.attention(a)
        a = self.block_mid(a, e)
        a = a.repeat_interleave(2, 1).repeat_interleave(2, 2)
        a = self.block_up(torch.cat([a, kept], -1), e)
        return self.conv_out(swish(self.norm_out(a))).permute(0, 3, 1, 2)


def model():
    return UNet(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["x"], batch["t"])


def loss(output, batch):
    return (output - batch["noise"]).square().mean()


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=2e-4)
