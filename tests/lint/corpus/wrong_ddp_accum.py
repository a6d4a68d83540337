import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train(local_rank, model, dataset, accumulation_steps=4):
    model = DistributedDataParallel(model.cuda(local_rank), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = torch.nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler("cuda")
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10_000)
    loader = torch.utils.data.DataLoader(dataset, 32, num_workers=4, pin_memory=True, sampler=torch.utils.data.distributed.DistributedSampler(dataset))
    for epoch in range(10):
        loader.sampler.set_epoch(epoch)
        for step, (img, label) in enumerate(loader, start=1):
            img, label = img.cuda(local_rank, non_blocking=True), label.cuda(local_rank, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = criterion(model(img), label)
                loss = loss / accumulation_steps
                scaler.scale(loss).backward()  # expect: RO201
            scaler.unscale_(optimizer)  # expect: RO105
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if step % accumulation_steps == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scheduler.step()  # expect: RO107
