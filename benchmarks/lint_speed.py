"""How many files of 300 lines ``roundoff lint`` reads in a second of one core.

Beside it, on the same files: Python's own parser, libcst's parser, libcst with positions (what a linter on libcst needs
at least), and flake8. Processor time, the cases in turns; the last column is the ratio of medians to ``roundoff lint``.
Bar: 20 files a second.

    python benchmarks/lint_speed.py [--quick]
"""

from __future__ import annotations

import argparse
import ast
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import ROOT, progress, table, verdict

# isort: split
import libcst
from libcst.metadata import MetadataWrapper, PositionProvider

import roundoff

sys.path.insert(0, str(ROOT))
from tests.lint.right_scripts import SCRIPTS

LINES = 300
BAR = 20.0


def scripts(count: int) -> list[str]:
    """Scripts of 300 lines, each from other patterns of mixed precision."""
    texts = list(SCRIPTS.values())
    files = []
    for first in range(count):
        lines: list[str] = []
        place = first
        while len(lines) < LINES:
            lines += texts[place % len(texts)].splitlines()
            place += 1
        files.append("\n".join([*lines, ""]))
    return files


def seconds_of(work: Callable[[], object]) -> float:
    """Processor time of this process and of those it started."""
    before = _used()
    work()
    return _used() - before


def _used() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def flake8(folder: Path) -> None:
    command = [sys.executable, "-m", "flake8", "--isolated", "-j1", str(folder)]
    subprocess.run(command, capture_output=True, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two files, one turn")
    args = parser.parse_args()
    texts = scripts(2 if args.quick else 20)
    turns = 1 if args.quick else 5
    lines = sum(text.count("\n") for text in texts)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        empty = folder / "empty"
        empty.mkdir()
        full = folder / "full"
        full.mkdir()
        (empty / "a.py").write_text("")
        for place, text in enumerate(texts):
            (full / f"a{place}.py").write_text(text)
        cases: dict[str, Callable[[], object]] = {
            "roundoff lint": lambda: roundoff.lint(full),
            "Python's parser": lambda: [ast.parse(text) for text in texts],
            "libcst's parser": lambda: [libcst.parse_module(text) for text in texts],
            "libcst with positions": lambda: [_with_positions(text) for text in texts],
            "flake8": lambda: flake8(full),
            "flake8's start": lambda: flake8(empty),
        }
        measured: dict[str, list[float]] = {case: [] for case in cases}
        cases["roundoff lint"]()  # imports
        for turn in range(turns):
            progress(f"turn {turn + 1} of {turns}")
            for case, work in cases.items():
                measured[case].append(seconds_of(work))
    medians = {case: statistics.median(times) for case, times in measured.items()}
    medians["flake8"] -= medians.pop("flake8's start")
    files = lines / LINES
    ours = medians["roundoff lint"]
    table(
        f"{len(texts)} files, {lines:,} lines",
        ("", "files of 300 lines a second", "time, roundoff lint = 1"),
        [
            (case, f"{files / seconds:.1f}", f"{seconds / ours:.2f}")
            for case, seconds in medians.items()
        ],
    )
    print(f"\nfiles a second: {verdict(files / ours, BAR)}")


def _with_positions(text: str) -> object:
    wrapper = MetadataWrapper(libcst.parse_module(text), unsafe_skip_copy=True)
    return wrapper.resolve(PositionProvider)


if __name__ == "__main__":
    main()
