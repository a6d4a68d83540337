"""Built of fused blocks with gradients by hand; channels come first, then pictures.

A convolution is one product of matrices: gathered taps, all pictures in the columns. The
transposed one makes four pictures, which are woven. Latents stand in columns, too.
"""

import math
from pathlib import Path

import torch
from torch import nn
from torch.autograd import Function

EPS = 1e-5
SLOPE = 0.2
GROUPS = 4
BETA = 0.8
FREE_NATS = 0.3


class BatchNormLeaky(Function):
    """x (c, n, h, w), affine (2, c): gain and shift. Also the mean and variance of channels."""

    @staticmethod
    def forward(ctx, x, affine):
        flat = x.flatten(1)
        var, mean = torch.var_mean(flat, dim=1, correction=0)
        inv = torch.rsqrt(var + EPS)
        xhat = (flat - mean[:, None]) * inv[:, None]
        y = xhat * affine[0][:, None] + affine[1][:, None]
        positive = y > 0
        out = torch.where(positive, y, y * SLOPE)
        ctx.save_for_backward(xhat, inv, positive, affine)
        ctx.mark_non_differentiable(mean, var)
        return out.view(x.shape), mean, var

    @staticmethod
    def backward(ctx, grad, _mean, _var):
        xhat, inv, positive, affine = ctx.saved_tensors
        g = grad.flatten(1)
        g = torch.where(positive, g, g * SLOPE)
        gaffine = torch.stack([(g * xhat).sum(1), g.sum(1)])
        g = g * affine[0][:, None]
        along = (g * xhat).mean(1, keepdim=True)
        gx = (g - g.mean(1, keepdim=True) - xhat * along) * inv[:, None]
        return gx.view(grad.shape), gaffine


class GroupNormSilu(Function):
    """x (c, n, h, w), affine (2, c)."""

    @staticmethod
    def forward(ctx, x, affine):
        parts = x.unflatten(0, (GROUPS, -1))
        var, mean = torch.var_mean(parts, dim=(1, 3, 4), correction=0, keepdim=True)
        inv = torch.rsqrt(var + EPS)
        xhat = ((parts - mean) * inv).flatten(0, 1)
        gain, shift = affine[:, :, None, None, None]
        y = xhat * gain + shift
        s = torch.sigmoid(y)
        ctx.save_for_backward(xhat, inv, y, s, affine)
        return y * s

    @staticmethod
    def backward(ctx, grad):
        xhat, inv, y, s, affine = ctx.saved_tensors
        g = grad * s * (1 + y * (1 - s))
        gaffine = torch.stack([(g * xhat).sum((1, 2, 3)), g.sum((1, 2, 3))])
        g = g * affine[0][:, None, None, None]
        gh, h = g.unflatten(0, (GROUPS, -1)), xhat.unflatten(0, (GROUPS, -1))
        along = (gh * h).mean((1, 3, 4), keepdim=True)
        gx = inv * (gh - gh.mean((1, 3, 4), keepdim=True) - h * along)
        return gx.flatten(0, 1), gaffine


class FreeNats(Function):
    """mean, log_var (n, latents) -> nats of a picture; a latent has some for nothing."""

    @staticmethod
    def forward(ctx, mean, log_var):
        var = log_var.exp()
        nats = 0.5 * (mean * mean + var - log_var - 1).mean(0)
        paid = nats > FREE_NATS
        ctx.save_for_backward(mean, var, paid)
        return nats.clamp(min=FREE_NATS).sum()

    @staticmethod
    def backward(ctx, grad):
        mean, var, paid = ctx.saved_tensors
        scale = grad * paid / len(mean)
        return scale * mean, scale * 0.5 * (var - 1)


def gather(x, k, stride=1):
    """x (c, n, h, w) -> (k * k * c, n * h * w // stride ** 2)."""
    x = nn.functional.pad(x, (1, 1, 1, 1))
    rows = (x.shape[2] - k) // stride + 1
    columns = (x.shape[3] - k) // stride + 1
    taps = [
        x[:, :, i : i + stride * rows : stride, j : j + stride * columns : stride]
        for i in range(k)
        for j in range(k)
    ]
    return torch.cat(taps), (x.shape[1], rows, columns)


def conv(x, weight, bias=None, k=3, stride=1):
    taps, size = gather(x, k, stride)
    y = weight @ taps.flatten(1)
    if bias is not None:
        y = y + bias[:, None]
    return y.unflatten(1, size)


def conv_up(x, taps):
    """taps (3, 3, out, c). Every second row and column has the middle tap alone."""
    c, n, h, w = x.shape
    x = nn.functional.pad(x, (0, 1, 0, 1))
    here, right = x[:, :, :-1, :-1].flatten(1), x[:, :, :-1, 1:].flatten(1)
    below, across = x[:, :, 1:, :-1].flatten(1), x[:, :, 1:, 1:].flatten(1)
    even_even = taps[1, 1] @ here
    even_odd = taps[1, 2] @ here + taps[1, 0] @ right
    odd_even = taps[2, 1] @ here + taps[0, 1] @ below
    odd_odd = taps[2, 2] @ here + taps[2, 0] @ right
    odd_odd = odd_odd + taps[0, 2] @ below + taps[0, 0] @ across
    woven = torch.stack([even_even, even_odd, odd_even, odd_odd], dim=1)
    woven = woven.view(-1, 2, 2, n, h, w).permute(0, 3, 4, 1, 5, 2)
    return woven.reshape(-1, n, 2 * h, 2 * w)


def double(x):
    c, n, h, w = x.shape
    return (
        x.view(c, n, h, 1, w, 1).expand(-1, -1, -1, 2, -1, 2).reshape(c, n, 2 * h, -1)
    )


class BatchNorm(nn.Module):
    def __init__(self, affine, running):
        super().__init__()
        self.affine = nn.Parameter(affine)
        self.register_buffer("running", running)

    def forward(self, x):
        y, mean, var = BatchNormLeaky.apply(x, self.affine)
        count = x[0].numel()
        seen = torch.stack([mean, var * count / (count - 1)])
        self.running.lerp_(seen, 0.1)
        return y


class Residual(nn.Module):
    def __init__(self, affines, weights, biases):
        super().__init__()
        self.affines = nn.Parameter(affines)
        self.weights = nn.Parameter(weights)
        self.biases = nn.Parameter(biases)

    def forward(self, x):
        h = x
        for affine, weight, bias in zip(self.affines, self.weights, self.biases):
            h = conv(GroupNormSilu.apply(h, affine), weight, bias)
        return x + h


class Encoder(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.conv1 = nn.Parameter(read.rows("encoder.down1.0"))
        self.norm1 = read.batch_norm("encoder.down1.1")
        self.conv2 = nn.Parameter(read.rows("encoder.down2.0"))
        self.norm2 = read.batch_norm("encoder.down2.1")
        self.residual = read.residual("encoder.block")
        self.project, self.offset = read.heads("encoder.mean", "encoder.log_var")

    def forward(self, x):
        x = self.norm1(conv(x, self.conv1, k=4, stride=2))
        x = self.norm2(conv(x, self.conv2, k=4, stride=2))
        x = self.residual(x)
        x = x * x.sigmoid()
        features = x.permute(0, 2, 3, 1).flatten(0, 2)
        both = torch.addmm(self.offset, self.project, features)
        mean, log_var = both.chunk(2)
        return mean, log_var


class Decoder(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.project = nn.Parameter(read.tensor("decoder.start.weight"))
        self.offset = nn.Parameter(read.tensor("decoder.start.bias")[:, None])
        self.residual = read.residual("decoder.block")
        self.taps = nn.Parameter(read.taps("decoder.up1.0"))
        self.norm1 = read.batch_norm("decoder.up1.1")
        self.conv2 = nn.Parameter(read.rows("decoder.up2.1"))
        self.norm2 = read.batch_norm("decoder.up2.2")
        self.last = nn.Parameter(read.rows("decoder.out"))
        self.last_bias = nn.Parameter(read.tensor("decoder.out.bias"))

    def forward(self, z):
        x = torch.addmm(self.offset, self.project, z)
        x = x.view(16, 4, 6, -1).permute(0, 3, 1, 2).contiguous()
        x = self.residual(x)
        x = self.norm1(conv_up(x, self.taps))
        x = self.norm2(conv(double(x), self.conv2))
        return conv(x, self.last, self.last_bias)


class Autoencoder(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.encoder = Encoder(read)
        self.decoder = Decoder(read)

    def forward(self, picture, noise):
        """picture (1, n, h, w), noise (latents, samples, n)."""
        mean, log_var = self.encoder(picture)
        sigma = log_var.mul(0.5).exp()
        z = torch.addcmul(mean[:, None], sigma[:, None], noise)
        logits = self.decoder(z.flatten(1))
        logits = logits.view(*noise.shape[1:], *logits.shape[2:])
        return logits, mean.t(), log_var.t()


class Reader:
    """Makes blocks of the weights of layers."""

    def __init__(self, state):
        self.state = state

    def tensor(self, name):
        return self.state[name].clone()

    def rows(self, name):
        """(out, c, k, k) -> (out, k * k * c)."""
        return self.tensor(f"{name}.weight").permute(0, 2, 3, 1).flatten(1)

    def taps(self, name):
        """(c, out, k, k) -> (k, k, out, c)."""
        return self.tensor(f"{name}.weight").permute(2, 3, 1, 0).contiguous()

    def affine(self, name):
        return torch.stack([self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias")])

    def batch_norm(self, name):
        kinds = ("mean", "var")
        running = torch.stack([self.tensor(f"{name}.running_{k}") for k in kinds])
        return BatchNorm(self.affine(name), running)

    def residual(self, name):
        affines = torch.stack([self.affine(f"{name}.norm{i}") for i in (1, 2)])
        weights = torch.stack([self.rows(f"{name}.conv{i}") for i in (1, 2)])
        biases = torch.stack([self.tensor(f"{name}.conv{i}.bias") for i in (1, 2)])
        return Residual(affines, weights, biases)

    def heads(self, *names):
        weights = torch.cat([self.tensor(f"{name}.weight") for name in names])
        biases = torch.cat([self.tensor(f"{name}.bias") for name in names])
        return nn.Parameter(weights), nn.Parameter(biases[:, None])


def model():
    return Autoencoder(Reader(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    picture = batch["image"].float().transpose(0, 1)
    picture = (picture - 127.5) / 127.5
    logits, mean, log_var = net(picture, batch["noise"].permute(2, 1, 0))
    return {
        "logits": logits.transpose(0, 1).unsqueeze(2),
        "mean": mean,
        "log_var": log_var,
    }


def loss(output, batch):
    logits = output["logits"].flatten(2)
    grey = (batch["image"].float() / 255).flatten(1)
    surprise = torch.logaddexp(logits, torch.zeros_like(logits)).sum()
    surprise = surprise - torch.einsum("nsp,np->", logits, grey)
    surprise = surprise / (logits.shape[0] * logits.shape[1])
    return surprise + BETA * FreeNats.apply(output["mean"], output["log_var"])


class Adam(torch.optim.Optimizer):
    """Corrections are part of the rate; matrices and kernels fade apart from the moments."""

    def __init__(self, named, peak, fade, clip):
        named = list(named)
        vectors = ("offset", "affine", "affines", "biases", "last_bias")
        is_vector = [name.rpartition(".")[2] in vectors for name, _ in named]
        groups = [
            {"params": [p for (_, p), v in zip(named, is_vector) if not v]},
            {"params": [p for (_, p), v in zip(named, is_vector) if v], "fade": 0.0},
        ]
        super().__init__(groups, {"fade": fade})
        self.peak, self.clip, self.t = peak, clip, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.t += 1
        rate = self.peak * min(self.t, 4) / 4
        root = math.sqrt(1 - 0.99**self.t)
        size = rate * root / (1 - 0.9**self.t)
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        length = torch.cat([g.flatten() for g in grads]).norm()
        shrink = (self.clip / length).clamp(max=1)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                g = p.grad * shrink
                state["m"].lerp_(g, 0.1)
                state["v"].lerp_(g * g, 0.01)
                p.mul_(1 - rate * group["fade"])
                p.addcdiv_(state["m"], state["v"].sqrt() + 1e-8 * root, value=-size)


def optimizer(net):
    return Adam(net.named_parameters(), peak=2e-3, fade=0.05, clip=100.0)
