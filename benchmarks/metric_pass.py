"""The metric pass of ``compare`` beside a plain sum over both operands, and the same metrics by torch and numpy.

All cases take turns on one pair of tensors, so that a change of load meets all of them; the speed is the median over the
turns of (time of ``a.sum(); b.sum()``) / (time of the case). Bars: 60 % in fp32 and 30 % in bf16, on two threads. Below
that, what one call costs on a small tensor, and on pairs of two formats or with special values in them.

    python benchmarks/metric_pass.py [--quick] [elements in millions] [turns]
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import partial

from common import middle, progress, table, verdict

# isort: split
import numpy as np
import torch
from torch import Tensor

from roundoff.compare import measure

BARS = {torch.float32: 0.60, torch.bfloat16: 0.30}


def naive_torch(r: Tensor, c: Tensor) -> list[float]:
    """One operator for each metric, as comparing tools do."""
    x, y = r.double(), c.double()
    d = (x - y).abs()
    rel = (d / x.abs()).nan_to_num()
    raw = torch.int32 if r.dtype is torch.float32 else torch.int16
    size = torch.iinfo(raw).max
    i, j = (
        torch.where(t < 0, -(t & size), t).long() for t in (r.view(raw), c.view(raw))
    )
    ulp = (i - j).abs()
    return [
        float(v)
        for v in (
            torch.nn.functional.cosine_similarity(x, y, 0),
            d.norm() / x.norm(),
            d.max(),
            d.mean(),
            rel.max(),
            rel.mean(),
            ulp.max(),
            ulp.double().mean(),
            (ulp > 1).double().mean(),
            (i == j).double().mean(),
            y.norm(),
            d.argmax(),
            (x.isnan() & y.isnan()).sum(),
            (x.isnan() ^ y.isnan()).sum(),
            (x.isinf() & (x == y)).sum(),
            (x.isinf() ^ y.isinf()).sum(),
        )
    ]


def naive_numpy(r: Tensor, c: Tensor) -> list[float]:
    x, y = (t.double().numpy() for t in (r, c))
    d = np.abs(x - y)
    rel = np.divide(d, np.abs(x), out=np.zeros_like(d), where=x != 0)
    wide = (r.float().numpy().view(np.int32), c.float().numpy().view(np.int32))
    i, j = (np.where(t < 0, -(t & 0x7FFFFFFF), t).astype(np.int64) for t in wide)
    ulp = np.abs(i - j)
    size = math.sqrt(float((x * x).sum()) * float((y * y).sum()))
    return [
        float(v)
        for v in (
            (x * y).sum() / size,
            np.sqrt((d * d).sum()),
            d.max(),
            d.mean(),
            rel.max(),
            rel.mean(),
            ulp.max(),
            ulp.mean(),
            (ulp > 1).mean(),
            (i == j).mean(),
            d.argmax(),
            (np.isnan(x) & np.isnan(y)).sum(),
            (np.isnan(x) ^ np.isnan(y)).sum(),
            (np.isinf(x) & (x == y)).sum(),
            (np.isinf(x) ^ np.isinf(y)).sum(),
        )
    ]


def pair(count: int, one: torch.dtype, other: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, generator=generator)
    return x.to(one), x.mul_(1.001).to(other)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def turns(
    cases: dict[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """Times of each case."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for work in cases.values():
        work()  # compiled, and the memory touched
    for _ in range(rounds):
        for name, work in cases.items():
            found[name].append(seconds(work))
    return found


def speeds(count: int, rounds: int) -> None:
    rows = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        r, c = pair(count, dtype, dtype)
        for threads in (2, 1):
            progress(f"{dtype}, {threads} threads")
            torch.set_num_threads(threads)
            bar = BARS.get(dtype) if threads == 2 else None
            (row,) = shares(r, c, {"measure": measure}, rounds, bar)
            rows.append([str(dtype).removeprefix("torch."), threads, *row[1:]])
    header = [
        "dtype",
        "threads",
        "of the speed of sum",
        "GB/s",
        "GB/s of sum",
        "bar",
        "",
    ]
    table(f"The pass on {count / 2**20:.3g} Mi elements", header, rows)


def shares(
    r: Tensor,
    c: Tensor,
    works: dict[str, Callable[[Tensor, Tensor], object]],
    rounds: int,
    bar: float | None = None,
) -> list[list[object]]:
    times = turns(
        {"sum": lambda: (r.sum(), c.sum())}
        | {name: partial(work, r, c) for name, work in works.items()},
        rounds,
    )
    size = (r.numel() * r.element_size() + c.numel() * c.element_size()) / 1e9
    rows: list[list[object]] = []
    for name in works:
        share = [
            plain / own for plain, own in zip(times["sum"], times[name], strict=True)
        ]
        row = [
            name,
            middle(share),
            *(size / statistics.median(times[n]) for n in (name, "sum")),
            bar,
        ]
        rows.append([*row, verdict(statistics.median(share), bar) if bar else None])
    return rows


def naive(count: int, rounds: int) -> None:
    torch.set_num_threads(2)
    rows = []
    for dtype in BARS:
        r, c = pair(count, dtype, dtype)
        works = {
            "measure": measure,
            "naive torch": naive_torch,
            "naive numpy": naive_numpy,
        }
        rows += [
            [str(dtype).removeprefix("torch."), *row[:4]]
            for row in shares(r, c, works, rounds)
        ]
    header = ["dtype", "what", "of the speed of sum", "GB/s", "GB/s of sum"]
    table(
        f"Beside the same metrics one by one, {count / 2**20:.3g} Mi elements, two threads",
        header,
        rows,
    )


def other_pairs(count: int, rounds: int) -> None:
    torch.set_num_threads(2)
    rows = []
    f32, bf16, f16, f64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
    for name, one, other in (
        ("fp32, bf16", f32, bf16),
        ("fp32, fp16", f32, f16),
        ("fp64", f64, f64),
        ("int64", torch.int64, torch.int64),
        ("fp32, NaN in a row of ten", f32, f32),
    ):
        r, c = pair(count, one, other)
        if "NaN" in name:
            r[:: 10 * 1024] = math.nan
        rows.append([name, *shares(r, c, {"measure": measure}, rounds)[0][1:4]])
    header = ["pair", "of the speed of sum", "GB/s", "GB/s of sum"]
    table(f"Other pairs, {count / 2**20:.3g} Mi elements, two threads", header, rows)


def small(rounds: int) -> None:
    torch.set_num_threads(2)
    rows = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        row: list[object] = [str(dtype).removeprefix("torch.")]
        for count in (16, 1024, 2048, 16384):
            r, c = pair(count, torch.float32, torch.float32)
            r, c = (r * 100).to(dtype), (c * 100).to(dtype)
            row.append(
                1e6
                * statistics.median(
                    seconds(partial(measure, r, c)) for _ in range(rounds)
                )
            )
        rows.append(row)
    table(
        "Small tensors: microseconds of one call",
        ["dtype", "16", "1024", "2048", "16384"],
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a million elements, two turns: does it run?",
    )
    parser.add_argument("millions", nargs="?", type=float, default=64.0)
    parser.add_argument("turns", nargs="?", type=int, default=15)
    args = parser.parse_args()
    count, rounds = (
        (2**20, 2) if args.quick else (int(args.millions * 2**20), args.turns)
    )
    speeds(count, rounds)
    naive(count // 16, min(rounds, 5))
    other_pairs(count // 8, min(rounds, 5))
    small(5 if args.quick else 500)


if __name__ == "__main__":
    main()
