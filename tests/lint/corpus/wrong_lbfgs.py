import torch
from torch import nn


class PINN(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, 1)])

    def forward(self, xt):
        for layer in self.layers[:-1]:
            xt = torch.tanh(layer(xt))
        return self.layers[-1](xt)


def solve(points, targets):
    net = PINN().cuda()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cuda")

    def closure():
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = ((net(points) - targets) ** 2).mean()
        scaler.scale(loss).backward()
        return loss

    for it in range(500):
        scaler.step(optimizer, closure)  # expect: RO116
        scaler.update()
        if it % 50 == 0:
            r = net(points) - targets
            err = (r / r.norm()).abs().max()  # expect: RO407
            print(it, err.item())
    return net
