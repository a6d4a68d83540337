"""Do migrated scripts run? Plain training scripts of many styles are migrated, run on the
CPU and linted; scripts that cannot run here are only read.

    python benchmarks/migrate_bank.py                 every script that runs, in three ways
    python benchmarks/migrate_bank.py --quick         one script that runs, in bf16
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, progress, table, verdict

import roundoff as ro
from roundoff.errors import RoundoffError
from roundoff.plan import Plan, Rule

PLAIN = ROOT / "tests/migrate/plain"
PROGRAMS = ROOT / "tests/scripts/programs"
READ = (ROOT / "tests/lint/corpus", ROOT / "tests/lint/apart", ROOT / "examples")
WAYS = ("amp", "bf16", "roundoff")
#: Seconds that a script may take.
LIMIT = 120


@dataclass(frozen=True)
class Outcome:
    """What became of one script: ``left``, or migrated with what went wrong."""

    script: str
    is_left: bool
    fault: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="one way, one script: does it run?"
    )
    args = parser.parse_args()
    scripts = sorted(PLAIN.glob("*.py"))
    scripts = scripts[:1] if args.quick else [*scripts, *sorted(PROGRAMS.glob("*.py"))]
    rows = []
    for way in ("bf16",) if args.quick else WAYS:
        outcomes = [outcome(script, way) for script in scripts if is_plain(script)]
        rows.append(row(way, outcomes))
    table(
        "Scripts that run",
        [
            "--to",
            "scripts",
            "left, with a reason",
            "migrated",
            "run, lint clean",
            "bar",
        ],
        rows,
    )
    table("Scripts that are read", ["what", "value", "bar"], read_only(args.quick))


def is_plain(script: Path) -> bool:
    """Return True unless a script is in mixed precision already."""
    return "autocast" not in script.read_text(encoding="utf-8")


def row(way: str, outcomes: Sequence[Outcome]) -> Sequence[object]:
    migrated = [each for each in outcomes if not each.is_left]
    faults = [each for each in migrated if each.fault]
    for each in faults:
        progress(f"{each.script} --to {way}: {each.fault}")
    share = 1 - len(faults) / max(1, len(migrated))
    right = f"{len(migrated) - len(faults)} of {len(migrated)}"
    left = len(outcomes) - len(migrated)
    return way, len(outcomes), left, len(migrated), right, verdict(share, 1.0)


def outcome(script: Path, way: str) -> Outcome:
    """Migrate, run and lint one script."""
    with tempfile.TemporaryDirectory() as folder:
        Plan((Rule("fp32", ("op:exp",)),), autocast="bf16").save(
            Path(folder, "plan.toml")
        )
        migration = ro.migrate(script, way, plan=Path(folder, "plan.toml"))
        if migration.left:
            return Outcome(script.stem, is_left=True)
        new = Path(folder, script.name)
        text = migration.after.replace(str(Path(folder, "plan.toml")), "plan.toml")
        new.write_bytes(text.encode())
        return Outcome(script.stem, is_left=False, fault=fault(new, way))


def fault(script: Path, way: str) -> str:
    """Return what is wrong with a migrated script; nothing where it is right."""
    if ro.migrate(script, way).is_changed:
        return "it changes when it is migrated again"
    codes = {each.code for each in ro.lint(script, select=["RO1", "RO2"]).findings}
    # the scripts of the tests name no device but the CPU
    if codes - {"RO204"}:
        return f"lint finds {', '.join(sorted(codes))}"
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", script.name],
            cwd=script.parent,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"more than {LIMIT} s"
    lines = done.stderr.strip().splitlines() or [""]
    return "" if done.returncode == 0 else lines[-1]


def read_only(quick: bool) -> list[tuple[str, object, str]]:
    """Migrate scripts in every way without running them."""
    files = [file for folder in READ for file in sorted(folder.rglob("*.py"))]
    files = files[:5] if quick else files
    changed = 0
    begin = time.process_time()
    for file in files:
        for way in WAYS:
            try:
                changed += ro.migrate(file, way).is_changed
            except RoundoffError:  # no training loop
                continue
    seconds = time.process_time() - begin
    return [
        ("scripts", len(files), ""),
        ("migrations that change something", changed, ""),
        (
            "migrations a second of processor time",
            f"{3 * len(files) / seconds:.0f}",
            "",
        ),
    ]


if __name__ == "__main__":
    main()
