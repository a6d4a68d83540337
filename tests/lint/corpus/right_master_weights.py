"""Weights in bf16 for the passes, updates in fp32."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class MasterWeights:
    def __init__(self, model, lr):
        self.low = [p for p in model.parameters() if p.requires_grad]
        self.master = [p.detach().float().clone().requires_grad_() for p in self.low]
        self.optimizer = torch.optim.AdamW(self.master, lr=lr)

    def zero_grad(self):
        for p in self.low:
            p.grad = None

    def step(self):
        for low, master in zip(self.low, self.master):
            master.grad = None if low.grad is None else low.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for low, master in zip(self.low, self.master):
                low.copy_(master)


def build():
    return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 10))


def train(loader, epochs=5):
    torch.manual_seed(0)
    model = build().to(torch.bfloat16)
    optimizer = MasterWeights(model, 1e-3)
    model.train()
    for epoch in range(epochs):
        total = torch.zeros((), dtype=torch.float32)
        for x, y in loader:
            logits = model(x.bfloat16())
            loss = F.cross_entropy(logits.float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach().float()
        print(epoch, total.item() / len(loader))
    return model


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hits = torch.zeros((), dtype=torch.int64)
    for x, y in loader:
        hits += (model(x.bfloat16()).argmax(-1) == y).sum()
    return hits.item() / len(loader.dataset)


if __name__ == "__main__":
    x = torch.randn(1024, 128)
    y = torch.randint(0, 10, (1024,))
    dataset = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True)
    print(accuracy(train(loader), loader))
