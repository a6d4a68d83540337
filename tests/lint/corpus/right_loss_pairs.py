import torch
import torch.nn as nn
import torch.nn.functional as F


class Multi(nn.Module):
    """One trunk; heads with the output that their losses want."""

    def __init__(self, dim, classes, tags):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, 128), nn.ReLU())
        self.classify = nn.Linear(128, classes)
        self.tag = nn.Linear(128, tags)
        self.topic = nn.Sequential(nn.Linear(128, classes), nn.LogSoftmax(dim=1))

    def forward(self, x):
        h = self.trunk(x)
        return self.classify(h), self.tag(h), self.topic(h)

    @torch.no_grad()
    def predict(self, x):
        logits, tags, _ = self(x)
        return F.softmax(logits, dim=1), torch.sigmoid(tags) > 0.5


class FocalLoss(nn.Module):
    def __init__(self, gamma=2.0):
        super().__init__()
        self.gamma = gamma

    def forward(self, logits, target):
        ce = F.cross_entropy(logits, target, reduction="none")
        return ((1 - torch.exp(-ce)) ** self.gamma * ce).mean()


def losses(model, x, y, tags, topic, soft):
    logits, tag_logits, log_topic = model(x)
    a = F.cross_entropy(logits, y)
    b = F.binary_cross_entropy_with_logits(tag_logits, tags)
    c = nn.NLLLoss()(log_topic, topic)
    d = F.kl_div(F.log_softmax(logits / 2, dim=1), F.softmax(soft / 2, dim=1), reduction="batchmean")
    e = F.kl_div(F.log_softmax(logits, 1), F.log_softmax(soft, 1), log_target=True, reduction="batchmean")
    f = FocalLoss()(logits, y)
    g = F.cross_entropy(logits, F.softmax(soft, dim=1))
    h = F.mse_loss(torch.sigmoid(tag_logits), tags)
    return a + b + c + d + e + f + g + h


def fit(model, loader, epochs):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for epoch in range(epochs):
        history = []
        for x, y, tags, topic, soft in loader:
            loss = losses(model, x, y, tags, topic, soft)
            model.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        print(epoch, sum(history) / len(history))


def mixup_criterion(criterion, pred, y_a, y_b, lam):
    return lam * criterion(pred, y_a) + (1 - lam) * criterion(pred, y_b)
