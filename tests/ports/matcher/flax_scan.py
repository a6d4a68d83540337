"""As in Flax: a tree of kernels with an axis of layers, through which a body is scanned.

Both images are padded to one length and stand on an axis of their own, the first:
(side, batch, points, ...). Heads are axes; a rotation pairs the halves of a head. The
states of all layers are kept, and scored together at the end. optax does the training.
"""

import math
from pathlib import Path

import torch
from torch import nn

CONFIG = {
    "num_layers": 3,
    "num_heads": 3,
    "embed_dim": 24,
    "layer_norm_eps": 1e-5,
    "nll_balance": 0.6,
    "layer_decay": 0.8,
}


# flax.linen, as functions


def subtree(params, prefix):
    """Return what stands below a name."""
    prefix = prefix + "/"
    return {k[len(prefix) :]: v for k, v in params.items() if k.startswith(prefix)}


def dense(params, x):
    return torch.einsum("...i,io->...o", x, params["kernel"]) + params["bias"]


def to_heads(params, x):
    return torch.einsum("...i,ihd->...hd", x, params["kernel"]) + params["bias"]


def from_heads(params, x):
    return torch.einsum("...hd,hdo->...o", x, params["kernel"]) + params["bias"]


def layer_norm(params, x):
    mean = torch.mean(x, dim=-1, keepdim=True)
    mean2 = torch.mean(torch.square(x), dim=-1, keepdim=True)
    var = torch.clamp(mean2 - torch.square(mean), min=0.0)
    mul = torch.rsqrt(var + CONFIG["layer_norm_eps"]) * params["scale"]
    return (x - mean) * mul + params["bias"]


def gelu(x):
    return 0.5 * x * torch.erfc(-x * math.sqrt(0.5))


def log_sigmoid(x):
    return -torch.logaddexp(-x, torch.zeros_like(x))


def softmax(x, where):
    """Over the last axis, of the entries that are there."""
    x = torch.where(where, x, torch.full_like(x, -torch.inf))
    x_max = torch.amax(x, dim=-1, keepdim=True).detach()
    unnormalized = torch.exp(x - x_max)
    return unnormalized / torch.sum(unnormalized, dim=-1, keepdim=True)


def logsumexp(x, where, axis):
    x = torch.where(where, x, torch.full_like(x, torch.finfo(x.dtype).min))
    x_max = torch.amax(x, dim=axis, keepdim=True).detach()
    total = torch.sum(torch.exp(x - x_max), dim=axis, keepdim=True)
    return torch.log(total) + x_max


def scan(body, carry, xs):
    """Return the last carry and what the body gives for each entry of the leading axis."""
    length = len(next(iter(xs.values())))
    ys = []
    for step in range(length):
        carry, y = body(carry, {k: v[step] for k, v in xs.items()})
        ys.append(y)
    return carry, torch.stack(ys)


# inputs


def both(batch, name):
    """Stack an input of either image, the shorter one padded."""
    first, second = batch[name + "0"], batch[name + "1"]
    length = max(first.shape[1], second.shape[1])

    def pad(x):
        shape = (x.shape[0], length - x.shape[1], *x.shape[2:])
        return torch.cat([x, torch.zeros(shape, dtype=x.dtype)], dim=1)

    return torch.stack([pad(first), pad(second)])


def rooted(desc):
    total = torch.sum(torch.abs(desc), dim=-1, keepdim=True)
    return torch.sqrt(torch.clamp(desc / torch.clamp(total, min=1e-6), min=1e-6))


def positions(keypoints, oris, sizes):
    """(side, batch, points, 3): places from the middle of the image, and angles."""
    half = 0.5 * sizes[:, :, None, :]
    longest = torch.amax(half, dim=-1, keepdim=True)
    placed = (keypoints - half) / longest
    turned = (oris * (math.pi / 180.0))[..., None]
    return torch.cat([placed, turned], dim=-1)


def fourier(kernel, x):
    angle = torch.einsum("sbkp,pf->sbkf", x, kernel)[:, :, :, None, :]
    return torch.cos(angle), torch.sin(angle)


def rotate(x, cos, sin):
    real, imag = torch.chunk(x, 2, dim=-1)
    return torch.cat([real * cos - imag * sin, imag * cos + real * sin], dim=-1)


# layers


def attend(query, key, value, key_mask):
    depth = query.shape[-1]
    logits = torch.einsum("sbqhd,sbkhd->sbhqk", query, key) / math.sqrt(depth)
    weights = softmax(logits, key_mask[:, :, None, None, :])
    return torch.einsum("sbhqk,sbkhd->sbqhd", weights, value)


def mlp(params, x, message):
    h = torch.einsum("...i,io->...o", x, params["wi/kernel"][0])
    h = h + torch.einsum("...i,io->...o", message, params["wi/kernel"][1])
    h = gelu(layer_norm(subtree(params, "norm"), h + params["wi/bias"]))
    return x + dense(subtree(params, "wo"), h)


def self_layer(params, x, cos, sin, mask):
    query = rotate(to_heads(subtree(params, "query"), x), cos, sin)
    key = rotate(to_heads(subtree(params, "key"), x), cos, sin)
    value = to_heads(subtree(params, "value"), x)
    message = from_heads(subtree(params, "out"), attend(query, key, value, mask))
    return mlp(subtree(params, "mlp"), x, message)


def cross_layer(params, x, mask):
    shared = to_heads(subtree(params, "shared"), x)
    value = to_heads(subtree(params, "value"), x)
    # the other image is the other side
    context = attend(shared, shared.flip(0), value.flip(0), mask.flip(0))
    message = from_heads(subtree(params, "out"), context)
    return mlp(subtree(params, "mlp"), x, message)


def encode(params, batch, mask):
    """Return the states behind each of the layers (layer, side, batch, points, dim)."""
    x = dense(subtree(params, "input"), rooted(both(batch, "descriptors")))
    sizes = torch.stack([batch["size0"], batch["size1"]])
    places = positions(both(batch, "keypoints"), both(batch, "oris"), sizes)
    cos, sin = fourier(params["posenc/kernel"], places)

    def body(x, layer):
        x = self_layer(subtree(layer, "self"), x, cos, sin, mask)
        x = cross_layer(subtree(layer, "cross"), x, mask)
        return x, x

    _, states = scan(body, x, subtree(params, "layers"))
    return states


# heads


def assignment(params, states, mask):
    """Log assignments of every layer (layer, batch, m + 1, n + 1)."""
    projected = torch.einsum("lsbki,lio->lsbko", states, params["project/kernel"])
    projected = projected + params["project/bias"][:, None, None, None]
    sim = torch.einsum("lbmi,lbni->lbmn", projected[:, 0], projected[:, 1])
    sim = sim / math.sqrt(CONFIG["embed_dim"])

    logits = torch.einsum("lsbki,li->lsbk", states, params["matchable/kernel"])
    logits = logits + params["matchable/bias"][:, None, None, None]
    sure, unsure = log_sigmoid(logits), log_sigmoid(-logits)

    there = mask[0][:, :, None] & mask[1][:, None, :]
    rows = logsumexp(sim, there, axis=3)
    columns = logsumexp(sim, there, axis=2)
    inner = 2.0 * sim - rows - columns + sure[:, 0, :, :, None] + sure[:, 1, :, None, :]
    inner = torch.where(there, inner, torch.zeros_like(inner))
    bins = torch.where(mask, unsure, torch.zeros_like(unsure))
    corner = torch.zeros_like(bins[:, 1, :, :1])
    below = torch.cat([bins[:, 1], corner], dim=-1)[:, :, None, :]
    return torch.cat([torch.cat([inner, bins[:, 0, :, :, None]], 3), below], 2)


def confidences(params, states, mask):
    """How sure each point is of its match (layer, side, batch, points); not the last layer's."""
    known = states[:-1].detach()
    logits = torch.einsum("lsbki,li->lsbk", known, params["kernel"])
    logits = logits + params["bias"][:, None, None, None]
    return torch.where(mask, torch.sigmoid(logits), torch.zeros_like(logits))


def apply(params, batch):
    mask = both(batch, "mask")
    m, n = batch["mask0"].shape[1], batch["mask1"].shape[1]
    states = encode(params, batch, mask)
    scores = assignment(subtree(params, "assign"), states, mask)
    k = mask.shape[2]
    rows, columns = [*range(m), k], [*range(n), k]
    scores = scores[:, :, rows][:, :, :, columns]
    sure = confidences(subtree(params, "confidence"), states, mask)
    return scores, (sure[:, 0, :, :m], sure[:, 1, :, :n])


# from the other side


def stacked(w, name, convert, layers=CONFIG["num_layers"]):
    return torch.stack([convert(w[name.format(i)]) for i in range(layers)])


def transposed(weight):
    return weight.T


def plain(value):
    return value


def heads_of(value):
    """(out, ...) -> (..., head, depth)."""
    split = value.unflatten(0, (CONFIG["num_heads"], -1))
    return split.movedim((0, 1), (-2, -1))


def heads_of_fused(which, turned):
    """Take one of the three; neighbours become halves where they are turned."""

    def convert(value):
        part = heads_of(value.unflatten(0, (-1, 3))[:, which])
        if turned:
            part = part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return part

    return convert


def heads_in(weight):
    """(out, head * depth) -> (head, depth, out)."""
    return weight.T.unflatten(0, (CONFIG["num_heads"], -1))


def halves(weight):
    """(out, 2 * in) -> (state or message, in, out)."""
    return weight.T.unflatten(0, (2, -1))


def mlp_tree(w, source, name):
    return {
        f"{name}/wi/kernel": stacked(w, source + ".ffn.0.weight", halves),
        f"{name}/wi/bias": stacked(w, source + ".ffn.0.bias", plain),
        f"{name}/norm/scale": stacked(w, source + ".ffn.1.weight", plain),
        f"{name}/norm/bias": stacked(w, source + ".ffn.1.bias", plain),
        f"{name}/wo/kernel": stacked(w, source + ".ffn.3.weight", transposed),
        f"{name}/wo/bias": stacked(w, source + ".ffn.3.bias", plain),
    }


def layers_tree(w):
    tree = {}
    source = "transformers.{}.self_attn"
    for which, name in enumerate(("query", "key", "value")):
        convert = heads_of_fused(which, turned=name != "value")
        tree[f"layers/self/{name}/kernel"] = stacked(
            w, source + ".Wqkv.weight", convert
        )
        tree[f"layers/self/{name}/bias"] = stacked(w, source + ".Wqkv.bias", convert)
    tree["layers/self/out/kernel"] = stacked(w, source + ".out_proj.weight", heads_in)
    tree["layers/self/out/bias"] = stacked(w, source + ".out_proj.bias", plain)
    tree |= mlp_tree(w, source, "layers/self/mlp")

    source = "transformers.{}.cross_attn"
    for name, theirs in (("shared", ".to_qk"), ("value", ".to_v")):
        kernel = stacked(w, source + theirs + ".weight", heads_of)
        tree[f"layers/cross/{name}/kernel"] = kernel
        tree[f"layers/cross/{name}/bias"] = stacked(
            w, source + theirs + ".bias", heads_of
        )
    tree["layers/cross/out/kernel"] = stacked(w, source + ".to_out.weight", heads_in)
    tree["layers/cross/out/bias"] = stacked(w, source + ".to_out.bias", plain)
    return tree | mlp_tree(w, source, "layers/cross/mlp")


def heads_tree(w):
    source = "log_assignment.{}."
    early = CONFIG["num_layers"] - 1
    token = "token_confidence.{}.token.0."
    return {
        "assign/project/kernel": stacked(w, source + "final_proj.weight", transposed),
        "assign/project/bias": stacked(w, source + "final_proj.bias", plain),
        "assign/matchable/kernel": stacked(
            w, source + "matchability.weight", torch.ravel
        ),
        "assign/matchable/bias": stacked(
            w, source + "matchability.bias", torch.squeeze
        ),
        "confidence/kernel": stacked(w, token + "weight", torch.ravel, early),
        "confidence/bias": stacked(w, token + "bias", torch.squeeze, early),
    }


def from_torch(w):
    return {
        "input/kernel": w["input_proj.weight"].T,
        "input/bias": w["input_proj.bias"],
        "posenc/kernel": w["posenc.Wr.weight"].T,
        **layers_tree(w),
        **heads_tree(w),
    }


class TrainState(nn.Module):
    def __init__(self, params):
        super().__init__()
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value.clone().contiguous()))

    def forward(self, batch):
        return apply(dict(self.named_parameters()), batch)


def model():
    return TrainState(from_torch(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    scores, sure = net(batch)
    output = {f"scores_{i}": layer for i, layer in enumerate(scores)}
    for side, layers in enumerate(sure):
        for i, layer in enumerate(layers):
            output[f"confidence{side}_{i}"] = layer
    return output


# losses


def one_hot(index, size):
    """All zeros where the index is negative."""
    return (index[..., None] == torch.arange(size)).to(torch.get_default_dtype())


def match_loss(scores, matches0, matches1):
    """Of scores (layer, batch, m + 1, n + 1); return (layer)."""
    n = scores.shape[3] - 1
    wanted = one_hot(matches0, n).to(scores)
    found = torch.einsum("lbmn,bmn->lb", scores[:, :, :-1, :-1], wanted)
    found = found / torch.clamp(torch.sum(wanted, dim=(1, 2)), min=1.0)
    alone0 = (matches0 == -1).to(scores)
    alone1 = (matches1 == -1).to(scores)
    left = torch.einsum("lbm,bm->lb", scores[:, :, :-1, -1], alone0)
    left = left + torch.einsum("lbn,bn->lb", scores[:, :, -1, :-1], alone1)
    count = torch.sum(alone0, dim=1) + torch.sum(alone1, dim=1)
    left = left / torch.clamp(count, min=1.0)
    balance = CONFIG["nll_balance"]
    return -torch.mean(balance * found + (1.0 - balance) * left, dim=1)


def chosen(scores, mask, axis):
    """Index of the best entry along an axis, absent ones left out; the bin is the last."""
    with_bin = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    there = with_bin[:, None, :] if axis == 3 else with_bin[:, :, None]
    best = torch.argmax(torch.where(there, scores, torch.full_like(scores, -1e9)), axis)
    return best[:, :, :-1]


def sure_loss(sure, best, mask):
    """Mean of the layers' cross entropies, over the points that are there."""
    same = (best[:-1] == best[-1:]).to(sure)
    there = mask.to(sure)
    entropy = -same * torch.log(sure.clamp(min=1e-30))
    entropy = entropy - (1.0 - same) * torch.log1p(-sure)
    return torch.mean(torch.sum(entropy * there, dim=(1, 2)) / torch.sum(there))


def loss(output, batch):
    last = CONFIG["num_layers"] - 1
    scores = torch.stack([output[f"scores_{i}"] for i in range(last + 1)])
    weights = CONFIG["layer_decay"] ** torch.arange(last, -1, -1).to(scores)
    losses = match_loss(scores, batch["matches0"], batch["matches1"])
    total = torch.sum(weights * losses) / torch.sum(weights)
    for side, axis in ((0, 3), (1, 2)):
        best = chosen(scores.detach(), batch[f"mask{1 - side}"], axis)
        sure = torch.stack([output[f"confidence{side}_{i}"] for i in range(last)])
        total = total + 0.5 * sure_loss(sure, best, batch[f"mask{side}"])
    return total


# optax


def nadam_direction(grad, state, count, b1, b2, eps, psi):
    """Nesterov's Adam, with a momentum that warms up."""
    now = b1 * (1.0 - 0.5 * 0.96 ** (count * psi))
    ahead = b1 * (1.0 - 0.5 * 0.96 ** ((count + 1) * psi))
    product = state["product"] * now
    left, then = 1.0 - product.item(), 1.0 - product.item() * ahead
    mu = b1 * state["mu"] + (1.0 - b1) * grad
    nu = b2 * state["nu"] + (1.0 - b2) * torch.square(grad)
    root = torch.sqrt(nu / (1.0 - b2**count)) + eps
    fresh = (1.0 - now) / left * grad
    kept = ahead / then * mu
    return (fresh + kept) / root, {"mu": mu, "nu": nu, "product": product}


class GradientTransformation(torch.optim.Optimizer):
    """A direction for each value, a decay of kernels, and a rate by the name's label."""

    def __init__(self, named, rates, decays, **direction):
        groups = [
            {"params": [p for _, p in group], "rate": rates[key], "decay": decays[key]}
            for key in rates
            if (group := [(name, p) for name, p in named if label_of(name) == key])
        ]
        super().__init__(groups, {})
        self.direction = direction
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p] or {
                    "mu": torch.zeros_like(p),
                    "nu": torch.zeros_like(p),
                    "product": torch.ones(()),
                }
                update, new = nadam_direction(
                    p.grad, state, self.count, **self.direction
                )
                self.state[p].update(new)
                p.sub_(group["rate"] * (update + group["decay"] * p))


def label_of(name):
    if name.startswith("posenc/"):
        return "posenc"
    return "kernel" if name.endswith("/kernel") else "other"


def optimizer(net):
    return GradientTransformation(
        list(net.named_parameters()),
        rates={"kernel": 2e-3, "other": 2e-3, "posenc": 5e-4},
        decays={"kernel": 0.1, "other": 0.0, "posenc": 0.0},
        b1=0.9,
        b2=0.98,
        eps=1e-8,
        psi=4e-3,
    )
