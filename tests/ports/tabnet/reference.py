"""A small TabNet: sparse masks over columns, ghost batch norm, shared and own GLU blocks."""

import math

import torch
from torch import nn
from torch.nn import functional as F

NUM_CLASSES = 3
MEDIANS = (38.0, 10.0, 12.0, 0.0, 0.0, 40.0)
SKEWED = (3, 4)
ROWS, WIDTHS = (7, 5, 11), (3, 2, 4)
COLUMNS = len(MEDIANS) + len(ROWS)
FEATURES = len(MEDIANS) + sum(WIDTHS)
N_D, N_A, N_STEPS = 8, 6, 3
N_SHARED, N_INDEPENDENT = 2, 2
GAMMA, VIRTUAL_BATCH = 1.3, 12
BN_EPS, INITIAL_MOMENTUM, GHOST_MOMENTUM = 1e-3, 0.01, 0.02
ENTROPY_EPS, SPARSITY = 1e-5, 0.05
CLASS_WEIGHTS = (0.6, 1.1, 1.9)
LR, ADAM_EPS, DECAY_RATE, DECAY_STEPS = 5e-3, 1e-3, 0.8, 4


def sparsemax(z):
    """Euclidean projection of each row onto the simplex."""
    ordered = z.sort(dim=-1, descending=True).values
    above = ordered.cumsum(dim=-1) - 1
    k = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype)
    size = (k * ordered > above).sum(dim=-1, keepdim=True)
    tau = above.gather(-1, size - 1) / size
    return F.relu(z - tau)


class GhostBatchNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.bn = nn.BatchNorm1d(dim, eps=BN_EPS, momentum=GHOST_MOMENTUM)

    def forward(self, x):
        chunks = x.chunk(math.ceil(len(x) / VIRTUAL_BATCH))
        return torch.cat([self.bn(chunk) for chunk in chunks])


class FeatureTransformer(nn.Module):
    """The first layers are shared by all steps, but not their norms."""

    def __init__(self):
        super().__init__()
        dim = N_D + N_A
        self.fcs = nn.ModuleList(
            [nn.Linear(dim, 2 * dim, bias=False) for _ in range(N_INDEPENDENT)]
        )
        self.norms = nn.ModuleList(
            [GhostBatchNorm(2 * dim) for _ in range(N_SHARED + N_INDEPENDENT)]
        )

    def forward(self, x, shared):
        for i, (fc, norm) in enumerate(zip([*shared, *self.fcs], self.norms)):
            out = F.glu(norm(fc(x)), dim=-1)
            x = (x + out) * math.sqrt(0.5) if i > 0 else out
        return x


class AttentiveTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(N_A, COLUMNS, bias=False)
        self.norm = GhostBatchNorm(COLUMNS)

    def forward(self, prior, att):
        return sparsemax(self.norm(self.fc(att)) * prior)


class Embedder(nn.Module):
    """Continuous columns come first, then the embeddings of the categories."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(r, w) for r, w in zip(ROWS, WIDTHS)])

    def forward(self, numeric, category):
        embedded = [table(c) for table, c in zip(self.tables, category.unbind(1))]
        return torch.cat([numeric, *embedded], dim=1)


def group_matrix():
    """Columns to features: the features of an embedding share what its column has."""
    widths = [1] * len(MEDIANS) + list(WIDTHS)
    rows = torch.arange(COLUMNS).repeat_interleave(torch.tensor(widths))
    return F.one_hot(rows, COLUMNS).T / torch.tensor(widths).unsqueeze(1)


class TabNet(nn.Module):
    def __init__(self):
        super().__init__()
        dim = N_D + N_A
        self.embedder = Embedder()
        self.initial_bn = nn.BatchNorm1d(
            FEATURES, eps=BN_EPS, momentum=INITIAL_MOMENTUM
        )
        self.shared = nn.ModuleList(
            [
                nn.Linear(FEATURES if i == 0 else dim, 2 * dim, bias=False)
                for i in range(N_SHARED)
            ]
        )
        self.splitter = FeatureTransformer()
        self.features = nn.ModuleList([FeatureTransformer() for _ in range(N_STEPS)])
        self.attentive = nn.ModuleList([AttentiveTransformer() for _ in range(N_STEPS)])
        self.head = nn.Linear(N_D, NUM_CLASSES)
        self.register_buffer("groups", group_matrix())

    def forward(self, numeric, category):
        x = self.initial_bn(self.embedder(numeric, category))
        prior = torch.ones(len(x), COLUMNS)
        att = self.splitter(x, self.shared)[:, N_D:]
        decision: torch.Tensor | float = 0.0
        entropy: torch.Tensor | float = 0.0
        for attentive, features in zip(self.attentive, self.features):
            mask = attentive(prior, att)
            plogp = mask * torch.log(mask + ENTROPY_EPS)
            entropy = entropy - plogp.sum(dim=1).mean()
            prior = prior * (GAMMA - mask)
            out = features((mask @ self.groups) * x, self.shared)
            decision = decision + F.relu(out[:, :N_D])
            att = out[:, N_D:]
        return {"logits": self.head(decision), "entropy": entropy / N_STEPS}


def model():
    torch.manual_seed(14)
    net = TabNet()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.weight.uniform_(0.6, 1.5)
                module.bias.normal_(0, 0.25)
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 1.5)
                if module.num_features == COLUMNS:
                    module.weight.mul_(0.4)
                    module.bias.mul_(0.5)
                elif module.num_features == 2 * (N_D + N_A):
                    module.bias[N_D + N_A :].add_(1.0)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight, gain=2.0)
                if module.bias is not None:
                    module.bias.normal_(0, 0.3)
    return net


def batches():
    """People: age, schooling, years at work, gains, losses, hours; some is not known.

    Codes of categories that are not in the tables are larger than these.
    """
    generator = torch.Generator().manual_seed(1909)

    def draw(low, high, size):
        return torch.randint(low, high, (size,), generator=generator)

    made = []
    for size in (36, 35):
        noise = torch.randn(size, 6, generator=generator)
        rich = (noise[:, 0] + noise[:, 5]).sigmoid()
        numeric = torch.stack(
            [
                (39 + 12 * noise[:, 0]).clamp(17, 90).round(),
                (10 + 2.5 * noise[:, 1]).clamp(1, 16).round(),
                (14 + 9 * noise[:, 2]).clamp(0, 50).round(),
                (3000 * torch.exp(1.5 * noise[:, 3])) * (noise[:, 4] > -0.2),
                (500 * torch.exp(0.8 * noise[:, 4])) * (noise[:, 3] < 0.3),
                (40 + 10 * noise[:, 5]).clamp(5, 80).round(),
            ],
            dim=1,
        )
        unknown = torch.rand(size, 6, generator=generator) < 0.12
        category = torch.stack([draw(0, 8, size), draw(0, 6, size), draw(0, 13, size)])
        score = 2.2 * rich + 0.15 * category[0] + 0.2 * noise[:, 1]
        made.append(
            {
                "numeric": numeric.masked_fill(unknown, float("nan")),
                "category": category.T.contiguous(),
                "label": (score > 1.3).long() + (score > 2.1).long(),
            }
        )
    return made


def forward(net, batch):
    numeric = batch["numeric"]
    numeric = torch.where(numeric.isnan(), torch.tensor(MEDIANS), numeric)
    skewed = torch.zeros(len(MEDIANS), dtype=torch.bool)
    skewed[list(SKEWED)] = True
    numeric = torch.where(skewed, torch.log1p(numeric), numeric)
    category = batch["category"]
    category = torch.where(category < torch.tensor(ROWS), category, 0)
    return net(numeric, category)


def loss(output, batch):
    weight = torch.tensor(CLASS_WEIGHTS)
    label_loss = F.cross_entropy(output["logits"], batch["label"], weight)
    return label_loss + SPARSITY * output["entropy"]


class DecayedAdam(torch.optim.Adam):
    """The rate falls a little with each step."""

    done = 0

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = LR * DECAY_RATE ** (self.done / DECAY_STEPS)
        self.done += 1
        return super().step(closure)


def optimizer(net):
    return DecayedAdam(net.parameters(), lr=LR, eps=ADAM_EPS)
