import os
import tempfile

import torch
from torch import nn


def save_checkpoint(path, model, optimizer, epoch):
    state = {
        "epoch": epoch,
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
    }
    torch.save(state, path)


def main():
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start_epoch = 0
    history = []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "last.pt")
        for _ in range(2):
            if os.path.exists(path):
                checkpoint = torch.load(path, map_location=device)
                model.load_state_dict(checkpoint["model_state_dict"])
                optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
                start_epoch = checkpoint["epoch"] + 1
            for epoch in range(start_epoch, start_epoch + 10):
                x = torch.randn(32, 4, device=device)
                y = x.sum(1, keepdim=True)
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                history.append(loss.item())
                save_checkpoint(path, model, optimizer, epoch)
    return history


if __name__ == "__main__":
    losses = main()
