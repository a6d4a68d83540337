import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(mixed_precision="fp16")
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10), nn.LogSoftmax(dim=1))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
net, opt, dl = accelerator.prepare(net, opt, make_loader())
loss_fn = nn.CrossEntropyLoss()
running = 0
for epoch in range(4):
    for x, y in dl:
        opt.zero_grad()
        pred = net(x)
        loss = loss_fn(pred, y)  # expect: RO502
        accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # expect: RO104
        opt.step()
        running += loss  # expect: RO602
    print(running / len(dl))
