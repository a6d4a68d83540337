import torch
from torch import nn
import numpy as np


class UNetTrainer:
    def __init__(self, net, lr=1e-4, weight_decay=1e-8, momentum=0.999, amp=True):
        self.net = net
        self.device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
        self.optimizer = torch.optim.RMSprop(net.parameters(), lr=lr, weight_decay=weight_decay, momentum=momentum, foreach=True)
        self.grad_scaler = torch.amp.GradScaler(self.device.type, enabled=amp)
        self.criterion = nn.CrossEntropyLoss() if net.n_classes > 1 else nn.BCEWithLogitsLoss()
        self.amp = amp

    def run_epoch(self, loader):
        self.net.train()
        total = 0.0
        for batch in loader:
            images, masks = batch['image'].to(self.device), batch['mask'].to(self.device)
            with torch.autocast(self.device.type if self.device.type != 'mps' else 'cpu', enabled=self.amp):
                pred = self.net(images)
                loss = self.criterion(pred, masks)
            self.optimizer.zero_grad(set_to_none=True)
            self.grad_scaler.scale(loss).backward()
            self.grad_scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.grad_scaler.step(self.optimizer)
            self.grad_scaler.update()
            total += loss.item()
        return total / len(loader)
