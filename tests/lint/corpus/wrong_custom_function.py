import torch
import torch.nn as nn
import torch.nn.functional as F


class Rational(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p, q):  # expect: RO206
        y = (x * p) / (1 + (x * q).abs())
        ctx.save_for_backward(x, p, q)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, p, q = ctx.saved_tensors
        d = 1 + (x * q).abs()
        return grad * p / d, (grad * x / d).sum(), None


class Net(nn.Module):
    def __init__(self, n, classes):
        super().__init__()
        self.a = nn.Linear(n, 128)
        self.b = nn.Linear(128, classes)
        self.p = nn.Parameter(torch.ones(()))
        self.register_buffer("q", torch.ones(()))

    def forward(self, x):
        return self.b(Rational.apply(self.a(x), self.p, self.q))


def main(train_loader, val_loader, n, classes):
    model = Net(n, classes).cuda()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(10):
        model.train()
        for x, y in train_loader:
            x, y = x.cuda(), y.cuda()
            opt.zero_grad()
            with torch.autocast("cuda"):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        model.eval()
        hits = 0
        with torch.no_grad():
            for x, y in val_loader:
                logits = model(x.cuda())  # expect: RO210
                hits += (logits.argmax(1).cpu() == y).sum().item()
        print(epoch, hits / len(val_loader.dataset))
