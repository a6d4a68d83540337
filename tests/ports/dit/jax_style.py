"""After Flax: a flat tree of arrays, layers stacked for a scan, channels last.

Letters of the einsums: b batch, n queries, m keys, d features, h heads, k features of a
head, f hidden features, s parts of a modulation.
"""

import dataclasses
import math
from pathlib import Path

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Config:
    height: int = 8
    width: int = 8
    channels: int = 2
    patch: int = 2
    features: int = 24
    heads: int = 3
    layers: int = 3
    hidden: int = 48
    time_features: int = 16
    timesteps: int = 60
    max_wavelength: float = 10_000.0


cfg = Config()
NULL_LABEL = 0


# ------------------------------------------------------------------------- functions


def subtree(params, scope):
    head = scope + "/"
    return {k[len(head) :]: v for k, v in params.items() if k.startswith(head)}


def silu(x):
    return x * torch.sigmoid(x)


def gelu_tanh(x):
    inner = 0.7978845608028654 * x * (1.0 + 0.044715 * x * x)
    return 0.5 * x * (1.0 + torch.tanh(inner))


def normalize(x):
    """LayerNorm without scale and bias."""
    mu = x.mean(dim=-1, keepdim=True)
    var = (x - mu).square().mean(dim=-1, keepdim=True)
    return (x - mu) / torch.sqrt(var + 1e-6)


def softmax(logits, axis=-1):
    unnormalized = torch.exp(logits - logits.amax(dim=axis, keepdim=True).detach())
    return unnormalized / unnormalized.sum(dim=axis, keepdim=True)


def dense(p, x):
    return x @ p["kernel"] + p["bias"]


# ------------------------------------------------------------------------ embeddings


def frequencies(count):
    return cfg.max_wavelength ** (-torch.arange(count, dtype=torch.float64) / count)


def position_table():
    """[rows * columns, features]: sin and cos of the column, then of the row."""
    rows, cols = cfg.height // cfg.patch, cfg.width // cfg.patch
    omega = frequencies(cfg.features // 4)
    row_angle = torch.arange(rows, dtype=torch.float64)[:, None] * omega
    col_angle = torch.arange(cols, dtype=torch.float64)[:, None] * omega
    row_code = torch.cat([row_angle.sin(), row_angle.cos()], dim=-1)
    col_code = torch.cat([col_angle.sin(), col_angle.cos()], dim=-1)
    row_code = row_code[:, None, :].expand(rows, cols, -1)
    col_code = col_code[None, :, :].expand(rows, cols, -1)
    return torch.cat([col_code, row_code], dim=-1).reshape(rows * cols, -1).float()


POSITIONS = position_table()


def time_code(t):
    angle = t.float()[:, None] * frequencies(cfg.time_features // 2).float()
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def embed_condition(p, t, label, drop):
    h = dense(subtree(p, "time/in"), time_code(t))
    h = dense(subtree(p, "time/out"), silu(h))
    index = torch.where(drop, NULL_LABEL, label + 1)
    return h + p["label/embedding"][index]


def patchify(x):
    """[b, H, W, c] -> [b, rows, columns, patch, patch, c]."""
    b, height, width, c = x.shape
    x = x.reshape(b, height // cfg.patch, cfg.patch, width // cfg.patch, cfg.patch, c)
    return x.permute(0, 1, 3, 2, 4, 5)


def embed_patches(p, x):
    x = torch.einsum("byxijc,ijcd->byxd", patchify(x), p["kernel"]) + p["bias"]
    return x.reshape(len(x), -1, cfg.features) + POSITIONS


# ---------------------------------------------------------------------------- blocks


def attention(p, x):
    query = torch.einsum("bnd,dhk->bnhk", x, p["query/kernel"]) + p["query/bias"]
    key = torch.einsum("bmd,dhk->bmhk", x, p["key/kernel"])
    value = torch.einsum("bmd,dhk->bmhk", x, p["value/kernel"]) + p["value/bias"]
    logits = torch.einsum("bnhk,bmhk->bhnm", query, key)
    weights = softmax(logits / math.sqrt(query.shape[-1]), axis=-1)
    mixed = torch.einsum("bhnm,bmhk->bnhk", weights, value)
    return torch.einsum("bnhk,hkd->bnd", mixed, p["out/kernel"]) + p["out/bias"]


def mlp(p, x):
    return dense(subtree(p, "down"), gelu_tanh(dense(subtree(p, "up"), x)))


def modulation(p, cond):
    """[s, b, 1, d]"""
    parts = torch.einsum("bd,dse->sbe", silu(cond), p["kernel"])
    return (parts + p["bias"][:, None, :])[:, :, None, :]


def block(p, x, cond):
    m = modulation(subtree(p, "modulation"), cond)
    y = normalize(x) * (1.0 + m[1]) + m[0]
    x = x + m[2] * attention(subtree(p, "attention"), y)
    y = normalize(x) * (1.0 + m[4]) + m[3]
    return x + m[5] * mlp(subtree(p, "mlp"), y)


def decode(p, x, cond):
    """Tokens -> [b, H, W, 2c]."""
    m = modulation(subtree(p, "modulation"), cond)
    x = normalize(x) * (1.0 + m[1]) + m[0]
    x = torch.einsum("bnd,dijc->bnijc", x, p["kernel"]) + p["bias"]
    rows, cols = cfg.height // cfg.patch, cfg.width // cfg.patch
    x = x.reshape(-1, rows, cols, cfg.patch, cfg.patch, x.shape[-1])
    return x.permute(0, 1, 3, 2, 4, 5).reshape(len(x), cfg.height, cfg.width, -1)


def apply(params, x, t, label, drop):
    cond = embed_condition(subtree(params, "condition"), t, label, drop)
    x = embed_patches(subtree(params, "patches"), x)
    stacked = subtree(params, "blocks")
    for i in range(cfg.layers):
        layer = {name: array[i] for name, array in stacked.items()}
        x = block(layer, x, cond)
    return decode(subtree(params, "decoder"), x, cond)


# --------------------------------------------------------------------------- weights


def linear(state, name):
    return {
        "kernel": state[f"{name}.weight"].T,
        "bias": state[f"{name}.bias"],
    }


def modulation_from(state, name, parts):
    p = linear(state, f"{name}.adaLN_modulation.1")
    return {
        "kernel": p["kernel"].reshape(cfg.features, parts, cfg.features),
        "bias": p["bias"].reshape(parts, cfg.features),
    }


def layer_from(state, name):
    head = (cfg.heads, cfg.features // cfg.heads)
    fused = state[f"{name}.attn.qkv.weight"].reshape(3, *head, cfg.features)
    query, key, value = fused.permute(0, 3, 1, 2)
    out = linear(state, f"{name}.attn.proj")
    return {
        "modulation": modulation_from(state, name, 6),
        "attention": {
            "query": {
                "kernel": query,
                "bias": state[f"{name}.attn.q_bias"].reshape(head),
            },
            "key": {"kernel": key},
            "value": {
                "kernel": value,
                "bias": state[f"{name}.attn.v_bias"].reshape(head),
            },
            "out": {
                "kernel": out["kernel"].reshape(*head, cfg.features),
                "bias": out["bias"],
            },
        },
        "mlp": {
            "up": linear(state, f"{name}.mlp.fc1"),
            "down": linear(state, f"{name}.mlp.fc2"),
        },
    }


def flatten(tree, prefix=""):
    flat = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}/"))
        else:
            flat[prefix + name] = value
    return flat


def from_torch(state):
    layers = [flatten(layer_from(state, f"blocks.{i}")) for i in range(cfg.layers)]
    final = linear(state, "final_layer.linear")
    window = (cfg.patch, cfg.patch)
    tree = {
        "patches": {
            "kernel": state["x_embedder.proj.weight"].permute(2, 3, 1, 0),
            "bias": state["x_embedder.proj.bias"],
        },
        "condition": {
            "time": {
                "in": linear(state, "t_embedder.mlp.0"),
                "out": linear(state, "t_embedder.mlp.2"),
            },
            # Labels begin at one here: the null class is the first.
            "label": {
                "embedding": state["y_embedder.embedding_table.weight"].roll(1, 0)
            },
        },
        "blocks": {k: torch.stack([layer[k] for layer in layers]) for k in layers[0]},
        "decoder": {
            "modulation": modulation_from(state, "final_layer", 2),
            "kernel": final["kernel"].reshape(cfg.features, *window, -1),
            "bias": final["bias"].reshape(*window, -1),
        },
    }
    return flatten(tree)


class Variables(nn.Module):
    def __init__(self, params):
        super().__init__()
        for path, array in params.items():
            self.register_parameter(path, nn.Parameter(array.clone().contiguous()))

    def forward(self, x, t, label, drop):
        return apply(dict(self.named_parameters()), x, t, label, drop)


def model():
    state = torch.load(Path(__file__).with_name("weights.pt"))
    return Variables(from_torch(state))


# ------------------------------------------------------------------------- diffusion


@dataclasses.dataclass(frozen=True)
class Schedule:
    """All of it from betas, in logarithms."""

    beta: torch.Tensor
    log_alpha: torch.Tensor
    log_alpha_bar: torch.Tensor
    log_var_low: torch.Tensor
    log_var_high: torch.Tensor

    def at(self, name, t):
        return getattr(self, name)[t][:, None, None, None].float()


def linear_beta_schedule(first=1e-4, last=0.02, reference_steps=1000):
    stretch = reference_steps / cfg.timesteps
    share = torch.arange(cfg.timesteps, dtype=torch.float64) / (cfg.timesteps - 1)
    beta = stretch * (first + (last - first) * share)
    log_alpha = torch.log1p(-beta)
    log_alpha_bar = torch.cumsum(log_alpha, dim=0)
    earlier = log_alpha_bar - log_alpha
    ratio = torch.expm1(earlier) / torch.expm1(log_alpha_bar)
    low = torch.log(ratio[1:]) + torch.log(beta[1:])
    low = torch.cat([low[:1], low])
    return Schedule(beta, log_alpha, log_alpha_bar, low, torch.log(beta))


SCHEDULE = linear_beta_schedule()


def diffuse(x, noise, t):
    signal = torch.exp(0.5 * SCHEDULE.log_alpha_bar)[t]
    sigma = torch.sqrt(-torch.expm1(SCHEDULE.log_alpha_bar))[t]
    signal, sigma = (v.float()[:, None, None, None] for v in (signal, sigma))
    return signal * x + sigma * noise


def step_back(x_t, noise, t):
    """Mean of the step before, given the noise."""
    sigma = torch.sqrt(-torch.expm1(SCHEDULE.at("log_alpha_bar", t)))
    cleaned = x_t - SCHEDULE.at("beta", t) / sigma * noise
    return torch.exp(-0.5 * SCHEDULE.at("log_alpha", t)) * cleaned


def channels_last(x):
    return x.permute(0, 2, 3, 1)


def forward(net, batch):
    x, noise = channels_last(batch["latent"]), channels_last(batch["noise"])
    x_t = diffuse(x, noise, batch["t"])
    return {"x_t": x_t, "pred": net(x_t, batch["t"], batch["label"], batch["drop"])}


def bound_in_bits(noise_hat, v, noise, x_t, t):
    """A KL divergence; at the first step a log-likelihood."""
    low, high = SCHEDULE.at("log_var_low", t), SCHEDULE.at("log_var_high", t)
    log_var = low + (high - low) * (0.5 * v + 0.5)
    gap = step_back(x_t, noise, t) - step_back(x_t, noise_hat, t)
    squared = gap.square() * torch.exp(-log_var)
    kl = log_var - low - 1.0 + torch.exp(low - log_var) + squared
    nll = math.log(2.0 * math.pi) + log_var + squared
    first = (t == 0).float()[:, None, None, None]
    nats = 0.5 * torch.mean(first * nll + (1.0 - first) * kl, dim=(1, 2, 3))
    return nats / math.log(2.0)


def loss(output, batch):
    pred, x_t, t = output["pred"], output["x_t"], batch["t"]
    noise = channels_last(batch["noise"])
    noise_hat, v = pred[..., : cfg.channels], pred[..., cfg.channels :]
    simple = torch.mean((noise_hat - noise).square(), dim=(1, 2, 3))
    bound = bound_in_bits(noise_hat.detach(), v, noise, x_t, t)
    return torch.mean(simple + bound * cfg.timesteps / 1000)


# ------------------------------------------------------------------------- optimizer


def clip_by_global_norm(max_norm):
    def update(grads, state, params):
        norm = torch.sqrt(sum(g.square().sum() for g in grads.values()))
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        return {k: g * factor for k, g in grads.items()}, state

    return dict, update


def scale_by_adam(b1=0.9, b2=0.999, eps=1e-8):
    def init():
        return {"count": 0, "mu": {}, "nu": {}}

    def update(grads, state, params):
        count = state["count"] + 1
        mu, nu, updates = {}, {}, {}
        for k, g in grads.items():
            mu[k] = b1 * state["mu"].get(k, 0.0) + (1.0 - b1) * g
            nu[k] = b2 * state["nu"].get(k, 0.0) + (1.0 - b2) * g * g
            mu_hat, nu_hat = mu[k] / (1.0 - b1**count), nu[k] / (1.0 - b2**count)
            updates[k] = mu_hat / (torch.sqrt(nu_hat) + eps)
        return updates, {"count": count, "mu": mu, "nu": nu}

    return init, update


def add_decayed_weights(weight_decay, mask):
    def update(updates, state, params):
        decayed = {
            k: u + weight_decay * params[k] if mask(k) else u
            for k, u in updates.items()
        }
        return decayed, state

    return dict, update


def scale(factor):
    def update(updates, state, params):
        return {k: factor * u for k, u in updates.items()}, state

    return dict, update


class Chain(torch.optim.Optimizer):
    def __init__(self, net, *transforms):
        self.params = dict(net.named_parameters())
        super().__init__(list(self.params.values()), {})
        self.transforms = [update for _, update in transforms]
        self.states = [init() for init, _ in transforms]

    @torch.no_grad()
    def step(self, closure=None):
        updates = {k: p.grad for k, p in self.params.items()}
        for i, transform in enumerate(self.transforms):
            updates, self.states[i] = transform(updates, self.states[i], self.params)
        for k, update in updates.items():
            self.params[k].add_(update)


def optimizer(net):
    return Chain(
        net,
        clip_by_global_norm(1.0),
        scale_by_adam(b1=0.9, b2=0.99),
        add_decayed_weights(0.2, mask=lambda path: path.endswith("kernel")),
        scale(-2e-3),
    )
