import torch
import torch.nn as nn
from torch.cuda.amp import GradScaler, autocast


class MultiTask:
    """Two heads, two optimizers, one scaler."""

    def __init__(self, trunk, head_a, head_b, loaders):
        self.trunk = trunk.cuda()
        self.head_a = head_a.cuda()
        self.head_b = head_b.cuda()
        self.opt_trunk = torch.optim.AdamW(self.trunk.parameters(), lr=1e-4)
        self.opt_heads = torch.optim.AdamW([*self.head_a.parameters(), *self.head_b.parameters()], lr=1e-3)
        self.scaler = GradScaler()  # expect: RO115
        self.loaders = loaders
        self.ce = nn.CrossEntropyLoss()
        self.mse = nn.MSELoss()

    def train_epoch(self):
        self.trunk.train()
        self.head_a.train()
        self.head_b.train()
        for x, y_class, y_value in self.loaders["train"]:
            x, y_class, y_value = x.cuda(), y_class.cuda(), y_value.cuda()
            self.opt_trunk.zero_grad()
            self.opt_heads.zero_grad()
            with autocast():  # expect: RO209
                h = self.trunk(x)
                loss = self.ce(self.head_a(h), y_class) + self.mse(self.head_b(h), y_value)
                self.scaler.scale(loss).backward()  # expect: RO201
            self.scaler.step(self.opt_trunk)
            self.scaler.update()  # expect: RO106
            self.scaler.step(self.opt_heads)
            self.scaler.update()

    def evaluate(self):
        self.trunk.eval()
        self.head_a.eval()
        self.head_b.eval()
        hits = 0
        for x, y_class, _ in self.loaders["valid"]:
            with autocast():  # expect: RO209
                out = self.head_a(self.trunk(x.cuda()))  # expect: RO604
            hits += (out.argmax(1).cpu() == y_class).sum().item()
        return hits

    def save(self, path):
        state = {  # the scaler is not kept
            "trunk": self.trunk.state_dict(),
            "opt": [self.opt_trunk.state_dict(), self.opt_heads.state_dict()],
        }
        torch.save(state, path)  # expect: RO108

    def fit(self, epochs):
        for epoch in range(epochs):
            self.train_epoch()
            print(epoch, self.evaluate())
            self.save(f"state{epoch}.pt")
