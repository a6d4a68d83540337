"""After JAX: one table for all features, masks in place of ragged rows, layers in a stack.

Letters of the einsums: b batch, f and g fields, l places in a bag, d width of an embedding,
i and o features, e experts, r and s ranks.
"""

from pathlib import Path

import torch
from torch import nn

# Rows of each feature in the one table, and whether its bags are averaged.
FEATURES = {
    "genres": {"rows": 19, "average": True},
    "history": {"rows": 41, "average": False},
    "tags": {"rows": 23, "average": True},
    "device": {"rows": 6, "average": False},
    "queries": {"rows": 29, "average": False},
}
WIDTH = 8
MAX_IDS = 8
LAYERS = 3
BN_EPS = 1e-5
BN_DECAY = 0.9


def first_rows():
    """Where each feature begins in the one table."""
    sizes = torch.tensor([spec["rows"] for spec in FEATURES.values()])
    return torch.cumsum(sizes, dim=0) - sizes


def pair_indices(fields):
    """Those above the diagonal, row by row."""
    return torch.triu_indices(fields, fields, offset=1)


# -------------------------------------------------------------------------- input


def to_dense(values, offsets, fill=0):
    """Values of ragged rows -> [b, l]."""
    ends = torch.cat([offsets[1:], offsets.new_tensor([len(values)])])
    lengths = ends - offsets
    place = offsets[:, None] + torch.arange(MAX_IDS)
    inside = torch.arange(MAX_IDS) < lengths[:, None]
    safe = torch.clamp(place, max=len(values) - 1)
    return torch.where(inside, values[safe], fill), inside


def bag_weights(inside, average):
    """[b, l]: what each id counts."""
    weights = inside.float()
    if average:
        total = torch.sum(weights, dim=1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1.0)
    return weights


def hash_ids(ids, rows):
    return (31 * ids + 7) % rows


def feature_ids(batch, name):
    """Ids [b, l], and what each counts."""
    spec, value = FEATURES[name], batch[name]
    if name == "device":
        value = value[:, None]
    if isinstance(value, torch.Tensor):
        ids = nn.functional.pad(value, (0, MAX_IDS - value.shape[1]), value=-1)
        inside = ids > 0 if name == "tags" else ids >= 0
        return torch.clamp(ids, min=0), bag_weights(inside, spec["average"])
    ids, inside = to_dense(value["ids"], value["offsets"])
    weights = bag_weights(inside, spec["average"])
    if name == "history":
        ids = hash_ids(ids, spec["rows"])
        age, _ = to_dense(value["age"], value["offsets"], 0.0)
        weights = weights * torch.pow(2.0, -age / 5.0)
    return ids, weights


def featurize(batch):
    pairs = [feature_ids(batch, name) for name in FEATURES]
    ids = torch.stack([ids for ids, _ in pairs], dim=1)
    return {
        "counts": torch.log1p(torch.relu(batch["counts"])),
        "rows": ids + first_rows()[:, None],
        "weights": torch.stack([weights for _, weights in pairs], dim=1),
    }


# ---------------------------------------------------------------------- functions


def dense(p, x):
    y = torch.einsum("bi,io->bo", x, p["w"])
    return y + p["b"] if "b" in p else y


def batch_norm(p, stats, x, train):
    """Return the normed x and the new averages."""
    mean, var = stats["mean"], stats["var"]
    if train:
        mean = torch.mean(x, dim=0)
        var = torch.mean(x**2, dim=0) - mean**2
        seen = {"mean": mean, "var": var * len(x) / (len(x) - 1)}
        stats = {k: BN_DECAY * stats[k] + (1.0 - BN_DECAY) * seen[k] for k in stats}
    y = (x - mean) / torch.sqrt(var + BN_EPS)
    return p["scale"] * y + p["offset"], stats


def bottom_mlp(p, stats, x, train):
    x, stats = batch_norm(p["norm"], stats, dense(p["in"], x), train)
    return torch.relu(dense(p["out"], torch.relu(x))), stats


def embed(p, rows, weights):
    """[b, f, l] -> [b, f, d]."""
    return torch.einsum("bfl,bfld->bfd", weights, p["table"][rows])


def interact(fields):
    gram = torch.einsum("bfd,bgd->bfg", fields, fields)
    first, second = pair_indices(fields.shape[1])
    return gram[:, first, second]


def gate(p, x):
    logits = torch.einsum("bi,ie->be", x, p["gate"])
    return torch.exp(logits - torch.logsumexp(logits, dim=1, keepdim=True))


def cross_layer(p, x0, x):
    low = torch.tanh(torch.einsum("bi,ier->ber", x, p["v"]))
    low = torch.tanh(torch.einsum("ber,ers->bes", low, p["c"]))
    high = torch.einsum("bes,eso->beo", low, p["u"])
    mixed = torch.einsum("be,beo->bo", gate(p, x), high + p["b"])
    return x + x0 * mixed


def cross_network(p, x0):
    x = x0
    for i in range(LAYERS):
        x = cross_layer({k: stack[i] for k, stack in p.items()}, x0, x)
    return x


def top_mlp(p, bottom, pairs, crossed):
    """Each of the three inputs has a kernel of its own."""
    x = torch.einsum("bi,io->bo", bottom, p["first"]["w_bottom"])
    x = x + torch.einsum("bi,io->bo", pairs, p["first"]["w_pairs"])
    x = x + torch.einsum("bi,io->bo", crossed, p["first"]["w_crossed"])
    x = torch.relu(x + p["first"]["b"])
    x = torch.relu(dense(p["second"], x))
    return torch.einsum("bi,i->b", x, p["score"]["w"]) + p["score"]["b"]


def apply(params, state, inputs, train):
    """Return the scores [b] and the new state."""
    x = inputs["counts"] * state["counts"]["scale"] + state["counts"]["shift"]
    bottom, stats = bottom_mlp(params["bottom"], state["bottom"], x, train)
    bags = embed(params["embed"], inputs["rows"], inputs["weights"])
    fields = torch.cat([bottom[:, None], bags], dim=1)
    crossed = cross_network(params["cross"], fields.flatten(1))
    score = top_mlp(params["top"], bottom, interact(fields), crossed)
    return score, {"bottom": stats}


# ------------------------------------------------------------------------ weights


def load_dense(state, name):
    p = {"w": state[name + ".weight"].T}
    if name + ".bias" in state:
        p["b"] = state[name + ".bias"]
    return p


def load_tables(state):
    return {"table": torch.cat([state[f"tables.{name}.weight"] for name in FEATURES])}


def load_cross(state):
    """One axis before all others for the layers."""

    def stack(key):
        return torch.stack([state[f"cross.{i}.{key}"] for i in range(LAYERS)])

    return {
        "v": torch.permute(stack("v"), (0, 3, 1, 2)),
        "c": torch.permute(stack("c"), (0, 1, 3, 2)),
        "u": torch.permute(stack("u"), (0, 1, 3, 2)),
        "b": stack("bias"),
        "gate": torch.permute(stack("gate.weight"), (0, 2, 1)),
    }


def upper_order(fields):
    """The pairs were those below the diagonal, row by row."""
    place = torch.zeros(fields, fields, dtype=torch.long)
    rows, columns = torch.tril_indices(fields, fields, offset=-1)
    place[rows, columns] = torch.arange(len(rows))
    first, second = pair_indices(fields)
    return place[second, first]


def load_top(state):
    fields = len(FEATURES) + 1
    w, order = state["top.hidden.0.weight"].T, upper_order(fields)
    end = WIDTH + len(order)
    return {
        "first": {
            "w_bottom": w[:WIDTH],
            "w_pairs": w[WIDTH:end][order],
            "w_crossed": w[end:],
            "b": state["top.hidden.0.bias"],
        },
        "second": load_dense(state, "top.hidden.1"),
        "score": {"w": state["top.out.weight"][0], "b": state["top.out.bias"][0]},
    }


def convert(state):
    """PyTorch's state dict -> (params, state)."""
    norm = {"scale": state["bottom.bn.weight"], "offset": state["bottom.bn.bias"]}
    params = {
        "embed": load_tables(state),
        "bottom": {
            "in": load_dense(state, "bottom.fc1"),
            "norm": norm,
            "out": load_dense(state, "bottom.fc2"),
        },
        "cross": load_cross(state),
        "top": load_top(state),
    }
    scale = 1.0 / state["count_std"]
    stats = {
        "mean": state["bottom.bn.running_mean"],
        "var": state["bottom.bn.running_var"],
    }
    counts = {"scale": scale, "shift": -state["count_mean"] * scale}
    return params, {"counts": counts, "bottom": stats}


class Tree(nn.Module):
    """Nested dicts of arrays, as parameters or as buffers."""

    def __init__(self, tree, trained):
        super().__init__()
        for key, value in tree.items():
            if isinstance(value, dict):
                self.add_module(key, Tree(value, trained))
            elif trained:
                self.register_parameter(key, nn.Parameter(value.clone().contiguous()))
            else:
                self.register_buffer(key, value.clone())

    def unfreeze(self):
        tree = {**self._parameters, **self._buffers}
        for key, child in self._modules.items():
            tree[key] = child.unfreeze()
        return tree


class Ranker(nn.Module):
    def __init__(self, params, state):
        super().__init__()
        self.params = Tree(params, trained=True)
        self.variables = Tree(state, trained=False)

    def forward(self, inputs):
        state = self.variables.unfreeze()
        score, new = apply(self.params.unfreeze(), state, inputs, self.training)
        with torch.no_grad():
            for key, value in new["bottom"].items():
                state["bottom"][key].copy_(value)
        return score


def model():
    return Ranker(*convert(torch.load(Path(__file__).with_name("weights.pt"))))


# ----------------------------------------------------------------------- training


def forward(net, batch):
    return net(featurize(batch))


def example_weights(position):
    """Inverse propensities, cut off."""
    return torch.clamp(torch.exp(0.7 * torch.log(position.float())), max=3.0)


def loss(output, batch):
    click, weights = batch["click"], example_weights(batch["position"])
    log_p = nn.functional.logsigmoid(output)
    log_not_p = nn.functional.logsigmoid(-output)
    nll = -(2.5 * click * log_p + (1.0 - click) * log_not_p)
    return torch.vdot(nll, weights / torch.sum(weights))


class MultiTransform(torch.optim.Optimizer):
    """The table has Adagrad, the rest Adam; one schedule scales both."""

    def __init__(self, params, peaks, schedule):
        self.count, self.peaks, self.schedule = 0, peaks, schedule
        super().__init__(params.parameters(), {})
        table = [params.embed.table]
        others = [p for name, p in params.named_parameters() if name != "embed.table"]
        self.transforms = {
            "table": torch.optim.Adagrad(
                table, initial_accumulator_value=0.1, eps=1e-8
            ),
            "others": torch.optim.Adam(others, betas=(0.9, 0.99), eps=1e-7),
        }

    def step(self, closure=None):
        for label, transform in self.transforms.items():
            rate = self.peaks[label] * self.schedule(self.count)
            transform.param_groups[0]["lr"] = rate
            transform.step()
        self.count += 1


def linear_warmup(count, steps=4):
    return min((count + 1.0) / steps, 1.0)


def optimizer(net):
    peaks = {"table": 0.05, "others": 5e-3}
    return MultiTransform(net.params, peaks, linear_warmup)
