"""After JAX: functions of a flat dictionary of arrays, channels last, blocks stacked.

Spectral kernels are complex, [modes, in, out]; coefficients are means over the points.
"""

from pathlib import Path

import torch
from torch import nn

DEPTH = 3
STRIDE = 2
PAD = 9
MEASURED = ("a_mean", "a_std", "u_mean", "u_std")


# ------------------------------------------------------------------------ network


def gelu(x, approximate=False):
    if approximate:
        inner = 0.7978845608 * (x + 0.044715 * x**3)
        return 0.5 * x * (1.0 + torch.tanh(inner))
    return 0.5 * x * (1.0 + torch.erf(x * 0.5**0.5))


def dense(x, kernel, bias):
    return torch.tensordot(x, kernel, dims=1) + bias


def spectral_conv(x, kernel):
    """x is [batch, points, in]; irfft adds the modes that are left out."""
    modes = kernel.shape[0]
    coeffs = torch.fft.rfft(x, dim=1, norm="forward")[:, :modes]
    coeffs = torch.einsum("bmi,mio->bmo", coeffs, kernel)
    return torch.fft.irfft(coeffs, n=x.shape[1], dim=1, norm="forward")


def fourier_layer(x, kernel, w, b):
    return spectral_conv(x, kernel) + dense(x, w, b)


def body(params, x):
    names = ("blocks/spectral", "blocks/w", "blocks/b")
    for layer in zip(*(params[name] for name in names)):
        x = gelu(fourier_layer(x, *layer))
    return x


def padded_layer(params, x):
    n = x.shape[1]
    x = torch.nn.functional.pad(x, (0, 0, 0, PAD))
    x = fourier_layer(x, params["last/spectral"], params["last/w"], params["last/b"])
    return x[:, :n]


def head(params, x):
    x = gelu(dense(x, params["head/w1"], params["head/b1"]))
    return dense(x, params["head/w2"], params["head/b2"])[..., 0]


def apply(params, stats, a):
    value = (a - stats["a_mean"]) / (stats["a_std"] + 1e-5)
    position = torch.linspace(0.0, 1.0, a.shape[1])
    position = torch.broadcast_to(position, a.shape)
    x = torch.stack((value, position), dim=-1)
    x = dense(x, params["lift/w"], params["lift/b"])
    x = padded_layer(params, body(params, x))
    y = head(params, x)
    return y * (stats["u_std"] + 1e-5) + stats["u_mean"]


# ------------------------------------------------------------------------- arrays


def spectral_kernel(state, name):
    """[in, out, modes] -> [modes, in, out]."""
    weights = torch.permute(state[name + ".weights"], (2, 0, 1))
    return torch.complex(weights.real, weights.imag)


def pointwise_kernel(state, name):
    return state[name + ".weight"][:, :, 0].T


def convert(state):
    blocks = range(DEPTH)
    params = {
        "lift/w": state["fc0.weight"].T,
        "lift/b": state["fc0.bias"],
        "blocks/spectral": torch.stack(
            [spectral_kernel(state, f"convs.{i}") for i in blocks]
        ),
        "blocks/w": torch.stack([pointwise_kernel(state, f"ws.{i}") for i in blocks]),
        "blocks/b": torch.stack([state[f"ws.{i}.bias"] for i in blocks]),
        "last/spectral": spectral_kernel(state, "last_conv"),
        "last/w": pointwise_kernel(state, "last_w"),
        "last/b": state["last_w.bias"],
        "head/w1": state["fc1.weight"].T,
        "head/b1": state["fc1.bias"],
        "head/w2": state["fc2.weight"].T,
        "head/b2": state["fc2.bias"],
    }
    stats = {}
    for name in MEASURED:
        field, kind = name.split("_")
        stats[name] = state[f"{field}_norm.{kind}"]
    return params, stats


class Variables(nn.Module):
    def __init__(self, params, stats):
        super().__init__()
        for path, array in params.items():
            self.register_parameter(path, nn.Parameter(array.clone().contiguous()))
        for name, array in stats.items():
            self.register_buffer(name, array.clone())

    def params(self):
        return dict(self.named_parameters())

    def forward(self, a):
        return apply(self.params(), dict(self.named_buffers()), a)


def model():
    return Variables(*convert(torch.load(Path(__file__).with_name("weights.pt"))))


# ----------------------------------------------------------------------- training


def coarse(field):
    return field[:, ::STRIDE]


def forward(net, batch):
    return net(coarse(batch["a"]))


def loss(output, batch):
    target = coarse(batch["u"])
    error = torch.sum(torch.square(output - target), dim=-1)
    size = torch.sum(torch.square(target), dim=-1)
    return torch.mean(torch.sqrt(error / size))


class AddDecayedWeights:
    def __init__(self, rate, mask):
        self.rate, self.mask = rate, mask

    def init(self, params):
        return ()

    def update(self, grads, state, params):
        for path, param in params.items():
            if self.mask(path, param):
                grads[path] = grads[path] + self.rate * param
        return grads, state


class ScaleByAdam:
    def __init__(self, b1=0.9, b2=0.999, eps=1e-8):
        self.b1, self.b2, self.eps = b1, b2, eps

    def init(self, params):
        mu = {path: torch.zeros_like(param) for path, param in params.items()}
        nu = {path: torch.zeros_like(param.abs()) for path, param in params.items()}
        return 0, mu, nu

    def update(self, grads, state, params):
        count, mu, nu = state
        count = count + 1
        fix_mu, fix_nu = 1 - self.b1**count, 1 - self.b2**count
        updates = {}
        for path, g in grads.items():
            mu[path] = self.b1 * mu[path] + (1 - self.b1) * g
            nu[path] = self.b2 * nu[path] + (1 - self.b2) * g.abs() ** 2
            root = torch.sqrt(nu[path] / fix_nu) + self.eps
            updates[path] = mu[path] / fix_mu / root
        return updates, (count, mu, nu)


class SplitRealAndImaginary:
    """What is inside sees two real arrays for a complex one."""

    def __init__(self, inner):
        self.inner = inner

    def split(self, tree):
        parts = {}
        for path, leaf in tree.items():
            if leaf.is_complex():
                parts[path, "re"], parts[path, "im"] = leaf.real, leaf.imag
            else:
                parts[path, ""] = leaf
        return parts

    def joined(self, parts):
        tree = {}
        for (path, part), leaf in parts.items():
            if part == "":
                tree[path] = leaf
            elif part == "re":
                tree[path] = torch.complex(leaf, parts[path, "im"])
        return tree

    def init(self, params):
        return self.inner.init(self.split(params))

    def update(self, grads, state, params):
        parts, state = self.inner.update(self.split(grads), state, self.split(params))
        return self.joined(parts), state


class ScaleByLearningRate:
    def __init__(self, schedule):
        self.schedule = schedule

    def init(self, params):
        return 0

    def update(self, grads, count, params):
        rate = -self.schedule(count)
        return {path: rate * g for path, g in grads.items()}, count + 1


def exponential_decay(init_value, decay_rate):
    return lambda count: init_value * decay_rate**count


def is_weight(path, param):
    return not path.rpartition("/")[2].startswith("b")


class Trainer(torch.optim.Optimizer):
    def __init__(self, params, chain):
        super().__init__(list(params.values()), {})
        self.params, self.chain = params, chain
        self.opt_state = [link.init(params) for link in chain]

    @torch.no_grad()
    def step(self, closure=None):
        updates = {path: param.grad for path, param in self.params.items()}
        for i, link in enumerate(self.chain):
            updates, self.opt_state[i] = link.update(
                updates, self.opt_state[i], self.params
            )
        for path, param in self.params.items():
            param.add_(updates[path])


def optimizer(net):
    chain = [
        AddDecayedWeights(2e-2, is_weight),
        SplitRealAndImaginary(ScaleByAdam()),
        ScaleByLearningRate(exponential_decay(2e-3, 0.7)),
    ]
    return Trainer(net.params(), chain)
