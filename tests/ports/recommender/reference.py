"""Will a shown item be clicked: numbers and bags of categories, their dots and crosses."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 8
ROWS = {"history": 50, "item": 40, "tags": 30}


class Cross(nn.Module):
    """Low-rank cross: first * (U V x + b) + x."""

    def __init__(self, width, rank):
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width)

    def forward(self, first, x):
        return first * self.up(self.down(x)) + x


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, WIDTH), nn.ReLU()
        )
        self.history = nn.EmbeddingBag(ROWS["history"], WIDTH, mode="sum")
        self.item = nn.Embedding(ROWS["item"], WIDTH)
        self.tags = nn.EmbeddingBag(ROWS["tags"], WIDTH, mode="mean")
        width = 4 * WIDTH + 6
        self.crosses = nn.ModuleList([Cross(width, 5) for _ in range(2)])
        self.top = nn.Sequential(
            nn.Linear(width, 20), nn.ReLU(), nn.Linear(20, 12), nn.ReLU()
        )
        self.last = nn.Linear(width + 12, 1)

    def forward(self, batch):
        numbers = self.bottom(torch.log1p(batch["counts"]))
        history = self.history(
            batch["history"],
            batch["history_offsets"],
            per_sample_weights=batch["history_weights"].to(numbers.dtype),
        )
        tags = self.tags(batch["tags"], batch["tags_offsets"])
        vectors = torch.stack([numbers, history, self.item(batch["item"]), tags], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))
        row, column = torch.tril_indices(4, 4, offset=-1)
        first = torch.cat([vectors.flatten(1), dots[:, row, column]], dim=1)
        crossed = first
        for cross in self.crosses:
            crossed = cross(first, crossed)
        both = torch.cat([crossed, self.top(first)], dim=1)
        return self.last(both).squeeze(1)


def model():
    torch.manual_seed(310)
    net = Clicks()
    with torch.no_grad():
        for table in (net.history, net.item, net.tags):
            table.weight.normal_(0, 0.5)
    return net


def batches():
    generator = torch.Generator().manual_seed(311)
    counts = torch.rand(8, 6, generator=generator) * 9
    lengths = torch.tensor([3, 1, 4, 2, 2, 5, 1, 3])
    tag_lengths = torch.tensor([2, 3, 1, 4, 2, 1, 3, 2])
    return [
        {
            "counts": counts,
            "history": torch.randint(0, 50, (21,), generator=generator),
            "history_offsets": lengths.cumsum(0) - lengths,
            "history_weights": torch.rand(21, generator=generator) + 0.2,
            "item": torch.randint(0, 40, (8,), generator=generator),
            "tags": torch.randint(0, 30, (18,), generator=generator),
            "tags_offsets": tag_lengths.cumsum(0) - tag_lengths,
            "clicked": torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1]),
            "seen": torch.rand(8, generator=generator) + 0.5,
        }
    ]


def forward(net, batch):
    return net(batch)


def loss(output, batch):
    return F.binary_cross_entropy_with_logits(
        output,
        batch["clicked"].to(output.dtype),
        weight=batch["seen"].to(output.dtype),
        pos_weight=torch.tensor(2.5, dtype=output.dtype),
    )


def optimizer(net):
    return torch.optim.Adagrad(
        net.parameters(), lr=0.02, initial_accumulator_value=0.01
    )
