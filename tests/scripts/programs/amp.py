"""Mixed precision with a loss scaler, gradients gathered over two micro-batches."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

MICRO = 2
torch.manual_seed(4)


class Residual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.wide = nn.Linear(dim, 2 * dim)
        self.back = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.back(F.gelu(self.wide(self.norm(x))))


class Net(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.enter = nn.Linear(10, dim)
        self.blocks = nn.Sequential(Residual(dim), Residual(dim))
        self.leave = nn.Linear(dim, 3)

    def forward(self, x):
        return self.leave(self.blocks(torch.tanh(self.enter(x))))


def table(rows=64):
    rng = np.random.default_rng(77)
    x = 3 * rng.standard_normal((rows, 10)).astype("f4") + 1
    y = (x[:, 0] > x[:, 1]).astype("i8") + (x[:, 2] > 2)
    return x, y


def normalised(x):
    return (x - x.mean(0)) / x.std(0)


x, y = table()
x = normalised(x)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.02)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
order = np.random.default_rng(1).permutation(len(x))
batches = [order[i : i + 8] for i in range(0, len(x), 8)]
for step in range(2):
    optimizer.zero_grad()
    for micro in range(MICRO):
        rows = batches[step * MICRO + micro]
        features, labels = torch.from_numpy(x[rows]), torch.from_numpy(y[rows])
        with torch.autocast("cpu", torch.bfloat16):
            logits = net(features)
        loss = F.cross_entropy(logits.float(), labels) / MICRO
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    print("step", step, "loss", loss.item() * MICRO)
