import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader


class SegHead(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.classifier = nn.Sequential(
            nn.Conv2d(64, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 1, 1), nn.Sigmoid()
        )

    def forward(self, x):
        return self.classifier(self.backbone(x))


def soft_iou(pred, target):
    inter = (pred * target).sum()
    return inter / (pred.sum() + target.sum() - inter + 1e-6)


def train(model, train_set, val_set, epochs):
    model.cuda()
    train_loader = DataLoader(train_set, batch_size=4, shuffle=True, num_workers=2, pin_memory=True)
    val_loader = DataLoader(val_set, batch_size=4, num_workers=2, pin_memory=True)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        model.train()
        for img, mask in train_loader:
            img, mask = img.cuda(), mask.cuda()
            optimizer.zero_grad()
            pred = model(img)
            loss = criterion(pred, mask)  # expect: RO506
            loss = loss + 1 - soft_iou(pred, mask)
            loss.backward()
            optimizer.step()
        # validation
        with torch.no_grad():
            iou = 0.0
            for img, mask in val_loader:
                pred = model(img.cuda())  # expect: RO603
                iou += soft_iou((pred > 0.5).float(), mask.cuda())
        print(epoch, iou.item() / len(val_loader))


def refine(logits, target):
    edge = F.max_pool2d(target, 3, 1, 1) - target
    probability = logits.sigmoid()
    return F.binary_cross_entropy_with_logits(probability, target, weight=1 + 4 * edge)  # expect: RO506
