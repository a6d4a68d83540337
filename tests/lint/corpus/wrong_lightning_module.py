import lightning as L
import torch
import torch.nn.functional as F
from torch import nn


class LitAutoEncoder(L.LightningModule):
    def __init__(self, width, classes):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, width), nn.GELU(), nn.Linear(width, width))
        self.decoder = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 784))
        self.classifier = nn.Sequential(nn.Linear(width, classes), nn.Softmax(dim=-1))
        self.train_outputs = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        z = self.encoder(x.view(x.size(0), -1))
        recon = F.mse_loss(self.decoder(z), x.view(x.size(0), -1))
        scores = self.classifier(z)
        loss = recon + F.cross_entropy(scores, y)  # expect: RO501
        self.train_outputs.append(loss)  # expect: RO602
        return loss

    def on_train_epoch_end(self):
        self.log("epoch_loss", torch.stack(self.train_outputs).mean())
        self.train_outputs.clear()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        z = self.encoder(x.view(x.size(0), -1))
        scores = self.classifier(z)
        self.log("val_acc", (scores.argmax(-1) == y).float().mean())

    def entropy(self, logits):
        p = torch.softmax(logits, dim=-1)
        return -(p * torch.log(p)).sum(-1).mean()  # expect: RO404

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    L.seed_everything(0)
    module = LitAutoEncoder(128, 10)
    trainer = L.Trainer(max_epochs=3, accelerator="auto")
    trainer.fit(module, torch.load("loader.pt", weights_only=False))
