"""The Set Transformer after Haiku: arrays by path, pure functions, an optax-like update.

A path is "module/submodule/w". Linear maps are [in, out]; keys and values of an attention
are one map [in, 2, heads, size], queries [in, heads, size], what comes out [heads, size, out].
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.func import vmap

NUM_HEADS = 3
NUM_ISABS = 2
LOG_VAR_BOUND = 2.5
VAR_EPS = 1e-4
ENTROPY_COEF = 0.3
LOG_2PI = 1.8378770664093453


def scope(params, name):
    """Those of one module."""
    prefix = name + "/"
    return {k[len(prefix) :]: v for k, v in params.items() if k.startswith(prefix)}


def linear(p, x):
    y = torch.einsum("...i,io->...o", x, p["w"])
    return y + p["b"] if "b" in p else y


def layer_norm(p, x, eps=1e-5):
    mu = torch.mean(x, dim=-1, keepdim=True)
    var = torch.mean(torch.square(x), dim=-1, keepdim=True) - torch.square(mu)
    inv = p["scale"] * torch.rsqrt(var + eps)
    return inv * (x - mu) + p["offset"]


def gelu(x):
    return 0.5 * x * (1.0 + torch.erf(x * 0.5**0.5))


def softmax(logits, where):
    """Zero where nothing is."""
    if where is not None:
        logits = torch.where(where, logits, -1e30)
    top = torch.amax(logits, dim=-1, keepdim=True).detach()
    unnormalized = torch.exp(logits - top)
    return unnormalized / torch.sum(unnormalized, dim=-1, keepdim=True)


def attention(p, inputs_q, inputs_kv, valid=None):
    """valid [batch, keys] is True at real points."""
    q = torch.einsum("bnd,dhk->bnhk", inputs_q, p["query/w"]) + p["query/b"]
    kv = torch.einsum("bmd,dshk->sbmhk", inputs_kv, p["key_value/w"])
    k, v = kv[0], kv[1] + p["key_value/b"]
    q = q * q.shape[-1] ** -0.5
    logits = torch.einsum("bnhk,bmhk->bhnm", q, k)
    where = None if valid is None else valid[:, None, None, :]
    weights = softmax(logits, where)
    context = torch.einsum("bhnm,bmhk->bnhk", weights, v)
    return torch.einsum("bnhk,hkd->bnd", context, p["out/w"]) + p["out/b"]


def mlp(p, x):
    hidden = gelu(linear(scope(p, "up"), x))
    return linear(scope(p, "down"), hidden)


def attend_block(p, x, y, valid=None):
    attended = attention(scope(p, "attention"), x, y, valid)
    h = layer_norm(scope(p, "norm_attention"), x + attended)
    update = mlp(scope(p, "mlp"), h)
    return layer_norm(scope(p, "norm_mlp"), h + update)


def tile(points, batch):
    """[points, dim] -> [batch, points, dim]"""
    return torch.broadcast_to(points, (batch, *points.shape))


def induced_block(p, x, valid):
    inducing = tile(p["inducing"], x.shape[0])
    induced = attend_block(scope(p, "gather"), inducing, x, valid)
    return attend_block(scope(p, "scatter"), x, induced)


def pool(p, x, valid):
    seeds = tile(p["seeds"], x.shape[0])
    features = torch.relu(linear(scope(p, "features"), x))
    return attend_block(scope(p, "block"), seeds, features, valid)


def standardize(points, valid):
    """Moments of the real points of every set."""
    weight = valid / torch.sum(valid, dim=1, keepdim=True)
    loc = torch.einsum("bn,bnd->bd", weight, points)[:, None]
    var = torch.einsum("bn,bnd->bd", weight, torch.square(points - loc))[:, None]
    scale = torch.sqrt(var + VAR_EPS)
    x = torch.where(valid[..., None], (points - loc) / scale, 0.0)
    return x, loc, scale


def mixture_head(p, x):
    logits = torch.einsum("bkd,d->bk", x, p["logit/w"])
    log_weights = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    moments = linear(scope(p, "moments"), x)
    means, raw = torch.tensor_split(moments, 2, dim=-1)
    log_vars = LOG_VAR_BOUND * torch.tanh(raw / LOG_VAR_BOUND)
    return log_weights, means, log_vars


def valid_points(points, sizes):
    index = torch.arange(points.shape[1])
    return index[None, :] < sizes[:, None]


class Mixture(NamedTuple):
    log_weights: torch.Tensor
    means: torch.Tensor
    log_vars: torch.Tensor


def apply(params, points, sizes):
    valid = valid_points(points, sizes)
    x, loc, scale = standardize(points, valid)
    x = linear(scope(params, "embed"), x)
    for i in range(NUM_ISABS):
        x = induced_block(scope(params, f"isab_{i}"), x, valid)
    x = pool(scope(params, "pma"), x, valid)
    x = attend_block(scope(params, "sab"), x, x)
    log_weights, means, log_vars = mixture_head(scope(params, "mixture"), x)
    means = loc + scale * means
    log_vars = log_vars + 2.0 * torch.log(scale)
    return Mixture(log_weights, means, log_vars)


# ---- weights of the torch model


def import_weights(state):
    def attention_params(name):
        def heads_last(weight):
            """[heads * size, in] -> [in, heads, size]"""
            return weight.T.unflatten(1, (NUM_HEADS, -1))

        key = heads_last(state[name + ".k_proj.weight"])
        value = heads_last(state[name + ".v_proj.weight"])
        out = state[name + ".out_proj.weight"].T
        return {
            "query/w": heads_last(state[name + ".q_proj.weight"]),
            "query/b": state[name + ".q_proj.bias"].unflatten(0, (NUM_HEADS, -1)),
            "key_value/w": torch.stack([key, value], dim=1),
            "key_value/b": state[name + ".v_proj.bias"].unflatten(0, (NUM_HEADS, -1)),
            "out/w": out.unflatten(0, (NUM_HEADS, -1)),
            "out/b": state[name + ".out_proj.bias"],
        }

    def linear_params(name):
        return {"w": state[name + ".weight"].T, "b": state[name + ".bias"]}

    def norm_params(name):
        return {"scale": state[name + ".weight"], "offset": state[name + ".bias"]}

    params = {}

    def put(path, arrays):
        params.update({f"{path}/{k}": v for k, v in arrays.items()})

    def put_block(path, name):
        put(path + "/attention", attention_params(name + ".attn"))
        put(path + "/norm_attention", norm_params(name + ".ln0"))
        put(path + "/mlp/up", linear_params(name + ".ff.0"))
        put(path + "/mlp/down", linear_params(name + ".ff.2"))
        put(path + "/norm_mlp", norm_params(name + ".ln1"))

    put("embed", linear_params("embed"))
    for i in range(NUM_ISABS):
        params[f"isab_{i}/inducing"] = state[f"encoder.{i}.inducing"][0]
        put_block(f"isab_{i}/gather", f"encoder.{i}.mab0")
        put_block(f"isab_{i}/scatter", f"encoder.{i}.mab1")
    params["pma/seeds"] = state["pool.seeds"][0]
    put("pma/features", linear_params("pool.rff"))
    put_block("pma/block", "pool.mab")
    put_block("sab", "sab.mab")
    params["mixture/logit/w"] = state["decoder.weight.weight"][0]
    mean, log_var = linear_params("decoder.mean"), linear_params("decoder.log_var")
    put("mixture/moments", {k: torch.cat([mean[k], log_var[k]], -1) for k in mean})
    return params


class Params(nn.Module):
    """Arrays under their paths."""

    def __init__(self, arrays):
        super().__init__()
        for path, array in arrays.items():
            self.register_parameter(path, nn.Parameter(array.clone().contiguous()))

    def tree(self):
        return dict(self.named_parameters())


def model():
    state = torch.load(Path(__file__).with_name("weights.pt"))
    return Params(import_weights(state))


def forward(net, batch):
    mixture = apply(net.tree(), batch["points"], batch["sizes"])
    return mixture._asdict()


# ---- objective


def component_log_prob(x, mean, log_var):
    """Of one point under one component."""
    z = (x - mean) * torch.exp(-0.5 * log_var)
    return -0.5 * torch.sum(torch.square(z) + log_var + LOG_2PI)


def set_log_probs(points, means, log_vars):
    """[points, components] of one set."""
    of_point = vmap(component_log_prob, in_dims=(None, 0, 0))
    return vmap(of_point, in_dims=(0, None, None))(points, means, log_vars)


def loss(output, batch):
    points, sizes = batch["points"], batch["sizes"]
    log_weights = output["log_weights"]
    log_probs = vmap(set_log_probs)(points, output["means"], output["log_vars"])
    joint = log_probs + log_weights[:, None, :]
    top = torch.amax(joint, dim=2, keepdim=True).detach()
    density = torch.log(torch.sum(torch.exp(joint - top), dim=2)) + top[..., 0]
    density = torch.where(valid_points(points, sizes), density, 0.0)
    nll = -torch.sum(density, dim=1) / sizes
    neg_entropy = torch.einsum("bk,bk->b", torch.exp(log_weights), log_weights)
    return torch.mean(nll + ENTROPY_COEF * neg_entropy)


# ---- update


def tree_map(fn, *trees):
    return {path: fn(*(t[path] for t in trees)) for path in trees[0]}


def decay_mask(params):
    """True for weights of linear maps."""
    return {path: path.endswith("/w") for path in params}


class AdamState(NamedTuple):
    steps: int
    mu: dict
    nu: dict


def adamw(learning_rate, b1, b2, eps, weight_decay, mask):
    def init(params):
        zeros = partial(tree_map, torch.zeros_like)
        return AdamState(0, zeros(params), zeros(params))

    def update(grads, state, params):
        count = state.steps + 1
        mu = tree_map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        nu = tree_map(lambda n, g: b2 * n + (1 - b2) * g**2, state.nu, grads)
        mu_hat = tree_map(lambda m: m / (1 - b1**count), mu)
        nu_hat = tree_map(lambda n: n / (1 - b2**count), nu)
        updates = tree_map(lambda m, n: m / (torch.sqrt(n) + eps), mu_hat, nu_hat)
        updates = tree_map(
            lambda u, p, decays: u + weight_decay * p if decays else u,
            updates,
            params,
            mask(params),
        )
        updates = tree_map(lambda u: -learning_rate * u, updates)
        return updates, AdamState(count, mu, nu)

    return init, update


class Updater(torch.optim.Optimizer):
    """Holds the state of the transformation."""

    def __init__(self, net):
        super().__init__(net.parameters(), {})
        self.net = net
        init, self.update = adamw(4e-3, 0.9, 0.98, 1e-4, 0.2, decay_mask)
        self.opt_state = init({k: p.detach() for k, p in net.tree().items()})

    @torch.no_grad()
    def step(self, closure=None):
        params = self.net.tree()
        grads = {path: p.grad for path, p in params.items()}
        updates, self.opt_state = self.update(grads, self.opt_state, params)
        for path, p in params.items():
            p.add_(updates[path])


def optimizer(net):
    return Updater(net)
