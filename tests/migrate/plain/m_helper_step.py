import torch
from torch import nn


def training_step(model, batch, optimizer, criterion, device):
    x, y = batch
    x, y = x.to(device), y.to(device)
    optimizer.zero_grad()
    prediction = model(x)
    loss = criterion(prediction, y)
    loss.backward()
    optimizer.step()
    return loss.item()


def evaluation_step(model, batch, criterion, device):
    x, y = batch
    with torch.no_grad():
        prediction = model(x.to(device))
        return criterion(prediction, y.to(device)).item()


def fit(model, data, epochs, device):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    criterion = nn.MSELoss()
    history = []
    for epoch in range(epochs):
        model.train()
        for batch in data:
            history.append(training_step(model, batch, optimizer, criterion, device))
        model.eval()
        validation = [evaluation_step(model, batch, criterion, device) for batch in data]
    return history, validation


torch.manual_seed(0)
data = [(torch.randn(16, 3), torch.ones(16, 1) * 2) for _ in range(4)]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
losses, _ = fit(nn.Linear(3, 1).to(device), data, 8, device)
