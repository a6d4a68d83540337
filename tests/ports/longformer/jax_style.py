"""After Flax: windows are gathered by a table of places, heads are an axis of the kernels.

Letters of the einsums: b batch, l tokens, w places of a window, d features, h heads,
k features of a head, c which of query, key and value.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn


@dataclass(frozen=True)
class LongformerConfig:
    hidden_size: int = 24
    num_heads: int = 3
    num_labels: int = 5
    one_sided: int = 3
    dilation: tuple = (1, 2, 1)
    pad_token_id: int = 1
    ignore_label: int = -100


CONFIG = LongformerConfig()


# ------------------------------------------------------------------------- layers


class Dense(nn.Module):
    """Contracts the axes of the kernel that its equation says."""

    def __init__(self, equation, kernel, bias):
        super().__init__()
        self.equation = equation
        self.kernel = nn.Parameter(kernel)
        self.bias = nn.Parameter(bias)

    def forward(self, x):
        return torch.einsum(self.equation, x, self.kernel) + self.bias


class LayerNorm(nn.Module):
    def __init__(self, scale, bias, epsilon=1e-5):
        super().__init__()
        self.scale, self.bias = nn.Parameter(scale), nn.Parameter(bias)
        self.epsilon = epsilon

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        centred = x - mean
        var = (centred * centred).mean(-1, keepdim=True)
        mul = torch.rsqrt(var + self.epsilon) * self.scale
        return centred * mul + self.bias


class Embed(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = nn.Parameter(embedding)

    def forward(self, ids):
        return self.embedding[ids]


def gelu(x, approximate=False):
    if approximate:
        inner = 0.7978845608028654 * (x + 0.044715 * x**3)
        return 0.5 * x * (1.0 + torch.tanh(inner))
    return 0.5 * x * (1.0 + torch.erf(x * 0.7071067811865476))


def softmax(logits, where):
    """Over the last axis, and only over places that are allowed."""
    logits = torch.where(where, logits, -1e9)
    unnormalized = torch.exp(logits - logits.amax(-1, keepdim=True).detach())
    return unnormalized / unnormalized.sum(-1, keepdim=True)


def window_table(length, one_sided, dilation):
    """Places [l, w] that each token looks at, and which of them exist."""
    offsets = torch.arange(2 * one_sided + 1) - one_sided
    table = torch.arange(length)[:, None] + dilation * offsets
    inside = (table >= 0) & (table < length)
    return table.clamp(0, length - 1), inside


# -------------------------------------------------------------------------- model


class LongformerEmbeddings(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.tokens = Embed(w["embeddings.word.weight"])
        self.positions = Embed(w["embeddings.position.weight"])
        self.segments = Embed(w["embeddings.segment.weight"])
        self.layer_norm = layer_norm(w, "embeddings.norm")

    def forward(self, input_ids, segment_ids):
        count = torch.arange(1, input_ids.shape[1] + 1)
        is_pad = input_ids == CONFIG.pad_token_id
        position_ids = torch.where(is_pad, 0, count) + CONFIG.pad_token_id
        x = self.tokens(input_ids) + self.segments(segment_ids)
        return self.layer_norm(x + self.positions(position_ids))


class LongformerAttention(nn.Module):
    """Local and global projections are fused, without a bias for the keys."""

    def __init__(self, w, name, dilation):
        super().__init__()
        self.dilation = dilation
        self.local_kernel = nn.Parameter(fused_kernel(w, name, ""))
        self.local_bias = nn.Parameter(fused_bias(w, name, ""))
        self.global_kernel = nn.Parameter(fused_kernel(w, name, "_global"))
        self.global_bias = nn.Parameter(fused_bias(w, name, "_global"))
        self.out = out_projection(w, f"{name}.out")
        self.scale = (CONFIG.hidden_size // CONFIG.num_heads) ** -0.5

    def windowed(self, query, key, value, is_token):
        table, inside = window_table(query.shape[1], CONFIG.one_sided, self.dilation)
        allowed = is_token[:, table] & inside & (table > 0)
        logits = torch.einsum("blhk,blwhk->blhw", query, key[:, table])
        to_first = torch.einsum("blhk,bhk->blh", query, key[:, 0])
        logits = torch.cat([logits, to_first[..., None]], -1) * self.scale
        allowed = nn.functional.pad(allowed, (0, 1), value=True)
        weights = softmax(logits, where=allowed[:, :, None])
        weights = torch.where(is_token[:, :, None, None], weights, 0.0)
        local = torch.einsum("blhw,blwhk->blhk", weights[..., :-1], value[:, table])
        return local + torch.einsum("blh,bhk->blhk", weights[..., -1], value[:, 0])

    def from_first(self, x, is_token):
        query = torch.einsum("bd,dhk->bhk", x[:, 0], self.global_kernel[0])
        query = (query + self.global_bias[0]) * self.scale
        key = torch.einsum("bld,dhk->blhk", x, self.global_kernel[1])
        value = torch.einsum("bld,dhk->blhk", x, self.global_kernel[2])
        value = value + self.global_bias[1]
        logits = torch.einsum("bhk,blhk->bhl", query, key)
        weights = softmax(logits, where=is_token[:, None])
        return torch.einsum("bhl,blhk->bhk", weights, value)

    def forward(self, x, is_token):
        query, key, value = torch.einsum("bld,cdhk->cblhk", x, self.local_kernel)
        query, value = query + self.local_bias[0], value + self.local_bias[1]
        local = self.windowed(query, key, value, is_token)
        first = self.from_first(x, is_token)
        at_first = (torch.arange(x.shape[1]) == 0)[:, None, None]
        return self.out(torch.where(at_first, first[:, None], local))


class LongformerBlock(nn.Module):
    def __init__(self, w, name, dilation):
        super().__init__()
        self.attention = LongformerAttention(w, f"{name}.attn", dilation)
        self.attention_norm = layer_norm(w, f"{name}.norm1")
        self.wi = dense(w, f"{name}.fc1")
        self.wo = dense(w, f"{name}.fc2")
        self.output_norm = layer_norm(w, f"{name}.norm2")

    def forward(self, x, is_token):
        x = self.attention_norm(self.attention(x, is_token) + x)
        y = self.wo(gelu(self.wi(x)))
        return self.output_norm(y + x)


class LongformerTagger(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.embed = LongformerEmbeddings(w)
        self.blocks = nn.ModuleList(
            LongformerBlock(w, f"layers.{i}", dilation)
            for i, dilation in enumerate(CONFIG.dilation)
        )
        self.logits = dense(w, "classifier")

    def forward(self, input_ids, segment_ids):
        is_token = input_ids != CONFIG.pad_token_id
        x = self.embed(input_ids, segment_ids)
        for block in self.blocks:
            x = block(x, is_token)
        return self.logits(x)


# ------------------------------------------------------------------------ weights


def dense(w, name):
    kernel = w[f"{name}.weight"].T.contiguous()
    return Dense("bli,io->blo", kernel, w[f"{name}.bias"])


def layer_norm(w, name):
    return LayerNorm(w[f"{name}.weight"], w[f"{name}.bias"])


def split_heads(kernel):
    """[d, h * k] -> [d, h, k]; a bias has no d."""
    return kernel.unflatten(-1, (CONFIG.num_heads, -1))


def fused_kernel(w, name, suffix):
    """Query, key and value: [3, d, h, k]."""
    parts = [w[f"{name}.{part}{suffix}.weight"] for part in ("query", "key", "value")]
    return torch.stack([split_heads(part.T) for part in parts])


def fused_bias(w, name, suffix):
    """Query and value: [2, h, k]."""
    parts = [w[f"{name}.{part}{suffix}.bias"] for part in ("query", "value")]
    return torch.stack([split_heads(part) for part in parts])


def out_projection(w, name):
    """[o, h * k] -> [h, k, o]."""
    kernel = w[f"{name}.weight"].T.unflatten(0, (CONFIG.num_heads, -1)).contiguous()
    return Dense("blhk,hko->blo", kernel, w[f"{name}.bias"])


def model():
    return LongformerTagger(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["ids"], batch["types"])


# --------------------------------------------------------------------------- loss


def loss(output, batch):
    labels = batch["labels"]
    keep = labels != CONFIG.ignore_label
    log_probs = output - torch.logsumexp(output, -1, keepdim=True)
    safe = torch.where(keep, labels, 0)
    picked = torch.take_along_dim(log_probs, safe[..., None], -1)[..., 0]
    return -torch.where(keep, picked, 0.0).sum() / keep.sum()


# ---------------------------------------------------------------------- optimizer


def clip_by_global_norm(max_norm):
    def update(grads, params, count):
        norm = torch.sqrt(sum((g * g).sum() for g in grads.values()))
        shrink = torch.where(norm < max_norm, 1.0, max_norm / norm)
        return {name: g * shrink for name, g in grads.items()}

    return update


def scale_by_adam(b1, b2, eps):
    mu, nu = {}, {}

    def update(grads, params, count):
        out = {}
        for name, g in grads.items():
            mu[name] = b1 * mu.get(name, 0.0) + (1.0 - b1) * g
            nu[name] = b2 * nu.get(name, 0.0) + (1.0 - b2) * g * g
            mu_hat, nu_hat = mu[name] / (1.0 - b1**count), nu[name] / (1.0 - b2**count)
            out[name] = mu_hat / (torch.sqrt(nu_hat) + eps)
        return out

    return update


def add_decayed_weights(weight_decay, mask):
    def update(grads, params, count):
        return {
            name: g + weight_decay * params[name] if mask(name) else g
            for name, g in grads.items()
        }

    return update


def scale_by_learning_rate(schedule):
    def update(grads, params, count):
        return {name: -schedule(count) * g for name, g in grads.items()}

    return update


def warmup_linear(peak, warmup, total):
    def schedule(count):
        if count < warmup:
            return peak * count / warmup
        return peak * (total - count) / (total - warmup)

    return schedule


def decays(name):
    return name.rpartition(".")[2].endswith(("kernel", "embedding"))


class Optax(torch.optim.Optimizer):
    def __init__(self, params, *chain):
        super().__init__(list(params.values()), {})
        self.params, self.chain, self.count = params, chain, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        updates = {name: p.grad for name, p in self.params.items()}
        for transform in self.chain:
            updates = transform(updates, self.params, self.count)
        for name, p in self.params.items():
            p.add_(updates[name])


def optimizer(net):
    return Optax(
        dict(net.named_parameters()),
        clip_by_global_norm(0.5),
        scale_by_adam(b1=0.9, b2=0.98, eps=1e-6),
        add_decayed_weights(0.1, mask=decays),
        scale_by_learning_rate(warmup_linear(4e-3, warmup=2, total=10)),
    )
