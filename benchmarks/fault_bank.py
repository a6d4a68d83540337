"""Does a comparison name the operator that is wrong, and only where something is?

Each fault of tests/faults is recorded right and wrong, on one thread, and compared: the rank of its true site among
the first three culprits. Then pairs of runs in which nothing is wrong: rows with the verdict "fail", of which there
may be none.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import torch
from common import ROOT, progress, table, verdict

import roundoff as ro
from roundoff.compare import Culprit

sys.path.insert(0, str(ROOT))
from tests.faults import FAULTS, Fault, clean_pairs, record

#: what is kept -> the share of faults named first, and among the first three
BARS: dict[str, tuple[float | None, float | None]] = {
    "tensors": (0.95, None),
    "stats": (None, 0.8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="*",
        help="these faults alone, and no clean pairs",
    )
    parser.add_argument(
        "--keep", choices=[*BARS, "both"], default="both", help="what is recorded"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one fault, one clean pair: does it run?",
    )
    parser.add_argument(
        "--inductor",
        action="store_true",
        help="compile by inductor, not by aot_eager alone",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    faults = chosen(args.names)
    if args.quick:
        faults = faults[:1]
    for keep in BARS if args.keep == "both" else [args.keep]:
        named(faults, keep)
    if not args.names:
        pairs = clean_pairs("inductor" if args.inductor else "aot_eager")
        false_alarms(pairs[:1] if args.quick else pairs)


def chosen(names: Sequence[str]) -> list[Fault]:
    """The faults with these names, all where there are none."""
    known = {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(
            f"no such fault: {', '.join(unknown)}; there are {', '.join(known)}"
        )
    return [known[name] for name in names] or FAULTS


def named(faults: Sequence[Fault], keep: str) -> None:
    """Which culprit is the true site, for each fault and over all."""
    rows, ranks = [], []
    for fault in faults:
        began = time.perf_counter()
        comparison = compared(
            lambda folder: record(fault, folder, False, keep),
            lambda folder: record(fault, folder, True, keep),
        )
        found = comparison.culprits(3)
        rank = rank_of(fault, found)
        ranks.append(rank)
        first = found[0].site or found[0].reference_site if found else None
        rows.append(
            (
                fault.name,
                fault.family,
                group(fault),
                " ".join(fault.sites)[:40],
                first,
                rank,
            )
        )
        progress(
            f"{fault.name}: {rank or 'not among three'} ({time.perf_counter() - began:.1f} s)"
        )
    header = ("fault", "model", "kind", "true site", "named first", "rank")
    table(f"The true site among the culprits, with {keep}", header, rows)
    counts = Counter(group(fault) for fault in faults)
    hits = [
        Counter(group(f) for f, r in zip(faults, ranks, strict=True) if r and r <= n)
        for n in (1, 3)
    ]
    bars = BARS[keep]
    summary = [
        (kind, n, *(f"{hit[kind]}/{n}" for hit in hits)) for kind, n in counts.items()
    ]
    totals = [sum(hit.values()) for hit in hits]
    summary.append(("all", len(faults), *(f"{n}/{len(faults)}" for n in totals)))
    table(f"Named, with {keep}", ("kind", "faults", "top-1", "top-3"), summary)
    for n, total, bar in zip((1, 3), totals, bars, strict=True):
        share = total / len(faults)
        print(
            f"top-{n} {total}/{len(faults)}"
            + (f", bar {bar:.0%}: {verdict(share, bar)}" if bar else "")
        )


def rank_of(fault: Fault, culprits: Sequence[Culprit]) -> int | None:
    """Which of the culprits, from 1, is the true site; None where none of them is."""
    for rank, culprit in enumerate(culprits, 1):
        names = (
            culprit.site,
            culprit.reference_site,
            culprit.name,
        )
        if fault.named_by(culprit.phase or fault.phase.partition("|")[0], *names):
            return rank
    return None


def false_alarms(pairs: Sequence[Any]) -> None:
    """How many rows are called wrong in pairs of runs where nothing is."""
    rows = []
    for pair in pairs:
        try:
            found = compared(pair.reference, pair.candidate).table
        except RuntimeError as error:  # a kernel that this CPU does not have
            reason = str(error).splitlines()[0][:60]
            rows.append((pair.name, pair.family, reason, "", ""))
            continue
        alarms = found.filter(pl.col("verdict") == "fail").height
        rows.append(
            (
                pair.name,
                pair.family,
                found.height,
                alarms,
                verdict(alarms, 0, at_most=True),
            )
        )
        progress(f"{pair.family}, {pair.name}: {alarms} of {found.height}")
    table(
        "False alarms on clean pairs",
        ("reference, candidate", "model", "rows", 'verdict "fail"', "bar 0"),
        rows,
    )


def compared(
    reference: Callable[[Path], None], candidate: Callable[[Path], None]
) -> Any:
    """The comparison of what the two record."""
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder, "reference"), Path(folder, "candidate")
        reference(paths[0])
        candidate(paths[1])
        return ro.compare(reference=paths[0], candidate=paths[1])


def group(fault: Fault) -> str:
    """The file of the bank that the fault is in."""
    return fault.break_it.__module__.rpartition(".")[2]


if __name__ == "__main__":
    main()
