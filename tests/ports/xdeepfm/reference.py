"""A small xDeepFM with a gated low-rank cross network: whether a film will be clicked."""

import math

import torch
from torch import nn
from torch.nn import functional as F

FIELDS = ("user", "item", "city", "device", "hour")
BUCKETS = (41, 61, 13, 7, 24)
GENRE_BUCKETS = 19
MAX_GENRES = 5
NUMBERS = 4
DIM = 8
CIN_SIZES = (16, 12)
CROSS_LAYERS, EXPERTS, RANK = 2, 3, 8
DEEP_SIZES = (48, 32, 24)
BN_EPS, BN_MOMENTUM = 1e-3, 0.05
NUMBER_LIMIT = 2.0
POS_WEIGHT, CALIBRATION, L2 = 2.0, 0.3, 0.02
TABLE_LR, DENSE_LR = 2e-2, 5e-3
BETAS, ADAM_EPS = (0.9, 0.99), 1e-3
CLIP_NORM = 0.5


def hash_ids(raw, field, buckets):
    """Spread raw ids over 1 .. buckets - 1; what is missing is 0."""
    mixed = (raw * 2654435761 + 40503 * (field + 1)) % 2**32
    mixed = mixed ^ (mixed >> 15)
    return torch.where(raw < 0, 0, 1 + mixed % (buckets - 1))


class Features(nn.Module):
    """Rows of one table for all fields; a vector per number."""

    def __init__(self):
        super().__init__()
        sizes = torch.tensor((*BUCKETS, GENRE_BUCKETS))
        self.register_buffer("offsets", sizes.cumsum(0) - sizes)
        self.embedding = nn.Embedding(int(sizes.sum()), DIM)
        self.first_order = nn.Embedding(int(sizes.sum()), 1)
        self.number_vectors = nn.Parameter(torch.empty(NUMBERS, DIM))
        self.register_buffer("number_mean", torch.tensor([2.1, 0.9, 4.0, 1.4]))
        self.register_buffer("number_std", torch.tensor([1.2, 0.7, 1.6, 0.5]))

    def standardize(self, numbers):
        logs = torch.log1p(numbers.clamp(min=0))
        scaled = (logs - self.number_mean) / self.number_std
        scaled = scaled.clamp(-NUMBER_LIMIT, NUMBER_LIMIT)
        return torch.where(numbers < 0, 0.0, scaled)

    def look_up(self, table, ids, genres, mask):
        single = table(ids + self.offsets[:-1])
        several = table(genres + self.offsets[-1]) * mask[:, :, None]
        pooled = several.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        return torch.cat([single, pooled[:, None]], dim=1)

    def forward(self, ids, genres, lengths, numbers):
        mask = (torch.arange(MAX_GENRES) < lengths[:, None]).float()
        embedded = self.look_up(self.embedding, ids, genres, mask)
        weights = self.look_up(self.first_order, ids, genres, mask)
        return embedded, weights.squeeze(-1), self.standardize(numbers)


class FactorizationMachine(nn.Module):
    def forward(self, vectors):
        square_of_sum = vectors.sum(1).square()
        sum_of_squares = vectors.square().sum(1)
        return 0.5 * (square_of_sum - sum_of_squares).sum(1)


class CompressedInteraction(nn.Module):
    """Half of each layer but the last goes on to the next; the rest goes out."""

    def __init__(self, fields, sizes):
        super().__init__()
        self.convs = nn.ModuleList()
        hidden, direct = fields, 0
        for i, size in enumerate(sizes):
            self.convs.append(nn.Conv1d(hidden * fields, size, 1))
            hidden = size // 2
            direct += size if i == len(sizes) - 1 else size - hidden
        self.out = nn.Linear(direct, 1, bias=False)

    def forward(self, x0):
        hidden, results = x0, []
        for i, conv in enumerate(self.convs):
            outer = torch.einsum("bhd,bmd->bhmd", hidden, x0).flatten(1, 2)
            h = F.relu(conv(outer))
            if i < len(self.convs) - 1:
                hidden, h = h.chunk(2, dim=1)
            results.append(h)
        pooled = torch.cat(results, dim=1).sum(-1)
        return self.out(pooled).squeeze(1)


class LowRankCross(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.v = nn.Parameter(torch.empty(EXPERTS, width, RANK))
        self.c = nn.Parameter(torch.empty(EXPERTS, RANK, RANK))
        self.u = nn.Parameter(torch.empty(EXPERTS, RANK, width))
        self.bias = nn.Parameter(torch.empty(width))
        self.gate = nn.Linear(width, EXPERTS)

    def forward(self, x0, x):
        low = torch.tanh(torch.einsum("bi,eir->ber", x, self.v))
        low = torch.tanh(torch.einsum("ber,ers->bes", low, self.c))
        high = torch.einsum("bes,esi->bei", low, self.u) + self.bias
        share = F.softmax(self.gate(x), dim=-1)
        return x + (share[:, :, None] * x0[:, None] * high).sum(1)


class Tower(nn.Sequential):
    def __init__(self, width, sizes):
        layers = []
        for size in sizes:
            layers.append(nn.Linear(width, size, bias=False))
            layers.append(nn.BatchNorm1d(size, eps=BN_EPS, momentum=BN_MOMENTUM))
            layers.append(nn.PReLU(size))
            width = size
        super().__init__(*layers)


class XDeepFM(nn.Module):
    def __init__(self):
        super().__init__()
        fields = len(FIELDS) + 1
        width = fields * DIM + NUMBERS
        self.features = Features()
        self.linear = nn.Linear(NUMBERS, 1)
        self.fm = FactorizationMachine()
        self.cin = CompressedInteraction(fields + NUMBERS, CIN_SIZES)
        self.cross = nn.ModuleList(LowRankCross(width) for _ in range(CROSS_LAYERS))
        self.deep = Tower(width, DEEP_SIZES)
        self.head = nn.Linear(width + DEEP_SIZES[-1], 1, bias=False)

    def forward(self, ids, genres, lengths, numbers):
        embedded, weights, numbers = self.features(ids, genres, lengths, numbers)
        number_vectors = numbers[:, :, None] * self.features.number_vectors
        vectors = torch.cat([embedded, number_vectors], dim=1)
        first_order = weights.sum(1) + self.linear(numbers).squeeze(1)

        x0 = torch.cat([embedded.flatten(1), numbers], dim=1)
        crossed = x0
        for layer in self.cross:
            crossed = layer(x0, crossed)
        stacked = torch.cat([crossed, self.deep(x0)], dim=1)
        logit = (
            first_order
            + self.fm(vectors)
            + self.cin(vectors)
            + self.head(stacked).squeeze(1)
        )
        return {"logit": logit, "embedded": embedded}


def model():
    """As after some training: scales, slopes and shifts are off their first values."""
    torch.manual_seed(4101)
    net = XDeepFM()
    with torch.no_grad():
        net.features.embedding.weight.normal_(0, 0.35)
        net.features.first_order.weight.normal_(0, 0.3)
        net.features.number_vectors.normal_(0, 0.3)
        for conv in net.cin.convs:
            conv.weight.normal_(0, 0.2)
            conv.bias.normal_(0, 0.1)
        for layer in net.cross:
            layer.v.normal_(0, 0.3)
            layer.c.normal_(0, 0.5)
            layer.u.normal_(0, 0.3)
            layer.bias.normal_(0, 0.2)
        for module in net.deep:
            if isinstance(module, nn.BatchNorm1d):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            if isinstance(module, nn.PReLU):
                module.weight.uniform_(0.05, 0.45)
    return net


def batches():
    """Impressions with ids of any size; -1 is missing, genres are padded with 0."""
    generator = torch.Generator().manual_seed(4102)
    made = []
    for size in (28, 22):
        raw = torch.randint(0, 900_000, (size, 5), generator=generator)
        raw[:, 3] %= 9
        raw[:, 4] %= 24
        absent = torch.rand(size, 5, generator=generator) < 0.1
        lengths = torch.randint(0, 6, (size,), generator=generator)
        genres = torch.randint(0, 300, (size, 5), generator=generator)
        genres = genres * (torch.arange(5) < lengths[:, None])
        scale = torch.tensor([1.2, 0.7, 1.6, 0.5])
        logs = torch.randn(size, 4, generator=generator) * scale
        numbers = torch.expm1((logs + torch.tensor([2.1, 0.9, 4.0, 1.4])).clamp(min=0))
        unknown = torch.rand(size, 4, generator=generator) < 0.12
        chance = torch.sigmoid(0.8 * logs[:, 0] - 0.6 + 0.4 * (raw[:, 4] > 16))
        label = torch.rand(size, generator=generator) < chance
        made.append(
            {
                "ids": raw.masked_fill(absent, -1),
                "genres": genres,
                "genre_count": lengths,
                "numbers": numbers.masked_fill(unknown, -1.0),
                "label": label.float(),
                "weight": 0.4 + 1.6 * torch.rand(size, generator=generator),
            }
        )
    return made


def forward(net, batch):
    raw = batch["ids"]
    columns = [hash_ids(raw[:, i], i, n) for i, n in enumerate(BUCKETS)]
    genres = hash_ids(batch["genres"], len(FIELDS), GENRE_BUCKETS)
    ids = torch.stack(columns, dim=1)
    return net(ids, genres, batch["genre_count"], batch["numbers"])


def loss(output, batch):
    logit, label, weight = output["logit"], batch["label"], batch["weight"]
    losses = F.binary_cross_entropy_with_logits(
        logit, label, pos_weight=torch.tensor(POS_WEIGHT), reduction="none"
    )
    click_loss = (weight * losses).sum() / weight.sum()

    # Positives count more than they are: it comes off before the rates are compared.
    chance = torch.sigmoid(logit - math.log(POS_WEIGHT))
    calibration = torch.log((weight * chance).sum() / (weight * label).sum()).square()

    penalty = 0.5 * output["embedded"].square().sum(dim=(1, 2)).mean()
    return click_loss + CALIBRATION * calibration + L2 * penalty


class ClippedAdam(torch.optim.Adam):
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, CLIP_NORM)
        return super().step(closure)


def optimizer(net):
    """Tables go faster than the rest."""
    tables = [net.features.embedding.weight, net.features.first_order.weight]
    dense = [p for p in net.parameters() if all(p is not table for table in tables)]
    groups = [
        {"params": tables, "lr": TABLE_LR},
        {"params": dense, "lr": DENSE_LR},
    ]
    return ClippedAdam(groups, betas=BETAS, eps=ADAM_EPS)
