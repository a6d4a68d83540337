"""After Flax: flat parameters with paths, blocks of a stage stacked and scanned, pure functions.

The mean of a window is a product with a banded matrix on each side.
"""

import math
from pathlib import Path

import torch
from torch import nn

DEPTHS = {"stage_0": 2, "stage_1": 1}
CROP = (32, 40)
POOL = 3
GROUP_EPS, LAYER_EPS = 1e-5, 1e-6
PIXEL_MEAN = torch.tensor([0.485, 0.456, 0.406]) * 255
PIXEL_STD = torch.tensor([0.229, 0.224, 0.225]) * 255

# ---------------------------------------------------------------------- functions


def scope(params, prefix):
    """Return what is below a path, with the rest of the paths."""
    return {
        path[len(prefix) + 1 :]: leaf
        for path, leaf in params.items()
        if path.startswith(prefix + "/")
    }


def scan(body, carry, xs):
    """Leaves of xs have a leading axis."""
    (length,) = {len(leaf) for leaf in xs.values()}
    for i in range(length):
        carry = body(carry, {path: leaf[i] for path, leaf in xs.items()})
    return carry


def conv(p, x, strides, padding):
    """NHWC, HWIO, NHWC; padding is ((top, bottom), (left, right))."""
    (top, bottom), (left, right) = padding
    lhs = nn.functional.pad(x.movedim(3, 1), (left, right, top, bottom))
    rhs = p["kernel"].permute(3, 2, 0, 1)
    y = nn.functional.conv2d(lhs, rhs, stride=strides)
    return y.movedim(1, 3) + p["bias"]


def dense(kernel, bias, x):
    return torch.einsum("...i,ij->...j", x, kernel) + bias


def group_norm(x, scale, bias=None):
    """One group; the variance is the mean of the squares less the squared mean."""
    mean = torch.mean(x, dim=(1, 2, 3), keepdim=True)
    mean_square = torch.mean(x * x, dim=(1, 2, 3), keepdim=True)
    var = torch.clamp(mean_square - mean * mean, min=0.0)
    y = (x - mean) * (torch.rsqrt(var + GROUP_EPS) * scale)
    return y if bias is None else y + bias


def layer_norm(p, x):
    centred = x - torch.mean(x, dim=-1, keepdim=True)
    var = torch.mean(centred * centred, dim=-1, keepdim=True)
    return centred / torch.sqrt(var + LAYER_EPS) * p["scale"] + p["bias"]


def gelu(x, approximate=False):
    if approximate:
        cdf = 0.5 * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return x * cdf
    return 0.5 * x * torch.erfc(-x * math.sqrt(0.5))


def band(size):
    """[size, size]: each row takes the mean of a place and of its neighbours."""
    place = torch.arange(size)
    near = (torch.abs(place[:, None] - place[None, :]) <= POOL // 2).float()
    return near / torch.sum(near, dim=1, keepdim=True)


def pooling(x):
    rows, columns = band(x.shape[1]), band(x.shape[2])
    pooled = torch.einsum("pi,qj,bijc->bpqc", rows, columns, x)
    return pooled - x


def mlp(p, x):
    x = gelu(dense(p["up/kernel"], p["up/bias"], x))
    return dense(p["down/kernel"], p["down/bias"], x)


def block(x, p):
    mixed = pooling(group_norm(x, p["norm_1/scale"]))
    x = x + p["gain_1"] * mixed
    hidden = mlp(p, group_norm(x, p["norm_2/scale"], p["norm_2/bias"]))
    return x + p["gain_2"] * hidden


def apply(params, x):
    x = conv(scope(params, "stem"), x, (4, 4), ((2, 2), (2, 2)))
    x = scan(block, x, scope(params, "stage_0"))
    x = conv(scope(params, "reduce"), x, (2, 2), ((1, 1), (1, 1)))
    x = scan(block, x, scope(params, "stage_1"))
    x = torch.einsum("bhwc->bc", x) / (x.shape[1] * x.shape[2])
    x = layer_norm(scope(params, "norm"), x)
    return dense(params["head/kernel"], params["head/bias"], x)


# ------------------------------------------------------------------------ weights


def to_hwio(weight):
    return torch.einsum("oihw->hwio", weight)


def to_dense(weight):
    """A convolution of one pixel -> [in, out]."""
    return weight.flatten(1).t()


BLOCK = {
    "norm_1/scale": "norm1.weight",
    "norm_2/scale": "norm2.weight",
    "norm_2/bias": "norm2.bias",
    "up/kernel": "mlp.fc1.weight",
    "up/bias": "mlp.fc1.bias",
    "down/kernel": "mlp.fc2.weight",
    "down/bias": "mlp.fc2.bias",
    "gain_1": "layer_scale_1",
    "gain_2": "layer_scale_2",
}


def stacked(state, prefix, depth):
    out = {}
    for path, key in BLOCK.items():
        leaves = [state[f"{prefix}.{i}.{key}"] for i in range(depth)]
        if path.endswith("kernel"):
            leaves = [to_dense(leaf) for leaf in leaves]
        out[path] = torch.stack(leaves)
    return out


def from_torch(state):
    params = {
        "stem/kernel": to_hwio(state["patch_embed.proj.weight"]),
        "stem/bias": state["patch_embed.proj.bias"],
        "reduce/kernel": to_hwio(state["network.1.proj.weight"]),
        "reduce/bias": state["network.1.proj.bias"],
        "norm/scale": state["norm.weight"],
        "norm/bias": state["norm.bias"],
        "head/kernel": state["head.weight"].t(),
        "head/bias": state["head.bias"],
    }
    for number, (stage, depth) in enumerate(DEPTHS.items()):
        blocks = stacked(state, f"network.{2 * number}", depth)
        params |= {f"{stage}/{path}": leaf for path, leaf in blocks.items()}
    return params


class Variables(nn.Module):
    def __init__(self, params):
        super().__init__()
        for path, leaf in params.items():
            self.register_parameter(path, nn.Parameter(leaf.clone().contiguous()))

    def forward(self, x):
        return apply(dict(self.named_parameters()), x)


def model():
    return Variables(from_torch(torch.load(Path(__file__).with_name("weights.pt"))))


# --------------------------------------------------------------------------- data


def centre(size, crop):
    start = (size - crop) // 2
    return torch.arange(start, start + crop)


def forward(net, batch):
    x = batch["image"]
    rows, columns = centre(x.shape[1], CROP[0]), centre(x.shape[2], CROP[1])
    x = x[:, rows[:, None], columns[None, :]]
    return net((x.float() - PIXEL_MEAN) / PIXEL_STD)


# --------------------------------------------------------------------------- loss


def smooth_labels(labels, alpha):
    return (1.0 - alpha) * labels + alpha / labels.shape[-1]


def softmax_cross_entropy(logits, labels):
    log_p = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    return -torch.einsum("bk,bk->b", labels, log_p)


def loss(output, batch):
    one_hot = (batch["label"][:, None] == torch.arange(output.shape[-1])).float()
    labels = smooth_labels(one_hot, alpha=0.1)
    return softmax_cross_entropy(output, labels).mean()


# ---------------------------------------------------------------------- optimizer

B1, B2, ADAM_EPS = 0.9, 0.99, 1e-7


def warmup(peak, steps):
    return lambda count: peak * min(1.0, (count + 1) / steps)


def decay_mask(params):
    return {path: path.endswith("kernel") for path in params}


def adamw_init(params):
    zeros = {path: torch.zeros_like(leaf) for path, leaf in params.items()}
    return {"count": 0, "mu": zeros, "nu": dict(zeros)}


def adamw_update(grads, state, params, schedule, weight_decay):
    """Return the updates, which are to be added, and the new state."""
    rate, mask = schedule(state["count"]), decay_mask(params)
    count = state["count"] + 1
    updates, mu, nu = {}, {}, {}
    for path, grad in grads.items():
        mu[path] = B1 * state["mu"][path] + (1 - B1) * grad
        nu[path] = B2 * state["nu"][path] + (1 - B2) * grad * grad
        mu_hat, nu_hat = mu[path] / (1 - B1**count), nu[path] / (1 - B2**count)
        update = mu_hat / (torch.sqrt(nu_hat) + ADAM_EPS)
        if mask[path]:
            update = update + weight_decay * params[path]
        updates[path] = -rate * update
    return updates, {"count": count, "mu": mu, "nu": nu}


class Optax(torch.optim.Optimizer):
    def __init__(self, params, schedule, weight_decay):
        super().__init__(list(params.values()), {})
        self.params, self.schedule, self.weight_decay = params, schedule, weight_decay
        self.opt_state = adamw_init(params)

    @torch.no_grad()
    def step(self, closure=None):
        # As from jax.grad: zeros for what the loss does not read.
        grads = {
            path: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for path, leaf in self.params.items()
        }
        updates, self.opt_state = adamw_update(
            grads, self.opt_state, self.params, self.schedule, self.weight_decay
        )
        for path, leaf in self.params.items():
            leaf.add_(updates[path])


def optimizer(net):
    return Optax(dict(net.named_parameters()), warmup(8e-3, 4), weight_decay=0.2)
