"""DIN: will a shown item be clicked, judged by what of the user's visits is like it."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

USERS, ITEMS, CATEGORIES = 40, 120, 15  # row zero of each table is padding
AGE_EDGES = torch.tensor([18, 25, 35, 45, 55])
EMBED, MAX_VISITS = 8, 10
UNIT, DEEP, NEXT = (24, 12), (40, 20), 16
AUX_WEIGHT, L2 = 0.5, 4e-3
EMBED_LR, EMBED_LR_DECAY, ACCUMULATOR = 0.05, 0.2, 1e-4
DENSE_LR, DECAY_RATE, DECAY_STEPS = 4e-3, 0.5, 3


class Dice(nn.Module):
    """A PReLU whose step is soft and stands at the mean of the batch."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width, eps=1e-8, affine=False)
        self.alpha = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        p = torch.sigmoid(self.norm(x))
        return p * x + (1 - p) * self.alpha * x


class ActivationUnit(nn.Module):
    """How much each visit counts for the shown item."""

    def __init__(self, width):
        super().__init__()
        self.scale = width**-0.5
        self.mlp = nn.Sequential(
            nn.Linear(4 * width, UNIT[0]),
            Dice(UNIT[0]),
            nn.Linear(UNIT[0], UNIT[1]),
            nn.PReLU(UNIT[1]),
            nn.Linear(UNIT[1], 1, bias=False),  # softmax forgets a bias
        )

    def forward(self, query, keys, mask):
        """(b, d), (b, t, d), (b, t) -> (b, d); only real visits enter the norm."""
        query = query.unsqueeze(1).expand_as(keys)
        x = torch.cat([query, keys, query - keys, query * keys], dim=-1)
        scores = self.mlp(x[mask]).squeeze(-1) * self.scale
        logits = keys.new_full(mask.shape, -1e9).masked_scatter(mask, scores)
        weights = logits.softmax(dim=1) * mask
        return (weights.unsqueeze(1) @ keys).squeeze(1)


class DIN(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS + 1, EMBED, padding_idx=0)
        self.age = nn.Embedding(len(AGE_EDGES) + 2, EMBED, padding_idx=0)
        self.hour = nn.Embedding(25, EMBED, padding_idx=0)
        self.item = nn.Embedding(ITEMS + 1, EMBED, padding_idx=0)
        self.category = nn.Embedding(CATEGORIES + 1, EMBED, padding_idx=0)
        self.item_bias = nn.Embedding(ITEMS + 1, 1, padding_idx=0)
        self.register_buffer("category_of", torch.zeros(ITEMS + 1, dtype=torch.long))

        width = 2 * EMBED
        self.attention = ActivationUnit(width)
        self.next_item = nn.Sequential(
            nn.Linear(2 * width, NEXT), nn.Sigmoid(), nn.Linear(NEXT, 1)
        )
        inputs = 3 * EMBED + 4 * width
        self.deep = nn.Sequential(
            nn.BatchNorm1d(inputs),
            nn.Linear(inputs, DEEP[0]),
            Dice(DEEP[0]),
            nn.Linear(DEEP[0], DEEP[1]),
            Dice(DEEP[1]),
            nn.Linear(DEEP[1], 1),
        )

    def describe(self, items):
        categories = self.category_of[items]
        return torch.cat([self.item(items), self.category(categories)], dim=-1)

    def auxiliary(self, keys, negatives, mask):
        """The mean of what was visited so far tells the next visit from a random item."""
        counts = torch.arange(1, keys.shape[1] + 1).view(1, -1, 1)
        state = (keys.cumsum(dim=1) / counts)[:, :-1]
        follows = mask[:, 1:]
        real = self.next_item(torch.cat([state, keys[:, 1:]], dim=-1))[follows]
        drawn = self.next_item(torch.cat([state, negatives[:, 1:]], dim=-1))[follows]
        losses = F.softplus(-real) + F.softplus(drawn)
        return losses.sum() / follows.sum().clamp(min=1)

    def regularization(self, fields):
        """Squares of the rows that the batch has, each row once."""
        squares = [
            getattr(self, name)(ids.unique()).square().sum()
            for name, ids in fields.items()
        ]
        return 0.5 * torch.stack(squares).sum()

    def forward(self, user, age, hour, item, visits, negatives):
        query, keys = self.describe(item), self.describe(visits)
        mask = visits > 0
        interest = self.attention(query, keys, mask)
        length = mask.sum(dim=1, keepdim=True).clamp(min=1)
        mean = keys.sum(dim=1) / length
        profile = [self.user(user), self.age(age), self.hour(hour)]
        x = torch.cat([*profile, query, interest, mean, query * mean], dim=1)
        logit = self.deep(x).squeeze(1) + self.item_bias(item).squeeze(1)

        items = torch.cat([item, visits.flatten(), negatives.flatten()])
        fields = {"user": user, "age": age, "hour": hour, "item": items}
        fields["category"] = self.category_of[items]
        return {
            "logit": logit,
            "aux_loss": self.auxiliary(keys, self.describe(negatives), mask),
            "l2": self.regularization(fields),
        }


def model():
    torch.manual_seed(2108)
    net = DIN()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Embedding):
                module.weight[1:].normal_(0, 0.5)
            elif isinstance(module, nn.Linear):
                module.weight.mul_(1.7)
            elif isinstance(module, Dice):
                module.alpha.uniform_(-0.3, 0.5)
            elif isinstance(module, nn.PReLU):
                module.weight.uniform_(0.05, 0.5)
        net.attention.mlp[-1].weight.mul_(4)
        norm = net.deep[0]
        norm.weight.uniform_(0.6, 1.4)
        norm.bias.normal_(0, 0.2)
        norm.running_mean.normal_(0, 0.2)
        norm.running_var.uniform_(0.5, 1.5)
        net.category_of[1:] = torch.randint(1, CATEGORIES + 1, (ITEMS,))
    return net


def batches():
    """Logs of a shop; visits of all users stand behind each other, the latest last.

    User 0 is a guest, age 0 unknown. Some users come without a visit.
    """
    generator = torch.Generator().manual_seed(2109)

    def draw(low, high, *size):
        return torch.randint(low, high, size, generator=generator)

    made = []
    for lengths in (
        [4, 13, 1, 7, 10, 2, 8, 3, 11, 5],
        [6, 0, 9, 3, 12, 2, 5, 10],
        [2, 7, 14, 1, 5, 8, 0, 4, 10, 3, 6],
    ):
        size, total = len(lengths), sum(lengths)
        user = draw(1, 900_000, size) * (draw(0, 6, size) > 0)
        age = draw(14, 70, size) * (draw(0, 5, size) > 0)
        age[1] = 35
        taste = draw(1, 121, size).repeat_interleave(torch.tensor(lengths))
        item = draw(1, 121, size)
        logit = torch.randn(size, generator=generator) + (item % 3 - 1)
        weight = 0.3 + 1.7 * torch.rand(size, generator=generator)
        weight[3] = 0.0  # a robot
        made.append(
            {
                "user": user,
                "age": age,
                "time": draw(1_500_000_000, 1_600_000_000, size),
                "item": item,
                "visits": (taste + draw(0, 12, total) - 1) % 120 + 1,
                "negatives": draw(1, 121, total),
                "lengths": torch.tensor(lengths),
                "clicked": (logit > 0).float(),
                "weight": weight,
            }
        )
    return made


def padded(values, lengths):
    """The latest visits of each user, zeros behind."""
    rows = values.split(lengths.tolist())
    return pad_sequence([row[-MAX_VISITS:] for row in rows], batch_first=True)


def forward(net, batch):
    user, age = batch["user"], batch["age"]
    return net(
        user=torch.where(user > 0, user % USERS + 1, 0),
        age=torch.where(age > 0, torch.bucketize(age, AGE_EDGES, right=True) + 1, 0),
        hour=batch["time"] // 3600 % 24 + 1,
        item=batch["item"],
        visits=padded(batch["visits"], batch["lengths"]),
        negatives=padded(batch["negatives"], batch["lengths"]),
    )


def loss(output, batch):
    click = F.binary_cross_entropy_with_logits(
        output["logit"], batch["clicked"], weight=batch["weight"]
    )
    return click + AUX_WEIGHT * output["aux_loss"] + L2 * output["l2"]


class DINOptimizer(torch.optim.Optimizer):
    """Adagrad for the tables, Adam for all else; each has its own decay of the rate."""

    def __init__(self, net):
        tables, dense = [], []
        for module in net.modules():
            own = module.parameters(recurse=False)
            (tables if isinstance(module, nn.Embedding) else dense).extend(own)
        super().__init__([{"params": tables}, {"params": dense}], {})
        self.adagrad = torch.optim.Adagrad(
            tables,
            lr=EMBED_LR,
            lr_decay=EMBED_LR_DECAY,
            initial_accumulator_value=ACCUMULATOR,
        )
        self.adam = torch.optim.Adam(dense, lr=DENSE_LR)
        decay = math.log(DECAY_RATE) / DECAY_STEPS
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.adam, lambda step: math.exp(decay * step)
        )

    def step(self, closure=None):
        self.adagrad.step()
        self.adam.step()
        self.scheduler.step()


def optimizer(net):
    return DINOptimizer(net)
