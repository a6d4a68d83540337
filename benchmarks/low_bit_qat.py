"""How much accuracy is left when a network is trained in one, two and four bits, beside what the papers lost?

A small residual network is trained on Fashion-MNIST in fp32 for some epochs. Each recipe starts from it, as in its paper,
keeps stem, classifier and BatchNorm in fp32, and is trained for as many epochs again, with a rate that falls as a cosine;
scales are per channel, TTQ's per layer. The figure is accuracy over that of fp32, of two kinds: the network that the recipe
starts from, which is the papers' own reference, and that network trained on in fp32 for the same epochs in the same way, so
that more epochs count on both sides. The papers' networks and data are others: only the relation can be compared. Bar: at
most 0.5 % below it; there is none where the figures of the paper are of a network that loses so much more (AlexNet, or
binary values on ImageNet) that no result here could miss it. Then each model is converted, and must give the same
outputs bit for bit.

--choose-rate trains on all but the last 10,000 training images with each of some rates, and says which does best on those.

--nets FOLDER takes ``ResNetS`` and its weights from a folder with nets.py and resnet.safetensors instead of training one.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import importlib.util
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import progress, table, verdict
from torch import Tensor, nn
from torch.nn import functional

from roundoff.formats import Format, integer, parse_format
from roundoff.quantize import (
    Freezing,
    Options,
    QuantizedModel,
    convert,
    parameter_groups,
    prepare_qat,
    scheme,
    trace,
    train,
)
from roundoff.workload import Workload

DATA = Path("/usr/share/datasets/fashion-mnist")
BATCH = 125


@dataclass(frozen=True)
class Training:
    """Rates of weights and scales, weight decay, and whether by Adam; otherwise by SGD with momentum 0.9."""

    rate: float
    scale_rate: float
    decay: float = 1e-4
    adam: bool = False


#: The papers of BNN, XNOR-Net and DoReFa train with Adam, those of LSQ and TTQ with momentum; less decay for fewer bits.
#: Rates that --choose-rate tries, weights' and scales' in the proportion of the recipe.
RATES = (3e-3, 1e-2, 3e-2, 1e-1)
HELD_OUT = 10_000
ADAM = Training(4e-3, 4e-4, adam=True)
MOMENTUM = Training(3e-2, 3e-2)
SCRATCH = Training(5e-2, 5e-2, 5e-4)


@dataclass(frozen=True)
class Recipe:
    """How a network is trained, and what its paper got: accuracy in percent, fp32 and low-bit of the same network."""

    label: str
    weights: str
    activations: str
    weight_format: Format
    activation_format: Format
    paper: tuple[float, float]
    source: str
    training: Training = ADAM
    weight: str = "channel"
    #: False where no result here could miss the paper's share of fp32.
    barred: bool = True


def unsigned(width: int) -> Format:
    return integer(width, symmetric=False)


def signed(width: int) -> Format:
    return integer(width, narrow_range=False)


BINARY, TERNARY = parse_format("binary"), parse_format("ternary")
RECIPES = (
    Recipe(
        "DoReFa W2A2",
        "dorefa",
        "dorefa",
        integer(2),
        unsigned(2),
        (91.6, 88.2),
        "ResNet-20, CIFAR-10, in arXiv:1805.06085",
    ),
    Recipe(
        "DoReFa W1A2",
        "dorefa",
        "dorefa",
        BINARY,
        unsigned(2),
        (55.9, 49.8),
        "AlexNet, ImageNet, arXiv:1606.06160",
        barred=False,
    ),
    Recipe(
        "TWN",
        "twn",
        "",
        TERNARY,
        unsigned(8),
        (92.88, 92.56),
        "VGG-7, CIFAR-10, arXiv:1605.04711",
    ),
    Recipe(
        "TTQ",
        "ttq",
        "",
        TERNARY,
        unsigned(8),
        (92.33, 92.37),
        "ResNet-32, CIFAR-10, arXiv:1612.01064",
        Training(1e-2, 1e-4),
        "tensor",
    ),
    Recipe(
        "BNN",
        "bnn",
        "bnn",
        BINARY,
        BINARY,
        (56.6, 27.9),
        "AlexNet, ImageNet, in arXiv:1603.05279",
        barred=False,
    ),
    Recipe(
        "XNOR-Net",
        "xnor",
        "xnor",
        BINARY,
        BINARY,
        (69.3, 51.2),
        "ResNet-18, ImageNet, arXiv:1603.05279",
        barred=False,
    ),
    Recipe(
        "LSQ W4A4",
        "lsq",
        "lsq",
        signed(4),
        unsigned(4),
        (70.5, 71.1),
        "ResNet-18, ImageNet, arXiv:1902.08153",
        MOMENTUM,
    ),
    Recipe(
        "LSQ W2A2",
        "lsq",
        "lsq",
        signed(2),
        unsigned(2),
        (70.5, 67.6),
        "ResNet-18, ImageNet, arXiv:1902.08153",
        Training(3e-2, 3e-2, 0.25e-4),
    ),
)


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut (He et al., 2015)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.act, self.last = nn.ReLU(), nn.ReLU()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.short = nn.Sequential()
        if stride != 1 or before != width:
            self.short = nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.conv1(x)))
        output: Tensor = self.last(self.bn2(self.conv2(y)) + self.short(x))
        return output


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


def read(name: str) -> Tensor:
    raw = gzip.decompress((DATA / f"{name}.gz").read_bytes())
    values = torch.frombuffer(
        bytearray(raw[16 if "images" in name else 8 :]), dtype=torch.uint8
    )
    return (
        ((values.view(-1, 1, 28, 28) / 255) - 0.2860) / 0.3530
        if "images" in name
        else values.long()
    )


class Shuffled:
    """Batches in another order in each epoch, half of the images mirrored; the same for every recipe."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels, self.epoch = images, labels, 0

    def __call__(self) -> Iterator[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        for index in torch.randperm(len(self.images), generator=random).split(BATCH):
            x = self.images[index]
            turned = torch.rand(len(x), 1, 1, 1, generator=random) < 0.5
            yield torch.where(turned, x.flip(-1), x), self.labels[index]


def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    output: Tensor = model(batch[0])
    return output


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(output, batch[1])


@torch.no_grad()
def logits(model: nn.Module, images: Tensor) -> Tensor:
    model.eval()
    return torch.cat([model(x) for x in images.split(500)])


def fit(model: nn.Module, data: Shuffled, epochs: int, how: Training) -> None:
    """Train with a rate that falls as a cosine, with Adam after a rise; BatchNorm keeps its statistics in the last quarter
    of Adam's steps, whose weights still move between signs."""
    steps = epochs * -(-len(data.images) // BATCH)
    groups, scheduler = (
        parameter_groups(model, how.rate, how.scale_rate, how.decay),
        torch.optim.lr_scheduler,
    )
    freezing = None
    optimizer: torch.optim.Optimizer
    schedule: Any
    if how.adam:
        optimizer = torch.optim.AdamW(groups)
        schedule = scheduler.OneCycleLR(optimizer, [g["lr"] for g in groups], steps)
        freezing = Freezing(model, batch_norm=steps * 3 // 4)
    else:
        optimizer = torch.optim.SGD(groups, momentum=0.9, nesterov=True)
        schedule = scheduler.CosineAnnealingLR(optimizer, steps)
    train(
        model,
        data,
        loss,
        optimizer,
        epochs,
        forward=forward,
        schedule=schedule,
        freezing=freezing,
    )


def quantized(net: nn.Module, recipe: Recipe, images: Tensor) -> QuantizedModel:
    """Quantizers in front of every convolution but the first; the formats are the recipe's."""
    workload = Workload(net, [images])
    graph = trace(workload)
    convolutions = [site for site, node in graph.nodes.items() if node.kind == "conv"][
        1:
    ]
    fmt = (
        parse_format("w4a4") if recipe.activations else TERNARY
    )  # the one of weights alone
    options = Options(elementwise=False, bias=False, weight=recipe.weight)
    model = QuantizedModel(
        copy.deepcopy(net).eval(),
        scheme(graph, dict.fromkeys(convolutions, fmt), options),
    )
    for _, quantizer in model.named():
        quantizer.fmt = (
            recipe.weight_format if quantizer.weight else recipe.activation_format
        )
    return model


def low_bit(
    net: nn.Module, recipe: Recipe, data: Shuffled, epochs: int, test: Tensor
) -> tuple[Tensor, bool]:
    if recipe.activation_format is BINARY:
        net = without_relu(net)
    model = quantized(net, recipe, data.images[:BATCH])
    prepare_qat(
        model,
        weights=recipe.weights,
        activations=recipe.activations or "ste",
        start="paper",
    )
    with torch.no_grad():
        model(data.images[:BATCH])
    fit(model, data, epochs, recipe.training)
    before = logits(model, test)
    return before, torch.equal(logits(convert(model), test), before)


def without_relu(net: nn.Module) -> nn.Module:
    """The same weights without ReLUs: the sign, before each convolution, is the nonlinearity, as in BinaryNet."""
    net = copy.deepcopy(net)
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.Identity())
    return net


def load(folder: Path) -> nn.Module:
    from safetensors.torch import load_file

    spec = importlib.util.spec_from_file_location("nets", folder / "nets.py")
    module: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    net: nn.Module = module.NETS["resnet"]()
    net.load_state_dict(load_file(folder / "resnet.safetensors"))
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="250 images and one epoch: does it run?"
    )
    parser.add_argument(
        "--only", metavar="LABEL", nargs="+", help="these recipes alone"
    )
    parser.add_argument(
        "--nets",
        type=Path,
        metavar="FOLDER",
        help="a folder with nets.py and resnet.safetensors",
    )
    parser.add_argument("--images", type=int, default=60000, help="training images")
    parser.add_argument(
        "--epochs", type=int, default=6, help="of fp32, and then of each recipe"
    )
    parser.add_argument(
        "--choose-rate",
        action="store_true",
        help="which rate is best on held-out training images",
    )
    args = parser.parse_args()
    count, epochs = (2 * BATCH, 1) if args.quick else (args.images, args.epochs)
    images, labels = (
        read("train-images-idx3-ubyte")[:count],
        read("train-labels-idx1-ubyte")[:count],
    )
    if args.choose_rate:
        choose_rates(images, labels, epochs, args.only)
        return
    test, answers = (
        read(f"t10k-{n}")[: count if args.quick else None]
        for n in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    torch.manual_seed(0)
    if args.nets is None:
        net = network()
        fit(net, Shuffled(images, labels), epochs, SCRATCH)
    else:
        net = load(args.nets)
    start = right(logits(net, test), answers)
    progress(f"fp32: {start:.2f} %")
    further: dict[Training, float] = {}
    rows = []
    for recipe in RECIPES:
        if args.only and recipe.label not in args.only:
            continue
        how = Training(
            recipe.training.rate, recipe.training.rate, adam=recipe.training.adam
        )  # fp32 has no scales
        if how not in further:
            again = copy.deepcopy(net)
            fit(again, Shuffled(images, labels), epochs, how)
            further[how] = max(right(logits(again, test), answers), start)
            progress(
                f"fp32 trained on by {'Adam' if how.adam else 'momentum'}, rate {how.rate:g}: {further[how]:.2f} %"
            )
        clock = time.process_time()
        outputs, same = low_bit(net, recipe, Shuffled(images, labels), epochs, test)
        percent, spent = right(outputs, answers), time.process_time() - clock
        paper = 100 * recipe.paper[1] / recipe.paper[0]
        own, alike = 100 * percent / start, 100 * percent / further[how]
        rows.append(
            (
                recipe.label,
                f"{percent:.2f}",
                f"{own:.2f}",
                f"{further[how]:.2f}",
                f"{alike:.2f}",
                f"{paper:.2f}",
                recipe.source,
                verdict(own, paper - 0.5) if recipe.barred else "",
                verdict(alike, paper - 0.5) if recipe.barred else "",
                same,
                f"{spent:.0f}",
            )
        )
        progress(" ".join(map(str, rows[-1])))
    table(
        f"Low-bit training, {len(images)} images, {epochs} epochs from an fp32 network of {start:.2f} %",
        (
            "recipe",
            "accuracy %",
            "% of fp32",
            "fp32 trained on",
            "% of that",
            "paper: % of fp32",
            "paper",
            "bar: paper - 0.5",
            "bar, of trained on",
            "converted: same bits",
            "CPU s",
        ),
        rows,
    )


def choose_rates(
    images: Tensor, labels: Tensor, epochs: int, only: list[str] | None
) -> None:
    """Print the accuracy of each recipe by rate on images that it was not trained on."""
    held_out = min(HELD_OUT, len(images) // 5)
    training = Shuffled(images[:-held_out], labels[:-held_out])
    torch.manual_seed(0)
    net = network()
    fit(net, training, epochs, SCRATCH)
    rows = []
    for recipe in RECIPES:
        if only and recipe.label not in only:
            continue
        given = recipe.training
        reached = {}
        for rate in RATES:
            how = replace(
                given, rate=rate, scale_rate=rate * given.scale_rate / given.rate
            )
            data = Shuffled(training.images, training.labels)
            outputs, _ = low_bit(
                net, replace(recipe, training=how), data, epochs, images[-held_out:]
            )
            reached[rate] = right(outputs, labels[-held_out:])
            progress(f"{recipe.label} {rate:g}: {reached[rate]:.2f} %")
        best = max(reached, key=lambda rate: reached[rate])
        shown = [f"{reached[rate]:.2f}" for rate in RATES]
        rows.append((recipe.label, *shown, f"{best:g}", f"{given.rate:g}"))
    table(
        f"Accuracy in % on {held_out} held-out training images, {epochs} epochs",
        ("recipe", *(f"rate {rate:g}" for rate in RATES), "best", "used"),
        rows,
    )


def right(outputs: Tensor, answers: Tensor) -> float:
    return 100 * (outputs.argmax(1) == answers).double().mean().item()


if __name__ == "__main__":
    main()
