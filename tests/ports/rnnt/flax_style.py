"""After Flax and optax: a tree of plain tensors, init and apply, a scan over the time.

Time comes first. Each gate has matrices of its own, the carry is (c, h). The lattice is
scanned frame by frame; the labels of a frame come out of one cumulative log-sum.
"""

from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch
from torch import nn

BLANK = 0
NEG_INF = -1e30
LAYERS = 2


# ---------------------------------------------------------------- trees


def flatten_dict(tree, prefix=""):
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten_dict(value, f"{prefix}{key}/"))
        else:
            flat[prefix + key] = value
    return flat


def unflatten_dict(flat):
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *path, leaf = name.split("/")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[leaf] = value
    return tree


def tree_map(f, *trees):
    return {name: f(*(tree[name] for tree in trees)) for name in trees[0]}


# ---------------------------------------------------------------- lax


def scan(f, init, xs):
    """xs is a tuple of arrays with time first."""
    carry, ys = init, []
    for x in zip(*xs):
        carry, y = f(carry, *x)
        ys.append(y)
    return carry, ys


def cumulative_logsumexp(x):
    """Along the last axis, by doubling."""
    shift = 1
    while shift < x.shape[-1]:
        earlier = nn.functional.pad(x[..., :-shift], (shift, 0), value=NEG_INF)
        x = torch.logaddexp(x, earlier)
        shift *= 2
    return x


# ---------------------------------------------------------------- layers


def dense(params, x):
    y = torch.einsum("...i,io->...o", x, params["kernel"])
    return y + params["bias"] if "bias" in params else y


def layer_norm(params, x, epsilon=1e-5):
    mean = x.mean(-1, keepdim=True)
    var = (x * x).mean(-1, keepdim=True) - mean * mean
    y = (x - mean) * torch.rsqrt(var + epsilon)
    return y * params["scale"] + params["bias"]


def lstm_cell(params, carry, x):
    c, h = carry
    i = torch.sigmoid(dense(params["ii"], x) + dense(params["hi"], h))
    f = torch.sigmoid(dense(params["if"], x) + dense(params["hf"], h))
    g = torch.tanh(dense(params["ig"], x) + dense(params["hg"], h))
    o = torch.sigmoid(dense(params["io"], x) + dense(params["ho"], h))
    c = f * c + i * g
    h = o * torch.tanh(c)
    return (c, h), h


def initialize_carry(params, batch):
    features = len(params["hi"]["bias"])
    return torch.zeros(batch, features), torch.zeros(batch, features)


def rnn(params, xs):
    """[time, batch, in] -> [time, batch, out]"""

    def body(carry, x):
        return lstm_cell(params, carry, x)

    _, ys = scan(body, initialize_carry(params, xs.shape[1]), (xs,))
    return torch.stack(ys)


# ---------------------------------------------------------------- model


def encoder_apply(params, xs, paddings):
    for i in range(LAYERS):
        xs = rnn(params[f"lstm_{i}"], xs)
        xs = layer_norm(params[f"norm_{i}"], xs)
    return torch.where(paddings[:, :, None], 0.0, xs)


def predictor_apply(params, labels):
    """[labels, batch] -> [labels + 1, batch, features]"""
    shifted = nn.functional.pad(labels, (0, 0, 1, 0), value=BLANK)
    one_hot = (shifted[..., None] == torch.arange(len(params["embedding"]))).float()
    xs = torch.einsum("ubv,vd->ubd", one_hot, params["embedding"])
    return rnn(params["lstm"], xs)


def joiner_apply(params, encoded, predicted):
    """[time, batch, d], [labels, batch, d] -> [time, labels, batch, vocabulary]"""
    source = dense(params["source"], encoded)
    target = dense(params["target"], predicted)
    hidden = torch.tanh(source[:, None] + target[None])
    return dense(params["logits"], hidden)


def apply(params, xs, paddings, labels):
    encoded = encoder_apply(params["encoder"], xs, paddings)
    predicted = predictor_apply(params["predictor"], labels)
    return joiner_apply(params["joiner"], encoded, predicted)


# ---------------------------------------------------------------- weights


def init(state):
    """The tree from PyTorch's weights."""

    def dense_params(name):
        params = {"kernel": state[f"{name}.weight"].T}
        if f"{name}.bias" in state:
            params["bias"] = state[f"{name}.bias"]
        return params

    def norm_params(name):
        return {"scale": state[f"{name}.weight"], "bias": state[f"{name}.bias"]}

    def lstm_params(name):
        params = {}
        for side, kind in (("i", "ih"), ("h", "hh")):
            kernels = state[f"{name}.weight_{kind}_l0"].chunk(4)
            biases = state[f"{name}.bias_{kind}_l0"].chunk(4)
            for gate, kernel, bias in zip("ifgo", kernels, biases):
                params[side + gate] = {"kernel": kernel.T, "bias": bias}
        return params

    encoder = {}
    for i in range(LAYERS):
        encoder[f"lstm_{i}"] = lstm_params(f"encoder.lstms.{i}")
        encoder[f"norm_{i}"] = norm_params(f"encoder.norms.{i}")
    return {
        "encoder": encoder,
        "predictor": {
            "embedding": state["predictor.embed.weight"],
            "lstm": lstm_params("predictor.lstm"),
        },
        "joiner": {
            "source": dense_params("joiner.enc_proj"),
            "target": dense_params("joiner.pred_proj"),
            "logits": dense_params("joiner.out"),
        },
    }


class TrainState(nn.Module):
    """Holds the leaves for ``apply``."""

    def __init__(self, params):
        super().__init__()
        for name, leaf in flatten_dict(params).items():
            self.register_parameter(name, nn.Parameter(leaf.clone().contiguous()))

    def forward(self, xs, paddings, labels):
        params = unflatten_dict(dict(self.named_parameters()))
        return apply(params, xs, paddings, labels)


def model():
    return TrainState(init(torch.load(Path(__file__).with_name("weights.pt"))))


# ---------------------------------------------------------------- data


def log_mel(mel):
    return torch.log(mel + 1e-3)


def standardized(x, lengths):
    """Per bin and utterance, with zeros behind the end; time first."""
    inside = torch.arange(len(x))[:, None] < lengths
    inside = inside[:, :, None]
    count = lengths[:, None]
    mean = torch.where(inside, x, 0.0).sum(0) / count
    offset = torch.where(inside, x - mean, 0.0)
    var = (offset**2).sum(0) / (count - 1)
    return offset / (torch.sqrt(var) + 1e-5)


def stack_pairs(x):
    """[time, batch, bins] -> [time / 2, batch, 2 * bins]"""
    if len(x) % 2 == 1:
        x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    pairs = x.unflatten(0, (-1, 2))
    return torch.cat([pairs[:, 0], pairs[:, 1]], dim=-1)


def encoded_lengths(lengths):
    return -(-lengths // 2)


def forward(net, batch):
    x = log_mel(batch["mel"].transpose(0, 1))
    xs = stack_pairs(standardized(x, batch["frames"]))
    paddings = torch.arange(len(xs))[:, None] >= encoded_lengths(batch["frames"])
    logits = net(xs, paddings, batch["labels"].T)
    return logits.permute(2, 0, 1, 3)  # batch first, as in the other program


# ---------------------------------------------------------------- loss


def log_softmax(x):
    shifted = x - x.amax(-1, keepdim=True).detach()
    return shifted - torch.log(torch.exp(shifted).sum(-1, keepdim=True))


def frame_scores(logits, labels):
    """Scores of the blank and of the next label: [time, batch, labels + 1], twice."""
    log_probs = log_softmax(logits.transpose(0, 1))
    blank = log_probs[..., BLANK]
    wanted = nn.functional.pad(labels, (0, 1))
    index = wanted[None, :, :, None].expand(len(log_probs), -1, -1, -1)
    emit = torch.take_along_dim(log_probs, index, dim=-1)[..., 0]
    return blank, emit


def transducer_loss(logits, labels, lengths, sizes):
    """The carry says how likely it is to have left a frame behind so many labels."""
    blank, emit = frame_scores(logits, labels)

    def body(left, t, blank_t, emit_t):
        before = torch.cumsum(emit_t, dim=-1) - emit_t
        alpha = before + cumulative_logsumexp(left - before)
        leaving = alpha + blank_t
        left = torch.where((t < lengths)[:, None], leaving, left)
        return left, None

    start = torch.full_like(blank[0], NEG_INF)
    start[:, 0] = 0.0
    left, _ = scan(body, start, (torch.arange(len(blank)), blank, emit))
    return -torch.take_along_dim(left, sizes[:, None], dim=1)[:, 0]


def loss(output, batch):
    lengths = encoded_lengths(batch["frames"])
    labels, sizes = batch["labels"], batch["sizes"]
    each = transducer_loss(output, labels, lengths, sizes)
    return each.sum() / sizes.sum()


# ---------------------------------------------------------------- optax


class GradientTransformation(NamedTuple):
    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], Any]


def clip_by_global_norm(max_norm):
    def update(updates, state, params):
        norm = torch.sqrt(sum((g * g).sum() for g in updates.values()))
        scale = torch.where(norm < max_norm, 1.0, max_norm / norm)
        return tree_map(lambda g: g * scale, updates), state

    return GradientTransformation(lambda params: None, update)


def scale_by_adam(b1, b2, eps):
    def init_fn(params):
        zeros = tree_map(torch.zeros_like, params)
        return 0, zeros, zeros

    def update(updates, state, params):
        count, mu, nu = state
        count = count + 1
        mu = tree_map(lambda g, m: (1.0 - b1) * g + b1 * m, updates, mu)
        nu = tree_map(lambda g, n: (1.0 - b2) * g * g + b2 * n, updates, nu)
        mu_hat = tree_map(lambda m: m / (1.0 - b1**count), mu)
        nu_hat = tree_map(lambda n: n / (1.0 - b2**count), nu)
        updates = tree_map(lambda m, n: m / (torch.sqrt(n) + eps), mu_hat, nu_hat)
        return updates, (count, mu, nu)

    return GradientTransformation(init_fn, update)


def decay_mask(params):
    decayed = ("kernel", "embedding")
    return {name: name.split("/")[-1] in decayed for name in params}


def add_decayed_weights(weight_decay, mask):
    def update(updates, state, params):
        chosen = mask(params)
        updates = {
            name: u + weight_decay * params[name] if chosen[name] else u
            for name, u in updates.items()
        }
        return updates, state

    return GradientTransformation(lambda params: None, update)


def scale_by_schedule(schedule):
    def update(updates, count, params):
        return tree_map(lambda u: schedule(count) * u, updates), count + 1

    return GradientTransformation(lambda params: 0, update)


def warmup_rsqrt_schedule(peak, warmup):
    def schedule(count):
        step = count + 1
        return -peak * min(step / warmup, (step / warmup) ** -0.5)

    return schedule


def chain(*transforms):
    def init_fn(params):
        return [t.init(params) for t in transforms]

    def update(updates, states, params):
        new_states = []
        for transform, state in zip(transforms, states):
            updates, state = transform.update(updates, state, params)
            new_states.append(state)
        return updates, new_states

    return GradientTransformation(init_fn, update)


class Optax(torch.optim.Optimizer):
    def __init__(self, named, tx):
        self.params = dict(named)
        super().__init__(self.params.values(), {})
        self.tx = tx
        self.opt_state = tx.init(self.params)

    @torch.no_grad()
    def step(self, closure=None):
        grads = {name: p.grad for name, p in self.params.items()}
        updates, self.opt_state = self.tx.update(grads, self.opt_state, self.params)
        for name, p in self.params.items():
            p.add_(updates[name])


def optimizer(net):
    tx = chain(
        clip_by_global_norm(5.0),
        scale_by_adam(b1=0.9, b2=0.98, eps=1e-6),
        add_decayed_weights(0.2, mask=decay_mask),
        scale_by_schedule(warmup_rsqrt_schedule(1e-2, warmup=2)),
    )
    return Optax(net.named_parameters(), tx)
