"""What recording costs with msprobe (MindStudio Probe): step time against plain training, and bytes on disk.

    PEER_PYTHON benchmarks/peer_msprobe.py [--quick]

Run by the Python of an environment that has mindstudio-probe and torch; roundoff is not needed there. A step is forward and
backward of a model of capture_models.py, without an optimizer. Each setting has a process of its own, because msprobe's
debugger is a singleton. In it plain and recorded steps take turns: the plain ones on a second model that the debugger never
sees, the recorded ones from ``start`` to ``step``, so that writing the files is part of them. Printed is one JSON object,
{model: {setting: {"ratio": median over the pairs of recorded / plain, "bytes": on disk for each step}}}.
With --compare, two dumps of all tensors of a step are compared by its command instead, the second of a model whose weights
differ by 1e-7: {model: {"bytes": of both dumps, "seconds": of the command}}.
The least and the largest ratio are told on standard error. Threads are OMP_NUM_THREADS, 2 unless it is set: set it to what
the other side was timed with.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# as in common.py, which needs roundoff
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch
from capture_models import BUILDERS, build, perturb

SETTINGS: dict[str, dict[str, Any]] = {
    "statistics L1": {"task": "statistics", "level": "L1"},
    "statistics L0": {"task": "statistics", "level": "L0"},
    "tensor L1": {"task": "tensor", "level": "L1"},
}
WARM = 2
PAIRS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="one pair of steps: does it run?"
    )
    parser.add_argument(
        "--only", metavar="MODEL", nargs="+", choices=BUILDERS, default=list(BUILDERS)
    )
    parser.add_argument(
        "--compare", action="store_true", help="time its compare command"
    )
    parser.add_argument(
        "--dump", nargs=3, metavar=("MODEL", "CHANGE", "FOLDER"), help=argparse.SUPPRESS
    )
    parser.add_argument(
        "--one", nargs=3, metavar=("MODEL", "SETTING", "FOLDER"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    pairs = 1 if args.quick else PAIRS
    if args.one:
        model, setting, folder = args.one
        (Path(folder) / "result").write_text(
            json.dumps(measure(model, setting, Path(folder), pairs))
        )
        return
    if args.dump:
        dump(args.dump[0], float(args.dump[1]), Path(args.dump[2]))
        return
    if args.compare:
        print(json.dumps({model: compared(model) for model in args.only}))
        return
    found: dict[str, dict[str, Any]] = {}
    for model in args.only:
        for setting in SETTINGS:
            found.setdefault(model, {})[setting] = in_a_process(
                model, setting, args.quick
            )
    print(json.dumps(found))


def in_a_process(model: str, setting: str, quick: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            __file__,
            "--one",
            model,
            setting,
            folder,
            *(["--quick"] if quick else []),
        ]
        # msprobe talks on standard output, which is for the result
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{model}, {setting}: {done.stderr[-2000:]}")
        result: dict[str, float] = json.loads((Path(folder) / "result").read_text())
        # Hooks that stop() leaves must not make the plain steps slow, which would make the tool look fast.
        change = result.pop("plain")
        low, high = result.pop("least"), result.pop("most")
        print(
            f"  {model}, {setting}: {result} ({low:.3g} – {high:.3g})",
            file=sys.stderr,
            flush=True,
        )
        if not 0.8 < change < 1.25:
            print(
                f"  plain steps took {change:.2f} times what they did before msprobe was imported",
                file=sys.stderr,
            )
        return result


def measure(name: str, setting: str, folder: Path, pairs: int) -> dict[str, float]:
    """Ratio and bytes of one model under one setting; files are written below ``folder`` and deleted after each step."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    _, plain = build(name)
    watched, step = build(name)
    untouched = [clock(plain) for _ in range(WARM + pairs)][WARM:]
    try:
        from msprobe.pytorch import PrecisionDebugger
    except ImportError as error:
        sys.exit(
            f"this Python has no msprobe ({error}): give one of an environment with mindstudio-probe and torch"
        )
    out = folder / "dump"
    config = folder / "config.json"
    config.write_text(
        json.dumps({"dump_path": str(out), "rank": [], "step": [], **SETTINGS[setting]})
    )
    debugger = PrecisionDebugger(config_path=str(config))

    def recorded() -> None:
        debugger.start(watched)
        step()
        debugger.stop()
        debugger.step()

    sizes, plains, ratios = [], [], []
    for _ in range(WARM + pairs):
        plains.append(clock(plain))
        ratios.append(clock(recorded) / plains[-1])
        sizes.append(
            sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        )
        shutil.rmtree(out)
        out.mkdir()
    if not all(sizes):
        sys.exit(f"{name}, {setting}: msprobe has written nothing")
    ratios = ratios[WARM:]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "least": min(ratios),
        "most": max(ratios),
        "bytes": int(statistics.median(sizes[WARM:])),
        "plain": statistics.median(plains[WARM:]) / statistics.median(untouched),
    }


def dump(name: str, change: float, folder: Path) -> None:
    """All tensors of one step."""
    model, step = build(name)
    perturb(model, change)
    from msprobe.pytorch import PrecisionDebugger

    config = folder / "config.json"
    config.write_text(
        json.dumps(
            {
                "dump_path": str(folder / "dump"),
                "rank": [],
                "step": [],
                **SETTINGS["tensor L1"],
            }
        )
    )
    debugger = PrecisionDebugger(config_path=str(config))
    debugger.start(model)
    step()
    debugger.stop()
    debugger.step()


def compared(name: str) -> dict[str, float]:
    """Bytes of two dumps, and seconds of comparing them, start-up included, the files in the page cache."""
    with tempfile.TemporaryDirectory() as folder:
        paths: list[Path] = []
        for side, change in (("reference", "0"), ("candidate", "1e-7")):
            here = Path(folder, side)
            here.mkdir()
            command = [sys.executable, __file__, "--dump", name, change, str(here)]
            subprocess.run(command, check=True, capture_output=True)
            paths += here.glob("dump/step0/*/dump.json")
        size = sum(
            path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()
        )
        tool = str(Path(sys.executable).with_name("msprobe"))
        command = [
            tool,
            "compare",
            "-tp",
            str(paths[1]),
            "-gp",
            str(paths[0]),
            "-o",
            str(Path(folder, "out")),
        ]
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            seconds.append(time.perf_counter() - start)
            if done.returncode:
                sys.exit(
                    f"msprobe compare, {name}: {(done.stdout + done.stderr)[-2000:]}"
                )
        return {"bytes": size, "seconds": min(seconds)}


def clock(work: Callable[[], None]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
