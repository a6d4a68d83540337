"""How fast are two runs with all their tensors compared, start-up included?

Of each model of capture_models.py two runs of some 0.5 GB are recorded, the second with weights that differ by 1e-7, so
that every value does. ``roundoff compare`` runs as a user runs it, in a process of its own, the files in the page cache;
beside it the same tensors are read and summed by a plain loop. With ROUNDOFF_PEER_PYTHON, the Python of an environment that
has mindstudio-probe, its compare command runs on its own dumps of the same models (peer_msprobe.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from capture_models import BUILDERS, build, perturb
from common import options, progress, table, verdict
from safetensors import safe_open

import roundoff as ro

BAR = 400.0  # MB/s
REPEATS = 5
STEPS = {"resnet18": 3, "gpt2": 2}


def main() -> None:
    args = options(__doc__)
    names = [name for name in BUILDERS if args.only is None or name in args.only]
    names = names[:1] if args.quick else names
    peer = peers(names)
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            for side, change in (("reference", 0.0), ("candidate", 1e-7)):
                record(
                    name, Path(folder, side), change, 1 if args.quick else STEPS[name]
                )
            size = (
                sum(
                    path.stat().st_size
                    for path in Path(folder).rglob("*")
                    if path.is_file()
                )
                / 1e6
            )
            speeds, sums = [], []
            for _ in range(1 if args.quick else REPEATS):
                speeds.append(size / compared(Path(folder)))
                sums.append(size / summed(Path(folder)))
                progress(f"{name}: {speeds[-1]:.0f} MB/s, summing alone {sums[-1]:.0f}")
        theirs = peer.get(name)
        speed = max(speeds)
        rows.append(
            (
                name,
                size,
                speed,
                max(sums),
                theirs and theirs["bytes"] / 1e6 / theirs["seconds"],
                BAR,
                verdict(speed, BAR),
            )
        )
    table(
        f"Comparing two runs with all tensors, MB of both a second, best of {REPEATS}",
        (
            "model",
            "MB",
            "roundoff compare",
            "reading and summing",
            "msprobe compare",
            "bar",
            "",
        ),
        rows,
    )


def record(name: str, folder: Path, change: float, steps: int) -> None:
    model, step = build(name)
    perturb(model, change)
    with ro.capture(folder, model, keep="tensors") as run:
        for _ in range(steps):
            step()
            run.step()


def compared(folder: Path) -> float:
    command = [
        sys.executable,
        "-m",
        "roundoff",
        "compare",
        str(folder / "reference"),
        str(folder / "candidate"),
        "--json",
    ]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(
            f"roundoff compare ended with {done.returncode}: {done.stderr[-2000:]}{done.stdout[:2000]}"
        )
    return seconds


def summed(folder: Path) -> float:
    """Seconds of summing every stored tensor, in this process."""
    start = time.perf_counter()
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 (no dict)
                file.get_tensor(key).sum(dtype=torch.float32)
    return time.perf_counter() - start


def peers(names: list[str]) -> dict[str, dict[str, float]]:
    python = os.environ.get("ROUNDOFF_PEER_PYTHON")
    if not python:
        return {}
    script = Path(__file__).with_name("peer_msprobe.py")
    done = subprocess.run(
        [python, str(script), "--compare", "--only", *names],
        capture_output=True,
        text=True,
        check=True,
    )
    figures: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return figures


if __name__ == "__main__":
    main()
