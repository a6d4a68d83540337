import torch
import torch.nn as nn
import torch.nn.functional as F


class SimCLR(nn.Module):
    def __init__(self, backbone, dim=128):
        super().__init__()
        self.backbone = backbone
        self.projector = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, dim))

    def forward(self, x):
        return F.normalize(self.projector(self.backbone(x)), dim=1)


def nt_xent(z1, z2, temperature=0.5):
    z = torch.cat([z1, z2])
    n = z1.size(0)
    sim = (z @ z.t()).float() / temperature
    sim.fill_diagonal_(float("-inf"))
    targets = torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(z.device)
    return F.cross_entropy(sim, targets)


def lr_at(step, warm, total, base):
    return base * min(1.0, step / max(1, warm)) * (1 - step / total)


def pretrain(model, loader, epochs, device="cuda"):
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler(device)
    total = epochs * len(loader)
    step = 0
    model.train()
    for epoch in range(epochs):
        for (a, b), _ in loader:
            for group in optimizer.param_groups:
                group["lr"] = lr_at(step, 100, total, 0.5)
            a = a.to(device, non_blocking=True)
            b = b.to(device, non_blocking=True)
            with torch.autocast(device, dtype=torch.float16):
                z1, z2 = model(a), model(b)
            loss = nt_xent(z1.float(), z2.float())
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            step += 1
        print(f"epoch {epoch}: {loss.item():.4f}")


@torch.no_grad()
def knn_accuracy(model, bank, labels, loader, k=20):
    model.eval()
    hits, n = 0, 0
    for x, y in loader:
        sim = model(x.cuda()) @ bank.t()
        top = sim.topk(k).indices
        votes = labels[top].mode(dim=1).values
        hits += (votes.cpu() == y).sum().item()
        n += len(y)
    model.train()
    return hits / n
