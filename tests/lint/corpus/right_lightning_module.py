import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, random_split


class LitClassifier(pl.LightningModule):
    def __init__(self, hidden=256, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.ReLU())
        self.head = nn.Linear(hidden, 10)

    def forward(self, x):
        """Class probabilities, for inference."""
        return F.softmax(self.head(self.encoder(x)), dim=-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.head(self.encoder(x))
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.head(self.encoder(x))
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", (logits.argmax(-1) == y).float().mean())

    def predict_step(self, batch, batch_idx):
        x, _ = batch
        return self(x).argmax(-1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)
        return [optimizer], [scheduler]


class Data(pl.LightningDataModule):
    def __init__(self, dataset, batch_size=64):
        super().__init__()
        self.dataset = dataset
        self.batch_size = batch_size

    def setup(self, stage=None):
        self.train, self.val = random_split(self.dataset, [55000, 5000])

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=4, pin_memory=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size, num_workers=4, pin_memory=True)


def main(dataset):
    pl.seed_everything(7)
    trainer = pl.Trainer(max_epochs=5, precision="16-mixed", gradient_clip_val=1.0)
    trainer.fit(LitClassifier(), Data(dataset))
