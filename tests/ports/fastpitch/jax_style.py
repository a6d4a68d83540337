"""After JAX: pure functions of a flat dict of arrays; layers of a stack are along axis 0.

Letters of the einsums: b batch, t places, s other places, f frames, d and e features,
h heads, k features of a head, w taps of a kernel, z query, key or value.
"""

import math
from functools import partial
from pathlib import Path

import torch
from torch import nn

HEADS = 2
LAYERS = 2
F0_MEAN, F0_STD = 214.72, 65.72
LOSS_WEIGHTS = {"mel": 1.0, "log_dur": 0.3, "pitch": 0.2}

# ------------------------------------------------------------------------- params


def convert(state):
    """PyTorch's names and layouts -> {"scope/name": array}."""
    params = {}

    def linear(scope, name):
        params[f"{scope}/w"] = state[f"{name}.weight"].T
        params[f"{scope}/b"] = state[f"{name}.bias"]

    def conv(scope, *names):
        kernels = [state[f"{name}.weight"].permute(2, 1, 0) for name in names]
        params[f"{scope}/w"] = stacked(kernels)
        params[f"{scope}/b"] = stacked([state[f"{name}.bias"] for name in names])

    def norm(scope, *names):
        params[f"{scope}/scale"] = stacked([state[f"{n}.weight"] for n in names])
        params[f"{scope}/offset"] = stacked([state[f"{n}.bias"] for n in names])

    def stack(scope, name):
        layers = [f"{name}.layers.{i}" for i in range(LAYERS)]
        qkv = torch.stack([state[f"{n}.dec_attn.qkv_net.weight"] for n in layers])
        params[f"{scope}/attn/w_qkv"] = split_heads(qkv)
        out = torch.stack([state[f"{n}.dec_attn.o_net.weight"] for n in layers])
        params[f"{scope}/attn/w_out"] = out.mT.unflatten(1, (HEADS, -1))
        norm(f"{scope}/attn/ln", *[f"{n}.dec_attn.layer_norm" for n in layers])
        conv(f"{scope}/ffn/up", *[f"{n}.pos_ff.core_net.0" for n in layers])
        conv(f"{scope}/ffn/down", *[f"{n}.pos_ff.core_net.2" for n in layers])
        norm(f"{scope}/ffn/ln", *[f"{n}.pos_ff.layer_norm" for n in layers])

    def predictor(scope, name):
        for i in range(2):
            conv(f"{scope}/conv_{i}", f"{name}.layers.{i}.conv")
            norm(f"{scope}/ln_{i}", f"{name}.layers.{i}.norm")
        linear(f"{scope}/out", f"{name}.fc")

    # Padding has no row: its one-hot vector is all zeros.
    params["embed/table"] = state["encoder.word_emb.weight"][1:]
    stack("encoder", "encoder")
    predictor("duration", "duration_predictor")
    predictor("pitch", "pitch_predictor")
    conv("pitch_embed", "pitch_emb")
    stack("decoder", "decoder")
    linear("mel", "proj")
    return params


def stacked(arrays):
    return torch.stack(arrays) if len(arrays) > 1 else arrays[0]


def split_heads(qkv):
    """[layers, 3 * heads * k, d] -> [layers, 3, d, heads, k]."""
    qkv = qkv.unflatten(1, (3, HEADS, -1))
    return torch.einsum("lzhkd->lzdhk", qkv)


def subtree(params, scope):
    start = scope + "/"
    return {k[len(start) :]: v for k, v in params.items() if k.startswith(start)}


# ---------------------------------------------------------------------- functions


def layer_norm(p, x, eps=1e-5):
    mean = torch.mean(x, dim=-1, keepdim=True)
    var = torch.mean(x * x, dim=-1, keepdim=True) - mean * mean
    return (x - mean) / torch.sqrt(var + eps) * p["scale"] + p["offset"]


def conv(p, x):
    """[b, t, d] -> [b, t, e]; kernel [w, d, e]; zeros on both sides."""
    taps = p["w"].shape[0]
    x = nn.functional.pad(x, (0, 0, taps // 2, taps // 2))
    windows = x.unfold(1, taps, 1)
    return torch.einsum("btdw,wde->bte", windows, p["w"]) + p["b"]


def linear(p, x):
    return torch.einsum("...d,de->...e", x, p["w"]) + p["b"]


def sinusoids(length, width):
    """[length, width]; sines in the first half, cosines in the second."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    angles = torch.arange(length)[:, None] * rates[None, :]
    return torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1)


def length_mask(lengths, size):
    return torch.arange(size)[None, :] < lengths[:, None]


def attention(p, x, mask):
    query, key, value = torch.einsum("btd,zdhk->zbhtk", x, p["w_qkv"])
    query = query / math.sqrt(query.shape[-1])
    logits = torch.einsum("bhtk,bhsk->bhts", query, key)
    lowest = torch.finfo(logits.dtype).min
    logits = torch.where(mask[:, None, None, :], logits, lowest)
    weights = torch.exp(logits - torch.logsumexp(logits, dim=-1, keepdim=True))
    mixed = torch.einsum("bhts,bhsk->bthk", weights, value)
    return torch.einsum("bthk,hkd->btd", mixed, p["w_out"])


def feed_forward(p, x):
    hidden = torch.clamp(conv(subtree(p, "up"), x), min=0.0)
    return conv(subtree(p, "down"), hidden)


def block(p, x, mask):
    """Norms stand behind the sums; places behind the end stay zero."""
    attn, ffn, keep = subtree(p, "attn"), subtree(p, "ffn"), mask[..., None]
    y = layer_norm(subtree(attn, "ln"), x + attention(attn, x, mask))
    x = torch.where(keep, y, 0.0)
    z = layer_norm(subtree(ffn, "ln"), x + feed_forward(ffn, x))
    return torch.where(keep, z, 0.0)


def transformer(p, x, mask):
    places = sinusoids(x.shape[1], x.shape[2])
    x = x + torch.where(mask[..., None], places, 0.0)
    for i in range(LAYERS):
        layer = {name: array[i] for name, array in p.items()}
        x = block(layer, x, mask)
    return x


def predictor(p, x, mask):
    for i in range(2):
        x = torch.clamp(conv(subtree(p, f"conv_{i}"), x), min=0.0)
        x = layer_norm(subtree(p, f"ln_{i}"), x)
    y = linear(subtree(p, "out"), x)[..., 0]
    return torch.where(mask, y, 0.0)


def alignment(durs, frames):
    """[b, frames, t]: 1 where a frame is one of a character's."""
    ends = torch.cumsum(durs, dim=1)[:, None, :]
    starts = ends - durs[:, None, :]
    frame = torch.arange(frames)[None, :, None]
    return ((frame >= starts) & (frame < ends)).float()


def pitch_by_character(pitch, align):
    voiced = (pitch > 0).float()
    unit = (pitch - F0_MEAN) / F0_STD
    total = torch.einsum("bft,bf,bf->bt", align, unit, voiced)
    count = torch.einsum("bft,bf->bt", align, voiced)
    return total / torch.clamp(count, min=1.0)


def embed(table, text):
    """Symbols are counted from 1."""
    symbols = torch.arange(1, len(table) + 1)
    one_hot = (text[..., None] == symbols).float()
    return one_hot @ table


def apply(params, text, text_lens, align, pitch_target):
    mask = length_mask(text_lens, text.shape[1])
    hidden = embed(params["embed/table"], text)
    hidden = transformer(subtree(params, "encoder"), hidden, mask)
    log_dur = predictor(subtree(params, "duration"), hidden, mask)
    pitch = predictor(subtree(params, "pitch"), hidden, mask)
    hidden = hidden + conv(subtree(params, "pitch_embed"), pitch_target[..., None])
    frames = torch.einsum("bft,btd->bfd", align, hidden)
    frame_mask = torch.sum(align, dim=-1) > 0
    frames = transformer(subtree(params, "decoder"), frames, frame_mask)
    mel = linear(subtree(params, "mel"), frames)
    return {"mel": mel, "log_dur": log_dur, "pitch": pitch}


class Params(nn.Module):
    def __init__(self, params):
        super().__init__()
        for name, array in params.items():
            value = array.clone(memory_format=torch.contiguous_format)
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, *args):
        return apply(dict(self.named_parameters()), *args)


def model():
    return Params(convert(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    align = alignment(batch["durs"], batch["pitch"].shape[1])
    pitch_target = pitch_by_character(batch["pitch"], align)
    return net(batch["text"], batch["text_lens"], align, pitch_target)


# --------------------------------------------------------------------------- loss


def masked_mean(values, mask):
    return torch.sum(torch.where(mask, values, 0.0)) / torch.sum(mask)


def loss(output, batch):
    durs = batch["durs"]
    align = alignment(durs, batch["mel"].shape[1])
    targets = {
        "mel": batch["mel"],
        "log_dur": torch.log(durs + 1.0),
        "pitch": pitch_by_character(batch["pitch"], align),
    }
    mask = length_mask(batch["text_lens"], durs.shape[1])
    frame_mask = length_mask(torch.sum(durs, dim=1), align.shape[1])
    masks = {
        "mel": frame_mask[..., None].expand_as(batch["mel"]),
        "log_dur": mask,
        "pitch": mask,
    }
    total = 0.0
    for name, weight in LOSS_WEIGHTS.items():
        squared = (output[name] - targets[name]) ** 2
        total = total + weight * masked_mean(squared, masks[name])
    return total


# ---------------------------------------------------------------------- optimizer


def adamw(learning_rate, b1, b2, eps, weight_decay, mask):
    """Return init and update, as a gradient transformation does."""

    def init(params):
        mu = {name: torch.zeros_like(p) for name, p in params.items()}
        nu = {name: torch.zeros_like(p) for name, p in params.items()}
        return {"count": 0, "mu": mu, "nu": nu}

    def update(grads, state, params):
        count = state["count"] + 1
        mu = {n: b1 * state["mu"][n] + (1 - b1) * g for n, g in grads.items()}
        nu = {n: b2 * state["nu"][n] + (1 - b2) * g * g for n, g in grads.items()}
        updates = {}
        for name, p in params.items():
            first = mu[name] / (1 - b1**count)
            second = nu[name] / (1 - b2**count)
            direction = first / (torch.sqrt(second) + eps)
            if mask(name):
                direction = direction + weight_decay * p
            updates[name] = -learning_rate * direction
        return updates, {"count": count, "mu": mu, "nu": nu}

    return init, update


def is_kernel(name):
    return name.rpartition("/")[2] in ("w", "w_qkv", "w_out")


class GradientTransformation(torch.optim.Optimizer):
    def __init__(self, params, init, update):
        super().__init__(params.values(), {})
        self.params, self.update = params, update
        self.opt_state = init(params)

    @torch.no_grad()
    def step(self, closure=None):
        grads = {name: p.grad for name, p in self.params.items()}
        updates, self.opt_state = self.update(grads, self.opt_state, self.params)
        for name, p in self.params.items():
            p.add_(updates[name])


def optimizer(net):
    make = partial(adamw, 2e-3, weight_decay=0.1, mask=is_kernel)
    init, update = make(b1=0.9, b2=0.98, eps=1e-8)
    return GradientTransformation(dict(net.named_parameters()), init, update)
