import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader


class Tracker:
    def __init__(self, model, dataset, device="cuda"):
        self.device = torch.device(device)
        self.model = model.to(self.device)
        self.loader = DataLoader(dataset, 64, shuffle=True, num_workers=4)  # expect: RO702
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def count_classes(self, labels, n):
        counts = torch.zeros(n)
        for i in range(labels.shape[0]):  # expect: RO707
            counts[labels[i].item()] += 1
        return counts

    def train(self, epochs):
        for epoch in range(epochs):
            self.model.train()
            for x, y in self.loader:
                x, y = x.to(self.device), y.to(self.device)
                logits = self.model(x)
                loss = F.cross_entropy(logits, y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                weights = torch.ones(x.size(0)).to(self.device)  # expect: RO705
                accuracy = ((logits.argmax(1) == y) * weights).mean().item()  # expect: RO704
                predictions = logits.detach().cpu().numpy()
                self.log(epoch, loss.item(), accuracy, predictions)

    def log(self, epoch, loss, accuracy, predictions):
        with open("log.txt", "a") as f:
            f.write(f"{epoch} {loss} {accuracy} {predictions.mean()}\n")

    def evaluate(self, loader):
        self.model.eval()
        with torch.no_grad():
            out = [self.model(x.to(self.device)) for x, _ in loader]
        self.model.train()
        return torch.cat(out)
