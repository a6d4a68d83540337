import torch
import torch.nn as nn
import torch.nn.functional as F


class AngularLoss(nn.Module):
    def __init__(self, dim, classes, margin=0.3, scale=30.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, dim))
        self.margin = margin
        self.scale = scale

    def forward(self, x, y):
        cosine = F.linear(F.normalize(x), F.normalize(self.weight))
        theta = torch.acos(cosine)  # expect: RO409
        target = torch.cos(theta + self.margin)
        mask = F.one_hot(y, cosine.size(1)).bool()
        logits = torch.where(mask, target, cosine)
        return F.cross_entropy(self.scale * logits, y)


def euclidean(a, b):
    return torch.sqrt(((a - b) ** 2).sum(dim=1))  # expect: RO408


def triplet(anchor, positive, negative, margin=0.2):
    return F.relu(euclidean(anchor, positive) - euclidean(anchor, negative) + margin).mean()


def haversine(delta):
    return 1 - torch.cos(delta)  # expect: RO406


def safe_log(p):
    return torch.where(p > 0, torch.log(p), torch.zeros_like(p))  # expect: RO410


def train(model, head, loader, epochs=30):
    opt = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-4)
    model.train()
    for epoch in range(epochs):
        total = 0.0
        for anchor, positive, negative, label in loader:
            fa, fp, fn = model(anchor), model(positive), model(negative)
            loss = triplet(fa, fp, fn) + head(fa, label)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        print(epoch, total / len(loader))
