"""Seconds per multiply-accumulate or per element, by operator, format and size: read from a file, or measured here.

A table is data, so that the speed of a device that isn't at hand can be given. Times are of kernels alone: casts and
quantization between neighbours in different formats aren't in them.
"""

from __future__ import annotations

import csv
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundoff.errors import OutputError, PlanError
from roundoff.formats import Format, parse_format

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KINDS", "SecondsRow", "SecondsTable", "measure_seconds", "read_seconds"]

# Kind of work -> the kind that is measured in its place, and what its seconds are divided by.
KINDS: Mapping[str, tuple[str, str]] = {
    "linear": ("linear", "mac"),
    "matmul": ("matmul", "mac"),
    "conv": ("conv", "mac"),
    "attention": ("matmul", "mac"),
    "rnn": ("linear", "mac"),
    "embedding": ("elementwise", "element"),
    "elementwise": ("elementwise", "element"),
    "normalization": ("elementwise", "element"),
    "reduction": ("elementwise", "element"),
    "softmax": ("elementwise", "element"),
}
# Smallest amount (multiply-accumulates, elements) of a medium and of a large call.
BOUNDS: Mapping[str, tuple[float, float]] = {"mac": (4e6, 1e8), "element": (3e4, 1e6)}
SIZES = ("small", "medium", "large")


@dataclass(frozen=True)
class SecondsRow:
    """Seconds per multiply-accumulate (matrix kinds) or per element (the others) of one kind, format and size."""

    kind: str
    format: str
    size: str
    seconds: float
    note: str = ""


class SecondsTable:
    """Rows by kind, format and size ("small", "medium", "large", or "any" where the size makes no difference).

    Raises:
        PlanError: unknown kind or size, seconds that are not finite and positive, or two rows for one case.
        FormatError: unknown format.

    Example:
        >>> table = SecondsTable([SecondsRow("linear", "fp32", "any", 2e-11), SecondsRow("linear", "bf16", "any", 1e-11)])
        >>> table.seconds("rnn", "bf16", 1e6)  # no row of its own: an RNN is costed as its linear parts
        1e-05
    """

    def __init__(self, rows: Iterable[SecondsRow], *, where: str = "table of seconds") -> None:
        self.rows = tuple(rows)
        self._seconds: dict[tuple[str, str, str], float] = {}
        for number, row in enumerate(self.rows, start=1):
            place = f"{where}, row {number}"
            for field, value, known in (("kind", row.kind, (*KINDS,)), ("size", row.size, (*SIZES, "any"))):
                if value not in known:
                    raise PlanError(f"unknown {field}", where=place, expected=", ".join(known), got=repr(value))
            if not (math.isfinite(row.seconds) and row.seconds > 0.0):
                raise PlanError("bad seconds", where=place, expected="a finite number above 0", got=str(row.seconds))
            key = row.kind, parse_format(row.format).name, row.size
            if key in self._seconds:
                raise PlanError("a second row for the same case", where=place, got=", ".join(key))
            self._seconds[key] = row.seconds

    def seconds(self, kind: str, fmt: str, amount: float) -> float:
        """Seconds of one call with ``amount`` multiply-accumulates (matrix kinds) or elements (the others).

        The row of the kind itself counts before that of the measured kind standing for it, its own size before "any".

        Raises:
            PlanError: the table has no row for it.
        """
        stand_in, unit = KINDS[kind]
        medium, large = BOUNDS[unit]
        size = "small" if amount < medium else "medium" if amount < large else "large"
        for key in ((k, fmt, s) for k in (kind, stand_in) for s in (size, "any")):
            if key in self._seconds:
                return self._seconds[key] * amount
        have = sorted({f"{k} {s}" for k, f, s in self._seconds if f == fmt})
        raise PlanError(
            "the table of seconds has no row for a call", where=f"{kind} in {fmt}",
            expected=f"kind {kind!r}" + (f" or {stand_in!r}" if stand_in != kind else "") + f", size {size!r} or 'any'",
            got=f"for {fmt}: {', '.join(have) or 'no row'}", do="add the row, or measure the table anew",
        )  # fmt: skip

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write as TOML, in place of what was there. OutputError if the file can't be written."""
        lines = ["# Seconds per multiply-accumulate (linear, matmul, conv) or per element (elementwise)."]
        for row in self.rows:
            lines += ["", "[[seconds]]"]
            # A JSON string is a TOML basic string (TOML 1.0, "String") once non-ASCII is escaped, which json does.
            for field in ("kind", "format", "size", "note"):
                lines.append(f"{field} = {json.dumps(getattr(row, field))}")
            lines.append(f"seconds = {row.seconds!r}")
        try:
            Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:
            raise OutputError("cannot write the table of seconds", where=str(path), got=str(error)) from error


def read_seconds(path: str | os.PathLike[str]) -> SecondsTable:
    """Read a table from a TOML or JSON file (an array ``seconds`` of tables) or a CSV file with a header.

    Fields of a row: kind, format, size, seconds, and note if wanted.

    Raises:
        PlanError: the file can't be read or parsed, has another ending, no rows, or a row that is no row.
        FormatError: unknown format.
    """
    path = Path(path)
    readers: dict[str, Callable[[str], Any]] = {
        ".toml": lambda text: tomllib.loads(text).get("seconds"),
        ".json": lambda text: json.loads(text).get("seconds"),
        ".csv": lambda text: list(csv.DictReader(text.splitlines(), restkey="more")),
    }
    if path.suffix not in readers:
        raise PlanError("unknown ending of a table of seconds", where=str(path), expected=", ".join(readers))
    try:
        records = readers[path.suffix](path.read_text(encoding="utf-8"))
    except (OSError, ValueError, AttributeError) as error:  # ValueError: not UTF-8, TOML or JSON; AttributeError: a list
        raise PlanError("cannot read the table of seconds", where=str(path), got=str(error)) from error
    if not isinstance(records, list) or not records:
        raise PlanError("no rows in the table of seconds", where=str(path), expected="an array named seconds")
    return SecondsTable((_row(r, f"{path}, row {n}") for n, r in enumerate(records, start=1)), where=str(path))


def _row(record: object, where: str) -> SecondsRow:
    fields = {"kind", "format", "size", "seconds"}
    if not isinstance(record, dict) or not fields <= set(record) <= fields | {"note"}:
        got = ", ".join(map(str, record)) if isinstance(record, dict) else repr(record)
        raise PlanError("bad row", where=where, expected="kind, format, size, seconds and at most note", got=got)
    try:
        seconds = float(record["seconds"])
    except (TypeError, ValueError) as error:
        raise PlanError("bad seconds", where=where, expected="a number", got=repr(record["seconds"])) from error
    kind, fmt, size, note = (str(record.get(field) or "") for field in ("kind", "format", "size", "note"))
    return SecondsRow(kind, fmt, size, seconds, note)


# Shapes: linear (tokens, in, out), matmul (batch, rows, inner, columns), conv (channels in and out, side; kernel 3),
# elementwise (elements). Sizes by BOUNDS; all are multiples of 32, as matrix units ask for.
SHAPES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "linear": {"small": (32, 128, 128), "medium": (128, 384, 384), "large": (256, 1024, 1024)},
    "matmul": {"small": (4, 64, 32, 64), "medium": (12, 128, 64, 128), "large": (12, 512, 64, 512)},
    "conv": {"small": (32, 16), "medium": (64, 32), "large": (128, 32)},
    "elementwise": {"small": (1 << 12,), "medium": (1 << 18,), "large": (1 << 21,)},
}


def measure_seconds(
    formats: Iterable[str | Format], device: str = "cpu", *, budget: float = 5.0, sizes: Iterable[str] = SIZES
) -> SecondsTable:
    """Measure kernels of this machine in each format: linear, matmul, conv, and an elementwise addition.

    All cases take turns until the time is spent, at least once after a warm-up, so that a change of the clock or of the
    load meets all formats; each row is the median. Floating point formats of torch run the plain operator in that type;
    int8 runs ``torch._int_mm``, fp8 ``torch._scaled_mm`` (linear only); tf32 is native on CUDA devices alone. A format
    without a kernel here gets fp32's time and a note: a plan gains nothing from it. Formats that run only matrix
    operators have no elementwise row, since such work stays in fp32. The global random state is not touched.

    Args:
        formats: names or formats; fp32 is measured in any case.
        device: a torch device that exists here.
        budget: seconds of measuring, without warm-up.
        sizes: of "small", "medium", "large".

    Raises:
        FormatError: unknown format.
        PlanError: unknown size.
    """
    import torch

    parsed = {f.name: f for f in map(lambda f: f if isinstance(f, Format) else parse_format(f), ("fp32", *formats))}
    chosen = tuple(sizes)
    if not set(chosen) <= set(SIZES):
        raise PlanError("unknown size", expected=", ".join(SIZES), got=", ".join(chosen))
    calls: dict[tuple[str, str, str], Callable[[], object]] = {}
    once: dict[tuple[str, str, str], float] = {}
    notes: dict[tuple[str, str, str], str] = {}
    synchronize = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None

    def clock(call: Callable[[], object], repeats: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        synchronize()
        return (time.perf_counter() - start) / repeats

    with torch.no_grad():
        for kind, shapes in SHAPES.items():
            for case in ((kind, name, size) for size in chosen for name in parsed):
                fmt = parsed[case[1]]
                if fmt.execution is None or (kind == "elementwise" and fmt.execution.operators == "matrix"):
                    continue
                try:
                    call = _kernel(kind, shapes[case[2]], fmt, device)
                    if call is None:
                        notes[case] = f"no {fmt.name} kernel on {device}: fp32's time"
                        continue
                    clock(call, 1)
                    once[case] = clock(call, 1)
                except RuntimeError as error:  # torch's way to say that this build or device has no such kernel
                    notes[case] = f"{fmt.name} failed on {device}: fp32's time ({str(error).splitlines()[0][:80]})"
                    continue
                calls[case] = call
        samples: dict[tuple[str, str, str], list[float]] = {case: [] for case in calls}
        end = time.perf_counter() + budget
        while True:
            for case, call in calls.items():
                # A sample of 0.2 ms at least: the clock and the launch of a kernel are then small against it.
                samples[case].append(clock(call, max(1, min(100, round(2e-4 / once[case])))))
            if time.perf_counter() > end:
                break
    rows = []
    for case in (*calls, *notes):
        kind, name, size = case
        median = statistics.median(samples[case if case in calls else (kind, "fp32", size)])
        note = notes.get(case, f"median of {len(samples[case])} on {device}" if case in calls else "")
        rows.append(SecondsRow(kind, name, size, median / _amount(kind, SHAPES[kind][size]), note))
    return SecondsTable(rows)


def _amount(kind: str, shape: tuple[int, ...]) -> float:
    """Multiply-accumulates, or elements, of a measured shape."""
    return 9.0 * shape[0] ** 2 * shape[1] ** 2 if kind == "conv" else float(math.prod(shape))


def _kernel(kind: str, shape: tuple[int, ...], fmt: Format, device: str) -> Callable[[], object] | None:
    """One call of the kind in the format, operands ready; ``None`` if torch has no kernel to try."""
    import torch
    from torch.nn import functional

    generator = torch.Generator().manual_seed(0)

    def operand(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    dtype = torch.float32 if fmt.name == "tf32" else fmt.torch_dtype
    one_byte = dtype is not None and dtype.itemsize == 1
    if dtype is None or (one_byte and kind != "linear") or (fmt.name == "tf32" and torch.device(device).type != "cuda"):
        return None
    if one_byte:
        tokens, inner, outer = shape
        if dtype == torch.int8:
            x, w = ((operand(*s) * 40).clamp(-127, 127).to(dtype) for s in ((tokens, inner), (outer, inner)))
            return lambda: torch._int_mm(x, w.t())
        if not dtype.is_floating_point:
            return None
        x, w, one = operand(tokens, inner).to(dtype), operand(outer, inner).to(dtype), torch.ones((), device=device)
        return lambda: torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    run: Callable[[], object]
    if kind == "linear":
        x, w = operand(*shape[:2]).to(dtype), operand(shape[2], shape[1]).to(dtype)
        run = lambda: functional.linear(x, w)  # noqa: E731
    elif kind == "matmul":
        batch, rows, inner, columns = shape
        x, w = operand(batch, rows, inner).to(dtype), operand(batch, inner, columns).to(dtype)
        run = lambda: x @ w  # noqa: E731
    elif kind == "conv":
        channels, side = shape
        x, w = operand(1, channels, side, side).to(dtype), operand(channels, channels, 3, 3).to(dtype)
        run = lambda: functional.conv2d(x, w, padding=1)  # noqa: E731
    else:
        x, w = operand(*shape).to(dtype), operand(*shape).to(dtype)
        run = lambda: x + w  # noqa: E731
    if fmt.name != "tf32":
        return run

    def run_tf32() -> object:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            return run()
        finally:
            torch.set_float32_matmul_precision(before)

    return run_tf32
