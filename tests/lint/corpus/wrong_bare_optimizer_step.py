"""Speech command classifier; AMP was added later."""
import torch
import torch.nn as nn


class CNN(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(1, 32, 80, stride=4), nn.BatchNorm1d(32), nn.ReLU(), nn.MaxPool1d(4),
            nn.Conv1d(32, 64, 3), nn.BatchNorm1d(64), nn.ReLU(), nn.AdaptiveAvgPool1d(1),
        )
        self.fc = nn.Linear(64, n_classes)

    def forward(self, x):
        return self.fc(self.conv(x).flatten(1))


class Runner:
    def __init__(self, model, loaders, device="cuda"):
        self.device = device
        self.model = model.to(device)
        self.loaders = loaders
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cuda")
        self.loss_fn = nn.CrossEntropyLoss()

    def train_epoch(self):
        self.model.train()
        for wav, target in self.loaders["train"]:
            wav = wav.to(self.device)
            target = target.to(self.device)
            self.optim.zero_grad()
            with torch.autocast("cuda"):
                out = self.model(wav)
                loss = self.loss_fn(out, target)
            self.scaler.scale(loss).backward()
            self.optim.step()  # expect: RO102
            self.scaler.update()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        right = 0
        for wav, target in self.loaders["valid"]:
            with torch.autocast("cuda"):
                out = self.model(wav.to(self.device))
            right += (out.argmax(1).cpu() == target).sum().item()
        return right / len(self.loaders["valid"].dataset)

    def run(self, epochs):
        for epoch in range(epochs):
            self.train_epoch()
            print(epoch, self.validate())
