import torch
import torch.nn as nn
from torch.amp import custom_bwd, custom_fwd


class ScaledExp(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x, scale):
        y = torch.exp(x * scale)
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y * ctx.scale, None


class Net(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.inp = nn.Linear(n, 64)
        self.out = nn.Linear(64, 1)

    def forward(self, x):
        return self.out(ScaledExp.apply(self.inp(x), 0.1))


def teacher_targets(teacher, x):
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        return teacher(x)


def train(model, teacher, loader, epochs):
    model.cuda()
    teacher.cuda().eval()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    compiled = torch.compile(model)
    for epoch in range(epochs):
        model.train()
        for x, _ in loader:
            x = x.cuda()
            target = teacher_targets(teacher, x)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(compiled(x), target)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        model.eval()
        total = torch.zeros((), device="cuda")
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            for x, y in loader:
                total += nn.functional.l1_loss(model(x.cuda()), y.cuda())
        print(epoch, total.item())
        torch.save({"m": model.state_dict(), "o": opt.state_dict(), "s": scaler.state_dict()}, "last.pt")
