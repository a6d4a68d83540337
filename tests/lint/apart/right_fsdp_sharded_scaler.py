import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

mp = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)


def train(rank, model, loader, epochs):
    model = FSDP(model, mixed_precision=mp, device_id=rank)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = ShardedGradScaler()
    for e in range(epochs):
        loader.sampler.set_epoch(e)
        for x, y in loader:
            opt.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x.to(rank)), y.to(rank))
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            model.clip_grad_norm_(1.0)
            scaler.step(opt)
            scaler.update()
