"""From a JAX code base: a flat dict of parameters, pure functions, NHWC, convolutions as einsum.

Kernels are (height, width, in, out). A transposed convolution is one over dilated inputs, so its
kernels are stored turned by half a circle. ``u`` and ``v`` of the spectral norm, and the
statistics of batch norm, are the state that goes through the functions.
"""

from pathlib import Path

import torch
from torch import nn
from torch.autograd import Function

GROUP = 4
LEAK = 0.2

# ------------------------------------------------------------------ layers


def patches(x, size, stride, padding):
    """(n, h, w, c) -> (n, h', w', size, size, c)."""
    low, high = padding
    x = nn.functional.pad(x, (0, 0, low, high, low, high))
    height = (x.shape[1] - size) // stride + 1
    width = (x.shape[2] - size) // stride + 1
    rows = []
    for i in range(size):
        row = x[:, i : i + stride * height : stride]
        cols = [row[:, :, j : j + stride * width : stride] for j in range(size)]
        rows.append(torch.stack([c[:, :height, :width] for c in cols], dim=3))
    return torch.stack(rows, dim=3)


def conv(x, w, stride=1, padding=(0, 0)):
    return torch.einsum("nhwijc,ijco->nhwo", patches(x, w.shape[0], stride, padding), w)


def conv_transpose(x, w):
    """Zeros between the pixels, then a convolution; twice as high and wide."""
    n, h, w_in, c = x.shape
    dilated = x.new_zeros(n, h, 2, w_in, 2, c)
    dilated[:, :, 0, :, 0] = x
    dilated = dilated.reshape(n, 2 * h, 2 * w_in, c)
    return conv(dilated, w, padding=(2, 1))


def normalize(x):
    return x / torch.clamp(torch.sqrt(torch.sum(x**2)), min=1e-12)


def spectral_norm(w, state, path):
    """The largest singular value of the kernel, by one more step of power iteration."""
    fixed, v = w.detach(), state[path + "/v0"]
    u = normalize(torch.einsum("ijc,ijco->o", v, fixed))
    v = normalize(torch.einsum("ijco,o->ijc", fixed, u))
    sigma = torch.einsum("ijc,ijco,o->", v, w, u)
    return sigma, {**state, path + "/v0": v}


def leaky_relu(x):
    return torch.where(x > 0, x, LEAK * x)


class BatchNorm(Function):
    """x (rows, features); statistics carry no gradient of their own."""

    @staticmethod
    def forward(ctx, x, scale, offset, eps):
        mean = torch.mean(x, dim=0)
        centred = x - mean
        var = torch.mean(centred**2, dim=0)
        inv = torch.rsqrt(var + eps)
        normed = centred * inv
        ctx.save_for_backward(normed, inv, scale)
        ctx.mark_non_differentiable(mean, var)
        return normed * scale + offset, mean, var

    @staticmethod
    def backward(ctx, g, g_mean, g_var):
        normed, inv, scale = ctx.saved_tensors
        g_offset = torch.sum(g, dim=0)
        g_scale = torch.sum(g * normed, dim=0)
        rows = g.shape[0]
        g_x = scale * inv * (g - g_offset / rows - normed * g_scale / rows)
        return g_x, g_scale, g_offset, None


def batch_norm(params, state, path, x, is_training, decay_rate=0.9, eps=1e-5):
    scale, offset = params[path + "/scale"], params[path + "/offset"]
    mean, var = state[path + "/mean"], state[path + "/var"]
    if not is_training:
        return (x - mean) / torch.sqrt(var + eps) * scale + offset, state
    rows = x.reshape(-1, x.shape[-1])
    out, new_mean, new_var = BatchNorm.apply(rows, scale, offset, eps)
    new_var = new_var * len(rows) / (len(rows) - 1)
    state = {
        **state,
        path + "/mean": decay_rate * mean + (1.0 - decay_rate) * new_mean,
        path + "/var": decay_rate * var + (1.0 - decay_rate) * new_var,
    }
    return out.reshape(x.shape), state


# ---------------------------------------------------------------- networks


def generator(params, state, z, is_training):
    x = torch.einsum("nz,zijo->nijo", z, params["gen/project/w"])
    x, state = batch_norm(params, state, "gen/norm_0", x, is_training)
    x = conv_transpose(torch.relu(x), params["gen/up_0/w"])
    x, state = batch_norm(params, state, "gen/norm_1", x, is_training)
    x = conv_transpose(torch.relu(x), params["gen/up_1/w"]) + params["gen/up_1/b"]
    return torch.tanh(x), state


def group_deviation(x):
    """One number for each image, the same in its group: images i, i + m, i + 2m, ..."""
    n = x.shape[0]
    group = min(GROUP, n)
    groups = x.reshape(group, n // group, -1)
    centred = groups - torch.mean(groups, dim=0)
    std = torch.sqrt(torch.mean(centred**2, dim=0) + 1e-8)
    return torch.mean(std, dim=-1).repeat(group)


def discriminator(params, state, x):
    for path in ("disc/conv_0", "disc/conv_1"):
        w = params[path + "/w"]
        sigma, state = spectral_norm(w, state, path)
        x = leaky_relu(conv(x, w, 2, (1, 1)) / sigma + params[path + "/b"])

    # The channel of deviations is constant: its share is a kernel over ones, times a number.
    w = params["disc/conv_2/w"]
    sigma, state = spectral_norm(w, state, "disc/conv_2")
    deviation = group_deviation(x)
    ones = torch.ones_like(x[:1, :, :, :1])
    y = conv(x, w[:, :, :-1], padding=(1, 1))
    constant = conv(ones, w[:, :, -1:], padding=(1, 1))
    y = y + deviation[:, None, None, None] * constant
    x = leaky_relu(y / sigma + params["disc/conv_2/b"])
    score = torch.einsum("nijc,ijc->n", x, params["disc/head/w"])
    return score + params["disc/head/b"], state


# ------------------------------------------------------------------- trees


def tree_map(function, *trees):
    return {path: function(*(tree[path] for tree in trees)) for path in trees[0]}


def stop_gradient(tree):
    return tree_map(torch.Tensor.detach, tree)


def subtree(tree, root):
    return {path: x for path, x in tree.items() if path.startswith(root + "/")}


def score_and_grad(function, x):
    """Scores with their state, and the gradient of their sum by the images."""
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        scores, aux = function(x)
        (gradient,) = torch.autograd.grad(torch.sum(scores), x, create_graph=True)
    return scores, gradient, aux


class Gan(nn.Module):
    """Holds the trees: parameters, their average, and the state of both."""

    def __init__(self, params, state, average):
        super().__init__()
        self.paths = list(params)
        for path, value in params.items():
            self.register_parameter(path, nn.Parameter(value.clone().contiguous()))
        self.state_paths = list(state)
        for path, value in state.items():
            self.register_buffer(path, value.clone().contiguous())
        self.average_paths = list(average)
        for path, value in average.items():
            self.register_buffer("ema/" + path, value.clone().contiguous())

    def params(self):
        return {path: getattr(self, path) for path in self.paths}

    def state(self):
        return {path: getattr(self, path).clone() for path in self.state_paths}

    def average(self):
        return {path: getattr(self, "ema/" + path) for path in self.average_paths}

    @torch.no_grad()
    def store(self, state):
        for path, value in state.items():
            getattr(self, path).copy_(value)

    def forward(self, image, z):
        params, state = self.params(), self.state()
        sample, _ = generator(self.average(), self.average(), z, is_training=False)

        real, gradient, state = score_and_grad(
            lambda x: discriminator(params, state, x), image
        )
        fake_image, state = generator(params, state, z, is_training=True)
        fake, state = discriminator(params, state, fake_image.detach())
        fooled, state = discriminator(stop_gradient(params), state, fake_image)
        self.store(state)
        return {
            "real": real,
            "fake": fake,
            "fooled": fooled,
            "penalty": torch.einsum("nhwc,nhwc->n", gradient, gradient),
            "sample": torch.permute(sample, (0, 3, 1, 2)),
        }


# ------------------------------------------------------------- the checkpoint


def convert(state):
    """torch's names and axes -> params, state and average."""

    def turned(name):
        """(in, out, h, w) -> (h, w, in, out), by half a circle."""
        return torch.flip(state[name], (2, 3)).permute(2, 3, 0, 1)

    def gen(name):
        params = {
            "gen/project/w": state[name + ".main.0.weight"].permute(0, 2, 3, 1),
            "gen/up_0/w": turned(name + ".main.3.weight"),
            "gen/up_1/w": turned(name + ".main.6.weight"),
            "gen/up_1/b": state[name + ".main.6.bias"],
        }
        statistics = {}
        for i, number in enumerate((1, 4)):
            norm = f"{name}.main.{number}"
            params[f"gen/norm_{i}/scale"] = state[norm + ".weight"]
            params[f"gen/norm_{i}/offset"] = state[norm + ".bias"]
            statistics[f"gen/norm_{i}/mean"] = state[norm + ".running_mean"]
            statistics[f"gen/norm_{i}/var"] = state[norm + ".running_var"]
        return params, statistics

    params, statistics = gen("generator")
    for i in range(3):
        name, path = f"discriminator.conv{i + 1}", f"disc/conv_{i}"
        weight = state[name + ".parametrizations.weight.original"]
        v = state[name + ".parametrizations.weight.0._v"].reshape(weight.shape[1:])
        params[path + "/w"] = weight.permute(2, 3, 1, 0)
        params[path + "/b"] = state[name + ".bias"]
        statistics[path + "/v0"] = v.permute(1, 2, 0)
    params["disc/head/w"] = state["discriminator.head.weight"][0].permute(1, 2, 0)
    params["disc/head/b"] = state["discriminator.head.bias"]

    average, averaged_statistics = gen("ema")
    return params, statistics, {**average, **averaged_statistics}


def model():
    return Gan(*convert(torch.load(Path(__file__).with_name("weights.pt"))))


# ---------------------------------------------------------------- the loss


def load_image(batch):
    """To (n, h, w, c) between -1 and 1; the mirrored ones by reading columns backwards."""
    image = batch["image"].permute(0, 2, 3, 1).float() * (2.0 / 255.0) - 1.0
    n, _, width, _ = image.shape
    column = torch.arange(width)
    column = torch.where(batch["flip"][:, None], width - 1 - column, column)
    return image[torch.arange(n)[:, None], :, column].transpose(1, 2)


def forward(net, batch):
    return net(load_image(batch), batch["z"])


def loss(output, batch, r1=0.5):
    hinge = torch.relu(1.0 - output["real"]) + torch.relu(1.0 + output["fake"])
    disc_loss = torch.mean(hinge + r1 / 2 * output["penalty"])
    gen_loss = -torch.mean(output["fooled"])
    return disc_loss + gen_loss


# ---------------------------------------------------------------- updates


def linear_schedule(init_value, transition_steps):
    return lambda count: init_value * (transition_steps - count) / transition_steps


def adam(schedule, b1, b2, eps=1e-8):
    def init(params):
        zeros = tree_map(torch.zeros_like, params)
        return {"count": 0, "mu": zeros, "nu": zeros}

    def update(grads, state):
        step_size = schedule(state["count"])
        count = state["count"] + 1
        mu = tree_map(lambda m, g: b1 * m + (1.0 - b1) * g, state["mu"], grads)
        nu = tree_map(lambda v, g: b2 * v + (1.0 - b2) * g * g, state["nu"], grads)

        def change(m, v):
            m_hat = m / (1.0 - b1**count)
            v_hat = v / (1.0 - b2**count)
            return -step_size * m_hat / (torch.sqrt(v_hat) + eps)

        return tree_map(change, mu, nu), {"count": count, "mu": mu, "nu": nu}

    return init, update


def averaging_rate(count, decay=0.95):
    """1 - decay, and more in the beginning."""
    return max(1.0 - decay, 9.0 / (10.0 + count))


class TrainState(torch.optim.Optimizer):
    def __init__(self, net):
        self.net = net
        params = net.params()
        super().__init__(params.values(), {})
        self.count = 0
        self.rules = {
            "gen": adam(linear_schedule(4e-4, 20), b1=0.5, b2=0.999),
            "disc": adam(linear_schedule(8e-4, 20), b1=0.3, b2=0.99),
        }
        self.opt_state = {
            root: init(subtree(params, root)) for root, (init, _) in self.rules.items()
        }

    @torch.no_grad()
    def step(self, closure=None):
        params = self.net.params()
        grads = tree_map(lambda p: p.grad, params)
        for root, (_, update) in self.rules.items():
            updates, self.opt_state[root] = update(
                subtree(grads, root), self.opt_state[root]
            )
            for path, change in updates.items():
                params[path].add_(change)

        self.count += 1
        rate = averaging_rate(self.count)
        state = self.net.state()
        for path, average in self.net.average().items():
            if path in params:
                average.add_(rate * (params[path] - average))
            else:
                average.copy_(state[path])


def optimizer(net):
    return TrainState(net)
