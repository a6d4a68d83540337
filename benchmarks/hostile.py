"""Commands on hostile files: how many crash, hang, end in a traceback, write outside or reach the terminal.

Every verb that reads files, on honest files of every kind that are changed (tests/hostile): bytes, values, columns,
headers, operators that a recording names, members of archives. Each runs in a forked process with limits of
processor time and memory. The bar: none of 2,000 does any of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
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
        "--verbs", nargs="+", metavar="VERB", help="commands of these verbs alone"
    )
    parser.add_argument(
        "--quick", action="store_true", help="12 commands, of all verbs"
    )
    args = parser.parse_args()
    count = QUICK if args.quick else args.count
    commands = [
        command
        for command in COMMANDS
        if not args.verbs or command.split()[0] in args.verbs
    ]
    commands = commands[:: len(commands) // QUICK + 1] if args.quick else commands
    complaints: Counter[str] = Counter()
    by_verb: Counter[str] = Counter()
    longest = 0.0
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server:
        for number in range(count):
            command = commands[number % len(commands)]
            complaint, output, seconds = server.end_of(command, args.seed + number)
            longest = max(longest, seconds)
            verb = command.split()[0]
            by_verb[verb] += 1
            if complaint is not None:
                complaints[verb] += 1
                progress(f"{command} (seed {args.seed + number}): {complaint}")
                progress(output[-600:])
            if number % 100 == 99:
                progress(f"{number + 1} of {count}, {complaints.total()} harmful")
    rows = [(verb, str(n), str(complaints[verb])) for verb, n in by_verb.items()]
    rows.append(("all", str(count), str(complaints.total())))
    table("Commands on hostile files", ("verb", "commands", "harmful"), rows)
    progress(f"longest: {longest:.1f} s of processor time")
    sys.exit(complaints.total() > 0)


if __name__ == "__main__":
    main()
