"""After Flax and Optax: a tree of arrays, pure functions, pixels with channels last.

Nothing is sorted or gathered: the rank of each place is counted, and a matrix of ones and
zeros takes the seen places out and puts them back. Heads have axes of their own.
"""

import math
from pathlib import Path

import torch
from torch import nn

CONFIG = {
    "patch": 4,
    "grid": (4, 6),
    "num_seen": 9,
    "encoder": {"layers": 3, "heads": 3},
    "decoder": {"layers": 2, "heads": 2},
}


# ---------------------------------------------------------------- layers


def dense(p, x):
    return torch.matmul(x, p["kernel"]) + p["bias"]


def layer_norm(p, x, epsilon=1e-6):
    mean = torch.mean(x, dim=-1, keepdim=True)
    mean2 = torch.mean(torch.square(x - mean), dim=-1, keepdim=True)
    mul = torch.rsqrt(mean2 + epsilon) * p["scale"]
    return (x - mean) * mul + p["bias"]


def gelu(x, approximate=False):
    if approximate:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1.0 + torch.tanh(inner))
    return 0.5 * x * torch.erfc(-x * math.sqrt(0.5))


def softmax(x):
    unnormalized = torch.exp(x - torch.amax(x, dim=-1, keepdim=True).detach())
    return unnormalized / torch.sum(unnormalized, dim=-1, keepdim=True)


def attention(p, x):
    query = torch.einsum("bqd,dhk->bqhk", x, p["query"]["kernel"]) + p["query"]["bias"]
    key = torch.einsum("bsd,dhk->bshk", x, p["key"]["kernel"])
    value = torch.einsum("bsd,dhk->bshk", x, p["value"]["kernel"]) + p["value"]["bias"]
    depth = query.shape[-1]
    query = query / math.sqrt(depth)
    weights = softmax(torch.einsum("bqhk,bshk->bhqs", query, key))
    out = torch.einsum("bhqs,bshk->bqhk", weights, value)
    return torch.einsum("bqhk,hkd->bqd", out, p["out"]["kernel"]) + p["out"]["bias"]


def mlp(p, x):
    return dense(p["wo"], gelu(dense(p["wi"], x)))


def block(p, x):
    y = attention(p["attention"], layer_norm(p["ln_0"], x))
    x = x + y * p["scale_0"]
    y = mlp(p["mlp"], layer_norm(p["ln_1"], x))
    return x + y * p["scale_1"]


# ---------------------------------------------------------------- model


def sincos(grid, dim):
    """(rows * columns, dim): sines and cosines of columns, then those of rows."""
    steps = torch.arange(dim // 4, dtype=torch.float64) / (dim // 4)
    omega = torch.exp(-math.log(10000.0) * steps)
    height, width = grid
    row = torch.arange(height, dtype=torch.float64).repeat_interleave(width)
    column = torch.arange(width, dtype=torch.float64).repeat(height)
    parts = []
    for place in (column, row):
        angle = place[:, None] * omega[None, :]
        parts += [torch.sin(angle), torch.cos(angle)]
    return torch.cat(parts, dim=1).to(torch.float32)


def to_patches(image):
    """(b, rows * columns, patch, patch, 3) of (b, height, width, 3)."""
    size = CONFIG["patch"]
    b, h, w, c = image.shape
    x = torch.reshape(image, (b, h // size, size, w // size, size, c))
    x = torch.permute(x, (0, 1, 3, 2, 4, 5))
    return torch.flatten(x, 1, 2)


def select_seen(noise):
    """One-hot rows (b, seen, places); the place with the least noise first."""
    rank = torch.sum(noise[:, :, None] > noise[:, None, :], dim=-1)
    return one_hot(rank, CONFIG["num_seen"]).transpose(1, 2)


def one_hot(index, depth):
    return (index[..., None] == torch.arange(depth)).to(torch.float32)


def encode(p, patches, pos, seen):
    x = torch.einsum("bnpqc,pqcd->bnd", patches, p["embed"]["kernel"])
    x = x + p["embed"]["bias"]
    x = x + pos
    x = torch.einsum("bkn,bnd->bkd", seen, x)
    cls = torch.broadcast_to(p["cls"], (x.shape[0], 1, x.shape[2]))
    x = torch.cat([cls, x], dim=1)
    for i in range(CONFIG["encoder"]["layers"]):
        x = block(p[f"layer_{i}"], x)
    return layer_norm(p["ln"], x)


def decode(p, latent, pos, seen):
    x = dense(p["embed"], latent)
    cls, x = x[:, :1], x[:, 1:]
    hidden = 1.0 - torch.sum(seen, dim=1)
    x = torch.einsum("bkn,bkd->bnd", seen, x)
    x = x + hidden[:, :, None] * p["mask_token"]
    x = torch.cat([cls, x + pos], dim=1)
    for i in range(CONFIG["decoder"]["layers"]):
        x = block(p[f"layer_{i}"], x)
    x = layer_norm(p["ln"], x)[:, 1:]
    pixels = torch.einsum("bnd,dpqc->bnpqc", x, p["head"]["kernel"])
    return pixels + p["head"]["bias"], hidden


# ---------------------------------------------------------------- the tree


class Tree(nn.Module):
    """Nested dicts of arrays."""

    def __init__(self, leaves):
        super().__init__()
        for name, value in leaves.items():
            if isinstance(value, dict):
                self.add_module(name, Tree(value))
            else:
                self.register_parameter(name, nn.Parameter(value.clone().contiguous()))

    def __getitem__(self, name):
        return getattr(self, name)


class Mae(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.params = Tree(params)
        widths = [
            params[side]["ln"]["scale"].numel() for side in ("encoder", "decoder")
        ]
        for side, width in zip(("encoder", "decoder"), widths):
            self.register_buffer(f"{side}_pos", sincos(CONFIG["grid"], width))

    def forward(self, image, noise):
        seen = select_seen(noise)
        patches = to_patches(image)
        latent = encode(self.params["encoder"], patches, self.encoder_pos, seen)
        return decode(self.params["decoder"], latent, self.decoder_pos, seen)


class FromTorch:
    """Reads a checkpoint of the other framework."""

    def __init__(self, state):
        self.state = state

    def array(self, name):
        return self.state[name]

    def norm(self, name):
        return {
            "scale": self.array(name + ".weight"),
            "bias": self.array(name + ".bias"),
        }

    def dense(self, name):
        return {
            "kernel": self.array(name + ".weight").T,
            "bias": self.array(name + ".bias"),
        }

    def attention(self, name, heads):
        query, key, value = self.array(name + ".qkv.weight").chunk(3)

        def into_heads(weight):
            return weight.T.unflatten(1, (heads, -1))

        def bias(short):
            return self.array(f"{name}.{short}_bias").unflatten(0, (heads, -1))

        return {
            "query": {"kernel": into_heads(query), "bias": bias("q")},
            "key": {"kernel": into_heads(key)},
            "value": {"kernel": into_heads(value), "bias": bias("v")},
            "out": {
                "kernel": self.array(name + ".proj.weight").T.unflatten(0, (heads, -1)),
                "bias": self.array(name + ".proj.bias"),
            },
        }

    def block(self, name, heads):
        return {
            "ln_0": self.norm(name + ".norm1"),
            "attention": self.attention(name + ".attn", heads),
            "scale_0": self.array(name + ".gamma_1"),
            "ln_1": self.norm(name + ".norm2"),
            "mlp": {
                "wi": self.dense(name + ".mlp.fc1"),
                "wo": self.dense(name + ".mlp.fc2"),
            },
            "scale_1": self.array(name + ".gamma_2"),
        }

    def blocks(self, name, layers, heads):
        return {f"layer_{i}": self.block(f"{name}.{i}", heads) for i in range(layers)}

    def params(self):
        size = CONFIG["patch"]
        embed, head = self.dense("patch_embed"), self.dense("decoder_pred")
        embed["kernel"] = embed["kernel"].unflatten(0, (size, size, 3))
        head = {k: v.unflatten(-1, (size, size, 3)) for k, v in head.items()}
        return {
            "encoder": {
                "embed": embed,
                "cls": self.array("cls_token")[0],
                **self.blocks("blocks", **CONFIG["encoder"]),
                "ln": self.norm("norm"),
            },
            "decoder": {
                "embed": self.dense("decoder_embed"),
                "mask_token": self.array("mask_token")[0, 0],
                **self.blocks("decoder_blocks", **CONFIG["decoder"]),
                "ln": self.norm("decoder_norm"),
                "head": head,
            },
        }


def model():
    state = torch.load(Path(__file__).with_name("weights.pt"))
    return Mae(FromTorch(state).params())


# ---------------------------------------------------------------- loss


def preprocess(batch):
    image = torch.permute(batch["image"], (0, 2, 3, 1)).to(torch.float32)
    mean = torch.tensor([123.675, 116.28, 103.53])
    stddev = torch.tensor([58.395, 57.12, 57.375])
    return (image - mean) / stddev


def forward(net, batch):
    pixels, hidden = net(preprocess(batch), batch["noise"])
    return {"pred": torch.flatten(pixels, 2), "mask": hidden}


def standardize(patches, epsilon=1e-6):
    """Each patch by its own mean and deviation, all colours together."""
    axes = (2, 3, 4)
    count = math.prod(patches.shape[2:])
    centred = patches - torch.mean(patches, dim=axes, keepdim=True)
    squares = torch.sum(torch.square(centred), dim=axes, keepdim=True)
    variance = squares / (count - 1)
    return centred * torch.rsqrt(variance + epsilon)


def loss(output, batch):
    target = standardize(to_patches(preprocess(batch)))
    difference = output["pred"] - torch.flatten(target, 2)
    per_patch = torch.mean(torch.square(difference), dim=-1)
    hidden = output["mask"]
    return torch.sum(per_patch * hidden) / torch.sum(hidden)


# ---------------------------------------------------------------- updates


def scale_by_adam(b1, b2, eps=1e-8):
    def init(params):
        zeros = {path: torch.zeros_like(p) for path, p in params.items()}
        return {"count": 0, "mu": zeros, "nu": zeros}

    def update(updates, state, params):
        count = state["count"] + 1
        mu = {k: b1 * state["mu"][k] + (1.0 - b1) * g for k, g in updates.items()}
        nu = {k: b2 * state["nu"][k] + (1.0 - b2) * g**2 for k, g in updates.items()}
        out = {}
        for k in updates:
            mu_hat = mu[k] / (1.0 - b1**count)
            nu_hat = nu[k] / (1.0 - b2**count)
            out[k] = mu_hat / (torch.sqrt(nu_hat) + eps)
        return out, {"count": count, "mu": mu, "nu": nu}

    return init, update


def add_decayed_weights(weight_decay, mask):
    def update(updates, state, params):
        out = {
            k: u + weight_decay * params[k] if mask(k) else u
            for k, u in updates.items()
        }
        return out, state

    return lambda params: None, update


def scale_by_layer(decay, number, last):
    def update(updates, state, params):
        out = {k: u * decay ** (last - number(k)) for k, u in updates.items()}
        return out, state

    return lambda params: None, update


def scale_by_schedule(schedule):
    def update(updates, count, params):
        rate = schedule(count)
        return {k: -rate * u for k, u in updates.items()}, count + 1

    return lambda params: 0, update


def chain(*transforms):
    def init(params):
        return [start(params) for start, _ in transforms]

    def update(updates, states, params):
        new_states = []
        for (_, change), state in zip(transforms, states):
            updates, state = change(updates, state, params)
            new_states.append(state)
        return updates, new_states

    return init, update


def warmup_cosine(peak, end, warmup_steps, decay_steps):
    def schedule(count):
        if count < warmup_steps:
            return peak * (count + 1) / warmup_steps
        fraction = (count - warmup_steps) / (decay_steps - warmup_steps)
        return end + (peak - end) * math.cos(0.5 * math.pi * fraction) ** 2

    return schedule


def is_kernel(path):
    return path.endswith(".kernel")


def layer_number(path):
    """The embedding is 0, the layers of the encoder 1, 2, 3, all the rest 4."""
    if path.startswith(("encoder.embed.", "encoder.cls")):
        return 0
    if path.startswith("encoder.layer_"):
        return 1 + int(path.split(".")[1].removeprefix("layer_"))
    return 1 + CONFIG["encoder"]["layers"]


class TrainState(torch.optim.Optimizer):
    def __init__(self, params, tx):
        self.params = dict(params)
        super().__init__(self.params.values(), {})
        init, self.update = tx
        self.opt_state = init(self.params)

    @torch.no_grad()
    def step(self, closure=None):
        grads = {path: p.grad for path, p in self.params.items()}
        updates, self.opt_state = self.update(grads, self.opt_state, self.params)
        for path, p in self.params.items():
            p.add_(updates[path])


def optimizer(net):
    tx = chain(
        scale_by_adam(b1=0.9, b2=0.95),
        add_decayed_weights(0.05, mask=is_kernel),
        scale_by_layer(0.75, layer_number, last=4),
        scale_by_schedule(warmup_cosine(2e-3, 1e-5, warmup_steps=2, decay_steps=12)),
    )
    return TrainState(net.params.named_parameters(), tx)
