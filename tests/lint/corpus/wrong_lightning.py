import torch
import torch.nn.functional as F
import lightning.pytorch as pl
from torch import nn


class SegNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 1), nn.Sigmoid())

    def forward(self, x):
        return self.body(x)


class LitSeg(pl.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.net = SegNet()
        self.loss_fn = nn.BCEWithLogitsLoss()
        self.lr = lr
        self.losses = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        y_hat = self(x)
        loss = self.loss_fn(y_hat, y)  # expect: RO506
        self.losses.append(loss)  # expect: RO602
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        pred = self.net(x)
        dice = 2 * (pred * y).sum() / (pred.sum() + y.sum())
        self.log("dice", dice)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


if __name__ == "__main__":
    trainer = pl.Trainer(precision="16-mixed", max_epochs=3)
    trainer.fit(LitSeg(), train_loader, val_loader)
