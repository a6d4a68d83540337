"""A recurrent classifier: token and hashed embeddings, a layer of own cells, a layer of ``nn.LSTM``, lengths."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, BUCKETS, LENGTH = 300, 64, 8
State = tuple[Tensor, Tensor]


class Words(nn.Module):
    """Of each id its own vector, and that of its bucket, as fastText has them for what is rare."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.known, self.hashed = (
            nn.Embedding(VOCABULARY, width, padding_idx=0),
            nn.Embedding(BUCKETS, width),
        )

    def index(self, ids: Tensor) -> Tensor:
        return ids.long()

    def bucket(self, ids: Tensor) -> Tensor:
        return (ids * 73856093) % BUCKETS

    def forward(self, ids: Tensor) -> Tensor:
        return self.known(self.index(ids)) + self.hashed(self.bucket(ids))


class Cell(nn.Module):
    """Hochreiter and Schmidhuber's cell with a forget gate; gates in the order input, forget, cell, output."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(inputs, 4 * width), nn.Linear(width, 4 * width)

    def forget(self, f: Tensor) -> Tensor:
        return torch.sigmoid(f + 1.0)

    def keep(self, c: Tensor, i: Tensor, f: Tensor, g: Tensor) -> Tensor:
        return self.forget(f) * c + torch.sigmoid(i) * torch.tanh(g)

    def forward(self, x: Tensor, state: State) -> State:
        i, f, g, o = (self.x(x) + self.h(state[0])).chunk(4, -1)
        c = self.keep(state[1], i, f, g)
        return torch.sigmoid(o) * torch.tanh(c), c


class Lstm(nn.Module):
    """Token ids (batch, length), padded on the right with 0, and their lengths (batch,), to 5 logits."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.words, self.width = Words(width), width
        self.cell, self.dropout = Cell(width, width), nn.Dropout(0.1)
        self.upper = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 5)

    def start(self, x: Tensor) -> State:
        return x.new_zeros(len(x), self.width), x.new_zeros(len(x), self.width)

    def last(self, x: Tensor, lengths: Tensor) -> Tensor:
        return x[torch.arange(len(x)), lengths - 1]

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.words(ids)
        state, states = self.start(x), []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            states.append(state[0])
        self.ended = tuple(s.detach() for s in state)
        above, _ = self.upper(self.dropout(torch.stack(states, 1)))
        return self.head(self.last(above, lengths))


def batch(seed: int, size: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, lengths of 3 to 8, labels."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (size, LENGTH), generator=draw)
    lengths = torch.randint(3, LENGTH + 1, (size,), generator=draw)
    ids[torch.arange(LENGTH) >= lengths[:, None]] = 0
    return ids, lengths, torch.randint(5, (size,), generator=draw)


def loss(model: nn.Module, ids: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(ids, lengths), labels)
