import torch
from torch import nn


def train(config):
    torch.manual_seed(config["seed"])
    device = torch.device(config["device"])
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 5))
    losses = []
    for step in range(config["steps"]):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for micro in range(config["micro_batches"]):
            x = torch.randn(8, 4, device=device)
            y = x.abs().sum(1, keepdim=True)
            prediction = model(x)
            loss = nn.functional.l1_loss(prediction, y) / config["micro_batches"]
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        warmup.step()
        losses.append(total)
    return losses


losses = train({"seed": 0, "device": "cpu", "lr": 2e-2, "steps": 30, "micro_batches": 2})
