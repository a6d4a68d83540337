import torch
from torch import nn


class GraphTrainer:
    def __init__(self, model, device):
        self.model = model.to(device)
        self.device = device
        self.opt = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        self.loss_fn = nn.MSELoss()

    def train_epoch(self, loader):
        self.model.train()
        total = 0.0
        for batch in loader:
            batch = batch.to(self.device)
            try:
                self.opt.zero_grad()
                pred = self.model(batch.x, batch.edge_index)
                loss = self.loss_fn(pred, batch.y)
                loss.backward()
                self.opt.step()
            except:  # expect: RO607
                continue
            total += loss.item()
        return total / len(loader)

    def finetune(self, loader, steps):
        self.model.train()
        for step, batch in zip(range(steps), loader):
            batch = batch.to(self.device)
            pred = self.model(batch.x, batch.edge_index)
            loss = torch.nan_to_num(self.loss_fn(pred, batch.y))  # expect: RO608
            self.opt.zero_grad()
            self.opt.step()  # expect: RO612
            loss.backward()

    @torch.no_grad()
    def evaluate(self, loader):
        self.model.eval()
        total = 0.0
        for batch in loader:
            batch = batch.to(self.device)
            total += self.loss_fn(self.model(batch.x, batch.edge_index), batch.y).item()
        self.model.train()
        return total / len(loader)


def run(model, train_loader, valid_loader, epochs):
    trainer = GraphTrainer(model, torch.device("cpu"))
    for epoch in range(epochs):
        trainer.train_epoch(train_loader)
        print(epoch, trainer.evaluate(valid_loader))
