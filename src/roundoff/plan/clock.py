"""Measure this machine's kernels: seconds per multiply-accumulate or element in each format."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from roundoff.errors import PlanError
from roundoff.formats import Format, parse_format
from roundoff.plan.seconds import SIZES, SecondsRow, SecondsTable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["measure_seconds"]

# Shapes: linear (tokens, in, out), matmul (batch, rows, inner, columns), conv (channels in and out,
# side; kernel 3), elementwise (elements). Sizes by BOUNDS; all are multiples of 32, as matrix units
# ask for.
SHAPES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "linear": {
        "small": (32, 128, 128),
        "medium": (128, 384, 384),
        "large": (256, 1024, 1024),
    },
    "matmul": {
        "small": (4, 64, 32, 64),
        "medium": (12, 128, 64, 128),
        "large": (12, 512, 64, 512),
    },
    "conv": {"small": (32, 16), "medium": (64, 32), "large": (128, 32)},
    "elementwise": {"small": (1 << 12,), "medium": (1 << 18,), "large": (1 << 21,)},
}


Case = tuple[str, str, str]  # kind, format, size


def measure_seconds(
    formats: Iterable[str | Format],
    device: str = "cpu",
    *,
    budget: float = 5.0,
    sizes: Iterable[str] = SIZES,
) -> SecondsTable:
    """Measure kernels of this machine in each format: linear, matmul, conv, elementwise addition.

    All cases take turns, at least once after a warm-up and until each has had its share of the
    time, so that a change of the clock or of the load meets all formats; each row is the median,
    at the current number of threads. Floating point formats of
    torch run the plain operator in that type, also where the device emulates it slowly; int8 runs
    ``torch._int_mm`` and fp8 ``torch._scaled_mm``, both for linear only (torch's other int8 kernels
    are deprecated); tf32 is native on CUDA devices alone. A case without a kernel gets fp32's time
    and a note, so that a plan gains nothing from it. Formats that run only matrix operators have no
    elementwise row, since such work stays in fp32. The global random state is not touched.

    Args:
        formats: names or formats; fp32 is measured in any case.
        device: a torch device that exists here.
        budget: seconds for all; more if one round of all cases takes longer.
        sizes: of "small", "medium", "large".

    Raises:
        FormatError: unknown format.
        PlanError: unknown size.
    """
    import torch

    parsed = [
        f if isinstance(f, Format) else parse_format(f) for f in ("fp32", *formats)
    ]
    runnable = {f.name: f for f in parsed if f.execution is not None}
    matrix_only = {
        f.name for f in parsed if f.execution and f.execution.operators == "matrix"
    }
    chosen = tuple(sizes)
    if not set(chosen) <= set(SIZES):
        raise PlanError(
            "unknown size", expected=", ".join(SIZES), got=", ".join(chosen)
        )
    calls: dict[Case, Callable[[], object]] = {}
    notes: dict[Case, str] = {}
    once: dict[Case, float] = {}
    end = time.perf_counter() + budget
    cuda = torch.device(device).type == "cuda"

    def clock(call: Callable[[], object], repeats: int) -> float:
        if cuda:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        if cuda:
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / repeats

    with torch.no_grad():
        for kind, size, name in itertools.product(SHAPES, chosen, runnable):
            fmt, case = runnable[name], (kind, name, size)
            if kind == "elementwise" and name in matrix_only:
                continue
            call = _kernel(kind, SHAPES[kind][size], fmt, device)
            if call is None:
                notes[case] = f"no {name} kernel on {device}: fp32's time"
                continue
            try:
                clock(call, 1)
                once[case] = clock(call, 1)
            except (
                RuntimeError
            ) as error:  # so torch says that a build or device lacks a kernel
                reason = str(error).splitlines()[0][:80]
                notes[case] = f"{name} failed on {device}: fp32's time ({reason})"
                continue
            calls[case] = call
        samples: dict[Case, list[float]] = {case: [] for case in calls}
        spent = dict.fromkeys(calls, 0.0)
        share = (end - time.perf_counter()) / len(calls)
        turn = list(calls)
        while turn:
            for case in turn:
                # At least 0.2 ms a sample, large against the clock and the launch of a kernel.
                repeats = max(1, min(100, round(2e-4 / once[case])))
                samples[case].append(clock(calls[case], repeats))
                spent[case] += samples[case][-1] * repeats
            # Without shares, the slowest case would leave the quick ones a handful of samples.
            turn = [
                case
                for case in turn
                if spent[case] < share and time.perf_counter() < end
            ]
    rows = []
    for case in (*calls, *notes):
        kind, name, size = case
        measured = samples[case if case in calls else (kind, "fp32", size)]
        median = statistics.median(measured)
        # A fastest sample far below the median tells of other work on the machine.
        spread = f"median of {len(measured)} on {device}, fastest {min(measured) / median:.0%} of it"
        note = notes.get(case, spread)
        rows.append(
            SecondsRow(
                kind, name, size, median / _amount(kind, SHAPES[kind][size]), note
            )
        )
    return SecondsTable(rows)


def _amount(kind: str, shape: tuple[int, ...]) -> float:
    """Multiply-accumulates, or elements, of a measured shape."""
    return (
        9.0 * shape[0] ** 2 * shape[1] ** 2
        if kind == "conv"
        else float(math.prod(shape))
    )


def _kernel(
    kind: str, shape: tuple[int, ...], fmt: Format, device: str
) -> Callable[[], object] | None:
    """One call of the kind in the format, operands ready; ``None`` without a kernel."""
    import torch
    from torch.nn import functional

    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if fmt.name == "tf32" else fmt.torch_dtype

    def operand(*size: int) -> Tensor:
        values = torch.randn(size, generator=generator)
        return (
            (values * 40).clamp(-127, 127).to(device, dtype)
        )  # within int8 and e4m3fn

    if dtype is None or (fmt.name == "tf32" and torch.device(device).type != "cuda"):
        return None
    if dtype.itemsize == 1:
        if kind != "linear":
            return None
        x, w = operand(*shape[:2]), operand(shape[2], shape[1]).t()
        if dtype == torch.int8:
            return partial(torch._int_mm, x, w)
        if not dtype.is_floating_point:
            return None
        one = torch.ones((), device=device)
        return partial(torch._scaled_mm, x, w, one, one, out_dtype=torch.bfloat16)
    run: Callable[[], object]
    if kind == "linear":
        run = partial(
            functional.linear, operand(*shape[:2]), operand(shape[2], shape[1])
        )
    elif kind == "matmul":
        batch, rows, inner, columns = shape
        run = partial(
            torch.matmul, operand(batch, rows, inner), operand(batch, inner, columns)
        )
    elif kind == "conv":
        channels, side = shape
        image, weight = (
            operand(1, channels, side, side),
            operand(channels, channels, 3, 3),
        )
        run = partial(functional.conv2d, image, weight, padding=1)
    else:
        run = partial(torch.add, operand(*shape), operand(*shape))
    return partial(_with_tf32, run) if fmt.name == "tf32" else run


def _with_tf32(run: Callable[[], object]) -> object:
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return run()
    finally:
        torch.set_float32_matmul_precision(before)
