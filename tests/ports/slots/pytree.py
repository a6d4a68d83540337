"""As in JAX: a tree of arrays, pure functions of it, pixels with channels last.

There is no transposed convolution: rows and columns of zeros are put between the pixels,
and kernels are turned when they are loaded. Each gate of the cell has matrices of its own.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn


class Config(NamedTuple):
    num_slots: int = 4
    slot_size: int = 10
    num_iterations: int = 3
    broadcast: tuple[int, int] = (4, 6)
    epsilon: float = 1e-8


CONFIG = Config()


# ------------------------------------------------------------------ primitives


def relu(x):
    return torch.where(x > 0, x, 0.0)


def softmax(x, axis):
    shifted = x - torch.amax(x, dim=axis, keepdim=True).detach()
    unnormalized = torch.exp(shifted)
    return unnormalized / torch.sum(unnormalized, dim=axis, keepdim=True)


def dense(params, x):
    y = torch.einsum("...i,io->...o", x, params["kernel"])
    return y + params["bias"] if "bias" in params else y


def layer_norm(params, x, epsilon=1e-5):
    mean = torch.mean(x, dim=-1, keepdim=True)
    mean_of_squares = torch.mean(torch.square(x), dim=-1, keepdim=True)
    var = mean_of_squares - torch.square(mean)
    mul = torch.rsqrt(var + epsilon) * params["scale"]
    return (x - mean) * mul + params["bias"]


def conv(params, x, strides=1):
    kernel = params["kernel"]
    pads = [(size // 2, size // 2) for size in kernel.shape[:2]]
    (top, bottom), (left, right) = pads
    x = nn.functional.pad(x, (0, 0, left, right, top, bottom))
    lhs, rhs = x.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1)
    y = nn.functional.conv2d(lhs, rhs, stride=strides)
    return y.permute(0, 2, 3, 1) + params["bias"]


def dilate(x):
    """A row of zeros after each row, a column of zeros after each column."""
    x = torch.stack([x, torch.zeros_like(x)], dim=2).flatten(1, 2)
    return torch.stack([x, torch.zeros_like(x)], dim=3).flatten(2, 3)


# ------------------------------------------------------------------ modules


def border_distances(height, width):
    """From the top, the bottom, the left, the right: (height, width, 4)."""
    down = torch.arange(height)[:, None].expand(height, width) / (height - 1)
    across = torch.arange(width)[None, :].expand(height, width) / (width - 1)
    return torch.stack([down, 1 - down, across, 1 - across], dim=-1)


def add_position(params, x):
    _, height, width, _ = x.shape
    grid = border_distances(height, width).to(x)
    return x + dense(params, grid)


def mlp(params, x):
    return dense(params["out"], relu(dense(params["hidden"], x)))


def encode(params, image):
    x = relu(conv(params["conv_0"], image))
    x = relu(conv(params["conv_1"], x, strides=2))
    x = relu(conv(params["conv_2"], x))
    x = add_position(params["position"], x)
    x = x.flatten(1, 2)
    x = layer_norm(params["norm"], x)
    return mlp(params["mlp"], x)


def gru(params, carry, x):
    r = torch.sigmoid(dense(params["i_r"], x) + dense(params["h_r"], carry))
    z = torch.sigmoid(dense(params["i_z"], x) + dense(params["h_z"], carry))
    n = torch.tanh(dense(params["i_n"], x) + r * dense(params["h_n"], carry))
    return (1.0 - z) * n + z * carry


def scan(body, carry, length):
    for _ in range(length):
        carry = body(carry)
    return carry


def slot_attention(params, inputs, noise, config=CONFIG):
    inputs = layer_norm(params["norm_inputs"], inputs)
    keys_values = torch.einsum("bni,isd->sbnd", inputs, params["kv"]["kernel"])
    keys, values = keys_values[0], keys_values[1]

    def body(carry):
        normed = layer_norm(params["norm_slots"], carry)
        queries = dense(params["q"], normed) / config.slot_size**0.5
        logits = torch.einsum("bnd,bkd->bnk", keys, queries)
        attention = softmax(logits, axis=-1) + config.epsilon
        total = torch.sum(attention, dim=1, keepdim=True)
        attention = attention / total
        updates = torch.einsum("bnk,bnd->bkd", attention, values)
        slots = gru(params["gru"], carry, updates)
        return slots + mlp(params["mlp"], layer_norm(params["norm_mlp"], slots))

    sigma = torch.exp(params["log_sigma"])
    start = params["mu"] + sigma * noise
    start = torch.tile(start, (inputs.shape[0], 1, 1))
    return scan(body, start, config.num_iterations)


def decode(params, slot, config=CONFIG):
    """What one slot paints: (batch, slot size) -> (batch, height, width, rgb and alpha)."""
    x = torch.tile(slot[:, None, None, :], (1, *config.broadcast, 1))
    x = add_position(params["position"], x)
    x = relu(conv(params["deconv_0"], dilate(x)))
    x = relu(conv(params["deconv_1"], dilate(x)))
    return conv(params["deconv_2"], x)


def autoencode(params, image, noise, config=CONFIG):
    slots = slot_attention(
        params["slot_attention"], encode(params["encoder"], image), noise
    )
    painted = torch.stack(
        [decode(params["decoder"], slots[:, i]) for i in range(config.num_slots)]
    )
    colour, alpha = painted[..., :3], painted[..., 3]
    masks = softmax(alpha, axis=0)
    recon = torch.einsum("kbhwc,kbhw->bhwc", colour, masks)
    return recon, masks, slots


# ------------------------------------------------------------------ parameters


class Tree(nn.Module):
    """Nested dicts of arrays."""

    def __init__(self, leaves):
        super().__init__()
        for name, value in leaves.items():
            if isinstance(value, dict):
                self.add_module(name, Tree(value))
            else:
                self.register_parameter(name, nn.Parameter(value.clone().contiguous()))

    def __getitem__(self, name):
        return getattr(self, name)

    def __contains__(self, name):
        return hasattr(self, name)


class Model(Tree):
    def __init__(self, params, noise):
        super().__init__(params)
        self.register_buffer("noise", noise.clone())

    def forward(self, image):
        return autoencode(self, image, self.noise)


class Checkpoint:
    def __init__(self, arrays):
        self.arrays = arrays

    def dense(self, name):
        return {
            "kernel": self.arrays[name + ".weight"].T,
            "bias": self.arrays[name + ".bias"],
        }

    def norm(self, name):
        return {
            "scale": self.arrays[name + ".weight"],
            "bias": self.arrays[name + ".bias"],
        }

    def conv(self, name):
        kernel = self.arrays[name + ".weight"].permute(2, 3, 1, 0)
        return {"kernel": kernel, "bias": self.arrays[name + ".bias"]}

    def deconv(self, name):
        # (in, out, height, width), for the other direction
        kernel = self.arrays[name + ".weight"].permute(2, 3, 0, 1).flip(0, 1)
        return {"kernel": kernel, "bias": self.arrays[name + ".bias"]}

    def position(self, name):
        from_top, from_left, from_bottom, from_right = self.arrays[name + ".weight"].T
        kernel = torch.stack([from_top, from_bottom, from_left, from_right])
        return {"kernel": kernel, "bias": self.arrays[name + ".bias"]}

    def mlp(self, name):
        return {"hidden": self.dense(name + ".0"), "out": self.dense(name + ".2")}

    def gru(self, name):
        gates = {}
        for side, suffix in (("i", "ih"), ("h", "hh")):
            kernels = self.arrays[f"{name}.weight_{suffix}"].chunk(3)
            biases = self.arrays[f"{name}.bias_{suffix}"].chunk(3)
            for gate, kernel, bias in zip("rzn", kernels, biases, strict=True):
                gates[f"{side}_{gate}"] = {"kernel": kernel.T, "bias": bias}
        return gates

    def slot_attention(self, name):
        key = self.arrays[name + ".project_k.weight"].T
        value = self.arrays[name + ".project_v.weight"].T
        return {
            "mu": self.arrays[name + ".slots_mu"],
            "log_sigma": self.arrays[name + ".slots_log_sigma"],
            "norm_inputs": self.norm(name + ".norm_inputs"),
            "norm_slots": self.norm(name + ".norm_slots"),
            "norm_mlp": self.norm(name + ".norm_mlp"),
            "q": {"kernel": self.arrays[name + ".project_q.weight"].T},
            "kv": {"kernel": torch.stack([key, value], dim=1)},
            "gru": self.gru(name + ".gru"),
            "mlp": self.mlp(name + ".mlp"),
        }

    def params(self):
        convs = {f"conv_{i}": self.conv(f"encoder_cnn.{2 * i}") for i in range(3)}
        deconvs = {f"deconv_{i}": self.deconv(f"decoder_cnn.{2 * i}") for i in range(3)}
        return {
            "encoder": {
                **convs,
                "position": self.position("encoder_pos.dense"),
                "norm": self.norm("layer_norm"),
                "mlp": self.mlp("mlp"),
            },
            "slot_attention": self.slot_attention("slot_attention"),
            "decoder": {"position": self.position("decoder_pos.dense"), **deconvs},
        }


# ------------------------------------------------------------------ training


def model():
    arrays = torch.load(Path(__file__).with_name("weights.pt"))
    return Model(Checkpoint(arrays).params(), arrays["slot_attention.noise"])


def preprocess(batch):
    image = torch.permute(batch["image"], (0, 2, 3, 1))
    return image / 127.5 - 1.0


def forward(net, batch):
    recon, masks, slots = net(preprocess(batch))
    return {
        "recon": torch.permute(recon, (0, 3, 1, 2)),
        "masks": torch.permute(masks, (1, 0, 2, 3)),
        "slots": slots,
    }


def loss(output, batch):
    recon = torch.permute(output["recon"], (0, 2, 3, 1))
    return torch.mean(torch.square(recon - preprocess(batch)))


class Chain(torch.optim.Optimizer):
    """Decay is added to the gradient, then moments are taken."""

    def __init__(self, net, rate, decay, b1, b2, eps):
        super().__init__(net.parameters(), {"rate": rate, "decay": decay})
        self.b1, self.b2, self.eps = b1, b2, eps

    def moments(self, leaf, update):
        state = self.state[leaf]
        if not state:
            state["count"] = 0
            state["mu"], state["nu"] = torch.zeros_like(leaf), torch.zeros_like(leaf)
        state["count"] += 1
        state["mu"] = self.b1 * state["mu"] + (1 - self.b1) * update
        state["nu"] = self.b2 * state["nu"] + (1 - self.b2) * torch.square(update)
        mu_hat = state["mu"] / (1 - self.b1 ** state["count"])
        nu_hat = state["nu"] / (1 - self.b2 ** state["count"])
        return mu_hat / (torch.sqrt(nu_hat) + self.eps)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for leaf in group["params"]:
                update = leaf.grad + group["decay"] * leaf
                update = self.moments(leaf, update)
                leaf.add_(update, alpha=-group["rate"])


def optimizer(net):
    return Chain(net, rate=2e-3, decay=1e-2, b1=0.9, b2=0.98, eps=1e-6)
