"""After Haiku: modules ask for arrays by name, a transformed function, a chain as in optax.

Both halves of the channels have a projection of their own, and so have queries, keys and
values. Positions are the last axis where they are mixed: w is [heads, from, to].
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCAB_SIZE, PAD_ID = 37, 0
MODEL_SIZE, GATE_SIZE, KEY_SIZE = 24, 24, 12
NUM_LAYERS, NUM_GROUPS, MAX_LEN = 3, 2, 16

# ---------------------------------------------------------------------- haiku


class Scope:
    params = None
    path: tuple[str, ...] = ()


def get_parameter(name):
    return Scope.params["/".join(Scope.path)][name]


def transform(function):
    """Returns apply(params, *args)."""

    def apply(params, *args):
        Scope.params = params
        try:
            return function(*args)
        finally:
            Scope.params = None

    return apply


class Module:
    call: Any

    def __init__(self, name):
        self.name = name

    def __call__(self, *args):
        outer = Scope.path
        Scope.path = (*outer, self.name)
        try:
            return self.call(*args)
        finally:
            Scope.path = outer


class Linear(Module):
    def __init__(self, name, with_bias=True):
        super().__init__(name)
        self.with_bias = with_bias

    def call(self, inputs):
        out = torch.tensordot(inputs, get_parameter("w"), dims=1)
        if self.with_bias:
            out = out + get_parameter("b")
        return out


class LayerNorm(Module):
    def __init__(self, name, eps=1e-5):
        super().__init__(name)
        self.eps = eps

    def call(self, inputs):
        mean = torch.mean(inputs, dim=-1, keepdim=True)
        variance = torch.var(inputs, dim=-1, keepdim=True, correction=0)
        inv = get_parameter("scale") * torch.rsqrt(variance + self.eps)
        return inv * (inputs - mean) + get_parameter("offset")


# ---------------------------------------------------------------------- model


def gelu(x, approximate=True):
    if approximate:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1.0 + torch.tanh(inner))
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def make_mask(tokens):
    """[batch, query, key], True where a query may look."""
    places = torch.arange(tokens.shape[1])
    causal = places[:, None] >= places[None, :]
    not_pad = tokens != PAD_ID
    return causal[None, :, :] & not_pad[:, None, :]


class Embed(Module):
    """The row of the padding learns as an output only."""

    def call(self, tokens):
        embedded = get_parameter("table")[tokens]
        is_pad = (tokens == PAD_ID)[..., None]
        embedded = torch.where(is_pad, embedded.detach(), embedded)
        return embedded * math.sqrt(MODEL_SIZE)


class TinyAttention(Module):
    def call(self, x, mask):
        query = Linear("query", with_bias=False)(x)
        key = Linear("key", with_bias=False)(x)
        value = Linear("value", with_bias=False)(x)
        logits = torch.einsum("btk,bsk->bts", query / math.sqrt(KEY_SIZE), key)
        logits = torch.where(mask, logits, -1e30)
        weights = torch.exp(logits - torch.amax(logits, dim=-1, keepdim=True))
        weights = weights / torch.sum(weights, dim=-1, keepdim=True)
        attended = torch.einsum("bts,bsk->btk", weights, value)
        return Linear("linear")(attended)


class SpatialGate(Module):
    def call(self, v):
        batch, length, size = v.shape
        v = LayerNorm("layer_norm")(v)
        v = torch.swapaxes(v, 1, 2)
        v = torch.reshape(v, (batch, NUM_GROUPS, size // NUM_GROUPS, length))
        w = get_parameter("w")[:, :length, :length]
        w = w * torch.triu(torch.ones(length, length))
        v = torch.matmul(v, w) + get_parameter("b")[:, None, :length]
        v = torch.reshape(v, (batch, size, length))
        return torch.swapaxes(v, 1, 2)


class Layer(Module):
    def call(self, x, mask):
        h = LayerNorm("layer_norm")(x)
        attended = TinyAttention("tiny_attention")(h, mask)
        u = gelu(Linear("linear_u")(h), approximate=False)
        v = gelu(Linear("linear_v")(h), approximate=False)
        gate = SpatialGate("spatial_gate")(v)
        h = u * (gate + attended)
        return x + Linear("linear_out")(h)


class Decode(Module):
    def call(self, x, table):
        return torch.einsum("btd,vd->btv", x, table) + get_parameter("b")


class GMLP(Module):
    def call(self, tokens):
        mask = make_mask(tokens)
        x = Embed("embed")(tokens)
        for i in range(NUM_LAYERS):
            x = Layer(f"layer_{i}")(x, mask)
        x = LayerNorm("layer_norm")(x)
        return Decode("decode")(x, Scope.params["gmlp/embed"]["table"])


apply_fn = transform(lambda tokens: GMLP("gmlp")(tokens))

# --------------------------------------------------------------------- params


def convert_norm(state, name):
    return {"scale": state[f"{name}.weight"], "offset": state[f"{name}.bias"]}


def convert_layer(state, i):
    old = f"blocks.{i}"
    query, key, value = state[f"{old}.attn.to_qkv.weight"].split(KEY_SIZE)
    w_u, w_v = state[f"{old}.proj_in.weight"].split(GATE_SIZE)
    b_u, b_v = state[f"{old}.proj_in.bias"].split(GATE_SIZE)
    spatial_w = state[f"{old}.sgu.weight"].swapaxes(1, 2)
    return {
        "layer_norm": convert_norm(state, f"{old}.norm"),
        "tiny_attention/query": {"w": query.T},
        "tiny_attention/key": {"w": key.T},
        "tiny_attention/value": {"w": value.T},
        "tiny_attention/linear": {
            "w": state[f"{old}.attn.to_out.weight"].T,
            "b": state[f"{old}.attn.to_out.bias"],
        },
        "linear_u": {"w": w_u.T, "b": b_u},
        "linear_v": {"w": w_v.T, "b": b_v},
        "spatial_gate/layer_norm": convert_norm(state, f"{old}.sgu.norm"),
        "spatial_gate": {"w": spatial_w, "b": state[f"{old}.sgu.bias"]},
        "linear_out": {
            "w": state[f"{old}.proj_out.weight"].T,
            "b": state[f"{old}.proj_out.bias"],
        },
    }


def params_from_torch(state):
    params = {"gmlp/embed": {"table": state["embed.weight"]}}
    for i in range(NUM_LAYERS):
        for module, arrays in convert_layer(state, i).items():
            params[f"gmlp/layer_{i}/{module}"] = arrays
    params["gmlp/layer_norm"] = convert_norm(state, "norm")
    params["gmlp/decode"] = {"b": state["out_bias"]}
    return params


class Params(nn.Module):
    """Two levels, as Haiku has them, under names of one."""

    def __init__(self, tree):
        super().__init__()
        self.modules_of = {module: list(arrays) for module, arrays in tree.items()}
        for module, arrays in tree.items():
            for name, array in arrays.items():
                leaf = nn.Parameter(array.clone().contiguous())
                self.register_parameter(f"{module}/{name}", leaf)

    def tree(self):
        return {
            module: {name: getattr(self, f"{module}/{name}") for name in names}
            for module, names in self.modules_of.items()
        }


def model():
    return Params(params_from_torch(torch.load(Path(__file__).with_name("weights.pt"))))


# ----------------------------------------------------------------------- loss


def forward(net, batch):
    return apply_fn(net.tree(), batch["tokens"][:, :-1])


def smooth_labels(labels, alpha):
    return (1.0 - alpha) * labels + alpha / labels.shape[-1]


def loss(output, batch):
    targets = batch["tokens"][:, 1:]
    weights = (targets != PAD_ID).to(output.dtype)
    labels = torch.eye(VOCAB_SIZE)[targets]
    labels = smooth_labels(labels, 0.1)
    log_z = torch.logsumexp(output, dim=-1)
    xent = log_z - torch.sum(labels * output, dim=-1)
    per_token = xent + 0.005 * torch.square(log_z)
    return torch.sum(per_token * weights) / torch.sum(weights)


# ---------------------------------------------------------------------- optax


def scale_by_adam(b1, b2, eps=1e-8):
    def init(params):
        zeros = {name: torch.zeros_like(p) for name, p in params.items()}
        return {"count": 0, "mu": zeros, "nu": dict(zeros)}

    def update(grads, state, params):
        count = state["count"] + 1
        mu, nu, updates = {}, {}, {}
        for name, g in grads.items():
            mu[name] = b1 * state["mu"][name] + (1.0 - b1) * g
            nu[name] = b2 * state["nu"][name] + (1.0 - b2) * torch.square(g)
            mu_hat = mu[name] / (1.0 - b1**count)
            nu_hat = nu[name] / (1.0 - b2**count)
            updates[name] = mu_hat / (torch.sqrt(nu_hat) + eps)
        return updates, {"count": count, "mu": mu, "nu": nu}

    return init, update


def add_decayed_weights(weight_decay, mask):
    def update(updates, state, params):
        decayed = {
            name: u + weight_decay * params[name] if mask(name, params[name]) else u
            for name, u in updates.items()
        }
        return decayed, state

    return lambda params: None, update


def scale(factor):
    def update(updates, state, params):
        return {name: factor * u for name, u in updates.items()}, state

    return lambda params: None, update


def decays(name, array):
    return name.endswith("/w")


class Optax(torch.optim.Optimizer):
    def __init__(self, net, *chain):
        named = dict(net.named_parameters())
        super().__init__(list(named.values()), {})
        self.named, self.chain = named, chain
        self.opt_state = [init(named) for init, _ in chain]

    @torch.no_grad()
    def step(self, closure=None):
        updates = {name: p.grad for name, p in self.named.items()}
        for i, (_, update) in enumerate(self.chain):
            updates, self.opt_state[i] = update(updates, self.opt_state[i], self.named)
        for name, p in self.named.items():
            p.add_(updates[name])


def optimizer(net):
    return Optax(
        net,
        scale_by_adam(b1=0.9, b2=0.98),
        add_decayed_weights(0.1, decays),
        scale(-3e-3),
    )
