"""Does a comparison name what is wrong in scripts of many styles, and in which words?

Each fault of tests/scripts is a small change of a training script's text. Both scripts
are recorded as a user records them, and compared: the rank of the truth (an operator's
line, a parameter, the data, a step of the loop) among the culprits, and how often "the
runs agree" is said of a fault.

    python benchmarks/script_bank.py                      all faults, tensors and statistics
    python benchmarks/script_bank.py --script unet gan --kind loop --keep stats --texts
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from common import ROOT, progress, table, verdict

import roundoff as ro
from roundoff.errors import RoundoffError

sys.path.insert(0, str(ROOT))
from tests.scripts import (
    KEPT_APART,
    KINDS,
    NAMES,
    ScriptFault,
    faults_of,
    rank_of,
    record_script,
    says_truth,
    text_of,
)

#: what is kept -> least share of faults named first, and among the first three
BARS = {"tensors": (0.95, 0.98), "stats": (0.88, 0.94)}


@dataclass(frozen=True)
class Outcome:
    """What a comparison says of a fault.

    ``rank`` is None where the truth is not named; ``crashed`` where the comparison ended
    in an error that it did not foresee.
    """

    fault: ScriptFault
    rank: int | None
    agrees: bool
    says: bool
    first: str
    error: str = ""
    crashed: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--script", nargs="*", default=[], choices=NAMES)
    parser.add_argument("--kind", nargs="*", default=[], choices=KINDS)
    parser.add_argument("--name", nargs="*", default=[], help="parts of faults' names")
    parser.add_argument("--keep", choices=[*BARS, "both"], default="both")
    parser.add_argument("--steps", default="0-1", help="steps to record, 0-1")
    parser.add_argument(
        "--apart", action="store_true", help="also the scripts that are kept apart"
    )
    parser.add_argument("--texts", action="store_true", help="print each answer")
    parser.add_argument(
        "--quick", action="store_true", help="two faults of two scripts"
    )
    parser.add_argument(
        "--drawn",
        type=int,
        metavar="N",
        help="N faults drawn at random, always the same",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    scripts = args.script or [n for n in NAMES if args.apart or n not in KEPT_APART]
    if args.quick:
        scripts = scripts[:2]
    faults = {script: chosen(script, args.kind, args.name) for script in scripts}
    if args.quick:
        faults = {script: of_script[:2] for script, of_script in faults.items()}
    if args.drawn:
        faults = drawn(faults, args.drawn)
    for keep in BARS if args.keep == "both" else [args.keep]:
        outcomes: list[Outcome] = []
        for script, of_script in faults.items():
            outcomes += measured(script, of_script, keep, args.steps, args.texts)
        report(outcomes, keep)


def chosen(
    script: str, kinds: Sequence[str], names: Sequence[str]
) -> list[ScriptFault]:
    """Return the faults of a script of these kinds whose names have one of these parts."""
    return [
        fault
        for fault in faults_of(script)
        if (not kinds or fault.kind in kinds)
        and (not names or any(part in fault.name for part in names))
    ]


def drawn(
    faults: Mapping[str, Sequence[ScriptFault]], count: int
) -> dict[str, list[ScriptFault]]:
    """Return this many faults, drawn at random with a fixed seed, by script."""
    every = [fault for of_script in faults.values() for fault in of_script]
    sample = random.Random(0).sample(every, min(count, len(every)))
    return {script: [f for f in sample if f.script == script] for script in faults}


def measured(
    script: str, faults: Sequence[ScriptFault], keep: str, steps: str, texts: bool
) -> list[Outcome]:
    """Record the script right and with each fault, and compare."""
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        right: dict[bool, Path] = {}
        for number, fault in enumerate(faults):
            if fault.whole not in right:
                right[fault.whole] = record_script(
                    text_of(script),
                    Path(folder, f"right{fault.whole}"),
                    keep=keep,
                    steps=steps,
                    whole=fault.whole,
                )
            place = Path(folder, f"wrong{number}")
            try:
                wrong = record_script(
                    fault.text, place, keep=keep, steps=steps, whole=fault.whole
                )
                outcome = compared(fault, right[fault.whole], wrong, texts)
            except RoundoffError as error:
                outcome = Outcome(fault, None, False, False, "", str(error))
            except Exception as error:  # noqa: BLE001 - a crash is a row of the table
                traceback.print_exc()
                outcome = Outcome(fault, None, False, False, "", repr(error), True)
            outcomes.append(outcome)
            mark = "agrees" if outcome.agrees else outcome.rank
            progress(
                f"{script}, {fault.kind}, {fault.name}: {mark}"
                f"{'' if outcome.says else ' (other words)'} {outcome.error}"
                f"{'' if outcome.rank == 1 else '  <' + outcome.first}"
            )
    return outcomes


def compared(fault: ScriptFault, right: Path, wrong: Path, texts: bool) -> Outcome:
    """Compare two recordings, and look for the truth."""
    comparison = ro.compare(reference=right, candidate=wrong)
    culprits = comparison.culprits(20)
    if texts:
        print(f"\n=== {fault.script}: {fault.name}\n{comparison.answer}")
        for culprit in culprits[:3]:
            print(f"   - {culprit.site} {culprit.line}: {culprit.evidence}")
    rank = rank_of(fault, culprits)
    agrees = comparison.agrees and not culprits
    says = rank is not None and says_truth(fault, culprits[rank - 1])
    first = culprits[0] if culprits else None
    name = ""
    if first is not None:
        name = f"{first.line} {first.site or first.reference_site}: {first.looks_like}"
    error = "; ".join(comparison.about.damage)
    return Outcome(fault, rank, agrees, says, name, error)


def report(outcomes: Sequence[Outcome], keep: str) -> None:
    """Print the table by kind, and the bars."""
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.fault.kind].append(outcome)
    rows = [(kind, *counts(by_kind[kind])) for kind in KINDS if by_kind[kind]]
    rows.append(("all", *counts(outcomes)))
    header = (
        "kind",
        "faults",
        "first",
        "among three",
        "in these words",
        "agrees",
        "crashed",
    )
    table(f"Named in scripts, with {keep}", header, rows)
    for top, bar in zip((1, 3), BARS[keep], strict=True):
        share = named_by(outcomes, top) / max(1, len(outcomes))
        print(f"top-{top} {share:.1%}, bar {bar:.0%}: {verdict(share, bar)}")
    passed = sum(outcome.agrees for outcome in outcomes)
    print(f"agrees {passed}, bar 0: {verdict(passed, 0, at_most=True)}")


def named_by(outcomes: Sequence[Outcome], top: int) -> int:
    """Return how many truths are among the first ``top`` culprits."""
    return sum(o.rank is not None and o.rank <= top for o in outcomes)


def counts(outcomes: Sequence[Outcome]) -> tuple[int, ...]:
    """Return the columns of a row of the table."""
    return (
        len(outcomes),
        named_by(outcomes, 1),
        named_by(outcomes, 3),
        sum(outcome.says for outcome in outcomes),
        sum(outcome.agrees for outcome in outcomes),
        sum(outcome.crashed for outcome in outcomes),
    )


if __name__ == "__main__":
    main()
