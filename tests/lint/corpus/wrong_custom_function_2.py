import torch
from torch.autograd import Function
import torch.nn as nn


class RevGrad(Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.alpha * g, None


class MatFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):  # expect: RO206
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad @ b.t(), a.t() @ grad


class Head(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.w = nn.Parameter(torch.randn(128, n))

    def forward(self, x):
        return MatFn.apply(x, self.w)


net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), Head(10)).cuda()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        logits = net(x.cuda())
        logp = torch.log(torch.softmax(logits, dim=1))  # expect: RO404
        loss = nn.functional.nll_loss(logp, y.cuda())
    scaler.scale(loss).backward()
    scaler.step(opt)  # expect: RO103
    print(loss.item())  # expect: RO704
