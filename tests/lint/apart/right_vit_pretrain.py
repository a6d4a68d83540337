import argparse
import os
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def train_epoch(net, loader, opt, sched, scaler, device, accum):
    net.train()
    loss_sum = torch.zeros((), device=device)
    opt.zero_grad(set_to_none=True)
    for it, (img, lab) in enumerate(loader, 1):
        img = img.to(device, non_blocking=True)
        lab = lab.to(device, non_blocking=True)
        with autocast(device.type, dtype=torch.float16):
            out = net(img)
            loss = F.cross_entropy(out, lab)
            loss_sum += loss.detach()
            loss = loss / accum
        scaler.scale(loss).backward()
        if it % accum:
            continue
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
        skipped = scaler.get_scale() < before
        if not skipped:
            sched.step()
    return (loss_sum / len(loader)).item()


def evaluate(net, loader, device):
    net.eval()
    good = torch.zeros((), dtype=torch.long, device=device)
    with torch.inference_mode(), autocast(device.type, dtype=torch.float16):
        for img, lab in loader:
            good += (net(img.to(device)).argmax(-1) == lab.to(device)).sum()
    return good.item() / len(loader.dataset)


def main(net, train_set, val_set):
    ap = argparse.ArgumentParser()
    ap.add_argument("--resume", default="")
    ap.add_argument("--epochs", type=int, default=90)
    args = ap.parse_args()
    seed_everything(0)
    device = torch.device("cuda")
    net.to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.05)
    loader = DataLoader(train_set, 256, shuffle=True, num_workers=8, pin_memory=True, drop_last=True)
    val = DataLoader(val_set, 256, num_workers=8, pin_memory=True)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-3, epochs=args.epochs, steps_per_epoch=len(loader) // 4)
    scaler = GradScaler(device.type)
    if os.path.exists(args.resume):
        ck = torch.load(args.resume, weights_only=True)
        net.load_state_dict(ck["net"])
        opt.load_state_dict(ck["opt"])
        scaler.load_state_dict(ck["scaler"])
    for epoch in range(args.epochs):
        print(epoch, train_epoch(net, loader, opt, sched, scaler, device, 4), evaluate(net, val, device))
        torch.save(dict(net=net.state_dict(), opt=opt.state_dict(), scaler=scaler.state_dict()), "ck.pt")
