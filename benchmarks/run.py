"""Run the benchmarks and write their tables into docs/benchmarks.md, each between its two markers.

    python benchmarks/run.py                          all of them (about an hour on two cores)
    python benchmarks/run.py rank_correlation memory  these
    python benchmarks/run.py --quick                  do they run? Writes nothing.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "docs" / "benchmarks.md"
#: in the order of the page
SCRIPTS = ("rank_correlation", "plan_agreement", "budget_time", "plan_quality", "memory", "rounding_speed")
QUICK = {"rounding_speed": ["0.1", "3"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=", ".join(SCRIPTS))
    parser.add_argument("--quick", action="store_true", help="small cases; the page stays as it is")
    args = parser.parse_args()
    unknown = set(args.scripts) - set(SCRIPTS)
    if unknown:
        parser.error(f"no script named {', '.join(sorted(unknown))}; there are {', '.join(SCRIPTS)}")
    for name in args.scripts or SCRIPTS:
        print(f"== {name}", flush=True)
        command = [sys.executable, str(FOLDER / f"{name}.py")]
        if args.quick:
            command += QUICK.get(name, ["--quick"])
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=FOLDER.parent, check=False)
        print(done.stdout, flush=True)
        if done.returncode:
            raise SystemExit(f"{name} failed with exit code {done.returncode}")
        if not args.quick:
            _write(name, done.stdout.strip())


def _write(name: str, text: str) -> None:
    """Put ``text`` between the markers of ``name``; text that is no Markdown table is fenced."""
    body = text if "\n|--" in text else f"```text\n{text}\n```"
    when = f"Measured {dt.date.today()} on {_machine()}."
    page = PAGE.read_text()
    marked = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    if not marked.search(page):
        raise SystemExit(f"{PAGE} has no markers for {name}")
    temporary = PAGE.with_suffix(".tmp")
    temporary.write_text(marked.sub(lambda m: f"{m[1]}{when}\n\n{body}\n{m[2]}", page))
    temporary.replace(PAGE)


def _machine() -> str:
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    vectors = "AVX-512" if "avx512f" in text else "AVX2" if "avx2" in text else "no AVX2"
    return f"{os.cpu_count()} CPU cores, {vectors}, torch {version('torch').split('+')[0]} on the CPU"


if __name__ == "__main__":
    main()
