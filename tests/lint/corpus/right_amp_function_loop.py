"""Train a small ResNet on CIFAR-10 with mixed precision."""
import argparse

import torch
import torch.nn as nn
import torchvision
import torchvision.transforms as T
from torch.utils.data import DataLoader


def get_loaders(root, batch_size):
    tf = T.Compose([T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), T.ToTensor()])
    train = torchvision.datasets.CIFAR10(root, train=True, transform=tf)
    test = torchvision.datasets.CIFAR10(root, train=False, transform=T.ToTensor())
    kwargs = dict(batch_size=batch_size, num_workers=4, pin_memory=True)
    return DataLoader(train, shuffle=True, **kwargs), DataLoader(test, **kwargs)


def train_one_epoch(model, loader, criterion, optimizer, scheduler, scaler, device):
    model.train()
    running = torch.zeros((), device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(device_type=device.type, dtype=torch.float16):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        old_scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= old_scale:
            scheduler.step()
        running += loss.detach()
    return running.item() / len(loader)


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct = 0
    total = 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        with torch.autocast(device_type=device.type, dtype=torch.float16):
            logits = model(images)
        correct += (logits.argmax(1) == labels).sum()
        total += labels.numel()
    return correct.item() / total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="data")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda")
    train_loader, test_loader = get_loaders(args.root, 128)
    model = torchvision.models.resnet18(num_classes=10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.4, total_steps=args.epochs * len(train_loader)
    )
    scaler = torch.amp.GradScaler("cuda")
    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        loss = train_one_epoch(model, train_loader, criterion, optimizer, scheduler, scaler, device)
        print(epoch, loss, evaluate(model, test_loader, device))
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
             "scheduler": scheduler.state_dict(), "scaler": scaler.state_dict()},
            "last.pt",
        )


if __name__ == "__main__":
    main()
