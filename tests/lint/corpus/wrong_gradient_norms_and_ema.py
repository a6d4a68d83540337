import argparse
import torch
import torch.nn.functional as F
from torch.amp import GradScaler, autocast


def train_epoch(args, model, ema, loader, opt, scaler):
    for step, batch in enumerate(loader):
        batch = {k: v.cuda() for k, v in batch.items()}
        with autocast("cuda", dtype=torch.float16):
            loss = model(**batch).loss
        if args.distributed:
            loss = loss.mean()
        scaler.scale(loss).backward()
        grads = [p.grad.norm() for p in model.parameters() if p.grad is not None]  # expect: RO104
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        opt.step()  # expect: RO102
        scaler.update()
        model.zero_grad()
        for p, e in zip(model.parameters(), ema.parameters()):
            e.data.mul_(0.999).add_(p.data.half(), alpha=0.001)  # expect: RO305
        if step % 10 == 0:
            print(step, loss.item(), torch.stack(grads).norm().item())


if __name__ == "__main__":
    args = argparse.ArgumentParser().parse_args()
    scaler = GradScaler("cuda")
