import torch
from torch import nn

use_bf16 = torch.cuda.is_bf16_supported()
dtype = torch.bfloat16 if use_bf16 else torch.float16
scaler = torch.amp.GradScaler("cuda", enabled=(dtype == torch.float16))
ctx = torch.autocast("cuda", dtype=dtype)
model = nn.Linear(10, 10).cuda()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
iter_num, accum = 0, 5
X, Y = get_batch("train")
while True:
    if iter_num % 100 == 0:
        model.eval()
        with torch.no_grad():
            for k in range(20):
                xv, yv = get_batch("val")
                with ctx:
                    lv = nn.functional.mse_loss(model(xv), yv)
        model.train()
        torch.save({"model": model.state_dict(), "optimizer": opt.state_dict(), "scaler": scaler.state_dict()}, "c.pt")
    for micro in range(accum):
        with ctx:
            loss = nn.functional.mse_loss(model(X), Y) / accum
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num > 1000:
        break
