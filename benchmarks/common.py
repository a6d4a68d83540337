"""What the benchmarks share: workloads, Markdown tables, and timing that survives a busy machine."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

# threads that wait for each other by spinning make every time meaningless when the cores are shared
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch

from roundoff.errors import RoundoffError
from roundoff.plan import run_batches
from roundoff.workload import Workload

ROOT = Path(__file__).parent.parent
SMALLEST = "digits"
FORMATS = ("bf16", "fp16", "fp8_e4m3fn", "int8")


def options(description: str | None) -> argparse.Namespace:
    """The command line of every script; sets the number of threads."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="one batch and fewer cases: does it run?"
    )
    parser.add_argument(
        "--first-batch", action="store_true", help="all cases, on the first batch alone"
    )
    parser.add_argument(
        "--only", metavar="NAME", nargs="+", help="these examples alone"
    )
    parser.add_argument(
        "--examples",
        type=Path,
        default=ROOT / "examples",
        help="folder of the workload files",
    )
    args = parser.parse_args()
    torch.set_num_threads(2)
    return args


def workloads(
    args: argparse.Namespace, names: Iterable[str]
) -> Iterable[tuple[str, Workload]]:
    """Each example that can be loaded; one that cannot is printed with the reason.

    With --quick only the smallest of the usual ones.
    """
    usual = list(names)
    if args.quick and SMALLEST in usual:
        usual = [SMALLEST]
    for name in usual if args.only is None else args.only:
        try:
            workload = Workload.load(args.examples / f"{name}.py")
        except RoundoffError as error:
            print(f"\n{name} is left out: {str(error).splitlines()[0]}")
            continue
        workload.model.eval()
        if args.quick or args.first_batch:
            workload = first_batch(workload)
        yield name, workload


def first_batch(workload: Workload) -> Workload:
    """The same workload on its first batch, without its metric (which may want all of them)."""
    return Workload(
        workload.model,
        workload.batches[:1],
        forward=workload.forward,
        loss=workload.loss,
        name=workload.name,
    )


def measured_noise(
    workload: Workload,
    formats: dict[str, str],
    reference: list[dict[str, torch.Tensor]],
) -> float:
    """Relative noise power of a real simulated run against reference targets."""
    from roundoff.plan import noise

    return noise(run_batches(workload, formats).targets, reference)


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print one Markdown table, columns aligned so that it reads in a terminal too."""
    cells = [list(header), *([_text(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| "
        + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))
        + " |"
        for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    print(f"\n{title}\n\n" + "\n".join(lines), flush=True)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def verdict(value: float, bar: float, *, at_most: bool = False) -> str:
    """Whether a bar is met, in words for a table cell."""
    return "met" if (value <= bar if at_most else value >= bar) else "**missed**"


def clock(work: Callable[[], object]) -> tuple[float, float]:
    """Wall seconds and process CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def middle(values: Sequence[float]) -> str:
    """Median with the range, of ratios."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} – {max(values):.3g})"


def progress(text: str) -> None:
    """A line for a person who waits; never part of the tables."""
    print(f"  {text}", file=sys.stderr, flush=True)
