"""Scripts that use mixed precision as PyTorch's documentation does; lint says nothing."""

SET_UP = """
import torch
from torch import nn, optim
from torch.amp import GradScaler, autocast

device = "cuda"
model = nn.Linear(4, 2).to(device)
optimizer = optim.SGD(model.parameters(), lr=0.1)
loss_fn = nn.MSELoss()
scaler = GradScaler()
"""

SCRIPTS = {
    "typical": SET_UP
    + """
for epoch in range(3):
    for input, target in data:
        optimizer.zero_grad()
        with autocast(device_type="cuda", dtype=torch.float16):
            output = model(input)
            loss = loss_fn(output, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    "clipping": SET_UP
    + """
for epoch in range(3):
    for input, target in data:
        optimizer.zero_grad()
        with autocast(device_type="cuda", dtype=torch.float16):
            output = model(input)
            loss = loss_fn(output, target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
""",
    "accumulation": SET_UP
    + """
iters_to_accumulate = 4
for epoch in range(3):
    for i, (input, target) in enumerate(data):
        with autocast(device_type="cuda", dtype=torch.float16):
            output = model(input)
            loss = loss_fn(output, target)
            loss = loss / iters_to_accumulate
        scaler.scale(loss).backward()
        if (i + 1) % iters_to_accumulate == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
    "gradient penalty": SET_UP
    + """
for epoch in range(3):
    for input, target in data:
        optimizer.zero_grad()
        with autocast(device_type="cuda", dtype=torch.float16):
            output = model(input)
            loss = loss_fn(output, target)
        scaled_grad_params = torch.autograd.grad(
            outputs=scaler.scale(loss), inputs=model.parameters(), create_graph=True
        )
        inv_scale = 1.0 / scaler.get_scale()
        grad_params = [p * inv_scale for p in scaled_grad_params]
        with autocast(device_type="cuda", dtype=torch.float16):
            grad_norm = 0
            for grad in grad_params:
                grad_norm += grad.pow(2).sum()
            grad_norm = grad_norm.sqrt()
            loss = loss + grad_norm
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    "several models, losses and optimizers": """
import torch

scaler = torch.amp.GradScaler("cuda")
model0 = torch.nn.Linear(4, 2).cuda()
model1 = torch.nn.Linear(4, 2).cuda()
optimizer0 = torch.optim.SGD(model0.parameters(), lr=0.1)
optimizer1 = torch.optim.SGD(model1.parameters(), lr=0.1)
loss_fn = torch.nn.MSELoss()
for epoch in range(3):
    for input, target in data:
        optimizer0.zero_grad()
        optimizer1.zero_grad()
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            output0 = model0(input)
            output1 = model1(input)
            loss0 = loss_fn(2 * output0 + 3 * output1, target)
            loss1 = loss_fn(3 * output0 - 5 * output1, target)
        scaler.scale(loss0).backward(retain_graph=True)
        scaler.scale(loss1).backward()
        scaler.unscale_(optimizer0)
        scaler.step(optimizer0)
        scaler.step(optimizer1)
        scaler.update()
""",
    "DataParallel": """
import torch
from torch import nn
from torch.amp import GradScaler, autocast

model = nn.Linear(4, 2)
dp_model = nn.DataParallel(model)
optimizer = torch.optim.SGD(dp_model.parameters(), lr=0.1)
loss_fn = nn.MSELoss()
scaler = GradScaler("cuda")
for input, target in data:
    optimizer.zero_grad()
    with autocast(device_type="cuda", dtype=torch.float16):
        output = dp_model(input)
        loss = loss_fn(output, target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "autocast in forward for DataParallel": """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    @torch.autocast(device_type="cuda")
    def forward(self, input):
        return self.layer(input)


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, input):
        with torch.autocast(device_type="cuda"):
            return self.layer(input)
""",
    "DistributedDataParallel": """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def main(dataset):
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    model = DDP(nn.Linear(4, 2).to(rank), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    criterion = nn.CrossEntropyLoss()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4, pin_memory=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x = x.to(rank, non_blocking=True)
            y = y.to(rank, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = criterion(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    if rank == 0:
        torch.save(
            {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
            },
            "checkpoint.pt",
        )
    dist.destroy_process_group()
""",
    "custom function with several inputs": """
import torch
from torch.amp import custom_bwd, custom_fwd


class MyMM(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad.mm(b.t()), a.t().mm(grad)


mymm = MyMM.apply
with torch.autocast(device_type="cuda", dtype=torch.float16):
    output = mymm(input1, input2)
""",
    "custom function that needs fp32": """
import torch
from torch.amp import custom_bwd, custom_fwd


class MyFloat32Func(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, input):
        ctx.save_for_backward(input)
        return input.exp()

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        (input,) = ctx.saved_tensors
        return grad * input.exp()


with torch.autocast(device_type="cuda", dtype=torch.float16):
    output = MyFloat32Func.apply(input)
""",
    "resumed": SET_UP
    + """
checkpoint = torch.load("checkpoint.pt", map_location="cpu", weights_only=True)
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
scaler.load_state_dict(checkpoint["scaler"])
for epoch in range(3):
    model.train()
    for input, target in data:
        optimizer.zero_grad(set_to_none=True)
        with autocast(device_type="cuda", dtype=torch.float16):
            loss = loss_fn(model(input), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
        },
        "checkpoint.pt",
    )
""",
    "switches": SET_UP.replace("GradScaler()", 'GradScaler("cuda", enabled=use_amp)')
    + """
for epoch in range(3):
    for input, target in data:
        optimizer.zero_grad()
        with torch.autocast(device_type=device, dtype=torch.float16, enabled=use_amp):
            output = model(input)
            assert output.dtype is torch.float16
            loss = loss_fn(output, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    "fp32 inside autocast": SET_UP
    + """
for input, target in data:
    optimizer.zero_grad()
    with autocast(device_type="cuda"):
        e = torch.mm(a, b)
        with autocast(device_type="cuda", enabled=False):
            f = torch.mm(c, e.float())
        g = torch.mm(d, f)
        loss = g.mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "bf16 on a CPU": """
import torch

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = torch.nn.CrossEntropyLoss()
for input, target in data:
    optimizer.zero_grad()
    with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
        loss = criterion(model(input), target)
    loss.backward()
    optimizer.step()

model.eval()
with torch.no_grad(), torch.autocast(device_type="cpu", dtype=torch.bfloat16):
    for input, target in test:
        output = model(input)
""",
    "closures and helpers": """
import torch


class Trainer:
    def __init__(self, model, optimizer, use_amp):
        self.model = model
        self.opt = optimizer
        self.scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
        self.criterion = torch.nn.CrossEntropyLoss()

    def forward_loss(self, batch):
        x, y = batch
        with torch.autocast("cuda", dtype=torch.float16):
            return self.criterion(self.model(x), y)

    def optimize(self):
        self.scaler.unscale_(self.opt)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad(set_to_none=True)

    def fit(self, loader, every):
        for step, batch in enumerate(loader, 1):
            loss = self.forward_loss(batch) / every
            self.scaler.scale(loss).backward()
            if step % every:
                continue
            self.optimize()
""",
    "with and without a scaler": """
import torch


def train(model, loader, optimizer, criterion, scaler=None):
    model.train()
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16, enabled=scaler is not None):
            loss = criterion(model(x), y)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
""",
    "a GAN": """
import torch

scaler = torch.amp.GradScaler("cuda")
for real in loader:
    optimizer_d.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        fake = generator(noise)
        loss_d = bce(discriminator(real), ones) + bce(discriminator(fake.detach()), zeros)
    scaler.scale(loss_d).backward()
    scaler.step(optimizer_d)

    optimizer_g.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        loss_g = bce(discriminator(fake), ones)
    scaler.scale(loss_g).backward()
    scaler.step(optimizer_g)
    scaler.update()
""",
    "accelerate": """
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
""",
    "Lightning": """
import lightning as L
import torch


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        loss = torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
""",
}

SCRIPTS["folds"] = """
import torch


def train(model, loader, epochs):
    optimizer = make_optimizer(model)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = criterion(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


for fold in range(5):
    train(make_model(), loaders[fold], 10)

for rate in (1e-3, 1e-4):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
