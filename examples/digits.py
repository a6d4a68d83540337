"""A small residual CNN with BatchNorm, trained in seconds on scikit-learn's 8x8 digits; metric: test accuracy."""

import torch
from torch import nn

TEST = 512
BATCH = 128


class Block(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Images (1797, 1, 8, 8) in [0, 1] and labels, shuffled with a fixed seed."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(
        len(digits.target), generator=torch.Generator().manual_seed(0)
    )
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[order], torch.tensor(digits.target)[order]


def model() -> nn.Module:
    """Train for 15 epochs (a few seconds)."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(1, 16, 3, 1, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            Block(16, 16, 1),
            Block(16, 32, 2),
            Block(32, 64, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )
        images, labels = (part[TEST:] for part in data())
        optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.05)
        epochs, step = 15, 64
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 4e-3, epochs * -(-len(images) // step)
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
    """The test set: images and labels."""
    images, labels = data()
    return list(
        zip(images[:TEST].split(BATCH), labels[:TEST].split(BATCH), strict=True)
    )


def forward(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return model(batch[0])


def loss(
    output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def accuracy(
    outputs: list[torch.Tensor], batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> float:
    """Share of test digits classified correctly."""
    right = [
        (o.argmax(1) == y).double() for o, (_, y) in zip(outputs, batches, strict=True)
    ]
    return torch.cat(right).mean().item()


metric = accuracy
