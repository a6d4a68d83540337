"""What does recording cost a training step, on disk and in memory, and does it miss an operator?

A step is forward and backward of a model of capture_models.py. Plain and recorded steps take turns in one process; a
recorded one lasts from its first operator until ``run.step()`` has written it. Coverage: the calls of a bare dispatch mode
that computes nothing, against the rows. OMP_NUM_THREADS sets the threads (2). With ROUNDOFF_PEER_PYTHON, the Python of an
environment that has mindstudio-probe, the same models are recorded by msprobe beside it (peer_msprobe.py).
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from capture_models import BUILDERS, TINY, build
from common import clock, middle, options, progress, table, verdict
from torch.utils._python_dispatch import TorchDispatchMode

import roundoff as ro

#: setting -> arguments of capture, bar of the step, the setting of msprobe that does the same
SETTINGS: dict[str, tuple[dict[str, Any], float, str | None]] = {
    "operators, statistics": ({}, 1.3, "statistics L1"),
    "modules, statistics": ({"level": "module"}, 1.1, "statistics L0"),
    "operators, all tensors": ({"keep": "tensors"}, 3.0, "tensor L1"),
    "operators, fp64 shadow": ({"shadow": "fp64"}, 6.0, None),
}
WARM, PAIRS = 2, 15
MEMORY = 50.0  # MiB
VIEWS = set(
    "t view detach expand transpose permute select slice unsqueeze squeeze _unsafe_view alias split as_strided "
    "_reshape_alias unbind chunk split_with_sizes".split()
)


def main() -> None:
    if sys.argv[1:2] == ["--memory"]:
        print(json.dumps(peak(sys.argv[2], sys.argv[3] == "captured")))
        return
    args = options(__doc__)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    names = [name for name in BUILDERS if args.only is None or name in args.only]
    names = [TINY] if args.quick else names
    peer = peers(names, args.quick)
    steps, disk, rest = [], [], []
    for name in names:
        for setting, (how, bar, theirs) in SETTINGS.items():
            found = measure(name, how, 1 if args.quick else PAIRS)
            other = peer.get(name, {}).get(theirs or "")
            ratio = statistics.median(found["ratios"])
            progress(f"{name}, {setting}: {ratio:.2f}")
            theirs = other and other["ratio"]
            steps.append(
                (
                    name,
                    setting,
                    middle(found["ratios"]),
                    theirs,
                    bar,
                    verdict(ratio, bar, at_most=True),
                )
            )
            if how.get("keep") == "tensors":
                size, half = (
                    found["bytes"] / 1e6,
                    other["bytes"] / 2e6 if other else None,
                )
                disk.append(
                    (
                        name,
                        size,
                        half and 2 * half,
                        half and verdict(size, half, at_most=True),
                    )
                )
        calls, rows, missing = coverage(name)
        plain, captured = (
            statistics.median(memory(name, how) for _ in range(1 if args.quick else 3))
            for how in ("plain", "captured")
        )
        rest.append(
            (
                name,
                calls,
                rows,
                ", ".join(sorted(missing)) or "none",
                verdict(len(missing), 0, at_most=True),
                captured - plain,
                verdict(captured - plain, MEMORY, at_most=True),
            )
        )
    threads = torch.get_num_threads()
    title = f"Recorded step / plain step, median (range), {threads} threads"
    table(title, ("model", "recorded", "roundoff", "msprobe", "bar", "verdict"), steps)
    table(
        "All tensors of a step on disk (MB)",
        ("model", "roundoff", "msprobe", "bar: half"),
        disk,
    )
    table(
        "Compute calls of a step, and memory of statistics",
        (
            "model",
            "calls",
            "recorded",
            "without a row",
            "bar",
            "more memory at the peak, MiB",
            f"bar {MEMORY:.0f}",
        ),
        rest,
    )


def measure(name: str, how: dict[str, Any], pairs: int) -> dict[str, Any]:
    """Ratios of recorded to plain steps, and bytes on disk of the last one."""
    model, step = build(name)
    _, plain = build(name)
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(WARM + pairs):
            before = clock(plain)[0]
            with ro.capture(folder + "/run", model, overwrite=True, **how) as run:

                def recorded(run: Any = run) -> None:
                    step()
                    run.step()

                ratios.append(clock(recorded)[0] / before)
        size = sum(
            path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()
        )
    return {"ratios": ratios[WARM:], "bytes": size}


class Trace(TorchDispatchMode):
    """The compute calls that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket.__name__ not in VIEWS:
            self.calls.append(f"{func.namespace}.{func.__name__}")
        return func(*args, **(kwargs or {}))


def coverage(name: str) -> tuple[int, int, set[str]]:
    """Compute calls of a step, how many of them have a row (or one with a reason), and the operators of the others."""
    model, step = build(name)
    with Trace() as trace:
        step()
    with tempfile.TemporaryDirectory() as folder:
        with ro.capture(folder + "/run", model):
            step()
        rows = ro.load(folder + "/run").ops.collect()
    rows = rows.filter(
        (rows["call"] >= 0) & ~rows["operator"].is_in(list(VIEWS))
    ).unique("call")
    missing = Counter(trace.calls) - Counter(rows["overload"])
    return len(trace.calls), len(trace.calls) - missing.total(), set(missing)


def memory(name: str, how: str) -> float:
    """Peak of resident memory of a process of its own, in MiB above what model and two plain steps take."""
    command = [sys.executable, __file__, "--memory", name, how]
    return float(
        json.loads(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
        )
    )


def peak(name: str, captured: bool) -> float:
    torch.set_num_threads(2)
    model, step = build(name)
    step()
    step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    before = _status("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        if captured:
            with ro.capture(folder + "/run", model) as run:
                for _ in range(5):
                    step()
                    run.step()
        else:
            for _ in range(5):
                step()
    return _status("VmHWM") - before


def _status(field: str) -> float:
    text = Path("/proc/self/status").read_text()
    return float(text.split(field + ":")[1].split()[0]) / 1024


def peers(names: list[str], quick: bool) -> dict[str, Any]:
    """What peer_msprobe.py measured; nothing without an environment for it."""
    python = os.environ.get("ROUNDOFF_PEER_PYTHON")
    if not python:
        print("ROUNDOFF_PEER_PYTHON is not set: msprobe's columns stay empty")
        return {}
    command = [
        python,
        str(Path(__file__).with_name("peer_msprobe.py")),
        "--only",
        *names,
        *(["--quick"] if quick else []),
    ]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    )
    return found


if __name__ == "__main__":
    main()
