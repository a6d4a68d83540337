"""After JAX: nested dicts of arrays, pure functions, a chain of gradient transformations.

Convolutions are einsums over patches. Letters of the einsums: b batch, l tokens, m reduced
tokens, d features, h heads, k features of a head. Pictures stay blue first.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn


class StageConfig(NamedTuple):
    window: int
    stride: int
    depth: int
    heads: int
    reduction: int


STAGES = {
    "stage_0": StageConfig(window=7, stride=4, depth=2, heads=2, reduction=4),
    "stage_1": StageConfig(window=3, stride=2, depth=2, heads=2, reduction=2),
    "stage_2": StageConfig(window=3, stride=2, depth=1, heads=4, reduction=1),
}
HEIGHT, WIDTH = 60, 76
UNLABELLED = -1
BN_EPS, BN_DECAY = 1e-5, 0.9
# Blue, green, red.
PIXEL_MEAN = torch.tensor([103.53, 116.28, 123.675])
PIXEL_STD = torch.tensor([57.375, 57.12, 58.395])

# -------------------------------------------------------------------------- trees


def tree_map(function, tree, *rest):
    """None is a place without a leaf."""
    if isinstance(tree, dict):
        return {
            k: tree_map(function, v, *(r[k] for r in rest)) for k, v in tree.items()
        }
    return None if tree is None else function(tree, *rest)


def tree_map_with_path(function, tree, path=()):
    if isinstance(tree, dict):
        return {k: tree_map_with_path(function, v, (*path, k)) for k, v in tree.items()}
    return function(path, tree)


def tree_leaves(tree):
    if isinstance(tree, dict):
        return [leaf for v in tree.values() for leaf in tree_leaves(v)]
    return [] if tree is None else [tree]


# --------------------------------------------------------------------- custom_vjp


class Standardize(torch.autograd.Function):
    """Mean 0 and variance 1 over the features."""

    @staticmethod
    def forward(ctx, x, eps):
        mean = torch.mean(x, dim=-1, keepdim=True)
        var = torch.mean(torch.square(x - mean), dim=-1, keepdim=True)
        rstd = torch.rsqrt(var + eps)
        y = (x - mean) * rstd
        ctx.save_for_backward(y, rstd)
        return y

    @staticmethod
    def backward(ctx, g):
        y, rstd = ctx.saved_tensors
        along = torch.mean(g * y, dim=-1, keepdim=True)
        return rstd * (g - torch.mean(g, dim=-1, keepdim=True) - y * along), None


# ---------------------------------------------------------------------- functions


def dense(p, x):
    y = torch.einsum("...i,io->...o", x, p["kernel"])
    return y + p["bias"] if "bias" in p else y


def layer_norm(p, x, eps=1e-6):
    y = Standardize.apply(x, eps) * p["scale"]
    return y + p["offset"] if "offset" in p else y


def gelu(x, approximate=False):
    if approximate:
        cubic = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
        return x * 0.5 * (1.0 + torch.tanh(cubic))
    return x * 0.5 * torch.erfc(-x / math.sqrt(2.0))


def to_grid(x, grid):
    """[b, l, d] -> [b, d, rows, columns]."""
    return x.mT.unflatten(-1, grid)


def patches(x, window, stride, pad):
    """[b, d, rows, columns] -> [b, d * window * window, l], and the new grid."""
    grid = tuple((side + 2 * pad - window) // stride + 1 for side in x.shape[2:])
    return nn.functional.unfold(x, window, padding=pad, stride=stride), grid


def conv(p, x, window, stride, pad=0):
    """[b, d, rows, columns] -> tokens [b, l, e], and their grid."""
    cols, grid = patches(x, window, stride, pad)
    return torch.einsum("bpl,pe->ble", cols, p["kernel"]) + p["bias"], grid


def depthwise(p, x, grid):
    """Tokens to tokens; the kernel is [taps, d]."""
    cols, _ = patches(to_grid(x, grid), 3, 1, 1)
    cols = cols.unflatten(1, (x.shape[-1], -1))
    return torch.einsum("bdtl,td->bld", cols, p["kernel"]) + p["bias"]


def attention(p, x, grid, cfg):
    query = torch.einsum("bld,dhk->bhlk", x, p["query"]["kernel"])
    query = query + p["query"]["bias"][:, None, :]
    memory = x
    if cfg.reduction > 1:
        memory, _ = conv(p["reduce"], to_grid(x, grid), cfg.reduction, cfg.reduction)
        memory = layer_norm(p["reduce_norm"], memory, eps=1e-5)
    key = torch.einsum("bmd,dhk->bhmk", memory, p["key"]["kernel"])
    value = torch.einsum("bmd,dhk->bhmk", memory, p["value"]["kernel"])
    query = query * query.shape[-1] ** -0.5
    logits = torch.einsum("bhlk,bhmk->bhlm", query, key)
    weights = torch.exp(logits - torch.logsumexp(logits, dim=-1, keepdim=True))
    mixed = torch.einsum("bhlm,bhmk->blhk", weights, value)
    out = torch.einsum("blhk,hkd->bld", mixed, p["out"]["kernel"])
    return out + p["out"]["bias"]


def mix_mlp(p, x, grid):
    x = depthwise(p["mix"], dense(p["up"], x), grid)
    return dense(p["down"], gelu(x))


def block(p, x, grid, cfg):
    x = x + attention(p["attention"], layer_norm(p["ln_1"], x), grid, cfg)
    return x + mix_mlp(p["mlp"], layer_norm(p["ln_2"], x), grid)


def stage(p, x, cfg):
    """Grid in, grid out."""
    x, grid = conv(p["embed"], x, cfg.window, cfg.stride, cfg.window // 2)
    x = layer_norm(p["embed_norm"], x, eps=1e-5)
    for i in range(cfg.depth):
        x = block(p[f"block_{i}"], x, grid, cfg)
    return to_grid(layer_norm(p["ln_out"], x), grid)


def resize_matrix(old, new):
    """Triangles around the places of the output; shares come to one. [new, old]"""
    places = (torch.arange(new) + 0.5) * old / new - 0.5
    near = torch.relu(1.0 - torch.abs(places[:, None] - torch.arange(old)))
    return near / torch.sum(near, dim=1, keepdim=True)


def batch_norm(p, stats, x, train):
    """[b, rows, columns, d]; return the normed x and the new averages."""
    mean, var = stats["mean"], stats["var"]
    if train:
        mean = torch.mean(x, dim=(0, 1, 2))
        var = torch.mean(torch.square(x), dim=(0, 1, 2)) - torch.square(mean)
        count = x[..., 0].numel()
        seen = {"mean": mean, "var": var * count / (count - 1)}
        stats = tree_map(
            lambda old, new: BN_DECAY * old + (1.0 - BN_DECAY) * new, stats, seen
        )
    y = (x - mean) / torch.sqrt(var + BN_EPS)
    return y * p["scale"] + p["offset"], stats


def head(p, stats, features, train):
    """Every stage has a kernel of its own for the fusion; what they give is added."""
    new = features["stage_0"].shape[2:]
    fused = 0.0
    for name, x in features.items():
        rows, cols = (resize_matrix(a, b) for a, b in zip(x.shape[2:], new))
        x = torch.einsum("bdij,de->bije", x, p["project"][name]["kernel"])
        x = torch.einsum("ri,cj,bije->brce", rows, cols, x)
        fused = fused + dense(p["fuse"][name], x)
    y, stats = batch_norm(p["norm"], stats, fused, train)
    return dense(p["classify"], torch.relu(y)), stats


def apply(params, state, x, train):
    """[b, 3, rows, columns] -> logits [b, rows / 4, columns / 4, classes], new state."""
    features = {}
    for name, cfg in STAGES.items():
        x = stage(params["backbone"][name], x, cfg)
        features[name] = x
    logits, stats = head(params["head"], state["head"], features, train)
    return logits, {"head": stats}


# ------------------------------------------------------------------------ weights


def load_dense(state, name, **split):
    """[out, in] or a convolution's -> [in, out]; ``heads`` or ``merge`` split an axis."""
    p = {"kernel": state[name + ".weight"].flatten(1).T}
    if name + ".bias" in state:
        p["bias"] = state[name + ".bias"]
    if "heads" in split:
        p = {k: v.unflatten(-1, (split["heads"], -1)) for k, v in p.items()}
    if "merge" in split:
        p["kernel"] = p["kernel"].unflatten(0, (split["merge"], -1))
    return p


def load_norm(state, name):
    p = {"scale": state[name + ".weight"]}
    if name + ".bias" in state:
        p["offset"] = state[name + ".bias"]
    return p


def load_block(state, name, cfg):
    kv = load_dense(state, name + ".attn.kv")["kernel"]
    key, value = torch.chunk(kv, 2, dim=1)
    attn = {
        "query": load_dense(state, name + ".attn.q", heads=cfg.heads),
        "key": {"kernel": key.unflatten(1, (cfg.heads, -1))},
        "value": {"kernel": value.unflatten(1, (cfg.heads, -1))},
        "out": load_dense(state, name + ".attn.proj", merge=cfg.heads),
    }
    if cfg.reduction > 1:
        attn["reduce"] = load_dense(state, name + ".attn.sr")
        attn["reduce_norm"] = load_norm(state, name + ".attn.norm")
    return {
        "ln_1": load_norm(state, name + ".norm1"),
        "attention": attn,
        "ln_2": load_norm(state, name + ".norm2"),
        "mlp": {
            "up": load_dense(state, name + ".mlp.fc1"),
            "mix": load_dense(state, name + ".mlp.dwconv"),
            "down": load_dense(state, name + ".mlp.fc2"),
        },
    }


def load_stage(state, name, cfg):
    p = {
        "embed": load_dense(state, name + ".patch_embed.proj"),
        "embed_norm": load_norm(state, name + ".patch_embed.norm"),
        "ln_out": load_norm(state, name + ".norm"),
    }
    for i in range(cfg.depth):
        p[f"block_{i}"] = load_block(state, f"{name}.blocks.{i}", cfg)
    return p


def convert(state):
    """PyTorch's state dict -> (params, state)."""
    backbone = {
        name: load_stage(state, f"backbone.stages.{i}", cfg)
        for i, (name, cfg) in enumerate(STAGES.items())
    }
    # Blue comes first here.
    embed = backbone["stage_0"]["embed"]
    embed["kernel"] = embed["kernel"].unflatten(0, (3, -1)).flip(0).flatten(0, 1)

    fuse = load_dense(state, "decode_head.linear_fuse")["kernel"]
    parts = torch.chunk(fuse, len(STAGES))
    decode_head = {
        "project": {
            name: load_dense(state, f"decode_head.linear_c.{i}")
            for i, name in enumerate(STAGES)
        },
        "fuse": {n: {"kernel": w} for n, w in zip(STAGES, reversed(parts))},
        "norm": load_norm(state, "decode_head.bn"),
        "classify": load_dense(state, "decode_head.linear_pred"),
    }
    stats = {
        "mean": state["decode_head.bn.running_mean"],
        "var": state["decode_head.bn.running_var"],
    }
    return {"backbone": backbone, "head": decode_head}, {"head": stats}


class Leaves(nn.Module):
    """Holds a nested dict of arrays."""

    def __init__(self, tree, trained):
        super().__init__()
        for name, value in tree.items():
            if isinstance(value, dict):
                self.add_module(name, Leaves(value, trained))
            elif trained:
                self.register_parameter(name, nn.Parameter(value.clone().contiguous()))
            else:
                self.register_buffer(name, value.clone())

    def tree(self):
        below = {name: module.tree() for name, module in self.named_children()}
        return below | self._parameters | self._buffers


class TrainState(nn.Module):
    def __init__(self, params, state):
        super().__init__()
        self.params = Leaves(params, trained=True)
        self.state = Leaves(state, trained=False)

    def forward(self, x):
        state = self.state.tree()
        logits, new_state = apply(self.params.tree(), state, x, self.training)
        with torch.no_grad():
            tree_map(lambda old, new: old.copy_(new), state, new_state)
        return logits


def model():
    return TrainState(*convert(torch.load(Path(__file__).with_name("weights.pt"))))


# --------------------------------------------------------------------------- data


def mirrored(x, flip):
    """[b, rows, columns, ...]: some from left to right."""
    flip = flip.reshape(-1, *[1] * (x.ndim - 1))
    return torch.where(flip, torch.flip(x, (2,)), x)


def onto_canvas(x, value):
    canvas = torch.full((len(x), HEIGHT, WIDTH, *x.shape[3:]), value, dtype=x.dtype)
    canvas[:, : x.shape[1], : x.shape[2]] = x
    return canvas


def prepare(batch):
    x = batch["image"].float() * (1.0 / PIXEL_STD) - PIXEL_MEAN / PIXEL_STD
    x = onto_canvas(mirrored(x, batch["flip"]), 0.0)
    return torch.permute(x, (0, 3, 1, 2))


def forward(net, batch):
    return torch.permute(net(prepare(batch)), (0, 3, 1, 2))


# --------------------------------------------------------------------------- loss

CLASS_WEIGHTS = torch.tensor([0.5, 1.2, 0.9, 1.6, 0.8, 1.3])
SMOOTHING = 0.1
DICE = 0.7


def quarter_labels(batch):
    """[b, l]; a fourth of the rows and columns; -1 is without a label."""
    labels = mirrored(batch["label"].long() - 1, batch["flip"])
    return onto_canvas(labels, UNLABELLED)[:, ::4, ::4].flatten(1)


def cross_entropy(log_p, safe, known):
    """Shares of the label and of all classes, each with its weight."""
    picked = torch.gather(log_p, 2, safe[..., None])[..., 0]
    weight = CLASS_WEIGHTS[safe] * known
    nll = -torch.sum(weight * picked)
    uniform = -torch.sum(torch.einsum("blc,c->bl", log_p, CLASS_WEIGHTS) * known)
    smooth = SMOOTHING / log_p.shape[-1]
    return ((1.0 - SMOOTHING) * nll + smooth * uniform) / torch.sum(weight)


def segment_sum(values, segments, count):
    """[b, l] -> [b, count]."""
    zeros = values.new_zeros(len(values), count)
    return zeros.scatter_add(1, segments, values)


def soft_dice(log_p, safe, known):
    p = torch.exp(log_p)
    classes = p.shape[-1]
    hit = torch.gather(p, 2, safe[..., None])[..., 0] * known
    both = segment_sum(hit, safe, classes)
    area = segment_sum(known, safe, classes)
    square = torch.einsum("blc,blc,bl->bc", p, p, known)
    return torch.mean(1.0 - (2.0 * both + 1.0) / (area + square + 1.0))


def loss(output, batch):
    logits = output.flatten(2).mT
    labels = quarter_labels(batch)
    known = (labels != UNLABELLED).float()
    safe = torch.clamp(labels, min=0)
    log_p = torch.log_softmax(logits, dim=-1)
    return cross_entropy(log_p, safe, known) + DICE * soft_dice(log_p, safe, known)


# ---------------------------------------------------------------------- optimizer


def linear_schedule(init_value, end_value, transition_steps):
    def schedule(count):
        share = min(count / transition_steps, 1.0)
        return init_value + (end_value - init_value) * share

    return schedule


def polynomial_schedule(init_value, end_value, power, transition_steps):
    def schedule(count):
        share = 1.0 - min(count, transition_steps) / transition_steps
        return (init_value - end_value) * share**power + end_value

    return schedule


def join_schedules(first, second, boundary):
    return lambda count: first(count) if count < boundary else second(count - boundary)


def scale_by_adam(b1=0.9, b2=0.999, eps=1e-8):
    def init(params):
        zeros = tree_map(torch.zeros_like, params)
        return 0, zeros, zeros

    def update(grads, state, params):
        count, mu, nu = state
        count = count + 1
        mu = tree_map(lambda g, m: (1 - b1) * g + b1 * m, grads, mu)
        nu = tree_map(lambda g, v: (1 - b2) * g**2 + b2 * v, grads, nu)
        mu_hat = tree_map(lambda m: m / (1 - b1**count), mu)
        nu_hat = tree_map(lambda v: v / (1 - b2**count), nu)
        updates = tree_map(lambda m, v: m / (torch.sqrt(v) + eps), mu_hat, nu_hat)
        return updates, (count, mu, nu)

    return init, update


def add_decayed_weights(weight_decay, mask):
    def update(updates, state, params):
        decayed = tree_map(
            lambda u, p, m: u + weight_decay * p if m else u,
            updates,
            params,
            mask(params),
        )
        return decayed, state

    return lambda params: (), update


def scale_by_schedule(schedule):
    def update(updates, count, params):
        rate = schedule(count)
        return tree_map(lambda u: -rate * u, updates), count + 1

    return lambda params: 0, update


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


def multi_transform(transforms, label):
    """Each leaf has the transformation of its label."""

    def only(which, tree):
        return tree_map_with_path(
            lambda path, leaf: leaf if label(path) == which else None, tree
        )

    def init(params):
        return {k: init(only(k, params)) for k, (init, _) in transforms.items()}

    def update(updates, states, params):
        new_states, parts = {}, []
        for k, (_, transform) in transforms.items():
            masked, masked_params = only(k, updates), only(k, params)
            part, new_states[k] = transform(masked, states[k], masked_params)
            parts.append(part)
        return merged(parts), new_states

    return init, update


def merged(parts):
    """Trees with None, of which one has a leaf at each place."""
    if isinstance(parts[0], dict):
        return {k: merged([part[k] for part in parts]) for k in parts[0]}
    return next(part for part in parts if part is not None)


def adamw(learning_rate, weight_decay, mask):
    return chain(
        scale_by_adam(),
        add_decayed_weights(weight_decay, mask),
        scale_by_schedule(learning_rate),
    )


def decay_mask(params):
    return tree_map_with_path(lambda path, _: path[-1] == "kernel", params)


def learning_rate(peak):
    return join_schedules(
        linear_schedule(0.3 * peak, peak, transition_steps=2),
        polynomial_schedule(peak, 0.0, power=0.9, transition_steps=10),
        boundary=2,
    )


class Optimizer(torch.optim.Optimizer):
    def __init__(self, params, transform):
        super().__init__(tree_leaves(params), {})
        self.params = params
        init, self.update = transform
        self.opt_state = init(params)

    @torch.no_grad()
    def step(self, closure=None):
        grads = tree_map(lambda p: p.grad, self.params)
        updates, self.opt_state = self.update(grads, self.opt_state, self.params)
        tree_map(lambda p, u: p.add_(u), self.params, updates)


def optimizer(net):
    transforms = {
        "backbone": adamw(learning_rate(2e-3), 0.1, decay_mask),
        "head": adamw(learning_rate(2e-2), 0.1, decay_mask),
    }
    return Optimizer(
        net.params.tree(), multi_transform(transforms, lambda path: path[0])
    )
