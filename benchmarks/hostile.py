"""Commands on hostile files: how many crash, hang, end in a traceback, write outside or reach the terminal.

Every verb that reads files, on honest files of every kind that are changed (tests/hostile): bytes, values, columns,
headers, operators that a recording names, members of archives. Each runs in a forked process with limits of
processor time and memory. The bar: none of 2,000 does any of it.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from common import ROOT, progress, table

sys.path.insert(0, str(ROOT))

from tests.hostile.honest import COMMANDS
from tests.hostile.server import serving

#: Commands with --quick.
QUICK = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=2000, help="commands")
    parser.add_argument("--seed", type=int, default=0, help="of the first attack")
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="the command to begin with: to go on, or beside another process",
    )
    parser.add_argument(
        "--verbs", nargs="+", metavar="VERB", help="commands of these verbs alone"
    )
    parser.add_argument("--like", metavar="PATTERN", help="commands that match this")
    parser.add_argument(
        "--quick", action="store_true", help="12 commands, of all verbs"
    )
    args = parser.parse_args()
    commands = _commands(args)
    first = args.first
    numbers = range(first, first + (QUICK if args.quick else args.count))
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server:
        for number in numbers:
            command = commands[number % len(commands)]
            complaint, output, seconds = server.end_of(command, args.seed + number)
            tally.add(command.split()[0], seconds, is_harmful=complaint is not None)
            if complaint is not None:
                progress(f"{command} (seed {args.seed + number}): {complaint}")
                progress(output[-600:])
            if number % 100 == 99:
                progress(f"up to {number + 1}: {tally}")
    rows = [
        (verb, str(count), str(tally.harmful[verb]))
        for verb, count in tally.commands.items()
    ]
    rows.append(("all", str(len(numbers)), str(tally.harmful.total())))
    table("Commands on hostile files", ("verb", "commands", "harmful"), rows)
    progress(f"{tally}; longest: {tally.longest:.1f} s")
    sys.exit(tally.harmful.total() > 0)


def _commands(args: argparse.Namespace) -> list[str]:
    chosen = [
        command
        for command in COMMANDS
        if (not args.verbs or command.split()[0] in args.verbs)
        and (not args.like or re.search(args.like, command))
    ]
    return chosen[:: len(chosen) // QUICK + 1] if args.quick else chosen


@dataclass
class Tally:
    """How many commands of each verb, how many were harmful, and processor time."""

    commands: Counter[str] = field(default_factory=Counter)
    harmful: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    longest: float = 0.0

    def add(self, verb: str, seconds: float, *, is_harmful: bool) -> None:
        self.commands[verb] += 1
        self.harmful[verb] += is_harmful
        self.seconds += seconds
        self.longest = max(self.longest, seconds)

    def __str__(self) -> str:
        return f"{self.harmful.total()} harmful, {self.seconds:.0f} s of processor time"


if __name__ == "__main__":
    main()
