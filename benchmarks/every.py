"""Does every benchmark still run? Each in a process of its own, with --quick, two at a time.

Names are those of the scripts to run, all when none is given. Scripts that other scripts call in other environments
(peer_*.py, quantize_peers.py) are left to those. Ends with an error if one of them fails; its output is printed then.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, progress, table

HERE = Path(__file__)
#: Seconds after which a quick run is none.
LIMIT = 400
#: Scripts that have no quick form, with the reason.
NOT_QUICK: dict[str, str] = {}
#: A Debian package; scripts that read its pictures are left out where it is not installed.
PICTURES = Path("/usr/share/datasets/fashion-mnist")


@dataclass(frozen=True)
class Outcome:
    """How a script ended, its processor time with that of its children, and the end of what it printed."""

    name: str
    status: str
    seconds: float
    printed: str

    @property
    def failed(self) -> bool:
        return self.status != "ran"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="these scripts alone, without .py"
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="how many run at the same time"
    )
    args = parser.parse_args()
    scripts = chosen(args.names)
    with ThreadPoolExecutor(args.jobs) as pool:
        outcomes = list(pool.map(run_quickly, scripts))
    rows = [(o.name, o.status, f"{o.seconds:.1f}") for o in outcomes]
    whole = sum(outcome.seconds for outcome in outcomes)
    rows.append(("all", "", f"{whole:.1f}"))
    table(
        "Every benchmark with --quick",
        ("script", "", "seconds of processor time"),
        rows,
    )
    for name, reason in (NOT_QUICK | without_pictures()).items():
        print(f"{name} is left out: {reason}")
    for outcome in outcomes:
        if outcome.failed:
            print(f"\n{outcome.name} {outcome.status}:\n{outcome.printed}")
    sys.exit(any(outcome.failed for outcome in outcomes))


def chosen(names: list[str]) -> list[Path]:
    """The scripts of these names, or all that are quick."""
    scripts = {script.stem: script for script in runnable()}
    unknown = sorted(set(names) - set(scripts))
    if unknown:
        sys.exit(f"no benchmark is called {', '.join(unknown)}")
    return [
        script
        for name, script in scripts.items()
        if (name in names if names else name not in NOT_QUICK | without_pictures())
    ]


def without_pictures() -> dict[str, str]:
    """The scripts that cannot run since Debian's dataset-fashion-mnist is not installed, with that reason."""
    if PICTURES.exists():
        return {}
    return {
        script.stem: "dataset-fashion-mnist is not installed"
        for script in runnable()
        if "fashion" in script.read_text(encoding="utf-8")
    }


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
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, str(script), *(["--quick"] if _has_quick(script) else [])],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        # the script's children too: it leads a process group of its own
        timer = threading.Timer(LIMIT, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        _, exit_status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(exit_status)
        output.seek(0)
        printed = output.read()
    seconds = usage.ru_utime + usage.ru_stime
    status = _status(process.returncode)
    progress(f"{script.stem} {status}, {seconds:.1f} s of processor time")
    return Outcome(script.stem, status, seconds, printed[-3000:])


def _has_quick(script: Path) -> bool:
    """Whether a script has the option, its own or that of ``common.options``."""
    text = script.read_text(encoding="utf-8")
    return "--quick" in text or "options(" in text


def _status(exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return f"was ended, after {LIMIT} s at most"
    return "ran" if exit_code == 0 else f"ended with {exit_code}"


if __name__ == "__main__":
    main()
