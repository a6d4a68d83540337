"""After inference code in C: flat arrays, tables of neighbours, both branches in one kernel.

A map is [images, channels, pixels]; a table says for each tap of a window which pixel
it reads and whether there is one. The small kernel goes into the large one, with the
scales of both norms, so that a block reads each window once. Planes are blue first.
"""

from math import pi, sqrt
from pathlib import Path

import torch
from torch import nn

N_BLOCKS, N_CLASSES = 3, 5
K_STEM, S_STEM = 5, 3
K_LARGE, K_SMALL = 7, 3
AUX_AFTER = 2
KEEP = (1.0, 0.85, 0.7)
EPS, BLEND = 1e-5, 0.1
BGR_MEAN = (103.53, 116.28, 123.675)
BGR_STD = (57.375, 57.12, 58.395)
SMOOTH, AUX_SHARE = 0.1, 0.4
RATE, MU, DECAY = 0.05, 0.9, 0.05

# ---------------------------------------------------------------- by hand


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        cdf = 0.5 * torch.erfc(-x / sqrt(2.0))
        ctx.save_for_backward(x, cdf)
        return x * cdf

    @staticmethod
    def backward(ctx, g):
        x, cdf = ctx.saved_tensors
        pdf = torch.exp(-0.5 * x * x) / sqrt(2.0 * pi)
        return g * (cdf + x * pdf)


class SoftmaxLoss(torch.autograd.Function):
    """Cross entropy of logits [images, classes] and targets, mean of the images."""

    @staticmethod
    def forward(ctx, logits, target):
        e = torch.exp(logits - logits.max(1, keepdim=True).values)
        p = e / e.sum(1, keepdim=True)
        ctx.save_for_backward(p, target)
        return -(target * torch.log(p)).sum() / len(p)

    @staticmethod
    def backward(ctx, g):
        p, target = ctx.saved_tensors
        return g * (p - target) / len(p), None


# ----------------------------------------------------------------- tables


def window_table(h, w, k, stride):
    """Pixel read by each tap at each place, whether it is inside, and the new sides."""
    pad = k // 2
    oh, ow = (h + 2 * pad - k) // stride + 1, (w + 2 * pad - k) // stride + 1
    tap, place = torch.arange(k * k)[:, None], torch.arange(oh * ow)[None, :]
    row = (place // ow) * stride + tap // k - pad
    col = (place % ow) * stride + tap % k - pad
    inside = (row >= 0) & (row < h) & (col >= 0) & (col < w)
    pixel = (row * w + col).clamp(0, h * w - 1)
    return pixel, inside, oh, ow


def read_windows(x, pixel, inside):
    """[n, c, pixels] -> [n, c, taps, places]."""
    return x[:, :, pixel] * inside


def small_in_large():
    """Numbers of the taps of the large window that the small one has."""
    first = (K_LARGE - K_SMALL) // 2
    side = torch.arange(first, first + K_SMALL)
    return (side[:, None] * K_LARGE + side[None, :]).flatten()


# ---------------------------------------------------------------- network


class Net(nn.Module):
    def __init__(self, arrays, statistics):
        super().__init__()
        for name, value in arrays.items():
            self.register_parameter(name, nn.Parameter(value.clone().contiguous()))
        for name, value in statistics.items():
            self.register_buffer(name, value.clone().contiguous())

    def get(self, *names):
        return [getattr(self, name) for name in names]

    def forward(self, planes):
        return run(self, planes)


def remember(kept, mean, var, count):
    with torch.no_grad():
        fresh = torch.stack([mean, var * count / (count - 1)])
        kept.add_(BLEND * (fresh - kept))


def fold(norm, mean, var):
    """Scale and shift that stand for a norm with these statistics."""
    scale = norm[0] / torch.sqrt(var + EPS)
    return scale, norm[1] - mean * scale


def moments(x):
    mean = x.mean((0, 2))
    centred = x - mean[:, None]
    return mean, (centred * centred).mean((0, 2))


def batch_norm(x, norm, kept):
    mean, var = moments(x)
    remember(kept, mean, var, x.shape[0] * x.shape[2])
    scale, shift = fold(norm, mean, var)
    return x * scale[:, None] + shift[:, None]


def stem(net, planes):
    n, c, h, w = planes.shape
    weight, bias, norm, kept = net.get("stem_w", "stem_b", "stem_n", "stem_kept")
    pixel, inside, oh, ow = window_table(h, w, K_STEM, S_STEM)
    cols = read_windows(planes.reshape(n, c, h * w), pixel, inside)
    cols = cols.reshape(n, c * K_STEM * K_STEM, oh * ow)
    y = torch.matmul(weight.T, cols) + bias[:, None]
    y = Gelu.apply(y)
    scale, shift = fold(norm, kept[0], kept[1])
    return y * scale[:, None] + shift[:, None], oh, ow


def mix_space(net, b, x, pixel, inside):
    """Measure both branches, fold them into one kernel, and run that."""
    large, large_n, large_kept = net.get(f"b{b}_k7", f"b{b}_n7", f"b{b}_kept7")
    small, small_n, small_kept = net.get(f"b{b}_k3", f"b{b}_n3", f"b{b}_kept3")
    cols = read_windows(x, pixel, inside)
    count = x.shape[0] * x.shape[2]
    centre = small_in_large()
    mean7, var7 = moments(torch.einsum("nctp,tc->ncp", cols, large))
    remember(large_kept, mean7, var7, count)
    mean3, var3 = moments(torch.einsum("nctp,tc->ncp", cols[:, :, centre], small))
    remember(small_kept, mean3, var3, count)
    scale7, shift7 = fold(large_n, mean7, var7)
    scale3, shift3 = fold(small_n, mean3, var3)
    kernel = (large * scale7).index_add(0, centre, small * scale3)
    y = torch.einsum("nctp,tc->ncp", cols, kernel)
    return y + (shift7 + shift3)[:, None]


def mix_channels(net, b, x):
    weight, bias, norm, kept = net.get(
        f"b{b}_pw", f"b{b}_pb", f"b{b}_n1", f"b{b}_kept1"
    )
    y = torch.einsum("io,nip->nop", weight, x) + bias[:, None]
    y = Gelu.apply(y)
    return batch_norm(y, norm, kept)


def excite(net, x):
    w1, b1, w2, b2 = net.get("se_w1", "se_b1", "se_w2", "se_b2")
    s = x.sum(2) / x.shape[2]
    s = torch.addmm(b1, s, w1).clamp(min=0)
    s = torch.addmm(b2, s, w2)
    gate = 0.5 * (1.0 + torch.tanh(0.5 * s))
    return x * gate[:, :, None]


def run(net, planes):
    x, h, w = stem(net, planes)
    pixel, inside, _, _ = window_table(h, w, K_LARGE, 1)
    for b in range(N_BLOCKS):
        y = Gelu.apply(mix_space(net, b, x, pixel, inside))
        x = x + KEEP[b] * y
        x = mix_channels(net, b, x)
        if b + 1 == AUX_AFTER:
            aux = torch.addmm(net.aux_b, x.sum(2) / x.shape[2], net.aux_w)
    x = excite(net, x)
    avg, top = x.sum(2) / x.shape[2], x.max(2).values
    logits = avg @ net.out_avg + top @ net.out_max + net.out_b
    return logits, aux


# ---------------------------------------------------------------- weights


def pack(state):
    """Arrays that are trained, and statistics, by their names here."""
    arrays, statistics = {}, {}

    def put_norm(name, kept, source):
        arrays[name] = torch.stack([state[source + ".weight"], state[source + ".bias"]])
        mean, var = state[source + ".running_mean"], state[source + ".running_var"]
        statistics[kept] = torch.stack([mean, var])

    weight = state["embed.proj.weight"].flip(1)
    arrays["stem_w"] = weight.flatten(1).T
    arrays["stem_b"] = state["embed.proj.bias"]
    put_norm("stem_n", "stem_kept", "embed.norm")
    for b in range(N_BLOCKS):
        at = f"blocks.{b}."
        arrays[f"b{b}_k7"] = state[at + "spatial.large.weight"].flatten(1).T
        arrays[f"b{b}_k3"] = state[at + "spatial.small.weight"].flatten(1).T
        put_norm(f"b{b}_n7", f"b{b}_kept7", at + "spatial.large_norm")
        put_norm(f"b{b}_n3", f"b{b}_kept3", at + "spatial.small_norm")
        arrays[f"b{b}_pw"] = state[at + "channel.weight"].flatten(1).T
        arrays[f"b{b}_pb"] = state[at + "channel.bias"]
        put_norm(f"b{b}_n1", f"b{b}_kept1", at + "norm")
    gate = f"blocks.{N_BLOCKS - 1}.excite."
    arrays["se_w1"] = state[gate + "reduce.weight"].flatten(1).T
    arrays["se_b1"] = state[gate + "reduce.bias"]
    arrays["se_w2"] = state[gate + "expand.weight"].flatten(1).T
    arrays["se_b2"] = state[gate + "expand.bias"]
    arrays["out_avg"], arrays["out_max"] = state["head.weight"].T.chunk(2)
    arrays["out_b"] = state["head.bias"]
    arrays["aux_w"] = state["aux_head.weight"].T
    arrays["aux_b"] = state["aux_head.bias"]
    return arrays, statistics


def model():
    return Net(*pack(torch.load(Path(__file__).with_name("weights.pt"))))


# --------------------------------------------------------------- training


def forward(net, batch):
    bgr = batch["image"][..., [2, 1, 0]].float()
    bgr = (bgr - torch.tensor(BGR_MEAN)) / torch.tensor(BGR_STD)
    logits, aux = net(bgr.movedim(3, 1))
    return {"logits": logits, "aux": aux}


def targets(label, smooth):
    off = smooth / N_CLASSES
    table = torch.full((N_CLASSES, N_CLASSES), off)
    table.fill_diagonal_(1.0 - smooth + off)
    return table[label]


def loss(output, batch):
    label = batch["label"]
    main = SoftmaxLoss.apply(output["logits"], targets(label, SMOOTH))
    aux = SoftmaxLoss.apply(output["aux"], targets(label, 0.0))
    return main + AUX_SHARE * aux


class Nesterov(torch.optim.Optimizer):
    """Arrays that multiply decay; norms and biases do not."""

    def __init__(self, net):
        plain = ("_n", "_n7", "_n3", "_n1", "_b", "_pb", "_b1", "_b2")
        self.decay = [
            0.0 if name.endswith(plain) else DECAY for name, _ in net.named_parameters()
        ]
        super().__init__(list(net.parameters()), {})

    @torch.no_grad()
    def step(self, closure=None):
        for p, decay in zip(self.param_groups[0]["params"], self.decay):
            g = p.grad + decay * p
            kept = self.state[p]
            m = MU * kept["m"] + g if "m" in kept else g.clone()
            kept["m"] = m
            p.sub_(RATE * (g + MU * m))


def optimizer(net):
    return Nesterov(net)
