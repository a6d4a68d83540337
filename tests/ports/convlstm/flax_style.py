"""After JAX and Flax: nested dicts of arrays, pure functions, a scan over time.

Time comes first, pixels are NHWC, kernels HWIO, the carry is (c, h), gates are i, g, f, o
and one is added to the forget gate. What happens in a cell has a gradient by hand.
"""

import math
from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch
from torch import nn

GATES = "igfo"
CONFIG = {
    "context": 5,
    "horizon": 4,
    "near": (14, 12, 16),
    "far": (7, 6, 24),
    "slope": 0.2,
    "l1": 0.5,
}
NODATA, BYTES = 255, 250.0


# ---------------------------------------------------------------- lax


def conv_general_dilated(lhs, rhs, stride, padding, lhs_dilation=1):
    """NHWC, HWIO -> NHWC: windows times kernel."""
    if lhs_dilation > 1:
        n, h, w, c = lhs.shape
        shape = (n, (h - 1) * lhs_dilation + 1, (w - 1) * lhs_dilation + 1, c)
        wide = lhs.new_zeros(shape)
        wide[:, ::lhs_dilation, ::lhs_dilation] = lhs
        lhs = wide
    lhs = nn.functional.pad(lhs, (0, 0, padding, padding, padding, padding))
    windows = lhs.unfold(1, rhs.shape[0], stride).unfold(2, rhs.shape[1], stride)
    return torch.einsum("nhwiyx,yxio->nhwo", windows, rhs)


def scan(f, init, xs, length=None):
    """xs is an array with time first, or None."""
    carry, ys = init, []
    for t in range(len(xs) if length is None else length):
        carry, y = f(carry, None if xs is None else xs[t])
        ys.append(y)
    return carry, ys


# ---------------------------------------------------------------- custom_vjp


class Gating(torch.autograd.Function):
    """Gates and cell -> new cell and output; the peepholes are i, f, o."""

    @staticmethod
    def forward(ctx, gates, c, peep_i, peep_f, peep_o):
        i, g, f, o = gates.chunk(4, dim=-1)
        i = torch.sigmoid(i + peep_i * c)
        g = torch.tanh(g)
        f = torch.sigmoid(f + peep_f * c + 1.0)
        new_c = f * c + i * g
        o = torch.sigmoid(o + peep_o * new_c)
        squashed = torch.tanh(new_c)
        ctx.save_for_backward(i, g, f, o, c, new_c, squashed, peep_i, peep_f, peep_o)
        return new_c, o * squashed

    @staticmethod
    def backward(ctx, d_new_c, d_h):
        i, g, f, o, c, new_c, squashed, peep_i, peep_f, peep_o = ctx.saved_tensors
        d_o = d_h * squashed * o * (1.0 - o)
        d_new_c = d_new_c + d_h * o * (1.0 - squashed * squashed)
        d_new_c = d_new_c + d_o * peep_o
        d_i = d_new_c * g * i * (1.0 - i)
        d_g = d_new_c * i * (1.0 - g * g)
        d_f = d_new_c * c * f * (1.0 - f)
        d_c = d_new_c * f + d_i * peep_i + d_f * peep_f
        d_gates = torch.cat([d_i, d_g, d_f, d_o], dim=-1)
        d_peep_i = torch.sum(d_i * c, dim=0)
        d_peep_f = torch.sum(d_f * c, dim=0)
        d_peep_o = torch.sum(d_o * new_c, dim=0)
        return d_gates, d_c, d_peep_i, d_peep_f, d_peep_o


# ---------------------------------------------------------------- layers


def conv(params, x, stride=1, padding=1):
    y = conv_general_dilated(x, params["kernel"], stride, padding)
    return y + params["bias"]


def conv_transpose(params, x):
    """The gradient of a convolution of 4 by 4, a stride of 2 and a padding of 1."""
    y = conv_general_dilated(x, params["kernel"], 1, 2, lhs_dilation=2)
    return y + params["bias"]


def group_norm(params, x, num_groups, epsilon=1e-5):
    grouped = x.unflatten(-1, (num_groups, -1))
    axes = (1, 2, 4)
    mean = grouped.mean(axes, keepdim=True)
    var = (grouped * grouped).mean(axes, keepdim=True) - mean * mean
    mul = torch.rsqrt(var + epsilon)
    y = ((grouped - mean) * mul).flatten(-2)
    return y * params["scale"] + params["bias"]


def leaky_relu(x):
    return torch.where(x >= 0, x, CONFIG["slope"] * x)


def down(params, x, num_groups):
    x = conv(params["conv"], x, stride=2)
    return leaky_relu(group_norm(params["norm"], x, num_groups))


def up(params, x, num_groups):
    x = conv_transpose(params["conv"], x)
    return leaky_relu(group_norm(params["norm"], x, num_groups))


def fused(params):
    """Kernels of the gates, one behind the other, and the peepholes."""
    cell = {
        "hidden": torch.cat([params[f"h{k}"]["kernel"] for k in GATES], dim=-1),
        "bias": torch.cat([params[f"h{k}"]["bias"] for k in GATES], dim=-1),
        "peepholes": [params["peephole"][k] for k in "ifo"],
    }
    if "ii" in params:
        cell["input"] = torch.cat([params[f"i{k}"]["kernel"] for k in GATES], dim=-1)
    return cell


def conv_lstm(cell, carry, x):
    c, h = carry
    gates = conv_general_dilated(h, cell["hidden"], 1, 1) + cell["bias"]
    if x is not None:
        gates = gates + conv_general_dilated(x, cell["input"], 1, 1)
    return Gating.apply(gates, c, *cell["peepholes"])


# ---------------------------------------------------------------- model


def init_carry(batch, shape):
    return torch.zeros(batch, *shape), torch.zeros(batch, *shape)


def encode(params, maps):
    near, far = fused(params["near"]), fused(params["far"])

    def body(carry, x):
        near_carry, far_carry = carry
        near_carry = conv_lstm(near, near_carry, down(params["down_near"], x, 2))
        _, h = near_carry
        far_carry = conv_lstm(far, far_carry, down(params["down_far"], h, 4))
        return (near_carry, far_carry), None

    batch = maps.shape[1]
    init = init_carry(batch, CONFIG["near"]), init_carry(batch, CONFIG["far"])
    carry, _ = scan(body, init, maps)
    return carry


def decode(params, down_near, carry, last):
    near, far = fused(params["near"]), fused(params["far"])

    def body(carry, _):
        near_carry, far_carry, last = carry
        far_carry = conv_lstm(far, far_carry, None)
        context = up(params["up_far"], far_carry[1], 3)
        x = torch.cat([context, down(down_near, last, 2)], dim=-1)
        near_carry = conv_lstm(near, near_carry, x)
        x = up(params["up_near"], near_carry[1], 2)
        y = torch.sigmoid(conv(params["head"], x, padding=0))
        last = torch.cat([y, torch.ones_like(y)], dim=-1)
        return (near_carry, far_carry, last), y

    _, ys = scan(body, (*carry, last), None, length=CONFIG["horizon"])
    return torch.stack(ys)


def apply(params, maps):
    """[time, batch, rows, columns, 2] -> [horizon, batch, rows, columns, 1]"""
    carry = encode(params["encoder"], maps)
    down_near = params["encoder"]["down_near"]
    return decode(params["forecaster"], down_near, carry, maps[-1])


# ---------------------------------------------------------------- weights


def from_torch(state):
    def conv_params(name):
        kernel = state[f"{name}.weight"].permute(2, 3, 1, 0)
        return {"kernel": kernel, "bias": state[f"{name}.bias"]}

    def transposed_params(name):
        """Turned by half a circle, as the input is dilated here."""
        kernel = state[f"{name}.weight"].permute(2, 3, 0, 1)
        return {"kernel": kernel.flip(0, 1), "bias": state[f"{name}.bias"]}

    def norm_params(name):
        return {"scale": state[f"{name}.weight"], "bias": state[f"{name}.bias"]}

    def block_params(name, convert):
        return {"conv": convert(f"{name}.0"), "norm": norm_params(f"{name}.1")}

    def cell_params(name):
        params = {}
        packed = conv_params(f"{name}.conv")
        kernels = packed["kernel"].chunk(4, dim=-1)
        biases = packed["bias"].chunk(4)
        features = len(biases[0])
        for gate, kernel, bias in zip("ifog", kernels, biases):
            if gate == "f":
                bias = bias - 1.0
            x, h = kernel[:, :, :-features], kernel[:, :, -features:]
            if x.shape[2] > 0:
                params[f"i{gate}"] = {"kernel": x}
            params[f"h{gate}"] = {"kernel": h, "bias": bias}
        params["peephole"] = {
            k: state[f"{name}.w_c{k}"].permute(1, 2, 0) for k in "ifo"
        }
        return params

    return {
        "encoder": {
            "down_near": block_params("down1", conv_params),
            "near": cell_params("enc1"),
            "down_far": block_params("down2", conv_params),
            "far": cell_params("enc2"),
        },
        "forecaster": {
            "far": cell_params("dec2"),
            "up_far": block_params("up2", transposed_params),
            "near": cell_params("dec1"),
            "up_near": block_params("up1", transposed_params),
            "head": conv_params("head"),
        },
    }


class Tree(nn.Module):
    """A nested dict whose leaves are parameters."""

    def __init__(self, nested):
        super().__init__()
        self.keys = list(nested)
        for key, value in nested.items():
            if isinstance(value, dict):
                self.add_module(key, Tree(value))
            else:
                leaf = nn.Parameter(value.clone().contiguous())
                self.register_parameter(key, leaf)

    def unwrapped(self):
        tree = {key: getattr(self, key) for key in self.keys}
        return {
            key: value.unwrapped() if isinstance(value, Tree) else value
            for key, value in tree.items()
        }


class TrainState(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.params = Tree(params)

    def forward(self, maps):
        return apply(self.params.unwrapped(), maps)


def model():
    return TrainState(from_torch(torch.load(Path(__file__).with_name("weights.pt"))))


# ---------------------------------------------------------------- data and loss


def decode_frames(frames):
    """[batch, time, rows, columns] bytes -> [time, batch, rows, columns, 1], twice."""
    frames = frames.transpose(0, 1).unsqueeze(-1)
    valid = frames < NODATA
    return torch.where(valid, frames / BYTES, 0.0), valid


def forward(net, batch):
    values, valid = decode_frames(batch["frames"][:, : CONFIG["context"]])
    maps = torch.cat([values, valid.to(values.dtype)], dim=-1)
    return net(maps)[..., 0].transpose(0, 1)


def byte_of(rain):
    """Where a rate of rain lies among the bytes."""
    decibels = 10.0 * (math.log10(58.53) + 1.56 * math.log10(rain))
    return BYTES * (decibels + 10.0) / 70.0


def balance(frames):
    """Weights of 1, 2, 5, 10 and 30 from 0, 2, 5, 10 and 30 mm/h on."""
    levels = torch.tensor([1.0, 2.0, 5.0, 10.0, 30.0])
    edges = torch.tensor([byte_of(rain) for rain in (2.0, 5.0, 10.0, 30.0)])
    return levels[torch.bucketize(frames.float(), edges, right=True)]


def loss(output, batch):
    frames = batch["frames"][:, CONFIG["context"] :]
    valid = frames < NODATA
    labels = (frames / BYTES)[valid]
    predictions = output[valid]
    weights = balance(frames[valid])
    l2 = torch.square(predictions - labels)
    l1 = torch.abs(predictions - labels)
    return torch.mean(weights * (l2 + CONFIG["l1"] * l1))


# ---------------------------------------------------------------- optax


class GradientTransformation(NamedTuple):
    init: Callable[[Any], Any]
    update: Callable[[Any, Any], Any]


def clip(max_delta):
    def update(updates, state):
        return [g.clamp(-max_delta, max_delta) for g in updates], state

    return GradientTransformation(lambda params: None, update)


def scale_by_adam(b1, b2, eps):
    def init(params):
        mu = [torch.zeros_like(p) for p in params]
        nu = [torch.zeros_like(p) for p in params]
        return 0, mu, nu

    def update(updates, state):
        count, mu, nu = state
        count = count + 1
        mu = [b1 * m + (1.0 - b1) * g for m, g in zip(mu, updates)]
        nu = [b2 * v + (1.0 - b2) * g * g for v, g in zip(nu, updates)]
        mu_hat = [m / (1.0 - b1**count) for m in mu]
        nu_hat = [v / (1.0 - b2**count) for v in nu]
        updates = [m / (torch.sqrt(v) + eps) for m, v in zip(mu_hat, nu_hat)]
        return updates, (count, mu, nu)

    return GradientTransformation(init, update)


def scale_by_schedule(schedule):
    def update(updates, count):
        factor = -schedule(count)
        return [factor * u for u in updates], count + 1

    return GradientTransformation(lambda params: 0, update)


def cosine_schedule(peak, end, steps):
    def schedule(count):
        share = min(count, steps) / steps
        return end + 0.5 * (peak - end) * (1.0 + math.cos(math.pi * share))

    return schedule


def chain(*transforms):
    def init(params):
        return [t.init(params) for t in transforms]

    def update(updates, states):
        new_states = []
        for transform, state in zip(transforms, states):
            updates, state = transform.update(updates, state)
            new_states.append(state)
        return updates, new_states

    return GradientTransformation(init, update)


class Optax(torch.optim.Optimizer):
    def __init__(self, params, tx):
        super().__init__(params, {})
        self.tx = tx
        self.opt_state = tx.init(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        grads = [p.grad for p in params]
        updates, self.opt_state = self.tx.update(grads, self.opt_state)
        for p, u in zip(params, updates):
            p.add_(u)


def optimizer(net):
    tx = chain(
        clip(0.02),
        scale_by_adam(b1=0.9, b2=0.995, eps=1e-5),
        scale_by_schedule(cosine_schedule(1e-2, 5e-4, steps=10)),
    )
    return Optax(net.parameters(), tx)
