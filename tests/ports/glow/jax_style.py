"""After JAX: nested dictionaries of arrays, pure functions, the steps of a level stacked.

Pixels are [batch, height, width, channels]. A flow returns what comes out and its log-det.
Both triangles of a mix and the logarithms of its diagonal are one square matrix.
"""

import math
from pathlib import Path

import torch
from torch import nn
from torch.func import vmap

BITS = 5
LEVELS, STEPS, CLASSES = 2, 2, 4
SHARPNESS = 3.0
LABEL_WEIGHT = 0.1
PEAK_RATE, WARMUP = 1e-2, 5
AVERAGE_DECAY = 0.9


# --------------------------------------------------------------- trees


def unflatten(flat):
    """{"a/b": x} -> {"a": {"b": x}}"""
    tree = {}
    for path, value in flat.items():
        *outer, last = path.split("/")
        node = tree
        for key in outer:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def flatten(tree, prefix=""):
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[prefix + key] = value
    return flat


def take(tree, i):
    """The i-th of what is stacked."""
    return {k: take(v, i) if isinstance(v, dict) else v[i] for k, v in tree.items()}


def tree_map(function, *trees):
    return {key: function(*(tree[key] for tree in trees)) for key in trees[0]}


# --------------------------------------------------------------- flows


def conv(kernel, x):
    """kernel [3, 3, in, *out], as a sum over its taps."""
    height, width = x.shape[1:3]
    x = nn.functional.pad(x, (0, 0, 1, 1, 1, 1))
    taps = [
        torch.tensordot(x[:, i : i + height, j : j + width], kernel[i, j], dims=1)
        for i in range(3)
        for j in range(3)
    ]
    return sum(taps)


def normalize(p, x):
    return (x - p["loc"]) * torch.exp(-p["log_std"])


def scaled_conv(p, x):
    """Returns two values for each channel, last."""
    y = conv(p["kernel"], x) + p["bias"]
    y = y * torch.exp(SHARPNESS * p["log_gain"])
    return torch.unbind(y, dim=-1)


def norm_flow(p, x):
    y = normalize(p, x)
    return y, -torch.sum(p["log_std"]) * x.shape[1] * x.shape[2]


def mix_flow(p, constants, x):
    lu = p["lu"]
    log_diagonal = torch.diagonal(lu)
    diagonal = constants["sign"] * torch.exp(log_diagonal)
    y = x * diagonal + torch.einsum("bhwi,oi->bhwo", x, torch.triu(lu, 1))
    y = y + torch.einsum("bhwi,oi->bhwo", y, torch.tril(lu, -1))
    y = y[..., constants["perm"]]
    return y, torch.sum(log_diagonal) * x.shape[1] * x.shape[2]


def conditioner(p, x):
    h = conv(p["conv_in"]["kernel"], x)
    h = torch.relu(normalize(p["norm_in"], h))
    h = torch.tensordot(h, p["conv_mid"]["kernel"], dims=1)
    h = torch.relu(normalize(p["norm_mid"], h))
    return scaled_conv(p["conv_out"], h)


def coupling_flow(p, x):
    half = x.shape[-1] // 2
    kept, changed = x[..., :half], x[..., half:]
    shift, raw = conditioner(p, kept)
    log_scale = -nn.functional.softplus(-raw - 2.0)
    changed = (changed + shift) * torch.exp(log_scale)
    return torch.cat([kept, changed], dim=-1), vmap(torch.sum)(log_scale)


def step_flow(p, constants, x):
    x, norm_log_det = norm_flow(p["norm"], x)
    x, mix_log_det = mix_flow(p["mix"], constants, x)
    x, coupling_log_det = coupling_flow(p["coupling"], x)
    return x, norm_log_det + mix_log_det + coupling_log_det


def level_flow(stacked, constants, x):
    """A scan over the steps."""
    log_dets = []
    for i in range(STEPS):
        x, log_det = step_flow(take(stacked, i), take(constants, i), x)
        log_dets.append(log_det)
    return x, torch.sum(torch.stack(log_dets), dim=0)


def squeeze(x):
    """Channels stay first, then rows and columns of the block."""
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // 2, 2, width // 2, 2, channels)
    x = torch.permute(x, (0, 1, 3, 5, 2, 4))
    return x.flatten(3)


def log_normal(x, mean, log_var):
    """The log-density of one example."""
    unit = (x - mean) * torch.exp(-0.5 * log_var)
    return -0.5 * torch.sum(unit**2 + log_var + math.log(2.0 * math.pi))


def apply(params, constants, x, label):
    """Returns the latent, log-det and log-density of each example."""
    total_log_det, log_density = 0.0, 0.0
    for level in range(LEVELS):
        key = f"level_{level}"
        x, log_det = level_flow(params[key], constants[key], squeeze(x))
        total_log_det = total_log_det + log_det
        if level + 1 < LEVELS:
            half = x.shape[-1] // 2
            x, out = x[..., :half], x[..., half:]
            mean, log_var = scaled_conv(params[f"prior_{level}"], x)
            log_density = log_density + vmap(log_normal)(out, mean, log_var)
    table = params["classes"]["table"][label]
    mean, log_var = table[:, 0], table[:, 1]
    log_density = log_density + vmap(log_normal)(x, mean, log_var)
    return x, total_log_det, log_density


def classify(p, latent):
    return torch.mean(latent.flatten(1, 2), dim=1) @ p["w"] + p["b"]


# --------------------------------------------------------------- weights


def from_torch(state):
    """Returns params and constants, both flat."""

    def stack(level, name):
        return torch.stack([state[f"levels.{level}.{i}.{name}"] for i in range(STEPS)])

    def norm(level, name):
        return {
            "loc": -stack(level, name + ".bias").flatten(1),
            "log_std": -stack(level, name + ".logs").flatten(1),
        }

    def lu(level):
        lower, upper = stack(level, "invconv.lower"), stack(level, "invconv.upper")
        return lower + upper + torch.diag_embed(stack(level, "invconv.log_s"))

    def taps(kernel):
        """[..., out, in, 3, 3] -> [..., 3, 3, in, out]"""
        return kernel.transpose(-4, -2).transpose(-3, -1).transpose(-2, -1)

    def pairs(kernel, bias, logs):
        return {
            "kernel": taps(kernel).unflatten(-1, (-1, 2)),
            "bias": bias.unflatten(-1, (-1, 2)),
            "log_gain": logs.flatten(-3).unflatten(-1, (-1, 2)),
        }

    params, constants = {}, {}
    for level in range(LEVELS):
        mid = stack(level, "block.3.weight").flatten(2)
        params[f"level_{level}"] = {
            "norm": norm(level, "actnorm"),
            "mix": {"lu": lu(level)},
            "coupling": {
                "conv_in": {"kernel": taps(stack(level, "block.0.weight"))},
                "norm_in": norm(level, "block.1"),
                "conv_mid": {"kernel": torch.transpose(mid, 1, 2)},
                "norm_mid": norm(level, "block.4"),
                "conv_out": pairs(
                    stack(level, "block.6.conv.weight"),
                    stack(level, "block.6.conv.bias"),
                    stack(level, "block.6.logs"),
                ),
            },
        }
        constants[f"level_{level}"] = {
            "perm": torch.argmax(stack(level, "invconv.p"), dim=2),
            "sign": stack(level, "invconv.sign_s"),
        }
    params["prior_0"] = pairs(
        state["priors.0.conv.weight"],
        state["priors.0.conv.bias"],
        state["priors.0.logs"],
    )
    params["classes"] = {"table": state["class_prior.weight"].unflatten(1, (2, -1))}
    w, b = state["classifier.weight"].T, state["classifier.bias"]
    params["head"] = {"w": w, "b": b}
    return flatten(params), flatten(constants)


class TrainState(nn.Module):
    """Holds the trees, their paths being the names."""

    def __init__(self, params, constants):
        super().__init__()
        for path, value in params.items():
            self.register_parameter(path, nn.Parameter(value.clone().contiguous()))
            self.register_buffer("ema/" + path, value.clone().contiguous())
        for path, value in constants.items():
            self.register_buffer(path, value)
        self.paths, self.constant_paths = list(params), list(constants)

    def params(self):
        return {path: getattr(self, path) for path in self.paths}

    def constants(self):
        return {path: getattr(self, path) for path in self.constant_paths}

    def averages(self):
        return {path: getattr(self, "ema/" + path) for path in self.paths}


def model():
    return TrainState(*from_torch(torch.load(Path(__file__).with_name("weights.pt"))))


# --------------------------------------------------------------- loss


def to_bins(image):
    """Drops the lower bits."""
    return torch.bitwise_right_shift(image, 8 - BITS).to(torch.float32)


def forward(net, batch):
    params, constants = unflatten(net.params()), unflatten(net.constants())
    x = (to_bins(batch["image"]) + batch["noise"]) * 2.0**-BITS - 0.5
    x = torch.movedim(x, 1, -1)
    latent, log_det, log_density = apply(params, constants, x, batch["label"])
    log_volume = -BITS * math.log(2.0) * x[0].numel()
    nll = -(log_density + log_det + log_volume)
    return {"nll": nll, "logits": classify(params["head"], latent)}


def cross_entropy(logits, label):
    """Of one example."""
    hot = nn.functional.one_hot(label, CLASSES).to(logits.dtype)
    return -torch.sum(hot * torch.log_softmax(logits, dim=-1))


def loss(output, batch):
    dims = batch["image"][0].numel()
    bits = torch.mean(output["nll"]) / dims * math.log2(math.e)
    label_loss = torch.mean(vmap(cross_entropy)(output["logits"], batch["label"]))
    return bits + LABEL_WEIGHT * label_loss


# --------------------------------------------------------------- transformations


def clip(delta):
    def update(updates, state):
        return tree_map(lambda g: torch.clamp(g, -delta, delta), updates), state

    return lambda params: {}, update


def clip_by_global_norm(max_norm):
    def update(updates, state):
        squares = [torch.sum(g**2) for g in updates.values()]
        norm = torch.sqrt(torch.sum(torch.stack(squares))) + 1e-6
        clipped = tree_map(lambda g: g / norm * max_norm, updates)
        keep = norm < max_norm
        return tree_map(lambda g, c: torch.where(keep, g, c), updates, clipped), state

    return lambda params: {}, update


def scale_by_adamax(b1=0.9, b2=0.98, eps=1e-7):
    def init(params):
        zeros = tree_map(torch.zeros_like, params)
        return {"mu": zeros, "nu": zeros, "count": 0}

    def update(updates, state):
        count = state["count"] + 1
        mu = tree_map(lambda g, m: b1 * m + (1.0 - b1) * g, updates, state["mu"])
        nu = tree_map(
            lambda g, n: torch.maximum(torch.abs(g) + eps, b2 * n), updates, state["nu"]
        )
        mu_hat = tree_map(lambda m: m / (1.0 - b1**count), mu)
        scaled = tree_map(lambda m, n: m / n, mu_hat, nu)
        return scaled, {"mu": mu, "nu": nu, "count": count}

    return init, update


def scale_by_schedule(schedule):
    def update(updates, state):
        rate = schedule(state["count"])
        return tree_map(lambda g: -rate * g, updates), {"count": state["count"] + 1}

    return lambda params: {"count": 0}, update


def chain(*transformations):
    def init(params):
        return [start(params) for start, _ in transformations]

    def update(updates, states):
        new = []
        for (_, change), state in zip(transformations, states):
            updates, state = change(updates, state)
            new.append(state)
        return updates, new

    return init, update


def ema(decay):
    """A pure state: averages and how many came in."""

    def update(params, state):
        count = state["count"] + 1
        average = tree_map(
            lambda p, a: decay * a + (1.0 - decay) * p, params, state["average"]
        )
        return average, {"average": average, "count": count}

    return lambda average: {"average": average, "count": 0}, update


def warmup_schedule(count):
    return PEAK_RATE * min(1.0, (count + 1) / WARMUP)


class Trainer(torch.optim.Optimizer):
    """Keeps the states between the steps."""

    def __init__(self, net):
        self.net = net
        super().__init__(list(net.params().values()), {})
        init, self.update = chain(
            clip(0.2),
            clip_by_global_norm(0.8),
            scale_by_adamax(),
            scale_by_schedule(warmup_schedule),
        )
        start_average, self.update_average = ema(AVERAGE_DECAY)
        self.opt_state = init({k: p.detach() for k, p in net.params().items()})
        self.ema_state = start_average(
            {k: a.clone() for k, a in net.averages().items()}
        )

    @torch.no_grad()
    def step(self, closure=None):
        params = self.net.params()
        gradients = {path: p.grad for path, p in params.items()}
        updates, self.opt_state = self.update(gradients, self.opt_state)
        for path, p in params.items():
            p.add_(updates[path])
        average, self.ema_state = self.update_average(params, self.ema_state)
        for path, value in self.net.averages().items():
            value.copy_(average[path])


def optimizer(net):
    return Trainer(net)
