"""After jraph and Haiku: a tuple of graphs, pure functions, arrays by path and name.

Categories are products with ones and noughts. Axes in einsums: b graphs, i j a c nodes,
p hops, h heads, k features of a head, d features, s query, key and value.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

CFG = {
    "num_layers": 3,
    "num_heads": 4,
    "atom_vocab": (12, 5, 4),
    "bond_vocab": (5, 3),
    "atom_types": 11,
    "max_degree": 3,
    "max_distance": 6,
    "max_path": 4,
    "target_mean": 5.2,
    "target_std": 1.6,
    "masked_atom_weight": 0.3,
}
LARGE = 1e9


# ------------------------------------------------------------------- jraph


class GraphsTuple(NamedTuple):
    nodes: torch.Tensor
    edges: torch.Tensor
    senders: torch.Tensor
    receivers: torch.Tensor
    n_node: torch.Tensor
    n_edge: torch.Tensor


def as_graphs_tuple(graphs):
    n_node = torch.tensor([len(graph["atoms"]) for graph in graphs])
    n_edge = torch.tensor([len(graph["bonds"]) for graph in graphs])
    senders = torch.cat([graph["edges"][0] for graph in graphs])
    receivers = torch.cat([graph["edges"][1] for graph in graphs])
    nodes = torch.cat([hide(graph["atoms"], graph["masked"]) for graph in graphs])
    edges = torch.cat([graph["bonds"] for graph in graphs])
    return GraphsTuple(
        multi_hot(nodes, CFG["atom_vocab"]),
        multi_hot(edges, CFG["bond_vocab"]),
        senders,
        receivers,
        n_node,
        n_edge,
    )


def hide(atoms, masked):
    """Types of masked atoms become the last of the vocabulary."""
    token = torch.tensor([CFG["atom_vocab"][0] - 1, 0, 0])
    keep = torch.tensor([0, 1, 1])
    return torch.where(masked[:, None], atoms * keep + token, atoms)


def one_hot(x, num_classes):
    return (x[..., None] == torch.arange(num_classes)).float()


def multi_hot(x, vocab):
    return torch.cat([one_hot(x[..., i], size) for i, size in enumerate(vocab)], dim=-1)


def to_dense(graph):
    """Nodes [b, n, f] and edges [b, n, n, f] with noughts where there are none."""
    batch, most = len(graph.n_node), int(graph.n_node.max())
    node_mask = torch.arange(most) < graph.n_node[:, None]
    nodes = graph.nodes.new_zeros(batch, most, graph.nodes.shape[-1])
    nodes[node_mask] = graph.nodes
    edges = graph.edges.new_zeros(batch, most, most, graph.edges.shape[-1])
    owner = torch.repeat_interleave(torch.arange(batch), graph.n_edge)
    edges[owner, graph.senders, graph.receivers] = graph.edges
    return nodes, edges, node_mask


def hops_between(adjacency):
    """Hops [b, n, n] by powers of the adjacency; infinite where no path leads."""
    n = adjacency.shape[-1]
    reached = torch.eye(n).expand_as(adjacency)
    hops = torch.where(reached > 0, 0.0, math.inf)
    for power in range(1, n):
        reached = torch.clamp(reached @ adjacency, max=1.0)
        hops = torch.minimum(hops, torch.where(reached > 0, power, math.inf))
    return hops


def places_on_path(hops, length):
    """[b, p, i, a, j]: node a is the p-th on the path from i to j, which is the only one."""
    step = torch.arange(length + 1.0)[:, None, None, None]
    start, end = hops[:, None, :, :, None], hops[:, None, None, :, :]
    whole = hops[:, None, :, None, :]
    return ((start == step) & (start + end == whole) & torch.isfinite(whole)).float()


# ------------------------------------------------------------------- functions


def linear(w, x):
    return torch.einsum("...i,io->...o", x, w["w"]) + w["b"]


def layer_norm(w, x):
    mean = torch.mean(x, dim=-1, keepdim=True)
    variance = torch.mean(torch.square(x), dim=-1, keepdim=True) - torch.square(mean)
    inv = w["scale"] * torch.rsqrt(variance + 1e-5)
    return inv * (x - mean) + w["offset"]


def gelu(x, approximate=False):
    if approximate:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1.0 + torch.tanh(inner))
    return 0.5 * x * torch.erfc(-x * math.sqrt(0.5))


def mlp(w, path, x):
    return linear(w[path + "/down"], gelu(linear(w[path + "/up"], x)))


def node_features(w, nodes, adjacency):
    """With the virtual node in front."""
    most = CFG["max_degree"]
    received = torch.clamp(torch.sum(adjacency, dim=1), max=most)
    sent = torch.clamp(torch.sum(adjacency, dim=2), max=most)
    x = nodes @ w["nodes/atoms"]["table"]
    x = x + one_hot(received, most + 1) @ w["nodes/degrees"]["received"]
    x = x + one_hot(sent, most + 1) @ w["nodes/degrees"]["sent"]
    virtual = torch.broadcast_to(w["nodes/virtual"]["vector"], (len(x), 1, x.shape[-1]))
    return torch.cat([virtual, x], dim=1)


def distance_bias(w, hops):
    last = CFG["max_distance"]
    category = torch.where(torch.isinf(hops), last + 1, torch.clamp(hops, max=last))
    return one_hot(category, last + 2) @ w["pairs/distance"]["table"]


def path_bias(w, hops, edges):
    """Edges of a path, each times the matrix of its place; the mean of these."""
    places = places_on_path(hops, CFG["max_path"])
    values = edges @ w["pairs/edges"]["table"] / len(CFG["bond_vocab"])
    values = torch.einsum("bacg,pgh->bpach", values, w["pairs/edges"]["by_place"])
    begun = torch.einsum("bpiaj,bpach->bpijch", places[:, :-1], values)
    total = torch.einsum("bpijch,bpicj->bijh", begun, places[:, 1:])
    seen = torch.where(torch.isinf(hops), 0.0, hops)
    length = torch.clamp(seen, min=1, max=CFG["max_path"])
    return total / length[..., None]


def attention_bias(w, hops, edges, node_mask):
    """[b, h, 1 + n, 1 + n], very low for keys that are no nodes."""
    inner = distance_bias(w, hops) + path_bias(w, hops, edges)
    virtual = w["pairs/virtual"]["to_all"]
    batch, n = node_mask.shape
    side = torch.broadcast_to(virtual, (batch, n, 1, len(virtual)))
    corner = torch.zeros(batch, 1, 1, len(virtual))
    top = torch.cat([corner, torch.swapaxes(side, 1, 2)], dim=2)
    bias = torch.cat([top, torch.cat([side, inner], dim=2)], dim=1)
    present = torch.cat([torch.ones(batch, 1), node_mask.float()], dim=1)
    bias = bias - LARGE * (1.0 - present)[:, None, :, None]
    return torch.permute(bias, (0, 3, 1, 2))


def attention(w, x, bias):
    query, key, value = torch.einsum("bnd,dshk->sbhnk", x, w["qkv"])
    query = query + w["query_bias"][:, None, :]
    value = value + w["value_bias"][:, None, :]
    logits = torch.einsum("bhik,bhjk->bhij", query, key)
    logits = logits / math.sqrt(query.shape[-1]) + bias
    weights = torch.softmax(logits, dim=-1)
    mixed = torch.einsum("bhij,bhjk->bihk", weights, value)
    return torch.einsum("bihk,hkd->bid", mixed, w["out"]) + w["out_bias"]


def block(w, path, x, bias):
    normed = layer_norm(w[path + "/ln_attention"], x)
    x = x + attention(w[path + "/attention"], normed, bias)
    normed = layer_norm(w[path + "/ln_mlp"], x)
    return x + mlp(w, path + "/mlp", normed)


def masked_atom_logits(w, x):
    x = layer_norm(w["atoms/ln"], gelu(linear(w["atoms/linear"], x)))
    table = w["nodes/atoms"]["table"]
    return x @ table[: CFG["atom_types"]].T + w["atoms/logits"]["b"]


def apply(w, graph):
    """Values [b] and logits of all nodes."""
    nodes, edges, node_mask = to_dense(graph)
    adjacency = torch.sum(edges[..., : CFG["bond_vocab"][0]], dim=-1)
    hops = hops_between(adjacency)
    x = node_features(w, nodes, adjacency)
    bias = attention_bias(w, hops, edges, node_mask)
    for i in range(CFG["num_layers"]):
        x = block(w, f"layer_{i}", x, bias)
    x = layer_norm(w["ln_final"], x)
    virtual, nodes = x[:, 0], x[:, 1:]
    value = mlp(w, "value", virtual)
    return value[:, 0], masked_atom_logits(w, nodes[node_mask])


# ------------------------------------------------------------------- weights


def convert(state):
    """PyTorch's state dict -> arrays by path and name; tables without padding."""

    def dense(name):
        return {"w": state[name + ".weight"].T, "b": state[name + ".bias"]}

    def norm(name):
        return {"scale": state[name + ".weight"], "offset": state[name + ".bias"]}

    def table(name):
        return state[name + "_embed.weight"][1:]

    w = {
        "nodes/atoms": {"table": table("features.atom")},
        "nodes/degrees": {
            "received": table("features.in_degree"),
            "sent": table("features.out_degree"),
        },
        "nodes/virtual": {"vector": state["features.graph_token"]},
        "pairs/distance": {"table": table("bias.distance")},
        "pairs/edges": {
            "table": table("bias.bond"),
            "by_place": state["bias.hop_weight"],
        },
        "pairs/virtual": {"to_all": state["bias.virtual_distance"]},
        "ln_final": norm("norm"),
        "value/up": dense("value_hidden"),
        "value/down": dense("value_out"),
        "atoms/linear": dense("atom_hidden"),
        "atoms/ln": norm("atom_norm"),
        "atoms/logits": {"b": state["atom_bias"]},
    }
    heads = CFG["num_heads"]
    for i in range(CFG["num_layers"]):
        old, new = f"layers.{i}.", f"layer_{i}/"
        qkv = state[old + "attn.qkv.weight"].unflatten(0, (3, heads, -1))
        qkv = torch.permute(qkv, (3, 0, 1, 2))
        w[new + "attention"] = {
            "qkv": qkv,
            "query_bias": state[old + "attn.q_bias"].unflatten(0, (heads, -1)),
            "value_bias": state[old + "attn.v_bias"].unflatten(0, (heads, -1)),
            "out": state[old + "attn.out.weight"].T.unflatten(0, (heads, -1)),
            "out_bias": state[old + "attn.out.bias"],
        }
        w[new + "ln_attention"] = norm(old + "attn_norm")
        w[new + "ln_mlp"] = norm(old + "ffn_norm")
        w[new + "mlp/up"] = dense(old + "fc1")
        w[new + "mlp/down"] = dense(old + "fc2")
    return w


class Transformed(nn.Module):
    """Holds the arrays for ``apply``."""

    def __init__(self, w):
        super().__init__()
        self.params = nn.ModuleDict(
            {
                path: nn.ParameterDict(
                    {k: nn.Parameter(v.clone().contiguous()) for k, v in arrays.items()}
                )
                for path, arrays in w.items()
            }
        )

    def forward(self, graph):
        return apply({path: dict(v.items()) for path, v in self.params.items()}, graph)


def model():
    return Transformed(convert(torch.load(Path(__file__).with_name("weights.pt"))))


# ------------------------------------------------------------------- training


def forward(net, batch):
    value, logits = net(as_graphs_tuple(batch["graphs"]))
    return {"value": value, "atoms": logits}


def masked_mean(x, mask):
    return torch.sum(torch.where(mask, x, 0.0)) / torch.sum(mask)


def loss(output, batch):
    target = (batch["target"] - CFG["target_mean"]) / CFG["target_std"]
    value_loss = torch.mean(torch.abs(output["value"] - target))

    types = torch.cat([graph["atoms"][:, 0] for graph in batch["graphs"]])
    masked = torch.cat([graph["masked"] for graph in batch["graphs"]])
    labels = one_hot(types, CFG["atom_types"])
    entropy = -torch.sum(labels * torch.log_softmax(output["atoms"], dim=-1), dim=-1)
    atom_loss = masked_mean(entropy, masked)
    return value_loss + CFG["masked_atom_weight"] * atom_loss


def clip_by_global_norm(max_norm):
    def update(grads, state, params):
        norm = torch.sqrt(sum(torch.sum(torch.square(g)) for g in grads.values()))
        scale = torch.where(norm < max_norm, 1.0, max_norm / norm)
        return {path: g * scale for path, g in grads.items()}, state

    return lambda params: (), update


def scale_by_adam(b1, b2, eps):
    def init(params):
        zeros = {path: torch.zeros_like(p) for path, p in params.items()}
        return 0, zeros, zeros

    def update(grads, state, params):
        count, mu, nu = state
        count = count + 1
        mu = {path: b1 * mu[path] + (1.0 - b1) * g for path, g in grads.items()}
        nu = {path: b2 * nu[path] + (1.0 - b2) * g * g for path, g in grads.items()}
        updates = {}
        for path in grads:
            mu_hat = mu[path] / (1.0 - b1**count)
            nu_hat = nu[path] / (1.0 - b2**count)
            updates[path] = mu_hat / (torch.sqrt(nu_hat) + eps)
        return updates, (count, mu, nu)

    return init, update


def add_decayed_weights(weight_decay, mask):
    def update(updates, state, params):
        decayed = {
            path: u + weight_decay * params[path] if mask(path) else u
            for path, u in updates.items()
        }
        return decayed, state

    return lambda params: (), update


def scale_by_schedule(schedule):
    def update(updates, count, params):
        count = count + 1
        return {path: schedule(count) * u for path, u in updates.items()}, count

    return lambda params: 0, update


def linear_schedule(init_value, end_value, transition_steps):
    return polynomial_schedule(init_value, end_value, 1.0, transition_steps)


def polynomial_schedule(init_value, end_value, power, transition_steps):
    def schedule(count):
        fraction = 1.0 - min(max(count, 0), transition_steps) / transition_steps
        return (init_value - end_value) * fraction**power + end_value

    return schedule


def join_schedules(schedules, boundary):
    first, second = schedules
    return lambda count: first(count) if count < boundary else second(count - boundary)


MATRICES = ("w", "qkv", "out", "by_place")


def is_matrix(path):
    return path.rpartition(".")[2] in MATRICES


class Chain(torch.optim.Optimizer):
    """Transformations of the gradients, one after the other."""

    def __init__(self, named_params, *transforms):
        self.params = dict(named_params)
        super().__init__(self.params.values(), {})
        self.updates = [update for _, update in transforms]
        self.states = [init(self.params) for init, _ in transforms]

    @torch.no_grad()
    def step(self, closure=None):
        changes = {path: p.grad for path, p in self.params.items()}
        for i, update in enumerate(self.updates):
            changes, self.states[i] = update(changes, self.states[i], self.params)
        for path, p in self.params.items():
            p.sub_(changes[path])


def optimizer(net):
    warmup = linear_schedule(0.0, 4e-3, transition_steps=2)
    decay = polynomial_schedule(4e-3, 1e-5, power=2.0, transition_steps=6)
    return Chain(
        net.params.named_parameters(),
        clip_by_global_norm(1.0),
        scale_by_adam(b1=0.9, b2=0.98, eps=1e-6),
        add_decayed_weights(0.4, mask=is_matrix),
        scale_by_schedule(join_schedules([warmup, decay], boundary=2)),
    )
