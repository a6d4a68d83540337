import math
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

EPS = 1e-6


def log_mix(logits, comp):
    return torch.logsumexp(logits.log_softmax(-1) + comp, dim=-1)


def logistic_loss(s, y):
    return F.binary_cross_entropy_with_logits(s, y)


def my_softmax(x):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def variance(x):
    m = x.mean(0)
    return ((x - m) ** 2).mean(0)


def cosine(a, b):
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)).clamp_min(EPS)


def dist(a, b):
    return torch.sqrt(((a - b) ** 2).sum(-1) + 1e-12)


def angle(u, v):
    c = F.cosine_similarity(u, v, dim=-1).clamp(-1 + 1e-7, 1 - 1e-7)
    return torch.acos(c)


def entropy(p):
    safe = torch.where(p > 0, p, torch.ones_like(p))
    return -(p * safe.log()).sum(-1)


def entropy2(p):
    return -torch.xlogy(p, p).sum(-1)


def psnr(a, b):
    return 10 * math.log10(1.0 / max(float(((a - b) ** 2).mean()), 1e-12))


def sched(step):
    return math.exp(-step / 1000) - 1 if step < 0 else 1 / math.sqrt(step + 1)


def bits(n):
    return np.log(1 + n)


class LayerScale(nn.Module):
    def forward(self, h):
        return (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + EPS)
