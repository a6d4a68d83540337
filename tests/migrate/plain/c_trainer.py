import os
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    """Holds what is trained."""

    def __init__(self, model, loader, lr=0.05):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device)
        self.loader = loader
        self.criterion = nn.MSELoss()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=lr,
            momentum=0.5,
        )
        self.history = []

    def _train_epoch(self, epoch):
        self.model.train()
        total = 0.0
        for batch in self.loader:
            inputs, targets = [part.to(self.device) for part in batch]
            self.optimizer.zero_grad(set_to_none=True)
            prediction = self.model(inputs)
            loss = self.criterion(prediction, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            total += loss.item()
            self.history.append(loss.item())
        return total / len(self.loader)

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        total = 0.0
        for inputs, targets in self.loader:
            inputs, targets = inputs.to(self.device), targets.to(self.device)
            prediction = self.model(inputs)
            total += self.criterion(prediction, targets).item()
        return total / len(self.loader)

    def save_checkpoint(self, path, epoch):
        torch.save(
            {
                "epoch": epoch,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            },
            path,
        )

    def load_checkpoint(self, path):
        checkpoint = torch.load(path, map_location=self.device)
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        return checkpoint["epoch"]

    def fit(self, epochs):
        for epoch in range(epochs):
            self._train_epoch(epoch)
            self.evaluate()
            path = os.path.join(tempfile.gettempdir(), f"trainer-{os.getpid()}.pt")
            self.save_checkpoint(path, epoch)
            self.load_checkpoint(path)
            os.remove(path)


torch.manual_seed(0)
features = torch.randn(48, 6)
dataset = TensorDataset(features, features @ torch.randn(6, 2))
trainer = Trainer(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)), DataLoader(dataset, batch_size=12))
trainer.fit(8)
losses = trainer.history
