import pytorch_lightning as pl
import torch
from torch import nn


class GAN(pl.LightningModule):
    def __init__(self, latent=64):
        super().__init__()
        self.automatic_optimization = False
        self.g = nn.Sequential(nn.Linear(latent, 256), nn.ReLU(), nn.Linear(256, 784), nn.Tanh())
        self.d = nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))
        self.latent = latent
        self.bce = nn.BCEWithLogitsLoss()

    def training_step(self, batch, batch_idx):
        opt_g, opt_d = self.optimizers()
        real, _ = batch
        z = torch.randn(real.size(0), self.latent, device=self.device)
        fake = self.g(z)
        ones = torch.ones(real.size(0), 1, device=self.device)
        zeros = torch.zeros_like(ones)
        d_loss = self.bce(self.d(real.flatten(1)), ones) + self.bce(self.d(fake.detach()), zeros)
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        self.clip_gradients(opt_d, gradient_clip_val=1.0)
        opt_d.step()
        g_loss = self.bce(self.d(fake), ones)
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.log_dict({"g": g_loss, "d": d_loss})

    def configure_optimizers(self):
        return (torch.optim.Adam(self.g.parameters(), lr=2e-4, betas=(0.5, 0.999)),
                torch.optim.Adam(self.d.parameters(), lr=2e-4, betas=(0.5, 0.999)))


trainer = pl.Trainer(accelerator="gpu", precision="bf16-mixed", max_epochs=5)
trainer.fit(GAN(), datamodule)
