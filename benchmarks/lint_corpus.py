"""How often is a finding of ``roundoff lint`` right, and how many planted mistakes does it find?

The scripts of tests/lint/corpus are labelled: which line breaks which rule. Those of
tests/lint/apart are too, and were not looked at while the rules were written.

    python benchmarks/lint_corpus.py                      both, by rule
    python benchmarks/lint_corpus.py --quick --places     the corpus alone, and what is wrong
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common import ROOT, table, verdict

import roundoff as ro
from roundoff.lint import Finding

sys.path.insert(0, str(ROOT))
from tests.lint.labelled import (
    APART,
    CORPUS,
    LabelledScript,
    Scores,
    score,
    scripts,
)

PRECISION = 0.95
RECALL = 0.90


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the corpus alone")
    parser.add_argument("--places", action="store_true", help="where it is wrong")
    args = parser.parse_args()
    folders = [CORPUS] if args.quick else [CORPUS, APART]
    for folder in folders:
        report(folder, args.places)


def report(folder: Path, places: bool) -> None:
    """Print how findings and labels agree in one folder."""
    labelled = scripts(folder)
    start = time.process_time()
    scores = score(zip(labelled, lint_each(labelled), strict=True))
    seconds = time.process_time() - start
    rate = len(labelled) / seconds
    table(
        f"{folder.name}, by rule", ["rule", "right", "wrong", "missed"], rows_of(scores)
    )
    right_scripts = sum(not each.labels for each in labelled)
    summary = [
        ("scripts (right ones)", f"{len(labelled)} ({right_scripts})", ""),
        ("scripts a second of processor time", f"{rate:.0f}", ""),
        (
            "precision",
            f"{scores.precision():.3f}",
            verdict(scores.precision(), PRECISION),
        ),
        ("recall", f"{scores.recall():.3f}", verdict(scores.recall(), RECALL)),
    ]
    table(folder.name, ["what", "value", "bar"], summary)
    if places:
        print("wrong:", *scores.wrong_places, sep="\n  ")
        print("missed:", *scores.missed_places, sep="\n  ")


def lint_each(labelled: Sequence[LabelledScript]) -> list[list[Finding]]:
    """Return the findings of each script, linted from a file as a user's."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, script.name) for script in labelled]
        for path, script in zip(paths, labelled, strict=True):
            path.write_text(script.text)
        result = ro.lint(paths)
    if result.unread:
        raise SystemExit(str(result.unread))
    by_name: dict[str, list[Finding]] = {script.name: [] for script in labelled}
    for finding in result.findings:
        by_name[Path(finding.path).name].append(finding)
    return [by_name[script.name] for script in labelled]


def rows_of(scores: Scores) -> list[list[str]]:
    """Return a row for each rule."""
    codes = sorted({*scores.right, *scores.wrong, *scores.missed})
    counts = (scores.right, scores.wrong, scores.missed)
    return [[code, *(str(count[code]) for count in counts)] for code in codes]


if __name__ == "__main__":
    main()
