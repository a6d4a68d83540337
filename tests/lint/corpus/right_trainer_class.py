import math
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader


@dataclass
class TrainingArguments:
    output_dir: str
    fp16: bool = False
    bf16: bool = False
    max_grad_norm: float = 1.0
    gradient_accumulation_steps: int = 1
    learning_rate: float = 5e-5
    num_train_epochs: int = 3
    warmup: int = 100


class Trainer:
    def __init__(self, model, args: TrainingArguments, train_dataset, eval_dataset, collate_fn, optimizer=None):
        self.model = model.to("cuda")
        self.args = args
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.collate_fn = collate_fn
        self.optimizer = optimizer or torch.optim.AdamW(self.model.parameters(), lr=args.learning_rate)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: min(1.0, (s + 1) / args.warmup))
        self.use_amp = args.fp16 or args.bf16
        self.amp_dtype = torch.float16 if args.fp16 else torch.bfloat16
        self.scaler = torch.amp.GradScaler("cuda", enabled=args.fp16)

    def autocast(self):
        return torch.autocast("cuda", dtype=self.amp_dtype, enabled=self.use_amp)

    def compute_loss(self, model, inputs, return_outputs=False):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs["logits"]
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-100)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model, inputs):
        model.train()
        inputs = {k: v.to("cuda", non_blocking=True) for k, v in inputs.items()}
        with self.autocast():
            loss = self.compute_loss(model, inputs)
        if self.args.gradient_accumulation_steps > 1:
            loss = loss / self.args.gradient_accumulation_steps
        self.scaler.scale(loss).backward()
        return loss.detach()

    def train(self):
        loader = DataLoader(self.train_dataset, batch_size=8, shuffle=True, collate_fn=self.collate_fn, num_workers=4, pin_memory=True)
        step_count = 0
        tr_loss = torch.tensor(0.0, device="cuda")
        self.model.zero_grad()
        for epoch in range(self.args.num_train_epochs):
            for step, inputs in enumerate(loader):
                tr_loss += self.training_step(self.model, inputs)
                if (step + 1) % self.args.gradient_accumulation_steps == 0:
                    self.scaler.unscale_(self.optimizer)
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
                    scale_before = self.scaler.get_scale()
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                    if scale_before <= self.scaler.get_scale():
                        self.lr_scheduler.step()
                    self.model.zero_grad()
                    step_count += 1
            self.evaluate()
            self.save()
        return tr_loss.item() / max(step_count, 1)

    def save(self):
        torch.save({
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.lr_scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
        }, f"{self.args.output_dir}/checkpoint.pt")

    @torch.no_grad()
    def evaluate(self):
        loader = DataLoader(self.eval_dataset, batch_size=16, collate_fn=self.collate_fn, num_workers=4, pin_memory=True)
        self.model.eval()
        losses = []
        for inputs in loader:
            inputs = {k: v.to("cuda", non_blocking=True) for k, v in inputs.items()}
            with self.autocast():
                loss = self.compute_loss(self.model, inputs)
            losses.append(loss.item())
        mean = sum(losses) / len(losses)
        return {"eval_loss": mean, "perplexity": math.exp(mean)}
