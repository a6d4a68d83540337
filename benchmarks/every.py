"""Does every benchmark still run? Each in a process of its own, with --quick, two at a time.

Scripts that other scripts call in other environments (peer_*.py, quantize_peers.py) are left to those. Ends with an error
if one of them fails; its output is printed then.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, progress, table

HERE = Path(__file__)
#: Seconds after which a quick run is none.
LIMIT = 900


@dataclass(frozen=True)
class Outcome:
    """How a script ended, and the end of what it printed."""

    name: str
    status: str
    seconds: float
    printed: str

    @property
    def failed(self) -> bool:
        return self.status != "ran"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="these scripts alone")
    args = parser.parse_args()
    scripts = [s for s in runnable() if not args.names or s.stem in args.names]
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(run_quickly, scripts))
    table(
        "Every benchmark with --quick",
        ("script", "", "seconds"),
        [(o.name, o.status, f"{o.seconds:.0f}") for o in outcomes],
    )
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    progress(f"processor time: {spent.ru_utime + spent.ru_stime:.0f} s")
    for outcome in outcomes:
        if outcome.failed:
            print(f"\n{outcome.name} {outcome.status}:\n{outcome.printed}")
    sys.exit(any(outcome.failed for outcome in outcomes))


def runnable() -> list[Path]:
    """The scripts that people start."""
    return [
        script
        for script in sorted(HERE.parent.glob("*.py"))
        if script != HERE
        and not {"peer", "peers"}.intersection(script.stem.split("_"))
        and "__main__" in script.read_text(encoding="utf-8")
    ]


def run_quickly(script: Path) -> Outcome:
    began = time.monotonic()
    has_quick = "quick" in script.read_text(encoding="utf-8")
    try:
        done = subprocess.run(
            [sys.executable, str(script), *(["--quick"] if has_quick else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            cwd=ROOT,
            timeout=LIMIT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        return Outcome(script.stem, f"took over {LIMIT} s", LIMIT, "")
    seconds = time.monotonic() - began
    status = "ran" if done.returncode == 0 else f"ended with {done.returncode}"
    progress(f"{script.stem} {status}, {seconds:.0f} s")
    return Outcome(script.stem, status, seconds, done.stdout[-3000:])


if __name__ == "__main__":
    main()
