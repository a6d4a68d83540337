"""Is anything called wrong where nothing is, and is the bug named where one is?

Clean pairs of one training; schedules (a cache, chunks, padding, micro-batches) against whole sequences; layouts of
several processes against one: alarms, of which there may be none. Bugs planted in schedules and layouts: how many are
named first. The same of scripts, recorded with all that they make before their first step, and of models of libraries
with a layer by another hand.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import ROOT, progress, table, verdict

import roundoff as ro
from roundoff.errors import RoundoffError
from roundoff.site import matches

sys.path.insert(0, str(ROOT))
from tests.faults.equivalent.layer_scripts import LAYER_SCRIPTS
from tests.faults.equivalent.layers import LAYERS
from tests.faults.equivalent.layouts import LAYOUTS, launch, one_process
from tests.faults.equivalent.pairs import pairs
from tests.faults.equivalent.schedules import SCHEDULES
from tests.faults.equivalent.script_pairs import PAIRS
from tests.faults.equivalent.script_portions import LAYOUTS as SCRIPTS_OF_RANKS
from tests.faults.equivalent.script_portions import SCHEDULES as SCRIPTS_OF_PORTIONS
from tests.faults.equivalent.scripts import ScriptCase
from tests.scripts import NAMES, Rewrite, rewrites_of

#: The share of the planted bugs that must be named first.
BAR = 0.9
#: What is said of runs without a difference.
AGREES = "agrees"
PARTS = ("pairs", "schedules", "layouts", "scripts", "layers")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="those with one of these in the name")
    parser.add_argument("--part", choices=PARTS, help="only this part")
    parser.add_argument(
        "--apart",
        choices=("all", "only", "without"),
        default="all",
        help="the quarter that no rule was tried on",
    )
    parser.add_argument(
        "--keep", choices=("tensors", "stats"), default="tensors", help="of texts"
    )
    parser.add_argument("--show", action="store_true", help="print the answers")
    parser.add_argument(
        "--quick", action="store_true", help="one case of each part: does it run?"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = _Chosen(args.names, args.apart, args.show, 1 if args.quick else None)
    measure: dict[str, Callable[[_Chosen], None]] = {
        "pairs": of_pairs,
        "schedules": of_schedules,
        "layouts": of_layouts,
        "scripts": functools.partial(of_scripts, keep=args.keep),
        "layers": functools.partial(of_layers, keep=args.keep),
    }
    for part in [args.part] if args.part else PARTS:
        measure[part](chosen)


class _Chosen:
    """Which cases are measured."""

    def __init__(
        self, names: Sequence[str], apart: str, show: bool, most: int | None
    ) -> None:
        self.most = most
        self.names = names
        self.apart = apart
        self.show = show

    def of(self, cases: Sequence[Any]) -> list[Any]:
        return [case for case in cases if self._is_chosen(case)][: self.most]

    def _is_chosen(self, case: Any) -> bool:
        if self.apart != "all" and case.apart != (self.apart == "only"):
            return False
        return not self.names or any(name in _label(case) for name in self.names)


def of_pairs(chosen: _Chosen) -> None:
    """Alarms of clean pairs, and culprits of those with a bug."""
    recorded = [(pair, pair.reference, pair.candidate) for pair in chosen.of(pairs())]
    _right_and_wrong("Pairs", recorded, chosen)


def of_schedules(chosen: _Chosen) -> None:
    """Alarms of right schedules, and culprits of wrong ones."""
    cases = chosen.of(SCHEDULES)
    recorded = [
        (
            case,
            lambda folder, case=case: case.record(folder, candidate=False),
            lambda folder, case=case: case.record(folder, candidate=True),
        )
        for case in cases
    ]
    _right_and_wrong("Schedules", recorded, chosen)


def of_layouts(chosen: _Chosen) -> None:
    """Alarms of right layouts, and culprits of wrong ones."""
    cases = chosen.of(LAYOUTS)
    if not cases:
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        launch(root, [case.name for case in cases])
        recorded = [
            (
                case,
                lambda f, case=case: one_process(
                    f, trains=case.trains, steps=case.steps
                ),
                root / case.name,
            )
            for case in cases
        ]
        _right_and_wrong("Layouts", recorded, chosen)


def of_scripts(chosen: _Chosen, keep: str) -> None:
    """Alarms of right scripts, and culprits of wrong ones."""
    rewrites = [rewrite for name in NAMES for rewrite in rewrites_of(name)]
    _of_texts("Scripts", PAIRS, chosen, keep)
    _of_texts("Scripts of the bank", rewrites, chosen, keep)
    _of_texts("Scripts in portions", SCRIPTS_OF_PORTIONS, chosen, keep)
    _of_texts("Scripts of several processes", SCRIPTS_OF_RANKS, chosen, keep)


def of_layers(chosen: _Chosen, keep: str) -> None:
    """Alarms of right layers by another hand, and culprits of wrong ones."""
    _of_texts("Layers of workload files", LAYERS, chosen, keep)
    _of_texts("Layers of scripts", LAYER_SCRIPTS, chosen, keep)


def _of_texts(
    title: str, cases: Sequence[ScriptCase | Rewrite], chosen: _Chosen, keep: str
) -> None:
    recorded = [
        (
            case,
            lambda f, case=case: case.record(f, candidate=False, keep=keep),
            lambda f, case=case: case.record(f, candidate=True, keep=keep),
        )
        for case in chosen.of(cases)
    ]
    _right_and_wrong(title, recorded, chosen)


def _right_and_wrong(title: str, recorded: Sequence[Any], chosen: _Chosen) -> None:
    alarms = [
        (_label(case), *_alarms(_label(case), chosen, *sides))
        for case, *sides in recorded
        if not case.sites
    ]
    _table_of_alarms(f"{title}: right ones", alarms)
    named = [
        (_label(case), *_named(case, chosen, *sides))
        for case, *sides in recorded
        if case.sites
    ]
    if named:
        first = sum(row[-1] == 1 for row in named)
        header = ("bug", "true site", "named first", "rank")
        table(f"{title}: planted bugs", header, named)
        share = first / len(named)
        print(f"first {first}/{len(named)}, bar {BAR:.0%}: {verdict(share, BAR)}")
        silent = sum(row[2] == AGREES for row in named)
        print(
            f"agrees {silent}/{len(named)}, bar 0: {verdict(silent, 0, at_most=True)}"
        )


def _label(case: Any) -> str:
    of = getattr(case, "network", None) or getattr(case, "script", None)
    return f"{of}, {case.name}" if isinstance(of, str) else str(case.name)


def _table_of_alarms(title: str, rows: Sequence[tuple[Any, ...]]) -> None:
    if not rows:
        return
    header = ("candidate", "rows", "undecided", "alarms", "first")
    table(title, header, rows)
    false = sum(bool(row[3]) for row in rows)
    print(f"false alarms {false}/{len(rows)}, bar 0: {verdict(false, 0, at_most=True)}")


def _alarms(label: str, chosen: _Chosen, reference: Any, candidate: Any) -> Any:
    compared = _compared(label, chosen, reference, candidate)
    if isinstance(compared, str):
        return 0, 0, 1, compared
    verdicts = compared.verdicts
    named = compared.culprits(1)
    first = f"{named[0].site}: {named[0].looks_like}" if named else ""
    # a cause behind the operators is an alarm too, where no row fails
    alarms = max(verdicts.get("fail", 0), int(compared.fails))
    progress(f"{label}: {alarms} alarms {first}")
    return compared.table.height, verdicts.get("undecided", 0), alarms, first[:60]


def _named(case: Any, chosen: _Chosen, reference: Any, candidate: Any) -> Any:
    compared = _compared(_label(case), chosen, reference, candidate)
    if isinstance(compared, str):
        return case.sites[0], compared, 0
    if compared.agrees:
        progress(f"{_label(case)}: {AGREES}")
        return case.sites[0], AGREES, 0
    culprits = compared.culprits(3)
    ranks = [n for n, culprit in enumerate(culprits, 1) if _is_true(case, culprit)]
    rank = ranks[0] if ranks else 0
    first = culprits[0].site or culprits[0].reference_site if culprits else "nothing"
    progress(f"{_label(case)}: {first}, rank {rank}")
    return case.sites[0], first, rank


def _is_true(case: Any, culprit: Any) -> bool:
    if isinstance(case, ScriptCase):
        return case.is_named(culprit)
    names = [culprit.site, culprit.reference_site, culprit.name]
    spelt = [name for name in names if name]
    spelt += [name.partition("#")[0] for name in spelt]
    return any(matches(glob, name) for glob in case.sites for name in spelt)


def _compared(label: str, chosen: _Chosen, reference: Any, candidate: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        sides = [
            _folder(side, Path(folder, name))
            for name, side in (("reference", reference), ("candidate", candidate))
        ]
        try:
            compared = ro.compare(reference=sides[0], candidate=sides[1])
        except RoundoffError as error:
            progress(f"{label}: {error.what}")
            return error.what
        except Exception as error:  # noqa: BLE001 - a crash is a row of the table
            traceback.print_exc()
            return repr(error)
        for line in compared.about.damage:
            progress(f"{label}: {line}")
        if chosen.show:
            print(f"--- {label}\n{compared.answer}\n")
        return compared


def _folder(side: Callable[[Path], Path | None] | Path, folder: Path) -> Path:
    """Return where a side is recorded."""
    if isinstance(side, Path):
        return side
    return side(folder) or folder


if __name__ == "__main__":
    main()
