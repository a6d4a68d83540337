"""Channels last; transforms are products with matrices of cosines and sines."""

import math
from pathlib import Path

import torch
from torch import nn

W = Path(__file__).with_name("weights.pt")


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2.0)))


def dense(x, kernel, bias):
    return torch.einsum("...i,io->...o", x, kernel) + bias


def kept_modes(n, modes):
    return list(range(modes)) + list(range(n - modes, n))


def table(n, waves, like):
    """Cosines and sines of waves (rows) at points (columns)."""
    k = torch.tensor(waves, dtype=like.dtype)
    angle = 2 * math.pi / n * k[:, None] * torch.arange(n, dtype=like.dtype)
    return torch.cos(angle), torch.sin(angle)


class FourierLayer(nn.Module):
    def __init__(self, state, at):
        super().__init__()
        low, high = state[at + ".spectral.low"], state[at + ".spectral.high"]
        both = torch.cat([low, high], 2).permute(4, 2, 3, 0, 1)
        self.real = nn.Parameter(both[0].contiguous())
        self.imag = nn.Parameter(both[1].contiguous())
        self.modes = low.shape[2]
        for name, key in (("skip", "skip"), ("up", "mlp.0"), ("down", "mlp.2")):
            kernel = state[f"{at}.{key}.weight"][:, :, 0, 0].T.contiguous()
            setattr(self, name + "_kernel", nn.Parameter(kernel))
            setattr(
                self, name + "_bias", nn.Parameter(state[f"{at}.{key}.bias"].clone())
            )
        self.scale = nn.Parameter(state[at + ".norm.weight"].clone())
        self.offset = nn.Parameter(state[at + ".norm.bias"].clone())

    def spectral(self, x):
        rows, columns = x.shape[1:3]
        m = self.modes
        cos_x, sin_x = table(columns, list(range(m)), x)
        cos_y, sin_y = table(rows, kept_modes(rows, m), x)
        re = torch.einsum("bhwc,kw->bhkc", x, cos_x)
        im = -torch.einsum("bhwc,kw->bhkc", x, sin_x)
        waves_re = torch.einsum("bhkc,lh->blkc", re, cos_y) + torch.einsum(
            "bhkc,lh->blkc", im, sin_y
        )
        waves_im = torch.einsum("bhkc,lh->blkc", im, cos_y) - torch.einsum(
            "bhkc,lh->blkc", re, sin_y
        )
        out_re = torch.einsum("blkc,lkco->blko", waves_re, self.real) - torch.einsum(
            "blkc,lkco->blko", waves_im, self.imag
        )
        out_im = torch.einsum("blkc,lkco->blko", waves_re, self.imag) + torch.einsum(
            "blkc,lkco->blko", waves_im, self.real
        )
        back_re = torch.einsum("blko,lh->bhko", out_re, cos_y) - torch.einsum(
            "blko,lh->bhko", out_im, sin_y
        )
        back_im = torch.einsum("blko,lh->bhko", out_re, sin_y) + torch.einsum(
            "blko,lh->bhko", out_im, cos_y
        )
        # all columns but the constant one stand for their mirror image too
        twice = torch.full((m, 1), 2.0, dtype=x.dtype)
        twice[0] = 1.0
        real = torch.einsum("bhko,kw->bhwo", back_re * twice, cos_x)
        imag = torch.einsum("bhko,kw->bhwo", back_im * twice, sin_x)
        return (real - imag) / (rows * columns)

    def forward(self, x):
        y = self.spectral(x)
        mean = y.mean(dim=(1, 2), keepdim=True)
        var = (y - mean).pow(2).mean(dim=(1, 2), keepdim=True)
        y = (y - mean) * torch.rsqrt(var + 1e-5) * self.scale + self.offset
        z = gelu(y + dense(x, self.skip_kernel, self.skip_bias))
        z = gelu(dense(z, self.up_kernel, self.up_bias))
        return dense(z, self.down_kernel, self.down_bias) + x


class Net(nn.Module):
    def __init__(self, state):
        super().__init__()
        for name, key in (("lift", "lift"), ("p0", "project.0"), ("p1", "project.2")):
            setattr(
                self, name + "_w", nn.Parameter(state[key + ".weight"].T.contiguous())
            )
            setattr(self, name + "_b", nn.Parameter(state[key + ".bias"].clone()))
        self.layers = nn.ModuleList(
            FourierLayer(state, f"blocks.{i}") for i in range(2)
        )
        self.register_buffer("mu", state["mean"].clone())
        self.register_buffer("sigma", state["std"].clone())

    def forward(self, field):
        n, rows, columns = field.shape
        ys = torch.arange(rows, dtype=field.dtype) / (rows - 1)
        xs = torch.arange(columns, dtype=field.dtype) / (columns - 1)
        features = torch.stack(
            [
                (field - self.mu) / self.sigma,
                ys[None, :, None].expand(n, rows, columns),
                xs[None, None, :].expand(n, rows, columns),
            ],
            dim=-1,
        )
        x = dense(features, self.lift_w, self.lift_b)
        x = nn.functional.pad(x, (0, 0, 0, 2, 0, 2))
        for layer in self.layers:
            x = layer(x)
        x = x[:, :rows, :columns]
        x = gelu(dense(x, self.p0_w, self.p0_b))
        x = dense(x, self.p1_w, self.p1_b)[..., 0]
        return x * self.sigma + self.mu


def model():
    return Net(torch.load(W))


def forward(net, batch):
    return net(batch["field"])


def central(u):
    after = torch.cat([u[:, :, 1:], u[:, :, :1]], dim=2)
    before = torch.cat([u[:, :, -1:], u[:, :, :-1]], dim=2)
    return 0.5 * (after - before)


def loss(prediction, batch):
    truth = batch["target"]
    far = ((prediction - truth) ** 2).sum(dim=(1, 2)).sqrt()
    relative = far / (truth**2).sum(dim=(1, 2)).sqrt()
    rough = (central(prediction) - central(truth)).square().mean()
    return relative.mean() + 0.1 * rough


class Adam(torch.optim.Optimizer):
    """Adam with the decay as a part of the gradient."""

    def __init__(self, params):
        super().__init__(params, {"lr": 2e-3, "decay": 1e-3, "beta": (0.9, 0.999)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["beta"]
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                s["t"] += 1
                g = p.grad + group["decay"] * p
                s["m"].add_((1 - b1) * (g - s["m"]))
                s["v"].add_((1 - b2) * (g * g - s["v"]))
                m = s["m"] / (1 - b1 ** s["t"])
                v = s["v"] / (1 - b2 ** s["t"])
                p.sub_(group["lr"] * m / (v.sqrt() + 1e-8))


def optimizer(net):
    return Adam(net.parameters())
