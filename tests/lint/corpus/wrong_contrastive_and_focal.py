import torch
import torch.nn.functional as F


def info_nce(z1, z2, tau=0.1):
    z1 = F.normalize(z1, dim=1)
    z2 = F.normalize(z2, dim=1)
    sim = torch.mm(z1, z2.t()) / tau
    pos = torch.exp(torch.diag(sim))
    neg = torch.exp(sim).sum(dim=1)
    return -torch.log(pos / neg).mean()  # expect: RO403


def focal(logits, y, gamma=2.0):
    p = torch.sigmoid(logits)
    ce = -(y * torch.log(p) + (1 - y) * torch.log(1 - p))  # expect: RO405 RO405
    return ((1 - p) ** gamma * ce).mean()


def entropy(logits):
    p = F.softmax(logits, dim=-1)
    return -(p * p.log()).sum(-1)  # expect: RO404


def normalise(v):
    n = torch.linalg.norm(v, dim=-1, keepdim=True)
    return v / n  # expect: RO407


def rmse(pred, target):
    crit = torch.nn.MSELoss()
    return torch.sqrt(crit(pred, target))  # expect: RO408


def instance_stats(x):
    mu = x.mean(dim=(2, 3), keepdim=True)
    sq = x.pow(2).mean(dim=(2, 3), keepdim=True)
    var = sq - mu.pow(2)  # expect: RO413
    return (x - mu) / torch.sqrt(var + 1e-5)


net = torch.nn.Linear(3, 3)
opt = torch.optim.SGD(net.parameters(), 0.1)
for x, y in data:
    opt.zero_grad()
    focal(net(x), y).backward()
    opt.step()
