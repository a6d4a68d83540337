"""How few bits do weights and values need on average, for at most half a point of accuracy, and how often is the metric
run?

``reach`` plans the formats of all sites from the budget and measures at most four plans on the first 2,000 test
images; the other 8,000 judge the model that it returns (training images would not do: the networks have learned
them). Values that only join or pool codes (adds, means) keep eight bits, and are not averaged: the bars are on the
operands of products, weighted by their number of elements. Evaluations of the metric that peers needed for their own
fallback, measured elsewhere on these networks: AMCT 6 (118 s), NNCF 11 to 37.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from typing import Any

import torch
from fashion_nets import Data, clock, nets, options, part, table, verdict
from torch import Tensor, nn

from roundoff.errors import RoundoffError
from roundoff.quantize import Reached, average_bits, reach
from roundoff.workload import Workload

FORMATS = ("w8a8", "w6a6", "w5a6", "w5a5", "w4a6", "w4a5", "w4a4", "w3a4")
DROP = "0.5%"


def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    output: Tensor = model(batch[0])
    return output


def accuracy(outputs: list[Tensor], batches: list[tuple[Tensor, Tensor]]) -> float:
    """Share of images classified correctly."""
    return (
        torch.cat(
            [
                (o.argmax(1) == y).double()
                for o, (_, y) in zip(outputs, batches, strict=True)
            ]
        )
        .mean()
        .item()
    )


def formats_of(found: Reached) -> str:
    """How many sites run in which format."""
    counts: dict[str, int] = {}
    for row in found.model.rows:
        if row.format not in ("", "fp32", "codes"):
            counts[row.format] = counts.get(row.format, 0) + 1
    return ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))


def main() -> None:
    args = options(
        __doc__,
        target={"default": DROP, "help": "what may be lost, as `reach` takes it"},
    )
    data = Data.load(args.quick)
    count = len(data.labels) // 5
    kept: list[Any] = list(
        zip(data.images[:count].split(100), data.labels[:count].split(100), strict=True)
    )
    data.images, data.labels = data.images[count:], data.labels[count:]
    calibration = list(zip(data.calibration, part("train")[1].split(32), strict=False))
    rows: list[tuple[object, ...]] = []
    trials: list[tuple[object, ...]] = []
    for name, net in nets(args):
        workload = Workload(
            net, calibration, forward=forward, metric=accuracy, held_out=kept, name=name
        )
        found: list[Reached] = []
        try:
            _, seconds = clock(
                lambda: found.append(
                    reach(workload, args.target, FORMATS, cost="bitops")
                )
            )
        except RoundoffError as error:
            rows.append(
                (name, None, None, None, None, None, None, str(error).splitlines()[0])
            )
            continue
        (result,) = found
        whole, after = data.top1(data.logits(net)), data.top1(data.logits(result.model))
        weight, value = average_bits(result.model)
        rows.append(
            (
                name,
                f"{whole:.2f}",
                f"{after:.2f}: {verdict(whole - after, 0.5, at_most=True)}",
                f"{weight:.2f}: {verdict(weight, 5.0, at_most=True)}",
                f"{value:.2f}: {verdict(value, 6.0, at_most=True)}",
                f"{len(result.trials)}: {verdict(len(result.trials), 4, at_most=True)}",
                f"{seconds:.0f}",
                formats_of(result),
            )
        )
        trials += [
            (
                name,
                i,
                f"{t.predicted_db:.1f}",
                f"{t.measured_db:.1f}",
                None if t.metric is None else f"{100 * t.metric:.2f}",
                f"{t.cost:.3f}",
                t.met,
            )
            for i, t in enumerate(result.trials, 1)
        ]
    table(
        f"Mixed by plan, at most {args.target} off; {len(data.labels)} other test images",
        (
            "network",
            "fp32 %",
            "mixed %",
            "bits a weight (bar 5.0)",
            "bits a value (bar 6)",
            "evaluations (bar 4)",
            "CPU s",
            "formats",
        ),
        rows,
    )
    table(
        f"What was tried, on {count} test images",
        (
            "network",
            "trial",
            "predicted dB",
            "measured dB",
            "metric %",
            "Gbitops",
            "meets the target",
        ),
        trials,
    )


if __name__ == "__main__":
    main()
