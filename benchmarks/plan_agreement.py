"""Does the plan do what it says? Predicted against measured SQNR of whole plans, for several targets.

Bar: within 1 dB after verify. The first round is the plan straight from the budget; verify runs it and, where
prediction and measurement part by more than 1 dB or the target is missed, linearises again and solves again.
"""

from __future__ import annotations

from common import FORMATS, options, progress, table, verdict, workloads

import roundoff as ro
from roundoff.errors import InfeasibleError

BAR = 1.0
TARGETS = (20.0, 30.0, 40.0, 50.0)


def main() -> None:
    args = options(__doc__)
    rows: list[tuple[object, ...]] = []
    for name, workload in workloads(
        args, ("minilm", "digits", "fashion_mnist", "gpt2", "resnet18")
    ):
        budget = ro.budget(workload, FORMATS)
        for target in TARGETS[1:3] if args.quick else TARGETS:
            try:
                plan = budget.plan(target)
            except InfeasibleError as error:
                rows.append(
                    (
                        name,
                        f"{target:.0f} dB",
                        f"infeasible, best {error.best_db:.1f} dB",
                        *[None] * 7,
                    )
                )
                continue
            found = ro.verify(workload, plan, budget=budget, native=False)
            first, last = found.rounds[0], found.last
            before, after = _off(first), _off(last)
            rows.append(
                (
                    name,
                    f"{target:.0f} dB",
                    f"{_text(first.predicted_db)} / {first.measured_db:.2f}",
                    f"{before:+.2f}",
                    len(found.rounds),
                    f"{_text(last.predicted_db)} / {last.measured_db:.2f}",
                    f"{after:+.2f}",
                    verdict(abs(after), BAR, at_most=True),
                    found.met,
                    f"{100 * found.plan.about['cost'] / found.plan.about['cost_fp32']:.0f} %",
                )
            )
            progress(
                f"{name} {target:.0f} dB: {after:+.2f} dB after {len(found.rounds)} rounds"
            )
    table(
        "Predicted / measured SQNR of the chosen plan (cost model bytes)",
        (
            "workload",
            "target",
            "first round",
            "off, dB",
            "rounds",
            "after verify",
            "off, dB",
            f"bar {BAR:.0f} dB",
            "target met",
            "cost of fp32",
        ),
        rows,
    )


def _off(round_: object) -> float:
    """Predicted less measured, in dB; positive where the budget was too optimistic."""
    predicted, measured = round_.predicted_db, round_.measured_db  # type: ignore[attr-defined]
    return 0.0 if predicted == measured or predicted is None else predicted - measured


def _text(db: float | None) -> str:
    return "–" if db is None else f"{db:.2f}"


if __name__ == "__main__":
    main()
