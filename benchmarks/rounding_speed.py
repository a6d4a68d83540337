"""How long rounding takes, over the time of two plain casts (fp32 to bf16 and back) of the same size.

All cases take turns, so that a change of load meets all of them, and medians are compared. The bar is 1.0 for formats
that torch casts quickly; torch's own two casts stand beside, since its fp8 casts are slow on some CPUs.

    python benchmarks/rounding_speed.py [elements in millions] [rounds]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from roundoff.formats import FORMATS, BlockFormat, PerAxis, PerTensor, round_tensor


def there_and_back(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(x.dtype)


def cases(x: Tensor) -> dict[str, Callable[[], Tensor]]:
    found: dict[str, Callable[[], Tensor]] = {
        "two casts": partial(there_and_back, x, torch.bfloat16)
    }
    for name, fmt in FORMATS.items():
        dtype = fmt.torch_dtype
        if dtype is not None and dtype.is_floating_point:
            found[f"{name}: torch"] = partial(there_and_back, x, dtype)
        if isinstance(fmt, BlockFormat) or fmt.one_quantum != 1.0:
            found[f"{name}: cast"] = partial(round_tensor, x, fmt)
        if (
            not isinstance(fmt, BlockFormat)
            and fmt.execution
            and fmt.execution.weight == "channel"
        ):
            found[f"{name}: PerTensor"] = partial(
                round_tensor, x, fmt, granularity=PerTensor()
            )
            found[f"{name}: PerAxis"] = partial(
                round_tensor, x, fmt, granularity=PerAxis(0)
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("millions", nargs="?", type=float, default=1.0)
    parser.add_argument("rounds", nargs="?", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="does it run?")
    args = parser.parse_args()
    millions, rounds = (0.1, 1) if args.quick else (args.millions, args.rounds)
    torch.set_num_threads(1)
    x = torch.randn(
        int(millions * 2**20) // 1024, 1024, generator=torch.Generator().manual_seed(0)
    )
    calls = cases(x)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:  # the first is a warm-up
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    plain = medians["two casts"]
    rows: dict[str, dict[str, float]] = {}
    for key, median in medians.items():
        name, _, what = key.partition(": ")
        if what:
            rows.setdefault(name, {})[what] = median / plain
    print(
        f"{x.numel():,} fp32 numbers on one thread; two casts take {plain * 1e3:.3f} ms = 1.00"
    )
    columns = ("cast", "PerTensor", "PerAxis", "torch")
    print(f"{'format':<14}" + "".join(f"{c:>11}" for c in columns))
    for name, row in rows.items():
        print(
            f"{name:<14}"
            + "".join(f"{row[c]:>11.2f}" if c in row else f"{'-':>11}" for c in columns)
        )


if __name__ == "__main__":
    main()
