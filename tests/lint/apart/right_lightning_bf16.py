import lightning as L
import torch
from torch import nn
from torchmetrics import Accuracy


class LitClassifier(L.LightningModule):
    def __init__(self, backbone, num_classes, lr=1e-3):
        super().__init__()
        self.save_hyperparameters(ignore=["backbone"])
        self.backbone = backbone
        self.head = nn.Linear(512, num_classes)
        self.acc = Accuracy("multiclass", num_classes=num_classes)

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, _):
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.acc(self(x).softmax(-1), y)
        self.log("acc", self.acc, on_epoch=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)]


L.Trainer(precision="bf16-mixed", gradient_clip_val=1.0, accumulate_grad_batches=4).fit(LitClassifier(net, 10), dm)
