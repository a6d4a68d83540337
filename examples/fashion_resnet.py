"""A small ResNet for `roundoff quantize`: calibrated on training images, judged on test images.

Fashion-MNIST where Debian's dataset-fashion-mnist is installed (trained in under a minute), else scikit-learn's digits.
"""

import gzip
from pathlib import Path

import torch
from torch import nn

FOLDER = Path("/usr/share/datasets/fashion-mnist")
CALIBRATION, TEST, BATCH = 512, 2048, 128
Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def read(name: str) -> torch.Tensor:
    """One file of Fashion-MNIST: a header of 16 (images) or 8 (labels) bytes, then bytes."""
    raw = gzip.decompress((FOLDER / f"{name}.gz").read_bytes())
    if "labels" in name:
        return torch.frombuffer(bytearray(raw[8:]), dtype=torch.uint8).long()
    return (
        torch.frombuffer(bytearray(raw[16:]), dtype=torch.uint8)
        .view(-1, 1, 28, 28)
        .float()
        / 255
    )


def data() -> tuple[Batch, Batch]:
    """Images and labels to train on and to test on."""
    if FOLDER.exists():
        train = read("train-images-idx3-ubyte"), read("train-labels-idx1-ubyte")
        test = (
            read("t10k-images-idx3-ubyte")[:TEST],
            read("t10k-labels-idx1-ubyte")[:TEST],
        )
        return train, test
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(
        len(digits.target), generator=torch.Generator().manual_seed(0)
    )
    images = torch.tensor(digits.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    labels = torch.tensor(digits.target)[order]
    return (images[CALIBRATION:], labels[CALIBRATION:]), (
        images[:CALIBRATION],
        labels[:CALIBRATION],
    )


def model() -> nn.Module:
    """Train with one-cycle AdamW: one epoch of Fashion-MNIST, 20 of digits."""
    images, labels = data()[0]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = network()
        optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.01)
        epochs = 1 if len(images) > 10_000 else 20
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 1e-2, epochs * -(-len(images) // BATCH)
        )
        for _ in range(epochs):
            for index in torch.randperm(len(images)).split(BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(
                    net(images[index]), labels[index]
                ).backward()
                optimizer.step()
                schedule.step()
    return net.eval()


def batches() -> list[Batch]:
    """Training images: the first 512 are calibrated on, all are trained on with --qat."""
    images, labels = data()[0]
    return list(zip(images.split(BATCH), labels.split(BATCH), strict=True))


def held_out() -> list[Batch]:
    """Test images."""
    images, labels = data()[1]
    return list(zip(images.split(BATCH), labels.split(BATCH), strict=True))


def forward(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch[0])


def loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def accuracy(outputs: list[torch.Tensor], batches: list[Batch]) -> float:
    """Share of images classified correctly."""
    right = [
        (o.argmax(1) == y).double() for o, (_, y) in zip(outputs, batches, strict=True)
    ]
    return torch.cat(right).mean().item()


metric = accuracy
