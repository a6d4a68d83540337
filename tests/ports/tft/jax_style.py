"""Pure functions over nested dicts of arrays, as one writes it in JAX with optax.

Variables of a selection are stacked, and so are the blocks of attention; time goes first in
the scans. Letters of the einsums: b series, t and s days, n variables, d features,
o outputs, h heads, k features of a head.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

ENCODER_LEN, DECODER_LEN = 14, 5
NUM_HEADS, NUM_LAYERS, NUM_BLOCKS = 4, 2, 2
LEVELS = torch.tensor([0.1, 0.5, 0.9])
STATIC = ("store", "region", "size", "scale")
OBSERVED = ("sales", "temperature")
KNOWN = ("price", "time", "season", "weekday", "event")
CATEGORICAL = ("store", "region", "weekday", "event")


# --------------------------------------------------------------------- pytrees


def flatten(tree, prefix=""):
    """Nested dicts -> {"a/b/c": leaf}."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[prefix + key] = value
    return flat


def unflatten(flat):
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def tree_stack(trees):
    """Stack leaves of trees that are alike."""
    flats = [flatten(tree) for tree in trees]
    return unflatten({k: torch.stack([flat[k] for flat in flats]) for k in flats[0]})


def tree_index(tree, i):
    return unflatten({k: leaf[i] for k, leaf in flatten(tree).items()})


# ------------------------------------------------------------------- functions


def linear(p, x):
    y = torch.einsum("...d,do->...o", x, p["w"])
    return y + p["b"] if "b" in p else y


def stacked_linear(p, x):
    """Variables have weights of their own."""
    return torch.einsum("...nd,ndo->...no", x, p["w"]) + p["b"]


def layer_norm(p, x, eps=1e-5):
    centered = x - torch.mean(x, -1, keepdim=True)
    var = torch.mean(centered * centered, -1, keepdim=True)
    return p["scale"] * (centered / torch.sqrt(var + eps)) + p["offset"]


def elu(x):
    return torch.where(x > 0, x, torch.expm1(torch.clamp(x, max=0.0)))


def glu(x):
    value, gate = torch.tensor_split(x, 2, dim=-1)
    return value * torch.sigmoid(gate)


def softmax(x, axis=-1):
    return torch.exp(x - torch.logsumexp(x, axis, keepdim=True))


def gate_add_norm(p, x, residual, dense=linear):
    return layer_norm(p["norm"], residual + glu(dense(p["glu"], x)))


def grn(p, x, context=None, dense=linear):
    residual = dense(p["skip"], x) if "skip" in p else x
    hidden = dense(p["dense_1"], x)
    if context is not None:
        hidden = hidden + linear(p["context"], context)
    hidden = dense(p["dense_2"], elu(hidden))
    return gate_add_norm(p["gate"], hidden, residual, dense)


def select(p, xs, context=None):
    """[..., n, d] -> [..., d]"""
    flat = torch.reshape(xs, (*xs.shape[:-2], -1))
    weights = softmax(grn(p["weights"], flat, context))
    candidates = grn(p["variables"], xs, dense=stacked_linear)
    return torch.einsum("...n,...nd->...d", weights, candidates)


def scan(f, carry, *xs):
    ys = []
    for x in zip(*xs):
        carry, y = f(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


class LSTMState(NamedTuple):
    hidden: torch.Tensor
    cell: torch.Tensor


def lstm_step(p, state, inputs):
    """Gates i, g, f, o of one matrix; one is added to the forget gate."""
    x, alive = inputs
    gated = torch.cat([x, state.hidden], dim=-1) @ p["w"] + p["b"]
    i, g, f, o = torch.tensor_split(gated, 4, dim=-1)
    f = torch.sigmoid(f + 1.0)
    cell = f * state.cell + torch.sigmoid(i) * torch.tanh(g)
    hidden = torch.sigmoid(o) * torch.tanh(cell)
    new = LSTMState(
        torch.where(alive, hidden, state.hidden), torch.where(alive, cell, state.cell)
    )
    return new, new.hidden


def deep_lstm(p, states, xs, alive):
    """[t, b, d] through all layers; one list of states in, one out."""
    finals = []
    for layer, state in enumerate(states):
        step = partial(lstm_step, p[f"layer_{layer}"])
        final, xs = scan(step, state, xs, alive)
        finals.append(final)
    return finals, xs


def attend(p, x, bias):
    query = torch.einsum("btd,dhk->bhtk", x, p["query"]["w"])
    query = query + p["query"]["b"][:, None, :]
    key = torch.einsum("bsd,dhk->bhsk", x, p["key"]["w"])
    value = linear(p["value"], x)
    logits = torch.einsum("bhtk,bhsk->bhts", query, key) * key.shape[-1] ** -0.5
    weights = torch.mean(softmax(logits + bias), dim=1)
    return linear(p["out"], torch.einsum("bts,bsk->btk", weights, value)), weights


def fusion_block(p, x, bias):
    attended, weights = attend(p["attention"], x, bias)
    return grn(p["feed_forward"], gate_add_norm(p["gate"], attended, x)), weights


def attention_bias(lengths):
    """[b, 1, t, s]: 0 where day t may look at day s, else a very small number."""
    steps = ENCODER_LEN + DECODER_LEN
    day = torch.arange(steps)
    past = day[None, :] <= day[:, None]
    exists = (day < lengths[:, None]) | (day >= ENCODER_LEN)
    allowed = past[None, None] & exists[:, None, None, :]
    return torch.where(allowed, 0.0, torch.finfo(torch.float32).min)


def embed(p, inputs, names):
    """[..., n, d]"""
    embedded = []
    for name in names:
        if name == "event":
            table = F.pad(p[name]["table"], (0, 0, 1, 0))
            embedded.append(table[inputs[name]])
        elif name in CATEGORICAL:
            embedded.append(p[name]["table"][inputs[name]])
        else:
            embedded.append(linear(p[name], inputs[name]))
    return torch.stack(embedded, dim=-2)


def apply(params, inputs):
    emb = partial(embed, params["embed"], inputs)
    static = select(params["static"]["select"], emb(STATIC))
    contexts = {k: grn(p, static) for k, p in params["static"]["contexts"].items()}

    known = emb(KNOWN)
    c = contexts["select"][:, None]
    past = torch.cat([emb(OBSERVED), known[:, :ENCODER_LEN]], dim=2)
    past = select(params["past"]["select"], past, c)
    future = select(params["future"]["select"], known[:, ENCODER_LEN:], c)
    local = torch.cat([past, future], dim=1)

    lengths = inputs["lengths"]
    alive = torch.arange(ENCODER_LEN)[:, None] < lengths
    always = torch.ones(DECODER_LEN, len(lengths), dtype=torch.bool)
    states = [LSTMState(contexts["hidden"], contexts["cell"])] * NUM_LAYERS
    states, encoded = deep_lstm(
        params["past"]["lstm"], states, torch.swapaxes(past, 0, 1), alive[..., None]
    )
    _, decoded = deep_lstm(
        params["future"]["lstm"],
        states,
        torch.swapaxes(future, 0, 1),
        always[..., None],
    )
    sequence = torch.swapaxes(torch.cat([encoded, decoded]), 0, 1)
    temporal = gate_add_norm(params["fusion"]["lstm_gate"], sequence, local)

    x = grn(params["fusion"]["enrich"], temporal, contexts["enrich"][:, None])
    bias = attention_bias(lengths)
    for i in range(NUM_BLOCKS):
        x, weights = fusion_block(tree_index(params["fusion"]["blocks"], i), x, bias)

    x, temporal = x[:, ENCODER_LEN:], temporal[:, ENCODER_LEN:]
    x = gate_add_norm(params["fusion"]["final_gate"], x, temporal)
    return linear(params["head"], x), weights[:, ENCODER_LEN:]


# --------------------------------------------------------------------- weights


def load_linear(sd, name):
    p = {"w": sd[f"{name}.weight"].T}
    if f"{name}.bias" in sd:
        p["b"] = sd[f"{name}.bias"]
    return p


def load_gate(sd, name):
    norm = {"scale": sd[f"{name}.norm.weight"], "offset": sd[f"{name}.norm.bias"]}
    return {"glu": load_linear(sd, f"{name}.glu.fc"), "norm": norm}


def load_grn(sd, name):
    p = {
        "dense_1": load_linear(sd, f"{name}.fc1"),
        "dense_2": load_linear(sd, f"{name}.fc2"),
        "gate": load_gate(sd, f"{name}.gate"),
    }
    for part in ("context", "skip"):
        if f"{name}.{part}.weight" in sd:
            p[part] = load_linear(sd, f"{name}.{part}")
    return p


def load_selection(sd, name, count):
    """Norms and biases broadcast over the variables as [n, d]."""
    variables = [load_grn(sd, f"{name}.variables.{i}") for i in range(count)]
    return {
        "weights": load_grn(sd, f"{name}.weights"),
        "variables": tree_stack(variables),
    }


def reorder_gates(x):
    """i, f, g, o -> i, g, f, o, on the last axis."""
    i, f, g, o = torch.chunk(x, 4, dim=-1)
    return torch.cat([i, g, f, o], dim=-1)


def load_lstm(sd, name):
    layers = {}
    for layer in range(NUM_LAYERS):
        w = torch.cat(
            [sd[f"{name}.weight_ih_l{layer}"], sd[f"{name}.weight_hh_l{layer}"]], dim=1
        )
        b = reorder_gates(sd[f"{name}.bias_ih_l{layer}"])
        i, g, f, o = torch.chunk(b, 4)
        layers[f"layer_{layer}"] = {
            "w": reorder_gates(w.T),
            "b": torch.cat([i, g, f - 1.0, o]),
        }
    return layers


def load_block(sd, name):
    def heads(p):
        return {k: v.unflatten(-1, (NUM_HEADS, -1)) for k, v in p.items()}

    attention = {
        "query": heads(load_linear(sd, f"{name}.attention.q")),
        "key": heads(load_linear(sd, f"{name}.attention.k")),
        "value": load_linear(sd, f"{name}.attention.v"),
        "out": load_linear(sd, f"{name}.attention.out"),
    }
    return {
        "attention": attention,
        "gate": load_gate(sd, f"{name}.gate"),
        "feed_forward": load_grn(sd, f"{name}.grn"),
    }


def from_torch(sd):
    embeddings = {}
    for name in (*STATIC, *OBSERVED, *KNOWN):
        if name in CATEGORICAL:
            embeddings[name] = {"table": sd[f"{name}.weight"]}
        else:
            embeddings[name] = load_linear(sd, name)
    # No event has no row.
    embeddings["event"]["table"] = embeddings["event"]["table"][1:]
    contexts = {
        "select": load_grn(sd, "context_selection"),
        "enrich": load_grn(sd, "context_enrichment"),
        "hidden": load_grn(sd, "context_hidden"),
        "cell": load_grn(sd, "context_cell"),
    }
    return {
        "embed": embeddings,
        "static": {
            "select": load_selection(sd, "static_selection", len(STATIC)),
            "contexts": contexts,
        },
        "past": {
            "select": load_selection(sd, "past_selection", len(OBSERVED + KNOWN)),
            "lstm": load_lstm(sd, "encoder"),
        },
        "future": {
            "select": load_selection(sd, "future_selection", len(KNOWN)),
            "lstm": load_lstm(sd, "decoder"),
        },
        "fusion": {
            "lstm_gate": load_gate(sd, "lstm_gate"),
            "enrich": load_grn(sd, "enrichment"),
            "blocks": tree_stack(
                [load_block(sd, f"blocks.{i}") for i in range(NUM_BLOCKS)]
            ),
            "final_gate": load_gate(sd, "final_gate"),
        },
        "head": load_linear(sd, "head"),
    }


class Params(nn.Module):
    """The leaves, each under its path."""

    def __init__(self, tree):
        super().__init__()
        for path, leaf in flatten(tree).items():
            self.register_parameter(path, nn.Parameter(leaf.clone().contiguous()))

    def forward(self, inputs):
        return apply(unflatten(dict(self.named_parameters())), inputs)


def model():
    return Params(from_torch(torch.load(Path(__file__).with_name("weights.pt"))))


# ------------------------------------------------------------------------ data


def fourier(day, period=365.25):
    phase = 2.0 * math.pi * day / period
    return torch.stack([torch.sin(phase), torch.cos(phase)], dim=-1)


def preprocess(batch):
    lengths = batch["length"]
    offsets = torch.where(
        torch.arange(ENCODER_LEN + DECODER_LEN) < ENCODER_LEN,
        lengths[:, None],
        ENCODER_LEN,
    )
    time = torch.arange(ENCODER_LEN + DECODER_LEN) - offsets
    day = time + batch["origin"][:, None]
    exists = torch.arange(ENCODER_LEN) < lengths[:, None]
    mean = torch.sum(batch["sales"], 1, keepdim=True) / torch.sum(
        exists, 1, keepdim=True
    )
    scale = mean + 1.0
    inputs = {
        "store": batch["store"],
        "region": batch["region"],
        "size": torch.log(batch["surface"] / 400.0)[:, None],
        "scale": torch.log(scale),
        "sales": (batch["sales"] / scale)[..., None],
        "temperature": ((batch["temperature"] - 14.0) / 8.0)[..., None],
        "price": ((batch["price"] - 3.2) / 0.9)[..., None],
        "time": (time / ENCODER_LEN)[..., None],
        "season": fourier(day),
        "weekday": day % 7,
        "event": batch["event"],
        "lengths": lengths,
    }
    return inputs, scale


def forward(net, batch):
    inputs, scale = preprocess(batch)
    predictions, attention = net(inputs)
    return {"quantiles": predictions * scale[..., None], "attention": attention}


# ------------------------------------------------------------------------ loss


def pinball(error, levels):
    """The slope is the level above, and the level less one below."""
    return error * (levels - (error < 0).float())


def loss(output, batch):
    error = batch["target"][..., None] - output["quantiles"]
    weight = batch["counted"].float()
    losses = torch.einsum("btq,bt->", pinball(error, LEVELS), weight)
    return 2.0 * losses / torch.einsum("bt,bt->", torch.abs(batch["target"]), weight)


# ----------------------------------------------------------------------- optax


class Transform(NamedTuple):
    init: Any
    update: Any


def clip_by_global_norm(max_norm):
    def update(updates, state, params):
        squares = [torch.sum(g**2) for g in updates.values()]
        norm = torch.sqrt(torch.stack(squares).sum())
        factor = torch.where(norm < max_norm, 1.0, max_norm / norm)
        return {k: g * factor for k, g in updates.items()}, state

    return Transform(lambda params: None, update)


def scale_by_adam(b1, b2, eps):
    def init(params):
        zeros = {k: torch.zeros_like(p) for k, p in params.items()}
        return 0, zeros, zeros

    def update(updates, state, params):
        count, mu, nu = state
        count = count + 1
        mu = {k: b1 * mu[k] + (1.0 - b1) * g for k, g in updates.items()}
        nu = {k: b2 * nu[k] + (1.0 - b2) * g**2 for k, g in updates.items()}
        out = {}
        for k in updates:
            mu_hat = mu[k] / (1.0 - b1**count)
            nu_hat = nu[k] / (1.0 - b2**count)
            out[k] = mu_hat / (torch.sqrt(nu_hat) + eps)
        return out, (count, mu, nu)

    return Transform(init, update)


def add_decayed_weights(rate, mask):
    def update(updates, state, params):
        decayed = {
            k: u + rate * params[k] if mask(k) else u for k, u in updates.items()
        }
        return decayed, state

    return Transform(lambda params: None, update)


def scale_by_learning_rate(schedule):
    def update(updates, count, params):
        return {k: -schedule(count) * u for k, u in updates.items()}, count + 1

    return Transform(lambda params: 0, update)


def exponential_decay(init_value, decay_rate):
    return lambda count: init_value * decay_rate**count


class Chain(torch.optim.Optimizer):
    def __init__(self, params, *transforms):
        super().__init__(list(params.values()), {})
        self.params = params
        self.transforms = transforms
        self.states = [t.init(params) for t in transforms]

    @torch.no_grad()
    def step(self, closure=None):
        updates = {k: p.grad for k, p in self.params.items()}
        for n, transform in enumerate(self.transforms):
            updates, self.states[n] = transform.update(
                updates, self.states[n], self.params
            )
        for k, p in self.params.items():
            p.add_(updates[k])


def optimizer(net):
    return Chain(
        dict(net.named_parameters()),
        clip_by_global_norm(0.5),
        scale_by_adam(b1=0.9, b2=0.98, eps=1e-6),
        add_decayed_weights(0.05, mask=lambda path: path.endswith("/w")),
        scale_by_learning_rate(exponential_decay(4e-3, 0.8)),
    )
