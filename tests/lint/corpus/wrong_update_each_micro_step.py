import torch
from torch import nn

model = nn.Linear(10, 10).cuda()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
accum = 4
opt.zero_grad()
for i, (X, Y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(X.cuda()), Y.cuda())
    loss = loss / accum
    scaler.scale(loss).backward()
    if (i + 1) % accum == 0:
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        opt.zero_grad()
    scaler.update()  # expect: RO112
