import time

import torch
import torch.nn as nn
from torch import optim


def train(model, loader, criterion, optimizer, device):
    running = 0.0
    for inputs, labels in loader:
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        running += loss.item() * inputs.size(0)
    return running / len(loader.dataset)


def validate(model, loader, criterion, device):
    model.eval()  # expect: RO605
    running, correct = 0.0, 0
    for inputs, labels in loader:
        inputs, labels = inputs.to(device), labels.to(device)
        outputs = model(inputs)  # expect: RO604
        loss = criterion(outputs, labels)
        running += loss.item() * inputs.size(0)
        correct += (outputs.argmax(1) == labels).sum().item()
    return running / len(loader.dataset), correct / len(loader.dataset)


def main(model, train_loader, val_loader, epochs=25):
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    optimizer = optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    model = model.to(device)
    criterion = nn.CrossEntropyLoss()
    torch.autograd.set_detect_anomaly(True)  # expect: RO609
    best = 0.0
    for epoch in range(epochs):
        since = time.time()
        train_loss = train(model, train_loader, criterion, optimizer, device)
        val_loss, val_acc = validate(model, val_loader, criterion, device)
        print(f"{epoch} {train_loss:.4f} {val_loss:.4f} {val_acc:.4f} {time.time() - since:.0f}s")
        if val_acc > best:
            best = val_acc
            torch.save(model.state_dict(), "best.pt")
