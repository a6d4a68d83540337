"""Deep survival model with hand-written likelihoods."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Hazard(nn.Module):
    def __init__(self, features, bins):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, 64), nn.SELU(), nn.Linear(64, bins))

    def forward(self, x):
        return self.net(x)


def discrete_likelihood(logits, bins, event):
    log_hazard = torch.log(torch.sigmoid(logits))  # expect: RO405
    log_survive = torch.log(1 - torch.sigmoid(logits))  # expect: RO405
    picked = log_hazard.gather(1, bins[:, None]).squeeze(1)
    before = log_survive.cumsum(1).gather(1, bins[:, None]).squeeze(1)
    return -(event * picked + before).mean()


def gompertz(shape, rate, t):
    growth = torch.exp(shape * t) - 1  # expect: RO402
    return rate / shape * growth


def gumbel(shape, device):
    u = torch.rand(shape, device=device).clamp(1e-6, 1 - 1e-6)
    return -torch.log(-torch.log(u))


def softplus(x):
    return torch.log(1 + torch.exp(x))  # expect: RO401


def rank_loss(risk, time):
    order = time.argsort(descending=True)
    risk = risk[order]
    return -(risk - torch.logcumsumexp(risk, 0)).mean()


def train(x, bins, event, time, epochs=200):
    torch.manual_seed(0)
    model = Hazard(x.size(1), int(bins.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        optimizer.zero_grad()
        logits = model(x)
        loss = discrete_likelihood(logits, bins, event) + 0.1 * rank_loss(softplus(logits).sum(1), time)
        loss.backward()
        optimizer.step()
        if epoch % 20 == 0:
            print(epoch, loss.item())
    return model


def concordance(risk, time, event):
    right, pairs = 0, 0
    for i in range(len(time)):
        if event[i]:
            later = time > time[i]
            right += (risk[later] < risk[i]).sum().item()
            pairs += later.sum().item()
    return right / max(pairs, 1)
