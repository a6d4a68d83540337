"""Does the report of a skipped step name the operator that was made to overflow?

Twenty overflows and divisions by zero are planted in six small models (tests/train/scaling/planted.py), in the
forward or the backward pass, which run under autocast to float16 on the CPU.
One step of each is scaled by 2**14, skipped and explained.
Named is a report whose origin is the planted module, operator and phase; the models without a plant must not skip. Beside
it, with --peer PYTHON of an environment that has mindstudio-probe and torch, msprobe: a dump of statistics (level mix) and
its overflow_check, which counts as right where its first finding lies in the planted module and phase, whatever the
operator.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from common import ROOT, progress, table, verdict

import roundoff as ro
from roundoff.train import Skip

sys.path.insert(0, str(ROOT))
from tests.train.scaling.planted import CASES, MODELS, Case, build

SCALE = 2.0**14


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="every fifth case: does it run?"
    )
    parser.add_argument(
        "--peer", metavar="PYTHON", help="a Python with mindstudio-probe"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of a loss that is NaN: that is what is planted
    cases = CASES[::5] if args.quick else CASES
    clean = [name for name in MODELS if report(*build(name)) is not None]
    rows, good, theirs = [], 0, 0
    for case in cases:
        progress(f"{case.model}, {case.plant}")
        start = time.perf_counter()
        skip = report(*build(case))
        seconds = time.perf_counter() - start
        named = skip is not None and case.names(skip.origin, skip.phase)
        good += named
        other = peer(args.peer, case) if args.peer else ("", "not run")
        theirs += other[0] == "yes"
        shown = "no skip" if skip is None else f"{skip.origin}, {skip.phase}"
        rows.append(
            (
                case.model,
                case.plant,
                case.phase,
                named,
                shown,
                skip and skip.gradient,
                seconds,
                *other,
            )
        )
    table(
        "Skips",
        (
            "model",
            "plant",
            "phase",
            "named",
            "origin",
            "first gradient",
            "seconds",
            "msprobe",
            "it says",
        ),
        rows,
    )
    table(
        "Together",
        ("", "named", "of", "bar: all"),
        [
            ("roundoff", good, len(cases), verdict(good, len(cases))),
            (
                "msprobe (module and phase)",
                theirs if args.peer else "not run",
                len(cases),
                "",
            ),
            (
                "models without a plant that skip",
                len(clean),
                len(MODELS),
                verdict(len(clean), 0, at_most=True),
            ),
        ],
    )


def report(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Skip | None:
    """The report of one step; None where it is not skipped."""
    scaler = ro.LossScaler(model, init_scale=SCALE)
    scaler.backward(loss())
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    return scaler.last_skip


def peer(python: str, case: Case) -> tuple[str, str]:
    """What msprobe finds, and whether it is right."""
    command = [
        python,
        str(Path(__file__).with_name("peer_skip.py")),
        str(CASES.index(case)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return "**no**", (done.stderr.strip().splitlines() or ["failed"])[-1][:80]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    right = any(f".Plant.{case.phase}." in part for part in found["where"])
    return "yes" if right else "**no**", found["name"] or "nothing"


if __name__ == "__main__":
    main()
