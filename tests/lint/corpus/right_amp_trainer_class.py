from pathlib import Path

import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast


class Trainer:
    def __init__(self, model, optimizer, train_loader, val_loader, cfg):
        self.model = model.cuda()
        self.optimizer = optimizer
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.scaler = GradScaler(enabled=cfg.amp)  # expect: RO115
        self.cfg = cfg
        self.best = 0.0

    def train_epoch(self, epoch):
        self.model.train()
        total = 0.0
        for step, batch in enumerate(self.train_loader):
            x = batch["image"].cuda(non_blocking=True)
            y = batch["label"].cuda(non_blocking=True)
            with autocast(enabled=self.cfg.amp):  # expect: RO209
                out = self.model(x)
                loss = self.criterion(out, y)
            self.scaler.scale(loss).backward()
            if self.cfg.clip:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_value_(self.model.parameters(), self.cfg.clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            if step % self.cfg.log_every == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
                total += loss.item()
        return total

    def validate(self):
        self.model.eval()
        hits, count = 0, 0
        with torch.no_grad():
            for batch in self.val_loader:
                x = batch["image"].cuda(non_blocking=True)
                y = batch["label"].cuda(non_blocking=True)
                with autocast(enabled=self.cfg.amp):  # expect: RO209
                    out = self.model(x)
                hits += (out.argmax(dim=1) == y).float().sum()
                count += y.size(0)
        return float(hits) / count

    def save(self, path):
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "best": self.best,
            },
            path,
        )

    def load(self, path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.best = state["best"]

    def fit(self):
        for epoch in range(self.cfg.epochs):
            self.train_epoch(epoch)
            score = self.validate()
            if score > self.best:
                self.best = score
                self.save(Path(self.cfg.out) / "best.pt")
