"""Time to calibrate activations, over that of IFMR as AMCT does it, and the error of the range each observer chooses.

The baseline joins all batches of a tensor, takes the two ranks, and passes 61 times over all values (clip, divide, round,
multiply, subtract, square, mean). Bar: 1/20 of its time over all tensors, and on each at most 1.01 times its error, both
measured on all values. The least of three rounds counts; all take turns, on one thread. `adjoint` gets a power for each
element (random here), so its error is the weighted one, over that of the baseline's range in the same weights.

    python benchmarks/calibration_time.py [--quick]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from roundoff.formats import (
    Format,
    QParams,
    choose_qparams,
    fake_quantize,
    parse_format,
)
from roundoff.quantize import make_observer

NAMES = ("minmax", "percentile", "entropy", "mse", "ifmr", "hfmg", "adjoint")
#: those that search as IFMR does; the others are quicker or coarser by design
JUDGED = ("mse", "ifmr", "hfmg", "adjoint")


def activations(images: int) -> dict[str, list[Tensor]]:
    """What the layers of a small CNN see, in batches of 32: channels of different scales, and a few large values."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    scales = torch.exp(0.7 * normal(16, 1, 1))
    first, later = (images, 16, 28, 28), (images, 32, 14, 14)
    wide = normal(*later) * torch.exp(0.5 * normal(32, 1, 1))
    tensors = {
        "after ReLU": (normal(*first) * scales).relu_(),
        "after ReLU6": (normal(*first) * scales * 2 + 1).clamp_(0, 6),
        "sum of a residual block": wide + wide.roll(1, 0).relu() + 0.3,
        "heavy tails": wide * torch.exp(normal(*later).mul_(0.6)),
    }
    return {name: list(x.split(32)) for name, x in tensors.items()}


def ifmr_on_all_values(batches: list[Tensor], fmt: Format) -> QParams:
    """IFMR, the straightforward way."""
    x = torch.cat([batch.flatten() for batch in batches])
    k = max(len(x) - int(0.999999 * len(x)), 1)
    high = x.topk(k).values[-1].clamp(min=0.0)
    low = x.topk(k, largest=False).values[-1].clamp(max=0.0)
    best, found = torch.inf, QParams(torch.tensor(1.0))
    for factor in torch.arange(61) * 0.01 + 0.7:
        top = high * factor if not fmt.symmetric else torch.maximum(high, -low) * factor
        bottom = low if not fmt.symmetric else -top
        scale = (top - bottom) / (fmt.max_finite - fmt.min_finite)
        loss = float(
            ((x.clamp(bottom, top) / scale).round() * scale - x).square().mean()
        )
        if loss < best:
            best, found = loss, choose_qparams(torch.stack([bottom, top]), fmt)
    return QParams(
        found.scale[0], None if found.zero_point is None else found.zero_point[0]
    )


def calibrated(
    name: str, batches: list[Tensor], powers: list[Tensor], fmt: Format
) -> QParams:
    observer = make_observer(name)
    for batch, power in zip(batches, powers, strict=True):
        observer.see(batch, power if name == "adjoint" else None)
    return observer.qparams(fmt)


def error(
    batches: list[Tensor], q: QParams, fmt: Format, powers: list[Tensor] | None = None
) -> float:
    total = 0.0
    for i, x in enumerate(batches):
        square = (fake_quantize(x, q, fmt) - x).double().square()
        total += float((square if powers is None else square * powers[i]).sum())
    return total


def timed(call: Callable[[], QParams]) -> tuple[float, QParams]:
    start = time.perf_counter()
    q = call()
    return time.perf_counter() - start, q


def main() -> None:
    torch.set_num_threads(1)
    quick = "--quick" in sys.argv[1:]
    images, rounds = (64, 1) if quick else (512, 3)
    failed = []
    for fmt in (parse_format("int8_asym"), parse_format("int8")):
        print(
            f"\n{fmt.name}, {images} images: time over IFMR's on all values, error over IFMR's\n"
        )
        print(
            f"| tensor | values | IFMR | {' | '.join(NAMES)} |\n|---|---|---|{'---|' * len(NAMES)}"
        )
        spent = dict.fromkeys(("baseline", *NAMES), 0.0)
        for tensor, batches in activations(images).items():
            random = torch.Generator().manual_seed(1)
            powers = [
                torch.rand(batch.shape, generator=random).square_() for batch in batches
            ]
            calls = {"baseline": partial(ifmr_on_all_values, batches, fmt)}
            calls |= {
                name: partial(calibrated, name, batches, powers, fmt) for name in NAMES
            }
            found: dict[str, list[tuple[float, QParams]]] = {}
            for _ in range(rounds):
                for name, call in calls.items():
                    found.setdefault(name, []).append(timed(call))
            cells = []
            for name, runs in found.items():
                seconds, q = min(s for s, _ in runs), runs[0][1]
                spent[name] += seconds
                weights = powers if name == "adjoint" else None
                ratio = error(batches, q, fmt, weights) / error(
                    batches, found["baseline"][0][1], fmt, weights
                )
                over = seconds / min(s for s, _ in found["baseline"])
                cells.append(
                    f"{seconds:.2f} s"
                    if name == "baseline"
                    else f"1/{1 / over:.0f}, {ratio:.3f}"
                )
                if name in JUDGED and ratio > 1.01:
                    failed.append(f"{fmt.name}, {tensor}, {name}: error {ratio:.3f}")
            print(
                f"| {tensor} | {sum(b.numel() for b in batches):,} | {' | '.join(cells)} |"
            )
        ratios = [f"1/{spent['baseline'] / spent[name]:.0f}" for name in NAMES]
        failed += [
            f"{fmt.name}, {name}: time {r}"
            for name, r in zip(NAMES, ratios, strict=True)
            if name in JUDGED and spent[name] > spent["baseline"] / 20
        ]
        print(f"| all | | {spent['baseline']:.2f} s | {' | '.join(ratios)} |")
    print(
        "\nbar (1/20 of the time, at most 1.01 of the error) "
        + ("met" if not failed else "missed: " + "; ".join(failed))
    )


if __name__ == "__main__":
    main()
