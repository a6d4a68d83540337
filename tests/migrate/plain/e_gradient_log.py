import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_


def fit(model, batches, epochs, max_norm=None):
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for _ in range(epochs):
        for x, y in batches:
            x = x.to(device)
            y = y.to(device)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()

            # the norm before clipping
            total = sum(p.grad.norm().item() ** 2 for p in model.parameters())
            norms.append(total**0.5)
            if max_norm is not None:
                clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            losses.append(loss.item())
    return losses, norms


torch.manual_seed(0)
batches = [(torch.randn(16, 4), torch.randn(16, 2).mul(0.1).add(2)) for _ in range(4)]
net = nn.Linear(4, 2)
losses, norms = fit(net, batches, 10, max_norm=5.0)
