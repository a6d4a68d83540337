"""After JAX: pure functions over a tree of arrays; blocks are gathered by one table.

Letters of the einsums: b example, l token, d feature, h head, k feature of a head, q block of
queries, t query in its block, c block that is seen, s key in its block, v word.
"""

import dataclasses
import math
from pathlib import Path

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Config:
    num_layers: int = 2
    num_heads: int = 4
    block_size: int = 4
    num_blocks: int = 10
    num_rand_blocks: int = 2
    table_seed: int = 62
    layer_norm_eps: float = 1e-12
    mask_value: float = -1e9


CFG = Config()


# --------------------------------------------------------------------------- tables


def random_columns(key):
    """[h, q, r], drawn in the order of heads and rows."""
    rng = torch.Generator().manual_seed(key)
    inner = torch.arange(1, CFG.num_blocks - 1)
    heads = []
    for _ in range(CFG.num_heads):
        rows = []
        for i in inner:
            far = inner[torch.abs(inner - i) > 1]
            drawn = torch.randperm(far.shape[0], generator=rng)
            rows.append(far[drawn[: CFG.num_rand_blocks]])
        heads.append(torch.stack(rows))
    return torch.stack(heads)


def static_columns():
    """Ends and window of the inner rows [q, c]; and which of them count.

    Next to an end the window has the end's block once more.
    """
    last = CFG.num_blocks - 1
    rows = torch.arange(1, last)[:, None]
    window = rows + torch.tensor([-1, 0, 1])
    ends = torch.tensor([0, last]).expand(rows.shape[0], 2)
    fresh = (window > 0) & (window < last)
    counts = torch.cat([torch.ones_like(ends, dtype=torch.bool), fresh], dim=1)
    return torch.cat([ends, window], dim=1), counts


def block_table(layer):
    """Columns [h, q, c] and a bias for them [q, c]."""
    drawn = random_columns(CFG.table_seed + layer)
    fixed, counts = static_columns()
    columns = torch.cat([fixed.expand(CFG.num_heads, -1, -1), drawn], dim=2)
    counts = nn.functional.pad(counts, (0, CFG.num_rand_blocks), value=True)
    return columns, torch.where(counts, 0.0, CFG.mask_value)


TABLES = [block_table(i) for i in range(CFG.num_layers)]


# ---------------------------------------------------------------------------- apply


def dense(p, x):
    return torch.einsum("...i,io->...o", x, p["kernel"]) + p["bias"]


def layer_norm(p, x):
    """The variance is the mean of squares less the square of the mean."""
    mean = torch.mean(x, dim=-1, keepdim=True)
    var = torch.mean(x * x, dim=-1, keepdim=True) - mean * mean
    mul = torch.rsqrt(var + CFG.layer_norm_eps) * p["scale"]
    return (x - mean) * mul + p["bias"]


def gelu(x, approximate=True):
    if approximate:
        return x / (1.0 + torch.exp(-2.0 * gelu_argument(x)))
    return 0.5 * x * torch.erfc(-x / math.sqrt(2.0))


def gelu_argument(x):
    return math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3))


def softmax(x, axis):
    unnormalized = torch.exp(x - torch.amax(x, dim=axis, keepdim=True).detach())
    return unnormalized / torch.sum(unnormalized, dim=axis, keepdim=True)


def in_heads(p, x):
    y = torch.einsum("bld,dhk->bhlk", x, p["kernel"])
    return y + p["bias"][:, None, :] if "bias" in p else y


def in_blocks(x, axis):
    return torch.unflatten(x, axis, (CFG.num_blocks, CFG.block_size))


def take_blocks(x, columns):
    """[b, h, blocks, s, k] -> [b, h, q, c, s, k]: every head has its columns."""
    head = torch.arange(CFG.num_heads)[:, None, None]
    return x[:, head, columns]


def global_rows(query, key, value, bias):
    """Blocks at the ends see all tokens."""
    logits = torch.einsum("bhtk,bhlk->bhtl", query, key) + bias[:, None, None, :]
    return torch.einsum("bhtl,bhlk->bhtk", softmax(logits, -1), value)


def sparse_rows(query, key, value, bias, table):
    columns, column_bias = table
    seen_keys = take_blocks(in_blocks(key, 2), columns)
    seen_values = take_blocks(in_blocks(value, 2), columns)
    token_bias = in_blocks(bias, 1)[:, columns][:, :, :, None]
    logits = torch.einsum("bhqtk,bhqcsk->bhqtcs", query, seen_keys)
    logits = logits + token_bias + column_bias[:, None, :, None]
    weights = softmax(logits, (-2, -1))
    return torch.einsum("bhqtcs,bhqcsk->bhqtk", weights, seen_values)


def attention(p, x, valid, table):
    query = in_heads(p["query"], x)
    query = query * query.shape[-1] ** -0.5
    key, value = in_heads(p["key"], x), in_heads(p["value"], x)
    bias = torch.where(valid, 0.0, CFG.mask_value)

    head, inner, tail = torch.split(
        query, [CFG.block_size, x.shape[1] - 2 * CFG.block_size, CFG.block_size], dim=2
    )
    ends = global_rows(torch.cat([head, tail], dim=2), key, value, bias)
    inner = torch.unflatten(inner, 2, (-1, CFG.block_size))
    inner = torch.flatten(sparse_rows(inner, key, value, bias, table), 2, 3)
    head, tail = torch.chunk(ends, 2, dim=2)
    mixed = torch.cat([head, inner, tail], dim=2)

    mixed = torch.where(valid[:, None, :, None], mixed, 0.0)
    return torch.einsum("bhlk,hkd->bld", mixed, p["out"]["kernel"]) + p["out"]["bias"]


def encoder_layer(p, x, valid, table):
    x = layer_norm(p["attention_ln"], x + attention(p["attention"], x, valid, table))
    y = dense(p["mlp"]["wo"], gelu(dense(p["mlp"]["wi"], x)))
    return layer_norm(p["mlp_ln"], x + y)


def embed(p, tokens, segments):
    x = p["token"]["embedding"][tokens]
    x = x + p["position"]["embedding"][: tokens.shape[1]]
    x = x + p["segment"]["embedding"][segments]
    return layer_norm(p["ln"], x)


def pooled(p, x):
    return torch.tanh(dense(p, x[:, 0]))


def token_logits(p, x, embedding):
    x = layer_norm(p["ln"], gelu(dense(p["dense"], x)))
    return torch.einsum("bld,vd->blv", x, embedding) + p["bias"]


def fill_blocks(x):
    """Zeros up to the end of the last block."""
    full = CFG.block_size * CFG.num_blocks
    return torch.cat([x, x.new_zeros(x.shape[0], full - x.shape[1])], dim=1)


def apply(params, tokens, segments, valid):
    length = tokens.shape[1]
    tokens, segments, valid = map(fill_blocks, (tokens, segments, valid))
    x = embed(params["embed"], tokens, segments)
    for i, table in enumerate(TABLES):
        x = encoder_layer(params["encoder"][f"layer_{i}"], x, valid, table)
    classes = dense(params["classify"], pooled(params["pool"], x))
    embedding = params["embed"]["token"]["embedding"]
    return classes, token_logits(params["lm"], x[:, :length], embedding)


# ---------------------------------------------------------------------------- state


def linear(w, name):
    p = {"kernel": w[f"{name}.weight"].T}
    if f"{name}.bias" in w:
        p["bias"] = w[f"{name}.bias"]
    return p


def norm(w, name):
    return {"scale": w[f"{name}.weight"], "bias": w[f"{name}.bias"]}


def table(w, name):
    return {"embedding": w[f"{name}.weight"]}


def to_heads(p):
    return {k: a.reshape(*a.shape[:-1], CFG.num_heads, -1) for k, a in p.items()}


def from_heads(p):
    kernel = p["kernel"]
    return p | {"kernel": kernel.reshape(CFG.num_heads, -1, kernel.shape[-1])}


def import_layer(w, name):
    return {
        "attention": {
            "query": to_heads(linear(w, f"{name}.attention.query")),
            "key": to_heads(linear(w, f"{name}.attention.key")),
            "value": to_heads(linear(w, f"{name}.attention.value")),
            "out": from_heads(linear(w, f"{name}.attention_output")),
        },
        "attention_ln": norm(w, f"{name}.attention_norm"),
        "mlp": {
            "wi": linear(w, f"{name}.intermediate"),
            "wo": linear(w, f"{name}.output"),
        },
        "mlp_ln": norm(w, f"{name}.output_norm"),
    }


def import_params(w):
    return {
        "embed": {
            "token": table(w, "embeddings.word_embeddings"),
            "position": table(w, "embeddings.position_embeddings"),
            "segment": table(w, "embeddings.token_type_embeddings"),
            "ln": norm(w, "embeddings.norm"),
        },
        "encoder": {
            f"layer_{i}": import_layer(w, f"layers.{i}") for i in range(CFG.num_layers)
        },
        "pool": linear(w, "pooler"),
        "classify": linear(w, "classifier"),
        "lm": {
            "dense": linear(w, "predictions.transform"),
            "ln": norm(w, "predictions.norm"),
            "bias": w["predictions.bias"],
        },
    }


class Params(nn.Module):
    """Arrays by name, as deep as the dicts they come from."""

    def __init__(self, arrays):
        super().__init__()
        for name, value in arrays.items():
            leaf = torch.is_tensor(value)
            setattr(
                self,
                name,
                nn.Parameter(value.contiguous().clone()) if leaf else Params(value),
            )

    def __getitem__(self, name):
        return getattr(self, name)

    def __contains__(self, name):
        return hasattr(self, name)

    def forward(self, tokens, segments, valid):
        return apply(self, tokens, segments, valid)


def model():
    return Params(import_params(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    valid = batch["attention_mask"].bool()
    classes, tokens = net(batch["input_ids"], batch["token_type_ids"], valid)
    return {"class_logits": classes, "token_logits": tokens}


# --------------------------------------------------------------------------- update


def nll(logits, labels):
    picked = torch.gather(logits, -1, labels[..., None])[..., 0]
    return torch.logsumexp(logits, dim=-1) - picked


def loss(output, batch):
    labels = batch["token_labels"]
    weight = (labels >= 0).float()
    losses = nll(output["token_logits"], torch.clamp(labels, min=0))
    token_loss = torch.sum(losses * weight) / torch.sum(weight)
    class_loss = torch.mean(nll(output["class_logits"], batch["label"]))
    return token_loss + 0.5 * class_loss


def decays(path, array):
    return path.rpartition(".")[2] in ("kernel", "embedding")


class AdamW(torch.optim.Optimizer):
    """Moments first, then decay, then the rate."""

    def __init__(self, params, rate=5e-3, b1=0.9, b2=0.98, eps=1e-6, decay=0.1):
        paths, arrays = zip(*params.named_parameters())
        super().__init__(arrays, {"lr": rate})
        self.mask = [decays(path, a) for path, a in zip(paths, arrays)]
        self.mu = [torch.zeros_like(a) for a in arrays]
        self.nu = [torch.zeros_like(a) for a in arrays]
        self.b1, self.b2, self.eps, self.decay = b1, b2, eps, decay
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        self.count += 1
        for i, array in enumerate(group["params"]):
            grad = array.grad
            self.mu[i] = self.b1 * self.mu[i] + (1.0 - self.b1) * grad
            self.nu[i] = self.b2 * self.nu[i] + (1.0 - self.b2) * grad * grad
            mu_hat = self.mu[i] / (1.0 - self.b1**self.count)
            nu_hat = self.nu[i] / (1.0 - self.b2**self.count)
            update = mu_hat / (torch.sqrt(nu_hat) + self.eps)
            if self.mask[i]:
                update = update + self.decay * array
            array.add_(-group["lr"] * update)


def optimizer(net):
    return AdamW(net)
