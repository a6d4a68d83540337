import torch
import torch.nn as nn
from torch.cuda.amp import GradScaler
from torch import autocast


def make_state(cfg):
    model = nn.Transformer(d_model=128).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), cfg.lr)
    scaler = GradScaler()  # expect: RO115
    return model, optimizer, scaler


def backward_and_step(loss, optimizer, scaler, model, max_norm):
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)  # expect: RO104
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def train_one_epoch(model, loader, optimizer, scaler, cfg):
    model.train()
    meter = 0.
    for src, tgt in loader:
        src, tgt = src.cuda(), tgt.cuda()
        with autocast('cuda', dtype=torch.float16):
            out = model(src, tgt[:-1])
            loss = ((out - tgt[1:]) ** 2).mean()
        optimizer.zero_grad()
        backward_and_step(loss, optimizer, scaler, model, cfg.max_norm)
        meter += loss.item()
    return meter / len(loader)


def run(cfg, loader):
    model, optimizer, scaler = make_state(cfg)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg.epochs)
    for e in range(cfg.epochs):
        print(train_one_epoch(model, loader, optimizer, scaler, cfg))
        sched.step()
