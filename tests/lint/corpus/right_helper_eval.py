"""Evaluation hygiene in helpers, decorators and context managers."""
import contextlib
import functools

import torch
import torch.nn as nn
import torch.nn.functional as F


def no_grad_eval(fn):
    @functools.wraps(fn)
    def wrapper(model, *args, **kwargs):
        was_training = model.training
        model.eval()
        with torch.no_grad():
            result = fn(model, *args, **kwargs)
        model.train(was_training)
        return result

    return wrapper


@contextlib.contextmanager
def evaluating(model):
    was_training = model.training
    try:
        model.eval()
        with torch.inference_mode():
            yield model
    finally:
        model.train(was_training)


@no_grad_eval
def validate(model, loader):
    total, hits = 0, 0
    for x, y in loader:
        hits += (model(x).argmax(1) == y).sum().item()
        total += len(y)
    return hits / total


def test(model, loader):
    with evaluating(model) as m:
        losses = [F.cross_entropy(m(x), y) for x, y in loader]
        return torch.stack(losses).mean().item()


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    if not torch.isfinite(loss):
        raise FloatingPointError(f"loss is {loss.item()}")
    loss.backward()
    optimizer.step()
    return loss.detach()


def main(train_loader, valid_loader, test_loader, epochs=10):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for epoch in range(epochs):
        model.train()
        total = torch.zeros(())
        for x, y in train_loader:
            total = total + train_step(model, optimizer, x, y)
        scheduler.step()
        print(f"{epoch} {total.item() / len(train_loader):.4f} {validate(model, valid_loader):.4f}")
    print("test", test(model, test_loader))
