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

# Shapes: linear (tokens, in, out), matmul (batch, rows, inner, columns), conv (channels
# in and out, side; kernel 3), elementwise (elements). Sizes by BOUNDS; all are
# multiples of 32, as matrix units ask for.
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
Operand = Callable[..., "Tensor"]  # sizes -> random values


def measure_seconds(
    formats: Iterable[str | Format],
    device: str = "cpu",
    *,
    budget: float = 5.0,
    sizes: Iterable[str] = SIZES,
) -> SecondsTable:
    """Measure kernels of this machine in each format: linear, matmul, conv, elementwise addition.

    All cases take turns, at least once after a warm-up and until each has had its share
    of the time, so that a change of the clock or of the load meets all formats; each
    row is the median, at the current number of threads. Floating point formats of torch
    run the plain operator in that type, also where the device emulates it slowly; int8
    runs ``torch._int_mm`` and fp8 ``torch._scaled_mm``, both for linear only (torch's
    other int8 kernels are deprecated); tf32 is native on CUDA devices alone. A case
    without a kernel gets fp32's time and a note, so that a plan gains nothing from it.
    Formats that run only matrix operators have no elementwise row, since such work
    stays in fp32. The global random state is not touched.

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

    parsed = [parse_format(name) for name in ("fp32", *formats)]
    runnable = {fmt.name: fmt for fmt in parsed if fmt.execution is not None}
    chosen = tuple(sizes)
    if not set(chosen) <= set(SIZES):
        raise PlanError(
            "unknown size", expected=", ".join(SIZES), got=", ".join(chosen)
        )
    end = time.perf_counter() + budget
    with torch.no_grad():
        kernels = _Kernels(device)
        for kind, size, fmt in itertools.product(SHAPES, chosen, runnable.values()):
            if kind != "elementwise" or not _matrix_only(fmt):
                kernels.prepare(kind, size, fmt)
        samples = kernels.take_turns(end)
    rows = [
        _row(case, samples, kernels.notes.get(case, ""), device)
        for case in (*kernels.calls, *kernels.notes)
    ]
    return SecondsTable(rows)


def _matrix_only(fmt: Format) -> bool:
    return fmt.execution is not None and fmt.execution.operators == "matrix"


class _Kernels:
    """The kernels that run on a device, by case, and a note for each case without one."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.calls: dict[Case, Callable[[], object]] = {}
        self.notes: dict[Case, str] = {}
        self._first: dict[Case, float] = {}

    def prepare(self, kind: str, size: str, fmt: Format) -> None:
        """Make the operands of a case, and run its kernel twice."""
        case = (kind, fmt.name, size)
        call = _kernel(kind, SHAPES[kind][size], fmt, self.device)
        if call is None:
            self.notes[case] = f"no {fmt.name} kernel on {self.device}: fp32's time"
            return
        try:
            self.seconds(call, 1)
            self._first[case] = self.seconds(call, 1)
        except RuntimeError as error:
            # so torch says that a build or device lacks a kernel
            reason = str(error).splitlines()[0][:80]
            failed = f"{fmt.name} failed on {self.device}: fp32's time ({reason})"
            self.notes[case] = failed
            return
        self.calls[case] = call

    def seconds(self, call: Callable[[], object], repeats: int) -> float:
        """Seconds of one call, the mean of ``repeats``."""
        self._wait()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        self._wait()
        return (time.perf_counter() - start) / repeats

    def take_turns(self, end: float) -> dict[Case, list[float]]:
        """Samples of each case, until ``end`` on the clock; at least one of each."""
        samples: dict[Case, list[float]] = {case: [] for case in self.calls}
        spent = dict.fromkeys(self.calls, 0.0)
        # Without shares, the slowest case would leave the quick ones a handful of samples.
        share = (end - time.perf_counter()) / len(self.calls)
        turn = list(self.calls)
        while turn:
            for case in turn:
                # At least 0.2 ms a sample, large against the clock and the launch of a
                # kernel.
                repeats = max(1, min(100, round(2e-4 / self._first[case])))
                sample = self.seconds(self.calls[case], repeats)
                samples[case].append(sample)
                spent[case] += sample * repeats
            in_time = time.perf_counter() < end
            turn = [case for case in turn if spent[case] < share and in_time]
        return samples

    def _wait(self) -> None:
        import torch

        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize(self.device)


def _row(
    case: Case, samples: Mapping[Case, list[float]], note: str, device: str
) -> SecondsRow:
    """The row of a case; where it has no samples, fp32's time."""
    kind, name, size = case
    measured = samples[case if case in samples else (kind, "fp32", size)]
    median = statistics.median(measured)
    # A fastest sample far below the median tells of other work on the machine.
    fastest = min(measured) / median
    spread = f"median of {len(measured)} on {device}, fastest {fastest:.0%} of it"
    seconds = median / _amount(kind, SHAPES[kind][size])
    return SecondsRow(kind, name, size, seconds, note or spread)


def _amount(kind: str, shape: tuple[int, ...]) -> float:
    """Multiply-accumulates, or elements, of a measured shape."""
    if kind == "conv":
        channels, side = shape
        return 9.0 * channels**2 * side**2
    return float(math.prod(shape))


def _kernel(
    kind: str, shape: tuple[int, ...], fmt: Format, device: str
) -> Callable[[], object] | None:
    """One call of the kind in the format, operands ready; ``None`` without a kernel."""
    import torch

    is_tf32 = fmt.name == "tf32"
    dtype = torch.float32 if is_tf32 else fmt.torch_dtype
    if dtype is None or (is_tf32 and torch.device(device).type != "cuda"):
        return None
    generator = torch.Generator().manual_seed(0)

    def operand(*size: int) -> Tensor:
        values = torch.randn(size, generator=generator) * 40
        return values.clamp(-127, 127).to(device, dtype)  # within int8 and e4m3fn

    if dtype.itemsize == 1:
        return _kernel_of_8_bits(shape, operand) if kind == "linear" else None
    run = _PLAIN_KERNELS[kind](shape, operand)
    return partial(_with_tf32, run) if is_tf32 else run


def _kernel_of_8_bits(
    shape: tuple[int, ...], operand: Operand
) -> Callable[[], object] | None:
    import torch

    rows, inner, columns = shape
    x = operand(rows, inner)
    weight = operand(columns, inner).t()
    if x.dtype == torch.int8:
        return partial(torch._int_mm, x, weight)
    if not x.dtype.is_floating_point:
        return None
    scale = torch.ones((), device=x.device)
    return partial(torch._scaled_mm, x, weight, scale, scale, out_dtype=torch.bfloat16)


def _linear(shape: tuple[int, ...], operand: Operand) -> Callable[[], object]:
    from torch.nn import functional

    rows, inner, columns = shape
    return partial(functional.linear, operand(rows, inner), operand(columns, inner))


def _matmul(shape: tuple[int, ...], operand: Operand) -> Callable[[], object]:
    import torch

    batch, rows, inner, columns = shape
    left = operand(batch, rows, inner)
    return partial(torch.matmul, left, operand(batch, inner, columns))


def _conv(shape: tuple[int, ...], operand: Operand) -> Callable[[], object]:
    from torch.nn import functional

    channels, side = shape
    image = operand(1, channels, side, side)
    weight = operand(channels, channels, 3, 3)
    return partial(functional.conv2d, image, weight, padding=1)


def _addition(shape: tuple[int, ...], operand: Operand) -> Callable[[], object]:
    import torch

    return partial(torch.add, operand(*shape), operand(*shape))


_PLAIN_KERNELS = {
    "linear": _linear,
    "matmul": _matmul,
    "conv": _conv,
    "elementwise": _addition,
}


def _with_tf32(run: Callable[[], object]) -> object:
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return run()
    finally:
        torch.set_float32_matmul_precision(before)
