"""Made for inference and trained as well: all is products of matrices, and there are no layers.

Maps are (channels, batch, height, width). Each kernel is a matrix, the norms are columns of
one table, and what has a rate is cut into smaller pictures without one.
"""

from pathlib import Path

import torch
from torch import nn
from torch.autograd import Function

CLASSES, UNKNOWN = 6, 255
HIGH, WIDE = 56, 72
SHADE = torch.tensor([0.45, 0.43, 0.40])
SPREAD = torch.tensor([0.24, 0.22, 0.23])
PRICE = torch.tensor([0.4, 1.0, 1.3, 0.8, 1.7, 1.1])
EPS = 1e-5
MEMORY = 0.03

#: Where each norm is in the files, in the order of the table.
NORMS = {
    "stem": "backbone.stem.1",
    **{
        f"{short}_{part}": f"backbone.{long}.{part}.1"
        for short, long in (
            ("one", "layer1"),
            ("two", "layer2"),
            ("three", "layer3.0"),
            ("four", "layer3.1"),
        )
        for part in ("conv1", "conv2", "conv3", "downsample")
        if (short, part) != ("four", "downsample")
    },
    "near": "aspp.convs.0.1",
    "mid": "aspp.convs.1.bn",
    "far": "aspp.convs.2.bn",
    "whole": "aspp.pooling.2",
    "join": "aspp.project.1",
    "low": "decoder.low_project.1",
    "fuse": "decoder.fuse.bn",
    "side": "aux.0.1",
}


# ------------------------------------------------------------ maps and matrices


def windows(x, stride):
    """(c, n, h, w) -> (c, n, h', w', 3, 3), with a rim of zeros."""
    x = nn.functional.pad(x, (1, 1, 1, 1))
    return x.unfold(2, 3, stride).unfold(3, 3, stride)


def columns(x, stride):
    """(c, n, h, w) -> (c * 9, n, h', w')."""
    return windows(x, stride).permute(0, 4, 5, 1, 2, 3).flatten(0, 2)


def product(matrix, x):
    """(out, c) and (c, n, h, w) -> (out, n, h, w)."""
    return (matrix @ x.flatten(1)).unflatten(1, x.shape[1:])


def depthwise(kernel, x):
    """(c, 9) and (c, n, h, w)."""
    nine = columns(x, 1).unflatten(0, (-1, 9))
    return torch.einsum("ck,ckn->cn", kernel, nine.flatten(2)).view_as(x)


def to_batch(x, rate):
    """Each of rate * rate pictures has the pixels that a dilated kernel sees together."""
    h, w = x.shape[2:]
    x = nn.functional.pad(x, (0, -w % rate, 0, -h % rate))
    x = x.unflatten(2, (-1, rate)).unflatten(4, (-1, rate))
    return x.permute(0, 3, 5, 1, 2, 4).flatten(1, 3)


def to_space(x, rate, h, w):
    x = x.unflatten(1, (rate, rate, -1)).permute(0, 3, 4, 1, 5, 2)
    return x.flatten(4, 5).flatten(2, 3)[:, :, :h, :w]


def dilated(convolve, x, rate):
    h, w = x.shape[2:]
    return to_space(convolve(to_batch(x, rate)), rate, h, w)


def stretch(n, m):
    """(m, n): shares of n pixels in each of m."""
    place = (torch.arange(m) + 0.5) * n / m - 0.5
    place = place.clamp(0, n - 1)
    return (1 - (place[:, None] - torch.arange(n)).abs()).clamp(min=0)


def enlarge(x, h, w):
    rows, cols = stretch(x.shape[2], h), stretch(x.shape[3], w)
    return rows @ x @ cols.T


# --------------------------------------------------- parts with gradients by hand


class Norm(Function):
    """x (c, n, h, w), gain and shift (c)."""

    @staticmethod
    def forward(ctx, x, gain, shift):
        flat = x.flatten(1)
        mean = flat.mean(1)
        var = (flat - mean[:, None]).square().mean(1)
        root = 1 / (var + EPS).sqrt()
        unit = (flat - mean[:, None]) * root[:, None]
        ctx.save_for_backward(unit, root, gain)
        ctx.mark_non_differentiable(mean, var)
        y = unit * gain[:, None] + shift[:, None]
        return y.view_as(x), mean, var

    @staticmethod
    def backward(ctx, grad, _mean, _var):
        unit, root, gain = ctx.saved_tensors
        g = grad.flatten(1)
        n = g.shape[1]
        d_shift = g.sum(1)
        d_gain = (g * unit).sum(1)
        inner = g - (d_shift[:, None] + unit * d_gain[:, None]) / n
        d_x = (gain * root)[:, None] * inner
        return d_x.view_as(grad), d_gain, d_shift


class PixelLoss(Function):
    """Cross-entropy and so much of Dice; z (classes, pixels), t (pixels), all of them known."""

    @staticmethod
    def forward(ctx, z, t, dice):
        log_p = z - z.logsumexp(0)
        p = log_p.exp()
        hot = torch.zeros_like(z)
        hot[t, torch.arange(len(t))] = 1
        price = PRICE[t] / PRICE[t].sum()
        entropy = -(price * (hot * log_p).sum(0)).sum()

        both = 2 * (p * hot).sum(1) + 1
        all_ = p.sum(1) + hot.sum(1) + 1
        ctx.save_for_backward(p, hot, price, both, all_)
        ctx.dice = dice
        return entropy + dice * (1 - (both / all_).mean())

    @staticmethod
    def backward(ctx, grad):
        p, hot, price, both, all_ = ctx.saved_tensors
        d_z = price * (p - hot)
        d_p = (both / all_**2)[:, None] - 2 * hot / all_[:, None]
        d_p = ctx.dice / CLASSES * d_p
        d_z = d_z + p * (d_p - (p * d_p).sum(0))
        return grad * d_z, None, None


# -------------------------------------------------------------------- the network


class Engine(nn.Module):
    def __init__(self, kernels, table, running, places):
        super().__init__()
        self.kernels = nn.ParameterDict(
            {k: nn.Parameter(v) for k, v in kernels.items()}
        )
        self.table = nn.Parameter(table)
        self.register_buffer("running", running)
        self.places = places

    def norm(self, key, x):
        at = self.places[key]
        gain, shift = self.table[:, at].unbind()
        y, mean, var = Norm.apply(x, gain, shift)
        n = x[0].numel()
        self.seen[:, at] = torch.stack([mean, var * n / (n - 1)])
        return y

    def conv(self, key, x, stride=1):
        """One by one or three by three: the matrix has the right number of columns."""
        matrix = self.kernels[key]
        if matrix.shape[1] != len(x):
            x = columns(x, stride)
        elif stride > 1:
            x = x[:, :, ::stride, ::stride]
        return product(matrix, x)

    def unit(self, key, x, stride=1, rate=1):
        y = self.norm(key + "_conv1", self.conv(key + "_conv1", x)).relu()
        if rate > 1:
            y = dilated(lambda part: self.conv(key + "_conv2", part), y, rate)
        else:
            y = self.conv(key + "_conv2", y, stride)
        y = self.norm(key + "_conv2", y).relu()
        y = self.norm(key + "_conv3", self.conv(key + "_conv3", y))
        if key + "_downsample" in self.kernels:
            x = self.conv(key + "_downsample", x, stride)
            x = self.norm(key + "_downsample", x)
        return (x + y).relu()

    def pyramid(self, x):
        """The branches are not put together: each has its part of the joining matrix."""
        near = self.norm("near", self.conv("near", x)).relu()
        parts = [near]
        for key, rate in (("mid", 2), ("far", 3)):
            kernel = self.kernels[key + "_depth"]
            y = dilated(lambda part, k=kernel: depthwise(k, part), x, rate)
            parts.append(self.norm(key, self.conv(key, y)).relu())
        whole = x.mean((2, 3), keepdim=True)
        parts.append(self.norm("whole", self.conv("whole", whole)).relu())
        pieces = self.kernels["join"].split(16, 1)
        joined = sum(product(m, part) for m, part in zip(pieces, parts))
        return self.norm("join", joined).relu()

    def decode(self, x, low):
        low = self.norm("low", self.conv("low", low)).relu()
        x = enlarge(x, *low.shape[2:])
        k = len(low)
        depth, point = self.kernels["fuse_depth"], self.kernels["fuse"]
        y = product(point[:, :k], depthwise(depth[:k], low))
        y = y + product(point[:, k:], depthwise(depth[k:], x))
        y = self.norm("fuse", y).relu()
        return self.classify("out", y)

    def classify(self, key, x):
        """The last row of the matrix is for a channel of ones."""
        matrix = self.kernels[key]
        return product(matrix[:-1].T, x) + matrix[-1][:, None, None, None]

    def forward(self, x):
        self.seen = torch.zeros_like(self.running)
        x = self.norm("stem", self.conv("stem", x, stride=2)).relu()
        low = self.unit("one", windows(x, 2).amax((4, 5)))
        middle = self.unit("two", low, stride=2)
        x = self.unit("four", self.unit("three", middle, rate=2), rate=4)
        out = self.decode(self.pyramid(x), low)
        aux = self.norm("side", self.conv("side", middle)).relu()
        aux = self.classify("aux", aux)
        self.running.lerp_(self.seen, MEMORY)
        return enlarge(out, HIGH, WIDE), enlarge(aux, HIGH, WIDE)


# -------------------------------------------------------------------- the weights


def read(state):
    kernels, places = {}, {}
    table, running = [], []
    begin = 0
    for key, name in NORMS.items():
        table.append(torch.stack([state[name + ".weight"], state[name + ".bias"]]))
        stats = [state[f"{name}.running_{kind}"] for kind in ("mean", "var")]
        running.append(torch.stack(stats))
        end = begin + len(state[name + ".bias"])
        places[key] = slice(begin, end)
        begin = end
        # In a sequence the convolution comes just before.
        head, _, last = name.rpartition(".")
        before = head + (".pointwise" if last == "bn" else f".{int(last) - 1}")
        kernels[key] = state[before + ".weight"].flatten(1)
        if last == "bn":
            kernels[key + "_depth"] = state[head + ".depthwise.weight"].flatten(1)
    for key, name in (("out", "decoder.classifier"), ("aux", "aux.1")):
        matrix = state[name + ".weight"].flatten(1).T
        kernels[key] = torch.cat([matrix, state[name + ".bias"][None]])
    return kernels, torch.cat(table, 1), torch.cat(running, 1), places


def model():
    return Engine(*read(torch.load(Path(__file__).with_name("weights.pt"))))


# ----------------------------------------------------------------------- the data


def look_up(pictures, batch, empty):
    """(n, c, h, w) -> (c, n, HIGH, WIDE): where each pixel of the crop comes from."""
    n, _, h, w = pictures.shape
    y = batch["corner"][:, :1] + torch.arange(HIGH)
    x = torch.arange(WIDE).expand(n, WIDE)
    x = torch.where(batch["flip"][:, None], WIDE - 1 - x, x) + batch["corner"][:, 1:]
    y, x = y[:, :, None], x[:, None, :]
    inside = (y < h) & (x < w)
    i = torch.arange(n)[:, None, None]
    seen = pictures[i, :, y.clamp(max=h - 1), x.clamp(max=w - 1)]
    return torch.where(inside[..., None], seen, empty).permute(3, 0, 1, 2)


def forward(net, batch):
    light = batch["image"] * (batch["brightness"] / 255)[:, None, None, None]
    light = light.clamp(max=1).sub(SHADE[:, None, None]).div(SPREAD[:, None, None])
    out, aux = net(look_up(light, batch, 0.0))
    return {"out": out.transpose(0, 1), "aux": aux.transpose(0, 1)}


# ------------------------------------------------------------------- the training


def loss(output, batch):
    target = look_up(batch["label"][:, None], batch, UNKNOWN).flatten()
    known = (target != UNKNOWN).nonzero()[:, 0]

    def term(z, dice):
        z = z.transpose(0, 1).flatten(1)
        return PixelLoss.apply(z[:, known], target[known], dice)

    return term(output["out"], 0.5) + 0.4 * term(output["aux"], 0.0)


class HeavyBall(torch.optim.Optimizer):
    """One vector of all weights, with its own rate and decay for each element."""

    backbone = ("stem", "one", "two", "three", "four")

    def __init__(self, net, rate, inertia, decay, steps):
        params = list(net.parameters())
        super().__init__(params, {})
        self.rate, self.inertia, self.steps = rate, inertia, steps
        fast = torch.full_like(net.table, 10.0)
        fast[:, net.places["stem"].start : net.places["near"].start] = 1.0
        rates, decays = {net.table: fast}, {net.table: torch.zeros_like(fast)}
        for key, kernel in net.kernels.items():
            slow = key.split("_")[0] in self.backbone
            rates[kernel] = torch.full_like(kernel, 1.0 if slow else 10.0)
            decays[kernel] = torch.full_like(kernel, decay)
            if key in ("out", "aux"):
                decays[kernel][-1] = 0
        self.rates = torch.cat([rates[p].flatten() for p in params])
        self.decays = torch.cat([decays[p].flatten() for p in params])
        self.ball = torch.zeros_like(self.rates)
        self.t = 0

    def now(self):
        rate = self.rate * (1 - self.t / self.steps) ** 0.9
        return rate * min(1, 0.25 + 0.75 * self.t / 3)

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        x = torch.cat([p.flatten() for p in params])
        g = torch.cat([p.grad.flatten() for p in params])
        g = g + self.decays * x
        self.ball = self.inertia * self.ball + g
        x = x - self.now() * self.rates * (g + self.inertia * self.ball)
        self.t += 1
        for p, part in zip(params, x.split([p.numel() for p in params])):
            p.copy_(part.view_as(p))


def optimizer(net):
    return HeavyBall(net, rate=0.02, inertia=0.9, decay=0.01, steps=24)
