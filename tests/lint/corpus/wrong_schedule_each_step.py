import math

import torch
import torch.nn as nn
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(step, warm, total):
    if step < warm:
        return step / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))


class Trainer:
    def __init__(self, model, loader, args):
        self.args = args
        self.model = model.cuda()
        self.loader = loader
        self.opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
        self.sched = LambdaLR(self.opt, lambda s: warmup_cosine(s, args.warm, args.total))
        self.scaler = torch.amp.GradScaler("cuda")
        self.loss = nn.CrossEntropyLoss()

    def train(self):
        self.model.train()
        for epoch in range(self.args.epochs):
            for x, y in self.loader:
                x, y = x.cuda(), y.cuda()
                self.opt.zero_grad()
                with torch.autocast("cuda", torch.float16):
                    loss = self.loss(self.model(x), y)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.opt)
                self.scaler.update()
                self.sched.step()  # expect: RO107
            self.checkpoint(epoch)

    def checkpoint(self, epoch):
        torch.save(  # expect: RO108
            {
                "epoch": epoch,
                "model": self.model.state_dict(),
                "optimizer": self.opt.state_dict(),
                "scheduler": self.sched.state_dict(),
            },
            f"{self.args.out}/epoch{epoch}.pt",
        )
