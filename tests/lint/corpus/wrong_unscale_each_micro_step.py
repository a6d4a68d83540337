import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast


class Engine:
    """Accumulates gradients over several small batches."""

    def __init__(self, model, optimizer, accumulate=4, clip=1.0):
        self.model = model
        self.optimizer = optimizer
        self.accumulate = accumulate
        self.clip = clip
        self.scaler = GradScaler()  # expect: RO115
        self.loss_fn = nn.MSELoss()

    def train_one_epoch(self, loader):
        self.model.train()
        self.optimizer.zero_grad()
        for index, (x, y) in enumerate(loader):
            x, y = x.cuda(), y.cuda()
            with autocast():  # expect: RO209
                loss = self.loss_fn(self.model(x), y)
                loss = loss / self.accumulate
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)  # expect: RO105
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            if (index + 1) % self.accumulate == 0:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()

    def evaluate(self, loader):
        self.model.eval()
        total = 0.0
        with torch.inference_mode():
            for x, y in loader:
                with autocast():  # expect: RO209
                    total += self.loss_fn(self.model(x.cuda()), y.cuda())
        return total.item() / len(loader)


def run(model, train_loader, val_loader, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    engine = Engine(model, optimizer)
    for epoch in range(epochs):
        engine.train_one_epoch(train_loader)
        print(epoch, engine.evaluate(val_loader))
