"""Captions and pictures meet in one space: two towers, a momentum teacher, a learned temperature."""

import copy
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


@dataclass
class Config:
    words: int = 50
    length: int = 9
    dim: int = 16
    batch: int = 8
    lr: float = 2e-2
    decay: float = 1e-2
    momentum: float = 0.9
    keep: float = 0.95
    distil: float = 0.3
    epochs: int = 1


class Pairs(Dataset):
    def __init__(self, cfg, split):
        rng = np.random.default_rng({"train": 5, "test": 6}[split])
        self.text = rng.integers(1, cfg.words, (32, cfg.length))
        lengths = rng.integers(3, cfg.length + 1, 32)
        for row, length in enumerate(lengths):
            self.text[row, length:] = 0
        topic = self.text[:, :3].sum(1)[:, None, None] / 30
        noise = rng.standard_normal((32, 3, 12))
        self.picture = (20 * np.sin(topic + noise) + 128).astype("f4")
        self.mean = self.picture.mean((0, 2), keepdims=True)[0]
        self.std = self.picture.std((0, 2), keepdims=True)[0]

    def __len__(self):
        return len(self.text)

    def __getitem__(self, index):
        picture = (self.picture[index] - self.mean) / self.std
        return torch.tensor(self.text[index]), torch.tensor(picture)


class TextTower(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.token = nn.Embedding(cfg.words, cfg.dim, padding_idx=0)
        self.register_buffer("place", self.places(cfg.length, cfg.dim))
        self.query = nn.Parameter(torch.zeros(cfg.dim))
        self.key = nn.Linear(cfg.dim, cfg.dim)
        self.value = nn.Linear(cfg.dim, cfg.dim)
        self.head = nn.Linear(cfg.dim, cfg.dim, bias=False)

    @staticmethod
    def places(length, dim):
        angle = torch.arange(length)[:, None] / 100 ** (torch.arange(0, dim, 2) / dim)
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)

    def forward(self, text):
        x = self.token(text) + self.place
        score = torch.tanh(self.key(x)) @ self.query / math.sqrt(x.shape[-1])
        score = score.masked_fill(text == 0, -math.inf)
        pooled = torch.einsum("bl,bld->bd", score.softmax(1), self.value(x))
        return self.head(pooled)


class PictureTower(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.stem = nn.Conv1d(3, 12, 3, padding=1)
        self.norm = nn.GroupNorm(3, 12, eps=1e-3)
        self.deep = nn.Conv1d(12, cfg.dim, 3, stride=2, padding=1, groups=4)
        self.head = nn.Linear(cfg.dim, cfg.dim, bias=False)

    def forward(self, picture):
        x = F.silu(self.norm(self.stem(picture)))
        return self.head(F.silu(self.deep(x)).amax(-1))


class TwoTowers(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.text, self.picture = TextTower(cfg), PictureTower(cfg)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, text, picture):
        t = F.normalize(self.text(text), dim=-1)
        p = F.normalize(self.picture(picture), dim=-1)
        return self.log_scale.exp().clamp(max=100) * t @ p.T


def contrast(logits, target):
    rows = -(target * logits.log_softmax(1)).sum(1).mean()
    columns = -(target.T * logits.T.log_softmax(1)).sum(1).mean()
    return (rows + columns) / 2


def pretrained(cfg):
    generator = torch.Generator().manual_seed(77)
    state = TwoTowers(cfg).state_dict()
    for name, value in state.items():
        if name.endswith("weight") or name.endswith("query"):
            value += 0.2 * torch.randn(value.shape, generator=generator)
    state["text.token.weight"][0] = 0
    return state


def groups_of(model, cfg):
    plain = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    return [
        {"params": matrices, "weight_decay": cfg.decay},
        {"params": plain, "weight_decay": 0.0},
    ]


@torch.no_grad()
def follow(teacher, student, keep):
    for slow, fast in zip(teacher.parameters(), student.parameters()):
        slow.lerp_(fast, 1 - keep)


def main(cfg):
    torch.manual_seed(0)
    model = TwoTowers(cfg)
    model.load_state_dict(pretrained(cfg))
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(
        groups_of(model, cfg), lr=cfg.lr, momentum=cfg.momentum, nesterov=True
    )
    loader = DataLoader(
        Pairs(cfg, "train"),
        batch_size=cfg.batch,
        shuffle=True,
        generator=torch.Generator().manual_seed(3),
    )
    for epoch in range(cfg.epochs):
        for text, picture in loader:
            logits = model(text, picture)
            soft = teacher(text, picture).softmax(1)
            hard = torch.eye(len(text))
            loss = contrast(logits, (1 - cfg.distil) * hard + cfg.distil * soft)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            follow(teacher, model, cfg.keep)
            print(f"{epoch} {loss.item():.6f}")


if __name__ == "__main__":
    main(Config())
