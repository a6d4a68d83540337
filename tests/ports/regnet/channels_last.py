"""RegNetY, channels last, batch norm and optimizer written out."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

W = Path(__file__).parent / "weights.pt"


def conv(x, kernel, stride=1, groups=1):
    """x: n h w c; kernel: h w i o."""
    pad = kernel.shape[0] // 2
    y = F.conv2d(
        x.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1), None, stride, pad, 1, groups
    )
    return y.permute(0, 2, 3, 1)


class BN(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(c))
        self.beta = nn.Parameter(torch.zeros(c))
        self.register_buffer("mean", torch.zeros(c))
        self.register_buffer("var", torch.ones(c))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        mean = flat.mean(0)
        var = flat.var(0, unbiased=False)
        with torch.no_grad():
            n = len(flat)
            self.mean.mul_(0.9).add_(0.1 * mean)
            self.var.mul_(0.9).add_(0.1 * var * n / (n - 1))
        return (x - mean) / torch.sqrt(var + 1e-5) * self.gamma + self.beta


class ConvBN(nn.Module):
    def __init__(self, i, o, k, stride=1, groups=1):
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(k, k, i // groups, o))
        self.bn = BN(o)
        self.stride, self.groups = stride, groups

    def forward(self, x):
        return self.bn(conv(x, self.kernel, self.stride, self.groups))


class Squeeze(nn.Module):
    def __init__(self, c, r):
        super().__init__()
        self.down = nn.Linear(c, r)
        self.up = nn.Linear(r, c)

    def forward(self, x):
        z = x.mean(dim=(1, 2))
        gate = torch.sigmoid(self.up(F.relu(self.down(z))))
        return x * gate[:, None, None, :]


class Y(nn.Module):
    def __init__(self, i, o, stride, reduced):
        super().__init__()
        self.a = ConvBN(i, o, 1)
        self.b = ConvBN(o, o, 3, stride, o // 8)
        self.se = Squeeze(o, reduced)
        self.c = ConvBN(o, o, 1)
        self.skip = ConvBN(i, o, 1, stride) if stride > 1 else None

    def forward(self, x):
        short = self.skip(x) if self.skip is not None else x
        y = torch.relu(self.a(x))
        y = torch.relu(self.b(y))
        y = self.c(self.se(y))
        return torch.relu(y + short)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = ConvBN(3, 8, 3, 2)
        self.body = nn.Sequential(Y(8, 16, 2, 2), Y(16, 24, 2, 4), Y(24, 24, 1, 6))
        self.out = nn.Linear(24, 6)

    def forward(self, image):
        x = torch.relu(self.stem(image.permute(0, 2, 3, 1)))
        x = self.body(x)
        return self.out(x.mean(dim=(1, 2)))


def model():
    w = torch.load(W)
    s = {}

    def take(to, source):
        s[to + ".kernel"] = w[source + ".convolution.weight"].permute(2, 3, 1, 0)
        s[to + ".bn.gamma"] = w[source + ".normalization.weight"]
        s[to + ".bn.beta"] = w[source + ".normalization.bias"]
        s[to + ".bn.mean"] = w[source + ".normalization.running_mean"]
        s[to + ".bn.var"] = w[source + ".normalization.running_var"]

    take("stem", "regnet.embedder.embedder")
    for number, place in enumerate(("0.layers.0", "1.layers.0", "1.layers.1")):
        source, to = f"regnet.encoder.stages.{place}.", f"body.{number}."
        for letter, index in (("a", 0), ("b", 1), ("c", 3)):
            take(to + letter, source + f"layer.{index}")
        for ours, theirs in (("down", 0), ("up", 2)):
            s[to + f"se.{ours}.weight"] = w[
                source + f"layer.2.attention.{theirs}.weight"
            ][:, :, 0, 0]
            s[to + f"se.{ours}.bias"] = w[source + f"layer.2.attention.{theirs}.bias"]
        if number < 2:
            take(to + "skip", source + "shortcut")
    s["out.weight"] = w["classifier.1.weight"]
    s["out.bias"] = w["classifier.1.bias"]
    net = Net()
    net.load_state_dict(s)
    return net.train()


def forward(model, batch):
    return model(batch[0])


def loss(output, batch):
    p = torch.log_softmax(output, 1)
    return -p[torch.arange(len(p)), batch[1]].mean()


class SGD(torch.optim.Optimizer):
    def __init__(self, params, lr, mu, decay):
        super().__init__(params, dict(lr=lr, mu=mu, decay=decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            mu = group["mu"]
            for p in group["params"]:
                g = p.grad + group["decay"] * p
                state = self.state[p]
                v = state.get("v")
                v = g.clone() if v is None else mu * v + g
                state["v"] = v
                p -= group["lr"] * (g + mu * v)


def optimizer(model):
    return SGD(model.parameters(), 0.05, 0.9, 1e-4)
