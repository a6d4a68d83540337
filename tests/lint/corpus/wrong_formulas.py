import math
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def gaussian_nll(mu, logvar, x):
    return 0.5 * (logvar + (x - mu) ** 2 / logvar.exp()).mean()


def log_mix(logits, comp):
    w = logits.softmax(-1)
    return torch.log((torch.exp(comp) * w).sum(-1))  # expect: RO403


def logistic_loss(s, y):
    return -(y * torch.log(torch.sigmoid(s)) + (1 - y) * torch.log(1 - torch.sigmoid(s))).mean()  # expect: RO405 RO405


def my_softmax(x):
    e = torch.exp(x)
    return e / e.sum(dim=-1, keepdim=True)  # expect: RO412


def variance(x):
    return (x ** 2).mean(0) - x.mean(0) ** 2  # expect: RO413


def cosine(a, b):
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))  # expect: RO407


def dist(a, b):
    return torch.sqrt(((a - b) ** 2).sum(-1))  # expect: RO408


def hazard(t):
    return torch.exp(t) - 1  # expect: RO402


def softplus(t):
    return torch.log(1 + torch.exp(t))  # expect: RO401


def angle(u, v):
    u = F.normalize(u, dim=-1)
    v = F.normalize(v, dim=-1)
    return torch.acos((u * v).sum(-1))  # expect: RO409


def xlogx(p):
    return torch.where(p > 0, p * torch.log(p), torch.zeros_like(p))  # expect: RO410


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x):
        h = self.f(x)
        return (h - h.mean(-1, keepdim=True)) / h.std(-1, keepdim=True)  # expect: RO411
