import torch
import torch.nn.functional as F
from torch import optim


def train_loop(model, loader, cfg):
    device = torch.device("cuda")
    model.to(device)
    optimizer = optim.AdamW(model.parameters(), lr=cfg["lr"], weight_decay=0.1)
    scaler = torch.amp.GradScaler("cuda")  # expect: RO109
    dtype = torch.bfloat16
    step = 0
    while step < cfg["steps"]:
        for x, y in loader:
            x = x.to(device, non_blocking=True)
            y = y.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=dtype):
                logits = model(x)
                loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            step += 1
            if step % cfg["log"] == 0:
                print(step, loss.item())
            if step >= cfg["steps"]:
                break


@torch.inference_mode()
def perplexity(model, loader, device="cuda"):
    model.eval()
    total, tokens = 0.0, 0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(x)
        loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="sum")
        total += loss
        tokens += y.numel()
    model.train()
    return (total / tokens).exp().item()
