"""Embeddings and numbers to two outputs of very different size: a class and a price near 5500."""

import torch
from torch import nn


class TabularModel(nn.Module):
    def __init__(self, cardinalities=(12, 7, 30), numbers=5, hidden=64):
        super().__init__()
        self.embeds = nn.ModuleList(
            [nn.Embedding(c, min(16, (c + 1) // 2)) for c in cardinalities]
        )
        width = sum(e.embedding_dim for e in self.embeds)
        self.bn_cont = nn.BatchNorm1d(numbers)
        self.layers = nn.Sequential(
            nn.Linear(width + numbers, hidden),
            nn.ReLU(),
            nn.BatchNorm1d(hidden),
            nn.Dropout(0.05),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
        )
        self.cls = nn.Linear(hidden, 3)
        self.price = nn.Linear(hidden, 1)

    def forward(self, x_cat, x_cont):
        x = torch.cat([e(x_cat[:, i]) for i, e in enumerate(self.embeds)], 1)
        x = self.layers(torch.cat([x, self.bn_cont(x_cont)], 1))
        return {"cls": self.cls(x), "price": self.price(x).squeeze(1) * 1000 + 5500}


def flats(count, seed):
    """Columns of town, kind and year, five measures of uneven scale; class and price."""
    g = torch.Generator().manual_seed(seed)
    cat = torch.stack(
        [torch.randint(0, c, (count,), generator=g) for c in (12, 7, 30)], 1
    )
    scale = torch.tensor([1.0, 30.0, 0.01, 5.0, 1000.0])
    cont = torch.randn(count, 5, generator=g)
    worth = cat[:, 0] / 6 + cont[:, 0] * (cat[:, 1] - 3) / 3 + cont[:, 4]
    price = 5500 + 400 * worth
    label = (price > 5000).long() + (price > 6000).long()
    return {"x_cat": cat, "x_cont": cont * scale + scale}, (label, price)


def model():
    torch.manual_seed(0)
    net = TabularModel()
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    for step in range(150):
        batch, (label, price) = flats(64, 100 + step)
        output = net(**batch)
        error = nn.functional.cross_entropy(output["cls"], label)
        error = error + nn.functional.l1_loss(output["price"], price) / 300
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    return net.eval()


def batches():
    return [flats(32, seed)[0] for seed in range(8)]


def held_out():
    return [flats(32, seed)[0] for seed in range(50, 54)]
