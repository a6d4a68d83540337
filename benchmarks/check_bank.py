"""Is a planted difference of two set-ups the first thing that is said, and nothing where they are alike?

Pairs of training scripts that differ in one setting (tests/check/planted.py), recorded and checked: how many are named by
the first line of the report with both values; how many of those that were kept apart while the rules were written; how many
pairs that are alike have no difference.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common import ROOT, progress, table

import roundoff as ro
from roundoff.check import Check

sys.path.insert(0, str(ROOT))
from tests.check.other_styles import FRESH, FRESH_ALIKE
from tests.check.planted import ALIKE, KEPT_APART, PLANTED, Alike, Planted, record_pair


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="two of each: does it run?"
    )
    args = parser.parse_args()
    count = 2 if args.quick else None
    rows = [
        ("planted differences, named first", *named(PLANTED[:count])),
        ("kept apart, named first", *named(KEPT_APART[:count])),
        ("alike, without any difference", *quiet(ALIKE[:count])),
        ("other styles, named first", *named(FRESH[:count])),
        ("other styles, alike", *quiet(FRESH_ALIKE[:count])),
    ]
    table("Set-ups", ("pairs", "right", "of"), rows)
    if any(right < every for _, right, every in rows):
        sys.exit("not all are right")


def named(cases: Sequence[Planted]) -> tuple[int, int]:
    """How many first lines have the words of their case."""
    right = 0
    for case in cases:
        differences = checked(case).differences
        first = differences[0].text if differences else "nothing"
        is_right = all(word in first for word in case.words)
        right += is_right
        progress(f"{'' if is_right else 'WRONG '}{case.name}: {first[:100]}")
    return right, len(cases)


def quiet(cases: Sequence[Alike]) -> tuple[int, int]:
    """How many pairs have no difference and are comparable."""
    right = 0
    for case in cases:
        check = checked(case)
        right += not check.differences and check.comparable is True
        progress(f"{case.name}: {len(check.differences)} differences")
    return right, len(cases)


def checked(case: Planted | Alike) -> Check:
    with tempfile.TemporaryDirectory() as folder:
        answer = ro.check(*record_pair(case, Path(folder)))
    if not isinstance(answer, Check):
        raise TypeError("these are runs")
    return answer


if __name__ == "__main__":
    main()
