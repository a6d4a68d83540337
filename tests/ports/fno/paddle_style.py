"""After Paddle: layers in NCL, linear weights [in, out], and no complex numbers.

The transform is a product with cosines and sines of the modes that are kept.
"""

import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

num_points, step = 60, 2
hidden_channels, projection_channels, num_layers = 24, 40, 3
n_modes, n_modes_padded, domain_padding = 10, 14, 9


# ------------------------------------------------------------------------- layers


def create_parameter(*shape):
    return nn.Parameter(torch.zeros(shape))


class Linear(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = create_parameter(in_features, out_features)
        self.bias = create_parameter(out_features)

    def forward(self, x):
        return torch.matmul(x, self.weight) + self.bias


class Conv1D(nn.Module):
    """Of kernel size one."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.weight = create_parameter(out_channels, in_channels, 1)
        self.bias = create_parameter(out_channels)

    def forward(self, x):
        return F.conv1d(x, self.weight, self.bias)


class GELU(nn.Module):
    def forward(self, x):
        return x * 0.5 * torch.erfc(-x / math.sqrt(2.0))


class Synthesis(torch.autograd.Function):
    """From coefficients of the lowest modes back to points."""

    @staticmethod
    def forward(ctx, real, imag, cos, sin, share):
        ctx.save_for_backward(cos, sin, share)
        points = torch.matmul(real * share, cos.T)
        return points - torch.matmul(imag * share, sin.T)

    @staticmethod
    def backward(ctx, grad):
        cos, sin, share = ctx.saved_tensors
        real = torch.matmul(grad, cos) * share
        imag = torch.matmul(grad, sin) * -share
        return real, imag, None, None, None


class SpectralConv1D(nn.Module):
    """Weights are [modes, out, in]."""

    def __init__(self, in_channels, out_channels, modes, length):
        super().__init__()
        self.weight_real = create_parameter(modes, out_channels, in_channels)
        self.weight_imag = create_parameter(modes, out_channels, in_channels)
        k = torch.arange(modes, dtype=torch.float64)
        x = torch.arange(length, dtype=torch.float64)
        angle = 2.0 * math.pi * torch.outer(x, k) / length
        self.register_buffer("cos", torch.cos(angle).float())
        self.register_buffer("sin", torch.sin(angle).float())
        share = torch.full((modes,), 2.0 / length)
        share[0] = 1.0 / length
        self.register_buffer("share", share)

    def forward(self, x):
        real = torch.matmul(x, self.cos).permute(2, 1, 0)
        imag = -torch.matmul(x, self.sin).permute(2, 1, 0)
        out_real = self.weight_real @ real - self.weight_imag @ imag
        out_imag = self.weight_real @ imag + self.weight_imag @ real
        out_real, out_imag = out_real.permute(2, 1, 0), out_imag.permute(2, 1, 0)
        return Synthesis.apply(out_real, out_imag, self.cos, self.sin, self.share)


class FNOBlock(nn.Module):
    def __init__(self, modes, length, act=None):
        super().__init__()
        self.spectral = SpectralConv1D(hidden_channels, hidden_channels, modes, length)
        self.skip = Conv1D(hidden_channels, hidden_channels)
        self.act = act

    def forward(self, x):
        out = self.spectral(x)
        out = out + self.skip(x)
        return out if self.act is None else self.act(out)


class Scaler(nn.Module):
    def __init__(self, epsilon=1e-5):
        super().__init__()
        self.epsilon = epsilon
        self.register_buffer("loc", torch.zeros(num_points))
        self.register_buffer("scale", torch.ones(num_points))

    def transform(self, x):
        return (x - self.loc) / (self.scale + self.epsilon)

    def inverse_transform(self, x):
        return x * (self.scale + self.epsilon) + self.loc


class FNO1DNet(nn.Module):
    """The coordinate is the first of the two inputs, the value the second."""

    def __init__(self):
        super().__init__()
        self.input_scaler = Scaler()
        self.output_scaler = Scaler()
        coords = torch.arange(num_points) / (num_points - 1)
        self.register_buffer("coords", coords)
        self.lifting = Linear(2, hidden_channels)
        self.blocks = nn.ModuleList(
            [FNOBlock(n_modes, num_points, GELU()) for _ in range(num_layers)]
        )
        self.padded_block = FNOBlock(n_modes_padded, num_points + domain_padding)
        self.projection = nn.Sequential(
            Linear(hidden_channels, projection_channels),
            GELU(),
            Linear(projection_channels, 1),
        )

    def forward(self, a):
        value = self.input_scaler.transform(a)
        coords = self.coords.unsqueeze(0).tile((a.shape[0], 1))
        x = self.lifting(torch.stack([coords, value], dim=2))
        x = x.permute(0, 2, 1)
        for block in self.blocks:
            x = block(x)
        zeros = torch.zeros(x.shape[0], x.shape[1], domain_padding)
        x = self.padded_block(torch.cat([x, zeros], dim=2))
        x = x[:, :, :num_points]
        y = self.projection(x.permute(0, 2, 1))
        return self.output_scaler.inverse_transform(y.flatten(1))


# --------------------------------------------------------------------- state dict


def convert_block(state, conv, w):
    weights = state[conv + ".weights"].permute(2, 1, 0)
    return {
        "spectral.weight_real": weights.real,
        "spectral.weight_imag": weights.imag,
        "skip.weight": state[w + ".weight"],
        "skip.bias": state[w + ".bias"],
    }


def convert_linear(state, name):
    weight = state[name + ".weight"]
    return {"weight": weight.t(), "bias": state[name + ".bias"]}


def convert_scaler(state, name):
    return {"loc": state[name + ".mean"], "scale": state[name + ".std"]}


def convert_state_dict(state):
    parts = {
        "input_scaler": convert_scaler(state, "a_norm"),
        "output_scaler": convert_scaler(state, "u_norm"),
        "lifting": convert_linear(state, "fc0"),
        "padded_block": convert_block(state, "last_conv", "last_w"),
        "projection.0": convert_linear(state, "fc1"),
        "projection.2": convert_linear(state, "fc2"),
    }
    for i in range(num_layers):
        parts[f"blocks.{i}"] = convert_block(state, f"convs.{i}", f"ws.{i}")
    parts["lifting"]["weight"] = parts["lifting"]["weight"].flip(0)
    return {f"{k}.{name}": v for k, part in parts.items() for name, v in part.items()}


def model():
    net = FNO1DNet()
    state = convert_state_dict(torch.load(Path(__file__).with_name("weights.pt")))
    unexpected = net.load_state_dict(state, strict=False).unexpected_keys
    assert not unexpected
    return net


# ----------------------------------------------------------------------- training


def forward(net, batch):
    return net(batch["a"][:, ::step])


class RelativeL2Loss(nn.Module):
    def forward(self, pred, label):
        error = torch.norm(pred - label, p=2, dim=-1)
        ratio = error / torch.norm(label, p=2, dim=-1)
        return ratio.sum() / pred.shape[0]


def loss(output, batch):
    return RelativeL2Loss()(output, batch["u"][:, ::step])


class ExponentialDecay:
    def __init__(self, learning_rate, gamma):
        self.last_lr, self.gamma = learning_rate, gamma

    def step(self):
        self.last_lr *= self.gamma


class Adam(torch.optim.Optimizer):
    """Powers of the betas stand beside the moments; epsilon is scaled with the rate."""

    def __init__(self, learning_rate, named, weight_decay, exclude):
        self.named = dict(named)
        super().__init__(list(self.named.values()), {})
        self.scheduler = learning_rate
        self.beta1, self.beta2, self.epsilon = 0.9, 0.999, 1e-8
        self.weight_decay, self.exclude = weight_decay, exclude
        for p in self.named.values():
            self.state[p] = {
                "moment1": torch.zeros_like(p),
                "moment2": torch.zeros_like(p),
                "beta1_pow": self.beta1,
                "beta2_pow": self.beta2,
            }

    def regularized(self, name, p):
        if self.exclude(name):
            return p.grad
        return p.grad + self.weight_decay * p

    @torch.no_grad()
    def step(self, closure=None):
        for name, p in self.named.items():
            if p.grad is None:
                continue
            acc = self.state[p]
            grad = self.regularized(name, p)
            acc["moment1"].lerp_(grad, 1.0 - self.beta1)
            acc["moment2"].lerp_(grad * grad, 1.0 - self.beta2)
            root = math.sqrt(1.0 - acc["beta2_pow"])
            lr = self.scheduler.last_lr * root / (1.0 - acc["beta1_pow"])
            denom = acc["moment2"].sqrt() + self.epsilon * root
            p.sub_(lr * acc["moment1"] / denom)
            acc["beta1_pow"] *= self.beta1
            acc["beta2_pow"] *= self.beta2
        self.scheduler.step()


def optimizer(net):
    return Adam(
        ExponentialDecay(2e-3, 0.7),
        net.named_parameters(),
        weight_decay=2e-2,
        exclude=lambda name: name.endswith("bias"),
    )
