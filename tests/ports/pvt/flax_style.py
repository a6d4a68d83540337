"""After Flax: functions of a tree of parameters, features last, kernels [..., in, out], einsums.

Letters: b batch, h and w places of a map, q and k places of queries and keys, n heads, d
features of a head, c and o features, i and j taps, y and x places after a resize.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class StageConfig:
    features: int
    num_heads: int
    num_blocks: int
    window: int
    stride: int
    reduction: int = 1
    pool: tuple | None = None
    table: tuple | None = None


@dataclasses.dataclass(frozen=True)
class Config:
    num_classes: int = 7
    stages: tuple = (
        StageConfig(12, 1, 1, window=7, stride=4, reduction=4, table=(6, 11)),
        StageConfig(20, 2, 2, window=3, stride=2, pool=(3, 4)),
        StageConfig(33, 3, 2, window=3, stride=2, reduction=2),
        StageConfig(40, 5, 1, window=3, stride=2),
    )
    class_heads: int = 5
    stem_epsilon: float = 1e-5
    norm_epsilon: float = 1e-6
    aux_weight: float = 0.4
    label_smoothing: float = 0.1


CONFIG = Config()


class Tree(nn.Module):
    """Nested parameters, read like a dict."""

    def __init__(self, leaves):
        super().__init__()
        for name, value in leaves.items():
            if isinstance(value, dict):
                self.add_module(name, Tree(value))
            else:
                value = value.clone(memory_format=torch.contiguous_format)
                self.register_parameter(name, nn.Parameter(value))

    def __getitem__(self, name):
        return getattr(self, name)

    def __contains__(self, name):
        return name in self._modules or name in self._parameters


# ------------------------------------------------------------------------- layers


def relu(x):
    return torch.maximum(x, torch.zeros_like(x))


def gelu(x):
    return 0.5 * x * torch.special.erfc(-x / math.sqrt(2.0))


def dense(params, x, axes=1):
    y = torch.tensordot(x, params["kernel"], dims=axes)
    return y + params["bias"]


def layer_norm(params, x, epsilon):
    mean = torch.mean(x, dim=-1, keepdim=True)
    mean2 = torch.mean(torch.square(x), dim=-1, keepdim=True)
    var = relu(mean2 - torch.square(mean))
    mul = torch.rsqrt(var + epsilon) * params["scale"]
    return (x - mean) * mul + params["bias"]


def same_pads(size, window, stride):
    total = max((-(-size // stride) - 1) * stride + window - size, 0)
    return total // 2, total - total // 2


def sliding_windows(x, window, stride, padding):
    """[b, h, w, c] -> [b, h', w', c, i, j]."""
    if padding == "SAME":
        rows, columns = (same_pads(size, window, stride) for size in x.shape[1:3])
        x = nn.functional.pad(x, (0, 0, *columns, *rows))
    return x.unfold(1, window, stride).unfold(2, window, stride)


def conv(params, x, stride, padding="SAME"):
    """kernel [i, j, c, o]."""
    windows = sliding_windows(x, params["kernel"].shape[0], stride, padding)
    y = torch.einsum("bhwcij,ijco->bhwo", windows, params["kernel"])
    return y + params["bias"]


def depthwise_conv(params, x):
    """kernel [i, j, 1, c], as for as many groups as features."""
    windows = sliding_windows(x, params["kernel"].shape[0], 1, "SAME")
    y = torch.einsum("bhwcij,ijc->bhwc", windows, params["kernel"].squeeze(2))
    return y + params["bias"]


def resize_matrix(in_size, out_size):
    """Weights of a triangle around each place; a column for each place of the output."""
    sample = (torch.arange(out_size) + 0.5) * (in_size / out_size) - 0.5
    away = torch.abs(sample[None, :] - torch.arange(in_size)[:, None])
    weights = relu(1.0 - away)
    return weights / torch.sum(weights, dim=0, keepdim=True)


def resize_bilinear(table, height, width):
    rows = resize_matrix(table.shape[0], height)
    columns = resize_matrix(table.shape[1], width)
    return torch.einsum("hwc,hy,wx->yxc", table, rows, columns)


def pool_matrix(in_size, out_size):
    """A column for each window; windows overlap where sizes do not divide."""
    place = torch.arange(in_size)[:, None]
    window = torch.arange(out_size)[None, :]
    start = window * in_size // out_size
    stop = -(-(window + 1) * in_size // out_size)
    inside = ((place >= start) & (place < stop)).float()
    return inside / torch.sum(inside, dim=0, keepdim=True)


def adaptive_avg_pool(x, shape):
    rows, columns = map(pool_matrix, x.shape[1:3], shape)
    return torch.einsum("bhwc,hy,wx->byxc", x, rows, columns)


# ---------------------------------------------------------------------- attention


def dot_product_attention(query, key, value):
    """[b, q, n, d] and twice [b, k, n, d]."""
    query = query / math.sqrt(query.shape[-1])
    logits = torch.einsum("bqnd,bknd->bnqk", query, key)
    weights = nn.functional.softmax(logits, dim=-1)
    return torch.einsum("bnqk,bknd->bqnd", weights, value)


def multi_head_attention(params, inputs_q, inputs_kv):
    query = dense(params["query"], inputs_q)
    key, value = torch.unbind(dense(params["key_value"], inputs_kv), dim=2)
    encoded = dot_product_attention(query, key, value)
    return dense(params["out"], encoded, axes=2)


def reduce_map(params, x, stage):
    """What is attended to: [b, h', w', c]."""
    if stage.pool is not None:
        x = adaptive_avg_pool(x, stage.pool)
        x = conv(params["conv"], x, 1)
        return gelu(layer_norm(params["norm"], x, CONFIG.stem_epsilon))
    if stage.reduction > 1:
        x = conv(params["conv"], x, stage.reduction, "VALID")
        return layer_norm(params["norm"], x, CONFIG.stem_epsilon)
    return x


def spatial_attention(params, x, stage):
    memory = x
    if "reduce" in params:
        memory = reduce_map(params["reduce"], x, stage)
    y = multi_head_attention(params, x.flatten(1, 2), memory.flatten(1, 2))
    return y.unflatten(1, x.shape[1:3])


# -------------------------------------------------------------------------- model


def feed_forward(params, x, linear):
    x = dense(params["wi"], x)
    if linear:
        x = relu(x)
    x = gelu(depthwise_conv(params["depthwise"], x))
    return dense(params["wo"], x)


def encoder_block(params, x, stage):
    y = layer_norm(params["ln_attention"], x, CONFIG.norm_epsilon)
    x = x + spatial_attention(params["attention"], y, stage)
    y = layer_norm(params["ln_mlp"], x, CONFIG.norm_epsilon)
    return x + feed_forward(params["mlp"], y, stage.pool is not None)


def pyramid_stage(params, x, stage):
    x = conv(params["embed"]["conv"], x, stage.stride)
    x = layer_norm(params["embed"]["norm"], x, CONFIG.stem_epsilon)
    if stage.table is not None:
        x = x + resize_bilinear(params["pos_embedding"], *x.shape[1:3])
    for i in range(stage.num_blocks):
        x = encoder_block(params[f"block_{i}"], x, stage)
    return x


def class_attention(params, x):
    """The token for the class [b, 1, c], after it has looked at all."""
    token = params["token"].expand(x.shape[0], 1, -1)
    tokens = torch.cat([token, x.flatten(1, 2)], dim=1)
    tokens = layer_norm(params["ln_attention"], tokens, CONFIG.norm_epsilon)
    y = multi_head_attention(params["attention"], tokens[:, :1], tokens)
    token = token + y * params["attention_scale"]
    y = layer_norm(params["ln_mlp"], token, CONFIG.norm_epsilon)
    y = dense(params["mlp"]["wo"], gelu(dense(params["mlp"]["wi"], y)))
    return token + y * params["mlp_scale"]


def apply(params, images):
    features = []
    x = images
    for i, stage in enumerate(CONFIG.stages):
        stage_params = params[f"stage_{i}"]
        x = pyramid_stage(stage_params, x, stage)
        x = layer_norm(stage_params["ln_post"], x, CONFIG.norm_epsilon)
        features.append(x)
    token = class_attention(params["class_attention"], x)
    pooled = torch.mean(features[2], dim=(1, 2))
    logits = dense(params["head"], token.squeeze(1))
    return {"logits": logits, "aux": dense(params["aux_head"], pooled)}


class PVT(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.params = Tree(params)

    def forward(self, images):
        return apply(self.params, images)


# --------------------------------------------------------------------- checkpoint


def subtree(state, prefix):
    return {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}


def convert_dense(src, name):
    return {"kernel": src[name + ".weight"].T, "bias": src[name + ".bias"]}


def convert_conv(src, name):
    """OIHW -> HWIO."""
    kernel = src[name + ".weight"].permute(2, 3, 1, 0)
    return {"kernel": kernel, "bias": src[name + ".bias"]}


def convert_norm(src, name):
    return {"scale": src[name + ".weight"], "bias": src[name + ".bias"]}


def heads_last(src, name, *shape):
    """Kernel [c, *shape, d] and bias [*shape, d]."""
    kernel = src[name + ".weight"].T.unflatten(1, (*shape, -1))
    return {"kernel": kernel, "bias": src[name + ".bias"].unflatten(0, (*shape, -1))}


def convert_attention(src, num_heads):
    out = src["proj.weight"].T.unflatten(0, (num_heads, -1))
    return {
        "query": heads_last(src, "q", num_heads),
        "key_value": heads_last(src, "kv", 2, num_heads),
        "out": {"kernel": out, "bias": src["proj.bias"]},
    }


def convert_block(src, num_heads):
    attention: dict[str, Any] = convert_attention(subtree(src, "attn."), num_heads)
    if "attn.sr.weight" in src:
        attention["reduce"] = {
            "conv": convert_conv(src, "attn.sr"),
            "norm": convert_norm(src, "attn.norm"),
        }
    return {
        "ln_attention": convert_norm(src, "norm1"),
        "attention": attention,
        "ln_mlp": convert_norm(src, "norm2"),
        "mlp": {
            "wi": convert_dense(src, "mlp.fc1"),
            "depthwise": convert_conv(src, "mlp.dwconv"),
            "wo": convert_dense(src, "mlp.fc2"),
        },
    }


def convert_stage(src, stage):
    params: dict[str, Any] = {
        "embed": {
            "conv": convert_conv(src, "patch_embed.proj"),
            "norm": convert_norm(src, "patch_embed.norm"),
        },
        "ln_post": convert_norm(src, "norm"),
    }
    if stage.table is not None:
        params["pos_embedding"] = src["pos_embed"].reshape(*stage.table, -1)
    for i in range(stage.num_blocks):
        block = subtree(src, f"blocks.{i}.")
        params[f"block_{i}"] = convert_block(block, stage.num_heads)
    return params


def convert_class_attention(src):
    return {
        "token": src["cls_token"],
        "ln_attention": convert_norm(src, "norm1"),
        "attention": convert_attention(src, CONFIG.class_heads),
        "attention_scale": src["gamma_1"],
        "ln_mlp": convert_norm(src, "norm2"),
        "mlp": {"wi": convert_dense(src, "fc1"), "wo": convert_dense(src, "fc2")},
        "mlp_scale": src["gamma_2"],
    }


def convert(state):
    """PyTorch's names and layouts -> ours."""
    params: dict[str, Any] = {
        f"stage_{i}": convert_stage(subtree(state, f"stages.{i}."), stage)
        for i, stage in enumerate(CONFIG.stages)
    }
    params["class_attention"] = convert_class_attention(subtree(state, "class_attn."))
    params["head"] = convert_dense(state, "head")
    params["aux_head"] = convert_dense(state, "aux_head")
    return params


def model():
    return PVT(convert(torch.load(Path(__file__).with_name("weights.pt"))))


# ----------------------------------------------------------------------- training

MEAN_RGB = (123.7, 101.3, 88.5)
STDDEV_RGB = (58.4, 47.1, 66.4)


def forward(net, batch):
    images = torch.movedim(batch["image"], 1, -1).float()
    return net((images - torch.tensor(MEAN_RGB)) / torch.tensor(STDDEV_RGB))


def one_hot(labels):
    return (labels[..., None] == torch.arange(CONFIG.num_classes)).float()


def smooth_labels(labels, alpha):
    return (1.0 - alpha) * labels + alpha / labels.shape[-1]


def softmax_cross_entropy(logits, labels):
    log_z = torch.logsumexp(logits, dim=-1)
    return log_z * torch.sum(labels, dim=-1) - torch.sum(labels * logits, dim=-1)


def mixed_labels(batch):
    """[b, classes]; the share is that of the first of two labels."""
    shares = torch.stack([batch["share"], 1.0 - batch["share"]], dim=-1)
    labels = torch.einsum("bl,blc->bc", shares, one_hot(batch["label"]))
    return smooth_labels(labels, CONFIG.label_smoothing)


def loss(output, batch):
    labels = mixed_labels(batch)
    main = torch.mean(softmax_cross_entropy(output["logits"], labels))
    aux = torch.mean(softmax_cross_entropy(output["aux"], labels))
    return main + CONFIG.aux_weight * aux


class AdamW(torch.optim.Optimizer):
    """As optax: scale by Adam, add decayed kernels, scale by the negative rate."""

    def __init__(self, net, learning_rate, b1, b2, eps, weight_decay):
        self.named = dict(net.named_parameters())
        super().__init__(list(self.named.values()), {})
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.b1, self.b2, self.eps = b1, b2, eps
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for name, param in self.named.items():
            grad, slots = param.grad, self.state[param]
            mu = slots.setdefault("mu", torch.zeros_like(param))
            nu = slots.setdefault("nu", torch.zeros_like(param))
            mu.copy_(self.b1 * mu + (1.0 - self.b1) * grad)
            nu.copy_(self.b2 * nu + (1.0 - self.b2) * torch.square(grad))
            mu_hat = mu / (1.0 - self.b1**self.count)
            nu_hat = nu / (1.0 - self.b2**self.count)
            update = mu_hat / (torch.sqrt(nu_hat) + self.eps)
            if name.endswith("kernel"):
                update = update + self.weight_decay * param
            param.sub_(self.learning_rate * update)


def optimizer(net):
    return AdamW(net, 2e-3, b1=0.9, b2=0.98, eps=1e-6, weight_decay=0.1)
