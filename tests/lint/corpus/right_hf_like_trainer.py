import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader


@dataclass
class TrainingArguments:
    output_dir: str = "out"
    lr: float = 5e-5
    num_epochs: int = 3
    batch_size: int = 16
    fp16: bool = True
    grad_accum: int = 1
    max_grad_norm: float = 1.0


class MyTrainer:
    """A trainer in the manner of transformers."""

    def __init__(self, model, args, train_dataset, eval_dataset, collate_fn):
        self.model = model.to("cuda")
        self.args = args
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.collate_fn = collate_fn
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.scaler = torch.amp.GradScaler("cuda", enabled=args.fp16)

    def get_loader(self, dataset, shuffle):
        return DataLoader(
            dataset, self.args.batch_size, shuffle=shuffle, collate_fn=self.collate_fn, num_workers=2, pin_memory=True
        )

    def autocast(self):
        return torch.autocast("cuda", dtype=torch.float16, enabled=self.args.fp16)

    def compute_loss(self, model, inputs):
        labels = inputs.pop("labels")
        logits = model(**inputs)
        return nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-100)

    def training_step(self, inputs):
        self.model.train()
        with self.autocast():
            loss = self.compute_loss(self.model, inputs)
        self.scaler.scale(loss / self.args.grad_accum).backward()
        return loss.detach()

    def train(self):
        loader = self.get_loader(self.train_dataset, True)
        total = torch.tensor(0.0, device="cuda")
        for epoch in range(self.args.num_epochs):
            for step, inputs in enumerate(loader):
                inputs = {k: v.to("cuda", non_blocking=True) for k, v in inputs.items()}
                total += self.training_step(inputs)
                if (step + 1) % self.args.grad_accum == 0:
                    self.scaler.unscale_(self.optimizer)
                    nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                    self.model.zero_grad()
            metrics = self.evaluate()
            print(epoch, metrics)

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        losses = []
        for inputs in self.get_loader(self.eval_dataset, False):
            inputs = {k: v.to("cuda") for k, v in inputs.items()}
            with self.autocast():
                losses.append(self.compute_loss(self.model, inputs))
        loss = torch.stack(losses).mean().item()
        return {"eval_loss": loss, "perplexity": math.exp(min(loss, 20))}
