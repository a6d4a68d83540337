"""What does a budget cost on networks that nobody tuned for, in plain forward passes?

For every network of examples/zoo: processor time of one budget of four formats over that of running all batches
without gradients. Trying every row instead (one site rounded in one format, all batches) costs at least one forward
pass a row, so the rows over the price say how many times dearer trials are at least. Real trials round as well: those
of all rows are run too, as fast as they would be written by hand (see ``one_site``), or a random sample of the rows
where there are many. The budget and the forward passes take turns; one thread. Bars: at most 12 in the median and 25
for each; never dearer than trials; at least 30 times less than trials from 50 sites on.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import FORMATS, clock, options, progress, table, verdict
from one_site import find_sites, rounding_alone

import roundoff as ro
from roundoff.errors import RoundoffError
from roundoff.formats import parse_format
from roundoff.workload import Workload, target_tensors

MEDIAN_BAR = 12.0
EACH_BAR = 25.0
MANY_SITES = 50
MANY_TRIALS = 30.0
#: Rows that are tried one by one; their mean stands for the others.
TRIED_ROWS = 40


def main() -> None:
    args = options(__doc__)
    torch.set_num_threads(1)
    files = sorted((args.examples / "zoo").glob("*.py"))
    names = [file.stem for file in files if args.only is None or file.stem in args.only]
    rows = []
    prices = []
    for name in names[:1] if args.quick else names:
        try:
            workload = Workload.load(args.examples / "zoo" / f"{name}.py")
            row, price = _measured(name, workload)
        except RoundoffError as error:
            rows.append((name, str(error).splitlines()[0], *[""] * 8))
            continue
        rows.append(row)
        prices.append(price)
        progress(f"{name}: {price:.1f}")
    table(
        f"Price of one budget of {len(FORMATS)} formats: median {statistics.median(prices):.1f}, "
        f"largest {max(prices):.1f} plain forward passes",
        (
            "network",
            "sites",
            "rows",
            "probes",
            "batches",
            "budget / plain",
            f"bar {EACH_BAR:.0f}",
            "trials / budget, at least",
            "real trials / budget",
            "bar 1, from 50 sites on 30",
        ),
        rows,
    )


def _measured(name: str, workload: Workload) -> tuple[tuple[object, ...], float]:
    workload.model.eval()
    budget = ro.budget(workload, FORMATS)  # also the warm-up
    plain = []
    whole = []
    for _ in range(3):
        plain.append(clock(lambda: _evaluate(workload))[1])
        whole.append(clock(lambda: ro.budget(workload, FORMATS))[1])
    price = min(whole) / min(plain)
    rows = len(budget.costs)
    trials = _all_trials(workload, budget) / min(plain)
    bar = MANY_TRIALS if len(budget.sites) >= MANY_SITES else 1.0
    about = budget.about
    row = (
        name,
        len(budget.sites),
        rows,
        about.probes,
        f"{len(about.batch_samples)} of {about.workload_batches}",
        f"{price:.1f}",
        verdict(price, EACH_BAR, at_most=True),
        f"{rows / price:.1f}",
        f"{trials / price:.1f}",
        verdict(trials / price, bar),
    )
    return row, price


def _all_trials(workload: Workload, budget: ro.Budget) -> float:
    """Processor seconds of trying every row of a budget on all batches."""
    pairs = [(cost.site, cost.format) for cost in budget.costs]
    tried = random.Random(0).sample(pairs, min(TRIED_ROWS, len(pairs)))
    targets = find_sites(workload)
    seconds = 0.0
    for site, fmt in tried:
        if site not in targets:
            continue
        chosen = parse_format(fmt)
        with (
            torch.no_grad(),
            rounding_alone(workload.model, targets[site], chosen) as mode,
        ):
            seconds += clock(partial(_outputs, workload, mode.begin))[1]
    return seconds * len(pairs) / len(tried)


def _evaluate(workload: Workload) -> list[Any]:
    with torch.no_grad():
        return _outputs(workload)


def _outputs(workload: Workload, begin: Callable[[], None] = lambda: None) -> list[Any]:
    outputs = []
    for batch in workload.batches:
        begin()
        outputs.append(target_tensors(workload.run(batch), None))
    return outputs


if __name__ == "__main__":
    main()
