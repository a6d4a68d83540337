import torch
from torch import nn


def step_with(scaler, optimizer, loss, params, max_norm=None):
    if scaler is None:
        loss.backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(params, max_norm)
        optimizer.step()
        return
    scaler.scale(loss).backward()
    if max_norm:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, max_norm)
    scaler.step(optimizer)
    scaler.update()


def fit(model, loader, epochs, fp16=True):
    device = next(model.parameters()).device
    scaler = torch.amp.GradScaler(device.type) if fp16 else None
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4)
    loss_fn = nn.HuberLoss()
    history = []
    for _ in range(epochs):
        epoch_loss = 0.0
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.float16, enabled=fp16):
                loss = loss_fn(model(x), y)
            step_with(scaler, optimizer, loss, model.parameters(), 5.0)
            epoch_loss += loss.detach()
        history.append(epoch_loss.item() / len(loader))
    return history
