from contextlib import nullcontext

import torch
from torch import nn


class Config:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    epochs = 6


def epoch(cfg, model, data, loss_function, optimizer=None):
    """One pass over the data; trains where an optimizer is given."""
    model.train(optimizer is not None)
    total = []
    with nullcontext() if optimizer is not None else torch.no_grad():
        for x, y in data:
            x, y = x.to(cfg.device), y.to(cfg.device)
            out = model(x)
            loss = loss_function(out, y)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            total.append(loss.item())
    return sum(total) / len(total)


torch.manual_seed(0)
cfg = Config()
data = [(torch.randn(16, 4), torch.randint(0, 3, (16,))) for _ in range(4)]
model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3)).to(cfg.device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
loss_function = nn.CrossEntropyLoss()
losses = []
for number in range(cfg.epochs):
    losses.append(epoch(cfg, model, data, loss_function, optimizer))
    scheduler.step(epoch(cfg, model, data, loss_function))
