"""A training that is slow for thirteen known reasons; each is marked where it stands."""

import atexit
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

SAMPLES = 48
FOLDER = Path(tempfile.mkdtemp(prefix="roundoff-slow-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


def write_samples():
    generator = np.random.default_rng(0)
    for number in range(SAMPLES):
        image = generator.standard_normal((3, 80, 80)).astype(np.float32)
        np.save(FOLDER / f"{number}.npy", image)


write_samples()


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        # fragmentation: three layers of one input
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x):
        query = self.split(self.query(x))
        key = self.split(self.key(x))
        value = self.split(self.value(x))
        # fused_attention: written out
        scores = torch.matmul(query, key.transpose(-2, -1)) / query.shape[-1] ** 0.5
        result = torch.matmul(functional.softmax(scores, dim=-1), value)
        return self.out(result.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        # drop_bias_before_norm
        self.stem = nn.Conv2d(3, 32, 3, stride=4, padding=1)
        self.norm = nn.BatchNorm2d(32)
        # group_convolutions
        self.grouped = nn.Conv2d(32, 64, 3, padding=1, groups=8)
        # equal_channels: 64 -> 16
        self.narrow = nn.Conv2d(64, 16, 1)
        self.wide = nn.Conv2d(16, 64, 1)
        self.attention = Attention(64, 4)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = self.wide(self.narrow(self.grouped(x)))
        # elementwise_share
        for _ in range(6):
            x = x * 1.01 + 0.001
            x = torch.tanh(x)
        # value_to_python
        if x.abs().max().item() > 1e6:
            x = x / 2
        x = x.flatten(2).transpose(1, 2)
        x = x + self.attention(x)
        # no_fp64
        x = x.double()
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt()
        return self.head(x.float().mean(1))


def model():
    torch.manual_seed(0)
    return Net()


def read(number):
    """packed_files: one file a sample. ready_samples: resized in every epoch."""
    image = torch.from_numpy(np.load(FOLDER / f"{number}.npy"))[None]
    return functional.interpolate(image, size=(64, 64), mode="bicubic")


def batches():
    for start in range(0, SAMPLES, 8):
        images = torch.cat([read(n) for n in range(start, start + 8)])
        yield images, torch.arange(8) % 10


def forward(model, batch):
    return model(batch[0])


def loss(output, batch):
    return functional.cross_entropy(output, batch[1])


def optimizer(model):
    # fused_optimizer: one parameter after the other
    return torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)


def step(model, optimizer, batch):
    # no_anomaly_mode, left from a search for NaN
    with torch.autograd.set_detect_anomaly(True):
        # gradients_to_none
        optimizer.zero_grad(set_to_none=False)
        value = loss(forward(model, batch), batch)
        value.backward()
        optimizer.step()
    return value
