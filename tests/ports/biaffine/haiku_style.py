"""After JAX and Haiku: functions of a tree of weights, time first, a scan and vmaps.

Letters of the shapes: T places, B sentences, C letters, D features, L labels.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn


class Hyper(NamedTuple):
    vocab: int = 41
    unk: int = 1
    letter_vocab: int = 27
    hidden_size: int = 18
    num_layers: int = 2
    head_sizes: tuple = (22, 24, 15, 12, 8, 5)
    negative_slope: float = 0.1


hp = Hyper()

# ---------------------------------------------------------------------------- lax


def tree_stack(outs, axis):
    """Stacks arrays, or tuples of arrays one by one."""
    if isinstance(outs[0], tuple):
        return type(outs[0])(*(torch.stack(leaves, axis) for leaves in zip(*outs)))
    return torch.stack(outs, axis)


def vmap(fun, in_axes=0, out_axes=0):
    """Over this axis of every argument."""

    def mapped(*args):
        slices = zip(*(torch.unbind(arg, in_axes) for arg in args))
        return tree_stack([fun(*each) for each in slices], out_axes)

    return mapped


def scan(f, init, xs):
    carry, ys = init, []
    for x in torch.unbind(xs, 0):
        carry, y = f(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


def one_hot(x, num_classes):
    return (x[..., None] == torch.arange(num_classes)).float()


def stop_gradient(x):
    return x.detach()


def leaky_relu(x):
    return torch.where(x >= 0, x, hp.negative_slope * x)


def log_sigmoid(x):
    return -torch.logaddexp(-x, torch.zeros_like(x))


def log_softmax(x):
    shifted = x - stop_gradient(torch.amax(x, -1, keepdim=True))
    return shifted - torch.log(torch.sum(torch.exp(shifted), -1, keepdim=True))


# -------------------------------------------------------------------------- haiku


def linear(params, x):
    return torch.matmul(x, params["w"]) + params["b"]


def layer_norm(params, x, eps=1e-5):
    mean = torch.mean(x, -1, keepdim=True)
    variance = torch.mean(torch.square(x), -1, keepdim=True) - torch.square(mean)
    inv = params["scale"] * torch.rsqrt(variance + eps)
    return inv * (x - mean) + params["offset"]


def conv1d(params, x):
    """w [width, in, out], padding SAME."""
    width = params["w"].shape[0]
    size = x.shape[1]
    x = nn.functional.pad(x, (0, 0, (width - 1) // 2, width // 2))
    taps = [torch.matmul(x[:, k : k + size], params["w"][k]) for k in range(width)]
    return sum(taps) + params["b"]


class LSTMState(NamedTuple):
    hidden: Any
    cell: Any


def lstm_step(params, state, x):
    """One matrix for inputs and hidden; gates are i, g, f, o, and f starts open."""
    x_and_h = torch.cat([x, state.hidden], -1)
    i, g, f, o = torch.chunk(linear(params, x_and_h), 4, -1)
    f = torch.sigmoid(f + 1.0)
    cell = f * state.cell + torch.sigmoid(i) * torch.tanh(g)
    hidden = torch.sigmoid(o) * torch.tanh(cell)
    return LSTMState(hidden, cell), hidden


def initial_state(params, batch_size):
    hidden = params["hidden"].expand(batch_size, -1)
    cell = params["cell"].expand(batch_size, -1)
    return LSTMState(hidden, cell)


def lstm(params, x):
    def step(state, inputs):
        return lstm_step(params, state, inputs)

    _, ys = scan(step, initial_state(params, x.shape[1]), x)
    return ys


def flip_sequence(x, length):
    """The first places turn around, padding stays behind them."""
    place = torch.arange(x.shape[0])
    index = (length - 1 - place) % x.shape[0]
    return torch.index_select(x, 0, index)


def flip_sequences(x, lengths):
    """x [T, B, D]."""
    return vmap(flip_sequence, in_axes=0, out_axes=1)(torch.swapaxes(x, 0, 1), lengths)


def bidirectional(params, x, lengths):
    mask = torch.arange(x.shape[0])[:, None] < lengths[None, :]
    forwards = lstm(params["fwd"], x)
    backwards = lstm(params["bwd"], flip_sequences(x, lengths))
    backwards = flip_sequences(backwards, lengths)
    return torch.cat([forwards, backwards], -1) * mask[..., None]


# ------------------------------------------------------------------------- parser


def letter_features(params, letters):
    """[B, C] -> [B, D]; a word without letters gets zeros."""
    mask = torch.sign(letters).float()[..., None]
    x = torch.matmul(one_hot(letters, hp.letter_vocab), params["embed"]["embeddings"])
    x = torch.tanh(conv1d(params["conv"], x * mask))
    pooled = torch.amax(torch.where(mask > 0, x, -1e30), 1)
    return torch.where(torch.sum(mask, 1) > 0, pooled, 0.0)


def word_features(params, table, words):
    """What is learned and what is given; the latter knows more words."""
    ids = torch.where(words < hp.vocab, words, hp.unk)
    return params["embeddings"][ids] + table["embeddings"][words]


def biaffine(params, dep, head):
    """One sentence: [T, D] and [T, D] -> [T, T]; heads have a prior."""
    return torch.matmul(torch.matmul(dep, params["w"]) + params["b"], head.T)


def arc_logits(params, dep, head):
    return biaffine(params, dep, head) / math.sqrt(head.shape[-1])


def order_logits(params, dep, head):
    side = torch.matmul(dep, params["w_dep"]) + params["b_out"]
    return biaffine(params, dep, head) + side[:, None]


def label_logits(params, dep, head):
    """One sentence: a bilinear term, a linear one of each side, a bias; [T, T, L]."""
    both = torch.einsum("di,ilj,hj->dhl", dep, params["u"], head)
    of_dep = torch.matmul(dep, params["w_dep"])
    of_head = torch.matmul(head, params["w_head"])
    return both + of_dep[:, None] + of_head[None, :] + params["b"]


class Logits(NamedTuple):
    arcs: Any
    labels: Any
    order: Any


def heads_fn(params, features):
    """One sentence [T, D]."""
    hidden = leaky_relu(linear(params["mlps"], features))
    pieces = torch.split(hidden, hp.head_sizes, -1)
    arc_dep, arc_head, label_dep, label_head, order_dep, order_head = pieces
    arcs = arc_logits(params["arcs"], arc_dep, arc_head)
    labels = label_logits(params["labels"], label_dep, label_head)
    order = order_logits(params["order"], order_dep, order_head)
    place = torch.arange(features.shape[0])
    side = torch.sign(place[None, :] - place[:, None])
    arcs = arcs + stop_gradient(log_sigmoid(order * side))
    return Logits(arcs, labels, order)


def apply(params, words, letters):
    """words [T, B], letters [T, B, C]."""
    spelled = vmap(lambda x: letter_features(params["letters"], x))(letters)
    looked_up = word_features(params["words"], params["given"], words)
    x = layer_norm(params["layer_norm"], torch.cat([looked_up, spelled], -1))
    lengths = torch.sum(words > 0, 0)
    for i in range(hp.num_layers):
        x = bidirectional(params[f"lstm_{i}"], x, lengths)
    return vmap(lambda x: heads_fn(params, x), in_axes=1)(x)


# --------------------------------------------------------------------- checkpoint


def convert_lstm(state, layer, suffix):
    """[i f g o] on rows -> [i g f o] on columns; what is added to f is taken off."""
    end = f"_l{layer}{suffix}"

    def gates(name):
        i, f, g, o = torch.chunk(state[f"encoder.lstm.{name}{end}"], 4)
        return [i, g, f, o]

    w = torch.cat([torch.cat(gates("weight_ih")), torch.cat(gates("weight_hh"))], 1).T
    i, g, f, o = (a + b for a, b in zip(gates("bias_ih"), gates("bias_hh")))
    row = 2 * layer + (suffix != "")
    return {
        "w": w,
        "b": torch.cat([i, g, f - 1.0, o]),
        "hidden": state["encoder.h_init"][row, 0],
        "cell": state["encoder.c_init"][row, 0],
    }


def convert_biaffine(state):
    arcs = state["arcs.weight"][0]
    order = state["order.weight"][0]
    labels = state["labels.weight"]
    return {
        "arcs": {"w": arcs[:-1], "b": arcs[-1]},
        "order": {
            "w": order[:-1, :-1],
            "b": order[-1, :-1],
            "w_dep": order[:-1, -1],
            "b_out": order[-1, -1],
        },
        "labels": {
            "u": torch.swapaxes(labels[:, :-1, :-1], 0, 1),
            "w_dep": labels[:, :-1, -1].T,
            "w_head": labels[:, -1, :-1].T,
            "b": labels[:, -1, -1],
        },
    }


def convert_mlps(state):
    names = (
        "arc_dep",
        "arc_head",
        "label_dep",
        "label_head",
        "order_dep",
        "order_head",
    )
    weights = [state[f"{name}.linear.weight"] for name in names]
    biases = [state[f"{name}.linear.bias"] for name in names]
    return {"w": torch.cat(weights).T, "b": torch.cat(biases)}


def convert(state):
    """PyTorch's names and layouts -> our tree."""
    tree = {
        "words": {"embeddings": state["words.weight"]},
        "given": {"embeddings": state["pretrained"]},
        "letters": {
            "embed": {"embeddings": state["letters.embed.weight"]},
            "conv": {
                "w": state["letters.conv.weight"].permute(2, 1, 0),
                "b": state["letters.conv.bias"],
            },
        },
        "layer_norm": {"scale": state["norm.weight"], "offset": state["norm.bias"]},
        "mlps": convert_mlps(state),
        **convert_biaffine(state),
    }
    for i in range(hp.num_layers):
        tree[f"lstm_{i}"] = {
            "fwd": convert_lstm(state, i, ""),
            "bwd": convert_lstm(state, i, "_reverse"),
        }
    return tree


class Tree(nn.Module):
    """Holds a tree of weights; nothing below a frozen key is learned."""

    def __init__(self, tree, frozen=("given",), learned=True):
        super().__init__()
        self.keys = list(tree)
        for key, value in tree.items():
            if isinstance(value, dict):
                self.add_module(key, Tree(value, frozen, learned and key not in frozen))
            elif learned:
                self.register_parameter(key, nn.Parameter(value.clone().contiguous()))
            else:
                self.register_buffer(key, value.clone())

    def unwrapped(self):
        values = [(key, getattr(self, key)) for key in self.keys]
        return {k: v.unwrapped() if isinstance(v, Tree) else v for k, v in values}

    def forward(self, words, letters):
        return apply(self.unwrapped(), words, letters)


def model():
    return Tree(convert(torch.load(Path(__file__).with_name("weights.pt"))))


# ----------------------------------------------------------------------- training

LABEL_COST, ORDER_COST = 0.7, 0.5


def forward(net, batch):
    words = torch.swapaxes(batch["words"], 0, 1)
    letters = torch.swapaxes(batch["letters"], 0, 1)
    return net(words, letters)._asdict()


def sentence_loss(arcs, labels, order, words, heads, gold):
    """Sums over one sentence; [3]."""
    place = torch.arange(len(words))
    present = (words > 0).float()
    weights = present * (place > 0)
    allowed = (words > 0)[None, :] & (place[:, None] != place[None, :])
    log_probs = log_softmax(torch.where(allowed, arcs, -1e30))
    arc_nll = -log_probs[place, heads]
    label_nll = -log_softmax(labels[place, heads])[place, gold]
    chosen = order[place, heads]
    behind = (heads > place).float()
    order_nll = -behind * log_sigmoid(chosen) - (1.0 - behind) * log_sigmoid(-chosen)
    nll = torch.stack([arc_nll, label_nll, order_nll])
    return torch.matmul(nll, weights)


def loss(output, batch):
    logits = (output["arcs"], output["labels"], output["order"])
    sums = vmap(sentence_loss)(*logits, batch["words"], batch["heads"], batch["labels"])
    costs = torch.tensor([1.0, LABEL_COST, ORDER_COST])
    count = torch.sum(batch["words"][:, 1:] > 0)
    return torch.sum(torch.sum(sums, 0) * costs) / count


class GradientTransformation(torch.optim.Optimizer):
    """As optax: clip_by_global_norm, scale_by_adam, scale by a schedule."""

    def __init__(self, params, max_norm, b1, b2, eps, schedule):
        super().__init__(params, {})
        self.max_norm, self.b1, self.b2, self.eps = max_norm, b1, b2, eps
        self.schedule = schedule
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        norm = torch.sqrt(sum(torch.sum(torch.square(p.grad)) for p in params))
        clip = torch.where(norm < self.max_norm, 1.0, self.max_norm / norm)
        rate = self.schedule(self.count)
        self.count += 1
        for param in params:
            slots, grad = self.state[param], param.grad * clip
            if not slots:
                slots["mu"] = torch.zeros_like(param)
                slots["nu"] = torch.zeros_like(param)
            mu, nu = slots["mu"], slots["nu"]
            mu.copy_(self.b1 * mu + (1.0 - self.b1) * grad)
            nu.copy_(self.b2 * nu + (1.0 - self.b2) * torch.square(grad))
            mu_hat = mu / (1.0 - self.b1**self.count)
            nu_hat = nu / (1.0 - self.b2**self.count)
            param.sub_(rate * mu_hat / (torch.sqrt(nu_hat) + self.eps))


def exponential_decay(init_value, transition_steps, decay_rate):
    return lambda count: init_value * decay_rate ** (count / transition_steps)


def optimizer(net):
    schedule = exponential_decay(2e-3, 50, 0.75)
    return GradientTransformation(net.parameters(), 1.0, 0.9, 0.9, 1e-6, schedule)
