"""A small DLRM with a DCN-Mix cross network: bags of ids, counts, pairs, and a top MLP."""

import torch
from torch import nn
from torch.nn import functional as F

COUNTS, DIM = 7, 8
#: Name of a feature -> rows of its table, and how its bags are reduced.
TABLES = {
    "genres": (19, "mean"),
    "history": (41, "sum"),
    "tags": (23, "mean"),
    "device": (6, "sum"),
    "queries": (29, "sum"),
}
FIELDS = 1 + len(TABLES)
BOTTOM, TOP = (24, DIM), (32, 16)
CROSS_LAYERS, EXPERTS, RANK = 3, 2, 6
HASH_FACTOR, HASH_SHIFT = 31, 7
HALF_LIFE = 5.0
POS_WEIGHT, POSITION_POWER, MAX_WEIGHT = 2.5, 0.7, 3.0
TABLE_LR, TABLE_EPS, ACCUMULATOR = 0.05, 1e-8, 0.1
LR, BETAS, EPS = 5e-3, (0.9, 0.99), 1e-7
WARMUP = 4


class BottomMLP(nn.Module):
    """The first layer has no bias: the norm forgets it."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(COUNTS, BOTTOM[0], bias=False)
        self.bn = nn.BatchNorm1d(BOTTOM[0])
        self.fc2 = nn.Linear(BOTTOM[0], BOTTOM[1])

    def forward(self, x):
        x = F.relu(self.bn(self.fc1(x)))
        return F.relu(self.fc2(x))


class CrossMix(nn.Module):
    """Low-rank experts and a gate."""

    def __init__(self, dim):
        super().__init__()
        self.v = nn.Parameter(torch.empty(EXPERTS, RANK, dim))
        self.c = nn.Parameter(torch.empty(EXPERTS, RANK, RANK))
        self.u = nn.Parameter(torch.empty(EXPERTS, dim, RANK))
        self.bias = nn.Parameter(torch.empty(dim))
        self.gate = nn.Linear(dim, EXPERTS, bias=False)

    def forward(self, x0, x):
        outs = []
        for v, c, u in zip(self.v, self.c, self.u):
            h = torch.tanh(F.linear(x, v))
            h = torch.tanh(F.linear(h, c))
            outs.append(x0 * (F.linear(h, u) + self.bias))
        gates = self.gate(x).softmax(dim=1)
        mixed = (torch.stack(outs, dim=2) @ gates.unsqueeze(2)).squeeze(2)
        return mixed + x


class TopMLP(nn.Module):
    def __init__(self, inp):
        super().__init__()
        sizes = (inp, *TOP)
        self.hidden = nn.ModuleList(
            [nn.Linear(a, b) for a, b in zip(sizes[:-1], sizes[1:])]
        )
        self.out = nn.Linear(TOP[-1], 1)

    def forward(self, x):
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.out(x).squeeze(1)


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count_mean", torch.zeros(COUNTS))
        self.register_buffer("count_std", torch.ones(COUNTS))
        self.tables = nn.ModuleDict(
            {
                name: nn.EmbeddingBag(
                    rows, DIM, mode=mode, padding_idx=0 if name == "tags" else None
                )
                for name, (rows, mode) in TABLES.items()
            }
        )
        self.bottom = BottomMLP()
        self.cross = nn.ModuleList(
            [CrossMix(FIELDS * DIM) for _ in range(CROSS_LAYERS)]
        )
        rows, columns = torch.tril_indices(FIELDS, FIELDS, offset=-1)
        self.rows, self.columns = rows, columns
        self.top = TopMLP(DIM + len(rows) + FIELDS * DIM)

    def bags(self, batch):
        history = batch["history"]
        hashed = history["ids"] * HASH_FACTOR + HASH_SHIFT
        recency = 0.5 ** (history["age"] / HALF_LIFE)
        return [
            self.tables["genres"](batch["genres"]["ids"], batch["genres"]["offsets"]),
            self.tables["history"](
                hashed % TABLES["history"][0],
                history["offsets"],
                per_sample_weights=recency,
            ),
            self.tables["tags"](batch["tags"]),
            self.tables["device"](batch["device"].unsqueeze(1)),
            self.tables["queries"](
                batch["queries"]["ids"], batch["queries"]["offsets"]
            ),
        ]

    def forward(self, batch):
        counts = torch.log1p(batch["counts"].clamp(min=0))
        dense = self.bottom((counts - self.count_mean) / self.count_std)
        fields = torch.stack([dense, *self.bags(batch)], dim=1)
        pairs = torch.bmm(fields, fields.transpose(1, 2))
        pairs = pairs[:, self.rows, self.columns]
        x0 = fields.flatten(1)
        x = x0
        for layer in self.cross:
            x = layer(x0, x)
        return self.top(torch.cat([dense, pairs, x], dim=1))


def model():
    torch.manual_seed(1906)
    net = DLRM()
    with torch.no_grad():
        net.count_mean.uniform_(0.8, 1.6)
        net.count_std.uniform_(0.6, 1.5)
        for module in net.modules():
            if isinstance(module, nn.EmbeddingBag):
                module.weight.normal_(0, 0.5)
            elif isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight)
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.BatchNorm1d):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.3)
            elif isinstance(module, CrossMix):
                for weight in (module.v, module.c, module.u):
                    weight.normal_(0, 1.2 * weight.shape[2] ** -0.5)
                module.bias.normal_(0, 0.3)
        net.tables["tags"].weight[0] = 0.0
    return net


def batches():
    """Clicks that depend on a few of the ids; some bags are empty, -1 is a missing count."""
    generator = torch.Generator().manual_seed(1907)

    def ragged(sizes, high):
        ids = torch.randint(0, high, (int(sizes.sum()),), generator=generator)
        return {"ids": ids, "offsets": sizes.cumsum(0) - sizes}

    made = []
    for size in (14, 12):
        counts = torch.rand(size, 7, generator=generator) ** 3 * 30
        missing = torch.rand(size, 7, generator=generator) < 0.15
        bags = torch.randint(0, 5, (3, size), generator=generator)
        bags[0, 2], bags[1, 5], bags[2, 0] = 0, 0, 0
        genres = ragged(bags[0], 19)
        history = ragged(bags[1] + 1, 100_000)
        queries = ragged(bags[2], 29)
        length = len(history["ids"])
        history["age"] = torch.randint(0, 15, (length,), generator=generator).float()
        tags = torch.randint(1, 23, (size, 5), generator=generator)
        kept = torch.randint(0, 6, (size, 1), generator=generator)
        device = torch.randint(0, 6, (size,), generator=generator)
        chance = 0.25 + 0.5 * (device > 2).float()
        made.append(
            {
                "counts": counts.floor().masked_fill(missing, -1.0),
                "genres": genres,
                "history": history,
                "tags": tags * (torch.arange(5) < kept),
                "device": device,
                "queries": queries,
                "position": torch.randint(1, 9, (size,), generator=generator),
                "click": (torch.rand(size, generator=generator) < chance).float(),
            }
        )
    return made


def forward(net, batch):
    return net(batch)


def loss(output, batch):
    """Clicks far down count for more, as fewer people look there."""
    weight = (batch["position"].float() ** POSITION_POWER).clamp(max=MAX_WEIGHT)
    total = F.binary_cross_entropy_with_logits(
        output,
        batch["click"],
        weight,
        reduction="sum",
        pos_weight=torch.tensor(POS_WEIGHT),
    )
    return total / weight.sum()


class TablesAndRest(torch.optim.Optimizer):
    """Adagrad for the tables, Adam for the rest; both rates rise in a line."""

    def __init__(self, net):
        tables = list(net.tables.parameters())
        known = {id(p) for p in tables}
        rest = [p for p in net.parameters() if id(p) not in known]
        super().__init__([{"params": tables}, {"params": rest}], {})
        self.adagrad = torch.optim.Adagrad(
            tables, TABLE_LR, initial_accumulator_value=ACCUMULATOR, eps=TABLE_EPS
        )
        self.adam = torch.optim.Adam(rest, LR, betas=BETAS, eps=EPS)
        self.done = 0

    def step(self, closure=None):
        self.done += 1
        factor = min(1.0, self.done / WARMUP)
        self.adagrad.param_groups[0]["lr"] = TABLE_LR * factor
        self.adam.param_groups[0]["lr"] = LR * factor
        self.adagrad.step()
        self.adam.step()


def optimizer(net):
    return TablesAndRest(net)
