"""After Flax: functions of a tree of params, NHWC, kernels [in, ...out], layers in one scan.

Letters of the einsums: B batch, Y and X places in the grid, P and Q in a patch, C channels, D
features, N heads, H features of a head, T and S tokens, F hidden features.
"""

import dataclasses
import math
from functools import partial
from pathlib import Path

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Config:
    image_shape: tuple = (16, 30, 3)
    patch_shape: tuple = (8, 6)
    embed_dim: int = 28
    num_heads: int = 4
    num_layers: int = 3
    num_layers_token_only: int = 2
    num_classes: int = 9
    label_smoothing: float = 0.1
    aux_weight: float = 0.4
    self_target: float = 0.25
    pixel_mean: tuple = (0.48, 0.45, 0.40)
    pixel_stddev: tuple = (0.23, 0.26, 0.29)


# --------------------------------------------------------------------------- trees


class Tree(nn.Module):
    """A tree of params: what is a dict is a branch."""

    def __init__(self, tree):
        super().__init__()
        for name, value in tree.items():
            if isinstance(value, dict):
                self.add_module(name, Tree(value))
            else:
                self.register_parameter(name, nn.Parameter(value.clone().contiguous()))

    def unfreeze(self):
        tree = {name: branch.unfreeze() for name, branch in self.named_children()}
        return {**tree, **dict(self.named_parameters(recurse=False))}


def tree_map(f, *trees):
    if isinstance(trees[0], dict):
        return {k: tree_map(f, *(tree[k] for tree in trees)) for k in trees[0]}
    return f(*trees)


def scan_layers(layer, stacked, x, length):
    """The params have the layers in front."""
    for i in range(length):
        x = layer(tree_map(lambda leaf: leaf[i], stacked), x)
    return x


# -------------------------------------------------------------------------- basics


def stop_gradient(x):
    return x.detach()


def softmax(x, axis=-1):
    unnormalized = torch.exp(x - stop_gradient(torch.amax(x, dim=axis, keepdim=True)))
    return unnormalized / torch.sum(unnormalized, dim=axis, keepdim=True)


def log_softmax(x):
    shifted = x - stop_gradient(torch.amax(x, dim=-1, keepdim=True))
    return shifted - torch.log(torch.sum(torch.exp(shifted), dim=-1, keepdim=True))


def gelu(x, approximate=False):
    if approximate:
        cdf = 1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))
        return x * 0.5 * cdf
    return x * (torch.erf(x / math.sqrt(2.0)) + 1.0) / 2.0


def dense(params, x):
    return torch.einsum("...D,DF->...F", x, params["kernel"]) + params["bias"]


def layer_norm(params, x, epsilon=1e-6):
    """With the fast variance: the mean of the squares less the square of the mean."""
    mean = torch.mean(x, dim=-1, keepdim=True)
    mean2 = torch.mean(torch.square(x), dim=-1, keepdim=True)
    mul = torch.rsqrt(mean2 - torch.square(mean) + epsilon) * params["scale"]
    return (x - mean) * mul + params["bias"]


# ------------------------------------------------------------------------- network


def patch_embed(params, cfg, images):
    """[B, height, width, C] -> [B, Y, X, D]."""
    batch, height, width, channels = images.shape
    ph, pw = cfg.patch_shape
    patches = images.reshape(batch, height // ph, ph, width // pw, pw, channels)
    tokens = torch.einsum("BYPXQC,PQCD->BYXD", patches, params["kernel"])
    return tokens + params["bias"]


def talking_heads(transform, logits):
    return torch.einsum("NM,BN...->BM...", transform, logits)


def talking_heads_attention(params, inputs):
    qkv = torch.einsum("BTD,DINH->IBTNH", inputs, params["qkv"]["kernel"])
    query, key, value = qkv
    query = query + params["query_bias"]
    value = value + params["value_bias"]
    query = query / math.sqrt(query.shape[-1])
    logits = torch.einsum("BTNH,BSNH->BNTS", query, key)
    logits = talking_heads(params["pre_softmax"]["kernel"], logits)
    weights = softmax(logits)
    weights = talking_heads(params["post_softmax"]["kernel"], weights)
    weights = weights + params["post_softmax"]["bias"][:, None, None]
    encoded = torch.einsum("BNTS,BSNH->BTNH", weights, value)
    out = torch.einsum("BTNH,NHD->BTD", encoded, params["out"]["kernel"])
    return out + params["out"]["bias"]


def dense_general(params, inputs):
    return torch.einsum("...D,DNH->...NH", inputs, params["kernel"])


def class_attention(params, inputs):
    """The query is the first token alone: [B, N, H]."""
    query = dense_general(params["query"], inputs[:, 0]) + params["query"]["bias"]
    key = dense_general(params["key"], inputs)
    value = dense_general(params["value"], inputs) + params["value"]["bias"]
    logits = torch.einsum("BNH,BSNH->BNS", query, key)
    weights = softmax(logits / math.sqrt(query.shape[-1]))
    encoded = torch.einsum("BNS,BSNH->BNH", weights, value)
    out = torch.einsum("BNH,NHD->BD", encoded, params["out"]["kernel"])
    return out + params["out"]["bias"]


def feed_forward(params, x):
    hidden = gelu(dense(params["wi"], x))
    return dense(params["wo"], hidden)


def encoder_layer(params, x):
    y = talking_heads_attention(params["attention"], layer_norm(params["norm_att"], x))
    x = x + y * params["scale_att"]
    y = feed_forward(params["mlp"], layer_norm(params["norm_mlp"], x))
    return x + y * params["scale_mlp"]


def class_layer(params, cls, tokens):
    """cls [B, D]; the tokens stay what they are."""
    inputs = torch.cat([cls[:, None], tokens], dim=1)
    y = class_attention(params["attention"], layer_norm(params["norm_att"], inputs))
    cls = cls + y * params["scale_att"]
    y = feed_forward(params["mlp"], layer_norm(params["norm_mlp"], cls))
    return cls + y * params["scale_mlp"]


def apply(params, cfg, images):
    """Logits of the class token and of the pooled tokens."""
    x = patch_embed(params["embedding"], cfg, images)
    x = x + params["pos_embedding"]
    x = x.flatten(1, 2)
    x = scan_layers(encoder_layer, params["encoder"], x, cfg.num_layers)
    cls = torch.broadcast_to(params["cls"], (x.shape[0], cfg.embed_dim))
    for i in range(cfg.num_layers_token_only):
        cls = class_layer(params[f"class_layer_{i}"], cls, x)
    norm = partial(layer_norm, params["encoder_norm"])
    pooled = torch.mean(norm(x), dim=1)
    return dense(params["head"], norm(cls)), dense(params["head_pooled"], pooled)


# ---------------------------------------------------------------------------- loss


def preprocess(cfg, images):
    """uint8 NCHW -> floats NHWC."""
    images = torch.movedim(images, 1, -1).float() / 255.0
    return (images - torch.tensor(cfg.pixel_mean)) / torch.tensor(cfg.pixel_stddev)


def mix(x, partner, lam):
    lam = lam.reshape(-1, *[1] * (x.ndim - 1))
    return lam * x + (1.0 - lam) * torch.index_select(x, 0, partner)


def smoothed_nll(logits, labels, alpha):
    """As with labels of which the share alpha lies on all classes alike."""
    logp = log_softmax(logits)
    nll = -torch.gather(logp, -1, labels[:, None])[:, 0]
    return (1.0 - alpha) * nll - alpha * torch.mean(logp, dim=-1)


def mixed_loss(logits, batch, cfg):
    """The loss is linear in the labels, so each label has its own."""
    own = smoothed_nll(logits, batch["label"], cfg.label_smoothing)
    others = batch["label"][batch["partner"]]
    other = smoothed_nll(logits, others, cfg.label_smoothing)
    lam = batch["lam"]
    return lam * own + (1.0 - lam) * other


def softmax_cross_entropy(logits, labels):
    return -torch.sum(labels * log_softmax(logits), dim=-1)


def loss_fn(params, cfg, batch):
    images = mix(preprocess(cfg, batch["image"]), batch["partner"], batch["lam"])
    logits, pooled = apply(params, cfg, images)
    main = torch.mean(mixed_loss(logits, batch, cfg))
    teacher = stop_gradient(softmax(logits))
    aux = (1.0 - cfg.self_target) * mixed_loss(pooled, batch, cfg)
    aux = aux + cfg.self_target * softmax_cross_entropy(pooled, teacher)
    return main + cfg.aux_weight * torch.mean(aux)


# ---------------------------------------------------------------------- checkpoint


def convert_dense(src, name):
    return {"kernel": src[name + ".weight"].T, "bias": src[name + ".bias"]}


def convert_norm(src, name):
    return {"scale": src[name + ".weight"], "bias": src[name + ".bias"]}


def convert_out(cfg, src):
    kernel = src["attn.proj.weight"].T.reshape(cfg.num_heads, -1, cfg.embed_dim)
    return {"kernel": kernel, "bias": src["attn.proj.bias"]}


def convert_talking_heads(cfg, src):
    heads = (cfg.num_heads, -1)
    qkv = src["attn.qkv.weight"].reshape(3, *heads, cfg.embed_dim)
    return {
        "qkv": {"kernel": torch.permute(qkv, (3, 0, 1, 2))},
        "query_bias": src["attn.q_bias"].reshape(heads),
        "value_bias": src["attn.v_bias"].reshape(heads),
        "pre_softmax": {"kernel": src["attn.proj_l.weight"].T},
        "post_softmax": convert_dense(src, "attn.proj_w"),
        "out": convert_out(cfg, src),
    }


def convert_class_attention(cfg, src):
    heads = (cfg.num_heads, -1)

    def projection(name):
        return src[f"attn.{name}.weight"].T.reshape(cfg.embed_dim, *heads)

    return {
        "query": {
            "kernel": projection("q"),
            "bias": src["attn.q.bias"].reshape(heads),
        },
        "key": {"kernel": projection("k")},
        "value": {
            "kernel": projection("v"),
            "bias": src["attn.v.bias"].reshape(heads),
        },
        "out": convert_out(cfg, src),
    }


def convert_layer(cfg, state, prefix, convert_attention):
    src = {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}
    return {
        "norm_att": convert_norm(src, "norm1"),
        "attention": convert_attention(cfg, src),
        "scale_att": src["gamma_1"],
        "norm_mlp": convert_norm(src, "norm2"),
        "mlp": {
            "wi": convert_dense(src, "mlp.fc1"),
            "wo": convert_dense(src, "mlp.fc2"),
        },
        "scale_mlp": src["gamma_2"],
    }


def convert(cfg, state):
    """PyTorch's names and layouts -> our tree."""
    rows = cfg.image_shape[0] // cfg.patch_shape[0]
    layers = [
        convert_layer(cfg, state, f"blocks.{i}.", convert_talking_heads)
        for i in range(cfg.num_layers)
    ]
    params = {
        "embedding": {
            "kernel": state["patch_embed.proj.weight"].permute(2, 3, 1, 0),
            "bias": state["patch_embed.proj.bias"],
        },
        "pos_embedding": state["pos_embed"].reshape(1, rows, -1, cfg.embed_dim),
        "encoder": tree_map(lambda *leaves: torch.stack(leaves), *layers),
        "cls": state["cls_token"][0, 0],
        "encoder_norm": convert_norm(state, "norm"),
        "head": convert_dense(state, "head"),
        "head_pooled": convert_dense(state, "head_aux"),
    }
    for i in range(cfg.num_layers_token_only):
        prefix = f"blocks_token_only.{i}."
        layer = convert_layer(cfg, state, prefix, convert_class_attention)
        params[f"class_layer_{i}"] = layer
    return params


class CaiT(nn.Module):
    """Holds the params for the functions above."""

    def __init__(self, cfg, params):
        super().__init__()
        self.cfg = cfg
        self.params = Tree(params)

    def forward(self, batch):
        return loss_fn(self.params.unfreeze(), self.cfg, batch)


def model():
    cfg = Config()
    state = torch.load(Path(__file__).with_name("weights.pt"))
    return CaiT(cfg, convert(cfg, state))


def forward(net, batch):
    return {"loss": net(batch)}


def loss(output, batch):
    return output["loss"]
