import torch
from torch import nn, optim
from torch.amp import GradScaler


def make_step(model, opt, loss_fn, scaler):
    def step(x, y):
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)  # expect: RO506
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: RO104
        scaler.step(opt)
        scaler.update()
        return loss.item()

    return step


model = nn.Sequential(nn.Linear(20, 1), nn.Sigmoid()).cuda()
opt = optim.Adam(model.parameters())
step = make_step(model, opt, nn.BCEWithLogitsLoss(), GradScaler())
for x, y in loader:
    print(step(x.cuda(), y.cuda()))
