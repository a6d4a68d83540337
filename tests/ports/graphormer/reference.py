"""A small Graphormer: a transformer on molecules, biased by paths and the bonds on them.

A virtual node reads a value of each graph; the types of masked atoms are to be found, too.
"""

import torch
from torch import nn
from torch.nn import functional as F

ATOM_SIZES, BOND_SIZES = (12, 5, 4), (5, 3)
ATOM_TYPES, MASK_TYPE = 11, 11
MAX_DEGREE, MAX_DIST, MAX_HOPS, FAR = 3, 6, 4, 510
DIM, HEADS, FFN, LAYERS = 64, 4, 128, 3
TARGET_MEAN, TARGET_STD = 5.2, 1.6
ATOM_WEIGHT = 0.3
PEAK_LR, END_LR, POWER, WARMUP, TOTAL_STEPS = 4e-3, 1e-5, 2.0, 2, 8
WEIGHT_DECAY, MAX_NORM = 0.4, 1.0


# ------------------------------------------------------------------- graphs


def table_rows(x, sizes):
    """Columns of categories to rows of one table, where row 0 is for padding."""
    offsets = torch.tensor([0, *sizes[:-1]]).cumsum(0)
    return x + offsets + 1


def shortest_paths(adjacency):
    """Floyd and Warshall: hops from i to j, and the node that comes after i."""
    n = len(adjacency)
    dist = torch.where(adjacency, 1, FAR).fill_diagonal_(0)
    follow = torch.arange(n).expand(n, n)
    for k in range(n):
        through = dist[:, k, None] + dist[k]
        shorter = through < dist
        dist = torch.where(shorter, through, dist)
        follow = torch.where(shorter, follow[:, k, None], follow)
    return dist, follow


def bonds_on_paths(dist, follow, bond):
    """(n, n, hops, features): the first bonds on the way from i to j, then padding."""
    n = len(dist)
    here = torch.arange(n)[:, None].expand(n, n)
    there = torch.arange(n).expand(n, n)
    way = []
    for hop in range(MAX_HOPS):
        going = (dist > hop) & (dist < FAR)
        after = torch.where(going, follow[here, there], here)
        way.append(bond[here, after] * going[..., None])
        here = after
    return torch.stack(way, dim=2)


def prepare(graph):
    atoms, masked = graph["atoms"].clone(), graph["masked"]
    atoms[masked, 0] = MASK_TYPE
    source, target = graph["edges"]
    n = len(atoms)
    adjacency = torch.zeros(n, n, dtype=torch.bool)
    adjacency[source, target] = True
    bond = torch.zeros(n, n, len(BOND_SIZES), dtype=torch.long)
    bond[source, target] = table_rows(graph["bonds"], BOND_SIZES)
    dist, follow = shortest_paths(adjacency)
    distance = torch.where(dist < FAR, dist.clamp(max=MAX_DIST), MAX_DIST + 1)
    return {
        "atoms": table_rows(atoms, ATOM_SIZES),
        "in_degree": adjacency.sum(0).clamp(max=MAX_DEGREE) + 1,
        "out_degree": adjacency.sum(1).clamp(max=MAX_DEGREE) + 1,
        "distance": distance + 1,
        "bonds": bonds_on_paths(dist, follow, bond),
    }


def collate(graphs):
    """Padded with zeros to the largest graph."""
    items = [prepare(graph) for graph in graphs]
    n = max(len(item["atoms"]) for item in items)
    batch = {}
    for name in items[0]:
        axes = 2 if name in ("distance", "bonds") else 1
        rows = []
        for item in items:
            x = item[name]
            pad = [0, 0] * (x.ndim - axes) + [0, n - len(x)] * axes
            rows.append(F.pad(x, pad))
        batch[name] = torch.stack(rows)
    batch["real"] = batch["atoms"][..., 0] > 0
    return batch


# -------------------------------------------------------------------- model


class NodeFeatures(nn.Module):
    def __init__(self):
        super().__init__()
        self.atom_embed = nn.Embedding(sum(ATOM_SIZES) + 1, DIM, padding_idx=0)
        self.in_degree_embed = nn.Embedding(MAX_DEGREE + 2, DIM, padding_idx=0)
        self.out_degree_embed = nn.Embedding(MAX_DEGREE + 2, DIM, padding_idx=0)
        self.graph_token = nn.Parameter(torch.empty(DIM))

    def forward(self, batch):
        x = self.atom_embed(batch["atoms"]).sum(dim=-2)
        x = x + self.in_degree_embed(batch["in_degree"])
        x = x + self.out_degree_embed(batch["out_degree"])
        token = self.graph_token.expand(len(x), 1, -1)
        return torch.cat([token, x], dim=1)


class AttentionBias(nn.Module):
    """For each head, from the distance of two nodes and the bonds between them."""

    def __init__(self):
        super().__init__()
        self.distance_embed = nn.Embedding(MAX_DIST + 3, HEADS, padding_idx=0)
        self.bond_embed = nn.Embedding(sum(BOND_SIZES) + 1, HEADS, padding_idx=0)
        self.hop_weight = nn.Parameter(torch.empty(MAX_HOPS, HEADS, HEADS))
        self.virtual_distance = nn.Parameter(torch.empty(HEADS))

    def forward(self, batch):
        """(graphs, heads, 1 + nodes, 1 + nodes)"""
        distance, bonds = batch["distance"], batch["bonds"]
        hops = (bonds[..., 0] > 0).sum(dim=-1, keepdim=True).clamp(min=1)
        bond = self.bond_embed(bonds).mean(dim=-2)
        way = torch.einsum("bijpk,pkh->bijh", bond, self.hop_weight) / hops
        bias = F.pad(self.distance_embed(distance) + way, (0, 0, 1, 0, 1, 0))
        bias[:, 1:, 0] += self.virtual_distance
        bias[:, 0, 1:] += self.virtual_distance
        outside = F.pad(~batch["real"], (1, 0))
        bias = bias.masked_fill(outside[:, None, :, None], float("-inf"))
        return bias.permute(0, 3, 1, 2)


class Attention(nn.Module):
    """Softmax forgets a bias of the keys, so there is none."""

    def __init__(self):
        super().__init__()
        self.scale = (DIM // HEADS) ** -0.5
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.q_bias = nn.Parameter(torch.empty(DIM))
        self.v_bias = nn.Parameter(torch.empty(DIM))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x, bias):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, v = (q + self.q_bias) * self.scale, v + self.v_bias
        q, k, v = (y.view(b, n, HEADS, -1).transpose(1, 2) for y in (q, k, v))
        weights = torch.softmax(q @ k.transpose(-1, -2) + bias, dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_norm = nn.LayerNorm(DIM)
        self.attn = Attention()
        self.ffn_norm = nn.LayerNorm(DIM)
        self.fc1 = nn.Linear(DIM, FFN)
        self.fc2 = nn.Linear(FFN, DIM)

    def forward(self, x, bias):
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.fc2(F.gelu(self.fc1(self.ffn_norm(x))))


class Graphormer(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = NodeFeatures()
        self.bias = AttentionBias()
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(DIM)
        self.value_hidden = nn.Linear(DIM, DIM)
        self.value_out = nn.Linear(DIM, 1)
        self.atom_hidden = nn.Linear(DIM, DIM)
        self.atom_norm = nn.LayerNorm(DIM)
        self.atom_bias = nn.Parameter(torch.empty(ATOM_TYPES))

    def forward(self, batch):
        x, bias = self.features(batch), self.bias(batch)
        for layer in self.layers:
            x = layer(x, bias)
        x = self.norm(x)

        value = self.value_out(F.gelu(self.value_hidden(x[:, 0]))).squeeze(-1)

        nodes = x[:, 1:][batch["real"]]
        nodes = self.atom_norm(F.gelu(self.atom_hidden(nodes)))
        types = self.features.atom_embed.weight[1 : 1 + ATOM_TYPES]
        return {"value": value, "atoms": F.linear(nodes, types, self.atom_bias)}


def model():
    torch.manual_seed(2719)
    net = Graphormer()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.endswith("norm.weight"):
                p.uniform_(0.6, 1.4)
            elif name.startswith("bias."):
                p.normal_(0, 0.8)
            elif "embed" in name or name.endswith("graph_token"):
                p.normal_(0, 0.4)
            elif p.ndim == 1:
                p.normal_(0, 0.2)
            else:
                nn.init.xavier_uniform_(p)
        for module in net.modules():
            if isinstance(module, nn.Embedding):
                module.weight[0] = 0
        for layer in net.layers:
            layer.attn.qkv.weight.mul_(1.5)
    return net


def batches():
    """Chains with twigs, rings of three or five atoms, dative bonds of one way, and ions."""
    generator = torch.Generator().manual_seed(2791)

    def draw(high):
        return int(torch.randint(0, high, (), generator=generator))

    def molecule(chain, rings, ion, hidden):
        bonds = []  # source, target, type, stereo
        count = 1
        for i in range(1, chain):
            bonds.append((max(0, i - 1 - draw(3) // 2), i, draw(3), draw(3)))
            count += 1
        for size in rings:
            ring = [draw(chain), *range(count, count + size - 1)]
            count += size - 1
            bonds += [(a, b, 3, 0) for a, b in zip(ring, ring[1:] + ring[:1])]
        bonds.append((chain - 1, count, 4, 1 + draw(2)))  # from the end to a metal
        count += 1 + ion
        edges, features = [], []
        for a, b, kind, stereo in bonds:
            edges.append((a, b))
            features.append((kind, stereo))
            if kind != 4:
                edges.append((b, a))
                features.append((kind, (3 - stereo) % 3))
        order = torch.randperm(count, generator=generator)
        atoms = torch.stack(
            [
                (torch.rand(count, generator=generator) ** 1.5 * 11).long(),
                torch.randint(0, 5, (count,), generator=generator),
                torch.randint(0, 4, (count,), generator=generator),
            ],
            dim=1,
        )
        masked = torch.zeros(count, dtype=torch.bool)
        masked[torch.randperm(count, generator=generator)[:hidden]] = True
        return {
            "atoms": atoms,
            "edges": order[torch.tensor(edges)].T.contiguous(),
            "bonds": torch.tensor(features),
            "masked": masked,
        }

    made = []
    for kinds in (
        ((5, (3,), 0, 2), (8, (), 1, 3), (2, (), 0, 0), (4, (5,), 0, 1)),
        ((9, (), 0, 1), (3, (5,), 1, 4), (4, (3,), 0, 0)),
        ((3, (), 0, 1), (6, (5,), 0, 3), (9, (), 1, 0), (4, (3,), 0, 2)),
    ):
        graphs = [molecule(*kind) for kind in kinds]
        own = torch.linspace(-0.6, 0.9, 11)
        sums = torch.stack([own[graph["atoms"][:, 0]].sum() for graph in graphs])
        target = 5 + sums + 0.8 * torch.randn(len(graphs), generator=generator)
        made.append({"graphs": graphs, "target": target})
    return made


# ----------------------------------------------------------------- training


def forward(net, batch):
    return net(collate(batch["graphs"]))


def loss(output, batch):
    target = (batch["target"] - TARGET_MEAN) / TARGET_STD
    value_loss = F.l1_loss(output["value"], target)
    masked = torch.cat([graph["masked"] for graph in batch["graphs"]])
    types = torch.cat([graph["atoms"][:, 0] for graph in batch["graphs"]])
    atom_loss = F.cross_entropy(output["atoms"][masked], types[masked])
    return value_loss + ATOM_WEIGHT * atom_loss


class PolynomialAdamW(torch.optim.AdamW):
    """Clips by the norm; the rate rises in a line and falls as a power."""

    done = 0

    def rate(self):
        count = self.done + 1
        if count <= WARMUP:
            return PEAK_LR * count / WARMUP
        left = max(0.0, 1 - (count - WARMUP) / (TOTAL_STEPS - WARMUP))
        return END_LR + (PEAK_LR - END_LR) * left**POWER

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = self.rate()
        self.done += 1
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        return super().step(closure)


def optimizer(net):
    """Matrices decay; tables of embeddings don't."""
    decay, rest = [], []
    for name, p in net.named_parameters():
        (decay if p.ndim > 1 and "embed" not in name else rest).append(p)
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return PolynomialAdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98), eps=1e-6)
