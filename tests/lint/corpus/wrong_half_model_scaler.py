import torch
import torch.nn as nn
from torchvision import models

net = models.resnet50(num_classes=100)
net = net.cuda()
net.half()  # expect: RO110
criterion = nn.CrossEntropyLoss().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
scaler = torch.cuda.amp.GradScaler()  # expect: RO115


def train(train_loader):
    net.train()
    total = 0
    for i, (inputs, targets) in enumerate(train_loader):
        inputs = inputs.cuda(non_blocking=True).half()
        targets = targets.cuda(non_blocking=True)
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if i % 20 == 0:
            total += loss.item()
    return total


def test(test_loader):
    net.eval()
    correct = 0
    with torch.no_grad():
        for inputs, targets in test_loader:
            outputs = net(inputs.cuda().half())
            correct += outputs.max(1)[1].eq(targets.cuda()).sum()
    return correct.item() / len(test_loader.dataset)


def main(train_loader, test_loader):
    for epoch in range(90):
        train(train_loader)
        print("epoch", epoch, "acc", test(test_loader))
