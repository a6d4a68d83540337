"""What is left of a network after pruning: accuracy, multiply-accumulates, bytes and time, before and after fine-tuning.

A ResNet-like network on Fashion-MNIST: 2:4 structure with fine-tuning (bar: at most 0.5 points lost), and channels removed
until half of the multiply-accumulates are left, with fine-tuning (bar: at most 1 point). Fine-tuning learns from the labels
and from the whole network's outputs (Hinton et al., arXiv:1503.02531). The network that nothing is taken from is fine-tuned
alike: points are lost against it or against the network as it was given, whichever is better. With --nets FOLDER that is the
trained reference net there (nets.py, resnet.safetensors); otherwise a small one is trained first.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import table
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from roundoff.quantize import (
    check_n_m,
    finish_,
    latency_ratio,
    model_cost,
    n_m_masks,
    prunable,
    prune_channels_,
    sparsify_,
    taylor_importance,
)

sys.path.insert(0, str(Path(__file__).parent.parent))
from examples.fashion_mnist import read

BATCH = 128


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.c1, self.b1 = (
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.c2, self.b2 = (
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.down = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.b2(self.c2(F.relu(self.b1(self.c1(x))))) + self.down(x))


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Block(16, 32, 2),
        Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def reference(folder: Path) -> nn.Module:
    from safetensors.torch import load_file

    spec = importlib.util.spec_from_file_location("nets", folder / "nets.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"no nets.py in {folder}")
    nets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nets)
    net: nn.Module = nets.NETS["resnet"]()
    net.load_state_dict(load_file(folder / "resnet.safetensors"))
    return net


def data(name: str) -> tuple[Tensor, Tensor]:
    images, labels = (
        read(f"{name}-images-idx3-ubyte"),
        read(f"{name}-labels-idx1-ubyte"),
    )
    return (images - 0.2860) / 0.3530, labels


def accuracy(net: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    net.eval()
    with torch.no_grad():
        right = [
            (net(x).argmax(1) == y).sum()
            for x, y in zip(*(t.split(500) for t in test), strict=True)
        ]
    return 100 * float(torch.stack(right).sum()) / len(test[1])


def train(
    net: nn.Module,
    train_set: tuple[Tensor, Tensor],
    epochs: float,
    rate: float,
    teacher: nn.Module | None,
) -> None:
    """OneCycle SGD; with a teacher half of the loss is the distance of the softened outputs."""
    images, labels = train_set
    optimizer = torch.optim.SGD(
        net.parameters(), rate, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    steps = int(epochs * len(images) / BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, steps, pct_start=0.1
    )
    net.train()
    order = torch.cat([torch.randperm(len(images)) for _ in range(int(epochs) + 1)])
    for step in range(steps):
        index = order[step * BATCH : (step + 1) * BATCH]
        x, y = images[index], labels[index]
        x = x.flip(-1) if step % 2 else x
        out = net(x)
        loss = F.cross_entropy(out, y)
        if teacher is not None:
            with torch.no_grad():
                soft = F.log_softmax(teacher(x) / 2, 1)
            loss = loss / 2 + 2 * F.kl_div(
                F.log_softmax(out / 2, 1), soft, log_target=True, reduction="batchmean"
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nets", type=Path, help="folder of trained reference nets")
    parser.add_argument("--epochs", type=float, default=1.0, help="of fine-tuning")
    parser.add_argument(
        "--quick", action="store_true", help="a fiftieth of the data: does it run?"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    train_set, test = data("train"), data("t10k")
    if args.quick:
        train_set, test = (
            (train_set[0][:1200], train_set[1][:1200]),
            (test[0][:500], test[1][:500]),
        )
    if args.nets is not None:
        net = reference(args.nets)
    else:
        net = small()
        train(net, train_set, 3, 0.1, None)
    net.eval()
    whole, batch = accuracy(net, test), test[0][:32]
    before = model_cost(net, batch)
    calibration = [
        (train_set[0][i : i + BATCH], train_set[1][i : i + BATCH])
        for i in range(0, 4 * BATCH, BATCH)
    ]

    def structured(candidate: nn.Module) -> Callable[[], object]:
        sparsify_(candidate, n_m_masks(candidate))
        return lambda: finish_(candidate)

    def removed(candidate: nn.Module) -> Callable[[], object]:
        importance = taylor_importance(
            candidate,
            calibration,
            lambda out, b: F.cross_entropy(out, b[1]),
            forward=lambda m, b: m(b[0]),
        )
        rows = prune_channels_(
            candidate,
            calibration,
            macs=0.5,
            importance=importance,
            forward=lambda m, b: m(b[0]),
        )
        left = {row.group: row.reason for row in rows if row.reason}
        print(
            f"channels {sum(r.before for r in rows)} → {sum(r.after for r in rows)}; left whole: {left}"
        )
        return lambda: None

    def nothing(_: nn.Module) -> Callable[[], object]:
        return lambda: None

    lines, best = [], whole
    cases = (
        ("nothing", nothing, None),
        ("2:4", structured, 0.5),
        ("channels, half the MACs", removed, 1.0),
    )
    for name, prune, bar in cases:
        candidate = copy.deepcopy(net)
        start = time.perf_counter()
        finish = prune(candidate)
        seconds = time.perf_counter() - start
        raw = accuracy(candidate, test)
        train(candidate, train_set, args.epochs, 0.02, net)
        finish()
        tuned = accuracy(candidate, test)
        best = max(best, tuned) if bar is None else best
        after = model_cost(candidate, batch)
        weights = [w.detach() for w in prunable(candidate).values()]
        zeros = sum(int((w == 0).sum()) for w in weights) / sum(
            w.numel() for w in weights
        )
        broken = sum(check_n_m(w) for w in weights)
        lines.append(
            (
                name,
                f"{whole:.2f}",
                f"{raw:.2f}",
                f"{tuned:.2f}",
                "–" if bar is None else f"{best - tuned:+.2f} (bar {bar})",
                f"{after.macs / before.macs:.3f}",
                f"{after.bytes / before.bytes:.3f}",
                f"{zeros:.3f}",
                str(broken) if name == "2:4" else "–",
                f"{latency_ratio(net, candidate, batch):.2f}",
                f"{seconds:.1f}",
                "–" if bar is None else "met" if best - tuned <= bar else "MISSED",
            )
        )
        print(*lines[-1], flush=True)
    header = (
        "pruning",
        "fp32 top-1",
        "pruned",
        "fine-tuned",
        "points lost",
        "MACs",
        "bytes",
        "zeros",
        "broken groups",
        "time, ratio",
        "seconds to prune",
        "bar",
    )
    table("Pruning with fine-tuning, Fashion-MNIST", header, lines)


if __name__ == "__main__":
    main()
