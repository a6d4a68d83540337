import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader


def dice_loss(logits, target, smooth=1.0):
    prob = torch.sigmoid(logits)
    inter = (prob * target).sum(dim=(1, 2, 3))
    union = prob.sum(dim=(1, 2, 3)) + target.sum(dim=(1, 2, 3))
    return 1 - ((2 * inter + smooth) / (union + smooth)).mean()


class DiceBCE(nn.Module):
    def __init__(self, weight=0.5):
        super().__init__()
        self.bce = nn.BCEWithLogitsLoss()
        self.weight = weight

    def forward(self, logits, target):
        return self.weight * self.bce(logits, target) + (1 - self.weight) * dice_loss(logits, target)


class DoubleConv(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
            nn.Conv2d(cout, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.net(x)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = DoubleConv(3, 32), DoubleConv(32, 64)
        self.up = nn.ConvTranspose2d(64, 32, 2, stride=2)
        self.merge = DoubleConv(64, 32)
        self.head = nn.Conv2d(32, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        return self.head(self.merge(torch.cat([a, self.up(b)], 1)))


def train_net(net, train_set, val_set, device, epochs=20):
    loader_args = dict(batch_size=8, num_workers=4, pin_memory=True)
    train_loader = DataLoader(train_set, shuffle=True, **loader_args)
    val_loader = DataLoader(val_set, shuffle=False, **loader_args)
    criterion = DiceBCE()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4)
    best = np.inf
    for epoch in range(epochs):
        net.train()
        for images, masks in train_loader:
            images = images.to(device, non_blocking=True)
            masks = masks.to(device, non_blocking=True)
            loss = criterion(net(images), masks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        score = evaluate(net, val_loader, device)
        if score < best:
            best = score
            torch.save(net.state_dict(), "unet.pt")
        print(epoch, score)


@torch.inference_mode()
def evaluate(net, loader, device):
    net.eval()
    total = 0.0
    for images, masks in loader:
        logits = net(images.to(device))
        total += dice_loss(logits, masks.to(device))
    net.train()
    return total.item() / max(len(loader), 1)
