"""Full complex transforms, one complex weight a block, real parts taken at the end."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


def params(**tensors):
    return nn.ParameterDict({k: nn.Parameter(v.clone()) for k, v in tensors.items()})


def conv1x1(p, x):
    n, c, h, w = x.shape
    flat = torch.baddbmm(
        p["b"][None, :, None], p["w"].expand(n, -1, -1), x.reshape(n, c, h * w)
    )
    return flat.view(n, -1, h, w)


def corner(weight, rows, columns, modes):
    """The weight of every wave, zero where none is kept; and of the mirrored waves."""
    full = weight.new_zeros(*weight.shape[:2], rows, columns)
    full = full.to(
        torch.complex128 if weight.dtype == torch.float64 else torch.complex64
    )
    kernel = torch.complex(weight[..., 0], weight[..., 1])
    full[:, :, :modes, :modes] = kernel[:, :, :modes]
    full[:, :, rows - modes :, :modes] = kernel[:, :, modes:]
    return full


def spectral(weight, x, modes):
    rows, columns = x.shape[2:]
    waves = torch.fft.fft2(x)
    kernel = corner(weight, rows, columns, modes)
    mixed = (waves.unsqueeze(2) * kernel.unsqueeze(0)).sum(1)
    y = torch.fft.ifft(mixed, dim=2)
    # what a real transform does not keep mirrors the rest
    first = y[..., :1].real
    others = torch.fft.ifft(
        torch.cat([torch.zeros_like(y[..., :1]), 2 * y[..., 1:]], 3), dim=3
    )
    return first / columns + others.real


def block(p, x, modes):
    y = spectral(p["spectral"]["kernel"], x, modes)
    n, c = y.shape[:2]
    rows = y.reshape(n * c, -1)
    var, mean = torch.var_mean(rows, dim=1, correction=0, keepdim=True)
    y = ((rows - mean) / torch.sqrt(var + 1e-5)).view_as(y)
    y = torch.addcmul(p["norm"]["b"][:, None, None], y, p["norm"]["g"][:, None, None])
    hidden = F.gelu(y + conv1x1(p["skip"], x))
    hidden = F.gelu(conv1x1(p["up"], hidden))
    return x + conv1x1(p["down"], hidden)


class Pieces(nn.Module):
    def __init__(self, w, modes=3):
        super().__init__()
        self.modes = modes
        self.ends = nn.ModuleDict(
            {
                name: params(w=w[key + ".weight"], b=w[key + ".bias"])
                for name, key in (
                    ("lift", "lift"),
                    ("head", "project.0"),
                    ("out", "project.2"),
                )
            }
        )
        self.blocks = nn.ModuleList()
        for i in range(2):
            at = f"blocks.{i}."
            kernel = torch.cat([w[at + "spectral.low"], w[at + "spectral.high"]], 2)
            parts = {
                "spectral": params(kernel=kernel),
                "norm": params(g=w[at + "norm.weight"], b=w[at + "norm.bias"]),
            }
            for name, key in (("skip", "skip"), ("up", "mlp.0"), ("down", "mlp.2")):
                matrix = w[at + key + ".weight"].flatten(1)
                parts[name] = params(w=matrix, b=w[at + key + ".bias"])
            self.blocks.append(nn.ModuleDict(parts))
        self.register_buffer("moments", torch.stack([w["mean"], w["std"]]))

    def end(self, name, x):
        p = self.ends[name]
        return F.linear(x, p["w"], p["b"])

    def forward(self, field):
        n, rows, columns = field.shape
        mean, std = self.moments.unbind()
        steps = [torch.linspace(0, 1, k, dtype=field.dtype) for k in (rows, columns)]
        grid = torch.cartesian_prod(*steps).view(1, rows, columns, 2).repeat(n, 1, 1, 1)
        normed = (field - mean).div(std)[..., None]
        h = self.end("lift", torch.cat([normed, grid], dim=3)).movedim(3, 1)
        padded = h.new_zeros(n, h.shape[1], rows + 2, columns + 2)
        padded[:, :, :rows, :columns] = h
        h = padded
        for p in self.blocks:
            h = block(p, h, self.modes)
        h = h[:, :, :rows, :columns].movedim(1, 3)
        h = self.end("out", F.gelu(self.end("head", h)))
        return torch.addcmul(mean, h[..., 0], std)


def model():
    return Pieces(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["field"])


def loss(output, batch):
    rest = output - batch["target"]
    size = torch.linalg.vector_norm(batch["target"], dim=(1, 2))
    value = torch.linalg.vector_norm(rest, dim=(1, 2)).div(size).mean()
    slope = rest.roll(-1, 2) - rest.roll(1, 2)
    return value + 0.025 * slope.square().mean()


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=2e-3, weight_decay=1e-3, foreach=False)
