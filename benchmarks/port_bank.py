"""Does a comparison of a port with its reference name what is wrong, and only where something is?

Each port of tests/ports and each faulty change of one is recorded beside its reference, on one
thread, and compared twice: from tensors and from statistics. A right port may not be called
wrong; of a faulty one the first culprit should be the changed line, or the parameter that the
loader filled wrongly.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import ROOT, progress, table, verdict

import roundoff as ro
from roundoff.compare import Culprit
from roundoff.errors import RoundoffError
from roundoff.plan import Variant, variant
from roundoff.verbs.diagnose_candidate import record
from roundoff.workload import Workload

sys.path.insert(0, str(ROOT))
from tests.ports import KEPT_APART, NETWORKS, Port, faults, ports, written

#: What is compared -> the share of faults named first.
BARS = {"tensors": 0.9, "statistics": 0.8}


@dataclass(frozen=True)
class Outcome:
    """What one comparison says of one port."""

    port: Port
    kept: str
    culprits: Sequence[Culprit]
    agrees: bool
    failure: str = ""

    @property
    def rank(self) -> int | None:
        """Which of the culprits, from 1, is the truth; None where none is."""
        for rank, culprit in enumerate(self.culprits, 1):
            if self.port.names_truth(culprit):
                return rank
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of titles: these alone")
    parser.add_argument(
        "--all", action="store_true", help="also the networks kept apart"
    )
    parser.add_argument("--apart", action="store_true", help="only those")
    parser.add_argument("--right", action="store_true", help="only right ports")
    parser.add_argument("--statistics", action="store_true", help="no tensors")
    parser.add_argument(
        "--bare",
        action="store_true",
        help="statistics, and nothing of what steps begin with",
    )
    parser.add_argument(
        "--quick", action="store_true", help="two right and two faulty ports"
    )
    parser.add_argument(
        "--drawn",
        type=int,
        metavar="N",
        help="N ports drawn at random, always the same",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    networks = [
        name for name in NETWORKS if args.all or args.apart == (name in KEPT_APART)
    ]
    entries = ports(networks) if args.right else [*ports(networks), *faults(networks)]
    if args.names:
        entries = [e for e in entries if any(name in e.title for name in args.names)]
    if args.quick:
        entries = entries[:2] + entries[-2:]
    if args.drawn:
        entries = random.Random(0).sample(entries, min(args.drawn, len(entries)))
    outcomes: list[Outcome] = []
    for entry in entries:
        began = time.process_time()
        found = list(outcomes_of(entry, not args.statistics, bare=args.bare))
        outcomes += found
        answers = ", ".join(answer(outcome) for outcome in found)
        progress(f"{entry.title}: {answers} ({time.process_time() - began:.1f} s)")
    show(outcomes)


def outcomes_of(port: Port, tensors: bool, *, bare: bool) -> Iterator[Outcome]:
    """Record one port and its reference, and compare them in each way.

    ``bare``: from recordings that keep nothing but statistics.
    """
    kept: dict[str, Any] = {"keep": "stats", "leaves": 0} if bare else {}
    with tempfile.TemporaryDirectory() as folder:
        reference, candidate = written(port, Path(folder) / "files")
        workload = Workload.load(reference)
        sides = {
            "reference": Variant("reference", workload),
            "candidate": variant(workload, candidate),
        }
        for name, side in sides.items():
            record(side, Path(folder) / name, port.steps, **kept)
        for way in BARS if tensors and not bare else ["statistics"]:
            yield compared(port, Path(folder), way)


def compared(port: Port, folder: Path, kept: str) -> Outcome:
    """Compare the two recordings of a port."""
    try:
        comparison = ro.compare(
            reference=str(folder / "reference"),
            candidate=str(folder / "candidate"),
            tensors=kept == "tensors",
        )
    except RoundoffError as error:
        return Outcome(port, kept, (), False, error.what)
    failure = "; ".join(comparison.about.damage)
    return Outcome(port, kept, comparison.culprits(3), comparison.agrees, failure)


def show(outcomes: Sequence[Outcome]) -> None:
    """Print what was named, and how often it is the truth."""
    for kept, bar in BARS.items():
        of_kind = [outcome for outcome in outcomes if outcome.kept == kept]
        right = [o for o in of_kind if o.port.change is None]
        wrong = [o for o in of_kind if o.port.change is not None]
        alarms = [o for o in right if not o.agrees]
        rows = [(o.port.title, o.rank, *said(o)) for o in wrong]
        if rows:
            header = ("faulty port", "rank", "named first", "line", "in words")
            table(f"Faulty ports, from {kept}", header, rows)
        if alarms:
            rows = [(o.port.title, None, *said(o)) for o in alarms]
            header = ("right port", "", "called wrong", "line", "in words")
            table(f"False alarms, from {kept}", header, rows)
        if right:
            print(f"{kept}: {len(alarms)} of {len(right)} right ports are called wrong")
        if wrong:
            summary(wrong, kept, bar)


def answer(outcome: Outcome) -> str:
    """Say what became of one port, in a word."""
    if outcome.failure:
        return f"failed: {outcome.failure}"
    if outcome.agrees:
        return "agrees"
    is_first = outcome.port.change is not None and outcome.rank == 1
    return "1" if is_first else f"{outcome.rank} < {said(outcome)}"


def said(outcome: Outcome) -> tuple[Any, ...]:
    """What is named first, in a table's columns."""
    if not outcome.culprits:
        return "-", "-", outcome.failure or "agrees"
    first = outcome.culprits[0]
    where = first.name if first.call < 0 else first.site
    return (
        str(where)[:32],
        first.line or first.reference_line,
        (first.evidence or "")[:70],
    )


def summary(wrong: Sequence[Outcome], kept: str, bar: float) -> None:
    """Print how many faults are named first and among three, by network and in all."""
    networks = dict.fromkeys(outcome.port.network for outcome in wrong)
    rows = []
    for network in (*networks, "all"):
        part = [o for o in wrong if network in (o.port.network, "all")]
        first = sum(o.rank == 1 for o in part)
        among = sum(o.rank is not None for o in part)
        passed = sum(o.agrees for o in part)
        rows.append((network, len(part), first, among, passed))
    table(
        f"Named, from {kept}",
        ("network", "faults", "first", "of three", "agrees"),
        rows,
    )
    share = sum(o.rank == 1 for o in wrong) / len(wrong)
    print(f"first {share:.0%}, bar {bar:.0%}: {verdict(share, bar)}")


if __name__ == "__main__":
    main()
