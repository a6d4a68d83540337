import torch
from torch import nn


class AverageMeter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.sum = 0
        self.count = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


def train(model, loader, optimizer, criterion, epoch):
    losses = AverageMeter()
    model.train()
    for i, (inp, tgt) in enumerate(loader):
        inp = inp.cuda(non_blocking=True)
        tgt = tgt.cuda(non_blocking=True)
        output = model(inp)
        loss = criterion(output, tgt)
        losses.update(loss, inp.size(0))  # expect: RO602
        loss.backward()
        optimizer.step()
        model.zero_grad()
    return losses.avg


def validate(model, loader, criterion):
    losses = AverageMeter()
    model.eval()
    with torch.no_grad():
        for inp, tgt in loader:
            loss = criterion(model(inp.cuda()), tgt.cuda())
            losses.update(loss.item(), inp.size(0))
    return losses.avg


def main():
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.1), nn.Linear(32, 2)).cuda()
    criterion = nn.CrossEntropyLoss().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    for epoch in range(90):
        train(model, train_loader, optimizer, criterion, epoch)
        validate(model, val_loader, criterion)
        scheduler.step()
