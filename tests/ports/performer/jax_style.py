"""After JAX: functions over a tree of parameters, [batch, length, heads, depth], a custom VJP.

What is rotated in a head is kept in halves: all first parts of the pairs, then all second.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True)
class PerformerConfig:
    vocab_size: int = 24
    pad_id: int = 0
    emb_dim: int = 36
    num_heads: int = 3
    head_dim: int = 12
    rotary_dim: int = 8
    rotary_max_wavelength: float = 10_000.0
    nb_features: int = 20
    kernel_epsilon: float = 1e-3
    numerical_stabilizer: float = 1e-6
    layer_norm_epsilon: float = 1e-5
    num_encoder_layers: int = 1
    num_decoder_layers: int = 2
    label_smoothing: float = 0.1
    learning_rate: float = 4e-3
    warmup_steps: int = 3
    max_norm: float = 0.6
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.98
    adam_eps: float = 1e-6


cfg = PerformerConfig()


class Tree(nn.Module):
    """A nested dict whose leaves are parameters; random features are not trained."""

    def __init__(self, leaves):
        super().__init__()
        for key, value in leaves.items():
            if isinstance(value, dict):
                self.add_module(key, Tree(value))
            elif key == "random_features":
                self.register_buffer(key, value.clone().contiguous())
            else:
                self.register_parameter(key, nn.Parameter(value.clone().contiguous()))

    def __getitem__(self, key):
        return getattr(self, key)


# ------------------------------------------------------------------- FAVOR+


def nonnegative_softmax_features(data, random_features, is_query):
    """data: [B, L, H, D]; random_features: [D, M]."""
    data_normalizer = 1.0 / math.sqrt(math.sqrt(data.shape[-1]))
    ratio = 1.0 / math.sqrt(random_features.shape[-1])
    data_dash = torch.einsum("blhd,dm->blhm", data_normalizer * data, random_features)
    diag_data = torch.sum(torch.square(data), dim=-1, keepdim=True)
    diag_data = diag_data / 2.0 * data_normalizer * data_normalizer
    attention_dims = (3,) if is_query else (1, 3)
    stabilizer = torch.amax(data_dash, dim=attention_dims, keepdim=True).detach()
    exponent = data_dash - diag_data - stabilizer
    return ratio * (torch.exp(exponent) + cfg.kernel_epsilon)


def reverse_cumsum(x, axis):
    return torch.flip(torch.cumsum(torch.flip(x, (axis,)), dim=axis), (axis,))


class CausalNumerator(torch.autograd.Function):
    """sum over j <= i of <q_i, k_j> v_j."""

    @staticmethod
    def forward(ctx, qs, ks, vs):
        ctx.save_for_backward(qs, ks, vs)
        sums = torch.cumsum(torch.einsum("blhm,blhd->blhmd", ks, vs), dim=1)
        return torch.einsum("blhmd,blhm->blhd", sums, qs)

    @staticmethod
    def backward(ctx, res_ct):
        qs, ks, vs = ctx.saved_tensors
        sums = torch.cumsum(torch.einsum("blhm,blhd->blhmd", ks, vs), dim=1)
        q_ct = torch.einsum("blhmd,blhd->blhm", sums, res_ct)
        outer = torch.einsum("blhm,blhd->blhmd", qs, res_ct)
        sums_ct = reverse_cumsum(outer, axis=1)
        k_ct = torch.einsum("blhmd,blhd->blhm", sums_ct, vs)
        v_ct = torch.einsum("blhmd,blhm->blhd", sums_ct, ks)
        return q_ct, k_ct, v_ct


def causal_attention(qs, ks, vs):
    numerator = CausalNumerator.apply(qs, ks, vs)
    denominator = torch.einsum("blhm,blhm->blh", qs, torch.cumsum(ks, dim=1))
    return numerator / (denominator + cfg.numerical_stabilizer)[..., None]


def noncausal_attention(qs, ks, vs):
    kvs = torch.einsum("bjhm,bjhd->bhmd", ks, vs)
    numerator = torch.einsum("bihm,bhmd->bihd", qs, kvs)
    ks_sum = torch.sum(ks, dim=1)
    denominator = torch.einsum("bihm,bhm->bih", qs, ks_sum)
    return numerator / (denominator + cfg.numerical_stabilizer)[..., None]


# -------------------------------------------------------------------- layers


def sinusoids(length):
    """sin and cos [L, 1, rotary_dim // 2]."""
    fraction = np.arange(0, cfg.rotary_dim, 2) / cfg.rotary_dim
    timescale = cfg.rotary_max_wavelength**fraction
    radians = np.arange(length)[:, None, None] / timescale
    sin, cos = np.sin(radians), np.cos(radians)
    return torch.tensor(sin, dtype=torch.float32), torch.tensor(
        cos, dtype=torch.float32
    )


def apply_rotary(x, sin, cos):
    half = cfg.rotary_dim // 2
    first, second, rest = torch.split(
        x, [half, half, x.shape[-1] - cfg.rotary_dim], dim=-1
    )
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    return torch.cat([turned_first, turned_second, rest], dim=-1)


def layer_norm(p, x):
    mean = torch.mean(x, dim=-1, keepdim=True)
    mean2 = torch.mean(torch.square(x), dim=-1, keepdim=True)
    mul = torch.rsqrt(mean2 - torch.square(mean) + cfg.layer_norm_epsilon)
    return (x - mean) * (mul * p.scale) + p.bias


def dense(p, x):
    return torch.einsum("...i,io->...o", x, p.kernel) + p.bias


def dense_heads(p, x):
    return torch.einsum("ble,ehd->blhd", x, p.kernel)


def gelu(x):
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def fast_attention(
    p, inputs_q, inputs_kv, padding_mask=None, rotary=None, causal=False
):
    query = dense_heads(p.query, inputs_q)
    key = dense_heads(p.key, inputs_kv)
    value = dense_heads(p.value, inputs_kv)
    if rotary is not None:
        query = apply_rotary(query, *rotary)
        key = apply_rotary(key, *rotary)
    query_prime = nonnegative_softmax_features(query, p.random_features, is_query=True)
    key_prime = nonnegative_softmax_features(key, p.random_features, is_query=False)
    if padding_mask is not None:
        key_prime = torch.where(padding_mask[:, :, None, None], key_prime, 0.0)
    if causal:
        x = causal_attention(query_prime, key_prime, value)
    else:
        x = noncausal_attention(query_prime, key_prime, value)
    return torch.einsum("blhd,hde->ble", x, p.out.kernel) + p.out.bias


def gated_mlp(p, x):
    gate = gelu(dense(p.wi_0, x))
    return dense(p.wo, gate * dense(p.wi_1, x))


def encoder_layer(p, x, padding_mask, rotary):
    y = layer_norm(p.pre_attention_norm, x)
    x = x + fast_attention(p.attention, y, y, padding_mask, rotary)
    y = layer_norm(p.pre_mlp_norm, x)
    return x + gated_mlp(p.mlp, y)


def decoder_layer(p, x, encoded, padding_mask, rotary):
    y = fast_attention(p.self_attention, x, x, rotary=rotary, causal=True)
    x = x + p.rezero_0 * y
    y = fast_attention(p.encoder_attention, x, encoded, padding_mask)
    x = x + p.rezero_1 * y
    return x + p.rezero_2 * gated_mlp(p.mlp, x)


def embed(p, tokens):
    one_hot = nn.functional.one_hot(tokens, cfg.vocab_size).to(p.embedding.dtype)
    return torch.einsum("blv,ve->ble", one_hot, p.embedding) * math.sqrt(cfg.emb_dim)


def encode(p, tokens):
    padding_mask = tokens > cfg.pad_id
    x = embed(p.token_embed, tokens)
    rotary = sinusoids(tokens.shape[1])
    for i in range(cfg.num_encoder_layers):
        x = encoder_layer(p.encoder[f"layer_{i}"], x, padding_mask, rotary)
    return layer_norm(p.encoder.encoder_norm, x), padding_mask


def decode(p, tokens, encoded, padding_mask):
    x = embed(p.token_embed, tokens)
    rotary = sinusoids(tokens.shape[1])
    for i in range(cfg.num_decoder_layers):
        x = decoder_layer(p.decoder[f"layer_{i}"], x, encoded, padding_mask, rotary)
    x = layer_norm(p.decoder.decoder_norm, x)
    logits = torch.einsum("ble,ve->blv", x, p.token_embed.embedding)
    return logits + p.decoder.logits_bias


class Performer(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.params = Tree(params)

    def forward(self, inputs, targets):
        encoded, padding_mask = encode(self.params, inputs)
        return decode(self.params, targets, encoded, padding_mask)


# ---------------------------------------------------------------- checkpoint


def halves():
    """Where each depth of a head comes from: the pairs of the torch model lie by turns."""
    pairs = np.arange(cfg.rotary_dim).reshape(-1, 2)
    rest = np.arange(cfg.rotary_dim, cfg.head_dim)
    return np.concatenate([pairs.T.ravel(), rest])


def convert_dense(ckpt, name):
    return {"kernel": ckpt[f"{name}.weight"].T, "bias": ckpt[f"{name}.bias"]}


def convert_norm(ckpt, name):
    return {"scale": ckpt[f"{name}.weight"], "bias": ckpt[f"{name}.bias"]}


def convert_heads(ckpt, name):
    kernel = ckpt[f"{name}.weight"].T
    return kernel.reshape(cfg.emb_dim, cfg.num_heads, cfg.head_dim)


def convert_attention(ckpt, name, rotary):
    query = convert_heads(ckpt, f"{name}.to_q")
    key = convert_heads(ckpt, f"{name}.to_k")
    features = ckpt[f"{name}.projection"].T
    if rotary:
        order = halves()
        query, key = query[..., order], key[..., order]
        features = features[order]
    out = ckpt[f"{name}.to_out.weight"].T
    out = out.reshape(cfg.num_heads, cfg.head_dim, cfg.emb_dim)
    return {
        "query": {"kernel": query},
        "key": {"kernel": key},
        "value": {"kernel": convert_heads(ckpt, f"{name}.to_v")},
        "out": {"kernel": out, "bias": ckpt[f"{name}.to_out.bias"]},
        "random_features": features,
    }


def convert_mlp(ckpt, name):
    both = convert_dense(ckpt, f"{name}.w1")
    kernels = torch.chunk(both["kernel"], 2, dim=1)
    biases = torch.chunk(both["bias"], 2)
    return {
        "wi_0": {"kernel": kernels[0], "bias": biases[0]},
        "wi_1": {"kernel": kernels[1], "bias": biases[1]},
        "wo": convert_dense(ckpt, f"{name}.w2"),
    }


def convert(ckpt):
    encoder = {"encoder_norm": convert_norm(ckpt, "encoder_norm")}
    for i in range(cfg.num_encoder_layers):
        name = f"encoder.{i}"
        encoder[f"layer_{i}"] = {
            "pre_attention_norm": convert_norm(ckpt, f"{name}.norm1"),
            "attention": convert_attention(ckpt, f"{name}.attn", rotary=True),
            "pre_mlp_norm": convert_norm(ckpt, f"{name}.norm2"),
            "mlp": convert_mlp(ckpt, f"{name}.ff"),
        }
    decoder = {
        "decoder_norm": convert_norm(ckpt, "norm"),
        "logits_bias": ckpt["out_bias"],
    }
    for i in range(cfg.num_decoder_layers):
        name = f"decoder.{i}"
        decoder[f"layer_{i}"] = {
            "self_attention": convert_attention(ckpt, f"{name}.attn", rotary=True),
            "encoder_attention": convert_attention(ckpt, f"{name}.cross", rotary=False),
            "mlp": convert_mlp(ckpt, f"{name}.ff"),
            "rezero_0": ckpt[f"{name}.attn_gain"],
            "rezero_1": ckpt[f"{name}.cross_gain"],
            "rezero_2": ckpt[f"{name}.ff_gain"],
        }
    token_embed = {"embedding": ckpt["embed.weight"]}
    return {"token_embed": token_embed, "encoder": encoder, "decoder": decoder}


def model():
    return Performer(convert(torch.load(Path(__file__).with_name("weights.pt"))))


# ------------------------------------------------------------------ training


def forward(net, batch):
    return net(batch["source"], batch["target"][:, :-1])


def log_softmax(x):
    shifted = x - torch.amax(x, dim=-1, keepdim=True).detach()
    return shifted - torch.log(torch.sum(torch.exp(shifted), dim=-1, keepdim=True))


def loss(output, batch):
    """The smoothed part is spread over all words, the right one too."""
    targets = batch["target"][:, 1:]
    weights = (targets != cfg.pad_id).to(output.dtype)
    low_confidence = cfg.label_smoothing / cfg.vocab_size
    confidence = 1.0 - cfg.label_smoothing + low_confidence
    one_hot = nn.functional.one_hot(targets, cfg.vocab_size)
    soft_targets = torch.where(one_hot > 0, confidence, low_confidence)
    xent = -torch.sum(soft_targets * log_softmax(output), dim=-1)
    return torch.sum(xent * weights) / torch.sum(weights)


def clip_by_global_norm(grads):
    norm = torch.sqrt(sum(torch.sum(torch.square(g)) for g in grads.values()))
    scale = torch.clamp(cfg.max_norm / (norm + 1e-6), max=1.0)
    return {path: g * scale for path, g in grads.items()}


def scale_by_adam(grads, mu, nu, count):
    updates = {}
    for path, g in grads.items():
        mu[path] = cfg.b1 * mu[path] + (1 - cfg.b1) * g
        nu[path] = cfg.b2 * nu[path] + (1 - cfg.b2) * torch.square(g)
        mu_hat = mu[path] / (1 - cfg.b1**count)
        nu_hat = nu[path] / (1 - cfg.b2**count)
        updates[path] = mu_hat / (torch.sqrt(nu_hat) + cfg.adam_eps)
    return updates


def decay_mask(path):
    return path.endswith("kernel")


def rsqrt_schedule(count):
    warmup = count / cfg.warmup_steps
    return cfg.learning_rate * min(warmup, math.sqrt(cfg.warmup_steps / count))


class Optax(torch.optim.Optimizer):
    def __init__(self, net):
        self.paths = dict(net.named_parameters())
        super().__init__(list(self.paths.values()), {})
        self.count = 0
        self.mu = {path: torch.zeros_like(p) for path, p in self.paths.items()}
        self.nu = {path: torch.zeros_like(p) for path, p in self.paths.items()}

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        grads = {path: p.grad for path, p in self.paths.items()}
        grads = clip_by_global_norm(grads)
        updates = scale_by_adam(grads, self.mu, self.nu, self.count)
        learning_rate = rsqrt_schedule(self.count)
        for path, p in self.paths.items():
            update = updates[path]
            if decay_mask(path):
                update = update + cfg.weight_decay * p
            p.sub_(learning_rate * update)


def optimizer(net):
    return Optax(net)
