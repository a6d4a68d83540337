"""After JAX and Equinox: modules as dataclasses of arrays, one picture [c, h, w] at a time.

Blocks of one kind are one module whose arrays have axes for groups and blocks in front; a
scan goes through them. The arrays lie in a tree, and modules are made of it for each call.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional as F

RGB_MEAN = (0.4488, 0.4371, 0.4040)
RES_SCALE = 0.4

# ----------------------------------------------------------------- pytrees and lax


@dataclass
class Module:
    """Its fields are arrays and other modules."""


def tree_map(f, tree):
    """Apply a function to each array of a module."""
    if not isinstance(tree, Module):
        return f(tree)
    parts = {field.name: getattr(tree, field.name) for field in fields(tree)}
    return replace(tree, **{name: tree_map(f, part) for name, part in parts.items()})


def leaves(tree):
    if not isinstance(tree, Module):
        return [tree]
    return [
        leaf for field in fields(tree) for leaf in leaves(getattr(tree, field.name))
    ]


def scan(f, carry, xs):
    """xs is a module with one more axis in front of its arrays."""
    for i in range(len(leaves(xs)[0])):
        carry = f(carry, tree_map(lambda leaf: leaf[i], xs))
    return carry


def conv_general_dilated(lhs, rhs):
    """lhs [i, h, w] and rhs [..., i, y, x]; strides of 1, padding SAME."""
    before = [(size - 1) // 2 for size in rhs.shape[-2:]]
    after = [size // 2 for size in rhs.shape[-2:]]
    lhs = F.pad(lhs, (before[1], after[1], before[0], after[0]))
    windows = lhs.unfold(1, rhs.shape[-2], 1).unfold(2, rhs.shape[-1], 1)
    return torch.einsum("ihwyx,...iyx->...hw", windows, rhs)


def rearrange_to_space(x):
    """c r1 r2 h w -> c (h r1) (w r2)"""
    c, r1, r2, h, w = x.shape
    return x.permute(0, 3, 1, 4, 2).reshape(c, h * r1, w * r2)


# ------------------------------------------------------------------------- modules


@dataclass
class Conv2d(Module):
    weight: Any
    bias: Any

    def __call__(self, x):
        return conv_general_dilated(x, self.weight) + self.bias


@dataclass
class Linear(Module):
    weight: Any
    bias: Any

    def __call__(self, x):
        return self.weight @ x + self.bias


@dataclass
class ChannelGate(Module):
    """What is called with features gives one number for each channel."""

    squeeze: Linear
    excite: Linear

    def __call__(self, x):
        statistics = torch.mean(x, dim=(1, 2))
        hidden = F.relu(self.squeeze(statistics))
        return torch.sigmoid(self.excite(hidden))


@dataclass
class Block(Module):
    conv_in: Conv2d
    conv_out: Conv2d
    gate: ChannelGate

    def __call__(self, x):
        h = self.conv_out(F.relu(self.conv_in(x)))
        h = h * self.gate(h)[:, None, None]
        return x + RES_SCALE * h


@dataclass
class Group(Module):
    blocks: Block
    conv: Conv2d

    def __call__(self, x):
        h = scan(lambda carry, block: block(carry), x, self.blocks)
        return x + self.conv(h)


@dataclass
class PixelShuffle(Module):
    """Kernels [c, r1, r2, i, y, x]; slopes of what is below zero."""

    conv: Conv2d
    slope: Any

    def __call__(self, x):
        x = rearrange_to_space(self.conv(x))
        return torch.where(x >= 0, x, self.slope * x)


@dataclass
class RCAN(Module):
    stem: Conv2d
    groups: Group
    trunk: Conv2d
    grow_3: PixelShuffle
    rgb_3: Conv2d
    grow_2: PixelShuffle
    rgb_6: Conv2d

    def __call__(self, image):
        mean = torch.tensor(RGB_MEAN)[:, None, None]
        shallow = self.stem(image - mean)
        deep = scan(lambda carry, group: group(carry), shallow, self.groups)
        features = shallow + self.trunk(deep)
        features_3 = self.grow_3(features)
        features_6 = self.grow_2(features_3)
        return self.rgb_3(features_3) + mean, self.rgb_6(features_6) + mean


# ----------------------------------------------------------------- trainable arrays


class Arrays(nn.Module):
    """The arrays of a module, named as its fields are."""

    def __init__(self, tree):
        super().__init__()
        for field in fields(tree):
            part = getattr(tree, field.name)
            if isinstance(part, Module):
                self.add_module(field.name, Arrays(part))
            else:
                leaf = nn.Parameter(part.detach().clone().contiguous())
                self.register_parameter(field.name, leaf)


def combine(kind, arrays):
    """A module of this kind that has the arrays."""
    parts = {field.name: getattr(arrays, field.name) for field in fields(kind)}
    for field in fields(kind):
        if is_dataclass(field.type):
            parts[field.name] = combine(field.type, parts[field.name])
    return kind(**parts)


def load_conv(state, name):
    """The bias is ready to be added to [c, h, w]."""
    weight, bias = state[name + ".weight"], state[name + ".bias"]
    return Conv2d(weight, bias[:, None, None])


def load_linear(state, name):
    weight, bias = state[name + ".weight"], state[name + ".bias"]
    return Linear(weight[:, :, 0, 0], bias)


def load_shuffle(state, name, r):
    """(c r1 r2) i y x -> c r1 r2 i y x"""
    weight = state[name + ".conv.weight"].unflatten(0, (-1, r, r))
    bias = state[name + ".conv.bias"].reshape(-1, r, r, 1, 1)
    slope = state[name + ".act.weight"]
    return PixelShuffle(Conv2d(weight, bias), slope[:, None, None])


def load_block(state, name):
    return Block(
        conv_in=load_conv(state, name + ".conv1"),
        conv_out=load_conv(state, name + ".conv2"),
        gate=ChannelGate(
            squeeze=load_linear(state, name + ".ca.conv_du.0"),
            excite=load_linear(state, name + ".ca.conv_du.2"),
        ),
    )


def tree_stack(trees):
    """One module of several, with an axis in front of each array."""
    first = trees[0]
    if not isinstance(first, Module):
        return torch.stack(trees)
    names = [field.name for field in fields(first)]
    return replace(
        first, **{n: tree_stack([getattr(t, n) for t in trees]) for n in names}
    )


def load_group(state, name, num_blocks=3):
    blocks = [load_block(state, f"{name}.body.{i}") for i in range(num_blocks)]
    return Group(tree_stack(blocks), load_conv(state, name + ".conv"))


def load_network(state, num_groups=2):
    groups = [load_group(state, f"body.{i}") for i in range(num_groups)]
    return RCAN(
        stem=load_conv(state, "head"),
        groups=tree_stack(groups),
        trunk=load_conv(state, "body_conv"),
        grow_3=load_shuffle(state, "up1", 3),
        rgb_3=load_conv(state, "tail1"),
        grow_2=load_shuffle(state, "up2", 2),
        rgb_6=load_conv(state, "tail2"),
    )


def model():
    return Arrays(load_network(torch.load(Path(__file__).with_name("weights.pt"))))


# ---------------------------------------------------------------------------- task


def to_float(pixels):
    return pixels.to(torch.float32) / 255.0


def forward(net, batch):
    network = combine(RCAN, net)
    x3, x6 = vmap(network)(to_float(batch["low"]))
    return {"x3": x3, "x6": x6}


def charbonnier(squared_error, eps=1e-3):
    return torch.sqrt(squared_error + eps**2)


def reduce_cells(x, r):
    """c (h r1) (w r2) -> c h w"""
    c, height, width = x.shape
    return x.reshape(c, height // r, r, width // r, r).mean(dim=(2, 4))


def shrink(x, known, r):
    """Means over the known pixels of cells of r x r."""
    total = reduce_cells(x * known, r)
    share = reduce_cells(known, r)
    return torch.where(share > 0, total / torch.where(share > 0, share, 1.0), 0.0)


def pad_around(x, mode):
    """Rows and columns around [c, h, w]: as in a mirror, or ones."""
    if mode == "ones":
        return F.pad(x, (1, 1, 1, 1), value=1.0)
    x = torch.cat([x[:, 1:2], x, x[:, -2:-1]], dim=1)
    return torch.cat([x[:, :, 1:2], x, x[:, :, -2:-1]], dim=2)


def sobel(x):
    """Both derivatives of [c, h, w] as sums of shifted pictures."""
    x = pad_around(x, "reflect")
    rows = x[:, :-2] + 2.0 * x[:, 1:-1] + x[:, 2:]
    columns = x[:, :, :-2] + 2.0 * x[:, :, 1:-1] + x[:, :, 2:]
    dx = rows[:, :, 2:] - rows[:, :, :-2]
    dy = columns[:, 2:] - columns[:, :-2]
    return dy, dx


def erode(known):
    """One where a pixel and all around it are known."""
    x = pad_around(known, "ones")
    x = x[:, :-2] * x[:, 1:-1] * x[:, 2:]
    return x[:, :, :-2] * x[:, :, 1:-1] * x[:, :, 2:]


def masked_sums(values, weight):
    """Sum of the values, and of the weights for all of their channels."""
    return torch.sum(values * weight), torch.sum(weight) * values.shape[0]


def edge_terms(x6, high, known):
    dy, dx = sobel(x6 - high)
    values = charbonnier(dy**2 + dx**2)
    return masked_sums(values, erode(known))


def picture_terms(x3, x6, high, known):
    """Sums and weights of one picture: full, middle and small size, and edges."""
    target_3, weight_3 = shrink(high, known, 2), reduce_cells(known, 2)
    target_1, weight_1 = shrink(high, known, 6), reduce_cells(known, 6)
    x1 = shrink(x6, known, 6)
    return (
        masked_sums(charbonnier((x6 - high) ** 2), known),
        masked_sums(charbonnier((x3 - target_3) ** 2), weight_3),
        masked_sums(charbonnier((x1 - target_1) ** 2), weight_1),
        edge_terms(x6, high, known),
    )


TERM_WEIGHTS = (1.0, 0.5, 0.25, 0.05)


def loss(output, batch):
    high, known = to_float(batch["high"]), batch["known"][:, None].float()
    terms = vmap(picture_terms)(output["x3"], output["x6"], high, known)
    means = [torch.sum(sums) / torch.sum(counts) for sums, counts in terms]
    return sum(weight * mean for weight, mean in zip(TERM_WEIGHTS, means))


# ----------------------------------------------------------------------- optimizer


def clip(max_delta):
    def update(grads, state):
        return [torch.clamp(g, -max_delta, max_delta) for g in grads], state

    return lambda params: (), update


def scale_by_adam(b1=0.9, b2=0.999, eps=1e-8):
    def init(params):
        zeros = [torch.zeros_like(p) for p in params]
        return 0, zeros, zeros

    def update(grads, state):
        count, mu, nu = state
        count += 1
        mu = [b1 * m + (1 - b1) * g for m, g in zip(mu, grads)]
        nu = [b2 * v + (1 - b2) * g**2 for v, g in zip(nu, grads)]
        mu_hat = [m / (1 - b1**count) for m in mu]
        nu_hat = [v / (1 - b2**count) for v in nu]
        updates = [m / (torch.sqrt(v) + eps) for m, v in zip(mu_hat, nu_hat)]
        return updates, (count, mu, nu)

    return init, update


def scale_by_schedule(schedule):
    def update(updates, count):
        return [-schedule(count) * u for u in updates], count + 1

    return lambda params: 0, update


def piecewise_schedule(count):
    return 2e-3 * 0.5 ** (count // 3)


class Chain(torch.optim.Optimizer):
    """Transformations of gradients, one after the other."""

    def __init__(self, params, *transformations):
        super().__init__(params, {})
        self.arrays = self.param_groups[0]["params"]
        self.updates = [update for _, update in transformations]
        self.states = [init(self.arrays) for init, _ in transformations]

    @torch.no_grad()
    def step(self, closure=None):
        updates = [p.grad for p in self.arrays]
        for i, update in enumerate(self.updates):
            updates, self.states[i] = update(updates, self.states[i])
        for p, u in zip(self.arrays, updates):
            p.add_(u)


def optimizer(net):
    return Chain(
        list(net.parameters()),
        clip(0.02),
        scale_by_adam(),
        scale_by_schedule(piecewise_schedule),
    )
