"""After JAX: pure functions of a tree of arrays and of one picture, mapped over the batch.

A map is [channels, height, width], tokens are [places, channels]. Only the norms of the
convolutions see a whole batch. Weights of layers are [in, out], those of heads have the
heads first; windows are sums and maxima of shifted slices.
"""

import functools
import math
import operator
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.func import vmap

NUM_CLASSES = 9
STRIDES = {"s0": (2,), "s1": (2, 1), "s2": (2, 1), "s3": (2,)}
CONV_STAGES, ATTENTION_STAGES = ("s0", "s1"), ("s2", "s3")
NUM_HEADS = {"s2": 3, "s3": 4}
POOL_HEADS = 5
PIXELS_PER_CELL = 32

# ------------------------------------------------------------------------ windows


def same_pads(size, window, stride):
    out = (size + stride - 1) // stride
    needed = max((out - 1) * stride + window - size, 0)
    low = needed // 2
    return low, needed - low


def window_slices(x, window, stride, fill=0.0):
    """One map for each tap of a window over the last two axes, row by row."""
    rows = same_pads(x.shape[-2], window, stride)
    columns = same_pads(x.shape[-1], window, stride)
    x = nn.functional.pad(x, (*columns, *rows), value=fill)
    height, width = x.shape[-2] - window + 1, x.shape[-1] - window + 1
    return [
        x[..., i : i + height : stride, j : j + width : stride]
        for i in range(window)
        for j in range(window)
    ]


def max_pool(x):
    return functools.reduce(torch.maximum, window_slices(x, 3, 2, fill=-math.inf))


def avg_pool(x):
    total = functools.reduce(operator.add, window_slices(x, 2, 2))
    ones = torch.ones(x.shape[-2:])
    count = functools.reduce(operator.add, window_slices(ones, 2, 2))
    return total / count


def depthwise(p, x, stride):
    """w is [taps, channels]."""
    window = math.isqrt(p["w"].shape[0])
    taps = torch.stack(window_slices(x, window, stride))
    return torch.einsum("kc,kchw->chw", p["w"], taps)


def conv(p, x, stride=1):
    """w is [taps, in, out]."""
    window = math.isqrt(p["w"].shape[0])
    taps = torch.stack(window_slices(x, window, stride))
    y = torch.einsum("kio,kihw->ohw", p["w"], taps)
    return y + p["b"][:, None, None] if "b" in p else y


def pointwise(p, x):
    y = torch.einsum("io,ihw->ohw", p["w"], x)
    return y + p["b"][:, None, None] if "b" in p else y


def linear(p, x):
    return x @ p["w"] + p["b"]


# -------------------------------------------------------------------------- norms


def layer_norm(p, x, eps=1e-5):
    mean = torch.mean(x, dim=-1, keepdim=True)
    centred = x - mean
    var = torch.mean(centred**2, dim=-1, keepdim=True)
    return p["scale"] * centred * torch.rsqrt(var + eps) + p["offset"]


def batch_norm(p, xs, eps=1e-3):
    """xs [batch, channels, height, width]; variance as mean of squares less squared mean."""
    pmean = partial(torch.mean, dim=(0, 2, 3))
    mean = pmean(xs)
    var = pmean(xs**2) - mean**2
    multiplier = p["scale"] / torch.sqrt(var + eps)
    shift = p["offset"] - mean * multiplier
    return xs * multiplier[:, None, None] + shift[:, None, None]


def gelu_tanh(x):
    return x * torch.sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))


def gelu_erf(x):
    return 0.5 * x * torch.erfc(-x / math.sqrt(2.0))


def silu(x):
    return x / (1.0 + torch.exp(-x))


def norm_act(p, xs):
    return gelu_tanh(batch_norm(p, xs))


# ------------------------------------------------------------------------- blocks


def squeeze_excite(p, x):
    squeezed = torch.mean(x, dim=(1, 2))
    gate = torch.sigmoid(linear(p["up"], silu(linear(p["down"], squeezed))))
    return x * gate[:, None, None]


def mbconv(p, xs, stride):
    """Of a batch."""
    h = vmap(partial(pointwise, p["expand"]))(norm_act(p["norm_in"], xs))
    h = norm_act(p["norm_expand"], h)
    h = vmap(partial(depthwise, p["depthwise"], stride=stride))(h)
    h = norm_act(p["norm_depthwise"], h)
    h = vmap(partial(squeeze_excite, p["gate"]))(h)
    h = vmap(partial(pointwise, p["project"]))(h)
    if "skip" in p:
        xs = vmap(lambda x: pointwise(p["skip"], avg_pool(x)))(xs)
    return xs + h


def relative_bias(table, height, width):
    """[2 * height - 1, 2 * width - 1, heads] -> [heads, query, key]; query less key."""
    y, x = torch.arange(height), torch.arange(width)
    dy = y[:, None] - y[None, :] + (height - 1)
    dx = x[:, None] - x[None, :] + (width - 1)
    bias = table[dy[:, None, :, None], dx[None, :, None, :]]
    bias = bias.reshape(height * width, height * width, -1)
    return torch.movedim(bias, -1, 0)


def head_attention(wq, wk, wv, bias, tokens):
    """Of one head; w [in, size], bias [query, key]."""
    logits = (tokens @ wq) @ (tokens @ wk).T / math.sqrt(wq.shape[1])
    logits = logits + bias
    weights = torch.exp(logits - torch.logsumexp(logits, dim=1, keepdim=True))
    return weights @ (tokens @ wv)


def attention(p, tokens, height, width):
    bias = relative_bias(p["table"], height, width)
    heads = vmap(head_attention, in_dims=(0, 0, 0, 0, None))(
        p["wq"], p["wk"], p["wv"], bias, tokens
    )
    return torch.einsum("nts,nso->to", heads, p["wo"]) + p["bo"]


def to_tokens(x):
    return torch.movedim(x, 0, -1).reshape(-1, x.shape[0])


def to_map(tokens, height, width):
    return tokens.T.reshape(-1, height, width)


def transformer(p, x, stride):
    """Of a picture."""
    normed = layer_norm(p["norm_attention"], torch.movedim(x, 0, -1))
    normed = torch.movedim(normed, -1, 0)
    if stride == 2:
        x, normed = pointwise(p["skip"], max_pool(x)), max_pool(normed)
    height, width = x.shape[1:]
    t = to_tokens(x) + attention(p["attention"], to_tokens(normed), height, width)
    h = gelu_erf(linear(p["mlp"]["up"], layer_norm(p["norm_mlp"], t)))
    t = t + linear(p["mlp"]["down"], h)
    return to_map(t, height, width)


def attention_pool(p, x, size):
    """size [2] in pixels; cells that begin behind the picture's end do not count."""
    height, width = x.shape[1:]
    rows = torch.arange(height) * PIXELS_PER_CELL < size[0]
    columns = torch.arange(width) * PIXELS_PER_CELL < size[1]
    mask = (rows[:, None] & columns[None, :]).reshape(-1)
    tokens = layer_norm(p["norm"], to_tokens(x))
    keys = torch.einsum("tc,ncs->nts", tokens, p["wk"])
    values = torch.einsum("tc,ncs->nts", tokens, p["wv"])
    logits = torch.einsum("ns,nts->nt", p["query"], keys)
    logits = logits / math.sqrt(p["query"].shape[1])
    weights = torch.exp(logits - torch.amax(logits, dim=1, keepdim=True)) * mask
    weights = weights / torch.sum(weights, dim=1, keepdim=True)
    pooled = torch.einsum("nt,nts->ns", weights, values)
    return torch.einsum("ns,nso->o", pooled, p["wo"]) + p["bo"]


def stem(p, xs):
    xs = vmap(partial(conv, p["first"], stride=2))(xs)
    xs = norm_act(p["norm"], xs)
    return vmap(partial(conv, p["second"]))(xs)


def auxiliary(p, x):
    return linear(p["head"], layer_norm(p["norm"], torch.mean(x, dim=(1, 2))))


def classify(p, pooled):
    return linear(p, torch.tanh(pooled))


def apply(params, images, sizes):
    xs = stem(params["stem"], images)
    for stage in CONV_STAGES:
        for i, stride in enumerate(STRIDES[stage]):
            xs = mbconv(params[stage][f"block{i}"], xs, stride)
    aux = vmap(partial(auxiliary, params["auxiliary"]))(xs)
    for stage in ATTENTION_STAGES:
        for i, stride in enumerate(STRIDES[stage]):
            block = partial(transformer, params[stage][f"block{i}"], stride=stride)
            xs = vmap(block)(xs)
    pooled = vmap(partial(attention_pool, params["pool"]))(xs, sizes)
    return {"logits": vmap(partial(classify, params["head"]))(pooled), "aux": aux}


# ------------------------------------------------------------------------- params


def affine(state, name):
    """A linear layer or a convolution of one tap."""
    made = {"w": state[f"{name}.weight"].flatten(1).T}
    if f"{name}.bias" in state:
        made["b"] = state[f"{name}.bias"]
    return made


def norm(state, name):
    return {"scale": state[f"{name}.weight"], "offset": state[f"{name}.bias"]}


def taps_first(kernel):
    """[out, in, height, width] -> [taps, in, out]."""
    return torch.movedim(kernel.flatten(2).transpose(0, 1), -1, 0)


def split_heads(w, heads):
    """[heads * size, in] -> [heads, in, size]."""
    return w.reshape(heads, -1, w.shape[1]).transpose(1, 2)


def output_heads(w, heads):
    """[out, heads * size] -> [heads, size, out]."""
    return w.T.reshape(heads, -1, w.shape[0])


def convert_mbconv(state, at):
    made = {
        "norm_in": norm(state, f"{at}.pre_norm"),
        "expand": affine(state, f"{at}.conv1"),
        "norm_expand": norm(state, f"{at}.norm1"),
        "depthwise": {"w": taps_first(state[f"{at}.conv2.weight"])[:, 0]},
        "norm_depthwise": norm(state, f"{at}.norm2"),
        "gate": {
            "down": affine(state, f"{at}.se.fc1"),
            "up": affine(state, f"{at}.se.fc2"),
        },
        "project": affine(state, f"{at}.conv3"),
    }
    if f"{at}.shortcut.weight" in state:
        made["skip"] = affine(state, f"{at}.shortcut")
    return made


def grid_size(table):
    """Rows and columns of s2 and s3 by the number of their differences."""
    return {45: (3, 5), 15: (2, 3)}[table.shape[0]]


def convert_attention(state, at, heads):
    wq, wk, wv = state[f"{at}.qkv.weight"].tensor_split(3)
    table = state[f"{at}.rel_pos.table"]
    height, width = grid_size(table)
    return {
        "wq": split_heads(wq, heads),
        "wk": split_heads(wk, heads),
        "wv": split_heads(wv, heads),
        "wo": output_heads(state[f"{at}.proj.weight"], heads),
        "bo": state[f"{at}.proj.bias"],
        "table": table.reshape(2 * height - 1, 2 * width - 1, heads),
    }


def convert_transformer(state, at, heads):
    made = {
        "norm_attention": norm(state, f"{at}.norm1"),
        "attention": convert_attention(state, f"{at}.attn", heads),
        "norm_mlp": norm(state, f"{at}.norm2"),
        "mlp": {
            "up": affine(state, f"{at}.fc1"),
            "down": affine(state, f"{at}.fc2"),
        },
    }
    if f"{at}.shortcut.weight" in state:
        made["skip"] = affine(state, f"{at}.shortcut")
    return made


def convert_pool(state):
    wk, wv = state["pool.kv.weight"].tensor_split(2)
    return {
        "norm": norm(state, "pool.norm"),
        "query": state["pool.query"],
        "wk": split_heads(wk, POOL_HEADS),
        "wv": split_heads(wv, POOL_HEADS),
        "wo": output_heads(state["pool.proj.weight"], POOL_HEADS),
        "bo": state["pool.proj.bias"],
    }


def convert(state):
    tree = {
        "stem": {
            "first": {"w": taps_first(state["stem1.weight"])},
            "norm": norm(state, "stem_norm"),
            "second": {
                "w": taps_first(state["stem2.weight"]),
                "b": state["stem2.bias"],
            },
        },
        "auxiliary": {
            "norm": norm(state, "aux_norm"),
            "head": affine(state, "aux_head"),
        },
        "pool": convert_pool(state),
        "head": affine(state, "head"),
    }
    for number, (stage, strides) in enumerate(STRIDES.items()):
        blocks = tree[stage] = {}
        for i in range(len(strides)):
            at = f"stages.{number}.{i}"
            if stage in CONV_STAGES:
                blocks[f"block{i}"] = convert_mbconv(state, at)
            else:
                blocks[f"block{i}"] = convert_transformer(state, at, NUM_HEADS[stage])
    return tree


class Params(nn.Module):
    """A tree of arrays that torch can see."""

    def __init__(self, tree):
        super().__init__()
        for name, value in tree.items():
            if isinstance(value, dict):
                self.add_module(name, Params(value))
            else:
                leaf = nn.Parameter(value.detach().clone().contiguous())
                self.register_parameter(name, leaf)

    def tree(self):
        branches = {name: child.tree() for name, child in self.named_children()}
        return {**self._parameters, **branches}

    def forward(self, batch):
        return loss(forward(self, batch), batch)


def model():
    return Params(convert(torch.load(Path(__file__).with_name("weights.pt"))))


# --------------------------------------------------------------------------- data


def standardize(image):
    """Of one picture [channels, height, width]."""
    mean = torch.tensor([123.675, 116.28, 103.53])
    inv_std = 1.0 / torch.tensor([58.395, 57.12, 57.375])
    return (image - mean[:, None, None]) * inv_std[:, None, None]


def forward(net, batch):
    images = vmap(standardize)(batch["image"].to(torch.float32))
    return apply(net.tree(), images, batch["size"])


# --------------------------------------------------------------------------- loss


def stop_gradient(x):
    return x.detach()


def smoothed_xent(logits, label, alpha=0.1):
    """Of one picture; a share alpha of the label is spread over all classes."""
    one_hot = (label == torch.arange(NUM_CLASSES)).to(logits.dtype)
    log_z = torch.logsumexp(logits, dim=0)
    picked = torch.sum(one_hot * logits)
    return log_z - (1.0 - alpha) * picked - alpha * torch.mean(logits)


def distill_kl(teacher, student, temperature):
    """KL(teacher || student) of one picture."""
    log_p = torch.log_softmax(teacher / temperature, dim=0)
    log_q = torch.log_softmax(student / temperature, dim=0)
    return temperature**2 * torch.sum(torch.exp(log_p) * (log_p - log_q))


def masked_mean(values, mask):
    return torch.sum(torch.where(mask, values, 0.0)) / torch.sum(mask)


def loss(output, batch):
    labels, logits, aux = batch["label"], output["logits"], output["aux"]
    known = labels >= 0
    main_xent = masked_mean(vmap(smoothed_xent)(logits, labels), known)
    aux_xent = masked_mean(vmap(smoothed_xent)(aux, labels), known)
    teacher = stop_gradient(logits)
    kl = vmap(partial(distill_kl, temperature=2.0))(teacher, aux)
    return main_xent + 0.4 * aux_xent + 0.3 * torch.mean(kl)


# ------------------------------------------------------------------------- update


def adamw_update(g, p, mu, nu, count, decay, rate=2e-3, b1=0.9, b2=0.95, eps=1e-6):
    mu = b1 * mu + (1.0 - b1) * g
    nu = b2 * nu + (1.0 - b2) * g**2
    mu_hat, nu_hat = mu / (1.0 - b1**count), nu / (1.0 - b2**count)
    update = mu_hat / (torch.sqrt(nu_hat) + eps) + decay * p
    return p - rate * update, mu, nu


def decay_mask(name):
    """Layers' own weights, no others."""
    return name.rpartition(".")[2] in ("w", "wq", "wk", "wv", "wo")


class AdamW(torch.optim.Optimizer):
    def __init__(self, net):
        self.named = dict(net.named_parameters())
        super().__init__(list(self.named.values()), {})
        self.moments = {n: (0.0 * p.detach(),) * 2 for n, p in self.named.items()}
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for name, p in self.named.items():
            decay = 0.05 if decay_mask(name) else 0.0
            new, *moments = adamw_update(
                p.grad, p, *self.moments[name], self.count, decay
            )
            p.copy_(new)
            self.moments[name] = moments


def optimizer(net):
    return AdamW(net)
