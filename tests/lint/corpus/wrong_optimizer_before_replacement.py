import torch
import torch.nn as nn
from torchvision import models, transforms
from torchvision.datasets import ImageFolder


def build(num_classes):
    model = models.resnet18(weights="IMAGENET1K_V1")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    model.fc = nn.Linear(model.fc.in_features, num_classes)  # expect: RO606
    return model, optimizer


def loaders(root):
    tf = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()])
    train = ImageFolder(root + "/train", tf)
    val = ImageFolder(root + "/val", tf)
    make = torch.utils.data.DataLoader
    return (
        make(train, batch_size=64, shuffle=True, num_workers=4, pin_memory=True),
        make(val, batch_size=64, num_workers=4, pin_memory=True),
    )


def train(model, optimizer, loader, device):
    model.train()
    criterion = nn.CrossEntropyLoss()
    skipped = 0
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        if torch.isnan(loss):  # expect: RO607
            continue
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad = torch.nan_to_num(p.grad)  # expect: RO608
        optimizer.step()
    return skipped


@torch.no_grad()
def test(model, loader, device):
    model.eval()
    hits = sum((model(x.to(device)).argmax(1).cpu() == y).sum() for x, y in loader)
    return int(hits) / len(loader.dataset)


def main(root):
    device = torch.device("cuda")
    train_loader, val_loader = loaders(root)
    model, optimizer = build(len(train_loader.dataset.classes))
    model.to(device)
    for epoch in range(10):
        train(model, optimizer, train_loader, device)
        print(epoch, test(model, val_loader, device))
