"""After Flax: trees of arrays and pure functions; state spaces run as recurrences.

Kernels are [in, out]; what belongs to a state space is [state, channel].
"""

import math
from pathlib import Path

import torch
from torch import nn

N_LAYERS, N_CLASSES = 3, 5
SENSOR_CENTER = torch.tensor([2.0, -1.5, 0.5])
SENSOR_SPREAD = torch.tensor([1.5, 0.8, 2.5])


# ------------------------------------------------------------------ modules


def dense(p, x):
    return torch.einsum("...i,io->...o", x, p["kernel"]) + p["bias"]


def layer_norm(p, x, epsilon=1e-5):
    mean = torch.mean(x, dim=-1, keepdim=True)
    mean2 = torch.mean(torch.square(x), dim=-1, keepdim=True)
    mul = torch.rsqrt(mean2 - torch.square(mean) + epsilon) * p["scale"]
    return (x - mean) * mul + p["bias"]


def gelu(x, approximate=False):
    if approximate:
        cubic = x + 0.044715 * x**3
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * cubic))
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


# -------------------------------------------------------------- state space


def discretize_zoh(Lambda, step):
    """The input matrix is all ones."""
    Lambda_bar = torch.exp(Lambda * step)
    B_bar = (Lambda_bar - 1.0) / Lambda
    return Lambda_bar, B_bar


def scan(f, init, xs):
    carry, ys = init, []
    for x in xs:
        carry, y = f(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


def initial_carry(p, batch_size):
    """[batch, state, channel]"""
    return torch.zeros(batch_size, *p["Lambda_im"].shape, dtype=torch.complex64)


def ssm(p, carry, us):
    """us [batch, time, channel]"""
    step = torch.exp(p["log_step"])
    Lambda = torch.complex(-torch.exp(p["log_neg_Lambda_re"]), p["Lambda_im"])
    Lambda_bar, B_bar = discretize_zoh(Lambda, step)

    def advance(x, u):
        x = Lambda_bar * x + B_bar * u[:, None, :]
        y = torch.sum(p["C_re"] * x.real - p["C_im"] * x.imag, dim=1)
        return x, 2.0 * y

    carry, ys = scan(advance, carry, torch.swapaxes(us, 0, 1))
    return carry, torch.swapaxes(ys, 0, 1) + p["D"] * us


def sequence_layer(p, carry, x):
    skip = x
    x = layer_norm(p["norm"], x)
    carry, x = ssm(p["seq"], carry, x)
    x = gelu(x)
    x = dense(p["out"], x) * torch.sigmoid(dense(p["out2"], x))
    return carry, skip + x


def masked_meanpool(x, lengths):
    steps = torch.arange(x.shape[1])
    weights = (steps[None, :] < lengths[:, None]) / lengths[:, None]
    return torch.einsum("blh,bl->bh", x, weights)


def apply(params, x, lengths):
    x = dense(params["encoder"], x)
    for i in range(N_LAYERS):
        p = params[f"layers_{i}"]
        carry = initial_carry(p["seq"], len(x))
        carry, x = sequence_layer(p, carry, x)
    x = layer_norm(params["norm"], x)
    return dense(params["decoder"], masked_meanpool(x, lengths))


# ------------------------------------------------------------------ weights


def from_torch(state):
    def linear(name):
        return {"kernel": state[name + ".weight"].T, "bias": state[name + ".bias"]}

    def norm(name):
        return {"scale": state[name + ".weight"], "bias": state[name + ".bias"]}

    def seq(name):
        C_re, C_im = torch.unbind(state[name + ".kernel.C"], dim=-1)
        return {
            "log_step": state[name + ".kernel.log_dt"],
            "log_neg_Lambda_re": state[name + ".kernel.log_A_real"].T,
            "Lambda_im": state[name + ".kernel.A_imag"].T,
            "C_re": C_re.T,
            "C_im": C_im.T,
            "D": state[name + ".D"],
        }

    def gated(name):
        kernel = state[name + ".weight"].squeeze(-1).T
        out, out2 = torch.chunk(kernel, 2, dim=1)
        bias, bias2 = torch.chunk(state[name + ".bias"], 2)
        return {"kernel": out, "bias": bias}, {"kernel": out2, "bias": bias2}

    params = {"encoder": linear("encoder")}
    for i in range(N_LAYERS):
        out, out2 = gated(f"layers.{i}.s4d.output_linear")
        params[f"layers_{i}"] = {
            "norm": norm(f"layers.{i}.norm"),
            "seq": seq(f"layers.{i}.s4d"),
            "out": out,
            "out2": out2,
        }
    return params | {"norm": norm("norm"), "decoder": linear("decoder")}


class Variables(nn.Module):
    """A tree whose leaves are parameters."""

    def __init__(self, tree):
        super().__init__()
        for key, value in tree.items():
            if isinstance(value, dict):
                self.add_module(key, Variables(value))
            else:
                leaf = nn.Parameter(value.clone(memory_format=torch.contiguous_format))
                self.register_parameter(key, leaf)

    def __getitem__(self, key):
        return getattr(self, key)


class Classifier(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.params = Variables(params)

    def forward(self, x, lengths):
        return apply(self.params, x, lengths)


def model():
    return Classifier(from_torch(torch.load(Path(__file__).with_name("weights.pt"))))


# ----------------------------------------------------------------- training


def forward(net, batch):
    x = (batch["series"] - SENSOR_CENTER) / SENSOR_SPREAD
    return net(x, batch["lengths"])


def smooth_labels(labels, alpha):
    return (1.0 - alpha) * labels + alpha / labels.shape[-1]


def softmax_cross_entropy(logits, labels):
    return -torch.sum(labels * torch.log_softmax(logits, dim=-1), dim=-1)


def loss(output, batch):
    labels = nn.functional.one_hot(batch["label"], N_CLASSES).float()
    return torch.mean(softmax_cross_entropy(output, smooth_labels(labels, 0.1)))


SSM_LEAVES = ("log_step", "log_neg_Lambda_re", "Lambda_im", "C_re", "C_im")


def label_of(path):
    return "ssm" if path.split(".")[-1] in SSM_LEAVES else "regular"


def adamw(learning_rate, weight_decay, b1=0.9, b2=0.999, eps=1e-8):
    def init(param):
        return 0, torch.zeros_like(param), torch.zeros_like(param)

    def update(grad, state, param):
        count, mu, nu = state
        count = count + 1
        mu = b1 * mu + (1.0 - b1) * grad
        nu = b2 * nu + (1.0 - b2) * torch.square(grad)
        mu_hat = mu / (1.0 - b1**count)
        nu_hat = nu / (1.0 - b2**count)
        direction = mu_hat / (torch.sqrt(nu_hat) + eps) + weight_decay * param
        return -learning_rate * direction, (count, mu, nu)

    return init, update


class MultiTransform(torch.optim.Optimizer):
    def __init__(self, named, transforms):
        self.named = dict(named)
        super().__init__(list(self.named.values()), {})
        self.rules = {path: transforms[label_of(path)] for path in self.named}
        self.states = {path: self.rules[path][0](p) for path, p in self.named.items()}

    @torch.no_grad()
    def step(self, closure=None):
        for path, param in self.named.items():
            _, update = self.rules[path]
            updates, self.states[path] = update(param.grad, self.states[path], param)
            param.add_(updates)


def optimizer(net):
    transforms = {
        "ssm": adamw(1e-3, weight_decay=0.0),
        "regular": adamw(4e-3, weight_decay=0.1),
    }
    return MultiTransform(net.named_parameters(), transforms)
