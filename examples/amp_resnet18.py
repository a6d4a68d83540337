"""ResNet-18 trained from nothing on real images, for `roundoff bench`: Fashion-MNIST where Debian's dataset-fashion-mnist is
installed, scikit-learn's digits else; metric: accuracy on images that training never sees.

    roundoff bench examples/amp_resnet18.py --configs fp32,bf16,bf16+channels_last
    python examples/amp_resnet18.py

The second also runs `as_commonly_published`, a mixed-precision step that is found in many tutorials and is wrong in four
places, beside the same done properly, and says what is wrong with it.
"""

import argparse
import warnings
from pathlib import Path

import fashion_mnist
import torch
from torch import nn

SIZE, BATCH, TRAIN, HELD_OUT = 56, 32, 2048, 512

Batch = tuple[torch.Tensor, torch.Tensor]


def images(part: str, count: int) -> Batch:
    """Images (count, 1, 56, 56) with mean 0 and standard deviation 1, and labels. `part`: train or t10k."""
    if fashion_mnist.FOLDER.exists():
        pictures = fashion_mnist.read(f"{part}-images-idx3-ubyte")[:count]
        labels = fashion_mnist.read(f"{part}-labels-idx1-ubyte")[:count]
    else:
        from sklearn.datasets import load_digits

        digits = load_digits()  # 1797 of them: the first 512 are held out
        own = slice(HELD_OUT, HELD_OUT + count) if part == "train" else slice(0, count)
        pictures = (
            torch.tensor(digits.images[own], dtype=torch.float32).unsqueeze(1) / 16
        )
        labels = torch.tensor(digits.target[own])
    pictures = nn.functional.interpolate(pictures, size=SIZE, mode="bilinear")
    return (pictures - pictures.mean()) / pictures.std(), labels


def model() -> nn.Module:
    """Weights as the random state gives them: each seed of a bench has its own."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        num_channels=1,
        embedding_size=64,
        hidden_sizes=[64, 128, 256, 512],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=10,
    )
    return ResNetForImageClassification(config)


def batches() -> list[Batch]:
    pictures, labels = images("train", TRAIN)
    whole = len(labels) // BATCH * BATCH
    return list(
        zip(pictures[:whole].split(BATCH), labels[:whole].split(BATCH), strict=True)
    )


def held_out() -> list[Batch]:
    pictures, labels = images("t10k", HELD_OUT)
    return list(zip(pictures.split(128), labels.split(128), strict=True))


def forward(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The logits, shape (images, 10)."""
    return model(batch[0]).logits


def loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def accuracy(outputs: list[torch.Tensor], batches: list[Batch]) -> float:
    """Share of images classified correctly."""
    right = [
        (o.argmax(1) == y).double() for o, (_, y) in zip(outputs, batches, strict=True)
    ]
    return torch.cat(right).mean().item()


metric = accuracy


def as_commonly_published(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch
) -> torch.Tensor:
    """Mixed precision as it stands in many tutorials; the bench finds what is wrong with it."""
    pictures, labels = batch
    scaler = torch.amp.GradScaler(pictures.device.type)  # made anew for each batch
    pictures = pictures.half()  # cast by hand, before autocast
    optimizer.zero_grad()
    with torch.autocast(pictures.device.type, torch.float16):
        value = nn.functional.cross_entropy(model(pictures).logits, labels)
    scaler.scale(value).backward()
    optimizer.step()  # not scaler.step(optimizer), and no scaler.update()
    return value


def main() -> None:
    import roundoff as ro

    parser = argparse.ArgumentParser(
        description="ResNet-18 in mixed precision, done properly and as commonly published"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--fp16-steps",
        type=int,
        default=10,
        help="steps of the second part, slow on a CPU",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("out/amp_resnet18"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    workload = ro.Workload.load(__file__)
    print("Done properly: what mixed precision gains on this machine\n")
    found = ro.bench(
        workload,
        ["fp32", "bf16", "bf16+channels_last"],
        steps=args.steps,
        seeds=args.seeds,
    )
    found.report(args.output / "report.html")
    print(found)
    print(
        "fp16 with a loss scale that is stepped and updated, beside the step as commonly published\n"
    )
    warnings.simplefilter(
        "ignore", RuntimeWarning
    )  # fp16 on a CPU is slow: it stands among the notes
    small = ro.Workload(
        model,
        [(x[:8], y[:8]) for x, y in workload.batches],
        forward=forward,
        loss=loss,
        optimizer=optimizer,
        metric=accuracy,
        held_out=[(x[:32], y[:32]) for x, y in workload.held_out[:2]],
        name="amp_resnet18, 8 images each",
    )
    found = ro.bench(
        small, ["fp32", "fp16", as_commonly_published], steps=args.fp16_steps, seeds=2
    )
    found.report(args.output / "as_commonly_published.html")
    print(found)
    print(f"Written to {args.output}: report.html, as_commonly_published.html")


if __name__ == "__main__":
    main()
