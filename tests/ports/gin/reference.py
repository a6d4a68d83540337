"""A small graph isomorphism network for molecules, with bonds and a virtual node."""

import torch
from torch import nn
from torch.nn import functional as F

ATOM_FIELDS, BOND_FIELDS = (11, 6, 4), (5, 3, 2)
WIDTH, HIDDEN, VIRTUAL_HIDDEN, ROUNDS = 48, 80, 60, 4
HEADS, HEAD_DIM, GATE_HIDDEN, SLOPE = 4, 14, 32, 0.2
TASKS, TASK_HIDDEN = 7, 40
VALUES, VALUE_HIDDEN = 3, 30
# One row for each method by which the values were found.
MEAN = ((6.9, -42.0, 75.0), (5.2, -40.5, 77.0), (8.4, -46.0, 71.5), (6.1, -37.0, 80.0))
STD = ((1.3, 10.0, 8.2), (1.0, 9.1, 8.8), (1.9, 12.5, 7.1), (0.8, 11.0, 9.6))
POSITIVE_WEIGHT = (3.0, 1.5, 6.0, 2.2, 0.7, 4.0, 1.2)
DELTA, VALUE_WEIGHT = 0.6, 0.8
LR, BETAS, EPS = 2e-3, (0.9, 0.99), 1e-5


def pool(x, batch, graphs):
    """Sums over the atoms of each graph."""
    return x.new_zeros(graphs, *x.shape[1:]).index_add(0, batch, x)


def batch_norm(width):
    return nn.BatchNorm1d(width, track_running_stats=False)


class FieldEncoder(nn.Module):
    """A table for each field; their rows are added."""

    def __init__(self, sizes):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, WIDTH) for size in sizes)

    def forward(self, fields):
        return sum(table(fields[:, i]) for i, table in enumerate(self.tables))


class GINEConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.bond_encoder = FieldEncoder(BOND_FIELDS)
        self.eps = nn.Parameter(torch.zeros(()))
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN, bias=False),
            batch_norm(HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, WIDTH, bias=False),
        )

    def forward(self, x, edge_index, edge_attr):
        source, target = edge_index
        message = F.relu(x[source] + self.bond_encoder(edge_attr))
        total = torch.zeros_like(x).index_add(0, target, message)
        return self.mlp((1 + self.eps) * x + total)


class VirtualNode(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, VIRTUAL_HIDDEN),
            nn.LayerNorm(VIRTUAL_HIDDEN),
            nn.ReLU(),
            nn.Linear(VIRTUAL_HIDDEN, WIDTH),
        )

    def forward(self, virtual, x, batch):
        total = pool(x, batch, len(virtual))
        return virtual + self.mlp(virtual + total)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.atom_encoder = FieldEncoder(ATOM_FIELDS)
        self.virtual = nn.Parameter(torch.zeros(WIDTH))
        self.convs = nn.ModuleList(GINEConv() for _ in range(ROUNDS))
        self.norms = nn.ModuleList(batch_norm(WIDTH) for _ in range(ROUNDS))
        self.virtuals = nn.ModuleList(VirtualNode() for _ in range(ROUNDS - 1))
        self.jump = nn.Parameter(torch.zeros(ROUNDS + 1))

    def forward(self, atoms, edge_index, edge_attr, batch, graphs):
        h = self.atom_encoder(atoms)
        virtual = self.virtual.expand(graphs, -1)
        states = [h]
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            x = h + virtual[batch]
            out = norm(conv(x, edge_index, edge_attr))
            if i < ROUNDS - 1:
                out = F.relu(out)
            h = x + out
            if i < ROUNDS - 1:
                virtual = self.virtuals[i](virtual, h, batch)
            states.append(h)
        weight = self.jump.softmax(dim=0)
        return (weight[:, None, None] * torch.stack(states)).sum(dim=0)


class Readout(nn.Module):
    """What the heads of the attention find, then the mean."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Sequential(
            nn.Linear(WIDTH, GATE_HIDDEN),
            nn.LeakyReLU(SLOPE),
            nn.Linear(GATE_HIDDEN, HEADS, bias=False),
        )
        self.value = nn.Linear(WIDTH, HEADS * HEAD_DIM)

    def attention(self, h, batch, graphs):
        score = self.gate(h)
        index = batch[:, None].expand_as(score)
        top = score.new_zeros(graphs, HEADS)
        top = top.scatter_reduce(0, index, score.detach(), "amax", include_self=False)
        weight = (score - top[batch]).exp()
        return weight / pool(weight, batch, graphs)[batch]

    def forward(self, h, batch, graphs):
        weight = self.attention(h, batch, graphs)
        value = self.value(h).view(-1, HEADS, HEAD_DIM)
        found = pool(weight.unsqueeze(-1) * value, batch, graphs).flatten(1)
        mean = pool(h, batch, graphs) / batch.bincount(minlength=graphs)[:, None]
        return torch.cat([found, mean], dim=-1)


class MoleculeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.readout = Readout()
        width = HEADS * HEAD_DIM + WIDTH
        self.task_head = nn.Sequential(
            nn.Linear(width, TASK_HIDDEN), nn.GELU(), nn.Linear(TASK_HIDDEN, TASKS)
        )
        self.value_head = nn.Sequential(
            nn.Linear(width + TASKS, VALUE_HIDDEN),
            nn.GELU(),
            nn.Linear(VALUE_HIDDEN, VALUES),
        )

    def forward(self, atoms, edge_index, edge_attr, batch, graphs):
        h = self.encoder(atoms, edge_index, edge_attr, batch, graphs)
        graph = self.readout(h, batch, graphs)
        task = self.task_head(graph)
        # Values may read the classes, but do not teach them.
        hint = task.sigmoid().detach()
        value = self.value_head(torch.cat([graph, hint], dim=-1))
        return {"task": task, "value": value}


def model():
    torch.manual_seed(1810)
    net = MoleculeNet()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1.3 * module.in_features**-0.5)
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.BatchNorm1d | nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(0, 0.6)
            elif isinstance(module, GINEConv):
                module.eps.uniform_(0.2, 0.6)
        net.encoder.virtual.normal_(0, 0.5)
        net.encoder.jump.normal_(0, 0.6)
    return net


def batches():
    """Trees of atoms with a ring; a lone atom is one of them. Some bonds go one way only."""
    generator = torch.Generator().manual_seed(1811)

    def draw(high, *shape):
        return torch.randint(high, shape, generator=generator)

    made = []
    for sizes in ((9, 1, 12, 6, 15, 8), (7, 11, 5, 13, 10)):
        edges, attributes, start = [], [], 0
        for size in sizes:
            pairs = [(int(draw(i, 1)), i) for i in range(1, size)]
            pairs += [(0, size - 1)] if size > 4 and (0, size - 1) not in pairs else []
            for first, second in pairs:
                kind, stereo = int(draw(5, 1)), int(draw(3, 1))
                edges.append((start + first, start + second))
                attributes.append((kind, stereo, 0))
                if kind < 4:
                    edges.append((start + second, start + first))
                    attributes.append((kind, stereo, 1))
            start += size
        graphs, method = len(sizes), draw(4, len(sizes))
        noise = torch.randn(graphs, 3, generator=generator)
        spread, middle = torch.tensor([1.4, 11.0, 8.5]), torch.tensor([6.5, -41, 76])
        # Classes that nobody knows are -1.
        unknown = torch.rand(graphs, 7, generator=generator) < 0.3
        atoms = torch.stack([draw(n, start) for n in (11, 6, 4)], dim=1)
        made.append(
            {
                "atoms": atoms,
                "edge_index": torch.tensor(edges).T.contiguous(),
                "edge_attr": torch.tensor(attributes),
                "batch": torch.arange(graphs).repeat_interleave(torch.tensor(sizes)),
                "label": draw(2, graphs, 7).masked_fill(unknown, -1),
                "value": middle + spread * noise,
                "method": method,
            }
        )
    return made


def forward(net, batch):
    return net(
        batch["atoms"],
        batch["edge_index"],
        batch["edge_attr"],
        batch["batch"],
        len(batch["label"]),
    )


def loss(output, batch):
    """Classes where they are known; values in deviations of their method."""
    known = (batch["label"] >= 0).float()
    task = F.binary_cross_entropy_with_logits(
        output["task"],
        batch["label"].clamp(min=0).float(),
        pos_weight=torch.tensor(POSITIVE_WEIGHT),
        reduction="none",
    )
    task = (task * known).sum() / known.sum()
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    target = (batch["value"] - mean[batch["method"]]) / std[batch["method"]]
    value = F.huber_loss(output["value"], target, delta=DELTA)
    return task + VALUE_WEIGHT * value


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=LR, betas=BETAS, eps=EPS)
