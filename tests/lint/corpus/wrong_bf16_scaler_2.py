import torch
from torch import nn, optim


def build(cfg):
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, batch_first=True), 4)
    return net.to(cfg["device"])


def train(cfg, data):
    net = build(cfg)
    opt = optim.AdamW(net.parameters(), lr=cfg["lr"])
    amp_dtype = torch.bfloat16
    scaler = torch.amp.GradScaler("cuda")  # expect: RO109
    ema = None
    for batch in data:
        x = batch["x"].to(cfg["device"])
        t = batch["t"].to(cfg["device"])
        with torch.autocast("cuda", amp_dtype):
            pred = net(x.half())  # expect: RO202
            loss = nn.functional.l1_loss(pred, t)
        if torch.isnan(loss):  # expect: RO607
            continue
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        ema = loss if ema is None else 0.9 * ema + 0.1 * loss  # expect: RO602
        print(ema.item())  # expect: RO704
