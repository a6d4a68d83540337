"""Adapters of low rank are trained beside a frozen language model: a trainer with callbacks and a collator."""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

IGNORE, PAD = -100, 0


@dataclass
class Arguments:
    rank: int = 4
    alpha: float = 12.0
    targets: tuple = ("query", "value", "up")
    learning_rate: float = 5e-3
    weight_decay: float = 0.01
    warmup_steps: int = 2
    max_steps: int = 3
    per_device_batch: int = 4
    accumulate: int = 2
    max_grad_norm: float = 0.5
    callbacks: list = field(default_factory=list)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, mask):
        rows, length, dim = x.shape
        split = (rows, length, self.heads, dim // self.heads)
        q, k, v = (f(x).view(split).transpose(1, 2) for f in (self.query, self.key, self.value))
        score = q @ k.transpose(-2, -1) / math.sqrt(dim // self.heads)
        score = score.masked_fill(~mask, torch.finfo(score.dtype).min)
        mixed = score.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(rows, length, dim))


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.before = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.between = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x, mask):
        x = x + self.attention(self.before(x), mask)
        return x + self.down(F.gelu(self.up(self.between(x))))


class LanguageModel(nn.Module):
    def __init__(self, words=40, dim=16, heads=2, depth=2, places=16):
        super().__init__()
        self.token = nn.Embedding(words, dim)
        self.place = nn.Embedding(places, dim)
        self.layers = nn.ModuleList([Layer(dim, heads) for _ in range(depth)])
        self.last = nn.LayerNorm(dim)

    def forward(self, input_ids, attention_mask, labels=None):
        length = input_ids.shape[1]
        position = (attention_mask.cumsum(1) - 1).clamp(min=0)
        x = self.token(input_ids) + self.place(position)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = causal & attention_mask[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, mask)
        logits = F.linear(self.last(x), self.token.weight)
        if labels is None:
            return logits
        loss = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE
        )
        return loss, logits


class LoraLinear(nn.Module):
    def __init__(self, base, rank, alpha, generator):
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features, generator=generator) / rank)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scaling = alpha / rank

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scaling


def adapted(model, args):
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(31)
    for layer in model.layers:
        for owner in (layer, layer.attention):
            for name, child in list(owner.named_children()):
                if name in args.targets:
                    setattr(owner, name, LoraLinear(child, args.rank, args.alpha, generator))
    model.last.requires_grad_(True)
    return model


def pretrained():
    torch.manual_seed(5)
    model = LanguageModel()
    for name, value in model.state_dict().items():
        if name.endswith("bias"):
            value.copy_(0.1 * torch.randn_like(value))
        elif value.ndim == 2:
            value.mul_(1.3)
    return model


def dataset(count=64):
    generator = torch.Generator().manual_seed(91)
    rows = []
    for _ in range(count):
        prompt = torch.randint(2, 5, (), generator=generator).item()
        answer = torch.randint(3, 8, (), generator=generator).item()
        ids = torch.randint(2, 40, (prompt + answer,), generator=generator)
        rows.append({"ids": ids, "prompt": prompt})
    return rows


def collate(rows):
    length = max(len(row["ids"]) for row in rows)
    input_ids = torch.full((len(rows), length), PAD)
    labels = torch.full((len(rows), length), IGNORE)
    for place, row in enumerate(rows):
        ids = row["ids"]
        input_ids[place, : len(ids)] = ids
        labels[place, row["prompt"] : len(ids)] = ids[row["prompt"] :]
    return {"input_ids": input_ids, "attention_mask": (input_ids != PAD).long(), "labels": labels}


class Callback:
    def on_step_end(self, trainer, loss):
        pass


class Printer(Callback):
    def on_step_end(self, trainer, loss):
        print(f"step {trainer.step} loss {loss:.5f}")


class ShrinkLargest(Callback):
    """Keeps the rows of the adapters' second matrices short."""

    @torch.no_grad()
    def on_step_end(self, trainer, loss):
        for name, value in trainer.model.named_parameters():
            if name.endswith("lora_B"):
                norm = value.norm(dim=1, keepdim=True)
                value.mul_((0.002 / norm).clamp(max=1.0))


class Trainer:
    def __init__(self, model, args, data):
        self.model, self.args, self.data = model, args, data
        self.step = 0
        self.optimizer = self.create_optimizer()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.factor)

    def create_optimizer(self):
        wanted = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        decayed = [p for n, p in wanted if "lora" in n]
        plain = [p for n, p in wanted if "lora" not in n]
        groups = [
            {"params": decayed, "weight_decay": self.args.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.args.learning_rate, betas=(0.9, 0.99))

    def factor(self, step):
        warm = (step + 1) / (self.args.warmup_steps + 1)
        return min(1.0, warm)

    def batches(self):
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(17))
        size = self.args.per_device_batch
        for start in range(0, len(order), size):
            yield collate([self.data[i] for i in order[start : start + size]])

    def training_step(self, batch):
        loss, _ = self.model(**batch)
        loss = loss / self.args.accumulate
        loss.backward()
        return loss.detach()

    def train(self):
        self.model.train()
        batches = self.batches()
        while self.step < self.args.max_steps:
            total = sum(self.training_step(next(batches)) for _ in range(self.args.accumulate))
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.step += 1
            for callback in self.args.callbacks:
                callback.on_step_end(self, total.item())


arguments = Arguments(callbacks=[Printer(), ShrinkLargest()])
Trainer(adapted(pretrained(), arguments), arguments, dataset()).train()
