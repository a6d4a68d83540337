import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class ArcFace(nn.Module):
    def __init__(self, dim, classes, s=64.0, m=0.5):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, dim))
        nn.init.xavier_uniform_(self.weight)
        self.s, self.m = s, m

    def forward(self, x, labels):
        cos = F.linear(F.normalize(x), F.normalize(self.weight))
        theta = torch.acos(cos.clamp(-1 + 1e-7, 1 - 1e-7))
        one_hot = F.one_hot(labels, cos.size(1)).to(cos.dtype)
        return self.s * torch.cos(theta + self.m * one_hot)


def pairwise_distance(x, eps=1e-12):
    sq = x.pow(2).sum(1, keepdim=True)
    dist = sq + sq.t() - 2 * x @ x.t()
    return dist.clamp(min=eps).sqrt()


def batch_hard_triplet(x, labels, margin=0.3):
    dist = pairwise_distance(x)
    same = labels[:, None] == labels[None]
    hardest_positive = dist.masked_fill(~same, 0).amax(1)
    hardest_negative = dist.masked_fill(same, math.inf).amin(1)
    return F.relu(hardest_positive - hardest_negative + margin).mean()


class Trainer:
    def __init__(self, net, head, loader, lr=0.1):
        self.net = net
        self.head = head
        self.loader = loader
        params = list(net.parameters()) + list(head.parameters())
        self.optimizer = torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=5e-4)
        self.ce = nn.CrossEntropyLoss()

    def train_epoch(self):
        self.net.train()
        self.head.train()
        for x, y in self.loader:
            feat = self.net(x)
            loss = self.ce(self.head(feat, y), y) + batch_hard_triplet(feat, y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def extract(self, loader):
        self.net.eval()
        feats = []
        with torch.no_grad():
            for x, _ in loader:
                feats.append(F.normalize(self.net(x)))
        self.net.train()
        return torch.cat(feats)
