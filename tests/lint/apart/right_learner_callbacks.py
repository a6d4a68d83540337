import torch
from torch import nn


class Learner:
    def __init__(self, model, opt_func, loss_func, dls, cbs=()):
        self.model, self.loss_func, self.dls = model, loss_func, dls
        self.opt = opt_func(model.parameters())
        self.cbs = cbs

    def __call__(self, name):
        for cb in self.cbs:
            getattr(cb, name, lambda: None)()

    def one_batch(self):
        self.pred = self.model(self.xb)
        self.loss = self.loss_func(self.pred, self.yb)
        if not self.model.training:
            return
        self.loss.backward()
        self.opt.step()
        self.opt.zero_grad()

    def one_epoch(self, train):
        self.model.train(train)
        for self.xb, self.yb in (self.dls.train if train else self.dls.valid):
            self.one_batch()

    def fit(self, n):
        for self.epoch in range(n):
            self.one_epoch(True)
            with torch.no_grad():
                self.one_epoch(False)


Learner(nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3)), torch.optim.Adam, nn.CrossEntropyLoss(), dls).fit(3)
