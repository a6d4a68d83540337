import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def build(dataset, model, args):
    sampler = DistributedSampler(dataset)
    loader = DataLoader(
        dataset, batch_size=args.batch, sampler=sampler, num_workers=8, pin_memory=True, persistent_workers=True
    )
    model = DDP(model.to(args.device), device_ids=[args.local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    return model, optimizer, loader, sampler


def train(model, optimizer, loader, sampler, scaler, args):
    accum = args.accum
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        optimizer.zero_grad(set_to_none=True)
        for i, (x, y) in enumerate(loader):
            x = x.to(args.device, non_blocking=True)
            y = y.to(args.device, non_blocking=True)
            is_last = (i + 1) % accum == 0 or i + 1 == len(loader)
            sync = contextlib.nullcontext() if is_last else model.no_sync()
            with sync:
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = F.cross_entropy(model(x), y) / accum
                scaler.scale(loss).backward()
            if is_last:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
            if i % 100 == 0 and dist.get_rank() == 0:
                print(epoch, i, loss.item() * accum)
        if dist.get_rank() == 0:
            torch.save({"model": model.module.state_dict(), "opt": optimizer.state_dict(),
                        "scaler": scaler.state_dict(), "epoch": epoch}, "ckpt.pt")


def main(args, dataset, model):
    dist.init_process_group("nccl")
    args.local_rank = int(os.environ["LOCAL_RANK"])
    args.device = torch.device("cuda", args.local_rank)
    torch.cuda.set_device(args.device)
    model, optimizer, loader, sampler = build(dataset, model, args)
    scaler = torch.amp.GradScaler("cuda")
    train(model, optimizer, loader, sampler, scaler, args)
    dist.destroy_process_group()
