"""As one writes it in JAX: pure functions, dicts of arrays, NHWC and HWIO.

Kernels of 1 x 1 that read the same map are one kernel. Batch statistics go in and come
out as a second dict. The optimizer is a chain of small transformations.
"""

import operator
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

#: Widths of the branches that start with a kernel of 1 x 1: itself, 3 x 3, the long one.
MIXED = {"mixed_3a": (10, 8, 6), "mixed_3b": (12, 10, 6), "mixed_4a": (14, 12, 8)}
CROP = (32, 40)
NUM_CLASSES = 9
PIXEL_MEAN = (0.485, 0.456, 0.406)
PIXEL_STD = 0.226


# ---------------------------------------------------------------- primitives


def pads_of_same(size, window, stride):
    """Zeros before and after, as "SAME" has it."""
    out = -(-size // stride)
    total = max((out - 1) * stride + window - size, 0)
    return total // 2, total - total // 2


def padded(x, window, strides, padding, value=0.0):
    """``padding`` is SAME, VALID, or pairs for height and width."""
    if padding == "VALID":
        return x
    if padding == "SAME":
        padding = [
            pads_of_same(n, w, s) for n, w, s in zip(x.shape[1:3], window, strides)
        ]
    (above, below), (left, right) = padding
    return F.pad(x, (0, 0, left, right, above, below), value=value)


def conv(kernel, x, strides=(1, 1), padding="SAME"):
    x = padded(x, kernel.shape[:2], strides, padding)
    lhs = torch.permute(x, (0, 3, 1, 2))
    rhs = torch.permute(kernel, (3, 2, 0, 1))
    return torch.permute(F.conv2d(lhs, rhs, stride=strides), (0, 2, 3, 1))


def patches(x, window, strides):
    """(n, height, width, channels, window)."""
    x = x.unfold(1, window[0], strides[0]).unfold(2, window[1], strides[1])
    return torch.flatten(x, 4)


def max_pool(x, window, strides=(1, 1), padding="SAME"):
    x = padded(x, window, strides, padding, value=-torch.inf)
    y = F.max_pool2d(torch.permute(x, (0, 3, 1, 2)), window, strides)
    return torch.permute(y, (0, 2, 3, 1))


def avg_pool(x, window, strides=(1, 1), padding="SAME", count_include_pad=True):
    total = patches(padded(x, window, strides, padding), window, strides).sum(-1)
    if count_include_pad:
        return total / (window[0] * window[1])
    ones = torch.ones_like(x[:1, :, :, :1])
    ones = padded(ones, window, strides, padding)
    return total / patches(ones, window, strides).sum(-1)


def local_response_norm(x, size=5, alpha=0.4, beta=0.75, bias=1.0):
    """The sum over neighbours is a product with a band of ones."""
    channel = torch.arange(x.shape[-1])
    band = torch.abs(channel[:, None] - channel[None, :]) <= size // 2
    sums = torch.einsum("nhwc,cd->nhwd", torch.square(x), band.to(x.dtype))
    return x * torch.exp(-beta * torch.log(bias + alpha / size * sums))


def dense(p, x):
    return torch.einsum("ni,io->no", x, p["kernel"]) + p["bias"]


def batch_norm(p, stats, x, momentum=0.9, epsilon=1e-3):
    """Return the output and the new statistics."""
    axes = (0, 1, 2)
    mean = torch.mean(x, dim=axes)
    var = torch.mean(torch.square(x - mean), dim=axes)
    count = x.numel() // x.shape[-1]
    new_stats = {
        "mean": momentum * stats["mean"] + (1 - momentum) * mean,
        "var": momentum * stats["var"] + (1 - momentum) * var * count / (count - 1),
    }
    mul = torch.rsqrt(var + epsilon) * p["scale"]
    return (x - mean) * mul + p["bias"], new_stats


def conv_bn(p, stats, x, strides=(1, 1), padding="SAME"):
    x = conv(p["kernel"], x, strides, padding)
    x, new_stats = batch_norm(p, stats, x)
    return torch.relu(x), new_stats


# ---------------------------------------------------------------- the network


def mixed(p, stats, x, widths, pool):
    """Four branches, three of which share their first product."""
    new = {}
    y, new["entry"] = conv_bn(p["entry"], stats["entry"], x)
    point, square, far = torch.split(y, widths, dim=-1)
    square, new["square"] = conv_bn(p["square"], stats["square"], square)
    far, new["far_0"] = conv_bn(p["far_0"], stats["far_0"], far)
    far, new["far_1"] = conv_bn(p["far_1"], stats["far_1"], far)
    pooled = pool(x, (3, 3))
    pooled, new["pooled"] = conv_bn(p["pooled"], stats["pooled"], pooled)
    return torch.cat([point, square, far, pooled], dim=-1), new


def auxiliary(p, stats, x):
    """Windows of 5 x 5; the last ones have one column less."""
    x = avg_pool(x, (5, 5), (3, 3), ((0, 0), (0, 1)), count_include_pad=False)
    x, new = conv_bn(p["conv"], stats["conv"], x)
    x = torch.reshape(x, (x.shape[0], -1))
    x = torch.relu(dense(p["hidden"], x))
    return dense(p["logits"], x), {"conv": new}


def apply(params, stats, x):
    """Return the logits, those of the auxiliary head, and the new statistics."""
    p, new = params, {}
    x, new["conv_1"] = conv_bn(
        p["conv_1"], stats["conv_1"], x, strides=(2, 2), padding=((2, 2), (2, 2))
    )
    x = max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
    x = local_response_norm(x)
    x, new["conv_2"] = conv_bn(p["conv_2"], stats["conv_2"], x)
    x, new["conv_3"] = conv_bn(p["conv_3"], stats["conv_3"], x)
    x = local_response_norm(x)

    def block(name, x, pool):
        y, new[name] = mixed(p[name], stats[name], x, MIXED[name], pool)
        return y

    x = block("mixed_3a", x, max_pool)
    aux, new["aux"] = auxiliary(p["aux"], stats["aux"], x)
    x = block("mixed_3b", x, avg_pool)
    x = max_pool(x, (3, 3), strides=(2, 2), padding=((0, 1), (0, 1)))
    x = block("mixed_4a", x, max_pool)
    x = torch.mean(x, dim=(1, 2))
    return dense(p["head"], x), aux, new


# ---------------------------------------------------------------- dicts


class Tree(nn.Module):
    """A nested dict; arrays of it are parameters, or buffers where they are not learned."""

    def __init__(self, leaves, learned):
        super().__init__()
        for name, value in leaves.items():
            if isinstance(value, dict):
                self.add_module(name, Tree(value, learned))
            elif learned:
                self.register_parameter(name, nn.Parameter(value.clone().contiguous()))
            else:
                self.register_buffer(name, value.clone())

    def __getitem__(self, name):
        return getattr(self, name)

    @torch.no_grad()
    def assign(self, leaves):
        for name, value in leaves.items():
            if isinstance(value, dict):
                self[name].assign(value)
            else:
                self[name].copy_(value)


class Variables(nn.Module):
    def __init__(self, params, batch_stats):
        super().__init__()
        self.params = Tree(params, learned=True)
        self.batch_stats = Tree(batch_stats, learned=False)

    def forward(self, x):
        logits, aux, batch_stats = apply(self.params, self.batch_stats, x)
        self.batch_stats.assign(batch_stats)
        return logits, aux


def convert(state):
    """Params and batch_stats of the weights of PyTorch."""

    def hwio(name):
        return torch.permute(state[name + ".conv.weight"], (2, 3, 1, 0))

    def unit(*names):
        """Several layers become one, side by side."""

        def joined(key):
            return torch.cat([state[f"{name}.bn.{key}"] for name in names])

        kernels = [hwio(name) for name in names]
        params = {
            "kernel": torch.cat(kernels, dim=-1),
            "scale": joined("weight"),
            "bias": joined("bias"),
        }
        return params, {"mean": joined("running_mean"), "var": joined("running_var")}

    def block(name, long):
        point, square, far = (
            f"{name}.branch{kind}" for kind in ("1x1", "3x3", f"{long}x{long}")
        )
        return {
            "entry": unit(point, square + ".0", far + ".0"),
            "square": unit(square + ".1"),
            "far_0": unit(far + ".1"),
            "far_1": unit(far + ".2"),
            "pooled": unit(name + ".branch_pool"),
        }

    def linear(name):
        kernel = torch.transpose(state[name + ".weight"], 0, 1)
        return {"kernel": kernel, "bias": state[name + ".bias"]}

    hidden = linear("aux.fc1")
    # Rows are (channel, height, width) there, and (height, width, channel) here.
    kernel = torch.reshape(hidden["kernel"], (8, 2, 3, -1))
    kernel = torch.permute(kernel, (1, 2, 0, 3))
    hidden["kernel"] = torch.reshape(kernel, (8 * 2 * 3, -1))

    tree = {
        "conv_1": unit("conv1"),
        "conv_2": unit("conv2"),
        "conv_3": unit("conv3"),
        "mixed_3a": block("inception3a", 5),
        "aux": {"conv": unit("aux.conv")},
        "mixed_3b": block("inception3b", 7),
        "mixed_4a": block("inception4a", 5),
    }

    def part(node, index):
        if isinstance(node, tuple):
            return node[index]
        return {name: part(value, index) for name, value in node.items()}

    params, batch_stats = part(tree, 0), part(tree, 1)
    params["aux"] |= {"hidden": hidden, "logits": linear("aux.fc2")}
    params["head"] = linear("fc")
    return params, batch_stats


def model():
    state = torch.load(Path(__file__).with_name("weights.pt"))
    return Variables(*convert(state))


# ---------------------------------------------------------------- data and loss


def augment(image, corner, flip):
    """(n, height, width, 3), cut out, mirrored where ``flip`` says so, and normalised."""
    image = torch.permute(image, (0, 2, 3, 1))
    cuts = [
        x[top : top + CROP[0], left : left + CROP[1]]
        for x, (top, left) in zip(image, corner.tolist())
    ]
    x = torch.stack(cuts).to(torch.float32)
    x = torch.where(flip[:, None, None, None], torch.flip(x, (2,)), x)
    return (x / 255.0 - torch.tensor(PIXEL_MEAN)) / PIXEL_STD


def forward(net, batch):
    logits, aux = net(augment(batch["image"], batch["corner"], batch["flip"]))
    return {"logits": logits, "aux": aux}


def smooth_labels(labels, alpha):
    one_hot = (labels[:, None] == torch.arange(NUM_CLASSES)).to(torch.float32)
    return (1.0 - alpha) * one_hot + alpha / NUM_CLASSES


def softmax_cross_entropy(logits, labels):
    return torch.logsumexp(logits, dim=-1) - torch.sum(labels * logits, dim=-1)


def loss(output, batch, aux_weight=0.3):
    labels = smooth_labels(batch["label"], alpha=0.1)
    main = softmax_cross_entropy(output["logits"], labels)
    aux = softmax_cross_entropy(output["aux"], labels)
    return torch.mean(main + aux_weight * aux)


# ---------------------------------------------------------------- updates


class Transformation(NamedTuple):
    init: object
    update: object


def tree_map(function, *trees):
    return {path: function(*(t[path] for t in trees)) for path in trees[0]}


def stateless(update):
    return Transformation(lambda params: (), lambda u, s, p: (update(u, p), s))


def clip_by_global_norm(max_norm):
    def update(updates, params):
        squares = [torch.sum(torch.square(u)) for u in updates.values()]
        norm = torch.sqrt(reduce(operator.add, squares))
        factor = torch.minimum(torch.ones(()), max_norm / norm)
        return tree_map(lambda u: u * factor, updates)

    return stateless(update)


def add_decayed_weights(weight_decay, mask):
    def update(updates, params):
        return {
            path: u + weight_decay * params[path] if mask(path) else u
            for path, u in updates.items()
        }

    return stateless(update)


def scale_by_rms(decay, eps):
    def update(updates, nu, params):
        nu = tree_map(lambda v, u: decay * v + (1 - decay) * u**2, nu, updates)
        updates = tree_map(lambda u, v: u / (torch.sqrt(v) + eps), updates, nu)
        return updates, nu

    return Transformation(lambda params: tree_map(torch.zeros_like, params), update)


def trace(decay):
    def update(updates, momentum, params):
        momentum = tree_map(lambda u, m: u + decay * m, updates, momentum)
        return momentum, momentum

    return Transformation(lambda params: tree_map(torch.zeros_like, params), update)


def scale_by_learning_rate(schedule):
    def update(updates, count, params):
        rate = schedule(count)
        return tree_map(lambda u: -rate * u, updates), count + 1

    return Transformation(lambda params: 0, update)


def chain(*transformations):
    def init(params):
        return tuple(t.init(params) for t in transformations)

    def update(updates, states, params):
        new_states = []
        for t, state in zip(transformations, states):
            updates, state = t.update(updates, state, params)
            new_states.append(state)
        return updates, tuple(new_states)

    return Transformation(init, update)


def exponential_decay(init_value, transition_steps, decay_rate, staircase):
    def schedule(count):
        passed = count / transition_steps
        if staircase:
            passed = int(passed)
        return init_value * decay_rate**passed

    return schedule


class TrainState(torch.optim.Optimizer):
    def __init__(self, params, tx):
        self.params = dict(params)
        super().__init__(self.params.values(), {})
        self.tx = tx
        self.opt_state = tx.init(self.params)

    @torch.no_grad()
    def step(self, closure=None):
        grads = {path: p.grad for path, p in self.params.items()}
        updates, self.opt_state = self.tx.update(grads, self.opt_state, self.params)
        for path, p in self.params.items():
            p.add_(updates[path])


def optimizer(net):
    schedule = exponential_decay(0.045, 2, 0.7, staircase=True)
    tx = chain(
        clip_by_global_norm(2.0),
        add_decayed_weights(5e-3, mask=lambda path: path.endswith("kernel")),
        scale_by_rms(decay=0.9, eps=0.1),
        trace(decay=0.9),
        scale_by_learning_rate(schedule),
    )
    return TrainState(net.params.named_parameters(), tx)
