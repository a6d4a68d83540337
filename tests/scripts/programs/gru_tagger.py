"""Tags words by an own GRU in both directions; padding is masked."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

WORDS, TAGS, PAD = 60, 5, 0


class Cell(nn.Module):
    def __init__(self, inside, hidden):
        super().__init__()
        self.x = nn.Linear(inside, 3 * hidden)
        self.h = nn.Linear(hidden, 3 * hidden)

    def forward(self, x, h):
        xr, xz, xn = self.x(x).chunk(3, -1)
        hr, hz, hn = self.h(h).chunk(3, -1)
        reset = torch.sigmoid(xr + hr)
        update = torch.sigmoid(xz + hz)
        new = torch.tanh(xn + reset * hn)
        return (1 - update) * new + update * h


class Tagger(nn.Module):
    def __init__(self, dim=16, hidden=12):
        super().__init__()
        self.words = nn.Embedding(WORDS, dim, padding_idx=PAD)
        self.there = Cell(dim, hidden)
        self.back = Cell(dim, hidden)
        self.norm = nn.LayerNorm(2 * hidden)
        self.out = nn.Linear(2 * hidden, TAGS)

    def scan(self, cell, x, real, order):
        h = x.new_zeros(x.shape[0], cell.h.in_features)
        states = [None] * x.shape[1]
        for t in order:
            fresh = cell(x[:, t], h)
            h = torch.where(real[:, t, None], fresh, h)
            states[t] = h
        return torch.stack(states, 1)

    def forward(self, ids):
        real = ids != PAD
        x = self.words(ids)
        there = self.scan(self.there, x, real, range(ids.shape[1]))
        back = self.scan(self.back, x, real, reversed(range(ids.shape[1])))
        return self.out(self.norm(torch.cat([there, back], -1)))


def sentences(seed, count=12, length=5):
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, WORDS, (count, length))
    lengths = rng.integers(2, length + 1, (count,))
    ids[np.arange(length) >= lengths[:, None]] = PAD
    tags = np.where(ids == PAD, -100, ids % TAGS)
    return ids, tags


def pretrained():
    g = torch.Generator().manual_seed(11)
    state = {}
    for name, value in Tagger().state_dict().items():
        state[name] = value + 0.1 * torch.randn(value.shape, generator=g)
    state["words.weight"][PAD] = 0
    return state


def main():
    torch.manual_seed(1)
    model = Tagger()
    state = pretrained()
    model.load_state_dict(state)
    data = sentences(5, count=24)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for step in range(2):
        rows = np.arange(12 * step, 12 * step + 12)
        ids, tags = (torch.from_numpy(part[rows]) for part in data)
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        schedule.step()
        print(step, float(loss))


if __name__ == "__main__":
    main()
