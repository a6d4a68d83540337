import torch
from torch.cuda import amp  # alias module
import torch.nn as nn


def get_optimizer(params, name):
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.1)
    return torch.optim.AdamW(params, lr=1e-3)


class Engine(object):
    def __init__(self, net, cfg):
        self._net = net.to(cfg.device)
        self._optim = get_optimizer(self._net.parameters(), cfg.optim)
        self._gs = amp.GradScaler(enabled=cfg.fp16)  # expect: RO115
        self._ce = nn.CrossEntropyLoss()
        self.cfg = cfg

    def step(self, batch):
        x, y = (t.to(self.cfg.device) for t in batch)
        self._optim.zero_grad()
        with amp.autocast(enabled=self.cfg.fp16):  # expect: RO209
            l = self._ce(self._net(x), y)
        self._backward(l)
        return l.item()

    def _backward(self, l):
        self._gs.scale(l).backward()
        if self.cfg.clip > 0:
            nn.utils.clip_grad_value_(self._net.parameters(), self.cfg.clip)  # expect: RO104
        self._gs.step(self._optim)
        self._gs.update()

    def run(self, loader):
        for epoch in range(self.cfg.epochs):
            self._net.train()
            for b in loader:
                self.step(b)
            torch.save({"m": self._net.state_dict(), "o": self._optim.state_dict(), "s": self._gs.state_dict()}, "x.pt")
