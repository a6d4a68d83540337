import argparse

import paddle
import paddle.nn.functional as F


class Solver:
    def __init__(self, net, args):
        self.net = net
        self.args = args
        self.sched = paddle.optimizer.lr.CosineAnnealingDecay(args.lr, T_max=args.epochs)
        clip = paddle.nn.ClipGradByGlobalNorm(1.0)
        self.opt = paddle.optimizer.AdamW(self.sched, parameters=net.parameters(), grad_clip=clip)
        self.scaler = paddle.amp.GradScaler(enable=args.amp, init_loss_scaling=2.0 ** 15)
        if args.amp and args.level == "O2":
            self.net, self.opt = paddle.amp.decorate(models=self.net, optimizers=self.opt, level="O2")

    def fit(self, loader):
        for epoch in range(self.args.epochs):
            self.net.train()
            for step, (image, label) in enumerate(loader):
                with paddle.amp.auto_cast(enable=self.args.amp, level=self.args.level):
                    logits = self.net(image)
                    loss = F.cross_entropy(logits, label)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.opt)
                self.scaler.update()
                self.opt.clear_grad()
            self.sched.step()
            self.evaluate(loader)
            paddle.save({"net": self.net.state_dict(), "opt": self.opt.state_dict(), "scaler": self.scaler.state_dict()}, "ck.pdparams")

    @paddle.no_grad()
    def evaluate(self, loader):
        self.net.eval()
        hits, total = 0, 0
        for image, label in loader:
            with paddle.amp.auto_cast(enable=self.args.amp, level=self.args.level):
                pred = self.net(image).argmax(axis=1)
            hits += int((pred == label.squeeze(-1)).sum())
            total += label.shape[0]
        return hits / total
