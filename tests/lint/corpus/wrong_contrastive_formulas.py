import torch
import torch.nn as nn


class InfoNCE(nn.Module):
    def __init__(self, temperature=0.07):
        super().__init__()
        self.temperature = temperature

    def forward(self, query, key):
        query = query / query.norm(dim=1, keepdim=True)  # expect: RO407
        key = key / torch.norm(key, dim=1, keepdim=True)  # expect: RO407
        logits = query @ key.t() / self.temperature
        positive = logits.diagonal()
        return (torch.log(torch.exp(logits).sum(dim=1)) - positive).mean()  # expect: RO403


class SupCon(nn.Module):
    def __init__(self, temperature=0.1):
        super().__init__()
        self.temperature = temperature

    def forward(self, z, labels):
        z = nn.functional.normalize(z, dim=1)
        logits = z @ z.t() / self.temperature
        mask = labels[:, None] == labels[None, :]
        weights = torch.exp(logits)
        prob = weights / weights.sum(dim=1, keepdim=True)  # expect: RO412
        return -(prob + 1e-12).log()[mask].mean()


def train(encoder, momentum_encoder, loader, epochs=10):
    criterion = InfoNCE()
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.03, momentum=0.9)
    encoder.cuda().train()
    momentum_encoder.cuda().eval()
    for epoch in range(epochs):
        for q, k in loader:
            q, k = q.cuda(), k.cuda()
            with torch.no_grad():
                target = momentum_encoder(k)
                for p, m in zip(encoder.parameters(), momentum_encoder.parameters()):
                    m.data.mul_(0.999).add_(p.data, alpha=0.001)
            loss = criterion(encoder(q), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())
