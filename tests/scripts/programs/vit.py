"""Trains a small vision transformer on stripes; label smoothing, AdamW, an average of weights."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) * (d // self.heads) ** -0.5).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, d))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        )

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, dim=24, heads=3, classes=4):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, stride=4)
        self.cls = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.pos = nn.Parameter(0.5 * torch.randn(1, 17, dim))
        self.blocks = nn.ModuleList([Block(dim, heads) for _ in range(2)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1)
        x = x + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def stripes(count):
    g = torch.Generator().manual_seed(21)
    labels = torch.randint(0, 4, (count,), generator=g)
    wave = torch.sin(torch.arange(16) * (labels[:, None] + 1) * 0.4)
    images = wave[:, None, None, :] + 0.5 * torch.randn(count, 3, 16, 16, generator=g)
    return images, labels


def load(model):
    torch.manual_seed(13)
    saved = ViT().state_dict()
    for key in saved:
        if "norm" in key:
            saved[key] += 0.25 * torch.randn(saved[key].shape)
    model.load_state_dict(saved)


images, labels = stripes(32)
images = (images - images.mean()) / images.std()
order = torch.Generator().manual_seed(2)
loader = DataLoader(
    TensorDataset(images, labels), batch_size=8, shuffle=True, generator=order
)
model = ViT()
load(model)
decayed = [p for n, p in model.named_parameters() if p.ndim > 1]
plain = [p for n, p in model.named_parameters() if p.ndim <= 1]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
    lr=3e-3,
)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
average = {n: p.detach().clone() for n, p in model.named_parameters()}
for step, (x, y) in enumerate(loader):
    if step == 2:
        break
    optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    cosine.step()
    with torch.no_grad():
        for n, p in model.named_parameters():
            average[n].lerp_(p, 0.1)
    print("loss", loss.item())
