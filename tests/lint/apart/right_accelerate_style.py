from accelerate import Accelerator
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from tqdm.auto import tqdm


class EMA:
    def __init__(self, model, decay=0.999):
        self.decay = decay
        self.shadow = {k: v.detach().clone().float() for k, v in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model):
        for k, v in model.state_dict().items():
            self.shadow[k].mul_(self.decay).add_(v.float(), alpha=1 - self.decay)


def main(model, train_set, valid_set, epochs=3, accum=2):
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=accum)
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    train_loader = DataLoader(train_set, 16, shuffle=True, num_workers=4, pin_memory=True)
    valid_loader = DataLoader(valid_set, 32, num_workers=4, pin_memory=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=1000)
    model, optimizer, train_loader, valid_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, valid_loader, scheduler
    )
    ema = EMA(model)
    for epoch in range(epochs):
        model.train()
        total = 0
        for batch in tqdm(train_loader, disable=not accelerator.is_main_process):
            with accelerator.accumulate(model):
                logits = model(batch["x"])
                loss = F.cross_entropy(logits, batch["y"])
                total += loss.detach()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.update(model)
        model.eval()
        hits = 0
        for batch in valid_loader:
            with torch.no_grad():
                pred = model(batch["x"]).argmax(-1)
            pred, ref = accelerator.gather_for_metrics((pred, batch["y"]))
            hits += (pred == ref).sum().item()
        accelerator.print(epoch, total.item() / len(train_loader), hits / len(valid_set))
        accelerator.wait_for_everyone()
        accelerator.save_state(f"state_{epoch}")
