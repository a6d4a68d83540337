"""From a JAX and Haiku code base: pure functions over nested dicts of parameters and of state.

Pictures are NHWC. A convolution is a product of windows and a kernel (height, width, in, out).
Averages are those of hk.ExponentialMovingAverage: hidden, average, and a counter.
"""

import math
from pathlib import Path

import torch
from torch import nn

STAGES = ((2, 1), (2, 2), (2, 2))  # blocks and stride
NUM_CLASSES = 7

# ---------------------------------------------------------------------- trees


def tree_map(function, tree, *others):
    if isinstance(tree, dict):
        return {
            key: tree_map(function, value, *(other[key] for other in others))
            for key, value in tree.items()
        }
    return function(tree, *others)


def flatten(tree, path=()):
    """Pairs of a path and a leaf."""
    if not isinstance(tree, dict):
        return [("/".join(path), tree)]
    return [
        pair for key, value in tree.items() for pair in flatten(value, (*path, key))
    ]


def tree_multimap_with_name(function, tree, name=""):
    if isinstance(tree, dict):
        return {
            key: tree_multimap_with_name(function, value, key)
            for key, value in tree.items()
        }
    return function(name, tree)


def merge(tree, path, values):
    """A tree with other values of one module."""
    head, *rest = path
    below = tree.get(head, {})
    return {**tree, head: merge(below, rest, values) if rest else values}


# -------------------------------------------------------------------- modules


def leaky_relu(x, negative_slope=0.1):
    return torch.where(x >= 0, x, negative_slope * x)


def conv(w, x, stride, padding):
    x = nn.functional.pad(x, (0, 0, padding, padding, padding, padding))
    windows = x.unfold(1, w.shape[0], stride).unfold(2, w.shape[1], stride)
    return torch.tensordot(windows, w, dims=((4, 5, 3), (0, 1, 2)))


def moving_average(old, value, decay, zero_debias):
    """hk.ExponentialMovingAverage of one array."""
    counter = old["counter"] + 1
    hidden = old["hidden"] * decay + value * (1.0 - decay)
    average = hidden
    if zero_debias:
        average = hidden / (1.0 - torch.pow(decay, counter))
    return {"counter": counter, "hidden": hidden, "average": average}


def batch_norm(params, state, x, is_training, eps=1e-5, decay_rate=0.9):
    """Return the normed x and the new state."""
    if is_training:
        mean = torch.mean(x, dim=(0, 1, 2))
        mean_of_squares = torch.mean(x * x, dim=(0, 1, 2))
        var = mean_of_squares - mean * mean
        rows = x.shape[0] * x.shape[1] * x.shape[2]
        seen = {"mean_ema": mean.detach(), "var_ema": var.detach() * rows / (rows - 1)}
        state = {
            name: moving_average(state[name], seen[name], decay_rate, zero_debias=False)
            for name in state
        }
    else:
        mean = state["mean_ema"]["average"]
        var = state["var_ema"]["average"]
    inv = params["scale"] * torch.rsqrt(var + eps)
    return (x - mean) * inv + params["offset"], state


def block(params, state, x, stride, is_training):
    new = {}
    h, new["norm_0"] = batch_norm(params["norm_0"], state["norm_0"], x, is_training)
    h = leaky_relu(h)
    shortcut = x
    if "shortcut" in params:
        shortcut = conv(params["shortcut"]["w"], h, stride, padding=0)
    h = conv(params["conv_0"]["w"], h, stride, padding=1)
    h, new["norm_1"] = batch_norm(params["norm_1"], state["norm_1"], h, is_training)
    h = conv(params["conv_1"]["w"], leaky_relu(h), 1, padding=1)
    return h + shortcut, new


def wide_resnet(params, state, x, is_training):
    new = {}
    x = conv(params["initial_conv"]["w"], x, 1, padding=1)
    for i, (blocks, first_stride) in enumerate(STAGES):
        for j in range(blocks):
            name = f"group_{i}_block_{j}"
            stride = first_stride if j == 0 else 1
            x, new[name] = block(params[name], state[name], x, stride, is_training)
    x, new["final_norm"] = batch_norm(
        params["final_norm"], state["final_norm"], x, is_training
    )
    pooled = torch.einsum("nhwc->nc", leaky_relu(x)) / (x.shape[1] * x.shape[2])
    return pooled @ params["logits"]["w"] + params["logits"]["b"], new


class TrainState(nn.Module):
    """Holds the leaves of all trees by their paths."""

    def __init__(self, params, state, ema):
        super().__init__()
        self.shapes = {}
        for root, tree in (("params", params), ("state", state), ("ema", ema)):
            self.shapes[root] = tree_map(lambda x: None, tree)
            for path, value in flatten(tree, (root,)):
                value = value.clone().contiguous()
                if root == "params":
                    self.register_parameter(path, nn.Parameter(value))
                else:
                    self.register_buffer(path, value)

    def tree(self, root):
        def read(tree, path):
            if not isinstance(tree, dict):
                return getattr(self, path)
            return {key: read(value, f"{path}/{key}") for key, value in tree.items()}

        return read(self.shapes[root], root)

    @torch.no_grad()
    def store(self, root, tree):
        for path, value in flatten(tree, (root,)):
            getattr(self, path).copy_(value)

    def forward(self, inputs, teacher_inputs):
        ema = self.tree("ema")
        averaged = {
            root: ema_values(ema[root], "average") for root in ("params", "state")
        }
        target, _ = wide_resnet(
            averaged["params"], averaged["state"], teacher_inputs, is_training=False
        )
        logits, state = wide_resnet(
            self.tree("params"), self.tree("state"), inputs, is_training=self.training
        )
        if self.training:
            self.store("state", state)
        return {"logits": logits, "target": target.detach()}


# ----------------------------------------------------------- averages of trees


def is_average(tree):
    return isinstance(tree, dict) and "hidden" in tree


def ema_values(tree, name):
    """A tree of averages, or of what is hidden; statistics keep their own ``average``."""
    if is_average(tree):
        return tree[name]
    return {key: ema_values(value, name) for key, value in tree.items()}


def ema_update(ema, tree, decay=0.9):
    """hk.EMAParamsTree."""
    if is_average(ema):
        return moving_average(ema, tree, decay, zero_debias=True)
    return {key: ema_update(ema[key], tree[key], decay) for key in ema}


def ema_init(tree, counter, decay=0.9):
    """As if there had been that many updates."""

    def init(average):
        hidden = average * (1.0 - decay**counter)
        return {"counter": counter, "hidden": hidden, "average": average}

    return tree_map(init, tree)


def statistics(state):
    """Without counters and hidden values."""
    if is_average(state):
        return {"average": state["average"]}
    return {key: statistics(value) for key, value in state.items()}


# ------------------------------------------------------------------ checkpoint


def convert(checkpoint, root):
    params, state = {}, {}

    def weight(name):
        return checkpoint[f"{root}.{name}.weight"]

    def put_conv(path, name):
        nonlocal params
        params = merge(params, path, {"w": weight(name).permute(2, 3, 1, 0)})

    def put_norm(path, name):
        nonlocal params, state
        offset = checkpoint[f"{root}.{name}.bias"]
        params = merge(params, path, {"scale": weight(name), "offset": offset})
        emas = {}
        for key, buffer in (("mean_ema", "running_mean"), ("var_ema", "running_var")):
            value = checkpoint[f"{root}.{name}.{buffer}"]
            counter = torch.zeros((), dtype=torch.long)
            emas[key] = {"counter": counter, "hidden": value, "average": value}
        state = merge(state, path, emas)

    put_conv(["initial_conv"], "conv1")
    for i, (blocks, _) in enumerate(STAGES):
        for j in range(blocks):
            path, name = f"group_{i}_block_{j}", f"group{i + 1}.{j}"
            for k in range(2):
                put_norm([path, f"norm_{k}"], f"{name}.bn{k + 1}")
                put_conv([path, f"conv_{k}"], f"{name}.conv{k + 1}")
            if f"{root}.{name}.shortcut.weight" in checkpoint:
                put_conv([path, "shortcut"], f"{name}.shortcut")
    put_norm(["final_norm"], "bn")
    logits = {"w": weight("fc").t(), "b": checkpoint[f"{root}.fc.bias"]}
    return merge(params, ["logits"], logits), state


def model():
    checkpoint = torch.load(Path(__file__).with_name("weights.pt"))
    params, state = convert(checkpoint, "student")
    averaged, averaged_state = convert(checkpoint, "teacher")
    counter = checkpoint["updates"]
    ema = {
        "params": ema_init(averaged, counter),
        "state": ema_init(statistics(averaged_state), counter),
    }
    return TrainState(params, state, ema)


# ------------------------------------------------------------------------ data


def sources(offset, size, pad=2):
    """Where the pixels of a crop come from, mirrored at the borders without the edge."""
    index = torch.arange(size) + offset[:, None] - pad
    index = torch.abs(index)
    return (size - 1) - torch.abs((size - 1) - index)


def augment(batch):
    image = batch["image"].float()
    n, height, width, _ = image.shape
    rows = sources(batch["offset"][:, 0], height)
    cols = sources(batch["offset"][:, 1], width)
    cols = torch.where(batch["flip"][:, None], torch.flip(cols, (1,)), cols)
    image = image[torch.arange(n)[:, None, None], rows[:, :, None], cols[:, None, :]]
    mean = image.new_tensor([0.4914, 0.4822, 0.4465])
    std = image.new_tensor([0.2470, 0.2435, 0.2616])
    return (image / 255.0 - mean) / std


def hole_mask(center, size, hole=6):
    """One outside of the hole's rows and columns."""

    def inside(c):
        position = torch.arange(size)
        low, high = c[:, None] - hole // 2, c[:, None] + hole // 2
        return ((position >= low) & (position < high)).float()

    rows, cols = inside(center[:, 0]), inside(center[:, 1])
    return 1.0 - torch.einsum("nh,nw->nhw", rows, cols)


def interpolate(lam, x, y):
    return y + lam.reshape(-1, *[1] * (x.ndim - 1)) * (x - y)


def forward(net, batch):
    image = augment(batch)
    holed = image * hole_mask(batch["hole"], image.shape[1])[..., None]
    mixed = interpolate(batch["lam"], holed, holed[batch["partner"]])
    return net(mixed, image)


# ------------------------------------------------------------------------ loss


def log_softmax(x):
    shifted = x - torch.amax(x, dim=-1, keepdim=True).detach()
    return shifted - torch.log(torch.sum(torch.exp(shifted), dim=-1, keepdim=True))


def smooth_labels(labels, alpha):
    return labels + alpha * (1.0 / NUM_CLASSES - labels)


def loss(output, batch, temperature=0.5, consistency_weight=8.0):
    lam, partner = batch["lam"], batch["partner"]
    labels = torch.eye(NUM_CLASSES)[batch["label"]]
    labels = smooth_labels(labels, alpha=0.1)
    labels = interpolate(lam, labels, labels[partner])
    log_probs = log_softmax(output["logits"])
    entropy = -torch.einsum("nc,nc->n", labels, log_probs)

    guess = torch.softmax(output["target"] / temperature, dim=-1)
    guess = interpolate(lam, guess, guess[partner])
    error = torch.exp(log_probs) - guess
    consistency = torch.einsum("nc,nc->n", error, error) / NUM_CLASSES
    return torch.mean(entropy + consistency_weight * consistency)


# ----------------------------------------------------------------- optax-like


def chain(*transforms):
    def init(params):
        return [init(params) for init, _ in transforms]

    def update(updates, states, params):
        new_states = []
        for (_, transform), state in zip(transforms, states):
            updates, state = transform(updates, state, params)
            new_states.append(state)
        return updates, new_states

    return init, update


def add_decayed_weights(weight_decay, mask):
    def update(updates, state, params):
        def decayed(u, p, masked):
            return u + weight_decay * p if masked else u

        return tree_map(decayed, updates, params, mask(params)), state

    return (lambda params: None), update


def trace(decay, nesterov):
    def init(params):
        return tree_map(torch.zeros_like, params)

    def update(updates, state, params):
        def add(u, t):
            return u + decay * t

        new_trace = tree_map(add, updates, state)
        updates = tree_map(add, updates, new_trace) if nesterov else new_trace
        return updates, new_trace

    return init, update


def scale_by_learning_rate(schedule):
    def update(updates, count, params):
        rate = schedule(count)
        return tree_map(lambda u: -rate * u, updates), count + 1

    return (lambda params: 0), update


def join_schedules(first, second, boundary):
    """The second one counts from the boundary."""
    return lambda count: first(count) if count < boundary else second(count - boundary)


def learning_rate(base=0.1, warmup=2, total=12):
    def rise(count):
        return base * (count + 1) / warmup

    def fall(count):
        return base * math.cos(7.0 * math.pi * (count + 1) / (16.0 * (total - warmup)))

    return join_schedules(rise, fall, warmup)


def decay_mask(params):
    return tree_multimap_with_name(lambda name, _: name == "w", params)


class Updater(torch.optim.Optimizer):
    def __init__(self, net):
        self.net = net
        params = net.tree("params")
        super().__init__([leaf for _, leaf in flatten(params)], {})
        self.init, self.update = chain(
            add_decayed_weights(0.02, decay_mask),
            trace(decay=0.9, nesterov=True),
            scale_by_learning_rate(learning_rate()),
        )
        self.opt_state = self.init(params)

    @torch.no_grad()
    def step(self, closure=None):
        params = self.net.tree("params")
        grads = tree_map(lambda p: p.grad, params)
        updates, self.opt_state = self.update(grads, self.opt_state, params)
        new_params = tree_map(torch.add, params, updates)
        averaged = {
            "params": new_params,
            "state": statistics(self.net.tree("state")),
        }
        self.net.store("ema", ema_update(self.net.tree("ema"), averaged))
        self.net.store("params", new_params)


def optimizer(net):
    return Updater(net)
