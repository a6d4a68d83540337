"""The field as arrays by name; light that is left by the sum of what was passed."""

from pathlib import Path

import torch
from torch import nn

CONFIG = {
    "near": 2.0,
    "far": 6.0,
    "samples": 10,
    "fine_samples": 8,
    "place_bands": 4,
    "view_bands": 2,
    "last_step": 0.5,
    "floor": 1e-2,
}


def bands(x, count):
    """[x, sines of all bands, cosines of all bands]."""
    scales = 2.0 ** torch.arange(count)
    angles = (scales[:, None] * x[..., None, :]).flatten(-2)
    return torch.cat([x, angles.sin(), angles.cos()], -1)


def by_bands(kernel, count):
    """Rows of a kernel, from band by band to sines, then cosines."""
    plain, waves = kernel[:3], kernel[3:]
    waves = waves.reshape(count, 2, 3, -1).transpose(0, 1)
    return torch.cat([plain, waves.reshape(6 * count, -1)])


class FieldMLP(nn.Module):
    def __init__(self, arrays):
        super().__init__()
        for name, value in arrays.items():
            self.register_parameter(name, nn.Parameter(value.clone().contiguous()))

    def dense(self, name, x):
        return x @ getattr(self, "w_" + name) + getattr(self, "b_" + name)

    def forward(self, xyz, viewdirs):
        enc = bands(xyz, CONFIG["place_bands"])
        h = torch.relu(self.dense("0", enc))
        h = torch.relu(self.dense("1", h))
        h = torch.relu(h @ self.w_2_hidden + enc @ self.w_2_skip + self.b_2)
        h = torch.relu(self.dense("3", h))
        out = self.dense("out", h)
        sigma = torch.nn.functional.softplus(out[..., 0])
        dirs = bands(viewdirs, CONFIG["view_bands"])
        h = out[..., 1:] @ self.w_view_hidden + self.b_view
        h = torch.relu(h + (dirs @ self.w_view_dirs).unsqueeze(1))
        return self.dense("rgb", h).sigmoid(), sigma


def render(rgb, sigma, t, norm):
    delta = torch.empty_like(t)
    delta[:, :-1] = t[:, 1:] - t[:, :-1]
    delta[:, -1] = CONFIG["last_step"]
    optical = sigma * delta * norm
    passed = torch.cumsum(optical, -1) - optical
    weights = torch.exp(-passed) * -torch.expm1(-optical)
    rgb = torch.einsum("rs,rsc->rc", weights, rgb)
    white = 1.0 - weights.sum(1)
    return rgb + white[:, None], weights


def sample_pdf(bins, weights, u):
    weights = weights + CONFIG["floor"]
    pdf = weights / weights.sum(1, keepdim=True)
    cdf = torch.cumsum(pdf, 1)
    cdf = torch.cat([torch.zeros(len(cdf), 1), cdf], 1)
    left = (u[:, :, None] >= cdf[:, None, 1:-1]).sum(-1)
    rows = torch.arange(len(u))[:, None]
    t = (u - cdf[rows, left]) / pdf[rows, left]
    return torch.lerp(bins[rows, left], bins[rows, left + 1], t)


class Renderer(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.mlp = FieldMLP(arrays_of(w, "coarse."))
        self.mlp_fine = FieldMLP(arrays_of(w, "fine."))

    def ray_march(self, mlp, rays, t):
        o, d = rays
        xyz = o.unsqueeze(1) + d.unsqueeze(1) * t.unsqueeze(2)
        norm = torch.sqrt((d * d).sum(1, keepdim=True))
        rgb, sigma = mlp(xyz, d / norm)
        return render(rgb, sigma, t, norm)

    def forward(self, batch):
        rays = batch["origin"], batch["direction"]
        near, far, n = CONFIG["near"], CONFIG["far"], CONFIG["samples"]
        t = near + (torch.arange(n) + batch["jitter"]) * ((far - near) / n)
        rgb, weights = self.ray_march(self.mlp, rays, t)
        with torch.no_grad():
            mids = (t[:, 1:] + t[:, :-1]) / 2
            t_new = sample_pdf(mids, weights[:, 1:-1], batch["u"])
            t_all, _ = torch.sort(torch.cat([t, t_new], 1), dim=1)
        rgb_fine, weights = self.ray_march(self.mlp_fine, rays, t_all)
        depth = torch.einsum("rs,rs->r", weights, t_all)
        return {"first": rgb, "second": rgb_fine, "depth": depth}


def arrays_of(w, at):
    kernel = {n: w[f"{at}{n}.weight"].t() for n in ("density", "feature", "view")}
    skip, hidden = w[at + "layers.2.weight"].t().split([27, 24])
    view_hidden, view_dirs = kernel["view"].split([24, 15])
    density_bias = w[at + "density.bias"] - 1
    return {
        "w_0": by_bands(w[at + "layers.0.weight"].t(), 4),
        "b_0": w[at + "layers.0.bias"],
        "w_1": w[at + "layers.1.weight"].t(),
        "b_1": w[at + "layers.1.bias"],
        "w_2_skip": by_bands(skip, 4),
        "w_2_hidden": hidden,
        "b_2": w[at + "layers.2.bias"],
        "w_3": w[at + "layers.3.weight"].t(),
        "b_3": w[at + "layers.3.bias"],
        "w_out": torch.cat([kernel["density"], kernel["feature"]], 1),
        "b_out": torch.cat([density_bias, w[at + "feature.bias"]]),
        "w_view_hidden": view_hidden,
        "w_view_dirs": by_bands(view_dirs, 2),
        "b_view": w[at + "view.bias"],
        "w_rgb": w[at + "colour.weight"].t(),
        "b_rgb": w[at + "colour.bias"],
    }


def model():
    return Renderer(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch)


def loss(output, batch):
    target = batch["colour"]
    coarse = ((output["first"] - target) ** 2).mean()
    fine = ((output["second"] - target) ** 2).mean()
    return 0.5 * coarse + fine


class Adam(torch.optim.Optimizer):
    def __init__(self, params, lr, b1=0.9, b2=0.999, eps=1e-7):
        super().__init__(params, dict(lr=lr, b1=b1, b2=b2, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["t"] = 0
                    s["m"] = torch.zeros_like(p)
                    s["v"] = torch.zeros_like(p)
                s["t"] += 1
                s["m"] = g["b1"] * s["m"] + (1 - g["b1"]) * p.grad
                s["v"] = g["b2"] * s["v"] + (1 - g["b2"]) * p.grad * p.grad
                m = s["m"] / (1 - g["b1"] ** s["t"])
                v = s["v"] / (1 - g["b2"] ** s["t"])
                p -= g["lr"] * m / (v.sqrt() + g["eps"])


def optimizer(net):
    return Adam(net.parameters(), 5e-4)
