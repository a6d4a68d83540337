"""After jraph and Haiku: a tuple of graphs that is padded by one more graph, segment sums.

Kernels are [in, out]. The virtual node is what jraph calls the globals of a graph.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

NUM_ATOM_TYPES, NUM_BOND_TYPES = (11, 6, 4), (5, 3, 2)
LATENT_SIZE, MLP_SIZE, GLOBAL_SIZE, NUM_MESSAGE_PASSING_STEPS = 48, 80, 60, 4
NUM_HEADS, HEAD_SIZE, GATE_SIZE = 4, 14, 32
NUM_TASKS, TASK_SIZE, NUM_TARGETS, TARGET_SIZE = 7, 40, 3, 30


class GraphsTuple(NamedTuple):
    nodes: torch.Tensor
    edges: torch.Tensor
    receivers: torch.Tensor
    senders: torch.Tensor
    globals: torch.Tensor
    n_node: torch.Tensor
    n_edge: torch.Tensor


# ----------------------------------------------------------------------- segments


def segment_sum(data, segment_ids, num_segments):
    out = torch.zeros(num_segments, *data.shape[1:])
    return out.index_add(0, segment_ids, data)


def segment_max(data, segment_ids, num_segments):
    rows = [data[segment_ids == i].amax(dim=0) for i in range(num_segments)]
    return torch.stack(rows)


def segment_softmax(logits, segment_ids, num_segments):
    maxs = segment_max(logits.detach(), segment_ids, num_segments)
    unnormalized = torch.exp(logits - maxs[segment_ids])
    normalizers = segment_sum(unnormalized, segment_ids, num_segments)
    return unnormalized / normalizers[segment_ids]


def one_hot(x, num_classes):
    return (x[:, None] == torch.arange(num_classes)).float()


def multi_hot(fields, sizes):
    """A one in the part of each field."""
    parts = [one_hot(fields[:, i], size) for i, size in enumerate(sizes)]
    return torch.cat(parts, dim=-1)


# ------------------------------------------------------------------------ padding


def nearest_bigger_power_of_two(x):
    y = 2
    while y < x:
        y *= 2
    return y


def pad_first_axis(x, size):
    return torch.cat([x, x.new_zeros(size - len(x), *x.shape[1:])])


def pad_with_graphs(graph, n_node, n_edge):
    """One graph more has all the nodes and edges that are missing."""
    sum_n_node, sum_n_edge = len(graph.nodes), len(graph.edges)
    loops = torch.full((n_edge - sum_n_edge,), sum_n_node)
    return GraphsTuple(
        nodes=pad_first_axis(graph.nodes, n_node),
        edges=pad_first_axis(graph.edges, n_edge),
        receivers=torch.cat([graph.receivers, loops]),
        senders=torch.cat([graph.senders, loops]),
        globals=pad_first_axis(graph.globals, len(graph.globals) + 1),
        n_node=torch.cat([graph.n_node, torch.tensor([n_node - sum_n_node])]),
        n_edge=torch.cat([graph.n_edge, torch.tensor([n_edge - sum_n_edge])]),
    )


def get_node_padding_mask(padded_graph):
    total = len(padded_graph.nodes)
    return torch.arange(total) < total - padded_graph.n_node[-1]


def get_graph_padding_mask(padded_graph):
    n_graph = len(padded_graph.n_node)
    return torch.arange(n_graph) < n_graph - 1


def node_graph_idx(graph):
    return torch.repeat_interleave(torch.arange(len(graph.n_node)), graph.n_node)


def edge_graph_idx(graph):
    return torch.repeat_interleave(torch.arange(len(graph.n_edge)), graph.n_edge)


def graph_network(update_edge_fn, update_node_fn, update_global_fn=None):
    """Edges, then nodes, then globals; each sees what was updated before it."""

    def apply(graph):
        num_nodes, num_graphs = len(graph.nodes), len(graph.n_node)
        sent = graph.nodes[graph.senders]
        received = graph.nodes[graph.receivers]
        of_edges = graph.globals[edge_graph_idx(graph)]
        edges = update_edge_fn(graph.edges, sent, received, of_edges)

        sent = segment_sum(edges, graph.senders, num_nodes)
        received = segment_sum(edges, graph.receivers, num_nodes)
        of_nodes = graph.globals[node_graph_idx(graph)]
        nodes = update_node_fn(graph.nodes, sent, received, of_nodes)
        graph = graph._replace(nodes=nodes, edges=edges)
        if update_global_fn is None:
            return graph

        node_attributes = segment_sum(nodes, node_graph_idx(graph), num_graphs)
        edge_attributes = segment_sum(edges, edge_graph_idx(graph), num_graphs)
        return graph._replace(
            globals=update_global_fn(node_attributes, edge_attributes, graph.globals)
        )

    return apply


# ------------------------------------------------------------------------ modules


class Linear(nn.Module):
    def __init__(self, input_size, output_size, with_bias=True):
        super().__init__()
        self.w = nn.Parameter(torch.empty(input_size, output_size))
        self.b = nn.Parameter(torch.empty(output_size)) if with_bias else None

    def forward(self, x):
        out = torch.matmul(x, self.w)
        return out if self.b is None else out + self.b


class BatchNorm(nn.Module):
    """Moments of this batch, of the nodes that are not padding."""

    def __init__(self, size, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.empty(size))
        self.offset = nn.Parameter(torch.empty(size))

    def forward(self, x, mask):
        weights = mask.float()
        count = torch.sum(weights)
        mean = torch.einsum("n,nd->d", weights, x) / count
        mean_of_squares = torch.einsum("n,nd->d", weights, torch.square(x)) / count
        var = mean_of_squares - torch.square(mean)
        inv = self.scale * torch.rsqrt(var + self.eps)
        return (x - mean) * inv + self.offset


class LayerNorm(nn.Module):
    def __init__(self, size, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.empty(size))
        self.offset = nn.Parameter(torch.empty(size))

    def forward(self, x):
        mean = torch.mean(x, dim=-1, keepdim=True)
        variance = torch.var(x, dim=-1, keepdim=True, correction=0)
        inv = self.scale * torch.rsqrt(variance + self.eps)
        return inv * (x - mean) + self.offset


def leaky_relu(x, negative_slope=0.01):
    return torch.where(x >= 0, x, negative_slope * x)


def gelu(x, approximate=True):
    if approximate:
        cdf = 0.5 * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3))))
        return x * cdf
    return x * 0.5 * torch.erfc(-x * 0.7071067811865476)


class NodeUpdate(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_0 = Linear(LATENT_SIZE, MLP_SIZE, with_bias=False)
        self.norm_0 = BatchNorm(MLP_SIZE)
        self.linear_1 = Linear(MLP_SIZE, LATENT_SIZE, with_bias=False)
        self.norm_1 = BatchNorm(LATENT_SIZE)

    def forward(self, x, mask):
        x = torch.relu(self.norm_0(self.linear_0(x), mask))
        return self.norm_1(self.linear_1(x), mask)


class GlobalUpdate(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_0 = Linear(LATENT_SIZE, GLOBAL_SIZE)
        self.norm_0 = LayerNorm(GLOBAL_SIZE)
        self.linear_1 = Linear(GLOBAL_SIZE, LATENT_SIZE)

    def forward(self, x):
        return self.linear_1(torch.relu(self.norm_0(self.linear_0(x))))


class GraphEncoder(nn.Module):
    """Kernels of the edges and weights of the nodes themselves are stacked over the steps."""

    def __init__(self):
        super().__init__()
        steps = NUM_MESSAGE_PASSING_STEPS
        self.embed_nodes = Linear(sum(NUM_ATOM_TYPES), LATENT_SIZE, with_bias=False)
        self.embed_edges = nn.Parameter(
            torch.empty(steps, sum(NUM_BOND_TYPES), LATENT_SIZE)
        )
        self.embed_globals = nn.Parameter(torch.empty(1, LATENT_SIZE))
        self.self_weight = nn.Parameter(torch.empty(steps))
        self.jumping_logits = nn.Parameter(torch.empty(steps + 1))
        self.node_updates = nn.ModuleList(NodeUpdate() for _ in range(steps))
        self.global_updates = nn.ModuleList(GlobalUpdate() for _ in range(steps - 1))

    def message_passing(self, step, mask):
        last = step == NUM_MESSAGE_PASSING_STEPS - 1

        def update_edge_fn(edges, sent_nodes, received_nodes, global_attributes):
            return torch.relu(sent_nodes + global_attributes + edges)

        def update_node_fn(nodes, sent_edges, received_edges, global_attributes):
            nodes = nodes + global_attributes
            inputs = self.self_weight[step] * nodes + received_edges
            update = self.node_updates[step](inputs, mask)
            return nodes + (update if last else torch.relu(update))

        def update_global_fn(node_attributes, edge_attributes, global_attributes):
            inputs = global_attributes + node_attributes
            return global_attributes + self.global_updates[step](inputs)

        return graph_network(
            update_edge_fn, update_node_fn, None if last else update_global_fn
        )

    def forward(self, graph):
        mask = get_node_padding_mask(graph)
        bonds = torch.einsum("ef,sfd->sed", graph.edges, self.embed_edges)
        nodes = self.embed_nodes(graph.nodes)
        virtual = self.embed_globals.repeat(len(graph.n_node), 1)
        graph = graph._replace(nodes=nodes, globals=virtual)
        layers = [graph.nodes]
        for step in range(NUM_MESSAGE_PASSING_STEPS):
            graph = self.message_passing(step, mask)(graph._replace(edges=bonds[step]))
            layers.append(graph.nodes)
        weights = torch.softmax(self.jumping_logits, dim=0)
        nodes = torch.tensordot(weights, torch.stack(layers), dims=1)
        return graph._replace(nodes=nodes)


class Readout(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_0 = Linear(LATENT_SIZE, GATE_SIZE)
        self.gate_1 = Linear(GATE_SIZE, NUM_HEADS, with_bias=False)
        self.value_w = nn.Parameter(torch.empty(NUM_HEADS, LATENT_SIZE, HEAD_SIZE))
        self.value_b = nn.Parameter(torch.empty(NUM_HEADS, HEAD_SIZE))

    def forward(self, graph):
        idx, n_graph = node_graph_idx(graph), len(graph.n_node)
        gate = leaky_relu(self.gate_0(graph.nodes), negative_slope=0.2)
        weights = segment_softmax(self.gate_1(gate), idx, n_graph)
        values = torch.einsum("nd,hdv->nhv", graph.nodes, self.value_w) + self.value_b
        attended = segment_sum(weights[:, :, None] * values, idx, n_graph)
        sums = segment_sum(graph.nodes, idx, n_graph)
        means = sums / torch.clamp(graph.n_node, min=1)[:, None]
        return torch.cat([attended.flatten(1), means], dim=-1)


class Predictor(nn.Module):
    """The first layers of both heads are one; what the targets read of the tasks is added."""

    def __init__(self):
        super().__init__()
        size = NUM_HEADS * HEAD_SIZE + LATENT_SIZE
        self.encoder = GraphEncoder()
        self.readout = Readout()
        self.trunk = Linear(size, TASK_SIZE + TARGET_SIZE)
        self.tasks = Linear(TASK_SIZE, NUM_TASKS)
        self.from_tasks = Linear(NUM_TASKS, TARGET_SIZE, with_bias=False)
        self.targets = Linear(TARGET_SIZE, NUM_TARGETS)

    def forward(self, graph):
        latents = self.trunk(self.readout(self.encoder(graph)))
        task_latents, target_latents = torch.tensor_split(latents, (TASK_SIZE,), dim=-1)
        logits = self.tasks(gelu(task_latents, approximate=False))
        probs = torch.sigmoid(stop_gradient(logits))
        target_latents = target_latents + self.from_tasks(probs)
        return logits, self.targets(gelu(target_latents, approximate=False))


def stop_gradient(x):
    return x.detach()


# ------------------------------------------------------------------------- params


def encoder_params(state):
    def tables(prefix, num_fields):
        names = [f"{prefix}.tables.{i}.weight" for i in range(num_fields)]
        return torch.cat([state[name] for name in names])

    steps = range(NUM_MESSAGE_PASSING_STEPS)
    bonds = [tables(f"convs.{i}.bond_encoder", len(NUM_BOND_TYPES)) for i in steps]
    params = {
        "embed_nodes.w": tables("atom_encoder", len(NUM_ATOM_TYPES)),
        "embed_edges": torch.stack(bonds),
        "embed_globals": state["virtual"][None],
        "self_weight": 1.0 + torch.stack([state[f"convs.{i}.eps"] for i in steps]),
        "jumping_logits": state["jump"],
    }
    for i in steps:
        params.update(node_params(state, i))
    for i in steps[:-1]:
        params.update(global_params(state, i))
    return params


def node_params(state, i):
    mlp, new = f"convs.{i}.mlp", f"node_updates.{i}"
    return {
        f"{new}.linear_0.w": state[f"{mlp}.0.weight"].T,
        f"{new}.norm_0.scale": state[f"{mlp}.1.weight"],
        f"{new}.norm_0.offset": state[f"{mlp}.1.bias"],
        f"{new}.linear_1.w": state[f"{mlp}.3.weight"].T,
        f"{new}.norm_1.scale": state[f"norms.{i}.weight"],
        f"{new}.norm_1.offset": state[f"norms.{i}.bias"],
    }


def global_params(state, i):
    mlp, new = f"virtuals.{i}.mlp", f"global_updates.{i}"
    return {
        f"{new}.linear_0.w": state[f"{mlp}.0.weight"].T,
        f"{new}.linear_0.b": state[f"{mlp}.0.bias"],
        f"{new}.norm_0.scale": state[f"{mlp}.1.weight"],
        f"{new}.norm_0.offset": state[f"{mlp}.1.bias"],
        f"{new}.linear_1.w": state[f"{mlp}.3.weight"].T,
        f"{new}.linear_1.b": state[f"{mlp}.3.bias"],
    }


def readout_params(state):
    value = state["value.weight"].reshape(NUM_HEADS, HEAD_SIZE, LATENT_SIZE)
    return {
        "gate_0.w": state["gate.0.weight"].T,
        "gate_0.b": state["gate.0.bias"],
        "gate_1.w": state["gate.2.weight"].T,
        "value_w": torch.permute(value, (0, 2, 1)),
        "value_b": state["value.bias"].reshape(NUM_HEADS, HEAD_SIZE),
    }


def head_params(state):
    target_w = state["value_head.0.weight"].T
    from_readout, from_tasks = target_w[:-NUM_TASKS], target_w[-NUM_TASKS:]
    biases = [state["task_head.0.bias"], state["value_head.0.bias"]]
    return {
        "trunk.w": torch.cat([state["task_head.0.weight"].T, from_readout], dim=1),
        "trunk.b": torch.cat(biases),
        "from_tasks.w": from_tasks,
        "tasks.w": state["task_head.2.weight"].T,
        "tasks.b": state["task_head.2.bias"],
        "targets.w": state["value_head.2.weight"].T,
        "targets.b": state["value_head.2.bias"],
    }


def scope(state, name):
    return {k[len(name) + 1 :]: v for k, v in state.items() if k.startswith(name + ".")}


def model():
    net = Predictor()
    state = torch.load(Path(__file__).with_name("weights.pt"))
    params = head_params(state)
    for name, convert in (("encoder", encoder_params), ("readout", readout_params)):
        for key, value in convert(scope(state, name)).items():
            params[f"{name}.{key}"] = value
    net.load_state_dict(params)
    return net


# ----------------------------------------------------------------------- training


def to_graphs_tuple(batch):
    n_graph = len(batch["label"])
    senders, receivers = batch["edge_index"]
    return GraphsTuple(
        nodes=multi_hot(batch["atoms"], NUM_ATOM_TYPES),
        edges=multi_hot(batch["edge_attr"], NUM_BOND_TYPES),
        receivers=receivers,
        senders=senders,
        globals=torch.zeros(n_graph, 1),
        n_node=torch.bincount(batch["batch"], minlength=n_graph),
        n_edge=torch.bincount(batch["batch"][senders], minlength=n_graph),
    )


def forward(net, batch):
    graph = to_graphs_tuple(batch)
    graph = pad_with_graphs(
        graph,
        n_node=nearest_bigger_power_of_two(len(graph.nodes)) + 1,
        n_edge=nearest_bigger_power_of_two(len(graph.edges)),
    )
    logits, targets = net(graph)
    mask = get_graph_padding_mask(graph)
    return {"task": logits[mask], "value": targets[mask]}


#: The mean and the deviation of each target, one row for each method.
STATISTICS = torch.tensor(
    [
        [[6.9, 1.3], [-42.0, 10.0], [75.0, 8.2]],
        [[5.2, 1.0], [-40.5, 9.1], [77.0, 8.8]],
        [[8.4, 1.9], [-46.0, 12.5], [71.5, 7.1]],
        [[6.1, 0.8], [-37.0, 11.0], [80.0, 9.6]],
    ]
)
POS_WEIGHT = torch.tensor([3.0, 1.5, 6.0, 2.2, 0.7, 4.0, 1.2])
HUBER_DELTA, TARGET_WEIGHT = 0.6, 0.8


def log_sigmoid(x):
    return -torch.logaddexp(-x, torch.zeros_like(x))


def sigmoid_binary_cross_entropy(logits, labels):
    positive = POS_WEIGHT * labels * log_sigmoid(logits)
    return -positive - (1.0 - labels) * log_sigmoid(-logits)


def huber_loss(predictions, targets, delta):
    abs_errors = torch.abs(predictions - targets)
    quadratic = torch.clamp(abs_errors, max=delta)
    linear = abs_errors - quadratic
    return 0.5 * quadratic**2 + delta * linear


def normalize(values, method):
    mean, std = torch.unbind(STATISTICS[method], dim=-1)
    return (values - mean) / std


def loss(output, batch):
    labels = batch["label"].float()
    mask = labels != -1
    labels = torch.where(mask, labels, 0.0)
    entropies = sigmoid_binary_cross_entropy(output["task"], labels)
    task_loss = torch.sum(torch.where(mask, entropies, 0.0)) / torch.sum(mask)
    targets = normalize(batch["value"], batch["method"])
    target_loss = torch.mean(huber_loss(output["value"], targets, HUBER_DELTA))
    return task_loss + TARGET_WEIGHT * target_loss


class Adam(torch.optim.Optimizer):
    """As optax: scale_by_adam, then scale by minus the rate."""

    def __init__(self, params, learning_rate, b1, b2, eps):
        super().__init__(list(params), {})
        self.learning_rate, self.b1, self.b2, self.eps = learning_rate, b1, b2, eps
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for param in self.param_groups[0]["params"]:
            slots, grad = self.state[param], param.grad
            if not slots:
                slots["mu"] = torch.zeros_like(param)
                slots["nu"] = torch.zeros_like(param)
            mu, nu = slots["mu"], slots["nu"]
            mu.copy_((1.0 - self.b1) * grad + self.b1 * mu)
            nu.copy_((1.0 - self.b2) * torch.square(grad) + self.b2 * nu)
            mu_hat = mu / (1.0 - self.b1**self.count)
            nu_hat = nu / (1.0 - self.b2**self.count)
            param.sub_(self.learning_rate * mu_hat / (torch.sqrt(nu_hat) + self.eps))


def optimizer(net):
    return Adam(net.parameters(), 2e-3, b1=0.9, b2=0.99, eps=1e-5)
