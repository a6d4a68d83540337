"""A small CNN with BatchNorm on Fashion-MNIST (Debian's dataset-fashion-mnist); metric: test accuracy."""

import gzip
from pathlib import Path

import torch
from torch import nn

FOLDER = Path("/usr/share/datasets/fashion-mnist")
TEST, BATCH = 1024, 128


def read(name: str) -> torch.Tensor:
    """One file of the data set: a header of 16 (images) or 8 (labels) bytes, then bytes."""
    found = next(
        (p for p in (FOLDER / f"{name}.gz", FOLDER / name) if p.exists()), None
    )
    if found is None:
        raise FileNotFoundError(
            f"no {name} in {FOLDER}: this example reads Debian's package; apt-get install dataset-fashion-mnist"
        )
    raw = (
        gzip.decompress(found.read_bytes())
        if found.suffix == ".gz"
        else found.read_bytes()
    )
    header = 16 if "images" in name else 8
    values = torch.frombuffer(bytearray(raw[header:]), dtype=torch.uint8)
    return (
        values.view(-1, 1, 28, 28).float() / 255 if "images" in name else values.long()
    )


def model() -> nn.Module:
    """Train for two epochs (about ten seconds)."""
    images, labels = read("train-images-idx3-ubyte"), read("train-labels-idx1-ubyte")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for inputs, outputs, stride in ((1, 16, 2), (16, 32, 2), (32, 64, 2)):
            layers += [
                nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
            ]
        net = nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
        )
        optimizer = torch.optim.AdamW(net.parameters())
        epochs, step = 2, 100
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 1e-2, epochs * len(images) // step
        )
        for _ in range(epochs):
            for index in torch.randperm(len(images)).split(step):
                optimizer.zero_grad()
                nn.functional.cross_entropy(
                    net(images[index]), labels[index]
                ).backward()
                optimizer.step()
                schedule.step()
    return net.eval()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The first test images and their labels."""
    images, labels = (
        read("t10k-images-idx3-ubyte")[:TEST],
        read("t10k-labels-idx1-ubyte")[:TEST],
    )
    return list(zip(images.split(BATCH), labels.split(BATCH), strict=True))


def forward(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return model(batch[0])


def loss(
    output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def accuracy(
    outputs: list[torch.Tensor], batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> float:
    """Share of test images classified correctly."""
    right = [
        (o.argmax(1) == y).double() for o, (_, y) in zip(outputs, batches, strict=True)
    ]
    return torch.cat(right).mean().item()


metric = accuracy
