import contextlib
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def setup():
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    return rank


def load(path, model, opt, scaler):
    if not os.path.exists(path):
        return 0
    ck = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(ck["model"])
    opt.load_state_dict(ck["opt"])
    scaler.load_state_dict(ck["scaler"])
    return ck["epoch"] + 1


def main(ds, build, accumulate=8, epochs=10):
    rank = setup()
    torch.manual_seed(17)
    net = build().to(rank)
    ddp = DDP(net, device_ids=[rank])
    opt = torch.optim.AdamW(ddp.parameters(), lr=3e-4, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cuda")
    start = load("ck.pt", net, opt, scaler)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=16, sampler=sampler, num_workers=8, pin_memory=True)
    for epoch in range(start, epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        for i, (tokens, target) in enumerate(loader):
            tokens = tokens.to(rank, non_blocking=True)
            target = target.to(rank, non_blocking=True)
            boundary = (i + 1) % accumulate == 0 or i + 1 == len(loader)
            sync = contextlib.nullcontext() if boundary else ddp.no_sync()
            with sync:
                with torch.autocast("cuda", dtype=torch.float16):
                    logits = ddp(tokens)
                    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()) / accumulate
                scaler.scale(loss).backward()
            if boundary:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad(set_to_none=True)
        if rank == 0:
            torch.save(dict(model=net.state_dict(), opt=opt.state_dict(), scaler=scaler.state_dict(), epoch=epoch), "ck.pt")
        dist.barrier()
    dist.destroy_process_group()
