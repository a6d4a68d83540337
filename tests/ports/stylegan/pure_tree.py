"""Pure functions over trees of arrays: filters are matrices, convolutions sums over patches."""

from pathlib import Path

import torch
from torch import nn

LAYERS, CROSSOVER, LR_MUL = 6, 3, 0.01


class Tree(nn.Module):
    """Arrays by name, in trees of the same."""

    def __init__(self, entries, learned=True):
        super().__init__()
        for name, value in entries.items():
            if isinstance(value, dict):
                self.add_module(name, Tree(value, learned))
            elif learned:
                self.register_parameter(name, nn.Parameter(value.clone().contiguous()))
            else:
                self.register_buffer(name, value.clone().contiguous())

    def __getitem__(self, name):
        return getattr(self, name)


def fir(size, up=1, down=1, pad=(0, 0), gain=1.0):
    """The matrix (outputs, size) of the filter 1 3 3 1 along one axis."""
    taps = torch.tensor([1.0, 3.0, 3.0, 1.0])
    taps = gain * taps / taps.sum()
    padded = size * up + sum(pad)
    rows = torch.arange((padded - len(taps)) // down + 1)
    place = pad[0] + up * torch.arange(size) - down * rows[:, None]
    inside = (place >= 0) & (place < len(taps))
    return torch.where(inside, taps[place.clamp(0, len(taps) - 1)], 0.0)


def resample(x, matrix):
    matrix = matrix.to(x.dtype)
    return torch.einsum("ih,bchw,jw->bcij", matrix, x, matrix)


def spread(x):
    """Zeros between the pixels, none after the last."""
    x = torch.stack([x, torch.zeros_like(x)], dim=-1).flatten(-2)[..., :-1]
    x = torch.stack([x, torch.zeros_like(x)], dim=-2).flatten(-3, -2)
    return x[..., :-1, :]


def patches(x, size, stride=1, pad=0):
    """(b, c, h, w) -> (b, c, i, j, size * size)."""
    x = nn.functional.pad(x, (pad, pad, pad, pad))
    x = x.unfold(2, size, stride).unfold(3, size, stride)
    return x.flatten(-2)


def he(w):
    """The factor of weights (..., in, out), over all axes but the last."""
    return w[..., 0].numel() ** -0.5


def leaky(x):
    return torch.where(x < 0, 0.2 * x, x) * 2**0.5


def over(b):
    return b[:, None, None]


def dense(p, x):
    return x @ (p["w"] * he(p["w"])) + p["b"]


def mapping(p, z):
    """z: (..., style)."""
    x = z * torch.rsqrt((z * z).mean(-1, keepdim=True) + 1e-8)
    for w, b in zip(p["w"], p["b"]):
        x = leaky(x @ (w * he(w)) + b)
    return x


def styled(p, style):
    """Weights of each sample (b, taps, in, out)."""
    return p["w"] * he(p["w"]) * dense(p["mod"], style)[:, None, :, None]


def normed(p, style):
    w, s = p["w"] * he(p["w"]), dense(p["mod"], style)
    squares = (w * w).sum(0)
    d = torch.rsqrt(s * s @ squares + 1e-8)
    return torch.einsum("kcd,bc,bd->bkcd", w, s, d)


def finished(p, x, noise):
    return leaky(x + p["strength"] * noise + over(p["b"]))


def layer(p, x, style, noise):
    y = patches(x, 3, pad=1)
    x = torch.einsum("bcijk,bkcd->bdij", y, normed(p, style))
    return finished(p, x, noise)


def up_layer(p, x, style, noise):
    y = patches(spread(x), 3, pad=2)
    x = torch.einsum("bcijk,bkcd->bdij", y, normed(p, style))
    x = resample(x, fir(x.shape[2], pad=(1, 1), gain=2.0))
    return finished(p, x, noise)


def to_rgb(p, x, style):
    x = torch.einsum("bcij,bkcd->bdij", x, styled(p, style))
    return x + over(p["b"])


def synthesis(p, noise, styles):
    """styles: (b, layers, style)."""
    styles = styles.unbind(1)
    x = p["const"].expand(len(styles[0]), -1, -1, -1)
    x = layer(p["layer0"], x, styles[0], noise["layer0"])
    image = to_rgb(p["rgb0"], x, styles[1])
    for i in (1, 3):
        first, second = f"layer{i}", f"layer{i + 1}"
        x = up_layer(p[first], x, styles[i], noise[first])
        x = layer(p[second], x, styles[i + 1], noise[second])
        image = resample(image, fir(image.shape[2], up=2, pad=(2, 1), gain=2.0))
        image = image + to_rgb(p[f"rgb{i // 2 + 1}"], x, styles[i + 2])
    return image


def conv(p, x, stride=1, pad=1):
    w = p["w"] * he(p["w"])
    x = torch.einsum("bcijk,kcd->bdij", patches(x, 3, stride, pad), w)
    return leaky(x + over(p["b"]))


def point(p, x):
    return torch.einsum("bcij,cd->bdij", x, p["w"] * he(p["w"]))


def block(p, x):
    size = x.shape[2]
    straight = point(p["skip"], resample(x, fir(size, down=2, pad=(1, 1))))
    x = conv(p["conv1"], x)
    x = conv(p["conv2"], resample(x, fir(size, pad=(2, 2))), stride=2, pad=0)
    return (x + straight) * 0.5**0.5


def spread_of_groups(x, group=2):
    """Each sample's mean deviation in its group, as one more channel."""
    b, _, h, w = x.shape
    groups = x.unflatten(0, (group, b // group))
    deviation = (groups.var(dim=0, correction=0) + 1e-8).sqrt()
    mean = deviation.mean(dim=(1, 2, 3)).repeat(group)
    return torch.cat([x, mean[:, None, None, None].expand(-1, -1, h, w)], dim=1)


def judge(p, x):
    x = leaky(point(p["from_rgb"], x) + over(p["from_rgb"]["b"]))
    x = block(p["block0"], x)
    x = block(p["block1"], x)
    x = conv(p["last"], spread_of_groups(x))
    w = p["hidden"]["w"]
    x = leaky(torch.einsum("bchw,chwd->bd", x, w * he(w)) + p["hidden"]["b"])
    return dense(p["score"], x)


def network(g, d, noise, batch):
    both = mapping(g["mapping"], torch.stack([batch["z"], batch["z_mix"]]))
    which = (torch.arange(LAYERS) >= CROSSOVER).long()
    styles = both[which].transpose(0, 1)
    image = synthesis(g["synthesis"], noise, styles)
    return {
        "image": image,
        "fake": judge(d, image),
        "real": judge(d, batch["real"]),
    }


def taps(weight):
    """(out, in, h, w) -> (taps, in, out)."""
    return weight.permute(2, 3, 1, 0).flatten(0, 1)


def converted_layer(w, at, up=False):
    kernel = taps(w[at + ".conv.weight"][0])
    if up:
        kernel = kernel.flip(0)
    return {
        "w": kernel,
        "mod": converted_dense(w, at + ".conv.modulation"),
        "strength": w[at + ".noise.weight"],
        "b": w[at + ".activate.bias"],
    }


def converted_rgb(w, at):
    return {
        "w": taps(w[at + ".conv.weight"][0]),
        "mod": converted_dense(w, at + ".conv.modulation"),
        "b": w[at + ".bias"].flatten(),
    }


def converted_dense(w, at):
    return {"w": w[at + ".weight"].T, "b": w[at + ".bias"]}


def converted_conv(w, weight, bias):
    return {"w": taps(w[weight + ".weight"]), "b": w[bias + ".bias"]}


def converted_generator(w):
    weights = torch.stack([w[f"style.{i}.weight"] for i in (1, 2, 3)])
    biases = torch.stack([w[f"style.{i}.bias"] for i in (1, 2, 3)])
    layers = {"const": w["input.input"][0]}
    layers["layer0"] = converted_layer(w, "conv1")
    layers["rgb0"] = converted_rgb(w, "to_rgb1")
    for i in range(4):
        layers[f"layer{i + 1}"] = converted_layer(w, f"convs.{i}", up=i % 2 == 0)
    for i in range(2):
        layers[f"rgb{i + 1}"] = converted_rgb(w, f"to_rgbs.{i}")
    return {
        "mapping": {"w": weights.mT * LR_MUL, "b": biases * LR_MUL},
        "synthesis": layers,
    }


def converted_discriminator(w):
    tree = {
        "from_rgb": {
            "w": w["convs.0.0.weight"][..., 0, 0].T,
            "b": w["convs.0.1.bias"],
        },
        "last": converted_conv(w, "final_conv.0", "final_conv.1"),
        "hidden": converted_dense(w, "final_linear.0"),
        "score": converted_dense(w, "final_linear.1"),
    }
    tree["hidden"]["w"] = tree["hidden"]["w"].unflatten(0, (-1, 4, 4))
    for i in range(2):
        at = f"convs.{i + 1}."
        tree[f"block{i}"] = {
            "conv1": converted_conv(w, at + "conv1.0", at + "conv1.1"),
            "conv2": converted_conv(w, at + "conv2.1", at + "conv2.2"),
            "skip": {"w": w[at + "skip.1.weight"][..., 0, 0].T},
        }
    return tree


def below(w, prefix):
    return {k.removeprefix(prefix): v for k, v in w.items() if k.startswith(prefix)}


class Pair(nn.Module):
    def __init__(self, w):
        super().__init__()
        g = below(w, "generator.")
        self.g = Tree(converted_generator(g))
        self.d = Tree(converted_discriminator(below(w, "discriminator.")))
        noise = {f"layer{i}": g[f"noises.noise_{i}"][0, 0] for i in range(5)}
        self.noise = Tree(noise, learned=False)

    def forward(self, batch):
        return network(self.g, self.d, self.noise, batch)


def model():
    return Pair(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch)


def loss(output, batch):
    zero = torch.zeros(())
    fooled = torch.logaddexp(-output["fake"], zero).mean()
    real = torch.logaddexp(-output["real"], zero).mean()
    return fooled + real + (output["image"] - batch["real"]).abs().mean()
