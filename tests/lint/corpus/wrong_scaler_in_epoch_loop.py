import torch
from torch import nn, optim
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader

from dataset import FolderDataset
from model import Net


def fit(net, loader, epochs=20, lr=1e-3):
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.Adam(net.parameters(), lr=lr)
    for epoch in range(epochs):
        scaler = GradScaler()  # expect: RO101 RO115
        net.train()
        epoch_loss = 0
        for imgs, masks in loader:
            imgs = imgs.cuda(non_blocking=True)
            masks = masks.cuda(non_blocking=True)
            optimizer.zero_grad()
            with autocast():  # expect: RO209
                pred = net(imgs)
                loss = criterion(pred, masks)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            epoch_loss += loss  # expect: RO602
        print("epoch", epoch, "loss", float(epoch_loss) / len(loader))
    return net


def predict(net, loader):
    net.eval()
    results = []
    with torch.no_grad():
        for imgs, _ in loader:
            with autocast():  # expect: RO209
                results.append(net(imgs.cuda()).argmax(1).cpu())
    return torch.cat(results)


if __name__ == "__main__":
    torch.manual_seed(1)
    train_set = FolderDataset("train")
    train_loader = DataLoader(train_set, 16, shuffle=True, num_workers=4, pin_memory=True)
    net = Net(3, 21).cuda()
    fit(net, train_loader)
    torch.save(net.state_dict(), "net.pth")
