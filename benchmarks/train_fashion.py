"""Train the networks of the quantization benchmarks on Fashion-MNIST, and write them to out/fashion_nets.

Three kinds: residual blocks with ReLU; inverted residual blocks with depthwise convolutions and ReLU6 (Sandler et al.,
arXiv:1801.04381); and the first kind again with the channels inside each block rescaled by 2^U(-3, 3), which leaves the
function as it is and makes ranges differ 64-fold between channels.
"""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from common import progress
from fashion_nets import (
    NAMES,
    OWN,
    QUICK,
    QUICK_TRAINED,
    Data,
    options,
    part,
    table,
)
from torch import Tensor, nn
from torch.nn import functional

BATCH = 128


class Unit(nn.Sequential):
    """Its first two parts have these names."""

    conv: nn.Conv2d
    norm: nn.BatchNorm2d


def unit(
    before: int,
    after: int,
    size: int,
    act: nn.Module | None = None,
    stride: int = 1,
    groups: int = 1,
) -> Unit:
    """Convolution, BatchNorm, activation."""
    conv = nn.Conv2d(before, after, size, stride, size // 2, groups=groups, bias=False)
    layers: list[tuple[str, nn.Module]] = [
        ("conv", conv),
        ("norm", nn.BatchNorm2d(after)),
    ]
    return Unit(OrderedDict([*layers, ("act", act)] if act is not None else layers))


class Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al., arXiv:1512.03385)."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.first = unit(before, after, 3, nn.ReLU(), stride)
        self.second = unit(after, after, 3)
        self.short = (
            unit(before, after, 1, stride=stride)
            if before != after or stride > 1
            else nn.Identity()
        )
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.act(self.second(self.first(x)) + self.short(x))
        return output


class Inverted(nn.Module):
    """Widen, convolve each channel alone, narrow; with a shortcut where the shape stays."""

    def __init__(
        self, before: int, after: int, stride: int = 1, widen: int = 4
    ) -> None:
        super().__init__()
        inside = before * widen
        self.body = nn.Sequential(
            unit(before, inside, 1, nn.ReLU6()),
            unit(inside, inside, 3, nn.ReLU6(), stride, inside),
            unit(inside, after, 1),
        )
        self.skips = before == after and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.body(x) if self.skips else self.body(x)
        return output


def head(width: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]


def resnet() -> nn.Module:
    return nn.Sequential(
        unit(1, 16, 3, nn.ReLU()),
        Residual(16, 32, 2),
        Residual(32, 32),
        Residual(32, 64, 2),
        Residual(64, 64),
        *head(64),
    )


def mobile() -> nn.Module:
    return nn.Sequential(
        unit(1, 16, 3, nn.ReLU6()),
        Inverted(16, 24, 2),
        Inverted(24, 24),
        Inverted(24, 40, 2),
        Inverted(40, 40),
        Inverted(40, 64),
        unit(64, 128, 1, nn.ReLU6()),
        *head(128),
    )


NETS: dict[str, Callable[[], nn.Module]] = {
    "resnet": resnet,
    "mobile": mobile,
    "skew": resnet,
}


@torch.no_grad()
def skewed(net: nn.Module) -> nn.Module:
    """The same function with each channel between the two convolutions of a block times a random factor."""
    net, random = copy.deepcopy(net), torch.Generator().manual_seed(1)
    for block in net.modules():
        if isinstance(block, Residual):
            factor = 2.0 ** (
                6 * torch.rand(block.first.norm.num_features, generator=random) - 3
            )
            block.first.norm.weight.mul_(factor)
            block.first.norm.bias.mul_(factor)
            block.second.conv.weight.div_(factor[:, None, None])
    return net


def train(
    net: nn.Module, epochs: int, rate: float = 0.1, count: int | None = None
) -> nn.Module:
    """OneCycle SGD; half of the images are mirrored."""
    images, labels = (t[:count] for t in part("train"))
    optimizer = torch.optim.SGD(
        net.parameters(), rate, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    steps = epochs * -(-len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, steps, pct_start=0.2
    )
    net.train()
    for _ in range(epochs):
        for index in torch.randperm(len(images)).split(BATCH):
            x = images[index]
            x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x)
            optimizer.zero_grad()
            functional.cross_entropy(net(x), labels[index]).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def make(
    name: str, folder: Path, epochs: int = 3, count: int | None = None
) -> nn.Module:
    """Train one and write it; the skewed one is made of the first."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    net = NETS[name]()
    if name == "skew":
        source = folder / "resnet.safetensors"
        if not source.exists():
            make("resnet", folder, epochs, count)
        net.load_state_dict(load_file(source))
        net = skewed(net.eval())
    else:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = train(NETS[name](), epochs, count=count)
    save_file(net.state_dict(), folder / f"{name}.safetensors")
    return net


def main() -> None:
    args = options(__doc__, epochs={"type": int, "default": 3, "help": "of training"})
    count, data, rows = QUICK_TRAINED if args.quick else None, Data.load(args.quick), []
    folder = QUICK if args.quick else OWN
    for name in (n for n in NAMES if n in args.only):
        start = time.process_time()
        net = make(name, folder, 1 if args.quick else args.epochs, count)
        rows.append(
            (
                name,
                sum(p.numel() for p in net.parameters()),
                f"{data.top1(data.logits(net)):.2f}",
                f"{time.process_time() - start:.0f}",
            )
        )
        progress(f"{name}: {rows[-1][2]} %")
    table(f"Networks in {folder}", ("network", "parameters", "top-1 %", "CPU s"), rows)


if __name__ == "__main__":
    main()
