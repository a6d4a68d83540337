import torch
from torch import nn
from torchvision import models


def evaluate(model, loader, device):
    model.eval()  # expect: RO605
    losses = []
    for x, y in loader:  # no_grad missing
        out = model(x.to(device))  # expect: RO604
        losses.append(nn.functional.cross_entropy(out, y.to(device)).item())
    return sum(losses) / len(losses)


def main():
    device = torch.device("cuda:0")
    model = models.resnet34(weights=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.fc = nn.Linear(512, 7)  # expect: RO606
    model.to(device)
    model.train()
    for epoch in range(30):  # train() only before, evaluate switches it off
        for x, y in train_loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()  # expect: RO601
            optimizer.step()
        print(evaluate(model, val_loader, device))


main()
