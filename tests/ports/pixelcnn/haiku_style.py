"""After Haiku: parameters in two levels of dictionaries, pure functions, NHWC and HWIO.

One projection of the label biases all gates of a block: those of the stack of rows above
come first, then those of the stack of the own row.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn


class Config(NamedTuple):
    channels: int = 2
    levels: int = 8
    features: int = 24
    kernel_sizes: tuple = (5, 3, 3)
    init_value: float = 4e-3
    transition_steps: int = 3
    decay_rate: float = 0.5


CFG = Config()


# ---- masks, in the layout of the kernels


def owner(features, tiles=1):
    """Which image channel owns a feature."""
    each = np.repeat(np.arange(CFG.channels), features // CFG.channels)
    return np.tile(each, tiles)


def present_mask(kind, inputs, outputs):
    """[in, out] for the pixel itself."""
    order = np.less if kind == "a" else np.less_equal
    return order(inputs[:, None], outputs[None, :])


def row_mask(kind, size, inputs, outputs):
    """[1, size, in, out]"""
    present = present_mask(kind, inputs, outputs)
    past = [np.ones_like(present)] * (size // 2)
    future = [np.zeros_like(present)] * (size // 2)
    mask = np.stack([*past, present, *future])
    return torch.from_numpy(mask[None].astype(np.float32))


def above_mask(size):
    """[size, 1, 1, 1]"""
    seen = np.arange(size) <= size // 2
    return torch.from_numpy(seen.astype(np.float32).reshape(size, 1, 1, 1))


# ---- functions of parameters and inputs


def conv2d(w, x):
    """With SAME padding, from patches."""
    height, width = w.shape[0], w.shape[1]
    x = nn.functional.pad(x, (0, 0, width // 2, width // 2, height // 2, height // 2))
    patches = x.unfold(1, height, 1).unfold(2, width, 1)
    return torch.einsum("nyxchw,hwcd->nyxd", patches, w)


def pointwise(p, x, mask=None):
    w = p["w"] if mask is None else p["w"] * mask
    return torch.einsum("nyxc,cd->nyxd", x, w) + p["b"]


def pointwise_b(p, x):
    """A 1x1 convolution of kind b."""
    mask = present_mask("b", owner(p["w"].shape[0]), owner(p["w"].shape[1]))
    return pointwise(p, x, torch.from_numpy(mask))


def sigmoid(x):
    return 0.5 * (torch.tanh(0.5 * x) + 1.0)


def gated_activation(x, bias):
    x = x + bias[:, None, None, :]
    signal, gate = torch.split(x, CFG.features, dim=-1)
    return torch.tanh(signal) * sigmoid(gate)


def shift_down(x):
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)


def gated_block(params, scope, kind, above, row, context):
    """Returns both stacks and what goes to the head; the last block ends the row."""
    biases = context @ params[f"{scope}/label_to_gates"]["w"]
    above_bias, row_bias = torch.split(biases, 2 * CFG.features, dim=-1)

    p = params[f"{scope}/above_conv"]
    above = conv2d(p["w"] * above_mask(p["w"].shape[0]), above) + p["b"]
    above = gated_activation(above, above_bias)

    w = params[f"{scope}/row_conv"]["w"]
    mask = row_mask(kind, w.shape[1], owner(w.shape[2]), owner(CFG.features, 2))
    x = conv2d(w * mask, row)
    x = x + pointwise(params[f"{scope}/above_to_row"], shift_down(above))
    x = gated_activation(x, row_bias)

    skip = pointwise_b(params[f"{scope}/skip"], x)
    if f"{scope}/residual" not in params:
        return above, None, skip
    residual = pointwise_b(params[f"{scope}/residual"], x)
    row = residual if kind == "a" else row + residual
    return above, row, skip


def pixel_cnn(params, image, label):
    """Returns logits [batch, height, width, channels, levels]."""
    x = image.permute(0, 2, 3, 1).to(torch.float32)
    x = x * (2.0 / (CFG.levels - 1)) - 1.0
    context = params["pixel_cnn/~/embed"]["embeddings"][label]
    above, row, collected = x, x, []
    for i in range(len(CFG.kernel_sizes)):
        scope, kind = f"pixel_cnn/~/block_{i}", "a" if i == 0 else "b"
        above, row, skip = gated_block(params, scope, kind, above, row, context)
        collected.append(skip)
    x = torch.stack(collected).sum(0)
    x = torch.relu(x)
    x = pointwise_b(params["pixel_cnn/~/head/hidden"], x)
    x = torch.relu(x)
    x = pointwise_b(params["pixel_cnn/~/head/logits"], x)
    return x.reshape(*x.shape[:3], CFG.channels, CFG.levels)


class Transformed(nn.Module):
    """Holds the parameters of a pure function."""

    def __init__(self, params):
        super().__init__()
        self.index = []
        for scope, bundle in params.items():
            for name, value in bundle.items():
                value = nn.Parameter(value.clone().contiguous())
                self.register_parameter(f"{scope}/{name}", value)
                self.index.append((scope, name))

    def params(self):
        tree = {}
        for scope, name in self.index:
            value = getattr(self, f"{scope}/{name}")
            tree.setdefault(scope, {})[name] = value
        return tree

    def forward(self, image, label):
        return pixel_cnn(self.params(), image, label)


# ---- checkpoint


def hwio(weight):
    return weight.permute(2, 3, 1, 0)


def matrix(weight):
    """[out, in] or [out, in, 1, 1] -> [in, out]"""
    return weight.flatten(1).T


def convert(state):
    params = {"pixel_cnn/~/embed": {"embeddings": state["label_embed.weight"]}}
    for i in range(len(CFG.kernel_sizes)):
        old, new = f"blocks.{i}", f"pixel_cnn/~/block_{i}"
        labels = [state[f"{old}.v_label.weight"], state[f"{old}.h_label.weight"]]
        params[f"{new}/label_to_gates"] = {"w": matrix(torch.cat(labels))}
        params[f"{new}/above_conv"] = {
            "w": hwio(state[f"{old}.v_conv.weight"]),
            "b": state[f"{old}.v_conv.bias"],
        }
        params[f"{new}/row_conv"] = {"w": hwio(state[f"{old}.h_conv.weight"])}
        params[f"{new}/above_to_row"] = {
            "w": matrix(state[f"{old}.v_to_h.weight"]),
            "b": state[f"{old}.v_to_h.bias"],
        }
        if i + 1 < len(CFG.kernel_sizes):
            params[f"{new}/residual"] = {
                "w": matrix(state[f"{old}.h_out.weight"]),
                "b": state[f"{old}.h_out.bias"],
            }
        params[f"{new}/skip"] = {
            "w": matrix(state[f"{old}.h_skip.weight"]),
            "b": state[f"{old}.h_skip.bias"],
        }
    for old, new in (("head1", "hidden"), ("head2", "logits")):
        params[f"pixel_cnn/~/head/{new}"] = {
            "w": matrix(state[f"{old}.weight"]),
            "b": state[f"{old}.bias"],
        }
    return params


def model():
    return Transformed(convert(torch.load(Path(__file__).with_name("weights.pt"))))


# ---- training


def forward(net, batch):
    return net(batch["image"], batch["label"])


def loss(output, batch):
    target = batch["image"].permute(0, 2, 3, 1).long()
    hot = nn.functional.one_hot(target, CFG.levels).to(output.dtype)
    nats = -torch.sum(hot * torch.log_softmax(output, dim=-1), dim=-1)
    bits = nats / np.log(2.0)
    per_image = torch.sum(bits, dim=(1, 2, 3)) / target[0].numel()
    return torch.mean(per_image)


def exponential_decay(count):
    return CFG.init_value * CFG.decay_rate ** (count / CFG.transition_steps)


def adam_update(g, mu, nu, count, b1=0.95, b2=0.9995, eps=1e-4):
    mu = b1 * mu + (1.0 - b1) * g
    nu = b2 * nu + (1.0 - b2) * torch.square(g)
    mu_hat = mu / (1.0 - b1**count)
    nu_hat = nu / (1.0 - b2**count)
    return mu_hat / (torch.sqrt(nu_hat) + eps), mu, nu


class Optax(torch.optim.Optimizer):
    """Moments in a state that is replaced at each step."""

    def __init__(self, net):
        self.net = net
        super().__init__(net.parameters(), {})
        zeros = {k: torch.zeros_like(p) for k, p in net.named_parameters()}
        self.opt_state = {"count": 0, "mu": zeros, "nu": dict(zeros)}

    @torch.no_grad()
    def step(self, closure=None):
        count, mu, nu = self.opt_state.values()
        new_mu, new_nu = {}, {}
        step_size = exponential_decay(count)
        for key, p in self.net.named_parameters():
            update, new_mu[key], new_nu[key] = adam_update(
                p.grad, mu[key], nu[key], count + 1
            )
            p.sub_(step_size * update)
        self.opt_state = {"count": count + 1, "mu": new_mu, "nu": new_nu}


def optimizer(net):
    return Optax(net)
