import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_batches(count):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(5, 1, generator=generator)
    for _ in range(count):
        x = torch.randn(16, 5, generator=generator)
        yield x, x @ weight


def run(epochs=5, steps=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 1)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = OneCycleLR(optimizer, max_lr=5e-2, total_steps=epochs * steps)
    history = []
    for epoch in range(epochs):
        model.train()
        for x, y in make_batches(steps):
            x, y = x.to(DEVICE), y.to(DEVICE)
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            history.append(loss.item())
    return history


losses = run()
