"""What the quantization benchmarks share: Fashion-MNIST, the three networks, and figures of their logits."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch
from common import ROOT, progress
from torch import Tensor, nn

from roundoff.budget import sqnr_db
from roundoff.plan import noise

sys.path.insert(0, str(ROOT))
from examples.fashion_mnist import read

NAMES = ("resnet", "mobile", "skew")
#: where train_fashion.py leaves its networks
OWN = ROOT / "out" / "fashion_nets"
QUICK = ROOT / "out" / "fashion_nets_quick"
#: Images that are trained on, calibrated on and judged with --quick.
QUICK_TRAINED, QUICK_CALIBRATION, QUICK_JUDGED = 250, 64, 200
MEAN, DEVIATION = 0.2860, 0.3530


def options(description: str | None, **more: dict[str, Any]) -> argparse.Namespace:
    """The command line of these scripts; one thread."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one network, hardly trained, 200 test images: does it run?",
    )
    parser.add_argument(
        "--only", choices=NAMES, nargs="+", default=NAMES, help="these networks alone"
    )
    parser.add_argument(
        "--nets",
        type=Path,
        metavar="FOLDER",
        help="trained networks: nets.py and NAME.safetensors; "
        "otherwise train_fashion.py trains its own",
    )
    for name, settings in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)
    args = parser.parse_args()
    if args.quick:
        args.only = args.only[:1]
    torch.set_num_threads(1)
    return args


def part(name: str) -> tuple[Tensor, Tensor]:
    """Images [N, 1, 28, 28], normalised, and labels of ``train`` or ``t10k``."""
    return (read(f"{name}-images-idx3-ubyte") - MEAN) / DEVIATION, read(
        f"{name}-labels-idx1-ubyte"
    )


def calibration(quick: bool = False) -> list[Tensor]:
    """The first training images, in batches of 32."""
    count = QUICK_CALIBRATION if quick else 512
    return list(part("train")[0][:count].split(32))


@dataclass
class Data:
    """Test images with labels, and the calibration data: the first 512 training images in 16 batches."""

    images: Tensor
    labels: Tensor
    calibration: list[Tensor]

    @classmethod
    def load(cls, quick: bool = False) -> Data:
        images, labels = part("t10k")
        count = QUICK_JUDGED if quick else len(images)
        return cls(images[:count], labels[:count], calibration(quick))

    @classmethod
    def validation(cls, quick: bool = False) -> Data:
        """Training images that neither calibration nor the test images hold: what settings are chosen on."""
        images, labels = part("train")
        chosen = slice(-QUICK_JUDGED if quick else -5000, None)
        return cls(images[chosen], labels[chosen], calibration(quick))

    @torch.no_grad()
    def logits(self, model: nn.Module) -> Tensor:
        """Of all test images, in evaluation mode."""
        model.eval()
        return torch.cat([model(x) for x in self.images.split(500)])

    def top1(self, logits: Tensor) -> float:
        """In percent."""
        return 100 * (logits.argmax(1) == self.labels).double().mean().item()


def agreement(logits: Tensor, reference: Tensor) -> float:
    """Percent of samples in the same class."""
    return 100 * (logits.argmax(1) == reference.argmax(1)).double().mean().item()


def db(logits: Tensor, reference: Tensor) -> float:
    """SQNR of logits in dB."""
    return sqnr_db(noise([{"logits": logits}], [{"logits": reference}]))


def nets(args: argparse.Namespace) -> Iterator[tuple[str, nn.Module]]:
    """Name and network, of those that ``--only`` names."""
    for name in args.only:
        yield name, load(name, args.nets, args.quick)


def load(name: str, folder: Path | None = None, quick: bool = False) -> nn.Module:
    """A network in evaluation mode: one of a folder's, else one of ours, trained first where there is none.

    With ``quick`` it is one that has hardly been trained.
    """
    from safetensors.torch import load_file

    if folder is not None:
        net, file = (
            _module(folder / "nets.py").NETS[name](),
            folder / f"{name}.safetensors",
        )
    else:
        import train_fashion

        net, file = train_fashion.NETS[name](), OWN / f"{name}.safetensors"
        if quick:
            file = QUICK / file.name
            train_fashion.make(name, QUICK, 1, QUICK_TRAINED)
        elif not file.exists():
            progress(f"no {name} in out/fashion_nets: training it")
            train_fashion.make(name, OWN)
    net.load_state_dict(load_file(file))
    module: nn.Module = net.eval()
    return module


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("nets", path)
    if spec is None or spec.loader is None or not path.exists():
        raise SystemExit(
            f"{path} is not there: --nets wants a folder with nets.py and NAME.safetensors"
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


table, verdict, clock = common.table, common.verdict, common.clock
