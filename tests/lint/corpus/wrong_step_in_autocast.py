import torch
from torch import nn
from torch.amp import autocast, GradScaler


def main(loader, val_loader, epochs=10):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)).cuda()
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = GradScaler("cuda")
    loss_fn = nn.CrossEntropyLoss()
    for ep in range(epochs):
        for x, y in loader:
            with autocast("cuda", torch.float16):
                out = model(x.cuda())
                loss = loss_fn(out, y.cuda())
                opt.zero_grad()
                scaler.scale(loss).backward()  # expect: RO201
                scaler.step(opt)
            scaler.update()
        acc = 0
        for x, y in val_loader:
            with torch.no_grad():
                with autocast("cuda", torch.float16):
                    acc += (model(x.cuda()).argmax(1) == y.cuda()).sum().item()  # expect: RO603
        print(ep, acc)
