"""After Spektral in batch mode: padded nodes x, dense adjacency a and edges e, masks.

x is [batch, nodes, channels], a is [batch, nodes, nodes] with the node that receives first. The
first row of every table belongs to what is not there. Kernels are [in, out].
"""

from pathlib import Path

import torch
from torch import nn

atom_fields, bond_fields = (11, 6, 4), (5, 3, 2)
channels, mlp_hidden, virtual_hidden, n_layers = 48, 80, 60, 4
n_heads, head_channels, gate_channels = 4, 14, 32
n_tasks, task_units, n_targets, target_units = 7, 40, 3, 30

# ------------------------------------------------------------------------- layers


def add_weight(*shape):
    return nn.Parameter(torch.zeros(shape))


class Dense(nn.Module):
    def __init__(self, inputs, units, activation=None, use_bias=True):
        super().__init__()
        self.activation = activation
        self.kernel = add_weight(inputs, units)
        self.bias = add_weight(units) if use_bias else None

    def forward(self, x):
        x = torch.tensordot(x, self.kernel, dims=1)
        if self.bias is not None:
            x = x + self.bias
        return x if self.activation is None else self.activation(x)


class CategoricalEmbedding(nn.Module):
    """The sum over fields; 0 is nothing."""

    def __init__(self, sizes):
        super().__init__()
        self.embeddings = nn.ParameterList(
            [add_weight(size + 1, channels) for size in sizes]
        )

    def forward(self, indices):
        output = 0.0
        for field, embeddings in enumerate(self.embeddings):
            output = output + embeddings[indices[..., field]]
        return output


class BatchNormalization(nn.Module):
    """Always by the moments of the batch."""

    def __init__(self, units, epsilon=1e-3):
        super().__init__()
        self.epsilon = epsilon
        self.gamma, self.beta = add_weight(units), add_weight(units)

    def forward(self, inputs, mask):
        mean, variance = weighted_moments(inputs, (0, 1), mask)
        outputs = (inputs - mean) / torch.sqrt(variance + self.epsilon)
        return outputs * self.gamma + self.beta


class LayerNormalization(nn.Module):
    def __init__(self, units, epsilon=1e-3):
        super().__init__()
        self.epsilon = epsilon
        self.gamma, self.beta = add_weight(units), add_weight(units)

    def forward(self, inputs):
        mean, variance = weighted_moments(inputs, (-1,), torch.ones_like(inputs))
        inv = torch.rsqrt(variance + self.epsilon) * self.gamma
        return inputs * inv + (self.beta - mean * inv)


def weighted_moments(x, axes, frequency_weights):
    divisor = torch.sum(frequency_weights, dim=axes, keepdim=True)
    mean = torch.sum(frequency_weights * x, dim=axes, keepdim=True) / divisor
    distance = torch.square(x - mean)
    variance = torch.sum(frequency_weights * distance, dim=axes, keepdim=True) / divisor
    return mean, variance


def leaky_relu(x, alpha=0.3):
    return torch.maximum(x, alpha * x)


def gelu(x):
    return 0.5 * x * (1.0 + torch.erf(x / 2.0**0.5))


def softmax(x, axis):
    exps = torch.exp(x - torch.amax(x, dim=axis, keepdim=True).detach())
    return exps / torch.sum(exps, dim=axis, keepdim=True)


# -------------------------------------------------------------------- convolution


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.expand = Dense(channels, mlp_hidden, use_bias=False)
        self.norm = BatchNormalization(mlp_hidden, epsilon=1e-5)
        self.project = Dense(mlp_hidden, channels, use_bias=False)

    def forward(self, x, mask):
        x = self.norm(self.expand(x), mask)
        return self.project(torch.relu(x))


class GINConvBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.edge_embedding = CategoricalEmbedding(bond_fields)
        self.mlp = MLP()
        self.eps = add_weight(1)

    def message(self, x, a, e):
        """[batch, receiving, sending, channels]"""
        senders = torch.unsqueeze(x, 1)
        messages = torch.relu(senders + self.edge_embedding(e))
        return messages * a[..., None]

    def forward(self, x, a, e, mask):
        aggregated = torch.sum(self.message(x, a, e), dim=2)
        return self.mlp(x + self.eps * x + aggregated, mask)


class GINBlock(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.activation = activation
        self.conv = GINConvBatch()
        self.norm = BatchNormalization(channels, epsilon=1e-5)

    def forward(self, inputs, a, e, mask):
        x = self.norm(self.conv(inputs, a, e, mask), mask)
        return self.activation(x) * mask


def linear(x):
    return x


class VirtualNode(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = Dense(channels, virtual_hidden)
        self.norm = LayerNormalization(virtual_hidden, epsilon=1e-5)
        self.out = Dense(virtual_hidden, channels)

    def forward(self, virtual, x, mask):
        inputs = virtual + torch.sum(x * mask, dim=1)
        return self.out(torch.relu(self.norm(self.hidden(inputs)))) + virtual


class JumpingKnowledge(nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = add_weight(n_layers + 1)

    def forward(self, outputs):
        return torch.stack(outputs, dim=-1) @ softmax(self.logits, axis=0)


# ------------------------------------------------------------------------ pooling


class GlobalAttentionPool(nn.Module):
    """Values have the heads last: [batch, nodes, head_channels, heads]."""

    def __init__(self):
        super().__init__()
        self.gate = Dense(channels, gate_channels)
        self.score = Dense(gate_channels, n_heads, use_bias=False)
        self.value = Dense(channels, head_channels * n_heads)

    def forward(self, x, mask):
        gate = leaky_relu(self.gate(x), alpha=0.2)
        scores = self.score(gate)
        coefficients = softmax(scores - 1e9 * (1.0 - mask), axis=1)
        values = self.value(x).unflatten(-1, (head_channels, n_heads))
        pooled = torch.einsum("bnh,bnch->bch", coefficients, values)
        return torch.flatten(pooled, 1)


class GlobalAvgPool(nn.Module):
    def forward(self, x, mask):
        return torch.sum(x * mask, dim=1) / torch.sum(mask, dim=1)


class MoleculeModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.node_embedding = CategoricalEmbedding(atom_fields)
        self.virtual = add_weight(1, channels)
        activations = [torch.relu] * (n_layers - 1) + [linear]
        self.blocks = nn.ModuleList([GINBlock(each) for each in activations])
        self.virtual_nodes = nn.ModuleList([VirtualNode() for _ in range(n_layers - 1)])
        self.jumping = JumpingKnowledge()
        self.avg_pool, self.attention_pool = GlobalAvgPool(), GlobalAttentionPool()
        pooled = channels + head_channels * n_heads
        self.task_dense = Dense(pooled, task_units, activation=gelu)
        self.task_logits = Dense(task_units, n_tasks)
        self.target_dense = Dense(pooled + n_tasks, target_units, activation=gelu)
        self.target_out = Dense(target_units, n_targets)

    def encode(self, x, a, e, mask):
        x = self.node_embedding(x) * mask
        virtual = self.virtual.repeat(len(x), 1)
        outputs = [x]
        for i, block in enumerate(self.blocks):
            x = x + virtual[:, None] * mask
            x = x + block(x, a, e, mask)
            outputs.append(x)
            if i < len(self.virtual_nodes):
                virtual = self.virtual_nodes[i](virtual, x, mask)
        return self.jumping(outputs)

    def forward(self, x, a, e, mask):
        x = self.encode(x, a, e, mask)
        pools = [self.avg_pool(x, mask), self.attention_pool(x, mask)]
        pooled = torch.cat(pools, dim=-1)
        logits = self.task_logits(self.task_dense(pooled))
        probabilities = torch.sigmoid(logits).detach()
        features = torch.cat([pooled, probabilities], dim=-1)
        return logits, self.target_out(self.target_dense(features))


# ------------------------------------------------------------------------ weights


class Checkpoint:
    """Fills layers with what PyTorch has."""

    def __init__(self, state):
        self.state = state

    def dense(self, layer, key):
        layer.kernel.copy_(self.state[key + ".weight"].T)
        if layer.bias is not None:
            layer.bias.copy_(self.state[key + ".bias"])

    def norm(self, layer, key):
        layer.gamma.copy_(self.state[key + ".weight"])
        layer.beta.copy_(self.state[key + ".bias"])

    def embedding(self, layer, key):
        """Nothing is said about the row of what is not there."""
        for i, embeddings in enumerate(layer.embeddings):
            embeddings[1:].copy_(self.state[f"{key}.tables.{i}.weight"])

    def after_pools(self, layer, key):
        """Rows for the mean come before those for the heads."""
        kernel = self.state[key + ".weight"].T
        sizes = (n_heads * head_channels, channels)
        heads, mean, rest = torch.tensor_split(kernel, (sizes[0], sum(sizes)))
        layer.kernel.copy_(torch.cat([mean, heads_last(heads.T).T, rest]))
        layer.bias.copy_(self.state[key + ".bias"])


def heads_last(x):
    """[..., heads * channels] -> [..., channels * heads]"""
    x = x.unflatten(-1, (n_heads, head_channels))
    return x.transpose(-1, -2).flatten(-2)


def load_block(checkpoint, block, i):
    checkpoint.embedding(block.conv.edge_embedding, f"encoder.convs.{i}.bond_encoder")
    checkpoint.dense(block.conv.mlp.expand, f"encoder.convs.{i}.mlp.0")
    checkpoint.norm(block.conv.mlp.norm, f"encoder.convs.{i}.mlp.1")
    checkpoint.dense(block.conv.mlp.project, f"encoder.convs.{i}.mlp.3")
    checkpoint.norm(block.norm, f"encoder.norms.{i}")
    block.conv.eps.fill_(checkpoint.state[f"encoder.convs.{i}.eps"])


def load_virtual_node(checkpoint, layer, i):
    checkpoint.dense(layer.hidden, f"encoder.virtuals.{i}.mlp.0")
    checkpoint.norm(layer.norm, f"encoder.virtuals.{i}.mlp.1")
    checkpoint.dense(layer.out, f"encoder.virtuals.{i}.mlp.3")


def load_attention_pool(checkpoint, layer):
    checkpoint.dense(layer.gate, "readout.gate.0")
    checkpoint.dense(layer.score, "readout.gate.2")
    value = checkpoint.state["readout.value.weight"].T
    layer.value.kernel.copy_(heads_last(value))
    layer.value.bias.copy_(heads_last(checkpoint.state["readout.value.bias"]))


@torch.no_grad()
def load_weights(net, state):
    checkpoint = Checkpoint(state)
    checkpoint.embedding(net.node_embedding, "encoder.atom_encoder")
    net.virtual.copy_(state["encoder.virtual"])
    net.jumping.logits.copy_(state["encoder.jump"])
    for i, block in enumerate(net.blocks):
        load_block(checkpoint, block, i)
    for i, layer in enumerate(net.virtual_nodes):
        load_virtual_node(checkpoint, layer, i)
    load_attention_pool(checkpoint, net.attention_pool)
    checkpoint.after_pools(net.task_dense, "task_head.0")
    checkpoint.dense(net.task_logits, "task_head.2")
    checkpoint.after_pools(net.target_dense, "value_head.0")
    checkpoint.dense(net.target_out, "value_head.2")


def model():
    net = MoleculeModel()
    load_weights(net, torch.load(Path(__file__).with_name("weights.pt")))
    return net


# --------------------------------------------------------------------------- data


def disjoint_to_batch(atoms, edge_index, bonds, graph):
    """Indices grow by one, so that 0 is padding."""
    sizes = torch.bincount(graph)
    n_graphs, n_max = len(sizes), int(sizes.max())
    first = torch.cumsum(sizes, dim=0) - sizes
    place = torch.arange(len(atoms)) - first[graph]
    x = atoms.new_zeros(n_graphs, n_max, atoms.shape[1])
    x[graph, place] = atoms + 1
    e = bonds.new_zeros(n_graphs, n_max, n_max, bonds.shape[1])
    source, target = edge_index
    e[graph[source], place[target], place[source]] = bonds + 1
    return x, e


def forward(net, batch):
    x, e = disjoint_to_batch(
        batch["atoms"], batch["edge_index"], batch["edge_attr"], batch["batch"]
    )
    mask = torch.ne(x[..., :1], 0).float()
    a = torch.ne(e[..., 0], 0).float()
    logits, targets = net(x, a, e, mask)
    return {"task": logits, "value": targets}


# --------------------------------------------------------------------------- loss

target_mean = [
    [6.9, 5.2, 8.4, 6.1],
    [-42.0, -40.5, -46.0, -37.0],
    [75.0, 77.0, 71.5, 80.0],
]
target_std = [[1.3, 1.0, 1.9, 0.8], [10.0, 9.1, 12.5, 11.0], [8.2, 8.8, 7.1, 9.6]]
pos_weight = (3.0, 1.5, 6.0, 2.2, 0.7, 4.0, 1.2)
loss_weights = {"task": 1.0, "value": 0.8}


def weighted_cross_entropy_with_logits(labels, logits):
    log_weight = 1.0 + (torch.tensor(pos_weight) - 1.0) * labels
    softplus = torch.log1p(torch.exp(-torch.abs(logits))) + torch.relu(-logits)
    return (1.0 - labels) * logits + log_weight * softplus


def masked_task_loss(y_true, logits):
    sample_weight = torch.ne(y_true, -1).float()
    y_true = torch.relu(y_true.float())
    losses = weighted_cross_entropy_with_logits(y_true, logits)
    return torch.sum(losses * sample_weight) / torch.sum(sample_weight)


def huber(y_true, y_pred, delta=1.0):
    error = torch.abs(y_pred - y_true)
    small = 0.5 * torch.square(error)
    large = delta * error - 0.5 * delta * delta
    return torch.mean(torch.where(error <= delta, small, large))


def standardized(values, method):
    mean = torch.tensor(target_mean)[:, method].T
    std = torch.tensor(target_std)[:, method].T
    return (values - mean) / std


def loss(output, batch):
    y_true = standardized(batch["value"], batch["method"])
    losses = {
        "task": masked_task_loss(batch["label"], output["task"]),
        "value": huber(y_true, output["value"], delta=0.6),
    }
    return sum(loss_weights[name] * value for name, value in losses.items())


class Adam(torch.optim.Optimizer):
    """Moments move to what is new by a part of the difference."""

    def __init__(
        self, variables, learning_rate, beta_1=0.9, beta_2=0.999, epsilon=1e-7
    ):
        super().__init__(list(variables), {})
        self.learning_rate, self.epsilon = learning_rate, epsilon
        self.beta_1, self.beta_2 = beta_1, beta_2
        self.iterations = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.iterations += 1
        root = (1.0 - self.beta_2**self.iterations) ** 0.5
        alpha = self.learning_rate * root / (1.0 - self.beta_1**self.iterations)
        for variable in self.param_groups[0]["params"]:
            slots = self.state[variable]
            if not slots:
                slots["m"] = torch.zeros_like(variable)
                slots["v"] = torch.zeros_like(variable)
            m, v = slots["m"], slots["v"]
            m.add_((variable.grad - m) * (1.0 - self.beta_1))
            v.add_((torch.square(variable.grad) - v) * (1.0 - self.beta_2))
            # PyTorch adds its epsilon behind the correction.
            variable.sub_(alpha * m / (torch.sqrt(v) + self.epsilon * root))


def optimizer(net):
    return Adam(net.parameters(), 2e-3, beta_2=0.99, epsilon=1e-5)
